# Owner(s): ["module: inductor"]

import re

import torch
from torch._inductor.runtime.registers import all_registers
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


SHARE_REGISTERS = "triton.mix_order_reduction_share_registers"


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

    def test_rows_copied_ahead(self):
        args = rms_norm_args(20000, 1024, torch.bfloat16)
        self.assertEqual(self.sharing(rms_norm_backward, *args), 0)

    def test_one_program(self):
        args = rms_norm_args(20000, 6401, torch.bfloat16)
        self.assertEqual(self.sharing(rms_norm_backward, *args), 0)

    def test_sums(self):
        def f(x):
            return x.sum(0), x.sum(-1)

        self.assertEqual(self.sharing(f, randn(20000, 1001, dtype=torch.bfloat16)), 16)

    def test_more_than_there_are(self):
        # a tile and its accumulators do not fit in the share: ptxas decides
        def f(x, *others):
            y = (x - x.mean(-1, keepdim=True)).to(x.dtype)
            return y, *((x * other).sum(0) for other in others)

        xs = [randn(20000, 2801, dtype=torch.bfloat16) for _ in range(5)]
        self.assertEqual(self.sharing(f, *xs), 0)

    def test_knob(self):
        args = rms_norm_args(20000, 1001, torch.bfloat16)
        off = {SHARE_REGISTERS: False}
        self.assertEqual(self.sharing(rms_norm_backward, *args, **off), 0)

    @parametrize("columns", (97, 1001))
    def test_result(self, columns):
        self.check(rms_norm_backward, *rms_norm_args(1030, columns, torch.bfloat16))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
