"""
Channels last, of a tensor whose dimensions are not in the order of a convolution's.

Layout optimization gives what lies between convolutions the layout that they want. It goes
by position: of four dimensions the second has the channels. Behind a permute it has not::

    y = layer_norm(conv(x).permute(0, 2, 3, 1))  # [N, H, W, C]

What is "channels last" of that has H innermost, and then C: each kernel that reads it
beside the convolution's output reads one of them across memory. The layout that was meant
is the one that the convolution's output has, permuted.
"""

from __future__ import annotations

from typing import Any, Optional, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._ordered_set import OrderedSet

from . import ir


if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.fx import Graph, Node


aten = torch.ops.aten
# Of each dimension of a node, which of a convolution's [N, C, H, W] it is.
Dimensions = tuple[int, ...]
CONVOLUTION: Dimensions = (0, 1, 2, 3)
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _shape(node: Node) -> Optional[Sequence[Any]]:
    """Of a tensor, or of the first of a tuple of them."""
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value.shape if isinstance(value, torch.Tensor) else None


def _same_dimensions(node: Node, other: Node, broadcast: bool) -> bool:
    """
    Whether both have four dimensions, of the same sizes; where they ``broadcast``, a size
    may be one in either.
    """
    sizes, others = _shape(node), _shape(other)
    if sizes is None or others is None or not len(sizes) == len(others) == 4:
        return False
    return all(
        statically_known_true(a == b)
        or (broadcast and any(statically_known_true(size == 1) for size in (a, b)))
        for a, b in zip(sizes, others)
    )


def _permuted(dimensions: Dimensions, permutation: Sequence[int]) -> Dimensions:
    return tuple(dimensions[d] for d in permutation)


def _inverse(permutation: Sequence[int]) -> list[int]:
    rank = len(permutation)
    positions = [d % rank for d in permutation]
    return [positions.index(d) for d in range(rank)]


def _of_inputs(
    node: Node, known: dict[Node, Optional[Dimensions]]
) -> tuple[bool, Optional[Dimensions]]:
    """
    Whether ``node`` is made of what a permute has made of a convolution, or of that itself;
    and its dimensions, where they are those of an input.
    """
    inputs = [each for each in node.all_input_nodes if each in known]
    if node.target is aten.permute.default:
        dimensions = known[inputs[0]] if inputs else None
        permutation: Any = node.args[1]
        if dimensions is not None:
            return True, _permuted(dimensions, permutation)
        return bool(inputs), None
    broadcast = node.target not in VIEWS
    for each in inputs:
        dimensions = known[each]
        if dimensions is not None and _same_dimensions(node, each, broadcast):
            return True, dimensions
    return any(known[each] != CONVOLUTION for each in inputs), None


def _of_users(
    node: Node, known: dict[Node, Optional[Dimensions]]
) -> Optional[Dimensions]:
    """The dimensions of ``node`` that one of its users tells."""
    for user in node.users:
        dimensions = known.get(user)
        if dimensions is None:
            continue
        if user.target is aten.convolution.default:
            if node is user.args[0]:
                return CONVOLUTION
        elif user.target is aten.permute.default:
            permutation: Any = user.args[1]
            return _permuted(dimensions, _inverse(permutation))
        elif _same_dimensions(node, user, user.target not in VIEWS):
            return dimensions
    return None


def permuted_dimensions(graph: Graph) -> dict[Node, Optional[Dimensions]]:
    """
    Of each node of ``graph`` that is made of a permuted output of a convolution, or becomes
    its input by a permute: which of [N, C, H, W] each of its dimensions is. None where they
    are others, as behind a view. No other node is in it.
    """
    known: dict[Node, Optional[Dimensions]] = {}
    for node in graph.nodes:
        if node.target is aten.convolution.default:
            shape = _shape(node)
            if shape is not None and len(shape) == 4:
                known[node] = CONVOLUTION
            continue
        is_known, dimensions = _of_inputs(node, known)
        if is_known:
            known[node] = dimensions
    for node in reversed(graph.nodes):
        if known.get(node) is None:
            dimensions = _of_users(node, known)
            if dimensions is not None:
                known[node] = dimensions
    return {n: dims for n, dims in known.items() if dims != CONVOLUTION}


def in_order_of_convolutions(
    graph: Graph, prefer: OrderedSet[Node]
) -> tuple[OrderedSet[Node], dict[Node, list[int]]]:
    """
    Those nodes of ``prefer``, which prefer channels last, of which it is known what that is;
    and the stride orders of those whose dimensions are not in the order of a convolution's.
    """
    if not prefer:
        return prefer, {}
    permuted = permuted_dimensions(graph)
    orders = {
        node: [ir.NHWC_STRIDE_ORDER[d] for d in dimensions]
        for node, dimensions in permuted.items()
        if dimensions is not None
    }
    unknown = OrderedSet(permuted) - OrderedSet(orders)
    return prefer - unknown, orders
