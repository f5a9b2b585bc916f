"""The backward that autograd makes of a forward, as a function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class Backward:
    """`Backward(forward, wrt)(*inputs, *grads)`: the gradients of `inputs[i]` for i in `wrt`.

    `grads` holds one gradient for each differentiable output of `forward`, in order. Called as
    it stands, it runs eagerly. A measurement compiles `forward` alone, as training does, and
    runs and times the backward that AOTAutograd made with it (see `prepare`).
    """

    def __init__(self, forward: Callable[..., Any], wrt: Sequence[int], outputs: int = 1) -> None:
        self.forward = forward
        self.wrt = tuple(wrt)
        self.outputs = outputs
        self.__name__ = f"{getattr(forward, '__name__', 'forward')}_grad"

    def __call__(self, *args: Any) -> tuple[torch.Tensor, ...]:
        return self.prepare(self.forward, args)()

    def prepare(
        self, forward: Callable[..., Any], args: Sequence[Any]
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Run `forward` once; the result runs its backward, as often as it is called.

        The same saved tensors serve each time, so buffers must not be donated to the backward
        (`torch._functorch.config.donated_buffer = False` when it is compiled).
        """
        split = len(args) - self.outputs
        inputs = [
            value.detach().requires_grad_() if i in self.wrt else value
            for i, value in enumerate(args[:split])
        ]
        grads = list(args[split:])
        made = tree_leaves(forward(*inputs))
        outputs = [out for out in made if isinstance(out, torch.Tensor) and out.requires_grad]
        leaves = [inputs[i] for i in self.wrt]

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

        return backward
