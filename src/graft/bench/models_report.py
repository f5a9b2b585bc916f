"""What a run of `graft bench models` says: the models, what lost, and where the time goes.

All of it is of a result file (`graft.bench.results`), of its first contender and of `patched` (or
of the last, where there is no `patched`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench import tables
from graft.bench.results import Result, Row
from graft.bench.stats import geomean
from graft.errors import GraftError

Kernels = Sequence[Mapping[str, Any]]

# Two runs of one step differ by as much of the memory: the allocator's smallest segment.
_SEGMENT_BYTES = 2 << 20


@dataclass(frozen=True)
class Sides:
    """The labels that are compared."""

    base: str
    judged: str

    @classmethod
    def of(cls, result: Result) -> Sides:
        labels = list(result["contenders"])
        return cls(labels[0], "patched" if "patched" in labels[1:] else labels[-1])


def models(rows: Sequence[Row], sides: Sides) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of models, and at its end the geometric means by group."""
    a, b = sides.base, sides.judged
    head = ["model", "group"]
    head += [f"step, {a}, us", f"step, {b}, us", f"{a} / {b}"]
    head += [f"generated, {a}, us", f"generated, {b}, us", f"{a} / {b}"]
    head += [f"peak, {a}, MB", f"peak, {b}, MB", f"compile, {a}, s", f"compile, {b}, s"]
    head += ["worst gradient", "eager's"]
    lines = []
    for row in rows:
        left, right = (row["times"].get(label, {}) for label in (a, b))
        lines.append(
            [
                row["case"],
                row.get("group", ""),
                tables.cell(left),
                tables.cell(right),
                _ratio(step_ratio(row, sides)),
                _number(left.get("triton_us"), 1),
                _number(right.get("triton_us"), 1),
                _ratio(generated_ratio(row, sides)),
                _number(left.get("peak_bytes"), 0, 1e6),
                _number(right.get("peak_bytes"), 0, 1e6),
                _number(left.get("compile_s"), 1),
                _number(right.get("compile_s"), 1),
                *_errors(right),
            ]
        )
    for group in dict.fromkeys(row.get("group", "") for row in rows):
        of = [row for row in rows if row.get("group", "") == group]
        lines.append(_means(f"mean of {len(of)}", group, of, sides, len(head)))
    return head, lines


def step_ratio(row: Row, sides: Sides) -> float | None:
    """Time of the base's step over the judged one's."""
    return tables.speedup(row, sides.base, sides.judged)


def generated_ratio(row: Row, sides: Sides) -> float | None:
    """GPU time of the base's generated kernels over that of the judged one's."""
    base, judged = (row["times"].get(label, {}) for label in (sides.base, sides.judged))
    if base.get("triton_us") and judged.get("triton_us"):
        return float(base["triton_us"] / judged["triton_us"])
    return None


def losses(rows: Iterable[Row], sides: Sides, max_loss: float) -> list[str]:
    """A line for each thing that is worse than the base's: time, by more than `max_loss`; memory.

    What fails or is wrong where the base is not is among them.
    """
    out = []
    for row in rows:
        name = row["case"]
        base, judged = (row["times"].get(label, {}) for label in (sides.base, sides.judged))
        if "us" not in base:
            continue
        if "us" not in judged:
            error = judged.get("error", {"kind": "absent", "message": judged.get("absent", "")})
            out.append(f"{name}: {sides.judged} fails: {error['kind']}: {error['message']}")
            continue
        if "wrong" in judged and "wrong" not in base:
            out.append(f"{name}: {sides.judged} is wrong: {judged['wrong']}")
        for what, ratio in (
            ("step", step_ratio(row, sides)),
            ("generated kernels", generated_ratio(row, sides)),
        ):
            if ratio is not None and 1 / ratio - 1 > max_loss:
                out.append(f"{name}: {what} {1 / ratio - 1:.1%} slower")
        more = judged.get("peak_bytes", 0) - base.get("peak_bytes", 0)
        if more > _SEGMENT_BYTES:
            out.append(f"{name}: peak memory {more / 1e6:.0f} MB over {sides.base}'s")
    return out


