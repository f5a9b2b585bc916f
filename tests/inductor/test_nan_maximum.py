# Owner(s): ["module: inductor"]

import ast
import inspect
import itertools
import textwrap
import unittest

import torch
import torch._inductor.config as inductor_config
from torch._inductor.runtime import triton_helpers
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


VALUES = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.5, -3e38, 1e-45)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class NanMaximumTest(TestCase):
    """Minima and maxima of float32 are an instruction each, and propagate NaN."""

    @parametrize("name", ("minimum", "maximum"))
    def test_one_instruction(self, name):
        source = inspect.getsource(getattr(triton_helpers, name).fn)
        calls = [
            {keyword.arg for keyword in node.keywords}
            for node in ast.walk(ast.parse(textwrap.dedent(source)))
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == name
        ]
        self.assertEqual(calls, [{"propagate_nan"}])

    def check(self, f, *args, **options):
        torch._dynamo.reset()
        with inductor_config.patch(options):
            actual = torch.compile(f, fullgraph=True)(*args)
        # of zeros, the sign may be either's
        self.assertEqual(actual, f(*args), atol=0, rtol=0, equal_nan=True)

    @parametrize("dtype", FLOATS)
    def test_all_pairs(self, dtype):
        pairs = torch.tensor(list(itertools.product(VALUES, VALUES)), device=GPU_TYPE)
        a, b = pairs.to(dtype).unbind(1)
        self.check(lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)), a, b)

    @parametrize("dtype", (torch.int8, torch.int32, torch.int64, torch.uint8))
    def test_integers(self, dtype):
        x = torch.randint(0, 100, (2, 300), device=GPU_TYPE).to(dtype)
        self.check(lambda a, b: (torch.maximum(a, b), torch.minimum(a, b)), *x)

    def test_a_float_and_an_integer(self):
        x = torch.tensor(VALUES, device=GPU_TYPE)
        n = torch.arange(len(VALUES), device=GPU_TYPE)
        self.check(lambda a, b: (torch.maximum(a, b), a.clamp(min=1), a.clamp(max=1)), x, n)

    @parametrize("dtype", FLOATS)
    @parametrize("persistent", (True, False))
    def test_rows(self, dtype, persistent):
        x = torch.randn(9, 3000, device=GPU_TYPE).to(dtype)
        for row, value in zip(x, VALUES):
            row[1999] = value
        options = {"triton.persistent_reductions": persistent, "split_reductions": False}
        self.check(lambda x: (x.amax(1), x.amin(1), x.relu().amax(0)), x, **options)

    @parametrize("columns", (3000, 20000))
    def test_softmax(self, columns):
        x = torch.randn(9, columns, device=GPU_TYPE)
        x[1, 7], x[2] = float("nan"), float("-inf")
        actual = torch.compile(torch.log_softmax)(x, 1)
        self.assertEqual(actual.isnan(), torch.log_softmax(x, 1).isnan())
        self.assertEqual(actual, torch.log_softmax(x, 1), equal_nan=True)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
