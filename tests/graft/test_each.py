"""graft verify --each: patches that are worth their place, and patches that are not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import standin
from standin import Project

from graft.errors import GraftError, UsageError
from graft.stack import each
from graft.stack.trees import bases

CONFIG = standin.FILES["torch/_inductor/config.py"]
SCHEDULER = standin.FILES["torch/_inductor/scheduler.py"]
CAPPED = CONFIG.replace("knob_9 = 9\n", "knob_9 = 9\nread_cap = 10\n")
HOOKED = SCHEDULER.replace("return -x", "return cap.cap(x)")
CAP = "from . import config\n\n\ndef cap(x):\n    return min(x, config.read_cap)\n"
TEST_CAP = """\
import unittest
from torch._inductor import cap, config, scheduler

class TestCap(unittest.TestCase):
    def test_module(self): self.assertEqual(cap.cap(99), config.read_cap)
    def test_fires(self): self.assertEqual(scheduler.split(99), 10)
"""


@pytest.fixture(scope="module")
def good(origin: tuple[bases.Base, Path], tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Two patches; the second adds a test to the first one's file, for a hunk of its own."""
    project = standin.make_project(tmp_path_factory.mktemp("each") / "project", *origin)
    project.edit()
    project.commit(
        "[inductor] Cap\n",
        _inductor__config=CAPPED,
        _inductor__cap=CAP,
        _inductor__scheduler="from . import cap\n" + HOOKED,
        inductor__test_cap=TEST_CAP,
    )
    project.commit(
        "[inductor] Fuse two\n",
        _inductor__scheduler="from . import cap\n" + HOOKED.replace("pass", "return x + x"),
        inductor__test_cap=TEST_CAP
        + "    def test_fuse(self): self.assertEqual(scheduler.fuse(2), 4)\n",
    )
    project.refresh()
    (project.root / "tests/inductor/conftest.py").write_text(
        "import pathlib\n\n"
        "def pytest_configure(config):\n"
        "    assert (pathlib.Path(__file__).parent / 'beside.json').exists()\n"
    )
    (project.root / "tests/inductor/beside.json").write_text("{}")
    return project


@pytest.fixture
def project(good: Project, tmp_path: Path) -> Project:
    for name in ("pins", "patches", "overlay", "tests"):
        shutil.copytree(good.root / name, tmp_path / "project" / name)
    made = Project(tmp_path / "project", good.base, good.checkout)
    made.build()
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins of this environment, which pytest would import in the trees, are what takes time."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def judge(project: Project, *only: str, complete: bool = True) -> list[each.Verdict]:
    found = each.verify(
        project.base, project.stack, only or None, complete=complete, root=project.root
    )
    return list(found)


def test_patches_that_are_worth_their_place(project: Project) -> None:
    first, second = judge(project)
    assert first.ok, first.problems
    assert second.ok, second.problems
    assert (first.whole.count("passed"), second.whole.count("passed")) == (2, 3)
    assert first.without is not None
    assert second.without is not None
    by_name = {name.rpartition("::")[2]: r.outcome for name, r in first.without.results.items()}
    assert by_name == {"test_module": "passed", "test_fires": "failed"}
    assert [name.rpartition("::")[2] for name in second.without.results] == ["test_fuse"]


def test_its_own_tests_alone(project: Project) -> None:
    """What is quick says the same of the patch, and nothing of those before it."""
    (verdict,) = judge(project, "fuse-two.patch", complete=False)
    assert verdict.ok, verdict.problems
    for run, outcome in ((verdict.whole, "passed"), (verdict.without, "failed")):
        assert run is not None
        ((name, result),) = run.results.items()
        assert name.endswith("::test_fuse")
        assert result.outcome == outcome


def amend(project: Project, **texts: str) -> None:
    """A third patch of these files."""
    project.edit()
    project.commit("[inductor] Third\n", **texts)
    project.refresh()


