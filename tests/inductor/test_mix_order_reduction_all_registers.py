# Owner(s): ["module: inductor"]

from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch._inductor import mix_order_spills
from torch._inductor.mix_order_pressure import Pressure
from torch._inductor.runtime.triton_compat import Config
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
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


DEBUG = "triton.mix_order_reduction_debug"
# or all kernels are compiled with as many as there are
NOT_SHARED = {**FUSE_ALL, DEBUG: {"share_registers": False}}


@instantiate_parametrized_tests
class OptionsTest(TestCase):
    """What a kernel is compiled with."""

    def maxnreg(self, num_warps, row_split=None, registers=65536, device="cuda"):
        meta = {"num_warps": num_warps, "num_stages": 1, "debug": False}
        autotuner = MagicMock(
            spec=CachingAutotuner,
            inductor_meta={} if row_split is None else {"row_split": row_split},
            device_props=SimpleNamespace(
                type=device, regs_per_multiprocessor=registers
            ),
        )
        options = CachingAutotuner._create_compile_options(
            autotuner, Config({}, num_warps=num_warps), meta
        )
        return options.get("maxnreg")

    @parametrize("num_warps,registers", ((4, 255), (8, 255), (16, 128), (32, 64)))
    def test_all_registers(self, num_warps, registers):
        row_split = {"ALL_REGISTERS": True}
        self.assertEqual(self.maxnreg(num_warps, row_split), registers)

    def test_fewer_in_a_multiprocessor(self):
        row_split = {"ALL_REGISTERS": True}
        self.assertEqual(self.maxnreg(16, row_split, registers=32768), 64)

    @parametrize("row_split", (None, {}, {"ALL_REGISTERS": False}))
    def test_other_kernels(self, row_split):
        self.assertIsNone(self.maxnreg(8, row_split))

    def test_what_the_device_does_not_say(self):
        self.assertIsNone(self.maxnreg(8, {"ALL_REGISTERS": True}, registers=None))

    def test_another_compiler(self):
        self.assertIsNone(self.maxnreg(8, {"ALL_REGISTERS": True}, device="hip"))


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
    """Which kernels are compiled with all registers."""

    fuse = NOT_SHARED

    def asks(self, columns, **options):
        args = rms_norm_args(1030, columns, torch.bfloat16)
        code = self.generate(rms_norm_backward, *args, **options)
        before, _ = self.kernel(code)
        self.assertIn("'row_split': {", before)
        return "'ALL_REGISTERS': 1," in before

    def test_rows_loaded_again(self):
        self.assertTrue(self.asks(16384))

    # Of 4096 columns a program has a multiprocessor to itself, as of 6401, whose rows begin
    # anywhere; of 1024 there are others.
    @parametrize(
        "columns,lacking,asked",
        ((4096, 0, False), (4096, 1, True), (6401, 1, True), (1024, 1, False)),
    )
    def test_rows_loaded_once(self, columns, lacking, asked):
        predicted = Pressure(255 + lacking, 255)
        with patch.object(mix_order_spills, "pressure", lambda *args: predicted):
            self.assertEqual(self.asks(columns), asked)

    def test_what_is_not_predicted(self):
        options = {DEBUG: {"share_registers": False, "register_pressure": False}}
        lacking = Pressure(256, 255)
        with patch.object(mix_order_spills, "pressure", lambda *args: lacking):
            self.assertFalse(self.asks(4096, **options))

    def test_knob(self):
        options = {DEBUG: {"share_registers": False, "all_registers": False}}
        self.assertFalse(self.asks(16384, **options))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
