"""How well two runs of the same thing agree: what a difference has to exceed to mean something."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graft.bench import results

# What has to be alike for two contenders of one label to be the same thing.
_SAME = ("impl", "knobs", "version", "torch", "git", "triton")


@dataclass(frozen=True)
class Repeat:
    """A point that both runs timed: `what` is a contender, or the ratio of two of them.

    `apart` is the larger over the smaller value, less 1: 0.02 is 2 % apart.
    """

    key: str
    case: str
    what: str
    first: float
    second: float

    @property
    def apart(self) -> float:
        return max(self.first, self.second) / min(self.first, self.second) - 1


def repeated(before: results.Result, after: results.Result) -> list[str]:
    """The contenders that are the same thing in both files.

    Patched is where the stack is; what a file of another stack has in common is stock and peers.
    """
    same_stack = before["stack_hash"] == after["stack_hash"]
    out = []
    for label, ours in before["contenders"].items():
        theirs = after["contenders"].get(label)
        if theirs is None or "absent" in ours or "absent" in theirs:
            continue
        fixed = same_stack or label == "stock" or ours["impl"] != "compile"
        if fixed and all(_alike(ours.get(name), theirs.get(name)) for name in _SAME):
            out.append(label)
    return out


def repeats(before: results.Result, after: results.Result) -> list[Repeat]:
    """Every time, and every ratio to the first contender, that both runs have of the same thing."""
    labels = repeated(before, after)
    base = next(iter(before["contenders"]), None)
    theirs = {results.key(row): row for row in after["rows"]}
    out = []
    for row in before["rows"]:
        key = results.key(row)
        other = theirs.get(key)
        if other is None:
            continue
        for label in labels:
            pair = [_us(each, label) for each in (row, other)]
            if all(pair):
                out.append(Repeat(key, row["case"], label, *pair))
        for label in labels if base in labels else ():
            pair = [_ratio(each, label) for each in (row, other)]
            if all(pair):
                out.append(Repeat(key, row["case"], f"{base} / {label}", *pair))
    return out


def render(found: Sequence[Repeat], over: float, limit: int = 20) -> list[str]:
    """Lines: each contender's times and ratios by case, then all, then who is apart by more."""
    if not found:
        return []
    lines = ["what is the same in both, run twice: how far apart, median and worst"]
    groups: dict[tuple[str, str], list[Repeat]] = {}
    for repeat in found:
        groups.setdefault((repeat.case, repeat.what), []).append(repeat)
    widths = [max(len(name[i]) for name in groups) for i in (0, 1)]
    for (case, what), group in groups.items():
        lines.append(f"  {case:{widths[0]}}  {what:{widths[1]}}  {_summary(group)}")
    times = [repeat for repeat in found if "/" not in repeat.what]
    ratios = [repeat for repeat in found if "/" in repeat.what]
    for name, group in (("times", times), ("ratios", ratios)):
        if group:
            apart = sorted(repeat.apart for repeat in group)
            median = statistics.median(apart)
            within = apart[math.ceil(0.9 * len(apart)) - 1]
            far = [repeat for repeat in group if repeat.apart > over]
            lines.append(
                f"two runs agree within {median:.1%} in the median case ({name}); nine of ten"
                f" within {within:.1%}; {len(far) or 'none'} of {len(group)} over {over:.1%}"
            )
            for repeat in sorted(far, key=lambda repeat: -repeat.apart)[:limit]:
                values = f"{repeat.first:.4g} and {repeat.second:.4g}"
                unit = " us" if group is times else ""
                lines.append(f"  {repeat.apart:6.1%}  {repeat.key}, {repeat.what}: {values}{unit}")
            if len(far) > limit:
                lines.append(f"  and {len(far) - limit} more")
    return lines


def _summary(group: Sequence[Repeat]) -> str:
    worst = max(group, key=lambda repeat: repeat.apart)
    median = statistics.median(repeat.apart for repeat in group)
    at = worst.key.split(" ", 1)[1]
    return f"{median:6.1%}  {worst.apart:6.1%} at {at}, n {len(group)}"


def _alike(ours: Any, theirs: Any) -> bool:
    """Equal, or not said on one side."""
    return ours == theirs or ours is None or theirs is None


def _us(row: results.Row, label: str) -> float:
    time: Mapping[str, Any] = row["times"].get(label, {})
    return float(time["us"]["median"]) if "us" in time else 0.0


def _ratio(row: results.Row, label: str) -> float:
    return float(row.get("speedup", {}).get(label, {}).get("median", 0.0))