def test_a_new_module_may_import_what_the_patch_adds_to_another(project: Project) -> None:
    """Without its hunks in the release, that is there, and its tests fail for the hunks alone."""
    amend(
        project,
        _inductor__cap=CAP + "\n\nMOST = 20\n",
        _inductor__most="from .cap import MOST\n\n\ndef most(x):\n    return min(x, MOST)\n",
        _inductor__scheduler="from . import cap, most\n"
        + HOOKED.replace("pass", "return most.most(x + x)"),
        inductor__test_third="from torch._inductor import most, scheduler\n\n"
        "def test_module():\n    assert most.most(99) == 20\n\n"
        "def test_fires():\n    assert scheduler.fuse(99) == 20\n",
    )
    (verdict,) = judge(project, "third.patch", complete=False)
    assert verdict.ok, verdict.problems
    assert verdict.without is not None
    outcomes = {name.split("::")[-1]: r.outcome for name, r in verdict.without.results.items()}
    assert outcomes == {"test_module": "passed", "test_fires": "failed"}


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        pytest.param(
            {
                "_inductor__utils": "x = 1\n",
                "inductor__test_third": "def test_it():\n    assert True\n",
            },
            r"without its hunks, no test of it fails an assertion \(1 passed\)",
            id="tests that pass without it",
        ),
        pytest.param(
            {
                "_inductor__utils": "x = 1\n",
                "inductor__test_third": "import torch._inductor.utils as u\n\n"
                "def test_it():\n    assert u.x == 1\n\n"
                "def test_other():\n    assert hasattr(u, 'x')\n",
            },
            "test_it stumbles over a missing name: AttributeError",
            id="tests that need a name of a hunk",
        ),
        pytest.param(
            {
                "_inductor__utils": "x = 1\n",
                "inductor__test_third": "from torch._inductor.utils import x\n\n"
                "def test_it():\n    assert x == 1\n",
            },
            "test_third stumbles over a missing name",
            id="tests that cannot be imported",
        ),
        pytest.param(
            {
                "_inductor__utils": "x = 1\n",
                "inductor__test_third": "def test_it():\n    assert 1 == 2\n",
            },
            "with the whole patch, .*test_it has failed: assert 1 == 2",
            id="tests that fail",
        ),
        pytest.param(
            {
                "_inductor__cap": CAP.replace("min", "max"),
                "_inductor__utils": "x = 1\n",
                "inductor__test_third": "def test_it():\n    pass\n",
            },
            "with the whole patch, .*TestCap::test_.* has failed",
            id="an earlier patch's tests fail",
        ),
        pytest.param(
            {"_inductor__new": "", "inductor__test_third": "def test_it():\n    pass\n"},
            "no test of it fails an assertion",
            id="no hunk at all",
        ),
    ],
)
def test_patches_that_are_not(project: Project, texts: dict[str, str], problem: str) -> None:
    amend(project, **texts)
    complete = "TestCap" in problem  # else its own tests are enough to see it
    (verdict,) = judge(project, "third.patch", complete=complete)
    assert not verdict.ok
    assert pytest.raises(AssertionError, match=problem).matches(
        AssertionError("; ".join(verdict.problems))
    ), verdict.problems


def test_what_a_conftest_finds_counts(project: Project) -> None:
    (project.root / "tests/inductor/conftest.py").write_text(
        "def pytest_sessionfinish(session): session.exitstatus = 1\n"
    )
    (verdict,) = judge(project, "cap.patch")
    assert verdict.problems[0].startswith("with the whole patch, pytest fails")


def test_a_patch_without_tests(project: Project) -> None:
    amend(project, _inductor__utils="x = 1\n")
    with pytest.raises(GraftError, match=r"third\.patch adds no test") as caught:
        judge(project, "third.patch")
    assert caught.value.next


@pytest.mark.parametrize(
    "more", ["", "    def test_more(self): self.assertEqual(scheduler.fuse(3), 6)\n"]
)
def test_changed_tests_of_an_earlier_file(project: Project, more: str) -> None:
    """They are run, beside those that it adds, and none that it leaves alone."""
    test = project.copy("test/inductor/test_cap.py").read_text()
    amend(
        project,
        _inductor__scheduler="from . import cap\n"
        + HOOKED.replace("pass", "return x + x").replace("cap(x)", "cap(x) + 1"),
        inductor__test_cap=test.replace("split(99), 10", "split(99), 11") + more,
    )
    (verdict,) = judge(project, "third.patch")
    assert verdict.ok, verdict.problems
    assert verdict.without is not None
    outcomes = {name.rpartition("::")[2]: r.outcome for name, r in verdict.without.results.items()}
    assert outcomes == {"test_fires": "failed"} | ({"test_more": "passed"} if more else {})


def test_an_unknown_patch(project: Project) -> None:
    with pytest.raises(UsageError, match=r"did you mean cap\.patch"):
        judge(project, "capp.patch")


def test_nothing_is_left_and_nothing_changes(project: Project, tmp_path: Path) -> None:
    before = project.snapshot()
    judge(project, "cap.patch")
    assert project.snapshot() == before
    assert {path.name for path in project.root.iterdir()} >= {"pins", "patches", "build"}


def test_changed(project: Project) -> None:
    with pytest.raises(UsageError, match="no commit before this one"):
        each.changed(project.stack, root=project.root)
    standin.run_git(project.root, "init", "-q", "-b", "main")
    (project.root / ".gitignore").write_text("/build/\n/.graft/\n")

    def commit(message: str) -> None:
        standin.run_git(project.root, "add", "-A")
        standin.run_git(project.root, "commit", "-q", "-m", message)

    commit("two")
    amend(project, _inductor__utils="x = 1\n")
    commit("three")
    assert each.changed(project.stack, root=project.root) == ["third.patch"]
    assert each.changed(project.stack, "HEAD", root=project.root) == []
    patch = project.root / "patches" / project.stack.pin.name / "third.patch"
    text = patch.read_text()
    for old, new in (
        ("Third", "Third, in other words"),
        (r"(?m)^index \w+", "index " + "7" * 40),
        ("(?m)^@@ -1,", "@@ -2,"),
    ):
        assert re.search(old, text)
        patch.write_text(re.sub(old, new, text))
        assert each.changed(project.stack, "HEAD", root=project.root) == []
    patch.write_text(text.replace("x = 1", "x = 2"))
    assert each.changed(project.stack, "HEAD", root=project.root) == ["third.patch"]
    patch.write_text(text)
    (project.root / "README").write_text("")
    commit("readme")
    assert each.changed(project.stack, root=project.root) == []
    assert each.changed(project.stack, "HEAD~2", root=project.root) == ["third.patch"]
    standin.run_git(project.root, "update-ref", "refs/remotes/origin/main", "HEAD~2")
    assert each.changed(project.stack, root=project.root) == ["third.patch"]
    with pytest.raises(UsageError, match="no commit nowhere"):
        each.changed(project.stack, "nowhere", root=project.root)
