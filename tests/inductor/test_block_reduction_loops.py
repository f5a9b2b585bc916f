# Owner(s): ["module: inductor"]
"""The loops of a block reduction, and of what goes on with it, whatever views it is written in."""

import re

import sympy

import torch
import torch._inductor.config as inductor_config
from test_reduction_tiling import BlockReductionTestBase, randn, TILED
from torch._inductor import tiling_utils
from torch._inductor.block_reduction_loops import (
    count_as,
    Strides,
    without_needless_modulo,
)
from torch._inductor.graph import GraphLowering
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU
from torch.utils._sympy.functions import FloorDiv, ModularIndexing


def flattened(x, block=32):
    t = x.t().contiguous()
    blocks = t.reshape(-1, block)
    amax = blocks.abs().amax(1).unsqueeze(1)
    return (blocks / amax).reshape(t.shape).t(), amax


def not_transposed_back(x, block=32):
    y, amax = flattened(x, block)
    return y.t(), amax


def three_dimensions(x, block=32):
    t = x.t().contiguous()
    blocks = t.reshape(t.shape[0], -1, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(t.shape).t(), amax


def without_a_dimension(x, block=32):
    t = x.t().contiguous()
    blocks = t.reshape(t.shape[0], -1, block)
    amax = blocks.abs().amax(-1)
    return (blocks / amax[..., None]).view(t.shape), amax


def unflattened(x, block=32):
    blocks = x.t().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).flatten(-2).contiguous(), amax


def blocks_of_rows(x, block=32):
    blocks = x.view(-1, block, x.shape[1])
    amax = blocks.abs().amax(1, keepdim=True)
    return (blocks / amax).view(x.shape).t().contiguous(), amax.squeeze(1).t()


FORMS = (
    flattened,
    not_transposed_back,
    three_dimensions,
    without_a_dimension,
    unflattened,
    blocks_of_rows,
)


def contiguous_again(x):
    y, amax = flattened(x)
    return y.contiguous(), amax


def in_float32(x):
    blocks = x.t().contiguous().reshape(-1, 32).float()
    amax = blocks.abs().amax(1, keepdim=True)
    y = (blocks / amax).to(x.dtype).reshape(x.t().shape)
    return y.t(), amax.reshape(x.shape[1], -1)


def by_a_power_of_two(x):
    blocks = x.t().contiguous().reshape(-1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True).float()))
    y = (blocks * torch.exp2(-exponent)).to(x.dtype).reshape(x.t().shape)
    return y.t(), (exponent + 127).to(torch.uint8).reshape(x.shape[1], -1)


def by_two_reductions(x):
    blocks = x.t().contiguous().reshape(-1, 32)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    return ((blocks - low) / (high - low)).reshape(x.t().shape).t(), low, high


def normed(x):
    blocks = x.t().contiguous().reshape(-1, 32)
    variance, mean = torch.var_mean(blocks, 1, keepdim=True)
    y = (blocks - mean) * torch.rsqrt(variance + 1e-5)
    return (y.reshape(x.t().shape).t(),)


def gated(x):
    """A product in front, which is computed where it is read."""
    return flattened(torch.sigmoid(x) * x)


@instantiate_parametrized_tests
class BlockReductionLoopsTest(BlockReductionTestBase):
    def check_tiled(self, f, x, block=32):
        code = self.check(f, x)
        self.assertIsNotNone(self.tile(code))
        self.assertEqual(self.size_hints(code)["r0_"], block)
        for line in code.split("\n"):
            if "tl.load(" in line or "tl.store(" in line:
                self.assertNotRegex(line, "//|%")
        return code

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @parametrize("f", FORMS)
    def test_forms(self, f, dtype):
        code = self.check_tiled(f, randn(256, 72, dtype=dtype))
        self.assertEqual(self.size_hints(code), {"y": 8, "x": 128, "r0_": 32})

    @parametrize("block", (16, 32, 64, 128))
    @parametrize("f", (flattened, three_dimensions))
    def test_blocks(self, f, block):
        x = randn(3 * block, 72, dtype=torch.bfloat16)
        self.check_tiled(lambda x: f(x, block), x, block)

    @parametrize("f", (in_float32, by_a_power_of_two, by_two_reductions, normed, gated))
    def test_what_is_computed_of_blocks(self, f):
        self.check_tiled(f, randn(160, 72, dtype=torch.bfloat16))

    @parametrize("f", (flattened, three_dimensions))
    def test_loops_of_one_size(self, f):
        """Their order alone is another."""
        self.check_tiled(f, randn(32 * 32, 32))

    @parametrize("f", (flattened, three_dimensions))
    def test_a_part_of_a_tensor(self, f):
        self.check_tiled(f, randn(128, 80)[:, :72])

    @parametrize("f", (flattened, three_dimensions))
    def test_an_unaligned_input(self, f):
        self.check_tiled(f, randn(128 * 72 + 1)[1:].view(128, 72))

    def test_batched(self):
        def f(x):
            t = x.transpose(1, 2).contiguous()
            blocks = t.reshape(-1, 32)
            amax = blocks.abs().amax(1, keepdim=True)
            return (blocks / amax).reshape(t.shape).transpose(1, 2), amax

        self.check_tiled(f, randn(3, 96, 72))

    def test_a_result_that_is_not_transposed(self):
        """It keeps its loops, which are as fast."""
        loops = []
        for tiles in (True, False):
            torch._dynamo.reset()
            options = {**TILED, "triton.block_reduction_tiles": tiles}
            with inductor_config.patch(options):
                compiled = torch.compile(contiguous_again)
                _, code = run_and_get_code(compiled, randn(128, 64))
            self.assertIsNone(self.tile("\n".join(code)))
            loops.append(re.findall(r"size_hints=(\{.*?\})", "\n".join(code)))
        self.assertEqual(*loops)

    def test_a_transposed_input_is_read_along_its_blocks(self):
        code = self.check(flattened, randn(64, 128).t())
        self.assertIsNone(self.tile(code))
        self.assertEqual(self.size_hints(code), {"x": 256, "r0_": 32})

    def test_blocks_of_more_than_one_column_are_left_alone(self):
        code = self.check(flattened, randn(48, 64))
        self.assertIsNone(self.tile(code))

    def test_off(self):
        options = {"triton.block_reduction_tiles": False}
        # 2.15 has one kernel of it by itself
        kernels = 1 if hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes") else 2
        code = self.check(three_dimensions, randn(128, 64), kernels=kernels, **options)
        self.assertIsNone(self.tile(code))

    @parametrize("f", (flattened, three_dimensions))
    @parametrize("dims", ((0,), (1,), (0, 1)))
    def test_dynamic(self, f, dims):
        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True)
        for rows, columns in ((128, 64), (96, 72), (160, 200)):
            x = randn(rows, columns, dtype=torch.bfloat16)
            x = x[: rows if 0 in dims else 96, : columns if 1 in dims else 64]
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
            with inductor_config.patch(TILED):
                actual, _ = run_and_get_code(compiled, x)
            for act, expect in zip(actual, f(x)):
                self.assertEqual(act, expect)
                self.assertEqual(act.stride(), expect.stride())


