"""Two contenders against each other, across result files or within one: who won, who lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.bench import results
from graft.bench.stats import geomean
from graft.errors import GraftError, UsageError


@dataclass(frozen=True)
class Side:
    """A result file and one of its contenders. `FILE:LABEL` on the command line."""

    path: Path
    label: str
    result: results.Result

    @property
    def name(self) -> str:
        return f"{self.path.name}:{self.label}"


@dataclass(frozen=True)
class Change:
    """A point that both sides have. `ratio` is time of A over time of B: above 1, B is faster."""

    key: str
    case: str
    group: str
    before_us: float
    after_us: float
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """All points of two sides. `broken` had a time in A and fail in B; `missing` are not in B."""

    before: Side
    after: Side
    changes: tuple[Change, ...]
    broken: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]

    def losses(self, max_loss: float) -> list[Change]:
        """Changes for the worse by more than `max_loss` (0.02 is 2 %), worst first."""
        slower = [c for c in self.changes if 1 / c.ratio - 1 > max_loss]
        return sorted(slower, key=lambda change: change.ratio)

    def wins(self, over: float) -> list[Change]:
        """Changes for the better by more than `over`, best first."""
        faster = [c for c in self.changes if c.ratio - 1 > over]
        return sorted(faster, key=lambda change: -change.ratio)

    def groups(self) -> dict[str, list[Change]]:
        """Changes by case, and by group where a case has several."""
        out: dict[str, list[Change]] = {}
        for change in self.changes:
            out.setdefault(f"{change.case} ({change.group})", []).append(change)
        return out


def parse_side(text: str, default: str) -> Side:
    """`FILE` or `FILE:LABEL`. Raises GraftError for the file, UsageError for the label."""
    path, label = Path(text), default
    if not path.exists() and ":" in text:
        name, _, label = text.rpartition(":")
        path = Path(name)
    result = results.load(path)
    if label not in result["contenders"]:
        labels = ", ".join(result["contenders"])
        raise UsageError(f"{path} has no contender {label!r}; it has {labels}")
    return Side(path, label, result)


def compare(before: Side, after: Side, across_pins: bool = False) -> Comparison:
    """Raises GraftError when the files are of different pins or GPUs, unless `across_pins`.

    Within one file, where the two took turns, a ratio is the paired one of the rounds.
    """
    if not across_pins:
        for what, ours, theirs in (
            ("pin", before.result["pin"], after.result["pin"]),
            ("GPU", _gpus(before), _gpus(after)),
        ):
            if ours != theirs:
                raise GraftError(
                    f"{after.path} is of {what} {theirs}, {before.path} of {ours}:"
                    " their times do not compare",
                    next=f"graft bench compare {before.path} {after.path} --across-pins",
                )
    ours = {results.key(row): row for row in before.result["rows"]}
    theirs = {results.key(row): row for row in after.result["rows"]}
    changes: list[Change] = []
    broken: list[tuple[str, str]] = []
    missing: list[str] = []
    for key, row in ours.items():
        left = row["times"].get(before.label, {})
        if "us" not in left:
            continue
        right = theirs.get(key, {}).get("times", {}).get(after.label)
        if right is None or "absent" in right:
            missing.append(key)
        elif "error" in right:
            broken.append((key, f"{right['error']['kind']}: {right['error']['message']}"))
        else:
            changes.append(_change(key, row, left, right, before, after))
    return Comparison(before, after, tuple(changes), tuple(broken), tuple(missing))


def parse_loss(text: str) -> float:
    """`2%` or `0.02` as 0.02. Raises UsageError."""
    try:
        value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--max-loss {text}: expected a share such as 2% or 0.02")
    return value


def summary(changes: Sequence[Change]) -> tuple[float, Change, Change]:
    """Geometric mean of the ratios, the worst change and the best one."""
    by_ratio = sorted(changes, key=lambda change: change.ratio)
    return geomean(change.ratio for change in changes), by_ratio[0], by_ratio[-1]


def render(comparison: Comparison, max_loss: float, limit: int = 20) -> str:
    """The comparison as text: one line a case and group, then who lost, broke or is missing."""
    lines = [f"{comparison.before.name} -> {comparison.after.name}; above 1, the second is faster"]
    width = max((len(name) for name in comparison.groups()), default=0)
    for name, changes in comparison.groups().items():
        mean, worst, best = summary(changes)
        lines.append(
            f"  {name:{width}}  {mean:6.3f}  n {len(changes):4}"
            f"  worst {worst.ratio:6.3f} {_shape(worst)}  best {best.ratio:6.3f} {_shape(best)}"
        )
    if comparison.changes:
        mean, worst, best = summary(comparison.changes)
        lost = comparison.losses(max_loss)
        lines.append(
            f"all: {mean:.3f} over {len(comparison.changes)};"
            f" {len(comparison.wins(max_loss))} won and {len(lost)} lost"
            f" more than {max_loss:.1%}"
        )
        for change in lost[:limit]:
            lines.append(
                f"  lost {1 / change.ratio - 1:6.1%}  {change.key}:"
                f" {change.before_us:.1f} -> {change.after_us:.1f} us"
            )
        if len(lost) > limit:
            lines.append(f"  and {len(lost) - limit} more")
    lines += [f"  broken  {key}: {why}" for key, why in comparison.broken]
    lines += [f"  missing {key}" for key in comparison.missing[:limit]]
    if len(comparison.missing) > limit:
        lines.append(f"  and {len(comparison.missing) - limit} more missing")
    if not comparison.changes:
        lines.append("no point has a time on both sides")
    return "\n".join(lines)


def failed(comparison: Comparison, max_loss: float) -> bool:
    """Whether something lost more than `max_loss`, broke, or there is nothing to compare."""
    return bool(comparison.losses(max_loss) or comparison.broken or not comparison.changes)


def _change(
    key: str,
    row: results.Row,
    left: Mapping[str, dict[str, float]],
    right: Mapping[str, dict[str, float]],
    before: Side,
    after: Side,
) -> Change:
    before_us, after_us = left["us"]["median"], right["us"]["median"]
    ratio = before_us / after_us
    paired = row.get("speedup", {})
    if before.path == after.path:
        base = next(iter(row["times"]))
        if before.label == base and after.label in paired:
            ratio = paired[after.label]["median"]
        elif after.label == base and before.label in paired:
            ratio = 1 / paired[before.label]["median"]
    return Change(key, row["case"], row.get("group", ""), before_us, after_us, ratio)


def _gpus(side: Side) -> str:
    return ", ".join(sorted({gpu.get("name", "?") for gpu in side.result["gpus"]}))


def _shape(change: Change) -> str:
    return change.key.split(" ", 1)[1]
