"""A pack makes the same tree elsewhere; only when told to it patches a torch, and can undo it."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from tinytorch import (
    CAP,
    CONFIG,
    SCHEDULER,
    SECOND,
    SITE,
    TORCH,
    Bench,
    make_bench,
    make_python,
    run,
    snapshot,
)

from graft.errors import GraftError, UsageError
from graft.stack.trees import bases, inplace, pack, tree

REMOVED = ("[inductor] Drop a module", {"torch/_inductor/codegen/simd.py": None})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path / "here", (CAP, SECOND, REMOVED))


@pytest.fixture
def packed(bench: Bench) -> Path:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    return pack.write(made, bench.stack.pin, bench.prefix.with_name("one.pyz"))


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """Another machine's Python: it has the pinned torch, and nothing of this repository."""
    return make_python(tmp_path / "there")


def install(packed: Path, *options: object, cwd: Path | None = None, **env: str) -> str:
    done = run(sys.executable, "-I", packed, *options, cwd=cwd, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(packed: Path, *options: object) -> str:
    done = run(sys.executable, "-I", packed, *options)
    assert done.returncode in (1, 2), done.stdout
    assert done.stderr.startswith("error: "), done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_one_file_with_everything(bench: Bench, packed: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        names = set(archive.namelist())
        assert archive.read("licences/torch/LICENSE") == b"Redistribution is permitted.\n"
    assert "licences/torch/NOTICE" in names
    assert {name for name in names if name.startswith("files/")} == {
        "files/torch/_inductor/config.py",
        "files/torch/_inductor/reads.py",
        "files/torch/_inductor/scheduler.py",
    }
    made = tree.load(bench.prefix)
    again = pack.write(made, bench.stack.pin, bench.prefix.with_name("two.pyz"))
    assert again.read_bytes() == packed.read_bytes()
    assert "Redistribution is permitted." in install(packed, "--licences")
    assert os.access(packed, os.X_OK)


def test_without_licence_texts_there_is_no_pack(bench: Bench) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    shutil.rmtree(bench.site / "torch-2.11.0.dist-info/licenses")
    with pytest.raises(GraftError, match="came without its LICENSE"):
        pack.write(made, bench.stack.pin, bench.prefix.with_name("one.pyz"))


def test_the_same_tree_on_another_host(
    bench: Bench, packed: Path, host: Path, tmp_path: Path
) -> None:
    before = snapshot(tmp_path / "there" / SITE)
    away = tmp_path / "away"
    away.mkdir()
    copy = Path(shutil.copy(packed, away))
    # Neither git nor the repository is needed there.
    env = {"PATH": "/nowhere"}
    assert "verified" in install(copy, "--python", host, cwd=away, **env)
    theirs, ours = tree.load(away / "graft-v2.11.0"), tree.load(bench.prefix)
    assert (theirs.files, theirs.stack_hash, theirs.patches) == (
        ours.files,
        ours.stack_hash,
        ours.patches,
    )
    assert snapshot(theirs.site_packages / "torch") == snapshot(ours.site_packages / "torch")
    code = "from torch._inductor import reads, config; print(reads.count(), config.__file__)"
    assert run(theirs.python, "-c", code).stdout.split() == [
        "4",
        str(theirs.torch_dir / "_inductor/config.py"),
    ]
    assert snapshot(tmp_path / "there" / SITE) == before
    assert "verified" in install(copy, "--verify", "--python", host, cwd=away)
    (theirs.torch_dir / "_inductor/reads.py").write_text("x = 1\n")
    assert "reads.py differs" in refused(
        copy, "--verify", "--python", host, "--prefix", theirs.prefix
    )
    install(copy, "--python", host, cwd=away)
    tree.verify(theirs, bench.stack)


def test_in_place_and_back(packed: Path, host: Path, tmp_path: Path) -> None:
    site = tmp_path / "there" / SITE
    before = snapshot(site)
    assert "undo: python3" in install(packed, "--in-place", "--python", host)
    code = (
        "from torch._inductor import reads, config; print(reads.count(), config.triton.max_reads)"
    )
    assert run(host, "-c", code, PYTHONDONTWRITEBYTECODE="").stdout == "4 10\n"
    assert not (site / "torch/_inductor/codegen/simd.py").exists()
    assert "nothing to do" in install(packed, "--in-place", "--python", host)
    assert "verified" in install(packed, "--in-place", "--verify", "--python", host)
    assert "4 files are as released again" in install(packed, "--undo", "--python", host)
    assert snapshot(site) == before
    assert not list(site.rglob("reads.*.pyc"))
    assert "is not patched in place" in refused(packed, "--undo", "--python", host)


def test_in_place_keeps_hard_links_apart(packed: Path, host: Path, tmp_path: Path) -> None:
    site = tmp_path / "there" / SITE
    cached = tmp_path / "package-cache"
    os.link(site / "torch/_inductor/config.py", cached)
    install(packed, "--in-place", "--python", host)
    assert cached.read_text() == CONFIG
    install(packed, "--undo", "--python", host)
    assert (site / "torch/_inductor/config.py").read_text() == CONFIG


def test_in_place_refuses_what_it_cannot_reverse(
    bench: Bench, packed: Path, host: Path, tmp_path: Path
) -> None:
    site = tmp_path / "there" / SITE
    (site / "torch/_inductor/scheduler.py").write_text(SCHEDULER + "# mine\n")
    before = snapshot(site)
    assert "scheduler.py differs" in refused(packed, "--in-place", "--python", host)
    (site / "torch/_inductor/scheduler.py").write_text(SCHEDULER)
    (site / "torch/_inductor/reads.py").write_text("mine = 1\n")
    assert "already has torch/_inductor/reads.py" in refused(packed, "--in-place", "--python", host)
    (site / "torch/_inductor/reads.py").unlink()
    (site / "torch/_inductor/scheduler.py").write_text(SCHEDULER + "# mine\n")
    assert snapshot(site) == before
    assert "is the Python of a patched tree" in refused(
        packed, "--in-place", "--python", tree.load(bench.prefix).python
    )


def test_links_are_not_patched_in_place(bench: Bench, packed: Path) -> None:
    base = bases.probe(bench.python)
    moved = bench.site / "elsewhere"
    (bench.site / "torch/_inductor").rename(moved)
    (bench.site / "torch/_inductor").symlink_to(moved)
    before = snapshot(moved)
    with pytest.raises(UsageError, match="is a link"):
        inplace.install(base, bench.stack.pin, bench.stack.tree_files, {})
    assert snapshot(moved) == before


def test_undo_leaves_what_was_changed_since(packed: Path, host: Path, tmp_path: Path) -> None:
    site = tmp_path / "there" / SITE
    install(packed, "--in-place", "--python", host)
    mine = site / "torch/_inductor/reads.py"
    mine.write_text("mine = 1\n")
    before = snapshot(site)
    says = refused(packed, "--undo", "--python", host)
    assert "torch/_inductor/reads.py" in says
    assert "nothing was undone" in says
    assert snapshot(site) == before


def test_another_stack_is_undone_first(bench: Bench, packed: Path, host: Path) -> None:
    install(packed, "--in-place", "--python", host)
    other = {path: blob for path, blob in bench.stack.tree_files.items() if "reads" not in path}
    with pytest.raises(GraftError, match="is patched with stack") as caught:
        inplace.install(bases.probe(host), bench.stack.pin, other, {})
    assert caught.value.next is not None
    assert "--undo" in caught.value.next


def test_a_failed_write_puts_everything_back(
    bench: Bench, host: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    contents = {
        path: (made.site_packages / path).read_bytes()
        for path in made.files
        if (made.site_packages / path).exists()
    }
    site = tmp_path / "there" / SITE
    before = snapshot(site)
    real, calls = inplace._replace, []

    def full(path: Path, data: bytes) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(path))
        real(path, data)

    monkeypatch.setattr(inplace, "_replace", full)
    with pytest.raises(GraftError, match="no space left"):
        inplace.install(bases.probe(host), bench.stack.pin, made.files, contents)
    assert snapshot(site) == before


def test_an_interrupted_run_can_be_repeated_or_undone(
    bench: Bench, packed: Path, host: Path, tmp_path: Path
) -> None:
    site = tmp_path / "there" / SITE
    before = snapshot(site)
    for repeat in (True, False):
        install(packed, "--in-place", "--python", host)
        (site / "torch/_inductor/config.py").write_text(CONFIG)  # as if it had not come to this one
        (site / "torch/_inductor/reads.py").unlink()
        if repeat:
            install(packed, "--in-place", "--python", host)
            assert "max_reads" in (site / "torch/_inductor/config.py").read_text()
        install(packed, "--undo", "--python", host)
        assert snapshot(site) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--in-place", "--undo"], "exclude each other"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--python", "/nowhere/python"], "cannot run /nowhere/python"),
        (["--verify", "--prefix", "/nowhere"], "no patched tree in /nowhere"),
    ],
)
def test_wrong_use_of_a_pack(packed: Path, host: Path, options: list[str], says: str) -> None:
    if "--python" not in options:
        options = [*options, "--python", str(host)]
    assert says in refused(packed, *options)


def test_a_damaged_pack_installs_nothing(packed: Path, host: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.pyz"
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(damaged, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, data + b"#" if name.endswith("_inductor/config.py") else data)
    before = snapshot(tmp_path / "there" / SITE)
    for options in (["--in-place"], ["--prefix", str(tmp_path / "never")]):
        says = refused(damaged, *options, "--python", host)
        assert "is damaged: torch/_inductor/config.py" in says
    assert not (tmp_path / "never").exists()
    assert snapshot(tmp_path / "there" / SITE) == before


def test_another_torch_is_refused(packed: Path, tmp_path: Path) -> None:
    version = TORCH["torch/version.py"].replace("2.11.0", "2.10.0")
    host = make_python(tmp_path / "old", {**TORCH, "torch/version.py": version})
    says = refused(packed, "--python", host, "--prefix", tmp_path / "never")
    assert "has torch 2.10.0+cu130, and v2.11.0 is for torch 2.11.0" in says
    assert not (tmp_path / "never").exists()
