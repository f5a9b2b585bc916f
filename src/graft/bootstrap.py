"""What ./build.sh does: a base, a patched tree of it, and what the stack changed. And its tests.

Standard library and git alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from graft import machine, stack
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import pins
from graft.stack.pins import Pin
from graft.stack.trees import bases, caches, compiled, requirements, source, tree
from graft.stack.trees.bases import Base
from graft.testing import suite

VENV = ROOT / ".venv"
"""Of the default pin; `venv` is any pin's."""
STAMP = "graft-venv.json"
"""In .venv once everything is installed in it; without it an install was interrupted."""

INSTALL_BYTES = 8 * 2**30
"""torch with its CUDA libraries and the tools take 5 GB, and pip unpacks aside first."""

SHOWN_CASE = "scaled_residual"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, next="./build.sh --help")


def parser() -> argparse.ArgumentParser:
    """The options of ./build.sh."""
    made = _Parser(
        prog="./build.sh",
        description="Make build/, an environment with the patched torch; 'test' runs the tests.",
        epilog="./build.sh test [--pin NAME] [tox arguments]: the tests, through tox where the "
        "base has it.",
    )
    add = made.add_argument
    add("--python", metavar="PY", help="make .venv of it; with --offline, use the torch it has")
    add("--offline", action="store_true", help="download nothing")
    add("--wheels", metavar="DIR", type=Path, help="wheels of what the base lacks, for the tree")
    add("--prefix", metavar="DIR", type=Path, help="instead of build/, or build-NAME/ with --pin")
    add("--pin", metavar="NAME", default=pins.DEFAULT_PIN, help=f"default {pins.DEFAULT_PIN}")
    add("--source", metavar="CHECKOUT", type=Path, help="take Python files of a PyTorch checkout")
    add("--compile", action="store_true", help="with --source: PyTorch's own build, patched")
    add("--no-explain", action="store_true", help="do not end with graft explain")
    return made


def main(argv: Sequence[str]) -> int:
    """Run ./build.sh with these arguments. Returns the exit code; prints errors itself."""
    try:
        if argv[:1] == ["test"]:
            return test(argv[1:])
        return build(parser().parse_args(argv))
    except GraftError as wrong:
        print(wrong.report(), file=sys.stderr)
        return wrong.code
    except KeyboardInterrupt:
        return 130


def say(text: str) -> None:
    """Print a line now, so that it stands before what other processes print."""
    print(text, flush=True)


# --- build ---------------------------------------------------------------------------------------


def build(options: argparse.Namespace) -> int:
    """Make the tree that `options` ask for, and show what its stack changes."""
    began = time.monotonic()
    if options.compile and not options.source:
        raise UsageError(
            "--compile needs the checkout to build", next="./build.sh --source CHECKOUT --compile"
        )
    if options.wheels and not options.wheels.is_dir():
        raise UsageError(f"there is no folder {options.wheels}", next="./build.sh --wheels DIR")
    pin = pins.load(options.pin)
    if options.prefix is None:
        options.prefix = default_prefix(pin.name)
    elif (options.prefix / tree.MANIFEST).is_file():
        _check_pin(options.prefix, pin.name)
    series = stack.load(pin)
    stack.check_copies(series)
    base = choose_base(options, pin)
    checkout = options.source.resolve() if options.source else None
    if checkout and not options.compile:
        source.check(checkout, pin)
        base = base.with_source(checkout)
    say(f"base   {base.describe()}")
    say(f"stack  {pin.name}, {_count(len(series.patches), 'patch')}, {series.hash[:12]}")
    if checkout and options.compile:
        made = compiled.build(base, series, checkout, options.prefix)
        tree.verify(made, series)
        say(f"tree   {made.prefix}: PyTorch's own build of {made.base.source}, verified")
        return 0 if options.no_explain else explain(made)
    if tree.is_current(options.prefix, base, series, options.wheels):
        say(f"tree   {options.prefix}: up to date and verified; nothing to do")
        return 0
    made = tree.build(base, series, options.prefix, options.wheels)
    tree.verify(made, series)
    say(f"tree   {made.prefix}: made and verified in {time.monotonic() - began:.1f} s")
    for note in machine.notes(base.cuda):
        say(f"note: {note}")
    say(f"run    {_short(made.python)} train.py   (stock: {_short(base.python)})")
    return 0 if options.no_explain else explain(made)


