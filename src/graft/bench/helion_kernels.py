"""Helion kernels of the cases, for the peer of that name. Imported only where Helion is.

Written the way its documentation writes row reductions: a tile of rows at a time, the row as a
whole (`:`), and the compiler chooses between a persistent and a looped reduction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import helion
import helion.language as hl
import torch


@helion.kernel
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        values = x[rows, :].to(torch.float32)
        rstd = torch.rsqrt(torch.mean(values * values, dim=-1) + 1e-5)
        out[rows, :] = (values * rstd[:, None] * weight[:].to(torch.float32)).to(x.dtype)
    return out


@helion.kernel
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    n = x.size(1)
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        values = x[rows, :].to(torch.float32)
        centred = values - (torch.sum(values, dim=-1) / n)[:, None]
        rstd = torch.rsqrt(torch.sum(centred * centred, dim=-1) / n + 1e-5)
        scaled = centred * rstd[:, None] * weight[:].to(torch.float32)
        out[rows, :] = (scaled + bias[:].to(torch.float32)).to(x.dtype)
    return out


@helion.kernel
def softmax(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        out[rows, :] = torch.softmax(x[rows, :], dim=1)
    return out


@helion.kernel
def row_sum(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty([x.size(0)], dtype=x.dtype, device=x.device)
    for rows in hl.tile(x.size(0)):
        out[rows] = x[rows, :].to(torch.float32).sum(-1).to(x.dtype)
    return out


@helion.kernel
def welford(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    m, n = x.size()
    out = torch.empty_like(x)
    for rows in hl.tile(m):
        count = hl.zeros([rows], dtype=torch.float32)
        mean = hl.zeros([rows], dtype=torch.float32)
        m2 = hl.zeros([rows], dtype=torch.float32)
        for columns in hl.tile(n):
            inside = columns.index < n
            values = x[rows, columns].to(torch.float32)
            size = inside.to(torch.float32).sum()
            part = torch.sum(values, dim=-1) / size
            centred = torch.where(inside[None, :], values - part[:, None], 0.0)
            delta = part - mean
            total = count + size
            m2 = m2 + torch.sum(centred * centred, dim=-1) + delta * delta * count * size / total
            mean = mean + delta * size / total
            count = total
        rstd = torch.rsqrt(m2 / count + 1e-5)
        for columns in hl.tile(n):
            values = (x[rows, columns].to(torch.float32) - mean[:, None]) * rstd[:, None]
            scaled = values * weight[columns].to(torch.float32)[None, :]
            out[rows, columns] = (scaled + bias[columns].to(torch.float32)[None, :]).to(x.dtype)
    return out


@helion.kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    n, v = logits.shape
    losses = torch.empty([n], dtype=torch.float32, device=logits.device)
    flat = logits.view(-1)
    for rows in hl.tile(n):
        picked = hl.load(flat, [rows.index * v + labels[rows]]).to(torch.float32)
        values = logits[rows, :].to(torch.float32)
        top = torch.amax(values, dim=-1)
        total = torch.sum(torch.exp(values - top[:, None]), dim=-1)
        losses[rows] = top + torch.log(total) - picked
    return losses.mean().to(logits.dtype)


@helion.kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def cross_entropy_ls_zloss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    n, v = logits.shape
    losses = torch.empty([n], dtype=torch.float32, device=logits.device)
    flat = logits.view(-1)
    for rows in hl.tile(n):
        picked = hl.load(flat, [rows.index * v + labels[rows]]).to(torch.float32)
        values = logits[rows, :].to(torch.float32)
        top = torch.amax(values, dim=-1)
        total = torch.sum(torch.exp(values - top[:, None]), dim=-1)
        mean = torch.sum(values, dim=-1) / v
        lse = top + torch.log(total)
        losses[rows] = lse - 0.9 * picked - 0.1 * mean + 1e-4 * lse * lse
    return losses.mean()


@helion.kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def kl_div(log_q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    n = log_q.size(0)
    losses = torch.empty([n], dtype=torch.float32, device=log_q.device)
    for rows in hl.tile(n):
        target = p[rows, :].to(torch.float32)
        log_target = torch.log(torch.clamp(target, min=1e-30))
        losses[rows] = torch.sum(target * (log_target - log_q[rows, :].to(torch.float32)), dim=-1)
    return (losses.sum() / n).to(log_q.dtype)


@helion.kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def jsd(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    n = log_q.size(0)
    losses = torch.empty([n], dtype=torch.float32, device=log_q.device)
    for rows in hl.tile(n):
        lq = log_q[rows, :].to(torch.float32)
        lp = log_p[rows, :].to(torch.float32)
        q = torch.exp(lq)
        p = torch.exp(lp)
        log_m = torch.log(0.5 * (p + q))
        losses[rows] = torch.sum(0.5 * (p * (lp - log_m) + q * (lq - log_m)), dim=-1)
    return losses.mean()


@helion.kernel
def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        added = x[rows, :] + residual[rows, :]
        total[rows, :] = added
        values = added.to(torch.float32)
        rstd = torch.rsqrt(torch.mean(values * values, dim=-1) + 1e-5)
        out[rows, :] = (values * rstd[:, None] * weight[:].to(torch.float32)).to(x.dtype)
    return out, total


@helion.kernel
def fused_add_layernorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n = x.size(1)
    out = torch.empty_like(x)
    total = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        added = x[rows, :] + residual[rows, :]
        total[rows, :] = added
        values = added.to(torch.float32)
        centred = values - (torch.sum(values, dim=-1) / n)[:, None]
        rstd = torch.rsqrt(torch.sum(centred * centred, dim=-1) / n + 1e-5)
        scaled = centred * rstd[:, None] * weight[:].to(torch.float32)
        out[rows, :] = (scaled + bias[:].to(torch.float32)).to(x.dtype)
    return out, total


@helion.kernel
def gated_rmsnorm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        gates = gate[rows, :].to(torch.float32)
        values = x[rows, :].to(torch.float32) * gates * torch.sigmoid(gates)
        rstd = torch.rsqrt(torch.mean(values * values, dim=-1) + 1e-5)
        out[rows, :] = (values * rstd[:, None] * weight[:].to(torch.float32)).to(x.dtype)
    return out


@helion.kernel
def scaled_masked_softmax(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for rows in hl.tile(x.size(0)):
        values = x[rows, :].to(torch.float32) * 0.125
        values = torch.where(mask[rows, :], float("-inf"), values)
        powers = torch.exp(values - torch.amax(values, dim=-1)[:, None])
        out[rows, :] = (powers / torch.sum(powers, dim=-1)[:, None]).to(x.dtype)
    return out


@helion.kernel
def dynamic_quant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = x.size()
    out = torch.empty([m, n], dtype=torch.int8, device=x.device)
    scales = torch.empty([m, 1], dtype=torch.float32, device=x.device)
    for rows in hl.tile(m):
        values = x[rows, :].to(torch.float32)
        scale = torch.clamp(torch.amax(torch.abs(values), dim=-1), min=1e-8) / 127
        scales[rows, 0] = scale
        out[rows, :] = torch.round(values / scale[:, None]).to(torch.int8)
    return out, scales


@helion.kernel
def grpo(
    logits: torch.Tensor,
    ids: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    advantage: torch.Tensor,
) -> torch.Tensor:
    n, v = logits.shape
    out = torch.empty([n], dtype=torch.float32, device=logits.device)
    flat = logits.view(-1)
    for rows in hl.tile(n):
        picked = hl.load(flat, [rows.index * v + ids[rows]]).to(torch.float32)
        values = logits[rows, :].to(torch.float32)
        top = torch.amax(values, dim=-1)
        total = torch.sum(torch.exp(values - top[:, None]), dim=-1)
        logp = picked - top - torch.log(total)
        ratio = torch.exp(logp - old_logp[rows])
        clipped = torch.clamp(ratio, 0.8, 1.2)
        gain = advantage[rows]
        delta = ref_logp[rows] - logp
        kl = torch.exp(delta) - delta - 1
        out[rows] = 0.04 * kl - torch.minimum(ratio * gain, clipped * gain)
    return out


@helion.kernel
def fused_linear_jsd(
    student: torch.Tensor, teacher: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    n = student.size(0)
    loss = torch.empty([n], dtype=torch.float32, device=student.device)
    grad = torch.empty_like(student)
    for rows in hl.tile(n):
        log_q = torch.log_softmax(student[rows, :].to(torch.float32), dim=-1)
        log_p = torch.log_softmax(teacher[rows, :].to(torch.float32), dim=-1)
        q = torch.exp(log_q)
        p = torch.exp(log_p)
        log_m = torch.log(0.5 * (q + p))
        log_ratio = log_q - log_m
        kl_q = torch.sum(q * log_ratio, dim=-1)
        kl_p = torch.sum(p * (log_p - log_m), dim=-1)
        loss[rows] = 0.5 * (kl_q + kl_p)
        grad[rows, :] = (0.5 * q * (log_ratio - kl_q[:, None])).to(student.dtype)
    return loss, grad


@helion.kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def rms_norm_backward(
    x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    m = x.size(0)
    n = hl.specialize(x.size(1))
    per_program = hl.register_block_size(m)
    dx = torch.empty_like(x)
    partial = x.new_empty([(m + per_program - 1) // per_program, n], dtype=torch.float32)
    for program in hl.tile(m, block_size=per_program):
        dweight = hl.zeros([n], dtype=torch.float32)
        scale = weight[None, :].to(torch.float32)
        for rows in hl.tile(program.begin, program.end):
            r = rstd[rows, :].to(torch.float32)
            xhat = x[rows, :].to(torch.float32) * r
            grads = dy[rows, :].to(torch.float32)
            dweight = dweight + (xhat * grads).sum(0)
            scaled = scale * grads
            dot = torch.mean(scaled * xhat, dim=-1)
            dx[rows, :] = ((scaled - xhat * dot[:, None]) * r).to(x.dtype)
        partial[program.id, :] = dweight
    return dx, partial.sum(0).to(weight.dtype)


@helion.kernel(ignore_warnings=[helion.exc.TensorOperationInWrapper])
def layer_norm_backward(
    x: torch.Tensor,
    dy: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = x.size(0)
    n = hl.specialize(x.size(1))
    per_program = hl.register_block_size(m)
    programs = (m + per_program - 1) // per_program
    dx = torch.empty_like(x)
    weight_partial = x.new_empty([programs, n], dtype=torch.float32)
    bias_partial = x.new_empty([programs, n], dtype=torch.float32)
    for program in hl.tile(m, block_size=per_program):
        dweight = hl.zeros([n], dtype=torch.float32)
        dbias = hl.zeros([n], dtype=torch.float32)
        scale = weight[None, :].to(torch.float32)
        for rows in hl.tile(program.begin, program.end):
            r = rstd[rows, :].to(torch.float32)
            xhat = (x[rows, :].to(torch.float32) - mean[rows, :].to(torch.float32)) * r
            grads = dy[rows, :].to(torch.float32)
            dweight = dweight + (xhat * grads).sum(0)
            dbias = dbias + grads.sum(0)
            scaled = scale * grads
            dot = torch.sum(scaled * xhat, dim=-1) / n
            average = torch.sum(scaled, dim=-1) / n
            dx[rows, :] = ((scaled - xhat * dot[:, None] - average[:, None]) * r).to(x.dtype)
        weight_partial[program.id, :] = dweight
        bias_partial[program.id, :] = dbias
    return dx, weight_partial.sum(0).to(weight.dtype), bias_partial.sum(0).to(weight.dtype)


_KERNELS: dict[str, Any] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "sum": row_sum,
    "long_sum": row_sum,
    "cross_entropy": cross_entropy,
    "kl_div": kl_div,
    "jsd": jsd,
    "welford": welford,
    "fused_add_rmsnorm": fused_add_rmsnorm,
    "fused_add_layernorm": fused_add_layernorm,
    "gated_rmsnorm": gated_rmsnorm,
    "scaled_masked_softmax": scaled_masked_softmax,
    "cross_entropy_ls_zloss": cross_entropy_ls_zloss,
    "dynamic_quant": dynamic_quant,
    "grpo": grpo,
    "fused_linear_jsd": fused_linear_jsd,
    "rms_norm_backward": rms_norm_backward,
    "layer_norm_backward": layer_norm_backward,
}


def bind(case: str, autotune: bool) -> Callable[..., Callable[[], Any]] | None:
    """The case's kernel, bound to its inputs at the first call; None where there is none."""
    found = _KERNELS.get(case)
    if found is None:
        return None

    def bound_to(*inputs: Any) -> Callable[[], Any]:
        bound = found.bind(inputs)
        if autotune:
            bound.autotune(inputs)
        else:
            bound.set_config(_heuristic_config(bound))
        return lambda: bound(*inputs)

    return bound_to


def _heuristic_config(bound: Any) -> Any:
    """The configuration that Helion's reduction heuristic seeds its search with, or its default."""
    seeds = getattr(bound.config_spec, "compiler_seed_configs", None)
    config = seeds[0] if seeds else bound.config_spec.default_config()
    print(f"{bound.kernel.name}: {config}", file=sys.stderr)
    return config
