"""Block scaling of [M, N] in blocks of 32, along either dimension and along both at once.

`dim0` scales along the contiguous dimension, `dim1` along the other and returns its result
transposed, as the two matrix products of a linear layer want it.
"""

import torch

from graft.cases import Case

BLOCK = 32
SHAPES = {
    "default": [(8192, 4096)],
    "large": [(16384, 16384), (8192, 4096), (16384, 4096), (8192, 8192), (4096, 14336)],
}


def _scale(x):
    """x [..., M, N] to x / amax and amax [..., M, N / 32], amax of |x| over blocks of 32."""
    blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(x.shape), amax.squeeze(-1)


def mx_dim0(x):
    return _scale(x)


def mx_dim1(x):
    return _scale(x.t().contiguous())


def mx_both(x):
    return *mx_dim0(x), *mx_dim1(x)


def mx_both_fp8(x):
    """Both directions, with the power-of-two scales and e4m3 values of the MX format."""
    out = []
    for side in (x, x.t().contiguous()):
        blocks = side.reshape(*side.shape[:-1], -1, BLOCK).float()
        amax = blocks.abs().amax(-1, keepdim=True)
        # e8m0: the power of two that brings amax into e4m3's largest binade, [256, 448].
        exponent = torch.floor(torch.log2(amax)) - 8
        values = torch.clamp(blocks * torch.exp2(-exponent), -448.0, 448.0)
        biased = (exponent + 127).to(torch.uint8)
        out += [values.to(torch.float8_e4m3fn).reshape(side.shape), biased.squeeze(-1)]
    return tuple(out)


def _matrix(shape, dtype, device):
    return (torch.randn(shape, dtype=dtype, device=device),)


def _bytes(directions, value_bytes=None, scale_bytes=None):
    def bytes_moved(shape, dtype):
        m, n = shape
        value = value_bytes or dtype.itemsize
        scale = scale_bytes or dtype.itemsize
        return m * n * dtype.itemsize + directions * (m * n * value + m * n // BLOCK * scale)

    return bytes_moved


def _case(name, summary, fn, bytes_moved):
    return Case(name, summary, fn, _matrix, SHAPES, ("bf16", "fp32"), bytes_moved)


CASES = [
    _case("mx_dim0", "scale blocks of 32 along the contiguous dimension", mx_dim0, _bytes(1)),
    _case("mx_dim1", "scale blocks of 32 along the other, transposed", mx_dim1, _bytes(1)),
    _case("mx_both", "scale both ways in one graph", mx_both, _bytes(2)),
    _case("mx_both_fp8", "both ways, to e4m3 with e8m0 scales", mx_both_fp8, _bytes(2, 1, 1)),
]
