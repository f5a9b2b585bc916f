"""What Inductor generates for a GPU that is described: kernels, bytes, refusals."""

from importlib.util import find_spec

import pytest
import torch
from lab_process import LabProcess

from graft.lab import compile

XNUMEL, RNUMEL = 32768, 768
# These tests run on stock and on patched. The stack's final reduction is a kernel of its own, and
# its workspace has a row a program: four an SM here.
PATCHED = find_spec("torch._inductor.mix_order_row_split") is not None


def in_lab_compile(name, shape, dtype="bf16", dynamic=False, knobs=None):
    """Each graph as JSON, with what kernels compute of themselves."""
    from graft import cases
    from graft.lab import capture, devices, fakegpu, worker

    fakegpu.install(devices.H200)
    found = []
    with torch._inductor.config.patch(knobs or {}):
        capture.trace(cases.find(name), tuple(shape), dtype, compile.into(found), dynamic=dynamic)
    return [worker._graph_json(graph) for graph in found]


@pytest.fixture(scope="module")
def lab():
    process = LabProcess(__file__, interpret=False)
    yield process
    process.close()


@pytest.fixture(scope="module")
def norm(lab):
    (graph,) = lab("compile", "rms_norm_backward", [XNUMEL, RNUMEL])
    return graph


def test_a_norm_s_backward_is_a_mix_order_kernel(norm):
    mix, last = norm["kernels"]
    assert (mix["kind"], last["kind"]) == ("mix-order", "looped" if PATCHED else "pointwise")
    assert (mix["xnumel"], mix["rnumel"]) == (XNUMEL, RNUMEL)
    assert mix["partial_sums"] == 1
    assert (mix["launches"], last["launches"]) == (1, 1)
    assert norm["metrics"]["codegen_mix_order_reduction"] == 1
    assert norm["metrics"]["generated_kernel_count"] == 2


def test_sources_are_cuda_s_and_whole(norm):
    for kernel in norm["kernels"]:
        assert f"def {kernel['name']}(" in kernel["source"]
        assert "multi_processor_count=132, cc=90" in kernel["source"]
    assert "MixOrderReductionGrid" in norm["kernels"][0]["source"]
    assert "empty_strided_cuda" in norm["wrapper"]


def test_bytes_are_those_of_the_buffers(norm):
    mix = norm["kernels"][0]
    tile, row, column = XNUMEL * RNUMEL * 2, XNUMEL * 4, RNUMEL * 2
    assert sorted(each["bytes"] for each in mix["loads"]) == sorted([tile, tile, row, column])
    assert [each["bytes"] for each in mix["stores"]] == [tile]
    assert mix["load_count"] == 4
    assert mix["load_bytes"] == 2 * tile + row + column
    splits = 132 * 4 if PATCHED else 2048
    assert mix["workspace_bytes"] == splits * RNUMEL * 4
    assert mix["bytes"] == mix["load_bytes"] + mix["store_bytes"] + 2 * mix["workspace_bytes"]


def test_the_knob_reaches_inductor(lab):
    knobs = {"triton.mix_order_reduction": False}
    (graph,) = lab("compile", "rms_norm_backward", [XNUMEL, RNUMEL], "bf16", False, knobs)
    assert "mix-order" not in {kernel["kind"] for kernel in graph["kernels"]}
    assert graph["metrics"]["codegen_mix_order_reduction"] == 0
    assert graph["refusals"] == []


@pytest.mark.parametrize(
    ("case", "shape", "reason"),
    [
        ("rms_norm_backward", [64, 8192], "does not pay"),
        ("layer_norm_backward", [4096, 16383], "registers a thread of 255"),
        ("rms_norm_backward", [4096, 32768], "under twice rnumel"),
    ],
)
def test_a_refused_fusion_says_why(lab, case, shape, reason):
    (graph,) = lab("compile", case, shape)
    assert graph["metrics"]["codegen_mix_order_reduction"] == 0
    reasons = {refusal["reason"]: refusal["pairs"] for refusal in graph["refusals"]}
    assert any(reason in each for each in reasons)
    assert all(len(pair) == 2 for pairs in reasons.values() for pair in pairs)


def test_sizes_of_dynamic_kernels_are_hints(lab):
    (graph,) = lab("compile", "rms_norm_backward", [XNUMEL, RNUMEL], "bf16", True)
    mix = next(kernel for kernel in graph["kernels"] if kernel["kind"] == "mix-order")
    assert (mix["xnumel"], mix["rnumel"]) == (XNUMEL, RNUMEL)
    assert "ks0" in mix["source"] or "xnumel," in mix["source"]
    assert f"xnumel = {XNUMEL}" not in mix["source"]


def test_calls_of_what_is_not_generated_are_counted(lab, tmp_path):
    file = tmp_path / "product.py"
    file.write_text(
        "import torch\n"
        "def product(device):\n"
        "    a = torch.empty(64, 64, device=device)\n"
        "    return (lambda a: (a @ a).relu() @ a), (a,)\n"
    )
    (graph,) = lab("compile", f"{file}:product", [], "fp32")
    assert graph["extern_calls"] == 2
    assert [kernel["kind"] for kernel in graph["kernels"]] == ["pointwise"]


def test_a_product_that_a_gpu_would_time_is_padded(lab, tmp_path):
    path = tmp_path / "head.py"
    path.write_text(
        "import torch\n"
        "def head(device):\n"
        "    bf16 = dict(device=device, dtype=torch.bfloat16)\n"
        "    x, w = torch.empty(4096, 1024, **bf16), torch.empty(1024, 5025, **bf16)\n"
        "    return (lambda x, w: (x @ w).float().logsumexp(1)), (x, w)\n"
    )
    (graph,) = lab("compile", f"{path}:head", ())
    assert graph["extern_calls"] == 1
    assert "5032" in graph["wrapper"]


def test_identical_kernels_of_other_names_have_one_key(lab):
    (graph,) = lab("compile", "layer_norm_backward", [XNUMEL, RNUMEL])
    # dweight and dbias are cast by the same kernel, where the final reduction does not cast them.
    launches = sorted(kernel["launches"] for kernel in graph["kernels"])
    assert launches == ([1, 1] if PATCHED else [1, 2])
    source = graph["kernels"][0]["source"]
    name = graph["kernels"][0]["name"]
    renamed = source.replace(name, "triton_other_7") + "# a comment\n"
    assert compile.anonymous(source, name) == compile.anonymous(renamed, "triton_other_7")
    assert compile.anonymous(source, name) != compile.anonymous(source + "x = 1\n", name)
