"""A pytest plugin (`-p graft.testing.pytest_limit`): a time limit for each test's call.

The limit comes in the environment variable GRAFT_TEST_LIMIT_S, in seconds. A test over it fails
with that reason. One that cannot be interrupted from Python (a kernel that hangs) ends the process,
with every thread's stack, a while later. Needs pytest and the standard library alone, for it runs
in the pythons that are compared.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

LIMIT_S = float(os.environ.get("GRAFT_TEST_LIMIT_S", "0"))
GRACE_S = 30.0


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if not LIMIT_S:
        yield
        return

    def over(signum: int, frame: FrameType | None) -> None:
        pytest.fail(f"over its time limit of {LIMIT_S:g} s", pytrace=False)

    previous = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    # file: pytest captures stderr's descriptor, and the process would end with the stacks in there
    faulthandler.dump_traceback_later(LIMIT_S + GRACE_S, exit=True, file=_STDERR)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        faulthandler.cancel_dump_traceback_later()


_STDERR = os.fdopen(os.dup(2), "w")
