"""The series of patches of a pin, and the copies of their new files that this repository shows.

A patch file is a whole commit, as ``git format-patch`` writes it with the flags in `git.py`. It is
read here with the standard library alone, because a tree is built from it anywhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from graft.errors import GraftError, nearest
from graft.places import ROOT
from graft.stack.git import NULL_BLOB, blob_id
from graft.stack.pins import Pin

COPIES: Mapping[str, str] = {
    "torch/_inductor/": "overlay/torch/_inductor/",
    "test/inductor/": "tests/inductor/",
}
"""Where a new file of a patch stands in this repository, by the folder it has in PyTorch."""

_DIFF = "diff --git "
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d+))?\Z")


@dataclass(frozen=True)
class Hunk:
    """One hunk: its first line in the old and new file (from 1), and its lines with their marks."""

    old_start: int
    new_start: int
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
        return Hunk(int(found[1]), int(found[3]), tuple(body)), at


@dataclass(frozen=True)
class Stack:
    """A pin with its patches, in order."""

    pin: Pin
    patches: tuple[Patch, ...]

    @cached_property
    def files(self) -> Mapping[str, str]:
        """Every path that a patch touches, with its blob id after the last patch."""
        return {change.path: change.new_blob for patch in self.patches for change in patch.files}

    @property
    def tree_files(self) -> Mapping[str, str]:
        """Those of `files` that a patched tree holds, removed ones (forty zeros) included."""
        return {path: blob for path, blob in self.files.items() if path.startswith("torch/")}

    @cached_property
    def new_files(self) -> Mapping[str, str]:
        """Paths that the stack makes (they are not upstream's), with their final blob ids."""
        made: set[str] = set()
        seen: set[str] = set()
        for patch in self.patches:
            for change in patch.files:
                if change.is_new and change.path not in seen:
                    made.add(change.path)
                seen.add(change.path)
        return {p: b for p, b in self.files.items() if p in made and b != NULL_BLOB}

    @property
    def hash(self) -> str:
        """Of the patched tree's files alone (64 hexadecimal digits).

        Messages, tests and patch boundaries are left out, so that a result measured with a
        stack stays that stack's when its papers change.
        """
        return files_hash(self.tree_files)

    def check(self) -> None:
        """Raise GraftError unless each patch is well formed and the pin knows what it touches.

        Whether the patches apply is for `trees.tree` to find out: it has the files.
        """
        known = set(self.pin.files)
        for patch in self.patches:
            patch.check()
            for change in patch.files:
                self._check_change(patch, change, known)
                known.add(change.path)

    def _check_change(self, patch: Patch, change: FileChange, known: set[str]) -> None:
        if change.path in known:
            return
        if change.is_new:
            if not change.path.startswith(tuple(COPIES)):
                raise GraftError(
                    f"{patch.name} makes {change.path}; new files belong under "
                    f"{' or '.join(COPIES)}",
                    "graft edit, move it, then graft refresh",
                )
        elif change.in_tree:
            raise GraftError(
                f"{patch.name} changes {change.path}, which pins/{self.pin.name}.toml does not "
                "list, so that a base that differs there would go unseen",
                "graft refresh (it adds the file's blob id to the pin)",
            )


def files_hash(files: Mapping[str, str]) -> str:
    """SHA-256 over the sorted lines ``<path> <blob id>``."""
    lines = "".join(f"{path} {blob}\n" for path, blob in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


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


def series_file(pin: Pin, root: Path = ROOT) -> Path:
    """Where the order of a pin's patches is kept."""
    return root / "patches" / pin.name / "series"


def read_line(line: str, where: str) -> tuple[str, Status]:
    """The patch that a line of ``series`` names, and its status.

    The line is ``<name>  # <origin>; <upstream>``, as `Status` has them; without the second part it
    is of a patch of our own that was not sent. Raises GraftError, naming `where`, for a status of
    another form.
    """
    name, mark, said = (part.strip() for part in line.partition("#"))
    if not mark:
        return name, Status()
    origin, _, upstream = (part.strip() for part in said.partition(";"))
    status = Status(origin, upstream)
    pull_request = re.compile(r"pytorch#\d+")
    if not (origin == "ours" or pull_request.fullmatch(origin)) or not (
        upstream == "not sent" or pull_request.fullmatch(upstream) or status.landed
    ):
        raise GraftError(
            f"{said!r} behind {name} in {where} is no status of a patch",
            "write '# ours; not sent' there: 'ours' or pytorch#N, then 'not sent', pytorch#N or "
            "'in 2.13.0'",
        )
    return name, status


def write_line(name: str, status: Status) -> str:
    """The inverse of `read_line`, without a newline."""
    return f"{name}  # {status}"


def load(pin: Pin, root: Path = ROOT) -> Stack:
    """Read ``patches/<pin>/series`` and the patch files that it names, and check them.

    The series has a line a patch (`read_line`); empty lines and lines that start with ``#`` are
    skipped. A pin without a series has an empty stack. Raises GraftError for a line without a file,
    a file without a line, a line twice, a status that is none, and whatever `Stack.check` finds.
    """
    series = series_file(pin, root)
    shown = f"patches/{pin.name}/series"
    lines = series.read_text("utf-8").splitlines() if series.exists() else []
    read = [read_line(line, shown) for line in lines if line.strip() and not line.startswith("#")]
    names = [name for name, _ in read]
    there = {path.name for path in series.parent.glob("*.patch")}
    for name in names:
        if name not in there:
            raise GraftError(
                f"{shown} names {name}, and there is no patches/{pin.name}/{name}"
                f"{nearest(name, there - set(names))}",
                f"mend or remove the line in {shown}",
            )
        if names.count(name) > 1:
            raise GraftError(f"{shown} names {name} twice", f"remove one of the lines in {shown}")
    for name in sorted(there - set(names)):
        raise GraftError(
            f"patches/{pin.name}/{name} has no line in {shown}",
            f"add {name} to {shown} where it belongs, or remove the file",
        )
    home = series.parent
    patches = tuple(Patch(name, home / name, (home / name).read_bytes(), st) for name, st in read)
    stack = Stack(pin, patches)
    stack.check()
    return stack


def copy_path(path: str, root: Path = ROOT) -> Path | None:
    """Where the new file `path` of a patch stands in this repository (None: nowhere)."""
    for upstream, ours in COPIES.items():
        if path.startswith(upstream):
            return root / ours / path[len(upstream) :]
    return None


def copies(root: Path = ROOT) -> dict[str, Path]:
    """The files under overlay/ and tests/inductor/ that patches must make, by upstream path.

    Under tests/inductor/ only ``test_*.py`` are the stack's; the rest runs them here.
    """
    found: dict[str, Path] = {}
    for upstream, ours in COPIES.items():
        folder = root / ours
        pattern = "test_*.py" if upstream.startswith("test/") else "*"
        for path in sorted(folder.rglob(pattern)):
            inside = path.relative_to(folder)
            if path.is_file() and "__pycache__" not in inside.parts:
                found[upstream + inside.as_posix()] = path
    return found


def differing_copies(stack: Stack, root: Path = ROOT) -> list[str]:
    """One entry for each copy that is missing, or differs from what the last patch leaves, or
    that no patch makes."""
    problems = []
    there = copies(root)
    for path, blob in stack.new_files.items():
        copy = there.pop(path, None) or copy_path(path, root)
        assert copy is not None, path
        shown = copy.relative_to(root)
        if not copy.is_file():
            problems.append(f"{shown} is missing")
        elif (found := blob_id(copy.read_bytes())) != blob:
            problems.append(f"{shown} differs (blob {found[:12]}, the stack leaves {blob[:12]})")
    problems += [f"{path.relative_to(root)} is made by no patch" for path in there.values()]
    return problems


def check_copies(stack: Stack, root: Path = ROOT) -> None:
    """Raise GraftError unless overlay/ and tests/inductor/ are what the last patch leaves."""
    problems = differing_copies(stack, root)
    if problems:
        raise GraftError(
            f"the copies of the stack's new files do not match patches/{stack.pin.name}: "
            + "; ".join(problems),
            "graft refresh (folds the change into the stack)",
        )
