"""The series of patches of a pin, and the copies of their new files that this repository shows.

Read with the standard library alone, because a tree is built from it anywhere.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT
from graft.stack.git import NULL_BLOB, blob_id
from graft.stack.patches import FileChange, Patch, Status
from graft.stack.pins import DEFAULT_PIN, Pin

COPIES: Mapping[str, str] = {
    "torch/_inductor/": "overlay/torch/_inductor/",
    "test/inductor/": "tests/inductor/",
}
"""Where a new file of a patch stands in this repository, by the folder it has in PyTorch."""


_SERIES = re.compile(r"# series: (?P<name>[^;]+?)(?P<alone>; alone)?")


@dataclass(frozen=True)
class Series:
    """Patches that are sent together: a name, and the names of its patches, in order.

    It applies on those before it; an `alone` one on the pinned release as well.
    """

    name: str
    patches: tuple[str, ...]
    alone: bool = False

    @property
    def slug(self) -> str:
        """The name as a part of a branch's: words with hyphens between."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Stack:
    """A pin with its patches, in order, and the series that they are in."""

    pin: Pin
    patches: tuple[Patch, ...]
    series: tuple[Series, ...] = ()

    def series_of(self, name: str) -> Series:
        """The series of that name, or slug. Raises UsageError, which lists them, for another."""
        for each in self.series:
            if name.lower() in (each.name, each.slug):
                return each
        names = [each.name for each in self.series]
        raise UsageError(
            f"patches/{self.pin.name}/series has no series {name}"
            + (f": it has {', '.join(names)}" if names else ", nor any other"),
        )

    def up_to(self, series: Series) -> Stack:
        """The stack that ends with the last patch of `series`."""
        at = self.series.index(series)
        kept = {name for each in self.series[: at + 1] for name in each.patches}
        # patches that stand before the first series belong to none, and to every prefix
        named = {name for each in self.series for name in each.patches}
        patches = tuple(p for p in self.patches if p.name in kept or p.name not in named)
        return replace(self, patches=patches)

    @property
    def names(self) -> set[str]:
        """Of all patches that the series have, also where `patches` are some of them."""
        return {patch.name for patch in self.patches}.union(*(s.patches for s in self.series))

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


def read_series(lines: Sequence[str], where: str) -> tuple[Series, ...]:
    """What the lines ``# series: <name>`` say: of which series the patches below them are.

    Behind the name of one that applies to the pinned release alone stands ``; alone``. Raises
    GraftError, naming `where`, for a series that is named twice, or has no patches.
    """
    found: list[Series] = []
    for line in lines:
        if mark := _SERIES.fullmatch(line.strip()):
            found.append(Series(mark["name"], (), bool(mark["alone"])))
        elif found and line.strip() and not line.startswith("#"):
            name = line.partition("#")[0].strip()
            found[-1] = replace(found[-1], patches=(*found[-1].patches, name))
    slugs = [each.slug for each in found]
    for each in found:
        if not each.patches or slugs.count(each.slug) > 1:
            wrong = "no patches" if not each.patches else "another of its name"
            raise GraftError(f"series {each.name} in {where} has {wrong}", f"fix {where}")
    return tuple(found)


def load(pin: Pin, root: Path = ROOT) -> Stack:
    """Read ``patches/<pin>/series`` and the patch files that it names, and check them.

    The series has a line a patch (`read_line`); empty lines and lines that start with ``#`` are
    skipped, but for those that name a series (`read_series`). A pin without a series has an empty
    stack. Raises GraftError for a line without a file, a file without a line, a line twice, a
    status that is none, a series that is named twice or has no patches, and whatever `Stack.check`
    finds.
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
                f"fix or remove the line in {shown}",
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
    stack = Stack(pin, patches, read_series(lines, shown))
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
    that no patch makes. None of another pin's stack: the copies are the default pin's."""
    if stack.pin.name != DEFAULT_PIN:
        return []
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
