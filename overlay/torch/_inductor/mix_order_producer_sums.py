"""
Sums of a kernel's own outputs, kept as partial accumulators of that kernel.

The backward of a norm writes dx, and the layer before it sums dx over the rows once
more, for the gradient of its bias. When a mix-order kernel stores a tile of dx it has
that tile in registers, so it can add it to one more partial accumulator: the consumer
becomes a reduction of the other node, and dx is not read again. A kernel that reduces
rows alone, or nothing, becomes a mix-order kernel by it.

This is the one exception from the rule that the two sides of a mix-order kernel do
not depend on each other, so it is made once, when all other fusions have been
decided, and proved here. In a kernel, a load of what the kernel stored is the value
that was stored, whatever the index; ``reads_where_written`` is what makes that true.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

import sympy

from torch._dynamo.utils import counters
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from . import config, ir
from .dependencies import MemoryDep
from .loop_body import MemoryEntry, MemoryUsageType
from .mix_order_reduction import (
    final_buffer,
    most_reads,
    splits_agree,
    why_not_partial_accumulators,
)
from .mix_order_row_split import row_cost, row_split, RowCost, splits_rows
from .runtime.hints import DeviceProperties, ReductionHint
from .runtime.runtime_utils import next_power_of_2
from .utils import get_dtype_size, sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable

    from .loop_body import LoopBody
    from .scheduler import (
        BaseSchedulerNode,
        FusedMixOrderReductions,
        Scheduler,
        SchedulerNode,
    )


# Columns of a row that a program holds, and of one that is worth a tile of its own.
MAX_COLUMNS = 16 * 1024
MIN_COLUMNS = 16
# What L2 holds, MiB, by compute capability (NVIDIA's architecture white papers: A100,
# H100 and H200, B200). Others are taken to serve nothing.
L2_MIB = {80: 40, 90: 50, 100: 126, 103: 126}
# Time of a byte from L2 by that of a byte from memory: 5.5 TB/s and 4.2 TB/s were read
# on an H200.
L2_BYTE = 0.75
# Bytes of memory traffic in the time between two kernels of a CUDA graph, where the
# last programs of one finish and the first of the next begin: 2 us of an H200.
LAUNCH_BYTES = 8 * 2**20
# Of what a kernel moves: pointwise kernels and row reductions are within 8 % of copy
# bandwidth on an H200, mix-order kernels within 15 %.
MIX_ORDER_LOSS = 0.07
# Bytes of memory traffic in the time that a mix-order kernel takes to compute a function
# of an element, with what is around it in the backward of a GELU, on an H200.
FUNCTION_BYTES = {"erf": 10, "tanh": 9}


def attach_producer_sums(
    scheduler: Scheduler, nodes: list[BaseSchedulerNode]
) -> list[BaseSchedulerNode]:
    """
    ``nodes``, which have been fused, with the reductions of a kernel's outputs made
    partial accumulators of that kernel where that is right and pays.
    """
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


def domain(other_node: BaseSchedulerNode) -> tuple[sympy.Expr, ...]:
    """``[xnumel, rnumel]`` of a mix-order kernel, by the reductions of its other node."""
    from .scheduler import MixOrderReduction

    return tuple(reversed(MixOrderReduction.get_numel_rnumel(other_node)))


def has_domain(producer: BaseSchedulerNode, numels: tuple[sympy.Expr, ...]) -> bool:
    """Whether ``producer`` works, or can work, on rows and columns of ``numels``."""
    from .codegen.simd import SIMDKernel

    node1, node2 = sides(producer)
    if node2:
        return domain(node2) == numels
    if node1.is_reduction():
        return node1.group[1] == numels  # type: ignore[index]
    xnumel, rnumel = numels
    return (
        V.graph.sizevars.statically_known_leq(rnumel, MAX_COLUMNS)
        and V.graph.sizevars.statically_known_geq(rnumel, MIN_COLUMNS)
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
    from .scheduler import (
        FusedMixOrderReductions,
        FusedSchedulerNode,
        MixOrderReduction,
        SchedulerNode,
    )

    if isinstance(producer, FusedMixOrderReductions):
        return True
    return (
        type(producer) in (SchedulerNode, FusedSchedulerNode)
        and producer.get_device().type in ("cuda", "xpu")  # type: ignore[union-attr]
        and not V.graph.cpp_wrapper
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
            MAX_COLUMNS,
        )
    )


def sides(
    producer: BaseSchedulerNode,
) -> tuple[BaseSchedulerNode, Optional[BaseSchedulerNode]]:
    """The contiguous node of ``producer`` and the other node, if it has one."""
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
    from .scheduler import FusedSchedulerNode, SchedulerNode

    node1, node2 = sides(producer)
    if type(consumer) not in (SchedulerNode, FusedSchedulerNode):
        return f"it is a {type(consumer).__name__}"
    if consumer.get_device() != producer.get_device():
        return "devices differ"
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


def reads_where_written(
    consumer: SchedulerNode,
    producer: BaseSchedulerNode,
    numels: tuple[sympy.Expr, ...],
) -> bool:
    """
    Whether the reduction ``consumer`` reads each buffer that ``producer`` writes where
    it is written: in the kernel's ``[xnumel, rnumel]``, element by element, or, of a
    row's result, row by row.

    A kernel maps the loops of a node to its domain in their order, row-major. So two
    accesses are the same if they are as functions of the element's number, which is
    what ``normalize`` makes of them when it merges loops. The loops of the consumer
    are those it has in the kernel: first what it reduces, then what it keeps.
    """
    xnumel, rnumel = numels
    written = {
        name: snode
        for snode in producer.get_nodes()
        for name in snode.get_buffer_names()
    }
    names = OrderedSet(
        dep.name for dep in consumer.read_writes.reads if dep.name in written
    )
    if not names:
        return True

    body, elements = kernel_loops(consumer, of_other_node=True)
    rows = {var: elements[var] for var in body.reduce_vars}
    if any(
        load.args[1] in names
        for block in body.subblocks.values()
        for load in block.graph.find_nodes(op="call_method", target="load")
    ):
        return False  # the mask of a masked load is that of an access to memory
    equal = V.graph.sizevars.statically_known_equals
    for name in names:
        writer = written[name]._body  # type: ignore[attr-defined]
        stores = [
            entry
            for usage in (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION)
            for entry in writer.memory_usage[usage]
            if entry.buffer_name == name
        ]
        if len(stores) != 1 or stores[0].mode is not None:
            return False
        loops = dict(zip(writer.iter_vars, writer.sizes[0]))
        numel = sympy_product(loops.values())
        if equal(numel, xnumel):
            reader_loops = rows
        elif equal(numel, xnumel * rnumel):
            reader_loops = elements
        else:
            return False
        store = access(writer, stores[0], loops)
        loads = [
            access(body, entry, reader_loops)
            for entry in body.memory_usage[MemoryUsageType.LOAD]
            if entry.buffer_name == name
        ]
        if (
            free_symbol_is_type(store.index, (SymT.TMP, SymT.INDIRECT))
            or not loads
            or any(load != store for load in loads)
        ):
            return False
    return True


def access(
    body: LoopBody, entry: MemoryEntry, loops: dict[sympy.Symbol, sympy.Expr]
) -> MemoryDep:
    """An access of ``body``, with its ``loops`` merged as far as they can be."""
    return MemoryDep(
        entry.buffer_name or "",
        body.indexing_exprs[entry.index_name],
        tuple(loops),
        tuple(loops.values()),
    ).normalize()


def kernel_loops(
    snode: SchedulerNode, of_other_node: bool
) -> tuple[LoopBody, dict[sympy.Symbol, sympy.Expr]]:
    """
    The body of ``snode`` in a mix-order kernel, and its loops in the order in which the
    kernel numbers its elements: rows, then columns, which the reductions of the other
    node keep.
    """
    body = whole_body(snode)
    loops = [
        dict(zip(body.iter_vars, body.sizes[0])),
        dict(zip(body.reduce_vars, body.sizes[1])),
    ]
    if of_other_node:
        loops.reverse()
    return body, {**loops[0], **loops[1]}


def whole_body(snode: SchedulerNode) -> LoopBody:
    """The loops of the reduction ``snode``, as if it had not been split in two layers."""
    buffer = snode.node
    assert isinstance(buffer, ir.ComputedBuffer)
    if buffer._split_size is None:
        return snode._body
    final = final_buffer(snode)
    assert final is not None
    with buffer.with_original_inner_fn(final):
        _, body = buffer.simplify_and_reorder()
    # what it is until it is cancelled
    buffer.get_default_sizes_body.clear_cache(buffer)
    assert body is not None
    return body


def attach(
    producer: BaseSchedulerNode, consumer: BaseSchedulerNode
) -> FusedMixOrderReductions:
    """The mix-order node in which ``consumer`` belongs to the other node."""
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


def load_as_stored(body: LoopBody, names: Iterable[str]) -> None:
    """
    Make ``body`` load ``names``, which its kernel stores, as they are in memory. A value
    of a half type is kept in float32 until it is stored, and its sum over the rows is to
    be that of the rounded values, whether it is attached or not.
    """
    narrow = {
        name: dtype
        for name in names
        if (dtype := V.graph.get_dtype(name)).is_floating_point and dtype.itemsize < 4
    }
    if not narrow:
        return
    for block in (body.root_block, *body.subblocks.values()):
        for node in block.graph.find_nodes(op="call_method", target="load"):
            ops, name, _ = node.args
            if name not in narrow:
                continue
            with block.graph.inserting_after(node):
                rounded = block.graph.call_method(
                    "to_dtype", (ops, node, narrow[name]), {"use_compute_types": False}
                )
            with block.graph.inserting_after(rounded):
                loaded = block.graph.call_method(
                    "to_dtype", (ops, rounded, narrow[name])
                )
            node.replace_all_uses_with(
                loaded, delete_user_cb=lambda user, skip=rounded: user is not skip
            )


@dataclasses.dataclass(frozen=True)
class ProducerSum:
    """
    What a consumer saves, and what it costs its producer. Bytes are hints where sizes
    are dynamic.

    depends: whether the consumer depends on the producer
    bytes_saved: of the consumer's reads of whole tensors, what the producer reads or
        writes as well, element by element
    bytes_written: of these, what the producer writes, and L2 may still hold
    bytes_added: of the consumer's other reads of whole tensors
    launches_saved: kernels of the consumer that the final reduction replaces
    compute_bytes: what would be moved while the producer computes its functions
    rows, columns: of the producer, ``[xnumel, rnumel]``
    dynamic: whether the number of rows is
    before, after: the cost of a row without the consumer and with it; before is None
        for a producer that is no mix-order kernel yet
    """

    depends: bool
    bytes_saved: int
    bytes_written: int
    bytes_added: int
    launches_saved: int
    compute_bytes: int
    rows: int
    columns: int
    dynamic: bool
    before: Optional[RowCost]
    after: RowCost

    @classmethod
    def create(
        cls,
        node1: BaseSchedulerNode,
        node2: Optional[BaseSchedulerNode],
        consumer: BaseSchedulerNode,
    ) -> ProducerSum:
        from .scheduler import FusedSchedulerNode, MixOrderReduction

        xnumel, rnumel = domain(consumer)
        hint = V.graph.sizevars.optimization_hint
        rows, columns = hint(xnumel, fallback=8192), hint(rnumel)
        at_hand = whole_accesses(node1, xnumel * rnumel)
        if node2:
            at_hand |= whole_accesses(node2, xnumel * rnumel, of_other_node=True)
        reads = whole_accesses(consumer, xnumel * rnumel, of_other_node=True)

        def size(accesses: OrderedSet[MemoryDep]) -> int:
            names = OrderedSet(dep.name for dep in accesses)
            itemsizes = [get_dtype_size(V.graph.get_dtype(name)) for name in names]
            return sum(itemsizes) * rows * columns

        rblock = next_power_of_2(columns)
        other = FusedSchedulerNode.fuse(node2, consumer) if node2 else consumer
        return cls(
            depends=bool(consumer.ancestors & node1.get_operation_names()),
            bytes_saved=size(reads & at_hand),
            bytes_written=size(
                OrderedSet(
                    dep
                    for dep in reads & at_hand
                    if dep.name in node1.get_buffer_names()
                )
            ),
            bytes_added=size(reads - at_hand),
            launches_saved=2 if MixOrderReduction.is_split_reduction(consumer) else 1,
            compute_bytes=rows * rblock * function_bytes(node1),
            rows=rows,
            columns=columns,
            dynamic=not isinstance(xnumel, (int, sympy.Integer)),
            before=(
                row_cost(
                    node1.get_nodes(), node2.get_nodes(), xnumel, rnumel, rblock
                )
                if node2
                else None
            ),
            after=row_cost(
                node1.get_nodes(), other.get_nodes(), xnumel, rnumel, rblock
            ),
        )


def function_bytes(node: BaseSchedulerNode) -> int:
    """`FUNCTION_BYTES` of what ``node`` computes of an element."""
    return sum(
        FUNCTION_BYTES.get(name, 0) * count
        for snode in node.get_nodes()
        for name, count in snode._body.op_counts.items()  # type: ignore[attr-defined]
    )


def whole_accesses(
    node: BaseSchedulerNode, numel: sympy.Expr, of_other_node: bool = False
) -> OrderedSet[MemoryDep]:
    """The accesses in a mix-order kernel's loops by which ``node`` reads or writes
    ``numel`` elements of a buffer."""
    accesses: OrderedSet[MemoryDep] = OrderedSet()
    for snode in node.get_nodes():
        if of_other_node and not snode.is_reduction():
            continue  # the epilogue runs after the kernel
        body, loops = kernel_loops(snode, of_other_node)  # type: ignore[arg-type]
        for usage in (MemoryUsageType.LOAD, MemoryUsageType.STORE):
            for entry in body.memory_usage[usage]:
                dep = access(body, entry, loops)
                if V.graph.sizevars.statically_known_equals(dep.get_numel(), numel):
                    accesses.add(dep)
    return accesses


def why_not_producer_sum(cost: ProducerSum, device: DeviceProperties) -> Optional[str]:
    """
    Why a sum had better stay a kernel of its own; None when it pays to attach it. All
    is in bytes of memory traffic.
    """
    min_bytes = config.triton.mix_order_reduction_producer_sums_min_bytes
    if cost.bytes_saved < min_bytes:
        return f"saves {cost.bytes_saved} bytes, fewer than {min_bytes}"
    if cost.bytes_added and not cost.depends:
        return "reads more than the kernel that it does not depend on"
    if not splits_rows(device):
        return None

    # What the consumer would find in L2: its share of the last bytes that passed.
    l2 = L2_MIB.get(device.cc, 0) * 2**20
    passed = cost.rows * cost.columns * cost.after.stream_bytes + cost.bytes_written
    served = min(cost.bytes_written, l2 * cost.bytes_written // max(1, passed))
    saved = cost.bytes_saved - served * (1 - L2_BYTE)
    saved += cost.launches_saved * LAUNCH_BYTES

    rows = None if cost.dynamic else cost.rows
    after = row_split(cost.after, device, rows)
    before = row_split(cost.before, device, rows) if cost.before else None
    accumulators = cost.after.accumulators
    accumulators -= cost.before.accumulators if cost.before else 0
    workspace = 4 * accumulators * cost.columns * after.num_programs
    lost = 2 * workspace * L2_BYTE
    streams = cost.rows * cost.columns * cost.after.stream_bytes
    if before is None:
        moved = streams + cost.bytes_written
        lost += moved * MIX_ORDER_LOSS + max(0, cost.compute_bytes - moved)
    if after.reload and not (before and before.reload):
        lost += streams * L2_BYTE
    if saved <= lost:
        return f"saves {saved:.0f} bytes and costs {lost:.0f}"
    return None
