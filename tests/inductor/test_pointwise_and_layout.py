# Owner(s): ["module: inductor"]
"""Pointwise functions, random numbers, max pools, and the layout behind a permute."""

import contextlib
import dataclasses
import inspect
import math
import re
import unittest
import unittest.mock
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from test_reduction_tiling import randn, TILED
from torch._decomp import decompositions
from torch._inductor import (
    looped_reduction,
    metrics,
    pointwise_rows,
    random_groups,
    slow_functions,
    tiling_utils,
)
from torch._inductor.channels_last_order import (
    in_order_of_convolutions,
    permuted_dimensions,
)
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.device_model import DeviceModel
from torch._inductor.fx_passes import packed_pairs
from torch._inductor.looped_rows import FEW_ROWS, SHORT_ROW
from torch._inductor.runtime import sigmoidal
from torch._inductor.runtime.runtime_utils import ceildiv
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
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


# Pointwise rows

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


# Knobs with which rows of 5120 columns are as long as those that are never persistent.
LOOPED = {
    "triton.persistent_reductions": False,
    "triton.persistent_reduction_max_numel": 5000,
}


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class LoopsOfReadersTest(PointwiseRowsTestCase):
    """A pointwise node is in the loop over a row that reads it, where less is moved then."""

    def check(self, f, *dtypes, loops, marked=False, short=5000, **options):
        """
        Of inputs of ``dtypes``, with each pointwise result a node of its own: the loads and
        the stores of each loop of the kernel, if given. Their rows may be marked as dynamic.
        """
        inputs = [torch.rand(6, 5120, device=GPU_TYPE).to(dtype) for dtype in dtypes]
        for each in inputs if marked else ():
            torch._dynamo.mark_dynamic(each, 0)
        expect = f(*(x.double() for x in inputs))
        options = {
            "realize_opcount_threshold": 0,
            "realize_reads_threshold": 0,
            "triton.persistent_reductions": False,
            "triton.persistent_reduction_max_numel": short,
            **options,
        }
        actual, code = self.compile(f, *inputs, **options)
        for one, other in zip(actual, expect, strict=True):
            self.assertEqual(one.double(), other.double(), atol=0, rtol=2e-6)
        found = [
            (each.count("tl.load("), each.count("tl.store("))
            for each in self.loops(code)
        ]
        if loops is not None:
            self.assertEqual(found, loops, str(found))

    def loops(self, code):
        """Without what is left of the rows behind whole blocks."""
        _, *loops = code.split("def call(")[0].split(LOOP)
        return [loop.split("if R0_WHOLE")[0] for loop in loops]

    @parametrize("dynamic", (False, True))
    def test_fewer_bytes(self, dynamic):
        def f(x, y):
            v = x.float() * 2 + y
            return (v.exp() * (x.float() * y).mean(1, keepdim=True),)

        half, full = (torch.bfloat16,) * 2, (torch.float32,) * 2
        rows = {"marked": True, "dynamic": None} if dynamic else {}
        self.check(f, *half, loops=[(2, 0), (2, 1)], **rows)
        self.check(f, *full, loops=[(2, 1), (1, 1)], **rows)

    def test_returned(self):
        """It is stored in any case."""

        def f(x, y):
            v = x.float() * 2
            return v.exp() * (x.float() * y).mean(1, keepdim=True), v

        self.check(f, torch.bfloat16, torch.float32, loops=[(2, 0), (1, 2)])
        self.check(f, torch.float32, torch.float32, loops=[(2, 1), (1, 1)])

    def test_what_it_needs(self):
        """Of three nodes none alone moves less in another loop."""

        def f(x):
            v = (x.float() * 2).sin().cos()
            return (v * x.float().mean(1, keepdim=True),)

        self.check(f, torch.bfloat16, loops=[(1, 0), (1, 1)])

    def test_what_it_alone_reads(self):
        def f(x, y, z):
            return ((x * y + z).exp() * x.mean(1, keepdim=True),)

        self.check(f, *(torch.float32,) * 3, loops=[(1, 0), (3, 1)])

    def test_read_by_both(self):
        def f(x):
            v = x.float() * 2
            return (v.exp() * v.mean(1, keepdim=True),)

        self.check(f, torch.bfloat16, loops=[(1, 0), (1, 1)])
        # of rows that may be held
        self.check(f, torch.bfloat16, loops=[(1, 1), (1, 1)], short=5120)

    def test_three_loops(self):

        def f(x):
            v = x.float() * 2
            mean = x.float().mean(1, keepdim=True)
            square = (v - mean).square().mean(1, keepdim=True)
            return (v * square,)

        self.check(f, torch.bfloat16, loops=[(1, 0), (1, 0), (1, 1)])

    def test_written_twice(self):
        """An input that is changed has its value of before."""

        def f(x, y):
            v = x * 2
            scale = (x * y).mean(1, keepdim=True)
            x.mul_(3)
            return v.exp() * scale, x + y

        x, y = torch.rand(2, 6, 5120, device=GPU_TYPE)
        expect = f(x.double(), y.double())
        actual, _ = self.compile(
            f, x, y, realize_opcount_threshold=0, realize_reads_threshold=0
        )
        for one, other in zip(actual, expect, strict=True):
            self.assertEqual(one.double(), other, atol=0, rtol=2e-6)

    def test_recomputed(self):
        """In each loop over a long row that reads it, from what that loads anyway."""

        def f(x):
            v = x.float() * 2
            return (v.exp() * x.float() * v.mean(1, keepdim=True),)

        self.check(f, torch.bfloat16, loops=[(1, 0), (1, 1)])

        def three(x):
            v = (x.float() * 2).exp()
            square = (v - v.mean(1, keepdim=True)).square().mean(1, keepdim=True)
            return (v * square,)

        self.check(three, torch.bfloat16, loops=[(1, 0), (1, 0), (1, 1)])

    @parametrize("dynamic", (False, True))
    def test_recomputed_with_what_it_needs(self, dynamic):
        """Each node once in a loop, whichever of its readers were there before it."""

        def f(x):
            u = x.float() * 2
            v = u.exp()
            w = v + u
            mean = x.float().mean(1, keepdim=True)
            square = (w - mean).square().mean(1, keepdim=True)
            return (w * square + u * v,)

        rows_alone = {"dynamic": None} if dynamic else {}
        loops = [(1, 0), (1, 0), (1, 1)]
        self.check(f, torch.bfloat16, loops=loops, marked=dynamic, **rows_alone)

    def test_gathered(self):
        """What another tensor says the place of is loaded again, and costs as much."""

        def f(x, y):
            v = y.view(-1)[(x * 1000).long()]
            return (v.exp() * x * v.mean(1, keepdim=True),)

        self.check(f, torch.float32, torch.float32, loops=[(2, 1), (1, 1)])

    def test_not_recomputed(self):
        """What takes longer to compute than to load, or is stored in any case."""

        def slow(x):
            v = x.float().lgamma()
            return (v.abs() * x.float() * v.mean(1, keepdim=True),)

        def returned(x):
            v = x.float() * 2
            return v.exp() * x.float() * v.mean(1, keepdim=True), v

        self.check(slow, torch.bfloat16, loops=[(1, 1), (1, 1)])
        self.check(returned, torch.bfloat16, loops=[(1, 1), (2, 1)])

    @parametrize("shape", ((8, 5120), (1, 5120), (5120,)))
    def test_a_row_value_that_is_overwritten(self, shape):
        """
        The kernel has it in registers when a later loop computes again what reads it, but of
        one row it loads it again.
        """

        def f(x, y):
            r = y @ y.mT[:, :1]
            if x.dim() == 1:
                r = r.view(())
            z = x.exp() + r
            total = r + z.mean(-1, keepdim=x.dim() > 1)
            square = (z - total).square().mean(-1, keepdim=x.dim() > 1)
            return z * total * square, total

        rows = shape[0] if len(shape) == 2 else 1
        x, y = torch.rand(shape, device=GPU_TYPE), torch.rand(rows, 8, device=GPU_TYPE)
        actual, code = self.compile(
            f,
            x,
            y,
            realize_opcount_threshold=0,
            realize_reads_threshold=0,
            split_reductions=False,
            **LOOPED,
        )
        self.assertIn("in_out_ptr", code)
        for one, other in zip(actual, f(x.double(), y.double()), strict=True):
            self.assertEqual(one.double(), other, atol=1e-6, rtol=1e-5)
        if rows > 1:
            self.assertEqual([each.count("tl.store(") for each in self.loops(code)], [0, 0, 1])

    @parametrize("form", ("padded", "added", "joined"))
    def test_not_of_a_row_value_under_a_mask(self, form):
        """Which is loaded in each loop, and overwritten between them."""

        def f(x, y):
            r = y @ y.mT[:, :1]
            if form == "joined":
                z = torch.cat([r.expand(8, 2560), x[:, :2560]], 1) + x.exp()
            else:
                z = F.pad(r.expand(8, 5000), (0, 120))
            if form == "padded":
                total = r + z.sum(1, keepdim=True) * 1e-3 + x.mean(1, keepdim=True)
                return x * total + z, total
            if form == "added":
                z = z + x
            total = r + z.mean(1, keepdim=True)
            return z.exp() * total * 1e-3, total

        x, y = torch.rand(8, 5120, device=GPU_TYPE), torch.rand(8, 8, device=GPU_TYPE)
        actual, code = self.compile(
            f,
            x,
            y,
            realize_opcount_threshold=0,
            realize_reads_threshold=0,
            **LOOPED,
        )
        self.assertIn("in_out_ptr", code)
        for one, other in zip(actual, f(x.double(), y.double()), strict=True):
            self.assertEqual(one.double(), other, atol=1e-6, rtol=1e-5)

    @parametrize(
        "form", ("returned", "local", "in_turn", "of_a_kernel", "moved", "moved_local")
    )
    def test_not_of_what_is_overwritten(self, form):
        """A result takes the buffer of a product, which another loop would have read again."""

        def f(x, y):
            z = x @ y
            if form == "of_a_kernel":
                z = z.softmax(0)
            u = z * 2
            if form.startswith("moved"):
                v = u.abs() + z
                w = v + 1.5 if form == "moved" else (v + 1.5).lgamma()
                t = u + 1
                s = (w * t.mean(1, keepdim=True) + t).mean(1, keepdim=True)
                z = (u * 0.1).exp()
                return (w, z * s) if form == "moved" else (w * s + z,)
            if form == "in_turn":
                w = (u - z) * u.mean(1, keepdim=True)
                return w, (u.abs() + 0.5).log() * w.mean(1, keepdim=True) + w
            if form == "returned":
                return z + u, u.exp() * u.mean(1, keepdim=True)
            slow = u.lgamma() + z
            return (slow * slow.sum(1, keepdim=True) + u.exp(),)

        x, y = torch.rand(8, 8, device=GPU_TYPE), torch.rand(8, 5120, device=GPU_TYPE)
        expect = f(x.double(), y.double())
        actual, code = self.compile(
            f,
            x,
            y,
            realize_opcount_threshold=0,
            realize_reads_threshold=0,
            **LOOPED,
        )
        self.assertIn("in_out_ptr", code)
        for one, other in zip(actual, expect, strict=True):
            self.assertEqual(one.double(), other, atol=1e-6, rtol=1e-5)

    @parametrize("option", ("use_block_ptr", "use_tensor_descriptor"))
    def test_descriptors(self, option):
        """Those of a buffer that is removed would be missing."""

        def f(x, y):
            v = x.float() * 2 + y
            return (v.exp() * (x.float() * y).mean(1, keepdim=True),)

        half = (torch.bfloat16,) * 2
        self.check(f, *half, loops=None, **{f"triton.{option}": True})

    def test_fewest_loops(self):
        """A sum that waits for no other is in the first loop, wherever it was scheduled."""

        def f(x, y):
            scaled = y * x.mean(1, keepdim=True)
            v = x.exp() + y
            return scaled, v * v.mean(1, keepdim=True)

        self.check(f, *(torch.float32,) * 2, loops=[(2, 0), (2, 2)])

    @parametrize("temperature", (1, 2))
    @parametrize("both", (False, True))
    def test_distillation(self, both, temperature):
        """The gradient by targets is in the loop of that by the teacher, and not stored."""

        def loss(x, y, targets):
            wanted = (y.float() / temperature).softmax(-1)
            soft = wanted * (x.float() / temperature).log_softmax(-1)
            return F.cross_entropy(x, targets) - soft.sum(-1).mean()

        def gradients(loss, *inputs):
            x, y = (each.detach().requires_grad_() for each in inputs)
            return torch.autograd.grad(
                loss(x, y, targets), (x, y) if both else (x,)
            )

        x, y = (self.rows(STRIDE) for _ in range(2))
        targets = torch.tensor([0, 17, -100, 17, 4096, 3], device=GPU_TYPE)
        with self.few_rows(**LOOPED):
            compiled = torch.compile(loss, fullgraph=True, dynamic=False)
            actual, codes = run_and_get_code(gradients, compiled, x, y)
        expect = gradients(loss, x.double(), y.double())
        for one, other in zip(actual, expect, strict=True):
            eps = 4 * torch.finfo(one.dtype).eps
            self.assertEqual(one.double(), other, atol=eps * other.abs().max().item(), rtol=eps)
        first, *_, last = self.loops(codes[1])
        self.assertNotIn("tl.store(", first)
        self.assertIn("tl.store(", last)


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


