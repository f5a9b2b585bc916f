"""Tests on stock and on patched, side by side: what differs, and what explains it.

What differs is run again, each test by itself, and the second outcome counts: with many processes
on a GPU, some tests fail for want of memory.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from graft.errors import GraftError
from graft.places import without_folders
from graft.testing.runner import OUTCOMES, Result
from graft.upstream.differences import Difference
from graft.upstream.testpool import Pool, Side

if TYPE_CHECKING:
    from rich.console import Console

NOT_RUN = "not run"
"""The outcome on stock of a test that passes on patched, where that was run first."""

_NOWHERE = ""  # of what was not run on patched

CHANCE = 200
"""So many tests that differ are no chance, and are not run again one by one."""


@dataclass(frozen=True)
class Row:
    """One test on both sides; None where it is not there.

    `before` has the outcomes of the first run, where the test was run again; `meant` what explains
    that they differ.
    """

    test: str
    stock: Result | None
    patched: Result | None
    before: tuple[str, str] | None = None
    meant: Difference | None = None

    @property
    def outcomes(self) -> tuple[str, str]:
        """Stock's and patched's, in a word each."""
        return _outcome(self.stock), _outcome(self.patched)

    @property
    def differs(self) -> bool:
        """The outcomes are not the same."""
        return len(set(self.outcomes) - {NOT_RUN}) > 1

    @property
    def is_unsteady(self) -> bool:
        """A side's second outcome is not its first."""
        return self.before is not None and self.before != self.outcomes

    @property
    def is_broken(self) -> bool:
        """It passes on stock, on patched it fails or is gone, and nothing explains it."""
        stock, patched = self.outcomes
        gone = patched in ("failed", "error", "missing")
        return stock == "passed" and gone and self.meant is None

    @property
    def rank(self) -> tuple[bool, ...]:
        """What broke first, then what else differs, is unsteady, is meant, and the rest."""
        unexplained = self.differs and self.meant is None
        return not self.is_broken, not unexplained, not self.is_unsteady, not self.differs


def _outcome(result: Result | None) -> str:
    return result.outcome if result else "missing"


@dataclass(frozen=True)
class Comparison:
    """Every test that has been run on both sides, what broke first.

    `changed` maps a test file to the patches that change it on the patched side; `pending` counts
    the tests that were not reached on a side, `waiting` those of them that wait for stock, by what
    came of them on patched; `stale` are meant differences that did not occur; `about` says
    what ran where. Of files that are not the pin's (not `of_pin`), `gone` has the names that each
    imports and a side lacks, `refused` the patches whose hunks do not apply to it.
    """

    rows: Sequence[Row]
    changed: Mapping[str, list[str]] = field(default_factory=dict)
    pending: int = 0
    waiting: Mapping[str, int] = field(default_factory=dict)
    stale: Sequence[Difference] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    gone: Mapping[str, list[str]] = field(default_factory=dict)
    refused: Mapping[str, list[str]] = field(default_factory=dict)
    of_pin: bool = True

    @property
    def broken(self) -> list[Row]:
        """The rows for which the comparison fails."""
        return [row for row in self.rows if row.is_broken]

    @property
    def unread(self) -> list[Row]:
        """The rows of files that pytest cannot read on a side: nothing of them was run there."""
        return [row for row in self.rows if "::" not in row.test]

    @property
    def differing(self) -> list[Row]:
        """Every row that differs or is unsteady."""
        return [row for row in self.rows if row.differs or row.is_unsteady]

    def counts(self) -> dict[str, dict[str, Any]]:
        """For each file: tests, outcomes of both sides, how many differ, and how many broke."""
        found: dict[str, dict[str, Any]] = {}
        for row in sorted(self.rows, key=lambda row: row.test):
            of = found.setdefault(
                row.test.partition("::")[0],
                {"tests": 0, "differ": 0, "broken": 0, "stock": Counter(), "patched": Counter()},
            )
            of["tests"] += 1
            of["differ"] += row.differs
            of["broken"] += row.is_broken
            for side, outcome in zip(("stock", "patched"), row.outcomes):
                of[side][outcome] += 1
        return found

    def as_json(self) -> dict[str, Any]:
        """Plain data: what ran, the counts, and each row that differs."""
        rows = [
            {
                "test": row.test,
                "outcomes": row.outcomes,
                "before": row.before,
                "meant": row.meant and row.meant.reason,
                "messages": [
                    without_folders(each.message) if each else ""
                    for each in (row.stock, row.patched)
                ],
            }
            for row in self.differing
        ]
        stale = [each.test for each in self.stale]
        return {
            **self.about,
            "files": self.counts(),
            "changed": dict(self.changed),
            **({"gone": dict(self.gone)} if self.gone else {}),
            **({"refused": dict(self.refused)} if self.refused else {}),
            "pending": self.pending,
            **({"waiting": dict(self.waiting)} if self.waiting else {}),
            "stale": stale,
            "differing": rows,
        }


