# Owner(s): ["module: inductor"]
"""Reductions of rows: persistent or looped, softmax, minima and maxima."""

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
import unittest
from types import SimpleNamespace
from unittest import mock

import sympy

import torch
import torch._inductor.config as inductor_config
from torch._inductor import (
    looped_reduction,
    persistent_reduction,
    rows_read_across,
    short_rows,
    wide_rows,
)
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.dependencies import MemoryDep
from torch._inductor.device_model import DeviceModel
from torch._inductor.fx_passes import online_softmaxes
from torch._inductor.looped_reduction import online_softmax_config
from torch._inductor.looped_rows import (
    can_have,
    long_loop,
    loop_us,
    LoopConfig,
    LoopedRows,
    RUNTIME_LOOP,
    SHORT_ROW,
)
from torch._inductor.mix_order_trace import Op, Width
from torch._inductor.persistent_reduction import Again, Loops, why_looped
from torch._inductor.row_accesses import lies_across, row_passes
from torch._inductor.row_program import RowProgram, whole_rows
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU
from torch.utils._sympy.functions import FloorDiv


INF, NAN = float("inf"), float("nan")
on_cuda = unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")


# Persistent, by what is live


LONG = {
    "triton.persistent_reductions": True,
    "triton.persistent_reduction_max_numel": 16384,
    "triton.cooperative_reductions": False,
    "triton.multi_kernel": 0,
    "triton.mix_order_reduction": False,
    "split_reductions": False,
}
STOCK = {**LONG, "triton.persistent_reduction_max_numel": 1024}
PERSISTENT, REDUCTION = "persistent_reduction", "reduction"


def softmax_of_floats(x):
    return torch.softmax(x.float(), -1).to(x.dtype)


def softmax_backward(grad, y):
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def rms_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)


def gated_norm(x, gate):
    y = x * torch.sigmoid(gate)
    return y / (y.abs().mean(-1, keepdim=True) + 1)


def scaled_norm(x, weight):
    return rms_norm(x) * weight[0]


def centered_norm(x, weight):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight[0])


def added_norm(x, y):
    total = x + y
    return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1)


def affine_norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight[0], bias[0])


def masked_softmax(x, kept):
    return torch.softmax(x.masked_fill(kept > 1, float("-inf")), -1)


# Rows that begin anywhere, and the warps that hold one, or None where it is looped.
UNALIGNED = (
    (rms_norm, 1237, 2),
    (rms_norm, 3001, 4),
    (softmax_of_floats, 5003, 8),
    (rms_norm, 5060, 8),
    (added_norm, 3001, 4),
    (added_norm, 5003, 8),
    (centered_norm, 3001, 2),
    (centered_norm, 5003, 4),
    (centered_norm, 10964, 8),
    (softmax_of_floats, 10964, 16),
    (softmax_of_floats, 12271, 8),
    (affine_norm, 1237, 1),
    (centered_norm, 1237, 2),
    (softmax_backward, 9001, 8),
    (softmax_backward, 16001, 8),
    (masked_softmax, 9001, 8),
    (masked_softmax, 14438, 8),
    (masked_softmax, 13001, 8),
    (masked_softmax, 15001, None),
    (gated_norm, 9001, 8),
    (gated_norm, 14001, 8),
    (gated_norm, 14501, None),
    (gated_norm, 16380, 16),
    (rms_norm, 10964, None),
    (rms_norm, 12501, None),
    (centered_norm, 12271, 8),
    (softmax_of_floats, 15993, 8),
)
WIDE = (
    (gated_norm, 8192),
    (gated_norm, 5120),
    (centered_norm, 5000),
    (centered_norm, 8192),
    (added_norm, 8190),
    (softmax_of_floats, 16384),
    (softmax_of_floats, 12300),
)


@on_cuda
@instantiate_parametrized_tests
class LongRowsTest(TestCase):
    """Rows of more than 1024 columns."""

    def compile(self, f, args, **options):
        torch._dynamo.reset()
        with inductor_config.patch({**LONG, **options}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        return actual, "\n".join(code)

    def check(self, f, shape, heuristic, count=1, dtype=torch.float32, **options):
        args = [torch.randn(shape, device=GPU_TYPE).to(dtype) for _ in range(count)]
        actual, code = self.compile(f, args, **options)
        found = re.findall(r"@triton_heuristics\.(\w+)\(", code)
        self.assertEqual(found, [heuristic])
        expect = f(*(arg.double() for arg in args))
        eager = f(*args)
        self.assertEqual((actual.shape, actual.dtype), (eager.shape, eager.dtype))
        error = (actual.double() - expect).norm()
        ulp = torch.finfo(dtype).eps * expect.norm()
        eager_error = (eager.double() - expect).norm()
        self.assertLessEqual(error, max(2 * eager_error, 2 * ulp))
        return code

    @parametrize("columns, warps", ((1536, 2), (2048, 2), (3200, 4), (8192, 8)))
    def test_warps(self, columns, warps):
        code = self.check(softmax_of_floats, (3, columns), PERSISTENT, dtype=torch.bfloat16)
        self.assertIn(f"'num_warps': {warps}", code)
        code = self.check(softmax_of_floats, (3, columns), REDUCTION, **STOCK)
        self.assertNotIn("'num_warps'", code)

    @parametrize("columns", (1536, 3200, 4096))
    def test_softmax(self, columns):
        self.check(softmax_of_floats, (3, columns), PERSISTENT)
        self.check(softmax_of_floats, (3, columns), REDUCTION, **STOCK)

    def test_half_types(self):
        self.check(softmax_of_floats, (3, 4096), PERSISTENT, dtype=torch.bfloat16)

    def test_softmax_backward(self):
        self.check(softmax_backward, (3, 3072), PERSISTENT, 2)

    def test_a_row_that_a_loop_reads_in_one_block(self):
        # nothing is gained but where functions are computed once, or loops store as well
        self.check(softmax_backward, (3, 4096), REDUCTION, 2)
        self.check(gated_norm, (3, 4096), PERSISTENT, 2)

    def test_a_row_that_is_stored_in_a_quarter_of_its_bytes(self):
        def heuristic(columns, dtype=torch.float32, narrow=torch.int8, grid=torch.round):
            def quantized(x):
                scale = x.abs().amax(-1, keepdim=True).float() / 127
                return grid(x.float() / scale).to(narrow), scale

            x = torch.randn(3, columns, device=GPU_TYPE).to(dtype)
            torch._dynamo.reset()
            with inductor_config.patch(LONG):
                compiled = torch.compile(quantized, fullgraph=True)
                actual, code = run_and_get_code(compiled, x)
            self.assertEqual(actual, quantized(x))
            (found,) = re.findall(r"@triton_heuristics\.(\w+)\(", "\n".join(code))
            return found

        self.assertEqual(heuristic(2048), REDUCTION)
        self.assertEqual(heuristic(3072), PERSISTENT)
        self.assertEqual(heuristic(2048, torch.bfloat16), PERSISTENT)
        self.assertEqual(heuristic(2048, narrow=torch.float32), PERSISTENT)
        self.assertEqual(heuristic(2048, grid=torch.tanh), PERSISTENT)

    def test_norm(self):
        self.check(rms_norm, (3, 2048), PERSISTENT, dtype=torch.bfloat16)

    @parametrize("dtype", (torch.float32, torch.float64))
    def test_whole_vectors_that_are_loaded_again(self, dtype):
        """They are cached, and a sum has few instructions for them."""
        for f, columns, heuristic in (
            (rms_norm, 2048, REDUCTION),
            (rms_norm, 3072, REDUCTION),
            (scaled_norm, 4096, REDUCTION),
            (centered_norm, 4096, REDUCTION),
            (centered_norm, 5120, REDUCTION),
            # short rows of Welford's algorithm, elements by themselves, two tensors
            (centered_norm, 2048, PERSISTENT),
            (centered_norm, 3072, PERSISTENT),
            (rms_norm, 3073, PERSISTENT),
            (added_norm, 4096, PERSISTENT),
        ):
            self.check(f, (3, columns), heuristic, f.__code__.co_argcount, dtype)

    def test_what_loops_do_beside_loading_again(self):
        def of_roots(x):
            return rms_norm(x.abs().sqrt())

        def of_sines(x):
            return rms_norm(x.sin())

        def by_maxima(x):
            return x / x.abs().amax(-1, keepdim=True)

        def with_function(x):
            return torch.sigmoid(rms_norm(x))

        def in_three_passes(x):
            y = rms_norm(x)
            return y - y.abs().mean(-1, keepdim=True)

        for f in (of_roots, of_sines, by_maxima, with_function, in_three_passes):
            self.check(f, (3, 4096), PERSISTENT)
        # rows that begin within a vector, and what the first loop stores
        self.check(lambda x: rms_norm(x[:, 1:4097]), (3, 4100), PERSISTENT)
        self.check(lambda x: rms_norm(x[:, 4:4100]), (3, 4100), REDUCTION)
        x = torch.randn(3, 4096, device=GPU_TYPE)
        with inductor_config.patch(LONG):
            both = torch.compile(lambda x: (x + 1, rms_norm(x + 1)), fullgraph=True)
            actual, code = run_and_get_code(both, x)
        self.assertIn(f"@triton_heuristics.{PERSISTENT}(", "\n".join(code))
        self.assertEqual(actual[0], x + 1)

    def test_short_rows_as_ever(self):
        self.check(rms_norm, (3, 1024), PERSISTENT, **STOCK)
        self.assertNotIn("'num_warps'", self.check(rms_norm, (3, 1024), PERSISTENT))

    def test_one_loop(self):
        self.check(lambda x: x.sum(-1), (3, 4096), REDUCTION)

    @parametrize("f, columns", WIDE)
    def test_wide_programs(self, f, columns):
        """A row is held of which loops compute functions, or divide, again."""
        args = f.__code__.co_argcount, torch.bfloat16
        code = self.check(f, (3, columns), PERSISTENT, *args)
        self.assertIn(f"'num_warps': {8 if columns <= 8192 else 16}", code)
        self.check(f, (3, columns), REDUCTION, *args, **STOCK)

    @parametrize("f, columns, warps", UNALIGNED)
    def test_unaligned_rows(self, f, columns, warps):
        args = f.__code__.co_argcount, torch.bfloat16
        code = self.check(f, (3, columns), PERSISTENT if warps else REDUCTION, *args)
        if warps:
            self.assertIn(f"'num_warps': {warps}", code)
        self.check(f, (3, columns), REDUCTION, *args, **STOCK)

    def test_unaligned_rows_of_other_types(self):
        for dtype in (torch.float16, torch.float32):
            code = self.check(rms_norm, (3, 1237), PERSISTENT, dtype=dtype)
            self.assertIn("'num_warps': 2", code)
        self.check(rms_norm, (3, 1237), REDUCTION, dtype=torch.float64)
        # whole vectors
        self.check(rms_norm, (3, 1236), REDUCTION)
        # until a thread has too many registers
        self.check(masked_softmax, (3, 14001), PERSISTENT, 2)
        self.check(masked_softmax, (3, 15001), REDUCTION, 2)

        def mixed(x, y):
            return rms_norm(x.float() + y)

        args = [torch.randn(3, 1237, device=GPU_TYPE) for _ in range(2)]
        args[0] = args[0].bfloat16()
        actual, code = self.compile(mixed, args)
        self.assertIn(f"@triton_heuristics.{PERSISTENT}(", code)
        self.assertEqual(actual, mixed(*args))

        def in_bytes(x):
            return torch.where(x > x.mean(-1, keepdim=True), x, 0).to(torch.int8)

        def in_floats(x):
            return rms_norm(x.float())

        for f in (in_bytes, in_floats):
            x = torch.randint(-9, 10, (3, 5060), device=GPU_TYPE).bfloat16()
            actual, code = self.compile(f, [x])
            self.assertIn(f"@triton_heuristics.{PERSISTENT}(", code)
            self.assertEqual(actual, f(x))

    def test_unaligned_rows_that_are_not_loaded_again(self):
        def scaled(x, y):
            return y * x.mean(-1, keepdim=True)

        self.check(scaled, (3, 1237), REDUCTION, 2, torch.bfloat16)

    @parametrize("columns, crowded", ((4801, False), (7001, True), (7000, False), (8000, True)))
    def test_registers_of_a_norm_that_stores_a_sum(self, columns, crowded):
        """Its rows are not masked where it would take too many; LayerNorm of whole vectors is told
        its share."""

        def added(x, y, weight, bias):
            total = x + y
            norm = torch.nn.functional.layer_norm(total, x.shape[-1:], weight[0], bias[0])
            return norm, total

        def added_rms(x, y, weight):
            total = x + y
            return rms_norm(total) * weight[0], total

        args = [torch.randn(3, columns, device=GPU_TYPE) for _ in range(4)]
        actual, code = self.compile(added, args)
        self.assertEqual("'sharing_programs': 2" in code, columns == 8000)
        self.assertEqual("'whole_programs': True" in code, crowded)
        self.assertEqual(actual, added(*args), atol=1e-5, rtol=1e-5)
        actual, code = self.compile(added_rms, args[:3])
        self.assertNotIn("'sharing_programs'", code)
        self.assertEqual("'whole_programs': True" in code, columns == 7001)
        self.assertEqual(actual, added_rms(*args[:3]), atol=1e-5, rtol=1e-5)

    def test_rows_that_begin_beside_a_vector(self):
        def part(x):
            return rms_norm(x[:, 1:])

        self.check(part, (3, 5001), PERSISTENT, dtype=torch.bfloat16)

    def test_padded_rows_are_not_unaligned(self):
        """A loop loads the whole blocks of such rows as vectors."""

        def part(x):
            return rms_norm(x[:, :5001])

        self.check(part, (3, 5008), REDUCTION, dtype=torch.bfloat16)
        self.check(part, (3, 5007), PERSISTENT, dtype=torch.bfloat16)

    def test_wide_programs_in_float32(self):
        for f in (gated_norm, centered_norm, added_norm):
            code = self.check(f, (3, 8190), PERSISTENT, 2)
            self.assertIn("'num_warps': 8", code)

    @parametrize(
        "f, columns, num_warps, sharing",
        (
            (masked_softmax, 12271, 8, 2),
            (masked_softmax, 9000, 16, 0),
            (added_norm, 9001, 8, 2),
            (added_norm, 12288, 32, 1),
            (gated_norm, 13332, 32, 1),
            (affine_norm, 9216, 16, 2),
            (affine_norm, 16384, 16, 2),
            (scaled_norm, 16001, 8, 2),
        ),
    )
    def test_programs_of_wide_rows(self, f, columns, num_warps, sharing):
        """Warps, and programs that share an SM's registers, which rows of float64 do not."""
        code = self.check(f, (3, columns), PERSISTENT, f.__code__.co_argcount)
        self.assertIn(f"'num_warps': {num_warps}", code)
        self.assertEqual(f"'sharing_programs': {sharing}" in code, sharing > 0)
        args = [torch.randn(3, columns, device=GPU_TYPE).double()] * f.__code__.co_argcount
        actual, code = self.compile(f, args)
        self.assertNotIn("'sharing_programs'", code)
        self.assertEqual(actual, f(*args))

    @parametrize("columns, late", ((9216, False), (12288, True), (12289, None)))
    def test_wide_rows_of_a_norm_that_stores_a_sum(self, columns, late):
        """Loads what rows share late where nearly all of a block's columns are of the row."""

        def added(x, y, weight):
            total = x + y
            return torch.nn.functional.layer_norm(total, x.shape[-1:], weight[0]), total

        args = [torch.randn(3, columns, device=GPU_TYPE) for _ in range(3)]
        actual, code = self.compile(added, args)
        self.assertEqual(actual, added(*args), atol=1e-5, rtol=1e-5)
        self.assertIn(PERSISTENT if late is not None else f"{REDUCTION}(", code)
        if late is not None:
            self.assertIn("'num_warps': 16", code)
            lines = code.splitlines()
            weight = [i for i, x in enumerate(lines) if re.search(r"in_ptr\d \+ \(r0_\d\)", x)]
            sums = [i for i, x in enumerate(lines) if "tl.sum(" in x]
            self.assertEqual(min(weight) > max(sums), late)

    def test_wide_rows_of_arithmetic(self):
        """A loop over them has more programs on an SM."""
        for f, columns in ((scaled_norm, 8192), (centered_norm, 16384), (added_norm, 16382)):
            count = f.__code__.co_argcount
            self.check(f, (3, columns), REDUCTION, count, torch.bfloat16)

    @parametrize("columns", (1100, 2501, 4104, 5120))
    @parametrize("f", (softmax_of_floats, centered_norm, gated_norm))
    def test_padding_that_pays(self, f, columns):
        # in float32 whole vectors of one tensor are as well loaded again
        again = f is centered_norm and columns > 4096
        dtype = torch.bfloat16 if again else torch.float32
        self.check(f, (3, columns), PERSISTENT, f.__code__.co_argcount, dtype)

    @parametrize("columns, warps", ((2560, 4), (3328, 8)))
    def test_warps_of_a_padded_row(self, columns, warps):
        """A thread has columns of the row, not of its padding."""
        code = self.check(centered_norm, (3, columns), PERSISTENT, 2, torch.bfloat16)
        self.assertIn(f"'num_warps': {warps}", code)

    def test_padding(self):
        for f, columns in ((rms_norm, 2500), (softmax_of_floats, 9000), (gated_norm, 9000)):
            dtype = torch.float32 if f is rms_norm else torch.bfloat16
            self.check(f, (3, columns), REDUCTION, f.__code__.co_argcount, dtype)

    def test_padding_with_few_programs(self):
        """A mask beside what is loaded again: an SM has two programs of such a row."""

        def masked(grad, y, kept):
            return torch.where(kept > 0, softmax_backward(grad, y), 0)

        self.check(softmax_backward, (3, 5000), PERSISTENT, 2)
        self.check(masked, (3, 5000), REDUCTION, 3)

    @parametrize("columns", (1500, 3001, 4190, 8190))
    @parametrize("gathered", (False, True))
    def test_rows_of_equal_columns(self, columns, gathered):
        """Their mean is the column, as of a loop by Welford's algorithm."""

        def normalized(x, index):
            x = x[:, index] if gathered else x
            var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            return (x - mean) * torch.rsqrt(var + 1e-5), var, mean

        x = torch.randn(7, 1, device=GPU_TYPE).expand(7, columns).contiguous()
        index = torch.arange(columns, device=GPU_TYPE)
        with inductor_config.patch(LONG):
            compiled = torch.compile(normalized, fullgraph=True)
            (zero, var, mean), code = run_and_get_code(compiled, x, index)
        self.assertIn(f"@triton_heuristics.{PERSISTENT}(", "\n".join(code))
        self.assertEqual(mean, x[:, :1], atol=0, rtol=0)
        self.assertEqual(int(zero.count_nonzero() + var.count_nonzero()), 0)

    @parametrize(
        "columns, dtype, sums",
        (
            (1024, torch.float32, 2),
            (1500, torch.bfloat16, 2),
            (1500, torch.float32, 3),
        ),
    )
    def test_means_as_ever(self, columns, dtype, sums):
        """Of rows that upstream holds, and of types that do not show it."""
        code = self.check(centered_norm, (3, columns), PERSISTENT, 2, dtype)
        self.assertEqual(code.count("tl.sum("), sums)

    def test_longer_than_the_most(self):
        options = {"triton.persistent_reduction_max_numel": 2048}
        self.check(softmax_of_floats, (3, 2049), REDUCTION, **options)

    def test_dynamic_columns(self):
        compiled = torch.compile(softmax_of_floats, fullgraph=True, dynamic=True)
        x = torch.randn(3, 4096, device=GPU_TYPE)
        with inductor_config.patch(LONG):
            actual, code = run_and_get_code(compiled, x)
        self.assertIn(f"@triton_heuristics.{REDUCTION}(", "\n".join(code))
        self.assertEqual(actual, softmax_of_floats(x))


def weighted_norm(x, weight):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight[0])


