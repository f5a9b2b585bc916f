"""Tables in Markdown pages, generated from result files and checked against them.

A page marks a table by comments, and what stands between them is written by `graft bench tables`:

    <!-- table: bench/results/FILE.json case=rms_norm_backward dtype=bf16 -->
    <!-- /table -->

Words after the file filter rows (`case=`, `group=`, `dtype=`, globs allowed) or choose
`view=rows` (one row a point, the default), `view=cases` (one row a case: geometric means), or
`view=agreement again=bench/results/OTHER.json` (how far apart two runs of the same thing are),
`view=models` and `view=kernels top=20` (what `graft bench models` and its `--kernels` show), and
`columns=`: labels of contenders by commas, all by default. `graft.outcome_tables` has the views of
what `graft upstream-tests` and `graft opinfo` write.
"""

from __future__ import annotations

import fnmatch
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from graft import outcome_tables
from graft.bench import agreement, results, shapes
from graft.bench.stats import geomean
from graft.errors import GraftError

# A marker starts its line: one that is indented, or inside a sentence, is text about markers.
_OPEN = re.compile(r"^<!-- table:", re.M)
_TABLE = re.compile(
    r"^(?P<open><!-- table: (?P<spec>[^>]*?) -->\n)"
    r"(?:(?!^<!-- table:).)*?"
    r"^(?P<close><!-- /table -->)",
    re.M | re.S,
)
_FILTERS = ("case", "group", "dtype")


def pages(root: Path) -> list[Path]:
    """The Markdown pages that may hold tables."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("bench/**/*.md")]
    return sorted(found)


def stale(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Each page whose tables and their files disagree: path, text as it is, text as due.

    Raises GraftError for a marker without its end, a word that is none, a file that is not there.
    """
    for page in pages(root):
        text = page.read_text()
        due = update(text, root, page.name)
        if due != text:
            yield page, text, due


def update(text: str, root: Path, where: str) -> str:
    """The page's text with each table as its file says."""

    def replace(found: re.Match[str]) -> str:
        spec = found["spec"].split()
        return f"{found['open']}{table(spec, root, where)}\n{found['close']}"

    opened = len(_OPEN.findall(text))
    due, count = _TABLE.subn(replace, text)
    if count != opened:
        raise GraftError(f"{where}: {opened - count} of {opened} tables lack <!-- /table -->")
    return due


def table(spec: Sequence[str], root: Path, where: str) -> str:
    """The Markdown table that a marker's words ask for."""
    if not spec:
        raise GraftError(f"{where}: a table marker names no result file")
    options = dict(word.partition("=")[::2] for word in spec[1:])
    if options.get("view") in outcome_tables.VIEWS:
        return outcome_tables.table(root / spec[0], options["view"])
    result = results.load(root / spec[0])
    if options.get("view") == "agreement":
        if set(options) != {"view", "again"}:
            raise GraftError(f"{where}: view=agreement of {spec[0]} takes again=FILE and no more")
        return apart(result, results.load(root / options["again"]))
    of_models = options.get("view") in ("models", "kernels")
    known = {*_FILTERS, "view", *(["top"] if of_models else ["columns"])}
    unknown = set(options) - known
    if unknown:
        raise GraftError(f"{where}: table of {spec[0]}: {unknown.pop()} is no option of a table")
    rows = [
        row
        for row in result["rows"]
        if all(
            fnmatch.fnmatchcase(str(row.get(name)), options[name])
            for name in _FILTERS
            if name in options
        )
    ]
    labels = options.get("columns", ",".join(result["contenders"])).split(",")
    missing = set(labels) - set(result["contenders"])
    if missing or not rows:
        what = f"contender {missing.pop()}" if missing else "row that the marker selects"
        raise GraftError(f"{where}: {spec[0]} has no {what}")
    view = options.get("view", "rows")
    if of_models:
        return _models(view, {**result, "rows": rows}, options.get("top", "0"), where)
    views = {"rows": by_row, "cases": by_case}
    if view not in views:
        raise GraftError(
            f"{where}: table of {spec[0]}: view={view}, expected rows, cases, models, kernels or"
            " agreement"
        )
    return views[view](rows, labels)


def _models(view: str, result: results.Result, top: str, where: str) -> str:
    from graft.bench import models_report

    if not top.isdigit():
        raise GraftError(f"{where}: top={top} is no number")
    sides = models_report.Sides.of(result)
    if view == "models":
        return _markdown(*models_report.models(result["rows"], sides), 2)
    found = models_report.groups(result)[: int(top) or None]
    return _markdown(*models_report.kernels(found, sides), 2)


