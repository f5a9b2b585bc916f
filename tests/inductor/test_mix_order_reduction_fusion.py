# Owner(s): ["module: inductor"]
"""Which nodes are fused to a mix-order reduction."""

import dataclasses
import itertools
import logging
from types import SimpleNamespace
from unittest.mock import patch

import sympy

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import metrics, mix_order_profit, row_parts
from torch._inductor.choices import InductorChoices
from torch._inductor.device_model import DeviceModel, SM_90
from torch._inductor.exc import InductorError
from torch._inductor.gathers import loads_of
from torch._inductor.mix_order_debug import debug_options, DebugOptions
from torch._inductor.mix_order_profit import estimate, Work
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import ops, V
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        DEBUG,
        FUSE,
        Kernel,
        MAX_READS,
        SPLIT_SIZE,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        DEBUG,
        FUSE,
        Kernel,
        MAX_READS,
        SPLIT_SIZE,
    )


# A cap on what a kernel reads


FUSE_UNSPLIT = {
    **FUSE,
    # a second layer is one more node that could be absorbed, and count as an attempt
    "split_reductions": False,
}


class Block(torch.nn.Module):
    """A transformer's residual block: two RMSNorms with weights and scaled branches."""

    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(dim), torch.nn.RMSNorm(dim)
        self.qkv = torch.nn.Linear(dim, 3 * dim, bias=False)
        self.proj = torch.nn.Linear(dim, dim, bias=False)
        self.up = torch.nn.Linear(dim, 2 * dim, bias=False)
        self.down = torch.nn.Linear(2 * dim, dim, bias=False)
        self.scale1 = torch.nn.Parameter(torch.rand(dim))
        self.scale2 = torch.nn.Parameter(torch.rand(dim))
        self.mix = torch.nn.Parameter(torch.rand(2, dim))

    def forward(self, x, x0):
        x = self.mix[0] * x + self.mix[1] * x0
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.scale1 * self.proj(torch.tanh(q) * k.sigmoid() * v)
        return x + self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))


def loads(code):
    """The number of loads in the loop over rows, for each mix-order kernel."""
    kernels = (kernel for kernel in Kernel.all_of(code) if kernel.is_mix_order)
    return [inside for _, inside in (kernel.loads() for kernel in kernels)]


