"""Rows and biases that an index gathers, and sums of what is broadcast.

Each row is gathered once, so the bytes are those of the rows in order, and of the index. A sum of
all pairs reads next to nothing: it has no limit.
"""

import torch
import torch.nn.functional as F

from graft.cases import Case, numel

WINDOW = 7


def gathered_sum(x, index):
    """The sum of rows [M, N] that an index [M] gathers, in float32."""
    return x[index].float().sum(0)


def gathered_columns_sum(x, index):
    """The sum of a row's columns that an index gathers; of few long rows."""
    return x[:, index].float().sum(1)


def _windows(g, side, shifted):
    """Windows [N, C] put back in place, and rolled by an index: [batch, side, side, C]."""
    channels = g.shape[-1]
    across = side // WINDOW
    g = g.view(-1, across, across, WINDOW, WINDOW, channels).permute(0, 1, 3, 2, 4, 5)
    return g.reshape(-1, side, side, channels)[:, shifted][:, :, shifted]


def rolled_sum(g, shifted):
    """The gradient of a bias behind Swin's windows: a sum over batch, rows and columns."""
    return _windows(g, shifted.shape[0], shifted).float().sum((0, 1, 2))


def rolled_norm_grad(g, shifted, xhat, rstd, weight, skip):
    """The backward of a LayerNorm in front of Swin's windows, as its model has it."""
    g = _windows(g, shifted.shape[0], shifted).float()
    dims = (0, 1, 2)
    wg = g * weight
    row = wg.mean(-1, keepdim=True)
    dx = rstd * (wg - row - xhat * (wg * xhat).mean(-1, keepdim=True))
    return skip + dx, (g * xhat).sum(dims), g.sum(dims)


def window_softmax(scores, table, index):
    """Swin's softmax of scores [windows, heads, P, P] with a bias by relative position."""
    bias = table[index.view(-1)].view(*index.shape, -1).permute(2, 0, 1).contiguous()
    return (scores + bias.unsqueeze(0)).softmax(-1).to(scores.dtype)


def position_softmax(scores, table, index):
    """T5's softmax of scores [batch, heads, L, L] with the bias of each pair's bucket."""
    bias = F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)
    return (scores + bias).softmax(-1).to(scores.dtype)


def pairs_sum(a, b):
    """The sum of each b [N] against all of a [M]: [N]."""
    return (a[:, None] - b).abs().sum(0)


def expert_shares(experts, count):
    """How many of a router's choices [tokens, 2] are each of `count` experts, as a share."""
    return F.one_hot(experts, count.shape[0]).float().mean((0, 1))


def _gathered(shape, dtype, device):
    rows = shape[0]
    return torch.randn(shape, dtype=dtype, device=device), torch.randperm(rows, device=device)


def _columns(shape, dtype, device):
    return torch.randn(shape, dtype=dtype, device=device), torch.randperm(shape[1], device=device)


