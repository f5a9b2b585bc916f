"""What a run of `graft bench models` says: the models, what lost, and where the time goes.

All of it is of a result file (`graft.bench.results`), of its first contender and of `patched` (or
of the last, where there is no `patched`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench import cells
from graft.bench.results import Result, Row
from graft.bench.stats import geomean
from graft.errors import GraftError

# Two runs of one step differ by as much of the memory: the allocator's smallest segment.
_SEGMENT_BYTES = 2 << 20
# Under this share of a launched step in kernels, the host decides how long it takes; over its
# reciprocal, what was launched is not the step that the profiler saw: its work is drawn at random.
_BUSY = 0.9


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
    """Head and lines of the table of models, and at its end the geometric means by group.

    `by` says what the step's ratio is of (`step_kind`), `busy` in what share of a step that the
    host launches the judged side's kernels run. Compile times are there where they compare.
    """
    a, b = sides.base, sides.judged
    head = ["model", "group"]
    head += [f"step, {a}, us", f"step, {b}, us", f"{a} / {b}", "by", "busy"]
    head += [f"generated, {a}, us", f"generated, {b}, us", f"{a} / {b}"]
    head += [f"peak, {a}, MB", f"peak, {b}, MB", f"{a} / {b}"]
    every = [row["times"].get(label, {}) for row in rows for label in (a, b)]
    compiled = any("compile_s" in time for time in every)
    head += [f"compile, {a}, s", f"compile, {b}, s"] if compiled else []
    head += ["worst gradient", "eager's"]
    lines = []
    for row in rows:
        left, right = (row["times"].get(label, {}) for label in (a, b))
        lines.append(
            [
                row["case"],
                row.get("group", ""),
                cells.cell(left),
                cells.cell(right),
                _ratio(step_ratio(row, sides)),
                step_kind(row, sides),
                f"{right['gpu_busy']:.0%}" if "gpu_busy" in right else "",
                _number(left.get("triton_us"), 1),
                _number(right.get("triton_us"), 1),
                _ratio(generated_ratio(row, sides)),
                _number(left.get("peak_bytes"), 0, 1e6),
                _number(right.get("peak_bytes"), 0, 1e6),
                _ratio(peak_ratio(row, sides)),
                *([_number(time.get("compile_s"), 1) for time in (left, right)] * compiled),
                *_errors(right),
            ]
        )
    for group in dict.fromkeys(row.get("group", "") for row in rows):
        of = [row for row in rows if row.get("group", "") == group]
        measured = [row for row in of if step_ratio(row, sides) is not None]
        lines.append(_means(f"mean of {len(measured)}", group, measured, sides, head))
    return head, lines


def step_kind(row: Row, sides: Sides) -> str:
    """What a step's ratio is of: `graph`, `launches`, or `kernels`.

    A step that was captured is timed as the GPU does it, without the host. One that cannot be
    captured is timed as it is launched; where the host is what takes the time, which differs from
    turn to turn by more than 1 %, or where kernels take more time than the step, whose work is not
    the same each time, the sums of its kernels are compared.
    """
    both = [row["times"].get(label, {}) for label in (sides.base, sides.judged)]
    if not all("us" in time for time in both):
        return ""
    if all(time.get("captured") for time in both):
        return "graph"
    busy = [time.get("gpu_busy", 1.0) for time in both]
    return "launches" if all(_BUSY <= share <= 1 / _BUSY for share in busy) else "kernels"


def step_ratio(row: Row, sides: Sides) -> float | None:
    """Time of the base's step over the judged one's, of what `step_kind` says."""
    if step_kind(row, sides) == "kernels":
        sums = [
            row["times"][label]["triton_us"] + row["times"][label]["rest_us"]
            for label in (sides.base, sides.judged)
        ]
        return float(sums[0] / sums[1])
    return cells.speedup(row, sides.base, sides.judged)


def generated_ratio(row: Row, sides: Sides) -> float | None:
    """GPU time of the base's generated kernels over that of the judged one's."""
    return _fact_ratio(row, sides, "triton_us")


def peak_ratio(row: Row, sides: Sides) -> float | None:
    """Peak memory of the base's step over that of the judged one's."""
    return _fact_ratio(row, sides, "peak_bytes")


def _fact_ratio(row: Row, sides: Sides, fact: str) -> float | None:
    base, judged = (row["times"].get(label, {}).get(fact) for label in (sides.base, sides.judged))
    return float(base / judged) if base and judged else None


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
        # The base of a model that drops at random may not have been checked.
        if "wrong" in judged and "wrong" not in base:
            out.append(f"{name}: {sides.judged} is wrong: {judged['wrong']}")
        for what, ratio in (
            ("step", step_ratio(row, sides)),
            ("generated kernels", generated_ratio(row, sides)),
        ):
            if ratio is not None and 1 / ratio - 1 > max_loss:
                of = f", by its {step_kind(row, sides)}" if what == "step" else ""
                out.append(f"{name}: {what} {1 / ratio - 1:.1%} slower{of}")
        more = judged.get("peak_bytes", 0) - base.get("peak_bytes", 0)
        if more > _SEGMENT_BYTES:
            out.append(f"{name}: peak memory {more / 1e6:.0f} MB over {sides.base}'s")
    return out


@dataclass(frozen=True)
class Group:
    """Kernels of a model that write the same values on both sides (`graft.bench.kernel_groups`).

    `base_us` and `us` are microseconds a step, None where a side has no kernel for it, as what it
    computes is in another's. `bounds` says that the limit is an upper bound, and why.
    """

    model: str
    base: tuple[str, ...]
    judged: tuple[str, ...]
    launches: int
    base_us: float | None
    us: float | None
    limit_us: float
    bounds: tuple[str, ...]

    @property
    def lost_us(self) -> float:
        """Microseconds a step over the limit, on the judged side."""
        return 0.0 if self.us is None else self.us - self.limit_us


def groups(result: Result) -> list[Group]:
    """The groups of kernels of every model; what is furthest over its limit comes first.

    Raises GraftError where no row has kernels.
    """
    sides = Sides.of(result)
    found = [
        _group(row["case"], group, sides)
        for row in result["rows"]
        for group in row.get("generated", {}).get("groups", ())
    ]
    found = [group for group in found if group.base or group.judged]
    if not found:
        raise GraftError(
            "no row has generated kernels: training steps alone have them",
            next="graft bench models --out FILE",
        )
    return sorted(found, key=lambda group: -group.lost_us)


def kernels(found: Sequence[Group], sides: Sides) -> tuple[list[str], list[list[str]]]:
    """Head and lines of the table of groups of kernels, in their order.

    A group is named by its first kernel on the judged side, and how many more there are on each.
    """
    a, b = sides.base, sides.judged
    head = ["model", "kernels", "launches", f"{a}, us", f"{b}, us", f"{a} / {b}"]
    head += ["limit, us", "lost, us", "time / limit", "bound"]
    lines = []
    for group in found:
        ratio = f"{group.base_us / group.us:.2f}" if group.us and group.base_us else ""
        lines.append(
            [
                group.model,
                _name(group, sides),
                str(group.launches),
                _number(group.base_us, 1),
                _number(group.us, 1),
                ratio,
                f"{group.limit_us:.1f}",
                f"{group.lost_us:.1f}",
                f"{group.us / group.limit_us:.2f}" if group.us and group.limit_us else "",
                ", ".join(group.bounds),
            ]
        )
    return head, lines


def _name(group: Group, sides: Sides) -> str:
    first = (group.judged or group.base)[0]
    if (len(group.base), len(group.judged)) == (1, 1):
        return first
    return f"{first} ({sides.base} {len(group.base)}, {sides.judged} {len(group.judged)})"


def _group(model: str, group: Mapping[str, Any], sides: Sides) -> Group:
    def side(label: str) -> tuple[tuple[str, ...], float | None, int]:
        mine = [(name, *took[label]) for name, took in group["kernels"] if label in took]
        us = math.fsum(us for _, _, us in mine) if mine else None
        return tuple(name for name, _, _ in mine), us, sum(launches for _, launches, _ in mine)

    base, base_us, base_launches = side(sides.base)
    judged, us, launches = side(sides.judged)
    return Group(
        model,
        base,
        judged,
        launches if judged else base_launches,
        base_us,
        us,
        group["limit_us"],
        tuple(group.get("bounds", ())),
    )


def _means(
    name: str, group: str, rows: Sequence[Row], sides: Sides, head: Sequence[str]
) -> list[str]:
    cells = [name, group, *([""] * (len(head) - 2))]
    column = f"{sides.base} / {sides.judged}"
    places = [i for i, title in enumerate(head) if title == column]
    for place, ratio in zip(places, (step_ratio, generated_ratio, peak_ratio), strict=True):
        ratios = [found for row in rows if (found := ratio(row, sides)) is not None]
        cells[place] = f"{geomean(ratios):.3f}" if ratios else ""
    return cells


def _errors(time: Mapping[str, Any]) -> list[str]:
    """The judged side's worst gradient: its error, and eager's under autocast."""
    outputs = time.get("outputs", ())
    if len(outputs) < 2:
        return ["", ""]  # of what was not checked
    error, eager = (outputs[1][name] for name in ("error", "eager_error"))
    cells = ["inf" if value is None else f"{value:.1e}" for value in (error, eager)]
    return [cells[0] + (" wrong" if "wrong" in time else ""), cells[1]]


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "" if value is None else f"{value / unit:.{digits}f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
