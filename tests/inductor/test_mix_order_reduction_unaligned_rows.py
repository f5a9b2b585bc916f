# Owner(s): ["module: inductor"]

import ast
import dataclasses
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_row_split import row_split, RowCost
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


H200 = DeviceModel.of(
    DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        regs_per_multiprocessor=65536,
    )
)
BF16, FP32 = torch.bfloat16, torch.float32


def both(x):
    y = x * x
    return y.sum(0), y.sum(1)


def both_of_two(x, y):
    return both(x * y)


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    fuse = FUSE_ALL

    def stages(self, f, *args):
        """Of the first configuration of the mix-order kernel of ``f``."""
        metrics.reset()
        code = self.check(f, *args)
        (meta,) = re.findall(r"'row_split': (\{.*?\})", code)
        return ast.literal_eval(meta)["configs"][0][2]

    # rows of bfloat16 with an odd number of columns cannot be copied asynchronously
    @parametrize(
        "columns,dtype,staged",
        ((513, BF16, False), (516, BF16, True), (512, BF16, True), (516, FP32, True)),
    )
    def test_one_stage(self, columns, dtype, staged):
        x = randn(133, columns, dtype=dtype)
        self.assertEqual(self.stages(both, x) > 1, staged)

    # the first column, and the columns of the tensor that 96 are of
    @parametrize(
        "first,width,staged",
        ((0, 201, False), (1, 200, False), (2, 200, True), (0, 200, True)),
    )
    def test_rows_of_a_wider_tensor(self, first, width, staged):
        def f(x):
            return both(x[:, first : first + 96])

        x = randn(133, width, dtype=BF16)
        self.assertEqual(self.stages(f, x) > 1, staged)

    def test_some_rows_that_are_staged(self):
        def f(x, y):
            return both_of_two(x, y[:, :513])

        x, y = randn(133, 513, dtype=BF16), randn(133, 600)
        self.assertGreater(self.stages(f, x, y), 1)

    @parametrize("columns", (65, 127, 769, 2049))
    @parametrize("rows", (13, 133, 1030))
    def test_values(self, rows, columns):
        x, *more = rms_norm_args(rows, columns, BF16)
        metrics.reset()
        self.check(rms_norm_backward, x, *more)
        metrics.reset()
        self.check(both, x)

    @inductor_config.patch("triton.mix_order_reduction_debug", {"keep_rows": False})
    def test_rows_that_would_be_loaded_twice(self):
        # those of bfloat16 with an odd number of columns: three times as slow as unfused
        for columns, dtype, fused in ((16383, BF16, 0), (16384, BF16, 1)):
            metrics.reset()
            args = rms_norm_args(40, columns, dtype)
            self.check(rms_norm_backward, *args, fused=fused)

    def test_dynamic_rows(self):
        x = randn(133, 513, dtype=BF16)
        torch._dynamo.mark_dynamic(x, 0)
        self.assertEqual(self.stages(both, x), 1)


@instantiate_parametrized_tests
class PolicyTest(TestCase):
    def cost(self, columns, streams=2, accumulators=1, stores_rows=True):
        fields = {field.name for field in dataclasses.fields(RowCost)}
        self.assertIn("staged", fields)
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=2 * streams,
            streams=streams,
            stores_rows=stores_rows,
            accumulators=accumulators,
            invariants=1,
            staged=False,
        )

    @parametrize("columns", (513, 769, 1001, 2049, 3001, 5003))
    @parametrize("stores_rows,warps", ((True, 16), (False, 32)))
    def test_warps_that_stay_on_an_sm(self, columns, stores_rows, warps):
        streams = 2 if stores_rows else 1
        cost = self.cost(columns, streams, stores_rows=stores_rows)
        split = row_split(cost, H200, 100_000)
        self.assertEqual(split.num_stages, 1)
        self.assertFalse(split.reload)
        self.assertLessEqual(split.num_warps * split.programs_per_sm, warps)
        self.assertGreaterEqual(split.num_warps * split.programs_per_sm, warps // 2)
        # 32 columns a thread at most, whatever the padding
        self.assertLessEqual(split.xblock * columns, 32 * 32 * split.num_warps)

    @parametrize("columns", (333, 701, 1537, 3333, 4601))
    @parametrize("stores_rows", (False, True))
    @parametrize("accumulators", (1, 3, 5))
    def test_programs_that_registers_hold(self, accumulators, stores_rows, columns):
        streams = accumulators
        cost = self.cost(columns, streams, accumulators, stores_rows)
        split = row_split(cost, H200, 100_000)
        tiles = split.xblock * (streams + 1 if stores_rows else streams)
        # of one program: its values, and of each thread what other things take. It may need
        # a sixteenth more than its share
        needed = (accumulators + 1 + tiles) * columns + 28 * 32 * split.num_warps
        programs = H200.registers_per_sm * 17 // 16 // needed
        self.assertLessEqual(split.programs_per_sm, max(1, programs))
        most = (16 if stores_rows else 32) // split.num_warps
        self.assertGreaterEqual(split.programs_per_sm, min(programs, most) // 2)

    # more than the tiles of all loads fit in, as they are reduced one after another
    @parametrize("columns,accumulators", ((7305, 5), (6401, 7)))
    def test_sums_that_fit_a_tile_at_a_time(self, columns, accumulators):
        cost = self.cost(columns, 4, accumulators, stores_rows=False)
        split = row_split(cost, H200, 100_000)
        self.assertEqual((split.num_stages, split.programs_per_sm), (1, 1))
        self.assertFalse(split.reload)

    @parametrize("rows", (1, 5, 1000))
    def test_no_more_programs_than_tiles(self, rows):
        split = row_split(self.cost(2049), H200, rows)
        self.assertLessEqual(split.num_programs * split.xblock, rows + split.xblock - 1)

    def test_what_is_given(self):
        split = row_split(self.cost(513), H200, 100_000, 3, 1)
        self.assertEqual((split.programs_per_sm, split.num_programs), (3, 396))
        self.assertEqual((split.xblock, split.num_stages), (1, 1))

    @inductor_config.patch("triton.mix_order_reduction_debug", {"prefetch_rows": False})
    def test_many_buffers(self):
        # fewer rows at once, and where one does not fit, rows are loaded twice
        few = row_split(self.cost(5003), H200, 100_000)
        more = row_split(self.cost(5003, streams=6, accumulators=3), H200, 100_000)
        self.assertLess(more.xblock, few.xblock)
        most = row_split(self.cost(16383, streams=9, accumulators=4), H200, 100_000)
        self.assertTrue(most.reload)

    def test_rows_that_are_staged(self):
        cost = dataclasses.replace(self.cost(2049), staged=True)
        self.assertGreater(row_split(cost, H200, 100_000).num_stages, 1)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
