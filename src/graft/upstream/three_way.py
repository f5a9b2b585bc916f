"""Puts patches on another release, one by one, three-way: in a repository that has both.

A patch that conflicts is left out for the next ones, but for what does not conflict: each is judged
by its own hunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graft.errors import GraftError
from graft.places import ROOT
from graft.stack import FileChange, Patch, Stack, commits, stand_in
from graft.stack import conflicts as places
from graft.stack.commits import HUNKS, Repo
from graft.stack.conflicts import CLEAN, CONFLICT, MOVED, THERE
from graft.stack.git import NULL_BLOB
from graft.stack.pins import Pin
from graft.upstream import additions, python_names


@dataclass(frozen=True)
class Verdict:
    """What becomes of one patch.

    `state` is ``clean`` (its files are those that it was made for), ``moved`` (they differ, and it
    applies), ``already there`` or ``conflict``. `places` says where: ``<path>:120-134`` for lines
    of the new release. `left_out` says why a patch that applies is not written.
    """

    patch: Patch
    state: str
    places: tuple[str, ...] = ()
    left_out: str = ""


@dataclass
class Grafter:
    """The repository with both releases; its work tree is at the commit that is being made."""

    repo: Repo
    stack: Stack
    release: tuple[int, ...]
    after: Mapping[str, bytes]
    base: str = field(init=False)
    own: frozenset[str] = field(init=False)
    absent: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.chain = self.repo.commits()
        made = {c.path for patch in self.stack.patches for c in patch.files if c.is_new}
        self.own = frozenset(made - self.after.keys())
        before = self.repo.files(self.repo.pristine)
        self.absent = frozenset(commits.absent_files(self.stack.patches, before))
        git_ = self.repo.git
        git_("checkout", "-q", "--detach", self.repo.pristine)
        git_("rm", "-r", "-q", "-f", "--ignore-unmatch", ".")
        for path, data in self.after.items():
            file = self.repo.path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        git_("add", "-A", "-f", ".")
        git_("commit", "-q", "--allow-empty", "-m", "The files as released next")
        self.base = self.repo.id()

    def judge(self) -> tuple[list[Verdict], list[str]]:
        """A verdict a patch, and the commit that stands for it in what the next ones are tried on:
        the whole of it, or what of it does not conflict."""
        verdicts, carried = [], []
        for patch, commit in zip(self.stack.patches, self.chain, strict=True):
            landed = patch.status.landed
            if landed is not None and landed <= self.release:
                said = f"{patch.status.upstream}, says the series"
                verdicts.append(Verdict(patch, THERE, (said,)))
                carried.append(self._own_alone(commit))
                continue
            before = self.repo.id()
            if self._pick(commit):
                verdicts.append(self._judge(patch, before))
                carried.append(self.repo.id())
            else:
                where = (*places.unmerged(self.repo.git), *self._there(patch, before))
                verdicts.append(Verdict(patch, CONFLICT, where))
                self._abort(before)
                carried.append(self._without_conflicts(commit))
        return verdicts, carried

    def keep(
        self, verdicts: Sequence[Verdict], carried: Sequence[str]
    ) -> tuple[list[tuple[Patch, str]], dict[str, str]]:
        """The patches that apply without those that conflict, with their commits; and why the
        others that could be applied are not among them."""
        self.repo.git("checkout", "-q", "--detach", self.base)
        written: list[tuple[Patch, str]] = []
        left_out: dict[str, str] = {}
        missing: list[Patch] = []
        for verdict, commit in zip(verdicts, carried, strict=True):
            patch, before = verdict.patch, self.repo.id()
            if verdict.state == CONFLICT:
                missing.append(patch)
            elif needs := self._put(patch, commit, missing):
                self._abort(before)
                left_out[patch.name] = needs
                missing.append(patch)
            elif self.repo.id(f"{before}^{{tree}}") == self.repo.id("HEAD^{tree}"):
                self.repo.git("reset", "-q", "--hard", before)  # nothing is left of it
            else:
                written.append((patch, self.repo.id()))
        return written, left_out

    def _put(self, patch: Patch, commit: str, missing: Sequence[Patch]) -> str:
        """Put `commit` on top, without the patches that are `missing`; why it cannot be, or ""."""
        if not self._pick(commit):
            stages = places.stages(self.repo.git)
            apart = stages.keys() <= self.own and all(
                has == {"1", "2", "3"} and self._set_apart(path) for path, has in stages.items()
            )
            if not apart:
                needed = [p for p in missing if stages.keys() & {c.path for c in p.files}]
                return _needs(needed or missing)
            self.repo.git("cherry-pick", "--quit")
            self._commit(commit)
        unmet = self._unmet(patch)
        makers = [p for p in missing if unmet and unmet.encode() in p.text]
        return f"{_needs(makers or missing)} (`{unmet}`)" if unmet else ""

    def _set_apart(self, path: str) -> bool:
        """Merge one of the stack's own files, where a commit does nothing but add to what another
        one, which is missing, would have added before it. False where it does more."""
        self.repo.git("checkout", "-q", "--conflict=diff3", "--", path)
        text = additions.merged((self.repo.path / path).read_text("utf-8"))
        if text is None or not python_names.parses(text.encode()):
            return False
        (self.repo.path / path).write_text(text, "utf-8")
        self.repo.git("add", "--", path)
        return True

    def _unmet(self, patch: Patch) -> str:
        """A name that a file of the patch imports from one of the stack's, and is not there."""
        head = self.repo.files("HEAD")
        for change in patch.files:
            if not change.in_tree or change.path not in head or change.is_deleted:
                continue
            for module, name in python_names.imports(
                self.repo.read(head[change.path]), change.path
            ):
                for path in (f"{module}.py", f"{module}/__init__.py"):
                    if path in self.own and (
                        path not in head
                        or name not in python_names.defines(self.repo.read(head[path]))
                    ):
                        return name
        return ""

    def patches(
        self, pin: Pin, written: Sequence[tuple[Patch, str]]
    ) -> tuple[tuple[Patch, ...], tuple[str, ...]]:
        """Patch files of those commits; and the files that are no Python after the last."""
        onto = Repo(self.repo.path, self.base)
        texts = onto.export([commit for _, commit in written])
        home = ROOT / "patches" / pin.name
        made = tuple(
            Patch(patch.name, home / patch.name, text, patch.status)
            for (patch, _), text in zip(written, texts, strict=True)
        )
        head = self.repo.files(written[-1][1] if written else self.base)
        touched = {change.path for patch in made for change in patch.files}
        broken = [
            path
            for path in sorted(touched & head.keys())
            if path.endswith(".py") and not python_names.parses(self.repo.read(head[path]))
        ]
        return made, tuple(broken)

    # --- one commit ---

    def _pick(self, commit: str) -> bool:
        """Whether `commit` could be put on top of what is there, three-way."""
        options = ("--allow-empty", "--keep-redundant-commits", "--allow-empty-message")
        try:
            self.repo.git("-c", "merge.conflictStyle=merge", "cherry-pick", *options, commit)
        except GraftError:
            if not places.stages(self.repo.git):
                raise
            return False
        return True

    def _abort(self, before: str) -> None:
        self.repo.git("cherry-pick", "--quit")
        self.repo.git("reset", "-q", "--hard", before)

    def _judge(self, patch: Patch, before: str) -> Verdict:
        """Of a patch that applied: whether anything of it was left to do, and where it went."""
        now = {change.path: change for change in self._changes(before)}
        wanted = [c for c in patch.files if c.path not in self.own | self.absent]
        if wanted and not now.keys() - self.own - {f"{path}{HUNKS}" for path in self.absent}:
            return Verdict(patch, THERE)
        files = self.repo.files(before)
        differing = [c for c in wanted if files.get(c.path, NULL_BLOB) != c.old_blob]
        if not differing:
            return Verdict(patch, CLEAN)
        return Verdict(patch, MOVED, tuple(places.offset(c, now.get(c.path)) for c in differing))

    def _changes(self, before: str) -> list[FileChange]:
        """What the commit that is there does to each file."""
        flags = ("--full-index", "--no-renames", "--no-color", "--no-ext-diff")
        text = self.repo.git("diff", *flags, before, "HEAD")
        if not text:
            return []
        head = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nSubject: x\n\n"
        return list(Patch("", Path(), commits.encode(head + text)).files)

    def _own_alone(self, commit: str) -> str:
        """Put what `commit` leaves of the stack's own files on top, and nothing else of it."""
        stand_in.put_own(self.repo.git, commit, self.own)
        return self._commit(commit)

    def _without_conflicts(self, commit: str) -> str:
        """Put what of `commit` does not conflict on top; the new release wins where it does."""
        stand_in.put(self.repo.git, commit, self.own)
        return self._commit(commit)

    def _commit(self, commit: str) -> str:
        message = self.repo.message(commit)
        self.repo.git("commit", "-q", "--allow-empty", "-F", "-", input=message)
        return self.repo.id()

    def _there(self, patch: Patch, before: str) -> tuple[str, ...]:
        """How many hunks the new release has already, line by line, where it has any."""
        files = self.repo.files(before)
        hunks = [(c, h) for c in patch.files if c.path not in self.own for h in c.hunks]
        there = 0
        for change, hunk in hunks:
            lines = tuple(line[1:] for line in hunk.lines if line[:1] in (" ", "+", ""))
            if change.path in files:
                text = self.repo.read(files[change.path]).decode("utf-8", "surrogateescape")
                there += "\n".join(["", *lines, ""]) in f"\n{text}"
        return (f"{there} of {len(hunks)} hunks are there already",) if there else ()


def _needs(missing: Sequence[Patch]) -> str:
    names = [patch.name.removesuffix(".patch") for patch in missing]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"needs {', '.join(names[:2])}{more}"
