"""`graft refresh`: the only writer of patch files.

It writes the stack back from where it was changed: the commits of the edit (`workbench`)
become the patch files; or a change under overlay/ or tests/inductor/ goes into the last patch that
touches the file. The figures in a message come from their result file (`Figures`).
Everything is computed and checked before the first byte is written. README shows figures of the
stack as it is alone, so its tables follow, and docs/modules.md its modules.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from graft import stack as stacks
from graft.errors import GraftError
from graft.places import ROOT
from graft.stack import Patch, Stack, Status, journal, modules_page, pins, submitted, workbench
from graft.stack import commits as repos
from graft.stack.commits import BRANCH, HUNKS, Change, Repo
from graft.stack.git import NULL_BLOB, blob_id
from graft.stack.pins import DEFAULT_PIN, Pin
from graft.stack.trees import tree
from graft.stack.trees.bases import Base
from graft.stack.workbench import Edit, Sync

NAME_LENGTH = 60
"""Of a patch file's name, without its suffix: it still fits a line of `git log --stat`."""


@dataclass(frozen=True)
class Refreshed:
    """What `refresh` wrote and removed, relative to the root."""

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


class Figures(Protocol):
    """What makes the figures of messages and pages from result files, as `graft.bench.figures`."""

    def stale(self, stack: Stack, root: Path) -> list[str]:
        """The patches whose messages and result files disagree."""

    def reworded_all(self, names: list[str], messages: list[str], root: Path) -> list[str]:
        """The messages of the patches called `names`, with their figures as due."""

    def write_pages(self, root: Path) -> list[str]:
        """Write the pages whose figures are of the stack as it is; their names."""


def refresh(
    prefix: Path, figures: Figures, *, root: Path = ROOT, pin: str = DEFAULT_PIN
) -> Refreshed:
    """Write the stack back, then make the tree at `prefix` from it; the `figures` follow.

    Raises GraftError, with nothing written, for changes in both places, uncommitted changes,
    merges, commits that are empty or reach outside the layout, messages that git would read
    otherwise, and patches that do not come out of git as they went in. An interrupted write is
    finished by the next call.
    """
    with journal.alone(root):
        base = tree.load(prefix).base
        stack = stacks.load(pins.load(pin, root), root)
        pins.check_base(stack.pin, base)
        changed = changed_copies(stack, root)
        there = workbench.load(root, pin)
        if there is not None:
            there = there.settled(stack)
        if there is not None and there.has_work:
            done = _from_edit(base, stack, there, changed, root, figures)
        elif changed or (pin == DEFAULT_PIN and figures.stale(stack, root)):
            done = _from_copies(base, stack, there, changed, root, figures)
        else:
            done = Refreshed()
        workbench.settle_tree(prefix, root)
        if pin != DEFAULT_PIN:
            return done
        pages = figures.write_pages(root)
        pages += modules_page.write(stacks.load(pins.load(pin, root), root), root)
        return replace(done, written=(*done.written, *pages))


def _from_edit(
    base: Base,
    stack: Stack,
    there: Edit,
    changed: Mapping[str, Path],
    root: Path,
    figures: Figures,
) -> Refreshed:
    if changed:
        names = " ".join(str(path.relative_to(root)) for path in changed.values())
        raise GraftError(
            f"both {there.path} and {names} have changed, and only one of them can be the source",
            f"make the change in {there.path} alone, and git checkout {names}",
        )
    if there.state.sync.patches != workbench.digest(stack):
        raise GraftError(
            f"patches/{stack.pin.name} has changed since {there.path} was made, and writing that "
            "back would undo the change",
            f"git checkout patches/{stack.pin.name} as it was, or graft edit --discard",
        )
    _check_edit(there)
    return _write_back(base, stack, there.repo, there.repo.id(), root, there, figures)


