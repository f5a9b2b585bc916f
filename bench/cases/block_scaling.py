"""Block scaling of [M, N] in blocks of 32, along either dimension and along both at once.

`dim0` scales along the contiguous dimension, `dim1` along the other and returns its result
transposed, as the two matrix products of a linear layer want it. People write it in several ways:
`flat` has the blocks in one dimension (pytorch#149982), `flat` and `view` transpose the result
back, `back` copies it back as well. `rows` has no transpose at all, and `rounded` is what x is
after it was quantized, in the shape of x.
"""

import torch

from graft.cases import Case
from graft.cases.scaled import block_bytes, matrix

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


def _flat(x, block=BLOCK):
    t = x.t().contiguous()
    blocks = t.reshape(-1, block)
    amax = blocks.abs().amax(1).unsqueeze(1)
    return (blocks / amax).reshape(t.shape).t(), amax


def mx_dim1_flat(x):
    return _flat(x)


def mx_dim1_flat16(x):
    return _flat(x, 16)


def mx_dim1_flat64(x):
    return _flat(x, 64)


def mx_dim1_flat128(x):
    return _flat(x, 128)


def mx_dim1_view(x):
    t = x.t().contiguous()
    blocks = t.reshape(t.shape[0], -1, BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(t.shape).t(), amax


def mx_dim1_back(x):
    y, amax = _flat(x)
    return y.contiguous(), amax


def mx_dim1_rows(x):
    blocks = x.unflatten(0, (-1, BLOCK))
    amax = blocks.abs().amax(1, keepdim=True)
    return (blocks / amax).reshape(x.shape), amax.squeeze(1)


def mx_dim1_rounded(x):
    blocks = x.unflatten(0, (-1, BLOCK)).float()
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scale).round() * scale).flatten(0, 1).to(x.dtype), scale.squeeze(1)


def mx_both(x):
    return *mx_dim0(x), *mx_dim1(x)


def mx_both_flat(x):
    blocks = x.reshape(-1, BLOCK)
    amax = blocks.abs().amax(1).unsqueeze(1)
    return (blocks / amax).reshape(x.shape), amax, *_flat(x)


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


def _case(name, summary, fn, bytes_moved):
    return Case(name, summary, fn, matrix, SHAPES, ("bf16", "fp32"), bytes_moved)


CASES = [
    _case("mx_dim0", "scale blocks of 32 along the contiguous dimension", mx_dim0, block_bytes(1)),
    _case("mx_dim1", "scale blocks of 32 along the other, transposed", mx_dim1, block_bytes(1)),
    _case(
        "mx_dim1_flat",
        "the same of flattened blocks, transposed back",
        mx_dim1_flat,
        block_bytes(1),
    ),
    *(
        _case(fn.__name__, f"the same of blocks of {n}", fn, block_bytes(1, block=n))
        for n, fn in ((16, mx_dim1_flat16), (64, mx_dim1_flat64), (128, mx_dim1_flat128))
    ),
    _case(
        "mx_dim1_view",
        "the same in three dimensions, transposed back",
        mx_dim1_view,
        block_bytes(1),
    ),
    _case("mx_dim1_back", "the flattened one, copied back", mx_dim1_back, block_bytes(1)),
    _case("mx_dim1_rows", "along the other, not transposed", mx_dim1_rows, block_bytes(1)),
    _case(
        "mx_dim1_rounded",
        "rounded to 8 bits and back",
        mx_dim1_rounded,
        block_bytes(1, scale=4),
    ),
    _case("mx_both", "scale both ways in one graph", mx_both, block_bytes(2)),
    _case("mx_both_flat", "both ways of flattened blocks", mx_both_flat, block_bytes(2)),
    _case("mx_both_fp8", "both ways, to e4m3 with e8m0 scales", mx_both_fp8, block_bytes(2, 1, 1)),
]
