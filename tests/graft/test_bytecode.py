"""Bytecode where Python is told to write none."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from graft.cli import bytecode

REFUSED = {"PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without bytecode, on this Python's path; caches are below `tmp_path`."""
    folder = tmp_path / "site" / "slow_to_compile"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("A = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def kept(**env: str) -> dict[str, str]:
    bytecode.keep(env, "slow_to_compile")
    return env


def run(code: str, folder: Path, env: dict[str, str]) -> None:
    full = {**env, "PYTHONPATH": str(folder)}
    subprocess.run([sys.executable, "-c", code], env=full, check=True)


def test_a_process_writes_it_into_the_users_cache(package: Path, tmp_path: Path) -> None:
    env = kept(**REFUSED)
    run("import slow_to_compile", package.parent, env)
    (written,) = (tmp_path / "cache").rglob("slow_to_compile/*.pyc")
    assert written.is_relative_to(tmp_path / "cache" / "inductor-graft" / "bytecode")
    assert not [*package.rglob("*.pyc")]


def test_what_changed_is_compiled_anew(package: Path) -> None:
    env = kept(**REFUSED)
    for value in (1, 22):
        (package / "__init__.py").write_text(f"A = {value}\n")
        run(
            f"import slow_to_compile; assert slow_to_compile.A == {value}",
            package.parent,
            env,
        )


def test_where_there_is_bytecode(package: Path) -> None:
    run("import slow_to_compile", package.parent, {})
    assert [*package.rglob("*.pyc")]
    assert kept(**REFUSED) == REFUSED


def test_where_nothing_is_refused(package: Path) -> None:
    assert kept() == {}
    assert kept(PYTHONDONTWRITEBYTECODE="") == {"PYTHONDONTWRITEBYTECODE": ""}


def test_a_folder_of_the_users_own(package: Path) -> None:
    own = {**REFUSED, "PYTHONPYCACHEPREFIX": "/elsewhere"}
    assert kept(**own) == own


def test_without_the_package(tmp_path: Path) -> None:
    env = dict(REFUSED)
    bytecode.keep(env, "no_such_package")
    assert env == REFUSED


def test_a_user_without_a_home(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert kept(**REFUSED)["PYTHONPYCACHEPREFIX"].startswith(tempfile.gettempdir())
