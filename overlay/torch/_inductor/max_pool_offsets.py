"""
A max pool's backward by the offsets that its forward kept.

The forward keeps for each window where its maximum is, an int8 offset within the window.
The backward asks of each element, for each window that covers it, whether it is that
maximum. As indices into the input, an offset is divided by the window's width, moved by
the window's place and multiplied by the input's width, in 64 bits, once for each window
and element. Within the window, the element's own offset is a product and a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch

from .virtualized import ops, V


if TYPE_CHECKING:
    import sympy

    from .ir import TensorBox
    from .virtualized import OpsValue


class WindowOffsets(NamedTuple):
    """Offsets [..., pooled height, pooled width] of maxima in windows of two dimensions."""

    offsets: TensorBox
    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]

    def is_maximum(
        self,
        place: Sequence[Any],
        position: Sequence[sympy.Expr],
        window: Sequence[OpsValue],
    ) -> OpsValue:
        """
        Whether the element at ``position``, counted from the padding's begin, is the maximum
        of ``window``, of which the offset is at ``place``. False of what no window covers
        by its row; ``window`` has to cover its column.
        """
        row, column = (
            ops.sub(
                ops.index_expr(at, torch.int32),
                ops.mul(index, ops.constant(step, torch.int32)),
            )
            for at, index, step in zip(position, window, self.stride)
        )
        width = ops.constant(self.kernel_size[1], torch.int32)
        own = ops.add(ops.mul(row, width), column)
        kept = self.offsets.make_loader()(place)
        return ops.eq(ops.to_dtype(kept, torch.int32), own)


def note_offsets(
    indices: TensorBox,
    offsets: TensorBox,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> TensorBox:
    """``indices``, as computed from ``offsets``, with what a backward wants to know of them."""
    if len(kernel_size) == 2 and all(d == 1 for d in dilation):
        noted = WindowOffsets(offsets, kernel_size, stride, padding)
        indices.window_offsets = noted  # type: ignore[attr-defined]
    return indices


def window_offsets(
    indices: TensorBox,
    sizes: Sequence[sympy.Expr],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Optional[WindowOffsets]:
    """
    The offsets that ``indices``, [..., pooled height, pooled width], were computed from, for
    a backward by an input whose last two sizes are ``sizes``.

    None where they are not known, and where elements are not known to be in a window: these
    are told apart by the index alone.
    """
    offsets = getattr(indices, "window_offsets", None)
    asked = (kernel_size, stride, padding)
    if offsets is None or any([*a] != [*b] for a, b in zip(offsets[1:], asked)):
        return None
    sizevars = V.graph.sizevars
    pooled = indices.get_size()[-2:]
    for size, count, kernel, step, pad in zip(
        sizes, pooled, kernel_size, stride, padding
    ):
        end = (count - 1) * step + kernel
        if step > kernel or not sizevars.statically_known_geq(end, size + pad):
            return None
    return offsets
