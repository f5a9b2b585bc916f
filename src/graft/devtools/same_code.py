"""`graft same-code A B`: whether two stacks generate the same code, to the letter.

Cases, operators and generated graphs are captured on both for each described GPU
(`graft.devtools.codes`), by a few processes that live long; what was captured of a stack is kept
(`graft.code_store`). The lab, the cases and the generator are those of this checkout on both sides.

Two codes are the same where their sections are equal, or are once the numbers in the names of
kernels, buffers and temporaries are replaced by the order in which they first appear: one for one,
so that two names never become one.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import json
import os
import queue
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.devtools import code_store, snapshots
from graft.devtools.code_store import Result, Store
from graft.devtools.codes import GROUPS, MODELS, PARTS, POINTS, Section, listed
from graft.devtools.snapshots import Snapshot
from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT, SRC
from graft.processes import kill_group
from graft.stack import files_hash
from graft.stack.git import blob_id
from graft.stack.trees import caches
from graft.stack.trees.bases import Base

GRAPHS = 1000
KINDS = ("same", "different", "failed on both", "failed on one", "nothing to compile")

_NUMBERED = re.compile(r"(?<![A-Za-z0-9])(buf|tmp)(\d+)(?![0-9])")


@dataclass(frozen=True)
class Wanted:
    """What to compare. `only` are texts one of which an item's name contains (none: all); `limit`
    is for each group; `without` are parts that do not count."""

    groups: tuple[str, ...] = GROUPS
    gpus: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16",)
    seed: int = 1
    graphs: int = GRAPHS
    limit: int | None = None
    without: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raise UsageError for what there is not."""
        for kind, given, known in (
            ("group", self.groups, (*GROUPS, POINTS, MODELS)),
            ("part", self.without, PARTS),
        ):
            for each in given:
                if each not in known:
                    raise UsageError(f"there is no {kind} {each}{nearest(each, known)}")
        if self.graphs < 0 or (self.limit is not None and self.limit < 1):
            raise UsageError("--graphs takes 0 or more, --limit 1 or more")


@dataclass(frozen=True)
class Difference:
    """An item on a GPU whose codes differ, in `parts`; `diff` are the lines of a unified diff."""

    item: str
    gpu: str
    kind: str
    parts: tuple[str, ...]
    diff: tuple[str, ...]


@dataclass
class Comparison:
    """Counts by (group, GPU) and kind, the differences, and how long each group took.

    `seconds` is the captures' own time by (group, side), of those that this run did; `pending` the
    items that were not reached, a GPU each.
    """

    sides: tuple[Snapshot, Snapshot]
    wanted: Wanted
    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    captured: Counter[tuple[str, str]] = field(default_factory=Counter)
    wall_s: float = 0.0
    pending: int = 0

    @property
    def all_same(self) -> bool:
        """Nothing differs, of what was compared."""
        return not self.differences


def compare(
    sides: tuple[Snapshot, Snapshot],
    base: Base,
    wanted: Wanted,
    *,
    workers: int | None = None,
    seconds: float | None = None,
    anew: bool = False,
    say: Callable[[str], None] = lambda line: None,
    root: Path = ROOT,
) -> Comparison:
    """Capture what is not kept yet, and compare.

    `workers` processes at a time (default: one a core); after `seconds` none takes another item.
    Raises UsageError for what is wanted wrongly, GraftError where a side's Python cannot start.
    """
    started = time.monotonic()
    wanted.check()
    names = ("A", "B")
    keys = _keys(sides, base, wanted)
    found = Comparison(sides, wanted)
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(code_store.opened(snapshots.folder(root)))
        if anew:
            store.forget(keys)
        store.use(keys)
        trees = [snapshots.build(side, base, root) for side in sides]
        snapshots.prune({built.prefix for built in trees}, root)
        pythons = {key: str(built.python) for key, built in zip(keys, trees, strict=True)}
        items = {
            group: _items(store, group, wanted, pythons[keys[0]], base) for group in wanted.groups
        }
        if not any(items.values()):
            raise UsageError("no case is called so", "graft same-code A B, without --cases")
        jobs = _jobs(store, keys, wanted.gpus, [i for of in items.values() for i in of])

        def keep(key: str, gpu: str, answer: dict[str, Any]) -> None:
            kept = store.add(key, gpu, answer)
            of = (answer["item"].partition("/")[0], names[keys.index(key)])
            found.captured[of] += 1
            found.seconds[of] = found.seconds.get(of, 0.0) + kept.seconds

        deadline = None if seconds is None else started + seconds
        _Pool(pythons, jobs, workers or os.cpu_count() or 1, deadline, keep, say).run()
        for gpu in wanted.gpus:
            a, b = (store.results(key, gpu) for key in keys)
            for group, of in items.items():
                counts = found.counts[group, gpu] = Counter()
                for item in of:
                    if item not in a or item not in b:
                        found.pending += 1
                        continue
                    kind, difference = _judge(store, item, gpu, (a[item], b[item]), wanted.without)
                    counts[kind] += 1
                    found.differences += [difference] if difference else []
    found.wall_s = time.monotonic() - started
    return found


