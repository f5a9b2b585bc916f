"""`graft upstream-tests`: Inductor's own tests of the pinned commit, on stock and on patched.

Both sides run the same files, from a folder of their own each. Where a patch changes one of
upstream's tests on purpose, the patched side runs the changed file, and the result says so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from graft import caches, commits, testrun
from graft.errors import GraftError, UsageError, nearest
from graft.git import git
from graft.pins import Pin
from graft.stack import Stack
from graft.testrun import Result, Run
from graft.tree import Tree
from graft.workbench import check_checkout

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_FILES = ("test_mix_order_reduction.py",)
REMOTE = "https://github.com/pytorch/pytorch"
LIMIT_S = 600.0
"""For one test: those with max-autotune take minutes."""

_NEEDED = ("pytest", "expecttest")
_PROBE = f"""
import importlib.util as u, torch.cuda
missing = [name for name in {_NEEDED!r} if u.find_spec(name) is None]
print(torch.cuda.is_available(), *missing)
"""


@dataclass(frozen=True)
class Row:
    """One test on both sides; None where it is not there."""

    test: str
    stock: Result | None
    patched: Result | None

    @property
    def outcomes(self) -> tuple[str, str]:
        """Stock's and patched's, in a word each."""
        stock, patched = self.stock, self.patched
        return stock.outcome if stock else "missing", patched.outcome if patched else "missing"

    @property
    def differs(self) -> bool:
        """The outcomes are not the same."""
        return len(set(self.outcomes)) > 1

    @property
    def is_broken(self) -> bool:
        """It passes on stock, and on patched it fails or is gone."""
        stock, patched = self.outcomes
        return stock == "passed" and patched in ("failed", "error", "missing")


@dataclass(frozen=True)
class Comparison:
    """Both runs; `changed` maps a test file to the patches that change it on the patched side."""

    stock: Run
    patched: Run
    changed: dict[str, list[str]]

    @property
    def rows(self) -> list[Row]:
        """What broke first, then what else differs, then the rest, each by name."""
        names = {*self.stock.results, *self.patched.results}
        rows = [Row(n, self.stock.results.get(n), self.patched.results.get(n)) for n in names]
        return sorted(rows, key=lambda row: (not row.is_broken, not row.differs, row.test))

    @property
    def broken(self) -> list[Row]:
        """The rows for which the comparison fails."""
        return [row for row in self.rows if row.is_broken]


def compare(
    built: Tree,
    stack: Stack,
    files: Sequence[str] = (),
    *,
    source: Path | None = None,
    paths: Sequence[Path] = (),
    limit_s: float = LIMIT_S,
    keyword: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run upstream's test `files` on the base and on the tree.

    The files come from `source`, a checkout at the pin's commit; or from `paths`, test files by
    themselves, all of which are run; or from a sparse fetch of that commit, kept in the user's
    cache. `limit_s` is for each test, `keyword` is pytest's ``-k``. Raises UsageError for a file or
    a checkout that is not as expected, GraftError without a GPU, without network where one is
    needed, and where a side gives no results.
    """
    if paths and (files or source):
        raise UsageError("--file gives the tests by itself: leave FILES and --source out")
    with tempfile.TemporaryDirectory(prefix="graft-upstream-") as aside:
        folder = Path(aside)
        stock = _Side("stock", [str(built.base.python)], folder / "stock", _extras(built, folder))
        patched = _Side("patched", [str(built.python)], folder / "patched", "")
        for side in (stock, patched):
            _check_able(side)
        if paths:
            wanted = _copy(paths, stock.folder)
        else:
            wanted = [_in_upstream(file) for file in files or DEFAULT_FILES]
            if source is not None:
                check_checkout(source, stack.pin)
            else:
                source = fetch(stack.pin, wanted, say)
            _unpack(source, stack.pin, wanted, stock.folder)
        shutil.copytree(stock.folder, patched.folder)
        changed = _apply(stack, patched.folder)
        on_stock = stock.run(wanted, limit_s, keyword, say)
        on_patched = patched.run(wanted, limit_s, keyword, say)
        asked = {path: by for path, by in changed.items() if path in wanted}
        return Comparison(on_stock, on_patched, asked)


