"""`graft edit`: the stack as a git repository, ``.graft/edit``, laid out as PyTorch is.

Another pin than the default one has its own, ``.graft/edit-<pin>``.

Its first commit is the base's whole ``torch/_inductor`` and every other pinned file, as released;
then comes a commit a patch, on the branch ``stack``. The patched tree follows it, so that a change
there is live in ``build/bin/python``. Commit, amend, reorder, split and drop with git; then
`graft refresh` (`graft.stack.refresh`) writes the patch files.

Without ``--source CHECKOUT`` the hunks of upstream's own tests are carried as text
(`graft.stack.commits`): they are kept with their commits, and cannot be changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath

from graft import stack as stacks
from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT
from graft.stack import Stack, commits, journal, pins
from graft.stack.commits import BRANCH, Repo
from graft.stack.git import blob_id, git
from graft.stack.pins import DEFAULT_PIN, Pin
from graft.stack.trees import tree
from graft.stack.trees.bases import Base
from graft.stack.trees.tree import Tree

PACKAGE = "torch/_inductor"
_UNDER_WAY = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or am",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}


@dataclass(frozen=True)
class Sync:
    """A moment at which the edit and the patch files said the same."""

    head: str  # the commit
    patches: str  # `digest` of the patch files


@dataclass(frozen=True)
class State:
    """What has to be remembered of an edit: ``.git/graft.json`` in it."""

    pin: str
    pristine: str  # the first commit
    sync: Sync
    next: Sync | None = None  # what a write that is under way will make of `sync`
    files: tuple[str, ...] = ()  # upstream's files that were asked for by name
    source: str | None = None  # the checkout that gave upstream's tests


@dataclass(frozen=True)
class Edit:
    """An edit as it stands on disk."""

    repo: Repo
    state: State

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.repo.path

    @property
    def branch(self) -> str | None:
        """The branch that is checked out."""
        name = git("symbolic-ref", "-q", "--short", "HEAD", cwd=self.path, check=False).strip()
        return name or None

    @property
    def dirty(self) -> list[str]:
        """Paths with changes that no commit has."""
        entries = self.repo.git("status", "--porcelain", "-z", "--no-renames", "-uall").split("\0")
        return [entry[3:] for entry in entries if entry]

    @property
    def under_way(self) -> str | None:
        """What git was left in the middle of."""
        folder = self.path / ".git"
        return next((what for name, what in _UNDER_WAY.items() if (folder / name).exists()), None)

    @property
    def has_work(self) -> bool:
        """It has something that the patch files have not."""
        return bool(
            self.under_way
            or self.dirty
            or self.branch != BRANCH
            or self.repo.id() != self.state.sync.head
        )

    @property
    def other_refs(self) -> list[str]:
        """Branches and stashes of the user's own."""
        refs = self.repo.git("for-each-ref", "--format=%(refname)", "refs/heads", "refs/stash")
        return [ref for ref in refs.split() if ref != f"refs/heads/{BRANCH}"]

    def saved(self, state: State) -> Edit:
        """The edit with `state`, on disk too."""
        path = self.path / ".git" / "graft.json"
        aside = path.with_suffix(".new")
        aside.write_text(json.dumps(asdict(state), indent=1) + "\n")
        os.replace(aside, path)
        return replace(self, state=state)

    def settled(self, stack: Stack) -> Edit:
        """The edit once a write that `next` announced has come to its end, if it has."""
        coming = self.state.next
        if coming is None or coming.patches != digest(stack):
            return self
        if not self.has_work:  # the commits were made beside the branch
            self.repo.git("reset", "-q", "--hard", coming.head)
        return self.saved(replace(self.state, sync=coming, next=None))


def folder(root: Path = ROOT, pin: str = DEFAULT_PIN) -> Path:
    """Where the edit of the pin's stack is kept: each pin has its own."""
    return root / ".graft" / pins.own("edit", pin)


def digest(stack: Stack) -> str:
    """Of the patch files, their names and their order."""
    named = {f"{at} {patch.name}": blob_id(patch.text) for at, patch in enumerate(stack.patches)}
    return stacks.files_hash(named)


