"""Seventeen row-wise kernels of training, forward, and backward as autograd makes it.

Nine that reductions are usually tuned on (rms_norm to welford) and eight that they are not:
fused_add_rmsnorm, fused_add_layernorm, gated_rmsnorm, scaled_masked_softmax,
cross_entropy_ls_zloss, dynamic_quant, grpo and fused_linear_jsd. Of the second group only
dynamic_quant was in a sweep. A name that ends in `_grad` is the backward of the name before it.
"""

import random
from typing import NamedTuple

import torch
import torch.nn.functional as F

from graft.bench.autograd import Backward
from graft.cases import Case

EPS = 1e-5

# Elements of a tensor whose shape is drawn, and its rows, if they are few or many.
DRAWN_ELEMENTS, FEW_ROWS, MANY_ROWS = (2**21, 2**27), (32, 1024), (2**15, 2**18)


class Shapes(NamedTuple):
    """Those of kernels that are alike.

    default, suite: chosen as models have them
    columns: the least and the most that are drawn, log-uniform
    drawn: of each shape that is drawn, whether its rows are `few` or `many` or its columns `odd`,
        or `any`; where no such number of rows has DRAWN_ELEMENTS, the nearest one is taken
    """

    default: list[tuple[int, int]]
    suite: list[tuple[int, int]]
    columns: tuple[int, int]
    drawn: tuple[str, ...]

    def of(self, name):
        """Of the kernel `name`, with `drawn` ones that nobody chose: its name is their seed."""
        source = random.Random(f"drawn for {name}")
        drawn = [self._draw(source, kind) for kind in self.drawn]
        return {"default": self.default, "suite": self.suite, "drawn": drawn}

    def _draw(self, source, kind):
        def size(low, high):
            return round(low * (high / low) ** source.random())

        columns = size(*self.columns)
        low, high = {"few": FEW_ROWS, "many": MANY_ROWS}.get(kind, (FEW_ROWS[0], MANY_ROWS[1]))
        least, most = (max(1, elements // columns) for elements in DRAWN_ELEMENTS)
        high = min(high, most)
        low = min(high, max(low, least))
        return size(low, high), columns | 1 if kind == "odd" else columns


HIDDEN = Shapes(
    default=[(8192, 4096)],
    suite=[
        (2048, 1024),
        (2048, 8192),
        (4096, 5120),
        (8192, 2048),
        (8192, 4096),
        (16384, 768),
        (32768, 1536),
        (4096, 16384),
    ],
    columns=(100, 16384),
    drawn=("odd", "few", "many", "any"),
)
WELFORD = HIDDEN._replace(
    default=[(65536, 1024)],
    suite=[(262144, 1024), (262144, 1536), (65536, 2048), (65536, 1000)],
)
VOCABULARY = Shapes(
    default=[(4096, 32000)],
    suite=[(1024, 128256), (2048, 50257), (4096, 32000), (8192, 32000), (4096, 65536)],
    columns=(20000, 260000),
    drawn=("odd", "few", "many"),
)
LONG = Shapes(
    default=[(8, 1048576)],
    suite=[(1, 4194304), (4, 131072), (8, 1048576), (32, 262144), (128, 131072)],
    columns=(50000, 2000000),
    drawn=("odd", "few"),
)


def rms_norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def layer_norm(x, weight, bias):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, EPS)


def softmax(x):
    return torch.softmax(x, -1)


def row_sum(x):
    return x.sum(-1)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels)


def kl_div(log_q, p):
    return F.kl_div(log_q, p, reduction="batchmean")


def jsd(log_q, log_p):
    """Jensen-Shannon divergence of [M, N] log-probabilities, mean over rows."""
    q, p = log_q.float().exp(), log_p.float().exp()
    log_m = torch.log(0.5 * (p + q))
    return (0.5 * (p * (log_p - log_m) + q * (log_q - log_m))).sum(-1).mean()


def fused_add_rmsnorm(x, residual, weight):
    total = x + residual
    return rms_norm(total, weight), total


def fused_add_layernorm(x, residual, weight, bias):
    total = x + residual
    return layer_norm(total, weight, bias), total


def gated_rmsnorm(x, gate, weight):
    return rms_norm(x * F.silu(gate), weight)


