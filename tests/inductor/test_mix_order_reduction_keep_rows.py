# Owner(s): ["module: inductor"]

import math
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config
from torch._inductor import mix_order_spills
from torch._inductor.choices import InductorChoices
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_pressure import Pressure
from torch._inductor.mix_order_row_split import row_split, RowCost
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.virtualized import V
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
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        rms_norm_args,
        rms_norm_backward,
    )


BF16, FP32 = torch.bfloat16, torch.float32
DEBUG = "triton.mix_order_reduction_debug"


@instantiate_parametrized_tests
class RowSplitTest(TestCase):
    """Which rows are kept that do not fit in registers: of norms' backwards on an H200."""

    def split(self, columns, size, accumulators=2, streams=2, cc=90, programs=None, **cost):
        gpu = DeviceModel.of(
            DeviceProperties(
                type="cuda",
                index=0,
                multi_processor_count=132,
                cc=cc,
                regs_per_multiprocessor=65536,
            )
        )
        cost = RowCost(
            columns=columns,
            rnumel=16384,
            stream_bytes=streams * size,
            streams=streams,
            stores_rows=True,
            accumulators=accumulators,
            invariants=1,
            staged=columns * size % 4 == 0,
            copy_bytes=math.gcd(columns * size, 16),
            apart=columns % 2 == 1,
            **cost,
        )
        return row_split(cost, gpu, 20000, programs)

    def how(self, *args, **cost):
        split = self.split(*args, **cost)
        return split.reload, split.num_warps, split.num_stages

    @parametrize("columns,size", ((12289, 2), (16383, 2), (12289, 4), (16383, 4)))
    def test_elements_that_are_loaded_one_at_a_time(self, columns, size):
        # once is enough
        self.assertEqual(self.how(columns, size), (False, 8, 1))
        self.assertFalse(self.split(columns, size).hoist)
        with inductor_config.patch({DEBUG: {"keep_rows": False}}):
            self.assertTrue(self.split(columns, size).reload)

    # of float32, with the accumulators of the partials
    @parametrize(
        "columns,streams,accumulators,kept",
        (
            (13312, 2, 2, True),
            (15360, 2, 2, True),
            (16384, 2, 2, False),
            (16384, 2, 1, True),
            (12292, 4, 4, False),
            # aligned by 8 bytes
            (15362, 2, 2, True),
            (14002, 2, 6, False),
        ),
    )
    def test_float32(self, columns, streams, accumulators, kept):
        split = self.split(columns, 4, accumulators, streams)
        self.assertEqual(split.reload, not kept)
        if kept:  # from shared memory
            self.assertEqual((split.num_warps, split.num_stages), (8, 2))
        with inductor_config.patch({DEBUG: {"keep_rows": False}}):
            self.assertTrue(self.split(columns, 4, accumulators, streams).reload)

    # whose shared memory holds no two stages
    @parametrize("columns,kept", ((13312, True), (15360, False)))
    def test_float32_in_one_stage(self, columns, kept):
        split = self.split(columns, 4, cc=80)
        self.assertEqual((split.reload, split.num_stages), (not kept, 1))

    # autotuned programs share what there is
    @parametrize("programs,stages", ((1, 2), (2, 1)))
    def test_stages_of_several_programs(self, programs, stages):
        self.assertEqual(self.how(13312, 4, programs=programs), (False, 8, stages))

    @parametrize("columns", (12296, 12290, 16384))
    def test_half_types(self, columns):
        # by what is predicted of both
        self.assertTrue(self.split(columns, 2).reload)
        self.assertEqual(self.how(columns, 2, keeps_rows=True), (False, 8, 1))
        with inductor_config.patch({DEBUG: {"keep_rows": False}}):
            self.assertTrue(self.split(columns, 2, keeps_rows=True).reload)

    def test_warps_that_load_twice(self):
        # those of whole rows have a stage of what is loaded first
        self.assertEqual(self.how(14336, 2), (True, 8, 1))
        self.assertEqual(self.how(16384, 2), (True, 16, 2))

    def test_what_fits(self):
        for columns in (12288, 14336):
            once = self.split(columns, 2, 1)
            self.assertEqual(self.split(columns, 2, 1, keeps_rows=True), once)