def _keys(sides: tuple[Snapshot, Snapshot], base: Base, wanted: Wanted) -> tuple[str, str]:
    """What names each side's codes. A stack beside itself is captured twice, to see that it can."""
    tool = _tool_hash(base, wanted)
    a, b = (f"{side.hash[:32]}-{tool}" for side in sides)
    return a, f"{b}-again" if a == b else b


def _tool_hash(base: Base, wanted: Wanted) -> str:
    """Of what decides what is captured, beside the stack: base, lab, cases, generator, models."""
    home = SRC / "graft"
    mine = (home / "devtools" / f"{name}.py" for name in ("codes", "fuzz", "programs"))
    files = [*mine, home / "upstream/operators.py", *(ROOT / "bench/cases").glob("*.py")]
    files += [path for package in ("lab", "cases") for path in (home / package).glob("*.py")]
    hashed = {str(path.relative_to(ROOT)): blob_id(path.read_bytes()) for path in files}
    if MODELS in wanted.groups:
        from graft.cases import models

        hashed[models.FILE.name] = blob_id(models.FILE.read_bytes())
        for library in models.LIBRARIES:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                version = importlib.metadata.version(library)
                hashed[library] = blob_id(version.encode())
    return files_hash({**hashed, "base": blob_id(json.dumps(base.as_json()).encode())})[:16]


def _items(store: Store, group: str, wanted: Wanted, python: str, base: Base) -> list[str]:
    request = {"dtypes": list(wanted.dtypes), "seed": wanted.seed, "graphs": wanted.graphs}
    key = f"{_tool_hash(base, wanted)} {group} {json.dumps(request)}"
    # what was measured changes from one run to the next, and is read, not generated
    items = listed(group) if group == POINTS else store.items(key)
    if items is None:
        with _Worker(python, "H200") as worker:
            answer = worker.ask({"list": group, **request})
            if answer is None:
                raise GraftError(f"{python} cannot list the {group}: {worker.last_words()}")
        items = answer["items"]
        if group == MODELS and not items:
            raise GraftError(
                f"{base.python} has no library of models",
                f"{base.python} -m pip install -e '{ROOT}[models]'",
            )
        store.keep_items(key, items)
    only = wanted.only
    named = [item for item in items if not only or any(text in item for text in only)]
    return named[: wanted.limit]


Key = tuple[str, str]  # a side and a GPU


def _jobs(
    store: Store, keys: Sequence[str], gpus: Sequence[str], items: Sequence[str]
) -> dict[Key, queue.SimpleQueue[str]]:
    """What is not kept yet, the longest first, as far as another side or GPU says how long."""
    known: dict[str, float] = {}
    missing: dict[Key, list[str]] = {}
    for gpu in gpus:
        for key in keys:
            kept = store.results(key, gpu)
            known |= {item: result.seconds for item, result in kept.items()}
            missing[key, gpu] = [item for item in items if item not in kept]
    jobs: dict[Key, queue.SimpleQueue[str]] = {}
    for of, names in missing.items():
        if names:
            jobs[of] = queue.SimpleQueue()
            for name in sorted(names, key=lambda name: -known.get(name, 0.0)):
                jobs[of].put(name)
    return jobs


# --- capturing -----------------------------------------------------------------------------------


