"""A stack as it is somewhere: at a commit of this repository, or in a checkout of it, saved or not.

`find` reads what is named:

- `.`, or a folder that begins with `.`, `/` or `~`: a checkout as it stands. That is its edit,
  commits and changed files, where its build/ follows one (`graft edit`); else its patches, with
  what was changed in place in overlay/;
- anything else: a commit, branch or tag of this repository; its patches.
"""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graft import stack as stacks
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import Stack, commits, files_hash, pins, workbench
from graft.stack.git import NULL_BLOB, blob_id, git
from graft.stack.pins import Pin
from graft.stack.trees import tree
from graft.stack.trees.bases import Base
from graft.stack.trees.tree import Tree

KEPT_TREES = 6
"""Trees of the latest snapshots, 5 MB each, that are kept."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a stack: `files` maps each path under torch/ to its blob id (forty zeros:
    removed), `contents` to its bytes. `what` says where they come from."""

    what: str
    pin: Pin
    files: Mapping[str, str]
    contents: Mapping[str, bytes]

    @property
    def hash(self) -> str:
        """As `Stack.hash`: of the patched files alone."""
        return files_hash(self.files)


def find(
    name: str,
    base: Base,
    pin: str,
    prefix: Path,
    root: Path = ROOT,
    again: str = "graft same-code HEAD .",
) -> Snapshot:
    """The stack that `name` names, on `base`; `prefix` is the tree of this checkout.

    `again` is the command to type where there is no such stack.

    Raises UsageError for a commit or checkout that there is not, or that has no series for `pin`,
    and GraftError for patches that do not apply and an edit that overlay/ contradicts.
    """
    if name.startswith((".", "/", "~")):
        folder = Path(name).expanduser().resolve()
        here = folder == root.resolve()
        return _in_checkout(folder, base, pin, prefix if here else folder / "build", name)
    return _at_commit(name, base, pin, root, again)


def _at_commit(name: str, base: Base, pin: str, root: Path, again: str) -> Snapshot:
    try:
        commit = git("rev-parse", "--verify", "-q", f"{name}^{{commit}}", cwd=root).strip()
    except GraftError as missing:
        folder = "; for a folder, write ./" + name if (Path.cwd() / name).is_dir() else ""
        raise UsageError(
            f"{root} has no commit, branch or tag {name!r}{folder}", again
        ) from missing
    with tempfile.TemporaryDirectory(prefix="graft-stack-") as aside:
        try:
            files = git("archive", "--format=tar", commit, "pins", f"patches/{pin}", cwd=root)
        except GraftError as missing:
            what = f"{name} ({commit[:12]}) has no pins/ and patches/{pin}"
            raise UsageError(what, again) from missing
        with tarfile.open(fileobj=io.BytesIO(commits.encode(files))) as archive:
            archive.extractall(aside, filter="data")
        series = stacks.load(pins.load(pin, Path(aside)), Path(aside))
        contents = _applied(series, base)
    what = f"{name} ({commit[:12]}), {len(series.patches)} patches"
    return Snapshot(what, series.pin, dict(series.tree_files), contents)


def _applied(series: Stack, base: Base) -> dict[str, bytes]:
    pins.check_base(series.pin, base)
    with tempfile.TemporaryDirectory(prefix="graft-stack-") as scratch:
        return tree.apply(series, base, Path(scratch))


def _in_checkout(folder: Path, base: Base, pin: str, prefix: Path, name: str) -> Snapshot:
    if not (folder / "patches" / pin / "series").is_file():
        raise UsageError(
            f"{name} is no checkout of this repository: there is no {folder}/patches/{pin}/series",
            "graft same-code HEAD .",
        )
    series = stacks.load(pins.load(pin, folder), folder)
    edit = _followed(prefix)
    differing = [
        each for each in stacks.differing_copies(series, folder) if each.startswith("overlay/")
    ]
    if edit is not None:
        if differing:
            raise GraftError(
                f"{name} has an edit, and changes in overlay/ that it does not have: "
                + "; ".join(differing[:5]),
                "graft refresh there, or undo one of the two",
            )
        return _in_edit(edit, series.pin, name)
    files, contents = dict(series.tree_files), _applied(series, base)
    kept = pin == pins.DEFAULT_PIN  # whose copies overlay/ has
    changed = _in_place(folder, series, files, contents) if kept else []
    said = f", with {', '.join(changed)} as in overlay/" if changed else ""
    return Snapshot(f"{name}, {len(series.patches)} patches{said}", series.pin, files, contents)


