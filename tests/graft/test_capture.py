"""Graphs of functions and training steps, traced on GPUs that are described and not there."""

import json

import pytest
import torch
from lab_process import LabProcess

from graft.cases import Case
from graft.errors import GraftError

# --- in the lab's process ------------------------------------------------------------------------


def in_lab_describe(gpu):
    from graft.lab import devices, fakegpu

    fakegpu.install(devices.find(gpu))


def in_lab_describe_two(first, second):
    in_lab_describe(first)
    try:
        in_lab_describe(second)
    except GraftError as wrong:
        return wrong.message


def in_lab_properties():
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.utils import get_gpu_shared_memory
    from triton.runtime import driver

    found = DeviceProperties.create(torch.device("cuda", 0))
    target = driver.active.get_current_target()
    return {
        "sm_count": found.multi_processor_count,
        "cc": found.cc,
        "target": [target.backend, target.arch],
        "shared": get_gpu_shared_memory(),
        "name": torch.cuda.get_device_name(),
    }


class Small(torch.nn.Module):
    """Norms, a product, attention, dropout-free: what a transformer's block is made of."""

    def __init__(self, dim=64):
        super().__init__()
        self.norm = torch.nn.RMSNorm(dim)
        self.layer_norm = torch.nn.LayerNorm(dim)
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, 32)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.layer_norm(x + y.transpose(1, 2).flatten(2)).square().mean()


def _step(model, x):
    with torch.autocast("cuda", torch.bfloat16):
        return model(x)


def _model(device):
    with device:
        return Small()


SMALL = Case(
    name="small",
    summary="",
    fn=_step,
    inputs=lambda shape, dtype, device: (torch.randn(*shape, 64, device=device),),
    shapes={"default": [(4, 128)]},
    model=_model,
)


def _rms_norm(x, weight):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight)


def _leaves(shape, dtype, device):
    x = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    return x, torch.randn(shape[1], dtype=dtype, device=device, requires_grad=True)


RMS_NORM = Case("rms", "", _rms_norm, _leaves, {"default": [(8192, 768)]})
CASES = {"small": SMALL, "rms": RMS_NORM}


def _operators(graph):
    return [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]


def in_lab_trace(name, shape, dynamic=False):
    from graft.lab import capture

    graphs = capture.trace(CASES[name], tuple(shape), "bf16", dynamic=dynamic)
    return [
        {
            "name": graph.name,
            "operators": _operators(graph),
            "inputs": [str(each) for each in graph.inputs],
            "outputs": [
                str(getattr(node.meta["val"], "dtype", "size")) if node is not None else None
                for node in next(iter(reversed(graph.module.graph.nodes))).args[0]
            ],
        }
        for graph in graphs
    ]


CONVERTED = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.register_buffer("scale", torch.ones(64))

    def forward(self, x, options):
        return (self.linear(x) * self.scale + options["bias"]).square().mean()

def given(model, device, dtype):
    x = torch.randn(8, 64, dtype=dtype, device=device, requires_grad=True)
    return model, (x, {"bias": torch.randn(64).to(device, dtype)})

def to(device):
    return given(Net().to(device), device, torch.float32)

def to_both(device):
    return given(Net().to(device, torch.bfloat16), device, torch.bfloat16)

def to_half(device):
    return given(Net().to(device).half(), device, torch.float16)

def within(device):
    with torch.device(device):
        return given(Net().bfloat16(), device, torch.bfloat16)
"""


def in_lab_trace_file(name):
    """The inputs of the graphs of a file's function, as text."""
    from graft import cases
    from graft.lab import capture

    case = cases.find(name)
    graphs = capture.trace(case, case.default_shape, "bf16")
    return [[str(each) for each in graph.inputs] for graph in graphs]


def in_lab_save(name, shape, dynamic, file):
    """Names and code of kernels: compiled as captured, and compiled from the file."""
    from pathlib import Path

    from graft.lab import capture, compile, saved

    direct = []
    graphs = capture.trace(CASES[name], tuple(shape), "bf16", compile.into(direct), dynamic=dynamic)
    saved.save(graphs, Path(file))
    again = compile.graphs(saved.load(Path(file)))
    return [[(k.name, k.code) for g in found for k in g.kernels] for found in (direct, again)]


