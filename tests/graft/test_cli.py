"""The commands: what they print, how they fail, and that they load no more than they need."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tinytorch import CAP, SECOND, make_python, make_root, run

from graft import cli
from graft.cli import options
from graft.stack import knobs
from graft.stack.trees import tree
from graft.stack.trees.tree import Tree


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """A whole repository of its own with a tree, built as a user would."""
    folder = tmp_path_factory.mktemp("cli")
    root = make_root(folder, (CAP, SECOND), tool=True)
    python = make_python(folder / "base")
    done = run(root / "build.sh", "--python", python, "--offline", "--no-explain")
    assert done.returncode == 0, done.stderr
    return tree.load(root / "build")


def graft(made: Tree, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a command of that repository by this Python, which has click."""
    root = made.prefix.parent
    return run(sys.executable, "-m", "graft", *args, cwd=root, PYTHONPATH=str(root / "src"))


def test_status_says_what_a_tree_is(made: Tree) -> None:
    done = graft(made, "status", "--prefix", made.prefix)
    assert done.returncode == 0, done.stderr
    for line in (
        f"tree    {made.prefix}",
        f"base    {made.base.describe()}",
        "pin     v2.11.0",
        f"stack   {made.stack_hash[:12]}",
        "  patch-0.patch",
        "  torch._inductor.config.triton.max_reads = 10",
    ):
        assert line in done.stdout.splitlines()


def test_a_trees_own_command_looks_at_that_tree(made: Tree, tmp_path: Path) -> None:
    away = tmp_path / "moved"
    shutil.copytree(made.prefix, away, symlinks=True)
    code = (
        "import sys; sys.argv = sys.argv[1:]\n"
        "from graft.cli import options; print(options.default_prefix())"
    )
    src = made.prefix.parent / "src"
    for command, tree_of_it in (
        (away / "bin/graft", away),
        (src / "graft/__main__.py", made.prefix),
    ):
        done = run(sys.executable, "-c", code, command, PYTHONPATH=str(src))
        assert done.stdout.strip() == str(tree_of_it), done.stderr


def test_status_says_that_the_series_has_changed(made: Tree) -> None:
    series = made.prefix.parent / "patches/v2.11.0/series"
    text = series.read_text()
    patch = series.parent / "patch-1.patch"
    aside = patch.rename(patch.with_suffix(".aside"))
    series.write_text("patch-0.patch\n")
    try:
        done = graft(made, "status")
        assert "the series has changed: ./build.sh" in done.stdout
        failed = graft(made, "verify")
        assert failed.returncode == 1
        assert "was made by another series" in failed.stderr
        assert "\nnext: ./build.sh" in failed.stderr
    finally:
        aside.rename(patch)
        series.write_text(text)


def test_verify_counts_what_it_checked(made: Tree) -> None:
    done = graft(made, "verify")
    assert done.returncode == 0, done.stderr
    assert "3 files of the base, 3 of the tree, 2 copies" in done.stdout


def test_the_copies_are_checked(made: Tree) -> None:
    assert "copy " not in graft(made, "status").stdout
    stray = made.prefix.parent / "overlay/torch/_inductor/stray.py"
    stray.write_text("")
    try:
        done = graft(made, "status")
        assert "stray.py is made by no patch  (graft refresh)" in done.stdout
        done = graft(made, "verify")
        assert done.returncode == 1
        assert "overlay/torch/_inductor/stray.py is made by no patch" in done.stderr
    finally:
        stray.unlink()


def test_pack_names_a_folder_that_is_not_there(made: Tree, tmp_path: Path) -> None:
    done = graft(made, "pack", "-o", tmp_path / "nowhere" / "x.pyz")
    assert done.returncode == 2
    assert f"{tmp_path}/nowhere is no folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_pack_says_where_and_how(made: Tree, tmp_path: Path) -> None:
    done = graft(made, "pack", "-o", tmp_path / "x.pyz")
    assert done.returncode == 0, done.stderr
    assert "x.pyz" in done.stdout
    assert (tmp_path / "x.pyz").exists()


def test_clean(made: Tree, tmp_path: Path) -> None:
    away = tmp_path / "copy"
    shutil.copytree(made.prefix, away, symlinks=True)
    assert f"removed {away}" in graft(made, "clean", "--prefix", away).stdout
    assert not away.exists()
    assert "nothing to remove" in graft(made, "clean", "--prefix", away).stdout


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["verfy"], 2, "graft has no command verfy; did you mean verify?"),
        (["status", "--prefixx", "x"], 2, "No such option '--prefixx'"),
        (["status", "extra"], 2, "unexpected extra argument"),
        (["status", "--prefix", "/nowhere"], 1, "there is no patched tree in /nowhere"),
        (["clean", "--prefix", "/usr"], 2, "/usr is not a patched tree"),
        (["opinfo", "--json", "/nowhere/x.json"], 2, "/nowhere is no folder"),
        (["verify", "--complete"], 2, "--patch, --series, --changed and --complete go with --each"),
        (["pin", "add", "2.11.0"], 2, "the series is that of 2.11.0"),
    ],
)
def test_errors_are_one_line_and_the_next_command(
    made: Tree, args: list[str], code: int, says: str
) -> None:
    done = graft(made, *args)
    assert done.returncode == code
    error, *rest = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert "Traceback" not in done.stderr
    assert [line.startswith("next: ") for line in rest] in ([True], [] if code == 1 else [True])


