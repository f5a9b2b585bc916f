"""Of which stack and day a figure is: what stands below each table, and at the end of a page.

A result says so itself (`stack_hash` and `date`, or `stack`); what does not, as the rows of a sweep
(`.jsonl.gz`), is listed in `bench/made.toml`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from graft.bench import carried, results
from graft.errors import GraftError
from graft.stack.pins import DEFAULT_PIN

_FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
_MARKER = re.compile(r"^<!-- table:.*?^<!-- /table -->", re.M | re.S)
_NAME = re.compile(r"`([\w./-]+\.jsonl?(?:\.gz)?)`")
_FOLDERS = ("", "steps", "counters")


def stamp(path: Path, root: Path) -> str:
    """`Stack 12a33358d1b3, 2026-11-20`: what a file was measured with, and when, if it is known.

    Raises GraftError for a `bench/made.toml` that is none.
    """
    stacks: list[str] = []
    same: str | None = None
    date = pin = points = ""
    if ".jsonl" not in path.name:
        try:
            data = json.loads(results.read_text(path))
        except (OSError, EOFError, ValueError):
            return ""
        found = data.get("stack_hash") or data.get("stack")
        stacks, date = [found] if found else [], data.get("date", "")
        same = carried.stack(path, found, root) if found else None
        for stack, day in results.earlier(data).items() if found else ():
            of_it = sum(row.get("measured", {}).get("stack") == stack for row in data["rows"])
            count = f"{of_it} point{'s' * (of_it != 1)}"
            points += f"; {count} {stack[:12]}, {day[:10]}, with the same code"
        # a table may have results of several pins: those of another than the default one say so
        if data.get("pin") != DEFAULT_PIN:
            pin = data.get("pin", "")
    folder = root / "bench" / "results"
    name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else path.name
    listed = _made(root).get(name, {})
    stacks, date = stacks or listed.get("stacks", []), date or listed.get("date", "")
    word = "Stack" if len(stacks) == 1 else "Stacks"
    names = " and ".join(stack[:12] for stack in stacks)
    said = ", ".join(filter(None, (f"{word} {names}" if names else "", pin, date[:10])))
    said += points
    return f"{said} (the same code in {same[:12]})" if same else said


def of_one(stack: str, paths: Iterable[Path]) -> str:
    """`Stack 12a33358d1b3; measured 2026-11-20`: of results that are all of `stack`, or of stacks
    with the same code."""
    found = [results.load(path) for path in paths]
    before = {hash: day for each in found for hash, day in results.earlier(each).items()}
    days = dict.fromkeys(sorted(day[:10] for day in (*before.values(), *_days(found))))
    said = f"Stack {stack[:12]}"
    if before or any(each["stack_hash"] != stack for each in found):
        said += ", or an earlier one that generates the same code"
    return f"{said}; measured {', '.join(days)}"


def _days(found: Iterable[results.Result]) -> list[str]:
    """Of the results that have points of their own stack."""
    return [each["date"] for each in found if any("measured" not in row for row in each["rows"])]


def cited(text: str, root: Path) -> Iterator[Path]:
    """The result files that a page names outside of its tables and of code, each once.

    `bench/results/steps/FILE`, `steps/FILE` and `FILE` alike.
    """
    prose = _FENCE.sub("", _MARKER.sub("", text))
    folder = root / "bench" / "results"
    seen = set()
    for name in _NAME.findall(prose):
        name = name.removeprefix("bench/").removeprefix("results/")
        for path in (folder / each / name for each in _FOLDERS):
            if path.is_file() and path not in seen:
                seen.add(path)
                yield path


def files(text: str, root: Path, where: str) -> str:
    """Of which stack and day are the files that the page `where` names.

    Raises GraftError for one that neither says so nor is listed, and where none is named.
    """
    lines = []
    for path in cited(text, root):
        said = stamp(path, root)
        if not said:
            raise GraftError(
                f"{where} names {path.name}, which does not say of which stack and day it is",
                f'"{path.relative_to(root / "bench" / "results")}" = '
                '{ stacks = ["…"], date = "…" } in bench/made.toml',
            )
        lines.append(f"`{path.name}`: {said[0].lower()}{said[1:]}")
    if not lines:
        raise GraftError(f"{where} names no result file, and has a marker view=files")
    return f"Made with: {'; '.join(lines)}."


def _made(root: Path) -> dict[str, dict[str, Any]]:
    path = root / "bench" / "made.toml"
    if not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as wrong:
        raise GraftError(f"bench/made.toml is not TOML: {wrong}") from wrong
