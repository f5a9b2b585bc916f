# Owner(s): ["module: inductor"]

import dataclasses
import re
import unittest

import torch
import torch._inductor.config as inductor_config
from torch._inductor import persistent_reduction
from torch._inductor.persistent_reduction import Loops, why_looped
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


LONG = {
    "triton.persistent_reductions": True,
    "triton.persistent_reduction_max_numel": 8192,
    "triton.cooperative_reductions": False,
    "triton.multi_kernel": 0,
    "triton.mix_order_reduction": False,
    "split_reductions": False,
}
STOCK = {**LONG, "triton.persistent_reduction_max_numel": 1024}
PERSISTENT, LOOPED = "persistent_reduction", "reduction"
on_cuda = unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")


def softmax(x):
    return torch.softmax(x.float(), -1).to(x.dtype)


def softmax_backward(grad, y):
    return y * (grad - (grad * y).sum(-1, keepdim=True))


def rms_norm(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)


def gated_norm(x, gate):
    y = x * torch.sigmoid(gate)
    return y / (y.abs().mean(-1, keepdim=True) + 1)


@on_cuda
@instantiate_parametrized_tests
class LongRowsTest(TestCase):
    """Rows of more than 1024 columns."""

    def check(self, f, shape, heuristic, count=1, dtype=torch.float32, **options):
        args = [torch.randn(shape, device=GPU_TYPE).to(dtype) for _ in range(count)]
        torch._dynamo.reset()
        with inductor_config.patch({**LONG, **options}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        found = re.findall(r"@triton_heuristics\.(\w+)\(", "\n".join(code))
        self.assertEqual(found, [heuristic])
        expect = f(*(arg.double() for arg in args))
        eager = f(*args)
        self.assertEqual((actual.shape, actual.dtype), (eager.shape, eager.dtype))
        error = (actual.double() - expect).norm()
        ulp = torch.finfo(dtype).eps * expect.norm()
        eager_error = (eager.double() - expect).norm()
        self.assertLessEqual(error, max(2 * eager_error, 2 * ulp))
        return "\n".join(code)

    @parametrize("columns, warps", ((1536, 2), (2048, 2), (3200, 4), (8192, 8)))
    def test_warps(self, columns, warps):
        code = self.check(softmax, (3, columns), PERSISTENT, dtype=torch.bfloat16)
        self.assertIn(f"'num_warps': {warps}", code)
        code = self.check(softmax, (3, columns), LOOPED, **STOCK)
        self.assertNotIn("'num_warps'", code)

    @parametrize("columns", (1536, 3200, 4096))
    def test_softmax(self, columns):
        self.check(softmax, (3, columns), PERSISTENT)
        self.check(softmax, (3, columns), LOOPED, **STOCK)

    def test_half_types(self):
        self.check(softmax, (3, 4096), PERSISTENT, dtype=torch.bfloat16)

    def test_softmax_backward(self):
        self.check(softmax_backward, (3, 3072), PERSISTENT, 2)

    def test_a_row_that_a_loop_reads_in_one_block(self):
        # nothing is gained but where functions are computed once, or loops store as well
        self.check(softmax_backward, (3, 4096), LOOPED, 2)
        self.check(gated_norm, (3, 4096), PERSISTENT, 2)

    def test_norm(self):
        self.check(rms_norm, (3, 2048), PERSISTENT)

    def test_short_rows_as_ever(self):
        self.check(rms_norm, (3, 1024), PERSISTENT, **STOCK)
        self.assertNotIn("'num_warps'", self.check(rms_norm, (3, 1024), PERSISTENT))

    def test_one_loop(self):
        self.check(lambda x: x.sum(-1), (3, 4096), LOOPED)

    def test_padding(self):
        self.check(softmax, (3, 2500), LOOPED)

    def test_longer_than_the_most(self):
        options = {"triton.persistent_reduction_max_numel": 2048}
        self.check(softmax, (3, 2049), LOOPED, **options)

    def test_dynamic_columns(self):
        compiled = torch.compile(softmax, fullgraph=True, dynamic=True)
        x = torch.randn(3, 4096, device=GPU_TYPE)
        with inductor_config.patch(LONG):
            actual, code = run_and_get_code(compiled, x)
        self.assertIn(f"@triton_heuristics.{LOOPED}(", "\n".join(code))
        self.assertEqual(actual, softmax(x))


class PolicyTest(TestCase):
    def why(self, rnumel=4096, streams=1, loops=2, online_softmax=False, most=8192):
        return why_looped(Loops(rnumel, streams, loops, online_softmax), most)

    def test_tiles_that_fit(self):
        self.assertIsNone(self.why(rnumel=2048, streams=8))
        self.assertIsNone(self.why(rnumel=4096, streams=4))
        self.assertIn("registers", self.why(rnumel=4096, streams=5))
        self.assertIn("registers", self.why(rnumel=8192, streams=2))

    def test_warps(self):
        """As few as hold the row, with 32 columns a thread."""
        self.assertTrue(hasattr(persistent_reduction, "num_warps"))

        def warps(rnumel, streams=1):
            return persistent_reduction.num_warps(Loops(rnumel, streams, 2, False))

        self.assertEqual([warps(n) for n in (1536, 2048, 4096, 8192)], [2, 2, 4, 8])
        self.assertEqual([warps(2048, n) for n in (2, 5)], [4, 8])
        self.assertIsNone(warps(8192, 2))
        self.assertIsNone(warps(16384))

    def test_one_loop(self):
        self.assertIn("one loop", self.why(loops=1))
        self.assertIsNone(self.why(loops=1, online_softmax=True))

    def test_padding(self):
        self.assertIsNone(self.why(rnumel=3072))
        self.assertIn("padded to 4096", self.why(rnumel=3071))

    def test_plain(self):
        plain = {field.name for field in dataclasses.fields(Loops)}
        self.assertIn("plain", plain)

        def why(rnumel, streams):
            return why_looped(Loops(rnumel, streams, 2, False, plain=True), 8192)

        self.assertIn("cached", why(2048, 2))
        self.assertIsNone(why(2048, 1))
        self.assertIsNone(why(3072, 2))

    def test_most(self):
        self.assertIn("more than 2048", self.why(most=2048))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
