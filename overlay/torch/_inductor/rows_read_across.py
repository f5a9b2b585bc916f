"""
Rows that are read across, and programs of several of them.

Where adjacent elements of an input are of adjacent rows, as of a transposed bias, or each column
is gathered from a row of its own, the columns of a row are each in another sector of memory. A
program of one row loads a sector for every column, of which it uses an element. Those of the rows
beside it are in the same sectors: a program of several rows loads each once.

A loop has as many rows, of which it holds a few columns at a time. What lies along the rows, as a
tensor that is added or the result, it accesses in pieces as short. So where something does, such
rows are held. Where all lies across, loops are as good, as long as there are rows for all SMs: few
rows are split by lowering, in up to five kernels, and are better held by one.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch.utils._ordered_set import OrderedSet

from . import config, ir
from .device_model import DeviceModel
from .mix_order_accesses import accessed_numel
from .repeated_passes import Again, computes_functions
from .row_accesses import (
    HALF_BYTES,
    has_reduction,
    is_of_rows,
    is_read_both_ways,
    lies_across,
    loaded,
    moves_along_rows,
    SCANS_AND_SORTS,
    WORD_BYTES,
)
from .row_program import RowProgram, UPSTREAM_COLUMNS
from .runtime.hints import DeviceProperties
from .runtime.registers import (
    MAX_REGISTERS_PER_THREAD,
    OTHER_REGISTERS,
    THREADS_PER_WARP,
)
from .runtime.runtime_utils import ceildiv, last_power_of_2, next_power_of_2
from .vector_width import aligned_columns
from .virtualized import V
from .unsplit_rows import is_elementwise, numel_hint, tensors_of


if TYPE_CHECKING:
    from collections.abc import Callable

    from .codegen.simd_kernel_features import SIMDKernelFeatures
    from .dependencies import MemoryDep


# Rows of such a program, at most: those of a sector of float32. Where all of the rows' elements
# lie across, those of a sector of half types; and of words too, as long as the rows are short.
ROWS, MANY_ROWS, SHORT_ACROSS = 8, 16, 512
# With fewer, loops are as good.
LEAST_ROWS = 4
# Columns of a row that a thread has, the most that its registers have room for.
HELD_PER_THREAD = (64, 32)
# Warps, at least; one has twice the columns, or half of the rows. Of ``MANY_ROWS``.
LEAST_WARPS, LEAST_WARPS_OF_MANY = 2, 4
# Programs of an SM, of which each has its share of the registers for what it loads.
PROGRAMS_PER_SM = 2
# Adjacent rows that a thread loads at once, at least, where it keeps to such a share: with fewer,
# what it has for addresses would be spilled.
SHARING_VECTOR = 4
# Accesses across the rows for one along them, at most, where rows are better held than looped.
MOST_ACROSS = 4
SCANS = (
    *(torch.ops.aten.cumsum.default, torch.ops.aten.cumprod.default),
    *(torch.ops.aten.cummax.default, torch.ops.aten.cummin.default),
    torch.ops.aten.logcumsumexp.default,
)
# Rows of an SM from which on lowering splits none that are read across (``Reduction.num_splits``).
UNSPLIT_ROWS_PER_SM = 2 * 32
# Columns up to which it splits none (``InductorChoices.reduction_split_factor``).
UNSPLIT_COLUMNS = 4 * 32


@dataclasses.dataclass(frozen=True)
class Across:
    """What is loaded of each row and column, and lies across the rows."""

    loads: tuple[MemoryDep, ...]

    @classmethod
    def of(cls, features: SIMDKernelFeatures) -> Across:
        return cls(
            tuple(
                dep
                for dep in loaded(features)
                if not dep.is_indirect()
                and is_of_rows(features, dep)
                and lies_across(features, dep)
            )
        )

    def __bool__(self) -> bool:
        return bool(self.loads)

    @property
    def vector(self) -> int:
        """Adjacent rows that a thread loads at once, of all of it."""
        return min(map(aligned_columns, self.loads))

    @property
    def is_half(self) -> bool:
        return all(itemsize(dep) <= HALF_BYTES for dep in self.loads)

    def is_in_few_sets(self, device: DeviceModel) -> bool:
        """Whether it is several tensors, of which the columns are in the same sets of the cache."""
        apart = device.set_stride_bytes
        return len(OrderedSet(dep.name for dep in self.loads)) > 1 and all(
            aligned_columns(dep, apart) * itemsize(dep) == apart for dep in self.loads
        )


def itemsize(dep: MemoryDep) -> int:
    return V.graph.get_dtype(dep.name).itemsize


def is_held_across(features: SIMDKernelFeatures) -> bool:
    """
    Whether a kernel of rows that are read across is inner all the same: something lies along
    the rows as well, or they are few. Of up to ``UPSTREAM_COLUMNS``, or of any length if no
    less lies along than across.
    """
    scores, sizevars = features.tiling_scores, V.graph.sizevars
    if not scores or scores.keys() != {"x", "r0_"}:
        return False
    is_both_ways = is_read_both_ways(features)
    if not is_both_ways and not sizevars.statically_known_leq(
        features.reduction_numel, UPSTREAM_COLUMNS
    ):
        return False
    across = Across.of(features)
    if not across or (program := rows_together(features, across)) is None:
        return is_both_ways
    device = DeviceModel.of(DeviceProperties.create(V.graph.get_current_device_or_throw()))
    rows = sizevars.optimization_hint(features.numel)
    may_be_split = sizevars.statically_known_geq(features.reduction_numel, UNSPLIT_COLUMNS + 1)
    if may_be_split and rows < UNSPLIT_ROWS_PER_SM * device.sms:
        return True
    lies_along = is_both_ways or MOST_ACROSS * scores["r0_"] >= scores["x"]
    return lies_along and not is_looped_as_fast(
        features, program, across, is_both_ways, device
    )


def is_looped_as_fast(
    features: SIMDKernelFeatures,
    program: RowProgram,
    across: Across,
    is_both_ways: bool,
    device: DeviceModel,
) -> bool:
    """
    Whether a loop is as fast as ``program``: of long rows of several tensors of half types, whose
    columns are in the same sets of the cache; and where most lies across, of words that a thread
    loads one at a time, or half types of which a program would not have a sector's rows.
    """
    columns, sizevars = features.reduction_numel, V.graph.sizevars
    if computes_functions(features) or sizevars.statically_known_leq(columns, SHORT_ACROSS):
        return False
    is_half, is_odd = across.is_half, across.vector == 1
    if not is_both_ways and (is_odd if not is_half else program.rows < MANY_ROWS and not is_odd):
        return True
    return is_half and across.is_in_few_sets(device)


def rows_together(
    features: SIMDKernelFeatures, across: Optional[Across] = None
) -> Optional[RowProgram]:
    """
    The program of rows, which are read across. None where one would not hold several, where there
    are too few for all SMs, and where a kernel scatters: its atomic additions to one sector wait
    for one another. Of a sort or a scan neither.
    """
    columns, rows = features.reduction_numel, features.numel
    device = DeviceProperties.create(V.graph.get_current_device_or_throw())
    if columns.free_symbols or device.type != "cuda":
        return None
    model = DeviceModel.of(device)
    across = Across.of(features) if across is None else across
    count = V.graph.sizevars.optimization_hint(rows)
    if count < ROWS * model.sms or scatters(features):
        return None
    if any(map(features.contains_op, SCANS_AND_SORTS)):
        return None
    padded, words = next_power_of_2(int(columns)), words_of_column(features)
    if count >= MANY_ROWS * model.sms and (
        program := many_rows(features, across, padded, words)
    ):
        return program
    together = min(ROWS, model.registers_per_sm // (PROGRAMS_PER_SM * words * padded))
    held = [n for n in HELD_PER_THREAD if n * words <= MAX_REGISTERS_PER_THREAD]
    if together < LEAST_ROWS or not held:
        return None
    together = last_power_of_2(together)
    warps = together * padded // (held[0] * THREADS_PER_WARP)
    return RowProgram(together, max(LEAST_WARPS, warps))


def many_rows(
    features: SIMDKernelFeatures, across: Across, padded: int, words: float
) -> Optional[RowProgram]:
    """
    The program of ``MANY_ROWS`` of so many ``padded`` columns, of which each loads ``words``;
    None where ``ROWS`` are as good.
    """
    if not across or padded > UPSTREAM_COLUMNS:
        return None
    is_short = padded <= SHORT_ACROSS
    if not is_short and (not across.is_half or across.vector == 1):
        return None
    # what is loaded, and what is live at a reduction beside a tile of that, or two of short rows
    words += max(0, Again.of(features).tiles - (2 if is_short else 1))
    held = [
        n for n in HELD_PER_THREAD if n * words + OTHER_REGISTERS <= MAX_REGISTERS_PER_THREAD
    ]
    if not held or (held[0] < HELD_PER_THREAD[0] and not is_short):
        return None
    warps = MANY_ROWS * padded // (held[0] * THREADS_PER_WARP)
    shares = not is_short and across.vector >= SHARING_VECTOR
    return RowProgram(
        MANY_ROWS,
        max(LEAST_WARPS_OF_MANY, warps),
        sharing_programs=PROGRAMS_PER_SM if shares else 0,
    )


def leaves_rows_whole_across(device: DeviceProperties, rows: int, columns: int) -> bool:
    """
    Whether ``rows`` of so many ``columns`` that the current node reduces, both static or as hinted,
    and reads across, are not split for their small number: what is made of each row is then in
    one kernel with its reductions, of which a program holds several.

    Long rows are, where a thread would load one at a time: its addresses leave no registers. So
    are those to which something is added that lies otherwise, and those of symbolic sizes.
    """
    node = V.graph.current_node
    return (
        device.type == "cuda"
        and node is not None
        and rows >= MANY_ROWS * DeviceModel.of(device).sms
        and columns <= UPSTREAM_COLUMNS < config.triton.persistent_reduction_max_numel
        and may_hold_rows()
        and node.target not in SCANS
        and is_used_in_its_kernel(node, rows * columns)
        and lies_one_way(node, rows * columns, columns > SHORT_ACROSS)
    )


def may_hold_rows() -> bool:
    """Whether no knob says otherwise of all kernels."""
    triton = config.triton
    return (
        triton.persistent_reductions
        and triton.coalesce_tiling_analysis
        and not triton.prefer_nd_tiling
        and not triton.force_cooperative_reductions
        and not triton.multi_kernel
        and not config.combo_kernels
    )


def is_used_in_its_kernel(node: torch.fx.Node, elements: int) -> bool:
    """
    Whether what ``node`` reduces is used for as many ``elements``, before another kernel or
    another reduction.
    """
    nodes, seen = [node], OrderedSet([node])
    for each in nodes:
        for user in each.users:
            if user in seen or not is_elementwise(user):
                continue
            if numel_hint(user.meta.get("val")) >= elements:
                return True
            seen.add(user)
            nodes.append(user)
    return False


def unless_left_whole(split_factor: Callable[..., int]) -> Callable[..., int]:
    """``InductorChoices.reduction_split_factor``, and 1 where ``leaves_rows_whole_across``."""
    signature = inspect.signature(split_factor)

    @functools.wraps(split_factor)
    def decided(*args: Any, **kwargs: Any) -> int:
        given = signature.bind(*args, **kwargs).arguments
        device = DeviceProperties.create(given["device"])
        sizes = given["numel_hint"], given["reduction_numel_hint"]
        if not given["inner_reduction"] and leaves_rows_whole_across(device, *sizes):
            return 1
        return split_factor(*args, **kwargs)

    return decided


def lies_one_way(node: torch.fx.Node, elements: int, is_long: bool) -> bool:
    """
    Whether all of so many ``elements`` that the input of ``node`` is made of have the same
    strides, which are known, as their sizes; of long rows none that is odd.
    """
    values = [each.meta["val"] for each in tensors_of(node, elements)]
    if any(not isinstance(n, int) for value in values for n in (*value.shape, *value.stride())):
        return False
    found = OrderedSet(tuple(value.stride()) for value in values)
    is_odd = any(stride % 2 and stride > 1 for strides in found for stride in strides)
    return len(found) == 1 and not (is_long and is_odd)


def scatters(features: SIMDKernelFeatures) -> bool:
    return any(
        isinstance(node.node, ir.ComputedBuffer) and isinstance(node.node.data, ir.Scatter)
        for node in features.scheduler_nodes()
    )


def words_of_column(features: SIMDKernelFeatures) -> int:
    """
    32-bit words that are loaded for a column, but for what all rows share; and one of what
    Welford's algorithm is computed of, which is kept for the deviations from its mean.
    """
    columns = features.reduction_numel
    words = int(has_reduction(features, "welford_reduce"))
    for dep in dict.fromkeys(loaded(features)):
        if dep.is_indirect() or (
            moves_along_rows(features, dep)
            and V.graph.sizevars.statically_known_gt(accessed_numel(dep), columns)
        ):
            words += ceildiv(itemsize(dep), WORD_BYTES)
    return max(1, words)  # of rows that are not known to be several, or computed of no tensor
