"""A tree is a base but for the changed files; it appears whole or not at all, and writes nowhere
else."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tinytorch import (
    CAP,
    CONFIG,
    SCHEDULER,
    SECOND,
    SITE,
    Bench,
    make_bench,
    make_patches,
    make_python,
    run,
    snapshot,
)

from graft import stack
from graft.errors import GraftError, UsageError
from graft.stack import Patch, Stack, pins
from graft.stack.git import NULL_BLOB, blob_id
from graft.stack.trees import bases, caches, tree


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return make_bench(tmp_path)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


# --- what a tree is ------------------------------------------------------------------------------


def test_only_changed_files_are_real(bench: Bench) -> None:
    before = snapshot(bench.site)
    made = tree.build(bench.base, bench.stack, bench.prefix)
    site = made.site_packages
    assert (site / "torch/_inductor/reads.py").read_text() == SECOND[1]["torch/_inductor/reads.py"]
    real = {str(p.relative_to(site)) for p in (site / "torch").rglob("*") if not p.is_symlink()}
    assert real - {p for p in real if "__pycache__" in p} == {
        "torch/_inductor",
        "torch/_inductor/config.py",
        "torch/_inductor/reads.py",
        "torch/_inductor/scheduler.py",
    }
    for link in ("torch/lib", "torch/nn", "torch/_inductor/codegen", "torch/functional.py"):
        assert (site / link).is_symlink()
        assert (site / link).resolve() == (bench.site / link).resolve()
    assert snapshot(bench.site) == before
    assert tree.load(bench.prefix) == made
    tree.verify(made, bench.stack)
    assert names_in(bench.prefix.parent / ".graft") == {"build.lock"}


def test_its_python_imports_the_patched_files_and_nothing_else_does(bench: Bench) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    code = (
        "from torch._inductor import config, reads; print(config.triton.max_reads, reads.count())"
    )
    for flags in ((), ("-I",), ("-s", "-P")):
        assert run(made.python, *flags, "-c", code).stdout == "10 4\n"
    spawn = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    assert run(made.python, "-c", spawn).stdout == "10 4\n"
    assert "cannot import name 'reads'" in run(bench.python, "-c", code).stderr
    assert run(made.prefix / "bin" / "torchstandin", cwd=Path("/")).stderr == "stock\n"
    pair = tree.pythons(bench.prefix)
    assert pair == {"stock": [str(bench.python)], "patched": [str(made.python)]}


def test_a_tree_takes_little_time_and_space(bench: Bench) -> None:
    began = time.monotonic()
    made = tree.build(bench.base, bench.stack, bench.prefix)
    assert time.monotonic() - began < 2
    size = sum(path.lstat().st_blocks * 512 for path in made.prefix.rglob("*"))
    assert size < 5 * 2**20


def test_an_empty_stack_makes_a_tree(bench: Bench) -> None:
    empty = Stack(bench.stack.pin, ())
    made = tree.build(bench.base, empty, bench.prefix)
    tree.verify(made, empty)
    assert (
        run(made.python, "-c", "import torch; print(torch.__version__)").stdout == "2.11.0+cu130\n"
    )


def test_a_removed_file_is_not_there(tmp_path: Path) -> None:
    path = "torch/_inductor/codegen/simd.py"
    bench = make_bench(tmp_path, [("drop", {path: None})])
    made = tree.build(bench.base, bench.stack, bench.prefix)
    assert made.files == {path: NULL_BLOB}
    assert not (made.site_packages / path).exists()
    assert (bench.site / path).exists()
    tree.verify(made, bench.stack)


def test_it_may_be_moved(bench: Bench) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    moved = bench.prefix.with_name("elsewhere")
    made.prefix.rename(moved)
    there = tree.load(moved)
    tree.verify(there, bench.stack)
    assert run(there.python, "-c", "import torch; print(torch.__file__)").stdout.strip() == str(
        there.torch_dir / "__init__.py"
    )
    assert run(moved / "bin" / "torchstandin").stderr == "stock\n"
    with pytest.raises(GraftError, match="no patched tree"):
        tree.load(bench.prefix)


def test_bytecode_of_the_base_is_used_and_never_written(bench: Bench) -> None:
    warm = "import torch._inductor.config, torch._inductor.codegen.simd"
    writing = {"PYTHONDONTWRITEBYTECODE": ""}
    assert run(bench.python, "-c", warm, **writing).returncode == 0
    made = tree.build(bench.base, bench.stack, bench.prefix)
    cached = made.torch_dir / "_inductor" / "__pycache__"
    tag = sys.implementation.cache_tag
    assert (cached / f"__init__.{tag}.pyc").is_symlink()
    assert not (cached / f"config.{tag}.pyc").exists()
    before = {p: p.read_bytes() for p in bench.site.rglob("*.pyc")}
    os.utime(bench.site / "torch/_inductor/__init__.py", (1, 1))  # stale bytecode is replaced
    assert run(made.python, "-c", warm, **writing).returncode == 0
    assert {p: p.read_bytes() for p in bench.site.rglob("*.pyc")} == before
    assert not (cached / f"__init__.{tag}.pyc").is_symlink()
    assert (cached / f"config.{tag}.pyc").is_file()
    tree.verify(made, bench.stack)


def test_a_new_folder_needs_an_init_file(tmp_path: Path) -> None:
    path = "torch/_inductor/fresh/module.py"
    bench = make_bench(tmp_path, [("one", {path: "x = 1\n"})])
    with pytest.raises(GraftError, match="a folder without __init__.py"):
        tree.build(bench.base, bench.stack, bench.prefix)
    assert not bench.prefix.exists()
    both = {path: "x = 1\n", "torch/_inductor/fresh/__init__.py": "# a package\n"}
    bench = make_bench(tmp_path / "second", [("one", both)])
    made = tree.build(bench.base, bench.stack, bench.prefix)
    code = "import torch._inductor.fresh.module as m; print(m.x)"
    assert run(made.python, "-c", code).stdout == "1\n"


# --- again, and at once --------------------------------------------------------------------------


def test_it_knows_when_there_is_nothing_to_do(bench: Bench) -> None:
    assert not tree.is_current(bench.prefix, bench.base, bench.stack)
    made = tree.build(bench.base, bench.stack, bench.prefix)
    assert tree.is_current(bench.prefix, bench.base, bench.stack)
    assert not tree.is_current(bench.prefix, bench.base, Stack(bench.stack.pin, ()))
    (made.torch_dir / "_inductor/scheduler.py").write_text("")
    assert not tree.is_current(bench.prefix, bench.base, bench.stack)


def test_a_build_replaces_an_earlier_tree(bench: Bench) -> None:
    first = Stack(bench.stack.pin, bench.stack.patches[:1])
    tree.build(bench.base, first, bench.prefix)
    (bench.prefix / "left-behind").write_text("")
    made = tree.build(bench.base, bench.stack, bench.prefix)
    assert not (bench.prefix / "left-behind").exists()
    tree.verify(made, bench.stack)
    with pytest.raises(GraftError, match="was made by another series"):
        tree.verify(made, first)


HOLD = """
import sys
from pathlib import Path
from graft.stack.trees import tree
with tree.locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()  # until the test ends, however it ends
"""


def test_two_builds_at_once(bench: Bench) -> None:
    before = tree.build(bench.base, bench.stack, bench.prefix)
    env = {**os.environ, "PYTHONPATH": str(pins.ROOT / "src")}
    command = [sys.executable, "-c", HOLD, str(bench.prefix)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(GraftError, match=f"another build of .*process {other.pid}") as caught:
            tree.build(bench.base, bench.stack, bench.prefix)
        assert caught.value.next
        with pytest.raises(GraftError, match="another build"):
            tree.clean(bench.prefix)
        other.kill()
    assert tree.load(bench.prefix) == before
    tree.build(bench.base, bench.stack, bench.prefix)


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {helpers!r})
from graft import stack
from graft.stack import pins
from graft.stack.trees import bases, tree
stop = getattr(tree, {where!r})
def killed(*args, **kwargs):
    stop(*args, **kwargs) if {after!r} else None
    os.kill(os.getpid(), signal.SIGKILL)
setattr(tree, {where!r}, killed)
root, python, prefix = map(Path, sys.argv[1:])
tree.build(bases.probe(python), stack.load(pins.load(root=root), root), prefix)
"""


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("apply", True),
        ("_make_venv", True),
        ("finish_environment", False),
        ("swap", False),
        ("swap", True),
    ],
)
@pytest.mark.parametrize("earlier", [True, False])
def test_a_killed_build_leaves_the_earlier_tree_or_none(
    bench: Bench, where: str, after: bool, earlier: bool
) -> None:
    if earlier:
        tree.build(bench.base, Stack(bench.stack.pin, ()), bench.prefix)
    code = KILLED.format(where=where, after=after, helpers=str(Path(__file__).parent))
    env = {"PYTHONPATH": str(pins.ROOT / "src")}
    done = run(sys.executable, "-c", code, bench.root, bench.python, bench.prefix, **env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    if after and where == "swap":
        tree.verify(tree.load(bench.prefix), bench.stack)
    elif earlier:
        tree.verify(tree.load(bench.prefix), Stack(bench.stack.pin, ()))
    else:
        assert not bench.prefix.exists()
    made = tree.build(bench.base, bench.stack, bench.prefix)
    tree.verify(made, bench.stack)
    assert names_in(bench.prefix.parent / ".graft") == {"build.lock"}


def fail(number: int) -> Callable[..., None]:
    def failing(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number), "some/file")

    return failing


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.ENOSPC, "no space left for"),
        (errno.EDQUOT, "no space left for"),
        (errno.EROFS, "cannot write"),
        (errno.EACCES, "cannot write"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_what_a_file_system_refuses(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    before = tree.build(bench.base, Stack(bench.stack.pin, ()), bench.prefix)
    monkeypatch.setattr(Path, "write_bytes", fail(number))
    with pytest.raises(GraftError, match=says) as caught:
        tree.build(bench.base, bench.stack, bench.prefix)
    assert caught.value.next
    monkeypatch.undo()
    assert names_in(bench.prefix.parent / ".graft") == {"build.lock"}
    tree.verify(before, Stack(bench.stack.pin, ()))


def test_a_full_disk(bench: Bench, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(small)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip(
            "mounting takes rights that this user lacks; the refusal itself is tested above"
        )
    try:
        with pytest.raises(GraftError, match="no space left for"):
            tree.build(bench.base, bench.stack, small / "build")
        assert names_in(small) == {".graft"}
        assert names_in(small / ".graft") == {"build.lock"}
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_a_read_only_base_is_enough(bench: Bench) -> None:
    folders = [bench.site, *(path for path in bench.site.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        made = tree.build(bench.base, bench.stack, bench.prefix)
        tree.verify(made, bench.stack)
        assert run(made.python, "-c", "import torch._inductor.reads").returncode == 0
        tree.clean(bench.prefix)
    finally:
        for path in folders:
            path.chmod(0o755)
    assert (bench.site / "torch/_inductor/config.py").read_text() == CONFIG


# --- patches that do not fit ---------------------------------------------------------------------


def restack(bench: Bench, texts: list[bytes]) -> Stack:
    patches = [Patch(f"p{i}.patch", bench.root / f"p{i}.patch", t) for i, t in enumerate(texts)]
    made = Stack(bench.stack.pin, tuple(patches))
    made.check()
    return made


def test_a_patch_for_other_lines_names_file_hunk_and_lines(bench: Bench) -> None:
    text = bench.stack.patches[0].text.replace(b"-    return 5\n", b"-    return five\n")
    with pytest.raises(GraftError) as caught:
        tree.build(bench.base, restack(bench, [text]), bench.prefix)
    assert "p0.patch does not apply: torch/_inductor/scheduler.py, hunk 1 at line 19:" in str(
        caught.value
    )
    assert "line 22: expected '    return five', found '    return 5'" in str(caught.value)
    assert caught.value.next is not None
    assert not bench.prefix.exists()


def test_an_offset_is_refused(bench: Bench) -> None:
    text = bench.stack.patches[0].text
    assert b"@@ -19,7 +19,7 @@" in text
    moved = restack(bench, [text.replace(b"@@ -19,7 +19,7 @@", b"@@ -15,7 +15,7 @@")])
    with pytest.raises(GraftError, match=r"applies only with an offset: .* line 19 \(offset 4\)"):
        tree.build(bench.base, moved, bench.prefix)


def test_patches_in_the_wrong_order(bench: Bench) -> None:
    texts = [patch.text for patch in reversed(bench.stack.patches)]
    with pytest.raises(GraftError, match=r"p0\.patch|reads\.py"):
        tree.build(bench.base, restack(bench, texts), bench.prefix)


def test_other_bytes_than_the_index_line_says(bench: Bench) -> None:
    text = bench.stack.patches[0].text.replace(b"+    return 55\n", b"+    return 56\n")
    with pytest.raises(
        GraftError, match=r"leaves torch/_inductor/scheduler\.py with blob .* edited"
    ):
        tree.build(bench.base, restack(bench, [text]), bench.prefix)


def test_a_file_that_is_made_twice(bench: Bench, tmp_path: Path) -> None:
    text = make_patches(tmp_path / "other", [CAP])[0]
    with pytest.raises(GraftError, match=r"p1\.patch (does not apply|makes|leaves)"):
        tree.build(bench.base, restack(bench, [text, text]), bench.prefix)


def test_crlf_and_missing_newlines_survive(tmp_path: Path) -> None:
    files = {
        "torch/_inductor/codegen/simd.py": "TILES = 3  ",
        "torch/_inductor/a.py": "a\r\nb \n\n",
    }
    bench = make_bench(tmp_path, [("x", files)])
    made = tree.build(bench.base, bench.stack, bench.prefix)
    for path, text in files.items():
        assert (made.site_packages / path).read_bytes() == text.encode()


def test_inside_an_ignored_folder_of_a_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("*\n")
    bench = make_bench(tmp_path)
    made = tree.build(bench.base, bench.stack, bench.prefix)
    assert "max_reads" in (made.torch_dir / "_inductor/config.py").read_text()


# --- verify --------------------------------------------------------------------------------------


def relink(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (
            lambda b, t: (b.site / "torch/_inductor/codegen/simd.py").write_text("x"),
            "base: torch/_",
        ),
        (lambda b, t: (t / "_inductor/scheduler.py").write_text("x"), "scheduler.py differs"),
        (lambda b, t: (t / "_inductor/reads.py").unlink(), "reads.py is missing"),
        (lambda b, t: relink(t / "nn", "/tmp"), "torch/nn links elsewhere"),
        (lambda b, t: (t / "lib").unlink(), "torch/lib is not the link that it was"),
        (lambda b, t: (t / "extra.py").write_text(""), "torch/extra.py does not belong there"),
        (lambda b, t: relink(b.prefix / "base", "/tmp"), "does not point to"),
        (lambda b, t: (b.site / "torch/added.py").write_text(""), "torch/added.py is not the link"),
        (lambda b, t: shutil.rmtree(b.site / "torch"), "its base is gone"),
        (lambda b, t: relink(b.prefix / "bin/python", "/nowhere"), "cannot run"),
        (lambda b, t: (b.prefix / "pyvenv.cfg").unlink(), "imports torch from|does not start"),
    ],
)
def test_verify_names_what_is_wrong(
    bench: Bench, damage: Callable[[Bench, Path], object], says: str
) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    damage(bench, made.torch_dir)
    with pytest.raises(GraftError, match=says) as caught:
        tree.verify(made, bench.stack)
    assert caught.value.next


def test_a_torch_on_pythonpath_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    monkeypatch.setenv("PYTHONPATH", str(bench.site))
    with pytest.raises(GraftError, match="PYTHONPATH comes first") as caught:
        tree.verify(made, bench.stack)
    assert caught.value.next is not None
    assert "unset PYTHONPATH" in caught.value.next


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', '{"format": 99}', "[]"])
def test_a_damaged_manifest(bench: Bench, text: str) -> None:
    tree.build(bench.base, bench.stack, bench.prefix)
    (bench.prefix / "graft.json").write_text(text)
    with pytest.raises(GraftError, match=r"graft\.json cannot be read|another version") as caught:
        tree.load(bench.prefix)
    assert caught.value.next == f"./build.sh --prefix {bench.prefix}"
    tree.build(bench.base, bench.stack, bench.prefix)


# --- where a tree may be -------------------------------------------------------------------------


def test_something_else_at_the_prefix_is_left_alone(bench: Bench) -> None:
    bench.prefix.mkdir()
    tree.build(bench.base, bench.stack, bench.prefix)  # an empty folder is no loss
    tree.clean(bench.prefix)
    bench.prefix.mkdir()
    (bench.prefix / "thesis.txt").write_text("years of work")
    for act in (
        lambda: tree.build(bench.base, bench.stack, bench.prefix),
        lambda: tree.clean(bench.prefix),
    ):
        with pytest.raises(UsageError, match="is not a patched tree"):
            act()
    assert (bench.prefix / "thesis.txt").read_text() == "years of work"
    other = bench.prefix.with_name("link")
    other.symlink_to(bench.prefix)
    with pytest.raises(UsageError, match="is not a patched tree"):
        tree.build(bench.base, bench.stack, other)


def test_clean_removes_tree_caches_and_leftovers_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    before = snapshot(bench.site)
    made = tree.build(bench.base, bench.stack, bench.prefix)
    made.cache_dir.mkdir(parents=True)
    (bench.prefix.parent / ".graft/build.new").mkdir()
    assert tree.clean(bench.prefix)
    assert not bench.prefix.exists()
    assert not made.cache_dir.exists()
    assert not (bench.prefix.parent / ".graft").exists()
    assert snapshot(bench.site) == before
    assert not tree.clean(bench.prefix)


# --- bases ---------------------------------------------------------------------------------------


def test_a_base_is_described(bench: Bench) -> None:
    base = bench.base
    assert base.python == bench.python
    assert base.torch_dir == bench.site / "torch"
    assert (base.version, base.cuda) == ("2.11.0+cu130", "13.0")
    assert base.site == SITE
    assert bases.Base.from_json(base.as_json()) == base
    with_source = base.with_source(Path("/x"))
    assert bases.Base.from_json(with_source.as_json()) == with_source


def test_a_base_is_found_by_a_relative_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(sys.executable).parent)
    found = bases.run_probe(f"./{Path(sys.executable).name}")
    assert Path(found["python"]).parent == Path(sys.executable).parent


def test_bases_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot run .*nowhere: No such file"):
        bases.probe(tmp_path / "nowhere")
    empty = make_python(tmp_path / "empty", {"other/__init__.py": ""})
    with pytest.raises(GraftError, match="has no torch"):
        bases.probe(empty)
    folder = make_python(tmp_path / "folder", {"torch/__init__.py": ""})
    with pytest.raises(GraftError, match=r"no version\.py"):
        bases.probe(folder)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'all is lost' >&2; exit 3\n")
    broken.chmod(0o755)
    with pytest.raises(GraftError, match="does not run: all is lost"):
        bases.probe(broken)


def test_an_old_python_is_named(tmp_path: Path) -> None:
    found = {"python": "/old/python", "python_version": "3.8.18"}
    with pytest.raises(
        GraftError, match=r"/old/python is Python 3\.8\.18; expected 3\.11 to 3\.14"
    ):
        bases.check_python(found)
    with pytest.raises(GraftError, match=r"3\.15\.0"):
        bases.check_python({**found, "python_version": "3.15.0"})


def test_a_tree_is_no_base(bench: Bench) -> None:
    made = tree.build(bench.base, bench.stack, bench.prefix)
    with pytest.raises(UsageError, match="is the Python of a patched tree") as caught:
        bases.probe(made.python)
    assert caught.value.next is not None
    assert str(bench.python) in caught.value.next


def test_a_base_that_differs_makes_no_tree(bench: Bench) -> None:
    (bench.site / "torch/_inductor/scheduler.py").write_text(SCHEDULER + "# mine\n")
    with pytest.raises(GraftError, match=r"torch/_inductor/scheduler\.py differs"):
        tree.build(bench.base, bench.stack, bench.prefix)
    with pytest.raises(GraftError, match=r"has torch 2\.10\.0"):
        tree.build(replace(bench.base, version="2.10.0"), bench.stack, bench.prefix)
    assert not bench.prefix.exists()


def test_no_git(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from graft.stack import git

    monkeypatch.setitem(git.ENV, "PATH", "/nowhere")
    with pytest.raises(GraftError, match="there is no git") as caught:
        tree.build(bench.base, bench.stack, bench.prefix)
    assert caught.value.next
    assert not bench.prefix.exists()


# --- the real torch ------------------------------------------------------------------------------


def real_base() -> bases.Base:
    """The torch that this test run has, or the one underneath the tree that runs it."""
    prefix = Path(sys.prefix)
    if (prefix / tree.MANIFEST).exists():
        return replace(tree.load(prefix).base, source=None)
    return bases.probe(sys.executable)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tree.Tree:
    base, pin = real_base(), pins.load()
    folder = tmp_path_factory.mktemp("real")
    text = (base.torch_dir / "_inductor/metrics.py").read_bytes()
    changed = text + b"\nSTANDIN = 1\n"
    files = {"torch/_inductor/metrics.py": blob_id(changed)}
    with tree.locked(folder / "build"):
        return tree.make(
            base, pin, files, {"torch/_inductor/metrics.py": changed}, folder / "build"
        )


def test_the_shipped_stack_grafts_on_the_real_torch(tmp_path: Path) -> None:
    base, series = real_base(), stack.load(pins.load())
    began = time.process_time()  # what else runs on the host is not its
    made = tree.build(base, series, tmp_path / "build")
    took_s = time.process_time() - began
    tree.verify(made, series)
    assert took_s < 2
    size = sum(path.lstat().st_blocks * 512 for path in made.prefix.rglob("*"))
    assert size < 5 * 2**20


KEYS = """
import torch, triton
from torch._inductor import codecache, metrics
from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

print(torch.__file__, hasattr(metrics, "STANDIN"), codecache.torch_key().hex())
print(cache_dir(), triton_cache_dir(0), triton.knobs.cache.dir)
"""
# A worker's cache key is injected by its parent, so comparing keys there would prove nothing.
WORKER = """
import sys, where
from torch._inductor.compile_worker.subproc_pool import SubprocPool

pool = SubprocPool(1)
print(*pool.submit(where.where).result())
pool.shutdown()
"""
WHERE = """
def where():
    import os, torch, torch._inductor.metrics as metrics
    return torch.__file__, metrics.STANDIN, os.environ["TORCHINDUCTOR_CACHE_DIR"]
"""


def test_stock_and_patched_share_no_cache_and_workers_have_the_trees_torch(
    real: tree.Tree, tmp_path: Path
) -> None:
    (tmp_path / "where.py").write_text(WHERE)
    env = {k: v for k, v in os.environ.items() if k not in caches.VARIABLES}
    env["PYTHONPATH"] = str(tmp_path)
    seen = []
    for python, code in ((real.base.python, KEYS), (real.python, KEYS + WORKER)):
        done = subprocess.run(
            [str(python), "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        seen.append(done.stdout.split())
    stock, patched = seen[0], seen[1][:6]
    assert stock[0] == str(real.base.torch_dir / "__init__.py")
    assert patched[0] == str(real.torch_dir / "__init__.py")
    assert (stock[1], patched[1]) == ("False", "True")
    kinds = ("torch_key", "Inductor's folder", "Inductor's Triton folder", "Triton's folder")
    for kind, one, other in zip(kinds, stock[2:], patched[2:], strict=True):
        assert one != other, kind
    assert patched[3] == str(real.cache_dir)
    assert all(folder.startswith(str(real.cache_dir)) for folder in patched[3:])
    assert not any(caches.MARK in folder for folder in stock[3:])
    assert seen[1][6:] == [str(real.torch_dir / "__init__.py"), "1", str(real.cache_dir)]
