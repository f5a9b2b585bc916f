"""A series as it applies to the pinned release alone, without those before it.

A patch of the stack has lines of other series around its own, and its modules may use a function
that a module of another series has. So each file is taken apart into lines, each with the patch
that adds it and those that remove it, and is what the series' own patches make of the released
lines. A file that another series makes is left out, with what is changed in it. What the series
imports of such a file is carried: its definition, and what that needs in turn, under the same name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath

from graft.errors import UsageError
from graft.stack import Patch, Stack, commits

_PACKAGE = "torch/_inductor/"
_IMPORT = re.compile(r"(?P<head>\s*from (?!__future__)[\w.]+ import )(?P<names>\w+(, \w+)*)\n")
_OPENS = re.compile(r"\s*((async )?(def|for|with)|class|if|elif|else|while|try|except|finally)\b")


@dataclass
class _Line:
    """A line of a file; `made` is the patch that adds it (-1: released), `gone` those that remove
    it, all by their places in the stack."""

    text: str
    made: int
    gone: set[int]

    @property
    def indent(self) -> int:
        """Columns before its first character."""
        return len(self.text) - len(self.text.lstrip())

    @property
    def opens_block(self) -> bool:
        """Whether the lines of a block follow it, or of a signature."""
        return bool(_OPENS.match(self.text))

    def is_in(self, kept: Collection[int]) -> bool:
        """Whether the file has it as the patches `kept` make it."""
        return (self.made == -1 or self.made in kept) and self.gone.isdisjoint(kept)


def alone(stack: Stack, name: str, pristine: Mapping[str, bytes], folder: Path) -> Stack:
    """The patches of series `name` of `stack` as they apply to `pristine`.

    `pristine` has the released files that the stack changes, by path; of one that it lacks (a wheel
    has no tests), the hunks stay as they are. The patch files are written into `folder`, which is
    made. Raises UsageError for a series that is not `alone`.
    """
    series = stack.series_of(name)
    if not series.alone:
        raise UsageError(
            f"the series {series.name} needs those before it",
            "graft export --series, without --onto; those that stand alone: "
            + ", ".join(each.name for each in stack.series if each.alone),
        )
    own = [at for at, patch in enumerate(stack.patches) if patch.name in series.patches]
    woven = _Woven(stack, pristine, frozenset(own))
    repo = commits.make(folder / "repo", {p: pristine[p] for p in woven.released()}, ())
    made = []
    for at in own:
        patch = stack.patches[at]
        for path, text in woven.files(at):
            target = repo.path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(commits.encode(text))
        repo.git("add", "-A", "-f", ".")
        repo.git("commit", "-q", "--allow-empty", "-F", "-", input=patch.message)
        made.append(repo.id())
    patches = []
    for at, diff in zip(own, repo.export(made), strict=True):
        file = folder / stack.patches[at].name
        file.write_bytes(diff)
        patches.append(replace(stack.patches[at], path=file, text=diff))
    found = replace(stack, patches=tuple(patches))
    found.check()
    return found


def _leave(blocks: list[_Line], line: _Line) -> None:
    """Take those from `blocks` that `line` does not stand in."""
    while blocks and blocks[-1].indent >= line.indent:
        blocks.pop()


def _imported_lines(
    lines: Sequence[_Line], kept: Collection[int], bound: Collection[str]
) -> Iterator[str]:
    """The text of `lines`, where an import that is not released has what is used alone.

    Of an import by the patches `kept`, what the file uses; of one by others, what their lines use,
    and the released file has not `bound`.
    """
    imports = [line.made != -1 and bool(_IMPORT.match(line.text)) for line in lines]
    code = [line for line, is_import in zip(lines, imports, strict=True) if not is_import]
    ours = {word for line in code if line.made != -1 for word in _words(line.text)}
    used = ours | {word for line in code if line.made == -1 for word in _words(line.text)}
    for line, is_import in zip(lines, imports, strict=True):
        found = _IMPORT.match(line.text) if is_import else None
        if found is None:
            yield line.text
            continue
        wanted = used if line.made in kept else ours.difference(bound)
        names = [name for name in found["names"].split(", ") if name in wanted]
        if names:
            yield f"{found['head']}{', '.join(names)}\n"


@lru_cache(maxsize=64)
def _bound(text: bytes) -> set[str]:
    """The names that a module's imports bind."""
    nodes = (n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Import, ast.ImportFrom)))
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def _is_module(path: str) -> bool:
    return path.startswith("torch/") and path.endswith(".py")


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


