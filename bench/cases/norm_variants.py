"""Norm backwards as models have them around the plain ones: residual adds, with and without bias.

Written out in fp32, as AOTAutograd decomposes them. `x`, `dy` and `skip` are [M, N], `weight`
[N], `mean` and `rstd` [M, 1] in fp32; `skip` is the gradient that reaches x past the norm.
"""

import torch

from graft.bench.shapes import GRID, NORMS14
from graft.cases import Case

SHAPES = {"default": [(32768, 1024)], "norms14": NORMS14, "grid": GRID}


def _rms_norm(x, dy, weight, rstd):
    xhat = x.float() * rstd
    wdy = dy.float() * weight.float()
    dx = (wdy - xhat * (wdy * xhat).mean(-1, keepdim=True)) * rstd
    return dx, (dy.float() * xhat).sum(0).to(weight.dtype)


def _layer_norm(x, dy, weight, mean, rstd):
    xhat = (x.float() - mean) * rstd
    wdy = dy.float() * weight.float()
    dx = rstd * (wdy - wdy.mean(-1, keepdim=True) - xhat * (wdy * xhat).mean(-1, keepdim=True))
    return dx, (dy.float() * xhat).sum(0).to(weight.dtype)


def rms_norm_bias_backward(x, dy, weight, rstd):
    """With the gradient of a bias that follows the norm."""
    dx, dweight = _rms_norm(x, dy, weight, rstd)
    return dx.to(x.dtype), dweight, dy.float().sum(0).to(weight.dtype)


def rms_norm_residual_backward(x, dy, weight, rstd, skip):
    dx, dweight = _rms_norm(x, dy, weight, rstd)
    return (dx + skip.float()).to(x.dtype), dweight


def layer_norm_nobias_backward(x, dy, weight, mean, rstd):
    dx, dweight = _layer_norm(x, dy, weight, mean, rstd)
    return dx.to(x.dtype), dweight


def layer_norm_residual_backward(x, dy, weight, mean, rstd, skip):
    dx, dweight = _layer_norm(x, dy, weight, mean, rstd)
    return (dx + skip.float()).to(x.dtype), dweight, dy.float().sum(0).to(weight.dtype)


def _inputs(statistics, skip):
    def inputs(shape, dtype, device):
        x, dy = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        weight = torch.randn(shape[1], dtype=dtype, device=device)
        mean = x.float().mean(-1, keepdim=True)
        centred = x.float() - mean if statistics == 2 else x.float()
        rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        rows = (mean, rstd) if statistics == 2 else (rstd,)
        skips = (torch.randn(shape, dtype=dtype, device=device),) if skip else ()
        return (x, dy, weight, *rows, *skips)

    return inputs


def _bytes(statistics, skip, gradients):
    """x, dy, dx and skip once each, the weight and its kind's gradients, statistics in fp32."""

    def bytes_moved(shape, dtype):
        m, n = shape
        return ((3 + skip) * m * n + (1 + gradients) * n) * dtype.itemsize + 4 * statistics * m

    return bytes_moved


def _case(fn, summary, statistics, skip, gradients):
    return Case(
        fn.__name__,
        summary,
        fn,
        _inputs(statistics, skip),
        SHAPES,
        bytes_moved=_bytes(statistics, skip, gradients),
    )


CASES = [
    _case(rms_norm_bias_backward, "RMSNorm backward with a bias", 1, 0, 2),
    _case(rms_norm_residual_backward, "RMSNorm backward and residual add", 1, 1, 1),
    _case(layer_norm_nobias_backward, "LayerNorm backward without a bias", 2, 0, 1),
    _case(layer_norm_residual_backward, "LayerNorm backward and residual add", 2, 1, 2),
]