def sum_of_floats(x):
    return x.float().sum(-1).to(x.dtype)


def added_weighted_norm(x, y, weight):
    return weighted_norm(x + y, weight)


def gated_weighted_norm(x, gate, weight):
    return weighted_norm(x * torch.nn.functional.silu(gate), weight)


def weighted_norm_backward(x, grad, weight):
    grad = grad * weight[0]
    return grad - x * (grad * x).mean(-1, keepdim=True)


@on_cuda
@instantiate_parametrized_tests
class ReadEvictionTest(TestCase):
    """What the L2 cache keeps of rows that move more bytes than it has."""

    def hints(self, f, *args, l2_bytes=1, **options):
        """The eviction policies of the loads of the inputs."""
        torch._dynamo.reset()
        options = {**LONG, "fx_graph_cache": False, **options}
        with (
            inductor_config.patch(options),
            mock.patch.object(DeviceModel, "l2_bytes", l2_bytes),
        ):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        self.assertEqual(actual, f(*args))
        loads = [line for line in "\n".join(code).splitlines() if "tl.load(in_" in line]
        found = [re.search(r"eviction_policy='evict_(\w+)'", line) for line in loads]
        return [each and each[1] for each in found]

    def rows(self, columns=2048, dtype=torch.float32):
        return torch.randn(6, columns, device=GPU_TYPE, dtype=dtype)

    def test_rows_that_are_stored(self):
        self.assertEqual(self.hints(lambda x: torch.softmax(x, -1), self.rows()), ["last"])

    def test_as_many_bytes_are_stored(self):
        def f(x, y):
            total = x + y
            return total, total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1)

        x = self.rows(dtype=torch.float16)
        self.assertEqual(self.hints(f, x.float(), x.float()), ["last"] * 2)
        kept = self.hints(lambda x: softmax_of_floats(x).float(), x)
        self.assertEqual(kept, ["last"])

    def test_fewer_bytes_are_stored(self):
        self.assertEqual(self.hints(gated_norm, self.rows(), self.rows()), [None] * 2)
        halved = self.hints(lambda x: torch.softmax(x, -1).half(), self.rows())
        self.assertEqual(halved, [None])

    def test_nothing_of_a_row_is_stored(self):
        self.assertEqual(self.hints(lambda x: x.amax(-1), self.rows(512)), ["first"])

    def test_what_rows_share(self):
        """Every row reads it."""
        args = self.rows(512), self.rows(512)[:1]
        self.assertEqual(self.hints(scaled_norm, *args), ["last", "last"])
        largest = self.hints(lambda x, w: (x * w[0]).amax(-1), *args)
        self.assertEqual(largest, ["first", "last"])

    def test_what_some_rows_share(self):
        """A line of it is read for each of them."""

        def f(x, y):
            return (x[:, None] * y).amax(-1)

        x, y = self.rows(512), torch.randn(6, 3, 512, device=GPU_TYPE)
        self.assertEqual(self.hints(f, x, y), ["last", "first"])
        masked = self.hints(lambda x, y: (x + y).amax(-1), y[0], y)
        self.assertEqual(masked, ["last", "first"])

        def repeated(x):
            return x.repeat_interleave(2, 0).amax(-1)

        self.assertEqual(self.hints(repeated, x), self.hints(repeated, x, l2_bytes=2**40))

    def test_what_a_batch_shares(self):
        """It would go, if the rows beside it were to stay."""

        def f(x, positions):
            total = x + positions
            return total, torch.softmax(total, -1)

        def hints(positions, **options):
            x = torch.randn(2, positions, 2048, device=GPU_TYPE)
            return self.hints(f, x, torch.randn(positions, 2048, device=GPU_TYPE), **options)

        self.assertEqual(hints(3), ["last", "last"])
        device = DeviceModel.of(DeviceProperties.create(torch.device(GPU_TYPE)))
        rows = device.shared_memory_kib * 1024 // (2048 * 4)
        self.assertEqual(hints(rows)[0], "last")
        self.assertEqual(hints(rows + 1), hints(rows + 1, l2_bytes=2**40))

        # rows that are read one after the other share it
        x = torch.randn(rows + 1, 2, 2048, device=GPU_TYPE)
        self.assertEqual(self.hints(f, x, torch.randn_like(x[:, :1])), ["last", "last"])

    def test_windows(self):
        """They overlap."""

        def f(x):
            return torch.softmax(x.unfold(-1, 512, 16), -1)

        x = torch.randn(4096, device=GPU_TYPE)
        self.assertEqual(self.hints(f, x), self.hints(f, x, l2_bytes=2**40))

    def test_all_reads_count(self):
        """Also those of one tensor."""

        def halves(x):
            return torch.softmax(x[:, :512] * x[:, 512:], -1)

        self.assertEqual(self.hints(halves, self.rows(1024)), [None] * 2)

    def test_parts_of_a_row(self):
        """What is masked is not read."""

        def f(x, y):
            return torch.softmax(torch.cat([x, y], -1), -1)

        args = self.rows(512), self.rows(512)
        self.assertEqual(self.hints(f, *args), self.hints(f, *args, l2_bytes=2**40))

    def test_every_other_column(self):
        """Half of each line is of no use."""

        def f(x):
            return torch.softmax(x[:, ::2], -1)

        x = self.rows(1024)
        self.assertEqual(self.hints(f, x), self.hints(f, x, l2_bytes=2**40))

    def test_scans(self):
        """They were not measured."""

        def f(x):
            return x.exp().cumsum(-1)

        x = self.rows(512)
        self.assertEqual(self.hints(f, x), self.hints(f, x, l2_bytes=2**40))

    @parametrize("columns", (1237, 3001))
    def test_unaligned_rows(self, columns):
        x = self.rows(columns, torch.float16)
        self.assertEqual(self.hints(softmax_of_floats, x), [None])

    def test_gathered_rows(self):
        """Which of them are read, and how often, is not known."""

        def f(x, index):
            return torch.softmax(x[index], -1)

        index = torch.tensor([1, 1, 0, 5], device=GPU_TYPE)
        hints = self.hints(f, self.rows(), index)
        self.assertEqual(hints, self.hints(f, self.rows(), index, l2_bytes=2**40))

    def test_what_the_cache_has(self):
        """A kernel of fewer bytes than twice the cache has is as upstream has it."""
        x = self.rows()
        moved = 2 * x.nbytes

        def f(x):
            return torch.softmax(x, -1)

        self.assertEqual(self.hints(f, x, l2_bytes=moved // 2), ["last"])
        upstream = self.hints(f, x, l2_bytes=2**40)
        self.assertNotEqual(upstream, ["last"])
        self.assertEqual(self.hints(f, x, l2_bytes=moved // 2 + 1), upstream)
        self.assertEqual(self.hints(f, x, l2_bytes=0), upstream)

    def test_dynamic_rows(self):
        """As many as the first call has."""
        x = self.rows()
        torch._dynamo.mark_dynamic(x, 0)
        self.assertEqual(self.hints(lambda x: torch.softmax(x, -1), x), ["last"])

    def test_loops(self):
        """They read a row again."""
        x = self.rows(40000)

        def f(x):
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)

        self.assertEqual(self.hints(f, x), self.hints(f, x, l2_bytes=2**40))


class UnalignedRowsTestCase(TestCase):
    """As if few rows were fewer than five."""

    def compile(self, f, args, **options):
        torch._dynamo.reset()
        options = {"force_disable_caches": True, **options}
        few = [mock.patch.object(m, "RUNTIME_ROWS", 5) for m in (persistent_reduction, short_rows)]
        with inductor_config.patch({**LONG, **options}), few[0], few[1]:
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        return actual, "\n".join(code)

    def compile_rows(self, f, rows, columns, dtype, ulps, dynamic=False, **options):
        """The code for random rows of all arguments, whose result is right."""
        count = f.__code__.co_argcount
        args = [torch.randn(rows, columns, device=GPU_TYPE).to(dtype) for _ in range(count)]
        if dynamic:
            for arg in args:
                torch._dynamo.mark_dynamic(arg, 0)
        actual, code = self.compile(f, args, **options)
        expect = f(*(arg.double() for arg in args))
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, dtype))
        tolerance = ulps * torch.finfo(dtype).eps
        self.assertEqual(actual.double(), expect, atol=tolerance, rtol=tolerance)
        return code


@on_cuda
@instantiate_parametrized_tests
class ShortRowsTest(UnalignedRowsTestCase):
    """Programs of several short rows, of a GPU of one SM."""

    def check(self, f, columns, expect, dtype=torch.bfloat16, rows=17, ulps=4, **options):
        """expect: rows and warps of a program; None: the runtime's."""
        small = DeviceModel(sms=1, memory_GBs=36.4)
        with mock.patch.object(DeviceModel, "of", return_value=small):
            code = self.compile_rows(f, rows, columns, dtype, ulps, **options)
        found = re.search(r"'rows': (\d+), 'num_warps': (\d)", code)
        self.assertEqual(found and (int(found[1]), int(found[2])), expect)

    @parametrize("dtype", (torch.bfloat16, torch.float16))
    @parametrize("columns", (192, 197, 255))
    def test_pairs(self, columns, dtype):
        """Of functions, of unaligned rows."""
        self.check(softmax_of_floats, columns, (2, 1) if columns % 8 else None, dtype)
        options = {"max_autotune_pointwise": True}
        self.check(softmax_of_floats, columns, (2, 1) if columns % 8 else None, dtype, **options)

    @parametrize("rows", (17, 32))
    @parametrize(
        "columns, expect",
        ((1000, (2, 2)), (640, (2, 2)), (513, (4, 4)), (512, (4, 2))),
    )
    def test_sums(self, columns, expect, rows):
        """Whose program would have fewer bytes than an SM moves in the time of another."""
        rows = 2 * rows if columns == 512 else rows
        self.check(sum_of_floats, columns, expect, rows=rows, ulps=32)

    def test_sums_of_bytes(self):
        def sums(x):
            return x.to(torch.int32).sum(-1)

        def check(columns, expect, rows=65):
            small = DeviceModel(sms=1, memory_GBs=36.4)
            x = torch.randint(-128, 127, (rows, columns), dtype=torch.int8, device=GPU_TYPE)
            with mock.patch.object(DeviceModel, "of", return_value=small):
                actual, code = self.compile(sums, (x,))
            found = re.search(r"'rows': (\d+), 'num_warps': (\d)", code)
            self.assertEqual(found and (int(found[1]), int(found[2])), expect)
            self.assertEqual(actual, sums(x))

        check(130, (32, 8))
        check(300, (8, 4))
        check(128, None)

    @parametrize("columns", (769, 900, 1024))
    @parametrize("dtype", (torch.bfloat16, torch.float32))
    def test_few_rows_of_a_warp(self, columns, dtype):
        """Half of an SM would be idle, with a warp each."""
        small = DeviceModel(sms=1, memory_GBs=36.4)
        plan = "'launch_plan': {'num_warps': 2}"

        def code_of(rows, columns, **options):
            with mock.patch.object(DeviceModel, "of", return_value=small):
                return self.compile_rows(rms_norm, rows, columns, dtype, 4, **options)

        for rows in (3, 15):
            self.assertIn(plan, code_of(rows, columns))
        for rows in (2, 16):
            self.assertNotIn(plan, code_of(rows, columns))
        self.assertNotIn(plan, code_of(15, 768))
        self.assertNotIn(plan, code_of(15, columns, dynamic=True))

    def test_as_ever(self):
        """Few rows, more bytes of each, short rows that are tuned, and an unknown GPU."""
        self.check(sum_of_floats, 640, None, rows=15, ulps=32)
        self.check(sum_of_floats, 384, None, rows=31, ulps=32)
        self.check(sum_of_floats, 640, None, torch.float32, ulps=32)
        self.check(sum_of_floats, 128, None, rows=200, ulps=32)
        self.check(rms_norm, 640, None)
        self.check(softmax_of_floats, 640, None)
        self.check(softmax_of_floats, 197, None, rows=4)
        self.check(softmax_of_floats, 191, None)
        self.check(weighted_norm, 197, None)
        self.check(lambda x: x.cumsum(-1).sum(-1), 300, None, torch.float16, rows=40, ulps=512)
        self.check(lambda x: x.sort(-1)[0].sum(-1), 300, None, rows=40, ulps=512)
        code = self.compile_rows(sum_of_floats, 1100, 640, torch.bfloat16, 32)
        self.assertNotIn("'launch_plan'", code)

    def test_tensor_descriptors(self):
        """Which are of 16 bytes or more, so of eight rows here."""
        options = {"triton.use_tensor_descriptor": True, "assume_aligned_inputs": True}
        self.check(sum_of_floats, 1000, (2, 2), rows=67, ulps=32, **options)

    def test_dynamic_rows(self):
        """Of which it is not known that they are many."""
        self.check(sum_of_floats, 640, None, rows=18, ulps=32, dynamic=True)
        self.check(softmax_of_floats, 197, None, rows=6, dynamic=True)


@on_cuda
@instantiate_parametrized_tests
class MatchedVectorsTest(UnalignedRowsTestCase):
    """What unaligned rows share is loaded in as many columns at once as the rows."""

    def check(self, f, columns, bytes_at_once, dtype=torch.bfloat16, rows=9, **options):
        """bytes_at_once: of the operands that rows share; of the others none is limited."""
        code = self.compile_rows(f, rows, columns, dtype, 8, **options)
        arguments = re.search(r"'signature': \{(.*?)\}", code)[1]
        names = re.findall(r"'(\w+)': '\*", arguments)
        found = dict(re.findall(r"\((\d+),\): \[\['tt\.divisibility', (\d+)\]\]", code))
        shared = set(re.findall(r"load\((in_ptr\d) \+ \(r0_\d\)", code))
        self.assertTrue(shared)
        for i, name in enumerate(names):
            expect = bytes_at_once if name in shared else 16
            self.assertEqual(int(found[str(i)]), expect, name)

    @parametrize("f", (weighted_norm, affine_norm, added_weighted_norm, gated_weighted_norm))
    @parametrize("columns", (101, 901, 3001, 5003))
    def test_odd_columns(self, f, columns):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            self.check(f, columns, dtype.itemsize, dtype)

    def test_columns_at_once(self):
        for columns, at_once in ((902, 2), (3004, 4), (1000, 8)):
            self.check(weighted_norm, columns, 2 * at_once)
        self.check(weighted_norm, 3002, 8, torch.float32)

    def test_rows_that_lie_apart(self):
        """They are aligned as their stride is, or not, as what begins at an odd column."""

        def part(x, weight):
            return weighted_norm(x[:, :1000], weight[:, :1000])

        def later_part(x, weight):
            return weighted_norm(x[:, 1:1001], weight[:, :1000])

        self.check(part, 1001, 2)
        self.check(part, 1008, 16)
        self.check(later_part, 1008, 2)

    def test_as_ever(self):
        """Loops, wide rows, aligned ones, and those beside which an aligned tensor is."""
        self.check(weighted_norm, 20001, 16)
        self.check(affine_norm, 9001, 16, torch.float32)
        self.check(weighted_norm, 904, 16)

    def test_dynamic_rows(self):
        self.check(weighted_norm, 901, 2, dynamic=True)


@on_cuda
@instantiate_parametrized_tests
class LateLoadsTest(UnalignedRowsTestCase):
    """What unaligned rows share is loaded where it is used."""

    def check(self, f, columns, late, masked, rows=8, dtype=torch.bfloat16, **options):
        """late: whether that is after all sums; masked: whether rows are."""
        code = self.compile_rows(f, rows, columns, dtype, 8, **options)
        lines = code.splitlines()
        found = {
            each: [i for i, line in enumerate(lines) if re.search(each, line)]
            for each in (r"load\(in_ptr\d \+ \(r0_\d\)", r"tl\.sum\(")
        }
        shared, sums = found.values()
        self.assertTrue(shared and sums)
        self.assertEqual(min(shared) > max(sums), late)
        loads = [line for line in lines if "tl.load(" in line]
        self.assertEqual(any("xmask" in line for line in loads), masked)
        return code

    @parametrize(
        "f, columns, late",
        (
            (weighted_norm, 3001, False),
            (weighted_norm, 8001, False),
            (affine_norm, 1237, True),
            (affine_norm, 3263, True),
            (affine_norm, 7001, True),
            (added_weighted_norm, 5003, False),
        ),
    )
    def test_norms(self, f, columns, late):
        """Where a thread has no registers for both."""
        self.check(f, columns, late, masked=False, rows=7)
        # autotuning tries more rows
        options = "max_autotune_pointwise", "coordinate_descent_tuning"
        for option in (*options, "triton.use_tensor_descriptor"):
            self.check(f, columns, late, masked=True, **{option: True})

    @parametrize("columns", (1536, 5642, 6120))
    def test_layer_norms_that_store_a_sum(self, columns):
        """Of half types: no mask is between its loads. Others have them as they were."""

        def added(norm):
            def f(x, y, weight):
                total = x + y
                return total, norm(total, total.shape[-1:], weight[0])

            return f

        def with_statistics(x, weight, bias):
            rows = x.shape[-1:]
            return torch.native_layer_norm(x, rows, weight[0], bias[0], 1e-5)

        def of_channels(x, y, weight):
            """Batch norms, whose weights are of rows."""
            total = x + y
            return total, torch.nn.functional.layer_norm(total, x.shape[-1:]) * weight[:, :1]

        def rows_are_masked(f, dtype):
            args = [torch.randn(7, columns, device=GPU_TYPE).to(dtype) for _ in range(3)]
            actual, code = self.compile(f, args)
            expect = f(*(arg.double() for arg in args))
            tolerance = 12 * torch.finfo(dtype).eps
            for got, want in zip(actual, expect):
                self.assertEqual(got.double(), want, atol=tolerance, rtol=tolerance)
            return any("tl.load(" in line and "xmask" in line for line in code.splitlines())

        layer_norm, rms_norm = (
            getattr(torch.nn.functional, name) for name in ("layer_norm", "rms_norm")
        )
        for dtype in (torch.bfloat16, torch.float16):
            self.assertFalse(rows_are_masked(added(layer_norm), dtype))
            self.assertTrue(rows_are_masked(added(rms_norm), dtype))
            self.assertTrue(rows_are_masked(with_statistics, dtype))
            self.assertTrue(rows_are_masked(of_channels, dtype))

    @parametrize("f", (weighted_norm, affine_norm, gated_weighted_norm))
    def test_long_rows_of_words(self, f):
        # two tensors of gated rows leave no registers for the weight
        late = f is not gated_weighted_norm
        code = self.check(f, 9001, late=late, masked=False, dtype=torch.float32)
        self.assertIn("'num_warps': 8", code)
        late = f is affine_norm
        masked = f is weighted_norm  # of the gate functions are computed
        self.check(f, 5003, late=late, masked=masked, dtype=torch.float32)

    def test_dynamic_rows(self):
        """A program has one."""
        self.check(affine_norm, 1237, late=True, masked=False, dynamic=True)

    @parametrize("runtimes", ("is_combo_kernel", "cooperative_reduction"))
    def test_programs_of_the_runtime(self, runtimes):
        """Which have several rows by its configurations, whatever the kernel asks for."""
        kernel = mock.Mock(is_combo_kernel=False, cooperative_reduction=False)
        kernel.row_program = lambda: RowProgram(1, 8, loads_late=True)
        self.assertEqual(whole_rows(kernel), 1)
        setattr(kernel, runtimes, True)
        self.assertIsNone(whole_rows(kernel))

    def test_combo_kernels(self):
        """Whose programs have the runtime's rows, and mask them."""

        def norms(x, y):
            return weighted_norm(x[1:], x), weighted_norm(y[1:], y)

        for columns, sizes in (((3001, 2901), 1), ((3001, 3001), 0)):
            args = [torch.randn(8, n, device=GPU_TYPE).bfloat16() for n in columns]
            options = {"combo_kernels": True, "combo_kernel_allow_mixed_sizes": sizes}
            actual, code = self.compile(norms, args, **options)
            self.assertIn("ComboKernelGrid", code)
            self.assertIn("r0_mask & xmask", code)
            self.assertEqual(actual, norms(*args))

    def test_hints_that_many_configurations_are_for(self):
        """Of which autotuning chooses, but for rows that all programs have."""

        def broadcast(x, y, weight):
            return weighted_norm(x + y[:, :1], weight)

        self.check(broadcast, 3001, late=False, masked=False)

    def test_as_ever(self):
        """A reduction that needs it, functions of elements, rows that begin at vectors."""
        self.check(weighted_norm_backward, 777, late=False, masked=True)
        self.check(gated_weighted_norm, 1237, late=False, masked=False)
        self.check(weighted_norm, 4096, late=False, masked=True)
        self.check(weighted_norm, 4002, late=False, masked=True)


BATCH, HEADS, QUERIES, KEYS = 2, 3, 8, 320
SCORES = (BATCH, HEADS, QUERIES, KEYS)


def bucket_bias(scores, table, index):
    bias = torch.nn.functional.embedding(index, table).permute(2, 0, 1)
    return torch.softmax(scores + bias.unsqueeze(0), -1)


def parameter_bias(scores, bias):
    return torch.softmax(scores + bias, -1)


def alibi(scores, slopes):
    keys = torch.arange(KEYS, device=scores.device)
    distance = (keys[None] - keys[:QUERIES, None]).abs()
    return torch.softmax(scores - slopes[:, None, None] * distance, -1)


def masked_fill(scores, keep):
    return torch.softmax((0.125 * scores).masked_fill(~keep, float("-inf")), -1)


def where(scores, keep):
    return torch.softmax(torch.where(keep, 0.125 * scores, -1e4), -1)


def expanded(scores, keep):
    bias = (~keep).to(scores.dtype).expand(BATCH, 1, QUERIES, KEYS) * -1e4
    return torch.softmax(scores + bias, -1)


def safe_softmax(scores, keep):
    scores = scores.masked_fill(~keep, float("-inf"))
    return torch.ops.aten._safe_softmax.default(scores, -1)


def in_float32(scores, bias):
    return torch.softmax((scores + bias).float(), -1).to(scores.dtype)


def attention_backward(scores, bias):
    """Of a softmax whose output is scaled by key."""
    grad = scores * bias
    return scores * (grad - (scores * grad).sum(-1, keepdim=True))


def layer_norm_of_positions(x, positions):
    return torch.nn.functional.layer_norm(x + positions, (KEYS,))


def keep(*shape):
    kept = torch.rand(shape, device=GPU_TYPE) > 0.3
    kept[..., 0] = True
    return (kept,)


def floats(*shape):
    return (torch.randn(shape, device=GPU_TYPE),)


def table_and_index():
    index = torch.randint(0, 32, (QUERIES, KEYS), device=GPU_TYPE)
    return (*floats(32, HEADS), index)


# what a softmax's scores are computed with, and the softmax of them
BROADCAST = {
    "bucket_bias": (bucket_bias, table_and_index),
    "parameter": (parameter_bias, lambda: floats(1, HEADS, QUERIES, KEYS)),
    "alibi": (alibi, lambda: floats(HEADS)),
    "masked_fill_keys": (masked_fill, lambda: keep(BATCH, 1, 1, KEYS)),
    "masked_fill_pairs": (masked_fill, lambda: keep(BATCH, 1, QUERIES, KEYS)),
    "where": (where, lambda: keep(BATCH, 1, QUERIES, KEYS)),
    "expanded": (expanded, lambda: keep(BATCH, 1, 1, KEYS)),
    "safe": (safe_softmax, lambda: keep(BATCH, 1, QUERIES, KEYS)),
    "in_float32": (in_float32, lambda: floats(HEADS, QUERIES, KEYS)),
    "backward": (attention_backward, lambda: floats(BATCH, 1, 1, KEYS)),
    "norm": (layer_norm_of_positions, lambda: floats(QUERIES, KEYS)),
}


class BroadcastTestCase(TestCase):
    """Rows that no split of them helps."""

    @property
    def inner_by_itself(self):
        """As 2.15 has it."""
        utils = torch._inductor.tiling_utils
        return hasattr(utils, "analyze_memory_coalescing_for_nodes")

    def compiled(self, f, *args, **options):
        hint = ReductionHint.DEFAULT, 1  # of as many rows as no split of them helps
        with mock.patch("torch._inductor.ir.Reduction.num_splits", return_value=hint):
            return self.split(f, *args, **options)

    def split(self, f, *args, **options):
        """Where lowering splits them, if an option says so."""
        torch._dynamo.reset()
        with inductor_config.patch({**LONG, **options}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        code = "\n".join(code)
        return actual, code, re.findall(r"@triton_heuristics\.(\w+)\(", code)


@on_cuda
@instantiate_parametrized_tests
class BroadcastTest(BroadcastTestCase):
    """Rows that are inner by what coalesces, as some of their inputs are broadcast."""

    def check(self, f, scores, others):
        actual, code, found = self.compiled(f, scores, *others)
        self.assertEqual(found, [PERSISTENT])
        eager = f(scores, *others)
        wide = [x.double() if x.is_floating_point() else x for x in (scores, *others)]
        # `.float()` would round
        expect = f(*wide) if f is not in_float32 else parameter_bias(*wide)
        self.assertEqual((actual.shape, actual.dtype), (eager.shape, eager.dtype))
        error, eager_error = ((x.double() - expect).norm() for x in (actual, eager))
        ulp = torch.finfo(actual.dtype).eps * expect.norm()
        self.assertLessEqual(error, max(2 * eager_error, 2 * ulp))
        return code

    @parametrize("name", tuple(BROADCAST))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_softmax(self, name, dtype):
        f, others = BROADCAST[name]
        self.check(f, torch.randn(SCORES, device=GPU_TYPE).to(dtype), others())

    def test_dropout(self):
        def f(scores, keep):
            return torch.nn.functional.dropout(masked_fill(scores, keep), 0.5)

        scores, (kept,) = torch.randn(SCORES, device=GPU_TYPE), keep(BATCH, 1, 1, KEYS)
        actual, _, found = self.compiled(f, scores, kept)
        self.assertEqual(found, [PERSISTENT])
        expect = 2 * masked_fill(scores.double(), kept)
        dropped = actual == 0
        share = dropped[expect > 0].float().mean().item()
        self.assertTrue(0.4 < share < 0.6, share)
        self.assertEqual(actual, expect.float().masked_fill(dropped, 0))

    def test_long_rows(self):
        scores = torch.randn(BATCH, HEADS, 2, 2048, device=GPU_TYPE)
        code = self.check(masked_fill, scores, keep(BATCH, 1, 1, 2048))
        self.assertIn("'num_warps': 4", code)

    def test_as_released(self):
        # rows that no release holds at once
        keys = 4 * KEYS
        scores = torch.randn(BATCH, HEADS, QUERIES, keys, device=GPU_TYPE)
        _, _, found = self.compiled(masked_fill, scores, *keep(BATCH, 1, 1, keys), **STOCK)
        self.assertEqual(found, [REDUCTION])

    def test_one_loop(self):
        def f(scores, bias):
            return (scores + bias).amax(-1)

        args = torch.randn(SCORES, device=GPU_TYPE), *floats(BATCH, 1, 1, KEYS)
        _, _, found = self.compiled(f, *args)
        # 2.15 sees by itself that the rows are inner, and they are short
        self.assertEqual(found, [PERSISTENT if self.inner_by_itself else REDUCTION])
        keys = 4 * KEYS
        scores = torch.randn(BATCH, HEADS, QUERIES, keys, device=GPU_TYPE)
        _, _, found = self.compiled(f, scores, *floats(BATCH, 1, 1, keys))
        self.assertEqual(found, [REDUCTION])

    def test_warps_of_many_rows(self):
        """One warp a row where two rows would take too many registers of it."""
        scores = torch.randn(4, 8, 32, 256, device=GPU_TYPE)
        code = self.check(masked_fill, scores, keep(4, 1, 1, 256))
        self.assertIn("'num_warps': 1", code)

    def test_rows_that_are_read_across(self):
        """A row a program would load a sector for each of its columns."""

        def f(x, crossing):
            y = x + crossing.transpose(1, 2)
            norm = torch.nn.functional.layer_norm(y.float(), (640,))
            return norm.type_as(crossing), y

        x = torch.randn(8, 36, 640, device=GPU_TYPE)
        crossing = torch.randn(8, 640, 36, device=GPU_TYPE).bfloat16()
        (actual, _), _, found = self.compiled(f, x, crossing)
        self.assertEqual(found, [REDUCTION])
        expect, _ = f(x.double(), crossing.double())
        self.assertEqual(actual.double(), expect.double(), atol=0.02, rtol=0.01)

    def test_parts_of_rows_that_are_read_across(self):
        """What images are cut into, behind a token of their class, as vision transformers have it."""

        def f(token, images, bias):
            patches = (images + bias[:, None, None]).flatten(2).transpose(1, 2)
            x = torch.cat([token.expand(8, -1, -1), patches.to(token.dtype)], 1) + 1
            return torch.nn.functional.layer_norm(x, (640,)), x

        token, images, bias = *floats(1, 1, 640), *floats(8, 640, 5, 7), *floats(640)
        args = token, images.bfloat16(), bias.bfloat16()
        (actual, _), _, found = self.compiled(f, *args)
        self.assertEqual(found, [PERSISTENT if self.inner_by_itself else REDUCTION])
        expect, _ = f(*(x.double() for x in args))
        self.assertEqual(actual.double(), expect.double(), atol=0.02, rtol=0.01)

    def test_columns_that_are_not_along_memory(self):
        def f(scores, bias):
            return torch.softmax(scores + bias, -2)

        shape = BATCH, HEADS, KEYS, 4 * QUERIES
        args = torch.randn(shape, device=GPU_TYPE), *floats(BATCH, 1, KEYS, 1)
        _, _, found = self.compiled(f, *args)
        self.assertEqual(found, [REDUCTION])


def with_bias(x, bias):
    return torch.softmax(x + bias.transpose(-1, -2), -1)


def with_gathered(x, table, index):
    gathered = torch.gather(table, -1, index.expand_as(x))
    return torch.softmax(x + gathered.transpose(-1, -2), -1)


def with_distances(x, table):
    """As `with_gathered`, by an index that is computed."""
    places = torch.arange(x.shape[-1], device=x.device)
    distances = (places[:, None] - places + 100).clamp(0, 199)
    return with_gathered(x, table, distances)


def scaled_by(x, scale):
    return rms_norm(x * scale.t())


def tokens_first(x, weight, bias):
    y = x.flatten(2).transpose(1, 2)
    return torch.nn.functional.layer_norm(y, weight.shape, weight, bias)


def added_tokens(x, channels_first):
    y = x + channels_first.transpose(1, 2)
    return torch.nn.functional.layer_norm(y, y.shape[-1:]), y


PLAN = "rows", "num_warps", "sharing_programs"


def as_parts(x):
    return x if isinstance(x, tuple) else (x,)


# Rows of 136 columns, of which 8 times 132 and more are, for 132 SMs.
ACROSS = {
    "bias": (with_bias, lambda: floats(8, 136, 136) + floats(136, 136)),
    "bias_by_head": (with_bias, lambda: floats(2, 4, 136, 136) + floats(1, 4, 136, 136)),
    "gathered": (
        with_gathered,
        lambda: (
            *floats(8, 136, 136),
            *floats(8, 136, 200),
            torch.randint(200, (1, 136, 136), device=GPU_TYPE),
        ),
    ),
    "distances": (with_distances, lambda: floats(8, 136, 136) + floats(8, 136, 200)),
    "scaled": (scaled_by, lambda: floats(8, 136, 140) + floats(140, 136)),
    "tokens_first": (tokens_first, lambda: floats(8, 140, 4, 35) + floats(140) + floats(140)),
    "added_tokens": (added_tokens, lambda: floats(8, 140, 136) + floats(8, 136, 140)),
}


@on_cuda
@instantiate_parametrized_tests
class RowsReadAcrossTest(BroadcastTestCase):
    """A program has several rows, whose columns are in the same sectors."""

    def check(self, f, args, program, kinds=(REDUCTION,), **options):
        actual, code, (found,) = self.compiled(f, *args, **options)
        self.assertIn(found, (PERSISTENT,) if program else kinds)
        plan = re.search(r"'rows': (\d), 'num_warps': (\d)", code)
        self.assertEqual(plan and (int(plan[1]), int(plan[2])), program)
        expect = f(*(x.double() if x.is_floating_point() else x for x in args))
        for one, right in zip(as_parts(actual), as_parts(expect), strict=True):
            tolerance = 0.02 if one.dtype == torch.bfloat16 else 2e-5
            self.assertEqual(one.double(), right, atol=tolerance, rtol=tolerance)

    @parametrize("name", tuple(ACROSS))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_forms(self, name, dtype):
        f, args = ACROSS[name]
        args = [x.to(dtype) if x.is_floating_point() else x for x in args()]
        self.check(f, args, (8, 2))

    @parametrize("words, program", ((1, (8, 4)), (3, (8, 4)), (4, (8, 8)), (7, (4, 4)), (8, None)))
    def test_registers(self, words, program):
        """A thread has those of 64 columns, or of 32, and an SM two programs of four rows or more."""
        args = floats(2, 540, 600) + floats(600, 540)
        with mock.patch.object(rows_read_across, "words_of_column", return_value=words):
            self.check(with_bias, args, program)

    def test_words(self):
        words = []

        def counted(features):
            words.append(count(features))
            return words[-1]

        count = rows_read_across.words_of_column
        with mock.patch.object(rows_read_across, "words_of_column", counted):
            for name in ("bias", "gathered", "tokens_first"):
                f, args = ACROSS[name]
                self.compiled(f, *args())
                # an index of int64 is two, and the mean is subtracted from what is kept
                expected = {"bias": 2, "gathered": 4, "tokens_first": 2}[name]
                self.assertEqual({*words}, {expected})
                words.clear()

    def test_what_lies_across(self):
        i, j, k = sympy.symbols("i j k", integer=True, nonnegative=True)
        position, sizes = sympy.Symbol("tmp0", integer=True), (8, 6, 7)
        elements = SimpleNamespace(numel=sympy.Integer(48), reduction_numel=sympy.Integer(7))
        distance = sympy.Min(9, sympy.Max(0, j - k + 5))
        across = {
            j + 6 * k: sizes,
            42 * i + j + 6 * k: sizes,
            5 - j + 6 * k: sizes,
            distance + 10 * k: sizes,
            position + 10 * k: sizes,
            i + 8 * FloorDiv(j, 6) + 8 * k: sizes,
        }
        along = {
            k + 7 * j: sizes,
            6 - k + 7 * j: sizes,
            2 * k + 14 * j: sizes,
            distance + 10 * j: sizes,
            position + 10 * j: (8, 6),
            FloorDiv(j, 6) + k: sizes,
            # a bias by head: rows beside one another have no line in common
            i + 8 * k + 64 * j: sizes,
            i + 8 * j: (8, 42),
            i + 9 * j: (8, 6),  # of several columns each
            i: (48,),
        }
        # of columns that are of two dimensions, which a variable of rows may have as well
        of_two = SimpleNamespace(numel=sympy.Integer(64), reduction_numel=sympy.Integer(42))
        groups = 384 * i + j + 64 * k  # as of channels last
        graph = SimpleNamespace(sizevars=SizeVarAllocator(), get_dtype=lambda _: torch.float32)
        with V.set_graph_handler(graph):

            def check(features, index, ranges, expected):
                dep = MemoryDep("buf", index, (i, j, k)[: len(ranges)], ranges)
                self.assertEqual(lies_across(features, dep), expected, index)

            for index, ranges in across.items():
                check(elements, index, ranges, True)
            for index, ranges in along.items():
                check(elements, index, ranges, False)
            check(of_two, i + 64 * k + 448 * j, (64, 6, 7), True)
            check(of_two, i + 64 * k, (64, 6, 7), True)
            check(of_two, groups, (2, 6 * 32, 7), True)
            check(of_two, groups, (2, 8 * 21, 16), False)
            of_eight = SimpleNamespace(numel=sympy.Integer(64), reduction_numel=sympy.Integer(56))
            check(of_eight, groups, (2, 8 * 32, 7), False)

    def test_few_rows(self):
        """Some SMs would have none. A program of one is a loop or not, as upstream has it."""
        args = floats(7, 136, 136) + floats(136, 136)
        self.check(with_bias, args, None, (REDUCTION, PERSISTENT))

    def test_dynamic(self):
        """Rows by their hint; of how many columns a program has registers, is not known."""
        x, bias = floats(8, 136, 144) + floats(144, 136)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(with_bias, (x, bias), (8, 2))
        y, bias = floats(8, 136, 144) + floats(144, 136)
        torch._dynamo.mark_dynamic(y, 2)
        torch._dynamo.mark_dynamic(bias, 0)
        self.check(with_bias, (y, bias), None)

    def test_scattered(self):
        """Atomic additions to a sector would wait for one another."""

        def f(x, index):
            y = torch.softmax(x, -1)
            sums = x.new_zeros(8, 136, 200)
            return y, sums.scatter_add(-1, index.expand_as(x), y.transpose(-1, -2))

        x = floats(8, 136, 136)[0]
        index = torch.randint(200, (1, 136, 136), device=GPU_TYPE)
        (_, sums), code, _ = self.compiled(f, x, index)
        self.assertNotIn("'rows'", code)
        self.assertEqual(sums.double(), f(x.double(), index)[1], atol=2e-5, rtol=2e-5)

    def test_along_rows(self):
        """A gather along rows, a row that others share, and what moves by more than an element."""
        x, table, index = ACROSS["gathered"][1]()

        def gathered(x, table, index):
            return torch.softmax(x + torch.gather(table, -1, index.expand_as(x)), -1)

        def shared(x, row):
            return torch.softmax(x + row[0], -1)

        def every_other(x, y):
            return torch.softmax(x + y[..., ::2], -1)

        for f, *args in (
            (gathered, x, table, index),
            (shared, x, table),
            (every_other, x, *floats(8, 136, 272)),
        ):
            _, code, _ = self.compiled(f, *args) if f is not shared else self.compiled(f, x, x)
            self.assertNotIn("'rows'", code)


def crossed(x, y):
    """Two reads and a write across, and one along."""
    z = x + y
    columns = (z.shape[1],)
    return z, torch.nn.functional.layer_norm(z.transpose(1, 2).float(), columns).type_as(z)


def to_last(x, y):
    z = torch.softmax((x + y).transpose(1, 2).float(), -1)
    return z.type_as(x)


def moments(x, y):
    z = x + y.transpose(1, 2)
    return z, *torch.var_mean(z.transpose(1, 2).float(), -1)


def unit_channels(x):
    return torch.nn.functional.normalize(x, dim=1)


def one_tensor(x, _):
    return torch.nn.functional.layer_norm(x.transpose(1, 2), x.shape[1:2])


def excited(x, weight):
    gate = torch.sigmoid(x.mean(2) @ weight)
    return x * gate[..., None]


def added_along(x, y):
    return unit_channels(x + y.transpose(1, 2))


def by_feature(x):
    return torch.nn.functional.batch_norm(x, None, None, training=True)


def first(x):
    return torch.softmax(x.float(), 0).type_as(x)


@on_cuda
@instantiate_parametrized_tests
class ManyRowsReadAcrossTest(BroadcastTestCase):
    """Of tensors that lie across a program has the rows of a sector of half types."""

    def check(self, f, args, compiled):
        actual, code, found = compiled(f, *args)
        expect = f(*(x.double() for x in args))
        for one, right in zip(as_parts(actual), as_parts(expect), strict=True):
            tolerance = 0.03 if args[0].dtype == torch.bfloat16 else 2e-5
            self.assertEqual(one.double(), right.double(), atol=tolerance, rtol=tolerance)
        plan = (re.search(rf"'{key}': (\d+)", code) for key in PLAN)
        return tuple(int(each[1]) if each else 0 for each in plan), found

    def plan(self, f, columns, rows, dtype, batch=8):
        """Rows, warps and sharing programs where the GPU has four SMs."""
        x = torch.randn(batch, columns, rows, device=GPU_TYPE).to(dtype)
        y = torch.randn(batch, *((rows, columns) if f is moments else x.shape[1:]), device=GPU_TYPE)
        of = DeviceModel.of
        four = mock.patch.object(
            DeviceModel, "of", staticmethod(lambda d: dataclasses.replace(of(d), sms=4))
        )
        with four:
            plan, (found,) = self.check(f, (x, y.to(dtype)), self.anew)
        self.assertEqual(found, PERSISTENT if plan[0] else REDUCTION)
        return plan

    def anew(self, f, *args):
        return self.compiled(f, *args, force_disable_caches=True)

    @parametrize("f", (crossed, to_last, moments))
    def test_rows_and_warps(self, f):
        for columns, rows, dtype, expected in (
            (300, 36, torch.bfloat16, (16, 4, 0)),
            (300, 37, torch.bfloat16, (16, 4, 0)),
            (300, 37, torch.float32, (16, 4, 0)),
            (600, 36, torch.bfloat16, (16, 8, 2)),
            (600, 38, torch.bfloat16, (16, 8, 0)),
            # each with an address of its own, or of which a sector has eight
            (600, 37, torch.bfloat16, (8, 4, 0)),
            (600, 36, torch.float32, (8, 4, 0)),
        ):
            found = self.plan(f, columns, rows, dtype)
            self.assertEqual(found, expected, (columns, rows, dtype))

    def test_registers(self):
        """What is loaded, and is live at a reduction: of more than fits there are eight rows."""
        for f, columns, words, tiles, expected in (
            (one_tensor, 600, 3, 1, (16, 8, 2)),
            (one_tensor, 600, 3, 1.5, (16, 8, 2)),
            (one_tensor, 600, 3, 2, (8, 4, 0)),
            (one_tensor, 600, 2, 2.5, (16, 8, 2)),
            (one_tensor, 600, 4, 1, (8, 8, 0)),
            (to_last, 300, 4, 1, (16, 8, 0)),
            (to_last, 300, 3, 2, (16, 4, 0)),
            (to_last, 300, 3, 3, (16, 8, 0)),
            # where most lies across, they would be half of a sector
            (crossed, 600, 3, 1, (16, 8, 2)),
            (crossed, 600, 3, 2, (0, 0, 0)),
        ):
            live = SimpleNamespace(of=lambda _, tiles=tiles: Again(tiles=tiles))
            with (
                mock.patch.object(rows_read_across, "words_of_column", return_value=words),
                mock.patch.object(rows_read_across, "Again", live),
            ):
                found = self.plan(f, columns, 36, torch.bfloat16)
            self.assertEqual(found, expected, (f, columns, words, tiles))

    def test_looped_as_fast(self):
        """Where columns are in the same sets of the cache, and words that begin anywhere."""
        of = DeviceModel.of
        near = staticmethod(lambda d: dataclasses.replace(of(d), set_stride_bytes=128))
        with mock.patch.object(DeviceModel, "of", near):
            self.assertEqual(self.plan(crossed, 600, 64, torch.bfloat16, 5), (0, 0, 0))
            self.assertEqual(self.plan(crossed, 600, 32, torch.bfloat16, 10), (16, 8, 2))
            # a loop would compute exponentials again, and has one tensor across
            self.assertEqual(self.plan(to_last, 600, 64, torch.bfloat16, 5), (16, 8, 2))
            for f in (moments, one_tensor):
                self.assertEqual(self.plan(f, 600, 64, torch.bfloat16, 5), (16, 8, 2))
            self.assertEqual(self.plan(crossed, 300, 64, torch.bfloat16, 5), (16, 4, 0))
            # so few rows would be split
            self.assertEqual(self.plan(crossed, 600, 64, torch.bfloat16, 3), (16, 8, 2))
        self.assertEqual(self.plan(crossed, 600, 37, torch.float32), (0, 0, 0))
        self.assertEqual(self.plan(to_last, 600, 37, torch.float32), (8, 4, 0))

    def few(self, f, *args, **knobs):
        return self.split(f, *args, **{"split_reductions": True, **knobs})

    def rows(self, share=1.2):
        """As many as lowering would split, 16 of an SM and more."""
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        return int(16 * share * device.multi_processor_count)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_few_rows(self, dtype):
        """What is made of rows that are read across is one kernel with their reductions."""
        n = self.rows()
        for f, *shapes in (
            (crossed, (1, 200, n), (1, 200, n)),
            (to_last, (2, 200, n // 2 + 9), (2, 200, n // 2 + 9)),
            (unit_channels, (1, 200, n)),
            (by_feature, (200, n)),
            (first, (200, n)),
        ):
            args = [torch.randn(shape, device=GPU_TYPE).to(dtype) for shape in shapes]
            (rows, warps, _), found = self.check(f, args, self.few)
            self.assertEqual(((rows, warps), found), ((16, 4), [PERSISTENT]), f)
        # lowering splits none of so few columns
        _, found = self.check(by_feature, floats(128, n), self.few)
        self.assertEqual(found, [REDUCTION])

    def test_few_rows_that_are_split(self):
        n = self.rows()
        for f, *shape in (
            (lambda x: x.sum(0), 200, n),
            (first, 200, self.rows(0.9)),
            # one at a time, with an address each
            (first, 520, n // 2 * 2 + 1),
        ):
            _, found = self.check(f, floats(*shape), self.few)
            self.assertGreater(len(found), 1, shape)
        # what it is used for is of another kernel, a squeeze and its excitation
        x, weight = floats(n // 200 + 1, 200, 200) + floats(200, 200)
        _, found = self.check(excited, (x.transpose(1, 2), weight), self.few)
        self.assertGreater(len(found), 2)
        # programs of columns that are not known
        x = floats(200, n)[0]
        torch._dynamo.mark_dynamic(x, 0)
        _, found = self.check(first, (x,), self.few)
        self.assertGreater(len(found), 1)
        for knob in (
            "triton.coalesce_tiling_analysis",
            "triton.persistent_reductions",
            "triton.prefer_nd_tiling",
        ):
            off = {knob: "prefer" in knob}
            _, _, found = self.few(first, floats(200, n)[0], **off)
            self.assertGreater(len(found), 1, knob)
        # of which one lies along
        _, found = self.check(added_along, floats(1, 200, n) + floats(1, n, 200), self.few)
        self.assertGreater(len(found), 1)
        plan, found = self.check(first, floats(520, n // 2 * 2), self.few)
        self.assertEqual((plan, found), ((8, 4, 0), [PERSISTENT]))

    def test_of_no_tensor(self):
        """What is computed, or is broadcast along the rows, has no words."""
        n = self.rows()
        row, column = floats(200, 1) + floats(1, n)
        for f, args in (
            (lambda x, y: torch.softmax(x * y, 0), (row, column)),
            (lambda x, y: unit_channels((x + y)[None]), (row, column)),
            (lambda x: unit_channels(x.expand(1, 200, n)), (column[None],)),
            (lambda x: x * unit_channels(torch.ones_like(x)[None])[0], (row + column,)),
        ):
            self.check(f, args, self.few)

    def test_sorts_and_scans(self):
        """They are as they were."""
        x = floats(200, self.rows())[0]
        for f in (lambda x: x.sort(0)[0] * 2, lambda x: x - x.cumsum(0)):
            _, code, _ = self.few(f, x)
            self.assertNotIn("'rows'", code)

    def test_which_are_split(self):
        def whole(rows, columns, sms=132, **knobs):
            device = DeviceProperties("cuda", 0, sms, 90)
            node = SimpleNamespace(target=torch.ops.aten.sum.dim_IntList)
            used = {"is_used_in_its_kernel": mock.DEFAULT, "lies_one_way": mock.DEFAULT}
            with (
                V.set_graph_handler(SimpleNamespace(current_node=node)),
                inductor_config.patch({**LONG, **knobs}),
                mock.patch.multiple(rows_read_across, **used),
            ):
                return bool(rows_read_across.leaves_rows_whole_across(device, rows, columns))

        self.assertTrue(whole(2112, 1024))
        self.assertFalse(whole(2111, 1024))
        self.assertTrue(whole(2111, 1024, sms=108))
        self.assertFalse(whole(2112, 1025))
        self.assertFalse(whole(2112, 1024, **{"triton.persistent_reduction_max_numel": 1024}))


class PersistentPolicyTest(TestCase):
    def why(self, rnumel=4096, streams=1, loops=2, online_softmax=False, most=8192):
        return why_looped(Loops(rnumel, streams, loops, online_softmax), most)

    def test_tiles_that_fit(self):
        self.assertIsNone(self.why(rnumel=2048, streams=8))
        self.assertIsNone(self.why(rnumel=4096, streams=4))
        self.assertIn("registers", self.why(rnumel=4096, streams=5))
        self.assertIn("registers", self.why(rnumel=8192, streams=2))

    def test_warps(self):
        """As few as hold the row, with 32 columns a thread."""
        self.assertTrue(hasattr(persistent_reduction, "fewest_warps_that_hold"))

        def warps(rnumel, streams=1):
            return persistent_reduction.fewest_warps_that_hold(Loops(rnumel, streams, 2, False))

        self.assertEqual([warps(n) for n in (1536, 2048, 4096, 8192)], [2, 2, 4, 8])
        # of a padded row, a thread has fewer
        for again, expect in ((Again(), 8), (Again(welford=True), 4)):
            row = Loops(2560, 3, 2, False, again=again)
            self.assertEqual(persistent_reduction.fewest_warps_that_hold(row), expect)
        self.assertEqual([warps(2048, n) for n in (2, 5)], [4, 8])
        self.assertIsNone(warps(8192, 2))
        self.assertIsNone(warps(16384))
        self.assertEqual([warps(512, n) for n in (1, 4, 5, 20)], [1, 1, 2, 4])

    def test_one_loop(self):
        self.assertIn("one loop", self.why(loops=1))
        self.assertIsNone(self.why(loops=1, online_softmax=True))

    def test_padding(self):
        self.assertIsNone(self.why(rnumel=3072))
        self.assertIn("padded to 4096", self.why(rnumel=3071))

    def test_plain(self):
        plain = {field.name for field in dataclasses.fields(Loops)}
        self.assertIn("plain", plain)

        def why(rnumel, streams, **row):
            row = Loops(rnumel, streams, 2, False, plain=True, **row)
            return why_looped(row, 8192)

        self.assertIn("cached", why(2048, 2))
        self.assertIsNone(why(2048, 1))
        self.assertIsNone(why(3072, 2))
        self.assertIn("cached", why(2048, 1, narrows=True))
        self.assertIsNone(why(3072, 1, narrows=True))

    def test_short(self):
        """Neither padding nor a block that is a row keeps rows of 1024 looped."""
        self.assertIsNone(self.why(rnumel=577))
        row = Loops(512, 2, 2, False, plain=True)
        self.assertIsNone(why_looped(row, 8192))
        row = Loops(512, 1, 2, False, narrows=True)
        self.assertIn("cached", why_looped(row, 8192))
        self.assertIsNone(why_looped(dataclasses.replace(row, rnumel=500), 8192))
        self.assertIn("one loop", self.why(rnumel=512, loops=1))
        self.assertIn("registers", self.why(rnumel=1024, streams=30))

    def test_most(self):
        self.assertIn("more than 2048", self.why(most=2048))

    def test_wide(self):
        """By what is live, where loops do more than arithmetic and loads of one tensor
        again: 32 columns a thread."""

        def warps(rnumel, online_softmax=False, **again):
            row = Loops(rnumel, 3, 2, online_softmax, again=Again(**again))
            looped = why_looped(row, 16384)
            self.assertEqual(looped is None, persistent_reduction.fewest_warps_that_hold(row) is not None)
            return persistent_reduction.fewest_warps_that_hold(row)

        self.assertIsNone(warps(8192))
        self.assertIsNone(warps(8192, loads=1))
        for again in ({"functions": True}, {"welford": True}, {"loads": 2}):
            self.assertEqual(warps(8192, **again), 8)
            self.assertEqual(warps(8192, live=48, **again), 8)
            self.assertIsNone(warps(8192, live=49, **again))
            self.assertEqual(warps(5120, **again), 8)
        for again in ({"functions": True}, {"online_softmax": True}):
            self.assertEqual(warps(16384, **again), 16)
            self.assertIsNone(warps(16382, **again))
        self.assertIsNone(warps(16384, welford=True, loads=2))
        # eight have fewer columns a thread
        self.assertIsNone(why_looped(Loops(4096, 3, 2, False), 16384))
        self.assertIsNotNone(
            why_looped(Loops(4096, 5, 2, False, again=Again(functions=True)), 16384)
        )

    def test_unaligned_rows_that_are_not_masked(self):
        """With functions of elements, of one tensor or in a norm."""
        softmax = {"streams": 1, "again": Again(loads=1), "functions": True}
        norm = {"streams": 3, "shared": 1, "sums": True}
        for row, gains in (
            ({}, True),
            (norm, True),
            ({"vector": 4}, True),
            ({**norm, "vector": 2}, False),
            ({**norm, "shared_is_reduced": True}, False),
            # as of a mask beside what is scaled
            ({"streams": 2}, False),
            ({"functions": False}, False),
            ({"branches": True}, False),
            # a thread loads whole vectors
            ({"unaligned_bytes": 0}, False),
        ):
            row = {"unaligned_bytes": 2, **softmax, **row}
            row = Loops(2555, row.pop("streams"), 2, False, **row)
            self.assertEqual(row.gains_unmasked, gains)

    def test_pairs_of_rows(self):
        """Of rows that compute functions, short of the runtime's."""

        def pair(rnumel, rows=4096, **row):
            row = {"unaligned_bytes": 2, "functions": True, **row}
            row = Loops(rnumel, 1, 2, False, **row)
            with V.set_graph_handler(mock.Mock(sizevars=SizeVarAllocator())):
                return short_rows.pair_of(row, sympy.Integer(rows))

        two = RowProgram(2, 1)
        self.assertEqual([pair(n) for n in (191, 197, 255, 256, 901)], [None, two, two, None, None])
        self.assertEqual(pair(250, vector=2), two)
        self.assertIsNone(pair(197, rows=1000))
        self.assertIsNone(pair(197, functions=False))
        for of_words in ({"unaligned_bytes": 4}, {"unaligned_bytes": 0, "vectors": True}):
            self.assertEqual(pair(244, **of_words), two)
            self.assertIsNone(pair(244, functions=False, **of_words))

    def test_registers_of_what_rows_share(self):
        """It is loaded late where a thread has none for it beside its columns of the row."""

        def late(rnumel, num_warps, column=3.0, **row):
            row = {"unaligned_bytes": 2, "shared": 2, "sums": True, **row}
            norm = Loops(rnumel, 3, 3, False, again=Again(column=column, loads=1), **row)
            return norm.loads_late(num_warps)

        self.assertEqual([late(n, 8) for n in (6399, 6401)], [False, True])
        self.assertEqual([late(n, 1) for n in (799, 801)], [False, True])
        self.assertEqual([late(n, 8, column=2.0) for n in (8191, 8701)], [False, True])
        for row in (
            {"vector": 2},
            {"shared": 0},
            {"shared_is_reduced": True},
            {"functions": True},
            {"unaligned_bytes": 4},
        ):
            self.assertFalse(late(8191, 8, **row))
        # words of long rows whatever their registers
        of_words = {"unaligned_bytes": 4, "stores_last": True}
        self.assertEqual([late(n, 16, **of_words) for n in (8191, 8193)], [False, True])

    def test_registers_of_an_sm(self):
        """Of half the registers half as many columns are held, and what is live is less."""

        def row(rnumel, streams, **again):
            wide = Loops(rnumel, streams, 2, False, again=Again(**again))
            return dataclasses.replace(wide, registers_per_sm=32768)

        self.assertIsNone(why_looped(row(2048, 1), 16384))
        self.assertIn("registers", why_looped(row(4096, 4), 16384))
        self.assertIsNone(why_looped(row(8192, 3, functions=True, live=16), 16384))
        self.assertIn(
            "registers", why_looped(row(8192, 3, functions=True, live=17), 16384)
        )
        self.assertIn("padded", why_looped(row(5000, 1, loads=2, live=7), 16384))

    def test_padding_that_pays(self):
        def why(rnumel, online_softmax=False, **again):
            row = Loops(rnumel, 1, 2, online_softmax, again=Again(**again))
            return why_looped(row, 16384)

        self.assertIn("padded", why(2500))
        self.assertIn("padded", why(2500, loads=2))
        self.assertIsNone(why(5000, loads=2, live=26))
        self.assertIn("padded", why(5000, loads=2, live=27))
        self.assertIsNone(why(5000, functions=True, live=27))
        self.assertIsNone(why(2500, welford=True))
        self.assertIsNone(why(2500, functions=True))
        self.assertIsNone(why(2500, online_softmax=True))
        self.assertIsNone(why(5000, online_softmax=True))
        self.assertIn("padded", why(9000, online_softmax=True))
        self.assertIn("padded", why(9000, functions=True, welford=True, loads=3))

    def test_unaligned(self):
        """What is live at a reduction, and registers for the loads, of the row alone."""

        def warps(
            rnumel, vector=1, softmax=False, plain=False, branches=False, streams=1, **again
        ):
            again = Again(**{"column": 1, "tiles": 1, "loads": 1, **again})
            row = Loops(rnumel, streams, 2, softmax, plain, again=again, branches=branches)
            row = dataclasses.replace(row, vector=vector, unaligned_bytes=2 * (vector < 8))
            looped = why_looped(row, 16384)
            return None if looped else persistent_reduction.fewest_warps_that_hold(row)

        self.assertEqual([warps(n) for n in (1237, 3001, 5003, 8191)], [2, 4, 8, 8])
        self.assertEqual([warps(n, welford=True) for n in (1237, 3001, 5003)], [2, 2, 4])
        affine = {"welford": True, "streams": 3}
        self.assertEqual([warps(n, **affine) for n in (1237, 1600, 1601)], [1, 1, 2])
        self.assertEqual([warps(n, tiles=3) for n in (1237, 3001, 4999)], [2, 4, 8])
        self.assertEqual(warps(3001, loads=2, welford=True), 4)
        # a loop that loads again is better, but where it computes again as well
        self.assertIsNone(warps(12271))
        self.assertIsNone(warps(12271, welford=True))
        self.assertEqual(warps(10964, 4, welford=True), 8)
        self.assertEqual(warps(12271, softmax=True), 8)
        self.assertEqual(warps(10964, 4, softmax=True), 16)
        # 128 registers: 50 columns and their loads, or 66 and half as many
        self.assertEqual(warps(12799, softmax=True), 8)
        self.assertIsNone(warps(12801, softmax=True))
        self.assertEqual(warps(16382, 2, softmax=True), 8)
        # a second tensor takes what is live of it, and its loads follow the first one's
        self.assertEqual(warps(12799, softmax=True, loads=2), 8)
        self.assertIsNone(warps(12799, softmax=True, loads=2, column=2))
        # or loads two again, and has the SM for itself
        self.assertEqual(warps(16383, plain=True, loads=2, column=2), 8)
        self.assertIsNone(warps(16383, plain=True, loads=2, column=3))
        self.assertIsNone(warps(16383, plain=True, branches=True, loads=2, column=2))
        self.assertIsNone(warps(16383, loads=2, column=2))
        # with whole vectors
        self.assertIsNone(warps(5000, 8))

    def test_unaligned_words(self):
        """As many columns as of an aligned row, but for what one warp or eight hold."""

        def warps(rnumel, softmax=False, plain=False, streams=1, late=False, **again):
            again = Again(**{"column": 1, "tiles": 1, "loads": 1, **again})
            row = Loops(rnumel, streams, 2, softmax, plain, again=again, unaligned_bytes=4)
            if late:
                row = dataclasses.replace(row, shared=1, sums=True, stores_last=True)
            looped = why_looped(row, 16384)
            return None if looped else persistent_reduction.fewest_warps_that_hold(row)

        self.assertEqual([warps(n) for n in (1237, 3001, 5003, 8191)], [2, 4, 8, 8])
        self.assertEqual([warps(n, streams=2) for n in (1237, 1955, 3226)], [2, 4, 8])
        affine = {"welford": True, "streams": 3}
        self.assertEqual([warps(n, **affine) for n in (1237, 1311, 1313)], [1, 1, 4])
        self.assertEqual([warps(n, True) for n in (10495, 10497)], [8, None])
        self.assertIsNone(warps(9001))
        self.assertIsNone(warps(9001, welford=True))
        self.assertEqual(warps(9001, plain=True, loads=2, column=2), 8)
        # or what rows share loaded late, and then the SM for itself
        self.assertEqual([warps(n, late=True) for n in (8193, 10497, 16383)], [8, 16, 16])
        self.assertEqual(warps(8191, late=True, **affine), 8)
        two = {"late": True, "loads": 2, "column": 2, "tiles": 2}
        self.assertEqual([warps(n, **two) for n in (9001, 16383)], [16, 16])
        self.assertIsNone(warps(16383, **{**two, "loads": 3, "column": 3}))

    def test_programs_of_wide_rows(self):
        def program(rnumel, vector=1, softmax=False, sums=True, last=False, size=4, **again):
            """Of unaligned rows, or of whole vectors."""
            again = Again(**{"column": 2, "tiles": 1, "loads": 2, **again})
            kind = {"vectors": True} if vector == 4 else {"unaligned_bytes": size}
            row = Loops(rnumel, 3, 2, softmax, again=again, vector=vector, **kind)
            row = dataclasses.replace(row, sums=sums, stores_last=last, shared=1)
            return wide_rows.wide_program(row)

        two = RowProgram(1, 8, unmasked=True, sharing_programs=2)
        one = RowProgram(1, 32, unmasked=True, sharing_programs=1)
        # 128 registers: two for each of 56 columns
        self.assertEqual([program(n) for n in (8191, 8193, 14335)], [None, two, two])
        self.assertEqual(program(14337), one)
        self.assertIsNone(program(14337, last=True))
        # of half types where loops do more than arithmetic again
        self.assertIsNone(program(9001, size=2))
        self.assertEqual(program(9001, size=2, functions=True), two)
        self.assertEqual(program(9001, size=2, sums=False), two)
        self.assertIsNone(program(9001, size=2, functions=True, loads=0))
        # of words where loops load or compute something again; not of a scan, which counts nothing
        self.assertIsNone(program(9001, loads=0))
        self.assertIsNone(program(9001, column=0))
        mean = {"size": 2, "welford": True, "column": 3}
        late = two._replace(loads_late=True)
        self.assertEqual(program(14335, last=True, **mean), late)
        self.assertIsNone(program(14335, **mean))
        softmax = {"softmax": True, "sums": False, "column": 1, "last": True}
        self.assertEqual([program(n, **softmax) for n in (14335, 14337)], [two, None])
        self.assertEqual(program(16383, loads=1, **softmax), two)
        self.assertEqual(program(16382, vector=2, **softmax), two)
        self.assertIsNone(program(9002, vector=2, **{**softmax, "loads": 1}))
        self.assertIsNone(program(8193, welford=True))
        # a weight that is loaded after the sum
        self.assertEqual(program(16383, loads=1, last=True), late)
        self.assertIsNone(program(16383, loads=1, tiles=2, last=True))
        # whole vectors
        aligned = {"vector": 4, "last": True}
        self.assertEqual([program(n, **aligned) for n in (8192, 8196, 16384)], [None, one, one])
        self.assertEqual(program(16384, column=3, **aligned), one)
        self.assertIsNone(program(16384, column=4, **aligned))
        self.assertIsNone(program(16384, loads=1, **aligned))
        self.assertIsNone(program(16384, vector=4, **softmax))
        # a thread has whole vectors of columns: 12 of 9, or 16 of 13
        wide = {**aligned, "column": 3.5}
        self.assertEqual([program(n, **wide) for n in (9216, 12288, 12292)], [one, one, None])
        means = {"vector": 4, "welford": True, "column": 3}
        sixteen = RowProgram(1, 16)
        found = [program(n, **means) for n in (8188, 8192, 9216, 12284, 12288)]
        sixteen_late = sixteen._replace(loads_late=True)
        self.assertEqual(found, [None, sixteen_late, sixteen, sixteen, sixteen_late])
        shared = RowProgram(1, 16, True, True, 2)
        lengths = 8192, 9212, 9216, 16384
        found = [program(n, loads=1, last=True, **means) for n in lengths]
        self.assertEqual(found, [None, None, shared, shared])
        self.assertIsNone(program(16384, loads=1, **means))

    def test_crowded_threads(self):
        """Of eight warps, of a norm that stores a sum and would take more registers than are."""

        def is_crowded(rnumel, num_warps=8, column=3.0, **row):
            again = Again(loads=2, column=column, tiles=1, welford=True)
            row = {"unaligned_bytes": 4, "sums": True, **row}
            norm = Loops(rnumel, 4, 2, False, again=again, **row)
            return norm.is_crowded(num_warps)

        # of a column three live values, two loads and their addresses, or one for some columns
        widths = 5120, 5121, 8191, 8193
        self.assertEqual([*map(is_crowded, widths)], [False, True, True, False])
        self.assertFalse(is_crowded(6398, vector=2))
        self.assertTrue(is_crowded(6402, vector=2))
        aligned = {"unaligned_bytes": 0, "vectors": True, "vector": 4}
        self.assertFalse(is_crowded(7168, **aligned))
        self.assertTrue(is_crowded(7424, **aligned))
        self.assertFalse(is_crowded(6400, column=2.0))
        self.assertTrue(is_crowded(6401, column=2.0))
        self.assertFalse(is_crowded(8191, num_warps=4))
        self.assertFalse(is_crowded(8191, sums=False))
        self.assertFalse(is_crowded(8191, stores_last=True))
        self.assertFalse(is_crowded(8191, unaligned_bytes=2))
        self.assertTrue(is_crowded(4097, registers_per_sm=32768))

    def test_what_loops_do_again(self):
        """By the operations: y = f(x), y * g(sum(y)) computes f twice, and g once."""
        tile, row = Width.TILE, Width.ROWS
        ops = (
            Op("load", (), tile, 32, 16),
            Op("exp", (0,), tile, 32),
            Op("row_reduction", (1,), row, 32),
            Op("log", (2,), row, 32),
            Op("load", (), tile, 32, 16),
            Op("mul", (1, 3), tile, 32),
            Op("add", (5, 4), tile, 32),
            Op("store", (6,), tile, 0, 16),
        )
        first, last = map(set, row_passes(ops))
        self.assertEqual(first, {0, 1, 2})
        self.assertEqual(last, {0, 1, 2, 3, 4, 5, 6, 7})
        without_store = row_passes(ops[:3])
        self.assertEqual([set(each) for each in without_store], [{0, 1, 2}, set()])


# Online softmax


# Loops, however long a persistent kernel's rows may be.
LOOPED = {"triton.persistent_reductions": False, "triton.cooperative_reductions": False}
if hasattr(inductor_config.triton, "scalar_accumulators"):
    LOOPED["triton.scalar_accumulators"] = False  # of 2.15: an accumulator a row


def ordered_rows(order, columns):
    x = torch.randn(3, columns, device=GPU_TYPE) * 8
    if order == "equal":
        return torch.full_like(x, 3)
    if order != "any":
        return x.sort(descending=order == "falling").values
    return x


def rows_with(value, rest, columns, later):
    """
    ``value`` in the first block of a row, in a later one, in the last that is not whole,
    and in all.
    """
    x = torch.randn(4, columns, device=GPU_TYPE)
    if rest == "-inf":
        x = torch.full_like(x, -INF)
    x[0, 7] = x[1, later] = x[2, -1] = value
    x[3] = value
    return x


@on_cuda
@instantiate_parametrized_tests
class OnlineSoftmaxCombineTest(TestCase):
    """An element is combined with what precedes it in its row."""

    def test_one_exponential(self):
        source = inspect.getsource(triton_helpers.online_softmax_combine.fn)
        calls = [
            node
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "exp"
        ]
        self.assertEqual(len(calls), 1)

    def check(self, f, x):
        torch._dynamo.reset()
        with inductor_config.patch(LOOPED):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), x)
        self.assertIn("online_softmax_combine", "\n".join(code))
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, x.dtype))
        tolerance = 4 * torch.finfo(x.dtype).eps
        self.assertEqual(
            actual.double(), expect, atol=tolerance, rtol=tolerance, equal_nan=True
        )

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("order", ("any", "rising", "falling", "equal"))
    def test_order(self, order, dtype):
        x = ordered_rows(order, 5000)
        self.check(lambda x: torch.softmax(x, -1), x.to(dtype))

    @parametrize("value", (INF, -INF, NAN, 3e38, -3e38))
    @parametrize("rest", ("numbers", "-inf"))
    def test_special_values(self, rest, value):
        x = rows_with(value, rest, 5000, later=4100)
        self.check(lambda x: torch.log_softmax(x, -1), x)


# Maxima that columns of a thread share


SHARED = "online_softmax_combine_columns"
SHARE = "triton.online_softmax_share_maxima"
# Loops, however long a persistent kernel's rows may be.
LOOPED_ALONE = {
    "triton.persistent_reductions": False,
    "triton.cooperative_reductions": False,
    "split_reductions": False,
    # which do not know of what is patched here
    "force_disable_caches": True,
}


def softmax(x):
    return torch.softmax(x, -1)


def log_softmax(x):
    return torch.log_softmax(x, -1)


@on_cuda
@instantiate_parametrized_tests
class SharedMaximaTest(TestCase):
    """The columns of a thread share a maximum in a loop over a row."""

    def compile(self, f, *inputs, rows=0, dynamic=False, **options):
        """As if `rows` an SM were few: none, by default."""
        torch._dynamo.reset()
        with (
            inductor_config.patch({**LOOPED_ALONE, **options}),
            mock.patch.object(looped_reduction, "FEW_ROWS", rows),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            result, code = run_and_get_code(compiled, *inputs)
        return result, "\n".join(code)

    def check(self, f, x, expected=True, **options):
        actual, code = self.compile(f, x, **options)
        self.assertEqual(SHARED in code, expected)
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, x.dtype))
        tolerance = 4 * torch.finfo(x.dtype).eps
        # and the reference's: it may add the columns one after another
        tolerance += x.shape[-1] * torch.finfo(expect.dtype).eps
        self.assertEqual(
            actual.double(), expect, atol=tolerance, rtol=tolerance, equal_nan=True
        )
        return code

    def vector(self, code):
        """The adjacent columns of which the kernel says that a thread has them."""
        (call,) = re.findall(rf"{SHARED}\(.*?\n *\)", code, re.DOTALL)
        return int(re.findall(r", (\d+), (?:True|False)\s*\)$", call)[0])

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
    @parametrize("order", ("any", "rising", "falling", "equal"))
    def test_order(self, order, dtype):
        x = ordered_rows(order, 2500)
        self.check(softmax, x.to(dtype))

    @parametrize("columns, vector", ((2504, 8), (2501, 1), (2502, 2), (2500, 4)))
    def test_rows_that_begin_anywhere(self, columns, vector):
        x = torch.randn(3, columns, device=GPU_TYPE, dtype=torch.bfloat16)
        self.assertEqual(self.vector(self.check(softmax, x)), vector)

    @parametrize("dtype, vector", ((torch.float32, 4), (torch.float64, 2)))
    def test_wider_types(self, dtype, vector):
        x = torch.randn(2, 2512, device=GPU_TYPE, dtype=dtype)
        self.assertEqual(self.vector(self.check(softmax, x)), vector)

    @parametrize("value", (INF, -INF, NAN, 3e38, -3e38))
    @parametrize("rest", ("numbers", "-inf"))
    def test_special_values(self, rest, value):
        x = rows_with(value, rest, 2500, later=2100)
        self.check(log_softmax, x)

    @parametrize("block", (4, 16, 64, 1024))
    @parametrize("columns", (1000, 1001))
    def test_other_blocks(self, columns, block):
        """As autotuning tries them, which have fewer columns a thread or a group."""
        configs = triton_heuristics._reduction_configs

        def others(**kwargs):
            (config,) = configs(**kwargs)
            config.kwargs["R0_BLOCK"] = block
            return [config]

        x = torch.randn(2, columns, device=GPU_TYPE, dtype=torch.float16)
        with mock.patch.object(triton_heuristics, "_reduction_configs", others):
            self.check(softmax, x)

    def test_rows_of_several_tensors(self):
        def f(x, bias, mask):
            return torch.log_softmax((x + bias).masked_fill(mask, -INF), -1)

        x = torch.randn(4, 3000, device=GPU_TYPE, dtype=torch.bfloat16)
        bias = torch.randn(3000, device=GPU_TYPE)
        mask = torch.rand(4, 3000, device=GPU_TYPE) < 0.5
        mask[2] = True
        actual, code = self.compile(f, x, bias, mask)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, f(x, bias, mask), atol=1e-5, rtol=1e-5)

    def test_cross_entropy(self):
        def f(x, y):
            return torch.nn.functional.cross_entropy(x, y)

        x = torch.randn(5, 3001, device=GPU_TYPE)
        y = torch.tensor([0, 3000, -100, 17, 3], device=GPU_TYPE)
        actual, code = self.compile(f, x, y)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, f(x.double(), y).float(), atol=1e-6, rtol=1e-6)

    def test_dynamic_columns(self):
        """Of which it is known that a row begins at a vector."""

        def f(x):
            return softmax(x.flatten(1))

        x = torch.randn(3, 160, 16, device=GPU_TYPE, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 1)
        actual, code = self.compile(f, x, dynamic=None)
        self.assertIn(SHARED, code)
        self.assertEqual(self.vector(code), 8)
        self.assertEqual(actual, f(x.double()).bfloat16(), atol=2e-3, rtol=2e-2)

    def test_columns_of_many_sizes(self):
        """Of which too much is dynamic to be known as a multiple of anything."""

        def f(*xs):
            return softmax(torch.cat(xs, -1))

        xs = [torch.randn(4, 100 + i, device=GPU_TYPE) for i in range(22)]
        for x in xs:
            torch._dynamo.mark_dynamic(x, 1)
        actual, code = self.compile(f, *xs, dynamic=None)
        if SHARED in code:
            self.assertEqual(self.vector(code), 1)
        self.assertEqual(actual, f(*xs), atol=1e-6, rtol=1e-5)

    def test_knob(self):
        x = torch.randn(3, 2500, device=GPU_TYPE)
        code = self.check(softmax, x, expected=False, **{SHARE: False})
        self.assertNotIn("'loop': (", code)

    def test_each_its_own(self):
        """Few rows, and rows of which a column is read at a time."""
        x = torch.randn(4, 2500, device=GPU_TYPE)
        self.check(softmax, x, expected=False, rows=8)
        self.check(lambda x: torch.softmax(x, 0), x.T.contiguous(), expected=False)

    @parametrize(
        "other",
        (
            {"cooperative_reduction": True},
            {"is_combo_kernel": True},
            {"persistent_reduction": True},
            {"dense_size_list": lambda: ["YBLOCK", "XBLOCK", "R0_BLOCK"]},
        ),
    )
    def test_warps_that_others_decide(self, other):
        features = SimpleNamespace(
            get_reduction_hint=lambda scores: ReductionHint.INNER,
            contains_op=lambda name: False,
            scheduler_nodes=list,
            numel=1,
            reduction_numel=4096,
        )
        kernel = {
            "features": features,
            "dense_size_list": lambda: ["XBLOCK", "R0_BLOCK"],
            "cooperative_reduction": False,
            "is_combo_kernel": False,
            "persistent_reduction": False,
            "tiling_scores": None,
        }
        decides = looped_reduction.is_plain_inner_loop
        self.assertTrue(decides(SimpleNamespace(**kernel)))
        self.assertFalse(decides(SimpleNamespace(**{**kernel, **other})))

    def test_combo_kernels(self):
        def f(x, y):
            return x.softmax(-1), y.softmax(-1)

        x, y = (torch.randn(2, n, device=GPU_TYPE) for n in (3000, 4100))
        actual, code = self.compile(f, x, y, combo_kernels=True)
        self.assertNotIn(SHARED, code)
        self.assertEqual(actual, f(x, y), atol=1e-6, rtol=1e-5)

    def test_config(self):
        x = torch.randn(3, 2500, device=GPU_TYPE)
        code = self.check(softmax, x)
        self.assertIn("'loop': (16, 4)", code)


@instantiate_parametrized_tests
class SharedMaximaConfigsTest(TestCase):
    """Which columns and warps, and what the runtime makes of them."""

    device = DeviceProperties(
        type="cuda", index=0, multi_processor_count=132, cc=90, warp_size=32
    )

    def config(
        self,
        rows,
        columns,
        read_again=0,
        narrow=True,
        accesses=2,
        loops=1,
        vector=1,
        alone=False,
        kept=0,
        widest=2,
        **device,
    ):
        row = LoopedRows(
            rows,
            columns,
            read_again,
            narrow,
            accesses,
            loops=loops,
            vector=vector,
            alone=alone,
            kept=kept,
            widest=widest,
        )
        device = self.device._replace(**device)
        return online_softmax_config(row, DeviceModel.of(device))

    def test_many_rows(self):
        for narrow in (False, True):
            self.assertEqual(self.config(8192, 16000, narrow=narrow), LoopConfig(16, 4))

    def test_rows_that_are_read_once(self):
        """Beyond those for which nothing is predicted; by what else a thread keeps."""
        for vector in (1, 8):
            one = {"accesses": 1, "vector": vector}
            wide = self.config(8192, 32000, narrow=False, **one)
            self.assertEqual(wide, LoopConfig(8, 16))
            self.assertEqual(self.config(8192, 32000, alone=True, **one), LoopConfig(16, 16))
            self.assertEqual(self.config(8192, 32000, **one), LoopConfig(16, 8))
        self.assertEqual(self.config(8192, 32000, vector=8, alone=True), LoopConfig(16, 8))
        usual = LoopConfig(16, 4)
        # of the last of its blocks, if a thread loads its columns one at a time
        self.assertEqual(self.config(8192, 20480, accesses=1), LoopConfig(16, 8))
        self.assertEqual(self.config(8192, 20481, accesses=1), usual)
        self.assertEqual(self.config(8192, 20488, vector=8), LoopConfig(16, 8))
        self.assertEqual(self.config(8192, 32000, vector=4), usual)
        self.assertEqual(self.config(8192, 16384, vector=8), usual)
        self.assertEqual(self.config(8192, 32000, 2, vector=8, loops=2), LoopConfig(8, 8))

    def test_wide_types(self):
        """Of which some loop is better than the runtime's, where none is predicted to be."""

        device = DeviceModel.of(self.device)

        def config(rows=1000, columns=40960, **row):
            row = LoopedRows(rows, columns, 4, False, 2, loops=2, **row)
            return looped_reduction.wide_rows_config(row, device)

        self.assertEqual(config(), LoopConfig(8, 16))
        self.assertIsNone(config(rows=1056, vector=4))
        self.assertEqual(config(rows=8192, vector=4, kept=3), LoopConfig(8, 16))
        self.assertEqual(config(rows=8192, vector=1), LoopConfig(8, 16))
        self.assertEqual(config(rows=133), LoopConfig(8, 16))
        self.assertIsNone(config(rows=132))
        self.assertIsNone(config(columns=16384))
        self.assertEqual(config(columns=20480), LoopConfig(8, 16))
        self.assertIsNone(config(columns=20481))
        self.assertEqual(config(columns=65535, vector=1), LoopConfig(8, 16))
        self.assertIsNone(config(columns=65537, vector=1))
        self.assertEqual(config(columns=100002, vector=2), LoopConfig(8, 16))

    def test_wide_rows_compiled(self):
        def f(x):
            return torch.logsumexp(x, -1)

        x = torch.randn(5, 20000, device=GPU_TYPE)
        torch._dynamo.reset()
        options = {**LOOPED_ALONE, "force_disable_caches": True}
        with (
            inductor_config.patch(options),
            mock.patch.object(looped_reduction, "long_loop", lambda *_: None),
            mock.patch.object(DeviceModel, "of", lambda _: DeviceModel(sms=1)),
        ):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), x)
        self.assertEqual(actual, f(x))
        self.assertIn("'loop': (8, 16)", "\n".join(code))

    def test_few_rows(self):
        self.assertEqual(self.config(512, 16000), LoopConfig(8, 16))
        self.assertIsNone(self.config(512, 16000, narrow=False))
        self.assertIsNone(self.config(128, 16000))
        # as many as there are SMs decide
        self.assertEqual(
            self.config(512, 16000, multi_processor_count=40), LoopConfig(16, 4)
        )

    def test_few_long_rows(self):
        """An SM has all of its own at a time, with registers for 48 warps."""
        for rows, expect in (
            (1, (16, 32)),
            (132, (16, 32)),
            (133, (16, 16)),
            (3 * 132, (16, 16)),
            (3 * 132 + 1, (16, 8)),
            (6 * 132, (16, 8)),
            (6 * 132 + 1, (8, 16)),
        ):
            self.assertEqual(self.config(rows, 128256), LoopConfig(*expect))
            again = self.config(rows, 128256, 2, loops=2)
            self.assertEqual(again, LoopConfig(*(expect if rows <= 132 else (8, 16))))
        # less than three blocks
        self.assertEqual(self.config(132, 49152), LoopConfig(16, 32))
        self.assertIsNone(self.config(132, 49151))
        self.assertEqual(self.config(264, 24576), LoopConfig(16, 16))
        self.assertEqual(self.config(264, 24575), LoopConfig(8, 16))

    def test_few_rows_of_several_tensors(self):
        """Whose registers leave an SM no more than 32 warps: they are of one row."""
        for narrow in (False, True):
            row = {"read_again": 8, "loops": 3, "narrow": narrow, "kept": 3}
            self.assertEqual(self.config(538, 249391, **row), LoopConfig(8, 32))
            self.assertNotEqual(self.config(538, 16384, **row), LoopConfig(8, 32))
            self.assertNotEqual(self.config(1056, 249391, **row), LoopConfig(8, 32))
            for other in ({"kept": 2}, {"vector": 8}):
                config = self.config(538, 249391, **{**row, **other})
                self.assertNotEqual(config, LoopConfig(8, 32))

    def test_rows_that_are_stored_wider(self):
        """A thread has the columns that it stores at once."""
        row = {"read_again": 2, "loops": 2, "narrow": False, "widest": 4}
        for columns in (2504, 32000):
            self.assertEqual(self.config(4096, columns, vector=8, **row), LoopConfig(4, 16))
            self.assertNotEqual(self.config(4096, columns, vector=4, **row), LoopConfig(4, 16))

    def test_rows_that_are_read_again(self):
        """All of the GPU's at a time are to fit in the L2 cache."""
        self.assertEqual(self.config(8192, 10000, 2), LoopConfig(16, 4))
        self.assertEqual(self.config(8192, 20000, 2), LoopConfig(8, 8))
        self.assertEqual(self.config(8192, 2500, 4, narrow=False), LoopConfig(16, 4))
        self.assertEqual(self.config(8192, 9000, 4, narrow=False), LoopConfig(8, 8))
        self.assertIsNone(self.config(8192, 12288, 4, narrow=False))
        # which holds more on another GPU
        self.assertEqual(
            self.config(8192, 12288, 4, narrow=False, cc=100), LoopConfig(16, 4)
        )

    def configs(self, columns, loop=(16, 4), **meta):
        return triton_heuristics.reduction(
            size_hints={"x": 4096, "r0_": columns},
            reduction_hint=ReductionHint.INNER,
            triton_meta={"signature": {}, "device": self.device},
            inductor_meta={"launch_plan": {"loop": loop}, **meta} if loop else meta,
            return_configs=True,
        )

    def test_block(self):
        (config,) = self.configs(32768)
        self.assertEqual(config.kwargs["XBLOCK"], 1)
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (2048, 4))
        (config,) = self.configs(32768, (8, 16))
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (4096, 16))
        # short rows: as many columns a thread
        (config,) = self.configs(2048, (8, 16))
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (2048, 8))
        (config,) = self.configs(32768, None)
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (2048, 16))

    def test_max_autotune_has_others_beside_it(self):
        own, *others = self.configs(32768, max_autotune=True)
        self.assertEqual((own.kwargs["R0_BLOCK"], own.num_warps), (2048, 4))
        others = [(c.kwargs["R0_BLOCK"], c.num_warps) for c in others]
        self.assertIn((2048, 16), others)

    @parametrize("loop", ((16, 4), (8, 8), (8, 16)))
    @parametrize("columns", (32, 64, 128, 256, 512))
    def test_rows_of_fewer_columns_than_a_warp_has(self, columns, loop):
        (config,) = self.configs(columns, loop)
        self.assertEqual(config.kwargs["R0_BLOCK"], columns)
        self.assertIn(config.num_warps, (1, 2, 4))

    @parametrize("loop", ((4, 32), (8, 32), (16, 32)))
    def test_as_many_warps_as_were_chosen(self, loop):
        (config,) = self.configs(65536, loop)
        self.assertEqual(config.num_warps, 32)
        self.assertEqual(config.kwargs["R0_BLOCK"], LoopConfig(*loop).block)


