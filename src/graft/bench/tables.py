"""Tables in Markdown pages, generated from result files and checked against them.

A page marks a table by comments, and what stands between them is written by `graft bench tables`:

    <!-- table: bench/results/FILE.json case=rms_norm_backward dtype=bf16 -->
    <!-- /table -->

Words after the file filter rows (`case=`, `group=`, `dtype=`, globs allowed), choose contenders
(`columns=`: labels by commas, all by default) and a view:

- `view=rows`: one row a point, the default;
- `view=cases`: one row a case, geometric means;
- `view=sentence of=helion to=patched`: whose time is how much of whose, in words. Pages compare
  with peers in no other (`graft.bench.claims`);
- `view=summary`: of one file or several, one row a case, or a kind of training steps;
- `view=models`: a model of `graft bench models` a row, and the means of each group;
- `view=kernels top=20`: its generated kernels, by time over limit, as with `--kernels`;
- `view=agreement again=bench/results/OTHER.json`: how far apart two runs of the same thing are;
- `view=files`, without a file: of which stack are those that the page names outside of tables;
- those of `graft.bench.outcome_tables`, of what `graft upstream-tests`, `graft opinfo` and
  `graft.devtools.compile_time` and `buffers` write.

Below each stand the stack that it is of, and the date. A page of `CURRENT` shows what is of the
stack in patches/ alone: files of another one are left out. So is one of `bench/publish.toml` that
is not measured yet, on any page.
"""

from __future__ import annotations

import fnmatch
import math
import re
import statistics
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from graft.bench import (
    agreement,
    carried,
    models_report,
    outcome_tables,
    parts,
    provenance,
    results,
    shapes,
)
from graft.bench.cells import cell, markdown, speedup
from graft.bench.stats import geomean
from graft.errors import GraftError

CURRENT = frozenset({"README.md"})
SUMMARY = "time, stock / patched (geometric mean)"
_SIDES = models_report.Sides("stock", "patched")  # of a summary
NONE_CURRENT = (
    "Of the stack as it is, nothing is measured yet (`graft bench publish`);"
    " [what was measured](docs/measured.md) of earlier ones has their dates."
)

# A marker starts its line: one that is indented, or inside a sentence, is text about markers.
_OPEN = re.compile(r"^<!-- table:", re.M)
BLOCK = re.compile(
    r"^(?P<open><!-- table: (?P<spec>[^>]*?) -->\n)"
    r"(?:(?!^<!-- table:).)*?"
    r"^(?P<close><!-- /table -->)",
    re.M | re.S,
)
_FILTERS = ("case", "group", "dtype")
# What two times of a point may differ by and count as the same, and two means of all points.
_TIE, _MEAN_TIE = 0.02, 0.005