def _from_copies(
    base: Base,
    stack: Stack,
    there: Edit | None,
    changed: Mapping[str, Path],
    root: Path,
    figures: Figures,
) -> Refreshed:
    last = {c.path: at for at, patch in enumerate(stack.patches) for c in patch.files}
    new = {path: (last[path], copy.read_bytes()) for path, copy in changed.items()}
    if there is not None and there.state.sync.patches == workbench.digest(stack):
        head = there.repo.with_files(new)
        return _write_back(base, stack, there.repo, head, root, there, figures)
    touched = {change.path for patch in stack.patches for change in patch.files}
    pristine = {
        path: workbench.released(base, None, stack.pin, path)
        for path in touched & stack.pin.files.keys()
    }
    with tempfile.TemporaryDirectory(prefix="graft-commits-") as aside:
        repo = repos.make(Path(aside) / "repo", pristine, stack.patches)
        return _write_back(base, stack, repo, repo.with_files(new), root, None, figures)


def changed_copies(stack: Stack, root: Path = ROOT) -> dict[str, Path]:
    """The copies that differ from what the stack leaves, by their path in PyTorch.

    Raises GraftError for a copy that is missing, and for one that no patch makes.
    """
    if stack.pin.name != DEFAULT_PIN:
        return {}  # the copies are of the default pin's stack alone
    there = stacks.copies(root)
    changed = {}
    for path, blob in stack.new_files.items():
        copy = there.pop(path, None) or stacks.copy_path(path, root)
        assert copy is not None, path  # Stack.check lets new files be nowhere else
        if not copy.is_file():
            shown = copy.relative_to(root)
            raise GraftError(
                f"{shown} is missing, and the stack makes it",
                f"git checkout {shown}; or graft edit, to drop the file",
            )
        if blob_id(copy.read_bytes()) != blob:
            changed[path] = copy
    for path, copy in there.items():
        raise GraftError(
            f"{copy.relative_to(root)} is made by no patch",
            f"move it away, graft edit, and commit it there as {path}",
        )
    return changed


# --- what may become a patch ---------------------------------------------------------------------


def _check_edit(there: Edit) -> None:
    """Raise GraftError unless every change is in a commit of the branch, after the first."""
    path, pristine = there.path, there.repo.pristine
    if there.under_way:
        raise GraftError(
            f"a {there.under_way} is under way in {path}",
            f"git -C {path} status, and bring it to its end",
        )
    if there.branch != BRANCH:
        raise GraftError(
            f"{path} is at {there.branch or 'a commit without a branch'}, and the stack is its "
            f"branch {BRANCH}",
            f"git -C {path} switch {BRANCH}",
        )
    if there.dirty:
        raise GraftError(
            f"{path} has changes that no commit has: {', '.join(there.dirty)}",
            f"git -C {path} add and commit them (or stash -u), then graft refresh",
        )
    if pristine not in there.repo.git("rev-list", "HEAD").split():
        raise GraftError(
            f"the first commit of {path}, the released files, was rewritten",
            f"git -C {path} rebase --onto {pristine[:12]} COMMIT, with what stands in its place",
        )


def _check_commits(base: Base, repo: Repo, commits: Sequence[str]) -> None:
    """Raise GraftError for the first commit that cannot be a patch."""
    released = repo.files(repo.pristine)
    rebase = f"git -C {repo.path} rebase -i {repo.pristine[:12]}"
    parent = repo.pristine
    for commit in commits:
        subject, _, body = repo.message(commit).partition("\n")
        called = f"commit {commit[:10]} ({subject})"
        if len(repo.git("rev-list", "--parents", "-1", commit).split()) != 2:
            raise GraftError(
                f"{called} is a merge; expected one parent",
                f"git -C {repo.path} rebase {repo.pristine[:12]}",
            )
        if re.match(r"(fixup|squash|amend)! ", subject):
            raise GraftError(f"{called} is meant for another commit", f"{rebase} --autosquash")
        if not subject.strip() or (body.strip() and not body.startswith("\n")):
            raise GraftError(
                f"{called}: expected a message of one line, an empty line, then the rest",
                f"{rebase}, and reword it",
            )
        wrong = stacks.misread_line(body)
        if wrong is not None:
            raise GraftError(
                f"{called} has a message line that git reads as the end of the message: {wrong!r}",
                f"{rebase}, and reword it",
            )
        changes = repo.changes(commit, parent)
        if not changes:
            raise GraftError(f"{called} changes nothing", f"{rebase}, and drop it")
        for change in changes:
            if (reason := _unfit(base, repo, change, change.path in released)) is not None:
                raise GraftError(f"{called} {reason}", f"{rebase}, and edit it")
        parent = commit


