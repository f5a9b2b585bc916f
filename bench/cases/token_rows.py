"""Reductions of rows that read an int64 beside each value: masks by token, segment or position.

Eight bytes beside each two or four: what is decided by a row's columns, and what by its bytes.
"""

import torch

from graft.cases import Case

SHAPES = {
    "default": [(4096, 32768)],
    "suite": [
        (3, 18432),
        (44, 40000),
        (200, 32000),
        (1024, 8192),
        (4096, 4096),
        (8192, 2051),
        (2048, 50257),
        (4096, 32768),
    ],
}


def _tokens(shape, dtype, device):
    x = torch.randn(shape, dtype=dtype, device=device)
    return x, torch.randint(0, 9, shape, device=device)


def _read_and_write(shape, dtype):
    m, n = shape
    return m * n * (2 * dtype.itemsize + 8)


def _read_and_write_and_sum(shape, dtype):
    return _read_and_write(shape, dtype) + shape[0] * dtype.itemsize


def _read_only(shape, dtype):
    m, n = shape
    return m * n * (dtype.itemsize + 8) + m * dtype.itemsize


def token_masked_sum(x, tokens):
    """x [M, N] where tokens are above 2, and the sums of its rows [M]."""
    kept = torch.where(tokens > 2, x, 0)
    return kept, kept.sum(-1)


def token_centred(x, tokens):
    """x [M, N] of the tokens above 0, less its row's mean."""
    y = x.float() * (tokens > 0)
    return (y - y.mean(-1, keepdim=True)).to(x.dtype)


def token_softmax(x, tokens):
    """Softmax of x [M, N] over the tokens of a row that are not padding."""
    return torch.softmax(x.float().masked_fill(tokens == 0, -1e9), -1).to(x.dtype)


def token_loss(x, tokens):
    """The mean square of x [M, N] over the tokens that are not ignored, a row [M]."""
    kept = tokens != 0
    return ((x.float().square() * kept).sum(-1) / kept.sum(-1).clamp(min=1)).to(x.dtype)


CASES = [
    Case(
        "token_masked_sum",
        "x where a token says so, and its row's sum",
        token_masked_sum,
        _tokens,
        SHAPES,
        bytes_moved=_read_and_write_and_sum,
    ),
    Case(
        "token_centred",
        "x of some tokens, less its row's mean",
        token_centred,
        _tokens,
        SHAPES,
        bytes_moved=_read_and_write,
    ),
    Case(
        "token_softmax",
        "softmax over the tokens that are not padding",
        token_softmax,
        _tokens,
        SHAPES,
        bytes_moved=_read_and_write,
    ),
    Case(
        "token_loss",
        "mean square over the tokens that count",
        token_loss,
        _tokens,
        SHAPES,
        bytes_moved=_read_only,
    ),
]
