"""The gradients of small tables by an index of many elements: biases of attention, token types.

Each is the backward of a sum with what is looked up. The gradient that comes in is read once; as a
scatter of atomic adds, thousands of them are for one address.
"""

import math

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case, numel

BUCKETS = 32
FARTHEST = 128
WINDOW = 7
TOKEN_TYPES = 2


def buckets(length, device):
    """T5's buckets of the distances of all pairs of positions, int64 [length, length]."""
    positions = torch.arange(length, device=device)
    distance = positions[None] - positions[:, None]
    half, exact = BUCKETS // 2, BUCKETS // 4
    near = distance.abs()
    # Beyond `exact`, a bucket is as many times as long as the one before it.
    scale = (half - exact) / math.log(FARTHEST / exact)
    far = exact + (torch.log(near.float().clamp(min=1) / exact) * scale).long()
    far = far.clamp(max=half - 1)
    return (distance > 0).long() * half + torch.where(near < exact, near, far)


def window_pairs(device):
    """Swin's index of all pairs of a window's positions, int64 [WINDOW**2, WINDOW**2]."""
    axis = torch.arange(WINDOW, device=device)
    rows, columns = (grid.flatten() for grid in torch.meshgrid(axis, axis, indexing="ij"))
    down, right = (x[:, None] - x[None] + WINDOW - 1 for x in (rows, columns))
    return down * (2 * WINDOW - 1) + right


def relative_bias(table, index, scores):
    """Scores [batch, heads, length, length] and each head's bias of a pair's bucket."""
    return scores + F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)


def relative_softmax(table, index, scores):
    return relative_bias(table, index, scores.float()).softmax(-1).to(scores.dtype)


def window_bias(table, index, scores):
    """Scores [windows, heads, positions, positions] and each head's bias of an offset."""
    bias = table[index.view(-1)].view(*index.shape, -1).permute(2, 0, 1).contiguous()
    return scores + bias.unsqueeze(0)


def token_types(table, types, tokens):
    """Tokens [batch, length, columns], and what their types stand for."""
    return tokens + F.embedding(types, table)


def _scores(shape, dtype, device):
    batch, heads, length = shape
    return torch.randn(batch, heads, length, length, dtype=dtype, device=device)


def bias_inputs(shape, dtype, device):
    table = torch.randn(BUCKETS, shape[1], device=device)
    scores, grad = (_scores(shape, dtype, device) for _ in range(2))
    return table, buckets(shape[2], device), scores, grad.float()


def softmax_inputs(shape, dtype, device):
    table, index, scores, grad = bias_inputs(shape, dtype, device)
    return table, index, scores, grad.to(dtype)


def window_inputs(shape, dtype, device):
    size = (*shape, WINDOW**2)
    table = torch.randn((2 * WINDOW - 1) ** 2, shape[1], device=device)
    scores, grad = (_scores(size, dtype, device) for _ in range(2))
    return table, window_pairs(device), scores, grad.float()


def type_inputs(shape, dtype, device):
    table = torch.randn(TOKEN_TYPES, shape[-1], device=device)
    types = torch.randint(TOKEN_TYPES, shape[:-1], device=device)
    tokens, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    return table, types, tokens, grad.float()


def bias_bytes(shape, dtype):
    batch, heads, length = shape
    return numel((batch, heads, length, length)) * 4 + length**2 * 8 + BUCKETS * heads * 4


def softmax_bytes(shape, dtype):
    """Output and its gradient in, the scores' gradient out."""
    batch, heads, length = shape
    moved = 3 * numel((batch, heads, length, length)) * dtype.itemsize
    return moved + length**2 * 8 + BUCKETS * heads * 4


def window_bytes(shape, dtype):
    windows, heads = shape
    pairs = WINDOW**4
    return (windows * heads * pairs + (2 * WINDOW - 1) ** 2 * heads) * 4 + pairs * 8


def type_bytes(shape, dtype):
    return (numel(shape) + TOKEN_TYPES * shape[-1]) * 4 + numel(shape[:-1]) * 8


CASES = [
    Case(
        "relative_bias_grad",
        "T5's bias of 32 buckets by head, from a gradient of its scores",
        Backward(relative_bias, (0,)),
        bias_inputs,
        {
            "default": [(16, 8, 512)],
            "suite": [(16, 8, 512), (8, 12, 512), (4, 16, 1024), (7, 12, 501), (2, 32, 2048)],
        },
        ("fp32",),
        bias_bytes,
    ),
    Case(
        "relative_softmax_grad",
        "the same behind a softmax, whose gradient is written out too",
        Backward(relative_softmax, (0, 2)),
        softmax_inputs,
        {"default": [(16, 8, 512)], "suite": [(16, 8, 512), (8, 12, 512), (4, 16, 1024)]},
        ("bf16", "fp32"),
        softmax_bytes,
    ),
    Case(
        "window_bias_grad",
        "Swin's bias of 169 offsets by head, from a gradient of its windows' scores",
        Backward(window_bias, (0,)),
        window_inputs,
        {"default": [(1024, 6)], "suite": [(4096, 3), (1024, 6), (256, 12), (64, 24)]},
        ("fp32",),
        window_bytes,
    ),
    Case(
        "token_types_grad",
        "BERT's 2 token types, from a gradient of its tokens",
        Backward(token_types, (0,)),
        type_inputs,
        {
            "default": [(32, 512, 768)],
            "suite": [(32, 512, 768), (16, 512, 1024), (128, 128, 768), (256, 511, 384)],
        },
        ("fp32",),
        type_bytes,
    ),
]
