"""
A max pool's backward by the offsets that its forward kept.

The forward keeps for each window where its maximum is, an int8 offset within the window.
The backward asks of each element, for each window that covers it, whether it is that
maximum. As indices into the input, an offset is divided by the window's width, moved by
the window's place and multiplied by the input's width, in 64 bits, once for each window
and element. Within the window, the element's own offset is a product and a sum.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional, TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .runtime.runtime_utils import ceildiv
from .virtualized import ops, V


if TYPE_CHECKING:
    import sympy

    from .ir import TensorBox
    from .virtualized import OpsValue


# Windows of an element, at most, that are compared where the release would scatter: a window
# of overlapping halves has four. With nine, comparing takes as long as what a scatter moves.
MAX_WINDOWS = 4


class WindowOffsets(NamedTuple):
    """Offsets [..., pooled height, pooled width] of maxima in windows of two dimensions."""

    offsets: TensorBox
    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]

    @property
    def channels_last(self) -> bool:
        """Whether they lie in memory as what is pooled channels last."""
        stride = self.offsets.maybe_get_stride()
        return stride is not None and len(stride) == 4 and stride[1] == 1

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
    known = V.graph.sizevars.statically_known_true
    pooled = indices.get_size()[-2:]
    if not windows_cover(sizes, pooled, kernel_size, stride, padding, known):
        return None
    return offsets


def windows_cover(
    sizes: Sequence[Any],
    pooled: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    known: Callable[[Any], bool],
) -> bool:
    """
    Whether each element of an input whose last two sizes are ``sizes`` is known to be in one
    of its ``pooled`` windows.
    """
    return all(
        step <= kernel and known((count - 1) * step + kernel >= size + pad)
        for size, count, kernel, step, pad in zip(
            sizes, pooled, kernel_size, stride, padding
        )
    )


def compares_offsets(
    grad: torch.Tensor,
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> bool:
    """
    Whether the gradient of ``x``, [..., height, width], by that of its pool is computed for
    each element from the few windows that cover it, by their offsets, where a release would
    scatter what is of each window: into zeros in float32, which are written, added to and
    read again.
    """
    stride = stride or kernel_size
    if (
        not grad.is_cuda
        or not len(kernel_size) == len(stride) == len(padding) == 2
        or any(d != 1 for d in dilation)
        or math.prod(map(ceildiv, kernel_size, stride)) > MAX_WINDOWS
    ):
        return False
    sizes, pooled = x.shape[-2:], grad.shape[-2:]
    return windows_cover(
        sizes, pooled, kernel_size, stride, padding, statically_known_true
    )


# whether a backward is being traced whose input is replaced
_replaced = contextvars.ContextVar("_replaced", default=False)


def compared_backward(grad: torch.Tensor, x: torch.Tensor, *args: Any) -> torch.Tensor:
    """
    What stands in a graph for a backward that ``compares_offsets``: the operator itself, of
    its other ``args`` and an empty tensor like ``x``. The operator wants its sizes alone, and
    a forward would keep ``x`` for them, which is as large as what the pool's windows cover.

    NotImplemented where it is called for that operator.
    """
    if _replaced.get():
        return NotImplemented
    like_x = grad.new_empty_strided(x.shape, x.stride(), dtype=x.dtype)
    token = _replaced.set(True)
    try:
        return torch.ops.aten.max_pool2d_with_indices_backward(grad, like_x, *args)
    finally:
        _replaced.reset(token)
