"""`graft bench carry`: figures of an earlier stack whose code is the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from graft.bench import carried, parts, provenance, publish, results
from graft.devtools import carry as carrying
from graft.devtools import codes, same_code, snapshots
from graft.errors import GraftError, UsageError
from graft.stack.trees import tree

FIND = snapshots.find
BEFORE, NOW, OTHER = "a" * 64, "b" * 64, "c" * 64
asked: list[tuple[str, str]] = []
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


def measured(
    path: Path, command: str, stack: str = BEFORE, pin: str = "v2.11.0", gpu: str = "NVIDIA H200"
) -> None:
    head = {
        "schema": results.SCHEMA,
        "pin": pin,
        "stack_hash": stack,
        "date": "2026-11-24T01:00:00",
        "commands": [command],
        "clock": {},
        "contenders": {},
        "gpus": [{"name": gpu}],
        "complete": True,
    }
    row = {"case": "rms_norm", "shape": [8, 8], "dtype": "bf16", "times": {}}
    path.write_text(json.dumps({**head, "rows": [row]}))


@pytest.fixture
def compared(root: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What `same_code.compare` finds, a kind and its count; it keeps what it was asked for."""
    counts = Counter(same=3)
    asked.clear()

    def compare(sides: object, base: object, wanted: same_code.Wanted, **_: object) -> object:
        (group,), (gpu,) = wanted.groups, wanted.gpus
        assert all(item.startswith(f"{group}/") for item in wanted.only)
        asked.append((wanted.only[0], gpu))
        found = [same_code.Difference(f"{wanted.only[0]}x", gpu, "different", (), ())]
        return SimpleNamespace(
            counts={("points", gpu): counts}, differences=found[: counts["different"]]
        )

    def listed(group: str) -> list[str]:
        if group == codes.MODELS:
            return []
        return [f"{group}/{name}/rms_norm" for name in results.named(root) if name != "models"]

    monkeypatch.setattr(same_code, "compare", compare)
    monkeypatch.setattr(carrying, "listed", listed)
    return counts


def test_the_same_code_counts_as_measured(root: Path, compared: Counter[str]) -> None:
    said: list[str] = []
    carrying.carry("HEAD~1", root, say=said.append, root=root)
    norms, sums, models = (publish.state(part, NOW, root) for part in parts.load(root).parts)
    assert [each.fresh for each in (norms, sums)] == [True, True]
    assert not models.fresh
    assert "models: not compared, 1 of 1 are no models of a library that is here" in said
    assert f"the same code in {NOW[:12]}" in str(norms)
    assert not publish.state(norms.part, OTHER, root).fresh
    stamp = provenance.stamp(root / norms.part.result, root)
    assert stamp == f"Stack {BEFORE[:12]}, 2026-11-24 (the same code in {NOW[:12]})"


