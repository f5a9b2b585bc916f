"""
The loop variables that are worth a dimension of a pointwise kernel's tile.

The coalescing analysis says along which variable each access is contiguous, and a tile
may have a dimension for each such variable. A value of a row, as a norm's statistic, may
have one of its own: where keys [B, T, H, D] come to be [B, H, G, T, D], the norm's
[B, T, H] is contiguous along H, and a tile of [B * H, G * T * D] makes it coalesced. But
it varies along both dimensions of that tile, so each element has an index and a load of
its own, in a layout that the other loads do not have. Along one dimension a thread's
elements are of one row, and share a load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .tiling_utils import find_broadcast_var, find_coalesced_var, has_indirect_access
from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    import sympy

    from .tiling_utils import CoalesceVarAnalysis, FusedNormalizedReadsWrites


# Elements of a row that share a value, at least. Loads move sectors of 32 bytes, so what
# is read for such values, wherever they are, is at most one byte an element.
MIN_ROW = 32


def tiling_variables(analysis: CoalesceVarAnalysis) -> OrderedSet[sympy.Symbol]:
    """
    The variables that a kernel's tile may have a dimension for: those along which it has
    coalesced accesses, less, in a pointwise kernel, those of nothing but scattered values
    of rows.
    """
    reads_writes = analysis.norm_read_writes
    variables = reads_writes.index_vars & analysis.coalesced_by_var.keys()
    if reads_writes.reduce_vars:
        return variables
    return variables - variables_of_row_values(reads_writes)


def variables_of_row_values(
    reads_writes: FusedNormalizedReadsWrites,
) -> OrderedSet[sympy.Symbol]:
    """The variables along which scattered values of rows are contiguous, and nothing else."""
    of_values: OrderedSet[sympy.Symbol] = OrderedSet()
    of_others: OrderedSet[sympy.Symbol] = OrderedSet()
    ranges = reads_writes.var_ranges
    for index in (*reads_writes.reads, *reads_writes.writes):
        if has_indirect_access(index):
            continue  # to the analysis, contiguous along none
        variable = find_coalesced_var(index, ranges) or find_broadcast_var(
            index, ranges
        )
        if variable is None:
            continue
        scattered = index not in reads_writes.writes and is_scattered_row_value(
            index, variable, reads_writes
        )
        (of_values if scattered else of_others).add(variable)
    return of_values - of_others


def is_scattered_row_value(
    index: sympy.Expr,
    variable: sympy.Symbol,
    reads_writes: FusedNormalizedReadsWrites,
) -> bool:
    """
    Whether ``index``, which is contiguous along ``variable``, also varies along variables
    inside of it, and is the same for the ``MIN_ROW`` innermost elements or more.
    """
    variables = [*reads_writes.index_vars]  # from the outermost
    last = max(variables.index(v) for v in variables if v in index.free_symbols)
    row = sympy_product(reads_writes.var_ranges[v] for v in variables[last + 1 :])
    return (
        variables.index(variable) < last
        and V.graph.sizevars.statically_known_geq(row, MIN_ROW)
    )
