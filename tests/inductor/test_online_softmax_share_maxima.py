# Owner(s): ["module: inductor"]

import re
import unittest
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import looped_reduction
from torch._inductor.device_model import DeviceModel
from torch._inductor.looped_reduction import (
    LoopConfig,
    LoopedRows,
    online_softmax_config,
)
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


try:
    from .test_online_softmax_combine import INF, NAN, ordered_rows, rows_with
except ImportError:
    from test_online_softmax_combine import INF, NAN, ordered_rows, rows_with


SHARED = "online_softmax_combine_columns"
SHARE = "triton.online_softmax_share_maxima"
# Loops, however long a persistent kernel's rows may be.
LOOPED = {
    "triton.persistent_reductions": False,
    "triton.cooperative_reductions": False,
    "split_reductions": False,
    # which do not know of what is patched here
    "force_disable_caches": True,
}


def softmax(x):
    return torch.softmax(x, -1)


def log_softmax(x):
    return torch.log_softmax(x, -1)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class SharedMaximaTest(TestCase):
    """The columns of a thread share a maximum in a loop over a row."""

    def compile(self, f, *inputs, rows=0, dynamic=False, **options):
        """As if `rows` an SM were few: none, by default."""
        torch._dynamo.reset()
        with (
            inductor_config.patch({**LOOPED, **options}),
            mock.patch.object(looped_reduction, "FEW_ROWS", rows),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            result, code = run_and_get_code(compiled, *inputs)
        return result, "\n".join(code)

    def check(self, f, x, expected=True, **options):
        actual, code = self.compile(f, x, **options)
        self.assertEqual(SHARED in code, expected)
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, x.dtype))
        tolerance = 4 * torch.finfo(x.dtype).eps
        self.assertEqual(
            actual.double(), expect, atol=tolerance, rtol=tolerance, equal_nan=True
        )
        return code

    def vector(self, code):
        """The adjacent columns of which the kernel says that a thread has them."""
        (call,) = re.findall(rf"{SHARED}\(.*?\n *\)", code, re.DOTALL)
        return int(re.findall(r", (\d+), (?:True|False)\s*\)$", call)[0])

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float64))
    @parametrize("order", ("any", "rising", "falling", "equal"))
    def test_order(self, order, dtype):
        x = ordered_rows(order, 2500)
        self.check(softmax, x.to(dtype))

    @parametrize("columns, vector", ((2504, 8), (2501, 1), (2502, 2), (2500, 4)))
    def test_rows_that_begin_anywhere(self, columns, vector):
        x = torch.randn(3, columns, device=GPU_TYPE, dtype=torch.bfloat16)
        self.assertEqual(self.vector(self.check(softmax, x)), vector)

    @parametrize("dtype, vector", ((torch.float32, 4), (torch.float64, 2)))
    def test_wider_types(self, dtype, vector):
        x = torch.randn(2, 2512, device=GPU_TYPE, dtype=dtype)
        self.assertEqual(self.vector(self.check(softmax, x)), vector)

    @parametrize("value", (INF, -INF, NAN, 3e38, -3e38))
    @parametrize("rest", ("numbers", "-inf"))
    def test_special_values(self, rest, value):
        x = rows_with(value, rest, 2500, later=2100)
        self.check(log_softmax, x)

    @parametrize("block", (4, 16, 64, 1024))
    @parametrize("columns", (1000, 1001))
    def test_other_blocks(self, columns, block):
        """As autotuning tries them, which have fewer columns a thread or a group."""
        configs = triton_heuristics._reduction_configs

        def others(**kwargs):
            (config,) = configs(**kwargs)
            config.kwargs["R0_BLOCK"] = block
            return [config]

        x = torch.randn(2, columns, device=GPU_TYPE, dtype=torch.float16)
        with mock.patch.object(triton_heuristics, "_reduction_configs", others):
            self.check(softmax, x)

    def test_rows_of_several_tensors(self):
        def f(x, bias, mask):
            return torch.log_softmax((x + bias).masked_fill(mask, -INF), -1)

        x = torch.randn(4, 3000, device=GPU_TYPE, dtype=torch.bfloat16)
        bias = torch.randn(3000, device=GPU_TYPE)
        mask = torch.rand(4, 3000, device=GPU_TYPE) < 0.5
        mask[2] = True
        actual, code = self.compile(f, x, bias, mask)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, f(x, bias, mask), atol=1e-5, rtol=1e-5)

    def test_cross_entropy(self):
        def f(x, y):
            return torch.nn.functional.cross_entropy(x, y)

        x = torch.randn(5, 3001, device=GPU_TYPE)
        y = torch.tensor([0, 3000, -100, 17, 3], device=GPU_TYPE)
        actual, code = self.compile(f, x, y)
        self.assertIn(SHARED, code)
        self.assertEqual(actual, f(x.double(), y).float(), atol=1e-6, rtol=1e-6)

    def test_dynamic_columns(self):
        """Of which it is known that a row begins at a vector."""

        def f(x):
            return softmax(x.flatten(1))

        x = torch.randn(3, 160, 16, device=GPU_TYPE, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 1)
        actual, code = self.compile(f, x, dynamic=None)
        self.assertIn(SHARED, code)
        self.assertEqual(self.vector(code), 8)
        self.assertEqual(actual, f(x.double()).bfloat16(), atol=2e-3, rtol=2e-2)

    def test_columns_of_many_sizes(self):
        """Of which too much is dynamic to be known as a multiple of anything."""

        def f(*xs):
            return softmax(torch.cat(xs, -1))

        xs = [torch.randn(4, 100 + i, device=GPU_TYPE) for i in range(22)]
        for x in xs:
            torch._dynamo.mark_dynamic(x, 1)
        actual, code = self.compile(f, *xs, dynamic=None)
        if SHARED in code:
            self.assertEqual(self.vector(code), 1)
        self.assertEqual(actual, f(*xs), atol=1e-6, rtol=1e-5)

    def test_knob(self):
        x = torch.randn(3, 2500, device=GPU_TYPE)
        code = self.check(softmax, x, expected=False, **{SHARE: False})
        self.assertNotIn("'loop_config'", code)

    def test_each_its_own(self):
        """Few rows, and rows of which a column is read at a time."""
        x = torch.randn(4, 2500, device=GPU_TYPE)
        self.check(softmax, x, expected=False, rows=8)
        self.check(lambda x: torch.softmax(x, 0), x.T.contiguous(), expected=False)

    @parametrize(
        "other",
        (
            {"cooperative_reduction": True},
            {"is_combo_kernel": True},
            {"persistent_reduction": True},
            {"dense_size_list": lambda: ["YBLOCK", "XBLOCK", "R0_BLOCK"]},
        ),
    )
    def test_warps_that_others_decide(self, other):
        features = SimpleNamespace(
            get_reduction_hint=lambda scores: ReductionHint.INNER,
            contains_op=lambda name: False,
        )
        kernel = {
            "features": features,
            "dense_size_list": lambda: ["XBLOCK", "R0_BLOCK"],
            "cooperative_reduction": False,
            "is_combo_kernel": False,
            "persistent_reduction": False,
            "tiling_scores": None,
        }
        decides = looped_reduction.decides_warps
        self.assertTrue(decides(SimpleNamespace(**kernel)))
        self.assertFalse(decides(SimpleNamespace(**{**kernel, **other})))

    def test_combo_kernels(self):
        def f(x, y):
            return x.softmax(-1), y.softmax(-1)

        x, y = (torch.randn(2, n, device=GPU_TYPE) for n in (3000, 4100))
        actual, code = self.compile(f, x, y, combo_kernels=True)
        self.assertNotIn(SHARED, code)
        self.assertEqual(actual, f(x, y), atol=1e-6, rtol=1e-5)

    def test_config(self):
        x = torch.randn(3, 2500, device=GPU_TYPE)
        code = self.check(softmax, x)
        self.assertIn("'loop_config': (16, 4)", code)