@instantiate_parametrized_tests
class MaxReadsTest(TestCase):
    def setUp(self):
        super().setUp()
        metrics.reset()

    def residual(self, n, dynamic=False, **options):
        """
        A row sum, a column sum, and an epilogue on the first that adds ``n`` tensors:
        the kernel reads x, the row sum, though it writes that too, and the ``n``.
        """

        def f(x, *tensors):
            return x.sum(0), x * x.sum(1, keepdim=True) + sum(tensors)

        args = [torch.randn(1030, 96, device=GPU_TYPE) for _ in range(n + 1)]
        if dynamic:
            for arg in args:
                torch._dynamo.mark_dynamic(arg, 0)
        with inductor_config.patch({**FUSE_UNSPLIT, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertEqual(actual, f(*args), atol=1e-3, rtol=1e-3)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        # its first line numbers the graphs of the process
        return code.split("\n", 1)[1]

    @parametrize("dynamic", (False, True))
    def test_at_the_cap(self, dynamic):
        self.residual(3, dynamic, **{MAX_READS: 5})
        self.assertEqual(metrics.generated_kernel_count, 2)

    @parametrize("dynamic", (False, True))
    def test_one_over_the_cap(self, dynamic):
        self.residual(4, dynamic, **{MAX_READS: 5})
        self.assertEqual(metrics.generated_kernel_count, 3)
        self.assertGreater(metrics.rejected_mix_order_reduction_fusion, 0)

    def test_no_cap(self):
        # nothing to reject, or told not to: one code
        code = self.residual(9, **{MAX_READS: 1000})
        self.assertEqual(metrics.generated_kernel_count, 2)
        torch._dynamo.reset()
        metrics.reset()
        self.assertEqual(self.residual(9, **{MAX_READS: 0}), code)

    @parametrize("rows", (256, 32768))
    def test_transformer(self, rows):
        torch.manual_seed(0)
        dim = 96
        blocks = torch.nn.ModuleList(Block(dim) for _ in range(3)).to(GPU_TYPE)
        x = torch.randn(rows, dim, device=GPU_TYPE)

        def step(x):
            h = x
            for block in blocks:
                h = block(h, x)
            return h.square().mean()

        def gradients(f):
            blocks.zero_grad()
            f(x).backward()
            return [p.grad.clone() for p in blocks.parameters()]

        expect = gradients(step)
        with inductor_config.patch({**FUSE_UNSPLIT, MAX_READS: 6}):
            actual, codes = run_and_get_code(gradients, torch.compile(step))
        fused = loads("\n".join(codes))
        self.assertGreater(len(fused), 0)
        self.assertLessEqual(max(fused), 6)
        self.assertGreater(metrics.codegen_mix_order_reduction, 0)
        self.assertGreater(metrics.rejected_mix_order_reduction_fusion, 0)
        for act, grad in zip(actual, expect):
            self.assertEqual(act, grad, atol=1e-3 * grad.abs().max().item(), rtol=1e-3)


# Square tensors


FUSE_ANY_READS = {
    **FUSE,
    "triton.mix_order_reduction_max_reads": 0,
}
STRICT = {
    "triton.mix_order_reduction_non_strict_mode": False,
    "triton.mix_order_reduction_cost_model": False,
}


def norm_backward(x, dy, weight, rstd):
    xhat = x * rstd
    wdy = weight * dy
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx, (dy * xhat).sum(0)


@instantiate_parametrized_tests
class SquareTest(TestCase):
    """Equal groups are of mixed orders when what both read whole says so."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, fused=1, kernels=1, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE_ANY_READS, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        # and one that finishes what each mix-order kernel began
        self.assertEqual(metrics.generated_kernel_count, kernels + fused)
        for act, ref in zip(actual, expect):
            self.assertEqual(act.stride(), ref.stride())
            self.assertEqual(act, ref, atol=1e-3, rtol=1e-3)
        return code

    @parametrize("split_reductions", (False, True))
    @parametrize("n", (96, 768, 4096, 8192))
    def test_rms_norm_backward(self, n, split_reductions):
        x, dy = (torch.randn(n, n, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(n, device=GPU_TYPE)
        rstd = torch.rand(n, 1, device=GPU_TYPE)
        self.check(
            norm_backward, x, dy, weight, rstd, split_reductions=split_reductions
        )

    @parametrize("split_reductions", (False, True))
    def test_rows_of_three_dimensions(self, split_reductions):
        x = torch.randn(12, 8, 96, device=GPU_TYPE)
        f = lambda x: (x.sum(2), x.sum((0, 1)))  # noqa: E731
        self.check(f, x, split_reductions=split_reductions)

    @parametrize("split_reductions", (False, True))
    def test_absorbed_later(self, split_reductions):
        # each goes to the side of its order, whatever order they come in
        def f(x, y):
            z = x * y
            return (
                z.sum(0),
                z.cos().sum(1),
                z.exp().sum(0),
                z.sum(1),
                z.sin().sum(0),
                x + y,
            )

        x, y = (torch.randn(96, 96, device=GPU_TYPE) for _ in range(2))
        code = self.check(f, x, y, split_reductions=split_reductions)
        # three partial accumulators, two sums of rows
        self.assertEqual(code.count("tl.store(ws_ptr"), 3)

    @parametrize("dim", (0, 1))
    def test_one_order(self, dim):
        x = torch.randn(96, 96, device=GPU_TYPE)
        f = lambda x: (x.sum(dim), x.cos().sum(dim))  # noqa: E731
        self.check(f, x, fused=0, split_reductions=False)

    @parametrize("dtype, fused", ((torch.float32, 0), (torch.float16, 1)))
    def test_more_bytes_in_one_order(self, dtype, fused):
        # x is read in two orders, y in one
        def f(x, y):
            return (x + y).sum(1), (x.t() * y).sum(1)

        x = torch.randn(96, 96, device=GPU_TYPE)
        y = torch.randn(96, 96, device=GPU_TYPE).to(dtype)
        self.check(f, x, y, fused=fused, split_reductions=False)

    def test_both_orders_in_one_node(self):
        # x says nothing about the order of the second
        def f(x):
            return x.sum(1), (x + x.t()).sum(1)

        self.check(
            f, torch.randn(96, 96, device=GPU_TYPE), fused=0, split_reductions=False
        )

    @parametrize("square, kernels", ((True, 2), (False, 1)))
    def test_not_flattened(self, square, kernels):
        # One loop for both would save no more than reading w twice, and one of them
        # would read x across its rows. Strict mode has no mix-order kernel for x.
        def f(x, w):
            return (x * w).sum(1), (x * w).sum(0)

        x = torch.randn(96, 96, device=GPU_TYPE)
        w = torch.randn((), device=GPU_TYPE)
        self.check(
            f,
            x,
            w,
            fused=0,
            kernels=kernels,
            split_reductions=False,
            score_fusion_memory_threshold=1,
            **STRICT,
            **{DEBUG: {"square": square}},
        )

    def test_off(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        self.check(
            lambda x: (x.sum(1), x.sum(0)), x, fused=0, kernels=2, **{DEBUG: {"square": False}}
        )

    def test_dynamic(self):
        # as many columns as a size that is not known: not a persistent reduction
        x = torch.randn(96, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, (0, 1))
        f = lambda x: (x.cos().sum(1), x.sum(0))  # noqa: E731
        self.check(f, x, fused=0, kernels=2, split_reductions=False)

    def test_dynamic_rows(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(lambda x: (x.sum(1), x.sum(0)), x, split_reductions=False)


class DebugOptionsTest(TestCase):
    """What ``triton.mix_order_reduction_debug`` may have."""

    def test_others_are_as_they_were(self):
        self.assertEqual(debug_options(), DebugOptions())
        with inductor_config.patch({DEBUG: {"square": False}}):
            self.assertEqual(debug_options(), DebugOptions(square=False))

    def test_what_is_none(self):
        for entries, why in (
            ({"squares": False}, "has no 'squares'; its options are .*square"),
            ({"__class__": False}, "has no '__class__'"),
            ({"square": 0}, "square is 0, and should be of type bool"),
        ):
            with inductor_config.patch({DEBUG: entries}):
                self.assertRaisesRegex(ValueError, why, debug_options)

    def test_options_of_compile(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        for square in (True, False):
            torch._dynamo.reset()
            metrics.reset()
            options = {**FUSE_ANY_READS, DEBUG: {"square": square}}
            torch.compile(lambda x: (x.sum(1), x.sum(0)), options=options)(x)
            self.assertEqual(metrics.codegen_mix_order_reduction, square)

    def test_caches_tell_them_apart(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        codes = []
        for square in (True, False, True):
            torch._dynamo.reset()
            options = {**FUSE_ANY_READS, "fx_graph_cache": True, DEBUG: {"square": square}}
            with inductor_config.patch(options):
                f = torch.compile(lambda x: (x.sum(1), x.sum(0)))
                codes += run_and_get_code(f, x)[1]
        self.assertNotEqual(codes[0], codes[1])
        self.assertEqual(codes[0], codes[2])


# Rows that an index gathers


def window_norm_backward(g, index, xhat, rstd, weight):
    """A LayerNorm's backward, where an index rolls the rows and columns of each image."""
    g = g[:, index][:, :, index]
    wg = g * weight
    row = wg.mean(-1, keepdim=True)
    dx = rstd * (wg - row - xhat * (wg * xhat).mean(-1, keepdim=True))
    return dx, (g * xhat).sum((0, 1, 2)), g.sum((0, 1, 2))


# of x [1000, 24] and index [20011]
GATHERED_SUMS = {
    "rows": lambda x, index: x[index].sum(0),
    "index_select": lambda x, index: torch.index_select(x, 0, index).sum(0),
    "embedding": lambda x, index: F.embedding(index[1:].view(2, -1), x).sum((0, 1)),
    "squares": lambda x, index: (x[index] ** 2).mean(0),
    "amax": lambda x, index: x[index].amax(0),
    "two": lambda x, index: x.view(50, 20, 24)[index // 20, index % 20].sum(0),
    "computed": lambda x, index: x[(index * 7 + 3) % 1000].sum(0),
    "masked": lambda x, index: torch.where(index[:, None] > 300, x[index], 1.5).sum(0),
    "of_each": lambda x, index: x.view(4, 250, 24)[:, index // 4].sum(1),
}


@instantiate_parametrized_tests
class GatheredRowsTest(TestCase):
    """Rows that an index gathers are reduced like rows in order: split, or fused."""

    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        metrics.reset()

    def check(self, f, *args, tol=1e-4, **options):
        with inductor_config.patch({"force_disable_caches": True, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        exact = f(*(x.double() if x.is_floating_point() else x for x in args))
        results = zip(actual, exact) if isinstance(exact, tuple) else [(actual, exact)]
        for act, ref in results:
            self.assertEqual(act.stride(), ref.stride())
            scale = max(1.0, ref.abs().max().item())
            self.assertEqual(act.double(), ref, atol=tol * scale, rtol=tol)
        return code

    def inputs(self, rows=20011, dtype=torch.float32):
        x = torch.randn(1000, 24, device=GPU_TYPE).to(dtype)
        return x, torch.randint(1000, (rows,), device=GPU_TYPE)

    @parametrize("form", tuple(GATHERED_SUMS))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_sums_are_split(self, form, dtype):
        f = GATHERED_SUMS[form]
        tol = 1e-4 if dtype == torch.float32 else 1e-2
        code = self.check(f, *self.inputs(dtype=dtype), tol=tol)
        self.assertEqual(metrics.generated_kernel_count, 2)
        # a warp has adjacent columns, and what it wrote is read as it was written
        self.assertRegex(code, r"24, \d+\), \((\d+, )?1, \d+\)")

    @parametrize(
        "f",
        (
            lambda a, b: (a[:, None] - b).abs().sum(0),
            lambda a, b: (b[:, None] - a).square().mean(1),
            lambda a, b: torch.where(a[:, None] > 0, b.exp(), 2.0).amax(0),
        ),
    )
    def test_sums_of_broadcasts_are_split(self, f):
        """No input has an element for each that is summed."""
        a, b = (torch.randn(n, device=GPU_TYPE) for n in (50021, 24))
        self.check(f, a, b)
        self.assertEqual(metrics.generated_kernel_count, 2)

    def test_columns_are_split(self):
        x = torch.randn(3, 2000, device=GPU_TYPE)
        index = torch.randint(2000, (40013,), device=GPU_TYPE)
        self.check(lambda x, index: x[:, index].sum(1), x, index)
        self.assertEqual(metrics.generated_kernel_count, 2)

    def test_dynamic_rows(self):
        x, index = self.inputs()
        torch._dynamo.mark_dynamic(index, 0)
        self.check(GATHERED_SUMS["rows"], x, index)
        self.assertEqual(metrics.generated_kernel_count, 2)

    @parametrize(
        "f, rows",
        (
            (GATHERED_SUMS["rows"], 30),
            (lambda x, index: x[index].cumsum(0), 2011),
        ),
    )
    def test_others_are_not(self, f, rows):
        x, index = self.inputs(rows)
        self.check(f, x, index)
        self.assertEqual(metrics.generated_kernel_count, 1)

    @parametrize("split_reductions", (False, True))
    def test_sums_are_fused(self, split_reductions):
        shape = 3, 14, 14, 96
        g, xhat = (torch.randn(shape, device=GPU_TYPE) for _ in range(2))
        index = torch.randperm(14, device=GPU_TYPE)
        rstd = torch.rand(*shape[:-1], 1, device=GPU_TYPE)
        weight = torch.randn(96, device=GPU_TYPE)
        options = {**FUSE_SPLIT, "split_reductions": split_reductions}
        inputs = g, index, xhat, rstd, weight
        code = self.check(window_norm_backward, *inputs, **options)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        gathering = ["tl.device_assert" in each for each in code.split("@triton.jit")]
        self.assertEqual(sum(gathering), 1)

    @parametrize(
        "f",
        (
            lambda x: (x.cumsum(0), x.sum(1)),
            lambda x: (x.cumsum(1), x.sum(0)),
            lambda x: (x.logcumsumexp(1), x.amax(1), x.amin(0)),
            lambda x: (x.softmax(1).cumsum(1), x.sum(0)),
            lambda x: (F.layer_norm(x, (24,)), x.sum(0), x.cumsum(1)),
        ),
    )
    @parametrize("rows", (24, 133))
    @parametrize("gathered", (False, True))
    def test_scans_beside_sums(self, f, rows, gathered):
        """They have the loops of a mix-order reduction, also of a square."""
        x, index = self.inputs(rows)
        options = {**FUSE_SPLIT, "split_reductions": False}
        if gathered:
            self.check(lambda x, index: f(x[index]), x, index, **options)
        else:
            self.check(f, x[index], **options)

    def test_loads(self):
        """As they would be if their places were in order."""
        i, j = sympy.symbols("i j", integer=True, nonnegative=True)

        def inner_fn(loops):
            i, j = loops
            loaded = ops.load("index", 3 * i)
            place = ops.indirect_indexing(loaded + ops.constant(1, torch.int64), 9)
            computed = ops.indirect_indexing(ops.index_expr(j, torch.int64), 9)
            rows = ops.load("x", 24 * place + j)
            return rows + ops.load("y", computed + 9 * i) + ops.load("z", 9 * i + j)

        index, rows, computed, direct = loads_of(inner_fn, [[i, j]])
        self.assertEqual((rows.name, rows.index), ("x", 72 * i + j))
        self.assertEqual(list(rows.places), [i])
        self.assertEqual((computed.name, computed.index), ("y", 9 * i + j))
        self.assertEqual(list(computed.places), [])
        self.assertEqual((index.places, direct.places), (None, None))


# Rows that lowering would split


FUSE_SPLIT = {
    **FUSE,
    "triton.mix_order_reduction_max_reads": 0,
    DEBUG: {"register_pressure": False},
    "split_reductions": True,
}


def whole_norm_backward(x, dy, weight):
    """The row statistic is made of x again; dweight does not need it."""
    rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    wdy = weight * dy
    c = (wdy * x).mean(-1, keepdim=True)
    return (wdy - x * rstd * rstd * c) * rstd, (dy * x).sum(0)


@instantiate_parametrized_tests
class EvenPartsTest(TestCase):
    """Rows that are split are in equal parts, of whole images or whole rows of one."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def device(self, **properties):
        given = {"max_threads_per_multi_processor": 2048, "multi_processor_count": 132}
        return DeviceProperties("cuda", 0, cc=90, **{**given, **properties})

    def parts(self, rows, ranges, parts, **properties):
        self.assertTrue(hasattr(V.choices, "even_parts"))
        return V.choices.even_parts(self.device(**properties), rows, ranges, parts)

    @parametrize("sms", (108, 132, 148))
    def test_parts_are_equal_and_whole(self, sms):
        for images, height, width in itertools.product(
            (1, 2, 12, 31, 64, 96, 100), (28, 57, 128), (28, 57, 150)
        ):
            ranges = images, height, width
            columns = images * height * width
            for rows, parts in itertools.product((2, 24, 96, 250), (2, 9, 22)):
                wholes = [
                    each
                    for each in range(2, 4 * parts + 1)
                    if columns % each == 0
                    and each * 4 >= parts
                    and columns // each >= 4096
                    and (
                        images % each == 0
                        or (each % images == 0 and images * height % each == 0)
                    )
                ]
                found = self.parts(rows, ranges, parts, multi_processor_count=sms)
                if found in wholes:
                    continue
                # these straddle what they are parts of
                self.assertEqual(found, parts)
                own, *others = (
                    row_parts.cost(self.device(multi_processor_count=sms), rows * each)
                    for each in (parts, *wholes)
                    if each >= parts or columns > 8192 * parts
                )
                self.assertTrue(all(other > 2 * own for other in others))

    def test_last_wave(self):
        """576 programs are one wave and some of the next, of which most SMs have none."""
        ranges = 64, 112, 112
        at_a_time, found = 4 * 132, self.parts(72, ranges, 8)
        waves, last = divmod(72 * found, at_a_time)
        self.assertLess(waves + max(last / at_a_time, 0.5), 1.1 * 72 * found / at_a_time)
        # as many as fill the GPU stay
        self.assertEqual(self.parts(66, ranges, 8), 8)
        # of another GPU, others do
        self.assertEqual(self.parts(72, ranges, 8, multi_processor_count=144), 8)

    def test_what_stays(self):
        prime = 1000003
        self.assertEqual(self.parts(64, (prime,), 9), 9)
        # parts would not begin at vectors, or be too short
        self.assertEqual(self.parts(64, (8 * 10007,), 4), 4)
        self.assertEqual(self.parts(2, (3, 5000), 2), 3)
        self.assertEqual(self.parts(2, (3, 4000), 2), 2)
        # 144 programs would be less than a third of the GPU's
        self.assertEqual(self.parts(48, (3, 509, 509), 11), 11)
        self.assertEqual(self.parts(176, (3, 509, 509), 11), 3)
        # no rows, and a range of one
        self.assertEqual(self.parts(0, (64, 128, 128), 9), 9)
        self.assertEqual(self.parts(64, (8 * 10007, 1), 4), 4)
        # of another device, or of sizes that are not known
        symbol = sympy.Symbol("s0", integer=True)
        self.assertEqual(self.parts(64, (64, symbol, symbol), 9), 9)
        cpu = DeviceProperties("cpu", 0, multi_processor_count=8, cc=0)
        self.assertEqual(V.choices.even_parts(cpu, 64, (64, 128, 128), 9), 9)

    def test_small_tensors(self):
        """A program has as few elements as lowering gives it, or fewer."""
        self.assertEqual(self.parts(3, (6, 512, 512), 192), 192)
        self.assertEqual(self.parts(36, (20, 80, 80), 16), 20)
        # not where there are two waves of them
        self.assertEqual(self.parts(130, (7, 96, 96), 8), 7)
        self.assertEqual(self.parts(32, (256, 32, 32), 32), 32)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("form", ("sum", "amax", "var_mean", "grad"))
    def test_channels(self, form, dtype):
        """Of nine images three are a part: nothing is masked, and no index wraps."""
        dims = 0, 2, 3
        forms = {
            "sum": lambda x, y: x.float().sum(dims),
            "amax": lambda x, y: x.amax(dims),
            "var_mean": lambda x, y: torch.var_mean(x.float(), dims),
            "grad": lambda x, y: (y.float().sum(dims), (y.float() * x).sum(dims)),
        }
        x, y = torch.randn(2, 9, 4, 40, 40, device=GPU_TYPE).to(dtype)
        splits = patch.object(
            InductorChoices,
            "leaves_rows_whole",
            staticmethod(lambda *_: False),
            create=True,
        )
        with splits, inductor_config.patch(force_disable_caches=True):
            actual, (code,) = run_and_get_code(torch.compile(forms[form]), x, y)
        # once, of both sums of a gradient
        self.assertEqual(code.count("r0_numel = 4800"), 1)
        self.assertNotIn("14400", code.split("async_compile.wait")[0])
        exact = forms[form](x.double(), y.double())
        self.assertEqual(actual, exact, exact_dtype=False, atol=1e-2, rtol=1e-4)


@instantiate_parametrized_tests
class FewLongRowsTest(TestCase):
    """
    A row that a program may have at once is not split, however few there are. In non-strict
    mode a mix-order reduction has them: one kernel, with what is made of a row's result.
    """

    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, fused=1, kernels=1, tol=1e-3, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE_SPLIT, **options}):
            try:
                actual, (code,) = run_and_get_code(torch.compile(f), *args)
            except InductorError as error:
                self.fail(f"does not compile: {error}")
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        # and one that finishes what each mix-order kernel began
        self.assertEqual(metrics.generated_kernel_count, kernels + fused)
        for act, ref in zip(actual, expect):
            self.assertEqual(act.dtype, ref.dtype)
            self.assertEqual(act.stride(), ref.stride())
            if ref.is_floating_point():
                scale = max(1.0, ref.abs().max().item())
                self.assertEqual(act, ref, atol=tol * scale, rtol=tol)
            else:
                self.assertTrue(torch.equal(act, ref))
        return code

    # 8209 is prime: the last part is shorter, so the parts are masked
    @parametrize("shape", ((13, 8472), (13, 8209), (64, 16384), (263, 16384)))
    def test_rms_norm_backward(self, shape):
        x, dy = (torch.randn(shape, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(shape[1], device=GPU_TYPE)
        self.check(whole_norm_backward, x, dy, weight)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_result_of_another_type(self, dtype):
        x = torch.randn(13, 8472, device=GPU_TYPE).to(dtype)
        f = lambda x: (x.sum(1), x.sum(0), x.sum(1, keepdim=True) * 2)  # noqa: E731
        self.check(f, x, tol=1e-2)

    def test_types(self):
        def f(x):
            return x.amax(1), x.amin(1), (x > 3.9).any(1), x.prod(1), x.sum(0)

        x = 1 + torch.randn(13, 8472, device=GPU_TYPE) / 4096
        x[1] += 4
        x[1] /= 5
        x[2, 7] = 4
        self.check(f, x, tol=5e-3)

    def test_nan_of_amax(self):
        x = torch.randn(13, 8472, device=GPU_TYPE)
        x[1, 8000] = float("nan")
        f = lambda x: (x.amax(1).isnan(), x.cos().sum(0).isnan())  # noqa: E731
        self.check(f, x)

    def test_integers(self):
        x = torch.randint(-(2**30), 2**30, (13, 8472), device=GPU_TYPE)
        self.check(lambda x: (x.sum(1), x.amax(1), x.sum(0)), x)

    def test_layer_norm_backward(self):
        def f(x, dy, weight):
            mean = x.mean(-1, keepdim=True)
            wdy = weight * dy
            c1 = wdy.mean(-1, keepdim=True)
            c2 = (wdy * x).mean(-1, keepdim=True)
            return wdy - c1 - (x - mean) * c2, (dy * x).sum(0), dy.sum(0)

        x, dy = (torch.randn(13, 8472, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(8472, device=GPU_TYPE)
        self.check(f, x, dy, weight)

    def test_reader_that_is_padded(self):
        # its load of the row's sum is in a masked body
        def f(x):
            total = x.sum(1)
            return F.pad(total.cos(), (2, 3)), x.sum(0), F.pad(total, (0, 1)) + 1

        # 2.15 writes the sum and what pads it side by side, where both are read
        kernels = 4 if hasattr(torch._inductor.lowering, "_pad_as_cat") else 3
        self.check(f, torch.randn(13, 8472, device=GPU_TYPE), kernels=kernels)

    def test_reader_that_is_another_reduction(self):
        # the maximum is in the kernel as well
        def f(x):
            shifted = x - x.amax(1, keepdim=True)
            return shifted - shifted.exp().sum(1, keepdim=True).log(), x.sum(0)

        x = torch.randn(13, 8472, device=GPU_TYPE)
        self.check(f, x, online_softmax=False)

    def test_dynamic_rows(self):
        x, dy = (torch.randn(13, 8472, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(8472, device=GPU_TYPE)
        for tensor in (x, dy):
            torch._dynamo.mark_dynamic(tensor, 0)
        self.check(whole_norm_backward, x, dy, weight)

    def test_a_dependency(self):
        # the sum over rows needs the row's maximum: no kernel can have both
        x = torch.randn(13, 8472, device=GPU_TYPE)
        f = lambda x: (x - x.amax(1, keepdim=True)).sum(0)  # noqa: E731
        self.check(lambda x: (f(x),), x, fused=0, kernels=2)

    def test_off(self):
        x, dy = (torch.randn(13, 8472, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(8472, device=GPU_TYPE)
        off = {"triton.mix_order_reduction": False}
        self.check(whole_norm_backward, x, dy, weight, fused=0, kernels=2, **off)

    def test_strict(self):
        x = torch.randn(64, 16384, device=GPU_TYPE)
        strict = {
            "triton.mix_order_reduction_non_strict_mode": False,
            "triton.mix_order_reduction_cost_model": False,
        }
        self.check(lambda x: (x.sum(1), x.sum(0)), x, fused=0, kernels=2, **strict)

    @parametrize("shape", ((2, 9001), (3, 16384), (2, 5, 12288)))
    def test_what_reduces_rows_alone(self, shape):
        x = torch.randn(shape, device=GPU_TYPE)
        for f in (
            lambda x: torch.softmax(x, -1),
            lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1),
            lambda x: x.sum(-1),
        ):
            torch._dynamo.reset()
            metrics.reset()
            self.check(lambda x, f=f: (f(x),), x, fused=0)

    def test_all_elements_are_no_row(self):
        x = torch.randn(3, 4096, device=GPU_TYPE)
        self.check(lambda x: (x.sum(),), x, fused=0, kernels=2)

    def test_scans_are_split(self):
        """Into parts of one kernel, which all SMs load."""
        x = torch.randn(3, 9000, device=GPU_TYPE)
        code = self.check(lambda x: (x.cumsum(1),), x, fused=0)
        self.assertIn("@triton_heuristics.split_scan(", code)

    def test_longer_rows_are_split(self):
        x = torch.randn(3, 21504, device=GPU_TYPE)
        self.check(lambda x: (x.sum(1),), x, fused=0, kernels=2)

    @parametrize("order", (torch.contiguous_format, torch.channels_last))
    def test_a_row_of_several_dimensions(self, order):
        x = torch.randn(3, 6, 40, 40, device=GPU_TYPE).to(memory_format=order)
        self.check(lambda x: (x.sum((1, 2, 3)),), x, fused=0)

    def test_few_channels_are_split(self):
        """As a batch norm's are, which are in as many pieces as there are images."""
        x = torch.randn(6, 3, 40, 40, device=GPU_TYPE)
        self.check(lambda x: (x.sum((0, 2, 3)),), x, fused=0, kernels=2)

    def test_many_channels(self):
        """A row is in pieces, and the one program that has it finds it in L2 again."""

        def f(x):
            x = x - x.mean((0, 2, 3), keepdim=True)
            return (x * x.square().mean((0, 2, 3), keepdim=True).rsqrt(),)

        x = torch.randn(2, 120, 65, 65, device=GPU_TYPE)
        self.check(f, x, fused=0)

    @parametrize("tensors, kernels", ((1, 4), (2, 1)))
    def test_rows_in_pieces_beside_another_tensor(self, tensors, kernels):
        """Both sums of a kernel are split, if L2 does not hold all that it reads."""
        dims = {"dim": (0, 2, 3), "keepdim": True}

        def f(x, grad):
            slope = (grad * x).mean(**dims)
            return (grad - grad.mean(**dims) - x * slope,)

        x, grad = torch.randn(2, 2, 120, 65, 65, device=GPU_TYPE)
        with patch.object(DeviceModel, "l2_bytes", tensors * x.nbytes):
            self.check(f, x, grad, fused=0, kernels=kernels)

    @parametrize("width, again, kernels", ((31, True, 3), (33, True, 1), (31, False, 1)))
    def test_rows_in_pieces_that_share_lines(self, width, again, kernels):
        """Of 31 float32 two rows have parts of a line: what is made of them is split."""
        dims = {"dim": (0, 2, 3), "keepdim": True}

        def f(x):
            mean = x.mean(**dims)
            return (x - mean if again else mean,)

        x = torch.randn(5, 66, 120, width, device=GPU_TYPE).transpose(1, 2)
        self.check(f, x, fused=0, kernels=kernels)

    @parametrize("product, kernels", ((False, 5), (True, 4)))
    def test_rows_in_pieces_that_another_kernel_reduces(self, product, kernels):
        """It has a matrix product between: what it reads beside them is not read here."""
        dims = {"dim": (0, 2, 3), "keepdim": True}

        def f(x, other, weight):
            x = x - x.mean(**dims)
            y = other * (x @ weight if product else x)
            return (y - y.mean(**dims),)

        x, other = torch.randn(2, 3, 120, 64, 64, device=GPU_TYPE)
        with patch.object(DeviceModel, "l2_bytes", x.nbytes):
            self.check(f, x, other, torch.eye(64, device=GPU_TYPE), fused=0, kernels=kernels)

    def test_rows_with_gaps_are_split(self):
        x = torch.randn(3, 250, 44, device=GPU_TYPE)
        self.check(lambda x: (x[:, :, :40].sum((1, 2)),), x, fused=0, kernels=2)

    def leaves(self, device, rows, columns, piece=None, reads=1):
        """Of tensors of float32, of which a row is in pieces of so many columns, or whole."""
        self.assertTrue(hasattr(V.choices, "leaves_rows_whole"))
        pieces = columns // piece if piece else 1

        def load(index, rindex):
            (row,), (*outer, column) = index, rindex
            for i in range(reads):
                start = (outer[0] * rows + row) * piece if piece else columns * row
                ops.load(f"x{i}", start + column)
            return ops.load("mean", row)

        reduction = SimpleNamespace(
            inner_fn=load,
            get_size=lambda: [sympy.Integer(rows)],
            get_reduction_size=lambda: [
                sympy.Integer(n) for n in ([pieces, piece] if piece else [columns])
            ],
        )
        graph = SimpleNamespace(
            sizevars=SizeVarAllocator(),
            get_dtype=lambda _: torch.float32,
            current_node=None,
            try_get_buffer=lambda _: None,
        )
        with V.set_graph_handler(graph):
            return V.choices.leaves_rows_whole(device, rows, columns, reduction)

    @parametrize("dynamic", (False, True))
    @parametrize("wide", (torch.int64, torch.float64, torch.float32))
    def test_wide_rows_of_which_nothing_is_made(self, wide, dynamic):
        """One SM loads all bytes of a row, and saves one kernel alone."""

        def loss(x, mask):
            kept = mask != 0
            loss = (x.square() * kept).sum(-1)
            return (loss / (loss.sqrt() + 1),)

        def centred(x, mask):
            y = x * (mask != 0)
            return ((y - 2 * y.mean(-1, keepdim=True).sqrt()).relu(),)

        def maximum(x, mask):
            return (torch.where(mask != 0, x, 0).amax(-1),)

        x = torch.rand(3, 18432, device=GPU_TYPE)
        mask = torch.randint(0, 3, x.shape, device=GPU_TYPE).to(wide)
        if dynamic:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(mask, 0)
        def kept(x, mask):
            y = torch.where(mask != 0, x, 0)
            return y, y.sum(-1)

        for f, kernels in ((loss, 2), (maximum, 2), (kept, 2), (centred, 1)):
            torch._dynamo.reset()
            metrics.reset()
            self.check(f, x, mask, fused=0, kernels=kernels)

    def test_rows_of_few_bytes_of_which_nothing_is_made(self):
        x = torch.rand(3, 18432, device=GPU_TYPE)
        mask = torch.randint(0, 3, x.shape, device=GPU_TYPE)
        for inputs in ((x, x), (x.half(), mask.byte())):
            torch._dynamo.reset()
            metrics.reset()
            self.check(lambda x, y: ((x * y).float().sum(-1),), *inputs, fused=0)

    def test_what_is_made_of_wide_rows_at_last(self):
        """Also by way of what has no element for each column."""
        x, y = (torch.rand(3, 18432, device=GPU_TYPE) for _ in range(2))

        def f(x, y):
            scale = (x * y).amax(-1)
            return (x / (scale * scale + 1).unsqueeze(-1),)

        self.check(f, x, y, fused=0)

    def test_what_the_row_was_reduced_to(self):
        """Is used again, where the last of several reductions is not."""
        x, y = (torch.randn(3, 18432, device=GPU_TYPE) for _ in range(2))

        def divergence(x, y):
            return ((x.softmax(-1) * (x.log_softmax(-1) - y)).sum(-1),)

        self.check(divergence, x, y, fused=0)

    def test_the_more_rows_the_longer(self):
        """With a row for most SMs none is split, however long."""
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        sms = device.multi_processor_count

        def longest(rows):
            lengths = range(4096, 2**20, 4096)
            return max(each for each in lengths if self.leaves(device, rows, each))

        lengths = [longest(rows) for rows in range(2, sms, sms // 8)]
        self.assertEqual(lengths, sorted(lengths))
        self.assertGreater(lengths[len(lengths) // 2], 1.5 * lengths[0])
        self.assertEqual(lengths[-1], 2**20 - 4096)

    def test_rows_in_pieces(self):
        """One for most SMs, and all that is read of them fits in L2."""
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        sms, l2 = device.multi_processor_count, DeviceModel.of(device).l2_bytes
        piece = 64

        def fitting(reads):
            return l2 // (4 * reads * sms) // piece * piece

        for rows, columns, reads, whole in (
            (sms, 9024, 1, True),
            (8, 9024, 1, False),
            (sms, fitting(1), 1, True),
            (sms, fitting(1) + piece, 1, False),
            (sms, fitting(2), 2, True),
            (sms, fitting(2) + piece, 2, False),
        ):
            self.assertTrue(self.leaves(device, rows, columns, reads=reads))
            found = self.leaves(device, rows, columns, piece, reads)
            self.assertEqual(found, whole)

    def test_other_gpus(self):
        """On other GPUs than NVIDIA's as upstream."""
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        for kind, whole in (("cuda", True), ("hip", False), ("xpu", False)):
            of_kind = device._replace(type=kind)
            self.assertEqual(self.leaves(of_kind, 8, 9000), whole)
            self.assertFalse(self.leaves(of_kind, 8, 32768))


# amax and amin


def extrema(x):
    return x.amax(0), x.amin(0), x.amax(1)


@instantiate_parametrized_tests
class ExtremaTest(TestCase):
    """amax and amin over the rows as partial accumulators: exact, as in eager."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, fused=1, exact=True, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE_ANY_READS, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        for act, ref in zip(actual, expect):
            self.assertEqual(act.dtype, ref.dtype)
            self.assertEqual(act.shape, ref.shape)
            tol = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-2, "rtol": 1e-3}
            self.assertEqual(act, ref, equal_nan=True, **tol)
        return code

    # 1025 rows: the last tile has rows beyond the end, whose 0 must not win
    @parametrize("split_reductions", (False, True))
    @parametrize("shift", (-9, 9))
    @parametrize("shape", ((1025, 96), (33, 64)))
    def test_rows_beyond_the_end(self, shape, shift, split_reductions):
        x = torch.randn(shape, device=GPU_TYPE) + shift
        self.check(extrema, x, split_reductions=split_reductions)

    @parametrize(
        "dtype",
        (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64),
    )
    def test_dtype(self, dtype):
        x = (torch.randn(1030, 96, device=GPU_TYPE) * 30).to(dtype)
        self.check(extrema, x)

    def test_ends_of_integers(self):
        ends = torch.iinfo(torch.int64)
        x = torch.full((1030, 96), ends.min, device=GPU_TYPE)
        x[:, ::2] = ends.max
        self.check(extrema, x)

    @parametrize("split_reductions", (False, True))
    def test_nan_and_infinities(self, split_reductions):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        x[1029, 0] = float("nan")
        x[0, 1] = float("nan")
        x[:, 2] = float("nan")
        x[:, 3] = float("inf")
        x[:, 4] = float("-inf")
        x[7, 5], x[8, 5] = float("inf"), float("-inf")
        x[7, 6], x[900, 6] = float("-inf"), float("nan")
        self.check(extrema, x, split_reductions=split_reductions)

    def test_beside_a_sum(self):
        # one workspace, an identity and a final reduction each
        x = torch.randn(1030, 96, device=GPU_TYPE) - 9
        code = self.check(
            lambda x: (x.amax(0), x.sum(0), x.amin(0), x.sum(1)), x, exact=False
        )
        FileCheck().check_count("tl.store(ws_ptr", 3, exactly=True).run(code)

    def test_keepdim_and_what_follows(self):
        def f(x):
            scale = x.abs().amax(0, keepdim=True)
            return scale, scale * 2, x.sum(1)

        x = torch.randn(1030, 96, device=GPU_TYPE).bfloat16()
        self.check(f, x, exact=False)

    def test_dynamic_rows(self):
        x = torch.randn(97, 96, device=GPU_TYPE) - 9
        torch._dynamo.mark_dynamic(x, 0)
        self.check(extrema, x)

    def test_off(self):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        self.check(extrema, x, fused=0, **{DEBUG: {"extrema": False}})


# Fusion by predicted time


COST_MODEL = "triton.mix_order_reduction_cost_model"
NON_STRICT = "triton.mix_order_reduction_non_strict_mode"
DECIDE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_max_reads": 0,
    DEBUG: {"register_pressure": False},
    "triton.mix_order_reduction_autotune_split_size": False,
    NON_STRICT: False,
    SPLIT_SIZE: None,
    COST_MODEL: True,
    "split_reductions": True,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    # which would sum in what makes the tensor
    "triton.mix_order_reduction_producer_sums": False,
}
H200_GBs = 4800.0


def h200_of(memory_GBs):
    """An H200, but for its bandwidth."""
    return dataclasses.replace(SM_90, sms=132, memory_GBs=memory_GBs)


def norm(rows, columns, itemsize=2, partials=1):
    """The work of a norm's backward: x and dy are read, dx is written."""
    tile = rows * columns * itemsize
    return Work(
        row_bytes=3 * tile,
        column_bytes=2 * tile,
        shared_bytes=2 * tile,
        foregone_bytes=0,
        unfused_launches=3,
        fused_launches=2,
        programs=min(rows, 132),
        partial_bytes=4 * columns * partials,
    )


class CostEstimateTest(TestCase):
    """The pure function: from work, bandwidth and constants to two times."""

    def estimate(self, work, memory_GBs=H200_GBs, **changes):
        work = dataclasses.replace(work, **changes)
        return estimate(work, h200_of(memory_GBs))

    def test_what_pays(self):
        for shape in (
            (4096, 8192),
            (8192, 8192),
            (4096, 4096),
            (2048, 8192),
            (4096, 16384),
            # a launch less is much where there is little to do
            (768, 768),
        ):
            self.assertTrue(self.estimate(norm(*shape)).pays, msg=str(shape))
        # partials of 128 KiB for few rows
        self.assertFalse(self.estimate(norm(128, 16384, partials=2)).pays)

    def test_what_is_shared_is_read_once(self):
        work = norm(32768, 1024)
        shared, alone = self.estimate(work), self.estimate(work, shared_bytes=0)
        saved_us = work.shared_bytes / (H200_GBs * DeviceModel.row_share) * 1e-3
        self.assertAlmostEqual(alone.fused_us - shared.fused_us, saved_us)
        self.assertEqual(alone.unfused_us, shared.unfused_us)

    def test_partials(self):
        work = norm(32768, 1024)
        few, many = (
            self.estimate(work, partial_bytes=n * 4096).fused_us for n in (1, 8)
        )
        self.assertLess(few, many)
        few, many = (self.estimate(work, programs=n).fused_us for n in (132, 2112))
        self.assertLess(few, many)

    def test_launches(self):
        work = norm(32768, 1024)
        one, three = (self.estimate(work, fused_launches=n).fused_us for n in (1, 3))
        self.assertAlmostEqual(three - one, 2 * DeviceModel.launch_us)

    def test_fusions_foregone(self):
        work = norm(131072, 1024)
        self.assertTrue(self.estimate(work).pays)
        foregone = self.estimate(work, foregone_bytes=work.row_bytes)
        self.assertFalse(foregone.pays)

    def test_read_again(self):
        """What the kernel of the rows reads anyway is free there, and nowhere else."""
        work = norm(32768, 768)
        self.assertTrue(self.estimate(work).pays)
        again = self.estimate(work, reread_bytes=2 * work.shared_bytes)
        self.assertFalse(again.pays)
        self.assertEqual(again.unfused_us, self.estimate(work).unfused_us)

    def test_bandwidth(self):
        work = norm(131072, 1024)
        slow, fast = (self.estimate(work, GBs) for GBs in (H200_GBs, 2 * H200_GBs))
        self.assertLess(fast.unfused_us - fast.fused_us, slow.unfused_us - slow.fused_us)


def half_norm_backward(x, dy, weight, rstd):
    xhat = x * rstd
    wdy = weight * dy
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy * xhat).sum(0)


@instantiate_parametrized_tests
class CostDecisionTest(TestCase):
    """What is fused by default, with an H200's bandwidth whatever GPU is here."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def inputs(self, rows, columns):
        x, dy = (
            torch.randn(rows, columns, device=GPU_TYPE, dtype=torch.bfloat16)
            for _ in range(2)
        )
        weight = torch.randn(columns, device=GPU_TYPE, dtype=torch.bfloat16)
        return x, dy, weight, torch.rand(rows, 1, device=GPU_TYPE)

    def run_with(self, f, *args, memory_GBs=H200_GBs, tol=2e-2, **options):
        """Fused kernels and code of ``f``, after its results were compared."""
        torch._dynamo.reset()
        metrics.reset()
        expect = f(*args)
        with (
            inductor_config.patch({**DECIDE, **options}),
            patch.object(mix_order_profit, "device_model", lambda device: h200_of(memory_GBs)),
        ):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        for act, ref in zip(actual, expect):
            scale = max(1.0, ref.abs().max().item())
            self.assertEqual(act, ref, atol=tol * scale, rtol=tol)
        return metrics.codegen_mix_order_reduction, code

    # the first two are small enough to be interpreted where there is no GPU
    @parametrize(
        "shape, fused",
        (((300, 768), 1), ((16, 2048), 0), ((4096, 4096), 1), ((2048, 8192), 1)),
    )
    def test_rms_norm_backward(self, shape, fused):
        found, _ = self.run_with(half_norm_backward, *self.inputs(*shape))
        self.assertEqual(found, fused)

    def test_a_view_that_is_cast(self):
        # its loops are those of the rows when they are merged, which a later round asks
        def f(x, dy, weight, rstd):
            xhat = x * rstd
            wdy = weight * dy
            dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
            return dx, dx.view(-1, 768).to(x.dtype), (dy * xhat).sum((0, 1))

        x, dy, weight, rstd = self.inputs(300, 768)
        args = [each.view(4, 75, -1) for each in (x, dy, rstd)]
        found, _ = self.run_with(f, *args[:2], weight, args[2])
        self.assertEqual(found, 1)
        self.assertEqual(metrics.generated_kernel_count, 2)

    @parametrize("shape, fused", (((300, 768), 0), ((8192, 640), 1)))
    @parametrize(
        "why", ("knob", "rows are not split", "one split size", "unknown GPU")
    )
    def test_old_gates(self, shape, fused, why):
        options = {
            "knob": {COST_MODEL: False},
            "rows are not split": {DEBUG: {"persistent_row_split": False}},
            "one split size": {SPLIT_SIZE: 16},
            "unknown GPU": {"memory_GBs": None},
        }[why]
        args = self.inputs(*shape)
        found, _ = self.run_with(half_norm_backward, *args, **options)
        self.assertEqual(found, fused)

    @parametrize("model", (True, False))
    def test_non_strict_mode_does_not_ask(self, model):
        args = self.inputs(16, 2048)
        options = {NON_STRICT: True, COST_MODEL: model}
        found, _ = self.run_with(half_norm_backward, *args, **options)
        self.assertEqual(found, 1)

    @parametrize("waits", (True, False))
    def test_sums_of_two_norms(self, waits):
        """
        A transformer's first block, where both reduce the embedding. The gradient of the
        second's weight is fused with the second's dx, and not with the gradient of the
        first's weight, which waits for that dx.
        """

        def f(x, y, dz, a, rows):
            h = x + y
            dh = h * (dz * h).sum(1, keepdim=True) + dz
            dw = (a @ dh) if waits else rows
            return (dz * h).sum(0), (dw * x).sum(0), x * (dw * x).sum(1, keepdim=True) + dw

        rows, columns = 256, 768
        args = [torch.randn(rows, columns, device=GPU_TYPE) / columns**0.5 for _ in range(3)]
        args += [torch.randn(rows, n, device=GPU_TYPE) / rows**0.5 for n in (rows, columns)]
        found, _ = self.run_with(f, *args)
        self.assertEqual(found, 2 if waits else 1)

    def test_choice_can_be_overridden(self):
        class Always(InductorChoices):
            @staticmethod
            def why_mix_order_reduction_does_not_pay(contiguous, other):
                return None

        with V.set_choices_handler(Always()):
            found, _ = self.run_with(half_norm_backward, *self.inputs(16, 2048))
        self.assertEqual(found, 1)

    @parametrize("rows", (64, 1024))
    @parametrize("made", (True, False))
    def test_producer_that_would_fuse(self, rows, made):
        # made of enough that it is a buffer, which a kernel of a row's sum alone would
        # write but not read
        def f(y, *tensors):
            if tensors:
                y = sum(t.sin() for t in (y, *tensors))
            return y.sum(0), y.sum(1)

        tensors = [torch.randn(rows, 1536, device=GPU_TYPE) for _ in range(9)]
        found, _ = self.run_with(f, *(tensors if made else tensors[:1]))
        self.assertEqual(found, not made and rows > 64)

    def test_dynamic_rows_are_not_guarded(self):
        compiled = torch.compile(lambda x: (x.sum(0), x.cos().sum(1)))
        x, fewer = (torch.randn(n, 96, device=GPU_TYPE) for n in (5000, 40))
        torch._dynamo.mark_dynamic(x, 0)
        with (
            inductor_config.patch(DECIDE),
            patch.object(mix_order_profit, "device_model", lambda device: h200_of(H200_GBs)),
        ):
            compiled(x)
            with torch._dynamo.config.patch(error_on_recompile=True):
                actual = compiled(fewer)
        self.assertEqual(actual[0], fewer.sum(0), atol=1e-3, rtol=1e-3)

    def test_bandwidth_is_not_in_the_source(self):
        # neither of a kernel that fuses nor of one that does not concern the model
        def f(x):
            return x.sum(0), x.sum(1), x[:5].cos()

        x = torch.randn(40, 96, device=GPU_TYPE)
        sources = [
            self.run_with(f, x, memory_GBs=GBs)[1].split("\n", 1)[1]
            for GBs in (H200_GBs, 1.01 * H200_GBs)
        ]
        self.assertEqual(*sources)

    def log(self, shape):
        log = logging.getLogger("torch._inductor.scheduler.__fusion")
        model = logging.getLogger("torch._inductor.mix_order_profit.__fusion")
        with (
            self.assertLogs(log, logging.DEBUG) as refused,
            self.assertLogs(model, logging.DEBUG) as fused,
        ):
            model.debug("asked")
            log.debug("asked")
            self.run_with(half_norm_backward, *self.inputs(*shape))
        return "\n".join(refused.output), "\n".join(fused.output)

    def test_log(self):
        refused, fused = self.log((16, 2048))
        self.assertRegex(refused, r"does not pay: [\d.]+ us fused, [\d.]+ us not")
        self.assertNotRegex(fused, "us fused")
        refused, fused = self.log((300, 768))
        self.assertRegex(fused, r"mix-order reduction of .*: [\d.]+ us fused, [\d.]+ us not")

    def works(self, f, *args):
        works = []
        work_of = mix_order_profit.work_of

        def watched(contiguous, other):
            works.append(work_of(contiguous, other))
            return works[-1]

        with patch.object(mix_order_profit, "work_of", watched):
            self.run_with(f, *args)
        return works

    @parametrize("again", (False, True))
    def test_work_that_waits_for_both(self, again):
        """A tensor scaled by its rows and by its columns is read after both."""

        def f(x):
            rows, columns = x.amax(1, keepdim=True), x.amax(0, keepdim=True)
            return x / rows, x / columns if again else columns

        x = torch.randn(64, 96, device=GPU_TYPE)
        (work, *_) = self.works(f, x)
        self.assertEqual(work.reread_bytes, 64 * 96 * 4 if again else 0)
        self.assertEqual(work.fused_launches, 2 + again)

    def test_work(self):
        (work, *_) = self.works(half_norm_backward, *self.inputs(64, 96))
        tile, vector, stat = 64 * 96 * 2, 96 * 2, 64 * 4
        self.assertEqual(work.programs, 8)
        # x, dy, weight, rstd, dx, and the row's sum, written and read
        self.assertEqual(work.row_bytes, 3 * tile + vector + 2 * stat)
        # what both read along the rows; the output is 4 bytes a column
        self.assertEqual(work.column_bytes, 2 * tile + stat)
        self.assertEqual(work.shared_bytes, 2 * tile)
        self.assertEqual(work.foregone_bytes, 0)
        self.assertEqual(work.partial_bytes, 4 * 96)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
