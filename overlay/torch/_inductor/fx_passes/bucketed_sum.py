"""
Sums of the values of each of a few buckets, without atomics.

The gradient of a small table by an index of many elements, as that of T5's relative position
bias, [32 buckets, heads], by all pairs of positions, is a scatter whose adds wait for each
other: thousands of them for an address. As a sum for each bucket of the values that are its
own, and zero elsewhere, the same is a reduction. All of its sums read the same values, so
they are one kernel, which reads them once, and another that adds what its programs found.
Whatever the values, a result has the same bits each time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast, Optional

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.checkpoint import CheckpointPolicy

from .. import config
from ..device_model import DeviceModel
from ..pattern_matcher import (
    Arg,
    CallFunction,
    Match,
    PatternMatcherPass,
    register_graph_pattern,
)
from ..runtime.hints import DeviceProperties
from ..upstream_names import optimization_hint


aten = torch.ops.aten
prims = torch.ops.prims
# As the gradient of an embedding is computed from PyTorch 2.15 on.
masked_scatter = aten._unsafe_masked_index_put_accumulate.default

# Elements that a reduction's tile has at once, of rows and of columns, by Inductor's choice
# (``InductorChoices.should_use_persistent_reduction``).
PERSISTENT_INNER, PERSISTENT = 1024, 64

bucketed_sums = PatternMatcherPass(pass_name="bucketed_sums")


@dataclass(frozen=True)
class Costs:
    """What sums and atomics take of an SM's clocks."""

    # Compare, select, add.
    instructions_per_term: int = 3
    # Between two adds to one address. Of 4.5 ms that T5's biases took on an H200: 3.4 ns for
    # each of the adds to the 32 bytes that get most of them.
    clocks_per_add: float = 6.0
    # Adds to one address that take as long as launching two kernels more, about 3.5 us.
    adds_of_a_launch: int = 1024


@dataclass(frozen=True)
class Scatter:
    """``values`` [*index, *row] that are added to [buckets, *row] zeros."""

    index: Node
    values: Node
    buckets: int
    # An element of the index whose values count as zero.
    padding: Optional[int]
    # Whether other values count as zero too where an element of the index is of no bucket.
    # If not, those below zero are counted from the end.
    masked: bool = False

    @property
    def index_size(self) -> tuple[Any, ...]:
        return tuple(self.index.meta["val"].shape)

    @property
    def row_size(self) -> tuple[Any, ...]:
        return tuple(self.values.meta["val"].shape[len(self.index_size) :])

    @property
    def by_column(self) -> bool:
        """Whether the elements of a column of the table follow each other in memory."""
        strides = self.values.meta["val"].stride()[len(self.index_size) :]
        return not any(
            statically_known_true(stride == 1) and not statically_known_true(size == 1)
            for stride, size in zip(strides, self.row_size)
        )


def scatter_of(node: Node) -> Optional[Scatter]:
    """What ``node`` scatters, where it is what ``sums`` computes."""
    masked = node.target is masked_scatter
    table, *masks, indices, values = cast(
        tuple[Any, ...], node.args if masked else node.args[:3]
    )
    if len(indices) != 1 or not all(map(has_value, (table, indices[0], values))):
        return None
    if table.target is not aten.full.default or table.args[1] != 0:
        return None
    index = indices[0]
    zeros, size = table.meta["val"], index.meta["val"].shape
    value = values.meta["val"]
    if (
        value.device.type != "cuda"
        or not value.is_floating_point()
        or value.dtype != zeros.dtype
        or index.meta["val"].dtype not in (torch.int32, torch.int64)
        or zeros.ndim == 0
        or not isinstance(zeros.shape[0], int)
        or not is_of_shape(values, (*size, *zeros.shape[1:]))
    ):
        return None
    buckets = zeros.shape[0]
    if masked:
        excluded = excluded_of_buckets(masks[0], index, buckets, value.ndim)
        if excluded is None or len(excluded) > 1:
            return None
        padding = excluded[0] if excluded else None
        return Scatter(index, without_clones(values), buckets, padding, masked=True)
    if not is_checked(index, buckets):
        return None
    values, padding = unmasked(values, index)
    return Scatter(index, values, buckets, padding)


