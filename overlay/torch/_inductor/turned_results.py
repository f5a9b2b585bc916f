"""
Results of blocks that a kernel has in another order than the one in which they are stored.

A tile of block reductions along both dimensions of a matrix has a result of one block for each
of its rows, or columns, and these lie apart where the next one along them is of the next block:
each is stored in a sector of its own, at the cost of one in L2, for a few bytes. Where these are
many, the kernel stores its results in a workspace, one number of a block after another, and a
second kernel brings them into order.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet

from . import ir
from .block_matrix import COLUMN, COLUMN_BLOCK, ROW, ROW_BLOCK
from .row_accesses import SECTOR_BYTES
from .device_model import DeviceModel
from .runtime.hints import DeviceProperties
from .scheduler import FusedSchedulerNode, SchedulerBuffer, SchedulerNode
from .utils import get_dtype_size
from .virtualized import ops, V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .block_matrix import Matrix
    from .block_reduction_loops import Strides
    from .codegen.common import WorkspaceArg
    from .codegen.simd import SIMDScheduling


@dataclasses.dataclass(frozen=True)
class Turned:
    """
    How a workspace has a result, row-major, and where it belongs.

    sizes: how many blocks are along their dimension, and results along the other
    strides: of the result, for these
    """

    sizes: tuple[int, int]
    strides: tuple[int, int]

    @property
    def numel(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def pays(self, sectors: int, itemsize: int, device: DeviceModel) -> bool:
        """
        Whether fewer bytes pass than those of the ``sectors`` in which the result, of
        ``itemsize`` bytes each, is stored at once: it is stored twice, and read, by one
        kernel more.
        """
        (next_block, next_result) = self.strides
        nbytes = 3 * self.numel * itemsize + device.launch_bytes
        return 0 < next_block < next_result and sectors * SECTOR_BYTES > nbytes

    def copy_of(
        self, snode: SchedulerNode, workspace: ir.Buffer, offset: sympy.Expr
    ) -> SchedulerNode:
        """``snode``, which has the result, as a copy of what is in ``workspace``."""
        buffer = snode.get_outputs()[0].node
        assert isinstance(buffer, ir.ComputedBuffer)
        # the loops go as what is stored
        sizes, strides = (
            [sympy.Integer(n) for n in reversed(each)] for each in (self.sizes, self.strides)
        )

        def load(index: Sequence[sympy.Expr]) -> ops.OpsValue:
            result, block = index
            return ops.load(workspace.get_name(), offset + block * sizes[0] + result)

        device, dtype = buffer.get_device_or_error(), buffer.get_dtype()
        copy = ir.ComputedBuffer(
            name=buffer.get_name(),
            layout=ir.FixedLayout(device, dtype, sizes, strides),
            data=ir.Pointwise(device=device, dtype=dtype, inner_fn=load, ranges=sizes),
        )
        copy.operation_name, copy.origins = buffer.operation_name, buffer.origins
        node = SchedulerNode(snode.scheduler, copy)
        node.ancestors = snode.ancestors
        node.min_order, node.max_order = snode.min_order, snode.max_order
        # what is allocated is the buffer, whatever sizes the layout above has
        node.outputs, node.outputs_by_name = snode.outputs, snode.outputs_by_name
        return node


def turned_results(
    matrix: Matrix,
    along: str,
    tile: tuple[int, int],
    results: dict[SchedulerNode, Strides],
    operations: OrderedSet[str],
) -> dict[str, Turned]:
    """
    By buffer, those of the ``results`` of blocks ``along`` "x" or "y" of ``matrix`` that are
    worth turning. Each is stored where it says, by `Matrix.ranges`, and not at all where none
    but ``operations``, those of the kernel, read it. ``tile``: rows and columns of a program.
    """
    if along == "x":
        blocks, others = (matrix.columns, COLUMN_BLOCK), (matrix.rows, ROW_BLOCK, ROW)
    else:
        blocks, others = (matrix.rows, ROW_BLOCK), (matrix.columns, COLUMN_BLOCK, COLUMN)
    sizes = blocks[0] // matrix.block(along), others[0]
    other_block = int(matrix.ranges[others[2]])
    # a tile has one for each of its rows, or columns
    sectors = matrix.numel // tile[along == "x"]
    found: dict[str, Turned] = {}
    for node, at in results.items():
        name = node.get_outputs()[0].get_name()
        next_block, outer, inner = (int(at.strides[v]) for v in (blocks[1], *others[1:]))
        turned = Turned(sizes, (next_block, inner))
        device = DeviceModel.of(DeviceProperties.create(node.get_device()))
        if (
            at.start == 0
            and outer == other_block * inner
            and not node.scheduler.can_buffer_be_removed_through_fusion(name, operations)
            and turned.pays(sectors, get_dtype_size(V.graph.get_dtype(name)), device)
        ):
            found[name] = turned
    return found


def of_one_dtype(results: dict[str, Turned]) -> dict[str, Turned]:
    """Those of the first one's, as a workspace is."""
    dtypes = {name: V.graph.get_dtype(name) for name in results}
    first = next(iter(dtypes.values()), None)
    return {name: each for name, each in results.items() if dtypes[name] == first}


def codegen_turned(
    scheduling: SIMDScheduling,
    nodes: Sequence[SchedulerNode],
    results: dict[str, Turned],
    arg: WorkspaceArg,
    offsets: dict[str, sympy.Expr],
) -> None:
    """
    The kernels that turn ``results`` of ``nodes``, which ``arg`` has from ``offsets`` on:
    one for those of the same sizes.
    """
    workspace = ir.Buffer(name=arg.get_name(), layout=arg.get_layout())
    scheduler = scheduling.scheduler
    V.graph.name_to_buffer[arg.get_name()] = workspace
    scheduler.name_to_buf[arg.get_name()] = SchedulerBuffer(scheduler, workspace, None)
    # with programmatic dependent launch, these kernels wait for the one before
    scheduler.previous_node = None
    copies: dict[tuple[int, int], list[SchedulerNode]] = {}
    for node in nodes:
        (name, *_) = node.get_buffer_names()
        if name in offsets:
            turned = results[name]
            copy = turned.copy_of(node, workspace, offsets[name])
            copies.setdefault(turned.sizes, []).append(copy)
    for alike in copies.values():
        scheduling.codegen_node(FusedSchedulerNode(scheduler, alike))
