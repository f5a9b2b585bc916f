"""Operators that run between two graphs, on fake tensors, where torch does not say of what sizes.

What is selected by values that a fake tensor does not have is all that there is. CTC's loss is
that of CUDA's own kernels, not cuDNN's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls

aten = torch.ops.aten


def masked_select(mode: Any, func: Any, x: Any, mask: Any) -> Any:
    """Of as many elements as both have when they are broadcast."""
    return x.new_empty(torch.broadcast_shapes(x.shape, mask.shape).numel())


def nonzero(mode: Any, func: Any, x: Any) -> Any:
    """The index of each element, [elements, dimensions]."""
    return x.new_empty((x.numel(), x.dim()), dtype=torch.int64)


def by_library(mode: Any, func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether cuDNN or MIOpen has the loss."""
    return False


def ctc_loss(mode: Any, func: Any, log_probs: Any, targets: Any, *args: Any, **kwargs: Any) -> Any:
    """Of [steps, batch, classes]: a loss for each of the batch, and what the backward needs."""
    steps, batch, _ = log_probs.shape
    longest = targets.numel() if targets.dim() == 1 else targets.shape[1]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def ctc_loss_backward(
    mode: Any, func: Any, grad: Any, log_probs: Any, *args: Any, **kwargs: Any
) -> Any:
    """The gradient of `log_probs`."""
    return torch.empty_like(log_probs)


IMPLS: dict[Any, Callable[..., Any]] = {
    aten.masked_select.default: masked_select,
    aten.nonzero.default: nonzero,
    aten._use_cudnn_ctc_loss.Tensor: by_library,
    aten._use_miopen_ctc_loss.Tensor: by_library,
    aten._ctc_loss.Tensor: ctc_loss,
    aten._ctc_loss_backward.Tensor: ctc_loss_backward,
}


@contextlib.contextmanager
def impls(sizes: Any) -> Iterator[None]:
    """Have them in the fake mode whose `ShapeEnv` is `sizes`; another, as Dynamo's, has torch's."""
    table = fake_impls.op_implementations_dict
    before = {op: table.get(op) for op in IMPLS}

    def here(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        impl = None if mode.shape_env is sizes else before[func]
        if impl is not None:
            return impl(mode, func, *args, **kwargs)
        with mode:
            return IMPLS[func](mode, func, *args, **kwargs)

    table.update(dict.fromkeys(IMPLS, here))
    try:
        yield
    finally:
        for op, impl in before.items():
            del table[op]
            if impl is not None:
                table[op] = impl
