"""Test files of another era: which names they import that a torch lacks, and files without those.

    PYTHON -m graft.upstream.gone_names FILE ...

prints, as JSON, for each file the names that PYTHON cannot import. Needs the standard library and
what the files import.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from graft.errors import GraftError
from graft.testing import runner

OF = ("torch", "functorch", "triton")
"""The packages whose names are asked for: of others, a missing one is to be installed."""


def missing(source: str) -> list[str]:
    """``module.name`` of each name of `OF` that `source` imports in its outermost block, or under
    an if there, and that cannot be imported."""
    found = []
    for node, alias in _imports(ast.parse(source)):
        module = node.module or ""
        try:
            there = hasattr(importlib.import_module(module), alias.name) or bool(
                importlib.import_module(f"{module}.{alias.name}")
            )
        except ImportError:
            there = False
        if not there:
            found.append(f"{module}.{alias.name}")
    return list(dict.fromkeys(found))


def without(source: str, names: Sequence[str]) -> str:
    """`source` with a `graft.upstream.gone.Gone` in place of each of `names`, on the same lines."""
    lines = source.splitlines(keepends=True)
    of: dict[ast.ImportFrom, list[ast.alias]] = {}
    for node, alias in _imports(ast.parse(source)):
        of.setdefault(node, []).append(alias)
    for node, aliases in sorted(of.items(), key=lambda each: -each[0].lineno):
        gone = [each for each in aliases if f"{node.module}.{each.name}" in names]
        if not gone:
            continue
        kept = [each for each in aliases if each not in gone]
        parts = [f"from {node.module} import {', '.join(map(_as, kept))}"] if kept else []
        parts.append("from graft.upstream.gone import Gone as _Gone")
        parts += [
            f'{each.asname or each.name} = _Gone("{node.module}.{each.name}")' for each in gone
        ]
        end = node.end_lineno or node.lineno
        tail = "\n" * (end - node.lineno + 1)
        lines[node.lineno - 1 : end] = [" " * node.col_offset + "; ".join(parts) + tail]
    return "".join(lines)


def _as(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _imports(tree: ast.Module) -> list[tuple[ast.ImportFrom, ast.alias]]:
    statements = [*tree.body]
    for node in tree.body:
        if isinstance(node, ast.If):
            statements += [*node.body, *node.orelse]
    return [
        (node, alias)
        for node in statements
        if isinstance(node, ast.ImportFrom) and not node.level
        if (node.module or "").partition(".")[0] in OF
        for alias in node.names
        if alias.name != "*"
    ]


def stand_in(
    python: Sequence[str], env: Mapping[str, str | None], folder: Path, wanted: Sequence[str]
) -> dict[str, list[str]]:
    """Put stand-ins into those of the files `wanted` (below `folder`) that import what `python`
    lacks; the names, by file. Raises GraftError where `python` cannot be asked."""
    command = [*python, "-m", "graft.upstream.gone_names", *wanted]
    done = subprocess.run(
        command, cwd=folder, env=runner.environ(env), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise GraftError(f"{python[0]} cannot be asked for names: {runner.tail(done.stderr, 3)}")
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    for path, names in found.items():
        file = folder / path
        file.write_text(without(file.read_text("utf-8"), names), "utf-8")
    return found


def main(files: Sequence[str]) -> None:
    """Print the names that each file lacks. A file that is no Python is pytest's to report."""
    lacking = {}
    with contextlib.redirect_stdout(io.StringIO()):  # what is imported may print
        for file in files:
            with contextlib.suppress(SyntaxError):
                if names := missing(Path(file).read_text("utf-8")):
                    lacking[file] = names
    print(json.dumps(lacking))


if __name__ == "__main__":
    main(sys.argv[1:])
