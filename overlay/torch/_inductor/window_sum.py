"""
Sums of values over windows of positions, as one operator.

A window has a few positions, one after the other, from a first one that is linear in the
element. Computed from loads of each, its sum is pointwise: adjacent elements read adjacent
values, and neither a reduction's tile nor an index of indices is between them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Optional

import sympy

import torch
from torch.utils._sympy.functions import FloorDiv

from .inductor_prims import make_prim
from .ir import Pointwise, Reduction, TensorBox
from .lowering import register_lowering
from .virtualized import ops, OpsValue, V


# Positions of a window, at most, whose sum is no reduction.
MAX_UNROLLED = 32
# Positions of two dimensions' windows, at most, that are read where the sum is stored: more
# are fewer loads in two steps.
MAX_INLINED = 16


def window_sum_eager(
    values: torch.Tensor,
    weights: Optional[torch.Tensor],
    dim: int,
    elements: int,
    step: int,
    offset: int,
    divisor: int,
    size: int,
) -> torch.Tensor:
    """
    Of ``values`` [..., positions, ...], at dimension ``dim``, the sums [..., elements, ...] of
    ``size`` positions from ``(step * element + offset) // divisor`` on, times ``weights``
    [size, elements]; of halves, in single precision. There is nothing where the weight is zero,
    nor beyond the positions that there are.
    """
    positions = values.shape[dim]
    element = torch.arange(elements, device=values.device)
    at = (step * element + offset).div(divisor, rounding_mode="floor")
    at = at + torch.arange(size, device=values.device)[:, None]
    counts = (at >= 0) & (at < positions)
    if weights is not None:
        counts = counts & (weights != 0)
    shape = (*at.shape, *[1] * (values.ndim - dim - 1))
    dtype = torch.promote_types(values.dtype, torch.float32)
    terms = values.index_select(dim, at.clamp(0, positions - 1).flatten())
    terms = terms.unflatten(dim, at.shape).to(dtype)
    if weights is not None:
        terms = terms * weights.reshape(shape)
    return terms.where(counts.reshape(shape), 0).sum(dim)


window_sum = make_prim(
    "inductor_window_sum(Tensor values, Tensor? weights, int dim, int elements, int step, "
    "int offset, int divisor, int size) -> Tensor",
    window_sum_eager,
    doc="sums of values over windows of positions",
)


@register_lowering(window_sum, type_promotion_kind=None)
def lower_window_sum(
    values: TensorBox,
    weights: Optional[TensorBox],
    dim: int,
    elements: int,
    step: int,
    offset: int,
    divisor: int,
    size: int,
) -> TensorBox:
    dtype = torch.promote_types(values.get_dtype(), torch.float32)
    ranges = list(values.get_size())
    positions, ranges[dim] = ranges[dim], elements
    first, last = ((step * x + offset) // divisor for x in (0, elements - 1))
    within = first >= 0 and V.graph.sizevars.statically_known_leq(last + size, positions)
    load = values.make_loader()
    if weights is not None:
        weights.realize()
        load_weight = weights.make_loader()

    def term(index: Sequence[sympy.Expr], place: sympy.Expr) -> OpsValue:
        """What the position at a ``place`` of the window adds."""
        at = FloorDiv(step * index[dim] + offset, divisor) + place

        def value() -> OpsValue:
            return ops.to_dtype(load([*index[:dim], at, *index[dim + 1 :]]), dtype)

        if within:
            out = value()
        else:
            position = ops.index_expr(at, torch.int64)
            counts = ops.and_(
                ops.ge(position, ops.constant(0, torch.int64)),
                ops.lt(position, ops.index_expr(positions, torch.int64)),
            )
            out = ops.masked(counts, value, 0.0)
        if weights is None:
            return out
        weight, zero = load_weight([place, index[dim]]), ops.constant(0, dtype)
        # An infinity or NaN is of its own elements alone.
        return ops.where(ops.ne(weight, zero), ops.mul(out, weight), zero)

    if size <= MAX_UNROLLED:

        def inner(index: Sequence[sympy.Expr]) -> OpsValue:
            terms = [term(index, sympy.Integer(place)) for place in range(size)]
            return functools.reduce(ops.add, terms)

        result = Pointwise.create(
            device=values.get_device(), dtype=dtype, inner_fn=inner, ranges=ranges
        )
    else:
        result = Reduction.create(
            device=values.get_device(),
            dst_dtype=dtype,
            src_dtype=dtype,
            inner_fn=lambda index, places: term(index, places[0]),
            ranges=ranges,
            reduction_ranges=[size],
            reduction_type="sum",
        )
    if weights is not None or size**2 > MAX_INLINED:
        # What reads windows of it would compute it as many times.
        result.realize()
    return result
