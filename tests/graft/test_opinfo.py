"""graft opinfo: which operators and samples, what is right, and the report; a part of it in full,
under Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_process import LabProcess
from rich.console import Console

from graft import stack
from graft.errors import UsageError
from graft.places import ROOT
from graft.stack import pins
from graft.stack.trees import tree
from graft.testing.runner import Result
from graft.upstream import opinfo
from graft.upstream.comparison import Comparison, Row
from graft.upstream.operators import Case

PATCHED = ROOT / "build" / "bin" / "python"

# Each form, dtype and kind of operator; the ones whose sums make mix-order kernels.
QUICK = (
    "sum-float32-4-sums",
    "prod-bfloat16-0-sums",
    "amax-bfloat16-8-sums",
    "var_mean-float32-0-sums",
    "argmax-float32-6-alone",
    "softmax-float32-1-sums",
    "log_softmax-bfloat16-1-sums",
    "nn.functional.layer_norm-float32-1-sums",
    "nn.functional.layer_norm-bfloat16-1-alone",
    "nn.functional.rms_norm-float32-1-sums",
    "nn.functional.rms_norm-bfloat16-3-sums",
    "nn.functional.group_norm-float32-0-alone",
    "nn.functional.batch_norm-float32-0-sums",
    "nn.functional.normalize-float32-0-sums",
    "nn.functional.cross_entropy-float32-0-sums",
    "nn.functional.mse_loss-bfloat16-4-sums",
    "masked.sum-float32-16-sums",
    "nansum-bfloat16-0-alone",
    "norm.fro-float32-0-sums",
    "nn.functional.nll_loss-float32-0-sums",
)


@pytest.fixture(scope="module")
def lab() -> Iterator[LabProcess]:
    python = str(PATCHED) if PATCHED.exists() else sys.executable
    process = LabProcess(__file__, python)
    yield process
    process.close()


def _machine() -> Any:
    from graft.devtools import fuzz

    if not hasattr(_machine, "made"):
        _machine.made = fuzz.Machine("lab")  # type: ignore[attr-defined]
    return _machine.made  # type: ignore[attr-defined]


def in_lab_check(case: str) -> list[Any]:
    import dataclasses

    machine = _machine()
    from graft.upstream import operators

    return list(dataclasses.astuple(operators.check(machine, Case.parse(case))))


@pytest.mark.parametrize("case", QUICK)
def test_a_part_of_the_database(lab: LabProcess, case: str) -> None:
    kind, mix_order, detail, *_ = lab("check", case)
    assert kind == "ok", detail
    if "norm-float32-1-sums" in case or "softmax" in case:
        assert mix_order, "the graph has no mix-order kernel: what is it a test of?"


def in_lab_operators() -> list[str]:
    _machine()
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import ReductionOpInfo

    from graft.upstream import operators

    taken = operators.operators()
    left = [op.name for op in op_db if isinstance(op, ReductionOpInfo) and op.name not in taken]
    assert not [name for name in left if not any(t.startswith(f"{name}.") for t in taken)]
    words = ("norm", "softm", "loss", "entropy")
    likely = {op.name for op in op_db if any(word in op.name for word in words)}
    return [*taken, "", *(likely - {op.name for op in taken.values()})]


def test_which_operators(lab: LabProcess) -> None:
    names = lab("operators")
    taken, left = names[: names.index("")], names[names.index("") + 1 :]
    assert len(taken) > 100
    for name in ("sum", "var_mean", "max.reduction_with_dim", "aminmax", "logsumexp", "norm.fro"):
        assert name in taken
    for name in ("native_layer_norm", "nn.functional.rms_norm", "nn.functional.kl_div"):
        assert name in taken
    for name in ("add", "max.binary", "cdist", "mm", "normal"):
        assert name not in taken
    assert sorted(left) == ["log_normal", "normal"]  # random numbers


def in_lab_cases(samples: int) -> list[str]:
    _machine()
    from graft.upstream import operators

    return [str(case) for case in operators.cases(samples)]


def test_cases_are_spread(lab: LabProcess) -> None:
    two, every = lab("cases", 2), lab("cases", 0)
    assert len(set(two)) == len(two)
    assert set(two) <= set(every)
    assert len(every) > 10_000
    names = ("sum", "trace", "log_softmax")
    count = {name: sum(c.startswith(f"{name}-float32-") for c in two) for name in names}
    assert count == {"sum": 6, "trace": 3, "log_softmax": 7}  # trace has one sample
    assert "log_softmax-float32-6-alone" in two  # of a scalar
    start = {Case.parse(case).operator for case in two[: len(two) // 2 + 100]}
    assert start == {Case.parse(case).operator for case in two}
    assert "nn.functional.pdist" not in {
        Case.parse(c).operator for c in every if c.endswith("-large")
    }


def test_a_case_and_its_name() -> None:
    case = Case("nn.functional.softmin.with_dtype", "bfloat16", 12, "large")
    assert str(case) == "nn.functional.softmin.with_dtype-bfloat16-12-large"
    assert Case.parse(str(case)) == case
    for text in ("sum-float64-0-alone", "sum-float32-x-alone", "sum", "sum-float32-0-huge"):
        with pytest.raises(ValueError, match=r"no case|invalid literal|unpack"):
            Case.parse(text)


def in_lab_enlarged(case: str) -> list[Any]:
    _machine()
    import torch

    from graft.upstream import operators

    parsed = Case.parse(case)
    op = operators.operators()[parsed.operator]
    sample = [*operators._samples(op, parsed.dtype)][parsed.index]
    call = operators._Call([sample.input, list(sample.args), dict(sample.kwargs)], [])
    longer = operators._enlarged(parsed, operators._with_sums(op.op), call)
    shaped = [x for x in longer.arguments[1] if not isinstance(x, torch.Tensor)]
    shapes = [[list(x.shape) for x in each.tensors()] for each in (call, longer)]
    zeros = [list(x.shape) for x in operators._with_zeros(longer).zeros]
    return [*shapes, shaped, zeros]


def test_what_follows_the_input_when_it_is_enlarged(lab: LabProcess) -> None:
    before, after, shape, zeros = lab("enlarged", "nn.functional.layer_norm-float32-1-sums")
    assert before == [[2, 2, 3], [2, 3], [2, 3]]
    assert after == [[14, 2, 9], [2, 9], [2, 9]]
    assert shape[0] == [2, 9]
    assert zeros == [[1, 2, 9], [14, 1, 9], [14, 2, 1], [1, 1, 9]]
    before, after, *_ = lab("enlarged", "nn.functional.mse_loss-float32-4-sums")
    assert before == [[5, 5], [5, 5]]
    assert after == [[35, 15], [35, 15]]
    before, after, *_ = lab("enlarged", "nn.functional.cross_entropy-float32-0-sums")
    assert before == [[2, 3], [2]]  # classes, and a target a row
    assert after == [[14, 9], [14]]


def in_lab_by_chance(by_eager_too: bool) -> list[Any]:
    """What becomes of an operator that is not the same twice."""
    machine = _machine()
    import types

    import torch

    from graft.upstream import operators

    def by_chance(x: Any) -> Any:
        if by_eager_too or torch.compiler.is_compiling():
            x = x + torch.rand_like(x)
        return x * 2

    def samples(op: Any, device: str, dtype: Any, requires_grad: bool) -> Any:
        yield types.SimpleNamespace(input=torch.ones(5, 3, dtype=dtype), args=(), kwargs={})

    op = types.SimpleNamespace(
        op=by_chance, sample_inputs_func=samples, dtypesIfCUDA={torch.float32},
        supports_autograd=False,
    )  # fmt: skip
    operators.operators()["by_chance"] = op
    try:
        outcome = operators.check(machine, Case("by_chance", "float32", 0, "alone"))
    finally:
        del operators.operators()["by_chance"]
    return [outcome.kind, outcome.detail]


def test_what_is_not_the_same_twice_is_wrong_where_eager_is(lab: LabProcess) -> None:
    assert lab("by_chance", False) == ["unstable", "output 0: two runs differ"]
    assert lab("by_chance", True)[0] == "ok"


def in_lab_reference(case: str) -> list[str]:
    """The dtypes of what a case is held to."""
    _machine()
    from graft.upstream import operators

    wanted = Case.parse(case)
    op = operators.operators()[wanted.operator]
    sample = [*operators._samples(op, wanted.dtype)][wanted.index]
    call = operators._Call([sample.input, list(sample.args), dict(sample.kwargs)], [])
    named = operators._run(operators._alone(op.op), call.in_double())
    return [str(x.dtype) for x in named.values() if x.is_floating_point()]


@pytest.mark.parametrize(
    "case",
    ["_softmax_backward_data-float32-0-alone", "nn.functional.softmin.with_dtype-bfloat16-0-alone"],
)
def test_the_reference_is_float64_where_an_argument_names_a_dtype(
    lab: LabProcess, case: str
) -> None:
    assert set(lab("reference", case)) == {"torch.float64"}


def in_lab_wrong(form: str) -> list[list[Any]]:
    """What becomes of an operator that is compiled into something else, or not at all."""
    machine = _machine()
    import types
    from unittest import mock

    import torch
    from torch._inductor.scheduler import Scheduler

    from graft.upstream import operators

    def softly(x: Any, how: str) -> Any:
        soft = torch.softmax(x, -1)
        if torch.compiler.is_compiling():
            wrong = {"value": soft * 1.001, "shape": soft[:-1], "dtype": soft.double()}
            soft = wrong.get(how, soft)
        return soft

    def samples(op: Any, device: str, dtype: Any, requires_grad: bool) -> Any:
        for how in ("right", "value", "shape", "dtype"):
            x = torch.randn(5, 3, dtype=dtype).requires_grad_(requires_grad)
            yield types.SimpleNamespace(input=x, args=(how,), kwargs={})

    op = types.SimpleNamespace(
        op=softly, sample_inputs_func=samples, dtypesIfCUDA={torch.float32}, supports_autograd=True
    )
    operators.operators()["softly"] = op
    try:
        cases = [Case("softly", "float32", at, form) for at in range(4)]
        found = [operators.check(machine, case) for case in cases]
        with mock.patch.object(Scheduler, "__init__", side_effect=AssertionError("not so")):
            found.append(operators.check(machine, cases[0]))
    finally:
        del operators.operators()["softly"]
    return [[outcome.kind, outcome.detail] for outcome in found]


@pytest.mark.parametrize("form", ["alone", "sums"])
def test_what_is_wrong_is_found(lab: LabProcess, form: str) -> None:
    right, value, shape, dtype, error = lab("wrong", form)
    assert right[0] == "ok", right
    assert value[0] == "wrong"
    assert "error" in value[1]
    assert shape[0] == dtype[0] == "wrong"
    assert "shape" in shape[1]
    assert "dtype" in dtype[1]
    assert error[0] == "error"
    assert "not so" in error[1]


# --- the report ----------------------------------------------------------------------------------


def row(case: str, stock: str, patched: str, fused: tuple[int, int] = (0, 0)) -> Row:
    results = [
        Result(outcome, f"{outcome}: why", 1.0, {"mix_order": count})
        for outcome, count in zip((stock, patched), fused)
    ]
    return Row(f"inductor/test_operators.py::test_operator[{case}]", results[0], results[1])


def test_the_counts_and_the_report() -> None:
    rows = [
        row("sum-float32-0-sums", "passed", "failed", (1, 2)),
        row("sum-float32-0-alone", "failed", "passed"),
        row("amax-float32-0-sums", "failed", "failed", (1, 0)),
        row("amax-float32-0-alone", "skipped", "skipped"),
    ]
    found = Comparison(rows)
    counts = opinfo.counts(found)
    assert vars(counts["sums"]) == {
        "cases": 2, "skipped": 0, "stock": 1, "patched": 2, "new": 1, "fused_stock": 2,
        "fused_patched": 1,
    }  # fmt: skip
    assert (counts["all"].cases, counts["all"].stock, counts["all"].skipped) == (4, 2, 1)
    console = Console(record=True, width=160)
    opinfo.show(found, console)
    lines = console.export_text().splitlines()
    assert lines[1].split()[:3] == ["sum-float32-0-sums", "passed", "failed"]
    assert any(line.startswith("amax-float32-0-sums") for line in lines)
    data = opinfo.as_json(found)
    assert [each["case"] for each in data["failing"] if each["new"]] == ["sum-float32-0-sums"]
    assert len(data["failing"]) == 3


@pytest.mark.skipif(not PATCHED.exists(), reason="needs the patched tree in build/")
def test_both_sides_in_processes_of_their_own(tmp_path: Path) -> None:
    built = tree.load(ROOT / "build")
    found = opinfo.compare(
        built,
        stack.load(pins.load(built.pin)),
        device="lab",
        samples=1,
        forms=["alone"],
        keyword="trace-float32",
        workers=2,
        kept=tmp_path,
    )
    assert [row.outcomes for row in found.rows] == [("passed", "passed")]
    assert found.rows[0].test.endswith("[trace-float32-0-alone]")
    with pytest.raises(UsageError, match="did you mean alone"):
        opinfo.compare(built, stack.load(pins.load(built.pin)), forms=["alon"])
