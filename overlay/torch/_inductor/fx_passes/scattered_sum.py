"""
Sums of scattered values whose places are known, without atomics.

The backward of an interpolation, of a gather by an index that is computed from positions, or
of a position embedding, is a scatter: an ``index_put`` that accumulates in zeros. Its adds to
one address wait for each other. Where the index is known, the same is a sum over windows of
positions, a dimension at a time.

The backward of an interpolation adds four such scatters, or eight, of one gradient times weights
of each dimension. What has the same gradient is one sum: of each dimension, the weights of all
that is added to an element are added before.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, Optional, Union

import torch
from torch.fx import Graph, Node

from .. import config
from ..window_sum import window_sum
from .bucketed_sum import has_value, is_of_shape, masked_scatter
from .inserted import insert_like
from .positions import Positions, Window


aten = torch.ops.aten
prims = torch.ops.prims

# Of a gradient, and what it is converted to and from on the way.
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# A function of the positions of a dimension: a number, a node, or the sum or the product of two.
Factor = Union[int, Node, tuple[str, "Factor", "Factor"]]


@dataclass(frozen=True)
class Scatter:
    """
    ``values`` [*leading, *positions, *trailing], but for dimensions of one, that are added to
    zeros [*leading, *sizes, *trailing], by an index [positions] of each of the dimensions
    between, from ``first`` on.
    """

    node: Node
    first: int
    indices: tuple[Node, ...]

    @property
    def values(self) -> Node:
        """As the graph has them: another scatter's sum may be replaced meanwhile."""
        return cast(Node, self.node.args[3 if self.node.target is masked_scatter else 2])

    @property
    def sizes(self) -> tuple[int, ...]:
        shape = self.node.meta["val"].shape
        return tuple(shape[self.first : self.first + len(self.indices)])

    @property
    def trailing(self) -> int:
        """Dimensions after those of the indices."""
        return self.node.meta["val"].ndim - self.first - len(self.indices)


@dataclass(frozen=True)
class Product:
    """``base`` times a factor of each dimension, and 1 or -1."""

    base: Node
    factors: tuple[Factor, ...]
    sign: int = 1

    def times(self, index: int, factor: Factor) -> Product:
        own = self.factors[index]
        return self.with_factor(index, factor if own == 1 else ("mul", own, factor))

    def with_factor(self, index: int, factor: Factor, sign: int = 0) -> Product:
        factors = (*self.factors[:index], factor, *self.factors[index + 1 :])
        return Product(self.base, factors, sign or self.sign)

    def plus(self, other: Product) -> Optional[Product]:
        """The sum, where but one dimension has other factors."""
        pairs = zip(self.factors, other.factors)
        differ = [i for i, (a, b) in enumerate(pairs) if a != b]
        if self.base is not other.base or len(differ) != 1:
            return None
        (index,) = differ
        factors = (each.signed(index) for each in (self, other))
        return self.with_factor(index, ("add", *factors), sign=1)

    def signed(self, index: int) -> Factor:
        """The factor of dimension ``index``, with the sign."""
        own = self.factors[index]
        if self.sign == 1:
            return own
        return -own if isinstance(own, int) else ("mul", own, -1)


@dataclass(frozen=True)
class Separable:
    """
    What ``base`` adds to each element, a dimension after the other: where an index of one of
    its ``terms`` is the element, times the term's factor.
    """

    base: Node
    scatter: Scatter
    terms: tuple[tuple[tuple[Node, Factor], ...], ...]

    def with_terms(self, dim: int, terms: tuple[tuple[Node, Factor], ...]) -> Separable:
        return replace(self, terms=(*self.terms[:dim], terms, *self.terms[dim + 1 :]))


def sum_scattered(graph: Graph) -> int:
    """Replace the scatters whose places are known; returns how many there were."""
    if not config.simplify_one_hot_sums:
        return 0
    positions = Positions()
    scatters = {
        node: scatter
        for target in (aten.index_put.default, masked_scatter)
        for node in graph.find_nodes(op="call_function", target=target)
        if (scatter := scatter_of(node, positions)) is not None
    }
    for total in totals(scatters):
        total.replace(positions)
    return len(scatters)