@instantiate_parametrized_tests
class LongLoopTest(TestCase):
    """The loop over a long row is the one that takes least time, as predicted."""

    device = DeviceModel(sms=132, l2_mib=50, memory_GBs=3350.0)

    def row(self, rows, columns, itemsize=2, **row):
        """Of a softmax."""
        of_softmax = {
            "read_again": itemsize,
            "narrow": itemsize == 2,
            "accesses": 2,
            "loops": 2,
            "moved": 2 * rows * columns * itemsize,
            "all_accesses": 3,
            "vector": 16 // itemsize,
            "slots": 26,
            "kept": 1,
            "widest": itemsize,
            "online": True,
        }
        return LoopedRows(rows, columns, **{**of_softmax, **row})

    def loop(self, row, usual=None, **device):
        device = dataclasses.replace(self.device, **device)
        return long_loop(row, usual, device), device

    def resident_bytes(self, row, loop, device):
        programs = device.sms * (device.warps_per_sm // loop.num_warps)
        return min(row.rows, programs) * row.columns * row.read_again

    @parametrize("columns", (32768, 65536, 131072))
    def test_rows_that_are_read_again_fit_in_l2(self, columns):
        row, usual = self.row(8192, columns), LoopConfig(8, 8)
        loop, device = self.loop(row, usual)
        self.assertGreater(self.resident_bytes(row, usual, device), device.l2_bytes)
        fewer = self.resident_bytes(row, loop, device)
        self.assertLess(fewer, self.resident_bytes(row, usual, device))
        # the largest rows: as few as may be resident
        self.assertTrue(fewer < device.l2_bytes or loop.num_warps == 32)

    def test_a_larger_cache_holds_more(self):
        row = self.row(8192, 65536)
        warps = [
            self.loop(row, LoopConfig(8, 8), l2_mib=mib)[0].num_warps
            for mib in (25, 50, 100, 400)
        ]
        self.assertEqual(warps, sorted(warps, reverse=True))
        self.assertLess(warps[-1], warps[0])

    @parametrize("rows", (2, 60, 132))
    def test_a_row_alone_on_its_sm_has_all_warps(self, rows):
        for row in (self.row(rows, 65536), self.row(rows, 50257, vector=1)):
            loop, _ = self.loop(row)
            self.assertEqual(loop.num_warps, 32)

    def test_unaligned_rows_have_short_blocks(self):
        for rows in (100, 1000, 10000):
            loop, _ = self.loop(self.row(rows, 50257, vector=1))
            self.assertLessEqual((loop or RUNTIME_LOOP).block, 4096)

    def test_wide_rows_fit_in_l2(self):
        """As those of one program an SM do; unaligned ones of two of 32 warps."""
        self.assertEqual(self.loop(self.row(6000, 40960, 4))[0], LoopConfig(16, 32))
        for rows in (1500, 2048):
            loop, _ = self.loop(self.row(rows, 50257, 4, vector=1))
            self.assertEqual(loop, LoopConfig(8, 32))

    def test_tensors_that_are_kept(self):
        """With registers for their loads, fewer rows are there, which L2 holds."""
        two, four = (self.row(4096, 131072, kept=kept) for kept in (2, 4))
        for loop in (LoopConfig(4, 32), LoopConfig(8, 16)):
            times = [loop_us(row, loop, self.device) for row in (four, two)]
            self.assertLess(*times)

    @parametrize("rows", (16, 150, 600, 3000))
    @parametrize("columns", (20480, 29971, 128256))
    @parametrize("online", (True, False))
    def test_it_saves_time(self, rows, columns, online):
        vector = 8 if columns % 8 == 0 else 1
        row = self.row(rows, columns, vector=vector, online=online)
        loop, device = self.loop(row)
        if loop is not None:
            usual = loop_us(row, RUNTIME_LOOP, device)
            self.assertLess(loop_us(row, loop, device), 0.95 * usual)
        self.assertEqual(self.loop(row, loop)[0], loop)

    @parametrize("columns", (32000, 128256, 151936))
    @parametrize("rows", (300, 1000, 4096, 9000))
    def test_rows_that_are_stored_wider(self, rows, columns):
        """A vector of half types is two of float32: of more columns stores have gaps."""
        moved = 6 * rows * columns
        row = self.row(rows, columns, narrow=False, widest=4, moved=moved, slots=17)
        for usual in (None, LoopConfig(4, 16)):
            loop, _ = self.loop(row, usual)
            self.assertTrue(loop is None or loop.columns_per_thread == 4)

    def test_what_holds_a_thread_s_columns_in_a_vector(self):
        # bytes are stored in vectors of 16 columns, of which a float32 load has 64 bytes
        row = self.row(2304, 93248, 4, vector=16, online=False)
        loop, _ = self.loop(row)
        self.assertEqual(loop.columns_per_thread, 4)

    @parametrize("rows", (3, 150, 3000))
    @parametrize("itemsize", (1, 2, 4, 8))
    def test_any_types(self, rows, itemsize):
        for vector, widest, kept, online in itertools.product(
            (1, 2, 4, 8, 16), (1, 2, 4, 8), (0, 1, 3), (True, False)
        ):
            row = {"vector": vector, "widest": widest, "kept": kept, "online": online}
            row = self.row(rows, 65536, itemsize, **row)
            usual = LoopConfig(16, 4)
            self.assertIsNotNone(self.loop(row, usual)[0])

    @parametrize("wide", (torch.int64, torch.float64))
    def test_wide_types_beside_half_types(self, wide):
        x = torch.randn(3, SHORT_ROW + 2048, device=GPU_TYPE, dtype=torch.bfloat16)
        keys = torch.randint(0, 9, x.shape, device=GPU_TYPE).to(wide)

        def f(x, keys):
            kept = torch.where(keys > 2, x, 0)
            return kept, kept.sum(-1)

        with inductor_config.patch(LONG):
            actual = torch.compile(f)(x, keys)
        self.assertEqual(actual, f(x, keys), atol=1.0, rtol=1e-2)

    @parametrize("rows", (300, 512, 3000))
    def test_rows_that_the_runtime_s_block_divides(self, rows):
        """All programs of an SM would end with what another block masks of them."""
        of_sum = {"read_again": 0, "accesses": 1, "loops": 1, "all_accesses": 1}
        of_sum = {**of_sum, "kept": 0, "slots": 4, "online": False}
        row = self.row(rows, 100352, **of_sum)
        row = dataclasses.replace(row, moved=rows * row.columns * 2)
        masked = LoopConfig(16, 16)
        self.assertLess(
            loop_us(row, masked, self.device), loop_us(row, RUNTIME_LOOP, self.device)
        )
        self.assertFalse(can_have(row, masked, self.device))
        self.assertTrue(can_have(row, LoopConfig(8, 16), self.device))
        for other in ({"columns": 81920}, {"columns": 100353}, {"rows": 264}):
            other = dataclasses.replace(row, **other)
            self.assertTrue(can_have(other, masked, self.device))

    @parametrize("rows", (600, 1024, 8192))
    def test_sums_in_float64(self, rows):
        """Three programs fit on an SM, though each column has registers of two more."""
        row = self.row(rows, 65536, 4, vector=4, read_again=0, kept=0, loops=1)
        row = dataclasses.replace(row, doubles=1)
        usual = LoopConfig(8, 16)
        loop, device = self.loop(row, usual)
        registers = 32 * loop.num_warps * (28 + 3 * loop.columns_per_thread)
        self.assertLessEqual(3 * registers, device.registers_per_sm)
        self.assertFalse(can_have(row, usual, device))
        self.assertTrue(can_have(dataclasses.replace(row, doubles=0), usual, device))

    @parametrize("vector", (1, 4))
    def test_sums_in_float64_of_few_rows(self, vector):
        """An SM has a row, or two: as many programs are enough."""
        row = self.row(107, 156867, 4, vector=vector, read_again=0, kept=0, loops=1)
        row = dataclasses.replace(row, doubles=1)
        self.assertEqual(self.loop(row)[0].num_warps, 32)
        for rows, usual in ((132, LoopConfig(8, 32)), (264, LoopConfig(8, 16))):
            few, more = (dataclasses.replace(row, rows=n) for n in (rows, rows + 1))
            self.assertTrue(can_have(few, usual, self.device))
            self.assertFalse(can_have(more, usual, self.device))

    def test_sums_in_float64_of_narrower_rows(self):
        def f(x):
            return torch.log_softmax(x, -1).sum(-1)

        found = []
        of_features = looped_reduction.looped_rows

        def record(features):
            found.append(of_features(features))
            return found[-1]

        for dtype, are_double in ((torch.float32, True), (torch.float64, False)):
            x = torch.randn(3, SHORT_ROW + 2048, device=GPU_TYPE, dtype=dtype)
            found.clear()
            with (
                inductor_config.patch(LONG),
                mock.patch.object(looped_reduction, "looped_rows", record),
            ):
                torch._dynamo.reset()
                actual = torch.compile(f)(x)
            self.assertEqual(any(row.doubles for row in found), are_double)
            expect = f(x.double()).to(dtype)
            self.assertEqual(actual, expect, atol=0, rtol=2e-6)

    def test_usual(self):
        usual = LoopConfig(16, 4)
        self.assertIs(self.loop(self.row(8192, SHORT_ROW), usual)[0], usual)
        # nothing is known of the memory
        self.assertIs(self.loop(self.row(64, 65536), usual, memory_GBs=None)[0], usual)
        # without a second pass, many rows wait for memory with few warps
        row = self.row(8192, 32000, read_again=0, kept=0, loops=1, slots=12)
        self.assertIs(self.loop(row, usual)[0], usual)

    @torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
    @parametrize("name", ("softmax", "rms_norm", "quotient", "sum"))
    def test_rows_that_nothing_is_known_of(self, name):
        """As many as an index has, which is computed: not even a hint says how many."""
        forms = {
            "softmax": lambda x: torch.softmax(x, -1),
            "rms_norm": lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True)),
            "quotient": lambda x: x / x.abs().amax(-1, keepdim=True),
            "sum": lambda x: x.sum(-1),
        }

        def f(x, chosen):
            return forms[name](x[chosen.nonzero().squeeze(1)].float()).to(x.dtype)

        x = torch.randn(4, SHORT_ROW + 2048, device=GPU_TYPE, dtype=torch.bfloat16)
        chosen = torch.tensor([True, False, True, True], device=GPU_TYPE)
        with inductor_config.patch(LONG):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), x, chosen)
        self.assertEqual(actual, f(x, chosen), atol=0.5 if name == "sum" else 1e-2, rtol=1e-2)
        self.assertNotIn("'loop': (", "".join(code))

    def test_rows(self):
        """What a kernel says of its rows."""
        seen = []

        def spy(row, usual, device):
            seen.append(row)
            return long_loop(row, usual, device)

        x = torch.randn(3, SHORT_ROW + 2048, device=GPU_TYPE)
        weight = torch.randn(SHORT_ROW + 2048, device=GPU_TYPE)
        f = lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * w  # noqa: E731
        with (
            mock.patch.object(looped_reduction, "long_loop", spy),
            inductor_config.patch(LONG),
        ):
            actual, (code,) = run_and_get_code(torch.compile(f), x, weight)
        self.assertEqual(actual, f(x, weight), atol=1e-4, rtol=1e-4)
        row = seen[-1]
        self.assertEqual((row.rows, row.columns), tuple(x.shape))
        self.assertEqual((row.loops, row.kept, row.read_again), (2, 1, 4))
        self.assertEqual((row.vector, row.widest, row.online), (4, 4, False))
        self.assertEqual(row.moved, 2 * x.nbytes + weight.nbytes)
        if GPU_TYPE == "cuda" and not torch.version.hip:
            self.assertIn("'loop': (", code)

    @on_cuda
    @parametrize("columns", (SHORT_ROW + 4096, SHORT_ROW + 4097))
    def test_softmax(self, columns):
        x = torch.randn(5, columns, device=GPU_TYPE)
        x[1, 7], x[2] = INF, -INF
        with inductor_config.patch(LONG):
            actual, (code,) = run_and_get_code(torch.compile(softmax), x)
        self.assertEqual(actual, softmax(x), atol=1e-6, rtol=1e-5)
        self.assertRegex(code, r"'loop': \(\d+, 32\)")


