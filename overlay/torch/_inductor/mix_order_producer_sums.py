"""
Sums of a kernel's own outputs, kept as partial accumulators of that kernel.

The backward of a norm writes dx, and the layer before it sums dx over the rows once
more, for the gradient of its bias. When a mix-order kernel stores a tile of dx it has
that tile in registers, so it can add it to one more partial accumulator: the consumer
becomes a reduction of the other node, and dx is not read again. A kernel that reduces
rows alone, or nothing, becomes a mix-order kernel by it.

This is the one exception from the rule that the two sides of a mix-order kernel do
not depend on each other, so it is made once, when all other fusions have been
decided, and proved: the consumer reads where the producer writes.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from torch._dynamo.utils import counters
from torch.utils._ordered_set import OrderedSet

from . import config, ir
from .dependencies import MemoryDep
from .mix_order_accesses import domain, reads_where_written
from .mix_order_producer_sum_cost import ProducerSum
from .mix_order_reads import most_reads
from .mix_order_reduction import splits_agree, why_not_partial_accumulators
from .runtime.hints import DeviceProperties, ReductionHint
from .upstream_names import place_as, why_kept_apart
from .utils import get_current_backend
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable

    import sympy

    from .scheduler import BaseSchedulerNode, FusedMixOrderReductions, Scheduler


# Columns of a row that a program holds, and of one that is worth a tile of its own.
MAX_ROW_COLUMNS = 16 * 1024
MIN_ROW_COLUMNS = 16


def attach_producer_sums(
    scheduler: Scheduler, nodes: list[BaseSchedulerNode]
) -> list[BaseSchedulerNode]:
    """
    ``nodes``, which have been fused, with the reductions of a kernel's outputs made
    partial accumulators of that kernel where that is right and pays.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import WhyNoFuse

    if not (
        config.triton.mix_order_reduction
        and config.triton.mix_order_reduction_producer_sums
    ):
        return nodes

    fused = OrderedSet(nodes)
    reductions = ReductionsByBuffer(nodes)
    for producer in nodes:
        if producer not in fused:
            continue
        for consumer in candidates(producer, reductions):
            if reason := why_not_attach(scheduler, producer, consumer):
                WhyNoFuse(producer, consumer)("producer sums: %s", reason)
                continue
            attached = attach(producer, consumer)
            place_as(scheduler, attached, producer)
            counters["inductor"]["mix_order_producer_sums"] += 1
            for node in (producer, consumer):
                fused.remove(node)
                reductions.remove(node)
            fused.add(attached)
            reductions.add(attached)
            scheduler.name_to_fused_node.update(
                (node.get_name(), attached) for node in attached.get_nodes()
            )
            producer = attached
    if len(fused) == len(nodes):
        return nodes
    return scheduler.topological_sort_schedule(
        sorted(fused, key=lambda node: node.min_order)
    )


class ReductionsByBuffer:
    """Which nodes that reduce use a buffer, for all buffers."""

    def __init__(self, nodes: Iterable[BaseSchedulerNode]) -> None:
        self.nodes: dict[str, OrderedSet[BaseSchedulerNode]] = {}
        for node in nodes:
            self.add(node)

    def add(self, node: BaseSchedulerNode) -> None:
        if node.is_reduction() and node.is_gpu() and splits_agree(node):
            for name in node.used_buffer_names():
                self.nodes.setdefault(name, OrderedSet()).add(node)

    def remove(self, node: BaseSchedulerNode) -> None:
        for name in node.used_buffer_names():
            self.nodes.get(name, OrderedSet()).discard(node)

    def that_use(self, names: Iterable[str]) -> list[BaseSchedulerNode]:
        """Those that use any buffer of ``names``, in the order of the schedule."""
        found = OrderedSet(node for name in names for node in self.nodes.get(name, ()))
        return sorted(found, key=lambda node: node.min_order)


