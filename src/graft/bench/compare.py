"""Two contenders against each other, across result files or within one: who won, who lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.bench import agreement, results
from graft.bench.stats import geomean
from graft.errors import GraftError, UsageError

_WINS_SHOWN = 5


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
    """A point that both sides have. `ratio` is time of A over time of B: above 1, B is faster.

    `same_code`: both were compiled to the same code, so what sets them apart is Inductor's choice
    between configurations that are near a tie, or the clock.
    """

    key: str
    case: str
    group: str
    before_us: float
    after_us: float
    ratio: float
    same_code: bool = False


@dataclass(frozen=True)
class Comparison:
    """All points of two sides. `broken` had a time in A and fail in B; `missing` are not in B."""

    before: Side
    after: Side
    changes: tuple[Change, ...]
    broken: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]

    def losses(self, max_loss: float) -> list[Change]:
        """Changes of code for the worse by more than `max_loss` (0.02 is 2 %), worst first."""
        slower = [c for c in self.changes if not c.same_code and 1 / c.ratio - 1 > max_loss]
        return sorted(slower, key=lambda change: change.ratio)

    def wins(self, over: float) -> list[Change]:
        """Changes of code for the better by more than `over`, best first."""
        faster = [c for c in self.changes if not c.same_code and c.ratio - 1 > over]
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
    """The comparison as text: a line a case and group, all, who won, lost, fails or is missing."""
    before, after = comparison.before, comparison.after
    lines = [
        f"A: {before.name}",
        f"B: {after.name}",
        "A / B is time over time: above 1, B is faster",
    ]
    lines += _table(comparison.groups())
    if comparison.changes:
        mean = geomean(change.ratio for change in comparison.changes)
        lost, won = comparison.losses(max_loss), comparison.wins(max_loss)
        lines.append(
            f"all: {mean:.3f} over {len(comparison.changes)} points; B won {len(won)} and lost"
            f" {len(lost)} by more than {max_loss:.1%}"
        )
        for word, changes, shown in (("won ", won, _WINS_SHOWN), ("lost", lost, limit)):
            for change in changes[:shown]:
                share = max(change.ratio, 1 / change.ratio) - 1
                times = f"{change.before_us:.1f} -> {change.after_us:.1f} us"
                lines.append(f"  {word} {share:6.1%}  {change.key}: {times}")
            if len(changes) > shown:
                lines.append(f"  {word} and {len(changes) - shown} more")
        lines += _same_code(comparison.changes, max_loss)
    else:
        lines.append("no point has a time in both")
    lines += [f"  fails in B  {key}: {why}" for key, why in comparison.broken]
    if comparison.missing:
        counts = Counter(key.split(" ", 1)[0] for key in comparison.missing)
        named = ", ".join(f"{case} ({count})" for case, count in counts.items())
        lines.append(f"  {len(comparison.missing)} points of A have no time in B: {named}")
    if before.path != after.path:
        lines += agreement.render(agreement.repeats(before.result, after.result), max_loss, limit)
    return "\n".join(lines)


def _same_code(changes: Sequence[Change], over: float) -> list[str]:
    """What the points that run the same code on both sides say of the measurement."""
    same = [change for change in changes if change.same_code]
    if not same:
        return []
    mean, worst, best = summary(same)
    apart = sum(max(change.ratio, 1 / change.ratio) - 1 > over for change in same)
    return [
        f"  same code at {len(same)} points: {mean:.3f}, from {worst.ratio:.3f} to"
        f" {best.ratio:.3f}; {apart} apart by more than {over:.1%}"
    ]


def _table(groups: Mapping[str, Sequence[Change]]) -> list[str]:
    """One line a group, under a head; points with their dtype are named for worst and best."""
    if not groups:
        return []
    rows = [("case", "A / B", "points", "worst", "best")]
    for name, changes in groups.items():
        mean, worst, best = summary(changes)
        ends = [f"{change.ratio:.3f} {_shape(change)}" for change in (worst, best)]
        if len(changes) == 1:
            ends = [f"      {_shape(worst)}", ""]
        rows.append((name, f"{mean:.3f}", str(len(changes)), ends[0], ends[1]))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        f"  {row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}"
        f"  {row[3]:{widths[3]}}  {row[4]}".rstrip()
        for row in rows
    ]


def failed(comparison: Comparison, max_loss: float) -> bool:
    """Whether something lost more than `max_loss`, broke, or there is nothing to compare."""
    return bool(comparison.losses(max_loss) or comparison.broken or not comparison.changes)


def _change(
    key: str,
    row: results.Row,
    left: Mapping[str, Any],
    right: Mapping[str, Any],
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
    same = left.get("code") is not None and left.get("code") == right.get("code")
    return Change(key, row["case"], row.get("group", ""), before_us, after_us, ratio, same)


def _gpus(side: Side) -> str:
    return ", ".join(sorted({gpu["name"] for gpu in side.result["gpus"] if "name" in gpu}))


def _shape(change: Change) -> str:
    return change.key.split(" ", 1)[1]
