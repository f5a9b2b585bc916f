"""Ending a process together with what it started."""

from __future__ import annotations

import signal
import subprocess
import sys

from graft.processes import kill_group

STARTS_ANOTHER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("started", flush=True)
import time; time.sleep(600)
"""


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_what_it_started_ends_too() -> None:
    process = start(STARTS_ANOTHER)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    kill_group(process)
    process.communicate(timeout=60)  # until nobody holds its output
    assert process.returncode == -signal.SIGKILL


def test_one_that_has_ended() -> None:
    process = start("")
    process.communicate(timeout=60)
    kill_group(process)
    assert process.returncode == 0
