# Owner(s): ["module: inductor"]

import re
import unittest
import unittest.mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import slow_functions
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


KNOB = "realize_slow_functions"


def kernels(code):
    return re.findall(r"@triton\.jit\n(.*?)'''", code, re.DOTALL)


def computing(code, function):
    """How many kernels call `function`."""
    return sum(f"{function}(" in kernel for kernel in kernels(code))


def rotate(x, table):
    left, right = x.chunk(2, -1)
    return x * table.cos() + torch.cat((-right, left), -1) * table.sin()


def rotary(x):
    """x: [batch, heads, tokens, channels]"""
    steps = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32)
    tokens = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    angles = torch.outer(tokens, 5e5 ** (-steps / x.shape[-1]))
    return rotate(x, torch.cat((angles, angles), -1)).type_as(x)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class RealizeSlowFunctionsTest(TestCase):
    """A small tensor of slow functions that is broadcast has a kernel of its own."""

    def compile(self, f, *inputs, computed=64, dynamic=False, **options):
        """As if a launch took as long as to compute so many elements."""
        torch._dynamo.reset()
        with (
            inductor_config.patch({"force_disable_caches": True, **options}),
            unittest.mock.patch.object(slow_functions, "MIN_COMPUTED", computed),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            result, code = run_and_get_code(compiled, *inputs)
        return result, "\n".join(code)

    def check(self, f, *inputs, **options):
        actual, code = self.compile(f, *inputs, **options)
        expect = f(*(x.double() for x in inputs)).to(actual.dtype)
        self.assertEqual(actual.shape, expect.shape)
        atol = 8 * torch.finfo(actual.dtype).eps
        self.assertEqual(actual, expect, atol=atol, rtol=atol)
        return code

    def randn(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, device=GPU_TYPE, dtype=dtype)

    def rotates_by_tables(self, code):
        """Cosines and sines are computed before what reads an input."""
        *tables, rotation = kernels(code)
        for function in ("cos", "sin"):
            self.assertEqual(computing(code, function), 1)
            self.assertNotIn(f"{function}(", rotation)
        self.assertNotIn("pow(", rotation)
        self.assertTrue(tables)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("dynamic", (False, True))
    def test_rotary_embeddings(self, dynamic, dtype):
        x = self.randn(2, 4, 24, 16, dtype=dtype)
        actual, code = self.compile(rotary, x, dynamic=dynamic)
        self.rotates_by_tables(code)
        expect = rotary(x.double()).to(dtype)
        atol = 1e-5 if dtype == torch.float32 else 2e-2
        self.assertEqual(actual, expect, atol=atol, rtol=atol)
        _, code = self.compile(rotary, x, dynamic=dynamic, **{KNOB: False})
        self.assertEqual(len(kernels(code)), 1)

    def test_tables_of_half_types(self):
        """They are rounded, as in eager mode."""

        def f(x, angles):
            return (x * angles.cos()).float()

        x = self.randn(16, 400, dtype=torch.bfloat16)
        angles = self.randn(400, dtype=torch.bfloat16)
        actual, code = self.compile(f, x, angles)
        self.assertEqual(len(kernels(code)), 2)
        products = x.double() * angles.double().cos().bfloat16().double()
        self.assertEqual(actual.double(), products, atol=0, rtol=2**-8)

    def test_part_of_a_tensor(self):
        """Not what is left of it, which might never be used."""

        def first(x, t):
            return x + t.sin()[:1]

        def parts(t):
            h = t.tan()
            return sum(h[i] for i in range(8))

        inputs = self.randn(16, 40), self.randn(64, 40)
        self.assertEqual(len(kernels(self.check(first, *inputs))), 1)
        self.assertEqual(len(kernels(self.check(parts, self.randn(8, 90)))), 1)

    def test_few_values(self):
        """A thread has one of them for all of its elements."""

        def f(x, t):
            return x * t.tanh()

        for shape, expected in (((1,), 1), ((31, 1), 1), ((32, 1), 2)):
            inputs = self.randn(shape[0], 90), self.randn(*shape)
            self.assertEqual(len(kernels(self.check(f, *inputs))), expected)

    @parametrize("function", ("sin", "tan", "atan", "lgamma", "tanh", "erfc"))
    def test_functions(self, function):
        def f(x, t):
            return x + getattr(torch, function)(t)

        inputs = self.randn(16, 40), self.randn(40)
        self.assertEqual(len(kernels(self.check(f, *inputs))), 2)
        self.assertEqual(len(kernels(self.check(f, *inputs, **{KNOB: False}))), 1)

    def test_power(self):
        def f(x, t):
            return x + t.abs() ** 1.7

        code = self.check(f, self.randn(16, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 2)

    @parametrize("function", ("exp", "sigmoid", "sqrt", "rsqrt", "relu"))
    def test_other_functions_where_they_are_read(self, function):
        def f(x, t):
            return x + getattr(torch, function)(t.abs() + 1)

        code = self.check(f, self.randn(16, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 1)

    def test_few_uses(self):
        code = self.check(lambda x, t: x + t.sin(), self.randn(7, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 1)
        code = self.check(lambda x, t: x + t.sin(), self.randn(8, 40), self.randn(40))
        self.assertEqual(len(kernels(code)), 2)

    def test_few_elements(self):
        def f(x, t):
            return x + t.sin()

        inputs = self.randn(16, 40), self.randn(40)
        self.assertEqual(len(kernels(self.check(f, *inputs, computed=640))), 2)
        self.assertEqual(len(kernels(self.check(f, *inputs, computed=641))), 1)

    def test_gradients(self):
        x = self.randn(4, 4, 32, 16).requires_grad_()
        w = self.randn(4, 4, 32, 16)
        torch._dynamo.reset()

        def backward():
            torch.compile(rotary, fullgraph=True)(x).backward(w)

        with (
            inductor_config.patch({"force_disable_caches": True}),
            unittest.mock.patch.object(slow_functions, "MIN_COMPUTED", 64),
        ):
            _, codes = run_and_get_code(backward)
        self.assertEqual(len(codes), 2)
        for code in codes:
            self.rotates_by_tables(code)
        reference = x.detach().double().requires_grad_()
        rotary(reference).backward(w.double())
        self.assertEqual(x.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
