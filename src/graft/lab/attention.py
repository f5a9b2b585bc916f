"""Which attention kernel CUDA picks, for a GPU that is described, not present.

`torch.nn.functional.scaled_dot_product_attention` asks the device before it chooses. These are the
questions of ATen's `sdp_utils.cpp` that matter to a graph, answered from the description.
"""

from __future__ import annotations

import math
import os
import warnings

import torch
import torch.library
import torch.nn.functional
from torch.nn.attention import SDPBackend

from graft.lab.devices import Device

_HALF = (torch.float16, torch.bfloat16)
# cuDNN comes first from this version on (earlier ones were wrong for some sequence lengths).
_PREFERRED_CUDNN = 91500
# Head dimensions that the kernels take, in elements.
_CUDNN_MAX_HEAD_DIM = 128
_FLASH_MAX_HEAD_DIM = 256
_HEAD_DIM_ALIGNMENT = 8


def describe(device: Device) -> None:
    """From now on `scaled_dot_product_attention` of CUDA tensors chooses as `device` would."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        backend = choose(device, query, key, value, attn_mask, enable_gqa)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            blocked = torch.full_like(attn_mask, -math.inf, dtype=query.dtype)
            attn_mask = torch.where(attn_mask, torch.zeros_like(blocked), blocked)
        aten = torch.ops.aten
        train = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        if backend is SDPBackend.CUDNN_ATTENTION:
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, attn_mask, train, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend is SDPBackend.FLASH_ATTENTION:
            size = query.size(-1)
            padding = -size % _HEAD_DIM_ALIGNMENT
            if padding:
                query, key, value = (
                    torch.nn.functional.pad(t, (0, padding)) for t in (query, key, value)
                )
            scale = 1 / math.sqrt(size) if scale is None else scale
            out = aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., :size] if padding else out
        if backend is SDPBackend.EFFICIENT_ATTENTION:
            if attn_mask is not None:
                attn_mask = attn_mask.expand(
                    query.size(0), query.size(1), query.size(2), key.size(2)
                )
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, attn_mask, train, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            None,
            scale=scale,
            enable_gqa=enable_gqa,
        )[0]

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Oo]verrid")
        library.impl(
            "scaled_dot_product_attention",
            attend,
            "CompositeImplicitAutograd",
            allow_override=True,
        )
    _libraries.append(library)


# A Library takes its kernels back when it is collected.
_libraries: list[torch.library.Library] = []


def choose(
    device: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> SDPBackend:
    """The kernel for `[batch, heads, sequence, head_dim]` query, key and value."""
    if query.device.type == "cuda":
        for backend in _order(device):
            if _takes(backend, query, key, value, attn_mask, enable_gqa):
                return backend
    return SDPBackend.MATH


def _order(device: Device) -> tuple[SDPBackend, ...]:
    fused = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    preferred = (
        device.capability in (90, 100, 103)
        and (torch.backends.cudnn.version() or 0) > _PREFERRED_CUDNN
        and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    )
    return (SDPBackend.CUDNN_ATTENTION, *fused) if preferred else fused


def _takes(
    backend: SDPBackend,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    enable_gqa: bool,
) -> bool:
    tensors = (query, key, value)
    head_dim, value_dim = query.size(-1), value.size(-1)
    grouped = query.size(-3) != key.size(-3) if query.dim() == 4 else False
    if any(t.dim() != 4 or t.stride(-1) != 1 for t in tensors) or (grouped and not enable_gqa):
        return False
    if attn_mask is not None and attn_mask.stride(-1) != 1:  # as T5's, of [query, key, head]
        return False
    if backend is SDPBackend.CUDNN_ATTENTION:
        return (
            torch.backends.cuda.cudnn_sdp_enabled()
            and query.dtype in _HALF
            and max(head_dim, value_dim) <= _CUDNN_MAX_HEAD_DIM
            and head_dim % _HEAD_DIM_ALIGNMENT == 0
            and value_dim % _HEAD_DIM_ALIGNMENT == 0
            # it has no gradient of a bias, as T5's of relative positions
            and not (attn_mask is not None and attn_mask.requires_grad)
            and not torch.are_deterministic_algorithms_enabled()
        )
    if backend is SDPBackend.FLASH_ATTENTION:
        return (
            torch.backends.cuda.flash_sdp_enabled()
            and query.dtype in _HALF
            and attn_mask is None
            and head_dim == value_dim <= _FLASH_MAX_HEAD_DIM
        )
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dtype in (*_HALF, torch.float32)
        and head_dim % (_HEAD_DIM_ALIGNMENT if query.dtype in _HALF else 4) == 0
        and not grouped
    )
