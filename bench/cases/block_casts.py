"""Casts to block-scaled formats as quantised training does them, of [M, N] along either dimension.

MXFP8 is e4m3 in blocks of 32 with a power of two each (OCP Microscaling Formats 1.0), taken from
the exponent bits of the block's largest magnitude. NVFP4 is e2m1, two to a byte, in blocks of 16
with an e4m3 scale each. `dim1` casts along the rows of x and returns its result transposed, as
the second matrix product of a linear layer wants it. `swizzled` scales lie in tiles of 128 rows
of 4, as tensor cores read them.
"""

import torch
import torch.nn.functional as F

from graft.cases import Case
from graft.cases.scaled import FP4_BLOCK, MX_BLOCK, block_bytes, matrix, swizzled_bytes

SHAPES = {
    "default": [(8192, 4096)],
    "large": [(16384, 16384), (8192, 4096), (4096, 14336), (33024, 5120)],
}
E4M3_EXPONENT = 8  # of 448, e4m3's largest value
# Where |x| rounds to the next value of e2m1: 0.5, 1, 1.5, 2, 3, 4, 6. Ties go to the even code.
E2M1_ABOVE, E2M1_FROM = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)
E2M1_MAX = 6.0


def _exponent(amax):
    """floor(log2(amax)) of a normal number, from its bits, int32."""
    if amax.dtype == torch.float64:
        return ((amax.view(torch.int64) >> 52) & 0x7FF).to(torch.int32) - 1023
    return ((amax.view(torch.int32) >> 23) & 0xFF) - 127


def _power_of_two(exponent):
    """2 to an int32 exponent from -126 to 127, by its bits, float32."""
    return ((exponent + 127) << 23).view(torch.float32)


def _mxfp8(x):
    """x [M, N] to e4m3 [M, N] and biased e8m0 exponents, uint8 [M, N / 32]."""
    blocks = x.reshape(x.shape[0], -1, MX_BLOCK).float()
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = (_exponent(amax) - E4M3_EXPONENT).clamp(-126, 126)
    values = (blocks * _power_of_two(-exponent)).clamp(-448.0, 448.0)
    scales = (exponent + 127).to(torch.uint8)
    return values.to(torch.float8_e4m3fn).reshape(x.shape), scales.squeeze(-1)


def _swizzle(scales):
    """scales [M, K] to tiles of 128 by 4, a tile as 32 by 4 by 4; what is missing is 0."""
    m, k = scales.shape
    padded = F.pad(scales, (0, -k % 4, 0, -m % 128))
    tiles = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _nvfp4(x):
    """x [M, N] to e2m1 pairs, uint8 [M, N / 2], the first in the low bits, and e4m3 [M, N / 16]."""
    blocks = x.reshape(x.shape[0], -1, FP4_BLOCK).float()
    amax = blocks.abs().amax(-1, keepdim=True)
    scales = (amax / E2M1_MAX).clamp(2.0**-6, 448.0).to(torch.float8_e4m3fn)
    scaled = blocks / scales.float()
    magnitude = scaled.abs()
    code = (scaled < 0).to(torch.uint8) << 3
    for bound in E2M1_ABOVE:
        code = code + (magnitude > bound).to(torch.uint8)
    for bound in E2M1_FROM:
        code = code + (magnitude >= bound).to(torch.uint8)
    pairs = code.reshape(x.shape[0], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4), scales.squeeze(-1)


def mxfp8_dim0(x):
    return _mxfp8(x)


def mxfp8_dim1(x):
    return _mxfp8(x.t().contiguous())


def mxfp8_both(x):
    return *mxfp8_dim0(x), *mxfp8_dim1(x)


def mxfp8_swizzled_dim0(x):
    values, scales = _mxfp8(x)
    return values, _swizzle(scales)


def mxfp8_swizzled_dim1(x):
    return mxfp8_swizzled_dim0(x.t().contiguous())


def nvfp4_dim0(x):
    return _nvfp4(x)


def nvfp4_dim1(x):
    return _nvfp4(x.t().contiguous())


def _case(summary, fn, bytes_moved):
    return Case(fn.__name__, summary, fn, matrix, SHAPES, ("bf16", "fp32"), bytes_moved)


CASES = [
    _case("e4m3 and e8m0 along the contiguous dimension", mxfp8_dim0, block_bytes(1, 1, 1)),
    _case("e4m3 and e8m0 along the other, transposed", mxfp8_dim1, block_bytes(1, 1, 1)),
    _case("e4m3 and e8m0 both ways", mxfp8_both, block_bytes(2, 1, 1)),
    _case("the contiguous one, scales in tiles", mxfp8_swizzled_dim0, swizzled_bytes(0)),
    _case("the other one, scales in tiles", mxfp8_swizzled_dim1, swizzled_bytes(1)),
    _case(
        "packed e2m1 along the contiguous dimension", nvfp4_dim0, block_bytes(1, 0.5, 1, FP4_BLOCK)
    ),
    _case("packed e2m1 along the other, transposed", nvfp4_dim1, block_bytes(1, 0.5, 1, FP4_BLOCK)),
]
