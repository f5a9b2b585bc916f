"""ATen operators that only CUDA has, and that generated wrappers call, on CPU tensors.

Attention, forward and backward, by its formula in float32 (float64 of float64). What the fused
kernels keep for their backward beside the output (log-sum-exp, philox state) has the right shape
and type; the backward here computes what it needs anew and does not read it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from graft.errors import GraftError


class OnCpu(TorchDispatchMode):
    """What a generated wrapper leaves to ATen runs on the CPU, whatever device it names."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.device, _cpu_for, (args, kwargs or {}))
        stand_in = STAND_INS.get(func)
        return stand_in(func, args, kwargs) if stand_in else func(*args, **kwargs)


def _cpu_for(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "cuda" else device


def _results(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Zeros in the shapes, strides and types that `func`, called with these arguments, returns."""

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        size, stride = tensor.size(), tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta")

    def zeros(tensor: torch.Tensor) -> torch.Tensor:
        size, stride = tensor.size(), tensor.stride()
        return torch.empty_strided(size, stride, dtype=tensor.dtype).zero_()

    args, kwargs = tree_map_only(torch.Tensor, meta, (args, kwargs))
    return list(tree_map_only(torch.Tensor, zeros, func(*args, **kwargs)))


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The call's arguments by their names in the operator's schema, with defaults."""
    schema = func._schema.arguments
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values |= {a.name: value for a, value in zip(schema, args)}
    values |= kwargs
    if values.get("dropout_p"):
        raise GraftError("the interpreter has no stand-in for attention with dropout")
    return values


def _weights(call: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Query, key, value in the type to compute in, the scale, and softmax(scale·q·kᵀ + bias)."""
    wide = torch.float64 if call["query"].dtype == torch.float64 else torch.float32
    query, key, value = (call[name].to(wide) for name in ("query", "key", "value"))
    groups = query.size(1) // key.size(1)
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    scale = call.get("scale")
    scale = torch.tensor(1 / math.sqrt(query.size(-1)) if scale is None else scale, dtype=wide)
    scores = query @ key.transpose(-1, -2) * scale
    if call.get("attn_bias") is not None:
        scores = scores + call["attn_bias"].to(wide)
    if call["is_causal"]:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return query, key, value, scale, torch.softmax(scores, -1)


def attention(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Any fused forward: its first result is the output, `[batch, heads, sequence, head_dim]`."""
    _, _, value, _, weights = _weights(_named(func, args, kwargs))
    results = _results(func, args, kwargs)
    results[0].copy_(weights @ value)
    return tuple(results)


def attention_backward(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Any fused backward: its first three results are the gradients of query, key and value."""
    call = _named(func, args, kwargs)
    if call.get("grad_input_mask", [False])[-1]:
        raise GraftError("the interpreter has no stand-in for the gradient of an attention bias")
    query, key, value, scale, weights = _weights(call)
    grad_out = next(call[name] for name in ("grad_out", "grad_out_") if name in call)
    grad_out = grad_out.to(query.dtype)
    grad_weights = grad_out @ value.transpose(-1, -2)
    grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True)) * scale
    heads = call["key"].size(1)
    grads = (
        grad_scores @ key,
        grad_scores.transpose(-1, -2) @ query,
        weights.transpose(-1, -2) @ grad_out,
    )
    results = _results(func, args, kwargs)
    for result, grad in zip(results, grads):
        result.copy_(grad if grad.size(1) == result.size(1) else _ungrouped(grad, heads))
    return tuple(results)


def _ungrouped(grad: torch.Tensor, heads: int) -> torch.Tensor:
    return grad.unflatten(1, (heads, -1)).sum(2)


_aten = torch.ops.aten
STAND_INS: dict[Any, Callable[[Any, Any, Any], tuple[Any, ...]]] = {
    _aten._scaled_dot_product_flash_attention.default: attention,
    _aten._scaled_dot_product_efficient_attention.default: attention,
    _aten._scaled_dot_product_cudnn_attention.default: attention,
    _aten._scaled_dot_product_flash_attention_backward.default: attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: attention_backward,
}