def of_sides(
    pool: Pool,
    sides: Sequence[Side],
    files: Sequence[str],
    keyword: str = "",
    meant: Sequence[Difference] = (),
    doubted: Callable[[Row], bool] = lambda row: row.differs,
    patched_first: bool = False,
) -> Comparison:
    """Run the tests of `files` (under test/) on both sides, as far as `pool` has time.

    `keyword` is pytest's ``-k``, `meant` what explains a difference; what is `doubted` runs again.
    With `patched_first` stock, the first of `sides`, runs what does not pass on patched alone.
    """
    pool.collect(sides, files, keyword)
    if patched_first:
        _run_waiting(pool, sides, files, keyword)  # of an earlier run, which was ended
        pool.run(sides[1:], files, keyword)
        _run_waiting(pool, sides, files, keyword)
    else:
        pool.run(sides, files, keyword)
    rows, waiting = _rows(sides, files, keyword, meant, patched_first)
    doubtful = [row.test for row in rows if doubted(row) and "::" in row.test]
    if len(doubtful) <= CHANCE:
        pool.run_again(sides, doubtful)
        rows, waiting = _rows(sides, files, keyword, meant, patched_first)
    pending = waiting.total()
    del waiting[_NOWHERE]
    return Comparison(rows, {}, pending, waiting, _stale(meant, rows))


def _run_waiting(pool: Pool, sides: Sequence[Side], files: Sequence[str], keyword: str) -> None:
    """Run on stock what was run on patched and did not pass; what failed there comes first."""
    stock, patched = sides
    results = patched.state.results
    known = {test for file in files for test in patched.state.collected.get((file, keyword)) or ()}

    def failed(test: str) -> bool:
        return test in results and results[test].outcome in ("failed", "error")

    def waits(test: str) -> bool:
        return test not in known or (test in results and not _passed(results[test]))

    for wants in (failed, waits):
        pool.run([stock], files, keyword, wants)


def _passed(result: Result | None) -> bool:
    return result is not None and result.outcome == "passed"


def _rows(
    sides: Sequence[Side],
    files: Sequence[str],
    keyword: str,
    meant: Sequence[Difference],
    patched_first: bool,
) -> tuple[list[Row], Counter[str]]:
    """A row for each test that has been run wherever it is, and how many have not.

    Those are counted by what came of them on patched, where stock alone is missing.
    """
    rows: list[Row] = []
    waiting: Counter[str] = Counter()
    for file in files:
        found = [side.state.collected.get((file, keyword)) for side in sides]
        if any(tests is None for tests in found):
            results = [
                side.state.final(file) if tests is None else Result("passed", "it can be read")
                for side, tests in zip(sides, found)
            ]
            if any(result is None for result in results):
                waiting[_NOWHERE] += 1  # of an unknown number
            else:
                rows.append(Row(file.removeprefix("test/"), results[0], results[1]))
            continue
        for test in dict.fromkeys([*(found[0] or ()), *(found[1] or ())]):
            results = [side.state.final(test) for side in sides]
            there = [test in (tests or ()) for tests in found]
            if patched_first and results[0] is None and _passed(results[1]):
                results[0] = Result(NOT_RUN)
            if any(is_there and not result for is_there, result in zip(there, results)):
                stock, patched = results
                waiting[_NOWHERE if stock or not patched else patched.outcome] += 1
                continue
            before = None
            if any(test in side.state.again for side in sides):
                first = [side.state.results.get(test) for side in sides]
                before = (_outcome(first[0]), _outcome(first[1]))
            # a result without the test is of a run with other hunks on it
            kept = [result if is_there else None for is_there, result in zip(there, results)]
            rows.append(Row(test, kept[0], kept[1], before))
    explained = [
        replace(row, meant=next((m for m in meant if m.means(row.test, row.outcomes)), None))
        for row in rows
    ]
    return sorted(explained, key=lambda row: (row.rank, row.test)), waiting


