# Owner(s): ["module: inductor"]

import math
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_row_split import row_split, RowCost
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.runtime_utils import next_power_of_2
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


BF16, FP32 = torch.bfloat16, torch.float32
DEBUG = "triton.mix_order_reduction_debug"


@instantiate_parametrized_tests
class RowSplitTest(TestCase):
    """Which rows are copied asynchronously, and which are fetched ahead instead."""

    def split(self, columns, size, cc=90, rows=20000, **cost):
        gpu = DeviceModel.of(
            DeviceProperties(
                type="cuda",
                index=0,
                multi_processor_count=132,
                cc=cc,
                regs_per_multiprocessor=65536,
            )
        )
        values = {
            "columns": columns,
            "rnumel": next_power_of_2(columns),
            "stream_bytes": 2 * size,
            "streams": 2,
            "stores_rows": True,
            "accumulators": 1,
            "invariants": 1,
            "copy_bytes": math.gcd(columns * size, 16),
        }
        return row_split(RowCost(**{**values, **cost}), gpu, rows)

    def copied(self, split):
        """Whether the loop over tiles has stages; if not, the next one is fetched."""
        self.assertEqual(split.prefetch, split.num_stages == 1)
        self.assertEqual(split.staged, split.num_stages > 1)
        return split.staged

    # 16 bytes; 8 of few columns, and of more; 4
    @parametrize(
        "columns,size,copied",
        (
            (1000, 2, True),
            (4100, 4, True),
            (516, 2, True),
            (1002, 4, True),
            (1028, 2, True),
            (2052, 2, False),
            (3334, 4, False),
            (130, 2, False),
            (5002, 2, False),
            (129, 4, False),
            (7001, 4, False),
        ),
    )
    def test_rows(self, columns, size, copied):
        self.assertEqual(self.copied(self.split(columns, size)), copied)
        sums = {"stores_rows": False, "streams": 1, "stream_bytes": size, "invariants": 0}
        self.assertEqual(self.copied(self.split(columns, size, **sums)), copied)
        with inductor_config.patch({DEBUG: {"min_copy_bytes": 4}}):
            self.assertTrue(self.copied(self.split(columns, size)))

    # whose next rows no instruction can ask for
    @parametrize("cost", ({"adjoin": False}, {"cc": 80}, {"slow": True}))
    def test_rows_that_are_not_fetched(self, cost):
        self.assertGreater(self.split(3333, 4, **cost).num_stages, 1)
        self.assertFalse(self.split(3333, 4, **cost).prefetch)

    # rows of few columns and many partials
    @parametrize("columns,accumulators,copied", ((129, 3, False), (129, 4, True), (257, 4, False)))
    def test_narrow_rows(self, columns, accumulators, copied):
        split = self.split(columns, 4, accumulators=accumulators)
        self.assertEqual(self.copied(split), copied)

    def test_prefetch_knob(self):
        with inductor_config.patch({DEBUG: {"prefetch_rows": False}}):
            self.assertGreater(self.split(3333, 4).num_stages, 1)

    @parametrize("columns,size", ((12290, 2), (14002, 2), (10241, 4), (12290, 4)))
    def test_wide_rows(self, columns, size):
        split = self.split(columns, size)
        self.assertEqual((split.num_stages, split.reload), (1, False))
        with inductor_config.patch({DEBUG: {"min_copy_bytes": 4}}):
            self.assertGreater(self.split(columns, size).num_stages, 1)


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    """What kernels fetch, and that they compute what they did."""

    fuse = FUSE_ALL

    def fetched(self, code):
        """How many tensors a kernel fetches the next rows of."""
        _, loop = self.kernel(code)
        fetched = loop.count("triton_helpers.prefetch_rows(")
        (config,) = re.findall(r"'configs': \[\((\d+), (\d+), (\d+)\)", code)
        self.assertEqual(config[2] == "1", fetched > 0)
        return fetched

    @parametrize("columns,dtype", ((130, BF16), (97, FP32), (1034, BF16), (1033, FP32)))
    @parametrize("rows", (13, 133, 1030))
    def test_values(self, rows, columns, dtype):
        args = rms_norm_args(rows, columns, dtype)
        self.assertEqual(self.fetched(self.check(rms_norm_backward, *args)), 2)

    @parametrize("columns,dtype", ((136, BF16), (132, BF16), (96, FP32), (98, FP32)))
    def test_rows_that_are_copied(self, columns, dtype):
        args = rms_norm_args(133, columns, dtype)
        self.assertEqual(self.fetched(self.check(rms_norm_backward, *args)), 0)

    # the other side's loops are split in two layers, and go beyond the last row
    @parametrize("rows", (8192, 20011))
    def test_rows_that_are_split_unevenly(self, rows):
        args = rms_norm_args(rows, 97)
        code = self.generate(rms_norm_backward, *args, split_reductions=True)
        self.assertEqual(self.fetched(code), 2)

    def test_rows_of_two_types(self):
        # elements of 4 bytes beside those that cannot be copied
        x, weight, dy, rstd = rms_norm_args(133, 97)
        code = self.check(rms_norm_backward, x.to(BF16), weight, dy, rstd)
        self.assertEqual(self.fetched(code), 2)

    @parametrize("first,width", ((0, 201), (4, 201)))
    def test_rows_of_a_wider_tensor(self, first, width):
        def f(x):
            y = x[:, first : first + 97] * 2
            return y.sum(0), y.sum(1)

        self.assertEqual(self.fetched(self.check(f, randn(133, width))), 0)

    def test_gathered_rows(self):
        def f(x, y, index):
            return rms_norm_backward(x, y[0], y[index], x[:, :1])

        x, y = randn(133, 97), randn(133, 97)
        index = torch.randint(0, 133, (133,), device=x.device)
        self.assertEqual(self.fetched(self.check(f, x, y, index)), 0)

    def test_dynamic_rows(self):
        args = rms_norm_args(133, 97)
        for arg in (args[0], args[2], args[3]):
            torch._dynamo.mark_dynamic(arg, 0)
        self.assertEqual(self.fetched(self.check(rms_norm_backward, *args)), 2)

    def test_knob(self):
        args = rms_norm_args(133, 97)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"min_copy_bytes": 4}})
        self.assertEqual(self.fetched(code), 0)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
