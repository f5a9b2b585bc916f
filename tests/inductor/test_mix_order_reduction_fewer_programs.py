# Owner(s): ["module: inductor"]

import ast
import dataclasses
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
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


H200 = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    regs_per_multiprocessor=65536,
)
FEWER_PROGRAMS = "triton.mix_order_reduction_fewer_programs"


def both(x):
    return x.sum(0), x.sum(-1)


@instantiate_parametrized_tests
class PolicyTest(TestCase):
    def cost(self, columns, size=2, accumulators=1):
        """Of sums over both dimensions."""
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=size,
            streams=1,
            stores_rows=False,
            accumulators=accumulators,
            invariants=0,
            staged=columns * size % 4 == 0,
        )

    def programs(self, cost, rows):
        """With all programs, and by default."""
        with inductor_config.patch({FEWER_PROGRAMS: False}):
            most = row_split(cost, H200, rows)
        split = row_split(cost, H200, rows)
        self.assertEqual(
            split, dataclasses.replace(most, num_programs=split.num_programs)
        )
        return most.num_programs, split.num_programs

    # as they were measured: some with all, a half and a quarter of their programs
    @parametrize(
        "rows,columns,share",
        ((4097, 513, 4), (2048, 2048, 2), (4097, 2048, 2), (8192, 512, 2)),
    )
    def test_fewer(self, rows, columns, share):
        most, programs = self.programs(self.cost(columns), rows)
        self.assertEqual(programs, -(-most // share))

    @parametrize(
        "rows,columns",
        ((1000, 512), (4097, 65), (4097, 128), (500, 4096), (65536, 513), (1 << 20, 2048)),
    )
    def test_all(self, rows, columns):
        most, programs = self.programs(self.cost(columns), rows)
        self.assertEqual(programs, most)

    @parametrize("columns", (65, 512, 513, 2049, 8192, 16384))
    @parametrize("accumulators", (1, 4))
    def test_most_sms_have_a_program(self, accumulators, columns):
        cost = self.cost(columns, accumulators=accumulators)
        for rows in (1, 99, 132, 200, 264, 1000, 4097, 30001):
            most, programs = self.programs(cost, rows)
            self.assertGreaterEqual(programs, min(most, 99))
            self.assertGreaterEqual(4 * programs, most)

    def test_more_accumulators_are_made_by_no_more_programs(self):
        programs = [
            self.programs(self.cost(2048, accumulators=count), 4097)[1]
            for count in (1, 2)
        ]
        self.assertGreaterEqual(programs[0], programs[1])

    def test_dynamic_rows(self):
        most, programs = self.programs(self.cost(513), None)
        self.assertEqual(programs, most)


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    fuse = FUSE_ALL

    def programs(self, f, *args, **options):
        """Of the mix-order kernel of ``f``, whose results are right."""
        torch._dynamo.reset()
        metrics.reset()
        code = self.check(f, *args, **options)
        (meta,) = re.findall(r"'row_split': (\{.*?\})", code)
        return ast.literal_eval(meta)["NUM_PROGRAMS"]

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("rows", (2048, 2051))
    def test_sums(self, rows, dtype):
        x = randn(rows, 513, dtype=dtype)
        most = self.programs(both, x, **{FEWER_PROGRAMS: False})
        programs = self.programs(both, x)
        self.assertLess(programs, most)
        self.assertGreaterEqual(4 * programs, most)

    def test_norm(self):
        args = rms_norm_args(500, 2048, torch.bfloat16)
        most = self.programs(rms_norm_backward, *args, **{FEWER_PROGRAMS: False})
        self.assertEqual(self.programs(rms_norm_backward, *args), most // 2)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
