"""graft pin add: what becomes of each patch on another release, and what is written of it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import standin
from rich.console import Console
from standin import Project

from graft import stack
from graft.errors import GraftError, UsageError
from graft.stack import pins
from graft.stack.trees import bases, tree
from graft.upstream import new_pin, pin_add, trial_report
from graft.upstream import release as releases
from graft.upstream import trial as trials
from graft.upstream.release import Release
from graft.upstream.three_way import Grafter
from graft.upstream.trial import Trial

COMMIT = "c" * 40
SCHEDULER = standin.FILES["torch/_inductor/scheduler.py"]
CONFIG = standin.FILES["torch/_inductor/config.py"]
UTILS = standin.FILES["torch/_inductor/utils.py"]
HELPER = "def helped(x):\n    return x\n"
TESTS = "class TestFirst:\n    def test(self):\n        pass\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Seven patches, each of its own kind."""
    folder = tmp_path_factory.mktemp("pin")
    commit = standin.make_checkout(folder / "checkout")
    base = bases.probe(standin.make_base(folder / "base", commit))
    made = standin.make_project(folder / "project", base, folder / "checkout")
    made.edit("torch/_inductor/utils.py")
    config = CONFIG.replace("knob_2 = 2", "knob_2 = 20")
    made.commit("Clean\n", _inductor__config=config)
    scheduler = SCHEDULER.replace("return -x", "return -x or 1")
    made.commit("Conflict\n", _inductor__scheduler=scheduler, _inductor__helper=HELPER)
    config = config.replace("knob_25 = 25", "knob_25 = 250")
    made.commit("Moved\n", _inductor__config=config, inductor__test_own=TESTS)
    utils = UTILS.replace("return 4", "return 40")
    made.commit("There\n", _inductor__utils=utils)
    scheduler = scheduler.replace("def fuse(x):\n    pass", "def fuse(x):\n    return None")
    made.commit("Landed\n", _inductor__scheduler=scheduler)
    more = f"{TESTS}\n\nclass TestSecond(TestFirst):\n    pass\n"
    helper = f"{HELPER}\n\ndef more(x):\n    return 2 * x\n"
    utils = utils.replace("def util_0", "from .helper import more\n\n\ndef util_0")
    made.commit("Needs\n", _inductor__utils=utils, _inductor__helper=helper)
    made.commit("Own\n", inductor__test_own=more)
    made.refresh()
    series = stack.series_file(made.pin, made.root)
    text = series.read_text()
    landed = text.replace("landed.patch  # ours; not sent", "landed.patch  # ours; in 2.12.0")
    assert landed != text
    series.write_text(landed)
    return made


def release(folder: Path, version: str = "2.13.0", **texts: str) -> Path:
    """The files of another release: `texts` by name, the others as they were."""
    shutil.rmtree(folder, ignore_errors=True)
    files = {f"torch/_inductor/{name}.py": text for name, text in texts.items()}
    for name, text in {**standin.FILES, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "torch/version.py").write_text(
        f"from typing import Optional\n\n__version__ = '{version}+cu130'\n"
        f"cuda: Optional[str] = '13.0'\ngit_version = '{COMMIT}'\n"
    )
    return folder


@pytest.fixture
def new(tmp_path: Path) -> Path:
    """A release in which one patch conflicts, one moves, one is there, and one has landed."""
    return release(
        tmp_path / "new",
        scheduler=SCHEDULER.replace("return -x", "return -x - 1").replace("pass", "return None"),
        config=CONFIG.replace("knob_9 = 9", "knob_9 = 9\nknob_10a = 10\nknob_10b = 10"),
        utils=UTILS.replace("return 4", "return 40"),
    )


def attempt(project: Project, new: Path, version: str = "2.13.0") -> Trial:
    return pin_add.of_version(
        project.prefix, version, files=new, dry_run=True, say=print, root=project.root
    )


def states(trial: Trial) -> dict[str, str]:
    return {v.patch.name.removesuffix(".patch"): v.state for v in trial.verdicts}


def test_each_patch_is_judged_by_its_own_hunks(project: Project, new: Path) -> None:
    trial = attempt(project, new)
    assert states(trial) == {
        "clean": "moved",  # its file is another one, though the hunk is where it was
        "conflict": "conflict",
        "moved": "moved",
        "there": "already there",
        "landed": "already there",
        "needs": "clean",
        "own": "clean",
    }
    places = {v.patch.subject: v.places for v in trial.verdicts}
    assert places["Clean"] == ("torch/_inductor/config.py",)
    assert places["Moved"] == ("torch/_inductor/config.py +2 lines",)
    assert places["Conflict"] == ("torch/_inductor/scheduler.py:6",)
    assert places["Landed"] == ("in 2.12.0, says the series",)
    assert trial.new.name == "v2.13.0"
    assert trial.new.commit == COMMIT


