"""graft edit and graft refresh, on a stand-in PyTorch and real git."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import standin
import tinytorch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from standin import Project

from graft import stack
from graft.errors import GraftError, UsageError
from graft.stack import commits, journal, refresh, workbench
from graft.stack.trees import bases, tree

READS = "def reads(x):\n    return [x]\n\n\n" + "".join(f"LIMIT_{n} = {n}\n" for n in range(6))
TEST = (
    "from torch._inductor import reads\n\n\ndef test_reads():\n    assert reads.reads(1) == [1]\n"
)
FIRST = "[inductor] Count reads in a module of their own\n\nWhy: they were not counted.\n"
SECOND = "[inductor] Split by reads\n"


@pytest.fixture
def empty(origin: tuple[bases.Base, Path], tmp_path: Path) -> Project:
    return standin.make_project(tmp_path / "project", *origin)


@pytest.fixture(scope="session")
def two_patches(
    origin: tuple[bases.Base, Path], tmp_path_factory: pytest.TempPathFactory
) -> Project:
    project = standin.make_project(tmp_path_factory.mktemp("two") / "project", *origin)
    project.edit()
    config = project.path("_inductor__config").read_text()
    project.commit(
        FIRST,
        _inductor__config=config.replace("knob_9 = 9\n", "knob_9 = 9\nread_cap = 10\n"),
        _inductor__reads=READS,
        _inductor__scheduler="from . import reads\n\n\n" + standin.FILES[SCHEDULER],
        inductor__test_reads=TEST,
    )
    scheduler = project.path("_inductor__scheduler").read_text()
    utils = project.path("_inductor__utils").read_text()
    project.commit(
        SECOND,
        _inductor__reads=READS + "\n\ndef split(x):\n    return reads(x)\n",
        _inductor__scheduler=scheduler.replace("return -x", "return reads.split(x)"),
        _inductor__utils=utils.replace("return 4", "return 44"),
    )
    project.refresh()
    return project


SCHEDULER = "torch/_inductor/scheduler.py"


@pytest.fixture
def project(two_patches: Project, tmp_path: Path) -> Project:
    """Two patches, no edit, a tree of them."""
    root = tmp_path / "project"
    for name in ("pins", "patches", "overlay", "tests"):
        shutil.copytree(two_patches.root / name, root / name)
    made = Project(root, two_patches.base, two_patches.checkout)
    made.build()
    return made


def names(project: Project) -> list[str]:
    return [patch.name for patch in project.stack.patches]


# --- edit ----------------------------------------------------------------------------------------


def test_edit_has_a_commit_a_patch_laid_out_as_pytorch(project: Project) -> None:
    project.edit()
    subjects = project.git("log", "--format=%s", "--reverse").splitlines()
    assert subjects == [
        "The files as released",
        "[inductor] Count reads in a module of their own",
        "[inductor] Split by reads",
    ]
    pristine = project.git("rev-list", "--max-parents=0", "HEAD").strip()
    assert project.git("show", f"{pristine}:{SCHEDULER}") == standin.FILES[SCHEDULER]
    assert (project.repo / "test/inductor/test_reads.py").read_text() == TEST
    assert not project.git("status", "--porcelain")


def test_a_change_is_live_and_refresh_makes_the_tree_real_again(project: Project) -> None:
    code = "import torch._inductor.scheduler as s; print(s.split(7))"
    assert project.run(code) == "[7]"
    project.edit()
    assert workbench.followed(tree.load(project.prefix)) == project.repo
    project.path("_inductor__reads").write_text("def split(x):\n    return 'live'\n")
    assert project.run(code) == "live"
    project.path("_inductor__fresh").write_text("x = 'new module'\n")
    assert project.run("import torch._inductor.fresh as f; print(f.x)") == "new module"
    with pytest.raises(GraftError, match="_inductor is not a real folder"):
        tree.verify(tree.load(project.prefix), project.stack)
    project.git("checkout", "-q", ".")
    project.git("clean", "-fdq")
    assert project.refresh() == refresh.Refreshed()
    there = tree.load(project.prefix)
    assert workbench.followed(there) is None
    tree.verify(there, project.stack)


def test_building_makes_the_tree_real_again(project: Project) -> None:
    project.edit()
    assert not tree.is_current(project.prefix, project.base, project.stack)
    project.build()
    assert tree.is_current(project.prefix, project.base, project.stack)


def test_nothing_is_written_through_a_link_into_the_base(project: Project) -> None:
    def state() -> dict[Path, tuple[int, bool]]:
        found = (p for p in project.base.torch_dir.rglob("*") if "__pycache__" not in p.parts)
        return {p: (p.stat().st_mtime_ns, p.is_symlink()) for p in found}

    before = state()
    project.edit("torch/_dynamo/config.py")
    project.commit("Limit", _dynamo__config="cache_size_limit = 9\n", _inductor__x="")
    project.refresh()
    assert state() == before


def test_a_file_outside_inductor_is_had_by_name(project: Project) -> None:
    project.edit()
    project.edit("torch/_dynamo/config.py")  # made anew: it had no work
    code = "import torch._dynamo.config as c; print(c.cache_size_limit)"
    assert project.run(code) == "8"
    project.path("_dynamo__config").write_text("cache_size_limit = 9\n")
    assert project.run(code) == "9"
    project.commit("[dynamo] Raise the limit\n\nBecause.\n")
    done = project.refresh()
    assert "pins/v2.11.0.toml" in done.written
    assert project.run(code) == "9"
    pinned = project.pin.files["torch/_dynamo/config.py"]
    assert pinned == commits.blob_id(standin.FILES["torch/_dynamo/config.py"].encode())


def test_an_unknown_file_suggests_the_nearest(project: Project) -> None:
    with pytest.raises(UsageError, match=r"did you mean torch/_dynamo/config\.py"):
        project.edit("torch/_dynamo/confg.py")
    assert workbench.load(project.root) is None


def test_an_edit_with_work_is_left_as_it_is(project: Project) -> None:
    project.edit()
    project.commit("[inductor] More\n", _inductor__more="x = 1\n")
    head = project.git("rev-parse", "HEAD")
    project.build()
    project.edit()  # comes back to it, and the tree follows again
    assert project.git("rev-parse", "HEAD") == head
    assert project.run("import torch._inductor.more as m; print(m.x)") == "1"
    with pytest.raises(GraftError, match=r"it lacks torch/_dynamo/config\.py"):
        project.edit("torch/_dynamo/config.py")
    assert project.git("rev-parse", "HEAD") == head


def test_a_branch_of_the_users_own_is_not_lost(project: Project) -> None:
    project.edit()
    project.git("branch", "idea")
    with pytest.raises(GraftError, match="refs/heads/idea"):
        project.edit("torch/_dynamo/config.py")
    assert workbench.discard(project.prefix, root=project.root)
    assert not project.repo.exists()
    assert workbench.followed(tree.load(project.prefix)) is None
    assert not workbench.discard(project.prefix, root=project.root)


def test_an_edit_is_made_anew_when_the_patch_files_changed(project: Project) -> None:
    project.edit()
    series = project.root / "patches/v2.11.0/series"
    kept, dropped = names(project)
    series.write_text(kept + "\n")
    (series.parent / dropped).unlink()
    project.copy("torch/_inductor/reads.py").write_text(READS)
    project.edit()
    assert project.path("_inductor__reads").read_text() == READS
    assert len(project.git("log", "--format=%h").split()) == 2


def test_no_tree_no_edit(project: Project) -> None:
    tree.clean(project.prefix)
    with pytest.raises(GraftError, match="no patched tree") as caught:
        project.edit()
    assert caught.value.next
    assert not project.repo.exists()


def test_a_tree_of_pytorchs_own_build_cannot_follow(project: Project) -> None:
    manifest = project.prefix / tree.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "compiled": True}))
    with pytest.raises(UsageError, match="cannot follow an edit") as caught:
        project.edit()
    assert caught.value.next
    project.copy("torch/_inductor/reads.py").write_text("# Direct.\n")
    before = tinytorch.snapshot(project.prefix)
    assert project.refresh().written
    assert tinytorch.snapshot(project.prefix) == before  # hours to make


def test_the_wheels_of_a_tree_stay(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = project.prefix / tree.MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "wheels": "/wheels"}))
    project.edit()
    asked = []
    monkeypatch.setattr(tree, "build", lambda *args: asked.append(args[3]))
    project.refresh()
    assert asked == [Path("/wheels")]


def test_two_at_once(project: Project) -> None:
    with open(project.root / ".graft" / "edit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(GraftError, match="another graft edit or refresh"):
            project.refresh()
        with pytest.raises(GraftError, match="another graft edit or refresh"):
            project.edit()


# --- refresh from the edit -----------------------------------------------------------------------


def test_what_refresh_wrote(two_patches: Project) -> None:
    first, second = two_patches.stack.patches
    assert first.name == "count-reads-in-a-module-of-their-own.patch"
    assert second.name == "split-by-reads.patch"
    assert first.message == FIRST
    head = first.text.decode().splitlines()[:4]
    assert head[0] == "From " + "0" * 40 + " Mon Sep 17 00:00:00 2001"
    assert head[1:] == [
        "From: inductor-graft <inductor-graft@localhost>",
        "Date: Thu, 1 Jan 2026 00:00:00 +0000",
        "Subject: [inductor] Count reads in a module of their own",
    ]
    assert two_patches.pin.files.keys() == {*standin.PINNED, "torch/_inductor/utils.py"}
    stack.check_copies(two_patches.stack, two_patches.root)
    assert two_patches.copy("test/inductor/test_reads.py").read_text() == TEST
    tree.verify(tree.load(two_patches.prefix), two_patches.stack)


def test_no_change_not_a_byte(project: Project) -> None:
    before = project.snapshot()
    assert project.refresh() == refresh.Refreshed()
    project.edit()
    project.git("commit", "-q", "--amend", "--no-edit", "--reset-author")
    assert project.refresh() == refresh.Refreshed()
    assert project.snapshot() == before


def test_only_what_changed_is_written(project: Project) -> None:
    before = project.snapshot()
    project.edit()
    project.path("_inductor__utils").write_text("# short\n")
    project.git("commit", "-qa", "--amend", "--no-edit")
    done = project.refresh()
    assert done == refresh.Refreshed(("patches/v2.11.0/split-by-reads.patch",))
    changed = {name for name, held in project.snapshot().items() if before[name] != held}
    assert changed == set(done.written)
    assert project.refresh() == refresh.Refreshed()


def test_amend_an_earlier_patch_whose_module_a_later_one_changes(project: Project) -> None:
    project.edit()
    mine = READS.replace("[x]", "[x, x]")
    project.git("branch", "second")
    project.git("reset", "-q", "--hard", "HEAD^")
    project.path("_inductor__reads").write_text(mine)
    project.git("commit", "-qa", "--amend", "--no-edit")
    project.git("cherry-pick", "second")
    assert set(project.refresh().written) == {
        "overlay/torch/_inductor/reads.py",
        *(f"patches/v2.11.0/{name}" for name in names(project)),
    }
    assert project.run("import torch._inductor.scheduler as s; print(s.split(7))") == "[7, 7]"


def test_drop_reorder_split_and_reword(project: Project) -> None:
    project.edit()
    project.commit("[inductor] A third\n", _inductor__third="a = 1\n", _inductor__fourth="b = 1\n")
    project.refresh()
    assert names(project)[2] == "a-third.patch"
    # reorder: the third before the second
    third = project.git("rev-parse", "HEAD").strip()
    second = project.git("rev-parse", "HEAD^").strip()
    project.git("reset", "-q", "--hard", "HEAD~2")
    project.git("cherry-pick", third, second)
    done = project.refresh()
    assert names(project)[1:] == ["a-third.patch", "split-by-reads.patch"]
    assert done.written == ("patches/v2.11.0/series",)
    # drop it
    project.git("reset", "-q", "--hard", "HEAD~2")
    project.git("cherry-pick", second)
    done = project.refresh()
    assert set(done.removed) == {
        "overlay/torch/_inductor/fourth.py",
        "overlay/torch/_inductor/third.py",
        "patches/v2.11.0/a-third.patch",
    }
    # split the second in two, of which one has its subject
    project.git("reset", "-q", "--soft", "HEAD^")
    project.git("reset", "-q", "torch/_inductor/utils.py")
    project.git("commit", "-q", "-m", SECOND)
    project.git("commit", "-qa", "-m", "[inductor][utils] Forty-four!\n")
    project.refresh()
    assert names(project)[1:] == ["split-by-reads.patch", "forty-four.patch"]
    # reword it
    project.git("commit", "-q", "--amend", "-m", "Say why\n\nIt was four.\n")
    done = project.refresh()
    assert names(project)[2] == "say-why.patch"
    assert done.removed == ("patches/v2.11.0/forty-four.patch",)
    stack.check_copies(project.stack, project.root)


def test_the_whole_stack_can_go_and_come_back(project: Project) -> None:
    before = project.snapshot()
    project.edit()
    head = project.git("rev-parse", "HEAD").strip()
    project.git("reset", "-q", "--hard", "HEAD~2")
    project.refresh()
    assert names(project) == []
    assert not list((project.root / "overlay").rglob("*.py"))
    assert project.run("import torch._inductor.scheduler as s; print(s.split(7))") == "-7"
    project.edit()
    project.git("reset", "-q", "--hard", head)
    project.refresh()
    assert {n: b for n, (b, _) in project.snapshot().items()} == {
        n: b for n, (b, _) in before.items()
    }


def test_comments_of_the_series_stay(project: Project) -> None:
    series = project.root / "patches/v2.11.0/series"
    first, second = names(project)
    status = "  # pytorch#12; in 2.13.0"
    series.write_text(f"# About it.\n\n{first}\n# Needs the first.\n{second}{status}\n# The end.\n")
    project.edit()
    project.commit("Third\n", _inductor__third="")
    project.refresh()
    assert series.read_text() == (
        f"# About it.\n\n{first}\n# Needs the first.\n{second}{status}\n"
        "third.patch  # ours; not sent\n# The end.\n"
    )


def test_names() -> None:
    name = refresh.file_name
    assert name("[inductor] Cap the reads of a kernel") == "cap-the-reads-of-a-kernel.patch"
    assert name("[a][b] Say 'no', twice") == "say-no-twice.patch"
    assert name("Again", {"again.patch", "again-2.patch"}) == "again-3.patch"
    assert name("[x] ¿?") == "change.patch"
    assert len(name("word " * 40)) <= refresh.NAME_LENGTH + len(".patch")
    assert len(name("w" * 200)) == refresh.NAME_LENGTH + len(".patch")


def test_long_and_unusual_messages_come_through(project: Project) -> None:
    project.edit()
    subject = "[inductor] " + " ".join(f"word{n}" for n in range(40))
    body = "\n".join(["It's 3 × 4 – naïve.", "", "    code: a -> b", "> quoted", "* list"])
    project.commit(f"{subject}\n\n{body}\n", _inductor__a="# é\n")
    project.refresh()
    assert project.stack.patches[-1].message == f"{subject}\n\n{body}\n"
    assert project.refresh() == refresh.Refreshed()


# --- what refresh refuses ------------------------------------------------------------------------


def dirty(p: Project) -> None:
    p.path("_inductor__utils").write_text("x")


def untracked(p: Project) -> None:
    p.path("_inductor__forgotten").write_text("x")


def merge(p: Project) -> None:
    p.git("switch", "-q", "-c", "side", "HEAD^")
    p.commit("Side\n", _inductor__side="")
    p.git("switch", "-q", "stack")
    p.git("merge", "-q", "--no-ff", "-m", "Join", "side")


def empty_commit(p: Project) -> None:
    p.git("commit", "-q", "--allow-empty", "-m", "Nothing")


def outside(p: Project) -> None:
    (p.repo / "README.md").write_text("x")
    p.commit("Readme\n")


def new_outside_the_layout(p: Project) -> None:
    p.commit("A file of dynamo's\n", _dynamo__mine="x = 1\n")


def diff_line(p: Project) -> None:
    p.commit("Message\n\ndiff -u a b\n", _inductor__a="")


def dashes(p: Project) -> None:
    p.commit("Message\n\nsome\n---\nmore\n", _inductor__a="")


def from_header(p: Project) -> None:
    p.commit("Message\n\nFrom: Some One <some@one.org>\n\nmore\n", _inductor__a="")


def two_line_subject(p: Project) -> None:
    p.commit("Message of\ntwo lines\n", _inductor__a="")


def fixup(p: Project) -> None:
    p.commit("fixup! [inductor] Split by reads\n", _inductor__a="")


def executable(p: Project) -> None:
    p.path("_inductor__a").write_text("")
    p.path("_inductor__a").chmod(0o755)
    p.commit("A script\n")


def link(p: Project) -> None:
    p.path("_inductor__a").symlink_to("utils.py")
    p.commit("A link\n")


def binary(p: Project) -> None:
    p.path("_inductor__a").write_bytes(b"\0\1")
    p.commit("Binary\n")


def carriage_returns(p: Project) -> None:
    p.path("_inductor__a").write_bytes(b"x = 1\r\n")
    p.commit("From elsewhere\n")


def removes_upstreams(p: Project) -> None:
    p.git("rm", "-q", SCHEDULER)
    p.git("commit", "-q", "-m", "Away")


def copies_upstreams(p: Project) -> None:
    p.commit("Dynamo's\n", _dynamo__config=standin.FILES["torch/_dynamo/config.py"] + "x = 1\n")


def rebase_under_way(p: Project) -> None:
    p.path("_inductor__scheduler").write_text("other\n")
    p.git("commit", "-qa", "-m", "Other")
    p.git("branch", "mine")
    p.git("reset", "-q", "--hard", "HEAD~2")
    with pytest.raises(AssertionError):
        p.git("cherry-pick", "mine")


def other_branch(p: Project) -> None:
    p.git("switch", "-q", "-c", "idea")
    p.commit("Idea\n", _inductor__idea="")


def rewritten(p: Project) -> None:
    p.git("checkout", "-q", "--orphan", "again")
    p.git("commit", "-q", "-m", "All in one")
    p.git("branch", "-M", "stack")


@pytest.mark.parametrize(
    ("break_", "words"),
    [
        (dirty, r"no commit has: torch/_inductor/utils\.py"),
        (untracked, r"no commit has: torch/_inductor/forgotten\.py"),
        (merge, r"\(Join\) is a merge"),
        (empty_commit, r"\(Nothing\) changes nothing"),
        (outside, r"changes README\.md; expected paths under torch/ and test/"),
        (new_outside_the_layout, r"makes torch/_dynamo/mine\.py; new files belong under"),
        (diff_line, r"end of the message: 'diff -u a b'"),
        (dashes, r"end of the message: '---'"),
        (from_header, r"'Message' does not come through git am"),
        (two_line_subject, r"expected a message of one line"),
        (fixup, r"is meant for another commit"),
        (executable, r"_inductor/a\.py mode 100755"),
        (link, r"_inductor/a\.py mode 120000"),
        (binary, r"_inductor/a\.py a binary file"),
        (carriage_returns, r"from-elsewhere\.patch"),
        (removes_upstreams, r"removes torch/_inductor/scheduler\.py, which is PyTorch's"),
        (copies_upstreams, r"makes torch/_dynamo/config\.py, which is PyTorch's"),
        (rebase_under_way, r"a cherry-pick is under way"),
        (other_branch, r"is at idea, and the stack is its branch stack"),
        (rewritten, r"the released files, was rewritten"),
    ],
)
def test_refused_with_nothing_written(
    project: Project, break_: Callable[[Project], None], words: str
) -> None:
    project.edit()
    before = project.snapshot()
    break_(project)
    with pytest.raises(GraftError, match=words) as caught:
        project.refresh()
    assert caught.value.next
    assert project.snapshot() == before
    assert workbench.followed(tree.load(project.prefix)) == project.repo


# --- refresh from the copies ---------------------------------------------------------------------


@pytest.mark.parametrize("with_edit", [False, True])
def test_a_changed_copy_goes_into_the_last_patch_that_touches_it(
    project: Project, with_edit: bool
) -> None:
    if with_edit:
        project.edit()
    first = project.stack.patches[0]
    module, test = (
        project.copy("torch/_inductor/reads.py"),
        project.copy("test/inductor/test_reads.py"),
    )
    module.write_text(module.read_text().replace("def split", "# Direct.\ndef split"))
    done = project.refresh()
    assert done.written == ("patches/v2.11.0/split-by-reads.patch",)
    assert project.stack.patches[0].text == first.text
    assert b"+# Direct." in project.stack.patches[1].text
    test.write_text(test.read_text() + "\n\ndef test_more():\n    pass\n")
    module.write_text("# Whole.\n")
    done = project.refresh()
    assert set(done.written) == {f"patches/v2.11.0/{name}" for name in names(project)}
    assert b"+def test_more" in project.stack.patches[0].text
    stack.check_copies(project.stack, project.root)
    assert project.run("import inspect, torch._inductor.reads as r; print(inspect.getsource(r))")
    assert project.refresh() == refresh.Refreshed()
    if with_edit:
        assert project.path("_inductor__reads").read_text() == "# Whole.\n"
        assert not project.git("status", "--porcelain")
    project.edit()
    assert project.path("_inductor__reads").read_text() == "# Whole.\n"


def test_changes_in_both_places_are_refused(project: Project) -> None:
    project.edit()
    project.commit("More\n", _inductor__more="")
    project.copy("torch/_inductor/reads.py").write_text("# Direct.\n")
    before, head = project.snapshot(), project.git("rev-parse", "HEAD")
    with pytest.raises(GraftError, match=r"both .*edit and overlay/torch/_inductor/reads\.py"):
        project.refresh()
    assert project.snapshot() == before
    assert project.git("rev-parse", "HEAD") == head


def test_a_copy_that_undoes_its_patch_is_refused(project: Project) -> None:
    project.edit()
    project.git("reset", "-q", "--hard", "HEAD^")
    project.commit("Only the module\n", _inductor__reads="# Changed.\n")
    project.refresh()
    project.copy("torch/_inductor/reads.py").write_text(READS)
    before = project.snapshot()
    with pytest.raises(GraftError, match=r"\(Only the module\) changes nothing"):
        project.refresh()
    assert project.snapshot() == before


def test_a_copy_that_no_patch_makes(project: Project) -> None:
    project.copy("torch/_inductor/mine.py").write_text("")
    with pytest.raises(GraftError, match=r"overlay/torch/_inductor/mine\.py is made by no patch"):
        project.refresh()


def test_a_missing_copy(project: Project) -> None:
    project.copy("test/inductor/test_reads.py").unlink()
    with pytest.raises(GraftError, match=r"tests/inductor/test_reads\.py is missing") as caught:
        project.refresh()
    assert caught.value.next
    assert "git checkout tests/inductor/test_reads.py" in caught.value.next


def test_patch_files_that_changed_under_the_edit(project: Project) -> None:
    project.edit()
    project.commit("Mine\n", _inductor__mine="")
    project.path("_inductor__mine").unlink()
    other = project.root / "patches/v2.11.0/split-by-reads.patch"
    other.write_bytes(other.read_bytes().replace(b"Split by reads", b"Split by pulls"))
    before = project.snapshot()
    with pytest.raises(GraftError, match="has changed since"):
        project.refresh()
    with pytest.raises(GraftError, match="has work of its own"):
        project.edit()
    assert project.snapshot() == before


# --- hunks of upstream's tests -------------------------------------------------------------------


UPSTREAM = "test/inductor/test_upstream.py"


@pytest.fixture
def with_hunks(project: Project) -> Project:
    """Three patches, of which the last two change one of upstream's tests."""
    project.edit(UPSTREAM, source=project.checkout)
    third = standin.UPSTREAM_TEST.replace("2 == 2", "2 != 3")
    project.commit("Expect more\n", inductor__test_upstream=third, _inductor__third="c = 3\n")
    project.commit("Still more\n", inductor__test_upstream=third.replace("9 == 9", "9 > 8"))
    project.refresh()
    assert "index " in project.stack.patches[3].text.decode()
    workbench.discard(project.prefix, root=project.root)
    return project