class _Woven:
    """The files of a stack, line by line; `own` are the places of the patches that are kept."""

    def __init__(self, stack: Stack, pristine: Mapping[str, bytes], own: frozenset[int]) -> None:
        self.pristine = pristine
        self.own = own
        self.patches = stack.patches
        self.lines: dict[str, list[_Line]] = {}
        self.maker: dict[str, int] = {}
        self.now: dict[str, str] = {}  # the series' files, behind the patch that was last
        for at, patch in enumerate(stack.patches):
            for change in patch.files:
                if change.is_new:
                    self.maker[change.path] = at
                if change.path in self.maker or change.path in pristine:
                    self._apply(at, patch, change.path)

    def _apply(self, at: int, patch: Patch, path: str) -> None:
        if path not in self.lines:
            text = self.pristine.get(path, b"").decode("utf-8", "surrogateescape")
            self.lines[path] = [_Line(each, -1, set()) for each in text.splitlines(keepends=True)]
        lines = self.lines[path]
        (change,) = (each for each in patch.files if each.path == path)
        live = [i for i, each in enumerate(lines) if not each.gone]
        for hunk in reversed(change.hunks):  # so that the places of the earlier ones stay
            # a hunk without old lines stands behind the line that it names
            first = hunk.old_start - 1 if hunk.old_lines else hunk.old_start
            here = live[first] if first < len(live) else len(lines)
            new: list[_Line] = []
            for text in hunk.lines:
                if text[:1] == "+":
                    new.append(_Line(text[1:] + "\n", at, set()))
                    continue
                while lines[here].gone:
                    new.append(lines[here])
                    here += 1
                if text[:1] == "-":
                    lines[here].gone.add(at)
                new.append(lines[here])
                here += 1
            start = live[first] if first < len(live) else len(lines)
            lines[start:here] = new

    def released(self) -> Iterator[str]:
        """The released files that the series changes."""
        touched = {change.path for at in self.own for change in self.patches[at].files}
        return (path for path in sorted(touched) if path in self.pristine)

    def text(self, path: str, kept: Collection[int]) -> str:
        """The file as the patches `kept` make it."""
        return "".join(line.text for line in self.lines[path] if line.is_in(kept))

    def own_text(self, path: str, at: int) -> str:
        """The file as the series' patches up to `at` make it.

        A line of theirs may stand under an ``if`` that another series adds as well: that is kept.
        """
        kept, before = {each for each in self.own if each <= at}, set(range(at + 1))
        done: list[_Line] = []
        blocks: list[_Line] = []  # that a line stands in, by their headers, outermost first
        there: list[_Line] = []  # those of them that are kept
        for line in self.lines[path]:
            if line.text.strip() and line.is_in(before):
                _leave(blocks, line)
            if line.is_in(kept):
                if line.text.strip():
                    _leave(there, line)
                for header in blocks if line.made in kept else ():
                    if header.indent not in [each.indent for each in there]:
                        done.append(header)
                        there.append(header)
                done.append(line)
                if line.opens_block:
                    there.append(line)
            elif line.is_in(before) and _IMPORT.match(line.text):
                done.append(line)
            if line.is_in(before) and line.opens_block:
                blocks.append(line)
        if not _is_module(path):
            return "".join(line.text for line in done)
        return "".join(_imported_lines(done, kept, _bound(self.pristine.get(path, b""))))

    def files(self, at: int) -> Iterator[tuple[str, str]]:
        """The files that the series' patch `at` leaves, and what it changes of absent ones."""
        for change in self.patches[at].files:
            if change.path in self.pristine or self.maker.get(change.path) in self.own:
                self.now[change.path] = self.own_text(change.path, at)
        yield from self.now.items()
        yield from self._carried(at, self.now).items()
        _, parts = commits.sections(self.patches[at].text.decode("utf-8", "surrogateescape"))
        for path, part in parts:
            if path not in self.lines:
                yield path + commits.HUNKS, part

    def _carried(self, at: int, files: Mapping[str, str]) -> dict[str, str]:
        """What `files` use of modules that other series make, as those are behind patch `at`."""
        before = set(range(at + 1))
        used: dict[str, set[str]] = {}
        carried: dict[str, str] = {}
        todo = [item for item in files.items() if _is_module(item[0])]
        while todo:
            path, text = todo.pop()
            for module, names in _imports(path, text):
                if self.maker.get(module, at + 1) > at or module in files:
                    continue
                if not names <= used.setdefault(module, set()):
                    used[module] |= names
                    carried[module] = _reduced(self.text(module, before), used[module])
                    todo.append((module, carried[module]))
        return carried


