"""Upstream's tests in many processes: over GPUs, a limit a test, each result kept at once.

A process runs a chunk of a file's tests and writes a row a test (`graft.testing.plugin`). One
that crashes or hangs costs the test that it was in, and the rest of its chunk goes on in another.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from graft.testing import GRACE_S, runner
from graft.testing.runner import Ended, Result
from graft.upstream.teststate import State

CHUNK = (8, 50)
"""Tests a process, at least (where there are as many) and at most: to import torch and the file
takes ten seconds."""

COLLECT_LIMIT_S = 600.0
_HANG_S = 60.0  # beyond limit and grace: the process did not even end itself


@dataclass(frozen=True)
class Side:
    """Stock or patched: its Python, a folder that has test/ as upstream, what results go to."""

    name: str
    python: Sequence[str]
    folder: Path
    env: Mapping[str, str | None]
    state: State


@dataclass
class Pool:
    """`workers` processes on each of `gpus` (as CUDA_VISIBLE_DEVICES has them).

    `limit_s` is for each test; from `deadline` (of `time.monotonic`) on nothing runs. `chunk` is
    the number of tests that a process runs, at least and at most.
    """

    gpus: Sequence[str]
    workers: int
    limit_s: float
    deadline: float | None = None
    say: Callable[[str], None] = lambda line: None
    chunk: tuple[int, int] = CHUNK
    _stopped: threading.Event = field(default_factory=threading.Event)

    def collect(self, sides: Sequence[Side], files: Sequence[str], keyword: str) -> None:
        """Find the tests of `files` (under test/) on each side, where that is not known yet.

        A file that pytest cannot read has an error in the state, under its own name.
        """
        self._run(
            [
                partial(self._collect, side, file, keyword)
                for file in files
                for side in sides
                if (file, keyword) not in side.state.collected
            ],
            self.workers,
        )

    def run(
        self,
        sides: Sequence[Side],
        files: Sequence[str],
        keyword: str,
        wants: Callable[[str], bool] = lambda test: True,
    ) -> None:
        """Run what was collected, is wanted and has no result, the sides in turn."""
        left = {
            (f, s.name): [*filter(wants, self._left(s, f, keyword))] for f in files for s in sides
        }
        slots = len(self.gpus) * self.workers
        total = sum(map(len, left.values()))
        least = min(self.chunk[0], max(-(-total // slots), 1))  # few tests may be slow ones
        size = min(max(total // (2 * slots), least), self.chunk[1])
        jobs: list[Callable[[str], None]] = []
        for file in files:
            chunks = [
                (at, side, left[file, side.name][at : at + size])
                for side in sides
                for at in range(0, len(left[file, side.name]), size)
            ]
            jobs += [
                partial(self._chunk, side, chunk, False)
                for _, side, chunk in sorted(chunks, key=lambda each: each[0])
            ]
        self._run(jobs, self.workers)

    def run_again(self, sides: Sequence[Side], tests: Sequence[str]) -> None:
        """Run each test in a process by itself, with a GPU of its own."""
        self._run(
            [
                partial(self._chunk, side, [test], True)
                for test in tests
                for side in sides
                if test in side.state.results and test not in side.state.again
            ],
            1,
        )

    @property
    def is_over(self) -> bool:
        """The time is up, or the run was interrupted."""
        late = self.deadline is not None and time.monotonic() >= self.deadline
        return late or self._stopped.is_set()

    def _left(self, side: Side, file: str, keyword: str) -> list[str]:
        found = side.state.collected.get((file, keyword), ())
        return [test for test in found if test not in side.state.results]

    def _run(self, jobs: Sequence[Callable[[str], None]], workers: int) -> None:
        free: queue.Queue[str] = queue.Queue()
        for gpu in [*self.gpus] * workers:
            free.put(gpu)
        done = 0
        lock = threading.Lock()

        def one(job: Callable[[str], None]) -> None:
            nonlocal done
            gpu = free.get()
            try:
                if not self.is_over:
                    job(gpu)
            finally:
                free.put(gpu)
            with lock:
                done += 1
                self.say(f"{done} of {len(jobs)} processes")

        with ThreadPoolExecutor(len(self.gpus) * workers) as executor:
            try:
                for future in [executor.submit(one, job) for job in jobs]:
                    future.result()
            except BaseException:
                self._stopped.set()  # the threads see it within a poll, and end their processes
                raise

    def _collect(self, side: Side, file: str, keyword: str, gpu: str) -> None:
        args = ["--collect-only", *(["-k", keyword] if keyword else []), _below_test(file)]
        found: list[str] | None = None
        broken: list[str] = []

        def take(row: dict[str, Any]) -> None:
            nonlocal found
            if "collected" in row:
                found = row["collected"]
            elif "broken" in row:
                broken.append(row["message"])

        ended = self._pytest(side, args, gpu, take, COLLECT_LIMIT_S)
        if ended is None:
            return
        if found is None or broken or ended.rc not in (0, 5):
            why = "\n".join(broken) or f"{runner.how(ended.rc)}: {runner.tail(ended.output)}"
            side.state.add(file, Result("error", f"pytest cannot read it: {why}"))
        else:
            side.state.add_collection(file, keyword, tuple(found))

    def _chunk(self, side: Side, tests: Sequence[str], again: bool, gpu: str) -> None:
        """Run `tests` in as many processes as it takes; each gets a result."""
        left = dict.fromkeys(tests)
        idle = 0  # processes in a row that brought nothing

        def keep(test: str, result: Result) -> None:
            side.state.add(test, result, again)
            left.pop(test, None)

        def take(row: dict[str, Any]) -> None:
            if "test" in row:
                keep(row.pop("test"), Result(**row))

        while left:
            before = len(left)
            with tempfile.NamedTemporaryFile("w", prefix="graft-list-", suffix=".txt") as wanted:
                wanted.write("".join(f"{test}\n" for test in left))
                wanted.flush()
                files = dict.fromkeys(test.partition("::")[0] for test in left)
                ended = self._pytest(side, [*files], gpu, take, self.limit_s, wanted.name)
            if ended is None:
                return
            if ended.running is not None:
                words = f"its process ended with it: {runner.how(ended.rc)}"
                keep(ended.running, Result("error", f"{words}\n{runner.tail(ended.output, 8)}"))
            elif ended.rc in (0, 1, 5):
                for test in list(left):
                    keep(test, Result("error", "pytest did not find it again"))
            idle = idle + 1 if len(left) == before else 0
            if idle == 2:
                words = f"no process got as far: {runner.how(ended.rc)}"
                for test in list(left):
                    keep(test, Result("error", f"{words}\n{runner.tail(ended.output, 8)}"))

    def _pytest(
        self,
        side: Side,
        args: Sequence[str],
        gpu: str,
        take: Callable[[dict[str, Any]], None],
        limit_s: float,
        wanted: str | None = None,
    ) -> Ended | None:
        """One process; `take` gets its rows as they come. None where the run was ended.

        `wanted` is the file that lists the tests to run (None: collect only).
        """
        test = side.folder / "test"
        # upstream's files import each other as inductor.test_x and as test_x
        env = runner.environ(side.env, test, test / "inductor", limit_s=self.limit_s)
        env["CUDA_VISIBLE_DEVICES"] = gpu
        threads = max((os.cpu_count() or 1) // (len(self.gpus) * self.workers), 1)
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        if wanted is not None:
            env["GRAFT_TEST_LIST"] = wanted
        return runner.process(
            side.python,
            args,
            take,
            cwd=test,
            env=env,
            silence_s=limit_s + GRACE_S + _HANG_S,
            stopped=lambda: self.is_over,
        )


def _below_test(file: str) -> str:
    return file.removeprefix("test/")
