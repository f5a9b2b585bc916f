# Owner(s): ["module: inductor"]

import ast
import dataclasses
import re
import unittest

import sympy

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.mix_order_row_split import RowCost
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


DEBUG = "triton.mix_order_reduction_debug"


def both(x):
    return x.sum(0), x.sum(-1)


def gpu(sms):
    return DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=sms,
        cc=90,
        regs_per_multiprocessor=65536,
    )


H200 = gpu(132)


@instantiate_parametrized_tests
class PolicyTest(TestCase):
    def cost(self, columns, size=2, accumulators=1, stores_rows=False):
        """Of sums over both dimensions, or, with rows that are stored, of a norm."""
        streams = 2 if stores_rows else 1
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=size * streams,
            streams=streams,
            stores_rows=stores_rows,
            accumulators=accumulators,
            invariants=1 if stores_rows else 0,
            staged=columns * size % 4 == 0,
        )

    def programs(self, cost, rows, device=H200):
        """With all programs, and by default, which changes nothing else."""
        with inductor_config.patch({DEBUG: {"fewer_programs": False}}):
            most = InductorChoices.mix_order_row_split(cost, rows, device)
        split = InductorChoices.mix_order_row_split(cost, rows, device)
        self.assertEqual(
            split, dataclasses.replace(most, num_programs=split.num_programs)
        )
        return most.num_programs, split.num_programs

    # the best of what was measured of each: all programs, a half or a quarter of them
    @parametrize(
        "rows,columns,share",
        (
            (4097, 513, 4),
            (2048, 2048, 2),
            (4097, 2048, 2),
            (8192, 512, 2),
            (1000, 512, 1),
            (4097, 65, 1),
            (4097, 128, 1),
            (500, 4096, 1),
        ),
    )
    def test_sums(self, rows, columns, share):
        most, programs = self.programs(self.cost(columns), rows)
        self.assertEqual(programs, -(-most // share))

    @parametrize(
        "rows,columns,size,share",
        ((500, 2048, 2, 2), (1000, 513, 4, 1), (8192, 1024, 2, 1), (2048, 4096, 2, 1)),
    )
    def test_rows_that_are_stored(self, rows, columns, size, share):
        cost = self.cost(columns, size, stores_rows=True)
        most, programs = self.programs(cost, rows)
        self.assertEqual(programs, -(-most // share))

    def test_more_partials_are_left_by_fewer_programs(self):
        programs = [
            self.programs(self.cost(2048, accumulators=count), 4097)
            for count in (1, 2, 3)
        ]
        self.assertEqual([most for most, _ in programs], [1056, 1056, 528])
        self.assertEqual([fewer for _, fewer in programs], [528, 528, 264])

    @parametrize("sms", (40, 84, 108, 132, 148))
    @parametrize("columns", (65, 513, 2048, 16384))
    def test_most_sms_have_a_program(self, columns, sms):
        fewer = 0
        for rows in (1, sms - 1, sms, 2 * sms, 1000, 2048, 4097, 30001):
            most, programs = self.programs(self.cost(columns), rows, gpu(sms))
            self.assertGreaterEqual(programs, min(most, sms * 3 // 4))
            self.assertGreaterEqual(4 * programs, most)
            fewer += programs < most
        if sms >= 108 and columns in (513, 2048):
            self.assertGreater(fewer, 0)

    @parametrize("programs_per_sm", (1, 4, 8, 16))
    def test_as_many_as_autotuning_asks_for(self, programs_per_sm):
        cost = self.cost(513)
        split = InductorChoices.mix_order_row_split(cost, 4097, H200, programs_per_sm)
        tiles = -(-4097 // split.xblock)
        self.assertEqual(split.num_programs, min(132 * programs_per_sm, tiles))

    def test_dynamic_rows(self):
        most, programs = self.programs(self.cost(513), sympy.Symbol("s0"))
        self.assertEqual(programs, most)


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


@nvidia_only
@unittest.skipIf(HAS_GPU and sms() < 108, "few SMs run no more programs than pay")
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
        most = self.programs(both, x, **{DEBUG: {"fewer_programs": False}})
        programs = self.programs(both, x)
        self.assertLess(programs, most)
        self.assertGreaterEqual(4 * programs, most)

    def test_norm(self):
        args = rms_norm_args(500, 2048, torch.bfloat16)
        most = self.programs(rms_norm_backward, *args, **{DEBUG: {"fewer_programs": False}})
        self.assertEqual(self.programs(rms_norm_backward, *args), most // 2)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
