"""./build.sh as a user runs it, on copies of this repository without .git and small torches."""

from __future__ import annotations

import configparser
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from tinytorch import (
    CAP,
    SCHEDULER,
    SECOND,
    SITE,
    TORCH,
    load_stack,
    make_python,
    make_root,
    run,
    snapshot,
)

from graft import bootstrap
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack.trees import requirements, tree
from graft.testing import suite


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_root(tmp_path, (CAP, SECOND), tool=True)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_python(tmp_path / "base")


def build(root: Path, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
    return run(root / "build.sh", *args, **env)


def refused(done: subprocess.CompletedProcess[str], code: int = 1) -> str:
    """The error, which has to be one with a next command, and the exit code."""
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    error, _, following = done.stderr.partition("\nnext: ")
    assert error.startswith("error: ")
    assert following.strip()
    return error


def test_offline_from_an_unpacked_archive(root: Path, python: Path, tmp_path: Path) -> None:
    before = snapshot(tmp_path / "base")
    began = time.monotonic()
    done = build(root, "--python", python, "--offline", "--no-explain")
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert took_s < 20
    assert re.search(r"^tree +\S+/build: made and verified in", done.stdout, re.MULTILINE)
    assert f"base   torch 2.11.0+cu130 (CUDA 13.0), Python {sys.version.split()[0]}" in done.stdout
    code = "from torch._inductor import reads; print(reads.count())"
    assert run(root / "build/bin/python", "-c", code).stdout == "4\n"
    assert snapshot(tmp_path / "base") == before
    assert not (root / ".venv").exists()

    again = build(root, "--python", python, "--offline", "--no-explain")
    assert again.returncode == 0
    assert "up to date and verified; nothing to do" in again.stdout
    stamp = (root / "build/graft.json").stat().st_mtime_ns
    assert stamp == (root / "build/graft.json").stat().st_mtime_ns

    (root / "build/lib" / SITE.split("/")[1] / "site-packages/torch/_inductor/reads.py").unlink()
    mended = build(root, "--python", python, "--offline", "--no-explain")
    assert "made and verified" in mended.stdout


def test_another_series_is_built_anew(root: Path, python: Path) -> None:
    build(root, "--python", python, "--offline", "--no-explain")
    folder = root / "patches/v2.11.0"
    (folder / "series").write_text("patch-0.patch\n")
    (folder / "patch-1.patch").unlink()
    text = CAP[1]["torch/_inductor/reads.py"] or ""
    (root / "overlay/torch/_inductor/reads.py").write_text(text)
    done = build(root, "--python", python, "--offline", "--no-explain")
    assert "made and verified" in done.stdout
    assert tree.load(root / "build").stack_hash == load_stack(root).hash


def test_a_note_where_the_commands_cannot_run(root: Path, python: Path) -> None:
    done = build(root, "--python", python, "--offline")
    assert done.returncode == 0, done.stderr
    assert "note: graft's own commands need click and rich" in done.stdout
    assert "--wheels DIR" in done.stdout


def test_a_failing_explain_is_reported(root: Path, tmp_path: Path) -> None:
    modules = {"click/__init__.py": "raise SystemExit(7)\n", "rich/__init__.py": ""}
    python = make_python(tmp_path / "other", {**TORCH, **modules})
    done = build(root, "--python", python, "--offline")
    says = refused(done)
    assert "graft explain scaled_residual failed (exit code 7)" in says
    assert "made and verified" in done.stdout
    tree.verify(tree.load(root / "build"), load_stack(root))


def test_other_prefixes(root: Path, python: Path, tmp_path: Path) -> None:
    where = tmp_path / "some where" / "tree"
    where.parent.mkdir()
    done = build(root, "--python", python, "--offline", "--no-explain", "--prefix", where)
    assert done.returncode == 0, done.stderr
    assert not (root / "build").exists()
    assert run(where / "bin/python", "-c", "import torch._inductor.reads").returncode == 0
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("")
    says = refused(build(root, "--python", python, "--offline", "--prefix", taken), 2)
    assert "is not a patched tree" in says


def second_pin(root: Path) -> None:
    """Give the repository a second pin, v2.12.1: of the same files, without patches."""
    text = (root / "pins/v2.11.0.toml").read_text().replace("2.11.0", "2.12.1")
    (root / "pins/v2.12.1.toml").write_text(text)


def test_each_pin_has_a_tree_of_its_own(root: Path, python: Path, tmp_path: Path) -> None:
    second_pin(root)
    torch = {**TORCH, "torch/version.py": TORCH["torch/version.py"].replace("2.11.0", "2.12.1")}
    other = make_python(tmp_path / "other", torch)
    rest = ("--offline", "--no-explain")
    assert build(root, "--python", python, *rest).returncode == 0
    done = build(root, "--pin", "v2.12.1", "--python", other, *rest)
    assert done.returncode == 0, done.stderr
    assert "stack  v2.12.1, 0 patches" in done.stdout
    assert {p: tree.load(root / p).pin for p in ("build", "build-v2.12.1")} == {
        "build": "v2.11.0",
        "build-v2.12.1": "v2.12.1",
    }
    asked = ("--pin", "v2.12.1", "--prefix", "build", "--python", other, *rest)
    says = refused(build(root, *asked), 2)
    assert "build is a tree of v2.11.0, and v2.12.1 is asked for" in says
    says = refused(build(root, "--pin", "v2.12.1", "--python", python, *rest))
    assert "has torch 2.11.0+cu130, and v2.12.1 is for torch 2.12.1" in says


def test_each_pin_has_an_environment_of_its_own() -> None:
    assert bootstrap.venv("v2.11.0") == ROOT / ".venv"
    assert bootstrap.venv("v2.12.1") == ROOT / ".venv-v2.12.1"


def test_a_read_only_checkout(root: Path, python: Path, tmp_path: Path) -> None:
    if os.getuid() == 0:
        # Root may write anywhere; a folder that is a file refuses it as well.
        (root / ".graft").write_text("")
    else:
        root.chmod(0o555)
    says = refused(build(root, "--python", python, "--offline"))
    assert str(root) in says
    elsewhere = build(
        root, "--python", python, "--offline", "--no-explain", "--prefix", tmp_path / "elsewhere"
    )
    assert elsewhere.returncode == 0, elsewhere.stderr
    root.chmod(0o755)


def test_bad_bases(root: Path, python: Path, tmp_path: Path) -> None:
    missing = build(root, "--python", tmp_path / "nowhere", "--offline")
    assert "cannot run" in refused(missing, 2)
    empty = make_python(tmp_path / "empty", {})
    assert "has no torch" in refused(build(root, "--python", empty, "--offline"))
    version = TORCH["torch/version.py"]
    old = make_python(
        tmp_path / "old", {**TORCH, "torch/version.py": version.replace("2.11.0", "2.12.1")}
    )
    says = refused(build(root, "--python", old, "--offline"))
    assert "has torch 2.12.1+cu130, and v2.11.0 is for torch 2.11.0" in says
    site = tmp_path / "base" / SITE
    (site / "torch/_inductor/scheduler.py").write_text(SCHEDULER + "# mine\n")
    says = refused(build(root, "--python", python, "--offline"))
    assert "torch/_inductor/scheduler.py differs" in says
    assert "config.py" not in says
    assert not (root / "build").exists()


def test_a_python_that_is_too_old(root: Path, tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text(
        "#!/bin/sh\n"
        'case "$2" in *"not (3, 11)"*) exit 1;; esac\n'
        """echo 'graft-probe:{"python": "/usr/bin/python3", "python_version": "3.8.18"}'\n"""
    )
    old.chmod(0o755)
    says = refused(build(root, "--python", old, "--offline"))
    assert "Python 3.8.18; expected 3.11 to 3.14" in says
    only = tmp_path / "only-old"
    only.mkdir()
    (only / "python3").write_text("#!/bin/sh\n[ $1 = -V ] && echo Python 3.8.18\nexit 1\n")
    (only / "python3").chmod(0o755)
    for name in ("bash", "dirname", "env"):
        (only / name).symlink_to(shutil.which(name) or name)
    says = refused(build(root, "--offline", PATH=str(only)))
    assert "needs Python 3.11 to 3.14; python3 here is: Python 3.8.18" in says


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--pin", "v2.10.0"], "there is no pin v2.10.0; did you mean v2.11.0"),
        (["--compile"], "--compile needs the checkout"),
        (["--wheels", "/nowhere"], "there is no folder /nowhere"),
        (["--prefix"], "expected one argument"),
    ],
)
def test_wrong_use(root: Path, args: list[str], says: str) -> None:
    assert says in refused(build(root, *args), 2)


