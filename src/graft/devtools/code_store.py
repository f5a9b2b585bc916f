"""Codes that were captured, on disk: equal ones once, whatever case, GPU and stack they are of."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.devtools.codes import Section
from graft.errors import GraftError

KEPT_SIDES = 24
"""Stacks whose codes are kept, the latest used."""

_TABLES = """
create table if not exists codes (hash text primary key, data blob not null);
create table if not exists results (
    side text not null, gpu text not null, item text not null,
    outcome text not null, hash text not null, seconds real not null,
    primary key (side, gpu, item)
) without rowid;
create table if not exists sides (side text primary key, used real not null);
create table if not exists lists (key text primary key, items text not null);
"""


@dataclass(frozen=True)
class Result:
    """What came of an item: `outcome` is "code", with the `hash` of its sections; "none", where
    there is nothing to compile, or "failed", with why in the place of the hash."""

    outcome: str
    hash: str
    seconds: float


class Store:
    """`side` names a stack and all else that decides what comes out."""

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, timeout=30)
        self._database.executescript(_TABLES)

    def close(self) -> None:
        """Write what is not yet written."""
        with self._lock:
            self._database.commit()
            self._database.close()

    def add(self, side: str, gpu: str, answer: dict[str, Any]) -> Result:
        """Keep what a process answered (`graft.devtools.codes.answer`)."""
        if "sections" in answer:
            data = json.dumps(answer["sections"]).encode()
            outcome, key = "code", hashlib.sha256(data).hexdigest()
        else:
            data = b""
            outcome = "none" if "none" in answer else "failed"
            key = str(answer.get("none") or answer.get("error") or "")
        seconds = float(answer.get("seconds", 0.0))
        with self._lock:
            if data:
                self._database.execute(
                    "insert or ignore into codes values (?, ?)", (key, zlib.compress(data, 6))
                )
            self._database.execute(
                "insert or replace into results values (?, ?, ?, ?, ?, ?)",
                (side, gpu, answer["item"], outcome, key, seconds),
            )
            self._database.commit()
        return Result(outcome, key, seconds)

    def results(self, side: str, gpu: str) -> dict[str, Result]:
        """What is known of a side on a GPU, by item."""
        with self._lock:
            rows = self._database.execute(
                "select item, outcome, hash, seconds from results where side = ? and gpu = ?",
                (side, gpu),
            ).fetchall()
        return {item: Result(*rest) for item, *rest in rows}

    def sections(self, key: str) -> list[Section]:
        """The code with this hash. Raises KeyError."""
        with self._lock:
            row = self._database.execute("select data from codes where hash = ?", (key,)).fetchone()
        if row is None:
            raise KeyError(key)
        return [(title, part, text) for title, part, text in json.loads(zlib.decompress(row[0]))]

    def items(self, key: str) -> list[str] | None:
        """A list that was kept."""
        with self._lock:
            row = self._database.execute("select items from lists where key = ?", (key,)).fetchone()
        return None if row is None else list(json.loads(row[0]))

    def keep_items(self, key: str, items: Sequence[str]) -> None:
        """Keep the items of a group."""
        with self._lock:
            self._database.execute(
                "insert or replace into lists values (?, ?)", (key, json.dumps(list(items)))
            )
            self._database.commit()

    def use(self, sides: Sequence[str]) -> None:
        """Note that these are in use; forget what was not for longest, beyond `KEPT_SIDES`."""
        with self._lock:
            now = time.time()
            for side in sides:
                self._database.execute("insert or replace into sides values (?, ?)", (side, now))
            old = self._database.execute(
                "select side from sides order by used desc limit -1 offset ?", (KEPT_SIDES,)
            ).fetchall()
            if old:
                self._database.executemany("delete from sides where side = ?", old)
                self._database.executemany("delete from results where side = ?", old)
                self._database.execute(
                    "delete from codes where hash not in (select hash from results)"
                )
            self._database.commit()

    def forget(self, sides: Sequence[str]) -> None:
        """Forget what is known of these."""
        with self._lock:
            for side in sides:
                self._database.execute("delete from results where side = ?", (side,))
            self._database.commit()


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Store]:
    """The store in `folder`. Raises GraftError for a file that is none."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "codes.sqlite"
    try:
        store = Store(path)
    except sqlite3.DatabaseError as damaged:
        raise GraftError(f"{path} cannot be read: {damaged}", f"rm {path}") from damaged
    try:
        yield store
    finally:
        store.close()