def pages(root: Path) -> list[Path]:
    """The Markdown pages that may hold tables."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("bench/**/*.md")]
    return sorted(found)


def stale(root: Path, only: Collection[str] | None = None) -> Iterator[tuple[Path, str, str]]:
    """Each page whose tables and their files disagree: path, text as it is, text as due.

    `only` names the pages to look at, from the root; all by default. Raises GraftError for a
    marker without its end, a word that is none, a file that is not there.
    """
    for page in pages(root):
        where = page.relative_to(root).as_posix()
        if only is None or where in only:
            text = page.read_text()
            due = update(text, root, where)
            if due != text:
                yield page, text, due


def update(text: str, root: Path, where: str) -> str:
    """The text of the page at `where`, from the root, with each table as its files say."""

    def replace(found: re.Match[str]) -> str:
        spec = found["spec"].split()
        if spec == ["view=files"]:
            due = provenance.files(text, root, where)
        else:
            due = content(spec, root, where)
        return f"{found['open']}{due}\n{found['close']}"

    opened = len(_OPEN.findall(text))
    due, count = BLOCK.subn(replace, text)
    if count != opened:
        raise GraftError(f"{where}: {opened - count} of {opened} tables lack <!-- /table -->")
    return due


def content(spec: Sequence[str], root: Path, where: str) -> str:
    """What stands at a marker of the page `where`: the table, and of which stack it is."""
    files, options = _words(spec, where)
    if to_come := _to_come(files, root):
        files = [name for name in files if name not in to_come]
        if not files and where not in CURRENT:
            return f"Not measured yet: `graft bench publish --part {next(iter(to_come.values()))}`."
    hash = parts.tree_hash(root) if where in CURRENT else None
    if hash is not None:
        files = [name for name in files if hash in _stacks(root / name, root)]
    if where in CURRENT and not files:
        return NONE_CURRENT
    spec = [*files, *(f"{name}={value}" for name, value in options.items())]
    if hash is not None:
        stamps = [provenance.of_one(hash, [root / name for name in files])]
    else:
        found = (provenance.stamp(root / name, root) for name in files)
        stamps = list(dict.fromkeys(filter(None, found)))
    between = " " if options.get("view") == "sentence" else "\n\n"
    return between.join([table(spec, root, where), *(["; ".join(stamps) + "."] if stamps else [])])


def _stacks(path: Path, root: Path) -> tuple[str, str | None]:
    """The stack that a result is of, and one with the same code."""
    measured = results.load(path)["stack_hash"]
    return measured, carried.stack(path, measured, root)


def _to_come(files: Sequence[str], root: Path) -> dict[str, str]:
    """Those of `files` that are not there and a part makes, with the name of the part."""
    absent = [name for name in files if not (root / name).exists()]
    if not absent or not parts.file(root).exists():
        return {}
    published = parts.load(root)
    return {name: part.name for name in absent if (part := published.of(name))}


def _words(spec: Sequence[str], where: str) -> tuple[list[str], dict[str, str]]:
    """The files of a marker, which come first, and its options."""
    files = [word for word in spec if "=" not in word]
    if not files:
        raise GraftError(f"{where}: a table marker names no result file")
    return files, dict(word.partition("=")[::2] for word in spec if "=" in word)


def table(spec: Sequence[str], root: Path, where: str) -> str:
    """The Markdown that a marker's words ask for."""
    files, options = _words(spec, where)
    view = options.get("view", "rows")
    if view in outcome_tables.VIEWS:
        return outcome_tables.table(root / files[0], view)
    if view == "summary":
        return summary([(_title(name, root), results.load(root / name)) for name in files])
    if len(files) > 1:
        raise GraftError(f"{where}: view={view} is of one file, and {files[1]} is another")
    result = results.load(root / files[0])
    if view == "agreement":
        if set(options) != {"view", "again"}:
            raise GraftError(f"{where}: view=agreement of {files[0]} takes again=FILE and no more")
        return apart(result, results.load(root / options["again"]))
    of_models = view in ("models", "kernels")
    takes = {"of", "to"} if view == "sentence" else {"top"} if of_models else {"columns"}
    unknown = set(options) - {*_FILTERS, "view", *takes}
    if unknown:
        raise GraftError(f"{where}: table of {files[0]}: {unknown.pop()} is no option of a table")
    rows = [
        row
        for row in result["rows"]
        if all(
            fnmatch.fnmatchcase(str(row.get(name)), options[name])
            for name in _FILTERS
            if name in options
        )
    ]
    if view == "sentence":
        labels = [options.get("of", "patched"), options.get("to", "stock")]
    else:
        labels = options.get("columns", ",".join(result["contenders"])).split(",")
    missing = set(labels) - set(result["contenders"])
    if missing or not rows:
        what = f"contender {missing.pop()}" if missing else "row that the marker selects"
        raise GraftError(f"{where}: {files[0]} has no {what}")
    if of_models:
        return _models(view, {**result, "rows": rows}, options.get("top", "0"), where)
    views = {"rows": by_row, "cases": by_case, "sentence": sentence}
    if view not in views:
        raise GraftError(
            f"{where}: table of {files[0]}: view={view},"
            " expected rows, cases, sentence, summary, models, kernels or agreement"
        )
    return views[view](rows, labels)


def _models(view: str, result: results.Result, top: str, where: str) -> str:
    if not top.isdigit():
        raise GraftError(f"{where}: top={top} is no number")
    sides = models_report.Sides.of(result)
    if view == "models":
        return markdown(*models_report.models(result["rows"], sides), 2)
    found = models_report.groups(result)[: int(top) or None]
    return markdown(*models_report.kernels(found, sides), 2)


