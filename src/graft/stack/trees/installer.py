"""What runs when a pack is run: the same tree on this host, or this host's torch patched."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from graft.errors import GraftError, UsageError
from graft.stack import files_hash, pins
from graft.stack.git import NULL_BLOB, blob_id
from graft.stack.pins import Pin
from graft.stack.trees import inplace, tree
from graft.stack.trees.bases import probe


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, next="the same file with --help")


def parser(pack: Path) -> argparse.ArgumentParser:
    """The options of a pack."""
    made = _Parser(
        prog=f"python3 {pack.name}",
        description="Make an environment whose torch is this Python's, patched. "
        "Nothing else is changed.",
    )
    add = made.add_argument
    add("--python", metavar="PY", default=sys.executable, help="whose torch (default: this one's)")
    add("--prefix", metavar="DIR", type=Path, help="where (default: ./graft-<pin>)")
    add("--in-place", action="store_true", help="patch that torch itself instead; --undo reverses")
    add("--undo", action="store_true", help="give it its own files back")
    add("--verify", action="store_true", help="check what this pack made; change nothing")
    add("--licences", action="store_true", help="print the licences of what is in this file")
    return made


def main(argv: Sequence[str], pack: Path | None = None) -> int:
    """Run a pack with these arguments; prints errors itself and returns the exit code."""
    pack = pack or Path(sys.argv[0])
    try:
        return run(pack, parser(pack).parse_args(argv))
    except GraftError as wrong:
        print(wrong.report(), file=sys.stderr)
        return wrong.code


def run(pack: Path, options: argparse.Namespace) -> int:
    """Do what `options` ask for."""
    with zipfile.ZipFile(pack) as archive:
        read = {name: archive.read(name) for name in archive.namelist()}
    if options.licences:
        for name in sorted(name for name in read if name.startswith("licences/")):
            print(f"==== {name}\n{read[name].decode('utf-8', 'replace')}")
        return 0
    if options.in_place and options.undo:
        raise UsageError("--in-place and --undo exclude each other", next="one of the two")
    about: dict[str, Any] = json.loads(read["pack.json"])
    pin = pins.parse(read["pin.toml"].decode(), about["pin"], "pin.toml")
    files: dict[str, str] = about["files"]
    contents = {p: read[f"files/{p}"] for p, blob in files.items() if blob != NULL_BLOB}
    _check(pack, about, contents)
    base = probe(options.python)
    if options.undo:
        count = inplace.undo(base)
        print(f"{base.torch_dir}: {count} files are as released again")
    elif options.in_place:
        if options.verify:
            inplace.verify(base, pin, files)
            print(f"{base.torch_dir} is patched with stack {about['stack_hash'][:12]}, verified")
        elif inplace.install(base, pin, files, contents):
            print(f"{base.torch_dir} is patched with stack {about['stack_hash'][:12]}, verified")
            print(f"to undo: python3 {pack} --undo --python {base.python}")
        else:
            print(f"{base.torch_dir} has stack {about['stack_hash'][:12]} already; nothing to do")
    else:
        _tree(options, pin, about, contents)
    return 0


def _tree(
    options: argparse.Namespace, pin: Pin, about: dict[str, Any], contents: dict[str, bytes]
) -> None:
    base = probe(options.python)
    prefix = (options.prefix or Path(f"graft-{pin.name}")).absolute()
    if not options.verify:
        pins.check_base(pin, base)
        with tree.locked(prefix):
            tree.make(base, pin, about["files"], contents, prefix, about["patches"])
    made = tree.load(prefix)
    if made.stack_hash != about["stack_hash"]:
        raise GraftError(
            f"{prefix} has stack {made.stack_hash[:12]}, this file {about['stack_hash'][:12]}",
            next="the same command without --verify",
        )
    found = tree.problems(made, pin)
    if found:
        raise GraftError(
            f"{prefix} is not what it was made as: {'; '.join(found)}",
            next="the same command without --verify",
        )
    tree.check_start(made)
    print(f"{made.prefix}: torch {base.version} with stack {made.stack_hash[:12]}, verified")
    print(f"run {made.python} train.py")


def _check(pack: Path, about: dict[str, Any], contents: dict[str, bytes]) -> None:
    """A damaged pack must not install anything."""
    files: dict[str, str] = about["files"]
    wrong = [path for path, data in contents.items() if blob_id(data) != files[path]]
    if wrong or files_hash(files) != about["stack_hash"]:
        raise GraftError(
            f"{pack} is damaged: {', '.join(wrong) or 'pack.json'} is not what it says",
            next="copy it here again, or graft pack",
        )
