"""`graft pin add`: a pin of another release, and what becomes of the series on it.

Both releases' files and the series are commits of a throwaway repository, where each patch is
merged onto the new release three-way, so that a hunk follows its place, and a file its new name. A
patch that conflicts is left out for the next ones, but for what does not conflict: each is judged
by its own hunks. Then the patches that apply without those that do not are written, all or none.
"""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graft import bases, commits, journal, pins, tree
from graft import stack as stacks
from graft.commits import HUNKS, Repo
from graft.errors import GraftError, UsageError
from graft.export import CLEAN, CONFLICT, MOVED, THERE, conflict_ranges
from graft.git import NULL_BLOB, blob_id
from graft.pins import ROOT, Pin
from graft.stack import FileChange, Patch, Stack, release_numbers

if TYPE_CHECKING:
    from rich.console import Console

PACKAGE = "torch/_inductor"
STATES = (CLEAN, MOVED, THERE, CONFLICT)


@dataclass(frozen=True)
class Release:
    """The files of a release: `folder` has ``torch/``; `commit` is what it was built from."""

    version: str
    commit: str
    folder: Path

    def read(self, extra: Collection[str] = ()) -> dict[str, bytes]:
        """Every Python file of Inductor, and those of `extra` that there are."""
        paths = {
            str(path.relative_to(self.folder))
            for path in (self.folder / PACKAGE).rglob("*.py")
            if path.is_file()
        }
        paths |= {path for path in extra if (self.folder / path).is_file()}
        return {path: (self.folder / path).read_bytes() for path in sorted(paths)}


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


@dataclass(frozen=True)
class Trial:
    """The series of `old` on `new`: a verdict a patch, and the stack of what applies.

    `gone` are the files of the old pin that the new release has not; `broken` are the files that
    are no Python any more, once the stack is applied.
    """

    old: Pin
    new: Pin
    verdicts: tuple[Verdict, ...]
    stack: Stack
    gone: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    def count(self, state: str) -> int:
        """The patches of that state."""
        return sum(verdict.state == state for verdict in self.verdicts)


def of_version(
    prefix: Path,
    version: str,
    *,
    old: str | None = None,
    python: Path | None = None,
    files: Path | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
    root: Path = ROOT,
) -> Trial:
    """Try the series of the pin `old` (default: that of the tree at `prefix`) on torch `version`.

    Its files are those of `python`, of the folder `files`, or of an installation that is made for
    it. The old release's are those of the tree's base. Raises as `attempt` and where those come
    from do, and, unless it is a `dry_run`, for a pin that is there.
    """
    if not re.fullmatch(r"\d+(\.\d+)+", version):
        raise UsageError(f"{version} is no version of torch; expected one as 2.12.1")
    built = tree.load(prefix)
    stack = stacks.load(pins.load(old or built.pin, root), root)
    pins.check_base(stack.pin, built.base)
    if not dry_run:
        check_absent(version, root)
    if files:
        new = of_folder(files, version)
    elif python:
        new = of_python(python, version)
    else:
        new = install(version, root, say)
    base = built.base
    return attempt(stack, Release(base.version, base.git_version, base.torch_dir.parent), new)


# --- where a release's files come from -----------------------------------------------------------


def of_folder(folder: Path, version: str) -> Release:
    """The release whose files lie in `folder`, as a wheel has them.

    Raises UsageError for a folder without them, or of another version.
    """
    file = folder / "torch" / "version.py"
    if not file.is_file() or not (folder / PACKAGE).is_dir():
        raise UsageError(
            f"{folder} has no torch/version.py and {PACKAGE}; expected the files of a torch wheel",
            f"unzip a wheel of torch {version} there, or --python PY",
        )
    text = file.read_text("utf-8")
    named = dict(re.findall(r"^(\w+)[^=\n]*= ['\"]([^'\"\n]*)", text, re.M))
    return _checked(
        Release(named.get("__version__", ""), named.get("git_version", ""), folder), version
    )


def of_python(python: Path, version: str) -> Release:
    """The release that `python` has. Raises as `graft.bases.probe`, and for another version."""
    base = bases.probe(python)
    return _checked(Release(base.version, base.git_version, base.torch_dir.parent), version)


def install(version: str, root: Path = ROOT, say: Callable[[str], None] = print) -> Release:
    """The release, installed without what it depends on into a venv of its own, which is kept.

    Raises GraftError where it cannot be installed.
    """
    folder = root / ".graft" / "pins" / version
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        say(f"installing torch {version} into {folder}")
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-q", "--no-deps", f"torch=={version}"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                words = (done.stderr or done.stdout).strip().splitlines()[-1:]
                raise GraftError(
                    f"torch {version} cannot be installed into {folder}: {''.join(words)}",
                    f"graft pin add {version} --python PY, with a Python that has it",
                )
        (folder / "done").touch()
    return of_python(python, version)


