# Owner(s): ["module: inductor"]
"""The loops of a block reduction, and of what goes on with it, whatever views it is written in."""

import dataclasses
from unittest import mock

import sympy

import torch
import torch._inductor.config as inductor_config
from test_reduction_tiling import BlockReductionTestBase, randn, TILED
from torch._inductor import (
    block_reads,
    block_reduction_tile,
    metrics,
    narrow_copy,
    tiling_utils,
)
from torch._inductor.block_reduction_loops import (
    count_as,
    Strides,
    without_needless_modulo,
)
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.device_model import DeviceModel
from torch._inductor.graph import GraphLowering
from torch._inductor.narrow_copy import is_copied_narrower
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
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


def there_and_back(x):
    """As what was quantized is read again: of the shape of ``x`` all the time."""
    amax = x.unflatten(0, (-1, 32)).abs().amax(1)
    scale = amax.repeat_interleave(32, 0)
    return (x / scale) * 3 + scale, amax


def rounded(x):
    blocks = x.unflatten(0, (-1, 32)).float()
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (((blocks / scale).round() * scale).flatten(0, 1).to(x.dtype),)


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

    @parametrize("innermost", (False, True))
    @parametrize("f", (*FORMS, by_two_reductions, gated))
    def test_where_warps_lie(self, f, innermost):
        """Blocks are outermost in a load where Triton has warps along what is innermost."""
        with mock.patch.object(block_reduction_tile, "WARPS_ALONG_INNERMOST", innermost):
            code = self.check_tiled(f, randn(7 * 32, 72, dtype=torch.bfloat16))
        self.assertEqual("tl.permute(tl.load(" in code, innermost)

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

    @parametrize("dtype", (torch.float16, torch.bfloat16))
    @parametrize("f", (there_and_back, rounded))
    def test_a_result_as_it_is_read(self, f, dtype):
        """One kernel, which reads along x and writes along x."""
        code = self.check(f, randn(128, 64, dtype=dtype))
        self.assertIsNone(self.tile(code))
        self.assertEqual(self.size_hints(code), {"x": 256, "r0_": 32})
        self.assertEqual(code.count("tl.load("), 1)

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_a_result_that_is_not_transposed(self, dtype):
        """It gets the loops of the reduction, and is in one kernel with it."""
        code = self.check(contiguous_again, randn(128, 64, dtype=dtype))
        self.assertEqual(self.size_hints(code)["r0_"], 32)
        self.assertEqual(code.count("tl.load("), 1)

    def test_a_result_as_it_is_read_of_a_batch(self):
        def f(x):
            blocks = x.unflatten(1, (-1, 32)).float()
            amax = blocks.abs().amax(2, keepdim=True)
            return (((blocks / amax * 3).floor() * amax).flatten(1, 2).to(x.dtype),)

        self.check(f, randn(3, 96, 72, dtype=torch.bfloat16))

    @parametrize("block", (64, 128, 512))
    def test_long_blocks_as_they_are_read(self, block):
        def f(x):
            blocks = x.unflatten(0, (-1, block)).float()
            scale = blocks.abs().amax(1, keepdim=True) / 127
            return (((blocks / scale).round() * scale).flatten(0, 1).to(x.dtype),)

        self.check(f, randn(2 * block, 64, dtype=torch.bfloat16))

    def test_blocks_of_rows(self):
        """As upstream fuses them, where it does."""

        def f(x):
            blocks = x.view(-1, 32, x.shape[1])
            amax = blocks.abs().amax(1, keepdim=True)
            return (blocks / amax).view(x.shape), amax

        code = self.check(f, randn(128, 64))
        sizes = self.size_hints(code)
        self.assertEqual(sizes, {"x": 256, "r0_": 32})
        torch._dynamo.reset()
        metrics.reset()
        # 2.15 has two kernels of it by itself
        upstream = 2 if hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes") else 1
        options = {"triton.block_reduction_tiles": False}
        code = self.check(f, randn(128, 64), kernels=upstream, **options)
        if upstream == 1:
            self.assertEqual(self.size_hints(code), sizes)

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


FP8 = torch.float8_e4m3fn


def scaled(t, dims, dtype=FP8):
    """t by the largest magnitude along ``dims``."""
    scale = 448 / t.abs().amax(dims, keepdim=True)
    return (t * scale).clamp(-448, 448).to(dtype), scale