# Loops whose last block is peeled


COLUMNS, STRIDE = 5001, 5008
MASK = "r0_index < r0_numel"


def row_sum(x):
    return x.sum(-1)


def logsumexp(x):
    return torch.logsumexp(x, -1)


def layer_norm(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def variance(x):
    return torch.var(x, -1)


def argmax(x):
    return x.argmax(-1)


def row_extrema(x):
    return torch.stack(torch.aminmax(x, dim=-1))


def vector_columns(code):
    """The adjacent columns that share a maximum, in whole blocks and in what is left alike."""
    (columns,) = {
        int(call)
        for call in re.findall(
            r"online_softmax_combine_columns\(.*?, (\d+), (?:True|False)\s*\)",
            code,
            re.DOTALL,
        )
    }
    return columns


@on_cuda
@instantiate_parametrized_tests
class PeeledLoopsTest(TestCase):
    """A loop over long rows has their whole blocks, and masks what is left alone."""

    def compile(self, f, *inputs, dynamic=False, **options):
        torch._dynamo.reset()
        options = {
            "split_reductions": False,
            "triton.persistent_reductions": False,
            "triton.cooperative_reductions": False,
            # which do not know of what is patched here
            "force_disable_caches": True,
            **options,
        }
        with (
            inductor_config.patch(options),
            mock.patch.object(looped_reduction, "FEW_ROWS", 0),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            actual, code = run_and_get_code(compiled, *inputs)
        return actual, "\n".join(code)

    def check(self, f, x, **options):
        """Also that loops over rows are peeled; returns the code."""
        actual, code = self.compile(f, x, **options)
        expect = f(x.double())
        self.assertEqual(actual.shape, expect.shape)
        eps = 8 * torch.finfo(x.dtype).eps
        finite = expect[expect.isfinite()] if expect.is_floating_point() else expect
        scale = finite.abs().max().item() if finite.numel() else 1
        self.assertEqual(
            actual.double(), expect.double(), atol=eps * scale, rtol=eps, equal_nan=True
        )
        self.check_code(code)
        return code

    def check_code(self, code):
        loops = re.findall(r"( +)for r0_offset in (.*)\n((?:\1 +.*\n|\n)*)", code)
        self.assertTrue(loops)
        for _, loop, body in loops:
            self.assertEqual(loop, "tl.range(0, R0_WHOLE, R0_BLOCK):")
            self.assertNotIn(MASK, body)
        rests = re.findall(r"( +)if R0_WHOLE < \d+:\n((?:\1 +.*\n|\n)*)", code)
        self.assertEqual(len(rests), len(loops))
        for _, body in rests:
            self.assertIn(MASK, body)

    def rows(self, columns=COLUMNS, stride=STRIDE, beyond=NAN, dtype=torch.bfloat16):
        """Five of them, with room behind that nobody may read."""
        x = torch.full((5, stride), beyond, device=GPU_TYPE, dtype=dtype)
        x[:, :columns] = torch.randn(5, columns, device=GPU_TYPE)
        return x[:, :columns]

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize(
        "f", (row_sum, softmax, logsumexp, layer_norm, variance, argmax, row_extrema)
    )
    def test_reductions(self, f, dtype):
        self.check(f, self.rows(dtype=dtype))

    @parametrize("beyond", (INF, -INF, NAN))
    @parametrize("f", (softmax, variance, argmax))
    def test_what_is_behind_rows(self, f, beyond):
        self.check(f, self.rows(beyond=beyond))

    @parametrize("value", (INF, -INF, NAN))
    @parametrize("column", (0, COLUMNS - 1))
    def test_special_values(self, column, value):
        x = self.rows(beyond=0)
        x[2, column] = value
        self.check(logsumexp, x)
        self.check(argmax, x)

    def test_rows_of_nothing(self):
        self.check(logsumexp, self.rows().fill_(-INF))

    @parametrize("columns", (4097, 5120, 6143))
    def test_columns(self, columns):
        """One more than the blocks have, half a block more, one less than another."""
        self.check(row_sum, self.rows(columns, 6144))

    @parametrize("block", (64, 512, 8192))
    def test_other_blocks(self, block):
        """As autotuning tries them, one of them larger than the row."""
        configs = triton_heuristics._reduction_configs

        def others(**kwargs):
            config, *_ = configs(**kwargs)
            config.kwargs["R0_BLOCK"] = block
            return [config]

        with mock.patch.object(triton_heuristics, "_reduction_configs", others):
            self.check(softmax, self.rows())
            self.check(layer_norm, self.rows())

    def test_masked_rows(self):
        """Of a block with more rows than there are."""
        configs = triton_heuristics._reduction_configs

        def others(**kwargs):
            config, *_ = configs(**kwargs)
            config.kwargs.update(XBLOCK=4, R0_BLOCK=512)
            return [config]

        with mock.patch.object(triton_heuristics, "_reduction_configs", others):
            self.check(variance, self.rows())

    def test_vectors(self):
        """Rows that are aligned are loaded so, whatever their length."""

        def loss(x):
            return torch.nn.functional.cross_entropy(x, targets)

        targets = torch.tensor([0, 5000, -100, 17, 3], device=GPU_TYPE)
        for stride, expected in ((5008, 8), (5004, 4), (5001, 1)):
            code = self.check(loss, self.rows(stride=stride))
            self.assertEqual(vector_columns(code), expected)

    @parametrize("columns", (COLUMNS, 5002, STRIDE))
    def test_narrower_stores(self, columns):
        """Rows are loaded as they are aligned, however those that are stored begin."""
        code = self.check(softmax, self.rows(columns))
        self.assertNotRegex(code, r"'tt.divisibility', [248]\]")
        self.assertEqual(vector_columns(code), 8)

    def test_rows_that_begin_anywhere(self):
        """
        They have one column at a time anyway. What is loaded again and a softmax have less
        to compare.
        """
        x = torch.randn(5, COLUMNS, device=GPU_TYPE, dtype=torch.bfloat16)
        for f, peeled in (
            (row_sum, False),
            (layer_norm, True),
            (half_rms_norm, True),
            (softmax, True),
        ):
            _, code = self.compile(f, x)
            self.assertEqual("R0_WHOLE" in code, peeled)

    @parametrize("wide", (torch.int32, torch.int64, torch.float64))
    def test_beside_types_of_eight_bytes(self, wide):
        """What is loaded again a column at a time waits for memory; a softmax computes."""
        x = torch.randn(5, COLUMNS, device=GPU_TYPE, dtype=torch.bfloat16)
        mask = torch.randint(0, 3, x.shape, device=GPU_TYPE).to(wide)

        def centred(x, mask):
            y = x.float() * (mask != 0)
            return y - y.mean(-1, keepdim=True)

        def masked_softmax(x, mask):
            return torch.softmax(x.float().masked_fill(mask == 0, -9), -1)

        for f, peeled in ((centred, wide.itemsize < 8), (masked_softmax, True)):
            actual, code = self.compile(f, x, mask)
            self.assertEqual(actual, f(x, mask), atol=1e-4, rtol=1e-4)
            self.assertEqual("R0_WHOLE" in code, peeled)

    @parametrize("columns, peeled", ((8191, True), (8193, False), (9215, False), (9217, True)))
    def test_welford_of_eight_blocks(self, columns, peeled):
        """Which LLVM unrolls; nine it does not."""
        x = torch.randn(3, columns, device=GPU_TYPE, dtype=torch.bfloat16)
        for f, expected in ((layer_norm, peeled), (half_rms_norm, True)):
            actual, code = self.compile(f, x)
            self.assertEqual(actual, f(x), atol=0.05, rtol=0.05)
            self.assertEqual("R0_WHOLE" in code, expected)

    @parametrize("columns", (5120, 5002))
    def test_welford(self, columns):
        """Whose weights would be converted: only for the vectors that a mask takes apart."""
        x = self.rows(columns, 5120)
        for f, peeled in ((row_sum, True), (layer_norm, columns % 8 != 0)):
            actual, code = self.compile(f, x)
            self.assertEqual(actual, f(x), atol=0.05, rtol=0.05)
            self.assertEqual("R0_WHOLE" in code, peeled)

    def test_dynamic_rows(self):
        x = self.rows()
        torch._dynamo.mark_dynamic(x, 0)
        self.check(softmax, x, dynamic=None)

    def test_as_ever(self):
        """Short rows, whole blocks, dynamic rows, other orders, and what others loop over."""
        x = torch.randn(5, COLUMNS, device=GPU_TYPE)
        short = torch.randn(5, 4096, device=GPU_TYPE)
        for f, given, options in (
            (row_sum, short, {}),
            (row_sum, torch.randn(5, 6144, device=GPU_TYPE), {}),
            (row_sum, x, {"dynamic": True}),
            (row_sum, x, {"triton.use_block_ptr": True}),
            (lambda x: x.sum(0), x.T.contiguous(), {}),
            (lambda x: x.cumsum(-1), x, {}),
            (lambda x: (x.sum(-1), x[:, :4500].exp().sum(-1)), x, {"combo_kernels": True}),
        ):
            actual, code = self.compile(f, given, **options)
            self.assertEqual(actual, f(given), atol=1e-3, rtol=1e-4)
            self.assertNotIn("R0_WHOLE", code)


# Logsumexp


def z_loss(x, y):
    lse = torch.logsumexp(x.float(), -1)
    return torch.nn.functional.cross_entropy(x, y, label_smoothing=0.1) + (lse * lse).mean()


def z_loss_of_bfloat16(x, y):
    lse = x.logsumexp(1, keepdim=True)
    return torch.nn.functional.cross_entropy(x, y) + 1e-4 * lse.float().square().mean()


def z_loss_of_log_softmax(x, y):
    nll = torch.log_softmax(x, -1, dtype=torch.float32).gather(1, y[:, None])
    return torch.special.logsumexp(x.float(), (-1,)).square().mean() - nll.mean()


def smoothed_cross_entropy(x, y):
    return torch.nn.functional.cross_entropy(x, y, ignore_index=3, label_smoothing=0.2)


def smoothed_by_mean(x, y):
    lprobs = torch.log_softmax(x, -1)
    nll = -lprobs.gather(-1, y[:, None]).squeeze(1)
    return (0.9 * nll - 0.1 * lprobs.mean(dim=-1)).mean()


def smoothed_by_sum(x, y):
    lprobs = torch.nn.functional.log_softmax(x, dim=-1, dtype=torch.float32)
    nll = -lprobs.gather(-1, y[:, None])
    return 0.9 * nll.sum() - 1e-4 * lprobs.sum(dim=-1, keepdim=True).sum()


def smoothed_by_negative(x, y):
    losses = -torch.nn.functional.log_softmax(x, -1)
    nll = losses.gather(-1, y[:, None]).mean()
    smoothed = losses.sum(-1, keepdim=True, dtype=torch.float32).mean()
    return nll + 1e-4 * smoothed


LABEL_SMOOTHING = (
    smoothed_cross_entropy,
    smoothed_by_mean,
    smoothed_by_sum,
    smoothed_by_negative,
)


class OnlineLoopsTestCase(TestCase):
    def compiled(self, f, *args):
        torch._dynamo.reset()
        with (
            inductor_config.patch({**LOOPED_ALONE, "online_softmax": True}),
            mock.patch.object(looped_reduction, "FEW_ROWS", 0),
        ):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        return actual, "\n".join(code)

    def assert_loops(self, code, loops, softmaxes=1):
        """The kernel of the online softmax has so many, and that softmax alone."""
        (kernel,) = (each for each in code.split("@triton.jit") if SHARED in each)
        # without what is left of a row behind whole blocks
        self.assertEqual(kernel.split("if R0_WHOLE")[0].count(SHARED), softmaxes)
        self.assertEqual(kernel.count("for r0_offset in"), loops)


@on_cuda
@instantiate_parametrized_tests
class LogsumexpTest(OnlineLoopsTestCase):
    """Its maximum and its sum are an online softmax."""

    @parametrize("keepdim", (False, True))
    def test_special_values(self, keepdim):
        x = torch.cat(
            [
                rows_with(value, rest, 2500, later=2100)
                for value in (INF, -INF, NAN, 3e38, -3e38)
                for rest in ("numbers", "-inf")
            ]
        )
        x[1, 5], x[2, 5] = INF, NAN

        def f(x):
            return torch.logsumexp(x, -1, keepdim)

        actual, code = self.compiled(f, x)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, f(x.double()).float(), equal_nan=True)

    @parametrize(
        "loss",
        (z_loss, z_loss_of_bfloat16, z_loss_of_log_softmax),
        name_fn=lambda loss: loss.__name__,
    )
    def test_beside_a_cross_entropy(self, loss):
        x = torch.randn(4, 2500, device=GPU_TYPE, dtype=torch.bfloat16)
        y = torch.tensor([0, 2499, 3, 17], device=GPU_TYPE)
        actual, code = self.compiled(loss, x, y)
        expect = loss(x.double(), y)
        self.assertEqual(actual.double(), expect.double(), atol=0.01, rtol=0.01)
        self.assert_loops(code, 1)

    @parametrize("dtype", (torch.float16, torch.bfloat16))
    @parametrize("loss", LABEL_SMOOTHING, name_fn=lambda loss: loss.__name__)
    def test_label_smoothing(self, loss, dtype):
        """The row that it sums is read once."""
        x = (3 * torch.randn(4, 2500, device=GPU_TYPE) + 40).to(dtype)
        y = torch.tensor([0, 2499, 3, 17], device=GPU_TYPE)
        actual, code = self.compiled(loss, x, y)
        self.assert_loops(code, 1)
        self.assertEqual(actual.dtype, loss(x, y).dtype)
        self.assertEqual(actual.double(), loss(x.double(), y).double(), atol=0, rtol=0.004)

    @parametrize("loss", LABEL_SMOOTHING, name_fn=lambda loss: loss.__name__)
    def test_label_smoothing_of_float32(self, loss):
        """Of rows that no kernel holds, in float64: not a digit is lost far from zero."""
        x = 3 * torch.randn(4, SHORT_ROW + 4, device=GPU_TYPE) + 1000
        y = torch.tensor([0, SHORT_ROW, 3, 17], device=GPU_TYPE)
        actual, code = self.compiled(loss, x, y)
        self.assert_loops(code, 1)
        self.assertEqual(actual.dtype, torch.float32)
        expect = loss(x.double(), y).double()
        self.assertEqual(actual.double(), expect, atol=0, rtol=2e-6)

    @parametrize("dtype", (torch.bfloat16, torch.float32))
    def test_sum_with_special_values(self, dtype):
        columns = 2500 if dtype == torch.bfloat16 else SHORT_ROW + 4
        values = (INF, -INF, NAN, torch.finfo(dtype).min)
        x = torch.cat(
            [rows_with(value, "numbers", columns, later=2100) for value in values]
        ).to(dtype)
        x[-1] = -INF
        actual, code = self.compiled(lambda x: torch.log_softmax(x, -1).sum(-1), x)
        self.assert_loops(code, 1)
        expect = torch.log_softmax(x.double(), -1).sum(-1)
        self.assertEqual(actual.double(), expect, equal_nan=True, atol=0, rtol=0.004)

    def test_dynamic_rows(self):
        x = torch.randn(6, 2500, device=GPU_TYPE, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)

        def f(x):
            return torch.log_softmax(x.float(), -1).mean()

        actual, code = self.compiled(f, x)
        self.assert_loops(code, 1)
        self.assertEqual(actual, f(x.double()).float(), atol=0, rtol=1e-4)

    def test_sums_over_more(self):
        x = torch.randn(3, 4, 2500, device=GPU_TYPE, dtype=torch.bfloat16)
        for f in (
            lambda lprobs: lprobs.mean((0, 2)),
            lambda lprobs: lprobs.sum((2, 1), keepdim=True),
            lambda lprobs: -lprobs.mean(),
            lambda lprobs: (-lprobs).sum(),
        ):

            def fn(x, f=f):
                return f(torch.log_softmax(x, -1, dtype=torch.float32))

            actual, code = self.compiled(fn, x)
            self.assert_loops(code, 1)
            expect = f(torch.log_softmax(x.double(), -1)).float()
            self.assertEqual(actual, expect, atol=0, rtol=1e-4)

    def test_sums_that_read_again(self):
        """Of float32, a row that may be held is; others are no sums of all columns."""
        x = torch.randn(4, 2500, device=GPU_TYPE)
        half = x.bfloat16()
        for f, given, options in (
            (lambda x: torch.log_softmax(x, -1).sum(-1), x, {}),
            (lambda x: torch.log_softmax(x, -1).abs().sum(-1), half, {}),
            (
                lambda x: torch.log_softmax(x, -1).sum(-1),
                half,
                {"emulate_precision_casts": True},
            ),
            (lambda x: torch.log_softmax(x, -1).double().sum(-1), half, {}),
            (
                lambda x: torch.log_softmax(x, -1).mean(-1, dtype=torch.float64),
                half,
                {},
            ),
        ):
            with inductor_config.patch(options):
                actual, code = self.compiled(f, given)
            self.assert_loops(code, 2)
            expect = f(given.double()).to(actual.dtype)
            self.assertEqual(actual, expect, atol=0, rtol=0.004)
        _, code = self.compiled(lambda x: torch.log_softmax(x, -1).sum(0), half)
        self.assertIn(SHARED, code)

    def test_values_of_rows(self):
        """They are no accesses of the loop."""

        def f(x, *rows):
            return sum(rows, torch.logsumexp(x, -1))

        x = torch.randn(4, 2500, device=GPU_TYPE)
        rows = [torch.randn(4, device=GPU_TYPE) for _ in range(7)]
        actual, code = self.compiled(f, x, *rows)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, f(x, *rows))

    @parametrize("dim", (0, -1))
    @parametrize("f", (torch.softmax, torch.log_softmax), name_fn=lambda f: f.__name__)
    def test_softmax_of_a_scalar(self, f, dim):
        x = torch.randn((), device=GPU_TYPE)
        actual, _ = self.compiled(lambda x: f(x, dim), x)
        self.assertEqual(actual, f(x, dim))

    def test_as_ever(self):
        x = torch.randn(4, 25, 100, device=GPU_TYPE)
        for f in (
            lambda x: torch.logsumexp(x, (1, 2)),
            lambda x: torch.logsumexp(x.long(), -1),
            lambda x: torch.logsumexp(x[0, 0, 0], 0),
            lambda x: torch.logsumexp(x[:, :, :0], -1),
        ):
            actual, code = self.compiled(f, x)
            self.assertNotIn("online_softmax", code)
            self.assertEqual(actual, f(x))


