# Owner(s): ["module: inductor"]

import re
import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import repeated_tensor
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


OPTIONS = {"loop_ordering_after_fusion": True, "split_reductions": False}


def heads_first(x, groups):
    """[B, T, H, D] -> [B, H * groups, T, D]."""
    return x.transpose(1, 2).repeat_interleave(groups, 1)


def normed_keys(groups):
    return lambda x: heads_first(F.rms_norm(x, x.shape[-1:]), groups)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class RepeatedTensorTest(TestCase):
    def check(self, f, x, kernels, stores, dynamic=False, **options):
        """Kernels of the code, and the stores of whole tensors in the last one."""
        torch._dynamo.reset()
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        with inductor_config.patch({**OPTIONS, **options}):
            compiled = torch.compile(f, fullgraph=True)
            actual, code = run_and_get_code(compiled, x)
        expect, exact = f(x), f(x.double())
        self.assertEqual(actual.dtype, expect.dtype)
        self.assertEqual(actual.shape, expect.shape)
        self.assertEqual(actual.stride(), expect.stride())
        error = (actual.double() - exact).norm()
        ulp = torch.finfo(x.dtype).eps * exact.norm()
        self.assertLessEqual(
            error, torch.maximum(2 * (expect.double() - exact).norm(), ulp)
        )
        sources = re.findall(r"@triton\.jit\n(.*?)\n''', device_str", code[0], re.S)
        self.assertEqual(len(sources), kernels)
        self.assertEqual(len(re.findall(r"tl\.store\(out_ptr", sources[-1])), stores)
        return code[0]

    def keys(self, dtype=torch.bfloat16, shape=(2, 24, 3, 64)):
        return torch.randn(shape, device=GPU_TYPE).to(dtype)

    @parametrize("dtype", (torch.bfloat16, torch.float32))
    @parametrize("groups", (2, 3, 8))
    def test_norm(self, groups, dtype):
        self.check(normed_keys(groups), self.keys(dtype), 1, groups)

    def test_off(self):
        with mock.patch.object(repeated_tensor, "MAX_STORED_REPEATS", 1):
            self.check(normed_keys(2), self.keys(), 2, 1)

    @parametrize("groups", (2, 8))
    def test_no_norm(self, groups):
        code = self.check(lambda x: heads_first(x, groups), self.keys(), 1, groups)
        self.assertEqual(code.count("tl.load("), 1)

    def test_dynamic_tokens(self):
        self.check(normed_keys(2), self.keys(), 1, 2, dynamic=True)

    def test_too_many_repeats(self):
        self.check(normed_keys(9), self.keys(), 2, 1)

    def test_matrix_product(self):
        # takes it from memory, by way of views
        def f(x):
            keys = heads_first(x.relu(), 2)
            return keys @ keys.transpose(-1, -2)

        self.check(f, self.keys(torch.float32), 1, 2)

    def test_custom_operator(self):
        # is not known to be a fallback before it is lowered once
        with torch.library._scoped_library("repeated_tensor", "FRAGMENT") as library:
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
            double = torch.ops.repeated_tensor.double

            def f(x):
                return double(normed_keys(2)(x))

            for _ in range(2):
                self.check(f, self.keys(torch.float32), 1, 2)

    def test_fused_with_what_uses_it(self):
        # the repeats are never stored
        self.check(lambda x: heads_first(x, 2) + 1, self.keys(), 1, 1)

    def test_short_runs(self):
        # of 16 elements of a half type, and of one
        self.check(
            lambda x: x.repeat_interleave(2, -2), self.keys(shape=(64, 2, 16)), 1, 1
        )
        self.check(lambda x: x.repeat_interleave(2, -1), self.keys(), 1, 1)

    def test_runs_that_are_not_aligned(self):
        self.check(
            lambda x: x.repeat_interleave(2, 0), self.keys(shape=(8, 5, 33)), 1, 1
        )

    def test_two_dimensions(self):
        def f(x):
            return x[:, None, :, None].expand(-1, 2, -1, 2, -1).clone()

        self.check(f, self.keys(shape=(4, 6, 64)), 1, 1)

    def test_nothing_is_read(self):
        # kernels of no common input would not be fused
        def f(x):
            rows = torch.arange(4, device=x.device, dtype=x.dtype)[:, None, None]
            return rows.expand(4, 2, 64).clone()

        self.check(f, self.keys(torch.float32, (4, 64)), 1, 1)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
