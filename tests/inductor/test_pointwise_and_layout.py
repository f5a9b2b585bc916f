# Owner(s): ["module: inductor"]
"""Pointwise functions, random numbers, max pools, and the layout behind a permute."""

import inspect
import math
import re
import unittest
import unittest.mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._decomp import decompositions
from torch._inductor import random_groups, slow_functions
from torch._inductor.channels_last_order import (
    in_order_of_convolutions,
    permuted_dimensions,
)
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import sigmoidal
from torch._inductor.runtime.runtime_utils import ceildiv
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU
from torch.utils._ordered_set import OrderedSet


on_cuda = unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")


# erf, tanh and sigmoid


FUNCTIONS = {"erf": torch.erf, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
# In units in the last place of float32. A sigmoid's exponent is rounded before it is raised.
ULPS = {"erf": 2.5, "tanh": 3.5, "sigmoid": 12}
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -3e38, 88.8, -88.8)


def gelu_backward(approximate):
    def f(grad, x):
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)

    return f


@unittest.skipIf(GPU_TYPE != "cuda" or torch.version.hip, "not an NVIDIA GPU")
@instantiate_parametrized_tests
class SigmoidalTest(TestCase):
    """erf, tanh and sigmoid of float32 without branches."""

    def points(self):
        """Both ranges of each function, their seam, and what is far beyond."""
        dense = torch.linspace(-9.5, 9.5, 40001)
        seams = torch.cat([s + torch.linspace(-1e-4, 1e-4, 501) for s in (0.6, 0.8, 4.0)])
        small = torch.logspace(-40, -1, 800)
        return torch.cat([dense, seams, -seams, small, -small]).to(GPU_TYPE)

    @parametrize("name", tuple(FUNCTIONS))
    def test_error_in_units_in_the_last_place(self, name):
        x = self.points()
        actual, (code,) = run_and_get_code(torch.compile(FUNCTIONS[name]), x)
        FileCheck().check(f"triton_helpers.{name}(").run(code)
        exact = FUNCTIONS[name](x.double())
        # a sigmoid that float32 cannot normalize is flushed to zero
        tiny = torch.finfo(torch.float32).tiny
        size = exact.abs().clamp(min=tiny)
        unit = torch.exp2(size.log2().floor() - 23)
        errors = (actual.double() - exact).abs() / unit
        self.assertLess(errors[size > tiny].max().item(), ULPS[name])

    @parametrize("name", tuple(FUNCTIONS))
    def test_special_values(self, name):
        x = torch.tensor(SPECIAL, device=GPU_TYPE)
        actual = torch.compile(FUNCTIONS[name])(x)
        self.assertEqual(actual, FUNCTIONS[name](x), atol=1e-37, rtol=1e-6)
        if name != "sigmoid":
            self.assertEqual(actual.signbit()[1:], x.signbit()[1:])

    @parametrize("name", tuple(FUNCTIONS))
    def test_other_types(self, name):
        x = torch.randn(1000, device=GPU_TYPE, dtype=torch.float64)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            y = x.to(dtype)
            self.assertEqual(torch.compile(FUNCTIONS[name])(y), FUNCTIONS[name](y))

    def test_no_choice_of_coefficients(self):
        # the one choice is which of two polynomials
        for name in ("erf", "tanh"):
            source = inspect.getsource(getattr(sigmoidal, f"_{name}_float32").fn)
            self.assertEqual(source.count("tl.where("), 1)
            self.assertEqual(source.count("libdevice." + name), 0)

    @parametrize("approximate", ("none", "tanh"))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_gelu(self, approximate, dtype):
        grad, x = (torch.randn(8, 1000, device=GPU_TYPE).to(dtype) for _ in range(2))
        for f, args in (
            (lambda x: F.gelu(x, approximate=approximate), (3 * x,)),
            (gelu_backward(approximate), (grad, 3 * x)),
        ):
            torch._dynamo.reset()
            actual = torch.compile(f)(*args)
            exact = f(*(arg.double() for arg in args))
            scale = torch.finfo(dtype).eps
            self.assertEqual(actual.double(), exact, atol=8 * scale, rtol=2 * scale)


# Slow functions that are computed once


KNOB = "realize_slow_functions"


def kernels(code):
    return re.findall(r"@triton\.jit\n(.*?)'''", code, re.DOTALL)


def computing(code, function):
    """How many kernels call `function`."""
    return sum(f"{function}(" in kernel for kernel in kernels(code))


def rotate(x, table):
    left, right = x.chunk(2, -1)
    return x * table.cos() + torch.cat((-right, left), -1) * table.sin()


def rotary(x):
    """x: [batch, heads, tokens, channels]"""
    steps = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32)
    tokens = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(tokens, 5e5 ** (-steps / x.shape[-1]))
    return rotate(x, torch.cat((angles, angles), -1)).type_as(x)


