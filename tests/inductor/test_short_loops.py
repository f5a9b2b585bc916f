# Owner(s): ["module: inductor"]

import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import looped_reduction
from torch._inductor.choices import InductorChoices
from torch._inductor.device_model import DeviceModel
from torch._inductor.looped_reduction import LoopConfig, LoopedRows
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


FOUR_WARPS = "'loop_config': (16, 4)"


def row_sum(x):
    return x.sum(-1)


def rms_norm(x):
    return x * x.float().square().mean(-1, keepdim=True).rsqrt().type_as(x)


def centered(x):
    return x - x.mean(-1, keepdim=True)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class ShortLoopsTest(TestCase):
    """A loop over a short row of half types has four warps."""

    def compile(self, f, x, rows=0, dynamic=False, **options):
        """As if `rows` an SM were few: none, by default."""
        torch._dynamo.reset()
        options = {
            "split_reductions": False,
            "triton.cooperative_reductions": False,
            # which do not know of what is patched here
            "force_disable_caches": True,
            **options,
        }
        with (
            inductor_config.patch(options),
            mock.patch.object(looped_reduction, "FEW_ROWS", rows),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            actual, code = run_and_get_code(compiled, x)
        return actual, "\n".join(code)

    def check(self, f, *shape, dtype=torch.bfloat16, **options):
        x = torch.randn(*shape, device=GPU_TYPE, dtype=dtype)
        actual, code = self.compile(f, x, **options)
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, dtype))
        eps = torch.finfo(dtype).eps
        scale = expect.abs().max().item()
        self.assertEqual(actual.double(), expect, atol=4 * eps * scale, rtol=4 * eps)
        return code

    @parametrize("f", (row_sum, rms_norm, centered))
    @parametrize("columns", (1100, 2501))
    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_half_types(self, dtype, columns, f):
        self.assertIn(FOUR_WARPS, self.check(f, 3, columns, dtype=dtype))

    def test_choice_can_be_overridden(self):
        class AtRunTime(InductorChoices):
            @staticmethod
            def loop_config(features):
                return None

        with V.set_choices_handler(AtRunTime()):
            code = self.check(row_sum, 3, 2501)
        self.assertNotIn("loop_config", code)

    def test_as_ever(self):
        """Wider types, longer rows, few rows, rows at once, dynamic ones, other orders."""

        def part(x):
            return x[:, :1100].sum(-1)

        def halves(x):
            return (x.view(3, -1, 2) * x[:, :1100, None]).flatten(1).sum(-1)

        for code in (
            self.check(row_sum, 3, 1100, dtype=torch.float32),
            self.check(row_sum, 3, 5000),
            self.check(row_sum, 3, 1100, rows=8),
            self.check(row_sum, 3, 1000),
            self.check(row_sum, 3, 1100, dynamic=True),
            self.check(lambda x: x.sum(0), 1100, 3),
            self.check(lambda x: x.cumsum(-1), 3, 1100),
            self.check(part, 3, 1200, dtype=torch.float32),
            self.check(halves, 3, 2200, dtype=torch.float32),
        ):
            self.assertNotIn("loop_config", code)

    def test_bytes(self):
        """Whose rows begin at words."""

        def f(x):
            return torch.where(x > x.mean(-1, keepdim=True), 1, 0).to(torch.int8)

        for columns, expected in ((1100, True), (1101, False)):
            x = torch.randint(-9, 10, (3, columns), device=GPU_TYPE).bfloat16()
            actual, code = self.compile(f, x)
            self.assertEqual(actual, f(x.double()))
            self.assertEqual(FOUR_WARPS in code, expected)


class ShortLoopConfigTest(TestCase):
    def config(self, sms=132, **row):
        row = {
            "rows": 8192,
            "columns": 2560,
            "read_again": 2,
            "narrow": True,
            "accesses": 2,
            **row,
        }
        device = DeviceModel.of(DeviceProperties("cuda", 0, sms, 90))
        return looped_reduction.short_loop_config(LoopedRows(**row), device)

    def test_config(self):
        self.assertTrue(hasattr(looped_reduction, "short_loop_config"))
        self.assertEqual(self.config(), LoopConfig(16, 4))
        self.assertEqual(self.config(columns=4096), LoopConfig(16, 4))
        self.assertIsNone(self.config(columns=4097))
        self.assertIsNone(self.config(narrow=False))
        self.assertIsNone(self.config(accesses=7))
        self.assertIsNone(self.config(rows=8 * 132 - 1))
        self.assertEqual(self.config(rows=8 * 132), LoopConfig(16, 4))
        self.assertEqual(self.config(rows=512, sms=64), LoopConfig(16, 4))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
