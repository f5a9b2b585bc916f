"""
Products that are rounded before anything is added to them.

A product that is subtracted from is contracted with the subtraction. Of an online softmax that
would be the product less its maximum, which is rounded: of a row of equal large values, such as a
mask's, neither is the other.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

from . import config
from .inductor_prims import make_prim
from .ir import TensorBox
from .lowering import make_pointwise, register_lowering
from .virtualized import ops


def rounded_product_eager(
    x: torch.Tensor, y: Optional[torch.Tensor], factor: float
) -> torch.Tensor:
    """``x`` times ``y``, which it broadcasts with, or times ``factor`` if there is none."""
    return x * (factor if y is None else y)


rounded_product = make_prim(
    "inductor_rounded_product(Tensor x, Tensor? y, float factor) -> Tensor",
    rounded_product_eager,
    doc="a product that is not contracted with a sum",
)


@register_lowering(rounded_product, broadcast=True)
def lower_rounded_product(
    x: TensorBox, y: Optional[TensorBox], factor: float
) -> TensorBox:
    dtype = x.get_dtype()
    # of half types that are not computed in float32 each product is rounded, to fewer digits
    is_rounded = dtype.itemsize < 4 and not config.triton.codegen_upcast_to_fp32
    mul = ops.mul if is_rounded else ops.mul_rn

    def scaled(value: Any) -> Any:
        return mul(value, ops.constant(factor, dtype))

    return make_pointwise(scaled)(x) if y is None else make_pointwise(mul)(x, y)