def test_bad_series_make_nothing(root: Path, python: Path) -> None:
    series = root / "patches/v2.11.0/series"
    series.write_text("patch-0.patch\npatch-1.patch\npatch-2.patch\n")
    says = refused(build(root, "--python", python, "--offline"))
    assert "names patch-2.patch, and there is no patches/v2.11.0/patch-2.patch" in says
    series.write_text("patch-0.patch\npatch-1.patch\n")
    (root / "overlay/torch/_inductor/stray.py").write_text("")
    says = refused(build(root, "--python", python, "--offline"))
    assert "overlay/torch/_inductor/stray.py is made by no patch" in says
    assert not (root / "build").exists()


def make_wheel(folder: Path, name: str, version: str) -> None:
    """A wheel of a package of one empty module, with a command."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "def main():\n    print('from the wheel')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = "".join(f"{path},,\n" for path in files) + f"{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def test_wheels_go_into_the_tree_only(root: Path, python: Path, tmp_path: Path) -> None:
    pip = importlib.util.find_spec("pip")
    assert pip is not None
    assert pip.origin is not None
    shutil.copytree(Path(pip.origin).parent, tmp_path / "base" / SITE / "pip")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    args = ("--python", python, "--offline", "--no-explain", "--wheels", wheels)
    assert "has no wheel of click" in refused(build(root, *args), 2)
    make_wheel(wheels, "unidiff", "1.9")
    before = snapshot(tmp_path / "base")
    done = build(root, *args)
    assert done.returncode == 0, done.stderr
    assert run(root / "build/bin/unidiff").stdout == "from the wheel\n"
    assert snapshot(tmp_path / "base") == before
    assert "nothing to do" in build(root, *args).stdout
    make_wheel(wheels, "hypothesis", "6.900")
    assert "made and verified" in build(root, *args).stdout
    assert run(root / "build/bin/hypothesis").stdout == "from the wheel\n"
    assert "nothing to do" in build(root, "test").stdout  # the tests keep what it was made with


def test_requirements_are_those_of_pyproject(tmp_path: Path) -> None:
    assert {"click", "rich", "tox", "pytest-xdist", "ghstack"} <= set(requirements.names())
    (tmp_path / "Pytest_XDist-3.6-py3-none-any.whl").write_text("")
    (tmp_path / "other-1.0-py3-none-any.whl").write_text("")
    assert [each.partition(">")[0] for each in requirements.with_wheel(tmp_path)] == [
        "pytest-xdist"
    ]


# --- .venv, with a pip that records instead of downloading ---------------------------------------


FAKE_PIP = """
import json, os, pathlib, sys
log = pathlib.Path(os.environ["STANDIN_PIP_LOG"])
log.write_text((log.read_text() if log.exists() else "") + json.dumps(sys.argv[1:]) + "\\n")
if os.environ.get("STANDIN_PIP_FAILS"):
    sys.exit("ERROR: Could not find a version that satisfies the requirement torch==2.11.0")
