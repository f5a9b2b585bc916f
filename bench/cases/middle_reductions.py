"""Reductions of [B, C, N] over C, of which each result is written as x is read, along N.

So are softmax over the classes of an image, and norms over its channels, with channels first.
"""

import functools

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case, numel
from graft.cases.scaled import matrix, two

SHAPES = {
    "default": [(128, 192, 784)],
    "suite": [
        (2048, 16, 1024),
        (16, 19, 65536),
        (512, 32, 4096),
        (64, 64, 16384),
        (128, 96, 3136),
        (16, 128, 16384),
        (16, 150, 16384),
        (128, 192, 784),
        (8, 256, 16384),
        (128, 384, 196),
        (4, 512, 16384),
        (128, 768, 196),
        (32, 1000, 1024),
    ],
    "held_out": [
        (24, 96, 4225),
        (3, 48, 100000),
        (40, 80, 2809),
        (12, 24, 9216),
        (160, 320, 196),
        (2, 640, 4096),
        (2, 1024, 4096),
        (1, 8, 262144),
    ],
    "small": [(1, 32, 4096), (8, 64, 784), (8, 96, 3136), (2, 256, 1024), (8, 384, 196)],
}
EPS = 1e-6


def softmax_middle(x):
    return torch.softmax(x, 1)


def log_softmax_middle(x):
    return torch.log_softmax(x.float(), 1)


def normalize_middle(x):
    return F.normalize(x, dim=1)


def layer_norm_middle(x, weight, bias):
    """A layer norm over channels, as ConvNeXt and SAM have it for channels first."""
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return weight[:, None] * ((x - mean) / torch.sqrt(variance + EPS)) + bias[:, None]


def added_norm_middle(x, residual, weight, bias):
    """A residual added, and the layer norm of the sum: both are written."""
    total = x + residual
    return total, layer_norm_middle(total, weight, bias)


def gated_norm_middle(x, gate, residual, weight, bias):
    """The layer norm of a gated x and a residual."""
    return layer_norm_middle(x * torch.sigmoid(gate) + residual, weight, bias)


def cast_middle(x):
    """To e4m3, with a scale for all channels of a place."""
    scale = x.float().abs().amax(1, keepdim=True).clamp(min=EPS) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _parameters(tensors):
    def inputs(shape, dtype, device):
        parameters = (torch.randn(shape[1], dtype=dtype, device=device) for _ in range(2))
        return *(
            torch.randn(shape, dtype=dtype, device=device) for _ in range(tensors)
        ), *parameters

    return inputs


def _bytes(tensors, result, parameters, scales, shape, dtype):
    """So many tensors of x's type, and one of results of `result` bytes.

    `parameters` have a value a channel, and `scales`, of float32, one of all channels.
    """
    batch, channels, columns = shape
    of_values = numel(shape) * (tensors * dtype.itemsize + (result or dtype.itemsize))
    return of_values + parameters * channels * dtype.itemsize + scales * batch * columns * 4


def _case(name, summary, fn, inputs, tensors, result=None, parameters=0, scales=0):
    moved = functools.partial(_bytes, tensors, result, parameters, scales)
    return Case(name, summary, fn, inputs, SHAPES, ("bf16", "fp32"), moved)


CASES = [
    _case("softmax_middle", "softmax over the channels", softmax_middle, matrix, 1),
    _case(
        "softmax_middle_grad",
        "the gradient of softmax over the channels",
        Backward(softmax_middle, (0,)),
        two,
        2,
    ),
    _case(
        "log_softmax_middle",
        "log-softmax over the channels, in float32",
        log_softmax_middle,
        matrix,
        1,
        4,
    ),
    _case("normalize_middle", "x over its norm over the channels", normalize_middle, matrix, 1),
    _case(
        "layer_norm_middle",
        "layer norm over the channels, with channels first",
        layer_norm_middle,
        _parameters(1),
        1,
        parameters=2,
    ),
    _case(
        "added_norm_middle",
        "layer norm over the channels of a sum that is written too",
        added_norm_middle,
        _parameters(2),
        3,
        parameters=2,
    ),
    _case(
        "gated_norm_middle",
        "layer norm over the channels of a gate, its values and a residual",
        gated_norm_middle,
        _parameters(3),
        3,
        parameters=2,
    ),
    _case(
        "cast_middle",
        "cast to e4m3, scaled over the channels",
        cast_middle,
        matrix,
        1,
        result=1,
        scales=1,
    ),
]