def candidates(
    producer: BaseSchedulerNode, reductions: ReductionsByBuffer
) -> list[BaseSchedulerNode]:
    """
    The reductions that run over the rows of ``producer``, and use what it uses.
    """
    found = [
        node
        for node in reductions.that_use(producer.used_buffer_names())
        if node is not producer
    ]
    if not found or not producer.is_gpu() or not is_row_producer(producer):
        return []
    return [node for node in found if has_domain(producer, domain(node))]


def has_domain(producer: BaseSchedulerNode, numels: tuple[sympy.Expr, ...]) -> bool:
    """Whether ``producer`` works, or can work, on rows and columns of ``numels``."""
    # a circle: codegen.simd imports this module in turn
    from .codegen.simd import SIMDKernel

    node1, node2 = sides(producer)
    if node2:
        return domain(node2) == numels
    if node1.is_reduction():
        return node1.group[1] == numels  # type: ignore[index]
    xnumel, rnumel = numels
    return (
        V.graph.sizevars.statically_known_leq(rnumel, MAX_ROW_COLUMNS)
        and V.graph.sizevars.statically_known_geq(rnumel, MIN_ROW_COLUMNS)
        and all(
            node.group[1] == (xnumel * rnumel, 1)  # type: ignore[index]
            and SIMDKernel.is_compatible(numels, node.get_ranges())  # type: ignore[attr-defined]
            for node in node1.get_nodes()
        )
    )


def is_row_producer(producer: BaseSchedulerNode) -> bool:
    """
    Whether ``producer`` is a mix-order kernel, or can be made one: a pointwise kernel, or
    one that reduces rows, by what ``MixOrderReduction.can_fuse`` wants of such a node.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import (
        FusedMixOrderReductions,
        FusedSchedulerNode,
        MixOrderReduction,
        SchedulerNode,
    )

    if isinstance(producer, FusedMixOrderReductions):
        return True
    device_type = producer.get_device().type  # type: ignore[union-attr]
    return (
        type(producer) in (SchedulerNode, FusedSchedulerNode)
        and device_type in ("cuda", "xpu")
        and get_current_backend(device_type) == "triton"
        and all(is_row_node(node) for node in producer.get_nodes())
        and MixOrderReduction.is_contiguous_node(producer)
    )


def is_row_node(node: BaseSchedulerNode) -> bool:
    """Whether ``node`` is pointwise, or a reduction of rows that a program can hold."""
    buffer = node.node
    if not isinstance(buffer, ir.ComputedBuffer) or not node._body.var_ranges:  # type: ignore[attr-defined]
        return False  # no loops: one element
    if not node.is_reduction():
        return type(buffer.data) is ir.Pointwise  # no scatter
    return (
        isinstance(buffer.data, ir.Reduction)
        and buffer._split_size is None
        and buffer.data.reduction_hint in (ReductionHint.INNER, ReductionHint.DEFAULT)
        and V.graph.sizevars.statically_known_leq(
            node.group[1][1],  # type: ignore[index]
            MAX_ROW_COLUMNS,
        )
    )


def sides(
    producer: BaseSchedulerNode,
) -> tuple[BaseSchedulerNode, Optional[BaseSchedulerNode]]:
    """The contiguous node of ``producer`` and the other node, if it has one."""
    # a circle: scheduler imports this module in turn
    from .scheduler import FusedMixOrderReductions

    if isinstance(producer, FusedMixOrderReductions):
        return producer.node1, producer.node2
    return producer, None


def why_not_attach(
    scheduler: Scheduler, producer: BaseSchedulerNode, consumer: BaseSchedulerNode
) -> Optional[str]:
    """
    Why the reductions of ``consumer`` can not, or had better not, be partial
    accumulators of ``producer``; None when they should.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import FusedSchedulerNode, SchedulerNode

    node1, node2 = sides(producer)
    if type(consumer) not in (SchedulerNode, FusedSchedulerNode):
        return f"it is a {type(consumer).__name__}"
    if consumer.get_device() != producer.get_device():
        return "devices differ"
    if reason := why_kept_apart(scheduler, producer, consumer):
        return reason
    if producer.has_aliasing_or_mutation() or consumer.has_aliasing_or_mutation():
        return "a buffer is aliased or mutated"
    if (
        producer.get_buffer_names() | consumer.get_buffer_names()
    ) & V.graph.no_fuse_buffer_names:
        return "fusion is disabled for a buffer"
    nodes = len(producer.get_nodes()) + len(consumer.get_nodes())
    if nodes > config.max_fusion_size:
        return f"{nodes} nodes are more than max_fusion_size"
    if producer.ancestors & consumer.get_operation_names():
        return "the producer needs it"
    if node2 and consumer.ancestors & node2.get_operation_names():
        return "it needs a final reduction"
    if reason := why_not_partial_accumulators(
        *([node2, consumer] if node2 else [consumer])
    ):
        return reason
    if reason := why_too_many_loads(producer, consumer):
        return reason
    if any(
        not reads_where_written(snode, node1, domain(consumer))
        for snode in consumer.get_nodes()
        if snode.is_reduction()
    ):
        return "it reads elsewhere than the producer writes"
    if is_between(scheduler, producer, consumer) or scheduler.will_fusion_create_cycle(
        producer, consumer
    ):
        return "another node stands between"
    reduces = any(node.is_reduction() for node in node1.get_nodes())
    depends = bool(consumer.ancestors & producer.get_operation_names())
    if reduces and not node2 and not depends:
        return "a pair of mixed orders, which was declined"
    if reduces and (
        reason := V.choices.why_mix_order_reduction_spills(
            node1.get_nodes(),
            [*(node2.get_nodes() if node2 else ()), *consumer.get_nodes()],
            absorbs=True,
        )
    ):
        return reason
    return V.choices.why_not_producer_sum(
        ProducerSum.create(node1, node2, consumer),
        DeviceProperties.create(producer.get_device()),
    )


