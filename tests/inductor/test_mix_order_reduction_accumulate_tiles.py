# Owner(s): ["module: inductor"]

import unittest

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.mix_order_row_split import row_split, RowCost
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


FUSE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "triton.mix_order_reduction_max_reads": 0,
    "triton.mix_order_reduction_autotune_split_size": False,
    "triton.mix_order_reduction_split_size": None,
    "triton.mix_order_reduction_persistent_row_split": True,
    "triton.mix_order_reduction_extrema": True,
    "split_reductions": False,
    # so that all inputs are loaded in the kernel
    "realize_reads_threshold": 100,
    "realize_acc_reads_threshold": 100,
    "realize_opcount_threshold": 100,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}
TILE = "accum0 = tl.full([XBLOCK, R0_BLOCK]"
ROW = "accum0 = tl.full([R0_BLOCK]"
nvidia_only = unittest.skipIf(
    GPU_TYPE != "cuda" or torch.version.hip is not None, "not an NVIDIA GPU"
)


def residual_backward(x, dy, *residuals):
    """RMSNorm's backward whose input is a sum: a buffer to load for each summand."""
    for residual in residuals:
        x = x + residual
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)
    return (dy - x * (x * dy).mean(-1, keepdim=True)) * rstd, (dy * x).sum(0)


def extrema(x, *others):
    y = x
    for other in others:
        y = y + other
    return y * y.sum(-1, keepdim=True), y.amax(0), y.amin(0)


def product(x, *others):
    y = x
    for other in others:
        y = y * other
    return y * y.sum(-1, keepdim=True), y.prod(0)


def randn(rows, columns, count, dtype=torch.float32):
    return [
        torch.randn(rows, columns, device=GPU_TYPE).to(dtype) for _ in range(count)
    ]


@nvidia_only
@instantiate_parametrized_tests
class AccumulateTilesTest(TestCase):
    """Partial accumulators where the rows of a tile are in several warps."""

    def compiled(self, f, args):
        """What ``f`` returns, and the source of its one mix-order kernel."""
        metrics.reset()
        torch._dynamo.reset()
        with inductor_config.patch(FUSE):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        kernels = "\n".join(code).split("async_compile.triton(")
        (kernel,) = (each for each in kernels if "'row_split'" in each)
        return actual, kernel

    def check(self, f, args, accumulator, reduction="tl.sum"):
        actual, kernel = self.compiled(f, args)
        self.assertIn(accumulator, kernel)
        _, _, loop = kernel.partition("in tl.range(0, split_size")
        after = f"accum0 = {reduction}(accum0, 0)[None, :]"
        self.assertEqual(after in loop, accumulator == TILE)
        expect = f(*(t.double() for t in args))
        eager = f(*args)
        for act, ref, eag in zip(actual, expect, eager):
            self.assertEqual((act.shape, act.stride()), (eag.shape, eag.stride()))
            self.assertEqual(act.dtype, eag.dtype)
            error = (act.double() - ref).norm()
            eager_error = (eag.double() - ref).norm()
            ulp = torch.finfo(act.dtype).eps * ref.norm()
            self.assertLessEqual(error, max(1.1 * eager_error, 2 * ulp))

    # of 8 rows: a tile and a bit, two, and more
    @parametrize("rows", (9, 16, 133))
    def test_rows_in_several_warps(self, rows):
        self.check(residual_backward, randn(rows, 128, 10), TILE)

    def test_half_types(self):
        self.check(residual_backward, randn(133, 128, 10, torch.bfloat16), TILE)

    def test_extrema(self):
        self.check(extrema, randn(133, 128, 10), TILE, "triton_helpers.max2")

    def test_extrema_propagate_nan(self):
        args = randn(133, 128, 10)
        args[3][77, 5] = float("nan")
        (_, largest, smallest), _ = self.compiled(extrema, args)
        for actual in (largest, smallest):
            self.assertEqual(actual.isnan().nonzero().tolist(), [[5]])

    def test_product(self):
        self.check(product, randn(9, 128, 10), TILE, "triton_helpers.prod")

    def test_a_row_for_all_warps(self):
        self.check(residual_backward, randn(133, 2048, 2), ROW)

    def test_one_warp(self):
        self.check(residual_backward, randn(133, 64, 2), ROW)

    def test_repeats(self):
        args = randn(133, 128, 10)
        with inductor_config.patch(FUSE):
            compiled = torch.compile(residual_backward, fullgraph=True)
            first, code = run_and_get_code(compiled, *args)
            self.assertIn(TILE, "\n".join(code))
            for left, right in zip(first, compiled(*args)):
                self.assertTrue(torch.equal(left, right))


@nvidia_only
class PolicyTest(TestCase):
    def test_when(self):
        """Tiles, and registers for them, where a warp holds no part of some row."""
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        for rnumel in (64, 128, 256, 512, 1024, 2048, 8192):
            for streams in (2, 5, 9):
                for accumulators in (1, 2, 5):
                    cost = RowCost(
                        columns=rnumel,
                        rnumel=rnumel,
                        stream_bytes=2 * streams,
                        streams=streams,
                        stores_rows=True,
                        accumulators=accumulators,
                        invariants=1,
                    )
                    split = row_split(cost, device, rows=100_000)
                    self.assertTrue(hasattr(split, "accumulate_tiles"))
                    several = split.xblock > 1 and split.num_warps > 1
                    self.assertEqual(
                        split.accumulate_tiles,
                        several and split.num_warps * 256 > rnumel,
                    )
                    if split.accumulate_tiles:
                        tile = split.xblock * rnumel
                        threads = split.num_warps * 32
                        self.assertLess(accumulators * tile / threads, 255)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
