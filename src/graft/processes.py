"""Ending a process together with what it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any


def kill_group(process: subprocess.Popen[Any]) -> None:
    """Kill `process`, which leads a session of its own, and what it started.

    Nothing where they have ended meanwhile. The caller waits for it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
