"""The two models of the stack, of registers and of what pays, as the lab fits and judges them."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.errors import UsageError
from graft.lab import pressure, profit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def sample(over: float, spill_bytes: int, limit: int = 255) -> pressure.Sample:
    """A kernel that needs `over` registers more than there are, by its one term."""
    return pressure.Sample("H200", False, (1.0, over + limit, 0.0), limit, limit, spill_bytes)


def test_fit_draws_the_line_where_kernels_spill() -> None:
    found = [sample(over, 8 * max(0, over - 40)) for over in range(-120, 240, 2)]
    *_, over_64_bytes, over_256_bytes = coefficients = pressure.fit(found)
    assert over_64_bytes < over_256_bytes
    spills, *_ = pressure.judge(found, coefficients)
    assert "found 1.000" in spills or "found 0.99" in spills


def test_judge_counts_what_was_missed() -> None:
    found = [sample(50, 400), sample(-50, 400), sample(50, 0), sample(-50, 0)]
    line, *_ = pressure.judge(found, [0.0, 1.0, 0.0, 0.0, 0.0])
    assert "kernels    4 spill    2 predicted    2  found 0.500  right 0.500" in line


def test_committed_kernels_are_distinct_and_of_four_gpus() -> None:
    lines = list(pressure.read(RESULTS / "pressure.jsonl.gz"))
    names = {(line["seed"], line["gpu"], line["program_id"], line["kernel"]) for line in lines}
    assert len(names) == len(lines) >= 500
    held_out = [line["seed"] in pressure.HELD_OUT_SEEDS for line in lines]
    assert {line["gpu"] for line in lines} == {"A100", "H100", "H200", "B200"}
    assert 0 < sum(held_out) < len(lines)


def test_works_are_read_by_case_dtype_and_shape() -> None:
    works = profit.read(RESULTS / "mix_order_works.jsonl.gz")
    found = works["sum_both", "bf16", (1024, 1024)]
    assert found is not None
    # x is read once fused and twice not
    assert found["shared_bytes"] == found["column_bytes"] == 2 * 1024 * 1024
    assert works["layer_norm_backward", "bf16", (1000, 12289)] is None


def test_half_of_the_shapes_are_held_out_in_every_case() -> None:
    shapes = {key[2] for key in profit.read(RESULTS / "mix_order_works.jsonl.gz")}
    points = [
        profit.Point((case, "bf16", shape), None, 4800.0, 1.0, 2.0)
        for shape in shapes
        for case in ("sum_both", "rms_norm_backward")
    ]
    held_out = [point.held_out for point in points]
    assert held_out[::2] == held_out[1::2]
    assert 0.4 < sum(held_out) / len(held_out) < 0.6


def test_a_result_file_without_the_contenders_is_refused() -> None:
    with pytest.raises(UsageError, match="'fused'"):
        list(profit.rows([RESULTS / "h200_norms14.json"]))