def test_the_same_files_are_clean(project: Project, tmp_path: Path) -> None:
    trial = attempt(project, release(tmp_path / "same", "2.11.1"), "2.11.1")
    assert set(states(trial).values()) == {"clean"}
    assert [patch.text for patch in trial.stack.patches] == [p.text for p in project.stack.patches]


def test_what_applies_is_written_and_builds(project: Project, new: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(project.root, root, symlinks=True)
    trial = attempt(project, new)
    kept = [patch.name.removesuffix(".patch") for patch in trial.stack.patches]
    assert kept == ["clean", "moved", "own"]
    left_out = {v.patch.subject: v.left_out for v in trial.verdicts if v.left_out}
    assert left_out == {"Needs": "needs conflict"}
    new_pin.write(trial, root)
    series = stack.load(pins.load("v2.13.0", root), root)
    assert [patch.name for patch in series.patches] == [f"{name}.patch" for name in kept]
    text = stack.series_file(series.pin, root).read_text()
    assert "#   conflict.patch: conflict" in text
    assert "#   needs.patch: needs conflict" in text
    base = standin.make_base(tmp_path / "base", COMMIT)
    site = bases.probe(base).torch_dir.parent
    shutil.copytree(new / "torch", site / "torch", dirs_exist_ok=True)
    built = tree.build(bases.probe(base), series, root / "build-new")
    changed = (built.torch_dir / "_inductor/config.py").read_text()
    assert "knob_2 = 20\n" in changed
    assert "knob_25 = 250\n" in changed
    assert "knob_10b" in changed
    with pytest.raises(UsageError, match=r"pins/v2.13.0.toml already"):
        new_pin.write(trial, root)


def test_nothing_is_half_made(
    project: Project, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    shutil.copytree(project.root, root, symlinks=True)
    trial = attempt(project, new)
    assert not pins.file("v2.13.0", project.root).exists()  # a dry run writes nothing
    with monkeypatch.context() as broken:
        broken.setattr("graft.stack.Stack.check", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            new_pin.write(trial, root)
    assert not pins.file("v2.13.0", root).exists()
    assert not (root / "patches/v2.13.0").exists()


def test_a_file_that_is_gone_and_one_with_a_new_name(project: Project, tmp_path: Path) -> None:
    new = release(tmp_path / "new")
    (new / "torch/_inductor/config.py").rename(new / "torch/_inductor/settings.py")
    (new / "torch/_inductor/scheduler.py").unlink()
    trial = attempt(project, new)
    verdicts = {v.patch.subject: v for v in trial.verdicts}
    assert verdicts["Clean"].state == "moved"
    assert "another name" in verdicts["Clean"].places[0]
    assert verdicts["Conflict"].state == "conflict"
    assert verdicts["Conflict"].places == ("torch/_inductor/scheduler.py (is not there)",)
    assert set(trial.gone) == {"torch/_inductor/config.py", "torch/_inductor/scheduler.py"}
    root = tmp_path / "root"
    shutil.copytree(project.root, root, symlinks=True)
    new_pin.write(trial, root)
    assert "torch/_inductor/settings.py" in pins.load("v2.13.0", root).files


def test_tests_that_stand_behind_those_of_a_missing_patch(project: Project, tmp_path: Path) -> None:
    """What only adds to one of the stack's own files does not need what was added before it."""
    new = release(tmp_path / "new", config=CONFIG.replace("knob_25 = 25", "knob_25 = 0"))
    trial = attempt(project, new)
    assert states(trial)["moved"] == "conflict"
    assert "own" not in [patch.name for patch in trial.stack.patches]
    left_out = {v.patch.subject: v.left_out for v in trial.verdicts if v.left_out}
    assert left_out["Own"] == "needs moved"  # the file is made by the patch that conflicts


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "merged"),
    [
        ("a\nb\n", "a\n", "a\nb\nc\n", "a\nc\n"),
        ("a\nb\n", "a\n", "a\nB\nc\n", None),
        ("a\nb\n", "a\n", "a\nb\nif\n", None),  # no Python
    ],
)
def test_additions_are_set_apart(
    tmp_path: Path, base: str, ours: str, theirs: str, merged: str | None
) -> None:
    from graft.stack.commits import Repo

    repo = tmp_path / "repo"
    repo.mkdir()
    standin.run_git(repo, "init", "-q", "-b", "main")
    standin.run_git(repo, "config", "user.email", "user@localhost")
    for name, text in (("base", base), ("theirs", theirs), ("ours", ours)):
        if name == "ours":
            standin.run_git(repo, "checkout", "-q", "-b", "other", "HEAD^")
        (repo / "f.py").write_text(text)
        standin.run_git(repo, "add", "-A")
        standin.run_git(repo, "commit", "-q", "-m", name)
    grafter = object.__new__(Grafter)
    grafter.repo = Repo(repo, "")
    assert not grafter._pick("main")
    assert grafter._set_apart("f.py") == (merged is not None)
    if merged is not None:
        assert (repo / "f.py").read_text() == merged


def test_what_a_series_without_imports_needs(project: Project, tmp_path: Path) -> None:
    new = release(tmp_path / "new", scheduler=SCHEDULER.replace("return -x", "return 0"))
    trial = attempt(project, new)
    needs = next(v for v in trial.verdicts if v.patch.subject == "Needs")
    assert needs.left_out.startswith("needs conflict")


def test_wrong_releases_are_refused(project: Project, new: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has torch 2.13.0\+cu130, expected 2.14.0") as caught:
        attempt(project, new, "2.14.0")
    assert caught.value.next == "graft pin add 2.13.0 ..."
    with pytest.raises(UsageError, match=r"no torch/version.py"):
        attempt(project, tmp_path, "2.13.0")
    with pytest.raises(UsageError, match="no version of torch"):
        attempt(project, new, "v2.13.0")
    with pytest.raises(UsageError, match="expected three numbers") as caught:
        attempt(project, new, "2.13")
    assert caught.value.next == "graft pin add 2.13.0"
    (new / "torch/version.py").write_text("__version__ = '2.13.0'\n")
    with pytest.raises(GraftError, match="does not name its commit"):
        attempt(project, new)
    old = Release("2.11.0", project.pin.commit, new)
    with pytest.raises(GraftError, match=r"is not that of torch 2.11.0"):
        trials.attempt(project.stack, old, old)


@pytest.mark.parametrize("how", ["not there", "another", "interrupted"])
def test_nothing_is_left_of_an_installation_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "venv" in command:
            (tmp_path / ".graft/pins/2.13.0/lib").mkdir(parents=True)
            return subprocess.CompletedProcess(command, 0, "", "")
        if how == "interrupted":
            raise KeyboardInterrupt
        says = "ERROR: No matching distribution found for torch==2.13.0\n[notice] a new pip\n"
        return subprocess.CompletedProcess(command, int(how == "not there"), "", says)

    def of_python(python: Path, version: str) -> Release:
        raise UsageError("has torch 2.13.1, expected 2.13.0")

    monkeypatch.setattr(releases.subprocess, "run", run)
    monkeypatch.setattr(releases, "of_python", of_python)
    with pytest.raises((GraftError, KeyboardInterrupt)) as caught:
        releases.install("2.13.0", tmp_path, lambda line: None)
    if how == "not there":
        assert "No matching distribution found" in str(caught.value)
    assert not (tmp_path / ".graft").exists()


def test_the_release_of_a_python(project: Project, tmp_path: Path) -> None:
    python = standin.make_base(tmp_path / "base", "d" * 40)
    found = releases.of_python(python, "2.11.0")
    assert found.commit == "d" * 40
    assert "torch/_inductor/scheduler.py" in found.read()


def test_the_page_has_one_section_a_release(project: Project, new: Path, tmp_path: Path) -> None:
    trial, page = attempt(project, new), tmp_path / "page.md"
    page.write_text("# New pins\n\nWords.\n")
    for _ in range(2):
        trial_report.report(trial, page)
    text = page.read_text()
    assert text.startswith("# New pins\n\nWords.\n\n<!-- pin: v2.13.0 -->\n## 2.13.0\n")
    assert f"3 can be written. Stack {project.stack.hash[:12]}.\n" in text
    assert text.count("| conflict | conflict | torch/_inductor/scheduler.py:6 | no |") == 1
    other = attempt(project, release(tmp_path / "same", "2.11.1"), "2.11.1")
    trial_report.report(other, page)
    trial_report.report(trial, page)
    assert page.read_text().count("<!-- pin: ") == 2
    console = Console(record=True, width=120)
    trial_report.show(trial, console)
    assert "7 patches, 2 clean, 2 moved, 2 already there, 1 conflict; 3 can be" in (
        console.export_text().replace("\n", " ")
    )


def test_the_repository_s_page_is_what_the_command_writes() -> None:
    page = pins.ROOT / "docs" / "new-pins.md"
    text = page.read_text()
    assert "<!-- pin: v2.12.1 -->\n## 2.12.1\n" in text
    assert text.count("<!-- pin: ") == text.count("<!-- /pin -->")
    assert len(re.findall(r"^`[0-9a-f]{40}`\. .* Stack [0-9a-f]{12}\.$", text, re.M)) == 1