class ConfigsTest(TestCase):
    """Which columns and warps, and what the runtime makes of them."""

    def config(self, rows, columns, read_again=0, narrow=True, accesses=2, **device):
        properties = {
            "type": "cuda",
            "index": 0,
            "multi_processor_count": 132,
            "cc": 90,
            **device,
        }
        row = LoopedRows(rows, columns, read_again, narrow, accesses)
        return online_softmax_config(row, DeviceModel.of(DeviceProperties(**properties)))

    def test_many_rows(self):
        for narrow in (False, True):
            self.assertEqual(self.config(8192, 32000, narrow=narrow), LoopConfig(16, 4))

    def test_many_accesses(self):
        self.assertEqual(self.config(8192, 32000, accesses=6), LoopConfig(16, 4))
        self.assertIsNone(self.config(8192, 32000, accesses=7))

    def test_few_rows(self):
        self.assertEqual(self.config(512, 32000), LoopConfig(8, 16))
        self.assertIsNone(self.config(512, 32000, narrow=False))
        self.assertIsNone(self.config(128, 128256))
        # as many as there are SMs decide
        self.assertEqual(
            self.config(512, 32000, multi_processor_count=40), LoopConfig(16, 4)
        )

    def test_rows_that_are_read_again(self):
        """All of the GPU's at a time are to fit in the L2 cache."""
        self.assertEqual(self.config(8192, 10000, 2), LoopConfig(16, 4))
        self.assertEqual(self.config(8192, 20000, 2), LoopConfig(8, 8))
        self.assertEqual(self.config(8192, 2500, 4, narrow=False), LoopConfig(16, 4))
        self.assertEqual(self.config(8192, 9000, 4, narrow=False), LoopConfig(8, 8))
        self.assertIsNone(self.config(8192, 12288, 4, narrow=False))
        # which holds more on another GPU
        self.assertEqual(
            self.config(8192, 12288, 4, narrow=False, cc=100), LoopConfig(16, 4)
        )

    def configs(self, columns, loop=(16, 4), **meta):
        return triton_heuristics.reduction(
            size_hints={"x": 4096, "r0_": columns},
            reduction_hint=ReductionHint.INNER,
            triton_meta={"signature": {}, "device": None},
            inductor_meta={"loop_config": loop, **meta} if loop else meta,
            return_configs=True,
        )

    def test_block(self):
        (config,) = self.configs(32768)
        self.assertEqual(config.kwargs["XBLOCK"], 1)
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (2048, 4))
        (config,) = self.configs(32768, (8, 16))
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (4096, 16))
        # short rows: as many columns a thread
        (config,) = self.configs(2048, (8, 16))
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (2048, 8))
        (config,) = self.configs(32768, None)
        self.assertEqual((config.kwargs["R0_BLOCK"], config.num_warps), (2048, 16))

    def test_max_autotune_has_others_beside_it(self):
        own, *others = self.configs(32768, max_autotune=True)
        self.assertEqual((own.kwargs["R0_BLOCK"], own.num_warps), (2048, 4))
        others = [(c.kwargs["R0_BLOCK"], c.num_warps) for c in others]
        self.assertIn((2048, 16), others)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
