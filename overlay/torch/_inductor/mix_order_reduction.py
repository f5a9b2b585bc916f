"""
What a mix-order reduction kernel accumulates, and for whom.

A mix-order kernel computes two reductions of one ``[xnumel, rnumel]`` tensor in
one pass. The contiguous node reduces each row; the other node reduces over the
rows, so every program keeps one partial accumulator of ``rnumel`` elements a
reduction, writes it to the workspace, and a final reduction sums those partials.
The functions here say what is right for the partial accumulators. They hold no
state, and decide nothing about profitability.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, TYPE_CHECKING, Union

import sympy

import torch
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from . import config, ir
from .dependencies import Dep, MemoryDep
from .loop_body import MemoryUsageType
from .mix_order_debug import debug_options
from .runtime.hints import ReductionHint
from .runtime.runtime_utils import ceildiv, last_power_of_2, next_power_of_2
from .utils import sympy_dot, sympy_product, triton_type
from .virtualized import ops, V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .codegen.simd import PartialAccumulate
    from .codegen.triton import (
        BlockDescriptorOptions,
        IndexingOptions,
        TritonCSEVariable,
        TritonKernel,
    )
    from .scheduler import BaseSchedulerNode, SchedulerNode


def accumulate_dtype(dtype: torch.dtype) -> Optional[torch.dtype]:
    """
    The dtype in which partials of a reduction that returns ``dtype`` are kept
    from the first row to the final reduction, as eager keeps them: float32 for
    the half types, the type itself for float32 and float64, int64 for integers.
    None when no dtype of the workspace holds the result.
    """
    if dtype in (torch.float16, torch.bfloat16, torch.float32):
        return torch.float32
    if dtype == torch.float64:
        return torch.float64
    if dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ):
        return torch.int64
    return None


def partial_reduction_types() -> OrderedSet[str]:
    """
    The reductions that can be partial accumulators: one value a column, a neutral
    element in the dtype it is kept in, and a final reduction that propagates NaN
    where the kernel does.
    """
    types = OrderedSet(["sum", "prod"])
    if debug_options().extrema:
        types |= OrderedSet(["max", "min"])
    return types


def why_not_partial_accumulators(*nodes: BaseSchedulerNode) -> Optional[str]:
    """
    Why the reductions of ``nodes`` can not be the partial accumulators of one
    mix-order kernel; None when they can.
    """
    reductions = [
        snode for node in nodes for snode in node.get_nodes() if snode.is_reduction()
    ]

    if not splits_agree(*nodes):
        return "reductions were split over different ranges"

    for snode in reductions:
        reduction_type = snode.node.get_reduction_type()  # type: ignore[union-attr]
        if reduction_type not in partial_reduction_types():
            return f"{reduction_type} is not kept as a partial accumulator"

    # The nodes of this side run after the kernel, from what the final reductions
    # made, so a reduction in the kernel can not read what one of them writes.
    names = OrderedSet(name for node in nodes for name in node.get_operation_names())
    if any(snode.ancestors & names for snode in reductions):
        return "a reduction depends on another node of its side"

    dtypes = {accumulate_dtype(snode.node.get_dtype()) for snode in reductions}  # type: ignore[union-attr]
    if None in dtypes:
        return "no accumulator holds the result's dtype"
    if len(dtypes) > 1:
        return "the partials of one workspace need one dtype"

    for snode in reductions:
        buffer = final_buffer(snode)
        if buffer is None:
            return "the second layer of a split reduction is not a reduction of its own"
        if type(layout := buffer.get_output_spec()) not in (
            ir.FixedLayout,
            ir.NonOwningLayout,
        ):
            return f"the result can not be written through a {type(layout).__name__}"
        if snode.node._split_size is None and FinalReduction.create(snode) is None:  # type: ignore[union-attr]
            return "the result's index is not affine in the loops"
    return None


def splits_agree(*nodes: BaseSchedulerNode) -> bool:
    """
    Whether the reductions of ``nodes`` are all split in two layers over the same
    ranges, or none is. Only then do they have one ``[xnumel, rnumel]``: layers of
    different reductions can have the same loops. A scan or a sort, which counts as a
    reduction, has none.
    """
    if any(
        isinstance(snode.node, ir.ComputedBuffer)
        and isinstance(snode.node.data, (ir.Scan, ir.Sort))
        for node in nodes
        for snode in node.get_nodes()
    ):
        return False
    domains = OrderedSet(
        None
        if snode.node._split_size is None
        else tuple(
            V.graph.sizevars.simplify(sympy_product(ranges))
            for ranges in (
                snode.node._original_ranges,
                snode.node._original_reduction_ranges,
            )
        )
        for node in nodes
        for snode in node.get_nodes()
        if snode.is_reduction() and isinstance(snode.node, ir.ComputedBuffer)
    )
    return len(domains) <= 1


def final_buffer(snode: SchedulerNode) -> Optional[ir.ComputedBuffer]:
    """
    The buffer that holds the result of the reduction ``snode``: its own, or,
    when lowering split it in two layers, that of the second layer. None when the
    second layer is not a reduction of nothing but the first.
    """
    node = snode.node
    assert isinstance(node, ir.ComputedBuffer)
    if node._split_size is None:
        return node

    users = snode.get_outputs()[0].users
    if len(users) != 1:
        return None
    second = users[0].node.node  # type: ignore[union-attr]
    if (
        isinstance(second, ir.ComputedBuffer)
        and isinstance(second.data, ir.Reduction)
        and second.get_reduction_type() == node.get_reduction_type()
        and len(second.get_read_names()) == 1
        and V.graph.sizevars.statically_known_list_equals(
            second.data.ranges, node._original_ranges
        )
        and V.graph.sizevars.statically_known_list_equals(
            second.data.reduction_ranges, node.data.ranges[len(second.data.ranges) :]
        )
    ):
        return second
    return None


@dataclasses.dataclass(frozen=True)
class FinalReduction:
    """
    Where the final reduction of one partial accumulator goes. A row of the
    workspace holds the columns in the order of the loops of the reduction,
    ``size`` row-major; the result for loop index ``i`` belongs at offset
    ``sum(i[k] * stride[k])`` of the buffer.
    """

    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]

    @classmethod
    def create(cls, snode: SchedulerNode) -> Optional[FinalReduction]:
        """From a reduction whose loops are those of the whole tensor."""
        body = snode._body
        (entry,) = body.memory_usage[MemoryUsageType.STORE_REDUCTION]
        index = body.indexing_exprs[entry.index_name]
        stride = V.graph.sizevars.stride_vars(index, body.iter_vars)
        if sympy.expand(index - sympy_dot(body.iter_vars, stride)) != 0:
            return None
        return cls(tuple(body.sizes[0]), tuple(stride))

    def scheduler_node(
        self,
        snode: SchedulerNode,
        partial: PartialAccumulate,
        workspace: ir.Buffer,
        offset: sympy.Expr,
        nsplit: Union[int, sympy.Expr],
    ) -> SchedulerNode:
        """
        ``snode``, which computes the result, as a reduction over the ``nsplit`` rows
        of ``workspace`` that begin at element ``offset``.
        """
        buffer = snode.node
        assert isinstance(buffer, ir.ComputedBuffer)
        device, dtype = buffer.get_device_or_error(), partial.dtype
        dense = ir.FlexibleLayout.contiguous_strides(self.size)

        def load(
            index: Sequence[sympy.Expr], row: Sequence[sympy.Expr] = (sympy.S.Zero,)
        ) -> ops.OpsValue:
            column = sympy_dot(index, dense)
            return ops.load(
                workspace.get_name(),
                offset + row[0] * sympy_product(self.size) + column,
            )

        data: Union[ir.Pointwise, ir.Reduction]
        if nsplit == 1:
            data = ir.Pointwise(
                device=device, dtype=dtype, inner_fn=load, ranges=[*self.size]
            )
        else:
            data = ir.Reduction(
                device=device,
                dtype=dtype,
                inner_fn=load,
                ranges=[*self.size],
                reduction_ranges=[sympy.sympify(nsplit)],
                reduction_type=partial.reduction_type,  # type: ignore[arg-type]
                src_dtype=dtype,
                reduction_hint=ReductionHint.OUTER,
            )
        final = ir.ComputedBuffer(
            name=buffer.get_name(),
            layout=ir.FixedLayout(
                device, buffer.get_dtype(), [*self.size], [*self.stride]
            ),
            data=data,
        )
        final.operation_name = buffer.operation_name
        final.origins = buffer.origins
        node = type(snode)(snode.scheduler, final)
        node.ancestors = snode.ancestors
        # the layout above says where to store; what is allocated is the buffer
        node.outputs = snode.outputs
        node.outputs_by_name = snode.outputs_by_name
        return node


def final_node(snode: SchedulerNode) -> SchedulerNode:
    """The node of ``final_buffer``: ``snode``, or the second layer of its split."""
    if snode.node._split_size is None:  # type: ignore[union-attr]
        return snode
    return snode.get_outputs()[0].users[0].node  # type: ignore[return-value]


# Of up to two accumulators, the elements that a program of their final reduction loads
# at once, and a thread of it.
MAX_FINAL_TILE = 16 * 1024
FINAL_ELEMENTS_PER_THREAD = 32


def final_reduction_kwargs(
    nsplit: Union[int, sympy.Expr], columns: sympy.Expr, reductions: int
) -> dict[str, Any]:
    """
    Of the kernel that makes ``reductions`` results, of ``columns`` each, of ``nsplit``
    rows of a workspace. It is bound by latency, so a program loads all rows at once: of
    16 columns, and where that makes few programs, of 8 or 4, half a 32-byte sector.
    """
    # a circle: codegen.triton imports this module in turn
    from .codegen.triton import FixedTritonConfig

    kwargs: dict[str, Any] = {"override_cooperative_reduction": False}
    if nsplit == 1 or not isinstance(nsplit, (int, sympy.Integer)):
        return kwargs
    if not (config.max_autotune or config.coordinate_descent_tuning):
        numel = V.graph.sizevars.optimization_hint(columns, fallback=4096)
        xblock = max(4, min(16, next_power_of_2(numel) // 64))
        pairs = ceildiv(reductions, 2)
        most = last_power_of_2(max(1, MAX_FINAL_TILE // (pairs * xblock)))
        r0_block = min(next_power_of_2(int(nsplit)), most)
        threads = xblock * r0_block * pairs // FINAL_ELEMENTS_PER_THREAD
        kwargs["override_persistent_reduction"] = False
        kwargs["fixed_config"] = FixedTritonConfig(
            {
                "XBLOCK": xblock,
                "R0_BLOCK": r0_block,
                "num_warps": max(4, min(32, next_power_of_2(max(1, threads)) // 32)),
                "num_stages": 1,
            }
        )
    return kwargs


def ready_epilogue(
    mix_order: Sequence[BaseSchedulerNode], seconds: Sequence[SchedulerNode]
) -> list[SchedulerNode]:
    """
    The pointwise nodes that were fused with the second layers ``seconds``, where
    nothing stands before them but what has run, the nodes ``mix_order`` of the
    kernel, and ``seconds``: they can run in the kernel of the final reductions.
    """
    if not seconds:
        return []
    scheduler = seconds[0].scheduler
    names = OrderedSet(second.get_name() for second in seconds)
    done = names | scheduler.completed_operations
    for node in mix_order:
        done |= node.get_operation_names()

    epilogue: list[SchedulerNode] = []
    for fused in dict.fromkeys(map(scheduler.get_fused_node, seconds)):
        # not in the list: a part of a foreach kernel, or of another graph partition
        if fused not in scheduler.nodes_in_codegen:
            continue
        nodes = [node for node in fused.get_nodes() if node.get_name() not in names]
        inside = done | OrderedSet(node.get_name() for node in nodes)
        if not any(
            node.is_reduction()
            or node.has_aliasing_or_mutation()
            or node.ancestors - inside
            for node in nodes
        ):
            epilogue += nodes  # type: ignore[arg-type]
            done = inside
    return epilogue


def leading_epilogue(
    finals: Sequence[SchedulerNode],
    epilogue: Sequence[SchedulerNode],
    columns: sympy.Expr,
) -> list[SchedulerNode]:
    """
    The first nodes of ``epilogue`` that can be in the kernel of the final reductions
    ``finals``: those that work on its ``columns``, and read what it writes where it is
    written. Second layers and what was fused with them come together here for the
    first time, so the scheduler did not compare their indices.
    """
    for final in finals:
        dtype = final.node.get_dtype()  # type: ignore[union-attr]
        # in registers a narrower integer has not wrapped around
        if not dtype.is_floating_point and dtype != final.node.data.dtype:  # type: ignore[union-attr]
            return []

    written: dict[str, Dep] = {}
    leading: list[SchedulerNode] = []
    for node in (*finals, *epilogue):
        if node not in finals:
            if node.group[1] != (columns, 1) or any(
                dep.name in written
                and not (
                    isinstance(dep, MemoryDep)
                    and dep.normalize() == written[dep.name].normalize()
                )
                for dep in node.read_writes.reads
            ):
                break
            leading.append(node)
        written.update((dep.name, dep) for dep in node.read_writes.writes)
    return leading


def is_row_invariant(indexing: IndexingOptions) -> bool:
    """
    Whether a load reads the same elements in every row, so that it can be done
    once, before the loop over rows. Stores in that loop keep Triton from moving it.
    """
    return "xmask" not in indexing.mask_vars and not free_symbol_is_type(
        indexing.index, SymT.XBLOCK
    )


def expand_row_invariant(
    kernel: TritonKernel,
    indexing: Union[IndexingOptions, BlockDescriptorOptions],
) -> Union[IndexingOptions, BlockDescriptorOptions]:
    """
    The indexing of a load, expanded from ``[1, R0_BLOCK]`` to ``[XBLOCK, R0_BLOCK]``
    where it is hoisted out of the loop over rows.

    Triton lays a load out by its own elements. A row has fewer than the tile that the
    threads share, or wider ones, so a thread would have fewer adjacent columns of it;
    and the row's layout, or both, would be that of what is computed with it, in every
    iteration. A tile has the layout of the other tiles. Its rows are one in registers:
    their addresses are the same.
    """
    # a circle: codegen.triton imports this module in turn
    from .codegen.triton import IndexingOptions

    if (
        not debug_options().expand_row_invariants
        or kernel.row_split is None
        or not kernel.row_split.hoist
        or not kernel.mix_order_reduction
        or not isinstance(indexing, IndexingOptions)
        or indexing.expand_shape
        or not indexing.has_rindex()
        or indexing.has_tmpmask()
        or not is_row_invariant(indexing)
    ):
        return indexing
    shape = ("XBLOCK", "R0_BLOCK")
    return dataclasses.replace(
        indexing,
        index_str=f"tl.broadcast_to({indexing.index_str}, [{', '.join(shape)}])",
        expand_shape=shape,
    )


def partial_accumulate_value(
    kernel: TritonKernel,
    partial: PartialAccumulate,
    identity: str,
) -> TritonCSEVariable:
    """
    The ``[XBLOCK, R0_BLOCK]`` tile that one iteration adds to a partial
    accumulator, emitted into ``kernel.body``.

    Rows beyond ``xnumel`` contribute ``identity``: their loads are masked, but
    what the body makes of a masked load need not be neutral (``exp(0)`` is 1, and
    0 is not neutral for a product). A value that does not depend on the row is
    one row wide, and counts once for each row of the tile.
    """
    value = partial.value
    tile = ("XBLOCK", "R0_BLOCK")
    if value.dtype != partial.dtype:
        value = kernel.cse.generate(
            kernel.body,
            f"{value}.to({triton_type(partial.dtype)})",
            dtype=partial.dtype,
            shape=value.shape,
        )
    if value.shape is None or tuple(map(str, value.shape)) != tile:
        value = kernel.cse.generate(
            kernel.body,
            f"tl.broadcast_to({value}, [XBLOCK, R0_BLOCK])",
            dtype=value.dtype,
            shape=tile,
        )
    if not kernel._has_constant_xmask():
        value = kernel.cse.generate(
            kernel.body,
            f"tl.where(xmask, {value}, {identity})",
            dtype=value.dtype,
            shape=tile,
        )
    return value


def unpadded_accumulator(kernel: TritonKernel, name: str, identity: str) -> list[str]:
    """
    Lines that leave what is not a column out of the partial accumulator ``name``, before
    it is stored.

    A store's mask says so, too, but the accumulator has another layout there than in the
    loop, where that has half types: it goes through shared memory as a whole, so ptxas
    keeps registers for the columns that ``R0_BLOCK`` pads the row by, and computes them in
    each iteration.
    """
    if kernel.row_split is None or not kernel.row_split.drop_padding:
        return []
    return [f"{name} = tl.where(r0_mask, {name}, {identity})"]
