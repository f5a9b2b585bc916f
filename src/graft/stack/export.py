"""`graft export`: the stack as commits on a real PyTorch checkout.

Each patch is applied with ``git am -k`` to the pinned commit; with ``--onto`` each of those commits
is then rebased, one at a time. What applies of one that conflicts stands for it after it, so that
it does not hide what becomes of the others.
A commit's author is the user, its date the patch's: the same series gives the same commits.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from graft.errors import GraftError, UsageError
from graft.stack import Patch, Stack, release_numbers, stand_in
from graft.stack import checkout as checkouts
from graft.stack.alone import alone
from graft.stack.checkout import Checkout
from graft.stack.commits import encode
from graft.stack.conflicts import CLEAN, CONFLICT, MOVED, THERE, offset, unmerged
from graft.stack.git import FORMAT_PATCH_FLAGS, IDENTITY, NULL_BLOB, GitFailed
from graft.stack.pins import Pin

NOT_TRIED = "not tried"


@dataclass(frozen=True)
class Outcome:
    """What became of one patch.

    `state` is ``clean`` (every file was as the patch names it), ``moved`` (the files differ, and
    it applies), ``conflict``, ``already there`` (nothing is left of it to do), or ``not tried``
    (one before it does not apply to the pinned commit). `places` says where: ``<path>:120-134`` for
    lines of a file as it was before the patch. `commit` is the commit that was made, if one was.
    """

    patch: Patch
    state: str
    places: tuple[str, ...] = ()
    commit: str | None = None


@dataclass(frozen=True)
class Target:
    """Where the stack goes: `commit`, as the user named it, and its release where it says so."""

    name: str
    commit: str
    release: tuple[int, ...] | None = None

    def has(self, patch: Patch, pin: Pin) -> bool:
        """Upstream has the patch in a release that is no later than this one, says the series.

        Of a patch that the pin's own release has, its series has what is left: what others build
        on, and tests.
        """
        landed = patch.status.landed
        if landed is None or landed <= release_numbers(pin.version):
            return False
        return self.release is None or landed <= self.release


@dataclass(frozen=True)
class Export:
    """The stack as commits, in a worktree that is there for as long as `opened` is."""

    checkout: Checkout
    stack: Stack
    onto: Target | None
    outcomes: tuple[Outcome, ...]
    folder: Path

    @property
    def commits(self) -> tuple[str, ...]:
        """Those that were made, in order."""
        return tuple(each.commit for each in self.outcomes if each.commit)

    @property
    def conflicts(self) -> tuple[Outcome, ...]:
        """Those that did not apply."""
        return tuple(each for each in self.outcomes if each.state in (CONFLICT, NOT_TRIED))

    def check(self, next: str | None = None) -> None:
        """Raise GraftError unless every patch is a commit now, or is there already.

        `next` is what to do about conflicts with `onto`, in place of resolving them by hand.
        """
        pin, where = self.stack.pin, self.checkout.shown
        real = [each for each in self.conflicts if each.state == CONFLICT]
        refused = "; ".join(
            f"{each.patch.name} ({', '.join(each.places[:2])})" for each in real[:2]
        )
        if len(real) > 2:
            refused += f"; and {len(real) - 2} more"
        if self.conflicts and self.onto:
            raise GraftError(
                f"{len(self.conflicts)} of {len(self.outcomes)} patches do not apply to "
                f"{self.onto.name}: {refused}",
                next
                or f"graft export {where}, then git -C {where} rebase --onto {self.onto.name} "
                f"{pin.commit[:12]} {branch_name(self.stack)}, and resolve them there",
            )
        if self.conflicts:
            raise GraftError(
                f"the series does not apply to {pin.name}: {refused}",
                "graft edit, fix the commit, then graft refresh",
            )
        if not self.commits:
            raise GraftError(
                f"there is nothing to export: {self.onto.name if self.onto else pin.name} has "
                f"all {len(self.outcomes)} patches"
            )


@contextlib.contextmanager
def of_series(path: Path, stack: Stack, name: str) -> Iterator[Stack]:
    """What is exported of series `name` to the checkout at `path`: for as long as it is open.

    One that is `alone` has its own patches, as they apply to the pinned release; another has those
    of the series before it too. Raises UsageError where there is no such series.
    """
    series = stack.series_of(name)
    if not series.alone:
        yield stack.up_to(series)
        return
    checkout = checkouts.find(path)
    checkouts.check_pin(checkout, stack.pin)
    commit = stack.pin.commit
    there = checkout.blobs(commit, sorted(stack.files))
    released = {
        file: encode(checkout.git("cat-file", "blob", f"{commit}:{file}"))
        for file, blob in there.items()
        if blob != NULL_BLOB
    }
    with tempfile.TemporaryDirectory(prefix="graft-alone-") as aside:
        yield alone(stack, series.name, released, Path(aside))


def branch_name(stack: Stack, onto: str | None = None) -> str:
    """The branch that an export makes where none is named."""
    name = f"graft/{stack.pin.name}"
    return f"{name}-onto-{re.sub(r'[^A-Za-z0-9.]+', '-', onto).strip('-.')}" if onto else name


def export(
    path: Path,
    stack: Stack,
    *,
    branch: str | None = None,
    onto: str | None = None,
    force: bool = False,
) -> tuple[Export, str, bool]:
    """Put the stack on a branch of the checkout at `path`; returns it, the branch, and whether the
    branch is new or moved.

    The branch appears, or moves, when every commit is made; with a conflict it does not. Raises
    GraftError for a checkout, commit or branch that is not as expected; not for a conflict:
    `Export.check` does.
    """
    checkout = checkouts.find(path)
    name = branch or branch_name(stack, onto)
    checkouts.check_branch(checkout, name, force=force)
    target = find_target(checkout, onto) if onto else None
    with opened(checkout, stack, target) as made:
        moved = False
        if not made.conflicts and made.commits:
            moved = checkouts.set_branch(checkout, name, made.commits[-1], force=force)
        return made, name, moved


def find_target(checkout: Checkout, onto: str) -> Target:
    """The commit that `onto` means in the checkout. Raises UsageError where it means none."""
    commit = checkout.commit(onto)
    if commit is None:
        raise UsageError(
            f"{checkout.path} has no commit {onto}",
            f"git -C {checkout.shown} fetch, or another --onto",
        )
    said = checkout.git("show", f"{commit}:version.txt", check=False).strip()
    release = release_numbers(said) if re.match(r"\d+\.\d+", said) else None
    return Target(onto, commit, release)


@contextlib.contextmanager
def opened(
    checkout: Checkout,
    stack: Stack,
    onto: Target | None = None,
    messages: Mapping[str, str] | None = None,
) -> Iterator[Export]:
    """The stack as commits in a worktree of its own, which goes away in the end.

    `messages` replaces the message of a patch, by its name. Raises GraftError for a stack without
    patches, a checkout without the pin's commit or without an identity; not for conflicts.
    """
    if not stack.patches:
        raise UsageError(f"{stack.pin.name} has no patches to export", "another --pin")
    checkouts.check_pin(checkout, stack.pin)
    # Files of the stack alone: a worktree takes milliseconds, and a blob-less clone fetches little.
    with checkouts.worktree(checkout, stack.pin.commit, stack.files) as folder:
        work = _Work(checkout, folder, checkout.identity())
        outcomes = _apply(work, stack)
        if onto is not None and all(each.commit for each in outcomes):
            outcomes = _rebase(work, stack, onto, outcomes)
        outcomes = _reword(work, stack, onto, outcomes, messages or {})
        yield Export(checkout, stack, onto, tuple(outcomes), folder)


@dataclass(frozen=True)
class _Work:
    checkout: Checkout
    folder: Path
    identity: Mapping[str, str]

    def git(self, *args: str, input: str | None = None, check: bool = True) -> str:
        dates = {f"GIT_{who}_DATE": IDENTITY["DATE"] for who in ("AUTHOR", "COMMITTER")}
        env = {**self.identity, **dates}
        return self.checkout.git(*args, cwd=self.folder, input=input, env=env, check=check)

    @property
    def head(self) -> str:
        return self.git("rev-parse", "HEAD").strip()


# --- at the pinned commit ------------------------------------------------------------------------


def _apply(work: _Work, stack: Stack) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for at, patch in enumerate(stack.patches):
        parent = work.head
        try:
            work.git("am", "-q", "-k", "--no-3way", str(patch.path))
        except GitFailed as failed:
            places = _refused(failed.words)
            if not places:
                raise  # no conflict: a disk that is full, a patch file that is gone
            outcomes.append(Outcome(patch, CONFLICT, places))
            outcomes += [Outcome(later, NOT_TRIED) for later in stack.patches[at + 1 :]]
            break
        outcomes.append(_judge(work, patch, parent, work.head))
    return outcomes


def _refused(words: str) -> tuple[str, ...]:
    """``<path>:<line>`` of each hunk that git apply names, ``<path>`` where it names no line."""
    lines = re.findall(r"^error: patch failed: (.+:\d+)$", words, re.MULTILINE)
    paths = re.findall(
        r"^error: (.+): (?:patch does not apply|does not exist in index|already exists in index|"
        r"No such file or directory|does not match index)$",
        words,
        re.MULTILINE,
    )
    named = {line.rpartition(":")[0] for line in lines}
    return tuple(dict.fromkeys([*lines, *(path for path in paths if path not in named)]))


def _judge(work: _Work, patch: Patch, parent: str, commit: str) -> Outcome:
    """Whether `commit`, which is the patch on `parent`, is where the patch says it is."""
    before = work.checkout.blobs(parent, [change.path for change in patch.files])
    differing = [change for change in patch.files if before[change.path] != change.old_blob]
    if not differing:
        return Outcome(patch, CLEAN, commit=commit)
    text = work.git("format-patch", *FORMAT_PATCH_FLAGS, "--stdout", "-1", commit)
    now = {c.path: c for c in replace(patch, text=text.encode("utf-8", "surrogateescape")).files}
    return Outcome(patch, MOVED, tuple(offset(c, now.get(c.path)) for c in differing), commit)


# --- elsewhere -----------------------------------------------------------------------------------


def _rebase(work: _Work, stack: Stack, onto: Target, applied: list[Outcome]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    tip, parent = onto.commit, stack.pin.commit
    made = {c.path for patch in stack.patches for c in patch.files if c.is_new}
    own = {path for path, blob in work.checkout.blobs(tip, made).items() if blob == NULL_BLOB}
    hidden: list[str] = []  # commits whose own files have to be there for what comes later
    broken = False
    for each in applied:
        assert each.commit is not None  # the caller has looked
        if onto.has(each.patch, stack.pin):
            places = (f"{each.patch.status.upstream}, says the series",)
            outcomes.append(Outcome(each.patch, THERE, places))
            hidden.append(each.commit)
        else:
            outcome = _move(work, each.patch, tip, parent, each.commit)
            outcomes.append(outcome)
            tip = outcome.commit or tip
            broken = broken or outcome.state == CONFLICT
        if broken:  # no branch will be made, but a report on each patch
            for commit in hidden:
                stand_in.put_own(work.git, commit, own)
            hidden, tip = [], _commit(work, tip)
            if outcomes[-1].state == CONFLICT:
                stand_in.put(work.git, each.commit, own)
                tip = _commit(work, tip)
        parent = each.commit
    return outcomes


def _move(work: _Work, patch: Patch, tip: str, parent: str, commit: str) -> Outcome:
    # Whether it became empty is asked of the result. To ask for it by patch id, as rebase would,
    # git would read all that upstream committed since.
    options = ("-q", "--merge", "--empty=drop", "--reapply-cherry-picks", "--no-fork-point")
    try:
        work.git("rebase", *options, "--onto", tip, parent, commit)
    except GitFailed:
        places = unmerged(work.git)
        if not places:
            raise
        work.git("rebase", "--quit")
        work.git("reset", "-q", "--hard", tip)
        work.git("clean", "-q", "-fdx")
        return Outcome(patch, CONFLICT, places)
    moved = work.head
    return Outcome(patch, THERE) if moved == tip else _judge(work, patch, tip, moved)


def _commit(work: _Work, parent: str) -> str:
    """What is in the index, as a commit on `parent` that is checked out then."""
    tree = work.git("write-tree").strip()
    made = work.git("commit-tree", tree, "-p", parent, "-F", "-", input="stands in\n").strip()
    work.git("reset", "-q", "--hard", made)
    return made


# --- as they are handed over ---------------------------------------------------------------------


def _reword(
    work: _Work,
    stack: Stack,
    onto: Target | None,
    outcomes: list[Outcome],
    messages: Mapping[str, str],
) -> list[Outcome]:
    """The same commits by the user, at one fixed date, under the patches' messages."""
    parent = onto.commit if onto else stack.pin.commit
    done = []
    for each in outcomes:
        if each.commit is None:
            done.append(each)
            continue
        message = messages.get(each.patch.name, each.patch.message)
        tree = f"{each.commit}^{{tree}}"
        parent = work.git("commit-tree", tree, "-p", parent, "-F", "-", input=message).strip()
        done.append(replace(each, commit=parent))
    work.git("update-ref", "--no-deref", "HEAD", parent)
    return done