# Packed pairs

is_2_15 = hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes")


def codes(x):
    """x of magnitudes up to 6 to 4 bits, by more operations than are inlined twice."""
    magnitude = x.abs()
    code = (x < 0).to(torch.uint8) << 3
    for bound in (0.25, 1.25, 2.5, 5.0):
        code = code + (magnitude > bound).to(torch.uint8)
    for bound in (0.75, 1.75, 3.5):
        code = code + (magnitude >= bound).to(torch.uint8)
    return code


def scaled(x, block):
    """x in blocks, by a power of two each, which is exact; and its exponents."""
    blocks = x.reshape(*x.shape[:-1], -1, block).float()
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = ((amax.view(torch.int32) >> 23) & 0xFF).clamp(3, 250) - 2
    return blocks * ((254 - exponent) << 23).view(torch.float32), exponent.to(torch.uint8)


def flat(code):
    """As torchao packs."""
    pairs = code.contiguous().view(-1)
    return pairs[::2] | pairs[1::2] << 4


def by_slices(code):
    return code[..., ::2] | code[..., 1::2] << 4


def by_pairs(code):
    pairs = code.reshape(*code.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def odd_first(code):
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] << 4) + pairs[..., 1]


def cast(x, block=32, pack=flat):
    values, exponent = scaled(x, block)
    code = codes(values.reshape(x.shape))
    return pack(code).reshape(*x.shape[:-1], -1), exponent.squeeze(-1)