def _shifted(side, device):
    return (torch.arange(side, device=device) + side - WINDOW // 2) % side


def _rolled(shape, dtype, device):
    batch, side, channels = shape
    rows = batch * side * side
    return torch.randn(rows, channels, dtype=dtype, device=device), _shifted(side, device)


def _rolled_norm(shape, dtype, device):
    batch, side, channels = shape
    g, shifted = _rolled(shape, dtype, device)
    places = (batch, side, side)
    xhat, skip = (torch.randn(*places, channels, device=device) for _ in range(2))
    rstd = torch.rand(*places, 1, device=device)
    return g, shifted, xhat, rstd, torch.randn(channels, device=device), skip


def _window_scores(shape, dtype, device):
    windows, heads = shape
    size = (windows, heads, WINDOW**2, WINDOW**2)
    pairs = (2 * WINDOW - 1) ** 2
    table = torch.randn(pairs, heads, device=device)
    index = torch.randint(pairs, size[2:], device=device)
    return torch.randn(size, dtype=dtype, device=device), table, index


def _position_scores(shape, dtype, device):
    batch, heads, length = shape
    table = torch.randn(32, heads, device=device)
    index = torch.randint(32, (length, length), device=device)
    scores = torch.randn(batch, heads, length, length, dtype=dtype, device=device)
    return scores, table, index


def _pairs(shape, dtype, device):
    return tuple(torch.randn(each, dtype=dtype, device=device) for each in shape)


def _experts(shape, dtype, device):
    tokens, count = shape
    experts = torch.randint(count, (tokens, 2), device=device)
    return experts, torch.empty(count, dtype=dtype, device=device)


def _sum_bytes(shape, dtype):
    return numel(shape) * dtype.itemsize + shape[0] * 8 + shape[1] * 4


def _columns_bytes(shape, dtype):
    return numel(shape) * dtype.itemsize + shape[1] * 8 + shape[0] * 4


def _rolled_bytes(shape, dtype):
    batch, side, channels = shape
    return batch * side**2 * channels * dtype.itemsize + side * 8 + channels * 4


def _norm_bytes(shape, dtype):
    batch, side, channels = shape
    rows = batch * side**2
    return rows * channels * (dtype.itemsize + 12) + rows * 4 + channels * 12 + side * 8


def _window_bytes(shape, dtype):
    table = (2 * WINDOW - 1) ** 2 * shape[1] * 4 + WINDOW**4 * 8
    return 2 * numel(shape) * WINDOW**4 * dtype.itemsize + table


def _position_bytes(shape, dtype):
    batch, heads, length = shape
    return 2 * batch * heads * length**2 * dtype.itemsize + 32 * heads * 4 + length**2 * 8


HALF_AND_FULL = ("bf16", "fp32")
WINDOWS = [(8192, 3), (2048, 6), (512, 12), (128, 24)]
IMAGES = [(128, 56, 96), (128, 28, 192), (128, 14, 384), (64, 56, 128), (7, 49, 66)]

CASES = [
    Case(
        "gathered_sum",
        "the sum of rows that an index gathers",
        gathered_sum,
        _gathered,
        {
            "default": [(401408, 96)],
            "suite": [(401408, 96), (65536, 768), (16384, 4096), (100003, 65), (8192, 1000)],
        },
        HALF_AND_FULL,
        _sum_bytes,
    ),
    Case(
        "gathered_columns_sum",
        "sums of few long rows whose columns an index gathers",
        gathered_columns_sum,
        _columns,
        {"default": [(16, 1048576)], "suite": [(16, 1048576), (3, 1000003), (64, 100000)]},
        HALF_AND_FULL,
        _columns_bytes,
    ),
    Case(
        "rolled_sum",
        "the gradient of a bias behind Swin's rolled windows",
        rolled_sum,
        _rolled,
        {"default": IMAGES[:1], "suite": IMAGES},
        HALF_AND_FULL,
        _rolled_bytes,
    ),
    Case(
        "rolled_norm_grad",
        "the backward of a LayerNorm in front of Swin's rolled windows",
        rolled_norm_grad,
        _rolled_norm,
        {"default": IMAGES[:1], "suite": IMAGES},
        HALF_AND_FULL,
        _norm_bytes,
    ),
    Case(
        "window_softmax",
        "Swin's softmax of windows, with a bias by relative position",
        window_softmax,
        _window_scores,
        {"default": WINDOWS[:1], "suite": WINDOWS},
        HALF_AND_FULL,
        _window_bytes,
    ),
    Case(
        "position_softmax",
        "T5's softmax, with the bias of each pair's bucket",
        position_softmax,
        _position_scores,
        {"default": [(16, 8, 512)], "suite": [(16, 8, 512), (8, 12, 512), (4, 16, 1024)]},
        HALF_AND_FULL,
        _position_bytes,
    ),
    Case(
        "pairs_sum",
        "the sum of the distances of few points from many",
        pairs_sum,
        _pairs,
        {"default": [(401408, 96)], "suite": [(401408, 96), (50021, 24), (1000003, 5)]},
        ("fp32",),
    ),
    Case(
        "expert_shares",
        "the shares of a router's experts, from their one-hot rows",
        expert_shares,
        _experts,
        {"default": [(16384, 64)], "suite": [(16384, 64), (65536, 8), (32768, 128)]},
        ("fp32",),
    ),
]