def scaled_masked_softmax(x, mask):
    return torch.softmax((x * 0.125).masked_fill(mask, float("-inf")), -1)


def cross_entropy_ls_zloss(logits, labels):
    """Cross entropy with label smoothing 0.1, plus 1e-4 times the squared log of the sum."""
    lse = torch.logsumexp(logits.float(), -1)
    return F.cross_entropy(logits, labels, label_smoothing=0.1) + 1e-4 * (lse * lse).mean()


def dynamic_quant(x):
    """x [M, N] to int8 with one scale a row."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return torch.round(x.float() / scale).to(torch.int8), scale


def grpo(logits, ids, old_logp, ref_logp, advantage):
    """Group-relative policy loss a token [M]: clipped ratio, and a KL term of weight 0.04."""
    logits = logits.float()
    picked = logits.gather(-1, ids[:, None]).squeeze(-1)
    logp = picked - torch.logsumexp(logits, -1)
    ratio = torch.exp(logp - old_logp)
    clipped = torch.clamp(ratio, 0.8, 1.2)
    delta = ref_logp - logp
    kl = torch.exp(delta) - delta - 1
    return 0.04 * kl - torch.minimum(ratio * advantage, clipped * advantage)


def fused_linear_jsd(student, teacher):
    """What lies between the linear layers: loss [M] and its gradient [M, N] by the student.

    softmax, log-softmax, divergence and gradient in one: about seven tiles live at once.
    """
    s, t = student.float(), teacher.float()
    log_q, log_p = torch.log_softmax(s, -1), torch.log_softmax(t, -1)
    q, p = log_q.exp(), log_p.exp()
    log_m = torch.log(0.5 * (q + p))
    log_ratio = log_q - log_m
    kl_q = (q * log_ratio).sum(-1)
    kl_p = (p * (log_p - log_m)).sum(-1)
    grad = 0.5 * q * (log_ratio - kl_q[:, None])
    return 0.5 * (kl_q + kl_p), grad.to(student.dtype)


def _rand(shape, dtype, device):
    return torch.randn(shape, dtype=dtype, device=device)


def _labels(shape, device):
    return torch.randint(0, shape[-1], shape[:-1], device=device)


def _x(shape, dtype, device):
    return (_rand(shape, dtype, device),)


def _x_weight(shape, dtype, device):
    return _rand(shape, dtype, device), _rand(shape[-1:], dtype, device)


def _x_weight_bias(shape, dtype, device):
    return *_x_weight(shape, dtype, device), _rand(shape[-1:], dtype, device)


def _logits_labels(shape, dtype, device):
    return _rand(shape, dtype, device), _labels(shape, device)


def _log_q_and_p(shape, dtype, device):
    q, p = (_rand(shape, torch.float32, device) for _ in range(2))
    return torch.log_softmax(q, -1).to(dtype), torch.softmax(p, -1).to(dtype)


def _log_q_log_p(shape, dtype, device):
    q, p = (torch.log_softmax(_rand(shape, torch.float32, device), -1) for _ in range(2))
    return q.to(dtype), p.to(dtype)


def _add_weight(shape, dtype, device):
    return _rand(shape, dtype, device), *_x_weight(shape, dtype, device)


def _add_weight_bias(shape, dtype, device):
    return _rand(shape, dtype, device), *_x_weight_bias(shape, dtype, device)


def _x_mask(shape, dtype, device):
    mask = torch.rand(shape, dtype=torch.float32, device=device) > 0.8
    mask[..., 0] = False  # a row that is masked as a whole has no softmax
    return _rand(shape, dtype, device), mask


def _grpo_inputs(shape, dtype, device):
    logits, ids = _logits_labels(shape, dtype, device)
    old, ref = (-10 + 0.1 * _rand(shape[:-1], torch.float32, device) for _ in range(2))
    return logits, ids, old, ref, _rand(shape[:-1], torch.float32, device)


def _two(shape, dtype, device):
    return _rand(shape, dtype, device), _rand(shape, dtype, device)


def _with_gradients(inputs, *kinds):
    """`inputs`, then the gradients of the outputs: `same` as x, per `row`, or of a `loss`."""

    def all_inputs(shape, dtype, device):
        made = inputs(shape, dtype, device)
        sizes = {"same": shape, "row": shape[:-1]}
        grads = [
            torch.ones((), dtype=torch.float32 if kind == "loss32" else dtype, device=device)
            if kind.startswith("loss")
            else _rand(sizes[kind], torch.float32 if kind == "row" else dtype, device)
            for kind in kinds
        ]
        return (*made, *grads)

    return all_inputs


def _pair(name, summary, fn, inputs, shapes, kinds=(), wrt=(), dtypes=("bf16", "fp16", "fp32")):
    """The case of a forward and, where `kinds` names its outputs' gradients, of its backward."""
    groups = shapes.of(name)
    yield Case(name, summary, fn, inputs, groups, dtypes)
    if kinds:
        yield Case(
            f"{name}_grad",
            f"backward of {name}, as autograd makes it",
            Backward(fn, wrt, len(kinds)),
            _with_gradients(inputs, *kinds),
            groups,
            dtypes,
        )


