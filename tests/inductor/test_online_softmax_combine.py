# Owner(s): ["module: inductor"]

import ast
import inspect
import textwrap
import unittest

import torch
import torch._inductor.config as inductor_config
from torch._inductor.runtime import triton_helpers
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


INF, NAN = float("inf"), float("nan")
# Loops, however long a persistent kernel's rows may be.
LOOPED = {"triton.persistent_reductions": False, "triton.cooperative_reductions": False}


def ordered_rows(order, columns):
    x = torch.randn(3, columns, device=GPU_TYPE) * 8
    if order == "equal":
        return torch.full_like(x, 3)
    if order != "any":
        return x.sort(descending=order == "falling").values
    return x


def rows_with(value, rest, columns, later):
    """
    ``value`` in the first block of a row, in a later one, in the last that is not whole,
    and in all.
    """
    x = torch.randn(4, columns, device=GPU_TYPE)
    if rest == "-inf":
        x = torch.full_like(x, -INF)
    x[0, 7] = x[1, later] = x[2, -1] = value
    x[3] = value
    return x


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class OnlineSoftmaxCombineTest(TestCase):
    """An element is combined with what precedes it in its row."""

    def test_one_exponential(self):
        source = inspect.getsource(triton_helpers.online_softmax_combine.fn)
        calls = [
            node
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "exp"
        ]
        self.assertEqual(len(calls), 1)

    def check(self, f, x):
        torch._dynamo.reset()
        with inductor_config.patch(LOOPED):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), x)
        self.assertIn("online_softmax_combine", "\n".join(code))
        expect = f(x.double())
        self.assertEqual((actual.shape, actual.dtype), (expect.shape, x.dtype))
        tolerance = 4 * torch.finfo(x.dtype).eps
        self.assertEqual(
            actual.double(), expect, atol=tolerance, rtol=tolerance, equal_nan=True
        )

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("order", ("any", "rising", "falling", "equal"))
    def test_order(self, order, dtype):
        x = ordered_rows(order, 5000)
        self.check(lambda x: torch.softmax(x, -1), x.to(dtype))

    @parametrize("value", (INF, -INF, NAN, 3e38, -3e38))
    @parametrize("rest", ("numbers", "-inf"))
    def test_special_values(self, rest, value):
        x = rows_with(value, rest, 5000, later=4100)
        self.check(lambda x: torch.log_softmax(x, -1), x)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
