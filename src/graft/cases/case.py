"""A case: a function of tensors or a training step, its inputs, its shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.errors import UsageError, nearest

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A computation, the inputs it takes, and the shapes it is looked at.

    `fn` is a function of tensors, or, where `model` is set, a training step's forward:
    `fn(model, *inputs)` returns the scalar loss. `inputs` makes them with factory functions alone.
    `shapes` are named groups; the first shape of "default" is what `graft explain` uses.
    `bytes_moved` gives the bytes that must move at a shape and dtype: each input read once, each
    output written once.

    `library` is another package whose code `fn` calls, which need not be installed (`cases.find`
    imports it). `reads_bits` says that `fn` reads the bits of its tensors or refuses float64, so
    that its reference is eager in the same dtype, or `in_float32`, which computes the same with
    what `fn` rounds on the way in float32.

    Of a training step: `whole_batch` says that its loss is no mean over the batch, so that its
    reference is the whole batch in float32; `dropout`, that its model drops at random.
    """

    name: str
    summary: str
    fn: Callable[..., Any]
    inputs: Callable[[Shape, torch.dtype, torch.device], tuple[Any, ...]]
    shapes: Mapping[str, Sequence[Shape]]
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    bytes_moved: Callable[[Shape, torch.dtype], int] | None = None
    model: Callable[[torch.device], torch.nn.Module] | None = None
    whole_batch: bool = False
    dropout: bool = False
    library: str | None = None
    reads_bits: bool = False
    in_float32: Callable[..., Any] | None = None

    @property
    def default_shape(self) -> Shape:
        return self.shapes["default"][0]

    def check_shape(self, shape: Shape) -> None:
        """Raise UsageError unless `shape` has as many sizes as the default shape."""
        default = self.default_shape
        if len(shape) != len(default):
            raise UsageError(
                f"{self.name} takes {len(default)} sizes, got {','.join(map(str, shape))!r}",
                next=f"graft explain {self.name} --shape {','.join(map(str, default))}",
            )

    def check_dtype(self, dtype: str) -> None:
        """Raise UsageError unless `dtype` is one that the case is looked at in."""
        if dtype not in self.dtypes:
            raise UsageError(
                f"{self.name} is not looked at in {dtype!r}{nearest(dtype, self.dtypes)}",
                next=f"graft explain {self.name} --dtype {self.dtypes[0]}",
            )


def numel(*shapes: Shape) -> int:
    """Elements of all `shapes` together."""
    return sum(math.prod(shape) for shape in shapes)
