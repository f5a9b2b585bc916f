"""
Rows that a mix-order kernel fetches into the L2 cache ahead of its loads.

Where rows are copied asynchronously, those of the next tiles are on their way while a tile
is computed. Others are loaded when they are needed: rows that begin anywhere, and rows that
leave no shared memory for another stage. One thread asks for those of the next tile, so
that they come from the L2 cache then, and memory is not idle before.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING, Union

import sympy

from . import config
from .mix_order_row_loop import takes_turns
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.triton import BlockDescriptorOptions, IndexingOptions, TritonKernel


def prefetches_rows(kernel: TritonKernel) -> bool:
    """Whether ``kernel`` fetches rows ahead of its loads."""
    return (
        kernel.row_split is not None
        and kernel.row_split.prefetch
        # these advance xoffset themselves
        and not (config.triton.use_tensor_descriptor or config.triton.use_block_ptr)
    )


def first_row(
    kernel: TritonKernel, indexing: Union[IndexingOptions, BlockDescriptorOptions]
) -> Optional[sympy.Expr]:
    """
    Where in its buffer the first of the rows is that ``indexing`` loads, if each follows
    the one before, so that a tile of them is one range of memory. None if not.
    """
    # a circle: codegen.triton imports this module in turn
    from .codegen.triton import IndexingOptions

    if not isinstance(indexing, IndexingOptions) or indexing.has_tmpmask():
        return None
    index = sympy.expand(indexing.index)
    nodes = kernel.range_tree_nodes
    symbols = {nodes[s].prefix: s for s in index.free_symbols if s in nodes}
    equal = V.graph.sizevars.statically_known_equals
    if (
        indexing.has_indirect()
        or symbols.keys() != kernel.numels.keys()
        or not all(
            nodes[symbols[prefix]].divisor == 1
            and equal(nodes[symbols[prefix]].length, numel)
            for prefix, numel in kernel.numels.items()
        )
    ):
        return None
    first = sympy.expand(index - kernel.numels["r0_"] * symbols["x"] - symbols["r0_"])
    return None if first.free_symbols & nodes.keys() else first


def note_rows(
    kernel: TritonKernel,
    pointer: str,
    name: str,
    indexing: Union[IndexingOptions, BlockDescriptorOptions],
) -> None:
    """That ``kernel`` loads at ``indexing`` of the buffer ``name``, which is ``pointer``."""
    if not prefetches_rows(kernel):
        return
    first = first_row(kernel, indexing)
    if first is None:
        return
    if first != 0:
        pointer = f"{pointer} + ({kernel.index_to_str(first)})"
    kernel.prefetched_rows[pointer] = V.graph.get_dtype(name).itemsize


def codegen_prefetch(kernel: TritonKernel, step: str) -> list[str]:
    """The lines of the loop over tiles that fetch the next one, ``step`` rows on."""
    if not kernel.prefetched_rows:
        return []
    end = "xnumel"
    if not takes_turns(kernel.row_split):
        end = "tl.program_id(0) * RSPLIT_SIZE + split_size"
    rows = f"xoffset, {end}, XBLOCK"
    return [
        f"xoffset += {step}",
        *(
            f"triton_helpers.prefetch_rows({pointer}, r0_numel * {itemsize}, {rows})"
            for pointer, itemsize in kernel.prefetched_rows.items()
        ),
    ]