def show(found: Comparison, console: Console) -> None:
    """Print the results side by side, what differs first, and the counts."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("test", "stock", "patched", "why", box=None, pad_edge=False)
    for row in found.rows:
        style = "bold red" if row.is_broken else "yellow" if row.differs else None
        why = row.patched if row.is_broken else row.stock
        reason = why.message.strip().partition("\n")[0][:120] if why and row.differs else ""
        where, _, test = row.test.partition("::")
        name = f"{where.rpartition('.')[2]}::{test}"
        table.add_row(escape(name), *row.outcomes, escape(reason), style=style)
    console.print(table)
    for path, patches in found.changed.items():
        console.print(f"patched runs {path} as changed by {', '.join(patches)}", highlight=False)
    for name, run in (("stock", found.stock), ("patched", found.patched)):
        console.print(f"{name:8}{run}, {run.seconds:.0f} s", highlight=False)
    differ = sum(row.differs for row in found.rows)
    console.print(f"{len(found.rows)} tests, {differ} differ, {len(found.broken)} broken")


@dataclass(frozen=True)
class _Side:
    name: str
    python: list[str]
    folder: Path  # has test/, as upstream
    extras: str  # a folder of packages that this Python is lent

    @property
    def env(self) -> dict[str, str | None]:
        cache = f"{self.folder}-cache"
        cleared: dict[str, str | None] = dict.fromkeys(caches.VARIABLES)
        env = {**cleared, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_HOME": cache}
        return {**env, "PYTHONPATH": self.extras or None}

    def run(
        self,
        wanted: Sequence[str],
        limit_s: float,
        keyword: str | None,
        say: Callable[[str], None],
    ) -> Run:
        say(f"{self.name}: {', '.join(PurePosixPath(path).name for path in wanted)}")
        (self.folder / "test" / "pytest.ini").write_text("[pytest]\n")
        tests = [path.removeprefix("test/") for path in wanted]
        args = ["-k", keyword] if keyword else []
        where = self.folder / "test"
        return testrun.run(self.python, tests, cwd=where, args=args, env=self.env, limit_s=limit_s)


def _extras(built: Tree, folder: Path) -> str:
    """A folder of links to what ``--wheels`` installed into the tree, for the stock side."""
    own = ("torch", "graft.pth", "graft_startup.py", "__pycache__")
    extras = folder / "extras"
    extras.mkdir()
    for entry in built.site_packages.iterdir():
        if entry.name not in own:
            (extras / entry.name).symlink_to(entry)
    return str(extras) if any(extras.iterdir()) else ""


def _check_able(side: _Side) -> None:
    env = {k: v for k, v in {**os.environ, **side.env}.items() if v is not None}
    done = subprocess.run(
        [*side.python, "-c", _PROBE], env=env, capture_output=True, text=True, check=False, cwd="/"
    )
    if done.returncode:
        words = done.stderr.strip().splitlines()[-1:]
        raise GraftError(f"{side.python[0]} cannot import torch: {''.join(words)}", "graft verify")
    gpu, *missing = done.stdout.split()
    if missing:
        raise GraftError(
            f"upstream's tests need {' and '.join(missing)}, which {side.python[0]} does not have",
            f"pip install {' '.join(missing)}; or ./build.sh ... --wheels DIR, with their wheels",
        )
    if gpu != "True":
        raise GraftError(
            "upstream's tests need a GPU, and there is none here (or no driver for it)",
            "./build.sh test (this repository's own tests need none)",
        )


def _in_upstream(file: str) -> str:
    """``test_x.py`` or ``inductor/test_x.py`` -> ``test/inductor/test_x.py``."""
    path = PurePosixPath(file)
    if len(path.parts) == 1:
        path = PurePosixPath("test/inductor") / path
    elif path.parts[0] != "test":
        path = PurePosixPath("test") / path
    if path.suffix != ".py" or ".." in path.parts:
        raise UsageError(f"{file} is not one of PyTorch's test files; expected test_NAME.py")
    return str(path)


def _copy(paths: Sequence[Path], folder: Path) -> list[str]:
    wanted = []
    for path in paths:
        if not path.is_file():
            raise UsageError(f"there is no file {path}", "graft upstream-tests --file PATH")
        wanted.append(f"test/inductor/{path.name}")
        (folder / wanted[-1]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / wanted[-1])
    return wanted


def _folders(wanted: Sequence[str]) -> list[str]:
    return sorted({str(PurePosixPath(path).parent) for path in wanted})


def _unpack(checkout: Path, pin: Pin, wanted: Sequence[str], folder: Path) -> None:
    """Copy the folders of `wanted`, as committed: the files import from their neighbours.

    Blob by blob, because `git archive` would fetch the whole of a checkout that is blob-less.
    """
    listed = git("ls-tree", "-r", "-z", pin.commit, *_folders(wanted), cwd=checkout).split("\0")
    entries = [entry.partition("\t") for entry in listed if entry.startswith("100")]
    blobs = {path: info.split()[2] for info, _, path in entries}
    for path in wanted:
        if path not in blobs:
            raise UsageError(f"PyTorch {pin.version} has no {path}{nearest(path, blobs)}")
    asked = "".join(f"{blob}\n" for blob in blobs.values())
    answer = commits.encode(git("cat-file", "--batch", cwd=checkout, input=asked))
    at = 0
    for path in blobs:
        start = answer.index(b"\n", at) + 1  # after "<blob> blob <size>"
        at = start + int(answer[at:start].split()[2])
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(answer[start:at])
        at += 1


def cache_folder(pin: Pin) -> Path:
    """Where the fetched tests of a pin are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "inductor-graft" / f"pytorch-{pin.commit[:12]}"