class IndexTest(TestCase):
    """Indices alone, of variables 0 <= a < 6, 0 <= b < 4 and 0 <= c < 8."""

    def setUp(self):
        super().setUp()
        self.a, self.b, self.c = sympy.symbols("a b c", integer=True, nonnegative=True)
        self.ranges = {v: sympy.Integer(n) for v, n in self.sizes()}
        graph = GraphLowering(torch.fx.symbolic_trace(lambda: 0))
        self.enterContext(V.set_graph_handler(graph))

    def sizes(self):
        return ((self.a, 6), (self.b, 4), (self.c, 8))

    def strides(self, index, *variables):
        return Strides.of(index, {v: self.ranges[v] for v in variables or self.ranges})

    def test_modulo_that_does_nothing(self):
        a, b, c = self.a, self.b, self.c
        inner = 8 * b + c
        for index, expected in (
            (FloorDiv(inner, 32), 0),
            (ModularIndexing(inner, 1, 32), inner),
            (a + FloorDiv(inner, 32), a),
            (FloorDiv(inner, 31), FloorDiv(inner, 31)),
            (ModularIndexing(inner, 1, 31), ModularIndexing(inner, 1, 31)),
            (ModularIndexing(inner, 8, 4), FloorDiv(inner, 8)),
            (FloorDiv(inner - 1, 32), FloorDiv(inner - 1, 32)),
            (FloorDiv(c - b, 32), FloorDiv(c - b, 32)),
        ):
            self.assertEqual(without_needless_modulo(index, self.ranges), expected)

    def test_no_sum_of_multiples(self):
        a, b = self.a, self.b
        for index in (a * b, FloorDiv(a, 2), a**2, ModularIndexing(a + b, 1, 3)):
            self.assertIsNone(self.strides(index))

    def test_count_as(self):
        a, b, c = self.a, self.b, self.c
        p = sympy.Symbol("p", integer=True, nonnegative=True)
        q = sympy.Symbol("q", integer=True, nonnegative=True)
        other = self.strides(32 * a + 8 * b + c)
        for index, sizes, expected in (
            (p, (192, 1), {p: 32 * a + 8 * b + c, q: 0}),
            (8 * p + q, (24, 8), {p: 4 * a + b, q: c}),
            (p + 32 * q, (32, 6), {p: 8 * b + c, q: a}),
            (p + 1, (192, 1), None),
            (2 * p, (192, 1), None),
            (p, (96, 2), None),
            (p, (64, 3), None),
            (32 * p + q, (6, 16), None),
        ):
            ranges = dict(zip((p, q), map(sympy.Integer, sizes)))
            self.assertEqual(count_as(Strides.of(index, ranges), other), expected)

    def test_a_variable_that_is_not_read(self):
        a, b, c = self.a, self.b, self.c
        p = sympy.Symbol("p", integer=True, nonnegative=True)
        q = sympy.Symbol("q", integer=True, nonnegative=True)
        other = self.strides(4 * a + b)
        for sizes, expected in (
            ((24, 8), {p: 4 * a + b, q: c}),
            ((24, 4), None),
        ):
            ranges = dict(zip((p, q), map(sympy.Integer, sizes)))
            self.assertEqual(count_as(Strides.of(p, ranges), other), expected)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
