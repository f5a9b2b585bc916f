"""
Whether a mix-order kernel of given nodes would spill too many registers to be worth it.

What it needs is ``mix_order_pressure``'s to say, for each configuration that it would be
launched with.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from . import ir
from .mix_order_plan import MixOrderPlan, partials, predicts_registers, reduced_numels
from .mix_order_row_cost import SLOW_FUNCTIONS
from .mix_order_trace import Width
from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import BaseSchedulerNode, SchedulerNode


# Of the registers that a thread may have, those that a kernel which loads rows twice may
# lack with a node that it need not have: less than it takes to spill much, where a kernel
# of its own for the node reads the rows once more.
MAX_LACKING_ABSORBED = 1 / 16
# What takes long to compute, and where rows are loaded twice, is computed so, by few warps.
SLOW_OPS = (*SLOW_FUNCTIONS, "rand", "randn")


def why_spills(
    contiguous: Sequence[SchedulerNode],
    other: Sequence[SchedulerNode],
    absorbs: bool = False,
) -> Optional[str]:
    """
    Why the mix-order kernel of the contiguous side's nodes and the other side's
    would spill too much in every configuration; None when it would not, or the policy
    is off. For a pair that is more than it saves, and less where one of the nodes is one
    that it ``absorbs``.

    What makes a row's output from its reductions belongs to the kernel, absorbed yet
    or not: without it the rows would be read once more.
    """
    if not predicts_registers(contiguous[0].get_device()):
        return None
    nodes = [*contiguous, *row_epilogue(contiguous)]
    reductions = partials(contiguous, other)
    plan = MixOrderPlan.of(nodes, reductions)
    if absorbs not in plan.refusals:
        plan.refusals[absorbs] = _why_spills(plan, nodes, reductions, absorbs)
    return plan.refusals[absorbs]


def finishes_rows(node: BaseSchedulerNode, epilogue: BaseSchedulerNode) -> bool:
    """
    Whether ``epilogue`` is of what makes a row's output from reductions of rows like
    those of the contiguous ``node``: without it, the rows would be read once more.
    """
    both = (*node.get_nodes(), *epilogue.get_nodes())
    reductions = [each for each in both if each.is_reduction()]
    names = OrderedSet(
        each.get_name() for each in (*reductions, *row_epilogue(reductions))
    )
    return all(each.get_name() in names for each in epilogue.get_nodes())


def row_epilogue(contiguous: Sequence[SchedulerNode]) -> list[SchedulerNode]:
    """
    The pointwise nodes that first make something of the size of the tensor from what
    the reductions of ``contiguous`` return, with those in between; in order.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction, SchedulerNode

    names = OrderedSet(node.get_name() for node in contiguous)
    found: dict[str, SchedulerNode] = {}
    reductions = [node for node in contiguous if node.is_reduction()]
    rows, columns = reduced_numels(contiguous)
    same = V.graph.sizevars.statically_known_equals
    pending: list[SchedulerNode] = [*reductions]
    while pending:
        node = pending.pop()
        for user in (user for output in node.get_outputs() for user in output.users):
            reader = user.node
            if (
                not isinstance(reader, SchedulerNode)
                or not isinstance(reader.node, ir.ComputedBuffer)
                or reader.get_name() in names
                or not MixOrderReduction.is_contiguous_node(reader)
            ):
                continue
            numel = sympy_product(reader.group[1])
            if reader.is_reduction() or not (
                same(numel, rows) or same(numel, rows * columns)
            ):
                continue
            if same(numel, rows):
                pending.append(reader)
            names.add(reader.get_name())
            found[reader.get_name()] = reader
    return sorted(found.values(), key=lambda node: node.min_order)


def _why_spills(
    plan: MixOrderPlan,
    contiguous: Sequence[SchedulerNode],
    other: Sequence[SchedulerNode],
    absorbs: bool,
) -> Optional[str]:
    split = plan.split
    if split.reload and not split.staged:
        return "rows that are not aligned would be loaded an element at a time, twice"
    if split.reload and any(
        op.name in SLOW_OPS and op.width == Width.TILE for op in plan.ops
    ):
        return "slow functions of rows that are loaded twice would be computed twice"

    def refused(plan: MixOrderPlan) -> bool:
        if not absorbs:
            return plan.spills_too_much(contiguous, other)
        return all(
            each.too_high
            or (split.reload and each.excess > MAX_LACKING_ABSORBED * each.limit)
            for each in plan.registers
        )

    if not refused(plan):
        return None
    smaller = plan.of_fewer_rows(contiguous)
    if smaller is not None and not refused(smaller):
        return None
    least = min(plan.registers, key=lambda each: each.need / each.limit)
    return f"needs {least.need:.0f} registers a thread of {least.limit}"
