"""graft upstream-tests, with a stand-in for PyTorch, its checkout, its remote and two GPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import standin
from rich.console import Console
from running import is_running, wait_for
from standin import Project

from graft.errors import GraftError, UsageError
from graft.places import ROOT, SRC
from graft.stack.trees import bases
from graft.testing import runner
from graft.testing.runner import Result
from graft.upstream import comparison, gone_names, sources, teststate
from graft.upstream import tests as upstream_tests
from graft.upstream.comparison import Comparison, Row
from graft.upstream.testpool import Pool, Side

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
    monkeypatch.setattr(sources, "REMOTE", "file:///nowhere")

    monkeypatch.setattr(upstream_tests, "DEFAULT_FILES", ("test_mix_order_reduction.py",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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


def compare(project: Project, *files: str, **options: object) -> Comparison:
    built = project.build()
    kept = {"root": project.root, **options}
    return upstream_tests.compare(built, project.stack, files, **kept)  # type: ignore[arg-type]


def shown(found: Comparison) -> str:
    """What is printed, on one line."""
    console = Console(record=True, width=200)
    comparison.show(found, console)
    return " ".join(console.export_text().split())


def outcomes(comparison: Comparison) -> list[tuple[str, str, str]]:
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


def test_patched_first(project: Project, tmp_path: Path) -> None:
    """Stock runs what does not pass on patched; what it ran before counts."""
    kept = tmp_path / "kept"
    found = compare(project, source=project.checkout, patched_first=True, kept=kept)
    assert outcomes(found) == [
        ("test_breaks", "passed", "failed"),
        ("test_skipped_on_patched", "passed", "skipped"),
        ("test_fails_on_both", "failed", "failed"),
        ("test_is_mended", "not run", "passed"),
        ("test_same", "not run", "passed"),
    ]
    assert [row.test.rpartition("::")[2] for row in found.broken] == ["test_breaks"]
    assert not found.pending
    assert found.as_json()["patched_first"]
    assert "2 passed, 1 failed, 2 not run" in shown(found)
    whole = compare(project, source=project.checkout, kept=kept)
    assert ("test_is_mended", "failed", "passed") in outcomes(whole)
    again = compare(project, source=project.checkout, patched_first=True, kept=kept)
    assert outcomes(again) == outcomes(whole)


def test_what_waits_for_stock_is_counted_and_goes_first(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    args = {"source": project.checkout, "patched_first": True, "kept": kept}
    asked: list[str] = []
    run = Pool.run

    def until_stock(pool: Pool, sides: Sequence[Side], *more: object) -> None:
        if sides[0].name == "patched":
            run(pool, sides, *more)

    monkeypatch.setattr(Pool, "run", until_stock)
    found = compare(project, **args)
    assert (found.pending, found.waiting) == (3, {"skipped": 1, "failed": 2})
    words = "3 not reached (2 failed and 1 skipped on patched wait for stock); the same command"
    assert words in shown(found)

    def in_order(pool: Pool, sides: Sequence[Side], *more: object) -> None:
        before = {*sides[0].state.results}
        run(pool, sides, *more)
        asked.extend(test.rpartition("::")[2] for test in {*sides[0].state.results} - before)

    monkeypatch.setattr(Pool, "run", in_order)
    found = compare(project, **args)
    assert (found.pending, found.waiting) == (0, {})
    assert asked[2:] == ["test_skipped_on_patched"]
    assert {*asked[:2]} == {"test_breaks", "test_fails_on_both"}


def test_the_patched_side_runs_what_a_patch_makes_of_a_test(project: Project) -> None:
    found = compare(project, "test_upstream.py", source=project.checkout, keyword="test_2")
    assert outcomes(found) == [("test_2", "passed", "failed")]
    assert found.changed == {"test/inductor/test_upstream.py": ["split-the-other-way.patch"]}


def test_hunks_apply_to_a_copy_with_other_line_ends(project: Project, tmp_path: Path) -> None:
    copied = tmp_path / "test_upstream.py"
    copied.write_bytes(standin.UPSTREAM_TEST.replace("\n", "\r\n").encode())
    found = compare(project, paths=[copied], keyword="test_2")
    assert outcomes(found) == [("test_2", "passed", "failed")]
    assert found.changed == {"test/inductor/test_upstream.py": ["split-the-other-way.patch"]}
    assert not found.refused


def test_a_test_that_is_gone_is_broken(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import torch._inductor.config as c\n\n"
        "def test_here():\n    pass\n\n"
        "if not hasattr(c, 'more'):\n    def test_gone():\n        pass\n"
    )
    found = compare(project, paths=[tmp_path / "test_mine.py"])
    assert outcomes(found) == [("test_gone", "passed", "missing"), ("test_here", *2 * ["passed"])]
    assert len(found.broken) == 1


def test_a_file_by_itself(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    found = compare(project, paths=[tmp_path / "test_mine.py"])
    assert outcomes(found) == [("test_mine", "passed", "passed")]
    with pytest.raises(UsageError, match="leave FILES and --checkout out"):
        compare(project, "test_x.py", paths=[tmp_path / "test_mine.py"])
    with pytest.raises(UsageError, match=r"no file .*test_none\.py"):
        compare(project, paths=[tmp_path / "test_none.py"])


def test_a_sparse_fetch_is_kept(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "REMOTE", f"file://{project.checkout}")
    said: list[str] = []
    found = compare(project, keyword="test_same", say=said.append)
    assert outcomes(found) == [("test_same", "passed", "passed")]
    assert said[0].startswith("fetching test/inductor of")
    kept = sources.cache_folder(project.pin)
    assert (kept / "test/inductor/neighbour.py").exists()
    assert not (kept / "test/large").exists()
    assert not (kept / "torch").exists()
    have = standin.run_git(kept, "rev-list", "--objects", "--missing=print", "HEAD")
    assert "\n?" in have  # blobs outside the folder stayed where they were
    monkeypatch.setattr(sources, "REMOTE", "file:///nowhere")
    said.clear()
    compare(project, keyword="test_same", say=said.append)
    assert not [line for line in said if "fetching" in line]


def test_an_interrupted_fetch_is_taken_up_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "REMOTE", f"file://{project.checkout}")
    kept = sources.cache_folder(project.pin)
    kept.mkdir(parents=True)
    standin.run_git(kept, "init", "-q")
    found = compare(project, keyword="test_same")
    assert outcomes(found) == [("test_same", "passed", "passed")]


def test_without_network_it_says_what_to_give(project: Project) -> None:
    with pytest.raises(GraftError, match="could not be fetched") as caught:
        compare(project)
    assert caught.value.next
    assert "--checkout DIR" in caught.value.next
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
    found = upstream_tests.compare(built, project.stack, paths=paths, root=project.root)
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
    assert runner.OUTCOMES[2] == row.stock.outcome


# --- many processes ------------------------------------------------------------------------------


def mine(project: Project, folder: Path, text: str, **options: object) -> Comparison:
    (folder / "test_mine.py").write_text(text)
    return compare(project, paths=[folder / "test_mine.py"], **options)


PATCHED = "import os, signal, torch._inductor.config as c\n\nPATCHED = hasattr(c, 'more')\n\n"


def test_a_crash_costs_one_test(project: Project, tmp_path: Path) -> None:
    found = mine(
        project,
        tmp_path,
        f"{PATCHED}def test_0():\n    pass\n\n"
        "def test_1():\n    if PATCHED: os.kill(os.getpid(), signal.SIGSEGV)\n\n"
        "def test_2():\n    pass\n",
    )
    assert outcomes(found) == [
        ("test_1", "passed", "error"),
        ("test_0", "passed", "passed"),
        ("test_2", "passed", "passed"),
    ]
    assert "SIGSEGV" in found.broken[0].patched.message  # type: ignore[union-attr]


def test_a_gpu_that_is_lost_costs_one_test(project: Project, tmp_path: Path) -> None:
    found = mine(
        project,
        tmp_path,
        f"{PATCHED}import types, torch\n\n"
        "def lost():\n    raise RuntimeError('CUDA error: an illegal memory access')\n\n"
        "def test_0():\n    torch.cuda = types.SimpleNamespace(synchronize=lambda: None)\n"
        "    assert not PATCHED, 'CUDA error: of a test that leaves the GPU as it was'\n\n"
        "def test_1():\n    assert hasattr(torch, 'cuda'), 'its process did not go on'\n\n"
        "def test_2():\n    torch.cuda = types.SimpleNamespace(synchronize=lost)\n"
        "    if PATCHED: lost()\n\n"
        "def test_3():\n    assert hasattr(torch, 'cuda') is not PATCHED\n",
    )
    assert outcomes(found) == [
        ("test_0", "passed", "failed"),
        ("test_2", "passed", "failed"),
        ("test_1", "passed", "passed"),
        ("test_3", "passed", "passed"),
    ]
    assert "illegal memory" in found.broken[1].patched.message  # type: ignore[union-attr]


def test_a_file_that_cannot_be_read_is_one_row(project: Project, tmp_path: Path) -> None:
    text = f"{PATCHED}assert not PATCHED, 'as it was'\n\ndef test_0():\n    pass\n"
    found = mine(project, tmp_path, text)
    assert [(row.test, row.outcomes) for row in found.rows] == [
        ("inductor/test_mine.py", ("passed", "error"))
    ]
    assert found.broken
    assert "as it was" in found.broken[0].patched.message  # type: ignore[union-attr]


def test_a_file_that_no_side_can_read_is_an_error(project: Project, tmp_path: Path) -> None:
    found = mine(project, tmp_path, "import no_such_module\n\ndef test_0():\n    pass\n")
    assert not found.broken
    with pytest.raises(GraftError, match="test_mine.py: .*cannot read it: .*no_such_module"):
        comparison.check_read(found)


# --- files of another era ------------------------------------------------------------------------

ANOTHER_ERA = """\
import unittest
from torch._inductor.scheduler import split, split_more
from torch._inductor.no_such_module import (
    a_decorator,
    FLAG as HAS_IT,  # and a comment
)
from torch._inductor import scheduler