def test_hunks_without_a_checkout_are_carried(with_hunks: Project) -> None:
    project, before = with_hunks, with_hunks.snapshot()
    project.edit()
    assert not (project.repo / UPSTREAM).exists()
    assert "+    assert 9 > 8" in (project.repo / (UPSTREAM + commits.HUNKS)).read_text()
    project.git("commit", "-q", "--amend", "--no-edit", "--reset-author")
    assert project.refresh() == refresh.Refreshed()
    assert project.snapshot() == before
    # drop the last, and amend the one before
    project.edit()
    project.git("reset", "-q", "--hard", "HEAD^")
    project.path("_inductor__third").write_text("c = 4\n")
    project.git("commit", "-qa", "--amend", "-m", "Expect more, differently\n")
    project.refresh()
    last = project.stack.patches[-1]
    assert {change.path for change in last.files} == {UPSTREAM, "torch/_inductor/third.py"}
    assert b"+    assert 2 != 3" in last.text
    # and with the checkout it is the file again
    project.edit(source=project.checkout)
    assert (project.repo / UPSTREAM).read_text() == standin.UPSTREAM_TEST.replace(
        "2 == 2", "2 != 3"
    )


def test_carried_hunks_cannot_be_rewritten(with_hunks: Project) -> None:
    with_hunks.edit()
    (with_hunks.repo / (UPSTREAM + commits.HUNKS)).write_text("mine\n")
    with_hunks.commit("Rewrite\n")
    before = with_hunks.snapshot()
    with pytest.raises(GraftError, match="is not the hunks of") as caught:
        with_hunks.refresh()
    assert caught.value.next
    assert "--source" in caught.value.next
    assert with_hunks.snapshot() == before