class _Worker:
    """A `python -m graft.devtools.codes GPU CACHES` of a side; its caches go with it."""

    def __init__(self, python: str, gpu: str) -> None:
        self.caches = tempfile.TemporaryDirectory(prefix="graft-codes-")
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, "-P", "-m", "graft.devtools.codes", gpu, self.caches.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=_environment(),
            start_new_session=True,
        )

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Its answer; None where it has ended."""
        assert self.process.stdin
        assert self.process.stdout
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def last_words(self) -> str:
        self.process.wait()  # its output has ended
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        return lines[-1] if lines else "no word"

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *raised: object) -> None:
        kill_group(self.process)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.errors.close()
        self.caches.cleanup()


def _environment() -> dict[str, str]:
    """For a worker: this tool's code, no GPU, one thread, and none of the user's settings."""
    dropped = ("TORCH", "TRITON", "PYTORCH", "INDUCTOR")
    env = {k: v for k, v in caches.stock_environ(os.environ).items() if not k.startswith(dropped)}
    return env | {
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONHASHSEED": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


class _Pool:
    """Threads that each keep one worker busy: of the GPU that comes first, where it has most to do.

    What a worker that ends was at has failed; it is started again for the rest.
    """

    def __init__(
        self,
        pythons: Mapping[str, str],
        jobs: Mapping[Key, queue.SimpleQueue[str]],
        workers: int,
        deadline: float | None,
        keep: Callable[[str, str, dict[str, Any]], None],
        say: Callable[[str], None],
    ) -> None:
        self.pythons, self.jobs, self.deadline = pythons, dict(jobs), deadline
        self.keep, self.say = keep, say
        self.lock = threading.Lock()
        self.busy: Counter[Key] = Counter()
        self.total = sum(job.qsize() for job in self.jobs.values())
        self.done = 0
        self.wrong: Exception | None = None
        self.running: set[_Worker] = set()
        self.stopped = False
        self.threads = [
            threading.Thread(target=self._work, daemon=True)
            for _ in range(min(workers, max(self.total, 1)))
        ]

    def run(self) -> None:
        """Until all is done, or the time is over."""
        for thread in self.threads:
            thread.start()
        try:
            for thread in self.threads:
                while thread.is_alive():
                    thread.join(0.2)
        finally:
            self.stopped = True
            for worker in list(self.running):
                kill_group(worker.process)
            for thread in self.threads:
                thread.join()
        if self.wrong:
            raise self.wrong

    @property
    def _over(self) -> bool:
        late = self.deadline is not None and time.monotonic() > self.deadline
        return self.stopped or late or self.wrong is not None

    def _next(self) -> Key | None:
        with self.lock:
            left = [key for key, job in self.jobs.items() if not job.empty()]
            if not left or self._over:
                return None
            gpu = left[0][1]
            here = [key for key in left if key[1] == gpu]
            chosen = max(here, key=lambda key: self.jobs[key].qsize() / (1 + self.busy[key]))
            self.busy[chosen] += 1
            return chosen

    def _work(self) -> None:
        try:
            while key := self._next():
                try:
                    self._serve(key)
                finally:
                    with self.lock:
                        self.busy[key] -= 1
        except Exception as wrong:
            self.wrong = wrong

    def _serve(self, key: Key) -> None:
        side, gpu = key
        with _Worker(self.pythons[side], gpu) as worker:
            self.running.add(worker)
            try:
                answered = 0
                while not self._over:
                    try:
                        item = self.jobs[key].get_nowait()
                    except queue.Empty:
                        return
                    answer = worker.ask({"item": item})
                    if self.stopped:
                        return
                    if answer is None and not answered:
                        raise GraftError(
                            f"{self.pythons[side]} does not capture {item} on {gpu}: "
                            + worker.last_words()
                        )
                    self.keep(side, gpu, answer or _ended(item, worker))
                    with self.lock:
                        self.done += 1
                        self.say(f"{self.done} of {self.total}: {gpu}, {item}")
                    if answer is None:
                        return
                    answered += 1
            finally:
                self.running.discard(worker)


def _ended(item: str, worker: _Worker) -> dict[str, Any]:
    return {"item": item, "error": f"the process ended: {worker.last_words()}"[:400]}


# --- comparing -----------------------------------------------------------------------------------


def _judge(
    store: Store, item: str, gpu: str, results: tuple[Result, Result], without: Collection[str]
) -> tuple[str, Difference | None]:
    a, b = results
    outcomes = {a.outcome, b.outcome}
    if outcomes == {"code"}:
        if a.hash == b.hash:
            return "same", None
        parts, diff = differing(store.sections(a.hash), store.sections(b.hash), without)
        if not parts:
            return "same", None
        return "different", Difference(item, gpu, "different", parts, tuple(diff))
    if a.outcome == b.outcome:
        return "failed on both" if a.outcome == "failed" else "nothing to compile", None
    said = tuple(
        f"{sign} {result.outcome}" + ("" if result.outcome == "code" else f": {result.hash}")
        for sign, result in zip("-+", results, strict=True)
    )
    return "failed on one", Difference(item, gpu, "failed on one", (), said)


def differing(
    a: Sequence[Section], b: Sequence[Section], without: Collection[str] = ()
) -> tuple[tuple[str, ...], list[str]]:
    """The parts in which two codes differ, in order, and a unified diff of those; both empty where
    they are the same but for `without` and for numbers in names."""
    a = [each for each in a if each[1] not in without]
    b = [each for each in b if each[1] not in without]
    if a == b:
        return (), []
    numbered = [renumbered(of) for of in (a, b)]
    if numbered[0] == numbered[1]:
        return (), []
    parts = [part for part in PARTS if _of(numbered[0], part) != _of(numbered[1], part)]
    # One number more shifts all that follow, in the one way of writing or in the other.
    diffs = (_diff(one, other, parts) for one, other in ((a, b), numbered))
    return tuple(parts), min((diff for diff in diffs if diff), key=len)


def _of(sections: Sequence[Section], part: str) -> list[tuple[str, str]]:
    return [(title, text) for title, its, text in sections if its == part]


def _diff(a: Sequence[Section], b: Sequence[Section], parts: Collection[str]) -> list[str]:
    def lines(sections: Sequence[Section]) -> list[str]:
        return [
            line
            for title, part, text in sections
            if part in parts
            for line in (f"=== {title}", *text.splitlines())
        ]

    return list(difflib.unified_diff(lines(a), lines(b), "A", "B", lineterm=""))


def renumbered(sections: Sequence[Section]) -> list[Section]:
    """With the numbers in names of kernels, buffers (of a graph) and temporaries (of a kernel) in
    the order in which they first appear."""
    found: list[Section] = []
    names = _Names([])
    graph = ""
    for title, part, text in sections:
        of = title.partition(",")[0]
        if of != graph:
            graph = of
            start = f"{of}, kernel "
            titles = [other for other, kind, _ in sections if kind == "kernel"]
            names = _Names([each[len(start) :] for each in titles if each.startswith(start)])
        if part in ("wrapper", "kernel"):
            names.temporaries.clear()
        found.append((names.rename(title), part, names.rename(text)))
    return found


class _Names:
    """The names of a graph, with the numbers that they have here."""

    def __init__(self, kernels: Sequence[str]) -> None:
        self.kernels = {
            name: re.sub(r"_\d+$", "", name) + f"_#{at}" for at, name in enumerate(kernels)
        }
        self.buffers: dict[str, str] = {}
        self.temporaries: dict[str, str] = {}
        longest = sorted(map(re.escape, kernels), key=len, reverse=True)
        self.kernel = re.compile(rf"\b({'|'.join(longest)})\b" if kernels else r"(?!)")

    def rename(self, text: str) -> str:
        text = self.kernel.sub(lambda match: self.kernels[match[1]], text)
        return _NUMBERED.sub(self._number, text)

    def _number(self, match: re.Match[str]) -> str:
        prefix, digits = match.groups()
        of = self.buffers if prefix == "buf" else self.temporaries
        return str(prefix + of.setdefault(digits, f"#{len(of)}"))


# --- telling -------------------------------------------------------------------------------------


def write(found: Comparison, folder: Path) -> list[Path]:
    """A file a difference in `folder`, in the place of what an earlier run left there."""
    shutil.rmtree(folder, ignore_errors=True)
    written = []
    for each in found.differences:
        path = folder / each.gpu / (re.sub(r"[^\w.=-]+", "-", each.item) + ".diff")
        path.parent.mkdir(parents=True, exist_ok=True)
        head = [
            f"# {each.item} on {each.gpu}: {each.kind} {', '.join(each.parts)}".rstrip(),
            f"# A: {found.sides[0].what}",
            f"# B: {found.sides[1].what}",
        ]
        path.write_text("\n".join([*head, *each.diff]) + "\n")
        written.append(path)
    return written


def as_json(found: Comparison) -> dict[str, Any]:
    """Plain data: what was compared, counts, times, and each difference without its diff."""
    wanted = found.wanted
    return {
        "sides": [{"what": side.what, "stack": side.hash} for side in found.sides],
        "pin": found.sides[0].pin.name,
        "gpus": list(wanted.gpus),
        "seed": wanted.seed,
        "graphs": wanted.graphs,
        "dtypes": list(wanted.dtypes),
        "without": sorted(wanted.without),
        "wall_s": round(found.wall_s, 1),
        "pending": found.pending,
        "counts": [
            {"group": group, "gpu": gpu, **{kind: counts[kind] for kind in KINDS}}
            for (group, gpu), counts in found.counts.items()
        ],
        "captures": [
            {"group": group, "side": side, "items": count, "seconds": round(seconds, 1)}
            for ((group, side), count), seconds in zip(
                sorted(found.captured.items()),
                (found.seconds[key] for key in sorted(found.captured)),
                strict=True,
            )
        ],
        "differences": [
            {"item": each.item, "gpu": each.gpu, "kind": each.kind, "parts": list(each.parts)}
            for each in found.differences
        ],
    }


def distinct(differences: Sequence[Difference]) -> Iterator[tuple[Difference, int]]:
    """One difference for each set of changed lines, and how many have it; most frequent first."""
    alike: dict[tuple[str, ...], list[Difference]] = {}
    for each in differences:
        changed = sorted(
            {line for line in each.diff if line[:1] in "-+" and line[:3] not in ("---", "+++")}
        )
        alike.setdefault(tuple(changed), []).append(each)
    for same in sorted(alike.values(), key=len, reverse=True):
        yield same[0], len(same)