def is_between(
    scheduler: Scheduler, producer: BaseSchedulerNode, consumer: BaseSchedulerNode
) -> bool:
    """Whether ``consumer`` waits for a node that waits for ``producer``."""
    names = producer.get_operation_names()
    return any(
        scheduler.get_fused_node(scheduler.name_to_buf[dep.name].defining_op).ancestors  # type: ignore[arg-type]
        & names
        for dep in consumer.unmet_dependencies
        if dep.name not in producer.get_buffer_names()
    )


def why_too_many_loads(
    producer: BaseSchedulerNode, consumer: BaseSchedulerNode
) -> Optional[str]:
    """
    Why ``consumer`` makes the kernel load more buffers than
    ``triton.mix_order_reduction_max_reads``; None when it does not, or loads none that
    ``producer`` does not. What the kernel itself stores is not loaded.
    """
    max_reads = most_reads(producer.get_device())
    loads = [
        OrderedSet(
            dep.name for dep in node.read_writes.reads if isinstance(dep, MemoryDep)
        )
        - producer.get_buffer_names()
        for node in (producer, consumer)
    ]
    count = len(loads[0] | loads[1])
    if loads[1] - loads[0] and 0 < max_reads < count:
        return f"loads {count} buffers, more than {max_reads}"
    return None


def attach(
    producer: BaseSchedulerNode, consumer: BaseSchedulerNode
) -> FusedMixOrderReductions:
    """The mix-order node in which ``consumer`` belongs to the other node."""
    # a circle: scheduler imports this module in turn
    from .scheduler import FusedMixOrderReductions, FusedSchedulerNode

    node1, node2 = sides(producer)
    attached = FusedMixOrderReductions(
        node1, FusedSchedulerNode.fuse(node2, consumer) if node2 else consumer
    )
    attached.producer_sums = OrderedSet(
        [*getattr(producer, "producer_sums", ()), *consumer.get_operation_names()]
    )
    return attached


def depends_on_own_kernel(node: FusedMixOrderReductions) -> bool:
    """Whether a side of ``node`` depends on the other, but for the attached sums."""
    names = node.node1.get_operation_names()
    return bool(node.node1.ancestors & node.node2.get_operation_names()) or any(
        snode.ancestors & names
        and not (OrderedSet([snode.get_name(), *snode.ancestors]) & node.producer_sums)
        for snode in node.node2.get_nodes()
    )
