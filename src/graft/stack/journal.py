"""Files that change together: all of them or none, whatever happens in between."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from graft.errors import GraftError, refused
from graft.places import ROOT


@contextlib.contextmanager
def alone(root: Path = ROOT) -> Iterator[None]:
    """Hold the lock of `graft edit` and `graft refresh`, with any earlier write finished.

    Raises GraftError where another process holds it, and for what the file system refuses. The
    lock ends with its process.
    """
    try:
        (root / ".graft").mkdir(exist_ok=True)
        with open(root / ".graft" / "edit.lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as held:
                raise GraftError(
                    f"another graft edit or refresh is at work in {root}",
                    "wait until it has ended, then the same command",
                ) from held
            finish(root)
            yield
    except OSError as wrong:
        raise refused(wrong, root, writable_copy(root)) from wrong


def writable_copy(root: Path) -> str:
    """What to type where the checkout `root` cannot be written."""
    return f"git clone {shlex.quote(str(root))} DIR && cd DIR && ./build.sh, then the same command"


def write(root: Path, changes: Mapping[Path, bytes | None]) -> None:
    """Give each file its bytes (None: remove it).

    Everything is written aside first; from the rename on, `finish` can bring it to its end.
    """
    if not changes:
        return
    aside = root / ".graft" / "journal.new"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    plan = []
    for number, (path, data) in enumerate(changes.items()):
        plan.append((str(path.relative_to(root)), data is not None))
        if data is not None:
            (aside / str(number)).write_bytes(data)
    (aside / "plan.json").write_text(json.dumps(plan))
    os.rename(aside, _journal(root))
    finish(root)


def finish(root: Path = ROOT) -> None:
    """Bring an interrupted `write` to its end; does nothing where there was none."""
    journal = _journal(root)
    if not journal.exists():
        return
    for number, (name, kept) in enumerate(json.loads((journal / "plan.json").read_text())):
        path, new = root / name, journal / str(number)
        if not kept:
            path.unlink(missing_ok=True)
        elif new.exists():  # else it was in its place before the interruption
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(new, path)
    done = journal.with_name("journal.old")
    shutil.rmtree(done, ignore_errors=True)
    os.rename(journal, done)
    shutil.rmtree(done)


def _journal(root: Path) -> Path:
    return root / ".graft" / "journal"