def test_models_whose_library_is_here(
    root: Path, compared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    items = ["models/rms_norm", "models/bert"]
    monkeypatch.setattr(carrying, "listed", lambda group: items if group == codes.MODELS else [])
    carrying.carry("HEAD~1", root, ["models"], say=lambda line: None, root=root)
    (models,) = (part for part in parts.load(root).parts if part.name == "models")
    assert publish.state(models, NOW, root).fresh
    assert asked == [("models/rms_norm", "H200")]


@pytest.mark.parametrize("kind", ["different", "failed on both", "failed on one"])
def test_other_code_does_not(root: Path, compared: Counter[str], kind: str) -> None:
    compared[kind] = 1
    said: list[str] = []
    with pytest.raises(GraftError, match="other code: norms") as caught:
        carrying.carry("HEAD~1", root, ["norms"], say=said.append, root=root)
    assert caught.value.next == "graft bench publish --part norms"
    assert f"1 {kind}" in said[0]
    assert not publish.state(parts.load(root).parts[0], NOW, root).fresh


def test_points_with_the_same_code_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, compared: Counter[str]
) -> None:
    """Where others have not, publish goes on with them; and a page says of which stack they are."""
    (norms, *_) = parts.load(root).parts
    data = json.loads((root / norms.result).read_text())
    data["rows"] = [{**data["rows"][0], "shape": [8, columns]} for columns in (8, 16, 32)]
    (root / norms.result).write_text(json.dumps(data))
    monkeypatch.setattr(carrying, "listed", lambda group: ["points/norms/rms_norm"] * 3)
    other = same_code.Difference("points/norms/rms_norm/8x16/bf16", "H200", "different", (), ())
    found = SimpleNamespace(
        counts={("points", "H200"): Counter(same=2, different=1)}, differences=[other]
    )
    monkeypatch.setattr(same_code, "compare", lambda *_, **__: found)
    said: list[str] = []
    with pytest.raises(GraftError, match="other code: norms"):
        carrying.carry("HEAD~1", root, ["norms"], say=said.append, root=root)
    assert "norms: 2 of 3 points need not be measured anew" in said
    state = publish.state(norms, NOW, root)
    assert not state.fresh
    assert str(state).endswith("; of a new one 2 rows")
    begun = publish.folder(root) / "norms.json"
    rows = results.load(begun)["rows"]
    assert [row["shape"] for row in rows] == [[8, 8], [8, 32]]
    assert {row["measured"]["stack"] for row in rows} == {BEFORE}
    # which is kept from one stack to the next
    whole = results.load(begun) | {"date": "2026-11-29", "complete": True}
    whole["rows"].append({**data["rows"][1]})
    results.save(whole, root / norms.result)
    assert provenance.stamp(root / norms.result, root) == (
        f"Stack {NOW[:12]}, 2026-11-29; 2 points {BEFORE[:12]}, 2026-11-24, with the same code"
    )
    of_one = provenance.of_one(NOW, [root / norms.result])
    assert of_one == (
        f"Stack {NOW[:12]}, or an earlier one that generates the same code; "
        "measured 2026-11-24, 2026-11-29"
    )
    publish.begin(begun, whole, whole["rows"][::2], OTHER)
    assert [row["measured"]["stack"] for row in results.load(begun)["rows"]] == [BEFORE, NOW]


def test_points_of_no_part_with_the_same_code_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, compared: Counter[str]
) -> None:
    """The command that measured them goes on with them."""
    path = root / "bench/results/sums_fp32.json"
    measured(path, "graft bench sum --dtype fp32")
    data = json.loads(path.read_text())
    data["rows"] = [{**data["rows"][0], "shape": [8, columns]} for columns in (8, 16)]
    path.write_text(json.dumps(data))
    monkeypatch.setattr(carrying, "listed", lambda group: ["points/sums_fp32/rms_norm"] * 2)
    case = data["rows"][0]["case"]
    other = same_code.Difference(f"points/sums_fp32/{case}/8x16/bf16", "H200", "different", (), ())
    found = SimpleNamespace(
        counts={("points", "H200"): Counter(same=1, different=1)}, differences=[other]
    )
    monkeypatch.setattr(same_code, "compare", lambda *_, **__: found)
    with pytest.raises(GraftError, match="other code: sums_fp32") as caught:
        carrying.carry("HEAD~1", root, ["sums_fp32"], say=lambda line: None, root=root)
    begun = publish.folder(root) / "sums_fp32.json"
    assert caught.value.next == f"graft bench sum --dtype fp32 --out {begun}"
    assert [row["shape"] for row in results.load(begun)["rows"]] == [[8, 8]]


