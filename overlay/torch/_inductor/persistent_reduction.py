"""
Whether an inner reduction is worth a persistent kernel.

A persistent kernel holds a whole row at once, and a looped one a block of it. Where
a row's reductions are used on the row again, a loop reads it twice, and computes
twice what it reduces; an online softmax computes two exponentials an element, so as
not to. A persistent kernel does neither, as long as what it holds of a row fits in
registers.

Of a row that eight warps do not hold, or that is padded by more than a third, a loop
may be as good: it has more programs on an SM, and computes no padding. So it is asked
what the loops do again, of the kernel's operations: functions of each element, the
divisions of Welford's algorithm, or loads of several tensors.

Of rows of words or half types that begin within a vector, a thread loads one column at a
time, or a few. To load such a row again is as many instructions again. What every thread would
have beyond the row is left out, so that it has its share of the row's columns.

A program has one row, or some: short ones (``short_rows``), or those that are read across. What
unaligned rows share is loaded a column at a time as well. Where it has no registers until it is
used, it is loaded then, after the reductions. Rows of 8192 columns or more have programs of their
own (``wide_rows``).
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .device_model import DeviceModel
from .repeated_passes import Again, FUNCTIONS, NOTHING_AGAIN, ROOTS, WIDE_WARPS
from .row_accesses import (
    BRANCHING_FUNCTIONS,
    bytes_of_row,
    HALF_BYTES,
    has_function,
    has_online_softmax,
    has_reduction,
    has_rows_of_doubles,
    has_whole_vectors,
    is_reduced,
    reads_across_rows,
    shared_by_rows,
    unaligned_bytes,
    vector_columns,
)
from .row_program import RowProgram, UPSTREAM_COLUMNS, WIDE_COLUMNS
from .rows_read_across import rows_together
from .runtime.hints import DeviceProperties
from .runtime.registers import all_registers, OTHER_REGISTERS, THREADS_PER_WARP
from .runtime.runtime_utils import ceildiv, next_power_of_2
from .short_rows import may_be_paired, pair_of, RUNTIME_ROWS, several_rows, TUNED_COLUMNS
from .vector_width import largest_divisor
from .virtualized import V
from .wide_rows import WIDE_OTHER_REGISTERS, wide_program, WIDE_VECTOR


if TYPE_CHECKING:
    import sympy

    from .codegen.simd_kernel_features import SIMDKernelFeatures


# Warps of a program of one row.
NUM_WARPS = (1, 2, 4, 8)
# Columns of a row that a thread has at most: more would wait for one another, and with
# fewer the warps wait at barriers for what they do in no time.
COLUMNS_PER_THREAD = 32
# Of an unaligned row, where more warps would wait longer: in a norm with two reductions that
# depend on each other, and beyond eight warps. Such a norm of full precision has three, as its
# mean is corrected, and half the warps are better only if that leaves one, which waits for none.
UNALIGNED_COLUMNS_PER_THREAD = 64
# Of words, unless the row is by itself on its SM: of a softmax or a LayerNorm with 42 ptxas
# takes 166 registers.
UNALIGNED_WORDS_PER_THREAD = 41
# Columns for which the runtime (``_persistent_reduction_configs``) has a warp, of rows that it
# neither tunes nor has tiles for.
UNTUNED_COLUMNS = 1024
# Warps of an unaligned row, at least. One warp holds that of a LayerNorm with weight and bias,
# which three streams are: two have registers for all of their columns, and an SM fewer rows.
UNALIGNED_WARPS, ONE_WARP_STREAMS = 2, 3
# Warps that an SM holds at least, whatever a thread of them takes.
RESIDENT_WARPS = 16
# Tiles that are computed, beside those that are loaded.
COMPUTED_TILES = 2
# Columns beyond the row, at most, for a column in it: a persistent kernel computes
# them, a looped one only those of its last block.
MAX_PADDING = 1 / 3
# Programs of ``WIDE_WARPS`` on an SM, whose threads hold what is live while all warps wait for a
# reduction: or as many columns in half the warps.
WIDE_PROGRAMS = 2
# Loads again that pay for padding with nothing computed again: with one there is nothing to
# gain, and with three the masked lanes take longer than loading again.
PADDED_LOADS = 2
# Programs of an SM that hold such a row in half of ``WIDE_WARPS``. With two, memory waits for
# the lanes of no column.
PADDED_PROGRAMS = 3
# Columns of a short row, whose loops with nothing computed again are as good as padding it.
SHORT_COLUMNS = 4096
# Columns of a row of full precision in whole vectors, below which Welford's algorithm is better
# held. Of seven lengths on an H200 longer rows gained 2 % when held, or lost 5.
WELFORD_COLUMNS = 4096
# Bytes that are loaded for one that is stored, where a loop that loads a row again is as short.
NARROW = 4


@dataclasses.dataclass(frozen=True)
class Loops:
    """
    What a reduction kernel does with a row of ``rnumel`` columns.

    streams: buffers of which each column loads an element
    loops: over the row, if it is looped
    online_softmax: whether a loop has the maximum and the sum of exponentials
    plain: whether loops compute nothing but arithmetic, and the last alone stores
    across: whether adjacent elements of an input are of other rows
    turned: whether rows of which something is read across are stored as well
    together: the program of several rows that are read across
    again: what more than one loop does
    vector: adjacent columns that a thread loads at once, of ``unaligned_bytes`` or ``vectors``
    unaligned_bytes: of an element of the rows that are loaded, if all begin within a vector; or 0
    shared: streams that every row loads
    shared_is_reduced: whether a reduction needs one of those
    sums: whether a row is summed
    functions, branches: whether the kernel computes functions of elements, beside roots, and some
        that have branches, around which what is live is held
    narrows: whether loops compute nothing but arithmetic, and store a quarter of a row's bytes
    vectors: whether all rows that are loaded are of full precision and in whole vectors
    doubles: whether one is of more than four bytes
    stores_last: whether no loop but the last one stores
    stored: tensors of which each column stores an element
    registers_per_sm: of the device
    """

    rnumel: int
    streams: int
    loops: int
    online_softmax: bool
    plain: bool = False
    across: bool = False
    turned: bool = False
    together: Optional[RowProgram] = None
    again: Again = NOTHING_AGAIN
    vector: int = 1
    unaligned_bytes: int = 0
    shared: int = 0
    shared_is_reduced: bool = False
    sums: bool = False
    functions: bool = False
    branches: bool = False
    narrows: bool = False
    vectors: bool = False
    doubles: bool = False
    stores_last: bool = False
    stored: int = 1
    registers_per_sm: int = DeviceModel.registers_per_sm

    def registers(self, num_warps: int, programs: int = 1) -> int:
        """A thread's, where an SM has ``programs`` of ``num_warps``."""
        return all_registers(self.registers_per_sm, num_warps, programs)

    @property
    def unaligned(self) -> bool:
        """Whether rows that are loaded again begin within a vector."""
        return self.unaligned_bytes > 0 and self.again.loads > 0

    @property
    def is_half_unaligned(self) -> bool:
        """Whether all rows that are loaded are of half types or bytes, and unaligned."""
        return 0 < self.unaligned_bytes <= HALF_BYTES

    @property
    def may_load_words_late(self) -> bool:
        """Whether an unaligned row of words has more than ``WIDE_COLUMNS``, or of Welford's
        algorithm more than ``SHORT_COLUMNS``, and no loop but the last one stores: a loop would
        load again only what an earlier one stored."""
        most = SHORT_COLUMNS if self.again.welford else WIDE_COLUMNS
        is_long = self.unaligned_bytes > HALF_BYTES and self.padded > most
        return is_long and self.stores_last

    @property
    def is_words(self) -> bool:
        """Whether all rows that are loaded are of full precision, in whole vectors or unaligned."""
        return self.vectors or self.unaligned_bytes > HALF_BYTES

    @property
    def padded(self) -> int:
        """Columns of a persistent kernel's block."""
        return next_power_of_2(self.rnumel)

    @property
    def is_little_padded(self) -> bool:
        return self.padded <= self.rnumel * (1 + MAX_PADDING)

    @property
    def least_warps(self) -> int:
        """The fewest warps that an unaligned row may have."""
        many = self.again.welford and self.streams >= ONE_WARP_STREAMS
        return 1 if many else UNALIGNED_WARPS

    @property
    def does_more_again(self) -> bool:
        """Whether its loops do more than arithmetic, and loads of one tensor, twice."""
        return self.computes_again or self.again.welford or self.again.loads > 1

    @property
    def computes_again(self) -> bool:
        """Whether its loops compute more than arithmetic twice, which takes them longer
        than their bytes do."""
        return self.online_softmax or self.again.functions

    @property
    def loads_vectors_again(self) -> bool:
        """Whether two loops do no more again, for sums, than load whole vectors of one tensor."""
        is_one = self.streams - self.shared == self.again.loads == 1 and self.loops == 2
        is_light = self.sums and self.again.light and not self.functions
        is_held = self.again.welford and self.rnumel < WELFORD_COLUMNS
        return self.vectors and self.stores_last and is_one and is_light and not is_held

    @property
    def pays_for_padding(self) -> bool:
        """
        Whether a block of up to twice the row is better than its loops, as it is for an
        unaligned row that is held.
        """
        if self.unaligned and (
            any(map(self.is_held_by, NUM_WARPS))
            or (self.padded > WIDE_COLUMNS and self.is_held_by_what_is_live)
        ):
            return True
        if self.padded > WIDE_COLUMNS:
            does_more = self.again.loads > 0 or self.sums
            return self.is_words and does_more and self.is_held_by_what_is_live
        return (
            self.computes_again
            or self.again.welford
            or (
                self.rnumel > SHORT_COLUMNS
                and self.again.loads == PADDED_LOADS
                and 2 * self.again.live + OTHER_REGISTERS
                <= self.registers(WIDE_WARPS // 2, PADDED_PROGRAMS)
            )
        )

    @property
    def is_held_by_what_is_live(self) -> bool:
        """Whether ``WIDE_WARPS`` have registers for what is live of the row, of more than 4096
        columns, and holding beats looping; or of an unaligned row that loads operands late,
        by itself on its SM."""
        threads = WIDE_WARPS * THREADS_PER_WARP
        if self.loads_words_late and self.padded > WIDE_COLUMNS:
            takes = self.registers_for_unaligned(ceildiv(self.rnumel, threads))
            return takes <= self.registers(WIDE_WARPS)
        columns = ceildiv(self.padded, threads)
        if not COLUMNS_PER_THREAD // 2 <= columns <= COLUMNS_PER_THREAD:
            return False
        live = self.again.live + WIDE_OTHER_REGISTERS
        if live > self.registers(WIDE_WARPS, WIDE_PROGRAMS):
            return False
        if self.padded > WIDE_COLUMNS:
            return self.computes_again and self.rnumel % WIDE_VECTOR == 0
        return self.does_more_again

    def registers_for(self, columns: int) -> float:
        """Registers of a thread that holds ``columns`` of a row."""
        return (self.streams + COMPUTED_TILES) * columns + OTHER_REGISTERS

    @property
    def is_better_held(self) -> bool:
        """Whether an unaligned row is, by eight warps at most: up to ``WIDE_COLUMNS``, beyond
        them if words have operands loaded late, and where loops do more than load one tensor
        again, and ``WIDE_WARPS`` do not hold it."""
        if self.padded <= WIDE_COLUMNS or self.loads_words_late:
            return True
        return not self.is_held_by_what_is_live and (
            self.computes_again
            or (self.again.welford and self.vector > 1)
            or self.only_loads_again
        )

    @property
    def only_loads_again(self) -> bool:
        """
        Whether what its loops do again is to load two tensors or more, for arithmetic or
        functions that have no branches.
        """
        return self.plain and not self.branches and self.again.loads > 1

    def registers_for_unaligned(self, columns: int) -> float:
        """
        Registers of a thread that has ``columns`` of an unaligned row: of what is live while
        the warps wait for a reduction, and of its loads, each an address. Beyond
        ``WIDE_COLUMNS`` a column's loads follow each other, if that takes less.
        """
        a_column = self.registers_of_column(self.again.tiles)
        if self.padded > WIDE_COLUMNS:
            a_column = min(a_column, self.again.column + 1 / self.vector)
        return a_column * columns + OTHER_REGISTERS

    def registers_of_column(self, live: float) -> float:
        """With so many ``live``, or with what is loaded again, and with the loads' addresses."""
        loads = self.again.loads
        return max(live, loads) + loads / self.vector

    def registers_of_thread(self, num_warps: int, a_column: float) -> float:
        """Where each of its columns takes so many."""
        return a_column * ceildiv(self.rnumel, num_warps * THREADS_PER_WARP) + OTHER_REGISTERS

    def is_held_by(self, num_warps: int) -> bool:
        """
        Whether so many warps hold the row at once, by what it loads, beside others on their SM;
        an unaligned row, by what it loads again or what is live at its reductions, and by
        itself where loops only load it again. Of words, one warp and eight hold what either
        count lets them, and two or four as much as of an aligned row: twice as many are as fast.
        Where loops do no more again little is gained, and a thread has padding as well.
        """
        threads = num_warps * THREADS_PER_WARP
        paid = self.unaligned or self.does_more_again
        columns = ceildiv(self.rnumel if paid else self.padded, threads)
        most, takes, resident = COLUMNS_PER_THREAD, self.registers_for(columns), RESIDENT_WARPS
        if self.unaligned:
            if num_warps < self.least_warps or not self.is_better_held:
                return False
            by_itself = self.padded > WIDE_COLUMNS and self.only_loads_again
            is_half = self.is_half_unaligned
            if is_half or num_warps in (NUM_WARPS[0], NUM_WARPS[-1]):
                by_live = self.registers_for_unaligned(columns)
                takes = by_live if is_half else min(takes, by_live)
                if self.again.welford or num_warps == NUM_WARPS[-1]:
                    most = UNALIGNED_WORDS_PER_THREAD
                    if is_half or by_itself:
                        most = UNALIGNED_COLUMNS_PER_THREAD
            if by_itself:
                resident = num_warps
        return columns <= most and takes <= self.registers(resident)

    @property
    def may_load_late(self) -> bool:
        """Whether unaligned rows share operands that none of their reductions needs."""
        one_at_a_time = self.is_half_unaligned and self.vector == 1
        is_light = one_at_a_time and not self.functions
        return self.is_norm and (is_light or self.may_load_words_late)

    @property
    def is_norm(self) -> bool:
        """Whether rows that are summed share operands that no reduction needs."""
        return self.sums and self.shared > 0 and not self.shared_is_reduced

    @property
    def stores_sum(self) -> bool:
        """Whether a row of up to ``WIDE_COLUMNS`` is summed, and not all stored in its last loop."""
        return self.sums and not self.stores_last and self.padded <= WIDE_COLUMNS

    @property
    def gains_unmasked(self) -> bool:
        """Whether a row has its loads in flight together where no mask is between them: a
        LayerNorm of half types that stores the sum which it normalizes, and an unaligned row
        with functions to wait for, of one tensor, or of a norm that loads a column at a time.
        Else ptxas takes as many registers that an SM has fewer programs."""
        stores_its_sum = self.is_norm and self.stores_sum and self.stored > 1
        if stores_its_sum and self.again.welford and not self.is_words:
            return True
        gains = self.streams == 1 or (self.is_norm and self.vector == 1)
        return self.unaligned and self.functions and not self.branches and gains

    @property
    def loads_words_late(self) -> bool:
        return self.may_load_late and self.may_load_words_late

    def loads_late(self, num_warps: int) -> bool:
        """Whether a thread of so many warps has too few registers for what rows share beside
        them. Else it has all in flight at once: later, ptxas waits for each column's in turn."""
        if not self.may_load_late or self.may_load_words_late:
            return self.may_load_late
        takes = self.registers_of_thread(num_warps, self.again.column + 1 / self.vector)
        return takes > self.registers(RESIDENT_WARPS)

    def program(self, rows: sympy.Expr) -> RowProgram:
        """Of so many rows, which are held."""
        if program := self.together or pair_of(self, rows) or wide_program(self):
            return program
        warps = fewest_warps_that_hold(self)
        assert warps is not None
        crowded = self.is_crowded(warps)
        sharing = WIDE_PROGRAMS if crowded and self.vectors and self.again.welford else 0
        unmasked = self.may_load_late or self.gains_unmasked or crowded
        return RowProgram(1, warps, self.loads_late(warps), unmasked, sharing)

    def is_crowded(self, num_warps: int) -> bool:
        """
        Whether a thread of a norm of words that stores the sum which it normalizes would have
        more registers than two programs of eight warps leave it. ptxas takes them where rows are
        masked, and of LayerNorm in whole vectors, which is told its share.
        """
        if not (self.stores_sum and self.is_words) or num_warps != NUM_WARPS[-1]:
            return False
        a_column = self.registers_of_column(self.again.column)
        return self.registers_of_thread(num_warps, a_column) > self.registers(RESIDENT_WARPS)

    def is_for_runtime(self, rows: sympy.Expr) -> bool:
        """
        Whether so many short ``rows`` have the runtime's programs: it tunes those of few
        columns, has some for few rows, and a warp for 1024 columns of others, if that
        holds them.
        """
        return self.padded < TUNED_COLUMNS or (
            self.together is None
            and (
                not V.graph.sizevars.statically_known_geq(rows, RUNTIME_ROWS)
                or self.registers_for(UNTUNED_COLUMNS // 32) <= self.registers(RESIDENT_WARPS)
            )
        )


def loops(features: SIMDKernelFeatures) -> Optional[Loops]:
    """None where the size of a row is dynamic, and on other GPUs than NVIDIA's: threads and
    registers are counted as theirs."""
    device = DeviceProperties.create(V.graph.get_current_device_or_throw())
    if features.reduction_numel.free_symbols or device.type != "cuda":
        return None
    stats = features.memory_stats()
    loaded, stored = stats.persistent.reads.dim[-1], stats.persistent.writes.dim[-1]
    of_columns = stored.count_per_thread - stored.count_per_thread_broadcast
    arithmetic = not has_function(features, *FUNCTIONS)
    stores_last = not any(each.count_per_thread for each in stats.looped.writes.loop[:-1])
    rnumel = int(features.reduction_numel)
    # which nothing asks of a shorter row
    again = Again.of(features) if rnumel > UPSTREAM_COLUMNS else NOTHING_AGAIN
    unaligned = unaligned_bytes(features)
    shared = shared_by_rows(features)
    vectors, across = has_whole_vectors(features), reads_across_rows(features)
    vector = vector_columns(features) if unaligned or vectors else 1
    return Loops(
        rnumel=rnumel,
        streams=loaded.count_per_thread - loaded.count_per_thread_broadcast,
        loops=len(stats.looped.memory.loop),
        online_softmax=has_online_softmax(features),
        plain=arithmetic and stores_last,
        again=again,
        vector=largest_divisor(features.reduction_numel, vector),
        unaligned_bytes=unaligned,
        shared=len(shared),
        shared_is_reduced=is_reduced(features, shared),
        sums=has_reduction(features, "sum", "welford_reduce"),
        functions=has_function(features, *OrderedSet(FUNCTIONS) - OrderedSet(ROOTS)),
        branches=has_function(features, *BRANCHING_FUNCTIONS),
        narrows=arithmetic and NARROW * bytes_of_row(stored) <= bytes_of_row(loaded),
        vectors=vectors,
        doubles=has_rows_of_doubles(features),
        stores_last=stores_last,
        stored=of_columns,
        across=across,
        turned=across and of_columns > 0,
        together=rows_together(features) if across else None,
        registers_per_sm=DeviceModel.of(device).registers_per_sm,
    )


def short_program(features: SIMDKernelFeatures) -> Optional[RowProgram]:
    """Of rows of up to 1024 columns that are inner by their hints; None: the runtime decides."""
    is_tuned = V.graph.sizevars.statically_known_leq(features.reduction_numel, TUNED_COLUMNS // 2)
    if not is_tuned and reads_across_rows(features) and (program := rows_together(features)):
        return program
    row = loops(features) if may_be_paired(features) else None
    return (pair_of(row, features.numel) if row else None) or several_rows(features)


def why_looped(row: Loops, max_rnumel: int) -> Optional[str]:
    """
    Why a kernel of rows beyond 1024 columns, or of shorter ones that are inner by their
    accesses alone, is looped; None when it is persistent.
    """
    if row.across and row.together is None:
        return "a program of one row reads across the rows"
    if row.rnumel > max_rnumel:
        return f"{row.rnumel} columns are more than {max_rnumel}"
    if row.loops < 2 and not (row.online_softmax or row.turned):
        return "one loop does all"
    if row.together is not None:
        return None
    padded = row.padded
    is_long = row.rnumel > UPSTREAM_COLUMNS
    is_light = row.plain if is_long and row.streams > 1 else row.narrows
    if is_light and padded == row.rnumel:
        return "a block of its loop is a row, which is cached when it is read again"
    if wide_program(row):
        return None
    if is_long and row.loads_vectors_again:
        return "whole vectors of one tensor are cached when they are read again"
    if is_long and not row.is_little_padded and not row.pays_for_padding:
        return f"{row.rnumel} columns are padded to {padded}"
    if fewest_warps_that_hold(row) is None:
        return f"{row.streams + COMPUTED_TILES} tiles take too many registers"
    return None


def fewest_warps_that_hold(row: Loops) -> Optional[int]:
    """The fewest warps that hold the row at once, by what it loads, or what is live at its
    reductions; None where it is too long for any."""
    for warps in NUM_WARPS:
        if row.is_held_by(warps):
            return warps
    if not row.is_held_by_what_is_live:
        return None
    return NUM_WARPS[-1] if row.padded <= WIDE_COLUMNS else WIDE_WARPS