site = pathlib.Path(sys.prefix) / {site!r}
for path, text in json.loads(pathlib.Path({torch!r}).read_text()).items():
    (site / path).parent.mkdir(parents=True, exist_ok=True)
    (site / path).write_text(text)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A Python whose venvs come with that pip (through a stand-in for ensurepip)."""
    (tmp_path / "torch.json").write_text(json.dumps(dict(TORCH)))
    pip = FAKE_PIP.format(site=SITE, torch=str(tmp_path / "torch.json"))
    folder = tmp_path / "driver-modules"
    folder.mkdir()
    (folder / "fake_pip.py").write_text(pip)
    shim = tmp_path / "driver"
    real = sys.executable
    # `-m venv DIR` makes a venv whose pip is the recording one; all else is the real Python.
    shim.write_text(
        "#!/bin/sh\n"
        'if [ "$1 $2" = "-m venv" ]; then\n'
        f'  for last; do :; done; {real} -m venv --without-pip "$last" || exit\n'
        f'  mkdir -p "$last/{SITE}/pip"; cp {folder}/fake_pip.py "$last/{SITE}/pip/__main__.py"\n'
        f'  touch "$last/{SITE}/pip/__init__.py"; exit 0\n'
        "fi\n"
        f'exec {real} "$@"\n'
    )
    shim.chmod(0o755)
    return shim


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_it_makes_venv_once(root: Path, driver: Path, tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    args = ("--python", driver, "--no-explain")
    failed = build(root, *args, STANDIN_PIP_LOG=str(log), STANDIN_PIP_FAILS="1")
    says = refused(failed)
    assert "pip could not install torch==2.11.0" in says
    assert "Could not find a version" in says
    assert "--offline" in failed.stderr
    assert not (root / "build").exists()

    done = build(root, *args, STANDIN_PIP_LOG=str(log))
    assert done.returncode == 0, done.stderr
    assert "made and verified" in done.stdout
    assert len(calls(log)) == 2
    assert calls(log)[0] == calls(log)[1]
    assert calls(log)[1][0] == "install"
    assert "torch==2.11.0" in calls(log)[1]
    assert set(requirements.load(root)) <= set(calls(log)[1])
    assert (root / ".venv/bin/graft").exists()

    again = build(root, "--no-explain", STANDIN_PIP_LOG=str(log))
    assert "nothing to do" in again.stdout, again.stderr
    assert len(calls(log)) == 2

    offline = build(root, "--offline", "--no-explain")
    assert "nothing to do" in offline.stdout

    (root / ".venv" / bootstrap.STAMP).unlink()  # as an interrupted install leaves it
    assert build(root, "--no-explain", STANDIN_PIP_LOG=str(log)).returncode == 0
    assert len(calls(log)) == 3


def test_no_space_and_no_pip(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / "venv")
    monkeypatch.setattr(bootstrap, "INSTALL_BYTES", 2**60)
    with pytest.raises(GraftError, match=r"need \d+ GB in .* GB are free"):
        bootstrap._pip(sys.executable, tmp_path / "venv/bin/python", ["torch==2.11.0"])
    monkeypatch.setattr(bootstrap, "INSTALL_BYTES", 0)
    monkeypatch.setattr(bootstrap, "_has", lambda python, module: False)
    with pytest.raises(GraftError, match="has neither ensurepip nor pip") as caught:
        bootstrap._pip(sys.executable, tmp_path / "venv/bin/python", ["torch==2.11.0"])
    assert caught.value.next is not None
    assert "python3-venv" in caught.value.next
    assert not (tmp_path / "venv").exists()


def test_another_python_for_a_venv_that_is_there(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "VENV", python.parent.parent)
    other = tmp_path / "other-python"
    other.write_text(
        "#!/bin/sh\n"
        """echo 'graft-probe:{"python": "/o", "python_version": "3.12.1", "executable": "/o"}'\n"""
    )
    other.chmod(0o755)
    from graft.stack import pins

    with pytest.raises(UsageError, match="is of .*, and --python is /o"):
        bootstrap.install(pins.load(), str(other))


# --- test ----------------------------------------------------------------------------------------


RECORDER = (
    "import json, os, sys\nprint('called:' + json.dumps([__name__, os.getcwd(), sys.argv[1:]]))\n"
)


def test_the_tests_run_through_tox_or_pytest(root: Path, tmp_path: Path) -> None:
    modules = {"pytest/__init__.py": "", "pytest/__main__.py": RECORDER}
    python = make_python(tmp_path / "plain", {**TORCH, **modules})
    build(root, "--python", python, "--offline", "--no-explain")
    done = build(root, "test")
    assert done.returncode == 0, done.stderr
    assert "note: the base has no tox" in done.stdout
    for args, wanted in (
        ([], [["tests/graft"], ["tests/inductor"]]),
        (["-e", "gpu"], [["tests/inductor"]]),
        (["--", "-x"], [["-x", "tests/graft"], ["-x", "tests/inductor"]]),
        (["-e", "cpu", "--", "tests/inductor", "-k", "y"], [["-k", "y", "tests/inductor"]]),
    ):
        done = build(root, "test", *args)
        called = re.findall(r"^called:(.*)$", done.stdout, re.MULTILINE)
        assert [json.loads(call)[1:] for call in called] == [[str(root), each] for each in wanted]
    assert "invalid choice" in refused(build(root, "test", "-e", "nonsense"), 2)

    tox = {"tox/__init__.py": "", "tox/__main__.py": RECORDER}
    with_tox = make_python(tmp_path / "with-tox", {**TORCH, **modules, **tox})
    build(root, "--python", with_tox, "--offline", "--no-explain")
    done = build(root, "test", "-e", "lint", "--", "x")
    assert json.loads(done.stdout.partition("called:")[2])[2] == [
        "-c",
        str(root / "tox.ini"),
        "-e",
        "lint",
        "--",
        "x",
    ]
    assert "nothing to do" in done.stdout


def test_without_pytest_it_says_so(root: Path, python: Path) -> None:
    build(root, "--python", python, "--offline", "--no-explain")
    assert "has neither tox nor pytest" in refused(build(root, "test"))


def test_the_exit_code_of_the_tests_is_ours(root: Path, tmp_path: Path) -> None:
    modules = {"pytest/__init__.py": "", "pytest/__main__.py": "raise SystemExit(5)\n"}
    python = make_python(tmp_path / "plain", {**TORCH, **modules})
    build(root, "--python", python, "--offline", "--no-explain")
    assert build(root, "test").returncode == 5


def test_ci_runs_the_tests() -> None:
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert './build.sh test "$@"' in (ROOT / ".ci/run").read_text()


def test_what_takes_time_and_tests_nothing_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the one who runs the tests says otherwise."""
    seen: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **how: object) -> object:
        seen.append(env)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(suite.subprocess, "run", run)
    monkeypatch.delenv("TORCHINDUCTOR_VEC_ISA_OK", raising=False)
    assert suite.main(["gpu", "-q"]) == 0
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    assert suite.main(["gpu", "-q"]) == 0
    assert [env["TORCHINDUCTOR_VEC_ISA_OK"] for env in seen] == ["0", "1"]
    assert all(env["PATH"] == os.environ["PATH"] for env in seen)


