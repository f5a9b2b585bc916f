# Owner(s): ["module: inductor"]

import dataclasses
import re
import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import persistent_reduction
from torch._inductor.persistent_reduction import Loops, why_looped
from torch._inductor.runtime.hints import ReductionHint
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


BATCH, HEADS, QUERIES, KEYS = 2, 3, 8, 320
SCORES = (BATCH, HEADS, QUERIES, KEYS)


def bucket_bias(scores, table, index):
    bias = torch.nn.functional.embedding(index, table).permute(2, 0, 1)
    return torch.softmax(scores + bias.unsqueeze(0), -1)


def parameter_bias(scores, bias):
    return torch.softmax(scores + bias, -1)


def alibi(scores, slopes):
    keys = torch.arange(KEYS, device=scores.device)
    distance = (keys[None] - keys[:QUERIES, None]).abs()
    return torch.softmax(scores - slopes[:, None, None] * distance, -1)


def masked_fill(scores, keep):
    return torch.softmax((0.125 * scores).masked_fill(~keep, float("-inf")), -1)


def where(scores, keep):
    return torch.softmax(torch.where(keep, 0.125 * scores, -1e4), -1)


def expanded(scores, keep):
    bias = (~keep).to(scores.dtype).expand(BATCH, 1, QUERIES, KEYS) * -1e4
    return torch.softmax(scores + bias, -1)


def safe_softmax(scores, keep):
    scores = scores.masked_fill(~keep, float("-inf"))
    return torch.ops.aten._safe_softmax.default(scores, -1)


def in_float32(scores, bias):
    return torch.softmax((scores + bias).float(), -1).to(scores.dtype)


def backward(scores, bias):
    """Of a softmax whose output is scaled by key."""
    grad = scores * bias
    return scores * (grad - (scores * grad).sum(-1, keepdim=True))


def layer_norm_of_positions(x, positions):
    return torch.nn.functional.layer_norm(x + positions, (KEYS,))


def keep(*shape):
    kept = torch.rand(shape, device=GPU_TYPE) > 0.3
    kept[..., 0] = True
    return (kept,)


def floats(*shape):
    return (torch.randn(shape, device=GPU_TYPE),)


def table_and_index():
    index = torch.randint(0, 32, (QUERIES, KEYS), device=GPU_TYPE)
    return (*floats(32, HEADS), index)


# what a softmax's scores are computed with, and the softmax of them
BROADCAST = {
    "bucket_bias": (bucket_bias, table_and_index),
    "parameter": (parameter_bias, lambda: floats(1, HEADS, QUERIES, KEYS)),
    "alibi": (alibi, lambda: floats(HEADS)),
    "masked_fill_keys": (masked_fill, lambda: keep(BATCH, 1, 1, KEYS)),
    "masked_fill_pairs": (masked_fill, lambda: keep(BATCH, 1, QUERIES, KEYS)),
    "where": (where, lambda: keep(BATCH, 1, QUERIES, KEYS)),
    "expanded": (expanded, lambda: keep(BATCH, 1, 1, KEYS)),
    "safe": (safe_softmax, lambda: keep(BATCH, 1, QUERIES, KEYS)),
    "in_float32": (in_float32, lambda: floats(HEADS, QUERIES, KEYS)),
    "backward": (backward, lambda: floats(BATCH, 1, 1, KEYS)),
    "norm": (layer_norm_of_positions, lambda: floats(QUERIES, KEYS)),
}


