"""
Cancel the split of a contiguous node, so that a mix-order reduction can have it.

Where a tensor has few rows, lowering splits the reduction of each in two layers,
before the scheduler can know that another reduction runs over the same tensor in
the other order. A mix-order kernel reduces whole rows, so the first layer is made
the whole reduction again, and whatever reads it finds the result where it used to
find the first of the parts, and the reduction's identity in place of the others.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, TYPE_CHECKING
from unittest.mock import patch

import sympy

from torch.utils._ordered_set import OrderedSet

from . import ir
from .dependencies import StarDep, WeakDep
from .mix_order_debug import debug_options
from .ops_handler import WrapperHandler
from .utils import sympy_index_symbol
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import BaseSchedulerNode, Scheduler, SchedulerNode


def cancel_contiguous_splits(
    scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode]
) -> None:
    """
    Cancel the split of each contiguous node of ``nodes`` that a mix-order reduction
    wants, before anything is fused. One that shares its rows with such a node is
    cancelled too, so that both can be in the kernel.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction, SchedulerNode

    if not debug_options().cancel_split:
        return
    reductions = [
        node
        for node in nodes
        if isinstance(node, SchedulerNode)
        and node.is_reduction()
        and isinstance(node.node, ir.ComputedBuffer)
    ]
    split = [
        node
        for node in reductions
        if node.node._split_size is not None  # type: ignore[union-attr]
        and MixOrderReduction.is_contiguous_node(node)
        and can_cancel(node)
    ]
    wanted = OrderedSet(
        node
        for node in split
        if any(
            MixOrderReduction.can_fuse(node, other, cancel_split=True)
            for other in reductions
        )
    )
    siblings = [
        node
        for node in split
        if any(
            MixOrderReduction.get_numel_rnumel(node)
            == MixOrderReduction.get_numel_rnumel(other)
            and MixOrderReduction.has_common_read(node, other)
            for other in wanted
        )
    ]
    for node in OrderedSet([*wanted, *siblings]):
        cancel_split(scheduler, node)


def readers(node: SchedulerNode) -> list[BaseSchedulerNode]:
    """The nodes that read the buffer of ``node``."""
    (output,) = node.get_outputs()
    return [user.node for user in output.users if not user.is_weak]  # type: ignore[misc]


def can_cancel(node: SchedulerNode) -> bool:
    """
    Whether all that read the first layer ``node`` are loops that can be traced
    again: its second layer, or nodes in which that is an unrolled expression.
    """
    # a circle: scheduler imports this module in turn
    from .scheduler import SchedulerNode

    (output,) = node.get_outputs()
    return (
        not output.get_aliases()
        and not output.get_mutations()
        and node.get_name() not in V.graph.get_output_names()
        and all(
            isinstance(reader, SchedulerNode)
            and isinstance(reader.node, ir.ComputedBuffer)
            and isinstance(reader.node.data, (ir.Pointwise, ir.Reduction))
            and (not is_second_layer(reader.node, node) or whole(reader.node))
            for reader in readers(node)
        )
    )


def is_second_layer(buffer: ir.ComputedBuffer, node: SchedulerNode) -> bool:
    """Whether ``buffer`` is a reduction over the parts that ``node`` makes."""
    parts = node.node.data.ranges[len(node.node._original_ranges) :]  # type: ignore[union-attr]
    return isinstance(
        buffer.data, ir.Reduction
    ) and V.graph.sizevars.statically_known_list_equals(
        buffer.data.reduction_ranges, parts
    )


def whole(buffer: ir.ComputedBuffer) -> bool:
    """Whether a reduction is in one layer and reads nothing but one buffer."""
    return buffer._split_size is None and len(buffer.get_read_names()) == 1


