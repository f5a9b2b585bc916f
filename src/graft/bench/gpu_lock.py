"""The lock of a GPU: whoever holds it is the only one that works on the GPU.

It goes first on the host's cores, too, where it may raise its priority (root): a kernel that is
launched late, because others compile, is timed as longer than it is, and tuned to the wrong
configuration.

Several points can then be prepared for one GPU at a time: what needs it (inputs, reference, first
runs, autotuning, timing) is done by one after the other, and only compiles, which run on the
host, overlap with it. What is loaded to the GPU meanwhile, a kernel that was compiled, keeps out of
what is timed alone, turns and the configurations of a kernel: it is no work that the rest of
another's preparation would notice, and there are hundreds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO

# Of the holder's threads; others compile at the niceness that they were started with.
_HOLDERS_NICENESS = -10


class GpuLock:
    """Held by one worker or lane at a time; the others wait. Not for several threads at once.

    It is an flock of a file, of which the system lets go when its holder dies. `waited_s` and
    `held_s` add up seconds. Without a `path` it is free for everyone. `waits` is told when a wait
    begins (True) and ends (False); `settle` waits for the holder's own work, before it lets go.
    """

    def __init__(
        self,
        path: Path | None = None,
        waits: Callable[[bool], None] = lambda begins: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.waited_s = 0.0
        self.held_s = 0.0
        self._waits = waits
        self._settle = settle
        self._file = path.open("ab") if path else None
        self._turns = path.with_name(f"{path.name}.turns").open("ab") if path else None
        self._since: float | None = None  # when it was taken
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)

    @property
    def held(self) -> bool:
        return self._since is not None

    def __enter__(self) -> GpuLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Take it, and wait for it where another has it. Nothing where it is held already."""
        if self.held:
            return
        if self._file:
            self._take(self._file, fcntl.LOCK_EX)
            _set_niceness(_HOLDERS_NICENESS)
        self._since = time.perf_counter()

    def release(self) -> None:
        """Let the next have it. Nothing where it is not held."""
        if self._since is None:
            return
        self._settle()
        self.held_s += time.perf_counter() - self._since
        self._since = None
        if self._file:
            _set_niceness(self._niceness)
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Held within, whether or not it was held before; as before at the end."""
        held = self.held
        self.acquire()
        try:
            yield
        finally:
            if not held:
                self.release()

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Held within, and nothing is loaded to the GPU meanwhile."""
        with self.borrowed():
            if self._turns:
                self._take(self._turns, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if self._turns:
                    fcntl.flock(self._turns, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Nobody's turn is timed within; others may prepare, and load."""
        if self.held or not self._turns:
            yield
            return
        self._take(self._turns, fcntl.LOCK_SH)
        try:
            yield
        finally:
            self._settle()
            fcntl.flock(self._turns, fcntl.LOCK_UN)

    def _take(self, file: IO[bytes], how: int) -> None:
        """Lock `file`, and say so where that means to wait."""
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            started = time.perf_counter()
            self._waits(True)
            fcntl.flock(file, how)
            self._waits(False)
            self.waited_s += time.perf_counter() - started

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Free for others within, where it was held; as before at the end."""
        held = self.held
        self.release()
        try:
            yield
        finally:
            if held:
                self.acquire()


def _set_niceness(niceness: int) -> None:
    """Of each thread of this process (a backward has its own); as it was where it may not."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), niceness)
