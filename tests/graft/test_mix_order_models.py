"""The two models of the stack, of registers and of what pays, as the lab fits and judges them."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from graft.devtools import fewest_registers, pressure, pressure_programs, profit
from graft.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"


def sample(over: float, spill_bytes: int, limit: int = 255) -> pressure.Sample:
    """A kernel that needs `over` registers more than there are, by its one term."""
    fewest = round(over) + limit if 32 < over + limit < limit else None
    return pressure.Sample("H200", False, (1.0, over + limit, 0.0), limit, spill_bytes, fewest)


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


def test_validate_judges_each_kernel_once_by_a_fit_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folds = range(pressure.FOLDS)
    # the last fold alone has a kernel that spills though its need says it does not
    found = [dataclasses.replace(sample(over, 400), fold=i) for i in folds for over in (50, 60)]
    found.append(dataclasses.replace(sample(-50, 400), fold=folds[-1]))
    fitted = []

    def fit(learnt: list[pressure.Sample]) -> list[float]:
        fitted.append({each.fold for each in learnt})
        return [0.0, 1.0, 0.0, 0.0, 0.0]

    monkeypatch.setattr(pressure, "fit", fit)
    line, *_ = pressure.validate(found)
    assert fitted == [{*folds} - {fold} for fold in folds]
    assert "kernels   17 spill   17 predicted   16  found 0.941  right 1.000" in line


def test_fewest_registers_are_found_within_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def spill_bytes(ptx: str, capability: int, registers: int) -> int:
        asked.append(registers)
        return 8 * max(0, 108 - registers)

    monkeypatch.setattr(fewest_registers, "_spill_bytes", spill_bytes)
    found = fewest_registers.fewest_registers("", 90, 255, 64)
    assert found is not None
    assert 100 <= found <= 100 + fewest_registers.TOLERANCE
    assert len(asked) < 10
    assert fewest_registers.fewest_registers("", 90, 96, 64) is None


def test_fewest_registers_limits_the_kernel() -> None:
    ptx = """
    .version 8.0
    .target sm_90a
    .address_size 64
    .visible .entry many(.param .u64 p)
    .reqntid 128
    {
    .reg .b64 %a;
    .reg .f32 %f<129>;
    ld.param.u64 %a, [p];
    """
    ptx += "".join(f"ld.volatile.global.f32 %f{i}, [%a+{4 * i}];\n" for i in range(128))
    ptx += "bar.sync 0;\n"
    ptx += "".join(f"st.volatile.global.f32 [%a+{4 * i}], %f{i};\n" for i in range(128))
    found = fewest_registers.fewest_registers(ptx + "ret;\n}\n", 90, 255, 0)
    assert found is not None
    assert 128 < found < 160


def test_programs_with_more_outputs_are_the_same_otherwise() -> None:
    plain, more = (pressure_programs.programs(7, outputs) for outputs in (0, 8))
    for _ in range(20):
        one, other = next(plain), next(more)
        assert one.copies < other.copies <= one.copies + 8
        assert one == dataclasses.replace(other, copies=one.copies)


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


def test_a_pair_that_is_never_fused_has_no_work(tmp_path: Path) -> None:
    line = {"case": "sum_both", "dtype": "bf16", "shape": [8, 16], "work": None}
    with gzip.open(tmp_path / "works.jsonl.gz", "wt") as file:
        file.write(json.dumps(line) + "\n")
    assert profit.read(tmp_path / "works.jsonl.gz") == {("sum_both", "bf16", (8, 16)): None}


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
