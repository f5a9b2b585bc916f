"""Scaling of a [M, N] activation by the largest value of each row and of each column.

As quantised training does it where a scale holds for a row of the first matrix of a product and
for a column of the second: the one product reads x by rows, the other reads it transposed. `silu`
has the gate of a feed-forward layer in front, as Inductor's own test_red_followed_by_transposed_
pointwise, and `amax` the largest values alone.
"""

import math

import torch
import torch.nn.functional as F

from graft.cases import Case
from graft.cases.scaled import matrix, two

SHAPES = {
    "default": [(26624, 1024)],
    "large": [(26624, 1024), (16384, 4096), (8192, 8192), (32768, 768), (65536, 2048)],
}


def _rows(x, dtype):
    return (x / x.amax(dim=1, keepdim=True)).to(dtype)


def _columns(x, dtype):
    """[N, M]"""
    return (x / x.amax(dim=0, keepdim=True)).to(dtype).t().contiguous()


def scaled_both(x):
    return _rows(x, torch.float8_e4m3fn), _columns(x, torch.float8_e4m3fn)


def scaled_both_half(x):
    return _rows(x, x.dtype), _columns(x, x.dtype)


def scaled_both_silu(x, gate):
    return scaled_both(F.silu(x) * gate)


def scaled_both_silu_half(x, gate):
    return scaled_both_half(F.silu(x) * gate)


def scaled_columns(x):
    return _columns(x, torch.float8_e4m3fn)


def scaled_rows_both_ways(x):
    y = _rows(x, torch.float8_e4m3fn)
    return y, y.t().contiguous()


def amax_both_silu(x, gate):
    y = F.silu(x) * gate
    return y.amax(dim=1), y.amax(dim=0)


def _bytes(reads, outputs, itemsize=None):
    """Each input once, and `outputs` tensors of as many elements, of `itemsize` bytes each."""

    def bytes_moved(shape, dtype):
        return math.prod(shape) * (reads * dtype.itemsize + outputs * (itemsize or dtype.itemsize))

    return bytes_moved


def _amax_bytes(shape, dtype):
    return (2 * math.prod(shape) + sum(shape)) * dtype.itemsize


def _case(summary, fn, make, bytes_moved):
    return Case(fn.__name__, summary, fn, make, SHAPES, ("bf16",), bytes_moved)


CASES = [
    _case("to e4m3 by rows and, transposed, by columns", scaled_both, matrix, _bytes(1, 2, 1)),
    _case("the same, not narrowed", scaled_both_half, matrix, _bytes(1, 2)),
    _case("of silu(x) * gate", scaled_both_silu, two, _bytes(2, 2, 1)),
    _case("of silu(x) * gate, not narrowed", scaled_both_silu_half, two, _bytes(2, 2)),
    _case("by columns, transposed", scaled_columns, matrix, _bytes(1, 1, 1)),
    _case("by rows, and transposed", scaled_rows_both_ways, matrix, _bytes(1, 2, 1)),
    _case("amax of rows and columns alone", amax_both_silu, two, _amax_bytes),
]
