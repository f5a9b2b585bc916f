"""What `graft explain` and `graft bench` compile: functions of tensors and training steps."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from graft.cases import models
from graft.cases.case import DTYPES, Case, Shape, numel
from graft.errors import GraftError, UsageError, nearest, said
from graft.places import ROOT

__all__ = ["DTYPES", "FOLDER", "Case", "Shape", "available", "files", "find", "load_all", "numel"]

FOLDER = ROOT / "bench" / "cases"


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


@functools.cache
def files(folder: Path = FOLDER) -> dict[str, str]:
    """The stem of the file that defines each case of `folder`, by the case's name."""
    return {
        case.name: path.stem
        for path in sorted(folder.glob("*.py"))
        for case in getattr(_module(path), "CASES", ())
    }


def find(name: str) -> Case:
    """The case or the model called `name`, or what `file.py:attribute` names. Raises UsageError.

    A case of another package's code, and a model, has that imported; GraftError says that it is
    missing.
    """
    if ":" in name:
        return _from_file(name)
    known = load_all()
    if name not in known:
        if "/" in name or name.endswith(".py"):
            raise UsageError(f"{name!r} is no case; of a file: FILE.py:FUNCTION")
        if name in models.catalogue():
            model = models.catalogue()[name]
            with _calling(name, model.library, "models"):
                models.imported(model.library)
            return models.case(model)
        raise UsageError(
            f"there is no case called {name!r}{nearest(name, known)}", next="graft explain --list"
        )
    case = known[name]
    if case.library is not None:
        with _calling(name, case.library, "cases"):
            importlib.import_module(case.library)
    return case


def available(case: Case) -> bool:
    """Whether what its code is of is installed here. Imports nothing."""
    return case.library is None or importlib.util.find_spec(case.library) is not None


@contextlib.contextmanager
def _calling(name: str, library: str, extra: str) -> Iterator[None]:
    """Where `name` imports its `library`, which `extra` of this project installs."""
    try:
        yield
    except Exception as error:  # whatever a library's import raises
        why = said(error) or type(error).__name__
        raise GraftError(
            f"{name} calls {library}, which {sys.executable} cannot import: {why}",
            next=f"pip install -e '{ROOT}[{extra}]'; or PYTHONPATH=DIR, with {library} in it",
        ) from None


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
    if path.suffix != ".py":
        raise UsageError(f"{file} is no Python file", next="graft explain FILE.py:FUNCTION")
    module = _module(path)
    found = getattr(module, attribute, None)
    if found is None:
        defined = [
            key
            for key, value in vars(module).items()
            if isinstance(value, Case) or getattr(value, "__module__", None) == module.__name__
        ]
        raise UsageError(f"{file} has no {attribute!r}{nearest(attribute, defined)}")
    if isinstance(found, Case):
        return found
    if not callable(found) or len(inspect.signature(found).parameters) != 1:
        raise UsageError(
            f"{name} is neither a graft.cases.Case nor a function that takes a device and returns "
            "(function, inputs) or (model, inputs)"
        )
    return _from_function(attribute, found)


def _from_function(name: str, build: Callable[[torch.device], tuple[Any, tuple[Any, ...]]]) -> Case:
    try:
        target, _ = build(torch.device("meta"))
    except (RuntimeError, AssertionError) as error:
        # Of `.cuda()`, too, where there is no driver.
        raise UsageError(
            f"{name} does not make its model and inputs: {said(error)}",
            next="all of it goes to the device that it is given: model.to(device), inputs as well",
        ) from error
    is_model = isinstance(target, torch.nn.Module)
    return Case(
        name=name,
        summary=inspect.getdoc(build) or name,
        fn=(lambda model, *inputs: model(*inputs)) if is_model else target,
        inputs=lambda shape, dtype, device: tuple(build(device)[1]),
        shapes={"default": [()]},
        model=(lambda device: build(device)[0]) if is_model else None,
    )
