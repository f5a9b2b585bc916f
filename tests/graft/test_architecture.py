"""The tool's packages: who may import whom, and that no import goes in a circle."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from graft.places import SRC

# From what stands on nothing to the commands: a package imports from those before it alone.
LAYERS = (
    ("errors", "places", "machine", "processes"),
    ("testing", "cases"),
    ("stack",),
    ("lab",),
    ("bench", "upstream"),
    ("devtools",),
    ("cli", "bootstrap"),
    ("__main__",),
)
ENTRIES = 15  # of the folder, `__init__.py` and `__main__.py` among them


def modules(src: Path) -> dict[str, Path]:
    """Every module of the tool, by its name."""
    found = {}
    for path in (src / "graft").rglob("*.py"):
        name = ".".join(path.relative_to(src).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(src: Path) -> dict[str, set[str]]:
    """What each module imports of the tool, anywhere in it."""
    known = modules(src)
    return {name: _imports(path.read_text("utf-8"), known) for name, path in known.items()}


def _imports(text: str, known: Mapping[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports of the tool name the whole module"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module or "")
    return found & known.keys()


def layer(name: str) -> int:
    """The place of a module's package in `LAYERS`."""
    part = name.split(".")[1] if "." in name else ""
    return next((at for at, names in enumerate(LAYERS) if part in names), -1)


def against(graph: Mapping[str, set[str]]) -> list[str]:
    """The imports that go up, or to the side where two packages share a layer."""

    def package(name: str) -> str:
        return ".".join(name.split(".")[:2])

    return sorted(
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if package(name) != package(other)
        if layer(other) > layer(name) or layer(other) == layer(name) > 0
    )


def test_every_module_has_a_layer() -> None:
    assert [name for name in modules(SRC) if name != "graft" and layer(name) < 0] == []


def test_packages_import_from_those_below_them_alone() -> None:
    assert against(imports(SRC)) == []


def test_no_import_goes_in_a_circle() -> None:
    try:
        [*graphlib.TopologicalSorter(imports(SRC)).static_order()]
    except graphlib.CycleError as found:
        pytest.fail(" -> ".join(found.args[1]))


def test_the_folder_can_be_read_at_a_glance() -> None:
    entries = [path for path in (SRC / "graft").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= ENTRIES


def test_every_package_says_what_it_is() -> None:
    for path in (SRC / "graft").rglob("__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), path


def test_what_goes_up_or_around_is_found(tmp_path: Path) -> None:
    texts = {
        "__init__": "",
        "errors": "from graft import stack\n",
        "stack/__init__": "def late():\n    from graft.bench import tables\n",
        "bench/__init__": "",
        "bench/tables": "import graft.errors\n",
    }
    for name, text in texts.items():
        path = tmp_path / "graft" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    graph = imports(tmp_path)
    assert against(graph) == [
        "graft.errors imports graft.stack",
        "graft.stack imports graft.bench.tables",
    ]
    with pytest.raises(graphlib.CycleError):
        [*graphlib.TopologicalSorter(graph).static_order()]
