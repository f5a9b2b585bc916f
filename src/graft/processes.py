"""Ending a process together with what it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from typing import Any


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill `process`, which leads a session of its own, and what it started.

    Nothing where they have ended meanwhile. The caller waits for it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, as `timeout` and schedulers send it, ends the block as Ctrl-C does: exit code 143.

    Nothing changes outside of the main thread.
    """

    def end(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
