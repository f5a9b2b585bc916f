"""Running pytest in another python, and reading what came of it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from running import is_running, wait_for

from graft.errors import GraftError
from graft.testing import runner

PYTHON = [sys.executable]
TESTS = """
import time, unittest
import pytest

class TestAll(unittest.TestCase):
    def test_passes(self): pass
    def test_asserts(self): self.assertEqual(1, 2)
    def test_no_attribute(self): raise AttributeError("config.read_cap does not exist")
    def test_wrapped(self): raise RuntimeError("InductorError: AssertionError: in the compiler")
    def test_wrapped_name(self): raise RuntimeError("InductorError: AttributeError: in there")
    def test_file_check(self): raise RuntimeError('Expected to find "tl.sum" but did not find it')
    def test_skipped(self): self.skipTest("a reason")

def test_rewritten():
    value = 1
    assert value == 2

def test_raises():
    with pytest.raises(ValueError): pass

@pytest.fixture
def broken(): import nowhere_to_be_found

def test_fixture(broken): pass

def test_slow(): time.sleep(30)
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, runner.Result]:
    folder = tmp_path_factory.mktemp("run")
    (folder / "test_a.py").write_text(TESTS)
    (folder / "test_b.py").write_text("import nowhere_to_be_found\n")
    run = runner.run(PYTHON, ["test_a.py", "test_b.py"], cwd=folder, limit_s=0.5)
    assert not run.ok
    names = {name.rpartition("::")[2]: result for name, result in run.results.items()}
    if run.count("passed") == 0:  # a file that does not import stops the run
        run = runner.run(PYTHON, ["test_a.py"], cwd=folder, limit_s=0.5)
        names |= {name.rpartition("::")[2]: result for name, result in run.results.items()}
    return names


@pytest.mark.parametrize(
    ("test", "outcome", "is_assertion", "is_missing_name"),
    [
        ("test_passes", "passed", False, False),
        ("test_asserts", "failed", True, False),
        ("test_no_attribute", "failed", False, True),
        ("test_wrapped", "failed", False, False),
        ("test_wrapped_name", "failed", False, True),
        ("test_file_check", "failed", True, False),
        ("test_rewritten", "failed", True, False),
        ("test_raises", "failed", True, False),
        ("test_fixture", "error", False, True),
        ("test_b", "error", False, True),
        ("test_skipped", "skipped", False, False),
        ("test_slow", "failed", False, False),
    ],
)
def test_outcomes(
    results: dict[str, runner.Result],
    test: str,
    outcome: str,
    is_assertion: bool,
    is_missing_name: bool,
) -> None:
    result = results[test]
    found = (result.outcome, result.is_assertion, result.is_missing_name)
    assert found == (outcome, is_assertion, is_missing_name), result.message


def test_a_test_over_its_limit_says_so(results: dict[str, runner.Result]) -> None:
    assert "over its time limit of 0.5 s" in results["test_slow"].message
    assert results["test_slow"].seconds < 5


def test_the_worst_of_several_counts(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/test_a.py").write_text(
        "import pytest\n\n"
        "@pytest.fixture\ndef late():\n    yield\n    assert 0, 'too late'\n\n"
        "class TestA:\n"
        "    @pytest.mark.parametrize('x', ['a/b.py::c'])\n"
        "    def test_x(self, late, x): pass\n"
    )
    found = runner.run(PYTHON, ["sub/test_a.py"], cwd=tmp_path)
    ((name, result),) = found.results.items()
    assert name == "sub.test_a.TestA::test_x[a/b.py::c]"
    assert (result.outcome, result.message.partition("\n")[0]) == (
        "error",
        "AssertionError: too late",
    )


def test_what_a_test_started_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(
        "import subprocess, sys\n\n"
        "def test_x():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    open('pid', 'w').write(str(child.pid))\n"
    )
    began = time.monotonic()
    assert runner.run(PYTHON, ["test_a.py"], cwd=tmp_path).ok
    assert time.monotonic() - began < 30
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not is_running(pid), limit_s=10)  # it sleeps for 60 s


def test_collect(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("class TestA:\n    def test_x(self): pass\n")
    assert runner.collect(PYTHON, ["test_a.py"], cwd=tmp_path) == ("test_a.py::TestA::test_x",)
    with pytest.raises(GraftError, match=r"cannot collect test_none\.py"):
        runner.collect(PYTHON, ["test_none.py"], cwd=tmp_path)


@pytest.mark.parametrize(
    ("body", "timeout_s", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", 60, "SIGSEGV"),
        ("import os; os._exit(7)", 60, "exit code 7"),
        ("import time; time.sleep(60)", 2, "ended after 2 s"),
    ],
)
def test_no_results_is_an_error(tmp_path: Path, body: str, timeout_s: float, words: str) -> None:
    (tmp_path / "test_a.py").write_text(f"def test_x():\n    {body}\n")
    with pytest.raises(GraftError, match=words):
        runner.run(PYTHON, ["test_a.py"], cwd=tmp_path, timeout_s=timeout_s)
