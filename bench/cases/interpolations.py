"""The backwards of interpolations, as decoders have them, and of a gather by known positions.

The gradient that comes in is read once. As scatters of atomic adds, one for each of the corners
that an element was interpolated from, they wait for each other.
"""

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case, numel


def bilinear(x, size):
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)


def corners(x, size):
    return F.interpolate(x, size=size, mode="bilinear", align_corners=True)


def bicubic(x, size):
    return F.interpolate(x, size=size, mode="bicubic", align_corners=False)


def nearest(x, size):
    return F.interpolate(x, size=size, mode="nearest")


def _of(memory_format):
    """Of (batch, channels, height, width, scaled height, scaled width): input, size, gradient."""

    def inputs(shape, dtype, device):
        batch, channels, *sizes = shape
        (source, size) = sizes[:2], tuple(sizes[2:])
        x, grad = (
            torch.randn(batch, channels, *each, dtype=dtype, device=device).contiguous(
                memory_format=memory_format
            )
            for each in (source, size)
        )
        return x, size, grad

    return inputs


def interpolation_bytes(shape, dtype):
    batch, channels, height, width, *size = shape
    return numel((batch, channels)) * (height * width + numel(size)) * dtype.itemsize


def position_inputs(shape, dtype, device):
    table = torch.randn(shape[-2:], device=device)
    tokens, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    return table, tokens, grad.float()


def add_positions(table, tokens):
    """Tokens [batch, length, columns], and what stands for each position."""
    return tokens + F.embedding(torch.arange(tokens.shape[1], device=tokens.device), table)


def position_bytes(shape, dtype):
    return (numel(shape) + numel(shape[1:])) * 4


CHANNELS_LAST = _of(torch.channels_last)
CONTIGUOUS = _of(torch.contiguous_format)

DECODER = {
    "default": [(16, 768, 64, 64, 128, 128)],
    "suite": [
        (16, 768, 64, 64, 128, 128),
        (16, 768, 16, 16, 128, 128),
        (16, 256, 32, 32, 56, 56),
        (8, 64, 100, 150, 201, 299),
        (2, 64, 16, 16, 32, 32),
    ],
}
LOGITS = {
    "default": [(16, 150, 128, 128, 512, 512)],
    "suite": [
        (16, 150, 128, 128, 512, 512),
        (8, 19, 128, 256, 512, 1024),
        (8, 21, 65, 65, 513, 513),
        (32, 64, 112, 112, 224, 224),
        (2, 2, 30, 30, 60, 60),
    ],
}

CASES = [
    Case(
        "bilinear_grad",
        "channels last, as decoders of convolutional nets have it",
        Backward(bilinear, (0,)),
        CHANNELS_LAST,
        DECODER,
        ("bf16", "fp32"),
        interpolation_bytes,
    ),
    Case(
        "bilinear_logits_grad",
        "contiguous, as the logits of segmentation are scaled to the labels",
        Backward(bilinear, (0,)),
        CONTIGUOUS,
        LOGITS,
        ("bf16", "fp32"),
        interpolation_bytes,
    ),
    Case(
        "bilinear_corners_grad",
        "with corners aligned",
        Backward(corners, (0,)),
        CHANNELS_LAST,
        DECODER,
        ("bf16",),
        interpolation_bytes,
    ),
    Case(
        "bicubic_grad",
        "a table of positions of images of another size, and images that are made larger",
        Backward(bicubic, (0,)),
        CONTIGUOUS,
        {
            "default": [(1, 768, 37, 37, 16, 16)],
            "suite": [
                (1, 768, 37, 37, 16, 16),
                (1, 1024, 16, 16, 32, 24),
                (8, 64, 64, 64, 128, 128),
            ],
        },
        ("fp32",),
        interpolation_bytes,
    ),
    Case(
        "nearest_grad",
        "the nearest element, channels last",
        Backward(nearest, (0,)),
        CHANNELS_LAST,
        DECODER,
        ("bf16", "fp32"),
        interpolation_bytes,
    ),
    Case(
        "nearest_planes_grad",
        "the nearest element, contiguous",
        Backward(nearest, (0,)),
        CONTIGUOUS,
        LOGITS,
        ("bf16",),
        interpolation_bytes,
    ),
    Case(
        "position_embedding_grad",
        "a learned table of positions, from a gradient of its tokens",
        Backward(add_positions, (0,)),
        position_inputs,
        {
            "default": [(16, 1024, 768)],
            "suite": [(16, 1024, 768), (64, 197, 384), (8, 2048, 2048)],
        },
        ("fp32",),
        position_bytes,
    ),
]
