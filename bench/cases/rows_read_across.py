"""Softmaxes and norms of rows that are read across: what is adjacent is of adjacent rows.

A transposed bias, a gather for each key as in DeBERTa, tokens out of channels first.
"""

import functools

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case
from graft.cases.scaled import matrix

SHAPES = {
    "default": [(192, 512, 512)],
    "suite": [
        (192, 512, 512),
        (24, 1024, 1024),
        (6, 2048, 2048),
        (96, 256, 256),
        (100, 384, 384),
        (768, 197, 197),
        (50, 641, 641),
        (60, 777, 777),
        (800, 128, 128),
        (4, 300, 300),
        (1, 1500, 1500),
        (3, 512, 512),
    ],
}
TOKENS = {
    "default": [(64, 196, 768)],
    "suite": [
        (64, 196, 768),
        (16, 1024, 1024),
        (64, 600, 640),
        (8, 3000, 1536),
        (2, 577, 1024),
        (128, 49, 384),
        (16, 4096, 256),
    ],
}


def transposed_bias(scores, bias):
    """A bias of each pair of positions, the other way round."""
    return torch.softmax(scores + bias.t(), -1)


def disentangled(scores, by_query, by_key, query_index, key_index):
    """DeBERTa's: a score for the distance by what asks, and one by what is asked."""
    c2p = torch.gather(by_query, -1, query_index.expand_as(scores))
    p2c = torch.gather(by_key, -1, key_index.expand_as(scores.mT)).transpose(-1, -2)
    return torch.softmax(scores + c2p * 0.07 + p2c * 0.07, -1)


def distance_bias(scores, by_key):
    """The same by key alone, and an index that is computed."""
    _, queries, keys = scores.shape
    index = (_distances(keys, queries, scores.device) + queries).clamp(0, queries + keys - 1)
    p2c = torch.gather(by_key, -1, index.expand_as(scores.mT)).transpose(-1, -2)
    return torch.softmax(scores + p2c, -1)


def transposed_scores(scores, others):
    return torch.softmax(scores + others.transpose(-1, -2), -1)


def tokens_norm(x, weight, bias):
    """[batch, channels, tokens], normalized over the channels, tokens first."""
    return F.layer_norm(x.transpose(1, 2), weight.shape, weight, bias)


def mixed_tokens(x, mixed, weight, bias):
    """MLP-Mixer's: what tokens were mixed to is added, and both are kept."""
    y = x + mixed.transpose(1, 2)
    return F.layer_norm(y, weight.shape, weight, bias), y


def channels_first(x, weight, bias):
    """A layer norm over the channels, whose result has them first, as tokens are mixed."""
    return F.layer_norm(x, weight.shape, weight, bias).transpose(1, 2).contiguous()


def _distances(rows, columns, device):
    """Of the places of rows and columns, [rows, columns]."""
    places = torch.arange(rows, device=device)
    return places[:, None] - torch.arange(columns, device=device)


def bias_inputs(shape, dtype, device):
    _, queries, keys = shape
    return *matrix(shape, dtype, device), *matrix((keys, queries), dtype, device)


def disentangled_inputs(shape, dtype, device):
    """Tables of all distances, [batch, queries or keys, queries + keys]."""
    batch, queries, keys = shape
    by_query = matrix((batch, queries, queries + keys), dtype, device)
    query_index = (_distances(queries, keys, device) + keys)[None]
    key_index = (keys - _distances(keys, queries, device))[None]
    by_key = distance_inputs(shape, dtype, device)[1]
    return *matrix(shape, dtype, device), *by_query, by_key, query_index, key_index


def distance_inputs(shape, dtype, device):
    batch, queries, keys = shape
    by_key = matrix((batch, keys, queries + keys), dtype, device)
    return *matrix(shape, dtype, device), *by_key


def transposed_inputs(shape, dtype, device):
    batch, queries, keys = shape
    return *matrix(shape, dtype, device), *matrix((batch, keys, queries), dtype, device)


def _affine(channels, dtype, device):
    """The weight and bias of a norm."""
    return (torch.randn(channels, dtype=dtype, device=device) for _ in range(2))


def tokens_inputs(shape, dtype, device):
    batch, tokens, channels = shape
    return *matrix((batch, channels, tokens), dtype, device), *_affine(channels, dtype, device)


def mixed_inputs(shape, dtype, device):
    return *matrix(shape, dtype, device), *tokens_inputs(shape, dtype, device)


def channels_first_inputs(shape, dtype, device):
    grad, *affine = tokens_inputs(shape, dtype, device)
    return *matrix(shape, dtype, device), *affine, grad


def _bytes(tensors, by_query, by_key, biases, indices, parameters, shape, dtype):
    """So many tensors of the shape, tables of all distances, and what all of a batch share."""
    batch, rows, columns = shape
    distances = (by_query * rows + by_key * columns) * (rows + columns)
    values = batch * (tensors * rows * columns + distances) + biases * rows * columns
    return (values + parameters * columns) * dtype.itemsize + 8 * indices * rows * columns


def _case(name, summary, fn, inputs, *moved, shapes=SHAPES):
    moved = functools.partial(_bytes, *moved)
    return Case(name, summary, fn, inputs, shapes, ("bf16", "fp32"), moved)


CASES = [
    _case(
        "transposed_bias_softmax",
        "softmax of scores with a bias of pairs of positions, transposed",
        transposed_bias,
        bias_inputs,
        *(2, 0, 0, 1, 0, 0),
    ),
    _case(
        "disentangled_softmax",
        "softmax of scores with those gathered by query and by key, as DeBERTa's",
        disentangled,
        disentangled_inputs,
        *(2, 1, 1, 0, 2, 0),
    ),
    _case(
        "distance_bias_softmax",
        "softmax of scores with one gathered by key and distance",
        distance_bias,
        distance_inputs,
        *(2, 0, 1, 0, 0, 0),
    ),
    _case(
        "transposed_scores_softmax",
        "softmax of scores and of others transposed",
        transposed_scores,
        transposed_inputs,
        *(3, 0, 0, 0, 0, 0),
    ),
    _case(
        "tokens_norm",
        "layer norm over the channels of what has them first, tokens first",
        tokens_norm,
        tokens_inputs,
        *(2, 0, 0, 0, 0, 2),
        shapes=TOKENS,
    ),
    _case(
        "mixed_tokens_norm",
        "MLP-Mixer's residual of mixed tokens, and the layer norm of it",
        mixed_tokens,
        mixed_inputs,
        *(4, 0, 0, 0, 0, 2),
        shapes=TOKENS,
    ),
    _case(
        "channels_first_norm_grad",
        "the gradients of a layer norm whose result has channels first",
        Backward(channels_first, (0, 1, 2)),
        channels_first_inputs,
        *(3, 0, 0, 0, 0, 3),
        shapes=TOKENS,
    ),
]
