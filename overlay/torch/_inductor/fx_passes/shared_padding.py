"""
One padded copy of a matrix for all products that want it, or none.

A product whose sizes are not aligned is padded. The gradient of a head with a vocabulary
of 50257 is an operand of two, as it is and transposed, and each pads it for itself: a
padding of a transposed matrix, and a padding of the matrix. They hold the same. Written
as one, and a transposed view of it, it is computed once, and can be in place where the
matrix has room behind its rows (``inplace_constant_pad_nd``).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .inserted import insert_like


aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)


def share_padding(graph: Graph) -> int:
    """
    Pad a matrix in place of its transpose, and once for all that pad it alike; returns
    how many paddings were replaced.
    """
    replaced = 0
    padded: dict[Hashable, Node] = {}
    # in the order of the graph, as a padding comes before what uses an equal one
    for node in [*graph.nodes]:
        if node.target is not aten.constant_pad_nd.default or not is_matrix(node):
            continue
        source, padding, *value = cast(tuple[Any, ...], node.args)
        columns, rows = (*padding, 0, 0)[:2], (*padding, 0, 0)[2:4]
        transposed = is_transpose(source)
        if transposed:
            source, columns, rows = source.args[0], rows, columns
        key = (source, *columns, *rows, *(value or [0]))
        if key not in padded and not transposed:
            padded[key] = node
            continue
        with graph.inserting_before(node):
            if key not in padded:
                padded[key] = insert_like(
                    node, node.target, source, [*columns, *rows], *value
                )
            made = padded[key]
            if transposed:
                made = insert_like(node, aten.permute.default, made, [1, 0])
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        replaced += 1
    return replaced


def is_matrix(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim == 2


def is_transpose(node: Node) -> bool:
    """Whether ``node`` is a view of a matrix with its dimensions exchanged."""
    if node.target is aten.t.default:
        return is_matrix(node)
    if node.target is not aten.permute.default or not is_matrix(node):
        return False
    return [dim % 2 for dim in cast(list[int], node.args[1])] == [1, 0]


def pads_products_alone(node: Node) -> bool:
    """Whether products are all that uses the padding ``node``, itself or transposed."""
    return bool(node.users) and all(
        user.target in PRODUCTS
        or (is_transpose(user) and all(of.target in PRODUCTS for of in user.users))
        for user in node.users
    )
