"""The two sides of a comparison: the base's Python and the tree's, on the same test files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.places import SRC
from graft.stack import Stack, files_hash
from graft.stack.git import blob_id
from graft.stack.trees import caches
from graft.stack.trees.tree import Tree
from graft.upstream import comparison, teststate
from graft.upstream.comparison import Comparison, Row
from graft.upstream.differences import Difference
from graft.upstream.testpool import CHUNK, Pool, Side

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
class Half:
    """A side before it is run: its Python, its folder (which has test/), its environment."""

    name: str
    python: Sequence[str]
    folder: Path
    env: Mapping[str, str | None]


def halves(built: Tree, folder: Path, extra: Mapping[str, str]) -> tuple[Half, Half]:
    """Stock and patched, each below `folder`, with caches of their own; `extra` is added to both
    environments. What ``--wheels`` installed into the tree is lent to stock."""
    stock, patched = folder / "stock", folder / "patched"
    lent = _extras(built, folder)
    return (
        Half("stock", [str(built.base.python)], stock, {**_env(stock, lent), **extra}),
        Half("patched", [str(built.python)], patched, {**_env(patched, ""), **extra}),
    )


@contextlib.contextmanager
def opened(
    halves: Sequence[Half],
    built: Tree,
    stack: Stack,
    about: Mapping[str, Any],
    kept: Path,
    anew: bool,
) -> Iterator[list[Side]]:
    """The sides, with what an earlier run of the same kept in the folder `kept`.

    `about` is what else decides what comes out. Raises GraftError where another run holds it.
    """
    with contextlib.ExitStack() as open_files:
        sides = []
        for half in halves:
            (half.folder / "test" / "pytest.ini").write_text("[pytest]\n")
            key = {
                "side": half.name,
                "pin": stack.pin.name,
                "commit": stack.pin.commit,
                "torch": built.base.version,
                "python": built.base.python_version,
                "stack": stack.hash if half.name == "patched" else "",
                "tests": _tests_hash(half.folder),
                **about,
                "env": {k: v for k, v in os.environ.items() if k.startswith("PYTORCH_TEST")},
            }
            state = open_files.enter_context(teststate.opened(kept, half.name, key, anew))
            sides.append(Side(half.name, half.python, half.folder, half.env, state))
        yield sides


@dataclass(frozen=True)
class How:
    """How tests are run on both sides.

    `workers` are processes a GPU, `limit_s` is for each test, `keyword` is pytest's ``-k``. Results
    are kept in the folder `kept` as they come, and a run takes up what an earlier one of the same
    kept, unless `anew`; at `deadline` (of `time.monotonic`) it ends with what it has. `chunk` is
    the number of tests a process, at least and at most. With `patched_first` stock runs what does
    not pass on patched alone.
    """

    workers: int
    limit_s: float
    keyword: str
    kept: Path
    anew: bool
    deadline: float | None
    say: Callable[[str], None]
    chunk: tuple[int, int] = CHUNK
    patched_first: bool = False


def compare(
    halves: Sequence[Half],
    gpus: Sequence[str],
    files: Sequence[str],
    how: How,
    built: Tree,
    stack: Stack,
    about: Mapping[str, Any],
    *,
    meant: Sequence[Difference] = (),
    doubted: Callable[[Row], bool] = lambda row: row.differs,
) -> Comparison:
    """Run the tests of `files` (under test/) on both halves, on each of `gpus`.

    `about` is what else decides what comes out; it has ``gpu``, their name. `meant` and `doubted`
    are as `comparison.of_sides` has them. Raises GraftError where another run is at work on it.
    """
    with opened(halves, built, stack, about, how.kept, how.anew) as sides:
        pool = Pool(
            gpus,
            how.workers,
            how.limit_s,
            how.deadline,
            lambda line: how.say(f"{about['gpu']}: {line}"),
            how.chunk,
        )
        return comparison.of_sides(
            pool, sides, files, how.keyword, meant, doubted, how.patched_first
        )


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


def check_able(halves: Sequence[Half], needs_gpu: bool = True) -> tuple[list[str], str]:
    """The GPUs, as CUDA_VISIBLE_DEVICES has them, and their name. Raises GraftError if a side
    cannot run upstream's tests."""
    count, name = 0, ""
    with ThreadPoolExecutor() as executor:  # each imports torch: seconds, on a cold disk many
        probes = [*executor.map(_probe, halves)]
    for half, done in zip(halves, probes, strict=True):
        python = half.python
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
        if not count and needs_gpu:
            raise GraftError(
                "upstream's tests need a GPU, and there is none here (or no driver for it)",
                "the same command with --device lab, under Triton's interpreter",
            )
    if not needs_gpu:
        return [""], "no GPU"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (visible.split(",") if visible else [str(n) for n in range(count)])[:count], name


def _probe(half: Half) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in {**os.environ, **half.env}.items() if v is not None}
    return subprocess.run(
        [*half.python, "-c", _PROBE], env=env, capture_output=True, text=True, check=False, cwd="/"
    )


def _tests_hash(folder: Path) -> str:
    """Of every file below test/: upstream's files import from their neighbours."""
    return files_hash(
        {
            str(path.relative_to(folder)): blob_id(path.read_bytes())
            for path in (folder / "test").rglob("*")
            if path.is_file()
        }
    )


def tool_hash(*names: str) -> str:
    """Of modules of this tool that decide what comes out (``lab/numerics.py``)."""
    home = SRC / "graft"
    return files_hash({name: blob_id((home / name).read_bytes()) for name in names})