if True:
    from torch._inductor.scheduler import Base

class TestMine(unittest.TestCase):
    def test_here(self): self.assertIn(split(3), (3, -3))

    @a_decorator
    def test_decorated(self): self.fail()

    @a_decorator("with", arguments=1)
    def test_decorated_more(self): self.fail()

    @unittest.skipIf(not HAS_IT, "it is not there")
    def test_flag(self): self.fail()

    def test_uses(self): split_more(3) + 1
    def test_attribute(self): split_more.most

class TestDerived(Base):
    def test_derived(self): self.fail()

@a_decorator
class TestWhole(unittest.TestCase):
    def test_whole(self): self.fail()
"""


def test_names_that_are_gone_are_listed_and_the_rest_runs(project: Project, tmp_path: Path) -> None:
    found = mine(project, tmp_path, ANOTHER_ERA)
    both = {name: (stock, patched) for name, stock, patched in outcomes(found)}
    assert both == {
        "test_here": ("passed", "passed"),
        "test_uses": ("failed", "failed"),
        "test_attribute": ("failed", "failed"),
        **dict.fromkeys(
            ["test_decorated", "test_decorated_more", "test_flag", "test_derived", "test_whole"],
            ("skipped", "skipped"),
        ),
    }
    names = ["scheduler.split_more", "no_such_module.a_decorator", "no_such_module.FLAG"]
    names.append("scheduler.Base")
    assert found.gone == {
        "test/inductor/test_mine.py": [f"torch._inductor.{name}" for name in names]
    }
    assert found.as_json()["gone"] == found.gone
    assert "split_more, torch._inductor.no_such_module.a_decorator" in shown(found)
    comparison.check_read(found)
    (row,) = (row for row in found.rows if row.test.endswith("test_attribute"))
    assert "torch._inductor.scheduler.split_more is not in this torch" in row.stock.message  # type: ignore[union-attr]


def test_what_a_patch_brings_is_not_gone_on_patched(project: Project, tmp_path: Path) -> None:
    text = "from torch._inductor.config import more\n\ndef test_it():\n    assert more == 1\n"
    found = mine(project, tmp_path, text)
    assert outcomes(found) == [("test_it", "failed", "passed")]
    assert found.gone == {"test/inductor/test_mine.py": ["torch._inductor.config.more"]}


def test_lines_stay_where_they_are() -> None:
    text = gone_names.without(ANOTHER_ERA, gone_names.missing(ANOTHER_ERA))
    assert text.count("\n") == ANOTHER_ERA.count("\n")
    assert text.splitlines()[11:] == ANOTHER_ERA.splitlines()[11:]
    compile(text, "test_mine.py", "exec")


def test_a_file_that_no_side_can_read_among_others(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text("def test_0():\n    pass\n")
    (tmp_path / "test_other.py").write_text("import no_such_module\n")
    found = compare(project, paths=[tmp_path / "test_mine.py", tmp_path / "test_other.py"])
    assert ("test_0", "passed", "passed") in outcomes(found)
    assert "inductor/test_other.py cannot be read" in shown(found)
    comparison.check_read(found)


def test_hunks_on_a_file_of_another_era(project: Project, tmp_path: Path) -> None:
    (tmp_path / "test_upstream.py").write_text("def test_2():\n    assert 1 == 1\n")
    found = compare(project, paths=[tmp_path / "test_upstream.py"])
    assert outcomes(found) == [("test_2", "passed", "passed")]
    assert found.changed == {}
    assert found.refused == {"test/inductor/test_upstream.py": ["split-the-other-way.patch"]}
    assert "patched runs it as it is" in shown(found)


def test_a_process_that_never_gets_to_a_test(project: Project, tmp_path: Path) -> None:
    text = (
        f"{PATCHED}import sys\nif PATCHED and '--collect-only' not in sys.argv: os._exit(3)\n\n"
        "def test_0():\n    pass\n\ndef test_1():\n    pass\n"
    )
    found = mine(project, tmp_path, text)
    assert outcomes(found) == [("test_0", "passed", "error"), ("test_1", "passed", "error")]
    assert "exit code 3" in found.broken[0].patched.message  # type: ignore[union-attr]


def test_what_differs_by_chance_is_unsteady(project: Project, tmp_path: Path) -> None:
    mark = tmp_path / "failed-once"
    found = mine(
        project,
        tmp_path,
        f"{PATCHED}def test_0():\n    if PATCHED and not os.path.exists({str(mark)!r}):\n"
        f"        open({str(mark)!r}, 'w').close()\n        assert 0, 'no memory'\n",
    )
    (row,) = found.rows
    assert row.outcomes == ("passed", "passed")
    assert row.before == ("passed", "failed")
    assert row.is_unsteady
    assert not found.broken
    assert found.differing == [row]


def test_processes_are_spread_over_gpus(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    tests = "".join(
        f"def test_{n}():\n    import time; time.sleep(0.5)\n"
        "    assert 0, f'{os.getpid()} {os.environ[\"CUDA_VISIBLE_DEVICES\"]}'\n\n"
        for n in range(2)
    )
    found = mine(project, tmp_path, f"import os\n\n{tests}", workers=2)
    sides = [(row.stock, row.patched) for row in found.rows]
    words = [side.message.splitlines()[0].split()[-2:] for pair in sides for side in pair if side]
    processes, gpus = zip(*words, strict=True)
    assert sorted(gpus) == ["3", "3", "5", "5"]
    assert len(set(processes)) == 4, "few tests: each has a process of its own"


def test_subtests_count_for_their_test(project: Project, tmp_path: Path) -> None:
    found = mine(
        project,
        tmp_path,
        f"{PATCHED}import unittest\n\nclass TestSub(unittest.TestCase):\n"
        "    def test_0(self):\n        for n in range(3):\n            with self.subTest(n=n):\n"
        "                self.assertNotEqual((n, PATCHED), (1, True))\n"
        "    @unittest.expectedFailure\n    def test_1(self): self.assertTrue(PATCHED)\n",
    )
    assert (
        outcomes(found) == [("test_1", "skipped", "failed"), ("test_0", "passed", "failed")][::-1]
    )


def test_a_run_goes_on_from_what_was_kept(project: Project, tmp_path: Path) -> None:
    """The second run runs what the first did not get to, and nothing else."""
    log = tmp_path / "log"
    text = "".join(
        f"def test_{n}():\n    with open({str(log)!r}, 'a') as f: f.write('{n}')\n\n"
        for n in range(3)
    )
    kept = tmp_path / "kept"
    mine(project, tmp_path, text, kept=kept)
    assert sorted(log.read_text()) == list("001122")
    log.unlink()
    for state in kept.glob("patched-*.jsonl"):  # as it is when its process was killed
        lines = state.read_text().splitlines(keepends=True)
        assert len(lines) == 5
        state.write_text("".join(lines[:-1]) + lines[-1][:7])
    found = mine(project, tmp_path, text, kept=kept)
    assert sorted(log.read_text()) == ["2"]
    assert outcomes(found) == [(f"test_{n}", "passed", "passed") for n in range(3)]
    mine(project, tmp_path, text + "# another file\n", kept=kept)
    assert sorted(log.read_text()) == list("0011222")
    log.unlink()
    mine(project, tmp_path, text, kept=kept)  # the first file again: nothing is left to run
    assert not log.exists()
    mine(project, tmp_path, text, kept=kept, anew=True)
    assert sorted(log.read_text()) == list("001122")


def test_time_that_is_up(project: Project, tmp_path: Path) -> None:
    text = "import time\n\ndef test_0():\n    time.sleep(60)\n"
    begin = time.monotonic()
    found = mine(project, tmp_path, text, seconds=4)
    assert time.monotonic() - begin < 20
    assert found.pending == 1
    assert not found.rows


def test_a_run_that_is_killed_leaves_no_process(project: Project, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "test_mine.py").write_text(
        "import os, time\n\ndef test_0():\n"
        f"    with open({str(pid)!r}, 'a') as f: f.write(f'{{os.getpid()}} ')\n"
        "    time.sleep(60)\n"
    )
    project.build()
    code = (
        "from graft import stack\nfrom graft.stack import pins\n"
        "from graft.stack.trees import tree\nfrom graft.upstream import tests as u\n"
        "from pathlib import Path\n"
        f"root = Path({str(project.root)!r})\n"
        f"u.compare(tree.load(root / 'build'), stack.load(pins.load(root=root), root), "
        f"paths=[Path({str(tmp_path / 'test_mine.py')!r})], root=root)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    run = subprocess.Popen([sys.executable, "-c", code], env=env)
    try:
        wait_for(lambda: pid.exists() and len(pid.read_text().split()) == 2)
        run.send_signal(signal.SIGKILL)
    finally:
        run.kill()
        run.wait()
    wait_for(lambda: not any(is_running(int(each)) for each in pid.read_text().split()))


def test_two_runs_do_not_share_a_state(tmp_path: Path) -> None:
    with (
        teststate.opened(tmp_path, "stock", {"a": 1}),
        pytest.raises(GraftError, match="another run is at work"),
        teststate.opened(tmp_path, "stock", {"a": 1}),
    ):
        pass
    with teststate.opened(tmp_path, "stock", {"a": 2}) as other:
        other.add("t", Result("passed"))
    other.path.write_text("no JSON\n")
    with (
        pytest.raises(GraftError, match="is not what a run of tests left"),
        teststate.opened(tmp_path, "stock", {"a": 2}),
    ):
        pass


# --- meant differences ---------------------------------------------------------------------------

MEANT = """\
[[difference]]
pin = "v2.11.0"
test = "inductor/test_mix_order_reduction.py::*::test_breaks"
stock = "passed"
patched = "failed"
patch = "split-the-other-way.patch"
reason = "it splits the other way"

