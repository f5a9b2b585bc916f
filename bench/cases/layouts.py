"""Pointwise, transpose, softmax, norm and reduction kernels over [N, C, H, W] in three layouts.

What a change of tiling may slow down: 13 operations in NCHW, in channels-last and permuted (H
outside C in memory, as attention's heads are), at sizes that are powers of two and not.
"""

import torch
import torch.nn.functional as F

from graft.cases import Case

SHAPES = {
    "default": [(32, 256, 56, 56)],
    "suite": [(32, 256, 56, 56), (16, 32, 1024, 64), (24, 96, 65, 65)],
}
EPS = 1e-5


def _nchw(shape, dtype, device):
    return torch.randn(shape, dtype=dtype, device=device)


def _channels_last(shape, dtype, device):
    n, c, h, w = shape
    return torch.randn((n, h, w, c), dtype=dtype, device=device).permute(0, 3, 1, 2)


def _permuted(shape, dtype, device):
    n, c, h, w = shape
    return torch.randn((n, h, c, w), dtype=dtype, device=device).permute(0, 2, 1, 3)


LAYOUTS = {"nchw": _nchw, "channels_last": _channels_last, "permuted": _permuted}


def gelu(x):
    return F.gelu(x * 0.5 + 1)


def add_contiguous(x):
    """Written as NCHW, whatever x is."""
    return (x + 1).contiguous(memory_format=torch.contiguous_format)


def transpose(x):
    """C and W exchanged, in memory too."""
    return (x.transpose(1, 3) * 2).contiguous()


def softmax_channels(x):
    return torch.softmax(x, 1)


def softmax_last(x):
    return torch.softmax(x, -1)


def layer_norm_channels(x):
    """Over C, as a convolutional network's layer norm; returns [N, H, W, C]."""
    return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), eps=EPS)


def rms_norm_last(x):
    return F.rms_norm(x, (x.shape[-1],), eps=EPS)


def group_norm(x):
    return F.group_norm(x, 32 if x.shape[1] % 32 == 0 else 8, eps=EPS)


def batch_norm(x):
    return F.batch_norm(x, None, None, training=True, eps=EPS)


def batch_norm_grad(x, dy):
    """The gradient of x, with sums of dy alone and beside x."""
    channels = {"dim": (0, 2, 3), "keepdim": True}
    wide, dy = x.float(), dy.float()
    variance, mean = torch.var_mean(wide, correction=0, **channels)
    scale = (variance + EPS).rsqrt()
    normed = (wide - mean) * scale
    slope = (dy * normed).mean(**channels)
    return (scale * (dy - dy.mean(**channels) - normed * slope)).to(x.dtype)


def mean_pixels(x):
    return x.mean((2, 3))


def sum_channel(x):
    """As the gradient of a bias per channel."""
    return x.float().sum((0, 2, 3))


def amax_channels(x):
    return x.abs().amax(1)


OPERATIONS = (
    gelu,
    add_contiguous,
    transpose,
    softmax_channels,
    softmax_last,
    layer_norm_channels,
    rms_norm_last,
    group_norm,
    batch_norm,
    batch_norm_grad,
    mean_pixels,
    sum_channel,
    amax_channels,
)


def _inputs(layout, tensors):
    make = LAYOUTS[layout]
    return lambda *of: tuple(make(*of) for _ in range(tensors))


CASES = [
    Case(
        f"{fn.__name__}_{layout}",
        f"{fn.__name__.replace('_', ' ')} of a tensor in {layout.replace('_', ' ')}",
        fn,
        _inputs(layout, 2 if fn is batch_norm_grad else 1),
        SHAPES,
        ("bf16", "fp32"),
    )
    for fn in OPERATIONS
    for layout in LAYOUTS
]