def layer_norm_backward(x, weight, dy, rstd):
    dx, total = rms_norm_backward(x, weight, dy, rstd)
    return dx - dx.mean(-1, keepdim=True), total, dy.sum(0)


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    """What is kept, by what is predicted, and that kernels compute what they did."""

    fuse = FUSE_ALL

    def predict(self, kept, again):
        """Registers that a kernel lacks which keeps a row, and one that loads it twice."""

        def pressure(ops, columns, launch, *args):
            return Pressure(255 + (again if launch.reload else kept), 255)

        return patch.object(mix_order_spills, "pressure", pressure)

    def loads(self, code):
        """How many times the loop over rows loads each row."""
        _, loop = self.kernel(code)
        return loop.count("tl.load(in_ptr0 ")

    # it must lack 13 registers less, unless none
    @parametrize(
        "kept,again,loads",
        ((0, 0, 1), (-20, -30, 1), (20, 40, 1), (20, 30, 2), (20, 0, 2), (0, 5, 1)),
    )
    def test_half_types(self, kept, again, loads):
        args = rms_norm_args(13, 16384, BF16)
        with self.predict(kept, again):
            code = self.generate(rms_norm_backward, *args)
        self.assertEqual(self.loads(code), loads)

    def test_not_predicted(self):
        args = rms_norm_args(13, 16384, BF16)
        code = self.generate(rms_norm_backward, *args, **{DEBUG: {"register_pressure": False}})
        self.assertEqual(self.loads(code), 2)

    # A program of 256 threads spills 1 KiB for each register that a thread lacks. It may spill
    # 0.9 times a row of what both sides read, of four bytes an element, which are two tensors
    # of 64 KiB here.
    @parametrize("dtype", (BF16, FP32))
    @parametrize("excess,fused", ((115, 1), (116, 0)))
    def test_elements_that_are_loaded_one_at_a_time(self, excess, fused, dtype):
        args = rms_norm_args(40, 16383, dtype)
        with self.predict(excess, 0):
            self.check(rms_norm_backward, *args, fused=fused)

    # loaded twice, it may spill as much as if they were not loaded alone, of as many bytes
    @parametrize("excess,fused", ((153, 1), (154, 0)))
    def test_elements_that_are_loaded_one_at_a_time_twice(self, excess, fused):
        args = rms_norm_args(40, 16383, FP32)
        options = {DEBUG: {"keep_rows": False}}
        with self.predict(1000, excess):
            self.check(rms_norm_backward, *args, fused=fused, **options)

    # 1.2 times where rows are loaded twice, of two bytes an element, by 512 threads
    @parametrize("excess,fused", ((38, 1), (39, 0)))
    def test_pair_that_loads_rows_twice(self, excess, fused):
        args = rms_norm_args(40, 16384, BF16)
        with self.predict(1000, excess):
            self.check(rms_norm_backward, *args, fused=fused)

    # a sixteenth of the registers, where rows are loaded twice
    @parametrize(
        "kept,again,absorbed", ((1000, 15, 1), (1000, 17, 0), (17, 1000, 1), (40, 1000, 1))
    )
    def test_output_of_rows_that_are_loaded_twice(self, kept, again, absorbed):
        def f(x, weight, dy, rstd, scale):
            return *rms_norm_backward(x, weight, dy, rstd), x * scale

        args = rms_norm_args(13, 16384, BF16)
        with self.predict(kept, again):
            code = self.generate(f, *args, torch.ones_like(args[1]))
        self.assertEqual(code.count("@triton.jit"), 3 - absorbed)

    @parametrize("function,fused", ((torch.tanh, 0), (torch.erf, 1)))
    @parametrize("policy", (True, False))
    def test_slow_functions_of_rows_that_are_loaded_twice(self, policy, function, fused):
        def f(x, weight, dy, rstd):
            return rms_norm_backward(x, weight, function(dy), rstd)

        args = rms_norm_args(13, 16384)
        self.check(f, *args, fused=fused or not policy, **{DEBUG: {"register_pressure": policy}})

    def test_slow_functions_of_a_row_s_value(self):
        def f(x, dy, rstd):
            s = (x * dy).sum(-1, keepdim=True)
            return torch.tanh(s), x * s * rstd + dy, (x * dy).sum(0), dy.sum(0)

        x, _, dy, rstd = rms_norm_args(13, 16384)
        self.check(f, x, dy, rstd)

    # float32 beside bytes, which are half types in the mean
    def test_types_that_are_loaded_one_at_a_time(self):
        def f(x, keep, dy, rstd):
            y = torch.where(keep, x, 0) * rstd
            return y * (y * dy).sum(-1, keepdim=True) + dy, (y * dy).sum(0), dy.sum(0)

        x, _, dy, rstd = rms_norm_args(13, 16383)
        code = self.generate(f, x, x > 0, dy, rstd, **{DEBUG: {"register_pressure": False}})
        self.assertEqual(self.loads(code), 1)

    @parametrize("columns,dtype", ((12289, BF16), (12301, FP32), (15362, FP32), (12296, BF16)))
    @parametrize("f", (rms_norm_backward, layer_norm_backward))
    def test_values(self, f, columns, dtype):
        self.check(f, *rms_norm_args(13, columns, dtype))


class WindowTest(MixOrderTestCase):
    """A buffer that an element reads at several places has as many loads."""

    fuse = FUSE_ALL

    def costs(self, f, *args):
        found = []

        class Recording(InductorChoices):
            def mix_order_row_split(self, cost, *args):
                found.append(cost)
                return InductorChoices.mix_order_row_split(cost, *args)

        with V.set_choices_handler(Recording()):
            self.generate(f, *args, split_reductions=True)
        return found[-1]

    @nvidia_only
    def test_loads(self):
        def window(x, g):
            padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
            y = g + padded[:-2] + padded[1:-1] + padded[2:]
            return y, y.sum(0)

        def one_place(x, g):
            y = g + x
            return y, y.sum(0)

        args = [torch.empty(65536, 256, device=GPU_TYPE) for _ in range(2)]
        cost = self.costs(window, *args)
        self.assertEqual((cost.streams, cost.stream_bytes, cost.memory_bytes), (4, 16, 8))
        cost = self.costs(one_place, *args)
        self.assertEqual((cost.streams, cost.stream_bytes, cost.memory_bytes), (2, 8, 8))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
