"""
How many columns of its block a thread of a looped inner reduction has, and how many warps.

The runtime gives a block of 2048 columns 16 warps, a thread four of them. With more
columns a thread has less to exchange with others and fewer loads to wait for, and what is
done once a thread is done less often. Against that, with fewer warps more rows are there at a
time: there have to be as many, and where a later loop reads its row again, all of them have to
fit in the L2 cache.

An online softmax gains most. For each column of its block a loop keeps a maximum and a
sum of exponentials, and combines each element with those of its column: an exponential to
scale the smaller one by, comparisons that say which that is, and again what infinities
want. What a thread holds of a row can share a maximum. Then an element costs a
comparison, and an exponential that is added; the rest is once for all of them.

A thread loads as many adjacent columns at once as have one mask: of rows of 50257 one. So
the whole blocks of a long row have no mask, and what is left of it is a block apart. Of a split
reduction a part begins where the one before ends: its size decides what is aligned.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any, Optional, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv

from . import config
from .dependencies import MemoryDep
from .device_model import DeviceModel
from .issue_slots import count_slots
from .looped_rows import (
    FEW_ROWS,
    lasts,
    long_loop,
    LoopConfig,
    LoopedRows,
    MOST_KEPT,
    MOST_WAITED,
    MOST_WARPS,
    rows_at_once,
    RUNTIME_LOOP,
    SHORT_ROW,
    VECTOR,
)
from .mix_order_accesses import accessed_numel
from .row_accesses import (
    doubles,
    has_online_softmax,
    has_reduction,
    is_computed_again,
    ONLINE_SOFTMAX,
    reads_across_rows,
    reduction_types,
    SCANS_AND_SORTS,
    vector_columns,
)
from .runtime.hints import DeviceProperties, ReductionHint
from .runtime.launch_plan import LaunchPlan
from .runtime.runtime_utils import last_power_of_2
from .utils import sympy_product
from .vector_width import largest_divisor, VECTOR_BYTES
from .virtualized import V


if TYPE_CHECKING:
    import sympy

    from .codegen.simd import IterationRangesRoot
    from .codegen.simd_kernel_features import SIMDKernelFeatures, StatsForReadsOrWrites
    from .codegen.triton import TritonKernel


# Rows, an SM, with which programs of 16 warps leave it half empty: there the runtime's
# block, which no thread waits for, is as good.
FEWEST_ROWS = 2
# Of the L2 cache, what rows that are read again may take. A loop that is bound by what it
# computes can wait for some of them.
L2_SHARE_NARROW, L2_SHARE = 1.3, 0.8
# What a loop loads and stores of a column, at most: no loops with more were measured.
MAX_ACCESSES = 6
# Columns of the runtime's block: the compiler sees that no mask is needed where it divides
# a row. Of a row longer than two of them most is in whole blocks.
BLOCK = 2048
# The smallest of its other blocks, and how many of them LLVM unrolls.
SMALL_BLOCK, UNROLLED = 1024, 8
# Of long rows, columns of a thread of an online softmax, and the share of an SM's warps that
# its programs have, as registers allow: of few rows, those of each share them.
LONG_COLUMNS, LONG_WARPS_SHARE = 16, 3 / 4
# With fewer, a row waits for its loads, and half the columns and twice the warps take as long.
LEAST_WARPS = 8
# Blocks of such a row: with fewer, what the last one masks is as much as others wait.
LEAST_BLOCKS = 3
# What the last block may mask, as a share of the row.
MOST_MASKED = 1 / 16
# Columns of a row that is loaded one at a time, up to which more than one of its loops find
# some of it in the L2 cache.
MOST_UNALIGNED = 65536
# Of wide types, and of few rows.
OF_16_WARPS = LoopConfig(8, 16)
# Of few rows that read more than ``MOST_KEPT`` tensors again, and begin within a vector: the
# registers of a thread leave an SM 16 to 32 warps, whose rows end sooner if they are of one.
OF_32_WARPS = LoopConfig(8, 32)
# Of rows that are loaded as half types in vectors and stored as float32: the columns of a thread
# are those that it stores at once, and of more a warp's stores have gaps.
OF_ONE_STORE = LoopConfig(4, 16)
# Rows of full precision, an SM, of which 32 warps are no better than the runtime's 16.
SUM_ROWS = 16
# Of programs of 32 warps, by how much longer they may take for what the last wave lacks, and,
# where they take longer, what share of the runtime's programs' time.
LAST_WAVE, SHORTER = 1.25, 0.8
# Columns that a thread loads at once.
ONE_LOAD = VECTOR_BYTES // 2
# Columns of a row that takes two blocks of programs of four warps at most, or four of eight
# warps: longer ones, and those of wider types, are as often slower with fewer warps.
SHORT_COLUMNS = 4096
# Of pointwise kernels: as many columns as a thread loads at once of a half type, in the block
# that the runtime gives a loop.
ROW_LOOP = LoopConfig(columns_per_thread=8, num_warps=8)
# Columns of a row of one tensor that one loop reads, at most: as many columns in half of the
# runtime's 16 warps wait less, but of a second block that is half full. Of one that has no
# vectors, those of a block.
ONE_LOOP_COLUMNS = 5120


@dataclasses.dataclass(frozen=True)
class SharedMaxima:
    """
    How the columns of a thread share a maximum in an online softmax.

    They are those that are a thread's already: as many adjacent columns as it loads at
    once, a ``vector``, and the same a number of times, as far apart as all threads load.
    Any other choice exchanges values between threads in each iteration. ``loop`` is with
    how many they are a thread's.
    """

    vector: int
    loop: LoopConfig

    @classmethod
    def of(cls, kernel: TritonKernel) -> Optional[SharedMaxima]:
        """Of a kernel with an online softmax; None where each column has its own maximum."""
        features = kernel.features
        if not config.triton.online_softmax_share_maxima or not is_plain_inner_loop(kernel):
            return None
        loop = V.choices.loop_config(features)
        vector = vector_columns(features)
        if loop is None or not vector:
            return None
        if not peels_last_block(kernel):
            vector = largest_divisor(features.reduction_numel, vector)
        return cls(min(vector, loop.columns_per_thread), loop)

    def accumulator_size(self, kernel: TritonKernel) -> str:
        """The shape of an accumulator of which a thread has one column."""
        columns = self.loop.columns_per_thread
        rows, block = kernel.dense_size_list()
        return f"[{rows}, {block} // {columns} if {block} > {columns} else 1]"


def is_plain_inner_loop(kernel: TritonKernel) -> bool:
    """Whether ``kernel`` is a loop over rows whose warps are not for others to decide."""
    features = kernel.features
    hint = features.get_reduction_hint(kernel.tiling_scores)
    return (
        hint == ReductionHint.INNER
        and len(kernel.dense_size_list()) == 2
        and not kernel.persistent_reduction
        and not kernel.cooperative_reduction
        and not kernel.is_combo_kernel
        and not any(map(features.contains_op, SCANS_AND_SORTS))
        and not reads_across_rows(features)
    )


def peels_last_block(kernel: TritonKernel) -> bool:
    """
    Whether ``kernel`` loops over the whole blocks of long rows, and has the rest of a row
    as a block of its own, which alone is masked.
    """
    columns = kernel.features.reduction_numel
    return (
        is_plain_inner_loop(kernel)
        and not (config.triton.use_block_ptr or config.triton.use_tensor_descriptor)
        and columns.is_Integer
        and int(columns) > 2 * BLOCK
        and int(columns) % BLOCK != 0
        and not any(
            kernel._has_constant_mask(tree)
            for tree in kernel.range_trees
            if tree.is_loop
        )
        and gains_without_a_mask(kernel.features)
    )


def gains_without_a_mask(features: SIMDKernelFeatures) -> bool:
    """
    Of a loop over rows. Where each column is loaded by itself with or without a mask, an
    online softmax gains, and loops that load their rows again: both are bound by their
    instructions. Beside a type of eight bytes the latter wait for memory, and lose. So does a
    Welford loop of which LLVM unrolls the whole blocks, and would not all of them: its registers
    are of twice as many warps.

    Where vectors are loaded, a Welford loop gains where a mask would take them apart. Else it
    loses: without a mask its weights depend on nothing that is loaded, so Triton gives them
    a layout of their own, and converts them for what is left of the row.
    """
    columns, vector = features.reduction_numel, vector_columns(features)
    if has_online_softmax(features):
        return True
    if vector == 1:
        row = looped_rows(features)
        blocks = row.columns / SMALL_BLOCK
        is_unrolled = row.welford and UNROLLED < blocks < UNROLLED + 1
        return row.read_again > 0 and row.widest < 8 and not is_unrolled
    return vector > 1 and (
        largest_divisor(columns, vector) < vector
        or not has_reduction(features, "welford_reduce", "welford_combine")
    )


# whose loop over whole blocks is being written
_in_whole_blocks: weakref.WeakSet[TritonKernel] = weakref.WeakSet()


def whole_blocks(tree: IterationRangesRoot) -> str:
    """The line that says where the whole blocks of a row end."""
    block = f"{tree.prefix.upper()}BLOCK"
    return (
        f"{tree.prefix.upper()}WHOLE: tl.constexpr = {tree.numel} // {block} * {block}"
    )


def begin_whole_blocks(kernel: TritonKernel) -> bool:
    """Whether the loop of ``kernel`` that begins is over the whole blocks of a row."""
    begins = peels_last_block(kernel)
    if begins:
        _in_whole_blocks.add(kernel)
    return begins


def in_whole_blocks(kernel: TritonKernel, tree: IterationRangesRoot) -> bool:
    """Whether the loop over ``tree`` that is written is over the whole blocks of a row."""
    return tree.is_loop and kernel in _in_whole_blocks


def end_whole_blocks(kernel: TritonKernel) -> None:
    """Write what is left of a row, if anything is, after a loop over its whole blocks."""
    if kernel not in _in_whole_blocks:
        return
    _in_whole_blocks.discard(kernel)
    (tree,) = (tree for tree in kernel.range_trees if tree.is_loop)
    whole = f"{tree.prefix.upper()}WHOLE"
    kernel.body.writeline(f"if {whole} < {tree.numel}:")
    with kernel.body.indent():
        kernel.body.writeline(f"{tree.prefix}offset = {whole}")
        kernel.iteration_ranges_codegen_header(tree, kernel.body)
        kernel.codegen_reduction_indices(kernel.body)
        for code in (kernel.indexing_code, kernel.loads, kernel.compute, kernel.stores):
            kernel.body.splice(code)


def part_elements(
    reduction_numel: sympy.Expr, split: int, hint: ReductionHint
) -> sympy.Expr:
    """
    Of a reduction of ``reduction_numel`` elements that is split into ``split`` parts, those
    of each. Where the last part has fewer, they are so many that each begins at a vector
    of a half type if the first one does, and the last one has what is left.

    An odd ``reduction_numel`` has no vectors: what is masked of the last part is at the
    remainder by it, which begins anywhere.
    """
    part = FloorDiv(reduction_numel + (split - 1), split)
    if (
        hint != ReductionHint.INNER
        or not part.is_Integer
        or reduction_numel % split == 0
        or reduction_numel % 2 != 0
    ):
        return part
    return part + -part % (VECTOR_BYTES // 2)


def column_slots(features: SIMDKernelFeatures) -> int:
    """Issue slots of a column, of all nodes that have one value for each."""
    numel = features.numel * features.reduction_numel
    return sum(
        count_slots(node._body, features.reduction_numel).slots  # type: ignore[arg-type]
        for node in features.scheduler_nodes()
        if sympy_product(node.group[1]) == numel
    )


def of_elements(stats: StatsForReadsOrWrites) -> tuple[int, int]:
    """The accesses of a loop, and their bytes, to what has one value for a row and column."""
    rows, columns = stats.dim[0], stats.dim[-1]
    return (
        columns.count_per_thread
        - columns.count_per_thread_broadcast
        - rows.count_per_thread_broadcast,
        columns.bytes_per_thread
        - columns.bytes_per_thread_broadcast
        - rows.bytes_per_thread_broadcast,
    )


def looped_rows(features: SIMDKernelFeatures) -> LoopedRows:
    """Of a kernel with one reduction dimension."""
    sizevars = V.graph.sizevars
    rows, columns = (
        sizevars.optimization_hint(size, fallback=0)
        for size in (features.numel, features.reduction_numel)
    )
    stats = features.memory_stats()
    loops = stats.looped
    of_columns = loops.memory.dim[-1]
    # without what has one value for a row
    all_accesses = of_columns.count_per_thread - of_columns.count_per_thread_broadcast
    again_count, again_bytes = (
        looped - once
        for looped, once in zip(
            of_elements(loops.reads), of_elements(stats.persistent.reads)
        )
    )
    itemsizes = [
        V.graph.get_dtype(name).itemsize
        for name, deps in features.buf_accesses().items()
        if any(
            isinstance(dep, MemoryDep)
            and sizevars.optimization_hint(accessed_numel(dep), fallback=0)
            > 2 * max(rows, columns)
            for dep in deps
        )
    ]
    words = sizevars.statically_known_multiple_of(features.reduction_numel, 4)
    return LoopedRows(
        rows=rows,
        columns=columns,
        read_again=again_bytes,
        narrow=all(size == 2 or (size == 1 and words) for size in itemsizes),
        accesses=min(
            max((loop.count_per_thread for loop in loops.memory.loop), default=0),
            all_accesses,
        ),
        loops=max(sum(loop.count_per_thread > 0 for loop in loops.reads.loop), 1),
        moved=sizevars.optimization_hint(
            sum(
                each.bytes_contiguous_or_broadcast + each.bytes_non_contiguous
                for each in (stats.persistent.reads, stats.persistent.writes)
            ),
            fallback=0,
        ),
        all_accesses=all_accesses,
        vector=max(vector_columns(features), 1),
        slots=column_slots(features) if columns > SHORT_ROW else 0,
        kept=again_count,
        widest=max(itemsizes, default=1),
        online=has_online_softmax(features),
        alone=reduction_types(features) == OrderedSet([ONLINE_SOFTMAX]),
        welford=has_reduction(features, "welford_reduce", "welford_combine"),
        doubles=doubles(features),
        again=is_computed_again(features),
    )


def online_softmax_config(row: LoopedRows, device: DeviceModel) -> Optional[LoopConfig]:
    """
    Of a loop with an online softmax; None where the runtime decides, and each column has
    a maximum of its own.
    """
    is_long = row.columns > SHORT_ROW
    if row.rows < FEW_ROWS * device.sms:
        if is_long and row.kept > MOST_KEPT and row.vector < ONE_LOAD:
            return OF_32_WARPS
        if is_long and row.narrow:
            return few_rows_config(row, device)
        enough = row.narrow and row.rows >= FEWEST_ROWS * device.sms
        return OF_16_WARPS if enough else None
    if is_long and row.loops == 1 and (found := one_loop_config(row)):
        return found
    if row.vector * row.widest > VECTOR_BYTES:
        return OF_ONE_STORE
    share = L2_SHARE_NARROW if row.narrow else L2_SHARE
    cached = share * device.l2_bytes
    for each in (LoopConfig(16, 4), LoopConfig(8, 8)):
        rows = min(row.rows, device.sms * device.warps_per_sm // each.num_warps)
        if rows * row.columns * row.read_again <= cached:
            return each
    return LoopConfig(8, 8) if row.narrow else None


def one_loop_config(row: LoopedRows) -> Optional[LoopConfig]:
    """Of many long rows that are read once; None of those that others are as good for."""
    if not row.narrow:
        return OF_16_WARPS if OF_16_WARPS.masked(row.columns) <= MOST_MASKED else None
    # what else a thread keeps of a column takes registers of as many warps
    alone = row.accesses == 1 and row.alone
    found = LoopConfig(LONG_COLUMNS, 16 if alone else LEAST_WARPS)
    if row.vector >= ONE_LOAD:
        return found
    one = row.accesses == 1 and found.masked(row.columns) <= MOST_MASKED
    return found if one else None


def few_rows_config(row: LoopedRows, device: DeviceModel) -> Optional[LoopConfig]:
    """
    Of long rows of half types, so that all that an SM has are there at a time, if they are
    read once.
    """
    rows = math.ceil(row.rows / device.sms)
    warps = max(min(int(LONG_WARPS_SHARE * device.warps_per_sm) // rows, MOST_WARPS), 1)
    found = LoopConfig(LONG_COLUMNS, last_power_of_2(warps))
    is_long = row.columns >= LEAST_BLOCKS * found.block
    if rows == 1:
        return found if is_long else None
    if warps < LEAST_WARPS or row.loops > 1 or not is_long:
        return OF_16_WARPS
    return found


def wide_rows_config(row: LoopedRows, device: DeviceModel) -> Optional[LoopConfig]:
    """
    Of long rows of wide types, where no loop is predicted to be better than the runtime's.
    That is as good where it has as many rows at a time in vectors, and for rows that are
    loaded a column at a time, and again from memory.
    """
    few = row.rows < FEW_ROWS * device.sms
    if (
        row.columns <= SHORT_ROW
        or row.rows <= device.sms
        or not (few or row.kept > MOST_KEPT or row.vector == 1)
        or (row.vector == 1 and row.columns > MOST_UNALIGNED)
        or OF_16_WARPS.masked(row.columns) > 2 * MOST_MASKED
    ):
        return None
    return OF_16_WARPS


def sum_loop_config(row: LoopedRows, device: DeviceModel) -> Optional[LoopConfig]:
    """
    Of few long rows that are read once, by whole vectors of one type, as the parts of a sum
    of all elements are: a vector a thread, and half as many programs of 32 warps as an SM
    has of 16. None of other rows, and where those do not fill an SM, or do not end together
    and lack no less of their last wave than the runtime's.
    """
    waves = row.rows / rows_at_once(device)
    is_wide = row.vector == VECTOR
    if (
        row.columns <= SHORT_ROW
        or row.rows >= (SUM_ROWS if is_wide else FEW_ROWS) * device.sms
        or device.warps_per_sm % MOST_WARPS > 0
        or waves <= 1
        or row.loops > 1
        or row.online
        or row.welford
        or row.doubles > 0
        or row.widest not in (2, 4)
        or row.vector != VECTOR_BYTES // row.widest
    ):
        return None
    # of one tensor without a mask, more blocks of half vectors are in flight
    is_whole = row.accesses == 1 and RUNTIME_LOOP.masked(row.columns) == 0
    columns = VECTOR if is_whole else row.vector
    # of two tensors ptxas takes a few registers more than a second program leaves; of one it
    # does not, and of more, or of eight columns, it cannot do with fewer
    is_told = columns == VECTOR and row.accesses == 2
    told = device.warps_per_sm // MOST_WARPS if is_told else 0
    loop = LoopConfig(columns, MOST_WARPS, told)
    masked = loop.masked(row.columns)
    if math.ceil(waves) <= LAST_WAVE * waves and masked <= (0 if is_whole else MOST_WAITED):
        return loop
    usual = lasts(row, RUNTIME_LOOP, device)
    is_shorter = lasts(row, loop, device) <= SHORTER * usual
    return loop if is_shorter and (is_wide or masked <= MOST_WAITED) else None


def short_loop_config(row: LoopedRows, device: DeviceModel) -> Optional[LoopConfig]:
    """
    Of loops over rows of half types; None where the runtime decides, as of a longer row that
    is read once: its block of 4096 columns has all of them in flight.
    """
    if not row.narrow or row.rows < FEW_ROWS * device.sms:
        return None
    if row.loops == 1 and row.accesses == 1:
        most = SHORT_COLUMNS if row.vector < VECTOR else ONE_LOOP_COLUMNS
        return LoopConfig(16, 8) if row.columns <= most else None
    if row.loops == 1:
        return LoopConfig(8, 8) if row.columns <= BLOCK else None
    if row.columns <= SHORT_COLUMNS:
        return LoopConfig(16, 4)
    return LoopConfig(8, 8) if row.columns <= 2 * SHORT_COLUMNS else None


def loop_over_rows(features: SIMDKernelFeatures) -> Optional[LoopConfig]:
    """
    Of a looped inner reduction, or of a pointwise kernel that loops over rows; None where
    the runtime decides.
    """
    if not features.reduction_nodes():
        return ROW_LOOP
    properties = DeviceProperties.create(V.graph.get_current_device_or_throw())
    if properties.type != "cuda":
        return None
    row, device = looped_rows(features), DeviceModel.of(properties)
    if row.rows == 0 or row.accesses > MAX_ACCESSES:  # of no rows not even a hint is known
        return None
    decide = online_softmax_config if row.online else short_loop_config
    found = sum_loop_config(row, device) or long_loop(row, decide(row, device), device)
    if found is None and row.online and not row.narrow:
        return wide_rows_config(row, device)
    return found


def loop_config(kernel: TritonKernel) -> Optional[LoopConfig]:
    """Of any kernel; None where the runtime decides."""
    if has_online_softmax(kernel.features):
        shared = SharedMaxima.of(kernel)
        return shared.loop if shared else None
    if is_plain_inner_loop(kernel) and not kernel.features.reduction_numel.free_symbols:
        return V.choices.loop_config(kernel.features)
    return None


def add_loop_plan(kernel: TritonKernel, inductor_meta: dict[str, Any]) -> None:
    """Tell the runtime of the loop of an inner reduction."""
    if kernel.inside_reduction and (loop := loop_config(kernel)):
        LaunchPlan(
            loop=(loop.columns_per_thread, loop.num_warps),
            sharing_programs=loop.sharing_programs,
        ).add_to(inductor_meta)