[[difference]]
pin = "v2.11.0"
test = "inductor/test_mix_order_reduction.py::TestBoth::test_same"
stock = "passed"
patched = "failed"
patch = "split-the-other-way.patch"
reason = "it was so once"

[[difference]]
pin = "v2.12.0"
test = "of another pin"
"""


@pytest.fixture
def meant(project: Project) -> object:
    file = project.root / "tests" / "upstream-differences.toml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(MEANT)
    yield file
    file.unlink()


def test_a_meant_difference_is_explained_and_a_stale_one_reported(
    project: Project, meant: Path
) -> None:
    found = compare(project, source=project.checkout)
    assert found.broken == []
    assert outcomes(found)[-3][0] == "test_breaks"  # after what nothing explains
    assert [each.test.rpartition("::")[2] for each in found.stale] == ["test_same"]
    console = Console(record=True, width=200)
    comparison.show(found, console)
    shown = console.export_text()
    assert "meant: it splits the other way" in shown
    assert "does not differ in that way" in shown
    assert "5 tests, 3 differ, 1 explained, 0 unsteady, 0 broken" in shown
    # a test that was not run says nothing of its line
    assert compare(project, source=project.checkout, keyword="test_breaks").stale == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (('reason = "it splits the other way"', 'reason = ""'), "has no reason"),
        (("split-the", "spilt-the"), "did you mean split-the-other-way.patch"),
        (('patched = "failed"', 'patched = "bad"'), "expected passed, skipped"),
        (('pin = "v2.12.0"\n', ""), "names no pin"),
        (("stock =", "stok ="), "has no stock"),
        (("[[difference]]", "[[difference"), "is not TOML"),
    ],
)
def test_a_wrong_line_is_refused(
    project: Project, meant: Path, wrong: tuple[str, str], told: str
) -> None:
    meant.write_text(MEANT.replace(*wrong))
    with pytest.raises(GraftError, match=told):
        compare(project, source=project.checkout)


def test_the_repository_s_own_differences_can_be_read() -> None:
    from graft import stack
    from graft.stack import pins
    from graft.upstream import differences

    differences.load(stack.load(pins.load()))


def test_the_result_as_data(project: Project, tmp_path: Path) -> None:
    found = compare(project, source=project.checkout)
    comparison.write(found.as_json(), tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["gpu"] == "a GPU"
    assert data["stack"] == project.stack.hash
    (counts,) = data["files"].values()
    assert counts["tests"] == 5
    assert counts["broken"] == 1
    assert counts["patched"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert data["differing"][0]["outcomes"] == ["passed", "failed"]


def test_a_result_has_no_path_of_this_machine() -> None:
    failed = Result("failed", f'File "{ROOT}/.venv/x.py"')
    (row,) = Comparison([Row("t", Result("passed"), failed)]).as_json()["differing"]
    assert row["messages"] == ["", 'File "./.venv/x.py"']


def test_what_counts_as_broken() -> None:
    passed, failed, skipped = (Result(name) for name in ("passed", "failed", "skipped"))
    assert Row("t", passed, failed).is_broken
    assert Row("t", passed, None).is_broken
    assert not Row("t", passed, skipped).is_broken
    assert Row("t", passed, skipped).differs
    assert not Row("t", None, failed).is_broken
    assert not Row("t", failed, failed).differs
