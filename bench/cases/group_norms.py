"""Reductions over channels and pixels at once, of tensors in channels last.

Group norms as convolutional networks have them (32 groups and SiLU in a U-Net's and a VAE's blocks,
one group in a PoolFormer's), and the loss of a diffusion model, by image. What is reduced is
[C / G, H * W] in that order, and lies in memory in the other.
"""

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case, numel

SHAPES = {
    "default": [(8, 320, 64, 64)],
    "suite": [
        (8, 320, 64, 64),
        (8, 640, 32, 32),
        (8, 1280, 16, 16),
        (2, 128, 512, 512),
        (64, 96, 56, 56),
        (3, 192, 37, 53),
    ],
}


def group_norm_silu(x, weight, bias):
    """For a convolution, which wants channels last."""
    y = F.silu(F.group_norm(x.float(), 32, weight, bias, 1e-5)).to(x.dtype)
    return y.contiguous(memory_format=torch.channels_last)


def group_norm_one(x, weight, bias):
    y = F.group_norm(x.float(), 1, weight, bias, 1e-5).to(x.dtype)
    return y.contiguous(memory_format=torch.channels_last)


def image_error(x, noise, weight):
    """The squared error of each image, weighted: [N]."""
    return (x.float() - noise.float()).square().mean((1, 2, 3)) * weight


def _channels_last(shape, dtype, device):
    x = torch.randn(shape, dtype=dtype, device=device)
    return x.contiguous(memory_format=torch.channels_last)


def _inputs(gradient):
    def inputs(shape, dtype, device):
        weight, bias = (torch.randn(shape[1], device=device) for _ in range(2))
        grads = (_channels_last(shape, dtype, device),) if gradient else ()
        return _channels_last(shape, dtype, device), weight, bias, *grads

    return inputs


def _images(shape, dtype, device):
    weight = torch.rand(shape[0], device=device)
    return *(_channels_last(shape, dtype, device) for _ in range(2)), weight


def norm_bytes(shape, dtype, tensors=2):
    """Of so many tensors, and as many of a value a channel."""
    return tensors * (numel(shape) * dtype.itemsize + shape[1] * 4)


def grad_bytes(shape, dtype):
    return norm_bytes(shape, dtype, tensors=3)


def error_bytes(shape, dtype):
    return 2 * numel(shape) * dtype.itemsize + 2 * shape[0] * 4


CASES = [
    Case(
        "group_norm_silu",
        "32 groups and SiLU, in channels last",
        group_norm_silu,
        _inputs(False),
        SHAPES,
        ("bf16", "fp32"),
        norm_bytes,
    ),
    Case(
        "group_norm_silu_grad",
        "all gradients of group_norm_silu",
        Backward(group_norm_silu, (0, 1, 2)),
        _inputs(True),
        SHAPES,
        ("bf16", "fp32"),
        grad_bytes,
    ),
    Case(
        "group_norm_one",
        "one group, in channels last",
        group_norm_one,
        _inputs(False),
        SHAPES,
        ("bf16", "fp32"),
        norm_bytes,
    ),
    Case(
        "group_norm_one_grad",
        "all gradients of group_norm_one",
        Backward(group_norm_one, (0, 1, 2)),
        _inputs(True),
        SHAPES,
        ("bf16", "fp32"),
        grad_bytes,
    ),
    Case(
        "image_error",
        "the squared error of each image, in channels last",
        image_error,
        _images,
        SHAPES,
        ("bf16", "fp32"),
        error_bytes,
    ),
]
