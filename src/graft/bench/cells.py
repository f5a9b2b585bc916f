"""A row of a result file as cells of a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from graft.bench.results import Row


def cell(time: dict[str, object]) -> str:
    """A contender's time of a point as a cell: microseconds, the kind of its error, or nothing."""
    if "us" in time:
        us = time["us"]
        assert isinstance(us, dict)
        return f"{us['median']:.1f}"
    if "error" in time:
        error = time["error"]
        assert isinstance(error, dict)
        return str(error["kind"])
    return ""


def speedup(row: Row, base: str, label: str) -> float | None:
    """Time of `base` over time of `label`: paired where the row has it, else of the medians."""
    paired = row.get("speedup", {})
    times = row["times"]
    if next(iter(times)) == base and label in paired:
        return float(paired[label]["median"])
    if "us" in times.get(base, {}) and "us" in times.get(label, {}):
        return float(times[base]["us"]["median"] / times[label]["us"]["median"])
    return None


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    """A table; its first `left` columns are words, the others numbers."""
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))
