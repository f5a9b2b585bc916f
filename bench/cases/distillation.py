"""Losses of two logits [M, N], a student's and a teacher's, beside cross entropies of them.

A kernel of the gradients has the row sums of the distillation, and a one-hot gradient, which has
none.
"""

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case

SHAPES = {
    "default": [(8192, 50257)],
    "suite": [(8192, 50257), (8192, 32000), (4096, 128256), (16384, 30522), (8191, 50259)],
}
TEMPERATURE = 2.0


def _inputs(shape, dtype, device):
    student, teacher = (torch.randn(*shape, dtype=dtype, device=device) for _ in range(2))
    labels = torch.randint(0, shape[1], shape[:1], device=device)
    return student, teacher, labels, torch.ones((), device=device)


def _soft(student, teacher, temperature=1.0):
    wanted = (teacher.float() / temperature).softmax(-1)
    return -(wanted * (student.float() / temperature).log_softmax(-1)).sum(-1).mean()


def soft_and_hard(student, teacher, labels):
    """Of the student: the cross entropies with the teacher's softmax, and with the labels."""
    return _soft(student, teacher) + F.cross_entropy(student, labels)


def kl_and_hard(student, teacher, labels):
    """As `soft_and_hard`, by a divergence at a temperature."""
    inputs = ((each.float() / TEMPERATURE).log_softmax(-1) for each in (student, teacher))
    soft = F.kl_div(*inputs, log_target=True, reduction="batchmean") * TEMPERATURE**2
    return soft + F.cross_entropy(student, labels)


def both_hard(student, teacher, labels):
    """As `soft_and_hard` at a temperature, and the teacher learns from the labels as well."""
    hard = (F.cross_entropy(each, labels) for each in (student, teacher))
    return sum(hard, _soft(student, teacher, TEMPERATURE))


CASES = [
    Case(
        f"{fn.__name__}_grad{suffix}",
        f"backward of {fn.__name__}, {of}",
        Backward(fn, wrt),
        _inputs,
        SHAPES,
        ("bf16", "fp32"),
    )
    for fn in (soft_and_hard, kl_and_hard, both_hard)
    for wrt, suffix, of in (((0,), "", "of the student"), ((0, 1), "_both", "of both"))
]
