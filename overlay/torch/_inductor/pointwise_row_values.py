"""
The values of long rows in a pointwise kernel with one index.

An element's row is a quotient. Where the columns are no multiple of those that a thread has,
it does not know that its adjacent elements are of one row, so each has a quotient, a rest,
and a load for each value of a row. But a block that is no longer than a row has elements of
two rows at most: that of its first element, and the next one. Both rows' values are loaded
once a program, and an element selects one of them by its column.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING, Union

from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from .block_reduction_tile import codegen_tile_load
from .looped_reduction import ROW_LOOP
from .utils import sympy_subs


if TYPE_CHECKING:
    from .codegen.simd import IterationRangesEntry
    from .codegen.triton import BlockDescriptorOptions, IndexingOptions, TritonKernel


def row_length(kernel: TritonKernel, entry: IterationRangesEntry) -> Optional[int]:
    """
    The columns of the rows, or of a row, that ``entry`` counts, where a block of the
    pointwise ``kernel`` has elements of two rows at most and whether it does is not known.
    """
    if (
        kernel.is_combo_kernel
        or kernel.features.is_reduction()
        or not any(kernel.features.scheduler_nodes())  # as of a template
        or kernel.dense_size_list() != ["XBLOCK"]
    ):
        return None
    index = entry.root.index_sym()
    if isinstance(entry.expr, FloorDiv):
        base, columns = entry.expr.args
        is_row = base == index
    elif isinstance(entry.expr, ModularIndexing):
        base, divisor, columns = entry.expr.args
        is_row = base == index and divisor == 1
    else:
        return None
    long = is_row and columns.is_Integer and columns >= kernel.max_block("x")
    return int(columns) if long and columns % ROW_LOOP.columns_per_thread else None


def codegen_row_or_column(
    kernel: TritonKernel, entry: IterationRangesEntry
) -> Optional[str]:
    """The line for ``entry``, by selects; None where it is to be a quotient or a rest."""
    columns = row_length(kernel, entry)
    if columns is None:
        return None
    first, column, in_next = names(columns)
    offset, index = f"{entry.prefix}offset", f"{entry.prefix}index"
    for line in (
        f"{first} = {offset} // {columns}",
        f"{column} = {index} - {first} * {columns}",
        f"{in_next} = {column} >= {columns}",
    ):
        if not kernel.body.contains(line):
            kernel.body.writeline(line)
    if isinstance(entry.expr, FloorDiv):
        return f"{entry.name} = tl.where({in_next}, {first} + 1, {first})"
    return f"{entry.name} = tl.where({in_next}, {column} - {columns}, {column})"


def names(columns: int) -> tuple[str, str, str]:
    """Of a block's first row, of a column counted from its begin, of whether it is beyond."""
    return (
        f"first_row_{columns}",
        f"column_of_first_{columns}",
        f"in_next_row_{columns}",
    )


def codegen_row_value(
    kernel: TritonKernel,
    pointer: str,
    indexing: Union[IndexingOptions, BlockDescriptorOptions],
) -> Optional[str]:
    """
    The load of a value of a row; None of what is no such value. It is a scalar's, so that
    no hint about the caches is needed.
    """
    if indexing.has_indirect() or indexing.has_tmpmask():
        return None
    symbols = indexing.index.free_symbols
    symbol = next(iter(symbols), None)
    entry = kernel.range_tree_nodes.get(symbol)
    if len(symbols) != 1 or entry is None or not isinstance(entry.expr, FloorDiv):
        return None
    columns = row_length(kernel, entry)
    if columns is None:
        return None
    first, _, in_next = names(columns)
    values = [
        kernel.index_to_str(sympy_subs(indexing.index, {symbol: row}))
        for row in (first, f"({first} + 1)")
    ]
    rows = kernel.kexpr(kernel.rename_indexing(entry.length))
    return (
        f"tl.where({in_next}, tl.load({pointer} + ({values[1]}), {first} + 1 < {rows}),"
        f" tl.load({pointer} + ({values[0]})))"
    )


def codegen_load(
    kernel: TritonKernel,
    line: str,
    name: str,
    pointer: str,
    indexing: IndexingOptions,
) -> str:
    """``line``, which loads ``name`` from ``pointer``, or what stands for it."""
    line = codegen_row_value(kernel, pointer, indexing) or line
    return codegen_tile_load(kernel, line, name, pointer, indexing)