_NO_FP16 = ("bf16", "fp32")  # 1 / N of a vocabulary is below fp16's smallest normal number

CASES = [
    *_pair("rms_norm", "RMSNorm", rms_norm, _x_weight, HIDDEN, ("same",), (0, 1)),
    *_pair("layer_norm", "LayerNorm", layer_norm, _x_weight_bias, HIDDEN, ("same",), (0, 1, 2)),
    *_pair("softmax", "softmax of rows", softmax, _x, HIDDEN, ("same",), (0,)),
    *_pair("sum", "sum of rows", row_sum, _x, HIDDEN),
    *_pair("long_sum", "sum of a few long rows", row_sum, _x, LONG),
    *_pair(
        "cross_entropy",
        "cross entropy over a vocabulary",
        cross_entropy,
        _logits_labels,
        VOCABULARY,
        ("loss",),
        (0,),
    ),
    *_pair(
        "kl_div",
        "Kullback-Leibler divergence",
        kl_div,
        _log_q_and_p,
        VOCABULARY,
        ("loss",),
        (0,),
        _NO_FP16,
    ),
    *_pair(
        "jsd",
        "Jensen-Shannon divergence of log-probabilities",
        jsd,
        _log_q_log_p,
        VOCABULARY,
        ("loss32",),
        (0,),
        _NO_FP16,
    ),
    *_pair(
        "welford",
        "LayerNorm of many short rows, as Welford's algorithm is used for",
        layer_norm,
        _x_weight_bias,
        WELFORD,
        ("same",),
        (0, 1, 2),
    ),
    *_pair(
        "fused_add_rmsnorm",
        "residual add and RMSNorm",
        fused_add_rmsnorm,
        _add_weight,
        HIDDEN,
        ("same", "same"),
        (0, 2),
    ),
    *_pair(
        "fused_add_layernorm",
        "residual add and LayerNorm",
        fused_add_layernorm,
        _add_weight_bias,
        HIDDEN,
        ("same", "same"),
        (0, 2, 3),
    ),
    *_pair(
        "gated_rmsnorm",
        "RMSNorm of x * silu(gate)",
        gated_rmsnorm,
        _add_weight,
        HIDDEN,
        ("same",),
        (0, 1, 2),
    ),
    *_pair(
        "scaled_masked_softmax",
        "softmax of scaled and masked scores",
        scaled_masked_softmax,
        _x_mask,
        HIDDEN,
        ("same",),
        (0,),
    ),
    *_pair(
        "cross_entropy_ls_zloss",
        "cross entropy with label smoothing and z-loss",
        cross_entropy_ls_zloss,
        _logits_labels,
        VOCABULARY,
        ("loss32",),
        (0,),
    ),
    *_pair("dynamic_quant", "int8 with one scale a row", dynamic_quant, _x, HIDDEN),
    *_pair(
        "grpo",
        "group-relative policy loss a token",
        grpo,
        _grpo_inputs,
        VOCABULARY,
        ("row",),
        (0,),
    ),
    *_pair(
        "fused_linear_jsd",
        "Jensen-Shannon divergence of two softmaxes, with its gradient",
        fused_linear_jsd,
        _two,
        VOCABULARY,
        dtypes=_NO_FP16,
    ),
]
