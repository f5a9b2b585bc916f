"""Generated graphs: the generator and the judge by themselves, and a run of them in the lab."""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graft.devtools import fuzz
from graft.devtools.programs import Input, Program, Step, generate, generate_scans, prune, smaller
from graft.stack import pins
from graft.stack.git import blob_id

ROOT = Path(__file__).resolve().parents[2]

seeds = st.integers(0, 2**32).map(random.Random)
small_programs = seeds.map(lambda rnd: generate(rnd, "small"))
full_programs = seeds.map(lambda rnd: generate(rnd, "full"))
scans = seeds.map(lambda rnd: generate_scans(rnd, "small"))


def make(program: Program, widen: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = [x.make("cpu", generator) for x in program.inputs]
    return [t.double() if widen and t.is_floating_point() else t for t in tensors]


@example(generate_scans(random.Random(2175), "small"))  # has a topk of bools
@given(small_programs | scans)
@settings(max_examples=90, deadline=None)
def test_a_program_is_python_that_runs_and_reads_what_it_is_given(program: Program) -> None:
    ast.parse(str(program))
    outputs = program.function()(*make(program))
    assert len(outputs) == len(program.outputs) >= 1
    reference = program.function(reference=True)(*make(program, widen=True))
    for output, wide in zip(outputs, reference, strict=True):
        assert output.shape == wide.shape
        assert wide.dtype == torch.float64 or not wide.is_floating_point()
    used = set().union(*(step.reads() for step in program.steps), program.outputs)
    assert {x.name for x in program.inputs} <= used


@given(small_programs | scans)
@settings(max_examples=40, deadline=None)
def test_smaller_programs_run_and_are_smaller(program: Program) -> None:
    def size(p: Program) -> tuple[int, int, int, int]:
        elements = sum(torch.Size(x.shape).numel() for x in p.inputs)
        plain = sum(x.layout != "contiguous" for x in p.inputs)
        wide = sum(x.dtype != "float32" for x in p.inputs)
        return len(p.outputs) + len(p.steps) + len(p.inputs) + plain + wide, elements, 0, p.dynamic

    for candidate in smaller(program):  # one whose index is out of range would not run
        assert candidate != program
        assert size(candidate) <= size(program) or not candidate.dynamic
        candidate.function()(*make(candidate))


def test_no_smaller_program_takes_the_variance_of_integers() -> None:
    steps = (Step("v0", "x0.float()"), Step("v1", "v0.var((0,))"))
    program = Program((Input("x0", (4, 2), "int32"),), steps, ("v1",))
    found = list(smaller(program))
    assert found
    for candidate in found:
        candidate.function()(*make(candidate))


def test_no_smaller_program_looks_up_what_is_not_there() -> None:
    inputs = (Input("x0", (4, 2), "float32"), Input("x1", (8,), "int64", below=8))
    steps = (Step("v0", "x0.repeat_interleave(2, 0)"), Step("v1", "v0[~x1]"))
    found = list(smaller(Program(inputs, steps, ("v1",))))
    assert found
    for candidate in found:
        candidate.function()(*make(candidate))
    assert not any(len(candidate.steps) < 2 and "[" in str(candidate) for candidate in found)


def test_scans_meet_lookups_sorts_and_sums_of_either_dimension() -> None:
    texts = [str(fuzz.graph(1, index, "scans")[0]) for index in range(200)]
    for parts in (
        (".cumsum(0)", ".sum(1"),
        (".cumsum(1)", ".sum(0"),
        (".gather(", ".cumsum(", ".sum("),
        (".sort(", ".sum("),
        ("[x", ".cumsum("),
        ("[:, ~x",),
    ):
        assert any(all(part in text for part in parts) for text in texts), parts
    assert sum("cum" in text for text in texts) > 60


def test_an_index_is_in_range_and_grows() -> None:
    index = Input("x1", (100,), "int32", row_axis=0, below=7)
    made = index.make("cpu", torch.Generator().manual_seed(0), grow=20)
    assert made.shape == (120,)
    assert set(made.tolist()) == set(range(7))


@given(full_programs)
@settings(max_examples=60, deadline=None)
def test_full_size_is_what_default_mode_asks_for(program: Program) -> None:
    elements = max(torch.Size(x.shape).numel() for x in program.inputs)
    assert 4_000_000 < elements <= 60_000_000


def test_a_number_of_a_seed_is_always_the_same_graph() -> None:
    assert fuzz.graph(3, 14, "both") == fuzz.graph(3, 14, "both")
    assert fuzz.graph(3, 14, "both") != fuzz.graph(3, 16, "both")
    assert fuzz.graph(3, 15, "both")[1] == fuzz.NON_STRICT
    assert fuzz.graph(3, 14, "both")[1] == fuzz.DEFAULT
    assert fuzz.graph(3, 14, "scans") == fuzz.graph(3, 14, "scans")
    assert fuzz.graph(3, 14, "scans")[1] == fuzz.NON_STRICT
    assert fuzz.graph(3, 14, "full-scans")[1] == fuzz.DEFAULT


def test_prune_keeps_updates_in_place() -> None:
    steps = (
        Step("v0", "x0 + 1.0"),
        Step("", "x1.add_(v0)"),
        Step("v1", "x0.exp()"),
        Step("v2", "x1.sum(0)"),
    )
    inputs = (Input("x0", (2, 2), "float32"), Input("x1", (2, 2), "float32"))
    pruned = prune(Program(inputs, steps, ("v2",)))
    assert [s.expression for s in pruned.steps] == ["x0 + 1.0", "x1.add_(v0)", "x1.sum(0)"]
    assert pruned.inputs == inputs


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "sliced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_inputs_have_their_layout_and_grow(layout: str, dtype: str) -> None:
    x = Input("x0", (4, 6), dtype, layout, row_axis=0)
    made = x.make("cpu", torch.Generator().manual_seed(0))
    again = x.make("cpu", torch.Generator().manual_seed(0))
    assert made.shape == (4, 6)
    assert torch.equal(made, again)
    assert made.is_contiguous() == (layout == "contiguous")
    assert x.make("cpu", torch.Generator().manual_seed(0), grow=3).shape == (7, 6)


EAGER = torch.tensor([1.0, 2.0, 3.0])
EXACT = EAGER.double()


@pytest.mark.parametrize(
    ("found", "kind", "says"),
    [
        (EAGER, "ok", "error 0.00e+00"),
        (EAGER * (1 + 2e-7), "ok", ""),
        (EAGER * (1 + 1e-5), "wrong", "allowed 2.38e-07"),
        (EAGER[None], "wrong", "shape torch.Size([1, 3]) for torch.Size([3])"),
        (EXACT, "wrong", "dtype torch.float64 for torch.float32"),
        (torch.tensor([1.0, 0, 2, 0, 3])[::2], "wrong", "strides (2,) for (1,)"),
        (torch.tensor([1.0, 2.0, float("nan")]), "wrong", "1 of 3 not finite"),
        (torch.tensor([1.0, 2.0, float("inf")]), "wrong", "1 of 3 not finite"),
    ],
)
def test_compare_floats(found: torch.Tensor, kind: str, says: str) -> None:
    outcome = fuzz.compare("v0", found, found, EAGER, EXACT)
    assert outcome.kind == kind
    assert says in outcome.detail


def test_compare_allows_a_tenth_more_than_eagers_own_error() -> None:
    eager = torch.tensor([1.01, 1.0])
    expected = torch.ones(2, dtype=torch.float64)
    near, far = torch.tensor([1.0, 1.0105]), torch.tensor([1.0, 1.012])
    assert fuzz.compare("v0", near, near, eager, expected).kind == "ok"
    assert fuzz.compare("v0", far, far, eager, expected).kind == "wrong"


def test_compare_wants_the_same_bits_twice() -> None:
    again = EAGER * (1 + 1e-7)
    assert fuzz.compare("v0", EAGER, again, EAGER, EXACT).kind == "unstable"


def test_compare_integers_wants_eagers_or_the_exact_ones() -> None:
    eager, expected = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert fuzz.compare("v0", eager, eager, eager, expected).kind == "ok"
    assert fuzz.compare("v0", expected, expected, eager, expected).kind == "ok"
    other = torch.tensor([1, 2, 5])
    assert fuzz.compare("v0", other, other, eager, expected).detail == "v0: 1 of 3 differ"


def test_compare_wants_nan_where_eager_has_it() -> None:
    eager = torch.tensor([float("nan"), 1.0])
    assert fuzz.compare("v0", eager, eager, eager, eager.double()).kind == "ok"
    number = torch.tensor([0.0, 1.0])
    assert fuzz.compare("v0", number, number, eager, eager.double()).kind == "wrong"


CRASHING = """
import json, os, sys
first = int(sys.argv[1])
for index in range(first, 6, 1):
    print(json.dumps({"started": index}), flush=True)
    if index == 2:
        print("CUDA error: an illegal memory access", file=sys.stderr, flush=True)
        os.abort()
    print(json.dumps({"index": index, "kind": "ok", "mix_order": 1}), flush=True)
"""


def test_a_worker_that_crashes_is_a_row_and_the_rest_goes_on(monkeypatch: Any) -> None:
    rows: list[dict[str, Any]] = []
    args = argparse.Namespace(seed=1, graphs=6, workers=1, mode="both", device="cuda", shrink=0)
    worker = fuzz.Worker(args, 0, rows.append)
    monkeypatch.setattr(
        worker, "command", lambda first: [sys.executable, "-c", CRASHING, str(first)]
    )
    worker.run()
    assert [row["index"] for row in rows] == list(range(6))
    assert [row["kind"] for row in rows] == ["ok", "ok", "crash", "ok", "ok", "ok"]
    assert "illegal memory access" in rows[2]["detail"]
    assert rows[2]["program"].startswith("def graph(")


def test_a_worker_that_cannot_start_is_a_row_not_a_loop(monkeypatch: Any) -> None:
    rows: list[dict[str, Any]] = []
    args = argparse.Namespace(seed=1, graphs=3, workers=1, mode="both", device="cuda", shrink=0)
    worker = fuzz.Worker(args, 0, rows.append)
    monkeypatch.setattr(
        worker, "command", lambda first: [sys.executable, "-c", "import sys; sys.exit('no GPU')"]
    )
    worker.run()
    assert [row["kind"] for row in rows] == ["crash"]
    assert "no GPU" in rows[0]["detail"]


def test_no_memory_says_nothing_of_a_graph(monkeypatch: Any) -> None:
    program, options = fuzz.graph(1, 0, "non-strict")

    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 642 MiB")

    monkeypatch.setattr(fuzz, "_inputs", refuse)
    outcome = fuzz.check(None, program, options)  # type: ignore[arg-type]
    assert outcome.kind == "memory"
    assert not outcome.failed
    assert outcome.kind in fuzz.UNJUDGED


def test_what_is_right_on_stock_is_the_stacks_fault(tmp_path: Path) -> None:
    args = argparse.Namespace(seed=1, graphs=9, workers=4, mode="both", device="cuda", shrink=2)
    for kind, right in (("ok", True), ("error", False)):
        stock = tmp_path / kind
        row = json.dumps({"index": 7, "kind": kind, "mix_order": 0})
        stock.write_text(f"#!/bin/sh\necho '{{\"started\": 7}}'\necho '{row}'\n")
        stock.chmod(0o755)
        worker = fuzz.Worker(args, 0, [].append)
        assert worker.is_right_on(stock, 7) is right
        assert worker.judge
        worker.stop()
        assert worker.judge.stopped
        assert not worker.is_right_on(stock, 7)  # nobody is asked after the end


def test_summary() -> None:
    rows = [
        {"kind": "ok", "mix_order": 2},
        {"kind": "wrong", "mix_order": 1, "blame": "mix-order"},
        {"kind": "eager", "mix_order": 0},
    ]
    text = fuzz.summary(rows)
    assert "3 graphs, 2 with a mix-order kernel (3 kernels)" in text
    assert "blame: {'mix-order': 1}" in text


def is_stock() -> bool:
    """Whether this process has the pinned torch as it was released."""
    path = "torch/_inductor/scheduler.py"
    file = Path(torch.__file__).parents[1] / path
    return blob_id(file.read_bytes()) == pins.load().files.get(path)


def test_generated_graphs_in_the_lab(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run = subprocess.run(
        [
            sys.executable, "-m", "graft.devtools.fuzz", "--device", "lab", "--seed", "2026",
            "--graphs", "12", "--workers", "2", "--shrink", "0", "--out", str(out),
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12, run.stdout + run.stderr
    assert sum(row["mix_order"] > 0 for row in rows) >= 5, run.stdout
    assert not [row for row in rows if row["kind"] in ("budget", "crash", "timeout")], run.stdout
    wrong = [row for row in rows if row.get("blame") == "mix-order"]
    if is_stock():
        assert wrong, "stock 2.11.0 has wrong mix-order reductions; none was found"
    else:
        assert not wrong, run.stdout