def cancel_split(scheduler: Scheduler, node: SchedulerNode) -> None:
    """Make ``node`` the whole reduction, and what reads it readers of its result."""
    buffer = node.node
    assert isinstance(buffer, ir.ComputedBuffer)
    assert isinstance(buffer.data, ir.Reduction)
    assert buffer._original_inner_fn is not None
    parts = Parts(buffer, buffer.data, tuple(buffer._original_ranges or ()))
    reading = readers(node)
    second = [
        reader
        for reader in reading
        if is_second_layer(reader.node, node)  # type: ignore[arg-type]
    ]

    buffer.layout = ir.FixedLayout(
        buffer.get_device_or_error(), buffer.get_dtype(), list(parts.ranges)
    )
    buffer.data = dataclasses.replace(
        buffer.data,
        inner_fn=buffer._original_inner_fn,
        ranges=parts.ranges,
        reduction_ranges=buffer._original_reduction_ranges,
    )
    buffer._split_size = None
    buffer._original_inner_fn = None
    trace_again(scheduler, node)

    for reader in reading:
        reader_buffer = reader.node
        assert isinstance(reader_buffer, ir.ComputedBuffer)
        data = reader_buffer.data
        if reader in second:
            # one part is left to reduce
            assert isinstance(data, ir.Reduction)
            first = [sympy.S.Zero] * len(data.reduction_ranges)
            reader_buffer.data = ir.Pointwise(
                device=data.device,
                dtype=data.dtype,
                inner_fn=parts.replace(functools.partial(at, data.inner_fn, first)),
                ranges=data.ranges,
            )
        else:
            reader_buffer.data = dataclasses.replace(
                data, inner_fn=parts.replace(data.inner_fn)
            )
            if reader_buffer._original_inner_fn is not None:
                reader_buffer._original_inner_fn = parts.replace(
                    reader_buffer._original_inner_fn
                )
        trace_again(scheduler, reader)  # type: ignore[arg-type]


def at(
    inner_fn: Callable[..., Any],
    reduction_index: Sequence[sympy.Expr],
    index: Sequence[sympy.Expr],
) -> Any:
    """A reduction's value at one ``reduction_index``."""
    return inner_fn(index, reduction_index)


def trace_again(scheduler: Scheduler, node: SchedulerNode) -> None:
    """Make the loops and dependencies of ``node`` those of its buffer as it is now."""
    assert isinstance(node.node, ir.ComputedBuffer)
    # added by the scheduler: no loop has them
    added = [
        dep for dep in node.read_writes.reads if isinstance(dep, (WeakDep, StarDep))
    ]
    node.node.get_default_sizes_body.clear_cache(node.node)
    node._compute_attrs()
    node.set_read_writes(
        node.read_writes.with_read(OrderedSet(added)).rename(scheduler.mutation_renames)
    )
    node.prune_deps()


@dataclasses.dataclass(frozen=True)
class Parts:
    """
    What used to be the parts of each element of ``ranges``: ``buffer`` as it was,
    with the loops of ``data``, ``[*ranges, number of parts]``.
    """

    buffer: ir.ComputedBuffer
    data: ir.Reduction
    ranges: tuple[sympy.Expr, ...]

    def replace(self, inner_fn: Callable[..., Any]) -> Callable[..., Any]:
        """
        ``inner_fn``, which loads the parts, made to load the whole in place of the
        first, and to take the identity of the reduction for any other.
        """
        part = sympy_index_symbol("part_of_row")
        size = list(self.data.ranges)
        layout = ir.FixedLayout(
            self.data.device,
            self.data.dtype,
            size,
            [
                *ir.FlexibleLayout.contiguous_strides(self.ranges),
                *[part] * (len(size) - len(self.ranges)),
            ],
        )

        @functools.wraps(inner_fn)
        def replaced(*args: Any) -> Any:
            handler = _WholeForFirstPart(V.get_ops_handler(), self, part)
            with (
                patch.object(self.buffer, "layout", layout),
                V.set_ops_handler(handler),
            ):
                return inner_fn(*args)

        return replaced


class _WholeForFirstPart(WrapperHandler):
    def __init__(self, inner: Any, parts: Parts, part: sympy.Symbol) -> None:
        super().__init__(inner)
        self.parts = parts
        self.part = part

    def load(self, name: str, index: sympy.Expr) -> Any:
        if name != self.parts.buffer.get_name():
            return self._inner.load(name, index)
        element = index.subs(self.part, 0)
        if index == element:
            return self._inner.load(name, element)
        data = self.parts.data
        identity = ir.Reduction.default_accumulator(data.reduction_type, data.dtype)
        return self._inner.constant(identity, data.dtype)

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        # its handler replaces this one
        return self._inner.masked(mask, self.parts.replace(body), other)