def in_lab_branches():
    """The operators of what branches on the values of its tensors."""
    from graft.lab import capture

    def step(x, labels):
        if labels.max() >= 10:
            raise ValueError("no such label")
        if not torch.rand([]) < 0.1:
            x = x.sin()
        return x.sum()

    def inputs():
        x = torch.empty(8, 64, device="cuda", requires_grad=True)
        return x, torch.empty(8, dtype=torch.long, device="cuda")

    graphs = []

    def compiler(module, inputs, **options):
        graphs.extend(_operators(capture.graph(module, inputs, options)))
        return module.forward

    capture.trace_function(step, inputs, compiler)
    return graphs


def in_lab_selected(loss):
    """Sizes of what the last forward graph is given, of a step that a mask's selection parts."""
    from graft.lab import capture

    def step(x, labels):
        known = labels.masked_select(labels >= 0)
        if loss == "ctc":
            rows = (labels >= 0).sum(-1)
            steps = torch.full_like(rows, x.shape[0])
            x = torch.nn.functional.ctc_loss(x.log_softmax(-1), known, steps, rows)
            return (2 * x).sin().sum()
        return (x[0, 0, 0] * known).sin().sum()

    def inputs():
        x = torch.empty(64, 8, 32, device="cuda", requires_grad=True)
        return x, torch.empty(8, 5, dtype=torch.long, device="cuda")

    sizes = []

    def compiler(module, inputs, **options):
        if not options.get("is_backward"):
            sizes.append([list(x.shape) for x in inputs if isinstance(x, torch.Tensor)])
        return module.forward

    capture.trace_function(step, inputs, compiler)
    return sizes


def in_lab_attention(dtype, mask, head_dim, bias_grad=False, heads_last=False):
    """The operator that attention of CUDA tensors comes down to."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        q = torch.empty(2, 4, 128, head_dim, dtype=getattr(torch, dtype), device="cuda")
        bias = torch.empty(2, 4, 128, 128, dtype=q.dtype, device="cuda") if mask else None
        if heads_last:
            bias = torch.empty(128, 128, 4, dtype=q.dtype, device="cuda").permute(2, 0, 1)
        if bias_grad:
            bias.requires_grad_()
        with Watch():
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, bias)
    assert out.shape == q.shape
    return next((name for name in seen if "attention" in name), "math")


# --- tests ---------------------------------------------------------------------------------------


def in_lab_convolution(dtype, dilation, transposed):
    """The strides of a fake convolution of a channels-last tensor, and of its input's gradient."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    options = ([1, 1], [0, 0], [dilation, dilation], transposed, [0, 0], 1)
    with FakeTensorMode():
        x = torch.empty(2, 8, 14, 14, dtype=getattr(torch, dtype), device="cuda")
        x = x.contiguous(memory_format=torch.channels_last)
        weight = x.new_empty(8, 8, 3, 3)
        y = torch.ops.aten.convolution(x, weight, None, *options)
        gradient = torch.ops.aten.convolution_backward(
            torch.empty_like(y), x, weight, None, *options, [True, True, False]
        )[0]
        return [t.is_contiguous(memory_format=torch.channels_last) for t in (y, gradient)]


@pytest.fixture(scope="module")
def h200():
    lab = LabProcess(__file__, interpret=False)
    lab("describe", "H200")
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def a100():
    lab = LabProcess(__file__, interpret=False)
    lab("describe", "A100")
    yield lab
    lab.close()


def test_inductor_and_triton_see_the_described_gpu(h200, a100):
    assert h200("properties") == {
        "sm_count": 132,
        "cc": 90,
        "target": ["cuda", 90],
        "shared": 227 * 1024,
        "name": "NVIDIA H200",
    }
    assert a100("properties")["cc"] == 80
    assert a100("properties")["shared"] == 163 * 1024


def test_a_process_describes_one_gpu(h200):
    assert h200("describe_two", "H200", "B200") == (
        "this process already describes H200; it cannot describe B200 too"
    )


