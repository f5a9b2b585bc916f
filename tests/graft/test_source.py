"""A PyTorch checkout as a base: its Python with the wheel's binaries, or its own build."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tinytorch import (
    CAP,
    COMMIT,
    SECOND,
    TORCH,
    Bench,
    load_stack,
    make_bench,
    make_root,
    run,
    snapshot,
    write_files,
)

from graft import stack
from graft.errors import GraftError, UsageError
from graft.stack import Stack, pins
from graft.stack.git import git
from graft.stack.trees import compiled, source, tree

TEST_CHANGE = ("[inductor] Expect another", {"test/inductor/test_old.py": "OLD = 2\n"})

# A build like PyTorch's: `pip install --no-build-isolation -v -e .` calls it, and it leaves its
# binaries in torch/. It records how it was called.
BACKEND = """\
import json, os, pathlib, sys, zipfile

def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    here = pathlib.Path.cwd()
    call = {"cwd": str(here), "python": sys.executable, "prefix": sys.prefix}
    with open(os.environ["STANDIN_BUILD_LOG"], "a") as log:
        log.write(json.dumps(call) + chr(10))
    if os.environ.get("STANDIN_BUILD_FAILS"):
        sys.exit("ninja: build stopped")
    (here / "torch/_C.so").write_text("compiled")
    version = "__version__ = '2.11.0a0+git'; git_version = 'x'; cuda = None"
    (here / "torch/version.py").write_text(version)
    name = "torch-2.11.0-py3-none-any.whl"
    info = "torch-2.11.0.dist-info"
    files = {
        "__editable__torch.pth": [str(here)],
        f"{info}/METADATA": ["Metadata-Version: 2.1", "Name: torch", "Version: 2.11.0"],
        f"{info}/WHEEL": ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any"],
        f"{info}/entry_points.txt": ["[console_scripts]", "compiled = torch.functional:einsum"],
        f"{info}/RECORD": [],
    }
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        for path, lines in files.items():
            wheel.writestr(path, "".join(line + chr(10) for line in lines))
    return name

def get_requires_for_build_editable(config_settings=None):
    return []
"""
PROJECT = """\
[build-system]
requires = ["cmake-which-is-not-there"]
build-backend = "standin_backend"
backend-path = ["."]
[project]
name = "torch"
version = "2.11.0"
"""


def commit(checkout: Path, message: str) -> str:
    git("add", "-A", cwd=checkout)
    git("commit", "-qm", message, cwd=checkout)
    return git("rev-parse", "HEAD", cwd=checkout).strip()


def make_checkout(folder: Path) -> Path:
    """A PyTorch checkout: the Python of the stand-in, no binaries, a build that records."""
    checkout = folder / "pytorch"
    checkout.mkdir()
    git("init", "-q", "-b", "main", cwd=checkout)
    left_out = ("torch/version.py", "torch/lib/libtorch.so")
    files = {p: t for p, t in TORCH.items() if p.startswith("torch/") and p not in left_out}
    write_files(checkout, files)
    write_files(
        checkout,
        {
            "torch/csrc/Module.cpp": "int main() {}\n",
            "torch/untouched/__init__.py": "here = 'checkout'\n",
            "test/inductor/test_old.py": "OLD = 1\n",
            "pyproject.toml": PROJECT,
            "standin_backend.py": BACKEND,
            ".gitignore": "*.so\nversion.py\n*.egg-info\n__pycache__\n",
        },
    )
    commit(checkout, "release")
    return checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return make_checkout(tmp_path)


def at_head(bench: Bench, checkout: Path) -> Bench:
    """`bench` pinned to the commit of the checkout, as the wheel's version.py then says too."""
    head = git("rev-parse", "HEAD", cwd=checkout).strip()
    pin = replace(bench.stack.pin, commit=head)
    return replace(
        bench,
        stack=Stack(pin, bench.stack.patches),
        base=replace(bench.base, git_version=head),
    )


@pytest.fixture
def bench(tmp_path: Path, checkout: Path) -> Bench:
    return at_head(make_bench(tmp_path, (CAP, SECOND, TEST_CHANGE)), checkout)


# --- its Python, the wheel's binaries ------------------------------------------------------------


