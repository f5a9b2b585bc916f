"""Runs points over contenders and GPUs: lanes of a GPU, a worker a contender in each.

The workers of a lane take turns in a point's timing. Where a GPU has several lanes, whoever works
on it holds its lock: a lane while it times a point, a worker for what else it does on the GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from graft.bench import kernel_groups
from graft.bench.gpu_lock import GpuLock
from graft.bench.plan import Contender, Point
from graft.bench.protocol import Message, Remote, WorkerLost
from graft.bench.results import Journal, Row
from graft.bench.stats import paired_ratio, spread
from graft.errors import GraftError
from graft.places import ROOT, without_folders
from graft.stack.trees import caches

WORKER = ("-m", "graft.bench.worker")
# Work that outlasts this is not disturbed by what came before it, and is dear to repeat.
_LONG_US = 5e3
MIN_SAMPLES = 30
_HELLO_TIMEOUT_S = 180.0
_COPY_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Settings:
    """How to measure: `rounds` turns of `samples` each, at least 30 together.

    Work of more than 5 ms gets as few samples a turn as make 30. `timeout_s` bounds each
    preparation and each turn. `serial` compiles one contender after the other, which compile
    times to be compared need; otherwise they compile at the same time. `shared` has them compile
    one after the other with one folder for what is compiled and tuned, so that a kernel which is
    the same to the letter is compiled and tuned once, by whoever needs it first: the times of the
    others' compiles mean nothing, and rows have none. The first contender's step is then not
    checked where that would be a compile of its own.

    `jobs` points of a GPU are under way at a time: compiles overlap, what happens on the GPU does
    not. With `spread` any of them compiles on any core; otherwise each has cores of its own. After
    `seconds` what is under way is given up; no point begins that would not be done by then.
    `sources` is the folder for the kernels of training steps.
    """

    rounds: int = 10
    samples: int = 5
    timeout_s: float = 300.0
    serial: bool = False
    shared: bool = False
    spread: bool = False
    jobs: int = 1
    autotune: bool = False
    seconds: float | None = None
    sources: Path | None = None
    peer_paths: tuple[str, ...] = ()
    worker: tuple[str, ...] = WORKER
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def long_samples(self) -> int:
        return min(self.samples, -(-MIN_SAMPLES // self.rounds))

    def as_dict(self) -> dict[str, Any]:
        """The clock's part, as result files hold it."""
        return {
            "rounds": self.rounds,
            "samples": self.samples,
            "serial": self.serial,
            **({"shared": True} if self.shared else {}),
        }


# What torchrun sets for its ranks. A worker is no rank, and torch must not take it for one;
# OMP_NUM_THREADS is set to 1 by torchrun where the user has not set it.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


# In place of a point, where there may be one later.
_LATER = Point("", (), "")


class LaneLost(Exception):
    """A GPU on which no worker starts: the text says what was seen."""


@dataclass
class Gpu:
    """A GPU, as CUDA_VISIBLE_DEVICES names it, that its lanes share by the lock at `lock`.

    `copy_gb_per_s` is measured by the first lane that opens, for all, under `guard`.
    """

    name: str
    lock: Path
    copy_gb_per_s: Message = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)


