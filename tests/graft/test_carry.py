"""`graft bench carry`: figures of an earlier stack whose code is the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from graft.bench import carried, parts, provenance, publish
from graft.devtools import carry as carrying
from graft.devtools import codes, same_code, snapshots
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack.trees import tree

FIND = snapshots.find
BEFORE, NOW, OTHER = "a" * 64, "b" * 64, "c" * 64
LIST = """
gpu = "NVIDIA H200"
[norms]
title = "norms"
command = "graft bench rms_norm"
result = "bench/results/norms.json"
minutes = 1
[sums]
title = "sums"
command = "graft bench sum"
result = "bench/results/sums.json"
minutes = 1
[models]
title = "models"
command = "graft bench models"
result = "bench/results/models.json"
minutes = 1
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three results of BEFORE, and a tree of NOW."""
    (tmp_path / "bench/results").mkdir(parents=True)
    parts.file(tmp_path).write_text(LIST)
    for part in parts.load(tmp_path).parts:
        measured(tmp_path / part.result, part.command)
    built = SimpleNamespace(prefix=tmp_path, stack_hash=NOW, base=None, pin="v2.11.0")
    monkeypatch.setattr(tree, "load", lambda prefix: built)
    monkeypatch.setattr(
        snapshots,
        "find",
        lambda name, *_: SimpleNamespace(hash=NOW if name == "." else BEFORE, what=name),
    )
    return tmp_path


def measured(path: Path, command: str, stack: str = BEFORE) -> None:
    head = {"stack_hash": stack, "date": "2026-11-24T01:00:00", "commands": [command]}
    path.write_text(json.dumps({**head, "complete": True, "rows": [{}]}))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What `same_code.compare` finds, a kind and its count; it keeps what it was asked for."""
    counts = Counter(same=3)

    def compare(sides: object, base: object, wanted: same_code.Wanted, **_: object) -> object:
        assert wanted.groups == (codes.POINTS,)
        assert wanted.gpus == ("H200",)
        found = [same_code.Difference(f"{wanted.only[0]}x", "H200", "different", (), ())]
        return SimpleNamespace(
            counts={("points", "H200"): counts}, differences=found[: counts["different"]]
        )

    monkeypatch.setattr(same_code, "compare", compare)
    return counts


def test_the_same_code_counts_as_measured(root: Path, compared: Counter[str]) -> None:
    said: list[str] = []
    carrying.carry("HEAD~1", root, say=said.append, root=root)
    norms, sums, models = (publish.state(part, NOW, root) for part in parts.load(root).parts)
    assert [each.fresh for each in (norms, sums)] == [True, True]
    assert not models.fresh  # the lab has no models
    assert f"the same code in {NOW[:12]}" in str(norms)
    assert not publish.state(norms.part, OTHER, root).fresh
    stamp = provenance.stamp(root / norms.part.result, root)
    assert stamp == f"Stack {BEFORE[:12]}, 2026-11-24 (the same code in {NOW[:12]})"


@pytest.mark.parametrize("kind", ["different", "failed on both", "failed on one"])
def test_other_code_does_not(root: Path, compared: Counter[str], kind: str) -> None:
    compared[kind] = 1
    said: list[str] = []
    with pytest.raises(GraftError, match="other code: norms") as caught:
        carrying.carry("HEAD~1", root, ["norms"], say=said.append, root=root)
    assert caught.value.next == "graft bench publish --part norms"
    assert f"1 {kind}" in said[0]
    assert not publish.state(parts.load(root).parts[0], NOW, root).fresh


def test_measured_anew(root: Path, compared: Counter[str]) -> None:
    """What was found of an earlier result says nothing of this one."""
    carrying.carry("HEAD~1", root, ["norms"], say=lambda line: None, root=root)
    part = parts.load(root).parts[0]
    measured(root / part.result, part.command, OTHER)
    assert not publish.state(part, NOW, root).fresh
    assert provenance.stamp(root / part.result, root) == f"Stack {OTHER[:12]}, 2026-11-24"


def test_nothing_of_that_stack(root: Path, compared: Counter[str]) -> None:
    for part in parts.load(root).parts:
        measured(root / part.result, part.command, OTHER)
    with pytest.raises(UsageError, match="no part is whole and of HEAD~1"):
        carrying.carry("HEAD~1", root, say=lambda line: None, root=root)


def test_file_that_is_none(root: Path) -> None:
    carried.file(root).write_text("{")
    with pytest.raises(GraftError, match="same_code.json is not JSON"):
        carried.stack(root / "bench/results/norms.json", BEFORE, root)


def test_points_are_the_rows_of_what_is_published() -> None:
    items = codes.listed(codes.POINTS)
    assert "points/norms14/rms_norm_backward/4096x8192/bf16" in items
    named = {part.name for part in parts.load(ROOT).parts if not part.models}
    assert {item.split("/")[1] for item in items} <= named


def test_no_such_revision(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "find", FIND)
    with pytest.raises(UsageError, match="no commit, branch or tag 'nosuch'") as caught:
        carrying.carry("nosuch", root, say=lambda line: None, root=root)
    assert caught.value.next == "graft bench carry HEAD~1"
