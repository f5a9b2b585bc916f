"""A patch file: a whole commit, as ``git format-patch`` writes it with the flags in `git.py`.

Read with the standard library alone, because a tree is built from it anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from graft.errors import GraftError
from graft.stack.git import NULL_BLOB

_DIFF = "diff --git "
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d+))?\Z")


@dataclass(frozen=True)
class Hunk:
    """One hunk: its first line in the old file (from 1), and its lines with their marks."""

    old_start: int
    lines: tuple[str, ...]

    @property
    def old_lines(self) -> tuple[str, ...]:
        """The lines that the file must have from `old_start` on."""
        return tuple(line[1:] for line in self.lines if line[:1] in (" ", "-", ""))


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file: blob ids before and after, and the hunks between them.

    `path` is the path in PyTorch. A blob id is forty zeros where there is no file.
    """

    path: str
    old_blob: str
    new_blob: str
    hunks: tuple[Hunk, ...] = ()

    @property
    def is_new(self) -> bool:
        """The patch makes the file."""
        return self.old_blob == NULL_BLOB

    @property
    def is_deleted(self) -> bool:
        """The patch removes the file."""
        return self.new_blob == NULL_BLOB

    @property
    def in_tree(self) -> bool:
        """The file is the installed package's, so that it belongs to a patched tree."""
        return self.path.startswith("torch/")


@dataclass(frozen=True)
class Status:
    """Where a patch is from, and what upstream has of it: what stands behind its name in `series`.

    `origin` is ``ours`` or ``pytorch#179494``. `upstream` is ``not sent``, a pull request
    (``pytorch#179494``), or ``in 2.13.0``: the first release whose code does what the patch does.
    """

    origin: str = "ours"
    upstream: str = "not sent"

    def __str__(self) -> str:
        return f"{self.origin}; {self.upstream}"

    @property
    def landed(self) -> tuple[int, ...] | None:
        """The release that has it, as numbers; None where none is known to."""
        found = re.fullmatch(r"in (\d+(?:\.\d+)*)", self.upstream)
        return release_numbers(found[1]) if found else None


def release_numbers(version: str) -> tuple[int, ...]:
    """``2.13.0`` and ``2.13.0a0+git1`` -> (2, 13, 0): two compare as the releases do."""
    numbers = [int(each) for each in re.findall(r"\d+", re.split(r"[a-z+]", version)[0])]
    return tuple(numbers + [0] * (3 - len(numbers)))


