"""Inductor's tests on a machine without a GPU.

With a GPU this does nothing but count. Without one, `graft.lab.backend` describes an H200 to torch
before a test imports it: code is generated at full size, and numerics are checked under Triton's
interpreter where a call fits in its budget. Where it does not, the call's results come from eager
PyTorch and the test counts as code only; the same test function must then have another parameter
at which the numerics were interpreted, or the run fails. So does a run with a skipped test, unless
the reason says what the machine lacks: a GPU here, the lab there. No test is skipped in both.

`GRAFT_LAB_DEVICE` names another GPU to describe, `GRAFT_LAB_BUDGET_S` another budget. With
`GRAFT_SAMPLE=8` every eighth test of each file runs, and a test may run code only.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROPERTY = "graft_numerics"
INTERPRETED, CODE_ONLY, NO_CALL = "interpreted", "code only", "no call"


def _enter_lab() -> bool:
    import torch

    if torch.cuda.is_available():
        return False
    if "triton" in sys.modules:
        raise pytest.UsageError("Triton was imported before tests/inductor/conftest.py")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(ROOT / "src"))
    from graft.lab import backend, devices

    device = devices.find(os.environ.get("GRAFT_LAB_DEVICE", "H200"))
    budget_s = float(os.environ.get("GRAFT_LAB_BUDGET_S", backend.DEFAULT_BUDGET_S))
    backend.install(device, budget_s, over_budget="eager")
    return True


LAB = _enter_lab()
SAMPLE = int(os.environ.get("GRAFT_SAMPLE", "1"))
# as Python itself does when a test file is run, and upstream's pytest: files share modules
sys.path.insert(0, str(Path(__file__).parent))


class Numerics:
    """What the run's tests did about numerics; collects reports, also from xdist's workers."""

    def __init__(self) -> None:
        self.by_function: dict[str, dict[str, str]] = defaultdict(dict)
        self.skipped: dict[str, str] = {}

    def of(self, outcome: str) -> list[str]:
        return [n for f in self.by_function.values() for n, o in f.items() if o == outcome]

    def unchecked(self) -> list[str]:
        """Tests that ran code only and have no sibling whose numerics were interpreted."""
        if SAMPLE > 1:
            return []  # siblings were left out
        return [
            test
            for tests in self.by_function.values()
            if INTERPRETED not in tests.values()
            for test, outcome in tests.items()
            if outcome == CODE_ONLY
        ]

    def unexcused(self) -> list[str]:
        """Skipped tests whose reason does not name what this machine lacks."""
        lacking = "GPU" if LAB else "lab"
        return [test for test, reason in self.skipped.items() if lacking not in reason]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.nodeid.startswith("tests/inductor") and "inductor" not in report.nodeid:
            return
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.skipped[report.nodeid] = str(reason)
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "call" and report.passed:
                function, outcome = value
                self.by_function[function][report.nodeid] = outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workerinput"):
            return
        if session.exitstatus == 0 and ((LAB and self.unchecked()) or self.unexcused()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if LAB and self.by_function:
            checked, code_only = len(self.of(INTERPRETED)), len(self.of(CODE_ONLY))
            terminalreporter.write_line(
                f"numerics checked: {checked}, code only: {code_only}"
                f" (no compiled call: {len(self.of(NO_CALL))})"
            )
            for test in self.unchecked():
                terminalreporter.write_line(
                    f"error: {test} ran code only, and no other parameter of it was interpreted: "
                    "add a smaller size",
                    red=True,
                )
        for test in self.unexcused():
            terminalreporter.write_line(
                f"error: {test} was skipped: {self.skipped[test]}", red=True
            )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Numerics(), "graft-numerics")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if LAB and any(Path(__file__).parent not in item.path.parents for item in items):
        raise pytest.UsageError(
            "tests/inductor makes its process believe in a GPU and interpret Triton: "
            "run it by itself, pytest tests/inductor"
        )
    if SAMPLE > 1:
        _sample(config, items)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    by_file: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_file[item.path].append(item)
    kept = [item for tests in by_file.values() for item in tests[::SAMPLE]]
    left = set(map(id, kept))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = kept


def _function(item: pytest.Item) -> str:
    """The test as it was written, whatever `parametrize` or `subtest` made of its name."""
    function = getattr(item, "function", None)
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    name = getattr(function, "__qualname__", item.name)
    return f"{item.nodeid.split('::')[0]}::{name}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Any:
    if not LAB:
        return (yield)
    from graft.lab import backend

    backend.tally.reset()
    try:
        return (yield)
    finally:
        tally = backend.tally
        outcome = CODE_ONLY if tally.code_only else INTERPRETED if tally.interpreted else NO_CALL
        item.user_properties.append((PROPERTY, (_function(item), outcome)))
