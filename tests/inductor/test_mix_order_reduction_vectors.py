# Owner(s): ["module: inductor"]

import torch
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


DEBUG = "triton.mix_order_reduction_debug"


@instantiate_parametrized_tests
class EvenVectorsTest(MixOrderTestCase):
    """As many columns a thread of each tensor as of the widest."""

    fuse = FUSE_ALL

    @parametrize("even", (True, False))
    @parametrize("mask", (torch.bool, torch.int8))
    def test_mask(self, mask, even):
        def f(x, y, mask):
            z = torch.where(mask != 0, x * y, 0.0)
            return z.sum(0), z - z.mean(-1, keepdim=True)

        x, y = randn(133, 96), randn(133, 96)
        mask = (torch.rand(133, 96, device=GPU_TYPE) > 0.1).to(mask)
        found = self.alignments(self.check(f, x, y, mask, **{DEBUG: {"even_vectors": even}}))
        self.assertEqual(found.pop("*fp32"), {16})
        self.assertEqual(list(found.values()), [{4 if even else 16}])

    @parametrize("rows", (133, 40))
    def test_half_and_single(self, rows):
        # what is written counts as well
        def f(x, y):
            z = x * y
            return z.sum(0), (z - z.mean(-1, keepdim=True)).bfloat16()

        x, y = randn(rows, 96), randn(rows, 96, dtype=torch.bfloat16)
        code = self.check(f, x, y)
        self.assertEqual(self.alignments(code), {"*fp32": {16}, "*bf16": {8}})

    def test_double_and_bytes(self):
        # an asynchronous copy of two bytes does not exist
        def f(x, mask):
            z = torch.where(mask, x, 0.0)
            return z.sum(0), z - z.mean(-1, keepdim=True)

        x = randn(133, 96, dtype=torch.float64)
        mask = torch.rand(133, 96, device=GPU_TYPE) > 0.1
        code = self.check(f, x, mask)
        self.assertEqual(self.alignments(code), {"*fp64": {16}, "*i1": {4}})

    @parametrize("dtype", (torch.bfloat16, torch.float32))
    def test_one_width(self, dtype):
        # the row statistic is float32, and no tile
        def f(*args):
            dx, dweight = rms_norm_backward(*args)
            return dx.to(dtype), dweight.to(dtype)

        code = self.check(f, *rms_norm_args(133, 96, dtype))
        self.assertEqual(
            {a for found in self.alignments(code).values() for a in found}, {16}
        )

    def test_row_vectors_do_not_count(self):
        # a weight of another width is loaded once, by itself
        def f(x, weight, scale):
            z = x * weight * scale
            return z.sum(0), (z - z.mean(-1, keepdim=True)).bfloat16()

        x = randn(133, 96, dtype=torch.bfloat16)
        code = self.check(f, x, randn(96), randn(133, 1, dtype=torch.float64).float())
        self.assertEqual(self.alignments(code), {"*fp32": {16}, "*bf16": {16}})

    def test_unaligned(self):
        # what is not aligned stays so
        def f(x, y, mask):
            z = torch.where(mask, x * y, 0.0)
            return z.sum(0), z - z.mean(-1, keepdim=True)

        x, y = randn(133, 96), randn(133 * 96 + 1)[1:].view(133, 96)
        mask = torch.rand(133, 96, device=GPU_TYPE) > 0.1
        found = self.alignments(self.check(f, x, y, mask))
        self.assertEqual(found["*i1"], {4})

    def test_dynamic_rows(self):
        def f(x, mask):
            z = torch.where(mask, x, 0.0)
            return z.sum(0), z - z.mean(-1, keepdim=True)

        x, mask = randn(133, 96), torch.rand(133, 96, device=GPU_TYPE) > 0.1
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(mask, 0)
        code = self.check(f, x, mask)
        self.assertEqual(self.alignments(code), {"*fp32": {16}, "*i1": {4}})


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
