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
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


DEBUG = "triton.mix_order_reduction_debug"
TILE = "[XBLOCK, R0_BLOCK])), "


def weighted(x, weight):
    y = x * weight
    return y.sum(0), y - y.mean(-1, keepdim=True)


@nvidia_only
@instantiate_parametrized_tests
class RowInvariantsTest(MixOrderTestCase):
    """What every row reads is a tile in registers, laid out as the other tiles."""

    fuse = FUSE_ALL

    @parametrize("columns", (96, 129, 1024))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_weight(self, columns, dtype):
        code = self.check(rms_norm_backward, *rms_norm_args(133, columns, dtype))
        before, loop = self.kernel(code)
        self.assertEqual(before.count(TILE), 1)
        self.assertNotIn(TILE, loop)

    @parametrize("rows", (13, 37, 133))
    def test_weight_of_another_type(self, rows):
        code = self.check(weighted, randn(rows, 96, dtype=torch.bfloat16), randn(96))
        self.assertEqual(self.kernel(code)[0].count(TILE), 1)

    def test_knob(self):
        args = rms_norm_args(133, 96)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"expand_row_invariants": False}})
        self.assertNotIn(TILE, code)

    def test_bool(self):
        self.check(weighted, randn(133, 96), randn(96) > 0)

    def test_scalar_is_no_tile(self):
        code = self.check(weighted, randn(133, 96), randn(1))
        self.assertNotIn(TILE, code)

    def test_parts_of_a_row(self):
        def f(x, weight):
            y = x * weight
            return y.sum(0), y.sum((1, 2))

        self.check(f, randn(133, 12, 8), randn(8))
        self.check(f, randn(133, 12, 8), randn(12, 1), fused=2)

    def test_gathered(self):
        index = torch.randint(0, 64, (96,), device=GPU_TYPE)
        self.check(
            lambda x, table, index: weighted(x, table[index]),
            randn(133, 96),
            randn(64),
            index,
        )

    def test_dynamic_rows(self):
        x = randn(133, 96, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        code = self.check(weighted, x, randn(96))
        self.assertEqual(self.kernel(code)[0].count(TILE), 1)

    # bytes of a float32 weight that a thread has as many columns of as of a row
    @parametrize("columns,weight", ((96, 16), (98, 8), (97, 4)))
    def test_no_more_columns_a_thread_than_of_a_row(self, columns, weight):
        def f(x, weight):
            y = x * weight
            return y.sum(0), (y - y.mean(-1, keepdim=True)).bfloat16()

        x = randn(133, columns, dtype=torch.bfloat16)
        code = self.check(f, x, randn(columns))
        self.assertEqual(self.alignments(code), {"*bf16": {16}, "*fp32": {weight}})

    def test_a_stride_that_is_not_known(self):
        def f(x, weight):
            y = x[:, :96] * weight
            return y.sum(0), (y - y.mean(-1, keepdim=True)).bfloat16()

        x = randn(133, 160, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 1)
        code = self.check(f, x, randn(96))
        self.assertEqual(self.alignments(code)["*fp32"], {4})

    def test_rows_of_a_wider_tensor(self):
        x = randn(133, 97, dtype=torch.bfloat16)[:, :96]
        code = self.check(weighted, x, randn(96))
        self.assertIn(4, self.alignments(code)["*fp32"])


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
