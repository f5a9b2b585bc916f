# Owner(s): ["module: inductor"]

import contextlib
import dataclasses
import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import looped_reduction, pointwise_rows
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.device_model import DeviceModel
from torch._inductor.looped_rows import FEW_ROWS, SHORT_ROW
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


INF, NAN = float("inf"), float("nan")
COLUMNS, STRIDE = 5001, 5008
LOOP = "for r0_offset in"


def cross_entropy(x, y):
    return F.cross_entropy(x, y)


def smoothed(x, y):
    return F.cross_entropy(x, y, label_smoothing=0.1)


def log_probabilities(x, y):
    """Of chosen tokens, as the losses of policies have them."""
    chosen = x.float().log_softmax(-1).gather(-1, y.clamp(min=0)[:, None])
    return -chosen.mean()


def next_tokens(x, y):
    """As language models of `transformers` have it."""
    y = F.pad(y.view(2, -1), (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(x.float(), y)


class PointwiseRowsTestCase(TestCase):
    @contextlib.contextmanager
    def few_rows(self, rows=0, slots=8, **options):
        """
        Within, what is compiled is compiled anew, as if `rows` an SM were few, and it
        issued `slots` in the time of a byte.
        """
        torch._dynamo.reset()
        options = {
            "split_reductions": False,
            "triton.cooperative_reductions": False,
            # which do not know of what is patched here
            "force_disable_caches": True,
            **options,
        }
        model_of = DeviceModel.of

        def as_fast(gpu):
            return dataclasses.replace(model_of(gpu), slots_per_byte=slots)

        with (
            inductor_config.patch(options),
            mock.patch.object(DeviceModel, "of", as_fast),
            mock.patch.object(looped_reduction, "FEW_ROWS", rows),
            mock.patch.object(pointwise_rows, "FEW_ROWS", rows),
        ):
            yield

    def compile(self, f, *inputs, rows=0, dynamic=False, **options):
        """As if `rows` an SM were few: none, by default."""
        with self.few_rows(rows, **options):
            actual, codes = run_and_get_code(
                torch.compile(f, fullgraph=True, dynamic=dynamic), *inputs
            )
        return actual, codes[-1]

    def rows(self, columns=COLUMNS, stride=STRIDE, dtype=torch.bfloat16, n=6):
        """With room behind them that nobody may read."""
        x = torch.full((n, stride), NAN, device=GPU_TYPE, dtype=dtype)
        x[:, :columns] = torch.randn(n, columns, device=GPU_TYPE)
        return x[:, :columns]


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class LossTest(PointwiseRowsTestCase):
    """The gradient of a cross entropy is a loop over rows, without another to sum them."""

    def check(self, loss, logits, targets, loops=1, **options):
        def gradient(loss, logits):
            logits = logits.detach().requires_grad_()
            loss(logits, targets).backward()
            return logits.grad

        with self.few_rows(**options):
            compiled = torch.compile(loss, fullgraph=True, dynamic=False)
            actual, codes = run_and_get_code(gradient, compiled, logits)
        self.assertEqual(len(codes), 2)
        self.assertEqual(codes[1].count(LOOP), loops)
        expect = gradient(loss, logits.double())
        eps = 4 * torch.finfo(logits.dtype).eps
        scale = expect[expect.isfinite()].abs().max().item()
        self.assertEqual(
            actual.double(), expect, atol=eps * scale, rtol=eps, equal_nan=True
        )
        return codes[1]

    def targets(self, columns=COLUMNS):
        return torch.tensor([0, columns - 1, -100, 17, 4096, 3], device=GPU_TYPE)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("loss", (cross_entropy, smoothed, next_tokens, log_probabilities))
    def test_loss(self, loss, dtype):
        code = self.check(loss, self.rows(dtype=dtype), self.targets())
        self.assertNotIn(f"// {COLUMNS}", code)
        self.assertNotIn("tl.sum", code.split(LOOP)[1])

    @parametrize("columns", (5001, SHORT_ROW + 1))
    @parametrize("loss", (cross_entropy, log_probabilities))
    def test_few_rows(self, loss, columns):
        """Their sums are left where a row is short, by a loop before that of the gradient."""
        loops = 2 if columns <= SHORT_ROW else 0
        x = self.rows(columns, columns)
        self.check(loss, x, self.targets(columns), loops, rows=FEW_ROWS)

    @parametrize("columns", (5001, 5002, 5008, 6144))
    def test_columns(self, columns):
        """Rows of an odd length, one behind the other, have vectors as one index has them."""
        x = torch.randn(6, columns, device=GPU_TYPE, dtype=torch.bfloat16)
        self.check(cross_entropy, x, self.targets(columns), loops=1 - columns % 2)

    @parametrize("slots, loops", ((5, 1), (8, 1), (11, 0)))
    def test_issue_rate(self, slots, loops):
        """The faster an SM is by its memory, the sooner one index waits for memory alone."""
        x = torch.randn(6, 5008, device=GPU_TYPE, dtype=torch.bfloat16)
        self.check(cross_entropy, x, self.targets(5008), loops, slots=slots)

    def test_ignored(self):
        self.check(
            lambda x, y: F.cross_entropy(x, y, ignore_index=17, reduction="sum"),
            self.rows(),
            self.targets().clamp(min=0),
        )

    @parametrize("value", (INF, -INF, NAN))
    def test_special_values(self, value):
        x = self.rows()
        x[1, 5000] = x[3, 2] = value
        self.check(cross_entropy, x, self.targets())

    def test_in_place(self):
        """The gradient takes the logits' buffer, which nothing reads any more."""
        # sizes that Inductor does not pad: then the gradient is as large
        n, columns = 8, 5024
        weight = torch.randn(32, columns, device=GPU_TYPE)
        hidden = torch.randn(n, 32, device=GPU_TYPE)
        targets = torch.randint(0, columns, (n,), device=GPU_TYPE)

        def f(hidden, weight, total):
            logits = (hidden @ weight).float().log_softmax(1)
            grad = torch.ops.aten.nll_loss_backward(
                1 / total, logits, targets, None, 1, -100, total
            )
            grad = torch.ops.aten._log_softmax_backward_data(
                grad, logits, 1, torch.float32
            )
            return grad.to(hidden.dtype) @ weight.t()

        args = (hidden.bfloat16(), weight.bfloat16())
        total = torch.full((), float(n), device=GPU_TYPE)
        actual, code = self.compile(f, *args, total)
        expect = f(*args, total)
        self.assertEqual(actual, expect, atol=2e-2, rtol=2e-2)
        self.assertIn("in_out_ptr0", code)

    def test_knob_of_sums(self):
        options = {"simplify_one_hot_sums": False}
        self.check(cross_entropy, self.rows(), self.targets(), loops=2, **options)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class LoopTest(PointwiseRowsTestCase):
    def check(self, f, *inputs, looped=True, **options):
        actual, code = self.compile(f, *inputs, **options)
        self.assertEqual(LOOP in code, looped)
        expect = f(*(x.double() for x in inputs))
        eps = 4 * torch.finfo(inputs[0].dtype).eps
        self.assertEqual(actual.double(), expect.double(), atol=eps, rtol=eps)
        return code

    def scale(self, n=6):
        return torch.rand(n, 1, device=GPU_TYPE)

    @parametrize("dtype", (torch.bfloat16, torch.float32))
    @parametrize("columns", (4104, 5120, 5001))
    def test_slow_functions(self, columns, dtype):
        """A loop is for what computes for longer than it waits for memory."""

        def f(x, scale):
            return (x - scale).exp().to(x.dtype)

        x = torch.randn(6, columns, device=GPU_TYPE, dtype=dtype).clamp(max=1)
        looped = dtype == torch.bfloat16 and columns % 2 == 0
        code = self.check(f, x, self.scale(), looped=looped)
        self.assertEqual("'loop': (8, 8)" in code, looped)

    def test_narrower_accesses(self):
        """Of an index for all, but not of each row."""

        def f(x, scale):
            return torch.empty_like(x).copy_(x * scale)

        self.check(f, self.rows(dtype=torch.float32), self.scale())

    def test_wider_accesses(self):
        """More of one index than of each row: a loop would make two narrower, one wider."""

        def f(x, y, scale):
            return (x * scale + y).to(x.dtype)

        x = torch.randn(6, COLUMNS, device=GPU_TYPE, dtype=torch.bfloat16)
        y = self.rows(dtype=torch.float32)
        self.check(f, x, y, self.scale(), looped=False)
        self.check(f, self.rows(), y, self.scale())

    def test_two_outputs(self):
        def f(x, scale, bias):
            y = (x * scale).sigmoid() + bias
            return torch.stack((y, -y))

        x = self.rows(dtype=torch.float32)
        self.check(f, x, self.scale(), torch.randn(COLUMNS, device=GPU_TYPE))

    def test_dynamic_rows(self):
        def f(x, scale):
            return (x - scale).exp().to(x.dtype)

        x, scale = self.rows(STRIDE).clamp(max=1), self.scale()
        for each in (x, scale):
            torch._dynamo.mark_dynamic(each, 0)
        self.check(f, x, scale, dynamic=None)

    def test_one_index(self):
        """Few rows, short ones, nothing shared, little to compute, and dynamic columns."""

        def exp(x, scale):
            return (x - scale).exp().to(x.dtype)

        def product(x, scale):
            return x * scale

        x = torch.randn(6, 5120, device=GPU_TYPE, dtype=torch.bfloat16).clamp(max=1)
        scale, short = self.scale(), x[:, :4096].contiguous()
        for f, inputs, options in (
            (exp, (x, scale), {"rows": 1}),
            (exp, (short, scale), {}),
            (exp, (x, x), {}),
            (exp, (x, scale), {"dynamic": True}),
            (product, (x, scale), {}),
        ):
            with self.subTest(f=f, options=options, shared=inputs[1].shape):
                self.check(f, *inputs, looped=False, **options)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class TwoRowsTest(PointwiseRowsTestCase):
    """A block of one index has elements of two rows at most, and loads each row's values once."""

    def check(self, f, x, *inputs, columns=COLUMNS, loads=None, **options):
        """Also that there are so many `loads` of a block's first row, and of the next."""
        actual, code = self.compile(f, x, *inputs, **options)
        self.assertNotIn(LOOP, code)
        expect = f(x.double(), *inputs)
        self.assertEqual(actual.shape, expect.shape)
        eps = 4 * torch.finfo(x.dtype).eps
        self.assertEqual(actual.double(), expect.double(), atol=eps, rtol=eps)
        found = code.count(f"first_row_{columns} + 1 < ")
        self.assertEqual(found, loads if loads is not None else len(inputs))
        quotients = f"xindex // {columns}", f"xindex % {columns}"
        for quotient in quotients if found else ():
            self.assertNotIn(quotient, code)
        return code

    def odd(self, columns=COLUMNS, dtype=torch.bfloat16, n=6):
        return torch.randn(n, columns, device=GPU_TYPE, dtype=dtype)

    def of_rows(self, dtype=torch.float32, n=6):
        return torch.rand(n, 1, device=GPU_TYPE).to(dtype)

    @parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    @parametrize("columns", (4097, 5001, 5002, 5004, 16381))
    def test_columns(self, columns, dtype):
        """Rows end everywhere in a block, and next to nothing may be left for the last one."""

        def f(x, scale, bias):
            return ((x - bias) * scale).to(x.dtype)

        x = self.odd(columns, dtype)
        self.check(f, x, self.of_rows(), self.of_rows(dtype), columns=columns)

    def test_types(self):
        """Targets, masks, and narrow floats are of rows as well."""

        def f(x, target, mask, scale):
            hot = torch.arange(x.shape[1], device=x.device) == target
            return torch.where(mask, hot.to(x.dtype) - x * scale, x)

        target = torch.tensor([0, 5000, -100, 17, 4096, 1], device=GPU_TYPE)[:, None]
        mask = torch.tensor([1, 0, 1, 1, 0, 1], device=GPU_TYPE).bool()[:, None]
        self.check(f, self.odd(), target, mask, self.of_rows(torch.bfloat16))

    def test_places(self):
        """Of values that are apart, or expanded over what is before the rows."""

        def f(x, values):
            return x * values[:, 2:3]

        self.check(f, self.odd(), torch.rand(6, 5, device=GPU_TYPE))

        def g(x, values):
            return x.view(2, 3, COLUMNS) + values

        self.check(g, self.odd(), torch.rand(3, 1, device=GPU_TYPE), loads=0)

    def test_one_row(self):
        def f(x, scale):
            return x * scale

        self.check(f, self.odd(n=1), torch.rand(1, 1, device=GPU_TYPE), loads=0)
        self.check(f, self.odd(n=2), self.of_rows(n=2))

    def test_rows_in_two_dimensions(self):
        """A kernel with values of two kinds of rows, some long ones of others."""

        def f(x, outer, inner):
            return x * outer + inner

        x = torch.randn(6, 4, 4097, device=GPU_TYPE)
        outer = torch.rand(6, 1, 1, device=GPU_TYPE)
        inner = torch.rand(6, 4, 1, device=GPU_TYPE)
        code = self.check(f, x, outer, inner, columns=4097, loads=1)
        self.assertIn("in_next_row_4097", code)

    def test_in_place(self):
        """A row's own first column is read before it is written."""

        def f(x):
            x = x.clone()
            return x.copy_(x - x[:, :1])

        self.check(f, self.odd(4097), columns=4097, loads=1)

    def test_blocks_of_one_size(self):
        """One that is longer than a row has elements of more rows."""

        class Choices(InductorChoices):
            def triton_kernel_kwargs(self, kernel_cls, features, groups, kernel_kwargs):
                config = {"XBLOCK": 8192, "num_warps": 8, "num_stages": 1}
                return {**kernel_kwargs, "fixed_config": FixedTritonConfig(config)}

        def f(x, scale):
            return (x * scale).to(x.dtype)

        with V.set_choices_handler(Choices()):
            self.check(f, self.odd(), self.of_rows(), loads=0)
            self.check(f, self.odd(8193), self.of_rows(), columns=8193)

    def test_gathered_rows(self):
        """What a value of a row points to has an address an element."""

        def f(x, index, table):
            return x + table[index[:, 0]]

        index = torch.tensor([3, 0, 2, 1, 3, 3], device=GPU_TYPE)[:, None]
        self.check(f, self.odd(), index, self.odd(n=4), loads=1)

    def test_dynamic_rows(self):
        def f(x, scale):
            return (x * scale).to(x.dtype)

        x, scale = self.odd(), self.of_rows()
        for each in (x, scale):
            torch._dynamo.mark_dynamic(each, 0)
        self.check(f, x, scale, dynamic=None)

    def test_as_ever(self):
        """Aligned rows, short ones, dynamic columns, and kernels in one launch."""

        def f(x, scale):
            return (x * scale).to(x.dtype)

        for columns, options in (
            (5008, {}),
            (4095, {}),
            (COLUMNS, {"dynamic": True}),
        ):
            x = self.odd(columns)
            self.check(f, x, self.of_rows(), columns=columns, loads=0, **options)

        def two(x, scale):
            return torch.cat((f(x, scale), f(x[:5] + 1, scale[1:])))

        x, options = self.odd(), {"combo_kernels": True}
        self.check(two, x, self.of_rows(), loads=0, **options)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
