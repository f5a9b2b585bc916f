"""Whether a process runs, and waiting for what comes a moment later: a kill takes one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_for(what: Callable[[], bool], limit_s: float = 30) -> None:
    """Return once `what` is so; fail where it is not within `limit_s`."""
    begin = time.monotonic()
    while not what():
        assert time.monotonic() - begin < limit_s
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether process `pid` is there, and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
