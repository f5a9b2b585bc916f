"""
What ``V.choices`` decides of mix-order reductions.

A handler of choices overrides these as it does Inductor's others.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

import sympy

from .device_model import DeviceModel
from .mix_order_producer_sum_cost import why_not_producer_sum
from .mix_order_profit import why_not_profitable
from .mix_order_program_count import fewer_programs, static_rows
from .mix_order_row_split import row_split
from .mix_order_spills import why_spills


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .mix_order_producer_sum_cost import ProducerSum
    from .mix_order_row_cost import RowCost
    from .mix_order_row_loop import RowSplit
    from .runtime.hints import DeviceProperties
    from .scheduler import BaseSchedulerNode


class MixOrderChoices:
    """Of ``InductorChoices``."""

    @staticmethod
    def mix_order_row_split(
        cost: RowCost,
        rows: sympy.Expr,
        device: DeviceProperties,
        programs_per_sm: Optional[int] = None,
    ) -> RowSplit:
        """How many programs a mix-order kernel has, and the tile that each reduces at
        once. programs_per_sm is given when it is autotuned."""
        fixed = static_rows(rows)
        model = DeviceModel.of(device)
        split = row_split(cost, model, fixed, programs_per_sm)
        if programs_per_sm is not None:
            return split
        return fewer_programs(split, cost, model, fixed)

    @staticmethod
    def why_mix_order_reduction_spills(
        contiguous: Sequence[BaseSchedulerNode],
        other: Sequence[BaseSchedulerNode],
        absorbs: bool,
    ) -> Optional[str]:
        """
        Why a mix-order kernel of these nodes of its two sides would spill registers;
        None when it would not, or that is no reason not to fuse them. Whether the
        kernel is there without one of the nodes, which it would absorb.
        """
        return why_spills(contiguous, other, absorbs)  # type: ignore[arg-type]

    @staticmethod
    def why_mix_order_reduction_does_not_pay(
        contiguous: BaseSchedulerNode, other: BaseSchedulerNode
    ) -> Optional[str]:
        """
        Why one mix-order kernel of the two nodes would take longer than a kernel each;
        None when it would not. Not asked in non-strict mode.
        """
        return why_not_profitable(contiguous, other)

    @staticmethod
    def why_not_producer_sum(
        cost: ProducerSum, device: DeviceProperties
    ) -> Optional[str]:
        """Why a sum over the rows of what a kernel writes had better not be a partial
        accumulator of that kernel; None when it should."""
        return why_not_producer_sum(cost, DeviceModel.of(device))
