"""What `graft explain` and `graft bench` compile: functions of tensors and training steps."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graft.errors import UsageError, nearest
from graft.places import ROOT

FOLDER = ROOT / "bench" / "cases"
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


@functools.cache
def load_all(folder: Path = FOLDER) -> dict[str, Case]:
    """Every case of the modules in `folder`, by name."""
    found: dict[str, Case] = {}
    for path in sorted(folder.glob("*.py")):
        for case in getattr(_module(path), "CASES", ()):
            if case.name in found:
                raise UsageError(f"{path}: there is another case called {case.name!r}")
            found[case.name] = case
    return found


def find(name: str) -> Case:
    """The case or the model called `name`, or what `file.py:attribute` names. Raises UsageError."""
    if ":" in name:
        return _from_file(name)
    known = load_all()
    if name not in known:
        from graft.cases import models

        if name in models.catalogue():
            return models.case(models.catalogue()[name])
        raise UsageError(
            f"there is no case called {name!r}{nearest(name, known)}", next="graft explain --list"
        )
    return known[name]


@functools.cache
def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"graft_case_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where Dynamo looks up the globals of what it traces
    spec.loader.exec_module(module)
    return module


def _from_file(name: str) -> Case:
    """`file.py:attribute`, a Case or a function of a device that returns (fn or model, inputs)."""
    file, _, attribute = name.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {file!r} (in {name!r})")
    module = _module(path)
    found = getattr(module, attribute, None)
    if found is None:
        raise UsageError(f"{file} has no {attribute!r}{nearest(attribute, vars(module))}")
    if isinstance(found, Case):
        return found
    if not callable(found) or len(inspect.signature(found).parameters) != 1:
        raise UsageError(
            f"{name} is neither a graft.cases.Case nor a function that takes a device and returns "
            "(function, inputs) or (model, inputs)"
        )
    return _from_function(attribute, found)


def _from_function(name: str, build: Callable[[torch.device], tuple[Any, tuple[Any, ...]]]) -> Case:
    target, _ = build(torch.device("meta"))
    is_model = isinstance(target, torch.nn.Module)
    return Case(
        name=name,
        summary=inspect.getdoc(build) or name,
        fn=(lambda model, *inputs: model(*inputs)) if is_model else target,
        inputs=lambda shape, dtype, device: tuple(build(device)[1]),
        shapes={"default": [()]},
        model=(lambda device: build(device)[0]) if is_model else None,
    )