def load(root: Path = ROOT, pin: str = DEFAULT_PIN) -> Edit | None:
    """The edit of the pin's stack, or None. Raises GraftError for one that cannot be read."""
    path = folder(root, pin)
    if not path.exists():
        return None
    try:
        data = json.loads((path / ".git" / "graft.json").read_text())
        values = {field.name: data[field.name] for field in fields(State)}
        values["sync"] = Sync(**values["sync"])
        values["next"] = Sync(**values["next"]) if values["next"] else None
        values["files"] = tuple(values["files"])
        return Edit(Repo(path, values["pristine"]), State(**values))
    except (OSError, ValueError, TypeError, KeyError) as damaged:
        raise GraftError(
            f"{path} is not an edit that this version of graft made: {damaged!r}",
            "keep what you need of it, then graft edit --discard",
        ) from damaged


def edit(
    prefix: Path = ROOT / "build",
    *,
    root: Path = ROOT,
    pin: str = DEFAULT_PIN,
    source: Path | None = None,
    files: Sequence[str] = (),
) -> Edit:
    """Open the edit, making it if there is none, and let the tree at `prefix` follow it.

    `files` are further upstream files to edit (``torch/_dynamo/config.py``); all of
    ``torch/_inductor`` is there anyway. `source` is a PyTorch checkout at the pin's commit, for
    upstream's tests. An edit that is open and has no work of its own is made anew where the patch
    files, `source` or `files` ask for more than it has; one with work stays as it is. Raises
    GraftError where the two cannot both be had, and for a tree, base, checkout or file that is not
    as expected.
    """
    with journal.alone(root):
        built = tree.load(prefix)
        if built.compiled:
            raise UsageError(
                f"{prefix} was built by PyTorch's own build, and cannot follow an edit",
                "./build.sh --prefix DIR, then graft edit --prefix DIR",
            )
        stack = stacks.load(pins.load(pin, root), root)
        stacks.check_copies(stack, root)
        pins.check_base(stack.pin, built.base)
        there = load(root, pin)
        if there is not None:
            there = there.settled(stack)
            if reason := _reason_to_remake(there, stack, source, files):
                _check_disposable(there, reason)
                files = sorted({*there.state.files, *files})
                if source is None and there.state.source:
                    source = Path(there.state.source)
                there = None
        opened = there or _make(built.base, stack, root, source, files)
        follow(built, opened)
        return opened


def discard(prefix: Path = ROOT / "build", *, root: Path = ROOT) -> Path | None:
    """Remove the edit of the tree's pin with whatever it has, and say where it was; None where
    there is none.

    A tree at `prefix` that follows it is made from the patch files again.
    """
    with journal.alone(root):
        built = (prefix / tree.MANIFEST).is_file()
        path = folder(root, tree.load(prefix).pin if built else DEFAULT_PIN)
        there = path.exists()
        settle_tree(prefix, root)
        if there:
            _remove(path)
        return path if there else None


def _reason_to_remake(
    there: Edit, stack: Stack, source: Path | None, files: Collection[str]
) -> str | None:
    if there.state.pin != stack.pin.name:
        return f"it is of {there.state.pin}"
    if there.state.sync.patches != digest(stack):
        return "the patch files have changed since"
    has = there.repo.files(there.state.pristine)
    lacks = [path for path in files if path not in has]
    if lacks:
        return f"it lacks {', '.join(lacks)}"
    if source is not None and str(source.resolve()) != there.state.source:
        return f"it was not made with {source}"
    return None


def _check_disposable(there: Edit, reason: str) -> None:
    if there.has_work or there.other_refs:
        also = f" (also {', '.join(there.other_refs)})" if there.other_refs else ""
        raise GraftError(
            f"{there.path} would have to be made anew, for {reason}; but it has work of its own"
            f"{also}",
            "graft refresh, or graft edit --discard once nothing in it is needed",
        )


def _make(base: Base, stack: Stack, root: Path, source: Path | None, files: Sequence[str]) -> Edit:
    pristine = _package(base)
    wanted = {*stack.pin.files, *files}
    if source is not None:
        check_checkout(source, stack.pin)
        wanted |= commits.absent_files(stack.patches, {*pristine, *wanted})
    for name in wanted - pristine.keys():
        pristine[name] = released(base, source, stack.pin, name)
    path = folder(root, stack.pin.name)
    aside = path.with_name(f"{path.name}.new")
    shutil.rmtree(aside, ignore_errors=True)
    repo = commits.make(aside, pristine, stack.patches)
    state = State(
        pin=stack.pin.name,
        pristine=repo.pristine,
        sync=Sync(repo.id(), digest(stack)),
        files=tuple(files),
        source=str(source.resolve()) if source else None,
    )
    Edit(repo, state).saved(state)
    if path.exists():
        _remove(path)
    os.rename(aside, path)
    return Edit(replace(repo, path=path), state)