def test_python_of_the_checkout_binaries_of_the_wheel(bench: Bench, checkout: Path) -> None:
    before = (snapshot(checkout), snapshot(bench.site))
    made = tree.build(bench.base.with_source(checkout), bench.stack, bench.prefix)
    torch = made.torch_dir
    for path in ("functional.py", "nn/functional.py", "_inductor/codegen/simd.py"):
        assert (torch / path).resolve() == checkout / "torch" / path
    for path in ("version.py", "lib/libtorch.so"):
        assert (torch / path).resolve() == bench.site / "torch" / path
    assert (torch / "_inductor/reads.py").read_text() == SECOND[1]["torch/_inductor/reads.py"]
    assert not (torch / "csrc").exists()
    code = "import torch.untouched as u; import torch._inductor.config as c; "
    code += "print(u.here, c.triton.max_reads)"
    done = run(made.python, "-c", code)
    assert done.stdout == "checkout 10\n", done.stderr
    tree.verify(made, bench.stack)
    assert (snapshot(checkout), snapshot(bench.site)) == before
    (checkout / "torch/functional.py").write_text("mine = 1\n")
    with pytest.raises(GraftError, match=r"changes of its own in torch/functional\.py"):
        tree.verify(made, bench.stack)
    (checkout / "torch/functional.py").write_text(TORCH["torch/functional.py"])
    (torch / "untouched/__init__.py").unlink()
    with pytest.raises(GraftError, match="untouched/__init__.py is not the link"):
        tree.verify(made, bench.stack)


def test_checkouts_that_are_refused(bench: Bench, checkout: Path, tmp_path: Path) -> None:
    base = bench.base.with_source(checkout)
    (checkout / "torch/functional.py").write_text("mine = 1\n")
    (checkout / "test/inductor/test_old.py").write_text("mine = 1\n")
    with pytest.raises(GraftError, match=r"changes of its own in torch/functional\.py$"):
        tree.build(base, bench.stack, bench.prefix)
    commit(checkout, "mine")
    with pytest.raises(GraftError, match=f"is at .*, and v2.11.0 is {bench.stack.pin.commit[:12]}"):
        tree.build(base, bench.stack, bench.prefix)
    with pytest.raises(UsageError, match="is not a PyTorch checkout"):
        source.check(tmp_path, bench.stack.pin)
    assert not bench.prefix.exists()


# --- its own build -------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Path:
    path = tmp_path / "build.log"
    monkeypatch.setenv("STANDIN_BUILD_LOG", str(path))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    import pip

    (bench.site / "pip").symlink_to(Path(pip.__file__).parent)
    return path


