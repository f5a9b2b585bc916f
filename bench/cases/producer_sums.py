"""LayerNorm backward in fp32 whose written-out dx is summed again over its rows.

The graphs and shapes that models have around it: what is added to dx, what it passes through
before it is written. Each returns sum(g * xhat), sum(g), dx and sum(dx).
"""

import torch

from graft.cases import Case

EPS = 1e-5


def _layer_norm_dx(g, x, weight):
    """dx of a LayerNorm over the last dimension, from g [M, N] and x [M, N]; and xhat."""
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    rstd = torch.rsqrt((centred * centred).mean(-1, keepdim=True) + EPS)
    xhat = centred * rstd
    wg = g * weight
    dx = rstd * (wg - wg.mean(-1, keepdim=True) - xhat * (wg * xhat).mean(-1, keepdim=True))
    return dx, xhat


def plain(g, x, weight):
    dx, xhat = _layer_norm_dx(g, x, weight)
    return (g * xhat).sum(0), g.sum(0), dx, dx.sum(0)


def residual(g, x, weight, skip):
    """The gradient of the skip connection is added to dx before it is written and summed."""
    dx, xhat = _layer_norm_dx(g, x, weight)
    dx = dx + skip
    return (g * xhat).sum(0), g.sum(0), dx, dx.sum(0)


def relu_scale(g, x, weight):
    """MobileBERT: the gradient comes through a ReLU of x and a scale."""
    g = torch.where(x > 0, g * 0.5, 0.0)
    dx, xhat = _layer_norm_dx(g, x, weight)
    return (g * xhat).sum(0), g.sum(0), dx, dx.sum(0)


def dropout(g, x, weight, skip, mask):
    """BERT: dx and the skip's gradient through the mask of a dropout."""
    dx, xhat = _layer_norm_dx(g, x, weight)
    dx = torch.where(mask, (dx + skip) * (1 / 0.9), 0.0)
    return (g * xhat).sum(0), g.sum(0), dx, dx.sum(0)


WINDOW = 7


def swin_window(g, x, weight, skip):
    """Swin: g comes in windows of 7 x 7; they are put back in place and rolled."""
    rows, channels = x.shape
    side = 56
    batch = rows // (side * side)
    across = side // WINDOW
    g = g.view(batch, across, across, WINDOW, WINDOW, channels).permute(0, 1, 3, 2, 4, 5)
    g = torch.roll(g.reshape(batch, side, side, channels), (3, 3), (1, 2)).reshape(rows, channels)
    dx, xhat = _layer_norm_dx(g, x, weight)
    dx = dx + skip
    return (g * xhat).sum(0), g.sum(0), dx, dx.sum(0)


def _tensors(count, mask=False):
    def inputs(shape, dtype, device):
        g, x, *more = (torch.randn(shape, dtype=dtype, device=device) for _ in range(count))
        weight = torch.randn(shape[-1], dtype=dtype, device=device)
        masks = [torch.rand(shape, dtype=torch.float32, device=device) > 0.1] if mask else []
        return (g, x, weight, *more, *masks)

    return inputs


def _bytes(tensors, mask=False):
    """`tensors` read, dx written, a mask of one byte an element; three sums and the weight."""

    def bytes_moved(shape, dtype):
        m, n = shape
        return (tensors + 1) * m * n * dtype.itemsize + mask * m * n + 4 * n * dtype.itemsize

    return bytes_moved


def _case(name, summary, fn, shape, tensors, mask=False):
    return Case(
        f"producer_sum_{name}",
        summary,
        fn,
        _tensors(tensors, mask),
        {"default": [shape]},
        dtypes=("fp32", "bf16"),
        bytes_moved=_bytes(tensors, mask),
    )


CASES = [
    _case("plain", "LayerNorm backward, dx summed again", plain, (32768, 768), 2),
    _case("swin", "Swin: window partition and roll", swin_window, (401408, 128), 3),
    _case("mobilebert", "MobileBERT: relu and scale", relu_scale, (32768, 512), 2),
    _case("distilbert", "DistilBERT: residual", residual, (32768, 768), 3),
    _case("deit", "DeiT: residual", residual, (25344, 768), 3),
    _case("bert", "BERT: residual and dropout", dropout, (16384, 768), 3, mask=True),
]
