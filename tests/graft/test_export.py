"""graft export: the stack on a branch of a checkout, with everything else as it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hosted
import pytest
from click.testing import CliRunner
from hosted import CAP, SPLIT, TILES, commit_all, configure, make_checkout, wheel_checkout
from tinytorch import CONFIG, SCHEDULER, Commit, make_root, snapshot, write_files

from graft import stack
from graft.cli import export_command, graft
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import Stack, export, pins
from graft.stack import checkout as checkouts
from graft.stack.conflicts import CLEAN, CONFLICT, MOVED, THERE
from graft.stack.export import NOT_TRIED
from graft.stack.git import git


class Place:
    """A checkout, a repository of patches for its first commit, and how they were before."""

    def __init__(self, folder: Path, commits: tuple[Commit, ...] = (CAP, SPLIT, TILES)) -> None:
        self.checkout = folder / "py torch"
        self.commit = make_checkout(self.checkout)
        self.root = make_root(folder)
        self.pin = replace(pins.load(root=self.root), commit=self.commit)
        self.series(*commits)

    def series(self, *commits: Commit, behind: tuple[str, ...] = ()) -> Stack:
        self.stack = hosted.write_series(self.root, self.pin, commits, behind)
        return self.stack

    def git(self, *args: str) -> str:
        return git(*args, cwd=self.checkout)

    def export(self, **options: object) -> tuple[export.Export, str, bool]:
        return export.export(self.checkout, self.stack, **options)  # type: ignore[arg-type]

    def states(self, onto: str) -> list[tuple[str, tuple[str, ...]]]:
        made = self.export(onto=onto)[0]
        return [(each.state, each.places) for each in made.outcomes]

    def later(self, **files: str | None) -> str:
        """A commit after the release, off any branch; ``_inductor__config`` is a file of torch/."""
        self.git("checkout", "-q", "--detach", self.commit)
        paths = {f"torch/{name.replace('__', '/')}.py": text for name, text in files.items()}
        write_files(self.checkout, {**paths, "version.txt": "2.14.0a0\n"})
        commit = commit_all(self.checkout, "later")
        self.git("checkout", "-q", "main")
        return commit


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    assert nothing_left(made.checkout)


def nothing_left(checkout: Path) -> bool:
    common = Path(git("rev-parse", "--path-format=absolute", "--git-common-dir", cwd=checkout)[:-1])
    mine = [*common.glob("worktrees/export*"), *common.rglob("*.lock")]
    return not ((common / "graft").exists() or mine)


def state_of(checkout: Path) -> tuple[object, ...]:
    """All that an export must leave alone."""
    folder = Path(git("rev-parse", "--absolute-git-dir", cwd=checkout).strip())
    return (
        {path: what for path, what in snapshot(checkout).items() if not path.startswith(".git")},
        (folder / "HEAD").read_bytes(),
        (folder / "index").read_bytes() if (folder / "index").exists() else b"",
        (folder / "config").read_bytes() if (folder / "config").exists() else b"",
        git("stash", "list", cwd=checkout),
        git("for-each-ref", "--exclude=x", cwd=checkout, check=False),
    )


# --- the stack of this repository ----------------------------------------------------------------


def test_the_stack_is_clean_on_the_files_of_the_wheel(tmp_path: Path) -> None:
    checkout = tmp_path / "pytorch"
    series, commit = wheel_checkout(checkout)
    before = state_of(checkout)[:3]
    made, branch, moved = export.export(checkout, series)
    # upstream's tests that patches change are stand-ins, of other blob ids
    stand_ins = hosted.upstream_tests_of(series.patches)
    assert [each.state for each in made.outcomes] == [
        MOVED if any(change.path in stand_ins for change in patch.files) else CLEAN
        for patch in series.patches
    ]
    assert (branch, moved) == ("graft/v2.11.0", True)
    assert state_of(checkout)[:3] == before
    for patch, here in zip(series.patches, made.commits, strict=True):
        assert git("log", "-1", "--format=%B", here, cwd=checkout).strip() == patch.message.strip()
        for change in patch.files:
            blob = git("rev-parse", f"{here}:{change.path}", cwd=checkout).strip()
            assert blob == change.new_blob or change.path in stand_ins, change.path
    said = git("log", f"{commit}..{branch}", "--format=%B%n%an%n%ae%n%cn%n%ce", cwd=checkout)
    assert not re.search(r"graft|overlay|tests/inductor|\.patch\b", said)
    changed = git("diff", "--name-only", commit, branch, cwd=checkout).split()
    assert sorted(changed) == sorted(series.files)
    for path in series.new_files:
        copy = stack.copy_path(path)
        assert copy is not None
        assert git("show", f"{branch}:{path}", cwd=checkout).encode() == copy.read_bytes()


def test_its_tests_run_as_upstreams_do(tmp_path: Path) -> None:
    """``python test/inductor/test_x.py`` in the exported checkout: the tests load, with nothing of
    this repository near, and end by running themselves (which they do where there is a GPU)."""
    checkout = tmp_path / "pytorch"
    series, _ = wheel_checkout(checkout)
    export.export(checkout, series, branch="mine")
    git("switch", "-q", "mine", cwd=checkout)
    python = ROOT / "build" / "bin" / "python"
    if not python.exists():
        pytest.skip("needs the patched tree, build/")
    texts = {path: (checkout / path).read_text() for path in series.new_files if "test/" in path}
    tests = [path for path, text in texts.items() if re.search(r"^ +def test_", text, re.M)]
    assert tests  # the others are what they share
    for path in tests:
        last = texts[path].rstrip().splitlines()[-3:]
        assert last[0] == 'if __name__ == "__main__":'
        assert last[-1].strip() == "run_tests()"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [str(python), "-P", "-c", AS_SCRIPTS, *tests],
        cwd=checkout,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [f"{path} 0" for path in tests], done.stderr


# Each file as ``python FILE`` runs it, in a process of its own that starts with torch imported, and
# with what compiles C++ to know whether it can: a dozen times over, that is all that takes time.
AS_SCRIPTS = """
import os, runpy, sys
import torch, torch._inductor.test_case, torch.testing._internal.inductor_utils

