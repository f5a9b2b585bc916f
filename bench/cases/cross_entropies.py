"""Cross entropies of logits [M, N] with room behind their rows, as a padded product has it.

A product whose N is not a multiple of 8 is padded, and what is used of it is a slice: rows are
aligned, and their length alone is odd. `cross_entropy` and `cross_entropy_ls_zloss` in `kernels`
are of contiguous logits.
"""

import math

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case

ALIGNMENT = 8
HIDDEN = 768
TOKENS = 1024  # of a sequence, at most
SHAPES = {
    "default": [(16384, 50257)],
    "suite": [(16384, 50257), (24576, 30522), (8192, 128256), (4096, 32000), (4096, 50257)],
}
_NO_FP16 = ("bf16", "fp32")


def _labels(shape, device):
    """A column for each row, and none (-100) for about one in ten."""
    m, n = shape
    labels = torch.randint(0, n, (m,), device=device)
    return labels.masked_fill(torch.rand(m, device=device) < 0.1, -100)


def _inputs(shape, dtype, device):
    m, n = shape
    padded = -(-n // ALIGNMENT) * ALIGNMENT
    return torch.randn(m, padded, dtype=dtype, device=device)[:, :n], _labels(shape, device)


def _head_inputs(shape, dtype, device):
    m, n = shape
    x, weight = (torch.randn(k, HIDDEN, dtype=dtype, device=device) for k in (m, n))
    return x, weight * HIDDEN**-0.5, _labels(shape, device)


def _with_gradient(inputs, of_dtype):
    def all_inputs(shape, dtype, device):
        grad_dtype = of_dtype or dtype
        return *inputs(shape, dtype, device), torch.ones((), dtype=grad_dtype, device=device)

    return all_inputs


def sliced(logits, labels):
    return F.cross_entropy(logits, labels)


def smoothed(logits, labels):
    return F.cross_entropy(logits, labels, label_smoothing=0.1)


def shifted(logits, labels):
    """As language models of `transformers` have it: in float32, each token predicts the next."""
    labels = labels.view(-1, math.gcd(len(labels), TOKENS))
    labels = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(logits.float(), labels)


def head(x, weight, labels):
    """Of the logits x [M, K] times weight [N, K], transposed."""
    return sliced(x @ weight.mT, labels)


def shifted_head(x, weight, labels):
    return shifted(x @ weight.mT, labels)


def _pair(fn, summary, inputs, wrt=(0,), of_dtype=None):
    name = f"cross_entropy_{fn.__name__}"
    yield Case(name, summary, fn, inputs, SHAPES, _NO_FP16)
    yield Case(
        f"{name}_grad",
        f"backward of {name}, as autograd makes it",
        Backward(fn, wrt),
        _with_gradient(inputs, of_dtype),
        SHAPES,
        _NO_FP16,
    )


CASES = [
    *_pair(sliced, "cross entropy of a slice of aligned rows", _inputs),
    *_pair(smoothed, "cross entropy with smoothed labels", _inputs),
    *_pair(shifted, "cross entropy of next tokens in float32", _inputs, of_dtype=torch.float32),
    *_pair(head, "a product and its cross entropy", _head_inputs, (0, 1)),
    *_pair(
        shifted_head,
        "a product and the cross entropy of next tokens",
        _head_inputs,
        (0, 1),
        torch.float32,
    ),
]
