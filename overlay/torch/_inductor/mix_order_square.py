"""
Reductions over the rows and over the columns of a square tensor.

Both have the loops ``[n, n]``, so what tells them apart is how they walk what they
both read: along its rows in one, across them in the other.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from . import config
from .loop_body import MemoryUsageType
from .mix_order_debug import debug_options
from .mix_order_reduction import splits_agree
from .virtualized import V


if TYPE_CHECKING:
    from .scheduler import BaseSchedulerNode


def runs_along_rows(buf: str, node: BaseSchedulerNode) -> Optional[bool]:
    """
    Whether the innermost loop of the reductions in ``node`` runs along the rows of
    ``buf``; None when some loads do and others do not, or none depends on it.
    """
    strides: OrderedSet[bool] = OrderedSet()
    for snode in node.get_nodes():
        if not snode.is_reduction():
            continue
        body = snode._body  # type: ignore[attr-defined]
        symbols = list(body.var_ranges)
        for entry in body.memory_usage[MemoryUsageType.LOAD]:
            if entry.buffer_name == buf:
                index = body.indexing_exprs[entry.index_name]
                stride = V.graph.sizevars.stride_vars(index, symbols, symbols)[-1]
                if stride != 0:
                    strides.add(bool(stride == 1))
    return next(iter(strides)) if len(strides) == 1 else None


def orders_differ(node1: BaseSchedulerNode, node2: BaseSchedulerNode) -> bool:
    """
    Whether the reductions ``node1`` and ``node2`` have the loops of one square
    tensor, and walk more of the bytes that both read whole in different orders than
    in one. Buffers are asked one by one: a reduction over columns may well read a
    row's statistic, or another matrix, along the rows.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    if not (
        config.triton.mix_order_reduction
        and debug_options().square
        and node1.is_reduction()
        and node2.is_reduction()
    ):
        return False
    group = MixOrderReduction.get_numel_rnumel(node1)
    if (
        len(group) != 2
        or not V.graph.sizevars.statically_known_equals(*group)
        or tuple(group) != tuple(MixOrderReduction.get_numel_rnumel(node2))
        or not (splits_agree(node1) and splits_agree(node2))
    ):
        return False

    # each is read whole, so an element's size weighs it
    differ = same = 0
    for buf in MixOrderReduction.get_common_read(node1, node2):
        along1, along2 = runs_along_rows(buf, node1), runs_along_rows(buf, node2)
        if along1 is None or along2 is None:
            continue
        if along1 == along2:
            same += V.graph.get_dtype(buf).itemsize
        else:
            differ += V.graph.get_dtype(buf).itemsize
    return differ > same