def scatter_of(node: Node, positions: Positions) -> Optional[Scatter]:
    """What ``node`` scatters, where each of its indices is known, and of one dimension."""
    table, *args = cast(tuple[Any, ...], node.args)
    if node.target is masked_scatter:
        mask, *args = args
        if not positions.is_true(mask):
            return None
    elif len(args) < 3 or not args[2]:
        return None
    indices, values = args[:2]
    tensors = [index for index in indices if index is not None]
    first = indices.index(tensors[0]) if tensors else 0
    if (
        not tensors
        or None in indices[first : first + len(tensors)]
        or not all(map(has_value, (node, table, values, *tensors)))
    ):
        return None
    result, value = node.meta["val"], values.meta["val"]
    if (
        table.target is not aten.full.default
        or table.args[1] != 0
        or result.device.type != "cuda"
        or value.dtype not in FLOATS
        or value.dtype != result.dtype
        or any(x.meta["val"].dtype not in (torch.int32, torch.int64) for x in tensors)
        or any(x.meta["val"].device != result.device for x in tensors)
    ):
        return None
    scatter = Scatter(node, first, tuple(tensors))
    if not all(isinstance(size, int) for size in scatter.sizes) or None in (
        positions.window((x,), size) for x, size in zip(tensors, scatter.sizes)
    ):
        return None
    # Of the dimensions that the indices are broadcast to, each has one of its own, in order.
    shapes = [x.meta["val"].shape for x in tensors]
    at = torch.broadcast_shapes(*shapes)
    own = [
        [len(at) - len(shape) + dim for dim, size in enumerate(shape) if size != 1]
        for shape in shapes
    ]
    dims = [dim for each in own for dim in each]
    if any(len(each) > 1 for each in own) or dims != sorted({*dims}):
        return None
    shape = (*result.shape[:first], *at, *result.shape[first + len(tensors) :])
    return scatter if is_of_shape(values, shape) else None