def _checked(release: Release, version: str) -> Release:
    if release.version.partition("+")[0] != version:
        raise UsageError(
            f"{release.folder} has torch {release.version or 'of no version'}, expected {version}",
            f"graft pin add {release.version.partition('+')[0] or 'VERSION'} ...",
        )
    if not re.fullmatch(r"[0-9a-f]{40}", release.commit):
        raise GraftError(f"torch {release.version} of {release.folder} does not name its commit")
    return release


# --- trying --------------------------------------------------------------------------------------


def attempt(stack: Stack, old: Release, new: Release) -> Trial:
    """Try the patches of `stack`, made for `old`, on `new`; nothing is written.

    Raises GraftError where the files of `old` are not the pin's.
    """
    touched = {*stack.pin.files, *stack.files}
    before, after = old.read(touched), new.read(touched)
    for path, blob in stack.pin.files.items():
        if path not in before or blob_id(before[path]) != blob:
            raise GraftError(
                f"{old.folder}/{path} is not that of torch {stack.pin.version}",
                f"pip install --force-reinstall --no-deps torch=={stack.pin.version}",
            )
    with tempfile.TemporaryDirectory(prefix="graft-pin-") as aside:
        repo = commits.make(Path(aside) / "repo", before, stack.patches)
        grafter = _Grafter(repo, stack, release_numbers(new.version), after)
        verdicts, carried = grafter.judge()
        written, left_out = grafter.keep(verdicts, carried)
        pin = _pin(stack, new, after)
        made, broken = grafter.patches(pin, written)
        commits.make(Path(aside) / "again", after, made)  # they apply as they are, one by one
        verdicts = [replace(v, left_out=left_out.get(v.patch.name, "")) for v in verdicts]
        gone = tuple(path for path in stack.pin.files if path not in after)
        return Trial(stack.pin, pin, tuple(verdicts), Stack(pin, made), gone, broken)


def _pin(stack: Stack, new: Release, after: Mapping[str, bytes]) -> Pin:
    files = {path: blob_id(after[path]) for path in stack.pin.files if path in after}
    version = new.version.partition("+")[0]
    return Pin(f"v{version}", version, new.commit, files)


@dataclass
class _Grafter:
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
                places = (*self._unmerged(), *self._there(patch, before))
                verdicts.append(Verdict(patch, CONFLICT, places))
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
            stages = self._stages()
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
        lines = (self.repo.path / path).read_text("utf-8").splitlines(keepends=True)
        done: list[str] = []
        at = 0
        while at < len(lines):
            if not lines[at].startswith("<<<<<<< "):
                done.append(lines[at])
                at += 1
                continue
            base = _index(lines, at, "||||||| ")
            theirs = _index(lines, base, "=======")
            end = _index(lines, theirs, ">>>>>>> ")
            matcher = difflib.SequenceMatcher(
                None, lines[base + 1 : theirs], lines[theirs + 1 : end], autojunk=False
            )
            steps = [step for step in matcher.get_opcodes() if step[0] != "equal"]
            if any(step[0] != "insert" for step in steps):
                return False
            done += lines[at + 1 : base]
            for _, _, _, first, last in steps:
                done += lines[theirs + 1 + first : theirs + 1 + last]
            at = end + 1
        if not _parses("".join(done).encode()):
            return False
        (self.repo.path / path).write_text("".join(done), "utf-8")
        self.repo.git("add", "--", path)
        return True

    def _unmet(self, patch: Patch) -> str:
        """A name that a file of the patch imports from one of the stack's, and is not there."""
        head = self.repo.files("HEAD")
        for change in patch.files:
            if not change.in_tree or change.path not in head or change.is_deleted:
                continue
            for module, name in _imports(self.repo.read(head[change.path]), change.path):
                for path in (f"{module}.py", f"{module}/__init__.py"):
                    if path in self.own and (
                        path not in head or name not in _defines(self.repo.read(head[path]))
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
            if path.endswith(".py") and not _parses(self.repo.read(head[path]))
        ]
        return made, tuple(broken)

    # --- one commit ---

    def _pick(self, commit: str) -> bool:
        """Whether `commit` could be put on top of what is there, three-way."""
        options = ("--allow-empty", "--keep-redundant-commits", "--allow-empty-message")
        try:
            self.repo.git("-c", "merge.conflictStyle=merge", "cherry-pick", *options, commit)
        except GraftError:
            if not self._stages():
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
        return Verdict(patch, MOVED, tuple(_offset(c, now.get(c.path)) for c in differing))

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
        wanted = self.repo.files(commit)
        for change in self.repo.changes(commit, f"{commit}^"):
            if change.path not in self.own:
                continue
            if change.path in wanted:
                self.repo.git("checkout", "-q", commit, "--", change.path)
            else:
                self.repo.git("rm", "-q", "--ignore-unmatch", "--", change.path)
        return self._commit(commit)

    def _without_conflicts(self, commit: str) -> str:
        """Put what of `commit` does not conflict on top; the new release wins where it does."""
        before = self.repo.id()
        there = self.repo.files(before)
        try:
            self.repo.git("cherry-pick", "-n", "-X", "ours", commit)
        except GraftError:
            for path in self._stages():
                if path in there:
                    self.repo.git("checkout", "-q", before, "--", path)
                else:
                    self.repo.git("rm", "-q", "-f", "--ignore-unmatch", "--", path)
            self.repo.git("cherry-pick", "--quit")
        return self._own_alone(commit)

    def _commit(self, commit: str) -> str:
        message = self.repo.message(commit)
        self.repo.git("commit", "-q", "--allow-empty", "-F", "-", input=message)
        return self.repo.id()

    def _stages(self) -> dict[str, set[str]]:
        """The files that are not merged, with what there is of each: 1 base, 2 ours, 3 theirs."""
        found: dict[str, set[str]] = {}
        for entry in self.repo.git("ls-files", "-u", "-z").split("\0")[:-1]:
            info, _, path = entry.partition("\t")
            found.setdefault(path, set()).add(info.split()[2])
        return found

    def _unmerged(self) -> tuple[str, ...]:
        """The lines in conflict, as the new release numbers them."""
        places: list[str] = []
        for path, has in self._stages().items():
            if "2" not in has:
                places.append(f"{path} (is not there)")
            elif "3" not in has:
                places.append(f"{path} (removed by the patch)")
            else:
                flags = ("--ours", "-U0", "--no-color", "--no-ext-diff")
                ranges = conflict_ranges(self.repo.git("diff", *flags, "--", path))
                places += [f"{path}:{lines}" for lines in ranges] or [path]
        return tuple(places)

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


