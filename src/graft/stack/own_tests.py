"""Which tests of a file a patch changes: those that read otherwise, themselves or in what they use.

A test uses the definitions of its module that it names, and those that these name in turn; the
members of its class that it, or its base classes in the module, have; and what any test of its
class does: the class's decorators, its attributes, ``setUp``. Comments and imports do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

# members that no test has to name
_OF_ALL = ("setUp", "tearDown", "setUpClass", "tearDownClass")


def changed(before: str, after: str, tests: Iterable[str]) -> list[str]:
    """Those of `tests` (node ids of the file `after`) that are not in `before`, or not so.

    Both are the text of the file; `before` may be empty. The names that parametrization makes of a
    test function begin with its own.
    """
    old, new = _Module(before), _Module(after)
    found = []
    for test in tests:
        _, *names = test.partition("[")[0].split("::")
        parts = new.reads(names)
        if not parts or any(old.parts.get(part) != new.parts[part] for part in parts):
            found.append(test)
    return found


class _Module:
    """The definitions of a module by name, those of its classes as ``Class.member``."""

    def __init__(self, text: str) -> None:
        self.parts: dict[str, str] = {}
        self.nodes: dict[str, list[ast.AST]] = {}
        self.bases: dict[str, list[str]] = {}
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                self._class(node)
            else:
                for name in _defined(node):
                    self._add(name, node)

    def _add(self, name: str, *nodes: ast.AST) -> None:
        self.nodes.setdefault(name, []).extend(nodes)
        self.parts[name] = self.parts.get(name, "") + "".join(map(ast.dump, nodes))

    def _class(self, node: ast.ClassDef) -> None:
        members = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        rest = [each for each in node.body if each not in members and not _is_text(each)]
        self.bases[node.name] = [each.id for each in node.bases if isinstance(each, ast.Name)]
        self._add(node.name, *node.decorator_list, *node.bases, *node.keywords, *rest)
        for each in members:
            self._add(f"{node.name}.{each.name}", each)

    def _classes(self, name: str) -> Iterator[str]:
        """A class and its base classes in this module, in the order in which they are asked."""
        if name in self.bases:
            yield name
            for base in self.bases[name]:
                yield from self._classes(base)

    def _member(self, owner: str, name: str) -> str | None:
        found = (f"{each}.{name}" for each in self._classes(owner))
        return next((part for part in found if part in self.parts), None)

    def _test(self, owner: str, name: str) -> str | None:
        """The test function that the name `name` was made of: the longest that it begins with."""
        ends = (at for at in range(len(name), 0, -1) if at == len(name) or name[at] == "_")
        for end in ends:
            found = self._member(owner, name[:end]) if owner else None
            found = found or (name[:end] if not owner and name[:end] in self.parts else None)
            if found:
                return found
        return None

    def reads(self, names: list[str]) -> set[str]:
        """The parts that the test `names` (a class and a function, or a function) uses."""
        owner = names[0] if len(names) > 1 else ""
        first = self._test(owner, names[-1]) if names else None
        if first is None:
            return set()
        todo = [first]
        for each in self._classes(owner):
            todo += [each, *(f"{each}.{name}" for name in _OF_ALL)]
        found: set[str] = set()
        while todo:
            part = todo.pop()
            if part in found or part not in self.parts:
                continue
            found.add(part)
            nodes = [inner for each in self.nodes[part] for inner in ast.walk(each)]
            local = set(_local(nodes))
            for node in nodes:
                if isinstance(node, ast.Name) and node.id not in local:
                    todo += self._of_name(node.id, owner)
                elif isinstance(node, ast.Attribute) and owner:
                    todo += filter(None, [self._member(owner, node.attr)])
        return found

    def _of_name(self, name: str, owner: str) -> Iterator[str]:
        """A definition; of a class that is not the test's own, all that it has."""
        own = set(self._classes(owner))
        for each in self._classes(name):
            if each not in own:
                yield each
                yield from (part for part in self.parts if part.startswith(f"{each}."))
        if name not in self.bases:
            yield name


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for each in (inner for target in targets for inner in ast.walk(target)):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id


def _local(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The names that are bound in them: not the module's."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _is_text(node: ast.stmt) -> bool:
    """A docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
