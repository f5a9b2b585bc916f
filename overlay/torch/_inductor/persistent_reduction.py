"""
Whether an inner reduction is worth a persistent kernel.

A persistent kernel holds a whole row at once, and a looped one a block of it. Where
a row's reductions are used on the row again, a loop reads it twice, and computes
twice what it reduces; an online softmax computes two exponentials an element, so as
not to. A persistent kernel does neither, as long as what it holds of a row fits in
registers.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

from .dependencies import MemoryDep
from .mix_order_accesses import accessed_numel
from .runtime.hints import DeviceProperties
from .runtime.runtime_utils import ceildiv, next_power_of_2
from .virtualized import V


if TYPE_CHECKING:
    import sympy

    from .codegen.simd_kernel_features import SIMDKernelFeatures


# Warps of a program, which has one row.
NUM_WARPS = (1, 2, 4, 8)
# Columns of a row that a thread has at most: more would wait for one another, and with
# fewer the warps wait at barriers for what they do in no time.
COLUMNS_PER_THREAD = 32
# What the runtime tunes has fewer columns, few rows are fewer, and others have a warp for
# so many columns of them (``_persistent_reduction_configs``).
TUNED_COLUMNS, FEW_ROWS, UNTUNED_COLUMNS = 256, 1024, 1024
# Registers of a thread: with these, an SM of 65536 holds 16 warps.
MAX_REGISTERS_PER_THREAD = 128
# for addresses, masks and temporaries
OTHER_REGISTERS = 28
# Tiles that are computed, beside those that are loaded.
COMPUTED_TILES = 2
# Columns beyond the row, at most, for a column in it: a persistent kernel computes
# them, a looped one only those of its last block.
MAX_PADDING = 1 / 3
# Functions that are worth computing once.
FUNCTIONS = ("exp", "exp2", "log", "sigmoid", "tanh", "erf", "rsqrt", "sqrt", "pow")


@dataclasses.dataclass(frozen=True)
class Loops:
    """
    What a reduction kernel does with a row of ``rnumel`` columns.

    streams: buffers that each column loads
    loops: over the row, if it is looped
    online_softmax: whether a loop has the maximum and the sum of exponentials
    plain: whether loops compute nothing but arithmetic, and the last alone stores
    across: whether adjacent elements of an input are of other rows
    """

    rnumel: int
    streams: int
    loops: int
    online_softmax: bool
    plain: bool = False
    across: bool = False

    def takes(self, columns: int) -> int:
        """Registers of a thread that has ``columns`` of rows."""
        return (self.streams + COMPUTED_TILES) * columns + OTHER_REGISTERS

    def is_for_runtime(self, rows: sympy.Expr) -> bool:
        """
        Whether so many short ``rows`` have the runtime's programs: it tunes those of few
        columns, has some for few rows, and a warp for 1024 columns of others, if that
        holds them.
        """
        return (
            next_power_of_2(self.rnumel) < TUNED_COLUMNS
            or not V.graph.sizevars.statically_known_geq(rows, FEW_ROWS)
            or self.takes(UNTUNED_COLUMNS // 32) <= MAX_REGISTERS_PER_THREAD
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
    return Loops(
        rnumel=int(features.reduction_numel),
        streams=row.count_per_thread - row.count_per_thread_broadcast,
        loops=len(stats.looped.memory.loop),
        online_softmax=has_online_softmax(features),
        plain=not any(loop.count_per_thread for loop in stats.looped.writes.loop[:-1])
        and not any(
            node._body.has_op(name)
            for node in features.scheduler_nodes()
            for name in FUNCTIONS
        ),
        across=reads_across_rows(features),
    )


def reads_across_rows(features: SIMDKernelFeatures) -> bool:
    """
    Whether an input has a value for each row and column, and adjacent ones are of other
    rows. A program of one row loads a sector of memory for each column of it, which those
    of the rows beside it load again.
    """
    nodes = features.scheduler_nodes()
    stored = {dep.name for node in nodes for dep in node.read_writes.writes}
    numel = features.numel * features.reduction_numel
    return any(
        isinstance(dep, MemoryDep)
        and dep.name not in stored
        and lies_across(dep)
        and V.graph.sizevars.statically_known_equals(accessed_numel(dep), numel)
        for node in nodes
        for dep in node.read_writes.reads
    )


def lies_across(dep: MemoryDep) -> bool:
    """Whether the innermost variable of ``dep`` has a stride, and another has none."""
    *others, columns = dep.ranges or (None,)
    return dep.index.coeff(columns) not in (0, 1) and any(
        dep.index.coeff(var) == 1 for var in others
    )


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
    padded = next_power_of_2(row.rnumel)
    is_long = row.rnumel > 1024  # of others upstream's persistent kernels pad any
    if is_long and row.plain and row.streams > 1 and padded == row.rnumel:
        return "a block of its loop is a row, which is cached when it is read again"
    if is_long and padded > row.rnumel * (1 + MAX_PADDING):
        return f"{row.rnumel} columns are padded to {padded}"
    if num_warps(row) is None:
        return f"{row.streams + COMPUTED_TILES} tiles take too many registers"
    return None


def num_warps(row: Loops) -> Optional[int]:
    """The fewest warps that hold the row at once; None when it is too long for any."""
    padded = next_power_of_2(row.rnumel)
    for warps in NUM_WARPS:
        columns = ceildiv(padded, warps * 32)
        if (
            columns <= COLUMNS_PER_THREAD
            and row.takes(columns) <= MAX_REGISTERS_PER_THREAD
        ):
            return warps
    return None