@dataclass(frozen=True)
class Group:
    """Kernels of a model, of both sides, that write the same values (nodes of its FX graphs).

    `limit_us` is that of the side which must move fewer bytes. `bounds` says that these are an
    upper bound, and why.
    """

    model: str
    base: tuple[Mapping[str, Any], ...]
    judged: tuple[Mapping[str, Any], ...]
    limit_us: float
    bounds: tuple[str, ...]

    @property
    def base_us(self) -> float:
        return math.fsum(kernel["us"] for kernel in self.base)

    @property
    def us(self) -> float:
        return math.fsum(kernel["us"] for kernel in self.judged)

    @property
    def lost_us(self) -> float:
        """Microseconds a step over the limit."""
        return self.us - self.limit_us


def groups(result: Result) -> list[Group]:
    """Every generated kernel of every model, in its group; what is furthest over its limit first.

    Raises GraftError where no row has kernels.
    """
    sides = Sides.of(result)
    bandwidths = {
        gpu["index"]: gpu["copy_gb_per_s"]["median"]
        for gpu in result["gpus"]
        if "copy_gb_per_s" in gpu
    }
    found = []
    for row in result["rows"]:
        base, judged = (
            row["times"].get(label, {}).get("generated", ()) for label in (sides.base, sides.judged)
        )
        bandwidth = bandwidths.get(row.get("gpu"))
        if bandwidth and (base or judged):
            found += [_group(row["case"], *pair, bandwidth) for pair in _paired(base, judged)]
    if not found:
        raise GraftError(
            "no row has generated kernels: training steps alone have them",
            next="graft bench models --out FILE",
        )
    return sorted(found, key=lambda group: -group.lost_us)


def kernels(found: Sequence[Group], sides: Sides) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of groups of kernels, in their order."""
    a, b = sides.base, sides.judged
    head = ["model", f"kernels, {b}", f"kernels, {a}", "launches", f"{b}, us", f"{a}, us"]
    head += [f"{a} / {b}", "limit, us", "lost, us", "time / limit", "bound"]
    lines = []
    for group in found:
        lines.append(
            [
                group.model,
                _names(group.judged),
                _names(group.base),
                str(sum(kernel["launches"] for kernel in group.judged)),
                f"{group.us:.1f}",
                f"{group.base_us:.1f}",
                f"{group.base_us / group.us:.2f}" if group.us and group.base_us else "",
                f"{group.limit_us:.1f}",
                f"{group.lost_us:.1f}",
                f"{group.us / group.limit_us:.2f}" if group.limit_us else "",
                ", ".join(group.bounds),
            ]
        )
    return head, lines


def _names(found: Kernels) -> str:
    return " ".join(str(kernel["name"]).removeprefix("triton_") for kernel in found)


def _paired(base: Kernels, judged: Kernels) -> Iterator[tuple[Kernels, Kernels]]:
    """The connected parts of the two sides' kernels: what writes the same value is connected."""
    every = [*((0, kernel) for kernel in base), *((1, kernel) for kernel in judged)]
    parent = list(range(len(every)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, (_, kernel) in enumerate(every):
        for value in kernel.get("writes", ()):
            parent[root(i)] = root(first.setdefault(value, i))
    parts: dict[int, tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]] = {}
    for i, (side, kernel) in enumerate(every):
        parts.setdefault(root(i), ([], []))[side].append(kernel)
    yield from parts.values()


def _group(model: str, base: Kernels, judged: Kernels, gb_per_s: float) -> Group:
    limits = [
        math.fsum(kernel["bytes"] * kernel["launches"] for kernel in side) / gb_per_s / 1e3
        for side in (judged, base)
        if side
    ]
    bounds = {bound for kernel in (*base, *judged) for bound in kernel.get("bounds", ())}
    # What the judged side does not write at all has no limit that it could be over.
    limit_us = min(limits) if judged else 0.0
    return Group(model, tuple(base), tuple(judged), limit_us, tuple(sorted(bounds)))


def _means(name: str, group: str, rows: Sequence[Row], sides: Sides, width: int) -> list[str]:
    cells = [name, group, *([""] * (width - 2))]
    for place, ratio in ((4, step_ratio), (7, generated_ratio)):
        ratios = [found for row in rows if (found := ratio(row, sides)) is not None]
        cells[place] = f"{geomean(ratios):.3f}" if ratios else ""
    return cells


def _errors(time: Mapping[str, Any]) -> list[str]:
    """The judged side's worst gradient: its error, and eager's under autocast."""
    outputs = time.get("outputs", ())
    if len(outputs) < 2:
        return ["", ""]
    error, eager = (outputs[1][name] for name in ("error", "eager_error"))
    cells = ["inf" if value is None else f"{value:.1e}" for value in (error, eager)]
    return [cells[0] + (" wrong" if "wrong" in time else ""), cells[1]]


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