def of_two_dimensions(x, m, n):
    """x [M, N] in blocks of [m, n], reduced where they are."""
    values, scale = scaled(x.float().view(x.shape[0] // m, m, x.shape[1] // n, n), (1, 3))
    return values.view(x.shape), scale


def with_dimensions_unflattened(x, m, n):
    values, scale = scaled(x.unflatten(0, (-1, m)).unflatten(2, (-1, n)).float(), (1, 3))
    return values.flatten(2, 3).flatten(0, 1), scale.squeeze(3).squeeze(1)


def one_after_another(x, m, n):
    """The values of a block follow one another, and are written back to their matrix."""
    t = x.view(x.shape[0] // m, m, -1, n).permute(0, 2, 1, 3).reshape(-1, m * n)
    values, scale = scaled(t.float(), (1,))
    values = values.view(x.shape[0] // m, -1, m, n).permute(0, 2, 1, 3)
    return values.reshape(x.shape), scale


def a_row_of_blocks_after_another(x, m, n):
    t = x.view(x.shape[0] // m, m, -1, n).transpose(1, 2).contiguous().flatten(2)
    values, scale = scaled(t.float(), (2,))
    values = values.unflatten(2, (m, n)).transpose(1, 2).contiguous()
    return values.view(x.shape), scale


@instantiate_parametrized_tests
class BlocksOfTwoDimensionsTest(BlockReductionTestBase):
    """One for each multiprocessor at least: 12 x 11 blocks, of 132."""

    FORMS = (
        of_two_dimensions,
        with_dimensions_unflattened,
        one_after_another,
        a_row_of_blocks_after_another,
    )

    def setUp(self):
        super().setUp()
        self.blocks = mock.patch.object(block_reads, "DeviceModel")
        self.device = self.blocks.start()
        self.addCleanup(self.blocks.stop)
        self.device.of.return_value = DeviceModel(sms=132, l2_mib=50)

    @parametrize("f", FORMS)
    @parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    def test_forms(self, f, dtype):
        x = randn(12 * 32, 11 * 32, dtype=dtype)
        self.check(lambda x: f(x, 32, 32), x)

    @parametrize("f", FORMS)
    @parametrize("m,n", ((2, 64), (8, 32), (16, 128)))
    def test_blocks(self, f, m, n):
        self.check(lambda x: f(x, m, n), randn(12 * m, 11 * n))

    def test_loops(self):
        """Blocks that are too long to be persistent are read again, and stay in the L2 cache."""
        x = randn(12 * 64, 11 * 64, dtype=torch.bfloat16)
        self.check(lambda x: of_two_dimensions(x, 64, 64), x)

    def test_what_is_computed_first(self):
        def f(x, gate):
            return of_two_dimensions(torch.nn.functional.silu(x) * gate, 32, 32)

        self.check(f, randn(12 * 32, 11 * 32), randn(12 * 32, 11 * 32))

    def test_batched(self):
        def f(x):
            values, scale = scaled(x.view(2, 6, 32, 11, 32), (2, 4), torch.bfloat16)
            return values.view(x.shape), scale

        self.check(f, randn(2, 6 * 32, 11 * 32))

    def test_a_part_of_a_tensor(self):
        x = randn(12 * 32, 12 * 32)[:, 32:]
        self.check(lambda x: with_dimensions_unflattened(x, 32, 32), x)

    def test_dynamic(self):
        def f(x):
            return scaled(x.view(x.shape[0] // 32, 32, x.shape[1] // 32, 32), (1, 3))

        x = randn(12 * 32, 11 * 32)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(f, x)

    def test_values_alone(self):
        x = randn(12 * 32, 11 * 32)
        self.check(lambda x: of_two_dimensions(x, 32, 32)[:1], x)

    @parametrize(
        "f,m,n",
        (
            (one_after_another, 32, 16),
            (one_after_another, 4, 49),
            (lambda x, m, n: (one_after_another(x, m, n)[0].t().contiguous(),), 32, 32),
        ),
    )
    def test_short_runs_are_not_written(self, f, m, n):
        """Less than a sector in a row, or a part of one, and a transposed result."""
        self.check(lambda x: f(x, m, n), randn(12 * m, 11 * n), kernels=2)

    def test_what_cannot_be_in_the_kernel_keeps_its_loops(self):
        """It is fused with the reduction of the rows, which comes after that of the blocks."""

        def f(x):
            blocks = x.view(12, 32, 11, 32)
            y = (blocks / blocks.abs().amax((1, 3), keepdim=True)).view(x.shape)
            amax = y.abs().amax(1, keepdim=True)
            return (y / amax).to(torch.bfloat16), amax

        self.check(f, randn(12 * 32, 11 * 32), kernels=2)

    def test_a_scale_of_scales(self):
        def f(x):
            blocks = x.view(12, 32, 11, 32)
            amax = blocks.abs().amax((1, 3), keepdim=True)
            return ((blocks * (amax.amax() / amax)).view(x.shape),)

        x, last = randn(12 * 32, 11 * 32), "def triton_poi"
        code = self.check(f, x, kernels=3).split(last)[-1]
        metrics.reset()
        off = self.check(f, x, kernels=3, **{"triton.block_reduction_tiles": False})
        self.assertEqual(code, off.split(last)[-1])

    def test_values_that_are_not_stored_stay_so(self):
        def f(x):
            blocks = x.view(12, 32, 11, 32)
            scale = 1 / blocks.abs().amax((1, 3), keepdim=True)
            x.view(12, 32, 11, 32).mul_(scale)
            return (scale,)

        x = randn(12 * 32, 11 * 32)
        with inductor_config.patch(TILED):
            _, (code,) = run_and_get_code(torch.compile(f, fullgraph=True), x)
        self.assertNotIn("empty_strided_cuda((384, 352)", code)

    @parametrize("device", ({"sms": 133}, {"l2_mib": 0}))
    def test_two_kernels_use_the_device_better(self, device):
        """Fewer blocks than multiprocessors, or blocks that leave the L2 cache."""
        self.device.of.return_value = dataclasses.replace(
            self.device.of.return_value, **device
        )
        x = randn(12 * 32, 11 * 32)
        self.check(lambda x: one_after_another(x, 32, 32), x, kernels=2)

    def test_off(self):
        x = randn(12 * 32, 11 * 32)
        self.check(
            lambda x: one_after_another(x, 32, 32),
            x,
            kernels=2,
            **{"triton.block_reduction_tiles": False},
        )


def scaled_cast(x, dtype, block=32):
    """Blocks by their largest magnitude, in float32, by more operations than are inlined."""
    blocks = x.float().view(x.shape[0], -1, block)
    y = blocks / blocks.abs().amax(-1, keepdim=True)
    for _ in range(16):  # two operations each, of 30
        y = y * 0.75 + 0.125
    return y.clamp(-2, 2).to(dtype).view(x.shape)


def transposed(y):
    return y.t().contiguous()


def column_major(y):
    return y.t().contiguous().t()


def untiled(y, tile=32):
    """The matrix [M, N] of tiles, one after another."""
    m, n = y.shape
    y = y.view(m // tile, n // tile, tile, tile)
    return y.permute(0, 2, 1, 3).contiguous().view(m, n)


@instantiate_parametrized_tests
class NarrowCopyTest(BlockReductionTestBase):
    WIDE = "(96, 5, 32), (160, 32, 1), torch.float32)"

    @parametrize("copy", (transposed, column_major, untiled))
    @parametrize("dtype", (torch.float8_e4m3fn, torch.bfloat16))
    def test_the_narrow_values_are_stored(self, copy, dtype):
        x = randn(96, 160, dtype=torch.bfloat16)
        # 2.15 has one kernel of both
        code = self.check(lambda x: (copy(scaled_cast(x, dtype)),), x, kernels=(1, 2))
        self.assertNotIn(self.WIDE, code)

    def test_off(self):
        x = randn(96, 160, dtype=torch.bfloat16)
        off = {"triton.block_reduction_tiles": False}
        code = self.check(
            lambda x: (untiled(scaled_cast(x, torch.bfloat16)),), x, kernels=2, **off
        )
        self.assertIn(self.WIDE, code)

    @parametrize(
        "f,expected",
        (
            (lambda y: transposed(y.clamp(-2, 2).half()), True),
            (lambda y: untiled(torch.relu(y).to(torch.float8_e5m2)), True),
            (lambda y: transposed(y.clamp(-2, 2)), False),
            (lambda y: transposed(y.double()), False),
            (lambda y: y.half().t(), False),
            (lambda y: y.half().contiguous(), False),
            (lambda y: transposed((y + y.exp()).half()), False),
            (lambda y: (y.half(), transposed(y.half())), False),
            (lambda y: transposed(y.half()).sum(), True),
        ),
    )
    def test_what_a_copy_reads(self, f, expected):
        graph = make_fx(lambda x: f(x * 2), select_decomp_table())(torch.randn(64, 96))
        (first,) = graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.mul.Tensor
        )
        self.assertFalse(is_copied_narrower(first))
        with mock.patch.object(narrow_copy, "tiles_blocks_on", lambda device: True):
            self.assertEqual(is_copied_narrower(first), expected)


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
