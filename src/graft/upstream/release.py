"""A release of PyTorch as files: a wheel's folder, a Python that has it, or one that is made."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack.trees import bases

PACKAGE = "torch/_inductor"


@dataclass(frozen=True)
class Release:
    """The files of a release: `folder` has ``torch/``; `commit` is what it was built from."""

    version: str
    commit: str
    folder: Path

    def read(self, extra: Collection[str] = ()) -> dict[str, bytes]:
        """Every Python file of Inductor, and those of `extra` that there are."""
        paths = {
            str(path.relative_to(self.folder))
            for path in (self.folder / PACKAGE).rglob("*.py")
            if path.is_file()
        }
        paths |= {path for path in extra if (self.folder / path).is_file()}
        return {path: (self.folder / path).read_bytes() for path in sorted(paths)}


def of_folder(folder: Path, version: str) -> Release:
    """The release whose files lie in `folder`, as a wheel has them.

    Raises UsageError for a folder without them, or of another version.
    """
    file = folder / "torch" / "version.py"
    if not file.is_file() or not (folder / PACKAGE).is_dir():
        raise UsageError(
            f"{folder} has no torch/version.py and {PACKAGE}; expected the files of a torch wheel",
            f"unzip a wheel of torch {version} there, or --python PY",
        )
    text = file.read_text("utf-8")
    named = dict(re.findall(r"^(\w+)[^=\n]*= ['\"]([^'\"\n]*)", text, re.M))
    return _checked(
        Release(named.get("__version__", ""), named.get("git_version", ""), folder), version
    )


def of_python(python: Path, version: str) -> Release:
    """The release that `python` has. Raises as `bases.probe`, and for another version."""
    base = bases.probe(python)
    return _checked(Release(base.version, base.git_version, base.torch_dir.parent), version)


def install(version: str, root: Path = ROOT, say: Callable[[str], None] = print) -> Release:
    """The release, installed without what it depends on into a venv of its own, which is kept.

    Raises GraftError where it cannot be installed, or is another release then. Nothing is left of
    an installation that did not come to its end, Ctrl-C among the reasons.
    """
    folder = root / ".graft" / "pins" / version
    python = folder / "bin" / "python"
    if (folder / "done").exists():
        return of_python(python, version)
    say(f"installing torch {version} into {folder}")
    try:
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-q", "--no-deps", f"torch=={version}"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise GraftError(
                    f"torch {version} cannot be installed into {folder}: {_why(done)}",
                    f"graft pin add {version} --python PY, with a Python that has it",
                )
        made = of_python(python, version)
        (folder / "done").touch()
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        for empty in (folder.parent, folder.parent.parent):
            with contextlib.suppress(OSError):
                empty.rmdir()
        raise
    return made


def _why(done: subprocess.CompletedProcess[str]) -> str:
    """What pip says is wrong, in one line."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    errors = [line for line in lines if line.startswith("ERROR: ") and "Impossible" not in line]
    return "".join((errors or lines)[-1:])


def _checked(release: Release, version: str) -> Release:
    if release.version.partition("+")[0] != version:
        raise UsageError(
            f"{release.folder} has torch {release.version or 'of no version'}, expected {version}",
            f"graft pin add {release.version.partition('+')[0] or 'VERSION'} ...",
        )
    if not re.fullmatch(r"[0-9a-f]{40}", release.commit):
        raise GraftError(f"torch {release.version} of {release.folder} does not name its commit")
    return release