def _in_place(
    folder: Path, series: Stack, files: dict[str, str], contents: dict[str, bytes]
) -> list[str]:
    """Put what overlay/ has in the place of what the patches leave; the names of what differs."""
    copies = {p: f for p, f in stacks.copies(folder).items() if p.startswith("torch/")}
    gone = [p for p in series.new_files if p.startswith("torch/") and p not in copies]
    for path in gone:
        del files[path], contents[path]
    changed = [path.rpartition("/")[2] for path in gone]
    for path, file in copies.items():
        data = file.read_bytes()
        if files.get(path) != blob_id(data):
            files[path], contents[path] = blob_id(data), data
            changed.append(path.rpartition("/")[2])
    return changed


def _followed(prefix: Path) -> Path | None:
    """The edit that the tree at `prefix` follows; None also where there is no tree."""
    if not (prefix / tree.MANIFEST).is_file():
        return None
    return workbench.followed(tree.load(prefix))


def _in_edit(edit: Path, pin: Pin, name: str) -> Snapshot:
    opened = workbench.load(edit.parents[1], pin.name)
    if opened is None or opened.path.resolve() != edit.resolve():
        raise GraftError(f"{name} follows {edit}, which is no edit", "./build.sh there")
    if opened.state.pin != pin.name:
        raise UsageError(f"the edit of {name} is of {opened.state.pin}, expected {pin.name}")
    if opened.under_way:
        raise GraftError(f"{edit} is in the middle of a {opened.under_way}", "finish it first")
    pristine = {
        path: blob
        for path, blob in opened.repo.files(opened.state.pristine).items()
        if path.startswith("torch/")
    }
    files: dict[str, str] = {}
    contents: dict[str, bytes] = {}
    there: set[str] = set()
    for top, folders, names in os.walk(edit / "torch"):
        folders[:] = [each for each in folders if each != "__pycache__"]
        for each in names:
            path = (Path(top) / each).relative_to(edit).as_posix()
            data = (edit / path).read_bytes()
            there.add(path)
            if pristine.get(path) != blob_id(data):
                files[path], contents[path] = blob_id(data), data
    files |= dict.fromkeys(pristine.keys() - there, NULL_BLOB)
    unsaved = f", {len(opened.dirty)} of them not committed" if opened.dirty else ""
    count = len(opened.repo.commits())
    what = f"{name}, its edit of {count} commits: {len(files)} files{unsaved}"
    return Snapshot(what, pin, files, contents)


def build(snapshot: Snapshot, base: Base, root: Path = ROOT) -> Tree:
    """A tree of the snapshot, made once, in .graft/ of this repository."""
    prefix = folder(root) / "trees" / snapshot.hash[:16]
    prefix.parent.mkdir(parents=True, exist_ok=True)
    pin = snapshot.pin
    with tree.locked(prefix):
        if (prefix / tree.MANIFEST).is_file():
            there = tree.load(prefix)
            wanted = tree.recipe(base, pin, snapshot.hash, (), "")
            if there.recipe == wanted and not tree.problems(there, pin):
                os.utime(prefix)
                return there
        return tree.make(base, pin, snapshot.files, snapshot.contents, prefix)


def prune(keep: set[Path], root: Path = ROOT) -> None:
    """Remove all but the latest trees, and those of `keep`."""
    trees = sorted(
        (path for path in (folder(root) / "trees").glob("*") if (path / tree.MANIFEST).is_file()),
        key=lambda path: path.stat().st_mtime,
        reverse=True,
    )
    for path in trees[KEPT_TREES:]:
        if path not in keep:
            shutil.rmtree(path)


def folder(root: Path = ROOT) -> Path:
    """Where trees and codes are kept."""
    return root / ".graft" / "same-code"
