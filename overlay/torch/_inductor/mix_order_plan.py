"""
What the mix-order kernel of a fusion candidate is: one plan, made of its nodes.

- ``row_cost`` (``mix_order_row_cost``): what a row costs, from the nodes of both sides.
- ``V.choices.mix_order_row_split`` (``mix_order_choices``): the number of programs, and what
  each does at once. It calls ``row_split`` (``mix_order_row_split``) for the tile, the warps,
  the stages, how rows are loaded and how many programs an SM has (``programs_per_sm``). Their
  number is ``count_programs``: one a tile, and ``programs_per_sm`` an SM at most; then, unless the
  caller gives ``programs_per_sm``, ``fewer_programs``: a half or a quarter, where few rows make
  the final reduction take longer (both in ``mix_order_program_count``). The choice can be
  overridden, and applies where ``splits_rows``: on CUDA, without a split size of the user's.
- ``pressure`` (``mix_order_pressure``): the registers of a thread.

Legality's last word (``mix_order_spills``) and profit (``mix_order_profit``) ask for it. So
does codegen (``codegen/mix_order.split_rows``), whose kernel may have more nodes than the
candidate: it takes over what the plan found of the registers, and asks for the split of what
was fused. ``RowSplit.launch_plan`` is what travels to the runtime.

SMs, registers and bandwidth of another GPU come from the device. For what its architecture
has, and what is fitted to its time, add an instance to ``ARCHITECTURES`` in
``device_model.py``, one a compute capability: each number has a unit and a source.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Optional, TYPE_CHECKING

import torch
from torch.utils._ordered_set import OrderedSet

from . import config
from .dependencies import MemoryDep
from .device_model import DeviceModel
from .mix_order_accesses import domain
from .mix_order_debug import debug_options
from .mix_order_pressure import LaunchConfig, Pressure, pressure
from .mix_order_program_count import predicted_us, static_rows
from .mix_order_row_cost import row_cost, RowCost
from .mix_order_row_loop import RowSplit, splits_rows
from .mix_order_trace import Op, Trace
from .runtime.hints import DeviceProperties
from .runtime.registers import THREADS_PER_WARP
from .runtime.runtime_utils import next_power_of_2
from .utils import get_dtype_size
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    import sympy

    from .scheduler import BaseSchedulerNode, SchedulerNode


fusion_log = torch._logging.getArtifactLogger(__name__, "fusion")
# Of the registers that a thread may have: a row of half types is kept, not loaded twice, if
# it lacks so many less.
KEPT_LACKING_LESS = 0.05
# Bytes that a program may spill, at most, for each that fusion need not read again. What is
# spilled is in a cache. Of norms' backwards that keep their rows, on an H200, four lack
# less than half a byte: they take 0.74 to 1.40 times as long as two kernels. Of 11 that
# lack more than 2.4 nine take longer, up to 5.7 times as long.
MAX_SPILLED_SHARE = 2
# Where rows are loaded twice.
MAX_SPILLED_TWICE_SHARE = 1.2
# Of rows whose elements are loaded one at a time, and kept: norms of 14001 columns lack
# 0.85, and take 0.85 times as long as two kernels; those of 15001 lack 0.92, and take 1.05
# to 1.14 times as long.
MAX_SPILLED_APART_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class MixOrderPlan:
    """
    The mix-order kernel of the nodes of two sides.

    cost: of a row
    split: the number of programs, and the rows, the warps, the stages and the loads of each
    ops: what the kernel computes, in order
    registers: of a thread, predicted for each configuration that the kernel would be launched
        in. These and the operations are left empty for profit, which asks for neither
    why: rows are loaded once or twice, for this reason; `split.why` has the other reasons
    us: what the kernel and the sums of its partials are predicted to take; None for a dynamic
        number of rows
    refusals: what ``mix_order_spills`` said of it, by whether it absorbs a node: a cache, so
        that it is asked once of each plan
    """

    cost: RowCost
    split: RowSplit
    ops: tuple[Op, ...]
    registers: tuple[Pressure, ...]
    why: str
    us: Optional[float] = None
    refusals: dict[bool, Optional[str]] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        contiguous: Sequence[SchedulerNode],
        other: Sequence[SchedulerNode],
        keeps_rows: bool = True,
    ) -> MixOrderPlan:
        """
        Of a fusion candidate, whose rows are those that ``contiguous`` reduces. It is made
        once, and again only where a node has other loops since.

        Rows that do not fit in registers are kept, not loaded twice, where that is predicted
        to lack no registers, or clearly fewer. Where two programs of one row an SM would spill
        too much, one of two rows has it to itself (``RowCost.pairs_rows``). ``keeps_rows`` is
        False for profit alone: its estimates were fitted to programs that load such rows twice.
        """
        nodes = (*contiguous, *other)
        plans = _plans.setdefault(contiguous[0].scheduler, {})
        sides = (tuple(n.get_name() for n in side) for side in (contiguous, other))
        key = (keeps_rows, *sides)
        accesses = [node.read_writes for node in nodes]
        known, plan = plans.get(key, ([], None))
        if plan is None or any(a is not b for a, b in zip(known, accesses)):
            plan = cls._make(contiguous, other, keeps_rows)._timed(contiguous)
            fusion_log.debug("mix-order plan of %s and %s: %s", *key[1:], plan)
            plans[key] = accesses, plan
        return plan

    @classmethod
    def _make(
        cls,
        contiguous: Sequence[SchedulerNode],
        other: Sequence[SchedulerNode],
        keeps_rows: bool,
    ) -> MixOrderPlan:
        rows, columns = reduced_numels(contiguous)
        rblock = next_power_of_2(V.graph.sizevars.optimization_hint(columns))
        cost = row_cost(contiguous, other, rows, columns, rblock)
        device = DeviceProperties.create(contiguous[0].get_device())
        split = V.choices.mix_order_row_split(cost, rows, device)
        if not keeps_rows:
            return cls(cost, split, (), (), "rows that do not fit are loaded twice")
        ops = Trace.of(rows, contiguous, other)
        found = predicted(split, contiguous, ops)
        plan = cls(cost, split, ops, found, "rows fit in registers, or nearly")
        if not split.reload:
            if not plan.spills_too_much(contiguous, other):
                return plan
            pairing = dataclasses.replace(cost, pairs_rows=True)
            pairs = V.choices.mix_order_row_split(pairing, rows, device)
            if pairs == split or pairs.reload:
                return plan
            lacks = lacking(found)
            why = f"two programs of one row lack {lacks:.2f} of the registers"
            paired = cls(pairing, pairs, ops, predicted(pairs, contiguous, ops), why)
            smaller = paired.of_fewer_rows(contiguous) or paired
            least = min(lacking(each.registers) for each in (paired, smaller))
            return plan if least >= lacks else paired
        keeping = dataclasses.replace(cost, keeps_rows=True)
        kept = V.choices.mix_order_row_split(keeping, rows, device)
        if kept.reload:
            return cls(cost, split, ops, found, "rows are too long to be kept")
        kept_found = predicted(kept, contiguous, ops)
        kept_lacks, lacks = lacking(kept_found), lacking(found)
        why = f"lacks {kept_lacks:.2f} of the registers kept, and {lacks:.2f} loaded twice"
        if kept_lacks > max(0, lacks - KEPT_LACKING_LESS):
            return cls(cost, split, ops, found, why)
        return cls(keeping, kept, ops, kept_found, why)

    def _timed(self, contiguous: Sequence[SchedulerNode]) -> MixOrderPlan:
        rows = static_rows(reduced_numels(contiguous)[0])
        if rows is None:
            return self
        device = DeviceModel.of(DeviceProperties.create(contiguous[0].get_device()))
        us = predicted_us(self.split, self.cost, device, rows, self.split.num_programs)
        return dataclasses.replace(self, us=us)

    def __str__(self) -> str:
        split = self.split
        time = "" if self.us is None else f", {self.us:.1f} us predicted"
        reasons = "; ".join(f"{name}: {why}" for name, why in split.why.items())
        return (
            f"{split.num_programs} programs of {split.num_warps} warps, {split.xblock} rows a "
            f"tile, {split.num_stages} stages, rows loaded {'twice' if split.reload else 'once'}"
            f"{time}: {self.why}; {reasons}"
        )

    @property
    def lacks_registers(self) -> bool:
        """Whether a thread may need more than there are; one that loads rows twice has them."""
        return not self.split.reload and any(each.excess for each in self.registers)

    def spills_too_much(
        self, contiguous: Sequence[SchedulerNode], other: Sequence[SchedulerNode]
    ) -> bool:
        """
        Whether it would spill more, in every configuration, than is worth it to read once
        what both of its sides read.
        """
        if not any(each.excess for each in self.registers):
            return False
        itemsizes = shared_itemsizes(contiguous, other)
        saved = worth_spilling(self.cost, self.split.reload, itemsizes)
        return all(
            spilled_bytes(each, launch) > launch.xblock * saved
            for each, launch in zip(self.registers, launch_configs(self.split))
        )

    def of_fewer_rows(self, contiguous: Sequence[SchedulerNode]) -> Optional[MixOrderPlan]:
        """Of half the rows a tile, as the runtime has it where that spills less."""
        if self.split.xblock == 1:
            return None
        split = dataclasses.replace(self.split, xblock=self.split.xblock // 2)
        found = predicted(split, contiguous, self.ops)
        return dataclasses.replace(self, split=split, registers=found)


# of the nodes of one graph, asked for many times while it is scheduled and generated
_plans: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def with_pressure(
    cost: RowCost,
    contiguous: Sequence[SchedulerNode],
    other: Sequence[SchedulerNode],
) -> RowCost:
    """
    ``cost``, with whether the kernel of these nodes lacks registers; that of a kernel
    that reduces no rows is not predicted.
    """
    if not predicts_registers(contiguous[0].get_device()) or not any(
        node.is_reduction() for node in contiguous
    ):
        return cost
    plan = MixOrderPlan.of(contiguous, partials(contiguous, other))
    return dataclasses.replace(
        cost,
        keeps_rows=plan.cost.keeps_rows,
        pairs_rows=plan.cost.pairs_rows,
        lacks_registers=plan.lacks_registers,
    )


def reduced_numels(
    contiguous: Sequence[BaseSchedulerNode],
) -> tuple[sympy.Expr, sympy.Expr]:
    """The rows, and the columns of each, that nodes of ``contiguous`` reduce."""
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    reduction = next(node for node in contiguous if node.is_reduction())
    return MixOrderReduction.get_numel_rnumel(reduction)


def lacking(found: Sequence[Pressure]) -> float:
    """The share of its registers that a thread lacks in the launch that lacks least."""
    return min(each.excess / each.limit for each in found)


def spilled_bytes(found: Pressure, launch: LaunchConfig) -> float:
    """Of the registers of a program, those that there are not."""
    return 4 * found.excess * launch.num_warps * THREADS_PER_WARP


def worth_spilling(cost: RowCost, reload: bool, itemsizes: Sequence[int]) -> float:
    """
    Bytes that a program of two fused sides, which loads its rows twice or not, may spill for
    each row, where both sides read elements of ``itemsizes``. What is loaded one element at a
    time takes as long as if those had 4 bytes at least, as what is spilled has.
    """
    share: float = MAX_SPILLED_SHARE
    if cost.apart:
        itemsizes = [max(4, size) for size in itemsizes]
        share = MAX_SPILLED_APART_SHARE
    if reload:
        share = MAX_SPILLED_TWICE_SHARE
    return share * cost.columns * sum(itemsizes)


def shared_itemsizes(
    contiguous: Sequence[SchedulerNode], other: Sequence[SchedulerNode]
) -> list[int]:
    """
    Bytes of an element of each tensor whose rows both sides read, once where they are fused.
    """
    hint = V.graph.sizevars.optimization_hint
    rows, columns = map(hint, reduced_numels(contiguous))
    read = OrderedSet(dep.name for node in contiguous for dep in node.read_writes.reads)
    shared = OrderedSet(
        dep.name
        for node in other
        for dep in node.read_writes.reads
        if isinstance(dep, MemoryDep)
        and dep.name in read
        # rows that are gathered are as many as there are
        and (dep.is_indirect() or hint(dep.get_numel(), fallback=0) >= rows * columns)
    )
    return [get_dtype_size(V.graph.get_dtype(name)) for name in shared]


def launch_configs(split: RowSplit) -> list[LaunchConfig]:
    """What a kernel with ``split`` would be launched as, or autotuned over."""
    configs = split.launch_plan().row_tiles
    if not config.max_autotune and not config.max_autotune_pointwise:
        configs = configs[:1]
    return [
        LaunchConfig(
            xblock,
            num_warps,
            num_stages,
            split.reload,
            split.hoist,
            split.accumulate_tiles,
            debug_options().even_vectors,
            split.programs_per_sm if split.all_registers else 1,
            split.drop_padding,
        )
        for xblock, num_warps, num_stages in configs
    ]


def predicts_registers(device: Optional[torch.device]) -> bool:
    """
    Whether kernels for ``device`` are refused by their registers, which are predicted
    for rows that are split over persistent programs alone.
    """
    return (
        debug_options().register_pressure
        and device is not None
        and splits_rows(DeviceProperties.create(device))
    )


def partials(
    contiguous: Sequence[BaseSchedulerNode], other: Sequence[SchedulerNode]
) -> list[SchedulerNode]:
    """
    The reductions of ``other`` over the rows that ``contiguous`` reduce, without the
    second layers of those that were split, which come after the kernel.
    """
    numels = tuple(reduced_numels(contiguous))
    return [node for node in other if node.is_reduction() and domain(node) == numels]


def predicted(
    split: RowSplit, contiguous: Sequence[SchedulerNode], ops: Sequence[Op]
) -> tuple[Pressure, ...]:
    """
    Of the kernel that reduces the rows of ``contiguous`` and computes ``ops``, in each
    configuration that it would be launched in.
    """
    _, columns = reduced_numels(contiguous)
    device = DeviceModel.of(DeviceProperties.create(contiguous[0].get_device()))
    columns = V.graph.sizevars.optimization_hint(columns)
    return tuple(
        pressure(ops, columns, launch, device.registers_per_sm)
        for launch in launch_configs(split)
    )