def test_what_measures_them_anew(
    root: Path, compared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts at once, the others by their own commands, with the tree of their pin."""
    compared["different"] = 1
    measured(root / "bench/results/h100_sums.json", "graft bench sum --dtype fp32")
    with pytest.raises(GraftError, match="other code: h100_sums norms sums") as caught:
        carrying.carry("HEAD~1", root, say=lambda line: None, root=root)
    parts_first = "graft bench publish --part norms --part sums; graft bench sum --dtype fp32"
    assert caught.value.next == parts_first
    pin = "v2.15.0"
    built = SimpleNamespace(prefix=root, stack_hash=NOW, base=None, pin=pin)
    monkeypatch.setattr(tree, "load", lambda prefix: built)
    measured(root / "bench/results/newest.json", "graft bench sum", pin=pin)
    with pytest.raises(GraftError, match="other code: newest") as caught:
        carrying.carry("HEAD~1", root, say=lambda line: None, root=root)
    assert caught.value.next == f"graft bench sum --prefix {root}"


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
    measured(root / "bench/results/newest.json", "graft bench sum", pin="v2.15.0")
    with pytest.raises(UsageError, match="no result is of HEAD~1, v2.11.0, stack aaaaaaaaaaaa"):
        carrying.carry("HEAD~1", root, say=lambda line: None, root=root)


def test_results_that_are_no_part(root: Path, compared: Counter[str]) -> None:
    """By the names of their files, for the GPU that each is of, parts or not."""
    path = root / "bench/results/h100_sums.json"
    measured(path, "graft bench sum --dtype fp32", gpu="NVIDIA H100 80GB HBM3")
    carrying.carry("HEAD~1", root, say=lambda line: None, root=root)
    assert asked == [
        ("points/h100_sums/", "H100"),
        ("points/norms/", "H200"),
        ("points/sums/", "H200"),
    ]
    assert f"the same code in {NOW[:12]}" in provenance.stamp(path, root)
    compared["different"] = 1
    with pytest.raises(GraftError, match="other code: h100_sums") as caught:
        carrying.carry("HEAD~1", root, ["h100_sums"], say=lambda line: None, root=root)
    assert caught.value.next == "graft bench sum --dtype fp32"


def test_a_tree_of_another_pin(
    root: Path, compared: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its results are compared, and its own patches are what it has to be of."""
    pin = "v2.15.0"
    built = SimpleNamespace(prefix=root, stack_hash=NOW, base=None, pin=pin)
    monkeypatch.setattr(tree, "load", lambda prefix: built)
    measured(root / "bench/results/newest.json", "graft bench sum", pin=pin)
    hashes = {"v2.11.0": OTHER, pin: NOW}
    monkeypatch.setattr(parts, "tree_hash", lambda root, pin="v2.11.0": hashes[pin])
    carrying.carry("HEAD~1", root, say=lambda line: None, root=root)
    assert asked == [("points/newest/", "H200")]
    hashes[pin] = OTHER
    with pytest.raises(GraftError, match="and patches/ cccccccccccc") as caught:
        carrying.carry("HEAD~1", root, say=lambda line: None, root=root)
    assert caught.value.next == "./build.sh --pin v2.15.0"


def test_a_name_that_is_none(root: Path, compared: Counter[str]) -> None:
    with pytest.raises(UsageError, match="no 'norm', and .* no such part.*norms"):
        carrying.carry("HEAD~1", root, ["norm"], say=lambda line: None, root=root)


def test_a_gpu_that_nothing_describes(root: Path, compared: Counter[str]) -> None:
    measured(root / "bench/results/sums.json", "graft bench sum", gpu="NVIDIA Foo")
    with pytest.raises(GraftError, match="sums.json: no described GPU is 'NVIDIA Foo'"):
        carrying.carry("HEAD~1", root, ["sums"], say=lambda line: None, root=root)


def test_file_that_is_none(root: Path) -> None:
    carried.file(root).write_text("{")
    with pytest.raises(GraftError, match="same_code.json is not JSON"):
        carried.stack(root / "bench/results/norms.json", BEFORE, root)


def test_points_are_the_rows_of_what_was_measured() -> None:
    items = codes.listed(codes.POINTS)
    assert "points/h200_norms14/rms_norm_backward/4096x8192/bf16" in items
    named = {item.split("/")[1] for item in items}
    assert named <= set(results.named())
    assert not {name for name in named if "models" in name}


def test_no_such_revision(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "find", FIND)
    with pytest.raises(UsageError, match="no commit, branch or tag 'nosuch'") as caught:
        carrying.carry("nosuch", root, say=lambda line: None, root=root)
    assert caught.value.next == "graft bench carry HEAD~1"
