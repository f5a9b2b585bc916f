"""Sums over both dimensions of one [M, N] tensor: the smallest mix-order reductions."""

import torch

from graft.bench.shapes import GRID, NORMS14
from graft.cases import Case
from graft.cases.scaled import matrix, two

SHAPES = {"default": [(32768, 1024)], "norms14": NORMS14, "grid": GRID}


def _read_once(shape, dtype):
    m, n = shape
    return (m * n + m + n) * dtype.itemsize


def _read_two_write_one(shape, dtype):
    m, n = shape
    return (3 * m * n + n) * dtype.itemsize


def sum_both(x):
    """x [M, N] to sums over rows [N] and over columns [M]."""
    return x.sum(0), x.sum(1)


def amax_and_column_sum(x):
    """x [M, N] to the largest magnitude of each row [M] and the sum of each column [N]."""
    return x.abs().amax(1), x.sum(0)


def gelu_bias_backward(x, dy):
    """Gradients of gelu(x + bias): dx [M, N] and dbias [N], no reduction over the rows' length.

    The other side of the comparison: one direction only, and nothing for mix-order to fuse.
    """
    x32, dy32 = x.float(), dy.float()
    cdf = 0.5 * (1 + torch.erf(x32 * 0.5**0.5))
    pdf = torch.exp(-0.5 * x32 * x32) * 0.3989422804014327
    dx = dy32 * (cdf + x32 * pdf)
    return dx.to(x.dtype), dx.sum(0).to(x.dtype)


CASES = [
    Case("sum_both", "x.sum(0) and x.sum(1)", sum_both, matrix, SHAPES, bytes_moved=_read_once),
    Case(
        "amax_and_column_sum",
        "row amax and column sum, as dynamic quantisation with a bias gradient",
        amax_and_column_sum,
        matrix,
        SHAPES,
        bytes_moved=_read_once,
    ),
    Case(
        "gelu_bias_backward",
        "backward of gelu(x + bias)",
        gelu_bias_backward,
        two,
        SHAPES,
        bytes_moved=_read_two_write_one,
    ),
]
