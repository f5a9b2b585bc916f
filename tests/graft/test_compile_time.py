"""How long the two sides take to generate a step's code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graft.bench import outcome_tables
from graft.devtools import compile_time
from graft.errors import GraftError


def test_a_line_has_the_medians_and_the_ratio_of_rounds() -> None:
    seconds = {"stock": [2.0, 4.0, 3.0], "patched": [3.0, 4.0, 6.0]}
    line = compile_time.summary("step", seconds)
    assert re.findall(r"\d+\.\d+", line) == ["3.00", "4.00", "1.500", "1.000", "2.000"]


def test_a_third_side_has_a_ratio_of_its_own(tmp_path: Path) -> None:
    seconds = {"stock": [2.0, 4.0], "earlier": [6.0, 8.0], "patched": [3.0, 4.0]}
    assert compile_time.summary("step", seconds).endswith("patched / earlier 0.500 [0.500, 0.500]")
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"steps": {"step": seconds}}), "utf-8")
    head, _, row = outcome_tables.table(out, "compile").splitlines()
    assert head.endswith(" patched, s | patched / stock | patched / earlier |")
    assert row.endswith("| 3.50 | 1.25 (1.00 to 1.50) | 0.50 (0.50 to 0.50) |")
    out.write_text(json.dumps({"steps": {"step": seconds, "other": {"patched": []}}}), "utf-8")
    with pytest.raises(GraftError, match="other: its sides are patched, not stock, earlier"):
        outcome_tables.table(out, "compile")


def test_both_sides_compile_the_same_graphs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    args = ["layer_norm_backward", "--rounds", "1", "--gpu", "A100", "--json", str(out)]
    assert compile_time.main(args) == 0
    (line,) = capsys.readouterr().out.splitlines()
    stock, patched, *ratios = map(float, re.findall(r"\d+\.\d+", line))
    assert line.startswith("layer_norm_backward ")
    assert stock > 0
    assert patched > 0
    assert ratios[0] == ratios[1] == ratios[2]
    assert ratios[0] == pytest.approx(patched / stock, rel=0.1)
    (row,) = outcome_tables.table(out, "compile").splitlines()[2:]
    assert row.startswith(f"| layer_norm_backward | 1 | {stock:.2f} | {patched:.2f} | ")


@pytest.mark.parametrize(
    "args", [["no_such_step"], ["--gpu", "Z1"], ["--prefix", "no/tree"], ["--earlier", "no/tree"]]
)
def test_what_there_is_not_is_named(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_time.main([*args, "--rounds", "1"]) != 0
    said = capsys.readouterr().err
    assert args[-1] in said
    assert "\nnext: " in said
