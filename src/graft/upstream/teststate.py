"""What came of one side's tests so far, in a file: a run that was ended goes on from it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from graft.errors import GraftError
from graft.testing.runner import Result


@dataclass
class State:
    """Rows of JSON in `path`, the first of which is `key`: all that decides what comes out.

    `collected` maps (file, keyword) to the tests that pytest found in it; `results` a test to its
    result, `again` to that of a second run, by itself.
    """

    path: Path
    key: Mapping[str, Any]
    collected: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    again: dict[str, Result] = field(default_factory=dict)
    _file: IO[str] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def final(self, test: str) -> Result | None:
        """What counts: of a test that was run again, the second time."""
        return self.again.get(test, self.results.get(test))

    def add_collection(self, file: str, keyword: str, tests: tuple[str, ...]) -> None:
        """Keep what pytest found in a file."""
        self._add({"file": file, "keyword": keyword, "tests": list(tests)})

    def add(self, test: str, result: Result, again: bool = False) -> None:
        """Keep a test's result."""
        row = {"test": test, **asdict(result)}
        self._add(row | {"again": True} if again else row)

    def _add(self, row: dict[str, Any]) -> None:
        with self._lock:
            if self._file is not None:  # closed: what a thread that is ending says is too late
                self._file.write(json.dumps(row) + "\n")
                self._file.flush()
                self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        if "tests" in row:
            self.collected[row["file"], row["keyword"]] = tuple(row["tests"])
        else:
            result = Result(row["outcome"], row["message"], row["seconds"], row["properties"])
            (self.again if row.get("again") else self.results)[row["test"]] = result


def digest(key: Mapping[str, Any]) -> str:
    """SHA-256 of a key (64 hexadecimal digits)."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def opened(folder: Path, side: str, key: Mapping[str, Any], anew: bool = False) -> Iterator[State]:
    """The state of `side` for `key`, in a file of `folder` that is named for both.

    What an earlier run wrote is read, unless `anew`; a last line that was cut short is dropped.
    Raises GraftError where another run holds the file, or it is not such a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = State(folder / f"{side}-{digest(key)[:12]}.jsonl", dict(key))
    with open(state.path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            raise GraftError(
                f"another run is at work on {state.path}",
                "wait until it has ended, or give a folder of its own: --state DIR",
            ) from held
        _read(state, file, anew)
        state._file = file
        try:
            yield state
        finally:
            with state._lock:
                state._file = None


def _read(state: State, file: IO[str], anew: bool) -> None:
    file.seek(0)
    text = "" if anew else file.read()
    whole = text[: text.rfind("\n") + 1]
    file.seek(0)
    file.truncate(len(whole.encode()))
    file.seek(0, 2)
    if not whole:
        file.write(json.dumps(state.key) + "\n")
        file.flush()
        return
    try:
        first, *rows = (json.loads(line) for line in whole.splitlines())
        if first != json.loads(json.dumps(state.key)):
            raise ValueError("its first line is of another run")
        for row in rows:
            state._take(row)
    except (ValueError, KeyError, TypeError) as wrong:
        raise GraftError(
            f"{state.path} is not what a run of tests left: {wrong}",
            "the same command with --anew, which writes it anew",
        ) from wrong
