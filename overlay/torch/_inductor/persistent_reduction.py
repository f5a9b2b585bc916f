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

Of rows of half types that begin within a vector, a thread loads one column at a time, or a
few. To load such a row again is as many instructions again.

What every thread would have beyond the row is left out, so that it has its share of the row's
columns, not of the padded ones.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from . import ir
from .dependencies import MemoryDep
from .device_model import DeviceModel
from .mix_order_accesses import accessed_numel
from .mix_order_pressure import Demand, LaunchConfig, Layout
from .mix_order_trace import Op, Trace, Width
from .runtime.hints import DeviceProperties
from .runtime.registers import all_registers, THREADS_PER_WARP
from .runtime.runtime_utils import ceildiv, next_power_of_2
from .vector_width import accesses, aligned_columns, VECTOR_BYTES
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .codegen.simd_kernel_features import SIMDKernelFeatures


# Warps of a program, which has one row.
NUM_WARPS = (1, 2, 4, 8)
# Columns of a row that a thread has at most: more would wait for one another, and with
# fewer the warps wait at barriers for what they do in no time.
COLUMNS_PER_THREAD = 32
# Of an unaligned row, where more warps would wait longer: in a norm with two reductions that
# depend on each other, and beyond eight warps.
UNALIGNED_COLUMNS_PER_THREAD = 64
# What the runtime tunes has fewer columns, few rows are fewer, and others have a warp for
# so many columns of them (``_persistent_reduction_configs``).
TUNED_COLUMNS, FEW_ROWS, UNTUNED_COLUMNS = 256, 1024, 1024
# Warps of an unaligned row, at least, and the bytes of its widest elements. One warp holds that
# of a LayerNorm with weight and bias, which three streams are: two have registers for all of
# their columns, and an SM fewer rows.
UNALIGNED_WARPS, HALF_BYTES, ONE_WARP_STREAMS = 2, 2, 3
# Warps that an SM holds at least, whatever a thread of them takes.
RESIDENT_WARPS = 16
# for addresses, masks and temporaries
OTHER_REGISTERS = 28
# Tiles that are computed, beside those that are loaded.
COMPUTED_TILES = 2
# Columns beyond the row, at most, for a column in it: a persistent kernel computes
# them, a looped one only those of its last block.
MAX_PADDING = 1 / 3
# Columns of a row, at most, that upstream's persistent inner reductions pad as they are.
UPSTREAM_COLUMNS = 1024
# Functions that are worth computing once.
FUNCTIONS = ("exp", "exp2", "log", "sigmoid", "tanh", "erf", "rsqrt", "sqrt", "pow")
# Warps of a program whose row has more than so many columns, which is the most of one whose
# loops compute nothing but arithmetic again. With twice as many columns an SM has one
# program or two, which wait for memory in turn, and loops have four. With these warps for
# shorter rows, more wait for one another at each reduction.
WIDE_WARPS, WIDE_COLUMNS = 16, 8192
# Such programs of an SM, whose threads hold what is live while all warps wait for a
# reduction, beside registers for addresses, masks and temporaries: or as many columns in
# half the warps.
WIDE_PROGRAMS, WIDE_OTHER_REGISTERS = 2, 16
# Adjacent columns that a thread loads at once, at least, of rows that ``WIDE_WARPS`` hold: one
# at a time, each has registers for its address.
WIDE_VECTOR = 4
# Loads again that pay for padding with nothing computed again: with one there is nothing to
# gain, and with three the masked lanes take longer than loading again.
PADDED_LOADS = 2
# Programs of an SM that hold such a row in half of ``WIDE_WARPS``. With two, memory waits for
# the lanes of no column.
PADDED_PROGRAMS = 3
# Columns of a short row, whose loops with nothing computed again are as good as padding it.
SHORT_COLUMNS = 4096


