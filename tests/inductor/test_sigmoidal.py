# Owner(s): ["module: inductor"]

import inspect
import unittest

import torch
import torch.nn.functional as F
from torch._inductor.runtime import sigmoidal
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


FUNCTIONS = {"erf": torch.erf, "tanh": torch.tanh, "sigmoid": torch.sigmoid}
# In units in the last place of float32. A sigmoid's exponent is rounded before it is raised.
ULPS = {"erf": 2.5, "tanh": 3.5, "sigmoid": 12}
SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -3e38, 88.8, -88.8)


def gelu_backward(approximate):
    def f(grad, x):
        return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)

    return f


@unittest.skipIf(GPU_TYPE != "cuda" or torch.version.hip, "not an NVIDIA GPU")
@instantiate_parametrized_tests
class SigmoidalTest(TestCase):
    """erf, tanh and sigmoid of float32 without branches."""

    def points(self):
        """Both ranges of each function, their seam, and what is far beyond."""
        dense = torch.linspace(-9.5, 9.5, 40001)
        seams = torch.cat([s + torch.linspace(-1e-4, 1e-4, 501) for s in (0.6, 0.8, 4.0)])
        small = torch.logspace(-40, -1, 800)
        return torch.cat([dense, seams, -seams, small, -small]).to(GPU_TYPE)

    @parametrize("name", tuple(FUNCTIONS))
    def test_error_in_units_in_the_last_place(self, name):
        x = self.points()
        actual, (code,) = run_and_get_code(torch.compile(FUNCTIONS[name]), x)
        FileCheck().check(f"triton_helpers.{name}(").run(code)
        exact = FUNCTIONS[name](x.double())
        # a sigmoid that float32 cannot normalize is flushed to zero
        tiny = torch.finfo(torch.float32).tiny
        size = exact.abs().clamp(min=tiny)
        unit = torch.exp2(size.log2().floor() - 23)
        errors = (actual.double() - exact).abs() / unit
        self.assertLess(errors[size > tiny].max().item(), ULPS[name])

    @parametrize("name", tuple(FUNCTIONS))
    def test_special_values(self, name):
        x = torch.tensor(SPECIAL, device=GPU_TYPE)
        actual = torch.compile(FUNCTIONS[name])(x)
        self.assertEqual(actual, FUNCTIONS[name](x), atol=1e-37, rtol=1e-6)
        if name != "sigmoid":
            self.assertEqual(actual.signbit()[1:], x.signbit()[1:])

    @parametrize("name", tuple(FUNCTIONS))
    def test_other_types(self, name):
        x = torch.randn(1000, device=GPU_TYPE, dtype=torch.float64)
        for dtype in (torch.float64, torch.float16, torch.bfloat16):
            y = x.to(dtype)
            self.assertEqual(torch.compile(FUNCTIONS[name])(y), FUNCTIONS[name](y))

    def test_no_choice_of_coefficients(self):
        # the one choice is which of two polynomials
        for name in ("erf", "tanh"):
            source = inspect.getsource(getattr(sigmoidal, f"_{name}_float32").fn)
            self.assertEqual(source.count("tl.where("), 1)
            self.assertEqual(source.count("libdevice." + name), 0)

    @parametrize("approximate", ("none", "tanh"))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_gelu(self, approximate, dtype):
        grad, x = (torch.randn(8, 1000, device=GPU_TYPE).to(dtype) for _ in range(2))
        for f, args in (
            (lambda x: F.gelu(x, approximate=approximate), (3 * x,)),
            (gelu_backward(approximate), (grad, 3 * x)),
        ):
            torch._dynamo.reset()
            actual = torch.compile(f)(*args)
            exact = f(*(arg.double() for arg in args))
            scale = torch.finfo(dtype).eps
            self.assertEqual(actual.double(), exact, atol=8 * scale, rtol=2 * scale)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
