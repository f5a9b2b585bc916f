"""docs/modules.md: each module of the overlay in a line, by the patch that brings it.

`graft refresh` writes it. A module's line is the first sentence of its docstring. What a patch
changes of upstream's files is named with the function that a hunk shows, or the class or function
at top level in whose lines it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from graft.places import ROOT
from graft.stack.commits import sections
from graft.stack.patches import Patch
from graft.stack.series import Stack, copy_path

PAGE = Path("docs/modules.md")

_HEAD = """\
# Modules and hooks

What each patch brings: its modules, under `overlay/torch/_inductor`, with the first sentence of
each; what it changes elsewhere; its tests. Written by `graft refresh`.
"""
_TREE = "torch/_inductor/"
_HUNK = re.compile(r"^@@ [^@]*@@ ?(.*)$")
_DEFINED = re.compile(r"^[ +-]?\s*(?:async def|def|class) (\w+)")


def due(stack: Stack, root: Path = ROOT) -> str:
    """The page for `stack`, whose modules are read under `root`."""
    ours = {change.path for patch in stack.patches for change in patch.files if change.is_new}
    heads = {each.patches[0]: each.name for each in stack.series}
    lines = [_HEAD]
    for patch in stack.patches:
        if patch.name in heads:
            name = heads[patch.name]
            lines.append(f"## {name[0].upper()}{name[1:]}\n")
        subject = patch.subject.removeprefix("[inductor] ")
        lines.append(f"**[{subject}](patches/{Path(patch.name).stem}.md)**\n")
        lines += [*_items(patch, ours, root), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def write(stack: Stack, root: Path = ROOT) -> list[str]:
    """Write the page where there is one that is stale; its name."""
    path = root / PAGE
    if not path.exists() or path.read_text("utf-8") == (text := due(stack, root)):
        return []
    path.write_text(text, "utf-8")
    return [PAGE.as_posix()]


def _items(patch: Patch, ours: set[str], root: Path) -> Iterator[str]:
    tests: dict[str, list[str]] = {}
    extended, hooks = [], []
    _, parts = sections(patch.text.decode("utf-8", "surrogateescape"))
    for change, (_, text) in zip(patch.files, parts, strict=True):
        name = change.path.removeprefix(_TREE)
        if not change.in_tree:
            found = re.findall(r"^\+class (\w+)\(", text, re.M)
            tests[PurePosixPath(change.path).name] = [n for n in found if n.endswith("Test")]
        elif change.is_new:
            yield f"- `{name}`: {sentence(copy_path(change.path, root))}"
        elif change.path in ours:
            extended.append(f"`{name}`")
        else:
            shown = ", ".join(dict.fromkeys(_places(text)))
            hooks.append(f"`{name}`" + (f" ({shown})" if shown else ""))
    for word, found in (("Changes", hooks), ("Extends", extended)):
        if found:
            yield f"- {word}: {', '.join(found)}."
    said = [f"`{name}`" + (f" ({', '.join(of)})" if of else "") for name, of in tests.items()]
    if said:
        yield f"- Tests: {', '.join(said)}."


def sentence(module: Path | None) -> str:
    """The first sentence of a module's docstring, in a line; empty where it has none."""
    if module is None or not module.exists():
        return ""
    whole = ast.get_docstring(ast.parse(module.read_text("utf-8"))) or ""
    paragraph = " ".join(whole.partition("\n\n")[0].split()).replace("``", "`")
    found = re.match(r"(.+?)(?:\.|::|:$)(?= |$)", paragraph)
    return f"{found[1] if found else paragraph}."


def _places(text: str) -> Iterator[str]:
    """What each hunk is in: the last definition above its first change, or that of its header."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if header := _HUNK.match(line):
            found = _DEFINED.match(header[1])
            for below in lines[i + 1 :]:
                if below[:1] in "+-@":
                    break
                found = _DEFINED.match(below) or found
            if found:
                yield f"`{found[1]}`"