@dataclasses.dataclass(frozen=True)
class Again:
    """
    What the loops over a row do more than once, which a persistent kernel does once.

    functions: whether they compute functions of elements
    loads: of tensors that have an element for each of rows and columns
    welford: whether one has Welford's algorithm, which divides; a persistent kernel has
        two sums
    live: registers of a thread of a persistent kernel of ``WIDE_WARPS``, of what it holds
        where its warps wait for a reduction
    column: among that, registers for each column
    tiles: the same without what every row reads
    """

    functions: bool = False
    loads: int = 0
    welford: bool = False
    live: float = 0
    column: float = 0
    tiles: float = 0

    @classmethod
    def of(cls, features: SIMDKernelFeatures) -> Again:
        """Of a kernel of static columns; nothing of one that scans or sorts."""
        nodes = features.scheduler_nodes()
        if not all(
            isinstance(node.node, ir.ComputedBuffer)
            and isinstance(node.node.data, (ir.Pointwise, ir.Reduction))
            for node in nodes
        ):
            return cls()
        ops = Trace.of(features.numel, nodes, ())
        columns = int(features.reduction_numel)
        launch = LaunchConfig(xblock=1, num_warps=WIDE_WARPS, hoist=False)
        seen, again = OrderedSet[int](), OrderedSet[int]()
        for each in row_passes(ops):
            again |= seen & each
            seen |= each
        names = [ops[i].name for i in again if ops[i].width == Width.TILE]
        # without what every row reads, which can be loaded after a reduction
        of_row = dataclasses.replace(launch, hoist=True)
        per_thread = Layout.of(ops, columns, of_row).elements[Width.TILE]
        live = Demand.of(ops, columns, launch).tiles
        return cls(
            any(name in FUNCTIONS for name in names),
            names.count("load"),
            has_reduction(features, "welford_reduce", "welford_combine"),
            live,
            live / per_thread,
            Demand.of(ops, columns, of_row).tiles / per_thread,
        )


def row_passes(ops: Sequence[Op]) -> list[OrderedSet[int]]:
    """
    The operations of each loop over a row: what its reductions need, or, of the last, what
    is stored, but for what is known of the row by then.
    """
    level: list[int] = []
    for op in ops:
        before = max((level[j] for j in op.inputs), default=0)
        level.append(before + (op.name == "row_reduction"))
    passes = []
    for each in range(1, max(level, default=0) + 2):
        last = each > max(level, default=0)
        needed = OrderedSet(
            i
            for i, op in enumerate(ops)
            if (op.name == "store" and last)
            or (op.name == "row_reduction" and level[i] == each)
        )
        roots = OrderedSet(needed)
        for i in reversed(range(len(ops))):
            if i in needed and (ops[i].name != "row_reduction" or i in roots):
                needed.update(ops[i].inputs)
        passes.append(needed)
    return passes


