# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_row_split import row_split, RowCost
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU

try:
    from .test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
    )


FUSE = {
    **FUSE_ALL,
    # so that all inputs are loaded in the kernel
    "realize_reads_threshold": 100,
    "realize_acc_reads_threshold": 100,
    "realize_opcount_threshold": 100,
}
TILE = "accum0 = tl.full([XBLOCK, R0_BLOCK]"
ROW = "accum0 = tl.full([R0_BLOCK]"


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


def tensors(count, *shape, dtype=torch.float32):
    return [randn(*shape, dtype=dtype) for _ in range(count)]


@nvidia_only
@instantiate_parametrized_tests
class AccumulateTilesTest(MixOrderTestCase):
    """Partial accumulators where the rows of a tile are in several warps."""

    fuse = FUSE

    def check(self, f, args, accumulator, reduction="tl.sum"):
        before, loop = self.kernel(super().check(f, *args))
        self.assertIn(accumulator, before)
        after = f"accum0 = {reduction}(accum0, 0)[None, :]"
        self.assertEqual(after in loop, accumulator == TILE)

    # of 8 rows: a tile and a bit, two, and more
    @parametrize("rows", (9, 16, 133))
    def test_rows_in_several_warps(self, rows):
        self.check(residual_backward, tensors(10, rows, 128), TILE)

    def test_half_types(self):
        args = tensors(10, 133, 128, dtype=torch.bfloat16)
        self.check(residual_backward, args, TILE)

    def test_extrema(self):
        self.check(extrema, tensors(10, 133, 128), TILE, "triton_helpers.max2")

    def test_extrema_propagate_nan(self):
        args = tensors(10, 133, 128)
        args[3][77, 5] = float("nan")
        with inductor_config.patch(FUSE):
            compiled = torch.compile(extrema, fullgraph=True)
            (_, largest, smallest), (code,) = run_and_get_code(compiled, *args)
        self.assertIn(TILE, code)
        for actual in (largest, smallest):
            self.assertEqual(actual.isnan().nonzero().tolist(), [[5]])

    def test_product(self):
        self.check(product, tensors(10, 9, 128), TILE, "triton_helpers.prod")

    def test_a_row_for_all_warps(self):
        self.check(residual_backward, tensors(2, 133, 2048), ROW)

    def test_one_warp(self):
        self.check(residual_backward, tensors(2, 133, 64), ROW)

    def test_repeats(self):
        args = tensors(10, 133, 128)
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
        device = DeviceModel.of(DeviceProperties.create(torch.device(GPU_TYPE)))
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
