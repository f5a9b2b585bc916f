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

from . import config
from .mix_order_row_split import COPY_BYTES
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
    that it is in. Words begin where the buffer does, and the last is whole.
    """
    from .codegen.common import TensorArg
    from .codegen.triton_utils import is_unaligned_buffer

    split = kernel.row_split
    if (
        not config.triton.mix_order_reduction_load_words
        or not kernel.mix_order_reduction
        or split is None
        or not split.staged
        or not free_symbol_is_type(indexing.index, SymT.XBLOCK)
        or indexing.has_rindex()
        or indexing.has_indirect()
        or indexing.has_tmpmask()
    ):
        return False
    buffer, dtype = V.graph.try_get_buffer(name), V.graph.get_dtype(name)
    return (
        buffer is not None
        and dtype in (torch.float16, torch.bfloat16)
        and not is_unaligned_buffer(TensorArg("", name, dtype))
        and V.graph.sizevars.statically_known_multiple_of(
            buffer.get_layout().storage_size(), COPY_BYTES // dtype.itemsize
        )
    )


def codegen_word_load(pointer: str, index: str, how: str, dtype: torch.dtype) -> str:
    """
    The element of ``dtype`` at ``pointer + (index)``. ``how`` is what follows the address
    in the load: its mask, and hints.
    """
    words = f"{pointer}.to(tl.pointer_type(tl.int32), bitcast=True)"
    word = f"tl.load({words} + (({index}) >> 1), {how})"
    return f"triton_helpers.half_of_word({word}, {index}, {triton_type(dtype)})"
