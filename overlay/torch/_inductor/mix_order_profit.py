"""
Whether fusing two reductions of mixed orders pays.

Unfused, the tensor that both reduce is read twice, and whatever makes it could be
fused with the first. Fused, it is read once, there is a kernel less where the column
reduction would be split, and a final reduction has a partial accumulator of each
program to read. The model adds up both times, from shapes, dtypes and the GPU.
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
from .mix_order_plan import MixOrderPlan
from .mix_order_reduction import accumulate_dtype
from .mix_order_row_loop import splits_rows
from .mix_order_spills import row_epilogue
from .runtime.hints import DeviceProperties
from .runtime.runtime_utils import ceildiv
from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import sympy

    from .scheduler import BaseSchedulerNode, Scheduler, SchedulerNode


fusion_log = torch._logging.getArtifactLogger(__name__, "fusion")


@dataclasses.dataclass(frozen=True)
class Work:
    """
    Two reductions of one tensor. ``row_bytes`` and ``column_bytes`` move in the kernel
    of either alone, ``shared_bytes`` in both. ``foregone_bytes`` would not move if what
    makes an input were fused with the kernel that reads it, which a mix-order kernel
    forgoes. ``reread_bytes`` of what is shared are read by what waits for both reductions:
    in the kernel of the rows, which reads them, or after a mix-order kernel once more.
    Each of the fused kernel's ``programs`` leaves ``partial_bytes``.
    """

    row_bytes: int
    column_bytes: int
    shared_bytes: int
    foregone_bytes: int
    unfused_launches: int
    fused_launches: int
    programs: int
    partial_bytes: int
    reread_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Times in us of two kernels and of one."""

    unfused_us: float
    fused_us: float

    @property
    def pays(self) -> bool:
        return self.fused_us < self.unfused_us


def estimate(work: Work, device: DeviceModel) -> Estimate:
    """What either way takes on ``device``, whose bandwidth is known."""
    assert device.memory_GBs is not None
    row_us = 1e-3 / (device.memory_GBs * device.row_share)
    column_us = 1e-3 / (device.memory_GBs * device.column_share)
    fused_bytes = work.row_bytes + work.column_bytes - work.shared_bytes
    fused_bytes += work.reread_bytes
    return Estimate(
        unfused_us=device.launch_us * work.unfused_launches
        + max(0, work.row_bytes - work.foregone_bytes) * row_us
        + work.column_bytes * column_us,
        fused_us=device.launch_us * work.fused_launches
        + fused_bytes * row_us
        + device.kiloprogram_us * work.programs / 1024
        + device.partial_KiB_us * work.partial_bytes / 1024,
    )


def device_model(device: torch.device) -> DeviceModel:
    """Of the GPU that decides what is fused."""
    return DeviceModel.of(DeviceProperties.create(device))


def decides_by_cost(device: Optional[torch.device]) -> bool:
    """
    Whether `estimate` decides what is fused on ``device``: where rows are split over
    persistent programs, as they were when it was fitted, and the GPU is known.
    """
    return (
        not config.triton.mix_order_reduction_non_strict_mode
        and config.triton.mix_order_reduction_cost_model
        and device is not None
        and splits_rows(DeviceProperties.create(device))
        and device_model(device).memory_GBs is not None
    )