def default_prefix(pin: str) -> Path:
    """The tree of a pin: build/, or for another than the default one build-NAME/."""
    return ROOT / pins.own("build", pin)


def _check_pin(prefix: Path, pin: str) -> None:
    """Raise UsageError for a tree of another pin: it is somebody's, and is not made anew."""
    there = tree.load(prefix).pin
    if there != pin:
        raise UsageError(
            f"{prefix} is a tree of {there}, and {pin} is asked for",
            next=f"./build.sh --pin {pin} (makes {default_prefix(pin).name}/), or first "
            f"graft clean --prefix {prefix}",
        )


def venv(pin: str) -> Path:
    """The environment that a pin's torch is installed into: .venv, or .venv-NAME."""
    return VENV.with_name(pins.own(VENV.name, pin))


def choose_base(options: argparse.Namespace, pin: Pin) -> Base:
    """The base that `options` ask for: .venv, made if need be, or another Python's torch."""
    if not options.offline:
        return install(pin, options.python)
    own = venv(pin.name) / "bin" / "python"
    python = options.python or (own if own.exists() else sys.executable)
    base = bases.probe(python)
    pins.check_base(pin, base)
    return base


def explain(made: tree.Tree) -> int:
    """Show what the stack changed in a real model's training step."""
    missing = [name for name in ("click", "rich") if not _has(made.python, name)]
    if missing:
        say(
            f"note: graft's own commands need {' and '.join(missing)}, which this Python does not "
            "have; the tree works without them. ./build.sh ... --wheels DIR adds them to it"
        )
        return 0
    command = [str(made.prefix / "bin" / "graft"), "explain", SHOWN_CASE]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise GraftError(
            f"the tree is made and verified, but graft explain {SHOWN_CASE} failed "
            f"(exit code {done.returncode})",
            next=f"{_short(Path(command[0]))} explain {SHOWN_CASE}",
        )
    return 0


