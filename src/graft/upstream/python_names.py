"""The names of a Python file: what it imports and what it defines, without running it."""

from __future__ import annotations

import ast


def imports(data: bytes, path: str) -> list[tuple[str, str]]:
    """(module as a path without .py, name) for each ``from module import name``."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            folder = [] if not node.level else path.split("/")[: -node.level]
            module = "/".join([*folder, *(node.module or "").split(".")]).strip("/")
            found += [(module, alias.name) for alias in node.names]
            found += [(f"{module}/{alias.name}", "") for alias in node.names]
    return found


def defines(data: bytes) -> set[str]:
    """The names at a module's top level, and "" for the module."""
    found = {""}
    for node in ast.parse(data).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            found |= {
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def parses(data: bytes) -> bool:
    """It is Python."""
    try:
        ast.parse(data)
    except (SyntaxError, ValueError):
        return False
    return True
