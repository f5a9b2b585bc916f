"""Runs pytest with a given python, and reads what came of each test from its JUnit file."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
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


def run(
    python: Sequence[str],
    tests: Sequence[str],
    *,
    cwd: Path,
    args: Sequence[str] = (),
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
    with tempfile.TemporaryDirectory(prefix="graft-junit-") as folder:
        junit = Path(folder) / "junit.xml"
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "graft.testing.pytest_limit",
            f"--junitxml={junit}",
        ]
        if limit_s:
            env = {**(env or {}), "GRAFT_TEST_LIMIT_S": str(limit_s)}
        rc, output = _pytest(python, [*options, *args, *tests], cwd, env, timeout_s)
        if rc not in _RAN or not junit.exists():
            raise GraftError(
                f"pytest ended without results ({how(rc)}) in {' '.join(python)}, on "
                f"{' '.join(tests)}:\n{tail(output)}"
            )
        return Run(parse(junit.read_bytes()), rc == 0, output, time.monotonic() - begin)


def collect(
    python: Sequence[str],
    tests: Sequence[str],
    *,
    cwd: Path,
    args: Sequence[str] = (),
    env: Mapping[str, str | None] | None = None,
) -> tuple[str, ...]:
    """The node ids that pytest finds in `tests`, in its order. Raises GraftError where it fails."""
    options = ["-q", "-p", "no:cacheprovider", "--collect-only", *args]
    rc, output = _pytest(python, [*options, *tests], cwd, env, None)
    if rc not in (0, 5):
        raise GraftError(f"pytest cannot collect {' '.join(tests)}:\n{tail(output)}")
    return tuple(line for line in output.splitlines() if "::" in line and not line.startswith(" "))


def parse(junit: bytes) -> dict[str, Result]:
    """Reads a JUnit file. A test that is in it more than once has its worst outcome."""
    results: dict[str, Result] = {}
    for case in ET.fromstring(junit).iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        result = _result(case)
        earlier = results.get(name)
        if earlier is None or OUTCOMES.index(result.outcome) > OUTCOMES.index(earlier.outcome):
            results[name] = result
    return results


def _result(case: ET.Element) -> Result:
    seconds = float(case.get("time") or 0)
    for tag, outcome in (("error", "error"), ("failure", "failed"), ("skipped", "skipped")):
        found = case.find(tag)
        if found is not None:
            message = found.get("message") or ""
            # of what broke a collection or a fixture, the message says only where it happened
            raised = re.findall(r"^E +(.*)$", found.text or "", re.M) if tag == "error" else []
            return Result(outcome, "\n".join([message, *raised]), seconds)
    return Result("passed", "", seconds)


def _pytest(
    python: Sequence[str],
    args: Sequence[str],
    cwd: Path,
    env: Mapping[str, str | None] | None,
    timeout_s: float | None,
) -> tuple[int, str]:
    full = {k: v for k, v in {**os.environ, **(env or {})}.items() if v is not None}
    full["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SRC), full.get("PYTHONPATH"))))
    full.pop("PYTEST_ADDOPTS", None)
    process = subprocess.Popen(
        [*python, "-m", "pytest", *args],
        cwd=cwd,
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what the tests started ends with them
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_group(process)
        output, _ = process.communicate()
        output += f"\nended after {timeout_s:g} s, the time given"
    except BaseException:
        kill_group(process)
        process.wait()
        raise
    return process.returncode, output


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
