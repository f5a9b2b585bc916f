"""The keys of grouped-query attention, as they come to stand in front of their tokens.

Attention kernels that know no groups get each head of the keys once a group. Where a norm stands
before that (Qwen3, Gemma 3, OLMo 2), its statistic is a value of each row.
"""

import torch
import torch.nn.functional as F

from graft.cases import Case, numel

GROUPS = 2
# Batch, tokens, heads, columns. The first is the scaled-residual model's.
SHAPES = {
    "default": [(48, 2048, 4, 64)],
    "suite": [
        (48, 2048, 4, 64),
        (16, 2048, 4, 32),
        (8, 4096, 8, 128),
        (32, 1024, 8, 96),
        (7, 3001, 5, 64),
    ],
}


def heads_first(x):
    """[batch, tokens, heads, columns] -> [batch, heads * GROUPS, tokens, columns]."""
    return x.transpose(1, 2).repeat_interleave(GROUPS, 1)


def scaled_keys(keys, scale, weight):
    """By a value of each row and one of each column."""
    return (heads_first((keys * scale * weight).to(keys.dtype)),)


def normed_keys(keys, weight):
    return (heads_first(F.rms_norm(keys, weight.shape, weight)),)


def normed_inputs(shape, dtype, device):
    return tuple(torch.randn(size, dtype=dtype, device=device) for size in (shape, shape[-1:]))


def scaled_inputs(shape, dtype, device):
    keys, weight = normed_inputs(shape, dtype, device)
    return keys, torch.rand(*shape[:-1], 1, device=device), weight


def normed_bytes(shape, dtype):
    return numel((*shape, 1 + GROUPS), shape[-1:]) * dtype.itemsize


def scaled_bytes(shape, dtype):
    return normed_bytes(shape, dtype) + numel(shape[:-1]) * 4


CASES = [
    Case(
        "grouped_keys",
        "keys by a value of each row, heads first, each for its groups",
        scaled_keys,
        scaled_inputs,
        SHAPES,
        ("bf16", "fp32"),
        scaled_bytes,
    ),
    Case(
        "grouped_keys_norm",
        "the same with the norm that the values come of",
        normed_keys,
        normed_inputs,
        SHAPES,
        ("bf16", "fp32"),
        normed_bytes,
    ),
]
