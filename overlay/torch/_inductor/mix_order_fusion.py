"""
What the scheduler asks of mix-order reductions: of their modules it imports this one alone.

The functions are what it asks of two nodes that may be one kernel, and of a node that may join one.
What is imported by its own name is called from one place each.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from .gathers import gathered_whole as gathered_whole
from .mix_order_inplace import inplace_reads as inplace_reads
from .mix_order_inplace import read_before_written as read_before_written
from .mix_order_plan import partials
from .mix_order_producer_sums import attach_producer_sums as attach_producer_sums
from .mix_order_profit import decides_by_cost as decides_by_cost
from .mix_order_profit import fusion_score as fusion_score
from .mix_order_reads import why_too_many_reads as why_too_many_reads
from .mix_order_reduction import final_buffer as final_buffer
from .mix_order_reduction import splits_agree as splits_agree
from .mix_order_reduction import why_not_partial_accumulators
from .mix_order_spills import finishes_rows
from .mix_order_square import orders_differ as orders_differ
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import BaseSchedulerNode, FusedMixOrderReductions


def why_not_fused(
    contiguous: BaseSchedulerNode, other: BaseSchedulerNode
) -> Optional[str]:
    """Why two nodes that may be the sides of one mix-order kernel are not; None: they are."""
    reason = why_not_partial_accumulators(other)
    if not reason and decides_by_cost(contiguous.get_device()):
        reason = V.choices.why_mix_order_reduction_does_not_pay(contiguous, other)
    return reason or V.choices.why_mix_order_reduction_spills(
        contiguous.get_nodes(), other.get_nodes(), absorbs=False
    )


def why_not_absorbed(
    kernel: FusedMixOrderReductions, side: BaseSchedulerNode, node: BaseSchedulerNode
) -> Optional[str]:
    """Why ``node`` may not join ``side``, one of the two of ``kernel``; None: it may."""
    if orders_differ(side, node):
        return "belongs to the other side"
    return why_not_partial_accumulators(side, node) if side is kernel.node2 else None


def why_absorbing_spills(
    kernel: FusedMixOrderReductions,
    side: BaseSchedulerNode,
    node: BaseSchedulerNode,
    others: Sequence[BaseSchedulerNode],
) -> Optional[str]:
    """Why ``kernel`` spills once ``node`` joins ``side``, beside ``others``; None: it does not."""
    if not others:
        return None
    sides = [
        [snode for each in nodes for snode in each.get_nodes()]
        for nodes in ((side, node), others)
    ]
    absorbs = True
    if side is kernel.node2:
        if not partials(others[0].get_nodes(), node.get_nodes()):
            # it comes after the kernel
            return None
        sides.reverse()
    elif finishes_rows(side, node):
        absorbs = False
    return V.choices.why_mix_order_reduction_spills(*sides, absorbs=absorbs)
