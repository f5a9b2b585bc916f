# Owner(s): ["module: inductor"]
"""Scatters whose places are known: sums over windows of positions in their stead."""

import unittest

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor.fx_passes.positions import Window, window_of
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.window_sum import window_sum_eager
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


SIMPLIFY = "simplify_one_hot_sums"
MODES = {
    "bilinear": {"mode": "bilinear"},
    "corners": {"mode": "bilinear", "align_corners": True},
    "nearest": {"mode": "nearest"},
    "exact": {"mode": "nearest-exact"},
}


def numbers(*size, dtype=torch.float32):
    return torch.randn(size, device=GPU_TYPE).to(dtype)


def arange(n):
    return torch.arange(n, device=GPU_TYPE)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class ScatteredSumTest(TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)

    def gradient(self, f, x, grad):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, grad.to(x.dtype))[0]

    def check(self, f, x, summed=True, grad=None, kernels=None, dynamic=None):
        """
        The gradient of ``f`` is float64's but for rounding, with or without atomics, from so
        many ``kernels`` of the backward.
        """
        torch._dynamo.reset()
        if dynamic is not None:
            torch._dynamo.mark_dynamic(x, dynamic)
        grad = torch.randn_like(f(x.detach())) if grad is None else grad
        with inductor_config.patch({SIMPLIFY: True}):
            actual, codes = run_and_get_code(self.gradient, torch.compile(f), x, grad)
        exact = self.gradient(f, x.double(), grad)
        self.assertEqual("tl.atomic_add" in codes[-1], not summed)
        if kernels is not None:
            self.assertEqual(codes[-1].count("@triton.jit"), kernels)
        self.assertEqual((actual.dtype, actual.shape), (x.dtype, exact.shape))
        eps = torch.finfo(x.dtype).eps
        self.assertEqual(actual.double(), exact, rtol=2 * eps, atol=64 * eps)
        return actual

    @parametrize("size", ((16, 16), (37, 23), (5, 40)))
    @parametrize("mode", tuple(MODES))
    def test_interpolation(self, mode, size):
        x = numbers(2, 3, 8, 8)
        if size[0] % 2:
            x = x.to(memory_format=torch.channels_last)
        self.check(lambda x: F.interpolate(x, size, **MODES[mode]), x)

    @parametrize(
        "shape,size,mode",
        (
            ((2, 3, 5), (37,), "linear"),
            ((2, 3, 4), (200,), "linear"),  # windows that are reductions
            ((2, 4, 3, 5), (7, 9), "bicubic"),
            ((2, 3, 4, 3, 5), (7, 8, 9), "trilinear"),
            ((2, 3, 1, 5), (7, 9), "bilinear"),
            ((2, 3, 4, 5), (1, 9), "bilinear"),
        ),
    )
    def test_dimensions(self, shape, size, mode):
        self.check(lambda x: F.interpolate(x, size, mode=mode), numbers(*shape))

    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_halves(self, dtype):
        x = numbers(2, 3, 6, 6, dtype=dtype)
        self.check(lambda x: F.interpolate(x, (13, 12), mode="bilinear"), x)

    def test_one_gradient_is_read_once(self):
        """Weights of two dimensions, and a sum over each, of the four corners' scatters."""
        self.check(
            lambda x: F.interpolate(x, (16, 16), mode="bilinear"),
            numbers(2, 3, 8, 8),
            kernels=3,  # the weights of both are of one kernel, launched twice
        )

    def test_copies_are_one_kernel(self):
        f = torch.nn.Upsample(scale_factor=2)
        self.check(f, numbers(2, 3, 8, 8), kernels=1)

    def test_scaled_and_added(self):
        def f(x):
            near = F.interpolate(x.relu(), (12, 12))
            return F.interpolate(x, (12, 12), mode="bilinear") * 1.5 + near

        self.check(f, numbers(2, 3, 6, 6))

    def test_one_after_the_other(self):
        """What one scatters is what another adds to, or the values of another."""

        def f(x):
            y = F.interpolate(x, (12, 12))
            return F.interpolate(y + F.interpolate(x, (12, 12), mode="bilinear"), (24, 24))

        self.check(f, numbers(2, 3, 6, 6))
        self.check(lambda x: x[:, arange(20) // 2][:, arange(40) // 2] + 1, numbers(3, 20))

    def test_dynamic_batch(self):
        f = torch.nn.Upsample(scale_factor=2, mode="bilinear")
        self.check(f, numbers(5, 3, 6, 6), dynamic=0)

    @parametrize(
        "index,summed",
        (
            (lambda: arange(20) // 3, True),
            (lambda: arange(20), True),
            (lambda: 2 * arange(20) // 5 + 1, True),
            (lambda: arange(20).view(1, 20) // 2, True),
            (lambda: 19 - arange(20), False),
            (lambda: arange(20) % 3, False),
            (lambda: arange(20) // 3 - 1, False),
            (lambda: arange(20).view(4, 5), False),
            (lambda: (arange(20).bfloat16() / 3).long(), False),
            (lambda: ((arange(19) + 1).double() * (1 - 1e-12)).long(), True),
            (lambda: (arange(20) * 0.65 + 0.9).long(), True),
        ),
    )
    def test_gather(self, index, summed):
        self.check(lambda x: x[:, index()], numbers(3, 20, 5), summed)

    def test_apart(self):
        rows = lambda x: x[arange(6)[:, None] // 2, :, arange(4)]  # noqa: E731
        self.check(rows, numbers(9, 5, 7), summed=False)

    def test_index_on_the_cpu(self):
        """With weights that are on the GPU."""
        weights = numbers(20)
        f = lambda x: x[:, torch.arange(20) // 3] * weights  # noqa: E731
        x, grad = numbers(3, 20), numbers(3, 20)
        actual = self.gradient(torch.compile(f), x, grad)
        self.assertEqual(actual, self.gradient(f, x, grad))

    def test_index_of_data(self):
        index = arange(20) // 3
        self.check(lambda x: x[:, index], numbers(3, 20, 5), summed=False)

    def test_deliberate_rounding(self):
        """To a type of which more than halves' rounding is lost."""

        def f(values):
            rounded = values.to(torch.float8_e4m3fn).float()
            return values.new_zeros(20, 5).index_put((arange(20) // 3,), rounded, True)

        values = numbers(20, 5)
        self.assertEqual(torch.compile(f)(values), f(values))

    @parametrize("shape", ((1, 5), (20, 1), (5,)))
    def test_broadcast_values(self, shape):
        def f(values):
            return values.new_zeros(20, 5).index_put((arange(20) // 3,), values, True)

        values = numbers(*shape)
        actual = torch.compile(f)(values)
        self.assertEqual(actual, f(values))

    def test_double(self):
        x = numbers(2, 3, 6, 6).double()
        self.check(lambda x: F.interpolate(x, (13, 12), mode="bilinear"), x)

    def test_position_embedding(self):
        tokens = numbers(2, 12, 8)
        f = lambda table: tokens + F.embedding(arange(12), table)  # noqa: E731
        self.check(f, numbers(12, 8), kernels=1)
        self.check(f, numbers(16, 8))

    def test_weights_of_no_dimension(self):
        """What is no product of a gradient and weights is summed as it is."""
        other = numbers(2, 3, 12, 12)

        def f(x):
            y = F.interpolate(x, (12, 12))
            return y * other + y.sin()

        self.check(f, numbers(2, 3, 6, 6))

    @parametrize("value", (float("inf"), float("nan")))
    def test_special_values(self, value):
        """They are of the elements that they are added to, and of no other."""
        grad = torch.ones(1, 1, 16, 16, device=GPU_TYPE)
        grad[0, 0, 9, 4] = value
        f = torch.nn.Upsample(scale_factor=2, mode="bilinear")
        x = numbers(1, 1, 8, 8)
        actual = self.gradient(torch.compile(f), x, grad)
        clean = self.gradient(f, x, torch.ones_like(grad))
        touched = torch.zeros(8, 8, dtype=torch.bool, device=GPU_TYPE)
        touched[4:6, 1:3] = True
        self.assertEqual(~actual[0, 0].isfinite(), touched)
        self.assertEqual(actual[0, 0][~touched], clean[0, 0][~touched])

    def test_same_bits(self):
        f = torch.compile(torch.nn.Upsample(scale_factor=2, mode="bilinear"))
        x, grad = numbers(2, 3, 8, 8), numbers(2, 3, 16, 16)
        first, again = (self.gradient(f, x, grad) for _ in range(2))
        self.assertEqual(first, again, rtol=0, atol=0)

    def test_off(self):
        f = torch.compile(torch.nn.Upsample(scale_factor=2))
        with inductor_config.patch({SIMPLIFY: False}):
            _, codes = run_and_get_code(
                self.gradient, f, numbers(2, 3, 8, 8), numbers(2, 3, 16, 16)
            )
        self.assertIn("tl.atomic_add", codes[-1])


class WindowTest(TestCase):
    """The positions of an element, and what is summed of them; no GPU."""

    def window(self, *indices, elements):
        return window_of([list(index) for index in indices], elements)

    def test_copies(self):
        index = [x // 3 for x in range(12)]
        expect = Window(step=3, offset=0, divisor=1, size=3, exact=True)
        self.assertEqual(self.window(index, elements=4), expect)

    def test_places_of_others(self):
        window = self.window([0, 0, 0, 1, 1, 2], elements=3)
        self.assertEqual((window.size, window.exact), (3, False))

    def test_elements_of_no_position(self):
        window = self.window([1, 4], elements=6)
        self.assertFalse(window.exact)

    def test_all_that_an_index_may_be(self):
        window = self.window([0, 0, 1, 1], [0, 1, 1, 1], elements=2)
        for index in ([0, 0, 1, 1], [0, 1, 1, 1]):
            for position, element in enumerate(index):
                first = (window.step * element + window.offset) // window.divisor
                self.assertTrue(first <= position < first + window.size)

    def test_none(self):
        self.assertIsNone(self.window([1, 0], elements=2))
        self.assertIsNone(self.window([0, 2], elements=2))
        self.assertIsNone(self.window([-1, 0], elements=2))
        self.assertIsNone(self.window([], elements=2))

    def test_most_of_others(self):
        """One element has nearly all, so that windows as large would be read in vain."""
        self.assertIsNone(self.window([0] * 90 + list(range(1, 11)), elements=11))

    def test_indices_of_64_bits(self):
        """``step * element`` is not, of two large sizes without a common divisor."""
        index = [x * 47000 // 60001 for x in range(60001)]
        self.assertIsNone(self.window(index, elements=47000))
        index = [x // 2 for x in range(60000)]
        self.assertEqual(self.window(index, elements=30000).step, 2)

    def test_many_elements(self):
        self.assertIsNone(self.window(range(100), elements=50_000_000))

    def test_sum(self):
        values = torch.arange(10.0).view(2, 5)
        weights = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
        total = window_sum_eager(values, weights, 1, 2, 3, -1, 1, 2)
        # of element 0, positions -1 and 0; of element 1, positions 2 and 3
        expect = torch.stack([0 * values[:, 0], 0.5 * values[:, 2] + 2 * values[:, 3]], 1)
        self.assertEqual(total, expect)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