def test_a_training_step_gives_a_forward_and_a_backward(h200):
    forward, backward = h200("trace", "small", [4, 128])
    assert (forward["name"], backward["name"]) == ("forward", "backward")
    # CUDA's choices: cuDNN's attention, products in autocast's dtype, norms in fp32.
    assert "aten._scaled_dot_product_cudnn_attention.default" in forward["operators"]
    assert "aten._scaled_dot_product_cudnn_attention_backward.default" in backward["operators"]
    assert "aten.rsqrt.default" in forward["operators"]
    assert forward["outputs"][0] == "torch.float32"
    parameters = 5
    assert backward["outputs"].count("torch.float32") == parameters
    assert all("cuda" in each for each in backward["inputs"])


def test_another_gpu_makes_another_choice(a100):
    forward, _ = a100("trace", "small", [4, 128])
    assert "aten._scaled_dot_product_flash_attention.default" in forward["operators"]


@pytest.mark.parametrize(
    ("dtype", "mask", "head_dim", "expected"),
    [
        ("bfloat16", False, 64, "_scaled_dot_product_flash_attention"),
        ("bfloat16", False, 60, "_scaled_dot_product_flash_attention"),
        ("float16", True, 64, "_scaled_dot_product_efficient_attention"),
        ("float32", False, 64, "_scaled_dot_product_efficient_attention"),
        ("float64", False, 64, "_scaled_dot_product_attention_math"),
    ],
)
def test_attention_follows_dtype_mask_and_head_dimension(a100, dtype, mask, head_dim, expected):
    found = a100("attention", dtype, mask, head_dim)
    assert found == (expected if "math" not in expected else "math")


@pytest.mark.parametrize(("gradient", "kernel"), [(False, "cudnn"), (True, "efficient")])
def test_the_gradient_of_a_bias_needs_another_kernel(h200, gradient, kernel):
    """cuDNN has none."""
    found = h200("attention", "bfloat16", True, 64, gradient)
    assert found == f"_scaled_dot_product_{kernel}_attention"


@pytest.mark.parametrize("gradient", [False, True])
def test_a_bias_whose_heads_are_adjacent_has_no_fused_kernel(h200, gradient):
    """As T5's of relative positions."""
    assert h200("attention", "bfloat16", True, 64, gradient, True) == "math"


def test_what_a_branch_asks_of_values_is_not_so(h200):
    operators = h200("branches")
    assert "aten.sin.default" in operators


def test_what_a_mask_selects_is_all_that_there_is(h200):
    assert [40] in h200("selected", "none")[-1]


def test_the_graphs_behind_ctc_loss_are_traced(h200):
    assert [64, 8, 32] in h200("selected", "ctc")[-1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("dilation", "transposed"), [(1, False), (2, False), (1, True)])
def test_a_convolution_keeps_channels_last(h200, dtype, dilation, transposed):
    assert h200("convolution", dtype, dilation, transposed) == [True, True]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("to", "float32"),
        ("to_both", "bfloat16"),
        ("to_half", "float16"),
        ("within", "bfloat16"),
    ],
)
def test_a_model_is_converted_as_users_convert_it(h200, tmp_path, form, dtype):
    file = tmp_path / "mine.py"
    file.write_text(CONVERTED)
    forward, backward = h200("trace_file", f"{file}:{form}")
    # float32 is not written
    said = {"float32": "size=("}.get(dtype, f"dtype=torch.{dtype}")
    other = {"dtype=torch.float16", "dtype=torch.bfloat16"} - {said}
    assert len(forward) == 5
    assert all(said in each for each in forward)
    assert not any(dtype in each for dtype in other for each in forward)
    assert all("cuda" in each for each in forward + backward)


def test_tensors_that_need_gradients_give_a_backward(h200):
    _, backward = h200("trace", "rms", [8192, 768])
    assert "aten.sum.dim_IntList" in backward["operators"]
    assert backward["outputs"] == ["torch.bfloat16", "torch.bfloat16"]