class _Seat:
    """A contender on one GPU: its worker, which is replaced when it is lost."""

    def __init__(
        self,
        contender: Contender,
        gpu: Gpu,
        settings: Settings,
        scratch: Path,
        caches: Path,
        cores: frozenset[int],
        threads: int,
    ) -> None:
        self.contender = contender
        self.absent: str | None = None
        self.about: Message = {}
        self._cores = cores
        self._threads = threads
        self._settings = settings
        self._scratch = scratch
        self._caches = caches
        self._gpu = gpu
        self._remote: Remote | None = None
        self._greeted = False
        self.held_s = 0.0  # for how long its workers held the GPU

    @property
    def label(self) -> str:
        return self.contender.label

    @property
    def alive(self) -> bool:
        return self._remote is not None

    def start(self) -> None:
        """Start a worker, if there is none, and ask who it is; `greet` hears the answer."""
        if self._remote is not None or self.absent:
            return
        argv = (*self.contender.python, *self._settings.worker)
        remote = Remote(argv, self._environment(), self._scratch / "worker.log", self._cores)
        self._remote, self._greeted = remote, False
        hello = {
            "do": "hello",
            "impl": self.contender.impl,
            "knobs": dict(self.contender.knobs),
            "paths": list(self._settings.peer_paths),
            "autotune": self._settings.autotune,
            "lock": str(self._gpu.lock),
        }
        try:
            remote.send(hello)
        except WorkerLost as lost:
            self._remote = None
            raise LaneLost(f"{self.label}: {lost}") from None

    def greet(self) -> None:
        """Have a worker that has said hello. Raises LaneLost when none starts."""
        remote = self._remote
        if remote is None or self._greeted:
            return
        try:
            reply = remote.receive(_HELLO_TIMEOUT_S)
        except WorkerLost as lost:
            self._remote = None
            raise LaneLost(f"{self.label}: {lost}") from None
        if not reply["ok"]:
            self.close()
            if reply["kind"] == "knob":
                raise GraftError(f"--set {self.label}: {reply['error']}")
            raise LaneLost(f"{self.label}: {reply['error']}")
        if "absent" in reply:
            self.absent = reply["absent"]
            self.close()
            return
        self.about = {n: value for n, value in reply.items() if n not in ("ok", "held_s")}
        self._greeted = True

    @property
    def _live(self) -> Remote:
        """Its worker. Raises WorkerLost when it was given up, as at the end of --seconds."""
        if self._remote is None:
            raise WorkerLost("crash", "the worker was ended")
        return self._remote

    def send(self, message: Message) -> None:
        try:
            self._live.send(message)
        except WorkerLost:
            self._remote = None
            raise

    def receive(self, timeout_s: float) -> Message:
        """The reply. A worker that is lost, or says that it cannot go on, is dropped."""
        try:
            reply = self._live.receive(timeout_s)
        except WorkerLost:
            self._remote = None
            raise
        if reply.get("fatal"):
            self.close()
        self.held_s += reply.pop("held_s", 0.0)
        return reply

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()
            self._remote = None

    def kill(self) -> None:
        if self._remote is not None:
            self._remote.kill()
            self._remote = None

    def _environment(self) -> dict[str, str]:
        """Compile caches that are empty at the start; its GPU; a share of the lane's cores."""
        env = caches.stock_environ(self._settings.env)
        if "LOCAL_RANK" in env:
            env = {name: value for name, value in env.items() if name not in _RANK_VARIABLES}
            env = {name: value for name, value in env.items() if "TORCHELASTIC" not in name}
        env |= {
            "CUDA_VISIBLE_DEVICES": self._gpu.name,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "src"), env.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self._caches / "inductor"),
            "TRITON_HOME": str(self._caches / "triton"),
        }
        env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(self._threads))
        return env


