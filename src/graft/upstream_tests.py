"""`graft upstream-tests`: Inductor's own tests of the pinned commit, on stock and on patched.

Both sides run the same files, from a folder of their own each. Where a patch changes one of
upstream's tests on purpose, the patched side runs the changed file, and the result says so. What
differs is run again, each test by itself, and the second outcome counts: with many processes on a
GPU, some tests fail for want of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from graft import caches, differences, teststate, upstream_files
from graft.differences import Difference
from graft.errors import GraftError, UsageError
from graft.git import blob_id
from graft.pins import ROOT
from graft.stack import Stack, files_hash
from graft.testpool import Pool, Side
from graft.testrun import OUTCOMES, Result
from graft.tree import Tree
from graft.workbench import check_checkout

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_FILES = (
    "test_mix_order_reduction.py",
    "test_loop_ordering.py",
    "test_online_softmax.py",
    "test_cooperative_reductions.py",
    "test_torchinductor_strided_blocks.py",
    "test_kernel_benchmark.py",
    "test_perf.py",
    "test_torchinductor.py",
    "test_torchinductor_dynamic_shapes.py",
    "test_gpu_cpp_wrapper.py",
    "test_aot_inductor.py",
)
LIMIT_S = 600.0
"""For one test: those with max-autotune take minutes."""

CHANCE = 200
"""So many tests that differ are no chance, and are not run again one by one."""

GPU_ONLY = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda"}
"""What makes upstream's files leave their tests of the CPU out."""