@dataclass(frozen=True)
class Total:
    """
    The sum of ``scatters`` that nothing else reads, and of what they are added to.

    node: what has the value, the last of ``adds`` or the only scatter
    """

    node: Node
    adds: tuple[Node, ...]
    scatters: tuple[Scatter, ...]

    @property
    def others(self) -> list[Node]:
        """What is added to the scatters."""
        own = {*self.adds, *(scatter.node for scatter in self.scatters)}
        args = [arg for add in self.adds for arg in cast(tuple[Node, Node], add.args)]
        return [arg for arg in args if arg not in own]

    def replace(self, positions: Positions) -> None:
        with self.node.graph.inserting_before(self.node):
            sums = [self.sum(each, positions) for each in separables(self.scatters)]
            total = functools.reduce(functools.partial(self.call, aten.add.Tensor), sums)
            dtype = self.node.meta["val"].dtype
            total = self.call(prims.convert_element_type.default, total, dtype)
            for other in self.others:
                total = self.call(aten.add.Tensor, other, total)
        self.node.replace_all_uses_with(total)
        for node in (*reversed(self.adds), *(each.node for each in self.scatters)):
            self.node.graph.erase_node(node)

    def sum(self, part: Separable, positions: Positions) -> Node:
        """The sum of ``part``, from the outermost dimension on, of which most is contiguous."""
        scatter = part.scatter
        windows = [
            positions.window(tuple(dict.fromkeys(index for index, _ in terms)), size)
            for terms, size in zip(part.terms, scatter.sizes)
        ]
        if None in windows:
            # of terms whose windows are too far apart to be one
            dim = windows.index(None)
            parts = [part.with_terms(dim, (term,)) for term in part.terms[dim]]
            sums = [self.sum(each, positions) for each in parts]
            return functools.reduce(functools.partial(self.call, aten.add.Tensor), sums)
        value = self.of_positions(part.base, scatter)
        for i, (terms, window) in enumerate(zip(part.terms, windows)):
            assert window is not None
            dim, size = scatter.first + i, scatter.sizes[i]
            is_sum = window.exact and [factor for _, factor in terms] == [1]
            weights = None
            if not is_sum:
                dtype = torch.promote_types(value.meta["val"].dtype, torch.float32)
                weights = self.weights(terms, size, window, dtype)
            place = window.step, window.offset, window.divisor, window.size
            value = self.call(window_sum, value, weights, dim, size, *place)
        return value

    def of_positions(self, values: Node, scatter: Scatter) -> Node:
        """``values`` with a dimension for each index, of one position too, and no other."""
        shape = values.meta["val"].shape
        after = len(shape) - scatter.trailing
        ones = [dim for dim in range(scatter.first, after) if shape[dim] == 1]
        if ones:
            values = self.call(aten.squeeze.dims, values, ones)
        for dim, index in enumerate(scatter.indices, scatter.first):
            if index.meta["val"].numel() == 1:
                values = self.call(aten.unsqueeze.default, values, dim)
        return values

    def weights(
        self,
        terms: Sequence[tuple[Node, Factor]],
        elements: int,
        window: Window,
        dtype: torch.dtype,
    ) -> Node:
        """What each position of each element's window counts, [places, elements]."""
        device = self.node.meta["val"].device
        positions = terms[0][0].meta["val"].numel()
        element, place = (
            self.call(
                prims.iota.default,
                count,
                start=0,
                step=1,
                dtype=torch.int64,
                device=device,
                requires_grad=False,
            )
            for count in (elements, window.size)
        )
        place = self.call(aten.unsqueeze.default, place, 1)
        at = self.call(aten.mul.Tensor, element, window.step)
        at = self.call(aten.add.Tensor, at, window.offset)
        at = self.call(aten.div.Tensor_mode, at, window.divisor, rounding_mode="floor")
        at = self.call(aten.add.Tensor, at, place)
        kept = self.call(aten.clamp_max.default, at, positions - 1)
        kept = self.call(aten.clamp_min.default, kept, 0)
        is_one = self.call(aten.eq.Tensor, at, kept)
        counts = []
        for index, factor in terms:
            index = self.call(aten.view.default, index, [positions])
            hit = self.call(aten._unsafe_index.Tensor, index, [kept])
            hit = self.call(aten.eq.Tensor, hit, element)
            hit = self.call(aten.bitwise_and.Tensor, hit, is_one)
            weight = self.factor(factor, positions, dtype)
            if weight.meta["val"].ndim:
                weight = self.call(aten._unsafe_index.Tensor, weight, [kept])
            counts.append(self.call(aten.where.self, hit, weight, self.number(0, dtype)))
        return functools.reduce(functools.partial(self.call, aten.add.Tensor), counts)

    def factor(self, factor: Factor, positions: int, dtype: torch.dtype) -> Node:
        """``factor`` of each of the ``positions``; a number of all."""
        if isinstance(factor, int):
            return self.number(factor, dtype)
        if isinstance(factor, Node):
            flat = self.call(aten.view.default, factor, [positions])
            return self.call(prims.convert_element_type.default, flat, dtype)
        op, *args = factor
        target = aten.add.Tensor if op == "add" else aten.mul.Tensor
        of = (self.factor(arg, positions, dtype) for arg in args)
        return self.call(target, *of)

    def number(self, number: int, dtype: torch.dtype) -> Node:
        device = self.node.meta["val"].device
        return self.call(aten.full.default, [], number, dtype=dtype, device=device)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """
        A node like the sum, but for what it computes. What needs no gradient is not saved: the
        backward computes it.
        """
        made = insert_like(self.node, target, *args, **kwargs)
        if made.meta.get("partitioner_tag") == "is_backward":
            made.meta["partitioner_tag"] = "must_be_in_backward"
        return made


def totals(scatters: dict[Node, Scatter]) -> list[Total]:
    """Sums that the ``scatters`` are terms of; what is added to no other is one by itself."""
    adds: dict[Node, set[Node]] = defaultdict(set)
    terms: dict[Node, list[Scatter]] = defaultdict(list)
    for node, scatter in scatters.items():
        path, last = set(), node
        while (user := add_of(last)) is not None:
            path.add(user)
            last = user
        terms[last].append(scatter)
        adds[last] |= path
    return [
        Total(last, tuple(sorted(adds[last])), tuple(own)) for last, own in terms.items()
    ]


