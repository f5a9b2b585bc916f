"""A gradient that is written out and summed again over its rows.

LayerNorm's backward in the graphs and shapes that models have around it: what is added to dx, what
it passes through before it is written. As in AOTAutograd's backward, x comes normalized (xhat) and
1 / std with it. Each returns sum(g * xhat), sum(g), dx and sum(dx). And two without sums of their
own: a norm without a weight, and an activation after a bias.
"""

import torch

from graft.cases import Case


def _layer_norm_dx(g, xhat, rstd, weight):
    """dx of a LayerNorm over the last dimension, from g and xhat [M, N], rstd [M, 1]."""
    wg = g * weight
    row = wg.mean(-1, keepdim=True)
    return rstd * (wg - row - xhat * (wg * xhat).mean(-1, keepdim=True))


def _sums(g, xhat, dx):
    return (g * xhat).sum(0), g.sum(0), dx, dx.sum(0)


def plain(g, xhat, rstd, weight):
    return _sums(g, xhat, _layer_norm_dx(g, xhat, rstd, weight))


def residual(g, xhat, rstd, weight, skip):
    """The gradient of the skip connection is added to dx before it is written and summed."""
    return _sums(g, xhat, skip + _layer_norm_dx(g, xhat, rstd, weight))


def relu(g, x, mean, rstd, weight):
    """MobileBERT: x is a ReLU's output before it is normalized, and dx passes its gradient."""
    activated = torch.relu(x)
    xhat = (activated - mean) * rstd
    dx = torch.where(activated <= 0, 0.0, _layer_norm_dx(g, xhat, rstd, weight))
    return _sums(g, xhat, dx)


def dropout(g, xhat, rstd, weight, skip, mask):
    """BERT: dx and the skip's gradient through the mask of a dropout."""
    dx = skip + _layer_norm_dx(g, xhat, rstd, weight)
    return _sums(g, xhat, dx * (mask.to(dx.dtype) * (1 / 0.9)))


def layer_scale(g, x, mean, rstd, weight, branch, scale, skip):
    """BEiT: x is a stream plus a scaled branch; the gradient of the scale is a sum as well."""
    xhat = (x + scale * branch - mean) * rstd
    stream = skip + _layer_norm_dx(g, xhat, rstd, weight)
    return (stream * branch).sum(0), *_sums(g, xhat, stream * scale)


def weightless(g, x, rstd):
    """RMSNorm without a weight: rows are reduced, and nothing is summed over them but dx."""
    xhat = x * rstd
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    return dx, dx.sum(0)


def activation(g, x):
    """The backward of a GELU after a bias."""
    dx = torch.ops.aten.gelu_backward(g, x)
    return dx, dx.sum(0)


WINDOW = 7


def swin_window(g, xhat, rstd, weight, skip, shifted):
    """Swin: g comes in windows of 7 x 7; they are put back in place and rolled by an index."""
    rows, channels = xhat.shape
    (side,) = shifted.shape
    batch = rows // (side * side)
    across = side // WINDOW
    g = g.view(batch, across, across, WINDOW, WINDOW, channels).permute(0, 1, 3, 2, 4, 5)
    g = g.reshape(batch, side, side, channels)[:, :, shifted][:, shifted]
    return residual(g.reshape(rows, channels), xhat, rstd, weight, skip)


def _tensors(count, statistics=1, vectors=1, extra=None):
    """`count` tensors [M, N], of which the first two come first, then `statistics` [M, 1], then
    `vectors` [N], of which the first comes next; what is left; and what `extra` makes."""

    def inputs(shape, dtype, device):
        rows, columns = shape
        g, x, *more = (torch.randn(shape, dtype=dtype, device=device) for _ in range(count))
        row = [torch.rand((rows, 1), dtype=dtype, device=device) for _ in range(statistics)]
        column = [torch.randn(columns, dtype=dtype, device=device) for _ in range(vectors)]
        made = [extra(shape, device)] if extra else []
        if vectors > 1:
            weight, scale = column
            branch, skip = more
            return (g, x, *row, weight, branch, scale, skip)
        return (g, x, *row, *column, *more, *made)

    return inputs


def _mask(shape, device):
    return torch.rand(shape, dtype=torch.float32, device=device) > 0.1


def _shifted(shape, device):
    """The rows of an image of 56 x 56, rolled by half a window."""
    return (torch.arange(56, device=device) + 53) % 56


def _bytes(tensors, statistics=1, vectors=1, sums=3, extra=None):
    """`tensors` read and dx written, rows' statistics, columns' vectors and sums, and what `extra`
    makes."""

    def bytes_moved(shape, dtype):
        m, n = shape
        elements = (tensors + 1) * m * n + statistics * m + (vectors + sums) * n
        return elements * dtype.itemsize + (extra(shape, "meta").nbytes if extra else 0)

    return bytes_moved


def _case(name, summary, fn, shape, tensors, statistics=1, extra=None):
    return Case(
        f"producer_sum_{name}",
        summary,
        fn,
        _tensors(tensors, statistics, extra=extra),
        {"default": [shape]},
        dtypes=("fp32", "bf16"),
        bytes_moved=_bytes(tensors, statistics, extra=extra),
    )


CASES = [
    _case("plain", "LayerNorm backward, dx summed again", plain, (32768, 768), 2),
    _case("swin", "Swin: window partition and roll", swin_window, (401408, 128), 3, extra=_shifted),
    _case("mobilebert", "MobileBERT: relu", relu, (32768, 512), 2, statistics=2),
    _case("distilbert", "DistilBERT: residual", residual, (32768, 768), 3),
    _case("deit", "DeiT: residual", residual, (25344, 768), 3),
    _case("bert", "BERT: residual and dropout", dropout, (16384, 768), 3, extra=_mask),
    Case(
        "producer_sum_beit",
        "BEiT: layer scale, whose gradient is a sum too",
        layer_scale,
        _tensors(4, statistics=2, vectors=2),
        {"default": [(25216, 768)]},
        dtypes=("fp32", "bf16"),
        bytes_moved=_bytes(4, statistics=2, vectors=2, sums=4),
    ),
    Case(
        "producer_sum_weightless",
        "RMSNorm backward without a weight, dx summed",
        weightless,
        _tensors(2, vectors=0),
        {"default": [(32768, 2048)]},
        dtypes=("fp32", "bf16"),
        bytes_moved=_bytes(2, vectors=0, sums=1),
    ),
    Case(
        "producer_sum_gelu",
        "GELU backward, dx summed for a bias",
        activation,
        _tensors(2, statistics=0, vectors=0),
        {"default": [(24576, 3072)]},
        dtypes=("fp32", "bf16"),
        bytes_moved=_bytes(2, statistics=0, vectors=0, sums=1),
    ),
]