_NEEDED = ("pytest", "expecttest")
_PROBE = f"""
import importlib.util as u, json, torch.cuda
print(json.dumps([
    [name for name in {_NEEDED!r} if u.find_spec(name) is None],
    torch.cuda.is_available() and torch.cuda.device_count(),
    torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
]))
"""


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
        return len(set(self.outcomes)) > 1

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
    the tests that were not reached, `stale` are meant differences that did not occur; `about` says
    what ran where.
    """

    rows: Sequence[Row]
    changed: Mapping[str, list[str]] = field(default_factory=dict)
    pending: int = 0
    stale: Sequence[Difference] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def broken(self) -> list[Row]:
        """The rows for which the comparison fails."""
        return [row for row in self.rows if row.is_broken]

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
                "messages": [each.message if each else "" for each in (row.stock, row.patched)],
            }
            for row in self.differing
        ]
        stale = [each.test for each in self.stale]
        return {
            **self.about,
            "files": self.counts(),
            "changed": dict(self.changed),
            "pending": self.pending,
            "stale": stale,
            "differing": rows,
        }


def compare(
    built: Tree,
    stack: Stack,
    files: Sequence[str] = (),
    *,
    source: Path | None = None,
    paths: Sequence[Path] = (),
    limit_s: float = LIMIT_S,
    keyword: str | None = None,
    workers: int = 1,
    gpu_only: bool = False,
    kept: Path | None = None,
    anew: bool = False,
    seconds: float | None = None,
    say: Callable[[str], None] = lambda line: None,
    root: Path = ROOT,
) -> Comparison:
    """Run upstream's test `files` on the base and on the tree.

    The files come from `source`, a checkout at the pin's commit; or from `paths`, test files by
    themselves, all of which are run; or from a sparse fetch of that commit, kept in the user's
    cache. `limit_s` is for each test, `keyword` is pytest's ``-k``, `workers` are processes a GPU
    (of CUDA_VISIBLE_DEVICES, or all). Results are kept in the folder `kept` (default: in the user's
    cache) as they come, and a run takes up what an earlier one of the same kept, unless `anew`;
    after `seconds` it ends with what it has. Raises UsageError for a file or a checkout that is not
    as expected, GraftError without a GPU, without network where one is needed, and where a side
    cannot run at all.
    """
    begin = time.monotonic()
    if paths and (files or source):
        raise UsageError("--file gives the tests by itself: leave FILES and --checkout out")
    if workers < 1:
        raise UsageError(f"{workers} processes a GPU; expected 1 or more")
    meant = differences.load(stack, root)
    extra = GPU_ONLY if gpu_only else {}
    with (
        tempfile.TemporaryDirectory(prefix="graft-upstream-") as aside,
        contextlib.ExitStack() as s,
    ):
        folder = Path(aside)
        stock, patched = folder / "stock", folder / "patched"
        lent = _extras(built, folder)
        pythons = {"stock": [str(built.base.python)], "patched": [str(built.python)]}
        envs = {"stock": {**_env(stock, lent), **extra}, "patched": {**_env(patched, ""), **extra}}
        gpus, gpu_name = _check_able(pythons, envs)
        if paths:
            wanted = upstream_files.copy(paths, stock)
        else:
            wanted = [upstream_files.in_upstream(file) for file in files or DEFAULT_FILES]
            if source is not None:
                check_checkout(source, stack.pin)
            else:
                source = upstream_files.fetch(stack.pin, wanted, say)
            upstream_files.unpack(source, stack.pin, wanted, stock)
        shutil.copytree(stock, patched)
        changed = upstream_files.apply(stack, patched)
        sides = []
        for name, where, made in (("stock", stock, ""), ("patched", patched, stack.hash)):
            (where / "test" / "pytest.ini").write_text("[pytest]\n")
            key = {
                "side": name,
                "pin": stack.pin.name,
                "commit": stack.pin.commit,
                "torch": built.base.version,
                "python": built.base.python_version,
                "stack": made,
                "tests": _tests_hash(where),
                "gpu": gpu_name,
                "limit_s": limit_s,
                "env": {
                    **{k: v for k, v in os.environ.items() if k[:12] == "PYTORCH_TEST"},
                    **extra,
                },
            }
            state = s.enter_context(teststate.opened(kept or default_state(stack), name, key, anew))
            sides.append(Side(name, pythons[name], where, envs[name], state))
        deadline = None if seconds is None else begin + seconds
        pool = Pool(gpus, workers, limit_s, deadline, lambda line: say(f"{gpu_name}: {line}"))
        pool.collect(sides, wanted, keyword or "")
        pool.run(sides, wanted, keyword or "")
        rows, pending = _rows(sides, wanted, keyword or "", meant)
        doubtful = [row.test for row in rows if row.differs and "::" in row.test]
        if len(doubtful) <= CHANCE:
            pool.run_again(sides, doubtful)
            rows, pending = _rows(sides, wanted, keyword or "", meant)
        about = {
            "pin": stack.pin.name,
            "stack": stack.hash,
            "torch": built.base.version,
            "python": built.base.python_version,
            "gpu": gpu_name,
            "gpus": len(gpus),
            "workers": workers,
            "keyword": keyword or "",
            "gpu_only": gpu_only,
            "seconds": round(time.monotonic() - begin),
        }
        asked = {path: by for path, by in changed.items() if path in wanted}
        return Comparison(rows, asked, pending, _stale(meant, rows), about)


def default_state(stack: Stack) -> Path:
    """Where results are kept: in the user's cache, by pin."""
    return upstream_files.cache_folder(stack.pin).parent / f"upstream-tests-{stack.pin.name}"


def _rows(
    sides: Sequence[Side], files: Sequence[str], keyword: str, meant: Sequence[Difference]
) -> tuple[list[Row], int]:
    """A row for each test that has been run wherever it is, and how many have not."""
    rows: list[Row] = []
    pending = 0
    for file in files:
        found = [side.state.collected.get((file, keyword)) for side in sides]
        if any(tests is None for tests in found):
            results = [
                side.state.final(file) if tests is None else Result("passed", "it can be read")
                for side, tests in zip(sides, found)
            ]
            if any(result is None for result in results):
                pending += 1  # of an unknown number
            else:
                rows.append(Row(file.removeprefix("test/"), results[0], results[1]))
            continue
        for test in dict.fromkeys([*(found[0] or ()), *(found[1] or ())]):
            results = [side.state.final(test) for side in sides]
            there = [test in (tests or ()) for tests in found]
            if any(is_there and not result for is_there, result in zip(there, results)):
                pending += 1
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
    return sorted(explained, key=lambda row: (row.rank, row.test)), pending


