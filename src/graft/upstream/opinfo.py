"""`graft opinfo`: PyTorch's operator database, compiled on stock and on patched, against eager.

What is run is in `graft.upstream.operators`; how, as `graft upstream-tests`: many processes, a
limit a case, results that are kept as they come.
"""

from __future__ import annotations

import datetime
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graft.errors import UsageError, nearest
from graft.stack import Stack
from graft.stack.trees.tree import Tree
from graft.testing.runner import Result
from graft.upstream import sides, sources
from graft.upstream.comparison import Comparison, Row
from graft.upstream.sides import How

if TYPE_CHECKING:
    from rich.console import Console

SAMPLES = 2
"""Of an operator, dtype and form, by default: what fits into minutes."""

CHUNK = (20, 150)
"""Cases a process, at least and at most."""

LIMIT_S = 120.0
"""For a case: compiling it takes about a second."""

FORMS = ("alone", "sums", "large")
_FILE = "test/inductor/test_operators.py"


@dataclass(frozen=True)
class Count:
    """Cases of one form: how many, how many failed on stock and on patched, how many of those are
    new, and in how many a side generated a mix-order kernel."""

    cases: int
    skipped: int
    stock: int
    patched: int
    new: int
    fused_stock: int
    fused_patched: int


def compare(
    built: Tree,
    stack: Stack,
    *,
    device: str = "cuda",
    samples: int = SAMPLES,
    forms: Sequence[str] = FORMS,
    keyword: str | None = None,
    workers: int | None = None,
    limit_s: float = LIMIT_S,
    kept: Path | None = None,
    anew: bool = False,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run the cases on the base and on the tree.

    `device` is "cuda", or "lab" for kernels under Triton's interpreter. `samples` are for each
    operator and dtype (0: all that there are); `workers` processes a GPU (default: one a core, but
    for two). The rest is as `graft.upstream.tests.compare` has it. Raises UsageError for a form
    that is none, GraftError where a side cannot run.
    """
    begin = time.monotonic()
    for form in forms:
        if form not in FORMS:
            raise UsageError(f"there is no form {form}{nearest(form, FORMS)}")
    if samples < 0 or (workers is not None and workers < 1):
        raise UsageError("--samples takes 0 (all) or more, --workers 1 or more")
    workers = workers or max((os.cpu_count() or 1) - 2, 1)
    with tempfile.TemporaryDirectory(prefix="graft-opinfo-") as aside:
        folder = Path(aside)
        (folder / "tmp").mkdir()
        extra = {
            "GRAFT_OPINFO_DEVICE": device,
            "GRAFT_OPINFO_SAMPLES": str(samples),
            "GRAFT_OPINFO_FORMS": ",".join(forms),
            "TRITON_INTERPRET": str(int(device == "lab")),
            "TMPDIR": str(folder / "tmp"),
        }
        both = sides.halves(built, folder, extra)
        gpus, gpu = sides.check_able(both, needs_gpu=device == "cuda")
        for half in both:
            file = half.folder / _FILE
            file.parent.mkdir(parents=True)
            file.write_text("from graft.upstream.operator_tests import *\n", "utf-8")
        about = {"gpu": gpu, "limit_s": limit_s, "samples": samples, "forms": list(forms)}
        home = kept or sources.cache_folder(stack.pin).parent / f"opinfo-{stack.pin.name}"
        tools = {"cases": sides.tool_hash("upstream/operators.py", "lab/numerics.py")}
        deadline = None if seconds is None else begin + seconds
        how = How(workers, limit_s, keyword or "", home, anew, deadline, say, CHUNK)
        key = about | tools | {"device": device}
        # stock is known to be wrong: that patched is not is no chance
        found = sides.compare(
            both, gpus, [_FILE], how, built, stack, key, doubted=lambda row: row.is_broken
        )
        about |= {
            "pin": stack.pin.name,
            "stack": stack.hash,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": built.base.version,
            "keyword": keyword or "",
            "workers": workers,
            "seconds": round(time.monotonic() - begin),
        }
        return replace(found, about=about)


def counts(found: Comparison) -> dict[str, Count]:
    """By form, and for all of them ("all")."""
    rows: dict[str, list[Row]] = {}
    for row in found.rows:
        form = row.test.rstrip("]").rpartition("-")[2]
        for name in (form, "all"):
            rows.setdefault(name, []).append(row)
    return {name: _count(rows[name]) for name in (*FORMS, "all") if name in rows}


def _count(rows: Sequence[Row]) -> Count:
    return Count(
        cases=len(rows),
        skipped=sum(row.outcomes == ("skipped", "skipped") for row in rows),
        stock=sum(_failed(row.stock) for row in rows),
        patched=sum(_failed(row.patched) for row in rows),
        new=sum(row.is_broken for row in rows),
        fused_stock=sum(_fused(row.stock) for row in rows),
        fused_patched=sum(_fused(row.patched) for row in rows),
    )


def _failed(result: Result | None) -> bool:
    return result is None or result.outcome in ("failed", "error")


def _fused(result: Result | None) -> bool:
    return bool(result and result.properties.get("mix_order"))


def show(found: Comparison, console: Console) -> None:
    """Print what fails on patched, what is new first, and what is unsteady; then the counts.

    What fails on stock alone is counted, not listed.
    """
    from rich.markup import escape
    from rich.table import Table

    listed = [row for row in found.rows if _failed(row.patched) or row.is_unsteady]
    if listed:
        table = Table("case", "stock", "patched", "why", box=None, pad_edge=False)
        for row in listed:
            style = "bold red" if row.is_broken else "yellow" if row.is_unsteady else None
            case = row.test.partition("[")[2].rstrip("]") or row.test
            result = row.patched if _failed(row.patched) else row.stock
            words = (result.message if result else "").partition("\n")[0][:140]
            table.add_row(escape(case), *row.outcomes, escape(words), style=style)
        console.print(table)
    heads = ("cases", "not run", "fail: stock", "patched", "new", "mix-order: stock", "patched")
    table = Table("form", *heads, box=None, pad_edge=False)
    for name, of in counts(found).items():
        cells = (of.cases, of.skipped, of.stock, of.patched, of.new)
        table.add_row(name, *map(str, (*cells, of.fused_stock, of.fused_patched)))
    console.print(table)
    if found.pending:
        console.print(f"{found.pending} not reached; the same command goes on from here")


def as_json(found: Comparison) -> dict[str, Any]:
    """Plain data: what ran, counts by form, and each case that differs or fails."""
    failing = [row for row in found.rows if _failed(row.stock) or _failed(row.patched)]
    return {
        **found.about,
        "pending": found.pending,
        "forms": {name: vars(count) for name, count in counts(found).items()},
        "failing": [
            {
                "case": row.test.partition("[")[2].rstrip("]") or row.test,
                "new": row.is_broken,
                "outcomes": row.outcomes,
                "messages": [each.message if each else "" for each in (row.stock, row.patched)],
            }
            for row in failing
        ],
    }
