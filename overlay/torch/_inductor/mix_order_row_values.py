"""
The values that a mix-order kernel loads one a row, such as a norm's statistics.

While a tile is computed, asynchronous copies load the next one. None copies fewer than
four bytes, so each tile would wait for its rows' values of half types: they are loaded with
the four bytes that they are in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import torch
from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from .codegen.common import TensorArg
from .codegen.triton_utils import is_unaligned_buffer
from .mix_order_debug import debug_options
from .mix_order_row_cost import COPY_BYTES
from .utils import triton_type
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.triton import BlockDescriptorOptions, IndexingOptions, TritonKernel


def loads_words(
    kernel: TritonKernel,
    name: str,
    indexing: Union[IndexingOptions, BlockDescriptorOptions],
) -> bool:
    """
    Whether ``kernel`` loads an element of the buffer ``name`` at ``indexing`` with the word
    that it is in. Words begin where the buffer does.
    """
    split = kernel.row_split
    if (
        not debug_options().load_words
        or not kernel.mix_order_reduction
        or split is None
        or not split.staged
        or not free_symbol_is_type(indexing.index, SymT.XBLOCK)
        or indexing.has_rindex()
        or indexing.has_indirect()
        or indexing.has_tmpmask()
    ):
        return False
    dtype = V.graph.get_dtype(name)
    return (
        V.graph.try_get_buffer(name) is not None
        and dtype in (torch.float16, torch.bfloat16)
        and not is_unaligned_buffer(TensorArg("", name, dtype))
    )


def codegen_word_load(
    kernel: TritonKernel,
    name: str,
    pointer: str,
    indexing: IndexingOptions,
    hints: str,
) -> str:
    """
    The element at ``indexing`` of the buffer ``name``, which is ``pointer``. ``hints``
    follow the mask of the load.

    Where the number of elements is odd, or may be, the last word is not all the buffer's:
    the last element is loaded before the loop over rows.
    """
    dtype = V.graph.get_dtype(name)
    index, mask = indexing.index_str, indexing.mask_str
    elements = V.graph.get_buffer(name).get_layout().storage_size()
    odd = not V.graph.sizevars.statically_known_multiple_of(
        elements, COPY_BYTES // dtype.itemsize
    )
    if odd:
        count = kernel.index_to_str(kernel.rename_indexing(elements))
        kernel._handle_pdl_before_access(kernel.body, name)
        last = kernel.cse.generate(
            kernel.body,
            f"tl.load({pointer} + ({count} - 1), {count} > 0)",
            dtype=dtype,
            shape=(),
        )
        kernel.outside_loop_vars.add(last)
        whole = f"(({index}) != ({count} - 1))"
        mask = whole if mask == "None" else f"({mask}) & {whole}"
    words = f"{pointer}.to(tl.pointer_type(tl.int32), bitcast=True)"
    word = f"tl.load({words} + (({index}) >> 1), {mask}{hints})"
    value = f"triton_helpers.half_of_word({word}, {index}, {triton_type(dtype)})"
    return f"tl.where({whole}, {value}, {last})" if odd else value
