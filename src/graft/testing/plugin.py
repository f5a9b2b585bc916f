"""The pytest plugin of every run (`-p graft.testing.plugin`): a limit a test, a row as it ends.

GRAFT_TEST_LIMIT_S, where it is set, is the time limit of each test's call, in seconds. A test over
it fails with that reason. One that cannot be interrupted from Python (a kernel that hangs) ends the
process, with every thread's stack, a while later.

GRAFT_TEST_ROWS names the file that lines of JSON are added to:

- ``{"collected": [ids]}`` and ``{"broken": id, "message": text}`` (a file that pytest cannot read)
  after a collection;
- ``{"started": id}`` before a test, and after it its row: ``test``, and what a
  `graft.testing.runner.Result` has.

So a process that ends in the midst of a test says which. One whose GPU answers no more, as after
an illegal memory access, ends after the test that did it: all others would fail for it.
GRAFT_TEST_LIST, where it is set, names a file with the ids to run, one a line, in that order; what
else pytest finds is left out. Needs pytest and the standard library alone, for it runs in the
pythons that are compared.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from graft.testing import GPU_LOST, GRACE_S

_LIMIT_S = float(os.environ.get("GRAFT_TEST_LIMIT_S") or 0)
_ROWS = os.environ["GRAFT_TEST_ROWS"]
_LIST = os.environ.get("GRAFT_TEST_LIST")
_OUTCOMES = ("passed", "skipped", "failed", "error")  # from best to worst
_MESSAGE = 4000  # characters of it that are kept
_PR_SET_PDEATHSIG = 1
# pytest captures stderr's descriptor, and the process would end with the stacks in there
_STDERR = os.fdopen(os.dup(2), "w")
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not _LIMIT_S:
        yield
        return

    def over(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"over its time limit of {_LIMIT_S:g} s", pytrace=False)

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
    faulthandler.dump_traceback_later(_LIMIT_S + GRACE_S, exit=True, file=_STDERR)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


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
    if "CUDA error" in message and _is_gpu_lost():
        os._exit(GPU_LOST)


def _is_gpu_lost() -> bool:
    """Whether every further call of this process to its GPU fails."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None:
        return False
    try:
        cuda.synchronize()
    except RuntimeError:
        return True
    return False


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