@instantiate_parametrized_tests
@on_cuda
class PackedPairsTest(TestCase):
    def setUp(self):
        super().setUp()
        metrics.reset()
        torch._dynamo.reset()

    def check(self, f, *args, kernels=1, **options):
        """``f`` compiles to ``kernels`` kernels, and returns eager's bits in its layout."""
        with inductor_config.patch({**TILED, **options}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        expected = f(*args)
        for act, expect in zip(actual, expected, strict=True):
            self.assertEqual(act.stride(), expect.stride())
            self.assertEqual(act.dtype, expect.dtype)
            self.assertTrue(torch.equal(act, expect))
        self.assertEqual(metrics.generated_kernel_count, kernels)
        return code

    @parametrize("pack", (flat, by_slices, by_pairs, odd_first))
    @parametrize("block", (16, 32))
    def test_rows(self, pack, block):
        x = randn(24, 96, dtype=torch.bfloat16)
        self.check(lambda x: cast(x, block, pack), x)

    @parametrize("pack", (flat, by_pairs))
    def test_columns(self, pack):
        x = randn(128, 160, dtype=torch.bfloat16)
        # whose loops differ there, and are not fused
        kernels = 2 if is_2_15 else 1
        self.check(lambda x: cast(x.t().contiguous(), 32, pack), x, kernels=kernels)

    @parametrize("dtype", (torch.float16, torch.float32))
    def test_dtypes(self, dtype):
        self.check(cast, randn(40, 64, dtype=dtype))

    def test_batches(self):
        self.check(cast, randn(3, 5, 64))

    def test_special_values(self):
        x = randn(8, 64)
        x[0] = 0
        x[1, 3], x[2, 4], x[3, 5] = float("inf"), float("-inf"), float("nan")
        self.check(cast, x)

    def test_what_comes_before_and_is_of_other_shapes(self):
        def f(x, bias, gain):
            y = torch.relu(x + bias) * gain[:, None]
            return cast(y, 32)

        self.check(f, randn(24, 64), randn(64), randn(24))

    def test_a_bias_in_blocks(self):
        def f(x, bias):
            values, exponent = scaled(x, 16)
            code = codes(values + bias.reshape(-1, 16).round())
            return flat(code), exponent

        self.check(f, randn(24, 64), randn(64))

    def test_smallest_values(self):
        def f(x):
            blocks = x.reshape(x.shape[0], -1, 16)
            least = blocks.amin(-1, keepdim=True)
            return flat(codes(blocks - least)), least.squeeze(-1)

        self.check(f, randn(24, 64).round())

    def test_constant_scales(self):
        self.check(lambda x: (flat(codes(x * 0.5)),), randn(24, 64))

    def test_dynamic_rows(self):
        x = randn(24, 64)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(cast, x)

    def test_odd_blocks_and_other_uses_stay(self):
        def of_odd_blocks(x):
            blocks = x.reshape(x.shape[0], -1, 3)
            amax = blocks.abs().amax(-1, keepdim=True)
            return flat(codes((blocks / amax).reshape(x.shape))), amax

        def with_codes(x):
            code = codes(x)
            return flat(code), code

        def apart(x):
            pairs = codes(x).unflatten(-1, (-1, 2))
            return pairs[..., 0].contiguous(), pairs[..., 1] + 1

        for f, size in ((of_odd_blocks, 48), (with_codes, 64), (apart, 64)):
            x = torch.randint(-4, 5, (16, size), device=GPU_TYPE).float()
            x[:, ::3] = 4
            metrics.reset()
            with inductor_config.patch(TILED):
                actual = torch.compile(f, fullgraph=True)(x)
            for act, expect in zip(actual, f(x), strict=True):
                self.assertTrue(torch.equal(act, expect))

    def test_off(self):
        x = randn(24, 64)
        kernels = 2 if is_2_15 else 3
        self.check(cast, x, kernels=kernels, **{"triton.block_reduction_tiles": False})


@on_cuda
class PackedPairsPassTest(TestCase):
    def split(self, f, *args):
        graph = make_fx(f, tracing_mode="fake")(*args).graph
        # where a GPU is described its tensors are the CPU's
        with mock.patch.object(packed_pairs, "is_for_triton", lambda value: True):
            return packed_pairs.split_packed_pairs(graph)

    def test_numbers_are_not_packed(self):
        def rotated(x):
            pairs = (x * 2).unflatten(-1, (-1, 2))
            return pairs[..., 0] - pairs[..., 1]

        x = randn(8, 16)
        self.assertEqual(self.split(rotated, x), 0)
        self.assertEqual(self.split(lambda x: by_pairs(x & 15), x.to(torch.int32)), 1)

    def test_what_is_read_is_not_computed(self):
        code = torch.zeros(8, 16, dtype=torch.uint8, device=GPU_TYPE)
        self.assertEqual(self.split(by_pairs, code), 0)

    def test_both_of_each_pair(self):
        code = torch.zeros(8, 16, dtype=torch.uint8, device=GPU_TYPE)
        self.assertEqual(self.split(lambda x: (x + 1)[:, ::2] | 1, code), 0)
        self.assertEqual(self.split(lambda x: (x + 1)[:, 2::2] | 1, code), 0)

    def test_results_need_a_pointwise_use(self):
        code = torch.zeros(8, 16, dtype=torch.uint8, device=GPU_TYPE)

        def f(x):
            y = x + 1
            return y[:, ::2], y[:, 1::2] << 4

        self.assertEqual(self.split(f, code), 0)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
