"""
Whether it pays to sum what a kernel writes in that kernel, in bytes of memory traffic.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet

from . import config
from .mix_order_accesses import domain, whole_accesses
from .mix_order_row_split import row_cost, row_split, splits_rows
from .runtime.runtime_utils import next_power_of_2
from .utils import get_dtype_size
from .virtualized import V


if TYPE_CHECKING:
    from .dependencies import MemoryDep
    from .mix_order_row_split import RowCost
    from .runtime.hints import DeviceProperties
    from .scheduler import BaseSchedulerNode


# What L2 holds, MiB, by compute capability (NVIDIA's architecture white papers: A100,
# H100 and H200, B200). Others are taken to serve nothing.
L2_MIB = {80: 40, 90: 50, 100: 126, 103: 126}
# Time of a byte from L2 by that of a byte from memory: 5.5 TB/s and 4.2 TB/s were read
# on an H200.
L2_BYTE = 0.75
# Time of a byte that rows share, which a mix-order kernel loads for each of them, and a
# pointwise kernel finds in L1, by that of a byte from memory. Of 80 kernels on an H200 one
# has to have 0.34 or more of this, or summing in it is slower, and one 0.45 or less.
SHARED_BYTE = 0.4
# Bytes of memory traffic in the time between two kernels of a CUDA graph, where the
# last programs of one finish and the first of the next begin: 2 us of an H200.
LAUNCH_BYTES = 8 * 2**20
# Of what a kernel moves: pointwise kernels and row reductions are within 8 % of copy
# bandwidth on an H200, mix-order kernels within 15 %.
MIX_ORDER_LOSS = 0.07
# Bytes of memory traffic in the time that a mix-order kernel takes to compute a function
# of an element, with what is around it in the backward of a GELU, on an H200.
FUNCTION_BYTES = {"erf": 10, "tanh": 9}


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
            bytes_shared=max(0, after.stream_bytes * rows * columns - size(loaded))
            * rblock
            // columns,
            launches_saved=1
            + MixOrderReduction.is_split_reduction(consumer)
            - (node2 is None),
            compute_bytes=rows * rblock * function_bytes(node1),
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


def function_bytes(node: BaseSchedulerNode) -> int:
    """`FUNCTION_BYTES` of what ``node`` computes of an element."""
    return sum(
        FUNCTION_BYTES.get(name, 0) * count
        for snode in node.get_nodes()
        for name, count in snode._body.op_counts.items()  # type: ignore[attr-defined]
    )


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
    if cost.tiled:
        return "its own kernel is tiled for an access across the others"
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
        lost += cost.bytes_shared * SHARED_BYTE
    if after.reload and not (before and before.reload):
        lost += streams * L2_BYTE
    if saved <= lost:
        return f"saves {saved:.0f} bytes and costs {lost:.0f}"
    return None