@dataclasses.dataclass
class _Known:
    """
    Of one graph: its reductions and its pointwise nodes by what they read, and what was
    decided on the names of a kernel's reductions. A decision is made once: the split of
    a contiguous node is cancelled because of it.
    """

    readers: dict[str, list[SchedulerNode]]
    pointwise: dict[str, list[SchedulerNode]]
    reasons: dict[Any, Optional[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, scheduler: Scheduler) -> _Known:
        if scheduler not in _known:
            readers: dict[str, list[SchedulerNode]] = {}
            pointwise: dict[str, list[SchedulerNode]] = {}
            for node in scheduler.nodes:
                for each in node.get_nodes():
                    by_name = readers if each.is_reduction() else pointwise
                    for name in each.used_buffer_names():
                        by_name.setdefault(name, []).append(each)  # type: ignore[arg-type]
            _known[scheduler] = cls(readers, pointwise)
        return _known[scheduler]


_known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()


def why_not_profitable(
    contiguous: BaseSchedulerNode, other: BaseSchedulerNode
) -> Optional[str]:
    """
    Why the mix-order kernel that begins with the two would be slower than two kernels,
    with sizes from hints; None when it would not.
    """
    device = contiguous.get_device()
    model = device_model(device) if device is not None else None
    if model is None or model.memory_GBs is None:
        return None
    sides = siblings(contiguous, other)
    key = tuple(" ".join(node.get_name() for node in side) for side in sides)
    reasons = _Known.of(contiguous.scheduler).reasons
    if key not in reasons:
        found = estimate(work_of(*sides), model)
        times = f"{found.fused_us:.1f} us fused, {found.unfused_us:.1f} us not"
        reasons[key] = None if found.pays else f"does not pay: {times}"
        if found.pays:
            fusion_log.debug("mix-order reduction of %s and %s: %s", *key, times)
    return reasons[key]


def fusion_score(node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> int:
    """
    How soon the two, of which ``MixOrderReduction.can_fuse`` is true, are fused.

    The elements of their tensor, which are fewer than the bytes that two reductions of
    one order share by it: those are fused first, and each side is whole. But a reduction
    like ``other`` that waits for ``contiguous`` makes what it is fused with wait as well,
    which cannot be fused with ``contiguous`` any more. Where there is one, the bytes that
    the two share are compared with what it shares.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    contiguous, other = node1, node2
    if not MixOrderReduction.is_contiguous_node(contiguous):
        contiguous, other = other, contiguous
    names = contiguous.get_operation_names()
    if not any(
        each.ancestors & names and MixOrderReduction.has_common_read(other, each)
        for each in _alike(other, other.used_buffer_names())
    ):
        return MixOrderReduction.get_numel(contiguous)
    shared = MixOrderReduction.get_common_read(contiguous, other)
    return moved_bytes(dep for dep in contiguous.read_writes.reads if dep.name in shared)


def siblings(
    contiguous: BaseSchedulerNode, other: BaseSchedulerNode
) -> tuple[list[SchedulerNode], list[SchedulerNode]]:
    """
    The reductions that either side's kernel would have: those of the two nodes, and
    those like them that read what both read, whose fusion with them comes later or
    came before.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    shared = MixOrderReduction.get_common_read(contiguous, other)
    sides = []
    for node, against in ((contiguous, other), (other, contiguous)):
        side = {each.get_name(): each for each in node.get_nodes() if each.is_reduction()}
        names = against.get_operation_names()
        for each in _alike(node, shared):
            if each.get_name() not in names and not each.ancestors & names:
                side[each.get_name()] = each
        sides.append(sorted(side.values(), key=lambda each: each.min_order))
    contiguous_side, other_side = sides
    return contiguous_side, other_side


def _alike(node: BaseSchedulerNode, names: Iterable[str]) -> Iterator[SchedulerNode]:
    """The reductions beside ``node``, of its loops, that read any of ``names``."""
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    readers = _Known.of(node.scheduler).readers
    own = node.get_operation_names()
    group = tuple(MixOrderReduction.get_numel_rnumel(node))
    order = MixOrderReduction.is_contiguous_node(node)
    for reader in (reader for name in names for reader in readers.get(name, ())):
        if (
            reader.get_name() not in own
            and tuple(MixOrderReduction.get_numel_rnumel(reader)) == group
            and MixOrderReduction.is_contiguous_node(reader) == order
        ):
            yield reader


def work_of(
    contiguous: Sequence[SchedulerNode], other: Sequence[SchedulerNode]
) -> Work:
    """What both sides' reductions, with what makes a row's output, have to do."""
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    rows, columns = MixOrderReduction.get_numel_rnumel(contiguous[0])
    hint = V.graph.sizevars.optimization_hint
    nodes = [*contiguous, *row_epilogue(contiguous)]
    row_reads = OrderedSet(
        dep.name for node in contiguous for dep in node.read_writes.reads
    )
    column_reads = [dep for node in other for dep in node.read_writes.reads]
    split = MixOrderPlan.of(nodes, other, keeps_rows=False).split
    foregone_bytes = moved_bytes(
        dep
        for node in nodes
        for dep in node.read_writes.reads
        if could_make(dep.name, contiguous)
    )
    shared = [
        dep
        for dep in column_reads
        if dep.name in row_reads
        and V.graph.sizevars.statically_known_geq(dep.get_numel(), rows * columns)
    ]
    reread_bytes = moved_bytes(
        dep for dep in shared if is_read_after_both(dep.name, other, rows * columns)
    )
    return Work(
        row_bytes=moved_bytes(
            dep for node in nodes for dep in node.read_writes.reads_and_writes()
        ),
        column_bytes=moved_bytes(column_reads),
        shared_bytes=moved_bytes(shared),
        foregone_bytes=foregone_bytes,
        unfused_launches=sum(
            1 + any(map(MixOrderReduction.is_split_reduction, side))
            for side in (contiguous, other)
        ),
        # the kernel, the final reduction of all its partial accumulators, and what could
        # have been in the kernel of the rows, before and after what it reduces
        fused_launches=2 + (foregone_bytes > 0) + (reread_bytes > 0),
        programs=min(split.num_programs, ceildiv(hint(rows), split.xblock)),
        partial_bytes=hint(columns)
        * sum(
            (accumulate_dtype(node.node.get_dtype()) or torch.float32).itemsize  # type: ignore[union-attr]
            for node in other
        ),
        reread_bytes=reread_bytes,
    )


def is_read_after_both(
    name: str, other: Sequence[SchedulerNode], numel: sympy.Expr
) -> bool:
    """
    Whether a pointwise node of ``numel`` elements reads ``name`` and waits for a reduction
    of ``other``: it could be in the kernel of the rows if that came last.
    """
    names = OrderedSet(node.get_name() for node in other)
    same = V.graph.sizevars.statically_known_equals
    return any(
        node.ancestors & names
        and hasattr(node, "group")
        and not (node.is_extern() or node.is_template())
        and same(sympy_product(node.group[1]), numel)
        for node in _Known.of(other[0].scheduler).pointwise.get(name, ())
    )


def moved_bytes(deps: Iterable[Any]) -> int:
    """Bytes of memory of the buffers of ``deps``, each of which moves once."""
    largest: dict[str, int] = {}
    for dep in deps:
        if isinstance(dep, MemoryDep):
            size = V.graph.get_dep_size_hint(dep)
            largest[dep.name] = max(size, largest.get(dep.name, 0))
    return sum(largest.values())


def could_make(name: str, contiguous: Sequence[SchedulerNode]) -> bool:
    """
    Whether the kernel of ``contiguous`` alone could make ``name`` itself: a node that
    is not a reduction over something else writes it, with its loops.
    """
    scheduler = contiguous[0].scheduler
    if name not in scheduler.name_to_buf:
        return False
    maker = scheduler.name_to_fused_node[
        scheduler.name_to_buf[name].defining_op_name()
    ]
    names = OrderedSet(node.get_name() for node in contiguous)
    if (
        maker.is_extern()
        or maker.is_template()
        or not hasattr(maker, "group")
        or not names.isdisjoint(node.get_name() for node in maker.get_nodes())
        or names & maker.ancestors
    ):
        return False
    same = V.graph.sizevars.statically_known_equals
    made, group = sympy_product(maker.group[1]), contiguous[0].group[1]
    return same(made, sympy_product(group)) and (
        not maker.is_reduction() or maker.group[1] == group
    )