@on_cuda
@instantiate_parametrized_tests
class BroadcastTest(TestCase):
    """Rows that are inner by what coalesces, as some of their inputs are broadcast."""

    def compiled(self, f, *args, **options):
        torch._dynamo.reset()
        hint = ReductionHint.DEFAULT, 1  # of as many rows as no split of them helps
        with (
            inductor_config.patch({**LONG, **options}),
            mock.patch("torch._inductor.ir.Reduction.num_splits", return_value=hint),
        ):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        code = "\n".join(code)
        return actual, code, re.findall(r"@triton_heuristics\.(\w+)\(", code)

    def check(self, f, scores, others):
        actual, code, found = self.compiled(f, scores, *others)
        self.assertEqual(found, [PERSISTENT])
        eager = f(scores, *others)
        wide = [x.double() if x.is_floating_point() else x for x in (scores, *others)]
        # `.float()` would round
        expect = f(*wide) if f is not in_float32 else parameter_bias(*wide)
        self.assertEqual((actual.shape, actual.dtype), (eager.shape, eager.dtype))
        error, eager_error = ((x.double() - expect).norm() for x in (actual, eager))
        ulp = torch.finfo(actual.dtype).eps * expect.norm()
        self.assertLessEqual(error, max(2 * eager_error, 2 * ulp))
        return code

    @parametrize("name", tuple(BROADCAST))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_softmax(self, name, dtype):
        f, others = BROADCAST[name]
        self.check(f, torch.randn(SCORES, device=GPU_TYPE).to(dtype), others())

    def test_dropout(self):
        def f(scores, keep):
            return torch.nn.functional.dropout(masked_fill(scores, keep), 0.5)

        scores, (kept,) = torch.randn(SCORES, device=GPU_TYPE), keep(BATCH, 1, 1, KEYS)
        actual, _, found = self.compiled(f, scores, kept)
        self.assertEqual(found, [PERSISTENT])
        expect = 2 * masked_fill(scores.double(), kept)
        dropped = actual == 0
        share = dropped[expect > 0].float().mean().item()
        self.assertTrue(0.4 < share < 0.6, share)
        self.assertEqual(actual, expect.float().masked_fill(dropped, 0))

    def test_long_rows(self):
        scores = torch.randn(BATCH, HEADS, 2, 2048, device=GPU_TYPE)
        code = self.check(masked_fill, scores, keep(BATCH, 1, 1, 2048))
        self.assertIn("'num_warps': 4", code)

    def test_as_released(self):
        args = torch.randn(SCORES, device=GPU_TYPE), *keep(BATCH, 1, 1, KEYS)
        _, _, found = self.compiled(masked_fill, *args, **STOCK)
        self.assertEqual(found, [LOOPED])

    def test_one_loop(self):
        def f(scores, bias):
            return (scores + bias).amax(-1)

        args = torch.randn(SCORES, device=GPU_TYPE), *floats(BATCH, 1, 1, KEYS)
        _, _, found = self.compiled(f, *args)
        self.assertEqual(found, [LOOPED])

    def test_warps_of_many_rows(self):
        """One warp a row where two rows would take too many registers of it."""
        scores = torch.randn(4, 8, 32, 256, device=GPU_TYPE)
        code = self.check(masked_fill, scores, keep(4, 1, 1, 256))
        self.assertIn("'num_warps': 1", code)

    def test_columns_that_are_not_along_memory(self):
        def f(scores, bias):
            return torch.softmax(scores + bias, -2)

        shape = BATCH, HEADS, KEYS, 4 * QUERIES
        args = torch.randn(shape, device=GPU_TYPE), *floats(BATCH, 1, KEYS, 1)
        _, _, found = self.compiled(f, *args)
        self.assertEqual(found, [LOOPED])


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
        self.assertEqual([warps(512, n) for n in (1, 4, 5, 20)], [1, 1, 2, 4])

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

    def test_short(self):
        """Neither padding nor a block that is a row keeps rows of 1024 looped."""
        self.assertIsNone(self.why(rnumel=577))
        row = Loops(512, 2, 2, False, plain=True)
        self.assertIsNone(why_looped(row, 8192))
        self.assertIn("one loop", self.why(rnumel=512, loops=1))
        self.assertIn("registers", self.why(rnumel=1024, streams=30))

    def test_most(self):
        self.assertIn("more than 2048", self.why(most=2048))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
