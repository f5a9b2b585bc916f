"""Log-probabilities of chosen tokens, as losses of policies have them (PPO, DPO, GRPO).

Of logits [M, N] one a row is taken. Its gradient is one value a row of zeros, to which that of a
logsumexp is added. `grpo` in `kernels` is a whole loss.
"""

import torch

from graft.bench.autograd import Backward
from graft.cases import Case

SHAPES = {
    "default": [(4096, 32000)],
    "suite": [(4096, 32000), (2048, 50257), (8192, 32000), (4096, 65536), (1024, 128256)],
}


def _logits_tokens(shape, dtype, device):
    m, n = shape
    return torch.randn(shape, dtype=dtype, device=device), torch.randint(0, n, (m,), device=device)


def _with_gradient(shape, dtype, device):
    return *_logits_tokens(shape, dtype, device), torch.randn(shape[0], device=device)


def of_log_softmax(logits, tokens):
    return torch.log_softmax(logits.float(), -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def gathered(logits, tokens):
    """Without the other log-probabilities."""
    logits = logits.float()
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - torch.logsumexp(logits, -1)


def indexed(logits, tokens):
    logits = logits.float()
    rows = torch.arange(len(tokens), device=tokens.device)
    return logits[rows, tokens] - torch.logsumexp(logits, -1)


def _gradient_bytes(shape, dtype):
    """Logits and their gradient, once each, and what each row has."""
    m, n = shape
    return 2 * m * n * dtype.itemsize + m * (8 + 4)


CASES = [
    Case(
        f"token_log_probs_{fn.__name__}_grad",
        f"backward of log-probabilities of tokens, {fn.__name__.replace('_', ' ')}",
        Backward(fn, (0,)),
        _with_gradient,
        SHAPES,
        ("bf16", "fp32"),
        _gradient_bytes,
    )
    for fn in (of_log_softmax, gathered, indexed)
]
