"""The figures in a patch's message: what they look like, when they are written, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import standin
from standin import Project

from graft import stack
from graft.bench import figures
from graft.errors import GraftError
from graft.stack import pins
from graft.stack.trees import bases

RESULT = pins.ROOT / "bench" / "results" / "h200_norms14.json"
SPEC = "bench/results/norms.json case=rms_norm_backward view=cases"
MESSAGE = "[inductor] First\n\nWhy.\n\nTest plan: python test/inductor/test_first.py\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "bench" / "results").mkdir(parents=True)
    results = json.loads(RESULT.read_text())
    for contender in results["contenders"].values():
        contender["torch"] = "2.11.0+cu130"
    (tmp_path / "bench" / "results" / "norms.json").write_text(json.dumps(results))
    return tmp_path


def entry(root: Path, text: str) -> None:
    figures.file(root).write_text(text)


def test_the_block(root: Path) -> None:
    assert figures.load(root) == {}
    entry(root, f'["first.patch"]\ntable = "{SPEC}"\n')
    block = figures.load(root)["first.patch"]
    head, empty, columns, rule, row = block.splitlines()
    assert head.startswith("Figures (NVIDIA H200, torch 2.11.0)")
    assert empty == ""
    assert columns.split(" | ")[3] == "stock / patched"
    assert rule.startswith("| ---")
    assert row.startswith("| rms_norm_backward | bf16 | 14 |")
    for word in ("graft", "bench/", "json"):
        assert word not in block


def test_where_it_goes() -> None:
    block = "Figures (a GPU)\n\n| a |\n| --- |\n| 1 |\n"
    once = figures.reworded(MESSAGE, block)
    assert once == f"[inductor] First\n\nWhy.\n\n{block}\nTest plan: {MESSAGE.split('plan: ')[1]}"
    assert figures.reworded(once, block) == once
    new = block.replace("| 1 |", "| 2 |").replace("a GPU", "another GPU")
    assert figures.reworded(once, new) == once.replace(block, new)
    assert figures.reworded("Short\n", block) == f"Short\n\n{block}"
    assert figures.reworded(MESSAGE, None) == MESSAGE
    mine = "First\n\nFigures (by hand)\n\nare prose.\n"
    assert figures.reworded(mine, None) == mine


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[first", "is not TOML"),
        ('["first.patch"]\n', "expected table ="),
        ('["first.patch"]\ntable = 1\n', "expected table ="),
        ('["first.patch"]\ntable = "bench/results/none.json"\n', "none.json"),
        ('["first.patch"]\ntable = "bench/results/norms.json case=no"\n', "has no row"),
    ],
)
def test_a_wrong_entry_is_refused(root: Path, text: str, told: str) -> None:
    entry(root, text)
    with pytest.raises(GraftError, match=told):
        figures.load(root)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("figures")
    commit = standin.make_checkout(folder / "checkout")
    base = bases.probe(standin.make_base(folder / "base", commit))
    made = standin.make_project(folder / "project", base, folder / "checkout")
    made.edit()
    made.commit(MESSAGE, _inductor__first="")
    made.commit("[inductor] Second\n", _inductor__second="")
    made.refresh()
    (made.root / "bench" / "results").mkdir(parents=True)
    return made


def test_refresh_writes_them(bare: Project) -> None:
    results: dict[str, Any] = json.loads(RESULT.read_text())
    file = bare.root / "bench" / "results" / "norms.json"
    file.write_text(json.dumps(results))
    entry(bare.root, f'["first.patch"]\ntable = "{SPEC}"\n')
    before = bare.stack
    assert figures.stale(before, bare.root) == ["first.patch"]
    done = bare.refresh()
    assert done.written == ("patches/v2.11.0/first.patch",)
    first, second = bare.stack.patches
    assert "Figures (NVIDIA H200" in first.message
    assert first.message.endswith("\nTest plan: python test/inductor/test_first.py\n")
    assert second.text == before.patches[1].text
    assert bare.stack.hash == before.hash  # results are of the stack, whatever its messages say
    assert bare.refresh().written == ()

    # a change in the edit keeps them, though the edit's commit has none
    bare.edit()
    bare.git("commit", "--amend", "-q", "-m", "[inductor] Second, again")
    bare.refresh()
    assert bare.stack.patches[0].text == first.text
    assert bare.stack.patches[1].subject == "[inductor] Second, again"

    # another result file, another table
    for row in results["rows"]:
        row["dtype"] = "fp16"
    file.write_text(json.dumps(results))
    assert figures.stale(bare.stack, bare.root) == ["first.patch"]
    bare.refresh()
    assert "| fp16 |" in bare.stack.patches[0].message
    assert "| bf16 |" not in bare.stack.patches[0].message

    entry(bare.root, f'["frst.patch"]\ntable = "{SPEC}"\n')
    with pytest.raises(GraftError, match=r"no such patch; did you mean first.patch"):
        bare.refresh()
    figures.file(bare.root).unlink()
    bare.refresh()


def test_messages_and_result_files_agree() -> None:
    assert figures.stale(stack.load(pins.load())) == []


def test_readme_follows_the_stack(bare: Project) -> None:
    """A refresh that changes the stack takes the figures of the one before out of README."""
    from graft.bench import parts, tables

    readme = bare.root / "README.md"
    page = bare.root / "docs" / "measured.md"
    page.parent.mkdir()
    for each in (readme, page):
        each.write_text("<!-- table: bench/results/now.json view=cases -->\n<!-- /table -->\n")
    data: dict[str, Any] = json.loads(RESULT.read_text())
    data["stack_hash"] = bare.stack.hash
    (bare.root / "bench" / "results" / "now.json").write_text(json.dumps(data))
    assert parts.tree_hash(bare.root) == bare.stack.hash
    assert bare.refresh().written == ("README.md",)
    assert f"Stack {bare.stack.hash[:12]}; measured 2026-" in readme.read_text()
    assert bare.refresh().written == ()

    bare.edit()
    bare.commit("[inductor] Third\n", _inductor__third="")
    assert "README.md" in bare.refresh().written
    assert tables.NONE_CURRENT in readme.read_text()
    assert "|" not in readme.read_text()
    assert "Stack" not in page.read_text()  # graft bench tables writes the other pages