@pytest.mark.parametrize(
    ("args", "says", "next"),
    [
        (["explain", "--gpu"], "'--gpu' requires an argument", "graft explain --help"),
        (["bench", "x", "--rounds"], "'--rounds' requires", "graft bench run --help"),
        (["verify", "--each", "--series", "nope"], "has no series nope", "graft verify --help"),
        (["explain", "nowhere.py:f"], "there is no file 'nowhere.py'", "graft explain --help"),
        (["explain", "docs/x.md"], "of a file: FILE.py:FUNCTION", "graft explain --help"),
        (["explain", "x", "--shape", "0,8"], "has no size 0", "graft explain --help"),
        (["bench", "models", "--kernels", "/x.json"], "No such file", "graft bench CASES --out"),
    ],
)
def test_the_next_command_is_that_of_the_command(
    made: Tree, args: list[str], says: str, next: str
) -> None:
    done = graft(made, *args)
    assert done.returncode in (1, 2)
    *_, error, follow = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert follow.startswith(f"next: {next}")


def test_of_a_python_file_what_it_defines_is_named(made: Tree, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, sys\n\ndef build(device):\n    pass\n")
    done = graft(made, "explain", f"{tmp_path}/mine.py:nothing")
    assert done.stderr.splitlines()[0].endswith("mine.py has no 'nothing'; there are: build")


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_a_disk_that_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def refuse(prefix: Path) -> None:
        raise OSError(number, os.strerror(number), "/disk/x")

    monkeypatch.setattr("graft.stack.trees.tree.load", refuse)
    monkeypatch.setattr("sys.argv", ["graft", "status"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    error, next = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert "in /disk" in error
    assert next.startswith("next: ")


@pytest.mark.parametrize(
    ("command", "next"),
    [
        (["edit"], "git clone {root} DIR"),
        (["edit", "--discard"], "git clone {root} DIR"),
        (["refresh"], "git clone {root} DIR"),
        (["clean"], "graft clean --prefix {prefix}"),
        (["pack"], "graft pack -o DIR/graft-"),
        (["pack", "-o", "x.pyz"], " DIR/x.pyz, a folder that you can write"),
    ],
)
def test_a_folder_that_cannot_be_written(made: Tree, command: list[str], next: str) -> None:
    """One error that names the folder, and what to type; the checkout is a read-only mount."""
    root = made.prefix.parent
    mount = f"mount --bind {root} {root} && mount -o remount,bind,ro {root}"
    if os.getuid() or run("unshare", "-m", "sh", "-c", mount).returncode:
        pytest.skip("mounting takes rights that this user lacks; refusals are tested above")
    done = run(
        *("unshare", "-m", "sh", "-c", f'{mount} && cd {root} && exec "$@"', "sh"),
        *(sys.executable, "-m", "graft", *command),
        cwd=root,
        PYTHONPATH=str(root / "src"),
        PYTHONDONTWRITEBYTECODE="1",
    )
    assert done.returncode in (1, 2)
    error, follow = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert str(root) in error
    assert follow.startswith("next: ")
    assert next.format(root=root, prefix=made.prefix) in follow


def test_a_log_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    console = Console(file=io.StringIO())
    with console.status("") as status:
        say = options.progress(console, status)
        say("1 of 3 processes")  # half a minute has not passed
        monkeypatch.setattr(options, "_LOG_EVERY_S", 0.0)
        say("2 of 3 processes")
    assert capsys.readouterr().out == "2 of 3 processes\n"


def test_help_lists_every_command(made: Tree) -> None:
    done = graft(made, "--help")
    assert done.returncode == 0
    for name in ("status", "verify", "clean", "pack"):
        assert f"\n  {name} " in done.stdout


def test_starting_loads_neither_torch_nor_rich(made: Tree) -> None:
    code = "import sys, graft.cli; print({'torch', 'rich', 'unidiff', 'numpy'} & set(sys.modules))"
    src = made.prefix.parent / "src"
    assert run(sys.executable, "-c", code, PYTHONPATH=str(src)).stdout == "set()\n"


def test_without_click_the_command_says_so(made: Tree) -> None:
    done = run(made.prefix / "bin" / "graft", "status")
    assert done.returncode == 1
    assert "error: graft's commands need click" in done.stderr
    assert "\nnext: ./build.sh" in done.stderr


def test_knobs_are_what_the_stack_adds_or_changes(tmp_path: Path) -> None:
    for name, text in (
        ("base", "import os\na = 1\n\nclass triton:\n    b = True\n"),
        (
            "patched",
            "import os\na = 2\nc: str = os.environ.get('STANDIN_C', 'c')\n\n"
            "class triton:\n    b = True\n    d = min(a, 3)\n    e: int\n",
        ),
    ):
        file = tmp_path / name / "torch/_inductor/config.py"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    found = {k.name: k.value for k in knobs.added(tmp_path / "base", tmp_path / "patched")}
    assert found == {"a": "2", "c": "'c'", "triton.d": "min(a, 3)"}
