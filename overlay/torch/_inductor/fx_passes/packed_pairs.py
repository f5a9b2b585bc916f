"""
Values of which each two neighbours become one, as a cast to 4-bit floats packs them.

Two codes of 4 bits lie in a byte, so what packs them reads every second code, twice::

    codes = ...                                        # [M, K], a function of blocks
    codes = codes.reshape(-1)
    return codes[::2] | codes[1::2] << 4               # [M * K / 2]

Computed from one input element each, codes take too much to be inlined where they are
used twice, so they are stored, a byte each, and the loops that pack them, half as many,
fuse with nothing. Here the even and the odd elements are computed apart, each once, from
the even and the odd elements of what is read, and the largest value of a block is that of
its pairs. All of it has the loops of the bytes then, and is one kernel.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast, Optional

import torch
from torch.fx import Graph, map_arg, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._ordered_set import OrderedSet

from .. import config
from .inserted import insert_like


aten = torch.ops.aten
prims = torch.ops.prims

VIEWS = (aten.reshape.default, aten.view.default)
# Of a reduction, what is the same of two values.
EXTREMES = {
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
}


def split_packed_pairs(graph: Graph) -> int:
    """Compute even and odd elements of packed values apart; returns of how many values."""
    if not config.triton.block_reduction_tiles:
        return 0
    takers: dict[Node, tuple[list[Node], list[Node]]] = {}
    for node in graph.nodes:
        if (found := taken(node)) is not None:
            source, which = found
            takers.setdefault(source, ([], []))[which].append(node)
    return sum(_split(source, *both) for source, both in takers.items())


def taken(node: Node) -> Optional[tuple[Node, int]]:
    """
    The values of which ``node`` has every second along the last dimension, of pairs the
    one or the other, and which: 0 or 1.
    """
    if node.target is aten.slice.Tensor:
        defaults: list[Any] = [None, 0, 0, sys.maxsize, 1]
        given = cast(tuple[Any, ...], node.args)
        source, dim, start, end, step = [*given, *defaults[len(given) :]]
        if step != 2 or not has_pairs(source):
            return None
        if not isinstance(end, int):
            return None
        if end < sys.maxsize and not statically_known_true(end >= shape_of(source)[-1]):
            return None
    elif node.target is aten.select.int:
        source, dim, start = cast(tuple[Any, ...], node.args)
        if not has_pairs(source) or not is_equal(shape_of(source)[-1], 2):
            return None
    else:
        return None
    if start not in (0, 1) or dim not in (-1, len(shape_of(source)) - 1):
        return None
    return source, start


def tensor_of(node: Any) -> Optional[torch.Tensor]:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def is_for_triton(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"


def shape_of(node: Any) -> list[Any]:
    return [*cast(torch.Tensor, tensor_of(node)).shape]


def is_equal(a: Any, b: Any) -> bool:
    return statically_known_true(a == b)


def is_same_shape(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(is_equal, a, b))


def is_scalar(node: Node) -> bool:
    value = tensor_of(node)
    return value is None or value.ndim == 0


def is_same_for_pairs(node: Node) -> bool:
    """Whether ``node`` has one value for all of the last dimension, where broadcast."""
    return is_scalar(node) or is_equal(shape_of(node)[-1], 1)


def has_pairs(node: Any) -> bool:
    """
    Whether the last dimension of ``node`` is of pairs; of more than one symbolic size no
    shape can be written.
    """
    value = tensor_of(node)
    return (
        value is not None
        and value.ndim > 0
        and statically_known_true(value.shape[-1] % 2 == 0)
        and sum(not isinstance(size, int) for size in value.shape) <= 1
    )


def halved(node: Node) -> list[Any]:
    """The shape of the even elements of ``node``."""
    *outer, last = shape_of(node)
    return [*outer, last // 2]


def is_pointwise(node: Node) -> bool:
    """Whether an element of ``node`` is a function of those at its place, and no more."""
    target = node.target
    if target is prims.convert_element_type.default:
        return True
    if target is aten.view.dtype:
        of, value = tensor_of(node.args[0]), tensor_of(node)
        return of is not None and value is not None and of.itemsize == value.itemsize
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.pointwise in target.tags
        and torch.Tag.nondeterministic_seeded not in target.tags
        and not target._schema.is_mutable
    )


def keeps_pairs(node: Node) -> bool:
    """
    Whether ``node`` has the pairs of its argument, as a copy, or as a view: where both
    have whole pairs in the last dimension, what is even in one is even in the other.
    """
    if node.target is aten.clone.default:
        return True
    return node.target in VIEWS and has_pairs(node) and has_pairs(node.args[0])


def sources(node: Node) -> Optional[OrderedSet[Node]]:
    """
    What elements of ``node`` are computed of, through all that is computed for each. None
    where something has no pairs, or the shape of none of what it is computed of.
    """
    found: OrderedSet[Node] = OrderedSet()
    seen: OrderedSet[Node] = OrderedSet()
    pending = [node]
    while pending:
        each = pending.pop()
        if each in seen or is_same_for_pairs(each):
            continue
        seen.add(each)
        if not has_pairs(each):
            return None
        if is_pointwise(each):
            if not any(has_shape_of(one, each) for one in each.all_input_nodes):
                return None
            pending.extend(each.all_input_nodes)
        elif keeps_pairs(each):
            pending.extend(each.all_input_nodes)
        elif each.target is not aten.full.default:
            found.add(each)
    return found


def has_shape_of(node: Node, other: Node) -> bool:
    if is_scalar(node) or node.target is aten.full.default:
        return False
    return is_same_shape(shape_of(node), shape_of(other))


def reductions_of(
    node: Node, read: OrderedSet[Node]
) -> Iterator[tuple[Node, Node, list[Any]]]:
    """
    The reductions over the last dimension that ``node`` depends on, of what is computed of
    ``read``, with their operands and the arguments after the dimensions.
    """
    seen: OrderedSet[Node] = OrderedSet(read)
    pending = [node]
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        pending.extend(each.all_input_nodes)
        if each.target not in EXTREMES or len(each.args) < 2:
            continue
        operand, dims, *more = cast(tuple[Any, ...], each.args)
        if has_pairs(operand) and dims in ([-1], [len(shape_of(operand)) - 1]):
            found = sources(operand)
            if found and found <= read:
                yield each, operand, more


@dataclasses.dataclass
class _Halves:
    """
    The even (0) or the odd (1) elements of nodes.

    They have the shape of what they are computed of, blocks for one, whatever views are
    between: what has other loops than the blocks is not fused with them.
    """

    made: dict[tuple[Node, int], Node] = dataclasses.field(default_factory=dict)

    def of(self, node: Node, which: int) -> Node:
        if is_same_for_pairs(node):
            return node
        if (node, which) not in self.made:
            self.made[node, which] = self._make(node, which)
        return self.made[node, which]

    def _make(self, node: Node, which: int) -> Node:
        if keeps_pairs(node):
            return self.of(cast(Node, node.args[0]), which)
        if is_pointwise(node):
            args = {each: self.of(each, which) for each in node.all_input_nodes}
            return call_on(node, args, halved)
        if node.target is aten.full.default:
            return insert_like(node, node.target, [1], *node.args[1:], **node.kwargs)
        dim = len(shape_of(node)) - 1
        return insert_like(node, aten.slice.Tensor, node, dim, which, sys.maxsize, 2)


def call_on(
    node: Node, args: dict[Node, Node], shape_for: Callable[[Node], list[Any]]
) -> Node:
    """
    The pointwise ``node`` of ``args``, in the one shape that these have. Where they have
    several, or one is broadcast, each gets that ``shape_for`` the argument.
    """
    varying = {
        key: each
        for key, each in args.items()
        if not is_same_for_pairs(each) and each.target is not aten.full.default
    }
    shapes = [shape_of(each) for each in varying.values()]
    broadcast = any(
        not is_scalar(key) and not is_same_shape(shape_of(key), shape_of(node))
        for key in args
        if args[key].target is not aten.full.default
    )
    if broadcast or not all(is_same_shape(shapes[0], each) for each in shapes):
        args = args | {
            key: with_shape(each, shape_for(key)) for key, each in varying.items()
        }
    return insert_like(
        node,
        node.target,
        *map_arg(node.args, args.__getitem__),
        **map_arg(node.kwargs, args.__getitem__),
    )


def with_shape(node: Node, shape: list[Any]) -> Node:
    """``node``, which has as many elements, as ``shape``."""
    if is_same_shape(shape_of(node), shape):
        return node
    sizes = [size if isinstance(size, int) else -1 for size in shape]
    return insert_like(node, aten.reshape.default, node, sizes)


def _split(source: Node, even: list[Node], odd: list[Node]) -> bool:
    nodes = [*even, *odd]
    values = source
    while keeps_pairs(values):
        values = cast(Node, values.args[0])
    value = tensor_of(source)
    if (
        not even
        or not odd
        or value is None
        # codes of few bits; a rotary embedding takes pairs of numbers
        or value.is_floating_point()
        or value.is_complex()
        or not is_for_triton(value)
        or not is_pointwise(values)
        or any(user not in nodes for user in source.users)
        or any(not is_pointwise(user) for node in nodes for user in node.users)
        or not (read := sources(source))
    ):
        return False
    graph = source.graph
    for node, operand, more in [*reductions_of(source, read)]:
        with graph.inserting_before(node):
            halves = _Halves()
            pair = [with_shape(halves.of(operand, i), halved(operand)) for i in (0, 1)]
            of_pairs = insert_like(operand, EXTREMES[node.target], *pair)
            reduced = insert_like(node, node.target, of_pairs, [-1], *more)
        node.replace_all_uses_with(reduced)
        erase_unused(node)
    with graph.inserting_before(min(nodes)):
        halves = _Halves()
        made = dict.fromkeys(even, halves.of(source, 0))
        made |= dict.fromkeys(odd, halves.of(source, 1))
    _compute_on(graph, made)
    return True


def _compute_on(graph: Graph, made: dict[Node, Node]) -> None:
    """Compute what is a function of the keys of ``made`` of its values, in their shape."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    pending = sorted(made, key=order.__getitem__)
    for node in pending:
        for user in [*node.users]:
            inputs = [each for each in user.all_input_nodes if not is_scalar(each)]
            if (
                user not in made
                and is_pointwise(user)
                and all(each in made for each in inputs)
            ):
                args = {each: made.get(each, each) for each in user.all_input_nodes}
                with graph.inserting_before(user):
                    made[user] = call_on(user, args, shape_of)
                pending.append(user)
    for node in reversed(pending):
        if any(user not in made for user in node.users):
            with graph.inserting_before(node):
                as_before = with_shape(made[node], shape_of(node))
            node.replace_all_uses_with(as_before, lambda user: user not in made)
    for node in reversed(pending):
        erase_unused(node)


def erase_unused(node: Node) -> None:
    """
    Erase ``node``, if nothing uses it, and then what only it did: a use that is none
    would have values stored that are inlined otherwise.
    """
    if node.users or node.op != "call_function" or node._erased:
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for each in inputs:
        if is_pointwise(each) or keeps_pairs(each) or each.target is aten.full.default:
            erase_unused(each)