@dataclass(frozen=True)
class Patch:
    """One patch file: its name in the series, where it is, its bytes, and what upstream has."""

    name: str
    path: Path
    text: bytes
    status: Status = Status()

    @cached_property
    def _parts(self) -> tuple[str, str]:
        """Header and message, then the diff."""
        text = self.text.decode("utf-8", "surrogateescape")
        at = 0 if text.startswith(_DIFF) else text.find("\n" + _DIFF) + 1
        if not text.startswith("From ") or not at:
            raise self._error(
                "is not what git format-patch writes: expected a 'From' line first, then a "
                "message, then 'diff --git' lines"
            )
        return text[:at], text[at:]

    @cached_property
    def _head(self) -> tuple[str, str]:
        """Subject and body."""
        header, _, body = self._parts[0].partition("\n\n")
        found = re.search(r"^Subject: (.*(?:\n[ \t].*)*)", header, re.MULTILINE)
        if not found:
            raise self._error("has no Subject line")
        return re.sub(r"\n[ \t]", " ", found[1]).strip(), body.strip("\n")

    @property
    def subject(self) -> str:
        """The first line of the commit's message."""
        return self._head[0]

    @property
    def diff(self) -> str:
        """What the patch changes, as text: all but header and message."""
        return self._parts[1]

    @property
    def message(self) -> str:
        """The commit's whole message: subject, empty line, body."""
        subject, body = self._head
        return f"{subject}\n\n{body}\n" if body else f"{subject}\n"

    @cached_property
    def files(self) -> tuple[FileChange, ...]:
        """What the patch changes, in its order.

        Raises GraftError for what a patch of this repository may not hold: renames, binary
        files, modes other than 100644, short blob ids, paths outside torch/ and test/.
        """
        return tuple(self._read_files())

    def check(self) -> None:
        """Raise GraftError if the patch cannot be read, or git would misread its message."""
        header = self._parts[0]
        if (
            header.count("\nSubject: ") != 1
            or len(re.findall(r"^From [0-9a-f]{40} ", header, re.M)) > 1
        ):
            raise self._error("holds more than one commit; expected one a file")
        wrong = misread_line(self._head[1])
        if wrong is not None:
            raise self._error(
                f"has a message line that git reads as the end of the message: {wrong!r}",
                "graft edit, reword the commit, then graft refresh",
            )
        if len({change.path for change in self.files}) != len(self.files):
            raise self._error("names a file twice")

    def _error(
        self, what: str, next: str = "graft edit, then graft refresh, writes it"
    ) -> GraftError:
        return GraftError(f"{self.name} {what}", next)

    def _read_files(self) -> Iterator[FileChange]:
        lines = self._parts[1].split("\n")
        at = 0
        while at < len(lines):
            line = lines[at]
            if not line.startswith(_DIFF):
                if line.strip():
                    raise self._error(f"has a line between two files: {line!r}")
                at += 1
                continue
            path = self._path(line)
            old = new = None
            at += 1
            while at < len(lines) and not lines[at].startswith(("@@", _DIFF)):
                extended = lines[at]
                if index := _INDEX.match(extended):
                    old, new = index[1], index[2]
                elif extended.startswith(("rename ", "copy ", "similarity ")):
                    raise self._error(f"renames {path}; expected a removal and a new file")
                elif extended.startswith(("GIT binary patch", "Binary files")):
                    raise self._error(f"changes {path} as a binary file; expected text")
                elif re.match(r"(old|new|deleted file|new file) mode (?!100644)", extended):
                    raise self._error(f"gives {path} another mode than 100644: {extended!r}")
                at += 1
            if old is None or new is None:
                raise self._error(f"has no line 'index <40 digits>..<40 digits>' for {path}")
            hunks = []
            while at < len(lines) and lines[at].startswith("@@"):
                hunk, at = self._read_hunk(path, lines, at)
                hunks.append(hunk)
            yield FileChange(path, old, new, tuple(hunks))

    def _path(self, line: str) -> str:
        found = re.match(r"diff --git a/(.+) b/\1\Z", line)
        if not found:
            raise self._error(f"has a file line of an unexpected form: {line!r}")
        path = PurePosixPath(found[1])
        if path.parts[0] not in ("torch", "test") or ".." in path.parts:
            raise self._error(f"changes {path}; expected a path under torch/ or test/")
        return str(path)

    def _read_hunk(self, path: str, lines: list[str], at: int) -> tuple[Hunk, int]:
        found = _HUNK.match(lines[at])
        if not found:
            raise self._error(f"has a damaged hunk in {path}: {lines[at]!r}")
        old_left, new_left = int(found[2] or 1), int(found[4] or 1)
        start = at = at + 1
        while old_left > 0 or new_left > 0:
            mark = lines[at][:1] if at < len(lines) else "end"
            if mark not in (" ", "+", "-", "\\"):
                raise self._error(f"has a hunk in {path} that ends early, at {found[0]}")
            old_left -= mark in (" ", "-")
            new_left -= mark in (" ", "+")
            at += 1
        body = [line for line in lines[start:at] if line[0] != "\\"]
        if at < len(lines) and lines[at].startswith("\\"):
            at += 1
        return Hunk(int(found[1]), tuple(body)), at


def misread_line(body: str) -> str | None:
    """The first line of a message's body that ``git am`` would take for the start of a diff."""
    for line in body.split("\n"):
        if line.startswith(("diff -", "Index: ")):
            return line
        if line.startswith("---") and (not line[3:].strip() or re.match(r"--- \S", line)):
            return line
        if re.match(r"From \S+ .*\d\d:\d\d", line):
            return line
    return None
