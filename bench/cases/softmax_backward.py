"""Backward of softmax and log-softmax over [M, N], with the gradient of a bias before it."""

import torch

from graft.bench.shapes import GRID, NORMS14
from graft.cases import Case

SHAPES = {"default": [(32768, 1024)], "norms14": NORMS14, "grid": GRID}


def _softmax_inputs(shape, dtype, device):
    y = torch.softmax(torch.randn(shape, dtype=torch.float32, device=device), -1)
    return y.to(dtype), torch.randn(shape, dtype=dtype, device=device)


def _log_softmax_inputs(shape, dtype, device):
    y = torch.log_softmax(torch.randn(shape, dtype=torch.float32, device=device), -1)
    return y.to(dtype), torch.randn(shape, dtype=dtype, device=device)


def _read_two_write_one(shape, dtype):
    m, n = shape
    return (3 * m * n + n) * dtype.itemsize


def softmax_bias_backward(y, dy):
    """Gradients of y = softmax(x + bias): dx [M, N] and dbias [N]."""
    y32, dy32 = y.float(), dy.float()
    dx = y32 * (dy32 - (y32 * dy32).sum(-1, keepdim=True))
    return dx.to(y.dtype), dx.sum(0).to(y.dtype)


def log_softmax_bias_backward(y, dy):
    """Gradients of y = log_softmax(x + bias): dx [M, N] and dbias [N]."""
    dy32 = dy.float()
    dx = dy32 - y.float().exp() * dy32.sum(-1, keepdim=True)
    return dx.to(y.dtype), dx.sum(0).to(y.dtype)


CASES = [
    Case(
        "softmax_bias_backward",
        "softmax backward, and the gradient of the bias before it",
        softmax_bias_backward,
        _softmax_inputs,
        SHAPES,
        bytes_moved=_read_two_write_one,
    ),
    Case(
        "log_softmax_bias_backward",
        "log-softmax backward, and the gradient of the bias before it",
        log_softmax_bias_backward,
        _log_softmax_inputs,
        SHAPES,
        bytes_moved=_read_two_write_one,
    ),
]
