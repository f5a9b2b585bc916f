"""Softmaxes of scores [batch, heads, length, length] with a bias or a mask, as models write them.

What is added is broadcast over the batch, the heads or the queries, or looked up, so that the
scores alone have an element of their own for each element of a row.
"""

import torch
import torch.nn.functional as F

from graft.cases import Case, numel

BUCKETS = 32
SCALE = 0.125
SHAPES = {
    "default": [(24, 12, 512)],
    "suite": [
        (24, 12, 512),
        (16, 8, 512),
        (64, 12, 197),
        (16, 16, 577),
        (8, 12, 1024),
        (2, 12, 2048),
    ],
}


def bucket_bias(scores, table, index):
    """T5's: a bias by head of the bucket of a distance. Rows of -inf alone would be 0."""
    bias = F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)
    return torch.ops.aten._safe_softmax.default((scores + bias).float(), -1).to(scores.dtype)


def parameter_bias(scores, bias):
    """Of each head and pair of positions, [heads, length, length]."""
    return (scores + bias).float().softmax(-1).to(scores.dtype)


def alibi(scores, slopes):
    """By the distance, with a slope a head, [heads]."""
    places = torch.arange(scores.shape[-1], device=scores.device)
    distance = (places[None] - places[:, None]).abs()
    return (scores - slopes[:, None, None] * distance).softmax(-1).to(scores.dtype)


def key_mask(scores, keep):
    """Without padded keys, bool [batch, 1, 1, length], as BERT has it."""
    bias = (~keep).to(scores.dtype) * torch.finfo(scores.dtype).min
    return (scores * SCALE + bias).float().softmax(-1).to(scores.dtype)


def pair_mask(scores, keep):
    """By what each query may see, bool [batch, 1, length, length]."""
    hidden = (scores * SCALE).masked_fill(~keep, float("-inf"))
    return hidden.float().softmax(-1).to(scores.dtype)


def _scores(shape, dtype, device):
    batch, heads, length = shape
    return torch.randn(batch, heads, length, length, dtype=dtype, device=device)


def bucket_inputs(shape, dtype, device):
    _, heads, length = shape
    index = torch.randint(0, BUCKETS, (length, length), device=device)
    return _scores(shape, dtype, device), torch.randn(BUCKETS, heads, device=device), index


def parameter_inputs(shape, dtype, device):
    _, heads, length = shape
    return _scores(shape, dtype, device), torch.randn(heads, length, length, device=device)


def alibi_inputs(shape, dtype, device):
    return _scores(shape, dtype, device), torch.rand(shape[1], device=device)


def key_inputs(shape, dtype, device):
    batch, _, length = shape
    keep = torch.rand(batch, 1, 1, length, device=device) > 0.2
    return _scores(shape, dtype, device), keep


def pair_inputs(shape, dtype, device):
    batch, _, length = shape
    keep = torch.rand(batch, 1, length, length, device=device) > 0.2
    keep[..., 0] = True  # a row that is masked as a whole has no softmax
    return _scores(shape, dtype, device), keep


def _bytes(other):
    """Bytes of scores in and out, and of the `other` input of a shape."""

    def moved(shape, dtype):
        batch, heads, length = shape
        return 2 * numel((batch, heads, length, length)) * dtype.itemsize + other(*shape)

    return moved


CASES = [
    Case(
        "bucket_bias_softmax",
        "softmax of scores with T5's bias of 32 buckets by head",
        bucket_bias,
        bucket_inputs,
        SHAPES,
        ("bf16", "fp32"),
        _bytes(lambda batch, heads, length: 8 * length**2 + 4 * BUCKETS * heads),
    ),
    Case(
        "parameter_bias_softmax",
        "softmax of scores with a bias of each head and pair of positions",
        parameter_bias,
        parameter_inputs,
        SHAPES,
        ("bf16", "fp32"),
        _bytes(lambda batch, heads, length: 4 * heads * length**2),
    ),
    Case(
        "alibi_softmax",
        "softmax of scores with a bias by the distance, ALiBi's",
        alibi,
        alibi_inputs,
        SHAPES,
        ("bf16", "fp32"),
        _bytes(lambda batch, heads, length: 4 * heads),
    ),
    Case(
        "key_mask_softmax",
        "softmax of scaled scores without padded keys",
        key_mask,
        key_inputs,
        SHAPES,
        ("bf16", "fp32"),
        _bytes(lambda batch, heads, length: batch * length),
    ),
    Case(
        "pair_mask_softmax",
        "softmax of scaled scores with a mask of pairs",
        pair_mask,
        pair_inputs,
        SHAPES,
        ("bf16", "fp32"),
        _bytes(lambda batch, heads, length: batch * length**2),
    ),
]
