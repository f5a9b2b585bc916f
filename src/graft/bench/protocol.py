"""One JSON line a message, between the runner and a worker process over the worker's pipes.

A request is `{"do": VERB, ...}`; its reply is `{"ok": true, ...}` or `{"ok": false,
"kind": KIND, "error": TEXT, "fatal": BOOL, "facts": {...}}`. Fatal says that the worker can
serve no further case (a CUDA error poisons the process) and wants to be replaced. Requests are
served in order, one reply each; `held_s` in it says for how long the GPU was held. Before it,
`{"ok": true, "waits": BOOL}` says that the worker begins, or ends, to wait for the GPU: that time
is not its own. The worker's own standard output goes to its log: nothing that a library prints
can be taken for a reply.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graft.processes import kill_group

Message = dict[str, Any]

_LOG_LINES = 4


class WorkerLost(Exception):
    """The worker is gone: `kind` is `crash` or `hang`, the text says what was seen of it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Remote:
    """A worker process, from the side that asks.

    It is the head of a process group of its own, so that killing it takes along the compile
    processes that it started. Those run on `cores`, where given, as it does.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cores: frozenset[int] = frozenset(),
    ) -> None:
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(env),
                start_new_session=True,
            )
        if cores:  # before it has a thread or a child that would not follow
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, cores)
        self._buffer = b""

    def send(self, message: Message) -> None:
        """Write one request. Raises WorkerLost when the worker has gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._crash() from None

    def receive(self, timeout_s: float) -> Message:
        """The next reply. Raises WorkerLost after `timeout_s` without one, or at a crash.

        While the worker waits for the GPU, its time stands still: whoever has the GPU is the one
        that has to let go of it in time.
        """
        left, waits = timeout_s, False
        while True:
            started = time.monotonic()
            line = self._line(None if waits else max(0.0, left))
            if line is None:
                self.kill()
                raise WorkerLost("hang", f"no answer within {timeout_s:g} s; worker killed")
            try:
                reply = json.loads(line)
            except ValueError:
                reply = None
            if not isinstance(reply, dict) or "ok" not in reply:
                self.kill()
                raise WorkerLost("crash", f"worker answered {line[:80]!r}, which is no reply")
            if "waits" not in reply:
                return reply
            if not waits:
                left -= time.monotonic() - started
            waits = reply["waits"]

    def _line(self, timeout_s: float | None) -> bytes | None:
        """The next line of the worker's; None if there is none within `timeout_s`."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([fd], [], [], left)[0]:
                return None
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                raise self._crash()
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def call(self, message: Message, timeout_s: float) -> Message:
        """`send`, then `receive`."""
        self.send(message)
        return self.receive(timeout_s)

    def close(self, patience_s: float = 5.0) -> None:
        """Let the worker end by itself, which closing its standard input asks for; else kill."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self.kill()

    def kill(self) -> None:
        """End the worker's whole process group and collect it."""
        with contextlib.suppress(PermissionError):
            kill_group(self._process)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _crash(self) -> WorkerLost:
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = 0
        self.kill()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        if code == -signal.SIGKILL:
            how += ", as by a host short of memory; next: fewer --jobs-per-gpu"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        said = " | ".join(line.strip() for line in lines[-_LOG_LINES:])
        return WorkerLost("crash", f"worker ended ({how})" + (f": {said}" if said else ""))


def serve(worker: Callable[[Callable[[bool], None]], Callable[[Message], Message]]) -> None:
    """The worker's loop: answer requests on standard input until it closes.

    `worker` makes what handles a request from a function that says when a wait for the GPU
    begins and ends. A handler returns the reply's fields, or raises; what it raises is answered
    by `{"ok": false}` with the exception's `kind` and `fatal`, where it has these.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(reply: Message) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    handle = worker(lambda begins: say({"ok": True, "waits": begins}))
    for line in sys.stdin:
        try:
            reply = {"ok": True, **handle(json.loads(line))}
        except Exception as error:
            named = hasattr(error, "kind")
            reply = {
                "ok": False,
                "kind": getattr(error, "kind", "error"),
                "error": str(error) if named else f"{type(error).__name__}: {error}",
                "fatal": bool(getattr(error, "fatal", False)),
                "facts": getattr(error, "facts", {}),
            }
        say(reply)
