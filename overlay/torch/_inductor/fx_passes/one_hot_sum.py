"""
Sums over rows that have two values: one where the row's index is, one elsewhere.

The gradient of a cross entropy by the log-probabilities, [rows, n], is zero but for the
target's column. The backward of the log-softmax sums it over each row: a loop of its own, or
a reduction that the whole row waits for. The elements are pointwise functions of a one-hot
row and of what all the row shares, so each is ``hit`` or ``miss``, and the sum is
``hit + (n - 1) * miss``. Nothing is left to reduce.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, Optional, Union

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._ordered_set import OrderedSet

from .. import config
from ..fx_utils import get_fake_args_kwargs


aten = torch.ops.aten
prims = torch.ops.prims
Scalar = Union[int, float, bool]

POINTWISE = (
    aten.add.Tensor,
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.neg.default,
    aten.sub.Tensor,
    aten.where.self,
    prims.convert_element_type.default,
)
# Where a first argument is zero they are too, or NaN.
ZERO_OF_ZERO = (
    aten.div.Tensor,
    aten.mul.Tensor,
    aten.neg.default,
    prims.convert_element_type.default,
)
# What a thread loads at once of a row of halves.
VECTOR = 8
# What describes the sum's own value, among its node's metadata.
OF_VALUE = ("val", "tensor_meta", "eager_input_vals")
VIEWS = (aten.expand.default, aten.unsqueeze.default, aten.view.default)


@dataclass(frozen=True)
class OneHot:
    """
    A tensor ``node`` that is ``hit`` where the coordinate along a dimension of ``length``
    elements is the row's ``index``, of size 1 along it, and ``miss`` elsewhere. Whether
    every index is within the row is ``in_range``; a row whose index is not is all ``miss``.
    """

    node: Node
    index: Node
    length: Union[Node, int]
    hit: Scalar
    miss: Scalar
    in_range: bool


def simplify_one_hot_sums(graph: Graph) -> int:
    """Replace the sums over rows of two values; returns how many there were."""
    if not config.simplify_one_hot_sums:
        return 0
    sums = graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    return sum(_replace(node) for node in sums)


def _replace(node: Node) -> bool:
    source, dims = cast(tuple[Node, list[int]], node.args[:2])
    value, result = source.meta["val"], node.meta["val"]
    if (
        value.ndim == 0
        or len(dims) != 1
        or not (value.is_floating_point() and result.is_floating_point())
    ):
        return False
    dim = dims[0] % value.ndim - value.ndim  # from the end, as shapes are broadcast
    one_hot = one_hot_of(source, dim)
    if one_hot is None:
        return False
    with node.graph.inserting_before(node):
        rows = _Rows(node, one_hot, dim)
        total = rows.sum(source)
        if total is None:
            rows.erase()
            return False
        if len(node.args) < 3 or not node.args[2]:
            total = rows.call(aten.squeeze.dim, total, dim)
    node.replace_all_uses_with(total)
    node.graph.erase_node(node)
    return True


def one_hot_of(source: Node, dim: int) -> Optional[OneHot]:
    """
    The one one-hot tensor that ``source`` is a pointwise function of, with what is the same
    along ``dim`` (negative) or differs along ``dim`` alone; None without.
    """
    shape = list(source.meta["val"].shape)
    shape[dim] = 1
    one_row = all(statically_known_true(size == 1) for size in shape)
    pending, seen, found = [source], OrderedSet[Node](), []
    while pending:
        node = pending.pop()
        if node in seen or is_same_along(node, dim):
            continue
        if is_column_vector(node, dim) and not one_row:
            continue
        seen.add(node)
        one_hot = _scattered(node, dim) or _compared(node, dim)
        if one_hot is not None:
            found.append(one_hot)
        elif node.target in POINTWISE:
            pending.extend(node.all_input_nodes)
        else:
            return None
    if len(found) != 1 or not _same_shape(found[0].index.meta["val"].shape, shape):
        return None
    return found[0]


def is_same_along(node: Node, dim: int) -> bool:
    """Whether ``node``, where it is broadcast, has one value along ``dim``."""
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor) or value.ndim < -dim:
        return True
    if statically_known_true(value.shape[dim] == 1) or node.target is aten.full.default:
        return True
    if node.target is not aten.expand.default:
        return False
    return is_same_along(cast(Node, node.args[0]), dim)


def is_column_vector(node: Node, dim: int) -> bool:
    """Whether ``node`` has values along ``dim`` alone, as the weights of classes do."""
    shape = list(node.meta["val"].shape)
    del shape[dim]
    return all(statically_known_true(size == 1) for size in shape)


def _scattered(node: Node, dim: int) -> Optional[OneHot]:
    # An index that is not within the row is an error of scatter's.
    if node.target is not aten.scatter.value:
        return None
    background, along, index, hit = cast(tuple[Node, int, Node, Any], node.args)
    ndim = node.meta["val"].ndim
    if (
        background.target is not aten.full.default
        or along % ndim - ndim != dim
        or isinstance(hit, Node)
        or isinstance(background.args[1], Node)
    ):
        return None
    length, miss = cast(list[Any], background.args[0])[dim], background.args[1]
    return OneHot(node, index, length, hit, cast(Scalar, miss), True)


def _compared(node: Node, dim: int) -> Optional[OneHot]:
    if node.target is not aten.eq.Tensor:
        return None
    left, right = cast(tuple[Node, Node], node.args)
    for index, places in ((left, right), (right, left)):
        while index.target is aten.expand.default:
            index = cast(Node, index.args[0])
        length = _row_of_places(places, dim)
        dtype = index.meta["val"].dtype
        if (
            length is not None
            and is_same_along(index, dim)
            and dtype in (torch.int32, torch.int64)
        ):
            return OneHot(node, index, length, True, False, False)
    return None


def _row_of_places(node: Node, dim: int) -> Optional[Union[Node, int]]:
    """The length of a row 0, 1, ... along ``dim``, if that is what ``node`` is."""
    value = node.meta["val"]
    if value.ndim < -dim or not is_column_vector(node, dim):
        return None
    size = value.shape[dim]
    while node.target in VIEWS:
        node = cast(Node, node.args[0])
    if (
        node.target is not prims.iota.default
        or node.kwargs["start"] != 0
        or node.kwargs["step"] != 1
        or not statically_known_true(node.meta["val"].shape[0] == size)
    ):
        return None
    return cast(Union[Node, int], node.args[0])


def _same_shape(left: Any, right: Any) -> bool:
    return len(left) == len(right) and all(
        statically_known_true(a == b) for a, b in zip(left, right)
    )


class _Rows:
    """The values of rows, [..., 1, ...], as nodes that it inserts for a sum of them."""

    def __init__(self, node: Node, one_hot: OneHot, dim: int) -> None:
        self.node = node
        self.one_hot = one_hot
        self.dim = dim
        self.fake_mode = (
            torch._guards.detect_fake_mode(node.meta["val"]) or contextlib.nullcontext()
        )
        self.made: list[Node] = []
        self.zeros = OrderedSet[Node]()

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A node like the sum, but for what it computes."""
        made = self.node.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in self.node.meta.items() if k not in OF_VALUE}
        _, fake_args, fake_kwargs = get_fake_args_kwargs(made)
        with self.fake_mode:
            made.meta["val"] = target(*fake_args, **fake_kwargs)
        self.made.append(made)
        return made

    def erase(self) -> None:
        for made in reversed(self.made):
            self.node.graph.erase_node(made)

    @functools.cached_property
    def in_range(self) -> Node:
        """Whether each row's index is in it."""
        index = self.one_hot.index
        above = self.call(aten.ge.Scalar, index, 0)
        below = self.call(aten.lt.Scalar, index, self.one_hot.length)
        return self.call(aten.logical_and.default, above, below)

    def sum(self, source: Node) -> Optional[Node]:
        """
        The sum of each row of ``source``; None where it misses many values, or where it
        takes more instructions than it spares.
        """
        one_hot, result = self.one_hot, self.node.meta["val"]
        miss, hit = (self.value(source, is_hit, {}) for is_hit in (False, True))
        if miss is None or hit is None:
            return None
        if miss in self.zeros and not self.is_row_of_vectors(source):
            return None
        # halves are summed in single precision
        dtype = torch.promote_types(result.dtype, torch.float32)
        miss, hit = (
            self.call(prims.convert_element_type.default, value, dtype)
            for value in (miss, hit)
        )
        if not one_hot.in_range:
            hit = self.call(aten.where.self, self.in_range, hit, miss)
        if isinstance(one_hot.length, Node):
            others: Union[Node, int] = self.call(operator.sub, one_hot.length, 1)
        else:
            others = one_hot.length - 1
        rest = self.call(aten.mul.Tensor, miss, others)
        total = self.call(aten.add.Tensor, hit, rest)
        shape = one_hot.index.meta["val"].shape
        if not _same_shape(total.meta["val"].shape, shape):
            sizes = [
                size
                if isinstance(size, int)
                else self.call(aten.sym_size.int, one_hot.index, i)
                for i, size in enumerate(shape)
            ]
            total = self.call(aten.expand.default, total, sizes)
        return self.call(prims.convert_element_type.default, total, result.dtype)

    def is_row_of_vectors(self, source: Node) -> bool:
        """
        Whether the elements of a thread, in a kernel that does not reduce, are known to be
        of one row. If not, each has an index and loads of its own for what its row shares:
        more instructions than a loop that does no more than sum what is computed anyway.
        """
        size = source.meta["val"].shape[self.dim]
        return self.dim != -1 or statically_known_true(size % VECTOR == 0)

    def value(self, node: Any, is_hit: bool, known: dict[Node, Optional[Node]]) -> Any:
        """``node`` where the index is, or elsewhere; None if it has many values there."""
        if not isinstance(node, Node):
            return node
        if node not in known:
            known[node] = self.compute(node, is_hit, known)
        return known[node]

    def compute(
        self, node: Node, is_hit: bool, known: dict[Node, Optional[Node]]
    ) -> Optional[Node]:
        if node is self.one_hot.node:
            return self.constant(
                self.one_hot.hit if is_hit else self.one_hot.miss, node
            )
        if is_same_along(node, self.dim):
            while node.target is aten.expand.default:
                node = cast(Node, node.args[0])
            if node.target is aten.full.default and node.meta["val"].ndim > 0:
                return self.constant(node.args[1], node)
            return node
        if node.target not in POINTWISE:
            return self.at_index(node) if is_hit else None
        args = [self.value(arg, is_hit, known) for arg in node.args]
        is_product = node.target is aten.mul.Tensor
        is_zero = (node.target in ZERO_OF_ZERO and args[0] in self.zeros) or (
            is_product and args[1] in self.zeros
        )
        if None in args:
            return self.constant(0, node) if is_product and is_zero else None
        made = self.call(cast(Any, node.target), *args, **node.kwargs)
        if is_zero:
            self.zeros.add(made)
        return made

    def constant(self, value: Any, node: Node) -> Node:
        """``value`` in as many dimensions as ``node``: those take part in its dtype."""
        fake = node.meta["val"]
        constant = self.call(
            aten.full.default,
            [1] * fake.ndim,
            value,
            dtype=fake.dtype,
            device=fake.device,
            pin_memory=False,
        )
        if not isinstance(value, Node) and value == 0:
            self.zeros.add(constant)
        return constant

    def at_index(self, vector: Node) -> Node:
        """The element of a column vector that each row's index is."""
        index = self.one_hot.index
        if not self.one_hot.in_range:
            index = self.call(aten.mul.Tensor, index, self.in_range)
        flat = self.call(aten.view.default, vector, [-1])
        return self.call(aten.index.Tensor, flat, [index])
