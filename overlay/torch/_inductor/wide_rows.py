"""
Programs that hold a row of 8192 columns or more at once, of full precision or unaligned.

A loop reads such a row again, beside those of one or two other programs, and waits for memory
once more in each iteration. A program that holds it is told its share of the SM's registers:
ptxas takes more than that for columns that it need not have at once, and an SM has one program
for two.

- Eight warps hold an unaligned row, where each column is an instruction, or few are one. Of half
  types a loop is as good where it computes nothing but sums again.
- 32 warps hold a row for a norm that loads several tensors again: in whole vectors, or where it
  stores a sum of them that eight do not hold.
- 16 hold whole vectors that have a mean, which a second one corrects: all warps wait for that as
  well. Those that store a sum take fewer registers than there are, and are not told.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from .repeated_passes import WIDE_WARPS
from .row_program import RowProgram, WIDE_COLUMNS
from .runtime.registers import THREADS_PER_WARP
from .runtime.runtime_utils import ceildiv


if TYPE_CHECKING:
    from .persistent_reduction import Loops


# Columns of whole vectors with a mean, at least, of which no sum is stored: a loop over 8448 was
# up to 5 % faster on an H200, and holding 9216 was.
LEAST_WITH_MEAN = 9216
# Adjacent columns that a thread loads at once, at least, of rows that ``WIDE_WARPS`` hold: one
# at a time, each has registers for its address.
WIDE_VECTOR = 4
# Registers of a thread beside what is live while all warps wait for a reduction: for addresses,
# masks and temporaries.
WIDE_OTHER_REGISTERS = 16
# Warps of a program that has an SM by itself, and of one that shares it with another.
ALONE, SHARING = 32, 8


def wide_program(row: Loops) -> Optional[RowProgram]:
    """
    What holds ``row``; None where a loop or the programs of shorter rows are as good, or its
    registers are not known: of float64, of scans and sorts, or around branches.
    """
    if row.rnumel < WIDE_COLUMNS or row.doubles or row.branches or not row.again.column:
        return None
    if row.vectors:
        return program_of_vectors(row)
    return program_of_unaligned(row) if row.unaligned_bytes else None


def holds(row: Loops, num_warps: int, programs: int, live: float) -> bool:
    """
    Whether threads of so many ``programs`` on an SM have registers for their columns of ``row``, of
    each ``live`` ones or those of its loads: one for each tensor, while what was loaded is stored
    early, or else one for the address of each vector.
    """
    vector = row.vector if row.vectors else 1
    columns = vector * ceildiv(row.rnumel, vector * num_warps * THREADS_PER_WARP)
    loads = row.again.loads / (row.vector if row.stores_last else 1)
    takes = max(live, loads) * columns + WIDE_OTHER_REGISTERS
    return takes <= row.registers(num_warps, programs)


def program_of_unaligned(row: Loops) -> Optional[RowProgram]:
    again = row.again
    if row.rnumel == WIDE_COLUMNS:
        return None
    if row.is_half_unaligned:
        has_mean = again.welford and row.stores_last
        pays = again.loads > 0 and (row.computes_again or has_mean or not row.sums)
        late = has_mean and row.shared > 0 and not row.shared_is_reduced
    else:
        pays = not again.welford and (again.loads > 0 or row.online_softmax)
        late = row.loads_words_late and again.loads == 1
    # those are faster with registers as they come, if a program has enough of them
    has_vectors = row.vector >= (WIDE_VECTOR if again.welford else 2)
    sums_beside_softmax = row.online_softmax and row.sums
    if has_vectors or sums_beside_softmax or row.only_loads_again:
        pays = pays and not (row.is_held_by(SHARING) or row.is_held_by_what_is_live)
    if pays and holds(row, SHARING, 2, again.tiles if late else again.column):
        return RowProgram(1, SHARING, late, unmasked=True, sharing_programs=2)
    stores_sum = row.sums and not row.stores_last
    if row.is_half_unaligned or not stores_sum or again.welford or again.loads < 2:
        return None
    return program_by_itself(row)


def program_of_vectors(row: Loops) -> Optional[RowProgram]:
    again = row.again
    if not row.sums or row.online_softmax or row.vector < WIDE_VECTOR:
        return None
    if not again.welford:
        pays = again.loads > 1 and row.rnumel > WIDE_COLUMNS
        return program_by_itself(row) if pays else None
    if row.stores_last and again.loads == 1:
        is_held = row.rnumel >= LEAST_WITH_MEAN and holds(row, WIDE_WARPS, 2, again.tiles)
        return RowProgram(1, WIDE_WARPS, True, True, sharing_programs=2) if is_held else None
    if not row.stores_last and again.loads > 1 and holds(row, WIDE_WARPS, 1, again.column):
        return RowProgram(1, WIDE_WARPS, loads_late=row.is_little_padded)
    return None


def program_by_itself(row: Loops) -> Optional[RowProgram]:
    is_held = holds(row, ALONE, 1, row.again.column)
    return RowProgram(1, ALONE, unmasked=True, sharing_programs=1) if is_held else None
