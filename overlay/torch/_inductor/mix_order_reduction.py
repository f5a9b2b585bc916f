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
from typing import Optional, TYPE_CHECKING

import sympy

import torch
from torch.utils._ordered_set import OrderedSet

from . import config, ir
from .dependencies import MemoryDep
from .loop_body import MemoryUsageType
from .utils import sympy_dot, sympy_product, triton_type
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.simd import PartialAccumulate
    from .codegen.triton import TritonCSEVariable, TritonKernel
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
        if reduction_type not in ("sum", "prod"):
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


def why_too_many_reads(*nodes: BaseSchedulerNode) -> Optional[str]:
    """
    Why the mix-order kernel of ``nodes`` reads too many buffers to fit registers;
    None when it does not, or ``triton.mix_order_reduction_max_reads`` is 0. Each
    buffer is loaded in every iteration of the loop over rows, one that is updated
    in place too, so buffers written by the nodes count when they are read.
    """
    max_reads = config.triton.mix_order_reduction_max_reads
    reads = OrderedSet(
        dep.name
        for node in nodes
        for snode in node.get_nodes()
        for dep in snode.read_writes.reads
        if isinstance(dep, MemoryDep)
    )
    if 0 < max_reads < len(reads):
        return f"reads {len(reads)} buffers, more than {max_reads}"
    return None


def splits_agree(*nodes: BaseSchedulerNode) -> bool:
    """
    Whether the reductions of ``nodes`` are all split in two layers over the same
    ranges, or none is. Only then do they have one ``[xnumel, rnumel]``: layers of
    different reductions can have the same loops.
    """
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
    second layer is not a reduction of nothing but the first: a few elements are
    summed as an unrolled expression, inlined wherever the result is used.
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

    def is_storage_order(self) -> bool:
        """Whether column ``c`` of the workspace belongs at offset ``c``."""
        return all(
            size == 1 or V.graph.sizevars.statically_known_equals(stride, dense)
            for size, stride, dense in zip(
                self.size,
                self.stride,
                ir.FlexibleLayout.contiguous_strides(self.size),
            )
        )

    def codegen(self, buffer: ir.Buffer, reduced: str, dtype: torch.dtype) -> None:
        """
        Write ``reduced``, the text of a 1-D tensor of ``dtype`` with the columns,
        into ``buffer``: its name is bound where the order is the same, else, and
        when the buffer is a slice of another, it is written in place.
        """
        wrapper = V.graph.wrapper_code
        name = buffer.get_name()
        layout = buffer.get_layout()
        shape = wrapper.codegen_python_shape_tuple
        if self.is_storage_order() and not isinstance(
            buffer.get_output_spec(), ir.NonOwningLayout
        ):
            if buffer.get_dtype() != dtype:
                reduced += f".to({buffer.get_dtype()})"
            if len(layout.size) != 1 or layout.stride[0] != 1:
                reduced = f"reinterpret_tensor({reduced}, {shape(layout.size)}, {shape(layout.stride)}, 0)"
            wrapper.writeline(f"{name} = {reduced}")
            # the name is bound: do not allocate the buffer when it is used later
            wrapper.allocated.add(name)
        else:
            wrapper.codegen_allocation(buffer)
            wrapper.writeline(
                f"reinterpret_tensor({name}, {shape(self.size)}, {shape(self.stride)}, 0)"
                f".copy_({reduced}.view({shape(self.size)}))"
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
