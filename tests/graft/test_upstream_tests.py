"""graft upstream-tests, with a stand-in for PyTorch, its checkout, its remote and a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import standin
from standin import Project

from graft import bases, testrun, upstream_tests
from graft.errors import GraftError, UsageError
from graft.testrun import Result, Run

COMPARED = """\
import expecttest, unittest
from inductor import neighbour
from torch._inductor import config, scheduler

class TestBoth(unittest.TestCase):
    def test_same(self): self.assertEqual(neighbour.HERE, 1)
    def test_breaks(self): self.assertEqual(scheduler.split(3), -3)
    def test_is_mended(self): self.assertEqual(scheduler.split(3), 3)
    def test_fails_on_both(self): self.assertEqual(1, 2)
    def test_skipped_on_patched(self):
        if hasattr(config, "more"): self.skipTest("patched")
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(upstream_tests, "REMOTE", "file:///nowhere")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """One patch, which changes what `split` does and one of upstream's tests."""
    folder = tmp_path_factory.mktemp("upstream")
    checkout = folder / "checkout"
    standin.make_checkout(checkout)
    tests = checkout / "test/inductor"
    (tests / "test_mix_order_reduction.py").write_text(COMPARED)
    (tests / "neighbour.py").write_text("HERE = 1\n")
    (checkout / "test/large").mkdir()
    (checkout / "test/large/data").write_text("not fetched\n")
    standin.run_git(checkout, "add", "-A")
    standin.run_git(checkout, "commit", "-q", "-m", "tests")
    standin.run_git(checkout, "config", "uploadpack.allowFilter", "true")
    commit = standin.run_git(checkout, "rev-parse", "HEAD").strip()
    base = bases.probe(standin.make_base(folder / "base", commit))
    (base.torch_dir.parent / "expecttest.py").write_text("")
    made = standin.make_project(folder / "project", base, checkout)
    made.edit("test/inductor/test_upstream.py", source=checkout)
    made.commit(
        "Split the other way\n",
        _inductor__scheduler=standin.FILES["torch/_inductor/scheduler.py"].replace("-x", "x"),
        _inductor__config=standin.FILES["torch/_inductor/config.py"] + "more = 1\n",
        inductor__test_upstream=standin.UPSTREAM_TEST.replace("2 == 2", "2 == 3"),
    )
    made.refresh()
    return made


def compare(project: Project, *files: str, **options: object) -> upstream_tests.Comparison:
    built = project.build()
    return upstream_tests.compare(built, project.stack, files, **options)  # type: ignore[arg-type]


def outcomes(comparison: upstream_tests.Comparison) -> list[tuple[str, str, str]]:
    return [(row.test.rpartition("::")[2], *row.outcomes) for row in comparison.rows]


def test_side_by_side_with_differences_first(project: Project) -> None:
    found = compare(project, source=project.checkout)
    assert outcomes(found) == [
        ("test_breaks", "passed", "failed"),
        ("test_is_mended", "failed", "passed"),
        ("test_skipped_on_patched", "passed", "skipped"),
        ("test_fails_on_both", "failed", "failed"),
        ("test_same", "passed", "passed"),
    ]
    assert [row.test.rpartition("::")[2] for row in found.broken] == ["test_breaks"]
    assert found.changed == {}
    assert "-3" in found.broken[0].patched.message  # type: ignore[union-attr]


def test_the_patched_side_runs_what_a_patch_makes_of_a_test(project: Project) -> None:
    found = compare(project, "test_upstream.py", source=project.checkout, keyword="test_2")
    assert outcomes(found) == [("test_2", "passed", "failed")]
    assert found.changed == {"test/inductor/test_upstream.py": ["split-the-other-way.patch"]}


def test_a_test_that_is_gone_is_broken() -> None:
    stock, patched = Run({"t": Result("passed")}, True, "", 0.0), Run({}, True, "", 0.0)
    (row,) = upstream_tests.Comparison(stock, patched, {}).broken
    assert row.outcomes == ("passed", "missing")


def test_a_file_by_itself(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    found = compare(project, paths=[tmp_path / "test_mine.py"])
    assert outcomes(found) == [("test_mine", "passed", "passed")]
    with pytest.raises(UsageError, match="leave FILES and --source out"):
        compare(project, "test_x.py", paths=[tmp_path / "test_mine.py"])
    with pytest.raises(UsageError, match=r"no file .*test_none\.py"):
        compare(project, paths=[tmp_path / "test_none.py"])


def test_a_sparse_fetch_is_kept(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_tests, "REMOTE", f"file://{project.checkout}")
    said: list[str] = []
    found = compare(project, keyword="test_same", say=said.append)
    assert outcomes(found) == [("test_same", "passed", "passed")]
    assert said[0].startswith("fetching test/inductor of")
    kept = upstream_tests.cache_folder(project.pin)
    assert (kept / "test/inductor/neighbour.py").exists()
    assert not (kept / "test/large").exists()
    assert not (kept / "torch").exists()
    have = standin.run_git(kept, "rev-list", "--objects", "--missing=print", "HEAD")
    assert "\n?" in have  # blobs outside the folder stayed where they were
    monkeypatch.setattr(upstream_tests, "REMOTE", "file:///nowhere")
    said.clear()
    compare(project, keyword="test_same", say=said.append)
    assert not [line for line in said if "fetching" in line]


def test_an_interrupted_fetch_is_taken_up_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upstream_tests, "REMOTE", f"file://{project.checkout}")
    kept = upstream_tests.cache_folder(project.pin)
    kept.mkdir(parents=True)
    standin.run_git(kept, "init", "-q")
    found = compare(project, keyword="test_same")
    assert outcomes(found) == [("test_same", "passed", "passed")]


