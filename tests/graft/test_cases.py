"""The cases: what ships, how they are named, and that their inputs and models are what they say."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graft import cases
from graft.errors import UsageError
from graft.lab.explain import SHIPPED

NORMS = ("rms_norm_backward", "layer_norm_backward")


def test_what_ships_is_there():
    assert set(SHIPPED) <= set(cases.load_all())


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_fourteen_shapes(name):
    case = cases.find(name)
    assert case.default_shape == (32768, 768)
    assert len(set(case.shapes["norms14"])) == 14
    assert case.default_shape in case.shapes["norms14"]


@pytest.mark.parametrize("name", NORMS)
def test_norms_are_the_backward_of_the_norm(name):
    case = cases.find(name)
    x, dy, weight, *rest = (
        t.double() for t in case.inputs((6, 32), torch.float32, torch.device("cpu"))
    )
    x.requires_grad_()
    weight.requires_grad_()
    if name == "rms_norm_backward":
        rstd = x.detach().pow(2).mean(1, keepdim=True).rsqrt()
        y, rest = torch.nn.functional.rms_norm(x, (32,), weight, eps=0.0), [rstd]
        wrt = [x, weight]
    else:
        bias = rest[0].requires_grad_()
        mean = x.detach().mean(1, keepdim=True)
        rstd = (x.detach().var(1, correction=0, keepdim=True)).rsqrt()
        y, rest = torch.nn.functional.layer_norm(x, (32,), weight, bias, 0.0), [bias, mean, rstd]
        wrt = [x, weight, bias]
    expected = torch.autograd.grad(y, wrt, dy)
    with torch.no_grad():
        got = _decomposed(case.fn, x, dy, weight, *rest)
    torch.testing.assert_close(tuple(got), expected)


def _decomposed(fn, *args):
    """`fn` by the decompositions that Inductor uses: CPU has no fused RMSNorm backward."""
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(fn, decomposition_table=core_aten_decompositions())(*args)(*args)


@pytest.mark.parametrize("name", NORMS)
def test_bytes_moved_count_each_tensor_once(name):
    case = cases.find(name)
    inputs = case.inputs((64, 32), torch.bfloat16, torch.device("cpu"))
    outputs = _decomposed(case.fn, *(t.float() for t in inputs))
    read = sum(t.nbytes for t in inputs)
    if name == "layer_norm_backward":
        read -= inputs[3].nbytes  # the bias is not needed for its gradient
    written = sum(t.numel() * torch.bfloat16.itemsize for t in outputs)
    assert case.bytes_moved((64, 32), torch.bfloat16) == read + written


@pytest.mark.parametrize("name", SHIPPED)
def test_inputs_can_be_fake(name):
    case = cases.find(name)
    with FakeTensorMode():
        inputs = case.inputs(case.default_shape, torch.bfloat16, torch.device("cpu"))
    assert all(isinstance(each, torch.Tensor) for each in inputs)


def test_the_seed_model_is_the_report_s():
    case = cases.find("seed_model")
    model = case.model(torch.device("meta"))
    dim, vocabulary, layers = 512, 4096, 11
    attention = 2 * dim * dim + 2 * dim * dim // 2
    expected = 2 * vocabulary * dim + layers * (attention + 8 * dim * dim)
    assert sum(p.numel() for p in model.parameters()) == expected
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert case.default_shape == (32, 2048)


def test_the_scaled_residual_model_adds_norm_weights_scales_and_mixes():
    case = cases.find("scaled_residual")
    seed, scaled = (
        cases.find(name).model(torch.device("meta")) for name in ("seed_model", "scaled_residual")
    )
    names = dict(scaled.named_parameters())
    added = sum(p.numel() for p in names.values()) - sum(p.numel() for p in seed.parameters())
    norms = 2 * 512 + 2 * 64
    assert added == 11 * (norms + 2 * 512 + 2 * 512) + 2 * 512
    assert names["blocks.3.mix"].shape == (2, 512)
    assert case.default_shape == (48, 2048)


@pytest.mark.parametrize("name", ["seed_model", "scaled_residual"])
def test_models_train_on_a_cpu(name):
    """With few tokens and no autocast: the loss depends on every parameter."""
    case = cases.find(name)
    model = case.model(torch.device("cpu")).float()
    loss = model(*case.inputs((1, 4), torch.bfloat16, torch.device("cpu")))
    loss.backward()
    assert loss.dim() == 0
    assert all(p.grad is not None for p in model.parameters())


def test_an_unknown_case_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean scaled_residual?"):
        cases.find("scaled_residua")


def test_a_wrong_shape_names_the_right_one():
    with pytest.raises(UsageError, match="takes 2 sizes, got '3'") as wrong:
        cases.find("rms_norm_backward").check_shape((3,))
    assert "32768,768" in wrong.value.next


def test_a_wrong_dtype_names_the_right_ones():
    with pytest.raises(UsageError, match="did you mean bf16"):
        cases.find("rms_norm_backward").check_dtype("bf61")


FILE = """
import torch
from graft.cases import Case

def squares(device):
    \"\"\"Sums of squares, both ways.\"\"\"
    x = torch.empty(8, 4, device=device)
    return (lambda x: (x.square().sum(0), x.square().sum(1))), (x,)

def net(device):
    with device:
        return torch.nn.Linear(4, 1), (torch.empty(8, 4),)

def cuda(device):
    raise RuntimeError("Found no NVIDIA driver\\nmore")

case = Case("other", "", lambda x: x, lambda s, t, d: (), {"default": [(1,)]})
number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def test_a_file_s_function_is_a_case(file):
    case = cases.find(f"{file}:squares")
    assert case.summary == "Sums of squares, both ways."
    (x,) = case.inputs(case.default_shape, torch.float32, torch.device("cpu"))
    assert [out.shape for out in case.fn(x)] == [(4,), (8,)]
    assert case.model is None


def test_a_file_s_model_is_a_training_step(file):
    case = cases.find(f"{file}:net")
    model = case.model(torch.device("cpu"))
    assert case.fn(model, torch.ones(8, 4)).shape == (8, 1)


def test_what_goes_to_another_device_than_the_given_one_is_told(file):
    with pytest.raises(UsageError, match="does not make .*: Found no NVIDIA driver$") as wrong:
        cases.find(f"{file}:cuda")
    assert "model.to(device)" in wrong.value.next


def test_a_file_s_case_is_itself(file):
    assert cases.find(f"{file}:case").name == "other"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [("square", "did you mean squares"), ("number", "neither a graft.cases.Case nor a function")],
)
def test_a_wrong_attribute_is_named(file, attribute, message):
    with pytest.raises(UsageError, match=message):
        cases.find(f"{file}:{attribute}")


def test_a_missing_file_is_named():
    with pytest.raises(UsageError, match="there is no file 'nowhere.py'"):
        cases.find("nowhere.py:f")


def test_a_file_that_is_no_python(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page")
    with pytest.raises(UsageError, match="is no Python file"):
        cases.find(f"{page}:function")
