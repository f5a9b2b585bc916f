"""Runs pytest with a given Python, and gets what comes of each test as rows, while it runs.

One process is `process`; `run` and `collect` are of one that runs to its end. Many at a time, for
upstream's tests, are `graft.upstream.testpool`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.places import SRC
from graft.processes import kill_group

OUTCOMES = ("passed", "skipped", "failed", "error")  # from best to worst
_RAN = (0, 1, 2, 5)  # pytest's exit codes with results: passed, failed, collection errors, no tests
_ASSERTION = re.compile(
    r"(\w+\.)*AssertionError\b"  # unittest, torch.testing
    r"|assert\b"  # pytest leaves the name out where it rewrote the statement
    r"|Failed: DID NOT RAISE"
    r"|RuntimeError: Expected to (not )?find"  # torch.testing.FileCheck
)
_POLL_S = 0.05
_MISSING_NAME = re.compile(r"\b(ImportError|ModuleNotFoundError|AttributeError)\b")


@dataclass(frozen=True)
class Result:
    """What came of one test; `message` is its exception, or the reason of a skip.

    `properties` are what it recorded of itself (pytest's ``record_property``).
    """

    outcome: str
    message: str = ""
    seconds: float = 0.0
    properties: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_assertion(self) -> bool:
        """It failed because what it checked was not so."""
        return self.outcome == "failed" and bool(_ASSERTION.match(self.message))

    @property
    def is_missing_name(self) -> bool:
        """It failed because a module or an attribute that it needs is not there."""
        return self.outcome in ("failed", "error") and bool(_MISSING_NAME.search(self.message))


@dataclass(frozen=True)
class Run:
    """A run of pytest. It may be bad without a failed test: a conftest can have checks too."""

    results: Mapping[str, Result]  # "folder.module.Class::test" -> its result
    ok: bool
    output: str
    seconds: float

    def count(self, outcome: str) -> int:
        return sum(r.outcome == outcome for r in self.results.values())

    @property
    def bad(self) -> dict[str, Result]:
        return {k: r for k, r in self.results.items() if r.outcome in ("failed", "error")}

    def __str__(self) -> str:
        return ", ".join(f"{n} {o}" for o in OUTCOMES if (n := self.count(o))) or "no tests"


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, what it printed, the test that it was in."""

    rc: int
    output: str
    running: str | None


def process(
    python: Sequence[str],
    args: Sequence[str],
    take: Callable[[dict[str, Any]], None],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout_s: float | None = None,
    silence_s: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Ended | None:
    """One process of pytest; `take` gets its rows (`graft.testing.plugin`) as they come.

    `env` is its whole environment (`environ`). It is ended after `timeout_s`, and after
    `silence_s` without a row. None where it was `stopped`. Whatever happens, what it started ends
    with it.
    """
    with tempfile.TemporaryDirectory(prefix="graft-rows-") as aside:
        rows, said = Path(aside) / "rows", Path(aside) / "said"
        rows.touch()
        options = ["-q", "-p", "no:cacheprovider", "-p", "graft.testing.plugin"]
        with said.open("wb") as output, rows.open("rb") as news:
            child = subprocess.Popen(
                [*python, "-m", "pytest", *options, *args],
                cwd=cwd,
                env={**env, "GRAFT_TEST_ROWS": str(rows)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that what the tests started ends with them
            )
            with _ending(child):
                running, rest, late = None, b"", ""
                begin = since = time.monotonic()
                while True:
                    ended = child.poll() is not None  # before the last rows are read
                    whole, _, rest = (rest + news.read()).rpartition(b"\n")
                    for row in map(json.loads, whole.splitlines()):
                        since = time.monotonic()
                        running = row.get("started")
                        take(row)
                    if stopped():
                        return None
                    if ended:
                        break
                    now = time.monotonic()
                    if timeout_s is not None and now - begin > timeout_s:
                        late = f"\nended after {timeout_s:g} s, the time given"
                        kill_group(child)
                    if silence_s is not None and now - since > silence_s:
                        kill_group(child)
                    time.sleep(_POLL_S)
        return Ended(child.returncode, said.read_text("utf-8", "replace") + late, running)


@contextlib.contextmanager
def _ending(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever happens inside: the process, and what it started, ends."""
    try:
        yield
    finally:
        kill_group(child)
        child.wait()


def environ(env: Mapping[str, str | None], *folders: Path, limit_s: float = 0) -> dict[str, str]:
    """This environment with `env` (None: taken away), and `folders` after this tool on its path.

    `limit_s` is for each test (0: none).
    """
    full = {k: v for k, v in {**os.environ, **env}.items() if v is not None}
    for name in ("PYTEST_ADDOPTS", "GRAFT_TEST_LIST"):
        full.pop(name, None)
    path = (str(SRC), *map(str, folders), full.get("PYTHONPATH"))
    full["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    full["GRAFT_TEST_LIMIT_S"] = str(limit_s)
    return full


def run(
    python: Sequence[str],
    tests: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
    limit_s: float = 0,
    timeout_s: float | None = None,
) -> Run:
    """Runs `tests` (files or node ids, relative to `cwd`).

    `env` adds to the environment (None: takes away). `limit_s` is for each test (0: none),
    `timeout_s` for the run. Raises GraftError where pytest ends without results: it was killed,
    crashed, ran out of time, or was called wrongly.
    """
    begin = time.monotonic()
    results: dict[str, Result] = {}

    def take(row: dict[str, Any]) -> None:
        if "test" in row:
            test = row.pop("test")
            results[_dotted(test)] = Result(**row)
        elif "broken" in row:
            results[_dotted(row["broken"])] = Result("error", row["message"])

    full = environ(env or {}, limit_s=limit_s)
    ended = process(python, tests, take, cwd=cwd, env=full, timeout_s=timeout_s)
    assert ended is not None, "nothing stops it"
    if ended.rc not in _RAN or ended.running is not None:
        raise GraftError(
            f"pytest ended without results ({how(ended.rc)}) in {' '.join(python)}, on "
            f"{' '.join(tests)}:\n{tail(ended.output)}"
        )
    return Run(results, ended.rc == 0, ended.output, time.monotonic() - begin)


def collect(
    python: Sequence[str],
    tests: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str | None] | None = None,
) -> tuple[str, ...]:
    """The node ids that pytest finds in `tests`, in its order. Raises GraftError where it fails."""
    found: list[str] = []

    def take(row: dict[str, Any]) -> None:
        found.extend(row.get("collected", ()))

    ended = process(python, ["--collect-only", *tests], take, cwd=cwd, env=environ(env or {}))
    assert ended is not None, "nothing stops it"
    if ended.rc not in (0, 5):
        raise GraftError(f"pytest cannot collect {' '.join(tests)}:\n{tail(ended.output)}")
    return tuple(found)


def _dotted(test: str) -> str:
    """``a/b.py::Class::test[x/y.py]`` -> ``a.b.Class::test[x/y.py]``, as in JUnit's files."""
    name, bracket, rest = test.partition("[")
    file, *names = name.split("::")
    parts = [file.replace("/", ".").removesuffix(".py"), *names]
    return "::".join(filter(None, (".".join(parts[:-1]), parts[-1]))) + bracket + rest


def how(rc: int) -> str:
    """An exit code in words: a signal by its name."""
    if rc >= 0:
        return f"exit code {rc}"
    try:
        return signal.Signals(-rc).name
    except ValueError:
        return f"signal {-rc}"


def tail(output: str, lines: int = 25) -> str:
    """Its last lines."""
    return "\n".join(output.rstrip().splitlines()[-lines:])
