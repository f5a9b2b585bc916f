"""One source, several pins: their stacks differ in upstream's files and one module."""

from __future__ import annotations

import ast

import pytest

from graft import stack
from graft.stack import Stack, pins

ADAPTER = "torch/_inductor/upstream_names.py"
OTHERS = [name for name in pins.names() if name != pins.DEFAULT_PIN]


def stack_of(name: str) -> Stack:
    return stack.load(pins.load(name))


def adapter_names(series: Stack) -> set[str]:
    """What the adapter module of a stack says that it has."""
    (text,) = (
        "\n".join(line[1:] for line in hunk.lines if line.startswith("+"))
        for patch in series.patches
        for change in patch.files
        if change.path == ADAPTER
        for hunk in change.hunks
    )
    (listed,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(listed)


@pytest.mark.parametrize("name", OTHERS)
def test_the_same_patches_in_the_same_series(name: str) -> None:
    default, other = stack_of(pins.DEFAULT_PIN), stack_of(name)
    assert other.series == default.series
    assert [p.name for p in other.patches] == [p.name for p in default.patches]
    assert [p.subject for p in other.patches] == [p.subject for p in default.patches]


@pytest.mark.parametrize("name", OTHERS)
def test_new_files_are_the_same_but_for_the_adapter(name: str) -> None:
    default, other = stack_of(pins.DEFAULT_PIN), stack_of(name)
    assert other.new_files.keys() == default.new_files.keys()
    differing = {p for p, blob in other.new_files.items() if default.new_files[p] != blob}
    assert differing == {ADAPTER}


@pytest.mark.parametrize("name", OTHERS)
def test_the_adapters_have_the_same_names(name: str) -> None:
    names = adapter_names(stack_of(pins.DEFAULT_PIN))
    assert names
    assert adapter_names(stack_of(name)) == names
