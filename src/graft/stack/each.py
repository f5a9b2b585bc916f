"""`graft verify --each`: a patch must be worth its place.

With the whole patch, its tests and those of every earlier patch pass. With its new files kept, and
the hunks that name its knobs or a device's numbers, and its other hunks dropped, its tests give at
least one assertion failure, and no import or attribute error: they test what the hunks do, and fail
for that reason alone. What it adds to modules of the stack is dropped with its hunks in the
release, or, where its new modules import that, kept.

A patch's own tests are those that it adds, or changes (`own_tests`).

Of patches that are asked for by name, or because they changed, its own tests alone are run, unless
all are asked for: the later a patch, the longer all of those before it take.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT
from graft.stack import COPIES, Patch, Stack, commits, copies, own_tests
from graft.stack.commits import Repo
from graft.stack.git import git
from graft.stack.trees import tree
from graft.stack.trees.bases import Base
from graft.testing import runner
from graft.testing.runner import Run
from graft.testing.suite import QUICK

TESTS = COPIES["test/inductor/"]
# where a patch says what a knob, a debug option or a number of a device is called
_KNOBS = ("config.py", "mix_order_debug.py", "device_model.py")
_INI = "[pytest]\naddopts = --import-mode=importlib\n"


@dataclass(frozen=True)
class Verdict:
    """What came of one patch: its tests, or those of all before it too, on the whole patch; its
    own, without its hunks (None: not run, because the first already failed)."""

    patch: str
    whole: Run
    without: Run | None
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """It is worth its place."""
        return not self.problems


def verify(
    base: Base,
    stack: Stack,
    only: Collection[str] | None = None,
    *,
    complete: bool = True,
    root: Path = ROOT,
    timeout_s: float | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Verdict]:
    """A verdict a patch, in order, as each is reached.

    `only` names the patches to look at, each after those before it (None: all). `complete`: with
    the whole patch, the tests of all before it are run as well.
    `timeout_s` is for one run of pytest; `say` is told what is being run. Raises UsageError for a
    patch that the stack has not, GraftError for one that has no tests, or whose tests cannot run.
    """
    names = [patch.name for patch in stack.patches]
    for name in only or ():
        if name not in names:
            raise UsageError(f"the series has no patch {name}{nearest(name, names)}")
    with tempfile.TemporaryDirectory(prefix="graft-each-") as aside:
        repo = commits.make(Path(aside) / "repo", _released(base, stack), stack.patches)
        chain = [repo.pristine, *repo.commits()]
        for at, patch in enumerate(stack.patches):
            if only is not None and patch.name not in only:
                continue
            folder = Path(aside) / str(at)
            bench = _Bench(base, stack, repo, chain, at, folder, root, timeout_s, say)
            yield _judge(bench, complete)
            shutil.rmtree(folder)


def changed(stack: Stack, rev: str | None = None, root: Path = ROOT) -> list[str]:
    """The patches whose diffs differ from those of commit `rev` of this repository.

    A message does not count, nor do blob ids and the places of hunks: they change with every
    patch before. Without `rev`: from where this branch left origin's main, or the commit before.
    Raises UsageError where there is no such commit, or no repository.
    """
    if rev is None:
        head = git("rev-parse", "HEAD", cwd=root, check=False).strip()
        for guess in ("origin/HEAD", "origin/main", "HEAD^"):
            with contextlib.suppress(GraftError):
                rev = git("merge-base", "HEAD", guess, cwd=root).strip()
                if rev != head:
                    break
    try:
        commit = git("rev-parse", "--verify", "-q", f"{rev}^{{commit}}", cwd=root).strip()
    except GraftError as missing:
        raise UsageError(
            f"{root} has no commit {rev or 'before this one'} to compare the patches with",
            "graft verify --each, for all patches",
        ) from missing
    folder = f"patches/{stack.pin.name}"
    then = git("ls-tree", "-z", "--name-only", commit, f"{folder}/", cwd=root).split("\0")
    return [
        patch.name
        for patch in stack.patches
        if (file := f"{folder}/{patch.name}") not in then
        or _diff(git("cat-file", "blob", f"{commit}:{file}", cwd=root))
        != _diff(patch.text.decode("utf-8", "surrogateescape"))
    ]


def _diff(text: str) -> list[str]:
    """A patch's lines of diff, without blob ids and line numbers."""
    lines = [line for _, part in commits.sections(text)[1] for line in part.splitlines()]
    return [
        "@@" if line.startswith("@@ ") else line for line in lines if not line.startswith("index ")
    ]


def without_hunks(patch: Patch, released: Collection[str]) -> list[Patch | None]:
    """The patch with the names of its knobs, new files and tests alone, and, if it has hunks in
    the `released` files and in others, with those in others too; None for nothing."""
    head, parts = commits.sections(patch.text.decode("utf-8", "surrogateescape"))
    new = {change.path for change in patch.files if change.is_new}
    hunks = {
        path
        for path, _ in parts
        if path not in new and path.startswith("torch/") and PurePosixPath(path).name not in _KNOBS
    }
    found: list[Patch | None] = []
    for dropped in dict.fromkeys((frozenset(hunks), frozenset(hunks & set(released) or hunks))):
        kept = [part for path, part in parts if path not in dropped]
        text = commits.encode(head + "".join(kept))
        found.append(replace(patch, text=text) if kept else None)
    return found


def _released(base: Base, stack: Stack) -> dict[str, bytes]:
    touched = {change.path for patch in stack.patches for change in patch.files}
    return {
        path: (base.torch_dir.parent / path).read_bytes()
        for path in touched & stack.pin.files.keys()
    }


