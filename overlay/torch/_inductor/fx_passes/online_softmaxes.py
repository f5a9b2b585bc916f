"""
Online softmaxes whose tensor would be read again.

A loss that has a logsumexp beside a cross entropy has two of one tensor. The second would be
computed in the loop behind the first one.

Label smoothing sums a log-softmax over its row, for which it would be read again as well. The
sum is that of the row, which the first loop has, less the logsumexp for each column. Both may
be far from zero, and what is left of them near it: so only of types whose own rounding is more
than what is lost.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .. import config
from ..inductor_prims import prepare_softmax_online
from ..pattern_matcher import CallFunction, KeywordArg, MULTIPLE
from .inserted import insert_like


aten = torch.ops.aten
prims = torch.ops.prims


def of_any_users(target: Any, *args: Any) -> CallFunction:
    return CallFunction(target, *args, _users=MULTIPLE)


LOG_SOFTMAX = of_any_users(
    aten.sub.Tensor,
    of_any_users(
        aten.sub.Tensor,
        KeywordArg("x"),
        of_any_users(operator.getitem, KeywordArg("softmax"), 0),
    ),
    of_any_users(
        aten.log.default, of_any_users(operator.getitem, KeywordArg("softmax"), 1)
    ),
)
HALF_TYPES = (torch.float16, torch.bfloat16)
# Of the values of their first argument, by the dimensions that they are over.
SUMS = (aten.sum.dim_IntList, aten.mean.dim)
SUMS_OF_ALL = (aten.sum.default, aten.mean.default)


def simplify_online_softmaxes(graph: Graph) -> None:
    """Read a tensor once for all online softmaxes over a dimension, and sums of their logarithm."""
    merge_online_softmaxes(graph)
    if not config.emulate_precision_casts:
        for target in (*SUMS, *SUMS_OF_ALL):
            for node in graph.find_nodes(op="call_function", target=target):
                sum_log_softmax(node)


def unconverted(x: Node) -> Node:
    return x.args[0] if x.target is prims.convert_element_type.default else x  # type: ignore[return-value]


def merge_online_softmaxes(graph: Graph) -> None:
    """
    Use the first online softmax of a tensor, or of what it is converted to, in place of
    others over the same dimension.
    """
    first: dict[Any, Node] = {}
    for node in graph.find_nodes(op="call_function", target=prepare_softmax_online):
        x, dim = node.args
        value = x.meta["val"]
        key = (unconverted(x), value.dtype, dim % max(value.ndim, 1))
        if key in first:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)
        else:
            first[key] = node


def sum_log_softmax(node: Node) -> None:
    """
    Of a sum or mean, over the dimension of a log-softmax at least: sum what the log-softmax is
    of, and subtract what is known of a row from that.
    """
    summed, sign = cast(Node, node.args[0]), 1
    while summed.target in (aten.neg.default, prims.convert_element_type.default):
        if not summed.meta["val"].dtype.is_floating_point:
            return
        sign = -sign if summed.target is aten.neg.default else sign
        summed = cast(Node, summed.args[0])
    match = LOG_SOFTMAX.match(summed)
    if not match:
        return
    x, softmax = match.kwargs["x"], match.kwargs["softmax"]
    if softmax.target is not prepare_softmax_online or softmax.args[0] is not x:
        return
    shifted, log = cast(tuple[Node, Node], summed.args)
    most, dim = shifted.args[1], softmax.args[1]
    value = x.meta["val"]
    columns = value.shape[dim]
    # none: over all
    dims = () if node.target in SUMS_OF_ALL else cast(list[int], node.args[1])
    over = [each % value.ndim for each in dims or range(value.ndim)]
    if (
        unconverted(x).meta["val"].dtype not in HALF_TYPES
        # whose sum is one of more digits than the row's
        or node.meta["val"].dtype == torch.float64
        or not isinstance(columns, int)
        or dim % value.ndim not in over
    ):
        return

    def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
        return insert_like(node, target, *args, **kwargs)

    is_sum = node.target in (SUMS[0], SUMS_OF_ALL[0])
    with node.graph.inserting_before(node):
        over_row = insert(SUMS[0 if is_sum else 1], x, [dim], True)
        logsumexp = insert(aten.add.Tensor, most, log)
        if is_sum:
            logsumexp = insert(aten.mul.Tensor, logsumexp, columns)
        row = insert(aten.sub.Tensor, *(over_row, logsumexp)[::sign])
        # over the dimensions that are left, and one of size one
        result = insert(node.target, row, *node.args[1:], **node.kwargs)
        dtype = node.meta["val"].dtype
        if result.meta["val"].dtype != dtype:
            result = insert(prims.convert_element_type.default, result, dtype)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
