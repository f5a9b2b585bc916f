"""Other people's kernels: the standalone repros of a better-benchmark checkout, as cases.

The checkout holds `repros/canonical/NAME/repro.py` (a module `Repro`) and `shapes.json` (its
points); its own `repro_harness` makes the inputs. Nothing of it is part of this project.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.bench.plan import Point
from graft.errors import GraftError, UsageError

_FOLDER = Path("repros") / "canonical"
_RANDOM = re.compile(r"inductor_(random|randint|seed)|aten\.(rand|bernoulli|native_dropout)")
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")
CAPTURED = "captured"  # the dtype of a point whose tensors bring their own


@dataclass(frozen=True)
class CorpusCase:
    """A repro, with the fields of `graft.cases.Case` that a measurement reads.

    A shape is `(i,)`: the i-th point of `shapes.json`. `random` says that it draws random
    numbers, so that no two implementations return the same.
    """

    name: str
    fn: Callable[..., Any]
    inputs: Callable[..., tuple[Any, ...]]
    random: bool
    bytes_moved: None = None
    model: None = None


def select(checkout: Path, wanted: Sequence[str], points: str) -> list[Point]:
    """The points of the repros that `wanted` names, by glob, number or range of numbers.

    Numbers count the folders in alphabetical order, from 0. `points` is `first`, `all`, or
    point numbers by commas. Raises GraftError for a checkout that is none, UsageError for a
    name that means nothing.
    """
    root = checkout / _FOLDER
    names = sorted(path.parent.name for path in root.glob("*/repro.py"))
    if not names:
        raise GraftError(
            f"{checkout} has no {_FOLDER}/*/repro.py: it is no checkout of better-benchmark",
            next="git clone https://github.com/eellison/better-benchmark",
        )
    chosen: dict[str, None] = {}
    for word in wanted or ["*"]:
        number = _NUMBERS.fullmatch(word)
        if number:
            first = int(number[1])
            hits = names[first : int(number[2] or first) + 1]
        else:
            hits = fnmatch.filter(names, word)
        if not hits:
            raise UsageError(f"{word!r} names no kernel of {len(names)} in {root}")
        chosen.update(dict.fromkeys(hits))
    out = []
    for name in chosen:
        for i in _points(root / name / "shapes.json", points):
            out.append(Point(name, (i,), CAPTURED, "corpus", str(checkout)))
    return out


def load(checkout: Path, name: str) -> CorpusCase:
    """Import a repro, in the process that runs it."""
    file = checkout / _FOLDER / name / "repro.py"
    source = file.read_text()
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    spec = importlib.util.spec_from_file_location(f"graft_corpus_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    harness: Any = importlib.import_module("repro_harness")
    configs = list(harness.load_shape_configs(str(file)).values())

    def inputs(shape: tuple[int, ...], dtype: Any, device: Any) -> tuple[Any, ...]:
        return tuple(harness.make_inputs_from_config(configs[shape[0]]))

    return CorpusCase(name, module.Repro(), inputs, bool(_RANDOM.search(source)))


def _points(file: Path, wanted: str) -> list[int]:
    try:
        count = len(json.loads(file.read_text())["points"])
    except (OSError, ValueError, KeyError) as error:
        raise GraftError(f"{file}: no points to measure ({error!r})") from None
    if wanted in ("default", "first"):
        return [0]
    if wanted == "all":
        return list(range(count))
    numbers = [int(word) for word in wanted.split(",") if word.isdigit()]
    if not numbers:
        raise UsageError(f"--shapes {wanted}: with --corpus, expected first, all or numbers")
    return [i for i in numbers if i < count]