def by_row(rows: Sequence[results.Row], labels: Sequence[str]) -> str:
    """One line a point: limit, each contender's median in us, patched's share of the limit.

    The share is the last contender's where patched is none of them. Training steps have no limit:
    theirs is the split into Triton's kernels and the rest.
    """
    one_case = len({row["case"] for row in rows}) == 1
    one_dtype = len({row["dtype"] for row in rows}) == 1
    lead = [*([] if one_case else ["case"]), "shape", *([] if one_dtype else ["dtype"])]
    base, judged = labels[0], "patched" if "patched" in labels else labels[-1]
    limits = any("limit_us" in row for row in rows)
    head = [*lead, *(["limit, us"] if limits else []), *(f"{label}, us" for label in labels)]
    if len(labels) > 1:
        head += [f"{base} / {label}" for label in labels[1:]]
    steps = any("triton_us" in time for row in rows for time in row["times"].values())
    if steps:
        head += [f"{part}, {label}, us" for label in labels for part in ("Triton", "rest")]
    elif limits:
        head += [f"SOL, {judged}"]
    lines = []
    for row in rows:
        names = {"case": row["case"], "shape": shapes.text(tuple(row["shape"]))}
        cells = [{**names, "dtype": row["dtype"]}[name] for name in lead]
        if limits:
            cells.append(f"{row['limit_us']:.1f}" if "limit_us" in row else "")
        cells += [cell(row["times"].get(label, {"absent": ""})) for label in labels]
        cells += [_speedup(row, base, label) for label in labels[1:]]
        if steps:
            cells += [
                f"{row['times'].get(label, {}).get(part, math.nan):.0f}".replace("nan", "")
                for label in labels
                for part in ("triton_us", "rest_us")
            ]
        elif limits:
            sol = row["times"].get(judged, {}).get("sol")
            cells.append(f"{sol:.0%}" if sol else "")
        lines.append(cells)
    return _markdown(head, lines, len(lead))


def by_case(rows: Sequence[results.Row], labels: Sequence[str]) -> str:
    """One line a case and dtype: points, geometric mean and worst of the ratios to the first."""
    base = labels[0]
    head = ["case", "dtype", "points"]
    for label in labels[1:]:
        head += [f"{base} / {label}", "worst", "at"]
    head.append("failed")
    found: dict[tuple[str, str], list[results.Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["dtype"]), []).append(row)
    lines = []
    for (case, dtype), group in found.items():
        cells = [case, dtype, str(len(group))]
        for label in labels[1:]:
            ratios = [
                (ratio, shapes.text(tuple(row["shape"])))
                for row in group
                if (ratio := speedup(row, base, label)) is not None
            ]
            if ratios:
                worst, at = min(ratios)
                cells += [f"{geomean(ratio for ratio, _ in ratios):.3f}", f"{worst:.3f}", at]
            else:
                cells += ["", "", ""]
        failures = [
            f"{label}: {count}"
            for label in labels
            if (count := sum("error" in row["times"].get(label, {}) for row in group))
        ]
        cells.append(", ".join(failures))
        lines.append(cells)
    return _markdown(head, lines, 2)


def apart(before: results.Result, after: results.Result) -> str:
    """One line a case and contender, or ratio of two: how far apart two runs of it are."""
    groups: dict[tuple[str, str], list[agreement.Repeat]] = {}
    for repeat in agreement.repeats(before, after):
        groups.setdefault((repeat.case, repeat.what), []).append(repeat)
    lines = []
    for (case, what), group in groups.items():
        worst = max(group, key=lambda repeat: repeat.apart)
        median = statistics.median(repeat.apart for repeat in group)
        at = worst.key.split(" ")[1]
        lines.append([case, what, str(len(group)), f"{median:.1%}", f"{worst.apart:.1%}", at])
    return _markdown(["case", "what", "points", "median", "worst", "at"], lines, 2)


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


def speedup(row: results.Row, base: str, label: str) -> float | None:
    """Time of `base` over time of `label`: paired where the row has it, else of the medians."""
    paired = row.get("speedup", {})
    times = row["times"]
    if next(iter(times)) == base and label in paired:
        return float(paired[label]["median"])
    if "us" in times.get(base, {}) and "us" in times.get(label, {}):
        return float(times[base]["us"]["median"] / times[label]["us"]["median"])
    return None


def _speedup(row: results.Row, base: str, label: str) -> str:
    ratio = speedup(row, base, label)
    return "" if ratio is None else f"{ratio:.2f}"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---" if i < left else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))
