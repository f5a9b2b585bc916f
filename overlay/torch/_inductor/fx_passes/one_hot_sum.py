"""
Sums over rows that have two values: one where the row's index is, one elsewhere.

With smoothed labels the gradient of a cross entropy by the log-probabilities, [rows, n], is
one value but for the target's column, and that of one gathered from each row is zero but for
it. The backward of the log-softmax sums it over each row: a loop of its own that stores the row
for the next, or a reduction that the whole row waits for. The elements are pointwise functions
of a one-hot row and of what all the row shares, so each is ``hit`` or ``miss``, and the sum is
``hit + (n - 1) * miss``. Nothing is left to reduce.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast, Optional

import torch
from torch.fx import Graph, map_arg, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._ordered_set import OrderedSet

from .. import config
from ..device_model import DeviceModel
from ..looped_rows import SHORT_ROW
from ..pointwise_rows import is_worth_a_loop
from ..runtime.hints import DeviceProperties
from .bucketed_sum import is_of_shape
from .inserted import insert_like
from .one_hot_rows import (
    have_same_strides,
    one_hot_rows_of,
    OneHotRows,
    SCATTERS,
)


aten = torch.ops.aten
prims = torch.ops.prims

# Whether a value is zero, or NaN, by which of its arguments are zero.
POINTWISE: dict[Any, Callable[[list[bool]], bool]] = {
    aten.add.Tensor: all,
    aten.div.Tensor: operator.itemgetter(0),
    aten.mul.Tensor: any,
    aten.neg.default: all,
    aten.sub.Tensor: all,
    aten.where.self: lambda zeros: zeros[2] and (zeros[0] or zeros[1]),
    prims.convert_element_type.default: operator.itemgetter(0),
}


def simplify_one_hot_sums(graph: Graph) -> int:
    """
    Replace the sums over rows of two values; returns how many there were.

    Rows that are zero elsewhere keep theirs, for which nothing is stored, unless they are
    long: the division that finds an element's column takes longer than the sum.
    """
    if not config.simplify_one_hot_sums:
        return 0
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    return sum(_replace(node) for node in sums)


def _replace(node: Node) -> bool:
    # No dims, None or an empty list, are all of them.
    source, dims = cast(tuple[Node, Optional[list[int]]], node.args[:2])
    value, result = source.meta.get("val"), node.meta.get("val")
    if (
        value is None
        or result is None  # inserted without, by a pass of the user
        or value.ndim == 0
        or not dims
        or len(dims) != 1
        or not (value.is_floating_point() and result.is_floating_point())
    ):
        return False
    dim = dims[0] % value.ndim - value.ndim  # from the end, as shapes are broadcast
    # An infinite ``miss`` counts unless there is none, nor has a row of none a value.
    if not statically_known_true(value.shape[dim] > 1):
        return False
    one_hot = one_hot_of(source, dim)
    if one_hot is None:
        return False
    if is_zero_elsewhere(source) and not has_long_rows(value, dim):
        return False
    with node.graph.inserting_before(node):
        rows = _Rows(node, one_hot, dim)
        total = rows.sum(source)
        if len(node.args) < 3 or not node.args[2]:
            total = rows.call(aten.squeeze.dim, total, dim)
        # Stored, as the sum was: inlined in what uses it, its loads would be added to
        # theirs, which may be too many for one buffer, and what is not stored at once is
        # not in place. A row's one value is there already.
        if not (rows.is_value(source) and have_same_strides(total, node)):
            order = prims.inductor_force_stride_order.default
            total = rows.call(order, total, result.stride())
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)
    return True


def one_hot_of(source: Node, dim: int) -> Optional[OneHotRows]:
    """
    The one-hot rows along ``dim`` (negative) that ``source`` is a pointwise function of, with
    what is the same along it; None of several, or without.
    """
    pending, seen = [source], OrderedSet[Node]()
    found: list[OneHotRows] = []
    while pending:
        node = pending.pop()
        if node in seen or is_same_along(node, dim):
            continue
        seen.add(node)
        one_hot = one_hot_rows_of(node)
        if one_hot is not None and one_hot.dim - node.meta["val"].ndim == dim:
            found.append(one_hot)
        elif node.target in POINTWISE:
            pending.extend(node.all_input_nodes)
        else:
            return None
    if len(found) != 1 or not is_of_shape(found[0].node, source.meta["val"].shape):
        return None
    return found[0]


def is_same_along(node: Node, dim: int) -> bool:
    """Whether ``node``, where it is broadcast, has one value along ``dim``."""
    value = node.meta.get("val")
    if value is None:
        return False
    if not isinstance(value, torch.Tensor) or value.ndim < -dim:
        return True
    if statically_known_true(value.shape[dim] == 1) or node.target is aten.full.default:
        return True
    if node.target is not aten.expand.default:
        return False
    return is_same_along(cast(Node, node.args[0]), dim)


def has_long_rows(value: torch.Tensor, dim: int) -> bool:
    """
    Whether the rows of ``value``, along ``dim``, are long enough for a pointwise kernel to loop
    over them, whose other conditions are known only of its nodes; or for a reduction of them to
    loop, which reads them twice.
    """
    columns = value.shape[-1]
    if dim != -1 or value.device.type != "cuda" or not isinstance(columns, int):
        return False
    device = DeviceModel.of(DeviceProperties.create(value.device))
    if columns > SHORT_ROW and device.type == "cuda":  # not "hip"
        return True
    rows = value.numel() // columns
    if not isinstance(rows, int):
        rows = rows.node.hint if rows.node.has_hint() else 0
    return is_worth_a_loop(rows, columns, device)


def is_zero_elsewhere(source: Node) -> bool:
    """Whether ``source`` is known to be zero, or NaN, where nothing is scattered."""

    @functools.cache
    def is_zero(value: Any) -> bool:
        if not isinstance(value, Node):
            return value == 0
        if value.target in SCATTERS:
            return is_zero(value.args[0])
        if value.target in (aten.full.default, aten.scalar_tensor.default):
            return is_zero(value.args[-1])
        of_arguments = POINTWISE.get(value.target)
        return of_arguments is not None and of_arguments([*map(is_zero, value.args)])

    return is_zero(source)


class _Rows:
    """The values of rows, [..., 1, ...], as nodes that it inserts for a sum of them."""

    def __init__(self, node: Node, one_hot: OneHotRows, dim: int) -> None:
        self.node = node
        self.one_hot = one_hot
        self.dim = dim
        self.sizes, self.miss = cast(tuple[list[Any], Any], one_hot.background.args)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node like the sum, but for what it computes."""
        return insert_like(self.node, target, *args, **kwargs)

    def is_value(self, source: Node) -> bool:
        """Whether the sum of each row of ``source`` is its one value: all else is zero."""
        while source.target is prims.convert_element_type.default:
            source = cast(Node, source.args[0])
        return source is self.one_hot.node and self.miss == 0

    def sum(self, source: Node) -> Node:
        """The sum of each row of ``source``; of halves, in single precision."""
        result = self.node.meta["val"].dtype
        dtype = torch.promote_types(result, torch.float32)
        convert = functools.partial(self.call, prims.convert_element_type.default)
        hit = convert(self.value(source, True), dtype)
        if self.is_value(source):
            return convert(hit, result)
        miss = convert(self.value(source, False), dtype)
        others = self.sizes[self.dim]
        others = (
            others - 1
            if isinstance(others, int)
            else self.call(operator.sub, others, 1)
        )
        total = self.call(
            aten.add.Tensor, hit, self.call(aten.mul.Tensor, miss, others)
        )
        return convert(total, result)

    def value(self, source: Node, is_hit: bool) -> Node:
        """``source`` where the row's index is, or elsewhere."""

        @functools.cache
        def value(node: Node) -> Node:
            if node is self.one_hot.node:
                return self.hit() if is_hit else self.constant(self.miss)
            if is_same_along(node, self.dim):
                return self.of_row(node)
            args = cast(tuple[Any, ...], map_arg(node.args, value))
            return self.call(cast(Any, node.target), *args, **node.kwargs)

        return value(source)

    def hit(self) -> Node:
        """The value of each row that is at its index."""
        values = self.one_hot.values
        if not isinstance(values, Node):
            return self.constant(values)
        if self.one_hot.lacks_dim:
            return self.call(aten.unsqueeze.default, values, self.one_hot.dim)
        return values

    def constant(self, element: Any) -> Node:
        """A one-hot tensor's ``element`` in every row."""
        fake, sizes = self.one_hot.node.meta["val"], [*self.sizes]
        sizes[self.dim] = 1
        return self.call(
            aten.full.default,
            sizes,
            element,
            dtype=fake.dtype,
            device=fake.device,
            pin_memory=False,
        )

    def of_row(self, node: Node) -> Node:
        """``node``, of size 1 along the row if it has that dimension."""
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or value.ndim < -self.dim:
            return node
        row = self.call(aten.select.int, node, self.dim, 0)
        return self.call(aten.unsqueeze.default, row, self.dim)