def _stale(meant: Sequence[Difference], rows: Sequence[Row]) -> list[Difference]:
    """Those whose tests were run, and none of which differs in that way."""
    return [
        each
        for each in meant
        if any(each.covers(row.test) for row in rows) and not any(row.meant == each for row in rows)
    ]


# --- showing -------------------------------------------------------------------------------------


def check_read(found: Comparison) -> None:
    """Raise GraftError where pytest cannot read a file: nothing of it was run there.

    A file of another commit that stock cannot read either is no fault of the patches: it is
    reported, and an error only where nothing else was run.
    """
    for row in found.unread:
        if not found.of_pin and not row.differs and len(found.unread) < len(found.rows):
            continue
        broken = next(r for r in (row.patched, row.stock) if r and r.outcome == "error")
        lines = broken.message.splitlines()
        why = [line for line in lines if re.search(r"\w(Error|Exit|Exception): ", line)] or lines
        raise GraftError(f"{row.test}: {lines[0].partition(':')[0]}: {why[0].strip()}")


def show(found: Comparison, console: Console) -> None:
    """Print what differs, then the counts of each file, then what did not go as it should."""
    from rich.markup import escape
    from rich.table import Table

    if found.differing:
        table = Table("test", "stock", "patched", "why", box=None, pad_edge=False)
        for row in found.differing:
            style = "bold red" if row.is_broken else None if row.meant else "yellow"
            name = PurePosixPath(row.test).name
            table.add_row(escape(name), *row.outcomes, escape(_why(row)), style=style)
        console.print(table)
    files = Table("file", "tests", "stock", "patched", "differ", "broken", box=None, pad_edge=False)
    for file, of in found.counts().items():
        cells = [str(of["tests"]), _words(of["stock"]), _words(of["patched"])]
        files.add_row(PurePosixPath(file).name, *cells, str(of["differ"]), str(of["broken"]))
    console.print(files)
    for path, patches in found.changed.items():
        console.print(f"patched runs {path} as changed by {', '.join(patches)}", highlight=False)
    for path, patches in found.refused.items():
        console.print(
            f"{path} is not what {', '.join(patches)} changes: patched runs it as it is",
            highlight=False,
        )
    for path, names in found.gone.items():
        console.print(
            f"{path}: not in this torch, and what they decorate is skipped: {', '.join(names)}",
            highlight=False,
        )
    for row in found.unread:
        console.print(f"{row.test} cannot be read: {_why(row)}", highlight=False)
    for each in found.stale:
        console.print(
            f"tests/upstream-differences.toml: {each.test} does not differ in that way "
            f"({each.stock}, {each.patched}); remove the line",
            highlight=False,
        )
    differ = sum(row.differs for row in found.rows)
    unsteady = sum(row.is_unsteady for row in found.rows)
    explained = sum(row.meant is not None for row in found.rows)
    console.print(
        f"{len(found.rows)} tests, {differ} differ, {explained} explained, {unsteady} unsteady, "
        f"{len(found.broken)} broken"
    )
    if found.pending:
        wait = " and ".join(f"{n} {outcome}" for outcome, n in sorted(found.waiting.items()))
        on_patched = f" ({wait} on patched wait for stock)" if wait else ""
        console.print(
            f"{found.pending} not reached{on_patched}; the same command goes on from here",
            highlight=False,
        )


def _why(row: Row) -> str:
    if row.meant:
        return f"meant: {row.meant.reason}"
    result = row.patched if row.is_broken else row.stock
    words = (result.message if result else "").strip().partition("\n")[0][:120]
    if row.is_unsteady and row.before:
        return f"at first {', '.join(row.before)}; {words}".rstrip("; ")
    return words


def _words(counts: Mapping[str, int]) -> str:
    names = (*OUTCOMES, NOT_RUN, "missing")
    return ", ".join(f"{counts[name]} {name}" for name in names if counts.get(name)) or "none"


def write(data: Mapping[str, Any], file: Path) -> None:
    """Write a comparison's data as JSON, at once or not at all."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    aside.replace(file)