def sentence(rows: Sequence[results.Row], labels: Sequence[str]) -> str:
    """Whose time is how much of whose over all points that have both, and who is faster, in words.

    The first of the `labels` is compared with the second. A point counts as faster by over 2 %;
    points of the same code count as neither.
    """
    of, to = labels
    ratios: list[float] = []
    ahead = behind = same = 0
    for row in rows:
        ratio = _share(row, of, to)
        if ratio is None:
            continue
        ratios.append(ratio)
        if row["times"][of].get("code", of) == row["times"][to].get("code", to):
            same += 1
        else:
            ahead += 1 / ratio > 1 + _TIE
            behind += ratio > 1 + _TIE
    if not ratios:
        return f"No point has a time of {of} and one of {to}."
    mean = geomean(ratios)
    counts = {of: ahead, to: behind}
    first, last = (to, of) if mean > 1 else (of, to)
    words = f"{first} is faster, by more than 2 % at {counts[first]} {_points(counts[first])}"
    if abs(math.log(mean)) < _MEAN_TIE:
        words = f"neither is faster in the mean; {first} is by more than 2 % at {counts[first]}"
    words += f"; {last} is at {counts[last]}"
    out = [
        f"Geometric mean over {len(ratios)} {_points(len(ratios))}: {of} takes {mean:.3f} of"
        f" {to}'s time; {words}."
    ]
    if same:
        out.append(f"Both run the same code at {same} {_points(same)}.")
    if failed := len(rows) - len(ratios):
        out.append(f"At {failed} {_points(failed)} more one of them has no time.")
    return " ".join(out)


def _points(count: int) -> str:
    return "point" if count == 1 else "points"


def _share(row: results.Row, of: str, to: str) -> float | None:
    """Time of `of` over time of `to`, paired where the row has it."""
    if not {of, to} <= set(row["times"]):
        return None
    if next(iter(row["times"])) == to:
        ratio = speedup(row, to, of)
        return None if ratio is None else 1 / ratio
    return speedup(row, of, to)


def summary(files: Sequence[tuple[str, results.Result]]) -> str:
    """Results by title: a row a case and dtype; of training steps one for all of a group, and one
    for their generated kernels.

    Raises GraftError for a result without stock and patched.
    """
    lines: list[list[str]] = []
    for title, result in files:
        if not {"stock", "patched"} <= set(result["contenders"]):
            found = ", ".join(result["contenders"])
            raise GraftError(f"{title}: a summary is of stock and patched, not of {found}")
        steps = any("triton_us" in time for row in result["rows"] for time in row["times"].values())
        groups: dict[str, list[results.Row]] = {}
        for row in result["rows"]:
            name = f"{row['case']}, {row['dtype']}"
            if steps:
                # whether models were tuned on; steps have the default shapes, or those given
                named = row["group"] not in ("default", "given")
                name = f"{title}, {row['group']}".replace("_", " ") if named else title
            groups.setdefault(name, []).append(row)
        for name, rows in groups.items():
            points = [(row, _step(row)) for row in rows]
            lines.append(_summary_line(f"{name}: step" if steps else name, points, steps))
            if steps:
                points = [(row, models_report.generated_ratio(row, _SIDES)) for row in rows]
                lines.append(_summary_line(f"{name}: generated kernels", points, steps))
    return markdown(["", "points", SUMMARY, "least", "at"], lines, 1)


def _summary_line(
    name: str, points: Sequence[tuple[results.Row, float | None]], steps: bool
) -> list[str]:
    ratios = [
        (ratio, row["case"] if steps else shapes.text(tuple(row["shape"])))
        for row, ratio in points
        if ratio is not None
    ]
    if not ratios:
        return [name, "0", "", "", ""]
    worst, at = min(ratios)
    mean = geomean(ratio for ratio, _ in ratios)
    return [name, str(len(ratios)), f"{mean:.3f}", f"{worst:.3f}", at]


def _step(row: results.Row) -> float | None:
    """Time on stock over that on patched; of a model's step, what the models' own table says."""
    if any("captured" in time for time in row["times"].values()):
        return models_report.step_ratio(row, _SIDES)
    return speedup(row, "stock", "patched")


def _title(name: str, root: Path) -> str:
    """Of the part that makes the file, on its GPU or on another."""
    part = parts.load(root).like(name) if parts.file(root).exists() else None
    return part.title if part else Path(name).name.split(".")[0]


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
    return markdown(head, lines, len(lead))


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
    return markdown(head, lines, 2)


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
    return markdown(["case", "what", "points", "median", "worst", "at"], lines, 2)


def _speedup(row: results.Row, base: str, label: str) -> str:
    ratio = speedup(row, base, label)
    return "" if ratio is None else f"{ratio:.2f}"
