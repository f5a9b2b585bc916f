"""A PyTorch of a few lines, with a pin and a repository of patches for it, for the tool's tests."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from graft import stack
from graft.bench import figures
from graft.stack import Stack, pins, refresh, workbench
from graft.stack.git import ENV, blob_id
from graft.stack.pins import Pin
from graft.stack.trees import bases, tree
from graft.stack.trees.tree import Tree

FILES = {
    "torch/__init__.py": "from torch.version import __version__\n",
    "torch/cuda/__init__.py": (
        "def is_available():\n    return True\n\n\n"
        "def device_count():\n    return 2\n\n\n"
        "def get_device_name(device):\n    return 'a GPU'\n"
    ),
    "torch/_dynamo/__init__.py": "",
    "torch/_dynamo/config.py": "cache_size_limit = 8\n",
    "torch/_inductor/__init__.py": "",
    "torch/_inductor/config.py": "".join(f"knob_{n} = {n}\n" for n in range(30)),
    "torch/_inductor/scheduler.py": "def fuse(x):\n    pass\n\n\ndef split(x):\n    return -x\n",
    "torch/_inductor/utils.py": "".join(f"def util_{n}():\n    return {n}\n\n\n" for n in range(9)),
}
UPSTREAM_TEST = "".join(f"def test_{n}():\n    assert {n} == {n}\n\n\n" for n in range(12))
PINNED = ("torch/_inductor/config.py", "torch/_inductor/scheduler.py")


def run_git(repo: Path, *args: str) -> str:
    """Git as a user would call it, who has an identity of their own."""
    env = {**ENV, "GIT_AUTHOR_NAME": "A User", "GIT_COMMITTER_DATE": "2031-05-06T07:08:09Z"}
    done = subprocess.run(
        ["git", *args], cwd=repo, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def make_checkout(path: Path) -> str:
    """A checkout of the stand-in PyTorch; returns its commit."""
    for name, text in {**FILES, "test/inductor/test_upstream.py": UPSTREAM_TEST}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    run_git(path, "init", "-q", "-b", "main")
    run_git(path, "add", "-A")
    run_git(path, "commit", "-q", "-m", "release")
    return run_git(path, "rev-parse", "HEAD").strip()


def make_base(path: Path, commit: str) -> Path:
    """An environment whose torch is the stand-in, with this interpreter's pytest; its python."""
    short = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = path / "lib" / short / "site-packages"
    for name, text in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    (site / "torch" / "version.py").write_text(
        f"__version__ = '2.11.0'\ngit_version = '{commit}'\ncuda = None\n"
    )
    own = [sysconfig.get_path("purelib"), *(p for p in sys.path if p.endswith("-packages"))]
    (site / "own.pth").write_text("\n".join(dict.fromkeys(own)) + "\n")
    (path / "bin").mkdir()
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    (path / "bin" / "python").symlink_to(executable)
    (path / "pyvenv.cfg").write_text(
        f"home = {executable.parent}\ninclude-system-site-packages = false\n"
    )
    return path / "bin" / "python"


@dataclass(frozen=True)
class Project:
    """A repository of patches for the stand-in, with a tree."""

    root: Path
    base: bases.Base
    checkout: Path

    @property
    def prefix(self) -> Path:
        return self.root / "build"

    @property
    def repo(self) -> Path:
        return workbench.folder(self.root)

    @property
    def pin(self) -> Pin:
        return pins.load(root=self.root)

    @property
    def stack(self) -> Stack:
        return stack.load(self.pin, self.root)

    def git(self, *args: str) -> str:
        return run_git(self.repo, *args)

    def build(self) -> Tree:
        return tree.build(self.base, self.stack, self.prefix)

    def edit(self, *files: str, source: Path | None = None) -> workbench.Edit:
        return workbench.edit(self.prefix, root=self.root, files=files, source=source)

    def refresh(self) -> refresh.Refreshed:
        return refresh.refresh(self.prefix, figures, root=self.root)

    def commit(self, message: str, **texts: str) -> None:
        """Commit files of the edit; a path is spelt ``_inductor__config`` for config.py there."""
        for name, text in texts.items():
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def path(self, name: str) -> Path:
        top = "test" if name.startswith("inductor__") else "torch"
        return self.repo / top / f"{name.replace('__', '/')}.py"

    def copy(self, path: str) -> Path:
        found = stack.copy_path(path, self.root)
        assert found is not None
        return found

    def snapshot(self) -> dict[str, tuple[bytes, int]]:
        """Every file that refresh may write, with its bytes and when it was written (ns)."""
        return {
            str(path.relative_to(self.root)): (path.read_bytes(), path.stat().st_mtime_ns)
            for folder in ("pins", "patches", "overlay", "tests")
            for path in sorted((self.root / folder).rglob("*"))
            if path.is_file()
        }

    def run(self, code: str) -> str:
        """What the tree's Python prints."""
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.prefix / "bin" / "python"), "-c", code],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def make_project(root: Path, base: bases.Base, checkout: Path) -> Project:
    """An empty stack, its pin, and a tree of it."""
    files = {name: blob_id(FILES[name].encode()) for name in PINNED}
    (root / "pins").mkdir(parents=True)
    pins.save(Pin(pins.DEFAULT_PIN, "2.11.0", base.git_version, files), root)
    project = Project(root, base, checkout)
    project.build()
    return project
