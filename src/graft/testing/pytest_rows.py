"""A pytest plugin (`-p graft.testing.pytest_rows`): what comes of each test, as lines of JSON.

GRAFT_TEST_ROWS names the file that they are added to:

- ``{"collected": [ids]}`` and ``{"broken": id, "message": text}`` (a file that pytest cannot read)
  after a collection;
- ``{"started": id}`` before a test, and after it its row: ``test``, and what a
  `graft.testing.testrun.Result` has.

So a process that ends in the midst of a test says which. GRAFT_TEST_LIST, where it is set, names a
file with the ids to run, one a line, in that order; what else pytest finds is left out. Needs
pytest and the standard library alone, for it runs in the pythons that are compared.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from typing import Any

import pytest

_ROWS = os.environ["GRAFT_TEST_ROWS"]
_LIST = os.environ.get("GRAFT_TEST_LIST")
_OUTCOMES = ("passed", "skipped", "failed", "error")  # from best to worst
_MESSAGE = 4000  # characters of it that are kept
_PR_SET_PDEATHSIG = 1
_worst: dict[str, tuple[int, str, float, dict[str, Any]]] = {}


def _write(row: dict[str, Any]) -> None:
    with open(_ROWS, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def pytest_configure() -> None:
    """Nothing runs on where nobody reads: this process ends with the one that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _LIST is None:
        return
    with open(_LIST, encoding="utf-8") as file:
        wanted = {line.rstrip("\n"): at for at, line in enumerate(file)}
    chosen = [item for item in items if item.nodeid in wanted]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in wanted])
    items[:] = sorted(chosen, key=lambda item: wanted[item.nodeid])


def pytest_collection_finish(session: pytest.Session) -> None:
    if _LIST is None:
        _write({"collected": [item.nodeid for item in session.items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"broken": report.nodeid, "message": _message(report)})


def pytest_runtest_logstart(nodeid: str) -> None:
    _worst[nodeid] = (0, "", 0.0, {})
    _write({"started": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = "error" if report.failed and report.when != "call" else report.outcome
    rank, message, seconds, _ = _worst.get(report.nodeid, (0, "", 0.0, {}))
    if _OUTCOMES.index(outcome) > rank:
        rank, message = _OUTCOMES.index(outcome), _message(report)
    told = {str(name): value for name, value in report.user_properties}
    _worst[report.nodeid] = (rank, message, seconds + report.duration, told)


def pytest_runtest_logfinish(nodeid: str) -> None:
    rank, message, seconds, told = _worst.pop(nodeid)
    row = {"outcome": _OUTCOMES[rank], "message": message, "seconds": round(seconds, 2)}
    _write({"test": nodeid, **row, "properties": told})


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The exception, or the reason of a skip."""
    told: Any = report.longrepr
    if isinstance(told, tuple):
        text = str(told[2]).removeprefix("Skipped: ")
    elif hasattr(told, "reprcrash") and told.reprcrash:
        text = told.reprcrash.message
    else:
        lines = str(told).strip().splitlines()
        text = "\n".join([*(line[1:].strip() for line in lines if line.startswith("E ")), *lines])
    return text[:_MESSAGE]