def _remove(path: Path) -> None:
    gone = path.with_name(f"{path.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def _package(base: Base) -> dict[str, bytes]:
    """Every file of the base's torch/_inductor."""
    top = base.torch_dir.parent
    return {
        path.relative_to(top).as_posix(): path.read_bytes()
        for path in (top / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def released(base: Base, source: Path | None, pin: Pin, path: str) -> bytes:
    """One of upstream's files as released: the base's, or for a test the checkout's.

    Raises UsageError for a file that neither has, and for a test without a checkout.
    """
    if path.startswith("torch/"):
        file = base.torch_dir.parent / path
        try:
            return file.read_bytes()
        except OSError as missing:
            names = file.parent.iterdir() if file.parent.is_dir() else ()
            near = nearest(path, [f"{path.rpartition('/')[0]}/{n.name}" for n in names])
            raise UsageError(f"torch {base.version} has no file {path}{near}") from missing
    if not path.startswith("test/"):
        raise UsageError(f"{path} is not under torch/ or test/, where patches change files")
    if source is None:
        raise UsageError(
            f"{path} is one of PyTorch's tests, and a wheel has none",
            f"graft edit --source CHECKOUT {path}, with a PyTorch checkout at {pin.commit}",
        )
    return commits.encode(git("cat-file", "blob", f"{pin.commit}:{path}", cwd=source))


def check_checkout(source: Path, pin: Pin) -> None:
    """Raise UsageError unless `source` is a git checkout at the pin's commit."""
    head = ""
    if source.is_dir():
        with contextlib.suppress(GraftError):
            head = git("rev-parse", "HEAD", cwd=source).strip()
    if head != pin.commit:
        found = f"is at {head}" if head else "is no git checkout"
        raise UsageError(
            f"{source} {found}; expected a PyTorch checkout at {pin.name} ({pin.commit})",
            f"git -C {source} checkout {pin.name}" if head else None,
        )


# --- the tree that follows -----------------------------------------------------------------------


def follow(built: Tree, opened: Edit) -> None:
    """Make the tree's torch/_inductor, and what the edit has elsewhere, links to the edit's.

    The links are absolute, and the only ones of a tree that are: the next build makes files again.
    """
    has = opened.repo.files("HEAD")
    paths = [p for p in has if p.startswith("torch/") and not p.startswith(f"{PACKAGE}/")]
    with tree.locked(built.prefix):
        for path in (PACKAGE, *paths):
            link, target = built.site_packages / path, opened.path / path
            if link.is_symlink() and Path(os.readlink(link)) == target:
                continue
            for folder in reversed(PurePosixPath(path).parents):
                _own(built.site_packages / folder)
            new = tree.work_dir(built.prefix) / f"{built.prefix.name}.link"
            new.unlink(missing_ok=True)
            new.symlink_to(target)
            if link.is_dir() and not link.is_symlink():
                old = tree.work_dir(built.prefix) / f"{built.prefix.name}.old"
                os.rename(link, old)  # a build sweeps this name, should the process end here
                os.rename(new, link)
                shutil.rmtree(old)
            else:
                os.replace(new, link)


def _own(folder: Path) -> None:
    """Make a linked folder a real one, of links to what it has."""
    if not folder.is_symlink():
        folder.mkdir(exist_ok=True)
        return
    real = folder.resolve()
    new = folder.with_name(f"{folder.name}.new")
    new.mkdir()
    for entry in real.iterdir():
        if entry.name != "__pycache__":
            (new / entry.name).symlink_to(entry)
    folder.unlink()
    os.rename(new, folder)


def followed(built: Tree) -> Path | None:
    """The edit that the tree follows, or None."""
    link = built.site_packages / PACKAGE
    target = Path(os.readlink(link)) if link.is_symlink() else Path()
    return target.parents[1] if target.is_absolute() else None


def settle_tree(prefix: Path, root: Path = ROOT) -> None:
    """Make the tree at `prefix` from the patch files again, where it follows an edit or is older.

    Does nothing where there is no tree, or one that PyTorch's own build made. Raises what
    `tree.build` raises.
    """
    if not (prefix / tree.MANIFEST).is_file():
        return
    built = tree.load(prefix)
    if built.compiled:
        return
    stack = stacks.load(pins.load(built.pin, root), root)
    if followed(built) is not None or built.stack_hash != stack.hash:
        tree.build(built.base, stack, prefix, built.wheels)