# Rows that are scaled


def tempered(x):
    return torch.log_softmax(x / 0.7, -1)


def scaled(x):
    return torch.softmax(-0.125 * x, -1)


def scaled_in_float32(x):
    return torch.softmax(x.float() * 1.5, -1).to(x.dtype)


def scaled_by_rows(x):
    return torch.softmax(x * x[:, :1], -1)


def capped(x):
    return torch.log_softmax(30 * torch.tanh(x / 30), -1)


@on_cuda
@instantiate_parametrized_tests
class ScaledSoftmaxTest(OnlineLoopsTestCase):
    """Rows are scaled before their maximum, so that a loop has it and the sum."""

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize(
        "f",
        (tempered, scaled, scaled_in_float32, scaled_by_rows, capped),
        name_fn=lambda f: f.__name__,
    )
    def test_forms(self, f, dtype):
        x = (3 * torch.randn(4, 2500, device=GPU_TYPE)).to(dtype)
        actual, code = self.compiled(f, x)
        self.assert_loops(code, 2)
        # ptxas contracts no product with what is subtracted from it
        self.assertIn("libdevice.mul_rn", code)
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (x.shape, dtype))
        # of logits of 30 a digit is lost, as eager loses it
        tolerance = 2 * max((f(x).double() - expect).abs().max().item(), 1e-6)
        self.assertEqual(actual.double(), expect, atol=tolerance, rtol=0)

    def test_by_a_tensor(self):
        x = torch.randn(4, 2500, device=GPU_TYPE)
        for scale in (torch.tensor(2.5), torch.tensor(-2.5), torch.rand(4, 1) - 0.5):

            def f(x, scale):
                return torch.softmax(scale * x, -1)

            actual, code = self.compiled(f, x, scale.to(GPU_TYPE))
            self.assert_loops(code, 2)
            self.assertEqual(actual, f(x.double(), scale.double().to(GPU_TYPE)).float())

    def test_losses(self):
        """One loop reads the logits."""

        def loss(x, y):
            return torch.nn.functional.cross_entropy(30 * torch.tanh(x.float() / 30), y)

        x = (40 * torch.randn(4, 2500, device=GPU_TYPE)).bfloat16()
        y = torch.tensor([0, 2499, 3, 17], device=GPU_TYPE)
        actual, code = self.compiled(loss, x, y)
        self.assert_loops(code, 1)
        self.assertEqual(actual, loss(x.double(), y).float())

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_distillation(self, dtype):
        """Both tensors are read twice, of five times."""

        def loss(x, y):
            log_probs, probs = torch.log_softmax(x / 2, -1), torch.softmax(y / 2, -1)
            return torch.nn.functional.kl_div(log_probs, probs, reduction="none").sum(-1)

        x, y = (torch.randn(4, 2500, device=GPU_TYPE).to(dtype) for _ in range(2))
        actual, code = self.compiled(loss, x, y)
        self.assert_loops(code, 2, softmaxes=2)
        expect = loss(x.double(), y.double())
        tolerance = 2 * (loss(x, y).double() - expect).abs().max().item()
        self.assertEqual(actual.double(), expect, atol=tolerance, rtol=1e-5)

    def test_training(self):
        """The backward computes the product again that the forward's maximum is of."""

        def loss(x):
            return torch.nn.functional.cross_entropy(0.3 * x, torch.arange(4, device=GPU_TYPE))

        def step(x):
            result = torch.compile(loss, fullgraph=True)(x)
            result.backward()
            return result

        x = torch.randn(4, 2500, device=GPU_TYPE, requires_grad=True)
        with inductor_config.patch({**LOOPED_ALONE, "online_softmax": True}):
            actual, codes = run_and_get_code(step, x)
        self.assertEqual(len(codes), 2)
        for code in codes:
            self.assertIn("libdevice.mul_rn", code)
        wide = x.detach().double().requires_grad_()
        expect = loss(wide)
        self.assertEqual(actual, expect.float())
        expect.backward()
        self.assertEqual(x.grad, wide.grad.float())

    @parametrize("value", (INF, -INF, NAN, 3e38, -3e38))
    @parametrize("rest", ("numbers", "-inf"))
    def test_special_values(self, rest, value):
        x = rows_with(value, rest, 2500, later=2100)
        actual, code = self.compiled(tempered, x)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, tempered(x), equal_nan=True)

    def test_which(self):
        """Of more columns than upstream holds, the dimension of the sum, and no other maxima."""

        def maxima_of(f, *shape):
            found = []

            def spy(shifted):
                found.append(is_online_softmax(shifted))
                return found[-1]

            x = torch.randn(shape, device=GPU_TYPE)
            is_online_softmax = online_softmaxes.is_online_softmax
            with mock.patch.object(online_softmaxes, "is_online_softmax", spy):
                actual, _ = self.compiled(f, x)
            self.assertEqual(actual, f(x.double()).float())
            return found

        def shifted(x):
            y = x / 3
            return y - y.amax(-1, keepdim=True)

        def summed_over_another(x):
            return shifted(x).exp().sum(0, keepdim=True)

        self.assertEqual(maxima_of(tempered, 3, 1024), [False])
        self.assertEqual(maxima_of(tempered, 3, 1025), [True])
        self.assertEqual(maxima_of(lambda x: torch.softmax(x / 3, 0), 1025, 3), [True])
        self.assertEqual(maxima_of(shifted, 3, 1025), [False])
        self.assertEqual(maxima_of(lambda x: torch.softmax(x / 3, 0)), [False])
        for sum_of in (
            lambda x: x.sum(),
            lambda x: x.sum(None, keepdim=True),
            lambda x: x.sum(-1),
            lambda x: x.sum((0, 1), keepdim=True),
        ):

            def summed(x, sum_of=sum_of):
                return sum_of(shifted(x).exp())

            self.assertEqual(maxima_of(summed, 3, 1025), [False])
        self.assertEqual(maxima_of(summed_over_another, 3, 1025), [False])

    def test_half_types_as_they_are(self):
        """There is no rounded product of them, nor a product that is not."""
        x = torch.randn(4, 2500, device=GPU_TYPE, dtype=torch.float16)
        with inductor_config.patch({"triton.codegen_upcast_to_fp32": False}):
            actual, code = self.compiled(scaled, x)
        self.assert_loops(code, 2)
        self.assertNotIn("libdevice.mul_rn", code)
        self.assertEqual(actual.double(), scaled(x.double()), atol=1e-4, rtol=0.1)

    def test_dynamic_columns(self):
        """Of which no softmax is an online one."""
        x = torch.randn(4, 2500, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, 1)
        actual, code = self.compiled(tempered, x)
        self.assertEqual(actual, tempered(x.double()).float())
        self.assertNotIn("libdevice.mul_rn", code)

    def test_as_ever(self):
        """Where no softmax is an online one."""
        x = torch.randn(4, 2500, device=GPU_TYPE)
        torch._dynamo.reset()
        with inductor_config.patch({**LOOPED_ALONE, "online_softmax": False}):
            actual, code = run_and_get_code(torch.compile(tempered, fullgraph=True), x)
        self.assertEqual(actual, tempered(x.double()).float())
        self.assertEqual("\n".join(code).count("for r0_offset in"), 3)
        self.assertNotIn("online_softmax_combine", "\n".join(code))


