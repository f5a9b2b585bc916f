"""Reductions over blocks of [M, N] along either dimension, and of [B, M, N] along the middle one.

`dim1` reduces blocks of rows, as if x were transposed: it reads along one dimension and writes
along another. Scaling and norms write a result of x's size, transposed; sums and argmax do not.
"""

import functools
import math

import torch

from graft.cases import Case
from graft.cases.scaled import matrix

SHAPES = {
    "default": [(8192, 8192)],
    "large": [(16384, 16384)],
}
BATCHED = {"default": [(8, 4096, 4096)]}
BLOCKS = (16, 32, 128, 512)
EPS = 1e-5


def _blocks(x, block):
    return x.reshape(*x.shape[:-1], -1, block)


def scale(x, block):
    """x / amax |x| and amax over blocks."""
    blocks = _blocks(x, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(x.shape), amax.squeeze(-1)


def norm(x, block):
    """x less its blocks' mean, over their standard deviation."""
    blocks = _blocks(x, block)
    variance, mean = torch.var_mean(blocks, -1, keepdim=True, correction=0)
    return ((blocks - mean) * torch.rsqrt(variance + EPS)).reshape(x.shape)


def total(x, block):
    return _blocks(x, block).sum(-1)


def argmax(x, block):
    return _blocks(x, block).argmax(-1)


OPERATIONS = {"scale": scale, "norm": norm, "sum": total, "argmax": argmax}


def _along(operation, block, dim):
    def along(x):
        return OPERATIONS[operation](x.transpose(-1, -2).contiguous() if dim else x, block)

    return along


def _bytes(operation, block, shape, dtype):
    elements = math.prod(shape)
    size = dtype.itemsize
    written = {
        "scale": elements * size + elements // block * size,
        "norm": elements * size,
        "sum": elements // block * size,
        "argmax": elements // block * 8,
    }
    return elements * size + written[operation]


def _case(operation, block, dim, name="", shapes=SHAPES):
    return Case(
        name or f"block_{operation}_{block}_dim{dim}",
        f"{operation} of blocks of {block}, along the {('contiguous', 'other')[dim]} dimension",
        _along(operation, block, dim),
        matrix,
        shapes,
        ("bf16", "fp32"),
        functools.partial(_bytes, operation, block),
    )


CASES = [
    *(_case(op, block, dim) for op in OPERATIONS for block in BLOCKS for dim in (0, 1)),
    _case("scale", 32, 1, "block_scale_32_batched", BATCHED),
]