def test_paths_are_sorted_into_suites() -> None:
    paths = ["tests/graft/test_pins.py::test_x", "tests/inductor", "src"]
    both = suite.commands("cpu", [*paths, "-q"], ROOT, parallel=False)
    assert both == [["-q", paths[0], "src"], ["-q", "tests/inductor"]]
    [gpu] = suite.commands("gpu", [], ROOT, parallel=True)
    assert gpu == ["tests/inductor"]  # one GPU, one process
    graft, inductor = suite.commands("cpu", [], ROOT, parallel=True)
    assert (graft[0], graft[2:]) == ("-n", ["--dist", "loadfile", "tests/graft"])
    assert (inductor[0], inductor[2:]) == ("-n", ["--dist", "loadscope", "tests/inductor"])


def test_tox_installs_nothing() -> None:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    assert parser["tox"]["no_package"] == "true"
    assert parser["testenv"]["skip_install"] == "true"
    for variable in ("CUDA_*", "TORCH*", "TRITON*", "CC"):
        assert variable in parser["testenv"]["pass_env"].split()
    environments = [name for name in parser.sections() if name.startswith("testenv:")]
    assert environments == ["testenv:cpu", "testenv:gpu", "testenv:lint"]
    for name in environments:
        assert "deps" not in parser[name]
        for command in parser[name]["commands"].strip().splitlines():
            assert command.startswith("{env:GRAFT_PREFIX:{tox_root}/build}/bin/python -")