def _unfit(base: Base, repo: Repo, change: Change, is_upstreams: bool) -> str | None:
    """Why a commit may not change a file so; None where it may."""
    path = change.path
    if not path.startswith(("torch/", "test/")):
        return f"changes {path}; expected paths under torch/ and test/"
    if change.new_blob == NULL_BLOB:
        return f"removes {path}, which is PyTorch's: its text would be here" * is_upstreams or None
    if change.mode != "100644":
        return f"gives {path} mode {change.mode}; expected 100644, a plain file"
    if b"\0" in repo.read(change.new_blob):
        return f"makes {path} a binary file; expected text"
    if path.endswith(HUNKS) or is_upstreams or change.old_blob != NULL_BLOB:
        return None
    if path.startswith("torch/") and (base.torch_dir.parent / path).exists():
        return (
            f"makes {path}, which is PyTorch's: its text would be here (take it out, then "
            f"graft edit {path}, and change it there)"
        )
    return None


# --- from commits to files -----------------------------------------------------------------------


def _write_back(
    base: Base,
    stack: Stack,
    repo: Repo,
    head: str,
    root: Path,
    there: Edit | None,
    figures: Figures,
) -> Refreshed:
    """Make patches, series, pin and copies say what the commits up to `head` say."""
    commits = repo.commits(head)
    _check_commits(base, repo, commits)
    messages = [repo.message(commit) for commit in commits]
    names = patch_names(stack, [message.partition("\n")[0] for message in messages])
    home = root / "patches" / stack.pin.name
    if stack.pin.name == DEFAULT_PIN:
        messages = figures.reworded_all(names, messages, root)
    texts = repo.export(commits, dict(zip(commits, messages, strict=True)))
    patches = tuple(Patch(name, home / name, text) for name, text in zip(names, texts, strict=True))
    new = Stack(_pin(base, stack.pin, repo, patches), patches)
    new.check()
    _check_again(repo, new)
    changes = {
        path: data
        for path, data in _contents(stack, new, repo, head, root).items()
        if data != (path.read_bytes() if path.is_file() else None)
    }
    if there is not None:
        sync = Sync(head, workbench.digest(new))
        there = there.saved(replace(there.state, next=sync))
    journal.write(root, changes)
    if there is not None:
        there.settled(new)
    shown = sorted((str(path.relative_to(root)), data is None) for path, data in changes.items())
    return Refreshed(
        tuple(name for name, gone in shown if not gone), tuple(name for name, gone in shown if gone)
    )


def _pin(base: Base, pin: Pin, repo: Repo, patches: Iterable[Patch]) -> Pin:
    """`pin` with the files of the base that `patches` are the first to touch."""
    released = repo.files(repo.pristine)
    touched = {change.path for patch in patches for change in patch.files if change.in_tree}
    return pins.with_files(pin, base, sorted(touched & released.keys() - pin.files.keys()))


def _check_again(repo: Repo, stack: Stack) -> None:
    """Raise GraftError unless the patches, applied anew, come out as the same patches.

    Each patch names the blob of every file before and after, so this compares the files too.
    """
    released = repo.files(repo.pristine)
    touched = {change.path for patch in stack.patches for change in patch.files}
    pristine = {path: repo.read(released[path]) for path in touched & released.keys()}
    with tempfile.TemporaryDirectory(prefix="graft-commits-") as aside:
        again = repos.make(Path(aside) / "repo", pristine, stack.patches)
        texts = again.export(again.commits())
    for patch, text in zip(stack.patches, texts, strict=True):
        if text != patch.text:
            pairs = zip(patch.text.splitlines(), text.splitlines(), strict=False)
            went, came = next(((a, b) for a, b in pairs if a != b), (b"more lines", b"fewer"))
            raise GraftError(
                f"commit '{patch.subject}' does not come through git am as it is: "
                f"{went.decode('utf-8', 'replace')!r} becomes {came.decode('utf-8', 'replace')!r}",
                f"git -C {repo.path} rebase -i {repo.pristine[:12]}, and reword or edit it",
            )


