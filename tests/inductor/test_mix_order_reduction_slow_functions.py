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
    from .test_mix_order_reduction_utils import MixOrderTestCase, randn
except ImportError:
    from test_mix_order_reduction_utils import MixOrderTestCase, randn


H200 = DeviceModel.of(
    DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=132,
        cc=90,
        regs_per_multiprocessor=65536,
    )
)


def of_tanh(x, y):
    z = x * (1 - torch.tanh(y) ** 2)
    return z.sum(0), z.sum(1)


def of_product(x, y):
    z = x * (1 - y**2)
    return z.sum(0), z.sum(1)


@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    def configs(self, f, *shape, dtype=torch.bfloat16):
        metrics.reset()
        code = self.check(f, *(randn(*shape, dtype=dtype) for _ in "xy"))
        (meta,) = re.findall(r"'row_split': (\{.*?\})", code)
        return ast.literal_eval(meta)["configs"][0]

    def test_more_warps(self):
        xblock, num_warps, _ = self.configs(of_tanh, 300, 4096)
        fewer_xblock, fewer, _ = self.configs(of_product, 300, 4096)
        self.assertEqual((xblock, num_warps), (1, 16))
        self.assertGreater(num_warps // xblock, fewer // fewer_xblock)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("shape", ((1030, 96), (301, 1000), (37, 5003)))
    def test_values(self, shape, dtype):
        self.configs(of_tanh, *shape, dtype=dtype)


@instantiate_parametrized_tests
class PolicyTest(TestCase):
    def cost(self, columns, streams=2, itemsize=2, accumulators=1, stores_rows=True):
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=itemsize * streams,
            streams=streams,
            stores_rows=stores_rows,
            accumulators=accumulators,
            invariants=0,
            slow=True,
        )

    @parametrize("columns", (768, 1024, 3072, 4096))
    def test_warps_that_stay_on_an_sm(self, columns):
        split = row_split(self.cost(columns), H200, 100_000)
        self.assertEqual(split.num_warps * split.programs_per_sm, 32)
        fast = dataclasses.replace(self.cost(columns), slow=False)
        split = row_split(fast, H200, 100_000)
        self.assertEqual(split.num_warps * split.programs_per_sm, 8)

    @parametrize("columns", (64, 128, 512, 1024, 2048, 4096, 8192, 16384))
    @parametrize("itemsize", (2, 4))
    # of rows that are kept though they do not fit, those that are slow are not
    @inductor_config.patch("triton.mix_order_reduction_debug", {"keep_rows": False})
    def test_fits(self, columns, itemsize):
        for streams in (1, 2, 5, 9):
            for accumulators in (1, 3, 6):
                cost = self.cost(columns, streams, itemsize, accumulators)
                split = row_split(cost, H200, 100_000)
                warps = split.num_warps * split.programs_per_sm
                self.assertLessEqual(warps, 64)
                tile = split.xblock * cost.rnumel * cost.stream_bytes
                if split.num_stages > 1:  # one is not held in shared memory
                    stages = split.num_stages * split.programs_per_sm
                    self.assertLessEqual(tile * stages, 227 * 1024)
                fast = row_split(dataclasses.replace(cost, slow=False), H200, 100_000)
                if split.reload:
                    self.assertTrue(fast.reload)
                if not fast.reload:
                    self.assertLessEqual(
                        split.xblock / split.num_warps, fast.xblock / fast.num_warps
                    )


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