class Lane:
    """A worker for each contender on one GPU, which hold it in turn.

    `cores` are the lane's own, so that another lane's compiles are not in the way of this one's
    launches; those of all lanes, where launches do not matter.
    """

    def __init__(
        self,
        gpu: Gpu,
        contenders: Sequence[Contender],
        settings: Settings,
        scratch: Path,
        cores: frozenset[int],
    ) -> None:
        self.gpu = gpu
        self.error: str | None = None
        self.about: Message = {}
        self.points = 0
        self.ready_s = 0.0  # from when it was made until its first point
        self._made = time.monotonic()
        self._settings = settings
        self._lock = GpuLock(gpu.lock)
        self.seats = []
        at_once = 4 if settings.spread else len(contenders)
        threads = max(1, min(8, len(cores) // at_once))
        for contender in contenders:
            own = scratch / contender.label
            own.mkdir(parents=True, exist_ok=True)
            caches = scratch / "caches" if settings.shared else own
            self.seats.append(_Seat(contender, gpu, settings, own, caches, cores, threads))

    def open(self) -> None:
        """Start the workers; measure the copy bandwidth, the GPU's first lane. Raises LaneLost."""
        self.revive()
        present = [seat for seat in self.seats if not seat.absent]
        if not present:
            raise LaneLost("; ".join(f"{seat.label}: {seat.absent}" for seat in self.seats))
        self.about = present[0].about
        with self.gpu.guard:
            if not self.gpu.copy_gb_per_s:
                self.gpu.copy_gb_per_s = self._copy(present[0])
        self.ready_s = time.monotonic() - self._made

    @property
    def held_s(self) -> tuple[float, float]:
        """Seconds for which it held the GPU: its workers for preparing, itself for timing."""
        return sum(seat.held_s for seat in self.seats), self._lock.held_s

    def _copy(self, seat: _Seat) -> Message:
        try:
            seat.send({"do": "copy"})
            reply = seat.receive(_COPY_TIMEOUT_S)
        except WorkerLost as lost:
            raise LaneLost(f"copy bandwidth: {lost}") from None
        if not reply.pop("ok"):
            raise LaneLost(f"copy bandwidth: {reply['error']}")
        return reply

    def revive(self) -> None:
        """Replace the workers that were lost. Raises LaneLost when one does not start."""
        for seat in self.seats:
            seat.start()
        for lost in _of_each(_Seat.greet, self.seats, LaneLost):
            if isinstance(lost, LaneLost):
                raise lost

    def close(self) -> None:
        for seat in self.seats:
            seat.close()

    def kill(self) -> None:
        for seat in self.seats:
            seat.kill()

    def measure(self, point: Point) -> Row:
        """The row of a point: every contender prepared, then timed in turns.

        What goes wrong with one contender is its entry's error. Raises LaneLost when a worker
        that was lost cannot be started again.
        """
        self.revive()
        row: Row = {**point.as_dict(), "gpu": self.gpu.name, "times": {}}
        times: dict[str, Message] = row["times"]
        facts = self._prepare(point, times)
        ready = [seat for seat in self.seats if seat.label in facts]
        with self._lock.timing():
            rounds = self._rounds(ready, facts, times)
        self._release()
        self.points += 1
        bytes_moved = next((f.get("bytes") for f in facts.values() if f.get("bytes")), None)
        if bytes_moved:
            row["bytes"] = bytes_moved
            row["limit_us"] = round(bytes_moved / self.gpu.copy_gb_per_s["median"] / 1e3, 2)
        for label, samples in rounds.items():
            times[label] = self._time(facts[label], samples, row.get("limit_us"))
        base = self.seats[0].label
        if base in rounds:
            row["speedup"] = {
                label: paired_ratio(rounds[base], rounds[label]).as_dict(4)
                for label in rounds
                if label != base
            }
        row["times"] = {seat.label: times[seat.label] for seat in self.seats}
        found = {label: time.pop("generated", None) for label, time in row["times"].items()}
        if any(found.values()):
            row["generated"] = kernel_groups.summary(
                {label: kernels for label, kernels in found.items() if kernels is not None},
                self.gpu.copy_gb_per_s["median"],
            )
        if self._settings.shared:
            for time in row["times"].values():
                time.pop("compile_s", None)
        return row

    def _prepare(self, point: Point, times: dict[str, Message]) -> dict[str, Message]:
        request = {
            "do": "prepare",
            "case": point.case,
            "shape": list(point.shape),
            "dtype": point.dtype,
            "corpus": point.corpus,
            "seed": zlib.crc32(point.key.encode()),
        }
        facts: dict[str, Message] = {}
        present = [seat for seat in self.seats if not seat.absent]
        times |= {seat.label: {"absent": seat.absent} for seat in self.seats if seat.absent}
        if self._settings.serial or self._settings.shared:
            for seat in present:
                checks = self._settings.serial or seat is not self.seats[0]
                asked = request | ({} if checks else {"checks": False})
                self._ask([seat], asked, facts, times)
                if _is_short(times.get(seat.label)) and seat.alive:  # what others had may be free
                    del times[seat.label]
                    self._ask([seat], asked, facts, times)
            return facts
        self._ask(present, request, facts, times)
        # Eager and the float64 reference take more memory than what is timed. Where that of all
        # contenders at a time is too much, those that had none left get it to themselves.
        for seat in present:
            if _is_short(times.get(seat.label)) and len(present) > 1 and seat.alive:
                del times[seat.label]
                self._ask([seat], request, facts, times)
        return facts

    def _ask(
        self,
        group: Sequence[_Seat],
        request: Message,
        facts: dict[str, Message],
        times: dict[str, Message],
    ) -> None:
        """Let `group` prepare at the same time; sort what they answer into facts and errors."""
        asked = []
        for seat in group:
            try:
                seat.send(request | self._kept(request["case"], seat))
                asked.append(seat)
            except WorkerLost as lost:
                times[seat.label] = _error(lost.kind, f"{lost} (preparing)")
        replies = _of_each(lambda seat: seat.receive(self._settings.timeout_s), asked, WorkerLost)
        for seat, reply in zip(asked, replies, strict=True):
            if isinstance(reply, WorkerLost):
                times[seat.label] = _error(reply.kind, f"{reply} (preparing)")
                continue
            if reply.pop("ok"):
                facts[seat.label] = reply
            elif reply["kind"] == "absent":
                times[seat.label] = {"absent": reply["error"]}
            else:
                times[seat.label] = _error(reply["kind"], reply["error"]) | _shown(
                    reply.get("facts", {})
                )

    def _kept(self, case: str, seat: _Seat) -> Message:
        folder = self._settings.sources
        return {"sources": str(folder / case / seat.label)} if folder else {}

    def _rounds(
        self,
        ready: list[_Seat],
        facts: dict[str, Message],
        times: dict[str, Message],
    ) -> dict[str, list[list[float]]]:
        """Samples by label and round. Every other round goes the other way around."""
        rounds: dict[str, list[list[float]]] = {seat.label: [] for seat in ready}
        longest = max((facts[seat.label].get("estimate_us", 0.0) for seat in ready), default=0.0)
        samples = self._settings.long_samples if longest > _LONG_US else self._settings.samples
        for turn in range(self._settings.rounds):
            for seat in list(ready if turn % 2 == 0 else reversed(ready)):
                try:
                    last = turn + 1 == self._settings.rounds
                    seat.send({"do": "measure", "samples": samples, "last": last})
                    reply = seat.receive(self._settings.timeout_s)
                    problem = None if reply["ok"] else _error(reply["kind"], reply["error"])
                except WorkerLost as lost:
                    problem = _error(lost.kind, f"{lost} (timing)")
                if problem is None:
                    rounds[seat.label].append(reply["us"])
                    facts[seat.label] |= reply.get("facts", {})
                else:
                    times[seat.label] = problem
                    ready.remove(seat)
                    del rounds[seat.label]
        return rounds

    def _release(self) -> None:
        """Give the case's memory back; a worker that is lost here is replaced at the next case."""
        asked = []
        for seat in self.seats:
            with contextlib.suppress(WorkerLost):
                if seat.alive:
                    seat.send({"do": "release"})
                    asked.append(seat)
        _of_each(lambda seat: seat.receive(_COPY_TIMEOUT_S), asked, WorkerLost)

    @staticmethod
    def _time(facts: Message, rounds: list[list[float]], limit_us: float | None) -> Message:
        us = spread([sample for turn in rounds for sample in turn]).as_dict(2)
        out: Message = {"us": us}
        if limit_us:
            out["sol"] = round(limit_us / us["median"], 4)
        # How far apart the turns of one contender are: what a difference has to exceed.
        medians = [statistics.median(turn) for turn in rounds]
        out["between_rounds"] = round((max(medians) - min(medians)) / us["median"], 4)
        return out | _shown(facts)


_Found = TypeVar("_Found")
_Lost = TypeVar("_Lost", bound=Exception)


def _of_each(
    ask: Callable[[_Seat], _Found], seats: Sequence[_Seat], lost: type[_Lost]
) -> list[_Found | _Lost]:
    """What `ask` returns for each seat, or the `lost` that it raises.

    All are listened to at the same time: one may wait for the GPU that another, which hangs, has.
    """

    def answer(seat: _Seat) -> _Found | _Lost:
        try:
            return ask(seat)
        except lost as error:
            return error

    with ThreadPoolExecutor(max(1, len(seats))) as pool:
        return list(pool.map(answer, seats))


def _is_short(time: Message | None) -> bool:
    """Whether the GPU's memory was too short for it."""
    return time is not None and time.get("error", {}).get("kind") == "oom"


def _shown(facts: Message) -> Message:
    """The facts that a row keeps."""
    hidden = ("bytes", "estimate_us", "ok")
    return {name: value for name, value in facts.items() if name not in hidden}


def _error(kind: str, message: str) -> Message:
    return {"error": {"kind": kind, "message": without_folders(message)}}


def run(
    points: Sequence[Point],
    contenders: Sequence[Contender],
    gpus: Sequence[str],
    settings: Settings,
    journal: Journal,
    on_row: Callable[[Row], None] = lambda row: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> None:
    """Measure what the journal lacks of `points`, each on one of `gpus`.

    A GPU on which no worker starts, or on which one cannot be started again, is noted and left
    out, and its point goes to the others. Raises GraftError when none is left, or the seconds
    are over, with points still to do; what was measured, and on what, is in the journal.
    """
    todo = [point for point in points if point.key not in journal.done]
    work = list(todo)  # in the order to begin in
    left = len(todo)
    lock = threading.Lock()
    failure: list[BaseException] = []
    stop = threading.Event()
    lanes: list[Lane] = []
    blamed: set[str] = set()  # points after which a GPU was lost
    # A kernel's fault can take every process of its GPU with it, and the GPU's memory is shared. So
    # a point at which something crashed, or was short of memory, beside others is measured once
    # more, alone, when nothing else is left to do.
    suspects: list[Point] = []
    tried: set[str] = set()  # of these, what was
    ends = None if settings.seconds is None else time.monotonic() + settings.seconds
    pace: list[float] = []  # seconds that points took, over what they were thought to

    def in_time(point: Point) -> bool:
        """Whether it would be done by then, at the pace that four points of five kept."""
        at = sorted(pace)[len(pace) * 4 // 5] if pace else 1.0
        return ends is None or time.monotonic() + point.cost_s * at <= ends

    def following() -> Point | None:
        """The next point that would be done; `_LATER` where none is left, None where none would."""
        for place, point in enumerate(work):
            if in_time(point):
                return work.pop(place)
        return None if work else _LATER

    def serve(lane: Lane) -> None:
        nonlocal left
        try:
            lane.open()
            with lock:
                journal.describe(described(lanes, journal.head))
            while not stop.is_set():
                with lock:
                    point = following()
                    if point is _LATER and not left:
                        return
                    if point is _LATER and left == len(suspects):
                        point = suspects.pop()
                        tried.add(point.key)
                if point is None:
                    return
                if point is _LATER:  # another lane may yet fail and give its point back
                    time.sleep(0.2)
                    continue
                lost: LaneLost | None = None
                started = time.monotonic()
                try:
                    row = lane.measure(point)
                    if point.cost_s:
                        pace.append((time.monotonic() - started) / point.cost_s)
                    if not stop.is_set():
                        lost = _lost(lane)
                except LaneLost:
                    with lock:
                        work.insert(0, point)
                    raise
                if stop.is_set():
                    return  # its workers were killed under it
                with lock:
                    others = any(not other.error for other in lanes if other is not lane)
                    # What failed as the GPU was lost is not the point's error, unless no other
                    # GPU can say, or one was lost at this point before.
                    if lost and others and point.key not in blamed:
                        blamed.add(point.key)
                        work.insert(0, point)
                    elif _suffered(row) and len(lanes) > 1 and point.key not in tried:
                        suspects.append(point)
                    else:
                        journal.append(row)
                        left -= 1
                        on_row(row)
                if lost:
                    raise lost
        except LaneLost as why:
            with lock:
                lane.error = without_folders(str(why))
                journal.describe(described(lanes, journal.head))
            on_note(f"GPU {lane.gpu.name}: {why}; left out")
        except BaseException as error:
            failure.append(error)
            stop.set()
        finally:
            if stop.is_set():
                lane.kill()
            else:
                lane.close()

    with tempfile.TemporaryDirectory(prefix="graft-bench-", ignore_cleanup_errors=True) as scratch:
        if not todo:
            return
        jobs = min(settings.jobs, -(-len(todo) // len(gpus)))
        cores = sorted(os.sched_getaffinity(0))
        lanes_of_all = len(gpus) * jobs
        shares = iter(
            [frozenset(cores)] * lanes_of_all if settings.spread else share(cores, lanes_of_all)
        )
        for name in gpus:
            gpu = Gpu(name, Path(scratch) / f"gpu{name}.lock")
            for job in range(jobs):
                own = Path(scratch) / f"gpu{name}-{job}"
                lanes.append(Lane(gpu, contenders, settings, own, next(shares)))
        threads = [threading.Thread(target=serve, args=(lane,), daemon=True) for lane in lanes]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    if ends is not None and time.monotonic() > ends and not stop.is_set():
                        stop.set()
                        for lane in lanes:
                            lane.kill()
        except BaseException:
            stop.set()
            for lane in lanes:
                lane.kill()
            raise
    if failure:
        raise failure[0]
    for line in use(lanes, time.monotonic() - began):
        on_note(line)
    if left and ends is not None and not all(lane.error for lane in lanes):
        raise GraftError(
            f"{left} of {len(todo)} points are not measured within {settings.seconds:g} s",
            next="the same command, which goes on where this one ended",
        )
    if left:
        said = "; ".join(f"GPU {lane.gpu.name}: {lane.error}" for lane in lanes if lane.error)
        raise GraftError(
            f"no GPU is left, and {left} of {len(todo)} points are not measured ({said})",
            next="the same command, which goes on where this one ended",
        )


def _suffered(row: Row) -> bool:
    """Whether a contender failed at the point as others on the GPU can make it fail."""
    kinds = {time.get("error", {}).get("kind") for time in row["times"].values()}
    return not kinds.isdisjoint(("crash", "oom"))


def use(lanes: Sequence[Lane], seconds: float) -> list[str]:
    """How busy each GPU was, a line each: what more points at a time could gain."""
    lines = []
    for name in dict.fromkeys(lane.gpu.name for lane in lanes):
        own = [lane for lane in lanes if lane.gpu.name == name and not lane.error]
        points = sum(lane.points for lane in own)
        if points:
            ready = max(lane.ready_s for lane in own)
            preparing, timing = (sum(held) for held in zip(*(lane.held_s for lane in own)))
            lines.append(
                f"GPU {name}: {points} points in {seconds:.0f} s, ready after {ready:.0f} s;"
                f" held for {preparing:.0f} s to prepare, for {timing:.0f} s to time"
            )
    return lines


def share(cores: Sequence[int], lanes: int) -> list[frozenset[int]]:
    """Cores for each lane: neighbouring ones, as many for each; all for all where they are few.

    A lane needs a core for its launches and one for a compile.
    """
    count = len(cores)
    if lanes == 1 or count < 2 * lanes:
        return [frozenset(cores)] * lanes
    edges = [i * count // lanes for i in range(lanes + 1)]
    return [frozenset(cores[low:high]) for low, high in itertools.pairwise(edges)]


_ABOUT_GPU = ("gpu", "driver", "capability", "sms", "memory_bytes", "l2_bytes", "flush_bytes")


def described(lanes: Sequence[Lane], head: Mapping[str, Any]) -> dict[str, Any]:
    """What the lanes found out about GPUs and contenders, as a result file holds it."""
    gpus: dict[str, dict[str, Any]] = {}
    contenders = {label: dict(about) for label, about in head["contenders"].items()}
    for lane in lanes:
        found: dict[str, Any] = {}
        about = dict(lane.about)
        for name in _ABOUT_GPU:
            if name in about:
                found["name" if name == "gpu" else name] = about[name]
        if lane.gpu.copy_gb_per_s:
            found["copy_gb_per_s"] = lane.gpu.copy_gb_per_s
        if lane.error:
            found["error"] = lane.error
        if found:  # a lane that is still starting has nothing to say
            gpus.setdefault(lane.gpu.name, {"index": lane.gpu.name}).update(found)
        for seat in lane.seats:
            if seat.absent:
                contenders[seat.label]["absent"] = seat.absent
            for name in ("torch", "git", "triton", "python", "version"):
                if seat.about.get(name):
                    contenders[seat.label][name] = seat.about[name]
    return {"gpus": list(gpus.values()), "contenders": contenders}


def _lost(lane: Lane) -> LaneLost | None:
    """Why a worker that was lost at a point cannot be replaced; None where all go on."""
    try:
        lane.revive()
    except LaneLost as lost:
        return lost
    return None
