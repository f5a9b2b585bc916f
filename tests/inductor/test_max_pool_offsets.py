# Owner(s): ["module: inductor"]

import unittest

import torch
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


aten, prims = torch.ops.aten, torch.ops.prims


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class MaxPoolOffsetsTest(TestCase):
    """The backward of a max pool compares offsets within windows, not indices."""

    def backward(self, sizes, kernel, stride, padding, ceil_mode=False, layout=None):
        """Gradients of ``x``, compiled and in float64, and the code."""
        x = torch.randn(sizes, device=GPU_TYPE).to(memory_format=layout or torch.contiguous_format)
        # ties, and what has no maximum but the padding's
        x[:, 0] = x[:, 0].round()
        x[0, 1, :3] = float("-inf")
        args = (kernel, stride, padding, [1, 1])
        y, indices = aten.max_pool2d_with_indices(x.double(), *args, ceil_mode)
        grad = torch.randn(y.shape, device=GPU_TYPE).to(memory_format=layout or torch.contiguous_format)
        offsets = prims._low_memory_max_pool_with_offsets(x, *args, ceil_mode)[1]

        def f(grad, x, offsets):
            found = prims._low_memory_max_pool_offsets_to_indices(
                offsets, kernel, [*x.shape[2:]], stride, padding, [1, 1]
            )
            return aten.max_pool2d_with_indices_backward(
                grad, x, *args, ceil_mode, found
            )

        actual, (code,) = run_and_get_code(torch.compile(f), grad, x, offsets)
        exact = aten.max_pool2d_with_indices_backward(
            grad.double(), x.double(), *args, ceil_mode, indices
        )
        self.assertEqual(actual.double(), exact, atol=1e-5, rtol=1e-5)
        return code

    @parametrize(
        "kernel, stride, padding, height, width",
        (
            ([3, 3], [2, 2], [1, 1], 14, 14),
            ([3, 3], [2, 2], [1, 1], 13, 15),
            ([2, 2], [2, 2], [0, 0], 8, 12),
            ([3, 3], [1, 1], [1, 1], 7, 9),
            ([3, 2], [2, 1], [1, 0], 9, 8),
            ([5, 5], [3, 3], [2, 2], 16, 16),
        ),
    )
    @parametrize("layout", (torch.contiguous_format, torch.channels_last))
    def test_windows_that_cover(self, kernel, stride, padding, height, width, layout):
        code = self.backward((2, 3, height, width), kernel, stride, padding, layout=layout)
        self.assertNotIn("device_assert", kernel_of(code))

    @parametrize(
        "kernel, stride, padding, height, width",
        (
            # a last row or column that no window covers
            ([2, 2], [2, 2], [0, 0], 9, 8),
            ([2, 2], [2, 2], [0, 0], 8, 9),
            ([3, 3], [2, 2], [0, 0], 8, 8),
            # between windows
            ([2, 2], [3, 3], [0, 0], 11, 11),
            ([1, 2], [2, 2], [0, 0], 9, 8),
        ),
    )
    def test_windows_that_leave_some_out(self, kernel, stride, padding, height, width):
        code = self.backward((2, 3, height, width), kernel, stride, padding)
        self.assertIn("device_assert", kernel_of(code))

    def test_ceil_mode(self):
        self.backward((2, 3, 10, 11), [3, 3], [2, 2], [0, 0], ceil_mode=True)

    def test_indices_of_another_origin(self):
        # eager's, that nothing computed from offsets
        x = torch.randn(2, 3, 8, 8, device=GPU_TYPE)
        args = ([2, 2], [2, 2], [0, 0], [1, 1], False)
        y, indices = aten.max_pool2d_with_indices(x, *args)

        def f(grad, x, indices):
            return aten.max_pool2d_with_indices_backward(grad, x, *args, indices)

        self.assertEqual(torch.compile(f)(y, x, indices), f(y, x, indices))

    def test_dynamic_sizes(self):
        def f(grad, x, offsets):
            found = prims._low_memory_max_pool_offsets_to_indices(
                offsets, [3, 3], [*x.shape[2:]], [2, 2], [1, 1], [1, 1]
            )
            return aten.max_pool2d_with_indices_backward(
                grad, x, [3, 3], [2, 2], [1, 1], [1, 1], False, found
            )

        compiled = torch.compile(f, dynamic=True)
        for size in (9, 12):
            x = torch.randn(2, 3, size, size, device=GPU_TYPE)
            y, indices = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
            offsets = prims._low_memory_max_pool_with_offsets(
                x, [3, 3], [2, 2], [1, 1], [1, 1], False
            )[1]
            exact = aten.max_pool2d_with_indices_backward(
                y, x, [3, 3], [2, 2], [1, 1], [1, 1], False, indices
            )
            self.assertEqual(compiled(y, x, offsets), exact)


def kernel_of(code):
    return code[code.index("def triton_") : code.index("''', device_str")]


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
