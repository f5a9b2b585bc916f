"""An activation, [M, N]; its backward, and what a layer's gradients do with it.

`forward` is the activation of x plus a bias, `alone` the backward as it is.
`sums` sums it over both dimensions, `norm` projects it off x row by row and sums it over the rows,
and `bias` writes it and sums it over the rows, as the gradient of the bias before the activation.
`centered` has one input and no activation: x less the mean of its rows, and its sum over them.
"""

import functools
import math

import torch
import torch.nn.functional as F

from graft.cases import Case

SHAPES = {
    "default": [(16384, 4096)],
    "suite": [(24576, 3072), (16384, 4096), (65536, 1024), (16384, 768), (4096, 11008)],
}
GRADIENTS = {
    "gelu_tanh": functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"),
    "gelu_erf": torch.ops.aten.gelu_backward,
    "silu": torch.ops.aten.silu_backward,
    "tanh": lambda dy, x: dy * (1 - torch.tanh(x) ** 2),
}


ACTIVATIONS = {
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def forward(activation):
    def fn(x, bias):
        return activation(x + bias)

    return fn


def alone(gradient):
    return lambda dy, x: gradient(dy, x)


def sums(gradient):
    def fn(dy, x):
        dx = gradient(dy, x)
        return dx.sum(0), dx.sum(1)

    return fn


def norm(gradient):
    def fn(dy, x):
        dx = gradient(dy, x)
        scale = (dx * x).mean(-1, keepdim=True)
        return dx - x * scale, (dx * x).sum(0)

    return fn


def bias(gradient):
    def fn(dy, x):
        dx = gradient(dy, x)
        return dx, dx.sum(0)

    return fn


def centered(x):
    return x - x.mean(-1, keepdim=True), x.sum(0)


def _tensors(count):
    def inputs(shape, dtype, device):
        return tuple(torch.randn(shape, dtype=dtype, device=device) for _ in range(count))

    return inputs


def _bytes(tensors, rows=0):
    """`tensors` of [M, N] read or written, a sum over the rows, and `rows` values of a row."""

    def bytes_moved(shape, dtype):
        m, n = shape
        return (tensors * m * n + n + rows * m) * dtype.itemsize

    return bytes_moved


def _with_bias(shape, dtype, device):
    return (
        torch.randn(shape, dtype=dtype, device=device),
        torch.randn(shape[1:], dtype=dtype, device=device),
    )


_WAYS = (
    (alone, "written", lambda shape, dtype: 3 * math.prod(shape) * dtype.itemsize),
    (sums, "summed over both dimensions", _bytes(2, rows=1)),
    (norm, "projected off x, and summed over the rows", _bytes(3)),
    (bias, "written, and summed over the rows", _bytes(3)),
)
CASES = [
    *(
        Case(
            f"{name}_forward",
            f"{name} of x plus a bias",
            forward(activation),
            _with_bias,
            SHAPES,
            bytes_moved=lambda shape, dtype: (2 * math.prod(shape) + shape[1]) * dtype.itemsize,
        )
        for name, activation in ACTIVATIONS.items()
    ),
    *(
        Case(
            f"{name}_{way.__name__}",
            f"backward of {name}, {summary}",
            way(gradient),
            _tensors(2),
            SHAPES,
            bytes_moved=bytes_moved,
        )
        for name, gradient in GRADIENTS.items()
        for way, summary, bytes_moved in _WAYS
    ),
    Case(
        "centered",
        "x less the mean of its rows, and its sum over them",
        centered,
        _tensors(1),
        SHAPES,
        bytes_moved=_bytes(2),
    ),
]
