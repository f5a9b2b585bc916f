"""
What follows a mix-order kernel: the final reductions of its partial accumulators, and what
was fused with the reductions over the rows.

And the split of its rows, which is decided before it is generated.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Optional, TYPE_CHECKING, Union

import sympy

from torch.utils._ordered_set import OrderedSet

from .. import ir
from ..mix_order_accesses import load_as_stored
from ..mix_order_plan import with_pressure
from ..mix_order_reduction import (
    final_buffer,
    final_node,
    final_reduction_kwargs,
    FinalReduction,
    leading_epilogue,
    ready_epilogue,
)
from ..mix_order_producer_sums import depends_on_own_kernel as depends_on_own_kernel
from ..mix_order_row_cost import row_cost
from ..mix_order_row_loop import RowSplit, splits_rows
from ..mix_order_square import orders_differ as orders_differ
from ..runtime.coordinate_descent_tuner import CoordescTuner
from ..runtime.hints import DeviceProperties
from ..scheduler import SchedulerBuffer
from ..virtualized import V
from .simd_kernel_features import SIMDKernelFeatures


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..scheduler import BaseSchedulerNode, Scheduler, SchedulerNode
    from .common import WorkspaceArg
    from .simd import SIMDScheduling
    from .triton_mix_order import MixOrderKernel


def split_rows(
    scheduling: SIMDScheduling,
    contiguous: BaseSchedulerNode,
    other: BaseSchedulerNode,
    rows: sympy.Expr,
    columns: sympy.Expr,
) -> Optional[Callable[..., RowSplit]]:
    """
    What splits the rows of the kernel of both nodes, by itself or with as many programs
    an SM as it is told; None where a program has upstream's number of rows.
    """
    device = DeviceProperties.create(contiguous.get_device())
    if not splits_rows(device):
        return None
    cost = row_cost(
        contiguous.get_nodes(),
        other.get_nodes(),
        rows,
        columns,
        scheduling.kernel_type._get_persistent_RBLOCK(columns),
    )
    cost = with_pressure(cost, contiguous.get_nodes(), other.get_nodes())
    return functools.partial(V.choices.mix_order_row_split, cost, rows, device)


def autotune_split(
    bench: Callable[[RowSplit], float], split: RowSplit, choose: Callable[..., RowSplit]
) -> RowSplit:
    """Of what ``choose`` returns for some programs an SM, the one of the least time."""
    return choose(
        CoordescTuner.autotune_single_field(
            lambda programs: bench(choose(programs)), split.programs_per_sm, max_val=32
        )
    )


class FinalReductionFeatures(SIMDKernelFeatures):
    """Of a kernel of final reductions: of ``columns``, each over ``partials`` rows."""

    def __init__(
        self,
        schedule: list[Any],
        columns: sympy.Expr,
        partials: Union[int, sympy.Expr],
        reductions: int,
    ) -> None:
        super().__init__(schedule, columns, partials)
        self.kernel_kwargs = final_reduction_kwargs(partials, columns, reductions)


def add_workspace(scheduler: Scheduler, arg: WorkspaceArg) -> ir.Buffer:
    """Make the workspace of one kernel readable by another, which runs next."""
    workspace = ir.Buffer(name=arg.get_name(), layout=arg.get_layout())
    V.graph.name_to_buffer[arg.get_name()] = workspace
    scheduler.name_to_buf[arg.get_name()] = SchedulerBuffer(scheduler, workspace, None)
    return workspace


class FinalReductions:
    """The reductions over the rows of a mix-order kernel, and what is left of them after it."""

    def __init__(
        self,
        scheduling: SIMDScheduling,
        contiguous: BaseSchedulerNode,
        reductions: Sequence[SchedulerNode],
    ) -> None:
        self.scheduling = scheduling
        self.contiguous = contiguous
        self.reductions = reductions
        self.finals: dict[str, tuple[SchedulerNode, Any]] = {}

    def extract(self, snode: SchedulerNode) -> SchedulerNode:
        """What the kernel computes of ``snode``, whose split is cancelled: its values."""
        name = final_buffer(snode).get_name()  # type: ignore[union-attr]
        self.finals[name] = (final_node(snode), FinalReduction.create(snode))
        pointwise = snode.extract_pw_from_reduction()
        load_as_stored(pointwise._body, self.contiguous.get_buffer_names())
        return pointwise

    def codegen(self, kernel: MixOrderKernel, epilogue: list[SchedulerNode]) -> None:
        """After the call of ``kernel``: to the last of ``epilogue``, the other nodes."""
        assert len(self.finals) == len(kernel.saved_partial_accumulate)
        columns = kernel.features.reduction_numel
        partials = kernel.num_partials

        # With programmatic dependent launch, the kernels below wait for this one.
        scheduler = self.scheduling.scheduler
        scheduler.previous_node = None

        # One kernel reduces all partial accumulators, with the part of the epilogue
        # that follows at once. It reads the workspace as it would any buffer.
        (arg,) = kernel.args.workspace_args
        workspace = add_workspace(scheduler, arg)
        nodes = []
        for i, partial in enumerate(kernel.saved_partial_accumulate):
            node, final = self.finals[partial.buffer_name]
            offset = i * partials * columns
            nodes.append(
                final.scheduler_node(node, partial, workspace, offset, partials)
            )

        # The epilogue may work on the columns and on the whole tensor, a kernel each.
        # What this node is the last to use is freed after the last of them.
        to_free = OrderedSet(scheduler.buffer_names_to_free)
        scheduler.buffer_names_to_free.clear()
        early: list[SchedulerNode] = []
        if self.reductions[0].node._split_size:  # type: ignore[union-attr]
            early = ready_epilogue(
                (self.contiguous, *self.reductions),
                [node for node, _ in self.finals.values()],
            )
        epilogue = early + epilogue
        leading = leading_epilogue(nodes, epilogue, columns)
        schedule = self.scheduling.generate_node_schedule(
            nodes + leading, columns, partials
        )
        self.scheduling.codegen_node_schedule(
            FinalReductionFeatures(schedule, columns, partials, len(nodes))
        )
        kernel.deallocate_workspaces()

        for _, group in itertools.groupby(
            epilogue[len(leading) :],
            key=lambda node: (scheduler.get_fused_node(node), node.group),
        ):
            scheduler.buffer_names_to_free.clear()
            self.scheduling._codegen_nodes(list(group))
        scheduler.removed_ops.update(node.get_name() for node in early)
        scheduler.buffer_names_to_free.update(to_free)