def test_a_dynamic_size_is_a_symbol_in_both_graphs(h200):
    forward, backward = h200("trace", "rms", [8192, 768], True)
    assert all(
        any("s" in each and ", 768)" in each for each in g["inputs"]) for g in (forward, backward)
    )
    fixed, _ = h200("trace", "rms", [8192, 768])
    assert any("size=(8192, 768)" in each for each in fixed["inputs"])


@pytest.mark.parametrize(
    ("name", "shape", "dynamic"),
    [("small", [4, 128], False), ("rms", [8192, 768], False), ("rms", [8192, 768], True)],
)
def test_saved_graphs_give_the_same_kernels(h200, tmp_path, name, shape, dynamic):
    file = tmp_path / "graphs.json"
    direct, again = h200("save", name, shape, dynamic, str(file))
    assert direct == again
    assert len(direct) >= 2
    assert [graph["name"] for graph in json.loads(file.read_text())["graphs"]] == [
        "forward",
        "backward",
    ]


def test_a_file_of_something_else_is_refused(tmp_path):
    from graft.lab import saved

    for text in ("[]", "{}", '{"format": 2, "graphs": []}', "not json"):
        file = tmp_path / "other.json"
        file.write_text(text)
        with pytest.raises(GraftError, match=r"other\.json"):
            saved.load(file)


def test_nothing_is_traced_where_no_gpu_is_described():
    from graft.lab import capture

    with pytest.raises(GraftError, match="no GPU is described"):
        capture.trace(RMS_NORM, (8192, 768), "bf16")


# --- the walk that stands in for autograd's engine -----------------------------------------------


def _branches(x, w, b):
    """A value used many times, broadcasts, mixed dtypes, views, several outputs."""
    h = torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b)
    gate = (h * w).sigmoid()
    low = (h @ h.transpose(-1, -2)).to(torch.bfloat16)
    picked = h[:, 1:3].reshape(-1)
    return h * gate + x, low.float().softmax(-1).sum(), torch.cat([picked, picked.exp()])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


PROGRAMS = {
    "branches": _branches,
    "one": lambda x, w, b: (x * w).sum(),
    "unused": lambda x, w, b: (x + x * b).tanh(),
    "in place": lambda x, w, b: (x * w).add_(b).mul_(2).relu_(),
    "own function": lambda x, w, b: Doubled.apply(x * w) + Doubled.apply(b),
}


def _inputs():
    torch.manual_seed(0)
    shapes = [(6, 8), (8,), (8,)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_the_engine_s(name):
    from graft.lab import gradients

    results = []
    for grad in (torch.autograd.grad, gradients.grad):
        inputs = _inputs()
        outputs = PROGRAMS[name](*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        seeds = [torch.full_like(out, 0.5) for out in outputs]
        results.append(grad(outputs, inputs, seeds, allow_unused=True))
    for expected, got in zip(*results, strict=True):
        assert (expected is None) == (got is None)
        if expected is not None:
            assert torch.equal(expected, got)
            assert expected.dtype == got.dtype


@pytest.mark.parametrize("name", ["branches", "one", "unused"])
def test_traced_backwards_are_node_for_node_the_engine_s(name, monkeypatch):
    from functorch.compile import aot_function, make_boxed_func

    from graft.lab import gradients

    traced = []
    for grad in (torch.autograd.grad, gradients.grad):
        graphs = []

        def keep(graph, inputs, graphs=graphs):
            graphs.append(graph.print_readable(print_output=False, include_stride=True))
            return make_boxed_func(graph.forward)

        monkeypatch.setattr(torch.autograd, "grad", grad)
        compiled = aot_function(PROGRAMS[name], fw_compiler=keep, bw_compiler=keep)
        outputs = compiled(*_inputs())
        sum(out.sum() for out in torch.utils._pytree.tree_leaves(outputs)).backward()
        traced.append(graphs)
    assert len(traced[0]) == 2
    assert traced[0] == traced[1]


def test_an_unused_input_is_an_error_unless_allowed():
    from graft.lab import gradients

    x, w, _ = _inputs()
    with pytest.raises(RuntimeError, match="not used"):
        gradients.grad([(x * 2).sum()], [x, w])
    assert gradients.grad([(x * 2).sum()], [x, w], allow_unused=True)[1] is None
