"""Reductions of the channels of [N, C, H, W] over N, H and W, as batch norms and biases have them.

A channel is in N pieces, and where there are few channels lowering splits each.
"""

import torch

from graft.cases import Case

SHAPES = {
    "default": [(64, 64, 128, 128)],
    # of networks for images of 224 to 256 pixels and their like, and sizes that nobody has
    "suite": [
        (64, 64, 112, 112),
        (64, 64, 128, 128),
        (128, 96, 56, 56),
        (64, 72, 112, 112),
        (128, 192, 28, 28),
        (96, 24, 150, 150),
        (128, 32, 112, 112),
        (256, 128, 28, 28),
        (64, 256, 56, 56),
        (100, 64, 57, 57),
        (32, 48, 192, 192),
        (48, 200, 40, 40),
        (31, 64, 113, 113),
        (1, 48, 1024, 1024),
        (20, 36, 80, 80),
        (7, 130, 96, 96),
        (16, 64, 256, 256),
        (64, 12, 224, 224),
        (6, 3, 512, 512),
        (40, 250, 60, 60),
        (96, 160, 28, 28),
        (24, 80, 90, 160),
        (192, 40, 65, 65),
        (8, 16, 512, 384),
    ],
}
CHANNELS = (0, 2, 3)


def _tensors(count, of_channels=0):
    def make(shape, dtype, device):
        wide = [torch.randn((1, shape[1], 1, 1), device=device) for _ in range(of_channels)]
        return (*(torch.randn(shape, device=device).to(dtype) for _ in range(count)), *wide)

    return make


def _sums(grad, x, mean):
    """Of a batch norm's backward: the gradients of its bias and, but for 1 / std, its weight."""
    return grad.sum(CHANNELS), (grad * (x.float() - mean)).sum(CHANNELS)


def channel_sum(x):
    return x.float().sum(CHANNELS)


def channel_moments(x):
    return torch.var_mean(x.float(), CHANNELS)


def relu_channel_grads(dy, y, x, mean):
    """What ReLU passes on of dy [N, C, H, W], summed for the norm before it: two of [C]."""
    return _sums(torch.where(y <= 0, 0.0, dy.float()), x, mean)


def silu_channel_grads(dy, x, mean, scale):
    """As the above behind SiLU, whose input is computed anew: two of [C]."""
    y = (x.float() - mean) * scale
    gate = torch.sigmoid(y)
    return _sums(dy.float() * gate * (1 + y * (1 - gate)), x, mean)


CASES = [
    Case(fn.__name__, title, fn, make, SHAPES, ("bf16", "fp32"))
    for fn, title, make in (
        (channel_sum, "the sum of each channel", _tensors(1)),
        (channel_moments, "mean and variance of each channel", _tensors(1)),
        (relu_channel_grads, "gradients of a batch norm behind ReLU", _tensors(3, 1)),
        (silu_channel_grads, "gradients of a batch norm behind SiLU", _tensors(2, 2)),
    )
]
