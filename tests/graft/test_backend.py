"""`torch.compile` in lab mode: what Inductor generates is a GPU's, what comes back is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab_process import LabProcess

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lab() -> Any:
    process = LabProcess(__file__)
    yield process
    process.close()


if os.environ.get("TRITON_INTERPRET") == "1":
    import torch
    from torch import nn
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code
    from torch.nn import functional

    from graft.lab import backend, interpret

    backend.install(budget_s=30)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    FUSE_SMALL = {"triton.mix_order_reduction_non_strict_mode": True}

    def error(found: Any, expected: Any) -> float:
        """The largest difference over the largest value, over all outputs; 1 for another shape."""
        worst = 0.0
        for a, b in zip(found, expected, strict=True):
            if a.shape != b.shape:
                return 1.0
            gap = (a.double() - b.double()).abs().max() / b.double().abs().max()
            worst = max(worst, float(torch.nan_to_num(gap, nan=1.0)))
        return worst

    def compiled(function: Any, *inputs: Any, **options: Any) -> tuple[Any, list[str]]:
        torch._dynamo.reset()
        metrics.reset()
        return run_and_get_code(torch.compile(function, options=FUSE_SMALL, **options), *inputs)


def in_lab_forward() -> Any:
    x = torch.randn(64, 96, device="cuda")
    backend.tally.reset()
    out, codes = compiled(lambda x: (x.sum(0), x.sum(1)), x)
    return [
        error(out, (x.double().sum(0), x.double().sum(1))),
        metrics.codegen_mix_order_reduction,
        "MixOrderReductionGrid" in codes[0] and "multi_processor_count=132" in codes[0],
        backend.tally.interpreted,
        backend.tally.code_only,
    ]


def test_generates_for_the_gpu_and_runs_here(lab: LabProcess) -> None:
    wrong, mix_order, described, interpreted, code_only = lab("forward")
    assert wrong < 1e-6
    assert (mix_order, described, interpreted, code_only) == (1, True, 1, 0)


def in_lab_norm(name: str, dtype: str) -> Any:
    type_ = getattr(torch, dtype)
    rows, columns = 64, 256
    x = torch.randn(rows, columns, device="cuda", dtype=type_)
    weight = torch.randn(columns, device="cuda", dtype=type_)
    bias = torch.randn(columns, device="cuda", dtype=type_)
    grad = torch.randn_like(x)

    def norm(x: Any, weight: Any, bias: Any) -> Any:
        if name == "layer_norm":
            return functional.layer_norm(x, [columns], weight, bias)
        return functional.rms_norm(x, [columns], weight) + bias

    def step(function: Any, *inputs: Any) -> Any:
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = function(*leaves)
        out.backward(grad.to(out.dtype))
        return out.detach(), *(leaf.grad for leaf in leaves)

    torch._dynamo.reset()
    metrics.reset()
    found = step(torch.compile(norm, options=FUSE_SMALL), x, weight, bias)
    expected = step(norm, x.double(), weight.double(), bias.double())
    return [error(found, expected), metrics.codegen_mix_order_reduction]


@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2e-2), ("float16", 2e-3)]
)
def test_norm_backward(lab: LabProcess, name: str, dtype: str, bound: float) -> None:
    wrong, mix_order = lab("norm", name, dtype)
    assert wrong < bound
    assert mix_order == 1


def in_lab_model(dtype: str) -> Any:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
            self.qkv = nn.Linear(width, 3 * width, bias=False)
            self.out = nn.Linear(width, width, bias=False)

        def forward(self, x: Any) -> Any:
            batch, length, width = x.shape
            heads = [
                t.view(batch, length, 4, width // 4).transpose(1, 2)
                for t in self.qkv(self.norms[0](x)).chunk(3, -1)
            ]
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
            return self.norms[1](x)

    torch.manual_seed(0)
    model = nn.Sequential(Block(64), Block(64)).cuda().to(getattr(torch, dtype))
    x, target = torch.randn(2, 2, 64, 64, device="cuda", dtype=getattr(torch, dtype)).unbind()

    def step(function: Any, model: Any, x: Any) -> Any:
        model.zero_grad()
        loss = (function(x).double() * target.double()).mean()
        loss.backward()
        return loss.detach(), *(p.grad.clone() for p in model.parameters())

    torch._dynamo.reset()
    found, codes = run_and_get_code(step, torch.compile(model, options=FUSE_SMALL), model, x)
    expected = step(model.double(), model, x.double())
    return [error(found, expected), "attention" in codes[0] and "attention" in codes[1]]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 5e-6), ("bfloat16", 3e-2)])
def test_training_step_with_attention(lab: LabProcess, dtype: str, bound: float) -> None:
    wrong, fused_attention = lab("model", dtype)
    assert wrong < bound
    assert fused_attention


def in_lab_dynamic() -> list[float]:
    torch._dynamo.reset()
    metrics.reset()
    function = torch.compile(lambda x: (x.sum(0), x.sum(1)), options=FUSE_SMALL)
    wrong = []
    for rows in (96, 128, 257):
        x = torch.randn(rows, 64, device="cuda")
        torch._dynamo.mark_dynamic(x, 0)
        wrong.append(error(function(x), (x.double().sum(0), x.double().sum(1))))
    return [*wrong, metrics.codegen_mix_order_reduction]


def test_dynamic_rows_compile_once(lab: LabProcess) -> None:
    *wrong, mix_order = lab("dynamic")
    assert max(wrong) < 1e-6
    assert mix_order == 1


def in_lab_unbacked() -> float:
    def function(x: Any, chosen: Any) -> Any:
        y = x[chosen.nonzero().squeeze(1)]
        return y.sum(0), y.sum(1)

    x = torch.randn(100, 64, device="cuda")
    chosen = torch.rand(100, device="cuda") > 0.5
    out, _ = compiled(function, x, chosen, fullgraph=True)
    return error(out, function(x.double(), chosen))


def test_unbacked_rows(lab: LabProcess) -> None:
    assert lab("unbacked") < 1e-6


def in_lab_in_place() -> list[float]:
    def function(x: Any, y: Any) -> Any:
        x.mul_(2)
        return (x * y).sum(1)

    x, y = torch.randn(2, 64, 96, device="cuda").unbind()
    expected_x = x.double()
    out, _ = compiled(function, x, y)
    expected = function(expected_x, y.double())
    return [error([out], [expected]), error([x], [expected_x])]


def test_inputs_updated_in_place(lab: LabProcess) -> None:
    assert max(lab("in_place")) < 1e-6


def in_lab_made_inside() -> list[str]:
    def function(x: Any) -> Any:
        return torch.zeros(4, device="cuda") + x.sum(), torch.arange(4, device=x.device) * 2

    out, _ = compiled(function, torch.ones(2, 2, device="cuda"))
    return [str(t.tolist()) for t in out] + [t.device.type for t in out]


def test_tensors_made_inside_a_compiled_function(lab: LabProcess) -> None:
    assert lab("made_inside") == ["[4.0, 4.0, 4.0, 4.0]", "[0, 2, 4, 6]", "cpu", "cpu"]


def in_lab_configurations() -> list[list[Any]]:
    torch._dynamo.reset()
    function = torch.compile(lambda x: x.sum(1), options={"max_autotune_pointwise": True})
    x = torch.randn(64, 3000, device="cuda")
    seen = []
    for index in (0, 1):
        with backend.configuration(index):
            wrong = error([function(x)], [x.double().sum(1)])
        seen.append([wrong, dict(backend.last_launches()[0].configuration)])
    return seen


def test_another_configuration_of_the_heuristic(lab: LabProcess) -> None:
    (first_wrong, first), (second_wrong, second) = lab("configurations")
    assert max(first_wrong, second_wrong) < 1e-6
    assert first != second


def in_lab_over_budget() -> Any:
    def function(x: Any) -> Any:
        x.mul_(2)
        return x.sum(0), x.sum(1)

    torch._dynamo.reset()
    x = torch.randn(256, 512, device="cuda")
    before = x.clone()
    runner = torch.compile(function)
    with backend.budget(1e-4, "raise"):
        try:
            runner(x)
        except interpret.OverBudget as refusal:
            message = str(refusal)
    unchanged = torch.equal(x, before)
    backend.tally.reset()
    with backend.budget(1e-4, "eager"):
        out = runner(x)
    expected = before.double() * 2
    return [
        message,
        unchanged,
        error(out, (expected.sum(0), expected.sum(1))),
        error([x], [expected]),
        [backend.tally.interpreted, backend.tally.code_only],
    ]


def test_over_budget_raises_or_runs_eagerly_and_is_counted(lab: LabProcess) -> None:
    message, unchanged, wrong, wrong_input, tally = lab("over_budget")
    assert "under the interpreter" in message
    assert unchanged
    assert max(wrong, wrong_input) < 1e-6
    assert tally == [0, 1]


UPSTREAM_SHAPED = """
# Owner(s): ["module: inductor"]
import torch
from torch._inductor import metrics
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


