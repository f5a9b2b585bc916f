"""Softmaxes of logits [M, N] that are scaled first, and losses of them.

By a temperature, a cap of the logits (`cap * tanh(x / cap)`), or a learned scale, as a contrastive
loss has it. Losses are float32, one number.
"""

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case

SHAPES = {
    "default": [(4096, 32000)],
    "suite": [
        *((4096, 32000), (2048, 50257), (4096, 128256), (3001, 21841), (300, 50257)),
        (8192, 4096),  # which are held
    ],
}
TEMPERATURE, CAP = 2.0, 30.0


def _rand(shape, dtype, device):
    return torch.randn(*shape, dtype=dtype, device=device)


def _logits(shape, dtype, device):
    return (_rand(shape, dtype, device),)


def _logits_labels(shape, dtype, device):
    return _rand(shape, dtype, device), torch.randint(0, shape[1], shape[:1], device=device)


def _pairs(shape, dtype, device):
    return *_logits_labels(shape, dtype, device), torch.tensor(2.0, device=device)


def _two(shape, dtype, device):
    return tuple(_rand(shape, dtype, device) for _ in range(2))


def _with_gradient(inputs):
    return lambda *args: (*inputs(*args), torch.ones((), device=args[-1]))


def tempered_softmax(logits):
    return torch.softmax(logits / TEMPERATURE, -1)


def tempered_log_softmax(logits):
    return torch.log_softmax(logits.float() / TEMPERATURE, -1)


def tempered_cross_entropy(logits, labels):
    return F.cross_entropy(logits.float() / TEMPERATURE, labels)


def capped_cross_entropy(logits, labels):
    return F.cross_entropy(CAP * torch.tanh(logits.float() / CAP), labels)


def contrastive_loss(logits, labels, log_scale):
    """Of pairs, by a learned scale."""
    return F.cross_entropy(log_scale.exp() * logits.float(), labels)


def tempered_divergence(student, teacher):
    """Of a student from its teacher, as distillation has it."""
    log_probs = F.log_softmax(student.float() / TEMPERATURE, -1)
    probs = F.softmax(teacher.float() / TEMPERATURE, -1)
    return F.kl_div(log_probs, probs, reduction="batchmean") * TEMPERATURE**2


def _case(fn, summary, inputs):
    return Case(fn.__name__, summary, fn, inputs, SHAPES, ("bf16", "fp32"))


def _with_backward(fn, summary, inputs):
    yield _case(fn, summary, inputs)
    yield Case(
        f"{fn.__name__}_grad",
        f"backward of {fn.__name__}, as autograd makes it",
        Backward(fn, (0,)),
        _with_gradient(inputs),
        SHAPES,
        ("bf16", "fp32"),
    )


CASES = [
    _case(tempered_softmax, "softmax at a temperature", _logits),
    _case(tempered_log_softmax, "log-softmax at a temperature, in float32", _logits),
    _case(tempered_cross_entropy, "cross entropy at a temperature", _logits_labels),
    *_with_backward(capped_cross_entropy, "cross entropy of capped logits", _logits_labels),
    _case(contrastive_loss, "cross entropy by a learned scale", _pairs),
    *_with_backward(tempered_divergence, "divergence of two softmaxes at a temperature", _two),
]