def add_of(node: Node) -> Optional[Node]:
    """The sum of ``node`` and of a tensor like it, where nothing else reads ``node``."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    if user.target is not aten.add.Tensor or user.kwargs or user.args[0] is user.args[1]:
        return None
    value = node.meta["val"]
    for each in (*user.args, user):
        if not has_value(each) or not is_of_shape(each, value.shape):
            return None
        if cast(Node, each).meta["val"].dtype != value.dtype:
            return None
    return user


def separables(scatters: Sequence[Scatter]) -> list[Separable]:
    """The fewest that what ``scatters`` scatter is the sum of."""
    alike: dict[Any, list[Separable]] = defaultdict(list)
    for scatter in scatters:
        product = product_of(scatter.values, scatter)
        terms = tuple((each,) for each in zip(scatter.indices, product.factors))
        part = Separable(product.base, scatter, terms)
        alike[product.base, scatter.first, scatter.sizes].append(part)
    out = []
    for found in alike.values():
        for dim in range(len(found[0].terms)):
            found = joined(found, dim)
        out += found
    return out


def joined(parts: Sequence[Separable], dim: int) -> list[Separable]:
    """``parts`` of one base, those that but dimension ``dim`` has other terms of as one."""
    out: dict[Any, Separable] = {}
    for part in parts:
        others = (*part.terms[:dim], *part.terms[dim + 1 :])
        key: Any = tuple(map(frozenset, others))
        if key not in out:
            out[key] = part
        elif {*out[key].terms[dim]} & {*part.terms[dim]}:
            out[part] = part  # what is added twice
        else:
            terms = out[key].terms[dim] + part.terms[dim]
            out[key] = out[key].with_terms(dim, terms)
    return list(out.values())


def product_of(values: Node, scatter: Scatter) -> Product:
    """
    ``values`` as a tensor of their shape times a factor of each of the scatter's dimensions.
    What halves are rounded to on the way is not.
    """
    shape = values.meta["val"].shape
    ones: tuple[Factor, ...] = (1,) * len(scatter.indices)
    dims = [
        dim
        for dim in range(scatter.first, len(shape) - scatter.trailing)
        if shape[dim] != 1
    ]
    own = [i for i, x in enumerate(scatter.indices) if x.meta["val"].numel() != 1]

    def dim_of(node: Any) -> Optional[int]:
        """The index whose dimension alone ``node`` is of."""
        if not has_value(node) or node.meta["val"].dtype not in FLOATS:
            return None
        sizes = node.meta["val"].shape
        at = [
            len(shape) - len(sizes) + i
            for i, size in enumerate(sizes)
            if not (isinstance(size, int) and size == 1)
        ]
        if len(at) != 1 or at[0] not in dims:
            return None
        return own[dims.index(at[0])]

    @functools.cache
    def product(node: Node) -> Product:
        args = node.args
        if node.kwargs or not all(isinstance(x, (Node, torch.dtype)) for x in args):
            return Product(node, ones)
        tensors = (node, *node.all_input_nodes)
        if not all(has_value(x) and x.meta["val"].dtype in FLOATS for x in tensors):
            return Product(node, ones)
        is_whole = [isinstance(x, Node) and is_of_shape(x, shape) for x in args]
        found: Optional[Product] = None
        if node.target in (prims.convert_element_type.default, aten.clone.default):
            found = product(cast(Node, args[0]))
        elif node.target is aten.neg.default:
            found = negated(product(cast(Node, args[0])))
        elif node.target is aten.mul.Tensor and any(is_whole):
            whole, other = args if is_whole[0] else reversed(args)
            index = dim_of(other)
            if index is not None:
                found = product(cast(Node, whole)).times(index, cast(Node, other))
        elif node.target in (aten.add.Tensor, aten.sub.Tensor) and all(is_whole):
            a, b = (product(cast(Node, x)) for x in args)
            if node.target is aten.sub.Tensor:
                b = negated(b)
            found = a.plus(b)
        return found or Product(node, ones)

    whole = product(values)
    return whole.with_factor(0, whole.signed(0), sign=1)


def negated(product: Product) -> Product:
    return Product(product.base, product.factors, -product.sign)
