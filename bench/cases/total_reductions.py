"""Reductions of all elements of [M, N], as losses and the norm of a gradient are."""

import torch
import torch.nn.functional as F

from graft.cases import Case
from graft.cases.scaled import matrix, two

SHAPES = {
    "default": [(8192, 5120)],
    # activations, logits of vocabularies, and sizes that nobody has
    "suite": [
        (8192, 5120),
        (32768, 1536),
        (16384, 4096),
        (4096, 4096),
        (1024, 128256),
        (30522, 768),
        (4096, 50257),
        (3000, 7000),
        (12345, 6789),
        (65536, 640),
        (2048, 32000),
        (777, 98304),
        (151936, 896),
        (100, 250000),
    ],
}


def total_sum(x):
    return x.float().sum()


def total_norm(x):
    """The 2-norm of a gradient."""
    return x.float().square().sum().sqrt()


def mse_loss(x, target):
    return F.mse_loss(x.float(), target.float())


def smooth_l1_loss(x, target):
    return F.smooth_l1_loss(x.float(), target.float())


def bce_loss(x, target):
    """Binary cross entropy of logits x, whose targets are the signs' probabilities."""
    return F.binary_cross_entropy_with_logits(x.float(), torch.sigmoid(target.float()))


CASES = [
    Case(fn.__name__, title, fn, inputs, SHAPES, ("bf16", "fp32"))
    for fn, title, inputs in (
        (total_sum, "the sum of all elements", matrix),
        (total_norm, "the 2-norm of all elements", matrix),
        (mse_loss, "mean squared error", two),
        (smooth_l1_loss, "smooth L1 loss", two),
        (bce_loss, "binary cross entropy of logits", two),
    )
]