# Parts of a reduction that is split


@on_cuda
@instantiate_parametrized_tests
class SplitPartsTest(TestCase):
    """Each part begins at a vector where the first one does."""

    def check(self, f, shape, part, dtype=torch.float32):
        """As if what is long were split into three."""

        def split(device, reduction_numel_hint, *args, **kwargs):
            return 3 if reduction_numel_hint > 10000 else 1

        x = torch.randn(shape, device=GPU_TYPE).to(dtype)
        torch._dynamo.reset()
        with (
            inductor_config.patch(
                {
                    "split_reductions": True,
                    "triton.cooperative_reductions": False,
                    "triton.mix_order_reduction": False,
                    "force_disable_caches": True,
                }
            ),
            mock.patch.object(
                InductorChoices, "reduction_split_factor", staticmethod(split)
            ),
            mock.patch.object(
                InductorChoices,
                "leaves_rows_whole",
                staticmethod(lambda *_: False),
                create=True,
            ),
        ):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), x)
        sizes = re.findall(r"r0_numel = (\d+)", "\n".join(code))
        self.assertEqual(sizes, [str(part), "3"])
        expect = f(x.double())
        eps = torch.finfo(dtype).eps
        atol = 4 * eps * x.numel() ** 0.5
        self.assertEqual(actual.double(), expect, atol=atol, rtol=4 * eps)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("f", (torch.sum, torch.amax, torch.var))
    def test_parts(self, f, dtype):
        self.check(f, (4, 2501), 3336, dtype)  # ceil(10004 / 3) is 3335

    def test_rows(self):
        self.check(lambda x: x.sum(-1), (2, 10004), 3336)

    def test_as_ever(self):
        """Equal parts, and what is no multiple of anything."""
        self.check(torch.sum, (3, 3337), 3337)
        self.check(torch.sum, (1, 10003), 3335)

    def test_columns(self):
        """Parts of columns that are summed across: a row is a vector, or none."""
        self.check(lambda x: x.sum(0), (10004, 2), 3335)


