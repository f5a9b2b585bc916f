"""A tree's Python caches in a folder of its own, and the stock one never in there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tinytorch import Bench, make_bench, run

from graft.places import SRC
from graft.stack import Stack
from graft.stack.trees import bases, caches, tree
from graft.stack.trees.tree import Tree

SHOW = f"import os; print(*(os.environ.get(n) for n in {caches.VARIABLES!r}), sep='|')"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return make_bench(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def made(bench: Bench) -> Tree:
    return tree.build(bench.base, bench.stack, bench.prefix)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in caches.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def shown(python: Path, **env: str) -> list[str]:
    done = run(python, "-c", SHOW, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def test_a_tree_has_a_folder_for_its_stack(bench: Bench, made: Tree) -> None:
    assert shown(made.python) == [str(made.cache_dir)] * 2 + ["None"]
    assert shown(bench.python) == ["None"] * 3
    assert made.stack_hash[:12] in made.cache_dir.name
    other = tree.build(bench.base, Stack(bench.stack.pin, ()), bench.prefix.with_name("unpatched"))
    assert other.cache_dir != made.cache_dir
    assert shown(other.python)[0] == str(other.cache_dir)


def test_tmpdir_moves_it(made: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert made.cache_dir.parent == tmp_path
    assert shown(made.python)[0] == str(made.cache_dir)


def test_what_the_user_sets_stands(made: Tree) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_HOME": "/b", "TRITON_CACHE_DIR": "/c"}
    assert shown(made.python, **env) == ["/a", "/b", "/c"]


def test_another_trees_folder_is_not_the_users(made: Tree) -> None:
    theirs = str(caches.folder("f" * 64))
    env = {"TORCHINDUCTOR_CACHE_DIR": theirs, "TRITON_CACHE_DIR": f"{theirs}/triton/0"}
    assert shown(made.python, **env) == [str(made.cache_dir)] * 2 + ["None"]
    # Its own, as its children inherit it, stays.
    own = f"{made.cache_dir}/triton/0"
    assert shown(made.python, TRITON_CACHE_DIR=own)[2] == own


def test_a_stock_child_of_a_patched_parent(bench: Bench, made: Tree) -> None:
    kept = {"TORCHINDUCTOR_CACHE_DIR": "/mine", "OTHER": caches.MARK}
    assert caches.stock_environ(kept) == kept
    inherited = dict.fromkeys(caches.VARIABLES, f"{made.cache_dir}/x")
    assert caches.stock_environ({**inherited, "A": "b"}) == {"A": "b"}
    code = (
        "import os, subprocess, sys; from graft.stack.trees.caches import stock_environ; "
        f"subprocess.run([{str(bench.python)!r}, '-c', {SHOW!r}], env=stock_environ(os.environ))"
    )
    src = SRC
    done = run(made.python, "-c", code, PYTHONPATH=str(src))
    assert done.stdout.strip() == "None|None|None", done.stderr


def test_the_probe_sees_no_tree(made: Tree, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(made.site_packages))
    assert bases.probe(bench.python) == bench.base
    assert os.environ["PYTHONPATH"]
