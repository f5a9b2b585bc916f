"""What cases of scaled casts, and others of whole matrices, take, and the bytes that they move."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from graft.cases.case import Shape

MX_BLOCK, FP4_BLOCK = 32, 16

BytesMoved = Callable[[Shape, torch.dtype], int]


def matrix(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """One tensor, as the inputs of a case."""
    return (torch.randn(shape, dtype=dtype, device=device),)


def two(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Two tensors of one shape."""
    return matrix(shape, dtype, device) + matrix(shape, dtype, device)


def block_bytes(
    directions: int,
    value: float | None = None,
    scale: int | None = None,
    block: int = MX_BLOCK,
    more: int = 0,
) -> BytesMoved:
    """The input once, and for each direction values of `value` bytes and scales of `scale`.

    They are of the input's type by default. `more` bytes are read besides.
    """

    def bytes_moved(shape: Shape, dtype: torch.dtype) -> int:
        elements = math.prod(shape)
        values = int(elements * (dtype.itemsize if value is None else value))
        scales = elements // block * (dtype.itemsize if scale is None else scale)
        return elements * dtype.itemsize + directions * (values + scales) + more

    return bytes_moved


def swizzled_bytes(direction: int) -> BytesMoved:
    """The input once, values of a byte, and scales in whole tiles of 128 rows of 4."""

    def bytes_moved(shape: Shape, dtype: torch.dtype) -> int:
        m, n = shape if direction == 0 else reversed(shape)
        tiles = math.ceil(m / 128) * math.ceil(n / MX_BLOCK / 4)
        return m * n * (dtype.itemsize + 1) + tiles * 512

    return bytes_moved