for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        sys.argv[:] = [path]
        sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    print(path, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


# --- what is made --------------------------------------------------------------------------------


def test_again_is_the_same(place: Place) -> None:
    first, branch, moved = place.export()
    assert moved
    again, _, moved = place.export()
    assert not moved
    assert again.commits == first.commits
    assert place.git("rev-parse", branch).strip() == first.commits[-1]
    place.series(CAP, TILES)
    changed, _, moved = place.export()
    assert moved
    assert place.git("rev-list", "--reverse", f"{place.commit}..{branch}").split() == list(
        changed.commits
    )
    author = place.git("log", "-1", "--format=%an|%ae|%cn|%ce|%aI", branch).strip()
    user = "A User|user@example.org"
    assert author == f"{user}|{user}|2026-01-01T00:00:00+00:00"


def test_everything_else_is_left_alone(place: Place) -> None:
    write_files(
        place.checkout,
        {
            "torch/_inductor/config.py": "mine = 1\n",
            "torch/_inductor/reads.py": "untracked = 1\n",
            "new.py": "staged = 1\n",
        },
    )
    place.git("add", "new.py")
    (place.checkout / "torch/_inductor/scheduler.py").unlink()
    before = state_of(place.checkout)[:5]
    place.export()
    place.export(onto="main", branch="other")
    assert state_of(place.checkout)[:5] == before
    assert place.git("branch", "--format=%(refname:short)").split() == [
        "graft/v2.11.0",
        "main",
        "other",
    ]


def test_whatever_is_configured(place: Place) -> None:
    later = place.later(_inductor__scheduler=SCHEDULER.replace("return 5\n", "return 6\n"))
    hooks = place.checkout / ".git/hooks"
    hooks.mkdir(exist_ok=True)
    for name in ("post-checkout", "applypatch-msg", "pre-commit", "pre-rebase", "post-rewrite"):
        (hooks / name).write_text("#!/bin/sh\ntouch ran\nexit 1\n")
        (hooks / name).chmod(0o755)
    plain = place.export()[0].commits
    settings = {
        "am.threeWay": "true",
        "apply.whitespace": "fix",
        "commit.gpgSign": "true",
        "core.autocrlf": "true",
        "core.sparseCheckout": "true",
        "diff.noprefix": "true",
        "format.pretty": "oneline",
        "i18n.commitEncoding": "ISO-8859-1",
        "merge.conflictStyle": "diff3",
        "rebase.updateRefs": "true",
        "rebase.autoStash": "true",
        "rerere.enabled": "true",
    }
    for key, value in settings.items():
        place.git("config", key, value)
    before = (place.checkout / ".git/config").read_bytes()
    assert place.export()[0].commits == plain
    assert [each[0] for each in place.states(later)] == [CLEAN, CONFLICT, CLEAN]
    assert (place.checkout / ".git/config").read_bytes() == before
    assert not (place.checkout / "ran").exists()


def test_messages_that_are_not_ascii(place: Place) -> None:
    message = "[inductor] Größe × 2 – naïve\n\n    code\n* 'list'\n# no comment\n"
    place.series((message, SPLIT[1]))
    place.git("config", "user.name", 'Jürgen "J" O\'Neil')
    made, _, _ = place.export()
    assert place.git("log", "-1", "--format=%B", made.commits[0]).rstrip("\n") + "\n" == message
    assert place.git("log", "-1", "--format=%an", made.commits[0]) == 'Jürgen "J" O\'Neil\n'


# --- onto another commit -------------------------------------------------------------------------


def test_moved(place: Place) -> None:
    later = place.later(
        _inductor__config="# one\n# two\n" + CONFIG,
        _inductor__scheduler=SCHEDULER.replace("return 11\n", "return 111\n"),
    )
    made, branch, _ = place.export(onto=later)
    assert [(each.state, each.places) for each in made.outcomes] == [
        (MOVED, ("torch/_inductor/config.py +2 lines",)),
        (MOVED, ("torch/_inductor/scheduler.py",)),
        (CLEAN, ()),
    ]
    assert branch == f"graft/v2.11.0-onto-{later}"
    config = place.git("show", f"{branch}:torch/_inductor/config.py")
    assert config.startswith("# one\n# two\n")
    assert "max_reads = 10" in config
    assert place.git("rev-list", "--count", f"{later}..{branch}").strip() == "3"


def test_conflicts_say_which_lines_and_leave_no_branch(place: Place) -> None:
    scheduler = "# first\n" + SCHEDULER.replace("return 5\n", "return 6\n")
    later = place.later(_inductor__scheduler=scheduler, _inductor__codegen__simd="TILES = 3\n")
    line = scheduler.splitlines().index("    return 6") + 1
    made, branch, moved = place.export(onto=later)
    assert [(each.state, each.places) for each in made.outcomes] == [
        (CLEAN, ()),
        (CONFLICT, (f"torch/_inductor/scheduler.py:{line}",)),
        (CONFLICT, ("torch/_inductor/codegen/simd.py:1",)),
    ]
    assert not moved
    assert place.git("branch", "--list", branch) == ""
    with pytest.raises(
        GraftError, match=rf"2 of 3 .*split-the-rows.*scheduler.py:{line}\)"
    ) as caught:
        made.check()
    assert "rebase --onto" in (caught.value.next or "")


def test_what_comes_after_a_conflict_is_judged_by_its_own_hunks(place: Place) -> None:
    """Though its file is made by the patch that conflicts, and one between is there already."""
    reads = "torch/_inductor/reads.py"
    landed = ("[inductor] Read twice\n", {reads: "def count():\n    return 3 + 3\n"})
    more = ("[inductor] Read on\n", {reads: "def count():\n    return 3 + 3 + 3\n"})
    place.series(CAP, landed, more, TILES, behind=("", "  # pytorch#1; in 2.11.1"))
    later = place.later(_inductor__config=CONFIG.replace("max_tiles = None", "max_tiles = 1"))
    line = CONFIG.splitlines().index("    max_tiles = None") + 1
    assert place.states(later) == [
        (CONFLICT, (f"torch/_inductor/config.py:{line}",)),
        (THERE, ("in 2.11.1, says the series",)),
        (CLEAN, ()),
        (CLEAN, ()),
    ]


def test_conflicts_with_files_that_are_gone_or_there(place: Place) -> None:
    later = place.later(_inductor__scheduler=None, _inductor__reads="def count():\n    return 4\n")
    states = place.states(later)
    assert [state for state, _ in states] == [CONFLICT, CONFLICT, CLEAN]
    assert states[0][1] == ("torch/_inductor/reads.py:2",)
    assert states[1][1] == ("torch/_inductor/scheduler.py (is not there)",)


def test_many_lines_in_conflict(place: Place) -> None:
    theirs = SCHEDULER.replace("return 5\n", "return 6\n    # and more\n    # and more\n")
    later = place.later(_inductor__scheduler=theirs.replace("return 9", "return 90"))
    both = SCHEDULER.replace("return 5\n", "return 55\n").replace("return 9\n", "return 99\n")
    place.series((SPLIT[0], {"torch/_inductor/scheduler.py": both}))
    start = theirs.splitlines().index("    return 6") + 1
    end = theirs.splitlines().index("    return 9") + 1
    assert place.states(later) == [
        (
            CONFLICT,
            (
                f"torch/_inductor/scheduler.py:{start}-{start + 2}",
                f"torch/_inductor/scheduler.py:{end}",
            ),
        )
    ]


def test_a_patch_that_is_there_already(place: Place) -> None:
    later = place.later(_inductor__scheduler=SPLIT[1]["torch/_inductor/scheduler.py"])
    assert place.states(later) == [(CLEAN, ()), (THERE, ()), (CLEAN, ())]
    made, branch, _ = place.export(onto=later)
    assert place.git("rev-list", "--reverse", f"{later}..{branch}").split() == list(made.commits)
    assert len(made.commits) == 2


def test_a_patch_that_the_series_says_is_there(place: Place) -> None:
    later = place.later(_inductor__scheduler=SCHEDULER.replace("return 5\n", "return 6\n"))
    said = ("in 2.13.0, says the series",)
    for release, state in (
        ("2.14.0", (THERE, ("in 2.14.0, says the series",))),
        ("2.13.0", (THERE, said)),
    ):
        place.series(CAP, SPLIT, TILES, behind=("", f"  # pytorch#1; in {release}"))
        assert place.states(later) == [(CLEAN, ()), state, (CLEAN, ())]
    place.series(CAP, SPLIT, TILES, behind=("", "  # pytorch#1; in 2.15.0"))
    assert [state for state, _ in place.states(later)] == [CLEAN, CONFLICT, CLEAN]
    place.export()  # at the pin it is a commit, whatever came later
    place.series(SPLIT, behind=("  # ours; in 2.12.1",))
    made, _, moved = place.export(onto=later, branch="none")
    assert not moved
    with pytest.raises(GraftError, match="there is nothing to export: .* has all 1 patches"):
        made.check()


def test_what_is_left_of_a_patch_that_the_pin_has(place: Place) -> None:
    later = place.later(_inductor__later="x = 1\n")
    place.series(CAP, SPLIT, behind=("  # pytorch#1; in 2.10.0", "  # ours; in 2.11.0"))
    assert place.states(later) == [(CLEAN, ()), (CLEAN, ())]


def test_a_series_that_does_not_apply(place: Place) -> None:
    path = place.stack.patches[1].path
    text = path.read_bytes().replace(b"-    return 5\n", b"-    return 7\n")
    path.write_bytes(text)
    place.stack = stack.load(place.pin, place.root)
    made, _, moved = place.export()
    assert [each.state for each in made.outcomes] == [CLEAN, CONFLICT, NOT_TRIED]
    assert re.fullmatch(r"torch/_inductor/scheduler\.py:\d+", made.outcomes[1].places[0])
    assert not moved
    with pytest.raises(GraftError, match=r"the series does not apply to v2.11.0: split-the-rows"):
        made.check()


def test_a_file_that_the_pin_does_not_have(place: Place) -> None:
    commit = place.later(_inductor__scheduler=None)
    place.stack = Stack(replace(place.pin, commit=commit), place.stack.patches)
    outcomes = place.export()[0].outcomes
    assert (outcomes[1].state, outcomes[1].places) == (CONFLICT, ("torch/_inductor/scheduler.py",))


# --- checkouts of every kind ---------------------------------------------------------------------


def test_detached(place: Place) -> None:
    place.git("checkout", "-q", "--detach")
    assert place.export()[2]
    assert place.git("rev-parse", "--abbrev-ref", "HEAD").strip() == "HEAD"


def test_shallow_and_blobless(place: Place, tmp_path: Path) -> None:
    place.later(_inductor__more="")
    place.git("config", "uploadpack.allowFilter", "true")
    place.git("config", "uploadpack.allowAnySHA1InWant", "true")
    url = f"file://{place.checkout}"
    shallow = tmp_path / "shallow"
    git("clone", "-q", "--depth", "1", url, str(shallow), cwd=tmp_path)
    configure(shallow)
    made = export.export(shallow, place.stack)[0]
    assert made.commits == place.export()[0].commits
    assert nothing_left(shallow)
    blobless = tmp_path / "blobless"
    git("clone", "-q", "--filter=blob:none", "--no-checkout", url, str(blobless), cwd=tmp_path)
    configure(blobless)
    assert export.export(blobless, place.stack)[0].commits == made.commits
    missing = git("rev-list", "--objects", "--missing=print", "main", cwd=blobless)
    assert missing.count("\n?") >= 3  # it fetched the files that it needed


def test_bare_and_linked_worktrees(place: Place, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    git("clone", "-q", "--bare", str(place.checkout), str(bare), cwd=tmp_path)
    configure(bare)
    commits = export.export(bare, place.stack)[0].commits
    linked = tmp_path / "linked"
    place.git("worktree", "add", "-q", "--detach", str(linked))
    assert export.export(linked, place.stack)[0].commits == commits
    assert place.git("rev-parse", "graft/v2.11.0").strip() == commits[-1]
    assert nothing_left(place.checkout)
    assert (linked / ".git").exists()


def test_checkouts_that_are_none(place: Place, tmp_path: Path) -> None:
    inside = place.checkout / "torch"
    plain = tmp_path / "plain"
    plain.mkdir()
    for path in (plain, inside):
        with pytest.raises(UsageError, match=f"{path} is not the root of a git checkout"):
            export.export(path, place.stack)
    with pytest.raises(UsageError, match="there is no folder"):
        export.export(tmp_path / "nowhere", place.stack)
    with pytest.raises(UsageError, match="has no patches to export"):
        export.export(place.checkout, Stack(place.pin, ()))


def test_a_checkout_without_the_pin(place: Place, tmp_path: Path) -> None:
    missing = "f" * 40
    there = Stack(replace(place.pin, commit=missing), place.stack.patches)
    with pytest.raises(
        GraftError, match=r"does not have v2.11.0 \(commit ffffffffffff\)"
    ) as caught:
        export.export(place.checkout, there)
    assert caught.value.next == (
        f"git -C '{place.checkout}' fetch https://github.com/pytorch/pytorch {missing}, "
        "then the same command"
    )
    place.git("remote", "add", "up", "git@github.com:pytorch/pytorch.git")
    with pytest.raises(GraftError) as caught:
        export.export(place.checkout, there)
    assert f" fetch up {missing}" in (caught.value.next or "")
    shallow = tmp_path / "shallow"
    git("clone", "-q", "--depth", "1", f"file://{place.checkout}", str(shallow), cwd=tmp_path)
    with pytest.raises(GraftError) as caught:
        export.export(shallow, there)
    assert " fetch --depth 1 https" in (caught.value.next or "")


def test_whose_commits(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place.git("config", "--unset", "user.name")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.delenv(f"GIT_{who}_NAME", raising=False)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    with pytest.raises(GraftError, match="does not know whose commits to make") as caught:
        place.export()
    assert "config user.name" in (caught.value.next or "")
    (tmp_path / ".gitconfig").write_text("[user]\nname = Of Home\n")
    made = place.export()[0]
    assert place.git("log", "-1", "--format=%an", made.commits[0]) == "Of Home\n"


def test_commits_that_are_none(place: Place) -> None:
    with pytest.raises(UsageError, match="has no commit origin/main"):
        place.export(onto="origin/main")


# --- branches ------------------------------------------------------------------------------------


def test_a_branch_of_the_users(place: Place) -> None:
    place.git("branch", "mine")
    before = place.git("rev-parse", "mine")
    with pytest.raises(
        GraftError, match="has a branch mine that is not as graft export left it"
    ) as caught:
        place.export(branch="mine")
    assert "--force" in (caught.value.next or "")
    assert place.git("rev-parse", "mine") == before
    assert place.export(branch="mine", force=True)[2]
    assert place.export(branch="mine")[2] is False
    place.git("checkout", "-q", "mine")
    place.git("commit", "-q", "--allow-empty", "-m", "work of my own")
    place.git("checkout", "-q", "main")
    with pytest.raises(GraftError, match="not as graft export left it"):
        place.export(branch="mine")


def test_a_branch_that_is_checked_out(place: Place, tmp_path: Path) -> None:
    _, branch, _ = place.export()
    linked = tmp_path / "linked"
    place.git("worktree", "add", "-q", str(linked), branch)
    assert not place.export()[2]
    place.series(CAP)
    with pytest.raises(GraftError, match=f"branch {branch} is checked out in {linked}"):
        place.export()
    with pytest.raises(GraftError, match="branch main is checked out in .*py torch, and would"):
        place.export(branch="main", force=True)
    assert git("status", "--porcelain", cwd=linked) == ""


@pytest.mark.parametrize("name", ["a..b", "-x", "x.lock", "", "HEAD"])
def test_names_that_are_none(place: Place, name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a branch"):
        checkouts.check_branch(checkouts.find(place.checkout), name, force=True)


def test_a_name_that_another_stands_in_the_way_of(place: Place) -> None:
    place.git("branch", "graft")
    with pytest.raises(
        GraftError, match="cannot make branch graft/v2.11.0: fatal:.*'refs/heads/gr"
    ):
        place.export()


# --- ends that are none --------------------------------------------------------------------------

STOP = """\
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from pathlib import Path
from dataclasses import replace
from graft import stack
from graft.stack import export, pins
root, checkout, reached = map(Path, sys.argv[1:4])
judge = export._judge
def stop(work, patch, *rest):
    if patch.name.startswith("tile"):
        reached.touch()
        time.sleep(60)
    return judge(work, patch, *rest)
export._judge = stop
try:
    export.export(checkout, stack.load(replace(pins.load(root=root), commit=sys.argv[4]), root))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ended_in_the_middle(place: Place, tmp_path: Path, how: signal.Signals) -> None:
    before = state_of(place.checkout)
    reached = tmp_path / "reached"
    arguments = [place.root, place.checkout, reached, place.commit]
    process = subprocess.Popen(
        [sys.executable, "-c", STOP, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    deadline = time.monotonic() + 60
    while not reached.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert reached.exists()
    with pytest.raises(GraftError, match="another graft export or submit is at work"):
        place.export()
    process.send_signal(how)
    code = process.wait(timeout=30)
    assert state_of(place.checkout) == before
    if how == signal.SIGKILL:
        assert not nothing_left(place.checkout)
    else:
        assert code == 130
        assert nothing_left(place.checkout)
    assert place.export()[2]


def test_another_that_is_gone_does_not_matter(place: Place, tmp_path: Path) -> None:
    """A worktree of the user's, on a disk that is away just now, keeps its note."""
    linked = tmp_path / "export"
    place.git("worktree", "add", "-q", "-b", "mine", str(linked))
    linked.rename(tmp_path / "away")
    place.export()
    (tmp_path / "away").rename(linked)
    assert git("rev-parse", "--abbrev-ref", "HEAD", cwd=linked) == "mine\n"
    place.git("worktree", "remove", str(linked))


def test_no_place_to_work(place: Place) -> None:
    (place.checkout / ".git/graft").write_text("in the way")
    before = state_of(place.checkout)
    with pytest.raises(
        GraftError, match="cannot work in .*/.git: fatal: could not create"
    ) as wrong:
        place.export()
    assert f"git clone '{place.checkout}' DIR" in (wrong.value.next or "")
    assert state_of(place.checkout) == before
    (place.checkout / ".git/graft").unlink()


# --- the series, the command ---------------------------------------------------------------------


def test_what_the_series_says(place: Place) -> None:
    place.series(CAP, SPLIT, TILES, behind=("", "  # pytorch#12; pytorch#13", " # ours;in 2.13"))
    found = [patch.status for patch in place.stack.patches]
    assert [str(each) for each in found] == [
        "ours; not sent",
        "pytorch#12; pytorch#13",
        "ours; in 2.13",
    ]
    assert [each.landed for each in found] == [None, None, (2, 13, 0)]
    for wrong in ("# ours", "# theirs; not sent", "# ours; in main", "# ours; sent", "#"):
        with pytest.raises(GraftError, match=r"behind cap-the-reads.* no status"):
            place.series(CAP, behind=(f"  {wrong}",))
    assert stack.release_numbers("2.13.0a0+gitabc1") == (2, 13, 0)
    assert stack.release_numbers("2.9") < stack.release_numbers("2.10.0")


def test_what_this_series_says() -> None:
    """Every patch has a status, and one that upstream has is on its page too."""
    for patch in stack.load(pins.load()).patches:
        if patch.status.landed:
            page = (ROOT / "docs/patches" / patch.name).with_suffix(".md").read_text("utf-8")
            numbers = re.escape(patch.status.upstream.removeprefix("in ").removesuffix(".0"))
            assert re.search(rf"\*\*Upstream\.\*\*[^*]*{numbers}", page), patch.name
    text = stack.series_file(pins.load()).read_text("utf-8")
    assert all("  # " in line for line in text.splitlines() if line[:1] not in ("#", ""))


def test_the_command(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_command, "ROOT", place.root)
    monkeypatch.chdir(place.checkout.parent)

    def run(*args: str) -> str:
        invoke = CliRunner().invoke
        return invoke(
            graft, ["export", "py torch", *args], catch_exceptions=False, standalone_mode=False
        ).output

    said = run()
    assert said.startswith("clean  cap-the-reads-of-a-kernel.patch\n")
    assert said.endswith(
        f"branch graft/v2.11.0: 3 commits on {place.commit[:12]}\n"
        f"git -C 'py torch' log {place.commit[:12]}..graft/v2.11.0\n"
    )
    assert "branch graft/v2.11.0 is there: 3 commits" in run()
    later = place.later(_inductor__scheduler=SCHEDULER.replace("return 5\n", "return 6\n"))
    with pytest.raises(GraftError, match="1 of 3 patches do not apply"):
        run("--onto", later)


def test_one_series(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs others stands on them, one that does not on the release."""
    monkeypatch.setattr(export_command, "ROOT", place.root)
    monkeypatch.chdir(place.checkout.parent)
    names = [patch.name for patch in place.stack.patches]
    heads = ("# series: few reads\n", "# series: row split\n", "# series: tiling; alone\n")
    text = "".join(f"{head}{name}\n" for head, name in zip(heads, names, strict=True))
    stack.series_file(place.pin, place.root).write_text(text)

    def run(name: str) -> list[str]:
        args = ["export", "py torch", "--series", name]
        invoke = CliRunner().invoke
        said = invoke(graft, args, catch_exceptions=False, standalone_mode=False).output
        return said.splitlines()[:2]

    first = place.commit[:12]
    assert run("few reads")[1] == f"branch graft/v2.11.0-few-reads: 1 commits on {first}"
    before = place.git("rev-parse", "graft/v2.11.0-few-reads")[:12]
    said = run("row-split")
    assert said == [
        "clean  split-the-rows-of-a-step.patch",
        f"branch graft/v2.11.0-row-split: 1 commits on {before}",
    ]
    assert run("tiling")[1] == f"branch graft/v2.11.0-tiling: 1 commits on {first}"
    changed = place.git("diff", "--name-only", place.commit, "graft/v2.11.0-tiling").split()
    assert changed == ["torch/_inductor/codegen/simd.py"]
    with pytest.raises(UsageError, match="no series rows: it has few reads, row split, tiling"):
        run("rows")
