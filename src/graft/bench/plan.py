"""What to measure: points (a case at a shape and dtype) and contenders (who runs them)."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.bench import shapes
from graft.errors import UsageError, nearest

COMPILED = ("stock", "patched")
PEERS = ("liger", "quack", "helion")
DTYPES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Point:
    """One row of a result. `corpus` names the folder of a case that is not the project's own.

    `cost_s` is about how long it takes, where that is known.
    """

    case: str
    shape: tuple[int, ...]
    dtype: str
    group: str = "default"
    corpus: str | None = field(default=None, compare=False)
    cost_s: float = field(default=0.0, compare=False)

    @property
    def key(self) -> str:
        """What a resumed run and a comparison know the row by."""
        return f"{self.case} {shapes.text(self.shape)} {self.dtype}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "group": self.group,
            "shape": list(self.shape),
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class Contender:
    """Who runs a case: a label, what it runs with, and the knobs it sets.

    `impl` is `compile` (torch.compile), `eager`, or a peer's name. `python` starts its worker:
    the stock interpreter or the patched one.
    """

    label: str
    impl: str
    python: tuple[str, ...]
    knobs: Mapping[str, Any] = field(default_factory=dict)


def points(
    selected: Iterable[Any], wanted_shapes: str, wanted_dtypes: Sequence[str]
) -> list[Point]:
    """The points of `selected` cases, each once, in the order given.

    A dtype that a case does not take is left out for that case; a dtype that no case takes is
    a UsageError.
    """
    unknown = [dtype for dtype in wanted_dtypes if dtype not in DTYPES]
    if unknown:
        raise UsageError(f"unknown dtype {unknown[0]!r}; one of {', '.join(DTYPES)}")
    out: dict[str, Point] = {}
    cases = list(selected)
    for case in cases:
        for group, shape in shapes.resolve(wanted_shapes, case.shapes, case.name):
            for dtype in wanted_dtypes or case.dtypes:
                if dtype in case.dtypes:
                    point = Point(case.name, shape, dtype, group)
                    out.setdefault(point.key, point)
    if not out:
        takes = "; ".join(f"{case.name} takes {', '.join(case.dtypes)}" for case in cases)
        raise UsageError(f"nothing to measure in {', '.join(wanted_dtypes)}: {takes}")
    return list(out.values())


def in_turn(points: Sequence[Point]) -> list[Point]:
    """The order to measure in, so that a run which is cut has some of each case.

    The dtypes after each other; in each, the first point of every case, then the second, and so on.
    """
    dtypes = list(dict.fromkeys(point.dtype for point in points))
    turns: dict[tuple[str, str], int] = {}
    numbered = []
    for point in points:
        turn = turns.get((point.case, point.dtype), 0)
        turns[point.case, point.dtype] = turn + 1
        numbered.append((dtypes.index(point.dtype), turn, point))
    return [point for *_, point in sorted(numbered, key=lambda entry: entry[:2])]


def select(names: Sequence[str], every: Mapping[str, Any], files: Mapping[str, str]) -> list[Any]:
    """The cases that `names` mean: case names, globs, or a file of `bench/cases/`.

    `files` maps a case's name to the stem of the file that defines it. Raises UsageError for a
    name that means none.
    """
    out: dict[str, Any] = {}
    for name in names:
        hits = (
            [name]
            if name in every
            else [n for n in every if files.get(n) == name]
            or [n for n in every if fnmatch.fnmatchcase(n, name)]
        )
        if not hits:
            hint = nearest(name, {*every, *files.values()})
            raise UsageError(f"unknown case {name!r}{hint}", next="graft bench --list")
        out.update({hit: every[hit] for hit in hits})
    return list(out.values())


def parse_knobs(settings: Sequence[str], labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--set` values by contender: `knob=value` is patched's, `stock:knob=value` is stock's.

    Values are Python literals; what is none is text. Raises UsageError for a form or a label
    that is not known.
    """
    out: dict[str, dict[str, Any]] = {label: {} for label in labels}
    for setting in settings:
        name, equals, value = setting.partition("=")
        label, colon, knob = name.rpartition(":")
        if not equals or not knob:
            raise UsageError(f"--set {setting}: expected knob=value or stock:knob=value")
        label = label if colon else "patched"
        if label not in out:
            raise UsageError(f"--set {setting}: no contender {label!r}; {', '.join(labels)} run")
        try:
            out[label][knob] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            out[label][knob] = value
    return out


def contenders(
    against: str, pythons: Mapping[str, Sequence[str]], settings: Sequence[str]
) -> list[Contender]:
    """The contenders that `--against` lists, the first being what the others are compared with.

    A word is stock, patched, eager, a peer, or `label=patched` for one more run of a compiled
    side under other knobs (`--set label:knob=value`). `pythons` maps stock and patched to the
    start of their command lines; eager and peers run on stock. Raises UsageError.
    """
    kinds: dict[str, str] = {}
    for word in filter(None, against.split(",")):
        label, _, kind = word.partition("=")
        kind = kind or label
        if kind not in (*COMPILED, "eager", *PEERS) or label in kinds:
            raise UsageError(
                f"--against {against}: {word!r} is "
                + ("named twice" if label in kinds else "no contender")
                + f"; {', '.join((*COMPILED, 'eager', *PEERS))}, or label=patched"
            )
        kinds[label] = kind
    if not kinds:
        raise UsageError("--against names nobody", next="graft bench --against stock,patched")
    missing = {k for k in kinds.values() if k in COMPILED} - set(pythons)
    if missing:
        raise UsageError(f"no {missing.pop()} environment here", next="./build.sh")
    knobs = parse_knobs(settings, list(kinds))
    out = []
    for label, kind in kinds.items():
        if knobs[label] and kind not in COMPILED:
            raise UsageError(f"--set {label}:...: {kind} has no knobs of torch._inductor.config")
        python = tuple(pythons[kind if kind in COMPILED else "stock"])
        impl = "compile" if kind in COMPILED else kind
        out.append(Contender(label, impl, python, knobs[label]))
    return out


def case_file(case: Any) -> str:
    """The stem of the file that defines a case."""
    from graft.cases import files

    return files().get(case.name, "")