@dataclass(frozen=True)
class _Bench:
    """One patch of a stack, and a folder to try it in."""

    base: Base
    stack: Stack
    repo: Repo
    chain: Sequence[str]  # the pristine commit, then one a patch
    at: int  # the patch's place in the stack
    folder: Path
    root: Path
    timeout_s: float | None
    say: Callable[[str], None]

    @property
    def patch(self) -> Patch:
        return self.stack.patches[self.at]

    def build(self, name: str, patches: Iterable[Patch | None]) -> tree.Tree:
        kept = tuple(patch for patch in patches if patch is not None)
        (self.folder / name).mkdir(parents=True)
        return tree.build(
            self.base, replace(self.stack, patches=kept), self.folder / name / "build"
        )

    def tests(self, at: int) -> dict[str, bytes]:
        """The test files that the first `at` patches leave, by their path in this repository."""
        there = self.repo.files(self.chain[at])
        return {
            TESTS + path.removeprefix("test/inductor/"): self.repo.read(blob)
            for path, blob in there.items()
            if path.startswith("test/inductor/") and not path.endswith(commits.HUNKS)
        }

    def lay(self, name: str, tests: Mapping[str, bytes]) -> Path:
        """A folder with `tests`, and what this repository has beside them to run them."""
        top = self.folder / name / "tests-of-it"
        patched = set(copies(self.root).values())
        for path in sorted((self.root / TESTS).rglob("*")):
            if path.is_file() and path not in patched and "__pycache__" not in path.parts:
                to = top / path.relative_to(self.root)
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, to)
        for file, data in tests.items():
            (top / file).parent.mkdir(parents=True, exist_ok=True)
            (top / file).write_bytes(data)
        (top / "pytest.ini").write_text(_INI)
        return top

    def own_tests(self, whole: tree.Tree, top: Path) -> list[str]:
        """What to run of the patch: files that it makes, and the tests that it adds to others, or
        changes there."""
        before, after = self.tests(self.at), self.tests(self.at + 1)
        own = []
        for path, data in after.items():
            if not _is_test(path) or before.get(path) == data:
                continue
            if path not in before:
                own.append(path)
                continue
            now = runner.collect([str(whole.python)], [path], cwd=top, env=self.env("whole"))
            old, new = (each.decode("utf-8", "surrogateescape") for each in (before[path], data))
            own += own_tests.changed(old, new, now)
        return own

    def run(self, name: str, built: tree.Tree, top: Path, tests: Sequence[str]) -> Run:
        return runner.run(
            [str(built.python)], tests, cwd=top, env=self.env(name), timeout_s=self.timeout_s
        )

    def env(self, name: str) -> dict[str, str | None]:
        cache = str(self.folder / name / "cache")
        caches = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_HOME": cache, "TRITON_CACHE_DIR": None}
        return {**QUICK, **caches}


def _is_test(path: str) -> bool:
    """Whether pytest finds tests in it; ``test_*_utils.py`` is what several files share."""
    return PurePosixPath(path).match("test_*.py") and not path.endswith("_utils.py")


def _judge(bench: _Bench, complete: bool) -> Verdict:
    patch, before = bench.patch, bench.stack.patches[: bench.at]
    whole = bench.build("whole", (*before, patch))
    tests = bench.tests(bench.at + 1)
    top = bench.lay("whole", tests)
    own = bench.own_tests(whole, top)
    if not own:
        raise GraftError(
            f"{patch.name} adds no test under test/inductor/, so nothing shows what it is for",
            "graft edit, add one to its commit, then graft refresh",
        )
    files = [path for path in tests if _is_test(path)]
    which = f"the tests up to it ({len(files)} files)" if complete else "its own tests"
    bench.say(f"{patch.name}: with the whole patch, {which}")
    on_whole = bench.run("whole", whole, top, files if complete else own)
    if not on_whole.ok:
        return Verdict(patch.name, on_whole, None, tuple(_failures(on_whole)))
    if patch.status.landed and not any(change.in_tree for change in patch.files):
        return Verdict(patch.name, on_whole, None, ())  # the release has it: its tests are left
    bench.say(f"{patch.name}: without its hunks, its own tests")
    *others, last = without_hunks(patch, bench.stack.pin.files)
    for number, less in enumerate(others):
        with contextlib.suppress(GraftError):  # its new modules do not import: the last is asked
            verdict = _without(bench, f"without-{number}", (*before, less), top, own, on_whole)
            if verdict.ok:
                return verdict
    return _without(bench, "without", (*before, last), top, own, on_whole)


def _without(
    bench: _Bench,
    name: str,
    patches: Iterable[Patch | None],
    top: Path,
    own: Sequence[str],
    on_whole: Run,
) -> Verdict:
    """What comes of `own` tests on `patches`, which lack hunks of the last."""
    on_without = bench.run(name, bench.build(name, patches), top, own)
    problems = _unproven(on_whole, on_without)
    return Verdict(bench.patch.name, on_whole, on_without, tuple(problems))


def _failures(whole: Run) -> list[str]:
    bad = [
        f"with the whole patch, {test} has {result.outcome}: {_line(result.message)}"
        for test, result in whole.bad.items()
    ]
    return bad or [f"with the whole patch, pytest fails: {runner.tail(whole.output, 5)}"]


def _unproven(whole: Run, without: Run) -> list[str]:
    problems = [
        f"without its hunks, {test} stumbles over a missing name: {_line(result.message)}"
        for test, result in without.bad.items()
        if result.is_missing_name
    ]
    proven = [
        test
        for test, result in without.results.items()
        if result.is_assertion and whole.results[test].outcome == "passed"
    ]
    if not proven:
        problems.append(f"without its hunks, no test of it fails an assertion ({without})")
    return problems


def _line(message: str) -> str:
    return next((line for line in message.splitlines() if line.strip()), "no message")