@lru_cache(maxsize=256)
def _imports(path: str, text: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """The modules of the package that a file imports from, by path, with the names it takes."""
    found: dict[str, set[str]] = {}
    attributes: dict[str, set[str]] = {}
    imports: list[ast.ImportFrom] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            imports.append(node)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.setdefault(node.value.id, set()).add(node.attr)
    for node in imports:
        if node.level:
            folder = PurePosixPath(path).parents[node.level - 1]
        elif (node.module or "").startswith("torch."):
            folder = PurePosixPath(".")
        else:
            continue
        module = folder / (node.module or "").replace(".", "/")
        for alias in node.names:
            found.setdefault(f"{module}.py", set()).add(alias.name)
            used = attributes.get(alias.asname or alias.name, set())
            found.setdefault(f"{module / alias.name}.py", set()).update(used)
    return tuple(
        (path, frozenset(names)) for path, names in found.items() if path.startswith(_PACKAGE)
    )


def _reduced(text: str, names: Collection[str]) -> str:
    """The module `text` with the definitions of `names` alone, and what those need."""
    tree = ast.parse(text)
    body = [each for each in tree.body if not isinstance(each, (ast.Import, ast.ImportFrom))]
    wanted, size = set(names), -1
    while len(wanted) > size:
        size = len(wanted)
        for each in body:
            if wanted & set(_defined(each)):
                wanted |= {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
    lines = text.splitlines()
    parts = [_imported(tree.body, wanted)]
    end = 0
    for each in tree.body:
        decorators = getattr(each, "decorator_list", [])
        start = min([each.lineno, *(d.lineno for d in decorators)]) - 1
        while start > end and lines[start - 1].startswith("#"):
            start -= 1
        end = each.end_lineno or each.lineno
        if wanted & set(_defined(each)):
            parts.append("\n".join(lines[start:end]))
    return "\n\n\n".join(part for part in parts if part) + "\n"


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module defines, or changes."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (each.id for target in node.targets for each in _names(target))
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        yield from (each.id for each in _names(node.target))


def _names(node: ast.AST) -> Iterator[ast.Name]:
    return (each for each in ast.walk(node) if isinstance(each, ast.Name))


def _imported(body: Iterable[ast.stmt], wanted: Collection[str]) -> str:
    """The imports of `wanted`, in groups, those for annotations last."""
    groups: dict[int, list[str]] = {0: ["from __future__ import annotations"]}
    checked = ""
    for node in body:
        if isinstance(node, ast.If):  # TYPE_CHECKING
            checked = "\n".join(f"    {line}" for line in _imports_of(node.body, wanted))
    if checked:
        wanted = {*wanted, "TYPE_CHECKING"}
    for line in _imports_of(body, wanted):
        groups.setdefault(2 if line.startswith("from .") else 1, []).append(line)
    found = "\n\n".join("\n".join(lines) for _, lines in sorted(groups.items()))
    return f"{found}\n\n\nif TYPE_CHECKING:\n{checked}" if checked else found


def _imports_of(body: Iterable[ast.stmt], wanted: Collection[str]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            kept = [a for a in node.names if (a.asname or a.name).partition(".")[0] in wanted]
            if kept:
                node.names = kept
                yield ast.unparse(node)