@on_cuda
@instantiate_parametrized_tests
class RealizeSlowFunctionsTest(TestCase):
    """A small tensor of slow functions that is broadcast has a kernel of its own."""

    def compile(self, f, *inputs, computed=64, dynamic=False, **options):
        """As if a launch took as long as to compute so many elements."""
        torch._dynamo.reset()
        with (
            inductor_config.patch({"force_disable_caches": True, **options}),
            unittest.mock.patch.object(slow_functions, "MIN_COMPUTED", computed),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            result, code = run_and_get_code(compiled, *inputs)
        return result, "\n".join(code)

    def check(self, f, *inputs, **options):
        actual, code = self.compile(f, *inputs, **options)
        expect = f(*(x.double() for x in inputs)).to(actual.dtype)
        self.assertEqual(actual.shape, expect.shape)
        atol = 8 * torch.finfo(actual.dtype).eps
        self.assertEqual(actual, expect, atol=atol, rtol=atol)
        return code

    def randn(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, device=GPU_TYPE, dtype=dtype)

    def rotates_by_tables(self, code):
        """Cosines and sines are computed before what reads an input."""
        *tables, rotation = kernels(code)
        for function in ("cos", "sin"):
            self.assertEqual(computing(code, function), 1)
            self.assertNotIn(f"{function}(", rotation)
        self.assertNotIn("pow(", rotation)
        self.assertTrue(tables)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("dynamic", (False, True))
    def test_rotary_embeddings(self, dynamic, dtype):
        x = self.randn(2, 4, 24, 16, dtype=dtype)
        actual, code = self.compile(rotary, x, dynamic=dynamic)
        self.rotates_by_tables(code)
        expect = rotary(x.double()).to(dtype)
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        self.assertEqual(actual, expect, atol=atol, rtol=atol)
        _, code = self.compile(rotary, x, dynamic=dynamic, **{KNOB: False})
        self.assertEqual(len(kernels(code)), 1)

    def test_order_of_reads(self):
        """A table lies as it is read, whatever the order of what it is computed from."""

        def f(x, angles):
            return x * angles.t().cos()

        code = self.check(f, self.randn(16, 40, 24), self.randn(24, 40))
        self.assertEqual(len(kernels(code)), 2)
        self.assertRegex(code, r"empty_strided_\w+\(\(40, 24\), \(24, 1\)")

    def test_tables_of_half_types(self):
        """They are rounded, as in eager mode."""

        def f(x, angles):
            return (x * angles.cos()).float()

        x = self.randn(16, 400, dtype=torch.bfloat16)
        angles = self.randn(400, dtype=torch.bfloat16)
        actual, code = self.compile(f, x, angles)
        self.assertEqual(len(kernels(code)), 2)
        products = x.double() * angles.double().cos().bfloat16().double()
        self.assertEqual(actual.double(), products, atol=0, rtol=2**-8)

    def test_part_of_a_tensor(self):
        """Not what is left of it, which might never be used."""

        def first(x, t):
            return x + t.sin()[:1]

        def parts(t):
            h = t.tan()
            return sum(h[i] for i in range(8))

        inputs = self.randn(16, 40), self.randn(64, 40)
        self.assertEqual(len(kernels(self.check(first, *inputs))), 1)
        self.assertEqual(len(kernels(self.check(parts, self.randn(8, 90)))), 1)

    def test_few_values(self):
        """A thread has one of them for all of its elements."""

        def f(x, t):
            return x * t.tanh()

        for shape, expected in (((1,), 1), ((31, 1), 1), ((32, 1), 2)):
            inputs = self.randn(shape[0], 90), self.randn(*shape)
            self.assertEqual(len(kernels(self.check(f, *inputs))), expected)

    @parametrize("function", ("sin", "tan", "atan", "lgamma", "tanh", "erfc"))
    def test_functions(self, function):
        def f(x, t):
            return x + getattr(torch, function)(t)

        inputs = self.randn(16, 40), self.randn(40)
        self.assertEqual(len(kernels(self.check(f, *inputs))), 2)
        self.assertEqual(len(kernels(self.check(f, *inputs, **{KNOB: False}))), 1)

    def test_power(self):
        def f(x, t):
            return x + t.abs() ** 1.7

        code = self.check(f, self.randn(16, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 2)

    @parametrize("function", ("reciprocal", "sqrt", "rsqrt"))
    @parametrize("stored", (torch.float32, torch.float64))
    def test_quotients_in_float64(self, function, stored):
        def scaled(x, t):
            return x * getattr(torch, function)(t.abs().double() + 1).float()

        def divided(x, t):
            return x * (448 / (t.abs().double() + 1)).float()

        x, t = self.randn(16, 40), self.randn(40, dtype=stored)
        for f in (scaled, divided):
            self.assertEqual(len(kernels(self.check(f, x, t))), 2)
            self.assertEqual(len(kernels(self.check(f, x, t, **{KNOB: False}))), 1)

    def test_what_is_fast_in_float64(self):
        def product(x, t):
            return x * (t.double() * 3 + 1).float()

        def quotient_in_float32(x, t):
            return x * (448 / (t.abs().double() + 1).float())

        x, t = self.randn(16, 40), self.randn(40)
        for f in (product, quotient_in_float32):
            self.assertEqual(len(kernels(self.check(f, x, t))), 1)

    def test_the_scale_of_a_block_is_computed_with_its_maximum(self):
        """As torchao scales weights for fp8: what copies them in another order loads it."""

        def f(x):
            blocks = x.view(4, 32, 8, 32).transpose(1, 2).flatten(2)
            amax = blocks.abs().amax(2, keepdim=True).double().clamp(min=1e-12)
            y = (blocks * (448 / amax).float()).view(4, 8, 32, 32).transpose(1, 2)
            return y.reshape(x.shape).t().contiguous()

        code = self.check(f, self.randn(128, 256))
        self.assertIn("tl.float64", kernels(code)[0])
        self.assertNotIn("tl.float64", kernels(code)[-1])

    @parametrize("function", ("exp", "sigmoid", "sqrt", "rsqrt", "relu"))
    def test_other_functions_where_they_are_read(self, function):
        def f(x, t):
            return x + getattr(torch, function)(t.abs() + 1)

        code = self.check(f, self.randn(16, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 1)

    def test_few_uses(self):
        code = self.check(lambda x, t: x + t.sin(), self.randn(7, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 1)
        code = self.check(lambda x, t: x + t.sin(), self.randn(8, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 2)

    def test_few_elements(self):
        def f(x, t):
            return x + t.sin()

        inputs = self.randn(16, 40), self.randn(40)
        self.assertEqual(len(kernels(self.check(f, *inputs, computed=640))), 2)
        self.assertEqual(len(kernels(self.check(f, *inputs, computed=641))), 1)

    def gathers_before(self, f, *inputs, dynamic=False):
        """The code of `f`, whose last kernel gathers nothing."""
        actual, code = self.compile(f, *inputs, dynamic=dynamic)
        exact = f(*(x.double() if x.is_floating_point() else x for x in inputs))
        self.assertEqual(actual.double(), exact, atol=1e-6, rtol=1e-6)
        bias, last = kernels(code)
        self.assertIn("tl.device_assert", bias)
        self.assertNotIn("tl.device_assert", last)
        return code

    @parametrize("dynamic", (False, True))
    @parametrize("contiguous", (False, True))
    def test_bias_by_relative_position(self, contiguous, dynamic):
        """Also of a permuted view: what reads it is coalesced."""

        def f(scores, table, index):
            bias = F.embedding(index, table).permute(2, 0, 1)
            return (scores + (bias.contiguous() if contiguous else bias)).softmax(-1)

        def by_view(scores, table, index):
            bias = table[index.view(-1)].view(10, 10, -1).permute(2, 0, 1)
            return (scores + bias.unsqueeze(0)).softmax(-1)

        scores, table = self.randn(9, 4, 10, 10), self.randn(19, 4)
        index = torch.randint(19, (10, 10), device=GPU_TYPE)
        code = self.gathers_before(f, scores, table, index, dynamic=dynamic)
        if not contiguous and not dynamic:
            FileCheck().check("(10, 10, 4), (10, 1, 100)").run(code)
            code = self.gathers_before(by_view, scores, table, index)
            FileCheck().check("(100, 4), (1, 100)").run(code)
        _, code = self.compile(f, scores, table, index, **{KNOB: False})
        self.assertEqual(len(kernels(code)), 1)

    def test_columns_that_are_gathered(self):
        def f(x, table, index):
            return x * table[:, index].expand(9, -1, -1)

        index = torch.randint(50, (40,), device=GPU_TYPE)
        self.gathers_before(f, self.randn(9, 8, 40), self.randn(8, 50), index)

    @parametrize(
        "f",
        (
            # a place for each row, whose elements adjoin
            lambda x, table, index: x + table[index],
            # computed, not loaded
            lambda x, table, index: x + table[:, (torch.arange(24, device=x.device) * 5) % 24],
            # of one element of a row
            lambda x, table, index: x + table[:, 0][index].unsqueeze(-1),
        ),
    )
    def test_other_gathers_where_they_are_read(self, f):
        x, table = self.randn(64, 24, 24), self.randn(24, 24)
        index = torch.randint(24, (24,), device=GPU_TYPE)
        actual, code = self.compile(f, x, table, index)
        self.assertEqual(actual, f(x, table, index))
        self.assertEqual(len(kernels(code)), 1)

    def test_sizes_that_stay(self):
        def f(x, t):
            return x + t.sin().expand(16, -1)

        code = self.check(f, self.randn(16, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 2)

    def test_gradients(self):
        x = self.randn(4, 4, 32, 16).requires_grad_()
        w = self.randn(4, 4, 32, 16)
        torch._dynamo.reset()

        def backward():
            torch.compile(rotary, fullgraph=True)(x).backward(w)

        with (
            inductor_config.patch({"force_disable_caches": True}),
            unittest.mock.patch.object(slow_functions, "MIN_COMPUTED", 64),
        ):
            _, codes = run_and_get_code(backward)
        self.assertEqual(len(codes), 2)
        for code in codes:
            self.rotates_by_tables(code)
        reference = x.detach().double().requires_grad_()
        rotary(reference).backward(w.double())
        self.assertEqual(x.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


# Random numbers


GROUPED, SINGLE = "triton_helpers.rand_groups(", "triton_helpers.rand("


@on_cuda
@inductor_config.patch(fallback_random=False)
@instantiate_parametrized_tests
class RandomGroupsTest(TestCase):
    """A tile computes each four of its random numbers by one call of Philox."""

    def run_code(self, f, *args, seed=7, **options):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        with inductor_config.patch({"fx_graph_cache": False, **options}):
            out, (code,) = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        return out, code

    def one_by_one(self):
        return unittest.mock.patch.object(random_groups, "find_groups", lambda *_: None)

    def numbers(self, size, **options):
        def f(x):
            return torch.rand_like(x)

        return self.run_code(f, torch.empty(size, device=GPU_TYPE), **options)

    @parametrize("size", ((4096,), (37, 64), (5, 12, 20), (1021,), (3,)))
    def test_pointwise(self, size):
        grouped, code = self.numbers(size)
        FileCheck().check(GROUPED).run(code)
        with self.one_by_one():
            single, code = self.numbers(size)
        FileCheck().check(SINGLE).run(code)
        # a number is its offset's, whoever computes it
        self.assertEqual(grouped, single, atol=0, rtol=0)

    @parametrize("persistent", (True, False))
    @parametrize("columns", (768, 1000, 1536))
    def test_rows(self, persistent, columns):
        def f(x):
            y = F.dropout(x, 0.25, True)
            return y, y.sum(1), (y * y).amax(1)

        x = torch.rand(6, columns, device=GPU_TYPE) + 1
        options = {"triton.persistent_reductions": persistent}
        grouped, code = self.run_code(f, x, **options)
        FileCheck().check(GROUPED).run(code)
        with self.one_by_one():
            single, code = self.run_code(f, x, **options)
        FileCheck().check(SINGLE).run(code)
        self.assertEqual(grouped[0], single[0], atol=0, rtol=0)
        self.assertEqual(grouped[0].sum(1), grouped[1], atol=1e-3, rtol=1e-5)
        kept = grouped[0] != 0
        self.assertEqual(grouped[0][kept], (x / 0.75)[kept], atol=1e-6, rtol=1e-6)

    @parametrize("columns", (770, 127))
    def test_rows_that_begin_within_a_group(self, columns):
        def f(x):
            return F.dropout(x, 0.5, True).sum(1)

        x = torch.ones(6, columns, device=GPU_TYPE)
        _, code = self.run_code(f, x)
        FileCheck().check_not(GROUPED).check(SINGLE).run(code)

    def test_another_order_than_the_tile_s(self):
        # numbers along the columns, for a tile whose last dimension is the rows
        def f(x):
            return torch.rand_like(x).t().contiguous()

        x = torch.empty(64, 96, device=GPU_TYPE)
        transposed, _ = self.run_code(f, x)
        plain, _ = self.numbers((64, 96))
        self.assertEqual(transposed, plain.t(), atol=0, rtol=0)

    def test_numbers_of_a_row_for_all_rows(self):
        def f(x):
            return x + torch.rand(x.shape[1], device=x.device), x.sum(1)

        x = torch.zeros(8, 256, device=GPU_TYPE)
        (out, _), _ = self.run_code(f, x)
        plain, _ = self.numbers((256,))
        self.assertEqual(out, plain.expand(8, 256), atol=0, rtol=0)

    def test_a_seed_as_a_tensor(self):
        def f(x, seed):
            return x + torch.ops.prims.inductor_random.default([64, 96], seed, "rand")

        x = torch.zeros(64, 96, device=GPU_TYPE)
        seed = torch.tensor(5, device=GPU_TYPE)
        out, code = self.run_code(f, x, seed)
        FileCheck().check(SINGLE).run(code)
        again, _ = self.run_code(f, x, seed)
        self.assertEqual(out, again, atol=0, rtol=0)
        self.assertEqual(out.mean().item(), 0.5, atol=0.02, rtol=0)

    def test_distribution(self):
        numbers, _ = self.numbers((1 << 16,))
        self.assertTrue(bool(((numbers >= 0) & (numbers < 1)).all()))
        places = numbers.view(-1, 4).double()
        # each place of a group is uniform, and none is another's
        self.assertEqual(places.mean(0), torch.full((4,), 0.5).double(), atol=0.01, rtol=0)
        variance = torch.full((4,), 1 / 12).double()
        self.assertEqual(places.var(0), variance, atol=0.005, rtol=0)
        self.assertEqual(torch.corrcoef(places.t()), torch.eye(4).double(), atol=0.04, rtol=0)
        following = torch.stack([places[:-1, 3], places[1:, 0]])
        self.assertEqual(torch.corrcoef(following), torch.eye(2).double(), atol=0.04, rtol=0)
        self.assertGreater(numbers.unique().numel(), (1 << 16) * 0.99)

    def test_seeds(self):
        first, _ = self.numbers((512,), seed=1)
        again, _ = self.numbers((512,), seed=1)
        other, _ = self.numbers((512,), seed=2)
        self.assertEqual(first, again, atol=0, rtol=0)
        self.assertLess((first == other).sum().item(), 8)

    def test_dynamic_shapes(self):
        def f(x):
            return F.dropout(x, 0.5, True)

        compiled = torch.compile(f, dynamic=True)
        for rows in (17, 64):
            out = compiled(torch.ones(rows, 128, device=GPU_TYPE))
            self.assertTrue(bool(((out == 0) | (out == 2)).all()))
            self.assertEqual((out == 0).float().mean().item(), 0.5, atol=0.1, rtol=0)


# The backward of a max pool


aten, prims = torch.ops.aten, torch.ops.prims


@on_cuda
@instantiate_parametrized_tests
class MaxPoolOffsetsTest(TestCase):
    """The backward of a max pool compares offsets within windows, not indices."""

    # 2.15 does, unless few windows are to be compared
    scattered = hasattr(decompositions, "max_pool2d_with_indices_backward")

    def backward(self, sizes, kernel, stride, padding, ceil_mode=False, layout=None):
        """Gradients of ``x``, compiled and in float64, and the code."""
        x = torch.randn(sizes, device=GPU_TYPE).to(memory_format=layout or torch.contiguous_format)
        # ties, and what has no maximum but the padding's
        x[:, 0] = x[:, 0].round()
        x[0, 1, :3] = float("-inf")
        args = (kernel, stride, padding, [1, 1])
        y, indices = aten.max_pool2d_with_indices(x.double(), *args, ceil_mode)
        grad = torch.randn(y.shape, device=GPU_TYPE).to(memory_format=layout or torch.contiguous_format)
        offsets = prims._low_memory_max_pool_with_offsets(x, *args, ceil_mode)[1]

        def f(grad, x, offsets):
            found = prims._low_memory_max_pool_offsets_to_indices(
                offsets, kernel, [*x.shape[2:]], stride, padding, [1, 1]
            )
            return aten.max_pool2d_with_indices_backward(
                grad, x, *args, ceil_mode, found
            )

        actual, (code,) = run_and_get_code(torch.compile(f), grad, x, offsets)
        exact = aten.max_pool2d_with_indices_backward(
            grad.double(), x.double(), *args, ceil_mode, indices
        )
        self.assertEqual(actual.double(), exact, atol=1e-5, rtol=1e-5)
        return code

    @parametrize(
        "kernel, stride, padding, height, width",
        (
            ([3, 3], [2, 2], [1, 1], 14, 14),
            ([3, 3], [2, 2], [1, 1], 13, 15),
            ([2, 2], [2, 2], [0, 0], 8, 12),
            ([3, 3], [1, 1], [1, 1], 7, 9),
            ([3, 2], [2, 1], [1, 0], 9, 8),
            ([5, 5], [3, 3], [2, 2], 16, 16),
        ),
    )
    @parametrize("layout", (torch.contiguous_format, torch.channels_last))
    def test_windows_that_cover(self, kernel, stride, padding, height, width, layout):
        code = self.backward((2, 3, height, width), kernel, stride, padding, layout=layout)
        many = math.prod(map(ceildiv, kernel, stride)) > torch._inductor.max_pool_offsets.MAX_WINDOWS
        self.assertEqual("tl.atomic_add" in code, many and self.scattered)
        if "tl.atomic_add" not in code:
            self.assertNotIn("device_assert", kernel_of(code))

    @parametrize(
        "kernel, stride, padding, height, width",
        (
            # a last row or column that no window covers
            ([2, 2], [2, 2], [0, 0], 9, 8),
            ([2, 2], [2, 2], [0, 0], 8, 9),
            ([3, 3], [2, 2], [0, 0], 8, 8),
            # between windows
            ([2, 2], [3, 3], [0, 0], 11, 11),
            ([1, 2], [2, 2], [0, 0], 9, 8),
        ),
    )
    def test_windows_that_leave_some_out(self, kernel, stride, padding, height, width):
        code = self.backward((2, 3, height, width), kernel, stride, padding)
        self.assertIn("device_assert", code)  # in its second kernel, where it scatters

    def test_ceil_mode(self):
        self.backward((2, 3, 10, 11), [3, 3], [2, 2], [0, 0], ceil_mode=True)

    @parametrize("layout", (torch.contiguous_format, torch.channels_last))
    def test_the_input_is_not_kept_for_its_sizes(self, layout):
        def f(x):
            var, mean = torch.var_mean(x, (0, 2, 3), keepdim=True)
            return F.max_pool2d(F.relu((x - mean) * (var + 1e-5).rsqrt()), 3, 2, 1)

        x = torch.randn(4, 8, 16, 24, device=GPU_TYPE).to(memory_format=layout)
        x.requires_grad_()
        y = torch.compile(f)(x)
        kept = [each for each in y.grad_fn.saved_tensors if each.is_floating_point()]
        # upstream keeps it, unless it scatters
        large = [each.numel() for each in kept].count(x.numel())
        self.assertEqual(large, 1 if self.scattered else 2)
        grad = torch.randn_like(y)
        (actual,) = torch.autograd.grad(y, x, grad)
        exact = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(f(exact), exact, grad.double())
        self.assertEqual(actual.double(), expected, atol=1e-5, rtol=1e-5)
        self.assertEqual(actual.stride(), x.stride())

    def test_indices_of_another_origin(self):
        # eager's, that nothing computed from offsets
        x = torch.randn(2, 3, 8, 8, device=GPU_TYPE)
        args = ([2, 2], [2, 2], [0, 0], [1, 1], False)
        y, indices = aten.max_pool2d_with_indices(x, *args)

        def f(grad, x, indices):
            return aten.max_pool2d_with_indices_backward(grad, x, *args, indices)

        self.assertEqual(torch.compile(f)(y, x, indices), f(y, x, indices))

    def test_dynamic_sizes(self):
        def f(grad, x, offsets):
            found = prims._low_memory_max_pool_offsets_to_indices(
                offsets, [3, 3], [*x.shape[2:]], [2, 2], [1, 1], [1, 1]
            )
            return aten.max_pool2d_with_indices_backward(
                grad, x, [3, 3], [2, 2], [1, 1], [1, 1], False, found
            )

        compiled = torch.compile(f, dynamic=True)
        for size in (9, 12):
            x = torch.randn(2, 3, size, size, device=GPU_TYPE)
            y, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
            offsets = prims._low_memory_max_pool_with_offsets(
                x, [3, 3], [2, 2], [1, 1], [1, 1], False
            )[1]
            exact = aten.max_pool2d_with_indices_backward(
                y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices
            )
            self.assertEqual(compiled(y, x, offsets), exact)


def kernel_of(code):
    return code[code.index("def triton_") : code.index("''', device_str")]


# Channels last behind a permute


N, C, H, W = 2, 32, 12, 8
# [N, H, W, C] in the memory of a convolution's output that is channels last
PERMUTED = (H * W * C, W * C, C, 1)
# what is channels last of that by position: H innermost, then C
BY_POSITION = (H * W * C, 1, C * H, H)


def norm(y, weight, bias):
    return F.layer_norm(y, (y.shape[-1],), weight, bias)


def channels_norm(x, kernel, weight, bias):
    """Of a convolution's channels, by a permute; what is normed is used by two kernels."""
    y = F.conv2d(x, kernel, padding=1).permute(0, 2, 3, 1)
    z = norm(y, weight, bias)
    z = z + F.linear(z, kernel[:, :, 1, 1])
    return F.conv2d(z.permute(0, 3, 1, 2), kernel, padding=1)


def products(x, kernel, weight, bias):
    """A block with products of channels, of which the hidden tensor has more."""
    y = F.conv2d(x, kernel, padding=1)
    z = F.linear(norm(y.permute(0, 2, 3, 1), weight, bias), kernel.reshape(-1, C))
    z = F.gelu(z) * z
    z = F.linear(z, kernel.reshape(C, -1)).permute(0, 3, 1, 2)
    return F.conv2d(y + z, kernel, padding=1)


class PermutedDimensionsTest(TestCase):
    """What dimensions a convolution's have become."""

    def graph(self, f, channels=C):
        with FakeTensorMode():
            args = (
                torch.empty(N, channels, H, W),
                torch.empty(channels, channels, 3, 3),
                torch.empty(channels),
                torch.empty(channels),
            )
            return make_fx(f, decomposition_table=select_decomp_table())(*args).graph

    def dimensions(self, f, channels=C):
        graph = self.graph(f, channels)
        found = permuted_dimensions(graph)
        return graph, {n: found[n] for n in graph.nodes if n in found}

    def test_behind_a_permute_and_before_one(self):
        graph, found = self.dimensions(channels_norm)
        first, last = graph.find_nodes(
            op="call_function", target=torch.ops.aten.convolution.default
        )
        for node in (first, last, last.args[0]):
            self.assertNotIn(node, found)
        of_channels = [
            node
            for node in graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) in ((N, H, W, C), (N, H, W, 1))
        ]
        self.assertGreater(len(of_channels), 5)
        for node in of_channels:
            self.assertEqual(found[node], (0, 2, 3, 1))

    def test_behind_a_view(self):
        graph, found = self.dimensions(products)
        hidden = [
            node
            for node in graph.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
            and tuple(node.meta["val"].shape) == (N, H, W, 9 * C)
        ]
        self.assertGreater(len(hidden), 1)
        for node in hidden:
            self.assertIsNone(found[node])
        # what comes back to the channels of a convolution is told by the permute behind it
        (add,) = (
            node
            for node in graph.nodes
            if node.target is torch.ops.aten.add.Tensor and node not in found
        )
        (back,) = (node for node in add.all_input_nodes if "permute" in node.name)
        self.assertEqual(found[back.all_input_nodes[0]], (0, 2, 3, 1))

    def test_no_permute(self):
        def f(x, kernel, weight, bias):
            y = F.conv2d(x, kernel, padding=1).relu()
            pooled = y.mean((2, 3), keepdim=True) * y
            shuffled = pooled.view(N, 2, C // 2, H, W).transpose(1, 2).reshape(y.shape)
            return F.conv2d(shuffled, kernel)

        _, found = self.dimensions(f)
        self.assertEqual(found, {})

    def test_no_convolution(self):
        _, found = self.dimensions(lambda x, kernel, weight, bias: x.permute(0, 2, 3, 1) + 1)
        self.assertEqual(found, {})

    def test_two_permutes(self):
        def f(x, kernel, weight, bias):
            y = F.conv2d(x, kernel, padding=1).permute(0, -2, -1, 1) + 1
            return y.permute(3, 1, 2, 0) * 2

        graph, found = self.dimensions(f)
        (mul,) = (n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)
        self.assertEqual(found[mul], (1, 2, 3, 0))

    def test_orders(self):
        graph = self.graph(products)
        prefer = OrderedSet(graph.nodes)
        kept, orders = in_order_of_convolutions(graph, prefer)
        permuted = permuted_dimensions(graph)
        self.assertEqual(OrderedSet(orders) & kept, OrderedSet(orders))
        self.assertEqual(
            prefer - kept, OrderedSet(n for n, dims in permuted.items() if dims is None)
        )
        for order in orders.values():
            self.assertEqual(order, [3, 2, 1, 0])
        self.assertEqual(in_order_of_convolutions(graph, OrderedSet()), (OrderedSet(), {}))


@on_cuda
@inductor_config.patch(
    {
        "layout_optimization": True,
        "force_layout_optimization": True,
        "keep_output_stride": True,
        "shape_padding": False,
        "triton.mix_order_reduction": False,
    }
)
@instantiate_parametrized_tests
class ChannelsLastOrderTest(TestCase):
    """What is made of a convolution's output behind a permute lies in memory as it does."""

    def inputs(self, dtype):
        def make(*size, scale=1.0):
            return (scale * torch.randn(size, device=GPU_TYPE)).to(dtype)

        return (
            make(N, C, H, W),
            make(C, C, 3, 3, scale=1 / 16),
            make(C),
            make(C),
        )

    def setUp(self):
        super().setUp()
        # the reference is float64's
        self.flags = torch.backends.cudnn.flags(allow_tf32=False)
        self.flags.__enter__()

    def tearDown(self):
        # before it is asked whether flags are as they were
        self.flags.__exit__(None, None, None)
        super().tearDown()

    def check(self, actual, f, args):
        for out, ref in zip(actual, f(*(arg.double() for arg in args))):
            scale = torch.finfo(args[0].dtype).eps * ref.abs().max().item()
            self.assertEqual(out.double(), ref.double(), atol=16 * scale, rtol=0)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_a_norm_of_channels(self, dtype):
        def f(*args):
            return (channels_norm(*args),)

        args = self.inputs(dtype)
        actual, codes = run_and_get_code(torch.compile(f), *args)
        self.check(actual, f, args)
        self.assertIn(str(PERMUTED), codes[-1])
        self.assertNotIn(str(BY_POSITION), codes[-1])

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_what_is_kept_for_a_backward(self, dtype):
        # what a forward returns for its backward is no user's: it has the layout that is best
        def f(x, kernel, weight, bias):
            y = F.conv2d(x, kernel, padding=1).permute(0, 2, 3, 1)
            var, mean = torch.var_mean(y.float(), 3, correction=0, keepdim=True)
            rstd = (var + 1e-6).rsqrt()
            normed = (y - mean) * rstd
            z = (normed * weight + bias).to(x.dtype).permute(0, 3, 1, 2)
            return F.conv2d(z, kernel, padding=1), normed, mean, rstd

        from torch._inductor.compile_fx import compile_fx_inner

        args = self.inputs(dtype)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(arg) for arg in args]
            graph = make_fx(f, decomposition_table=select_decomp_table())(*fakes)
        compiled = compile_fx_inner(graph, fakes)
        actual = compiled(list(args))
        self.check(actual, f, args)
        self.assertEqual(actual[1].stride(), PERMUTED)
        for each in actual[2:]:
            self.assertEqual(each.stride()[:3], (H * W, W, 1))

    def test_a_hidden_tensor_has_no_order(self):
        def f(*args):
            return (products(*args),)

        args = self.inputs(torch.float32)
        actual, codes = run_and_get_code(torch.compile(f), *args)
        self.check(actual, f, args)
        self.assertNotIn(str((H * W * 9 * C, 1, 9 * C * H, H)), codes[-1])

    def test_dynamic_batch(self):
        def f(*args):
            return (channels_norm(*args),)

        args = self.inputs(torch.float32)
        torch._dynamo.mark_dynamic(args[0], 0)
        actual, codes = run_and_get_code(torch.compile(f), *args)
        self.check(actual, f, args)
        self.assertNotIn(str(BY_POSITION), codes[-1])


# reduced dimensions in the order of memory


def channels_last(*size, dtype=torch.float32):
    x = torch.randn(size, device=GPU_TYPE).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def rows_outside(*size, dtype=torch.float32):
    """[N, C, H, W], of which memory has H outside C."""
    n, c, h, w = size
    x = torch.randn((n, h, c, w), device=GPU_TYPE).to(dtype)
    return x.permute(0, 2, 1, 3)


@on_cuda
@instantiate_parametrized_tests
class MemoryOrderTest(TestCase):
    """What is read of a long reduction's part lies together, whatever the layout."""

    SIZE = (3, 64, 32, 40)

    def check(self, f, *args, atol=2e-4):
        actual, codes = run_and_get_code(torch.compile(f), *args)
        ref = f(*(arg.double() for arg in args))
        actual, ref = (t if isinstance(t, (tuple, list)) else (t,) for t in (actual, ref))
        for out, expected in zip(actual, ref, strict=True):
            self.assertEqual(out.shape, expected.shape)
            self.assertEqual(out.double(), expected.double(), atol=atol, rtol=1e-3)
        return codes[-1]

    def loads(self, code):
        """The indices of what the first kernel reads."""
        first = code[code.index("@triton.jit") :].partition("async_compile")[0]
        found = re.findall(r"tl.load\(in_ptr\d+ \+ \((.+?)\), ", first)
        self.assertTrue(found)
        return found

    def check_contiguous(self, code):
        for index in self.loads(code):
            self.assertNotIn("%", index)
            self.assertNotIn("//", index)

    @parametrize("make", (channels_last, rows_outside))
    @parametrize(
        "reduce",
        (
            lambda x: x.sum((1, 2, 3)),
            lambda x: x.amax((3, 1, 2)),
            lambda x: torch.var_mean(x, (1, 2, 3)),
            lambda x: (x * 2 + 1).mean((1, 2, 3), keepdim=True),
            lambda x: torch.linalg.vector_norm(x, dim=(1, 2, 3)),
        ),
    )
    def test_an_image(self, make, reduce):
        self.check_contiguous(self.check(reduce, make(*self.SIZE)))

    @parametrize("groups", (1, 4, 32))
    @parametrize("dtype", (torch.bfloat16, torch.float32))
    def test_group_norm(self, groups, dtype):
        def f(x, weight, bias):
            y = F.group_norm(x.to(weight.dtype), groups, weight, bias)
            return F.silu(y)

        weight, bias = (torch.randn(64, device=GPU_TYPE) for _ in range(2))
        x = channels_last(*self.SIZE, dtype=dtype)
        code = self.check(f, x, weight, bias)
        if groups == 1:
            self.check_contiguous(code)
        elif groups == 4:
            # of a row, or of a part of it: a group's channels, and then the next pixel's
            (index,) = self.loads(code)
            size = 64 // groups
            self.assertRegex(index, rf"% {size}\)|^r0_\d \+ {size}\*x\d \+ 64\*r0_\d")

    def test_gradients(self):
        def f(x, weight, bias):
            return F.group_norm(x, 4, weight, bias)

        x = channels_last(*self.SIZE)
        weight, bias = (torch.randn(64, device=GPU_TYPE) for _ in range(2))
        args = [arg.requires_grad_() for arg in (x, weight, bias)]
        doubles = [arg.detach().double().requires_grad_() for arg in args]
        grad = torch.randn_like(x)
        actual = torch.autograd.grad(torch.compile(f)(*args), args, grad)
        ref = torch.autograd.grad(f(*doubles), doubles, grad.double())
        for out, expected in zip(actual, ref):
            self.assertEqual(out.double(), expected, atol=2e-3, rtol=1e-3)

    def test_a_buffer_without_a_layout(self):
        # its layout is decided by what it reads, later
        def f(x, y):
            z = (x + y).relu()
            return z, z.sum((1, 2, 3)), z.exp().sum((1, 2, 3))

        args = (channels_last(*self.SIZE), channels_last(*self.SIZE))
        code = self.check(f, *args, atol=2)
        self.assertNotIn("//", "".join(re.findall(r"tl.load\(.+", code)))

    def test_most_bytes_of_two_layouts(self):
        def f(x, y):
            return (x.float() * y.float()).sum((1, 2, 3))

        x = channels_last(*self.SIZE)
        y = torch.randn(self.SIZE, device=GPU_TYPE).half()
        # the half floats are read a channel after the other, which are 32 * 40 apart
        index = self.loads(self.check(f, x, y, atol=2e-2))[1]
        self.assertRegex(index, r"\b1280\*")

    def test_broadcasts(self):
        def f(x, bias):
            return (x * bias[:, None, None]).sum((1, 2, 3))

        args = (channels_last(*self.SIZE), torch.randn(64, device=GPU_TYPE))
        self.assertNotIn("%", self.loads(self.check(f, *args))[0])

    @parametrize(
        "reduce",
        (
            lambda x, y: x.sum(),
            lambda x, y: F.mse_loss(x, y),
            lambda x, y: torch.var(x - y),
            lambda x, y: x[0].flatten(1).t().amax(),
        ),
    )
    def test_all_elements(self, reduce):
        # but for a variance, upstream has the dense dimension innermost
        args = (channels_last(*self.SIZE), channels_last(*self.SIZE))
        for index in self.loads(self.check(reduce, *args, atol=2e-2)):
            self.assertNotRegex(index, r"\b(64|2560)\*\(")

    def test_one_image(self):
        def f(x):
            return x.sum((1, 2, 3)), *torch.var_mean(x, (1, 2, 3))

        def g(x):
            return torch.var_mean(x, (1, 2, 3))

        x = channels_last(1, *self.SIZE[1:])
        self.check(f, x, atol=2e-3)
        self.check_contiguous(self.check(g, x))

    def test_the_index_of_a_maximum(self):
        def f(x):
            return x.flatten(1).argmax(1), x.argmin()

        x = channels_last(*self.SIZE)
        self.assertEqual(torch.compile(f)(x), f(x))

    @parametrize("dynamic", (1, 2, 3))
    def test_dynamic_sizes(self, dynamic):
        x = channels_last(*self.SIZE)
        torch._dynamo.mark_dynamic(x, dynamic)
        self.check(lambda x: torch.var_mean(x, (1, 2, 3)), x)

    def test_a_dimension_of_one_element(self):
        x = channels_last(3, 1, 240, 400)
        self.check_contiguous(self.check(lambda x: x.sum((1, 2, 3)), x, atol=2e-3))

    def test_nothing_is_permuted(self):
        x = torch.randn(self.SIZE, device=GPU_TYPE)
        self.check_contiguous(self.check(lambda x: x.sum((1, 2, 3)), x))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
