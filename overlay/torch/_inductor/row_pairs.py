"""
Programs of two rows: unaligned ones of fp16, bf16 or bytes, which share a weight or compute
functions, and short ones of full precision that compute functions.

The weight is loaded once for both, and threads have as many columns in flight with half of the
warps to wait for.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from .row_program import RowProgram, UPSTREAM_COLUMNS
from .runtime.runtime_utils import ceildiv, next_power_of_2
from .virtualized import V


if TYPE_CHECKING:
    import sympy

    from .persistent_reduction import Loops


# The runtime (``_persistent_reduction_configs``) tunes rows of fewer columns than the first, and
# has tiles for fewer rows than the second.
TUNED_COLUMNS, RUNTIME_ROWS = 256, 1024
# Columns of two unaligned rows of a program that share an operand: at least, as the runtime's
# one warp loads fewer in a few rounds; up to which it has two warps, not four; and at most.
LEAST_PAIRED, PAIRED_BY_TWO_WARPS, MOST_PAIRED = 640, 832, 2048
# Columns of two such rows at most, of all tensors but those that rows share.
PAIRED_ELEMENTS = 6144
# The same two where no reduction needs the operand.
MOST_PAIRED_LATE, PAIRED_ELEMENTS_LATE = 4096, 10240
# Columns of both rows that a warp has then, at most.
ELEMENTS_PER_WARP = 1664
# Columns of a short row, unaligned or of full precision, at least, whose function of each element
# makes the runtime's four rows of a warp wait longer than two.
LEAST_PAIRED_SHORT = 192


def pair_of(row: Loops, rows: sympy.Expr) -> Optional[RowProgram]:
    """Two of ``rows``; None where one, or the runtime's, are as good."""
    if not V.graph.sizevars.statically_known_geq(rows, RUNTIME_ROWS):
        return None
    if LEAST_PAIRED_SHORT <= row.rnumel < TUNED_COLUMNS:
        is_paired = row.functions and (row.is_half_unaligned or row.is_words)
        return RowProgram(2, 1) if is_paired else None
    if not row.is_half_unaligned or row.vector > 1 or not (row.shared and row.sums):
        return None
    most, most_elements = MOST_PAIRED, PAIRED_ELEMENTS
    # of rows that load several tensors again and have their mean, a thread has registers for
    # half as many columns
    many = row.again.welford and row.again.loads > 1
    if row.loads_late and not (many and row.rnumel > most):
        most, most_elements = MOST_PAIRED_LATE, PAIRED_ELEMENTS_LATE
    elements = 2 * (row.streams - row.shared) * row.rnumel
    if not LEAST_PAIRED <= row.rnumel <= most or elements > most_elements:
        return None
    if row.loads_late:
        per_warp = ELEMENTS_PER_WARP // 2 if many else ELEMENTS_PER_WARP
        warps = next_power_of_2(ceildiv(elements, per_warp))
        return RowProgram(2, warps, loads_late=True)
    by_two_warps = row.rnumel <= PAIRED_BY_TWO_WARPS
    if row.functions and (by_two_warps or row.rnumel > UPSTREAM_COLUMNS):
        return None
    return RowProgram(2, 2 if by_two_warps else 4)