def calls(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def state_of(checkout: Path) -> tuple[object, ...]:
    return (
        snapshot(checkout / "torch"),
        git("symbolic-ref", "HEAD", cwd=checkout),
        git("rev-parse", "HEAD", cwd=checkout),
        git("status", "--porcelain", cwd=checkout),
    )


def test_the_stack_becomes_commits_and_the_checkouts_build_is_called(
    bench: Bench, checkout: Path, log: Path
) -> None:
    before, base_before = state_of(checkout), snapshot(bench.site)
    made = compiled.build(bench.base, bench.stack, checkout, bench.prefix)
    folder = compiled.worktree_of(bench.prefix)
    [call] = calls(log)
    assert call["cwd"] == str(folder)
    assert str(call["python"]).startswith(str(bench.prefix.parent / ".graft/build.new"))
    assert state_of(checkout) == before
    assert snapshot(bench.site) == base_before
    branch = source.branch_name(bench.stack)
    subjects = git("log", "--format=%s", f"{bench.stack.pin.commit}..{branch}", cwd=checkout)
    assert subjects.splitlines() == [patch.subject for patch in reversed(bench.stack.patches)]
    assert git("show", f"{branch}:test/inductor/test_old.py", cwd=checkout) == "OLD = 2\n"
    assert made.compiled
    tree.verify(made, bench.stack)
    assert tree.load(bench.prefix) == made
    code = "import torch, torch._inductor.reads as r; print(torch.__version__, r.count())"
    assert run(made.python, "-c", code).stdout == "2.11.0a0+git 4\n"
    assert run(made.prefix / "bin/compiled").stderr == "stock\n"
    assert (
        run(bench.python, "-c", "import torch; print(torch.__version__)").stdout == "2.11.0+cu130\n"
    )
    (folder / "torch/_inductor/reads.py").write_text("")
    with pytest.raises(GraftError, match="reads.py differs"):
        tree.verify(made, bench.stack)


def test_the_next_stack_is_built_where_the_last_one_was(
    bench: Bench, checkout: Path, log: Path
) -> None:
    first = Stack(bench.stack.pin, bench.stack.patches[:1])
    compiled.build(bench.base, first, checkout, bench.prefix)
    folder = compiled.worktree_of(bench.prefix)
    (folder / "torch/object.so").write_text("slow to make")
    made = compiled.build(bench.base, bench.stack, checkout, bench.prefix)
    assert (folder / "torch/object.so").exists()
    tree.verify(made, bench.stack)
    compiled.build(bench.base, bench.stack, checkout, bench.prefix)
    assert len(calls(log)) == 3
    branches = git("branch", "--format=%(refname:short)", cwd=checkout).split()
    assert set(branches) == {"main", source.branch_name(first), source.branch_name(bench.stack)}


def test_a_failed_build_leaves_the_earlier_tree(
    bench: Bench, checkout: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tree.build(bench.base, bench.stack, bench.prefix)
    monkeypatch.setenv("STANDIN_BUILD_FAILS", "1")
    with pytest.raises(GraftError, match="PyTorch's own build failed in") as caught:
        compiled.build(bench.base, bench.stack, checkout, bench.prefix)
    assert caught.value.next
    assert tree.load(bench.prefix) == earlier
    tree.verify(earlier, bench.stack)
    assert not (bench.prefix.parent / ".graft/build.new").exists()
    monkeypatch.delenv("STANDIN_BUILD_FAILS")
    assert compiled.build(bench.base, bench.stack, checkout, bench.prefix).compiled


def test_a_stack_that_a_checkout_cannot_take(
    bench: Bench, checkout: Path, log: Path, tmp_path: Path
) -> None:
    other = make_root(tmp_path / "other", [("x", {"test/inductor/test_old.py": "OLD = 3\n"})])
    patch = load_stack(other).patches[0]
    patch.path.write_bytes(patch.text.replace(b"-OLD = 1\n", b"-OLD = 7\n"))
    wrong = replace(patch, text=patch.path.read_bytes())
    before = state_of(checkout)
    with pytest.raises(GraftError, match="patch-0.patch does not apply to"):
        compiled.build(bench.base, Stack(bench.stack.pin, (wrong,)), checkout, bench.prefix)
    assert state_of(checkout) == before
    assert not bench.prefix.exists()
    assert not log.exists()
    assert compiled.build(bench.base, bench.stack, checkout, bench.prefix).compiled


def test_worktrees_that_are_refused(bench: Bench, checkout: Path, log: Path) -> None:
    folder = compiled.worktree_of(bench.prefix)
    folder.mkdir(parents=True)
    (folder / "mine").write_text("")
    with pytest.raises(GraftError, match="is not a worktree of"):
        compiled.build(bench.base, bench.stack, checkout, bench.prefix)
    (folder / "mine").unlink()
    folder.rmdir()
    first = Stack(bench.stack.pin, bench.stack.patches[:1])
    compiled.build(bench.base, first, checkout, bench.prefix)
    (folder / "torch/functional.py").write_text("mine = 1\n")
    with pytest.raises(GraftError, match=r"has changes of its own in torch/functional\.py"):
        compiled.build(bench.base, bench.stack, checkout, bench.prefix)
    assert (folder / "torch/functional.py").read_text() == "mine = 1\n"
    unknown = Stack(replace(bench.stack.pin, commit="f" * 40), bench.stack.patches)
    with pytest.raises(GraftError, match="does not have v2.11.0"):
        compiled.build(bench.base, unknown, checkout, bench.prefix)


def test_submodules_come_from_the_checkouts_own_clones(
    tmp_path: Path, bench: Bench, checkout: Path, log: Path
) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for repo, name in ((inner, "inner.txt"), (outer, "outer.txt")):
        repo.mkdir()
        git("init", "-q", cwd=repo)
        write_files(repo, {name: name})
        commit(repo, name)
    allow = ("-c", "protocol.file.allow=always", "submodule", "add", "-q")
    git(*allow, str(inner), "deps/inner", cwd=outer)
    commit(outer, "with inner")
    git(*allow, str(outer), "third_party/outer", cwd=checkout)
    update = ("-c", "protocol.file.allow=always", "submodule", "update", "-q", "--init")
    git(*update, "--recursive", cwd=checkout)
    commit(checkout, "release with submodules")
    moved = at_head(bench, checkout)
    inner.rename(tmp_path / "gone-1")  # nothing is fetched
    outer.rename(tmp_path / "gone-2")
    compiled.build(moved.base, moved.stack, checkout, moved.prefix)
    folder = compiled.worktree_of(moved.prefix)
    assert (folder / "third_party/outer/outer.txt").read_text() == "outer.txt"
    assert (folder / "third_party/outer/deps/inner/inner.txt").read_text() == "inner.txt"
    assert git("status", "--porcelain", "-uno", cwd=folder) == ""
    assert git("status", "--porcelain", "-uno", cwd=checkout) == ""


def test_through_build_sh(bench: Bench, checkout: Path, log: Path, tmp_path: Path) -> None:
    root = make_root(tmp_path / "whole", (CAP, SECOND, TEST_CHANGE), tool=True)
    pin = bench.stack.pin
    pins.save(pin, root)
    version = TORCH["torch/version.py"].replace(COMMIT, pin.commit)
    (bench.site / "torch/version.py").write_text(version)
    common = ("--python", bench.python, "--offline", "--no-explain", "--source", checkout)
    done = run(root / "build.sh", *common)
    assert done.returncode == 0, done.stderr
    assert f"Python files of {checkout}" in done.stdout
    again = run(root / "build.sh", *common)
    assert "nothing to do" in again.stdout
    done = run(root / "build.sh", *common, "--compile")
    assert done.returncode == 0, done.stderr
    assert "PyTorch's own build of" in done.stdout
    assert tree.load(root / "build").compiled
    assert stack.load(pin, root).hash == tree.load(root / "build").stack_hash
