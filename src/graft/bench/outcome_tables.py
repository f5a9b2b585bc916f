"""Markdown tables of what `--json` of `graft upstream-tests`, `graft opinfo`,
`graft.devtools.compile_time` and `graft.devtools.buffers` wrote."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from graft.errors import GraftError
from graft.testing.runner import OUTCOMES

_REASONS = 90  # characters of a reason, at most


def table(file: Path, view: str) -> str:
    """The table `view` of `VIEWS` of a result file.

    Raises GraftError for a file that is not there, or has not what the view shows.
    """
    make, key = VIEWS[view]
    try:
        data = json.loads(file.read_text("utf-8"))
        return make(data[key])
    except OSError as missing:
        raise GraftError(f"{file}: {missing.strerror}") from missing
    except (ValueError, KeyError, TypeError) as wrong:
        raise GraftError(f"{file} has no {key} for view={view}: {wrong!r}") from wrong


def _by_file(files: Mapping[str, Any]) -> str:
    """One line a test file: how many tests, what came of them on each side, what broke."""
    lines = [
        [
            PurePosixPath(name).name,
            str(of["tests"]),
            _words(of["stock"]),
            _words(of["patched"]),
            str(of["differ"]),
            str(of["broken"]),
        ]
        for name, of in files.items()
    ]
    return _markdown(["file", "tests", "stock", "patched", "differ", "broken"], lines, "lrllrr")


def _words(counts: Mapping[str, int]) -> str:
    found = [f"{counts[name]} {name}" for name in (*OUTCOMES, "missing") if counts.get(name)]
    return ", ".join(found)


def _by_form(forms: Mapping[str, Mapping[str, int]]) -> str:
    """One line a form: cases, those that fail on each side, those with a mix-order kernel."""
    head = ["form", "cases", "not run", "fail on stock", "on patched", "new"]
    head += ["mix-order kernels: stock", "patched"]
    keys = ("cases", "skipped", "stock", "patched", "new", "fused_stock", "fused_patched")
    lines = [[name, *(str(of[key]) for key in keys)] for name, of in forms.items()]
    return _markdown(head, lines, "l" + "r" * len(keys))


def _by_reason(failing: Sequence[Mapping[str, Any]]) -> str:
    """One line a reason: in how many cases it failed each side. Numbers and names are left out."""
    counts: dict[str, Counter[int]] = {}
    for row in failing:
        for side, (outcome, message) in enumerate(zip(row["outcomes"], row["messages"])):
            if outcome in ("failed", "error"):
                counts.setdefault(_reason(message), Counter())[side] += 1
    lines = [
        [reason, str(by[0]), str(by[1])]
        for reason, by in sorted(counts.items(), key=lambda each: (-sum(each[1].values()), each[0]))
    ]
    return _markdown(["it fails because of", "stock", "patched"], lines, "lrr")


_WRONG = (  # how `graft.lab.numerics.compare` begins to say it, and its kind
    (r"(shape|dtype|strides) ", r"another {0} than eager's"),
    (r"error ", "further from float64 than eager, and than 2 ulp"),
    (r"a number where eager has NaN", "a number where eager has NaN"),
    (r"\d+ of \d+ not finite", "not finite where eager is"),
    (r"\d+ of \d+ differ", "other integers than eager's"),
    (r"two runs differ", "two runs differ"),
)


def _reason(message: str) -> str:
    """The kind of a failure: an error by its first words, without numbers."""
    kind, _, rest = message.partition("\n")[0].removeprefix("Failed: ").partition(": ")
    if kind in ("wrong", "unstable"):
        for pattern, words in _WRONG:
            if found := re.match(pattern, rest.partition(": ")[2]):
                return words.format(*found.groups())
        return kind
    text = re.sub(r"\d+", "N", rest if kind == "error" else f"{kind}: {rest}".removesuffix(": "))
    words = text if len(text) <= _REASONS else text[:_REASONS].rpartition(" ")[0] + " …"
    return words.replace("|", "\\|")


def ratios(seconds: Mapping[str, Sequence[float]], base: str) -> tuple[float, float, float]:
    """Of the rounds' patched by `base`: the median, the least and the most."""
    found = [one / other for one, other in zip(seconds["patched"], seconds[base], strict=True)]
    return statistics.median(found), min(found), max(found)


def _by_step(steps: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """One line a case: median seconds of each side, and the median of the rounds' ratios."""
    sides = [*next(iter(steps.values()), {})]
    bases = [side for side in sides if side != "patched"]
    lines = []
    for name, seconds in steps.items():
        if sides != [*seconds]:
            raise GraftError(f"{name}: its sides are {', '.join(seconds)}, not {', '.join(sides)}")
        line = [name, str(len(seconds["patched"]))]
        line += [f"{statistics.median(seconds[side]):.2f}" for side in sides]
        for base in bases:
            ratio, least, most = ratios(seconds, base)
            line.append(f"{ratio:.2f} ({least:.2f} to {most:.2f})")
        lines.append(line)
    head = ["case", "rounds", *(f"{side}, s" for side in sides)]
    head += [f"patched / {base}" for base in bases]
    return _markdown(head, lines, "l" + "r" * (len(head) - 1))


def _by_graph(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """One line a case: the most of its graphs' buffers, and what a graph has above stock's."""
    lines = []
    for name, of in rows.items():
        stock, patched = of["stock"], of["patched"]
        more = {graph: patched[graph]["bytes"] - stock[graph]["bytes"] for graph in stock}
        graph = max(more, key=more.__getitem__)
        most = [max(each["bytes"] for each in side.values()) for side in (stock, patched)]
        lines.append(
            [name, str(len(stock)), *(f"{n / 1e6:.1f}" for n in most), f"{more[graph] / 1e6:+.3f}"]
        )
    head = ["case", "graphs", "stock, MB", "patched, MB", "patched − stock, most of a graph, MB"]
    return _markdown(head, lines, "lrrrr")


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]], sides: str) -> str:
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


VIEWS: Mapping[str, tuple[Callable[[Any], str], str]] = {
    "tests": (_by_file, "files"),
    "operators": (_by_form, "forms"),
    "reasons": (_by_reason, "failing"),
    "compile": (_by_step, "steps"),
    "buffers": (_by_graph, "buffers"),
}
"""Words behind ``view=`` in a page's marker: how the table is made, of which part of the file."""
