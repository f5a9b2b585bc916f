"""Small stand-ins for what is large: a torch of a few files, a Python that has it, a repository
with a pin and patches for it. Real git, real interpreters, real folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graft import stack
from graft.places import ROOT
from graft.stack import Stack, pins
from graft.stack.git import FORMAT_PATCH_FLAGS, blob_id, git
from graft.stack.pins import Pin
from graft.stack.trees import bases
from graft.stack.trees.bases import Base

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SITE = f"lib/python3.{sys.version_info[1]}/site-packages"

CONFIG = """\
import os

max_fusion_size = 64


class triton:
    cudagraphs = os.environ.get("STANDIN_CUDAGRAPHS") == "1"
    max_tiles = None
"""
SCHEDULER = "".join(f"def step_{i}():\n    return {i}\n\n\n" for i in range(12))

TORCH: Mapping[str, str] = {
    "torch/__init__.py": "from torch.version import __version__\n",
    "torch/version.py": f"__version__ = '2.11.0+cu130'\ncuda = '13.0'\ngit_version = '{COMMIT}'\n",
    "torch/functional.py": "def einsum():\n    return 'stock'\n",
    "torch/lib/libtorch.so": "not really a library\n",
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "",
    "torch/_inductor/__init__.py": "",
    "torch/_inductor/config.py": CONFIG,
    "torch/_inductor/scheduler.py": SCHEDULER,
    "torch/_inductor/codegen/__init__.py": "",
    "torch/_inductor/codegen/simd.py": "TILES = 2\n",
    "torch-2.11.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n",
    "torch-2.11.0.dist-info/licenses/LICENSE": "Redistribution is permitted.\n",
    "torch-2.11.0.dist-info/licenses/NOTICE": "Parts are of others.\n",
    "torch-2.11.0.dist-info/entry_points.txt": (
        "[console_scripts]\ntorchstandin = torch.functional:einsum\n"
    ),
}
PINNED = ("config", "scheduler", "codegen/simd")

Commit = tuple[str, Mapping[str, str | None]]
"""A message, and the files that it changes (None: removes)."""

CAP = (
    "[inductor] Cap the reads\n\nBecause they cost registers.\n",
    {
        "torch/_inductor/config.py": CONFIG.replace(
            "    max_tiles = None\n", "    max_tiles = None\n    max_reads = 10\n"
        ),
        "torch/_inductor/scheduler.py": SCHEDULER.replace("return 5\n", "return 55\n"),
        "torch/_inductor/reads.py": "def count():\n    return 3\n",
        "test/inductor/test_reads.py": "def test_reads():\n    assert True\n",
    },
)
SECOND = (
    "[inductor] Count differently",
    {
        "torch/_inductor/reads.py": "def count():\n    return 4\n",
        "torch/_inductor/scheduler.py": SCHEDULER.replace("return 5\n", "return 55\n").replace(
            "return 9\n", "return 99\n"
        ),
    },
)


def write_files(folder: Path, files: Mapping[str, str | None]) -> None:
    """Write (or, for None, remove) files below `folder`."""
    for path, text in files.items():
        target = folder / path
        if text is None:
            target.unlink()
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)


def make_python(folder: Path, files: Mapping[str, str] = TORCH) -> Path:
    """A venv at `folder` whose site-packages holds `files`; returns its Python."""
    command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True)
    write_files(folder / SITE, files)
    return folder / "bin" / "python"


def make_pin(files: Mapping[str, str] = TORCH) -> Pin:
    """The pin of the stand-in torch."""
    paths = [f"torch/_inductor/{name}.py" for name in PINNED]
    return Pin("v2.11.0", "2.11.0", COMMIT, {p: blob_id(files[p].encode()) for p in paths})


def make_patches(folder: Path, commits: Sequence[Commit]) -> list[bytes]:
    """The patch files of `commits` on top of the stand-in torch, made by git."""
    upstream = folder / "upstream"
    upstream.mkdir(parents=True)
    git("init", "-q", cwd=upstream)
    write_files(upstream, {p: t for p, t in TORCH.items() if p.startswith("torch/")})
    write_files(upstream, {"test/inductor/test_old.py": "OLD = 1\n"})
    git("add", "-A", cwd=upstream)
    git("commit", "-qm", "base", cwd=upstream)
    for message, files in commits:
        write_files(upstream, files)
        git("add", "-A", cwd=upstream)
        git("commit", "-q", "-F", "-", cwd=upstream, input=message)
    made = []
    for back in range(len(commits), 0, -1):
        revisions = f"HEAD~{back}..HEAD~{back - 1}"
        text = git("format-patch", *FORMAT_PATCH_FLAGS, "--stdout", revisions, cwd=upstream)
        made.append(text.encode("utf-8", "surrogateescape"))
    return made


def make_root(folder: Path, commits: Sequence[Commit] = (), *, tool: bool = False) -> Path:
    """A repository without .git: pin, series, patches and copies; with `tool`, build.sh too."""
    root = folder / "repository"
    (root / "pins").mkdir(parents=True)
    (root / "patches" / "v2.11.0").mkdir(parents=True)
    pins.save(make_pin(), root)
    names = [f"patch-{i}.patch" for i in range(len(commits))]
    for name, text in zip(names, make_patches(folder, commits), strict=True):
        (root / "patches" / "v2.11.0" / name).write_bytes(text)
    (root / "patches" / "v2.11.0" / "series").write_text("".join(f"{n}\n" for n in names))
    series = stack.load(pins.load(root=root), root)
    final = {path: text for _, files in commits for path, text in files.items()}
    for path in series.new_files:
        copy = stack.copy_path(path, root)
        assert copy is not None
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(final[path] or "")
    if tool:
        for name in ("build.sh", "pyproject.toml", "tox.ini"):
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(
            ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    return root


def load_stack(root: Path) -> Stack:
    """The stack of a repository that `make_root` made."""
    return stack.load(pins.load(root=root), root)


@dataclass(frozen=True)
class Bench:
    """A repository with two patches, and a base for it."""

    root: Path
    python: Path
    base: Base
    stack: Stack
    prefix: Path

    @property
    def site(self) -> Path:
        return self.base.torch_dir.parent


def make_bench(folder: Path, commits: Sequence[Commit] = (CAP, SECOND)) -> Bench:
    """A repository, a Python with the stand-in torch, and where a tree may go."""
    root = make_root(folder, commits)
    python = make_python(folder / "base")
    return Bench(root, python, bases.probe(python), load_stack(root), folder / "build")


def snapshot(folder: Path) -> dict[str, tuple[int, bytes | str]]:
    """Every file and link below `folder`, with mode and content, to see that nothing changed."""
    found: dict[str, tuple[int, bytes | str]] = {}
    for here, folders, names in os.walk(folder):
        folders[:] = [each for each in folders if each != "__pycache__"]
        for name in names + folders:
            path = Path(here) / name
            key, mode = str(path.relative_to(folder)), path.lstat().st_mode
            if path.is_symlink():
                found[key] = (mode, os.readlink(path))
            elif path.is_file():
                found[key] = (mode, path.read_bytes())
            else:
                found[key] = (mode, b"")
    return found


def run(*command: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command with `env` added; returns what it printed and its exit code."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