@dataclasses.dataclass(frozen=True)
class Loops:
    """
    What a reduction kernel does with a row of ``rnumel`` columns.

    streams: buffers that each column loads
    loops: over the row, if it is looped
    online_softmax: whether a loop has the maximum and the sum of exponentials
    plain: whether loops compute nothing but arithmetic, and the last alone stores
    across: whether adjacent elements of an input are of other rows
    again: what more than one loop does
    vector: of an unaligned row, adjacent columns that a thread loads at once
    unaligned: whether rows of half types that are loaded again begin within a vector
    registers_per_sm: of the device
    """

    rnumel: int
    streams: int
    loops: int
    online_softmax: bool
    plain: bool = False
    across: bool = False
    again: Again = Again()
    vector: int = 1
    unaligned: bool = False
    registers_per_sm: int = DeviceModel.registers_per_sm

    def registers(self, num_warps: int, programs: int = 1) -> int:
        """A thread's, where an SM has ``programs`` of ``num_warps``."""
        return all_registers(self.registers_per_sm, num_warps, programs)

    @property
    def padded(self) -> int:
        """Columns of a persistent kernel's block."""
        return next_power_of_2(self.rnumel)

    @property
    def least_warps(self) -> int:
        """Of an unaligned row."""
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
            return False
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
        """Whether a row of more than 4096 columns is, and is better held than looped."""
        columns = ceildiv(self.padded, WIDE_WARPS * THREADS_PER_WARP)
        if not COLUMNS_PER_THREAD // 2 <= columns <= COLUMNS_PER_THREAD:
            return False
        live = self.again.live + WIDE_OTHER_REGISTERS
        if live > self.registers(WIDE_WARPS, WIDE_PROGRAMS):
            return False
        if self.padded > WIDE_COLUMNS:
            return self.computes_again and self.rnumel % WIDE_VECTOR == 0
        return self.does_more_again

    def takes(self, columns: int) -> float:
        """Registers of a thread that has ``columns`` of rows."""
        return (self.streams + COMPUTED_TILES) * columns + OTHER_REGISTERS

    @property
    def is_better_held(self) -> bool:
        """Whether an unaligned row is, by eight warps at most: up to ``WIDE_COLUMNS``, and beyond
        them where loops do more than load one tensor again, and ``WIDE_WARPS`` do not hold it."""
        if self.padded <= WIDE_COLUMNS:
            return True
        return not self.is_held_by_what_is_live and (
            self.computes_again
            or (self.again.welford and self.vector > 1)
            or self.only_loads_again
        )

    @property
    def only_loads_again(self) -> bool:
        """Whether its loops load two tensors again or more, for nothing but arithmetic."""
        return self.plain and self.again.loads > 1

    def takes_unaligned(self, columns: int) -> float:
        """
        Registers of a thread that has ``columns`` of an unaligned row: of what is live while
        the warps wait for a reduction, and of its loads, each an address. Beyond
        ``WIDE_COLUMNS`` a column's loads follow each other, if that takes less.
        """
        again, loads = self.again, self.again.loads
        a_column = max(again.tiles, loads) + loads / self.vector
        if self.padded > WIDE_COLUMNS:
            a_column = min(a_column, again.column + 1 / self.vector)
        return a_column * columns + OTHER_REGISTERS

    def is_held_by(self, num_warps: int) -> bool:
        """
        Whether so many warps hold the row at once, by what it loads, and beside others on
        their SM; an unaligned row, by what it loads again or what is live at its reductions,
        and by themselves where loops only load it again. Little is gained where loops do no
        more again: there a thread has padding as well.
        """
        threads = num_warps * THREADS_PER_WARP
        paid = self.unaligned or self.does_more_again
        columns = ceildiv(self.rnumel if paid else self.padded, threads)
        most, takes, resident = COLUMNS_PER_THREAD, self.takes(columns), RESIDENT_WARPS
        if self.unaligned:
            if num_warps < self.least_warps or not self.is_better_held:
                return False
            if self.again.welford or num_warps == NUM_WARPS[-1]:
                most = UNALIGNED_COLUMNS_PER_THREAD
            takes = self.takes_unaligned(columns)
            if self.padded > WIDE_COLUMNS and self.only_loads_again:
                resident = num_warps
        return columns <= most and takes <= self.registers(resident)

    def is_for_runtime(self, rows: sympy.Expr) -> bool:
        """
        Whether so many short ``rows`` have the runtime's programs: it tunes those of few
        columns, has some for few rows, and a warp for 1024 columns of others, if that
        holds them.
        """
        return (
            next_power_of_2(self.rnumel) < TUNED_COLUMNS
            or not V.graph.sizevars.statically_known_geq(rows, FEW_ROWS)
            or self.takes(UNTUNED_COLUMNS // 32) <= self.registers(RESIDENT_WARPS)
        )


def has_reduction(features: SIMDKernelFeatures, *kinds: str) -> bool:
    """Whether a kernel has a reduction of one of the ``kinds``."""
    return any(
        node.node.get_reduction_type() in kinds  # type: ignore[union-attr]
        for node in features.reduction_nodes()
    )


def has_online_softmax(features: SIMDKernelFeatures) -> bool:
    return has_reduction(features, "online_softmax_reduce")


def loops(features: SIMDKernelFeatures) -> Optional[Loops]:
    """
    None where the size of a row is dynamic, and on other GPUs than NVIDIA's: threads and
    registers are counted as theirs.
    """
    device = DeviceProperties.create(V.graph.get_current_device_or_throw())
    if features.reduction_numel.free_symbols or device.type != "cuda":
        return None
    stats = features.memory_stats()
    row = stats.persistent.reads.dim[-1]
    rnumel = int(features.reduction_numel)
    # which nothing asks of a shorter row
    again = Again.of(features) if rnumel > UPSTREAM_COLUMNS else Again()
    unaligned = again.loads > 0 and begins_within_vectors(features)
    vector = vector_columns(features) if unaligned else 1
    return Loops(
        rnumel=rnumel,
        streams=row.count_per_thread - row.count_per_thread_broadcast,
        loops=len(stats.looped.memory.loop),
        online_softmax=has_online_softmax(features),
        plain=not any(loop.count_per_thread for loop in stats.looped.writes.loop[:-1])
        and not any(
            node._body.has_op(name)
            for node in features.scheduler_nodes()
            for name in FUNCTIONS
        ),
        again=again,
        vector=largest_divisor(features.reduction_numel, vector),
        unaligned=unaligned,
        across=reads_across_rows(features),
        registers_per_sm=DeviceModel.of(device).registers_per_sm,
    )


def largest_divisor(columns: sympy.Expr, vector: int) -> int:
    """Of ``columns``, the largest known power of two up to ``vector``, which is one."""
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    while vector > 1 and not is_multiple(columns, vector):
        vector //= 2
    return vector


def adjacent_columns(dep: MemoryDep, columns: sympy.Expr) -> int:
    """Those that a thread can load at once of rows of ``columns`` where no mask is."""
    vector = aligned_columns(dep)
    innermost = [var for var in dep.ranges if dep.index.coeff(var) == 1]
    if innermost and V.graph.sizevars.statically_known_equals(
        dep.ranges[innermost[0]], columns
    ):
        return vector
    # One loop over rows and columns: a row begins anywhere where the next one does.
    return largest_divisor(columns, vector)


def vector_columns(features: SIMDKernelFeatures) -> int:
    """Columns that a thread has at once of any tensor: of all, as of the widest; 0 of none."""
    columns = features.reduction_numel
    whole = accesses(features, features.numel * columns)
    return max(
        (adjacent_columns(dep, columns) for deps in whole.values() for dep in deps),
        default=0,
    )


def loaded(features: SIMDKernelFeatures) -> list[MemoryDep]:
    """What a kernel reads, but for what it writes itself."""
    nodes = features.scheduler_nodes()
    stored = {dep.name for node in nodes for dep in node.read_writes.writes}
    return [
        dep
        for node in nodes
        for dep in node.read_writes.reads
        if isinstance(dep, MemoryDep) and dep.name not in stored
    ]


def is_of_rows(features: SIMDKernelFeatures, dep: MemoryDep) -> bool:
    """Whether ``dep`` has a value for each row and column."""
    numel = features.numel * features.reduction_numel
    return V.graph.sizevars.statically_known_equals(accessed_numel(dep), numel)


def begins_within_vectors(features: SIMDKernelFeatures) -> bool:
    """Whether all rows that are loaded are of half types or bytes, and unaligned."""
    rows = [dep for dep in loaded(features) if is_of_rows(features, dep)]
    columns = features.reduction_numel
    return bool(rows) and all(
        V.graph.get_dtype(dep.name).itemsize <= HALF_BYTES
        and adjacent_columns(dep, columns) < VECTOR_BYTES // HALF_BYTES
        for dep in rows
    )


def reads_across_rows(features: SIMDKernelFeatures) -> bool:
    """
    Whether an input has a value for each row and column, and adjacent ones are of other
    rows. A program of one row loads a sector of memory for each column of it, which those
    of the rows beside it load again.
    """
    return any(
        lies_across(dep) and is_of_rows(features, dep) for dep in loaded(features)
    )


def lies_across(dep: MemoryDep) -> bool:
    """
    Whether adjacent elements of ``dep`` are not those of adjacent columns, the innermost
    variable, but of another's.
    """
    *others, columns = dep.ranges or (None,)
    index = nearby(dep.index)
    return index.coeff(columns) not in (0, 1) and any(
        index.coeff(var) == 1 for var in others
    )


def nearby(index: sympy.Expr) -> sympy.Expr:
    """
    ``index`` where no quotient changes and no remainder begins anew, as of most elements and
    those beside them: a part of a concatenation, or of a padded tensor, has both.
    """
    index = index.replace(
        ModularIndexing,
        lambda base, divisor, _: base if divisor == 1 else sympy.S.Zero,
    )
    return index.replace(FloorDiv, lambda *_: sympy.S.Zero).expand(identity=True)


def why_looped(row: Loops, max_rnumel: int) -> Optional[str]:
    """
    Why a kernel of rows beyond 1024 columns, or of shorter ones that are inner by their
    accesses alone, is looped; None when it is persistent.
    """
    if row.across:
        return "a program of one row reads across the rows"
    if row.rnumel > max_rnumel:
        return f"{row.rnumel} columns are more than {max_rnumel}"
    if row.loops < 2 and not row.online_softmax:
        return "one loop does all"
    padded = row.padded
    is_long = row.rnumel > UPSTREAM_COLUMNS
    if is_long and row.plain and row.streams > 1 and padded == row.rnumel:
        return "a block of its loop is a row, which is cached when it is read again"
    is_little_padded = padded <= row.rnumel * (1 + MAX_PADDING)
    if is_long and not is_little_padded and not row.pays_for_padding:
        return f"{row.rnumel} columns are padded to {padded}"
    if num_warps(row) is None:
        return f"{row.streams + COMPUTED_TILES} tiles take too many registers"
    return None


def num_warps(row: Loops) -> Optional[int]:
    """
    The fewest warps that hold the row at once, by what it loads, or what is live at its
    reductions; None where it is too long for any.
    """
    for warps in NUM_WARPS:
        if row.is_held_by(warps):
            return warps
    if not row.is_held_by_what_is_live:
        return None
    return NUM_WARPS[-1] if row.padded <= WIDE_COLUMNS else WIDE_WARPS
