"""
Rows of zeros but for one value, without storing the zeros.

The gradient of ``x.gather(-1, index)`` with one index a row, of ``x[torch.arange(n), index]``
or of a maximum and its place, is a scatter into zeros as large as ``x``. They are stored, and
what adds another gradient loads them: for logits in bfloat16 that a loss has as float32, each
time twice the bytes of the logits. As a comparison of each position with its row's index, the
same is computed where it is used. ``scatter_upon_const_tensor`` does so of a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast, Optional

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import config
from ..utils import is_gpu
from .bucketed_sum import has_value, is_of_shape
from .inserted import insert_like


aten = torch.ops.aten
prims = torch.ops.prims

INDEX_TYPES = (torch.int32, torch.int64)
# Of tensors. That of a number is compared by ``scatter_upon_const_tensor``.
COMPARED = (aten.scatter_add.default, aten.scatter.src, aten.index_put.default)
SCATTERS = (*COMPARED, aten.scatter.value)
# What leaves positions in order.
VIEWS = (aten.expand.default, aten.unsqueeze.default, aten.view.default)


@dataclass(frozen=True)
class OneHotRows:
    """
    What ``node`` computes: ``values`` where the position along ``dim`` is ``index``, and
    elsewhere the number that fills ``background``. Values are a number, or as the index is:
    of a size of one along ``dim``, or without that dimension, and then an index below zero is
    counted from the end. One that is not within its row is an error of the scatter's.
    """

    node: Node
    background: Node
    dim: int
    index: Node
    values: Any  # a node or a number
    lacks_dim: bool

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return insert_like(self.node, target, *args, **kwargs)

    def unsqueezed(self, node: Node, times: int) -> Node:
        for _ in range(times):
            node = self.call(aten.unsqueeze.default, node, -1)
        return node

    def compared(self) -> Node:
        """The same, as a pointwise function of positions, inserted."""
        sizes, fill = cast(tuple[list[Any], Any], self.background.args)
        fake = self.background.meta["val"]
        columns, trailing = sizes[self.dim], fake.ndim - 1 - self.dim
        index, values = self.index, self.values
        positions = self.call(
            prims.iota.default,
            columns,
            start=0,
            step=1,
            dtype=index.meta["val"].dtype,
            device=fake.device,
            requires_grad=False,
        )
        if self.lacks_dim:
            from_end = self.call(aten.add.Tensor, index, columns)
            is_negative = self.call(aten.lt.Scalar, index, 0)
            index = self.call(aten.where.self, is_negative, from_end, index)
            index = self.unsqueezed(index, 1 + trailing)
            values = self.call(aten.unsqueeze.default, values, self.dim)
        hit = self.call(aten.eq.Tensor, self.unsqueezed(positions, trailing), index)
        miss = self.call(
            aten.full.default,
            [],
            fill,
            dtype=fake.dtype,
            layout=torch.strided,
            device=fake.device,
            pin_memory=False,
        )
        return self.call(aten.where.self, hit, values, miss)


def compare_one_hot_rows(graph: Graph) -> int:
    """Replace scatters of one value a row into a constant; returns how many there were."""
    if not config.simplify_one_hot_sums:
        return 0
    nodes = [
        node
        for target in COMPARED
        for node in graph.find_nodes(op="call_function", target=target)
    ]
    return sum(_replace(node) for node in nodes)


def _replace(node: Node) -> bool:
    found = one_hot_rows_of(node)
    if found is None or not is_gpu(node.meta["val"].device.type):
        return False
    before = node.prev
    with node.graph.inserting_before(node):
        result = found.compared()
    if not have_same_strides(result, node):
        while node.prev is not before:
            node.graph.erase_node(node.prev)
        return False
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return True


def have_same_strides(a: Node, b: Node) -> bool:
    """Whether two nodes of one shape are known to be laid out in one way."""
    strides = a.meta["val"].stride(), b.meta["val"].stride()
    return all(statically_known_true(x == y) for x, y in zip(*strides))


def one_hot_rows_of(node: Node) -> Optional[OneHotRows]:
    """What ``node``, one of four kinds of scatters, computes; None of anything else."""
    if node.target not in SCATTERS:
        return None
    by_positions = node.target is aten.index_put.default
    if by_positions:
        background, indices, values = cast(tuple[Any, ...], node.args[:3])
        adds, dim, index = (*node.args[3:], False)[0], len(indices) - 1, indices[-1]
    else:
        background, dim, index, values = cast(tuple[Any, ...], node.args[:4])
        adds = node.target is aten.scatter_add.default
    # none of a number
    tensors = [values] if isinstance(values, Node) else []
    if (
        node.kwargs
        or not all(map(has_value, (node, background, index, *tensors)))
        or background.target is not aten.full.default
        or (adds and background.args[1] != 0)
    ):
        return None
    fake = background.meta["val"]
    if (
        fake.ndim == 0
        or any(each.meta["val"].dtype != fake.dtype for each in tensors)
        or index.meta["val"].dtype not in INDEX_TYPES
    ):
        return None
    dim %= fake.ndim
    before, behind = fake.shape[:dim], fake.shape[dim + 1 :]
    if not by_positions:
        rows = (*before, 1, *behind)
        if not all(is_of_shape(each, rows) for each in (index, *tensors)):
            return None
    elif not (
        is_of_shape(index, before)
        and is_of_shape(values, (*before, *behind))
        and all(is_positions(indices[i], i, before) for i in range(dim))
    ):
        return None
    return OneHotRows(node, background, dim, index, values, by_positions)


def is_positions(node: Optional[Node], dim: int, sizes: torch.Size) -> bool:
    """Whether ``node`` is each element's position along ``dim``, broadcast to ``sizes``."""
    if not isinstance(node, Node) or not has_value(node):
        return False
    if node.target is aten.expand.default:
        return is_positions(cast(Node, node.args[0]), dim, sizes)
    shape = [1] * len(sizes)
    shape[dim] = sizes[dim]
    if not is_of_shape(node, shape[len(sizes) - node.meta["val"].ndim :]):
        return False
    while node.target in VIEWS:
        node = cast(Node, node.args[0])
    return (
        node.target is prims.iota.default
        and statically_known_true(node.meta["val"].shape[0] == sizes[dim])
        and (node.kwargs["start"], node.kwargs["step"]) == (0, 1)
    )
