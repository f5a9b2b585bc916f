"""
Online softmaxes whose tensor would be read again.

Upstream scales a softmax behind its maximum, by a temperature or what caps the logits. Then the
maximum is a loop of its own, and what the logits are of is computed again. Longer rows than a
persistent kernel of upstream's holds are scaled first, and have one loop for both. The product is
rounded, so that it is what its maximum is of, in the backward as well.

A loss that has a logsumexp beside a cross entropy has two of one tensor. The second would be
computed in the loop behind the first one.

Label smoothing sums a log-softmax over its row, for which it would be read again as well. The
sum is that of the row, which the first loop has, less the logsumexp for each column. Both may
be further from zero than what is left of them. Of half types their own rounding is more than
what is lost; rows of float32 that are too long to be held are summed in float64.
"""

from __future__ import annotations

import operator
from typing import Any, cast, Optional

import torch
from torch.fx import Graph, Node

from .. import config
from ..inductor_prims import prepare_softmax_online
from ..looped_rows import SHORT_ROW
from ..pattern_matcher import CallFunction, KeywordArg, MULTIPLE
from ..rounded_product import rounded_product
from ..row_program import UPSTREAM_COLUMNS
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
SCALES = (aten.mul.Tensor, aten.div.Tensor)
# Marks those, among their metadata, of which a maximum is subtracted.
ROUNDED = "inductor_rounded_product"
# Of the values of their first argument, by the dimensions that they are over.
SUMS = (aten.sum.dim_IntList, aten.mean.dim)
SUMS_OF_ALL = (aten.sum.default, aten.mean.default)


def is_online_softmax(shifted: Node) -> bool:
    """
    Whether ``shifted``, a tensor less its maximum over a dimension, is of a softmax whose maximum
    and sum one loop computes, as ``prepare_softmax_pattern`` finds them.
    """
    x, most = cast(tuple[Node, Node], shifted.args)
    value = x.meta["val"]
    # dimensions, and whether they are kept
    reduced = most.args[1:]
    is_online = config.online_softmax and config.cuda_backend == "triton"
    dims = cast(list[int], reduced[0])
    if value.device.type != "cuda" or not is_online or not value.ndim or len(dims) != 1:
        return False
    columns = value.shape[dims[0]]
    if not isinstance(columns, int) or columns <= UPSTREAM_COLUMNS:
        return False
    return reduced[1] is True and any(
        total.target is SUMS[0] and total.args[1:] == reduced
        for exponential in shifted.users
        if exponential.target is aten.exp.default
        for total in exponential.users
    )


def is_scaled_first(shifted: Node) -> bool:
    """Whether ``shifted`` is as it is what ``is_online_softmax`` says. Then its product is marked:
    the partitioner keeps the mark, whichever graph computes it."""
    is_online = is_online_softmax(shifted)
    if is_online:
        unconverted(cast(Node, shifted.args[0])).meta[ROUNDED] = True
    return is_online


def simplify_online_softmaxes(graph: Graph) -> None:
    """Read a tensor once for all online softmaxes over a dimension, and sums of their logarithm."""
    merge_online_softmaxes(graph)
    for target in SCALES:
        for node in graph.find_nodes(op="call_function", target=target):
            if node.meta.get(ROUNDED):
                round_product(node)
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


def round_product(x: Node) -> None:
    """Round ``x``, a product, before its maximum is subtracted from it."""
    (a, b), factor = x.args, 1.0
    if isinstance(a, (int, float)) and x.target is aten.mul.Tensor:
        a, b = b, a
    if isinstance(b, (int, float)):
        if x.target is aten.div.Tensor and b == 0:
            return
        factor, b = float(b if x.target is aten.mul.Tensor else 1 / b), None
    elif x.target is aten.div.Tensor:
        return  # which nothing is contracted with
    given = (a,) if b is None else (a, b)
    if not all(
        isinstance(each, Node) and isinstance(each.meta["val"], torch.Tensor)
        for each in given
    ):
        return
    with x.graph.inserting_before(x):
        product = insert_like(x, rounded_product, a, b, factor)
    if product.meta["val"].dtype != x.meta["val"].dtype:
        x.graph.erase_node(product)
        return
    x.replace_all_uses_with(product)
    x.graph.erase_node(x)


def sum_type(x: Node, columns: int) -> Optional[torch.dtype]:
    """That of the sum of each row of ``x``; None where the sum is better that of a log-softmax."""
    stored = unconverted(x).meta["val"]
    if stored.dtype in HALF_TYPES:
        return x.meta["val"].dtype
    is_looped = stored.device.type == "cuda" and columns > SHORT_ROW
    return torch.float64 if stored.dtype == torch.float32 and is_looped else None


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
        # whose sum is one of more digits than the row's
        node.meta["val"].dtype == torch.float64
        or not isinstance(columns, int)
        or dim % value.ndim not in over
        or (dtype := sum_type(x, columns)) is None
    ):
        return

    def insert(target: Any, *args: Any, **kwargs: Any) -> Node:
        return insert_like(node, target, *args, **kwargs)

    def converted(x: Node, dtype: torch.dtype) -> Node:
        if x.meta["val"].dtype == dtype:
            return x
        return insert(prims.convert_element_type.default, x, dtype)

    is_sum = node.target in (SUMS[0], SUMS_OF_ALL[0])
    with node.graph.inserting_before(node):
        x, most, log = (converted(each, dtype) for each in (x, most, log))
        over_row = insert(SUMS[0 if is_sum else 1], x, [dim], True)
        logsumexp = insert(aten.add.Tensor, most, log)
        if is_sum:
            logsumexp = insert(aten.mul.Tensor, logsumexp, columns)
        row = insert(aten.sub.Tensor, *(over_row, logsumexp)[::sign])
        # over the dimensions that are left, and one of size one
        result = insert(node.target, row, *node.args[1:], **node.kwargs)
        result = converted(result, node.meta["val"].dtype)
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