class PartElementsTest(TestCase):
    def test_part(self):
        self.assertTrue(hasattr(looped_reduction, "part_elements"))

        def part(numel, split, hint=ReductionHint.INNER):
            return looped_reduction.part_elements(sympy.sympify(numel), split, hint)

        self.assertEqual(part(10004, 3), 3336)
        self.assertEqual(part(10004, 3, ReductionHint.OUTER), 3335)
        self.assertEqual(part(10003, 3), 3335)
        self.assertEqual(part(9 * 1111, 3), 3333)
        self.assertEqual(part(1024 * 128256, 528), 248744)
        # what is longer than it has to be may share no factor with the sizes of an image
        self.assertEqual(part(8 * 112 * 112, 13), 7720)
        size = sympy.Symbol("s0", integer=True, positive=True)
        self.assertEqual(str(part(size, 3)), str(FloorDiv(size + 2, 3)))


# Loops over short rows


FOUR_WARPS = "'loop': (16, 4)"


def half_rms_norm(x):
    return x * x.float().square().mean(-1, keepdim=True).rsqrt().type_as(x)


def centered(x):
    return x - x.mean(-1, keepdim=True)


@on_cuda
@instantiate_parametrized_tests
class ShortLoopsTest(TestCase):
    """A loop over a short row of half types has four warps, or eight."""

    def compile(self, f, x, rows=0, dynamic=False, **options):
        """As if `rows` an SM were few: none, by default."""
        torch._dynamo.reset()
        options = {
            "split_reductions": False,
            "triton.cooperative_reductions": False,
            # which do not know of what is patched here
            "force_disable_caches": True,
            **options,
        }
        with (
            inductor_config.patch(options),
            mock.patch.object(looped_reduction, "FEW_ROWS", rows),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            actual, code = run_and_get_code(compiled, x)
        return actual, "\n".join(code)

    def check(self, f, *shape, dtype=torch.bfloat16, **options):
        x = torch.randn(*shape, device=GPU_TYPE, dtype=dtype)
        actual, code = self.compile(f, x, **options)
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, dtype))
        eps = torch.finfo(dtype).eps
        scale = expect.abs().max().item()
        self.assertEqual(actual.double(), expect, atol=4 * eps * scale, rtol=4 * eps)
        return code

    @parametrize("f, longest", ((half_rms_norm, 2504), (centered, 4000)))
    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_half_types(self, dtype, f, longest):
        with inductor_config.patch("triton.persistent_reductions", False):
            for columns in (1104, longest):
                self.assertIn(FOUR_WARPS, self.check(f, 3, columns, dtype=dtype))

    def test_eight_warps(self):
        """Of what takes more than two blocks of four, and is read again."""
        self.assertIn("'loop': (8, 8)", self.check(half_rms_norm, 3, 5000))

    @parametrize("columns", (1104, 2504, 3001, 3998, 5120))
    def test_sums(self, columns):
        """Of the columns of one tensor, all are in flight."""
        self.assertIn("'loop': (16, 8)", self.check(row_sum, 3, columns))

    def test_many_accesses(self):
        def f(x):
            return sum(x[i : i + 3] for i in range(9)).sum(-1)

        x = torch.randn(12, 1104, device=GPU_TYPE, dtype=torch.bfloat16)
        actual, code = self.compile(f, x)
        self.assertEqual(actual, f(x.double()).bfloat16(), atol=1, rtol=0.01)
        self.assertNotIn("'loop': (", code)

    @parametrize("columns", (70, 196, 500))
    def test_few_columns(self, columns):
        """Fewer than four warps have."""
        with inductor_config.patch("triton.persistent_reductions", False):
            self.assertIn("'loop': (", self.check(half_rms_norm, 3, columns))

    def test_choice_can_be_overridden(self):
        class AtRunTime(InductorChoices):
            @staticmethod
            def loop_config(features):
                return None

        with V.set_choices_handler(AtRunTime()):
            code = self.check(row_sum, 3, 1501)
        self.assertNotIn("'loop': (", code)

    def test_as_ever(self):
        """Wider types, longer rows, few rows, rows at once, dynamic ones, other orders."""

        def part(x):
            return x[:, :1100].sum(-1)

        def halves(x):
            return (x.view(3, -1, 2) * x[:, :1100, None]).flatten(1).sum(-1)

        for code in (
            self.check(row_sum, 3, 1100, dtype=torch.float32),
            self.check(row_sum, 3, 5128),
            self.check(row_sum, 3, 4097),
            self.check(half_rms_norm, 3, 9000),
            self.check(row_sum, 3, 1100, rows=8),
            self.check(row_sum, 3, 1000),
            self.check(row_sum, 3, 1100, dynamic=True),
            self.check(lambda x: x.sum(0), 1100, 3),
            self.check(lambda x: x.cumsum(-1), 3, 1100),
            self.check(part, 3, 1200, dtype=torch.float32),
            self.check(halves, 3, 2200, dtype=torch.float32),
        ):
            self.assertNotIn("'loop': (", code)

    def test_rows_that_are_read_across(self):
        """A row a program would load a sector for each of its columns."""

        def f(x):
            return (x + x.flip(0)).sum(-1)

        def across(x):
            return (x + x.view(1100, -1).t()).sum(-1)

        hint = mock.Mock(return_value=ReductionHint.INNER)
        with mock.patch.object(SIMDKernelFeatures, "get_reduction_hint", hint):
            self.assertIn("'loop': (8, 8)", self.check(f, 24, 1100))
            self.assertNotIn("'loop': (", self.check(across, 24, 1100))

    def test_bytes(self):
        """Whose rows begin at words."""

        def f(x):
            return (x > 0).to(torch.int8), x.float().sum(-1)

        for columns, expected in ((1100, True), (1101, False)):
            x = torch.randint(-9, 10, (3, columns), device=GPU_TYPE).bfloat16()
            actual, code = self.compile(f, x)
            self.assertEqual(actual, f(x.double()))
            self.assertEqual("'loop': (8, 8)" in code, expected)