def fetch(pin: Pin, wanted: Sequence[str], say: Callable[[str], None]) -> Path:
    """A checkout, at the pin's commit, of the folders of `wanted` alone; fetched if it is not here.

    A fetch that was interrupted is taken up again. Raises GraftError, saying what to give instead,
    when there is no network.
    """
    folder = cache_folder(pin)
    config = ("-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=30")
    try:
        if not (folder / ".git").exists():
            folder.mkdir(parents=True, exist_ok=True)
            git("init", "-q", cwd=folder)
        git("config", "remote.origin.url", REMOTE, cwd=folder)
        head = git("rev-parse", "HEAD", cwd=folder, check=False).strip()
        if head != pin.commit or not all((folder / path).is_dir() for path in _folders(wanted)):
            say(f"fetching {' '.join(_folders(wanted))} of {pin.commit[:12]} from {REMOTE}")
            shallow = ("--depth", "1", "--filter=blob:none", "--no-tags")
            git(*config, "fetch", "-q", *shallow, "origin", pin.commit, cwd=folder)
            git("sparse-checkout", "set", "--no-cone", *_folders(wanted), cwd=folder)
            git(*config, "checkout", "-q", "--detach", pin.commit, cwd=folder)
    except (GraftError, OSError) as failed:
        raise GraftError(
            f"the tests of PyTorch {pin.version} are not here and could not be fetched: {failed}",
            f"graft upstream-tests --source CHECKOUT (a PyTorch checkout at {pin.commit}), or "
            "--file PATH (a test file of that commit)",
        ) from failed
    return folder


def _apply(stack: Stack, folder: Path) -> dict[str, list[str]]:
    """Apply what the stack changes in upstream's own tests; which patches changed which file."""
    upstreams = commits.absent_files(stack.patches, ())
    changed: dict[str, list[str]] = {}
    for patch in stack.patches:
        head, parts = commits.sections(patch.text.decode("utf-8", "surrogateescape"))
        kept = [
            (path, part)
            for path, part in parts
            if path in upstreams and path.startswith("test/") and (folder / path).exists()
        ]
        if not kept:
            continue
        ceiling = {"GIT_CEILING_DIRECTORIES": str(folder.resolve().parent)}
        text = head + "".join(part for _, part in kept)
        try:
            git("apply", "-", cwd=folder, input=text, env=ceiling)
        except GraftError as failed:
            raise GraftError(
                f"{patch.name} does not apply to {', '.join(path for path, _ in kept)}: "
                f"{failed.message}",
                f"give the files of PyTorch at {stack.pin.commit}",
            ) from failed
        for path, _ in kept:
            changed.setdefault(path, []).append(patch.name)
    return changed