def test_without_network_it_says_what_to_give(project: Project) -> None:
    with pytest.raises(GraftError, match="could not be fetched") as caught:
        compare(project)
    assert caught.value.next
    assert "--source CHECKOUT" in caught.value.next
    assert "--file PATH" in caught.value.next


def test_another_commit_is_refused(project: Project, tmp_path: Path) -> None:
    standin.run_git(tmp_path, "clone", "-q", str(project.checkout), "other")
    standin.run_git(tmp_path / "other", "commit", "-q", "--allow-empty", "-m", "Later")
    with pytest.raises(UsageError, match=r"expected a PyTorch checkout at v2\.11\.0"):
        compare(project, source=tmp_path / "other")
    with pytest.raises(UsageError, match="is no git checkout"):
        compare(project, source=tmp_path)


def test_an_unknown_file_suggests_the_nearest(project: Project) -> None:
    with pytest.raises(UsageError, match=r"did you mean test/inductor/test_mix_order_reduction"):
        compare(project, "test_mixorder_reduction.py", source=project.checkout)
    with pytest.raises(UsageError, match=r"expected test_NAME\.py"):
        compare(project, "test/inductor", source=project.checkout)


def edited_base(project: Project, folder: Path, **texts: str) -> Project:
    """The project with a base of its own, some of whose files are otherwise."""
    shutil.copytree(project.base.torch_dir.parents[3], folder / "base", symlinks=True)
    base = bases.probe(folder / "base" / "bin" / "python")
    for name, text in texts.items():
        (base.torch_dir.parent / name.replace("__", "/")).with_suffix(".py").write_text(text)
    return Project(project.root, base, project.checkout)


def test_without_a_gpu(project: Project, tmp_path: Path) -> None:
    no_gpu = "def is_available():\n    return False\n"
    other = edited_base(project, tmp_path)
    (other.base.torch_dir / "cuda/__init__.py").write_text(no_gpu)
    with pytest.raises(GraftError, match="need a GPU") as caught:
        compare(other, source=project.checkout)
    assert caught.value.next
    project.build()


def test_without_expecttest(project: Project, tmp_path: Path) -> None:
    other = edited_base(project, tmp_path)
    (other.base.torch_dir.parent / "expecttest.py").unlink()
    (other.base.torch_dir.parent / "own.pth").unlink()
    with pytest.raises(GraftError, match="need pytest and expecttest") as caught:
        compare(other, source=project.checkout)
    assert caught.value.next
    assert "--wheels" in caught.value.next
    project.build()


def test_what_wheels_brought_into_the_tree_is_lent_to_stock(
    project: Project, tmp_path: Path
) -> None:
    built = project.build()
    (built.site_packages / "from_a_wheel.py").write_text("")
    (tmp_path / "test_lent.py").write_text(
        "import from_a_wheel, torch._inductor.config as c\n\n"
        "def test_lent():\n    assert not hasattr(c, 'more')\n"
    )
    paths = [tmp_path / "test_lent.py"]
    found = upstream_tests.compare(built, project.stack, paths=paths)
    assert outcomes(found) == [("test_lent", "passed", "failed")]  # stock is still stock
    project.build()


def test_a_hanging_test_ends(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text(
        "import time, torch._inductor.config as c\n\n"
        "def test_slow():\n    time.sleep(30 * hasattr(c, 'more'))\n"
    )
    found = compare(project, paths=[tmp_path / "test_slow.py"], limit_s=0.5)
    assert outcomes(found) == [("test_slow", "passed", "failed")]
    assert "time limit" in found.broken[0].patched.message  # type: ignore[union-attr]


def test_caches_are_not_shared(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_env.py").write_text(
        "import os, torch\n\n"
        "def test_env():\n    assert 0, os.environ['TORCHINDUCTOR_CACHE_DIR'] + torch.__file__\n"
    )
    found = compare(project, paths=[tmp_path / "test_env.py"])
    (row,) = found.rows
    assert row.stock
    assert row.patched
    assert "stock-cache" in row.stock.message
    assert "patched-cache" in row.patched.message
    assert str(project.prefix) in row.patched.message
    assert str(project.prefix) not in row.stock.message
    assert testrun.OUTCOMES[2] == row.stock.outcome