def has_value(node: Any) -> bool:
    """Whether it is known of ``node`` what tensor it is."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def is_of_shape(node: Node, shape: Sequence[Any]) -> bool:
    value = node.meta["val"]
    return value.ndim == len(shape) and all(
        statically_known_true(a == b) for a, b in zip(value.shape, shape)
    )


def unmasked(values: Node, index: Node) -> tuple[Node, Optional[int]]:
    """
    Where ``values`` are zero at an element of the index, as the gradient of an embedding
    is at its padding: those without zeros, and the element. They are laid out as what they
    are computed from is, not as a tensor that is made to be scattered.
    """
    shape = values.meta["val"].shape
    values = without_clones(values)
    if values.target is not aten.where.self or values.kwargs:
        return values, None
    mask, zero, others = cast(tuple[Node, Node, Node], values.args)
    mask = of_positions(mask, len(shape))
    if (
        mask.target is aten.eq.Scalar
        and mask.args[0] is index
        and isinstance(mask.args[1], int)
        and zero.target in (aten.full.default, aten.scalar_tensor.default)
        and (zero.args[-1] == 0)
        and has_value(others)
        and is_of_shape(others, shape)
        and others.meta["val"].dtype == values.meta["val"].dtype
    ):
        return others, mask.args[1]
    return values, None


def without_clones(values: Node) -> Node:
    while values.target is aten.clone.default and has_value(values.args[0]):
        values = cast(Node, values.args[0])
    return values


def of_positions(mask: Node, ndim: int) -> Node:
    """``mask`` [*index, 1, ...] of ``ndim`` dimensions without those of a row; else as it is."""
    if not has_value(mask) or mask.meta["val"].ndim != ndim:
        return mask
    while mask.target is aten.unsqueeze.default and has_value(mask.args[0]):
        if mask.args[1] not in (-1, mask.meta["val"].ndim - 1):
            break
        mask = cast(Node, mask.args[0])
    return mask


def excluded_of_buckets(
    mask: Node, index: Node, buckets: int, ndim: int
) -> Optional[tuple[int, ...]]:
    """
    Where ``mask`` is of the elements of the index that are of a bucket, as that of the
    gradient of an embedding is: the buckets that it leaves out, such as the padding's.
    """
    asked = set()
    parts = [of_positions(mask, ndim)]
    while parts:
        part = parts.pop()
        if part.target is aten.bitwise_and.Tensor:
            parts.extend(cast(tuple[Node, Node], part.args))
        elif (
            part.target in (aten.ge.Scalar, aten.lt.Scalar, aten.ne.Scalar)
            and part.args[0] is index
            and isinstance(part.args[1], int)
        ):
            asked.add((part.target, part.args[1]))
        else:
            return None
    excluded = {(op, number) for op, number in asked if op is aten.ne.Scalar}
    if asked - excluded != {(aten.ge.Scalar, 0), (aten.lt.Scalar, buckets)}:
        return None
    return tuple(number for _, number in excluded if 0 <= number < buckets)


def is_checked(index: Node, size: int) -> bool:
    """Whether something of ``size`` rows is gathered by ``index``, which checks it."""
    indices = [index]
    if index.target is prims.convert_element_type.default:
        # An index of 32 bits is converted for the scatter alone.
        source = cast(Node, index.args[0])
        if has_value(source) and source.meta["val"].dtype == torch.int32:
            indices.append(source)
    for by in indices:
        for user in by.users:
            gathers = (user.target is aten.embedding.default and user.args[1] is by) or (
                user.target is aten.index.Tensor and user.args[1] == [by]
            )
            if not gathers or not has_value(user.args[0]):
                continue
            if statically_known_true(user.args[0].meta["val"].shape[0] == size):
                return True
    return False


def pays(scatter: Scatter, device: DeviceModel, costs: Costs = Costs()) -> bool:
    """
    Whether the sums take less time than adds that wait for each other would, were the
    index's elements evenly spread over the buckets. Less evenly, it pays more.
    """
    rows, columns = (
        math.prod(optimization_hint(x, config.unbacked_symint_fallback) for x in size)
        for size in (scatter.index_size, scatter.row_size)
    )
    adds = rows / scatter.buckets
    terms = rows * columns * scatter.buckets
    clocks = terms * costs.instructions_per_term / (device.lanes_per_sm * device.sms)
    return adds >= costs.adds_of_a_launch and clocks <= adds * costs.clocks_per_add


def should_sum(match: Match) -> bool:
    """Whether what ``match`` scatters is summed by ``sums``."""
    if not config.simplify_one_hot_sums:
        return False
    scatter = scatter_of(match.output_node())
    # One kernel has all sums, and what is computed on the way to them.
    if scatter is None or not 0 < scatter.buckets <= config.max_fusion_size // 2:
        return False
    device = match.output_node().meta["val"].device
    return pays(scatter, DeviceModel.of(DeviceProperties.create(device)))


def sums(
    index: torch.Tensor,
    values: torch.Tensor,
    buckets: int,
    padding: Optional[int],
    masked: bool,
    by_column: bool,
) -> torch.Tensor:
    """
    The sums of the ``values`` [*index, *row] of each bucket, [buckets, *row], rounded
    once; of halves, in single precision.
    """
    row_size = values.shape[index.ndim :]
    chunk = PERSISTENT_INNER if by_column else PERSISTENT
    dtype = torch.promote_types(values.dtype, torch.float32)
    terms = index.numel()
    index = index.reshape(terms)
    if masked:
        # Nothing has checked it: it may be more than 32 bits hold.
        index = torch.where((index >= 0) & (index < buckets), index, -1)
    index = prims.convert_element_type(index, torch.int32)
    if not masked:
        index = torch.where(index < 0, index + buckets, index)
    if padding is not None and 0 <= padding < buckets:
        index = torch.where(index == padding, -1, index)
    values = values.reshape(terms, math.prod(row_size))
    if by_column:
        values = values.t()
    if not statically_known_true(terms % chunk == 0):
        # What is beyond the end is of no bucket.
        beyond = (terms + chunk - 1) // chunk * chunk - terms
        index = aten.constant_pad_nd(index, [0, beyond], -1)
        after = [0, beyond] if by_column else [0, 0, 0, beyond]
        values = aten.constant_pad_nd(values, after)
    chunks = (terms + chunk - 1) // chunk
    if by_column:
        index = index.reshape(chunks, chunk)
        values = values.reshape(values.shape[0], chunks, chunk)
    else:
        index = index.reshape(chunks, chunk, 1)
        values = values.reshape(chunks, chunk, values.shape[1])
    dim = 2 if by_column else 1
    zero = values.new_zeros(())
    partials = [
        torch.where(index == bucket, values, zero).sum(dim, dtype=dtype)
        for bucket in range(buckets)
    ]
    total = torch.stack(partials).sum(dim)
    return total.to(values.dtype).reshape(buckets, *row_size)


@register_graph_pattern(
    CallFunction(masked_scatter, Arg(), Arg(), Arg(), Arg()),
    # pyrefly: ignore [bad-argument-type]
    pass_dict=bucketed_sums,
    extra_check=should_sum,
)
@register_graph_pattern(
    CallFunction(aten.index_put.default, Arg(), Arg(), Arg(), True),
    # pyrefly: ignore [bad-argument-type]
    pass_dict=bucketed_sums,
    extra_check=should_sum,
)
def sum_buckets(match: Match, *args: Any) -> None:
    scatter = scatter_of(match.output_node())
    assert scatter is not None
    replacement = functools.partial(
        sums,
        buckets=scatter.buckets,
        padding=scatter.padding,
        masked=scatter.masked,
        by_column=scatter.by_column,
    )
    # A backward that scatters would read it too; each sum would compute it once more.
    scatter.index.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    match.replace_by_example(replacement, [scatter.index, scatter.values])