@instantiate_parametrized_tests
class SumTest(TestCase):
    @parametrize("rows", {rows})
    def test_sum(self, rows):
        self.assertTrue(HAS_GPU)
        metrics.reset()
        x = torch.randn(rows, 64, device=GPU_TYPE)
        out = torch.compile(lambda x: (x.sum(0), x.sum(1)))(x)
        self.assertGreater(metrics.generated_kernel_count, 0)
        self.assertEqual(out[1], x.double().sum(1).float(), atol=1e-4, rtol=1e-4)

    def test_skipped(self):
        self.skipTest("{reason}")


if __name__ == "__main__" and HAS_GPU:
    run_tests()
"""


def run_upstream_shaped(folder: Path, rows: list[int], reason: str) -> tuple[int, str]:
    """Exit code and output of pytest on one such file, in a folder of its own."""
    tests = folder / "tests" / "inductor"
    tests.mkdir(parents=True)
    conftest = (ROOT / "tests/inductor/conftest.py").read_text()
    here = "Path(__file__).resolve().parents[2]"
    assert here in conftest
    (tests / "conftest.py").write_text(conftest.replace(here, f"Path({str(ROOT)!r})"))
    (tests / "test_sum.py").write_text(UPSTREAM_SHAPED.format(rows=rows, reason=reason))
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=folder,
        env=env | {"GRAFT_LAB_BUDGET_S": "0.2"},
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout + run.stderr


def test_code_only_passes_beside_an_interpreted_size(tmp_path: Path) -> None:
    code, output = run_upstream_shaped(tmp_path, [16, 65536], "needs a GPU")
    assert "numerics checked: 1, code only: 1" in output, output
    assert code == 0


def test_code_only_alone_fails_and_so_does_an_unexcused_skip(tmp_path: Path) -> None:
    code, output = run_upstream_shaped(tmp_path, [65536], "not today")
    assert "test_sum_rows_65536 ran code only, and no other parameter" in output, output
    assert "test_skipped was skipped: Skipped: not today" in output
    assert code == 1