def test_an_upstream_test_needs_a_checkout(project: Project, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a wheel has none") as caught:
        project.edit(UPSTREAM)
    assert caught.value.next
    assert project.pin.commit in caught.value.next
    with pytest.raises(UsageError, match="is no git checkout"):
        project.edit(source=tmp_path)
    standin.run_git(tmp_path, "clone", "-q", str(project.checkout), "other")
    other = tmp_path / "other"
    standin.run_git(other, "commit", "-q", "--allow-empty", "-m", "Later")
    with pytest.raises(
        UsageError, match=f"expected a PyTorch checkout at v2.11.0 .{project.pin.commit}"
    ):
        project.edit(source=other)


# --- interruptions -------------------------------------------------------------------------------


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs, no handler catches it."""


@pytest.mark.parametrize("at", range(1, 8))
def test_an_interrupted_refresh_is_finished_or_never_was(
    project: Project, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.edit()
    project.git("reset", "-q", "--hard", "HEAD^")
    project.commit("[inductor] New\n", _inductor__new="n = 1\n", _inductor__utils="u = 1\n")
    head = project.git("rev-parse", "HEAD")
    before = {name: held[0] for name, held in project.snapshot().items()}
    calls = 0
    rename, replace_ = os.rename, os.replace

    def counted(real: Callable[[str, str], None]) -> Callable[[str, str], None]:
        def call(a: str, b: str) -> None:
            nonlocal calls
            calls += ".graft/journal" in f"{a}{b}" or "edit" in str(b)
            if calls == at:
                raise Killed
            real(a, b)

        return call

    monkeypatch.setattr(os, "rename", counted(rename))
    monkeypatch.setattr(os, "replace", counted(replace_))
    with pytest.raises(Killed):
        project.refresh()
    monkeypatch.undo()
    between = {name: held[0] for name, held in project.snapshot().items()}
    began = (project.root / ".graft/journal").exists() or between != before
    journal.finish(project.root)
    assert [n for n in names(project) if n == "new.patch"] == ["new.patch"] * began
    project.refresh()
    assert names(project)[1:] == ["new.patch"]
    assert project.git("rev-parse", "HEAD") == head
    stack.check_copies(project.stack, project.root)
    project.edit()
    assert project.refresh() == refresh.Refreshed()


def test_an_interrupted_fold_is_finished(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.edit()
    project.copy("torch/_inductor/reads.py").write_text("# Direct.\n")

    with monkeypatch.context() as patched:
        patched.setattr(journal, "finish", lambda root: None)
        patched.setattr(workbench.Edit, "settled", lambda self, stack: self)
        project.refresh()
    # the plan is written, nothing is in its place
    assert b"Direct" not in project.stack.patches[1].text
    assert project.refresh() == refresh.Refreshed()
    assert b"+# Direct." in project.stack.patches[1].text
    assert project.path("_inductor__reads").read_text() == "# Direct.\n"
    assert not project.git("status", "--porcelain")


def test_no_space_leaves_everything(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.edit()
    project.commit("More\n", _inductor__more="x = 1\n")
    before = project.snapshot()
    real = Path.write_bytes

    def full(self: Path, data: bytes) -> int:
        if "journal.new" in str(self):
            raise OSError(28, "No space left on device")
        return real(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(GraftError, match="no space left in .*project"):
            project.refresh()
    assert project.snapshot() == before
    assert names(project) != []
    project.refresh()
    assert names(project)[-1] == "more.patch"


# --- the commands --------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path) -> None:
    root = tinytorch.make_root(tmp_path, (tinytorch.CAP,), tool=True)
    python = tinytorch.make_python(tmp_path / "base")
    done = tinytorch.run(root / "build.sh", "--python", python, "--offline", "--no-explain")
    assert done.returncode == 0, done.stderr

    def graft(*args: str) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "graft", *args)
        return tinytorch.run(*command, cwd=root, PYTHONPATH=str(root / "src"))

    assert "nothing to write" in graft("refresh").stdout
    assert "1 commits, one a patch" in graft("edit").stdout
    repo = workbench.folder(root)
    assert f"follows {repo}" in graft("status").stdout
    (repo / "torch/_inductor/reads.py").write_text("def count():\n    return 5\n")
    failed = graft("refresh")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert "no commit has: torch/_inductor/reads.py\nnext: " in failed.stderr
    standin.run_git(repo, "commit", "-qam", "[inductor] Count to five\n")
    done = graft("refresh")
    assert "wrote   patches/v2.11.0/count-to-five.patch\n" in done.stdout, done.stderr
    assert "follows" not in graft("status").stdout
    assert graft("verify").returncode == 0
    failed = graft("verify", "--each", "--patch", "count-to-five.patch")
    assert failed.returncode == 1
    assert "adds no test under test/inductor" in failed.stderr
    assert graft("verify", "--changed").returncode == 2
    failed = graft("verify", "--each", "--changed", "HEAD")
    assert failed.returncode == 2
    assert "has no commit HEAD" in failed.stderr
    failed = graft("upstream-tests", "--file", "nowhere.py")
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ")
    assert "\nnext: " in failed.stderr
    assert f"removed {repo}" in graft("edit", "--discard").stdout
    assert "no edit to remove" in graft("edit", "--discard").stdout


# --- any sequence of changes ---------------------------------------------------------------------

LINES = st.lists(
    st.sampled_from(["a = 1", "", "def f():", "    pass", "# é", "+", "-"]), max_size=6
)
ACTIONS = st.one_of(
    st.tuples(st.just("edit"), st.sampled_from(["config", "scheduler", "utils"]), LINES),
    st.tuples(st.just("module"), st.sampled_from(["one", "two"]), LINES),
    st.tuples(st.just("drop"), st.integers(0, 3), st.just([])),
    st.tuples(st.just("swap"), st.integers(0, 3), st.just([])),
)


def act(project: Project, kind: str, what: str | int, lines: list[str]) -> None:
    if isinstance(what, str):
        path = project.path(f"_inductor__{what}")
        old = path.read_text() if path.exists() else ""
        at = len(lines) * len(old) // 12
        path.write_text(old[:at] + "\n".join(lines) + old[at:] + "\n")
        project.commit(f"[inductor] {kind} {what}\n\nWith {len(lines)} lines.\n")
        return
    chain = project.git("rev-list", "--reverse", "HEAD").split()
    if what + 2 >= len(chain):
        return
    picked = chain[what + 2 :]
    picked = [*picked[:1], chain[what + 1], *picked[1:]] if kind == "swap" else picked
    project.git("reset", "-q", "--hard", chain[what])
    try:
        project.git("cherry-pick", "--allow-empty", *picked)
    except AssertionError:  # they build on each other
        project.git("cherry-pick", "--abort")
        project.git("reset", "-q", "--hard", chain[-1])


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(ACTIONS, min_size=2, max_size=6))
def test_any_sequence_round_trips(
    empty: Project, actions: list[tuple[str, str | int, list[str]]]
) -> None:
    workbench.discard(empty.prefix, root=empty.root)
    project = empty
    project.edit()
    for kind, what, lines in actions:
        act(project, kind, what, lines)
    head = project.git("rev-parse", "HEAD").strip()
    tree_id = project.git("rev-parse", "HEAD^{tree}").strip()
    project.refresh()
    before = project.snapshot()
    stack.check_copies(project.stack, project.root)
    there = tree.load(project.prefix)
    tree.verify(there, project.stack, start=False)
    for path in project.git("ls-tree", "-r", "--name-only", head, "torch/").split():
        assert (there.site_packages / path).read_text() == project.git("show", f"{head}:{path}")
    workbench.discard(project.prefix, root=project.root)
    project.edit()
    assert project.git("rev-parse", "HEAD^{tree}").strip() == tree_id
    assert project.refresh() == refresh.Refreshed()
    assert project.snapshot() == before
