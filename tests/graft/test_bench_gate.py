"""The gate: what it lets through and what it stops, on the CPU."""

import math

import pytest
import torch

from graft import cases
from graft.bench import gate
from graft.bench.autograd import Backward


def judged(out, ref, eager=None, **options):
    eager = out if eager is None else eager
    return gate.check("0", out, ref.double(), eager, **options)


def test_rounding_passes_and_has_its_error():
    ref = torch.randn(64, 64, dtype=torch.float64)
    found = judged(ref.bfloat16(), ref)
    assert found.wrong is None
    assert 1e-4 < found.error < 1e-2
    assert found.eager_error == found.error


def test_one_wrong_row_of_many_is_stopped():
    ref = torch.randn(32768, 16, dtype=torch.float64)
    out = ref.bfloat16()
    out[77] = 0
    found = judged(out, ref, ref.bfloat16())
    assert found.error < 1e-2  # the whole hides it
    assert "worst element" in found.wrong


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_stopped(value):
    ref = torch.ones(8, 8, dtype=torch.float64)
    out = ref.float()
    out[3, 3] = value
    assert judged(out, ref, ref.float()).wrong


def test_infinities_that_the_reference_has_pass():
    ref = torch.tensor([1.0, -math.inf, math.nan], dtype=torch.float64)
    assert judged(ref.float(), ref).wrong is None


def test_what_eager_gets_wrong_may_be_wrong_as_much():
    ref = torch.randn(1000, dtype=torch.float64)
    off = (ref * 1.1).float()
    assert judged(off, ref, off).wrong is None
    assert "error 0.1" in judged(off, ref, ref.float()).wrong


def test_shape_dtype_and_stride_are_eagers():
    ref = torch.randn(4, 8, dtype=torch.float64)
    eager = ref.float()
    assert "shape (32,)" in judged(eager.reshape(-1), ref, eager).wrong
    assert "dtype" in judged(ref, ref, eager).wrong
    turned = eager.t().contiguous().t()
    assert "stride (1, 4)" in judged(turned, ref, eager).wrong
    assert judged(turned, ref, eager, layout=False).wrong is None
    one = torch.randn(1, 8, dtype=torch.float64)
    strided = one.float().as_strided((1, 8), (999, 1))
    assert judged(strided, one, one.float()).wrong is None


def test_a_missing_output_is_stopped():
    x = torch.ones(2)
    (found,) = gate.check_all([x], [x, x], [x, x])
    assert found.wrong == "1 outputs, eager has 2"


def test_integers_may_round_the_other_way_and_no_further():
    ref = torch.arange(-100, 100)
    out = ref.clone()
    out[50] += 1
    assert judged(out, ref, ref).wrong is None
    assert judged(ref + 50, ref, ref).wrong


def test_the_reference_stays_in_float64_through_casts_and_autocast():
    seen = []

    def fn(x):
        y = x.float().bfloat16() + torch.zeros(4, dtype=torch.float16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ y
        seen.append((y.dtype, z.dtype))
        return z.to(torch.bfloat16), (y * 100).to(torch.int8), x.sum(dtype=torch.float32)

    outs = gate.reference(fn, [torch.randn(4, 4)])
    assert seen == [(torch.float64, torch.float64)]
    assert [out.dtype for out in outs] == [torch.float64, torch.int8, torch.float64]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_reference_in_float32_leaves_nothing_to_compile_again():
    """What Dynamo guards: a step compiled before it is the one that is timed."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    parts = (matmul, cudnn.conv, cudnn.rnn)
    before = [each.fp32_precision for each in parts]
    assert before[0] == "none"
    with gate.float32():
        assert not matmul.allow_tf32
        assert not cudnn.allow_tf32
        with torch.autocast("cpu", torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    assert [each.fp32_precision for each in parts] == before


def test_backward_is_what_autograd_makes():
    def forward(x, labels):
        return torch.nn.functional.cross_entropy(x, labels)

    x, labels = torch.randn(8, 16), torch.randint(0, 16, (8,))
    (dx,) = Backward(forward, (0,))(x, labels, torch.ones(()))
    expected = (torch.softmax(x, -1) - torch.nn.functional.one_hot(labels, 16)) / 8
    torch.testing.assert_close(dx, expected)
    again = Backward(forward, (0,)).prepare(forward, (x, labels, torch.ones(())))
    torch.testing.assert_close(again()[0], again()[0])


# The two that call CUDA's fused operators, and whole models, have no small CPU form.
SMALL = [
    name
    for name, case in cases.load_all().items()
    if case.model is None and not name.endswith("norm_backward") and cases.available(case)
]


@pytest.mark.parametrize("name", SMALL)
def test_every_case_runs_in_each_dtype_within_the_gate(name):
    case = cases.find(name)
    torch.manual_seed(0)
    sizes = {2: (64, 96), 3: (2, 64, 96), 4: (2, 32, 6, 4), 6: (2, 3, 6, 7, 11, 13)}
    shape = sizes[len(case.default_shape)]
    if name.startswith(("block_", "torchao_")) and len(shape) == 2:
        shape = (512, 512)  # a block
    windows = {"producer_sum_swin": (3136, 16)}
    windows |= dict.fromkeys(("rolled_sum", "rolled_norm_grad"), (2, 14, 6))
    shape = windows.get(name, shape)
    for dtype in case.dtypes:
        inputs = case.inputs(shape, cases.DTYPES[dtype], torch.device("cpu"))
        eager = gate.tensors(case.fn(*inputs))
        refs = gate.reference_of(case, inputs, eager)
        checks = gate.check_all(eager, refs, eager)
        # Eager's own error, without the allowance that it gives others.
        assert all(check.error < 2e-2 for check in checks), (dtype, checks)
        # a backward does not read all that its forward did
        if case.bytes_moved and not isinstance(case.fn, Backward):
            moved = sum(t.nbytes for t in [*gate.tensors(inputs), *eager])
            assert case.bytes_moved(shape, cases.DTYPES[dtype]) == moved
