"""
Whether it pays to sum what a kernel writes in that kernel, in bytes of memory traffic.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet

from .device_model import DeviceModel
from .issue_slots import count_slots
from .mix_order_accesses import domain, whole_accesses
from .mix_order_row_cost import row_cost
from .mix_order_row_loop import splits_rows
from .mix_order_row_split import COLUMNS_PER_WARP, row_split
from .runtime.hints import DeviceProperties
from .runtime.runtime_utils import ceildiv, next_power_of_2
from .utils import get_dtype_size
from .virtualized import V


if TYPE_CHECKING:
    from .dependencies import MemoryDep
    from .mix_order_row_cost import RowCost
    from .mix_order_row_loop import RowSplit
    from .scheduler import BaseSchedulerNode


# Of what a kernel moves: pointwise kernels and row reductions are within 8 % of copy
# bandwidth on an H200, mix-order kernels within 15 %.
MIX_ORDER_LOSS = 0.07
# Functions with which a mix-order kernel computes for longer than it issues.
FUNCTIONS = ("erf", "tanh")


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
    bytes_shared: that the kernel loads of rows of which several are one, or in any order,
        with what pads them
    launches_saved: kernels of the consumer that the final reduction replaces, less that
        one where the producer has none yet
    compute_bytes: what would be moved while the producer computes its functions
    slots: issue slots in which the producer computes an element, all that it does
    bytes_gathered: that the producer loads at places that are read from a tensor, or that do
        not adjoin along a row
    tiled: whether a whole tensor is accessed across the others, by the consumer alone or
        by a producer that reduces nothing, so that its own kernel has tiles of both
        dimensions
    rows, columns: of the producer, ``[xnumel, rnumel]``
    dynamic: whether the number of rows is
    before, after: the cost of a row without the consumer and with it; before is None
        for a producer that is no mix-order kernel yet
    """

    depends: bool
    bytes_saved: int
    bytes_written: int
    bytes_added: int
    bytes_shared: int
    launches_saved: int
    compute_bytes: int
    slots: int
    bytes_gathered: int
    tiled: bool
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
        # a circle: scheduler imports this module in turn
        from .scheduler import FusedSchedulerNode, MixOrderReduction

        xnumel, rnumel = domain(consumer)
        device = DeviceModel.of(DeviceProperties.create(node1.get_device()))
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

        counted = [count_slots(snode._body, rnumel) for snode in node1.get_nodes()]  # type: ignore[attr-defined]
        gathered = OrderedSet(name for each in counted for name in each.gathered)
        functions = sum(each.of(FUNCTIONS) for each in counted)
        rblock = next_power_of_2(columns)
        other = FusedSchedulerNode.fuse(node2, consumer) if node2 else consumer
        after = row_cost(node1.get_nodes(), other.get_nodes(), xnumel, rnumel, rblock)
        loaded = OrderedSet(
            dep for dep in at_hand | reads if dep.name not in node1.get_buffer_names()
        )
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
            bytes_shared=max(0, after.memory_bytes * rows * columns - size(loaded))
            * rblock
            // columns,
            launches_saved=1
            + MixOrderReduction.is_split_reduction(consumer)
            - (node2 is None),
            compute_bytes=int(rows * rblock * functions * device.function_slot_bytes),
            slots=sum(each.slots for each in counted),
            bytes_gathered=rows
            * columns
            * sum(get_dtype_size(V.graph.get_dtype(name)) for name in gathered),
            tiled=any(is_across(dep) for dep in reads - at_hand)
            or (
                node2 is None
                and not node1.is_reduction()
                and any(is_across(dep) for dep in at_hand)
            ),
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
            after=after,
        )


def is_across(dep: MemoryDep) -> bool:
    """Whether what ``dep`` touches adjoins in memory in another loop than the innermost."""
    strides = [dep.index.coeff(var) for var in dep.var_names]
    return 1 in strides[:-1] and strides[-1] != 1


def slower_by(
    cost: ProducerSum, split: RowSplit, device: DeviceModel, moved: int
) -> float:
    """
    Bytes of memory traffic in the time that the producer takes longer to compute than to
    have them ``moved``, as a mix-order kernel with ``split``, beyond that of a kernel of its
    own.
    """
    # whole loads of all threads: ptxas drops what only pads a row
    width = max(1, cost.after.stream_bytes // max(1, 2 * cost.after.streams))
    load = max(1, split.num_warps * COLUMNS_PER_WARP // width)
    columns = min(cost.after.rnumel, ceildiv(cost.columns, load) * load)
    share = min(1.0, split.num_warps * split.programs_per_sm / device.issuing_warps)
    column_bytes = cost.rows * cost.slots / device.slots_per_byte
    fused = max(cost.compute_bytes, columns * column_bytes / share) - moved
    apart = cost.columns * column_bytes - (moved - cost.bytes_added)
    return max(0.0, fused - max(0.0, apart))


def why_not_producer_sum(cost: ProducerSum, device: DeviceModel) -> Optional[str]:
    """
    Why a sum had better stay a kernel of its own; None when it pays to attach it. All
    is in bytes of memory traffic.
    """
    if cost.bytes_added and not cost.depends:
        return "reads more than the kernel that it does not depend on"
    if cost.tiled:
        return "its own kernel is tiled for an access across the others"
    if not splits_rows(device):
        return None

    # What the consumer would find in L2: its share of the last bytes that passed.
    passed = cost.rows * cost.columns * cost.after.memory_bytes + cost.bytes_written
    served = min(
        cost.bytes_written, device.l2_bytes * cost.bytes_written // max(1, passed)
    )
    saved = cost.bytes_saved - served * (1 - device.l2_byte)
    saved += cost.launches_saved * device.launch_bytes

    rows = None if cost.dynamic else cost.rows
    after = row_split(cost.after, device, rows)
    before = row_split(cost.before, device, rows) if cost.before else None
    accumulators = cost.after.accumulators
    accumulators -= cost.before.accumulators if cost.before else 0
    workspace = 4 * accumulators * cost.columns * after.num_programs
    lost = 2 * workspace * device.l2_byte
    streams = cost.rows * cost.columns * cost.after.memory_bytes
    if before is None:
        moved = streams + cost.bytes_written
        lost += moved * MIX_ORDER_LOSS
        lost += slower_by(cost, after, device, moved)
        lost += cost.bytes_shared * device.shared_row_byte
        lost += cost.bytes_gathered * device.gathered_byte
    if after.reload and not (before and before.reload):
        lost += streams * device.l2_byte
    if saved <= lost:
        return f"saves {saved:.0f} bytes and costs {lost:.0f}"
    return None
