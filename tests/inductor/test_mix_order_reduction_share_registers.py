# Owner(s): ["module: inductor"]

import re
from types import SimpleNamespace

import torch
from torch._inductor.mix_order_pressure import LaunchConfig, pressure
from torch._inductor.mix_order_spills import launch_configs
from torch._inductor.runtime.registers import all_registers
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        centered_and_sums,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        centered_and_sums,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


DEBUG = "triton.mix_order_reduction_debug"


@instantiate_parametrized_tests
class ShareTest(TestCase):
    """Registers of a thread, where several programs share a multiprocessor."""

    @parametrize(
        "programs,num_warps,registers",
        ((1, 8, 255), (4, 2, 255), (3, 4, 168), (2, 8, 128), (8, 4, 64), (16, 4, 32)),
    )
    def test_share(self, programs, num_warps, registers):
        self.assertEqual(all_registers(65536, num_warps, programs), registers)
        self.assertLessEqual(programs * num_warps * 32 * registers, 65536)

    def test_least(self):
        # ptxas refuses 0, which would be these programs' share
        self.assertEqual(all_registers(65536, 32, 16), 24)

    def test_prediction(self):
        for sharing, limit in ((1, 255), (2, 128), (4, 64)):
            launch = LaunchConfig(xblock=2, num_warps=8, sharing=sharing)
            self.assertEqual(pressure((), 2050, launch).limit, limit)

    @parametrize("all_registers,limit", ((True, 64), (False, 255)))
    def test_prediction_of_a_row_split(self, all_registers, limit):
        split = SimpleNamespace(
            programs_per_sm=4,
            all_registers=all_registers,
            reload=False,
            hoist=True,
            accumulate_tiles=False,
            drop_padding=False,
            inductor_meta=lambda: {"configs": [(2, 8, 1)]},
        )
        (launch,) = launch_configs(split)
        self.assertEqual((launch.xblock, launch.num_warps), (2, 8))
        self.assertEqual(pressure((), 2050, launch).limit, limit)


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    """Which kernels are compiled with a share of the registers."""

    fuse = FUSE_ALL

    def sharing(self, f, *args, **options):
        """Programs that share registers, of the one mix-order kernel."""
        before, _ = self.kernel(self.generate(f, *args, **options))
        return int(re.search(r"'ALL_REGISTERS': (\d+)", before)[1])

    @parametrize("columns,programs", ((97, 16), (333, 16), (1001, 4)))
    def test_several_programs(self, columns, programs):
        args = rms_norm_args(20000, columns, torch.bfloat16)
        self.assertEqual(self.sharing(rms_norm_backward, *args), programs)

    @parametrize(
        "dtype,columns,programs",
        (
            (torch.bfloat16, 384, 4),
            (torch.bfloat16, 2048, 4),
            (torch.bfloat16, 4096, 1),
            (torch.float32, 1024, 2),
        ),
    )
    def test_rows_copied_ahead(self, dtype, columns, programs):
        args = rms_norm_args(20000, columns, dtype)
        self.assertEqual(self.sharing(rms_norm_backward, *args), programs)

    def test_accumulated_tiles(self):
        # three programs of four warps, which may need more than they have together
        xs = [randn(20000, 256, dtype=torch.bfloat16) for _ in range(7)]
        before, _ = self.kernel(self.generate(centered_and_sums, *xs))
        self.assertIn("tl.full([XBLOCK, R0_BLOCK]", before)
        self.assertEqual(self.sharing(centered_and_sums, *xs), 0)

    @parametrize("columns", (256, 257))
    def test_values_of_8_bytes(self, columns):
        # sums of integers, whose tiles take twice the registers that are counted
        def f(x, y):
            z = x * 3 + y
            return z.sum(0), z.sum(-1), (x * y).sum(0)

        x, y = (torch.ones(65536, columns, dtype=torch.int8, device=GPU_TYPE),) * 2
        self.assertEqual(self.sharing(f, x, y.clone()), 0)

    @parametrize("columns", (6401, 16384))
    def test_one_program(self, columns):
        args = rms_norm_args(20000, columns, torch.bfloat16)
        self.assertEqual(self.sharing(rms_norm_backward, *args), 1)

    def test_sums(self):
        def f(x):
            return x.sum(0), x.sum(-1)

        self.assertEqual(self.sharing(f, randn(20000, 1001, dtype=torch.bfloat16)), 8)

    def test_no_more_than_their_registers(self):
        # accumulators and tiles do not fit in a half of the registers
        xs = [randn(20000, 2801, dtype=torch.bfloat16) for _ in range(5)]
        self.assertEqual(self.sharing(centered_and_sums, *xs), 1)

    @parametrize("columns", (1001, 1024, 4096, 6401))
    def test_knob(self, columns):
        args = rms_norm_args(20000, columns, torch.bfloat16)
        off = {DEBUG: {"share_registers": False}}
        self.assertEqual(self.sharing(rms_norm_backward, *args, **off), 0)

    @parametrize("columns", (97, 384, 1001))
    def test_result(self, columns):
        self.check(rms_norm_backward, *rms_norm_args(1030, columns, torch.bfloat16))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