def _contents(
    old: Stack, new: Stack, repo: Repo, head: str, root: Path
) -> dict[Path, bytes | None]:
    """Every file that the stack decides, with its bytes (None: it is to go)."""
    series = stacks.series_file(new.pin, root)
    renamed = renames(old, new)
    wanted: dict[Path, bytes | None] = {patch.path: None for patch in old.patches}
    wanted.update({patch.path: patch.text for patch in new.patches})
    wanted[series] = _series(old, new, renamed, series)
    if renamed:
        sent = submitted.file(new.pin, root)
        wanted[sent] = submitted.renamed(submitted.load(new.pin, root), renamed).render()
    if new.pin != old.pin:
        wanted[pins.file(new.pin.name, root)] = pins.render(new.pin).encode()
    if new.pin.name == DEFAULT_PIN:
        there = repo.files(head)
        for path in [*old.new_files, *new.new_files]:
            copy = stacks.copy_path(path, root)
            assert copy is not None, path  # Stack.check lets new files be nowhere else
            wanted[copy] = repo.read(there[path]) if path in new.new_files else None
    return wanted


def patch_names(stack: Stack, subjects: Sequence[str]) -> list[str]:
    """A file name for each: that of the stack's patch of this subject, or one made from it."""
    has: dict[str, list[str]] = {}
    for patch in stack.patches:
        has.setdefault(patch.subject, []).append(patch.name)
    kept = [has[subject].pop(0) if has.get(subject) else None for subject in subjects]
    taken = {name for name in kept if name}
    names = []
    for subject, name in zip(subjects, kept, strict=True):
        names.append(name or file_name(subject, taken))
        taken.add(names[-1])
    return names


def file_name(subject: str, taken: Collection[str] = ()) -> str:
    """``[inductor] Cap the reads`` -> ``cap-the-reads.patch``; numbered where that is taken."""
    words = re.sub(r"^(\s*\[[^\]]*\])+", "", subject).lower()
    stem = re.sub(r"[^a-z0-9]+", "-", words).strip("-") or "change"
    if len(stem) > NAME_LENGTH:
        stem = stem[: NAME_LENGTH + 1].rpartition("-")[0] or stem[:NAME_LENGTH]
    name, number = f"{stem}.patch", 2
    while name in taken:
        name, number = f"{stem}-{number}.patch", number + 1
    return name


def renames(old: Stack, new: Stack) -> dict[str, str]:
    """Old name -> new name of the patches whose subject was changed.

    A patch that changes the same lines is the same patch; and so is the one that is left, where
    one name went and one came.
    """
    gone = {p.name: p for p in old.patches if p.name not in {each.name for each in new.patches}}
    came = {p.name: p for p in new.patches if p.name not in {each.name for each in old.patches}}
    found = {}
    for name, patch in list(gone.items()):
        same = [other for other in came.values() if other.diff == patch.diff]
        if same:
            found[name] = same[0].name
            del gone[name], came[same[0].name]
    if len(gone) == len(came) == 1:
        found[next(iter(gone))] = next(iter(came))
    return found


def _series(old: Stack, new: Stack, renamed: Mapping[str, str], path: Path) -> bytes | None:
    """The text of ``series``: a comment stays above the name that it stands above, and what is
    said of a patch behind its name.

    What stands before the first name, and after the last, is about the series and stays there.
    """
    text = path.read_text("utf-8") if path.exists() else ""
    names = [patch.name for patch in new.patches]
    if names == [patch.name for patch in old.patches]:
        return text.encode() if path.exists() else None
    above: dict[str, list[str]] = {}
    behind: dict[str, str] = {}
    head: list[str] | None = None
    waiting: list[str] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            waiting.append(line)
            continue
        was = stacks.read_line(line, str(path))[0]
        name = renamed.get(was, was)
        behind[name] = line.strip().removeprefix(was)
        if head is None:
            head, waiting = waiting, []
        else:
            above[name], waiting = waiting, []
    if head is None:
        head, waiting = waiting, []
    lines = head
    for name in names:
        line = name + behind[name] if name in behind else stacks.write_line(name, Status())
        lines += [*above.get(name, []), line]
    return "".join(f"{line}\n" for line in [*lines, *waiting]).encode()
