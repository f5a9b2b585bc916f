"""The knobs that a stack adds to ``torch._inductor.config``, read without importing torch."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONFIG = "torch/_inductor/config.py"


@dataclass(frozen=True)
class Knob:
    """A name under ``torch._inductor.config``, and its default as text.

    The default is what Python would read in this environment, or the expression where that takes
    more than literals and ``os.environ``.
    """

    name: str
    value: str


def added(base: Path, patched: Path) -> list[Knob]:
    """Knobs of the package folder `patched` that `base` lacks, or gives another default.

    Both are folders that hold ``torch``. Returns an empty list if the stack leaves config.py alone.
    """
    before = dict(_assignments(_parse(base)))
    after = dict(_assignments(_parse(patched)))
    return [
        Knob(name, _value(node))
        for name, node in after.items()
        if name not in before or ast.dump(before[name]) != ast.dump(node)
    ]


def _parse(package: Path) -> ast.Module:
    return ast.parse((package / CONFIG).read_text("utf-8"))


def _assignments(
    node: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.expr]]:
    for each in node.body:
        if isinstance(each, ast.ClassDef):
            yield from _assignments(each, f"{prefix}{each.name}.")
        elif isinstance(each, ast.AnnAssign) and each.value and isinstance(each.target, ast.Name):
            yield prefix + each.target.id, each.value
        elif isinstance(each, ast.Assign):
            for target in each.targets:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, each.value


def _value(node: ast.expr) -> str:
    try:
        code = compile(ast.Expression(node), CONFIG, "eval")
        return repr(eval(code, {"os": os, "sys": sys}))
    except Exception:
        return ast.unparse(node)
