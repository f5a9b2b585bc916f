"""Scaling of [M, N] to e4m3 by the largest value of each block of two dimensions.

The forms are those in which people write the blocks; the values are the same. `few` has one to four
blocks of 128 x 128 for each SM of a GPU of 132, or nearly one.
"""

import functools

import torch

from graft.cases import Case
from graft.cases.scaled import block_bytes, matrix

FP8 = torch.float8_e4m3fn
SHAPES = {
    "default": [(8192, 4096)],
    "large": [(8192, 4096), (16384, 16384), (4096, 14336), (7168, 2048)],
    "few": [(2048, 1024), (1536, 1408), (2176, 1024), (3072, 1408), (4096, 2048)],
}
BLOCKS = ((128, 128), (32, 32), (8, 64))


def _scale(blocks, dims):
    amax = blocks.abs().amax(dims, keepdim=True).float()
    scale = torch.finfo(FP8).max / amax.clamp(min=1e-12)
    return (blocks.float() * scale).to(FP8), amax


def viewed(x, m, n):
    """Blocks are two dimensions of a view."""
    values, amax = _scale(x.view(x.shape[0] // m, m, x.shape[1] // n, n), (1, 3))
    return values.view(x.shape), amax.squeeze(3).squeeze(1)


def unflattened(x, m, n):
    values, amax = _scale(x.unflatten(0, (-1, m)).unflatten(2, (-1, n)), (1, 3))
    return values.flatten(2).flatten(0, 1), amax.flatten()


def permuted(x, m, n):
    """Blocks are rows: one after another, and written back to their places."""
    M, N = x.shape
    rows = x.reshape(M // m, m, N // n, n).permute(0, 2, 1, 3).reshape(-1, m * n)
    values, amax = _scale(rows, 1)
    values = values.reshape(M // m, N // n, m, n).permute(0, 2, 1, 3).reshape(M, N)
    return values, amax.reshape(M // m, N // n)


FORMS = {"viewed": viewed, "unflattened": unflattened, "permuted": permuted}


CASES = [
    Case(
        f"block_tile_{m}x{n}_{name}",
        f"e4m3 in blocks of {m} x {n}, {name}",
        functools.partial(form, m=m, n=n),
        matrix,
        SHAPES,
        ("bf16", "fp32"),
        block_bytes(1, FP8.itemsize, 4, m * n),
    )
    for m, n in BLOCKS
    for name, form in FORMS.items()
]