class ShortLoopConfigTest(TestCase):
    def config(self, sms=132, **row):
        row = {
            "rows": 8192,
            "columns": 2560,
            "read_again": 2,
            "narrow": True,
            "accesses": 2,
            "loops": 2,
            **row,
        }
        device = DeviceModel.of(DeviceProperties("cuda", 0, sms, 90))
        return looped_reduction.short_loop_config(LoopedRows(**row), device)

    def test_config(self):
        self.assertTrue(hasattr(looped_reduction, "short_loop_config"))
        self.assertEqual(self.config(), LoopConfig(16, 4))
        self.assertEqual(self.config(columns=4096), LoopConfig(16, 4))
        self.assertEqual(self.config(columns=4097), LoopConfig(8, 8))
        self.assertEqual(self.config(columns=8192), LoopConfig(8, 8))
        self.assertIsNone(self.config(columns=8193))
        # what is read once
        self.assertEqual(self.config(columns=2048, loops=1), LoopConfig(8, 8))
        self.assertIsNone(self.config(columns=2049, loops=1))
        sums = {"accesses": 1, "loops": 1}
        for vector, most in ((8, 5120), (4, 5120), (2, 4096), (1, 4096)):
            sums["vector"] = vector
            self.assertEqual(self.config(columns=most, **sums), LoopConfig(16, 8))
            self.assertIsNone(self.config(columns=most + 1, **sums))
        self.assertIsNone(self.config(narrow=False))
        self.assertIsNone(self.config(rows=8 * 132 - 1))
        self.assertEqual(self.config(rows=8 * 132), LoopConfig(16, 4))
        self.assertEqual(self.config(rows=512, sms=64), LoopConfig(16, 4))

    def sum_config(self, sms=132, cc=90, warps=64, **row):
        """Of the parts of a sum of all elements; None where the runtime decides."""
        of_sum = {"read_again": 0, "loops": 1, "all_accesses": 2, "slots": 8}
        of_sum = {"rows": 528, "columns": 81920, "accesses": 2, "vector": 8, **of_sum}
        row = {**of_sum, "narrow": True, "widest": 2, **row}
        self.assertTrue(hasattr(looped_reduction, "sum_loop_config"))
        device = DeviceModel.of(DeviceProperties("cuda", 0, sms, cc))
        device = dataclasses.replace(device, warps_per_sm=warps)
        return looped_reduction.sum_loop_config(LoopedRows(**row), device)

    def test_few_long_sums(self):
        """By whole vectors, in half as many programs of twice as many warps."""
        self.assertEqual(self.sum_config(), LoopConfig(8, 32))
        wide = {"vector": 4, "widest": 4, "narrow": False}
        # whose threads are told what two programs leave of the registers
        self.assertEqual(self.sum_config(**wide), LoopConfig(4, 32, 2))
        for fits_or_not in (1, 3):
            row = {**wide, "accesses": fits_or_not}
            self.assertEqual(self.sum_config(**row), LoopConfig(4, 32))
        self.assertEqual(self.sum_config(accesses=1), LoopConfig(4, 32))
        # of as many rows for its SMs
        self.assertEqual(self.sum_config(108, 80, rows=432), LoopConfig(8, 32))
        self.assertIsNone(self.sum_config(108, 80, rows=3 * 108))
        # an SM has 48 warps, of which a program would leave 16
        self.assertIsNone(self.sum_config(84, 86, warps=48, rows=336))
        self.assertEqual(self.sum_config(accesses=1, columns=81912), LoopConfig(8, 32))
        for other in (
            {"rows": 132},
            {"rows": 8 * 132},
            {**wide, "rows": 16 * 132},
            # three an SM, of which two are there at a time, or none of the runtime's waits
            {"rows": 3 * 132},
            {"loops": 2},
            {"online": True},
            {"welford": True},
            {"doubles": 1},
            {"columns": SHORT_ROW},
            # of two types, or of one that makes no vectors
            {"vector": 4},
            {"vector": 8, "widest": 4, "narrow": False},
            # of whose last block half is masked, or some where another masks nothing
            {"columns": 20480},
            {"accesses": 1, "columns": 100352},
        ):
            self.assertIsNone(self.sum_config(**other))

    def test_few_long_sums_beside_a_last_wave_of_the_runtime(self):
        """Of which more is idle than of half as many programs, with what their last block masks."""
        for rows, columns in ((540, 122880), (792, 122880), (651, 30952)):
            row = {"rows": rows, "columns": columns, "vector": 4, "widest": 4}
            self.assertEqual(self.sum_config(**row), LoopConfig(4, 32, 2))
        for rows in (528 + 264 + 1, 3 * 132):
            self.assertIsNone(self.sum_config(rows=rows, columns=122880))
        # of half types, whose usual programs have eight columns a thread
        self.assertEqual(self.sum_config(rows=540, columns=122880), LoopConfig(8, 32))
        self.assertIsNone(self.sum_config(rows=651, columns=30952))


# Minima and maxima that propagate NaN


VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -3e38, 1e-45)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@on_cuda
@instantiate_parametrized_tests
class NanMaximumTest(TestCase):
    """Minima and maxima of float32 are an instruction each, and propagate NaN."""

    @parametrize("name", ("minimum", "maximum"))
    def test_one_instruction(self, name):
        source = inspect.getsource(getattr(triton_helpers, name).fn)
        calls = [
            {keyword.arg for keyword in node.keywords}
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == name
        ]
        self.assertEqual(calls, [{"propagate_nan"}])

    def check(self, f, *args, **options):
        torch._dynamo.reset()
        with inductor_config.patch(options):
            actual = torch.compile(f, fullgraph=True)(*args)
        # of zeros, the sign may be either's
        self.assertEqual(actual, f(*args), atol=0, rtol=0, equal_nan=True)

    @parametrize("dtype", FLOATS)
    def test_all_pairs(self, dtype):
        pairs = torch.tensor(list(itertools.product(VALUES, VALUES)), device=GPU_TYPE)
        a, b = pairs.to(dtype).unbind(1)
        self.check(lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)), a, b)

    @parametrize("dtype", (torch.int8, torch.int32, torch.int64, torch.uint8))
    def test_integers(self, dtype):
        x = torch.randint(0, 100, (2, 300), device=GPU_TYPE).to(dtype)
        self.check(lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)), *x)

    def test_a_float_and_an_integer(self):
        x = torch.tensor(VALUES, device=GPU_TYPE)
        n = torch.arange(len(VALUES), device=GPU_TYPE)
        self.check(lambda a, b: (torch.maximum(a, b), a.clamp(min=1), a.clamp(max=1)), x, n)

    @parametrize("dtype", FLOATS)
    @parametrize("persistent", (True, False))
    def test_rows(self, dtype, persistent):
        x = torch.randn(9, 3000, device=GPU_TYPE).to(dtype)
        for row, value in zip(x, VALUES):
            row[1999] = value
        options = {"triton.persistent_reductions": persistent, "split_reductions": False}
        columns = slice(1984, 2048)
        f = lambda x: (x.amax(1), x.amin(1), x[:, columns].relu().amax(0))  # noqa: E731
        self.check(f, x, **options)

    @parametrize("columns", (3000, 20000))
    def test_softmax(self, columns):
        x = torch.randn(9, columns, device=GPU_TYPE)
        x[1, 7], x[2] = float("nan"), float("-inf")
        actual = torch.compile(torch.log_softmax)(x, 1)
        self.assertEqual(actual.isnan(), torch.log_softmax(x, 1).isnan())
        self.assertEqual(actual, torch.log_softmax(x, 1), equal_nan=True)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