def _has(python: Path, module: str) -> bool:
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _short(path: Path) -> str:
    """A path as one would type it here."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


# --- .venv ---------------------------------------------------------------------------------------


def install(pin: Pin, python: str | None) -> Base:
    """Make the pin's `venv` with its torch and the tool's requirements, or find that it is there.

    An interrupted install is taken up again. Raises GraftError when there is no space, no way to
    get pip, or pip fails (which is what no network looks like).
    """
    wanted = [f"torch=={pin.version}", *requirements.load()]
    home = venv(pin.name)
    stamp, own = home / STAMP, home / "bin" / "python"
    if python and own.exists():
        asked, there = bases.run_probe(python), bases.run_probe(own)
        if asked.get("executable") != there.get("executable"):
            raise UsageError(
                f"{home} is of {there.get('executable')}, and --python is "
                f"{asked.get('executable')}",
                next=f"remove {home.name}, then the same command",
            )
    if own.exists() and stamp.exists() and json.loads(stamp.read_text("utf-8")) == wanted:
        base = bases.probe(own)
        pins.check_base(pin, base)
        return base
    with tree.locked(home):
        driver = python or sys.executable
        if not own.exists():
            bases.check_python(bases.run_probe(driver))
        say(f"installing torch {pin.version} and the tools into {home}")
        _pip(driver, own, wanted)
        base = bases.probe(own)
        pins.check_base(pin, base)
        tree.write_scripts(home / "bin", ())
        stamp.write_text(json.dumps(wanted), encoding="utf-8")
    return base


def _pip(driver: str, own: Path, wanted: list[str]) -> None:
    """Install `wanted` into the environment whose Python is `own`; `driver` makes it and lends its
    pip."""
    home = own.parents[1]
    if not own.exists():
        free = shutil.disk_usage(ROOT).free
        if free < INSTALL_BYTES:
            raise GraftError(
                f"torch and its libraries need {INSTALL_BYTES / 2**30:.0f} GB in {ROOT}, and "
                f"{free / 2**30:.1f} GB are free",
                next="free some, or ./build.sh --python PY --offline with a Python that has "
                "torch already",
            )
        seeded = _has(Path(driver), "ensurepip")
        if not seeded and not _has(Path(driver), "pip"):
            raise GraftError(
                f"{driver} has neither ensurepip nor pip, so nothing can be installed",
                next="install them (Debian: apt-get install python3-venv), or "
                "./build.sh --python PY with another Python",
            )
        options = [] if seeded else ["--without-pip"]
        made = f"{driver} could not make {home}"
        _call([driver, "-m", "venv", *options, str(home)], made, wanted[0])
    lent = [str(own), "-m", "pip"]
    if not _has(own, "pip"):
        lent = [driver, "-m", "pip", "--python", str(own)]
    _call(
        [*lent, "install", "--disable-pip-version-check", "--no-input", *wanted],
        f"pip could not install {wanted[0]} and the tools into {home}",
        wanted[0],
    )


def _call(command: list[str], failed: str, torch: str) -> None:
    env = caches.stock_environ(os.environ)
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise GraftError(
            f"{failed}: {' '.join(errors)}",
            next="fix it (a network? space?) and ./build.sh again, or ./build.sh --python PY "
            f"--offline with a Python that has {torch.replace('==', ' ')}",
        )


# --- test ----------------------------------------------------------------------------------------


def test(args: Sequence[str]) -> int:
    """Run the tests on the pin's tree, which is made first where it is missing or stale."""
    pin = pins.DEFAULT_PIN
    if args[:1] == ["--pin"] and len(args) > 1:
        pin, args = pins.load(args[1]).name, args[2:]
    prefix = default_prefix(pin)
    options = ["--no-explain", "--prefix", str(prefix), "--pin", pin]
    made = tree.load(prefix) if (prefix / tree.MANIFEST).is_file() else None
    if made and made.compiled:
        tree.verify(made, stack.load(pins.load(made.pin)))  # hours to make: never made anew here
        return run_tests(prefix, args)
    if made:
        _check_pin(prefix, pin)
        options += ["--offline", "--python", str(made.base.python)]
        if made.base.source:
            options += ["--source", str(made.base.source)]
        if made.wheels:
            options += ["--wheels", str(made.wheels)]
    code = build(parser().parse_args(options))
    return code or run_tests(prefix, args)


def run_tests(prefix: Path, args: Sequence[str]) -> int:
    """Run the tests in the tree at `prefix`, through tox where its base has it."""
    python = str(prefix / "bin" / "python")
    if _has(Path(python), "tox"):
        command = [python, "-m", "tox", "-c", str(ROOT / "tox.ini"), *args]
    elif not _has(Path(python), "pytest"):
        raise GraftError(
            f"{python} has neither tox nor pytest, so it cannot run the tests",
            next="./build.sh ... --wheels DIR with their wheels, then ./build.sh test",
        )
    else:
        command = [python, "-P", str(ROOT / "src/graft/testing/suite.py"), *_suite_args(args)]
        say(f"note: the base has no tox; running {' '.join(command[1:])}")
    env = {**os.environ, "GRAFT_PREFIX": str(prefix)}
    return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


def _suite_args(args: Sequence[str]) -> list[str]:
    """What ``[-e cpu|gpu] [-- PYTEST ARGUMENTS]`` means without tox."""
    chosen = _Parser(prog="./build.sh test", add_help=False)
    chosen.add_argument("-e", choices=suite.SUITES, default="cpu")
    at = list(args).index("--") if "--" in args else len(args)
    return [chosen.parse_args(args[:at]).e, *args[at + 1 :]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