def _stale(meant: Sequence[Difference], rows: Sequence[Row]) -> list[Difference]:
    """Those whose tests were run, and none of which differs in that way."""
    return [
        each
        for each in meant
        if any(each.covers(row.test) for row in rows) and not any(row.meant == each for row in rows)
    ]


# --- showing -------------------------------------------------------------------------------------


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
        console.print(f"{found.pending} not reached; the same command goes on from here")


def _why(row: Row) -> str:
    if row.meant:
        return f"meant: {row.meant.reason}"
    result = row.patched if row.is_broken else row.stock
    words = (result.message if result else "").strip().partition("\n")[0][:120]
    if row.is_unsteady and row.before:
        return f"at first {', '.join(row.before)}; {words}".rstrip("; ")
    return words


def _words(counts: Mapping[str, int]) -> str:
    names = (*OUTCOMES, "missing")
    return ", ".join(f"{counts[name]} {name}" for name in names if counts.get(name)) or "none"


def write(found: Comparison, file: Path) -> None:
    """Write the comparison as JSON, at once or not at all."""
    aside = file.with_name(f"{file.name}.new")
    aside.write_text(json.dumps(found.as_json(), indent=1) + "\n", "utf-8")
    aside.replace(file)


# --- sides ---------------------------------------------------------------------------------------


def _env(folder: Path, lent: str) -> dict[str, str | None]:
    cache = f"{folder}-cache"
    cleared: dict[str, str | None] = dict.fromkeys(caches.VARIABLES)
    env = {**cleared, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_HOME": cache}
    return {**env, "PYTHONPATH": lent or None}


def _extras(built: Tree, folder: Path) -> str:
    """A folder of links to what ``--wheels`` installed into the tree, for the stock side."""
    own = ("torch", "graft.pth", "graft_startup.py", "__pycache__")
    extras = folder / "extras"
    extras.mkdir()
    for entry in built.site_packages.iterdir():
        if entry.name not in own:
            (extras / entry.name).symlink_to(entry)
    return str(extras) if any(extras.iterdir()) else ""


def _check_able(
    pythons: Mapping[str, Sequence[str]], envs: Mapping[str, Mapping[str, str | None]]
) -> tuple[list[str], str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES has them, and their name. Raises GraftError if a side
    cannot run upstream's tests."""
    count, name = 0, ""
    for side, python in pythons.items():
        env = {k: v for k, v in {**os.environ, **envs[side]}.items() if v is not None}
        done = subprocess.run(
            [*python, "-c", _PROBE], env=env, capture_output=True, text=True, check=False, cwd="/"
        )
        if done.returncode:
            words = done.stderr.strip().splitlines()[-1:]
            raise GraftError(f"{python[0]} cannot import torch: {''.join(words)}", "graft verify")
        missing, count, name = json.loads(done.stdout.splitlines()[-1])
        if missing:
            raise GraftError(
                f"upstream's tests need {' and '.join(missing)}, which {python[0]} does not have",
                f"pip install {' '.join(missing)}; or ./build.sh ... --wheels DIR, with their "
                "wheels",
            )
        if not count:
            raise GraftError(
                "upstream's tests need a GPU, and there is none here (or no driver for it)",
                "./build.sh test (this repository's own tests need none)",
            )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(n) for n in range(count)])[:count], name


def _tests_hash(folder: Path) -> str:
    """Of every file below test/: upstream's files import from their neighbours."""
    return files_hash(
        {
            str(path.relative_to(folder)): blob_id(path.read_bytes())
            for path in (folder / "test").rglob("*")
            if path.is_file()
        }
    )