def _offset(change: FileChange, now: FileChange | None) -> str:
    """How far the hunks of a file went: ``<path> +12, -3 lines``."""
    if now is None:
        return f"{change.path} (under another name, or there already)"
    if len(now.hunks) != len(change.hunks):
        return change.path
    offsets = [new.old_start - old.old_start for old, new in zip(change.hunks, now.hunks)]
    shown = ", ".join(f"{offset:+d}" for offset in dict.fromkeys(offsets) if offset)
    return f"{change.path} {shown} lines" if shown else change.path


def _needs(missing: Sequence[Patch]) -> str:
    names = [patch.name.removesuffix(".patch") for patch in missing]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"needs {', '.join(names[:2])}{more}"


def _index(lines: Sequence[str], start: int, mark: str) -> int:
    return next(at for at in range(start, len(lines)) if lines[at].startswith(mark))


def _imports(data: bytes, path: str) -> list[tuple[str, str]]:
    """(module as a path without .py, name) for each ``from module import name``."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            folder = [] if not node.level else path.split("/")[: -node.level]
            module = "/".join([*folder, *(node.module or "").split(".")]).strip("/")
            found += [(module, alias.name) for alias in node.names]
            found += [(f"{module}/{alias.name}", "") for alias in node.names]
    return found


def _defines(data: bytes) -> set[str]:
    """The names at a module's top level, and "" for the module."""
    found = {""}
    for node in ast.parse(data).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            found |= {
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def _parses(data: bytes) -> bool:
    try:
        ast.parse(data)
    except (SyntaxError, ValueError):
        return False
    return True


# --- writing -------------------------------------------------------------------------------------


def check_absent(version: str, root: Path = ROOT) -> None:
    """Raise UsageError if there is a pin of that version, or a series for it, already."""
    name = f"v{version}"
    for path in (pins.file(name, root), root / "patches" / name):
        if path.exists():
            shown = path.relative_to(root)
            raise UsageError(
                f"there is {shown} already",
                f"graft pin add {version} --dry-run; or remove pins/{name}.toml and patches/{name}",
            )


def write(trial: Trial, root: Path = ROOT) -> list[str]:
    """Write the pin, and the series of what applies; all of it or nothing. The files written.

    Raises UsageError for a pin that is there, GraftError for files that are no Python any more, and
    for patches that do not come out of git as they went in.
    """
    check_absent(trial.new.version, root)
    if trial.broken:
        raise GraftError(
            f"with what applies, {', '.join(trial.broken)} would be no Python any more",
            f"graft pin add {trial.new.version} --dry-run, and mend the patch in the old series",
        )
    home = root / "patches" / trial.new.name
    touched = {c.path for p in trial.stack.patches for c in p.files if c.in_tree and not c.is_new}
    missing = touched - trial.new.files.keys() - trial.stack.new_files.keys()
    pin = replace(trial.new, files={**trial.new.files, **_blobs(trial.stack, missing)})
    Stack(pin, trial.stack.patches).check()
    lines = [
        f"# The patches of PyTorch {pin.version}, in the order in which they apply; written by "
        "graft refresh.",
        f"# Made from those of {trial.old.name}; of which these are not here yet:",
    ]
    lines += [
        f"#   {verdict.patch.name}: {verdict.left_out or verdict.state}"
        for verdict in trial.verdicts
        if verdict.left_out or verdict.state == CONFLICT
    ] or ["#   none"]
    lines += [stacks.write_line(patch.name, patch.status) for patch in trial.stack.patches]
    changes: dict[Path, bytes | None] = {
        pins.file(pin.name, root): pins.render(pin).encode(),
        home / "series": "".join(f"{line}\n" for line in lines).encode(),
    }
    changes |= {home / patch.name: patch.text for patch in trial.stack.patches}
    with journal.alone(root):
        journal.write(root, changes)
    return [str(path.relative_to(root)) for path in changes]


def _blobs(stack: Stack, paths: Collection[str]) -> dict[str, str]:
    """The blob that the first patch which touches a path finds there."""
    found: dict[str, str] = {}
    for patch in stack.patches:
        for change in patch.files:
            if change.path in paths:
                found.setdefault(change.path, change.old_blob)
    return found


# --- reporting -----------------------------------------------------------------------------------

_SECTION = "<!-- pin: {name} -->\n{body}<!-- /pin -->\n"


def summary(trial: Trial) -> str:
    """The counts in one line."""
    counts = ", ".join(f"{n} {state}" for state in STATES if (n := trial.count(state)))
    kept = len(trial.stack.patches)
    return (
        f"{trial.old.name} on {trial.new.version}: {len(trial.verdicts)} patches, "
        f"{counts or 'none'}; {kept} can be written"
    )


def show(trial: Trial, console: Console) -> None:
    """Print a line a patch, then the counts."""
    styles = {CONFLICT: "red", MOVED: "yellow", THERE: "cyan"}
    for verdict in trial.verdicts:
        kept = any(patch.name == verdict.patch.name for patch in trial.stack.patches)
        console.print(f"{verdict.state:14}{verdict.patch.name}", style=styles.get(verdict.state))
        for place in verdict.places:
            console.print(f"{'':14}{place}", highlight=False, soft_wrap=True)
        if verdict.left_out:
            console.print(f"{'':14}not written: {verdict.left_out}", highlight=False)
        elif not kept and verdict.state != CONFLICT:
            console.print(f"{'':14}not written: nothing is left of it", highlight=False)
    for path in trial.gone:
        console.print(f"gone: {path}", highlight=False)
    for path in trial.broken:
        console.print(f"no Python any more: {path}", style="red")
    console.print(summary(trial), highlight=False, soft_wrap=True)


def markdown(trial: Trial) -> str:
    """The section of a release in ``docs/new-pins.md``, without its markers."""
    lines = [
        f"## {trial.new.version}",
        "",
        f"`{trial.new.commit}`. {summary(trial)}.",
        "",
    ]
    if trial.gone:
        names = ", ".join(f"`{path}`" for path in trial.gone)
        lines += [f"Files of {trial.old.name} that it does not have: {names}.", ""]
    if trial.broken:
        names = ", ".join(f"`{path}`" for path in trial.broken)
        lines += [f"No Python any more with what applies: {names}.", ""]
    lines += ["| patch | | where | written |", "| --- | --- | --- | --- |"]
    for verdict in trial.verdicts:
        kept = any(patch.name == verdict.patch.name for patch in trial.stack.patches)
        why = "yes" if kept else f"no: {verdict.left_out}" if verdict.left_out else "no"
        places = "; ".join(place.replace("|", "\\|") for place in verdict.places)
        name = verdict.patch.name.removesuffix(".patch")
        lines.append(f"| {name} | {verdict.state} | {places} | {why} |")
    return "\n".join(lines) + "\n"


def report(trial: Trial, page: Path) -> None:
    """Put the release's section into `page`, in place of the one that is there, or at the end."""
    text = page.read_text("utf-8") if page.exists() else ""
    section = _SECTION.format(name=trial.new.name, body=markdown(trial))
    mark = re.escape(f"<!-- pin: {trial.new.name} -->")
    found = re.compile(rf"^{mark}\n.*?^<!-- /pin -->\n", re.M | re.S)
    if found.search(text):
        text = found.sub(lambda _: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}" if text.strip() else section
    aside = page.with_name(f"{page.name}.new")
    aside.write_text(text, "utf-8")
    aside.replace(page)
