# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.test_case import run_tests
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU

try:
    from .test_mix_order_reduction_utils import (
        FUSE,
        MixOrderTestCase,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE,
        MixOrderTestCase,
    )


@instantiate_parametrized_tests
class RowsBeyondTheEndTest(MixOrderTestCase):
    """Rows of the last tile beyond xnumel contribute the reduction's identity."""

    @parametrize("shape", ((1025, 512), (33, 64), (40001, 512)))
    def test_function_of_a_masked_load(self, shape):
        # exp(0) is 1: every row beyond the end used to add 1 to each column
        x = torch.randn(shape, device=GPU_TYPE) - 4
        self.check(lambda x: (x.exp().sum(0), x.sum(1)), x)

    @parametrize("rows", (1025, 16389))
    def test_prod(self, rows):
        # 0, what a masked load returns, is not neutral for a product, whose rounding
        # errors add up over the rows in any order
        x = 1 + torch.randn(rows, 64, device=GPU_TYPE) / 1024
        self.check(lambda x: (x.prod(0), x.sum(1)), x, ulps=8 * rows**0.5)

    @parametrize("rows", (9, 13))
    def test_fewer_rows_than_a_split(self, rows):
        x = torch.randn(rows, 64, device=GPU_TYPE)
        self.check(lambda x: (x.cos().sum(0), x.sum(1)), x)

    def test_no_mask_where_tiles_fit(self):
        x = torch.randn(4096, 64, device=GPU_TYPE)
        code = self.check(lambda x: (x.cos().sum(0), x.sum(1)), x)
        FileCheck().check_not("tl.where(xmask").run(code)


@instantiate_parametrized_tests
class AccumulateDtypeTest(MixOrderTestCase):
    """Partials are kept in a type that holds the result."""

    @parametrize("dtype", (torch.int64, torch.int32, torch.uint8, torch.bool))
    def test_integers(self, dtype):
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max
        x = torch.randint(0, high, (1030, 96), device=GPU_TYPE).to(dtype)
        code = self.check(lambda x: (x.sum(0), x.sum(1)), x)
        FileCheck().check("tl.full([R0_BLOCK], 0, tl.int64)").run(code)

    def test_double(self):
        x = torch.randn(1030, 96, dtype=torch.float64, device=GPU_TYPE)
        code = self.check(lambda x: (x.sum(0), x.sum(1)), x)
        FileCheck().check("tl.full([R0_BLOCK], 0, tl.float64)").run(code)

    @parametrize("dtype", (torch.float16, torch.bfloat16, torch.float32))
    def test_float(self, dtype):
        x = torch.randn(1030, 96, device=GPU_TYPE).to(dtype)
        code = self.check(lambda x: (x.sum(0), x.sum(1)), x)
        FileCheck().check("tl.full([R0_BLOCK], 0, tl.float32)").run(code)

    def test_two_dtypes_do_not_share_a_workspace(self):
        def f(x):
            return x.sum(0), (x * 100).to(torch.int64).sum(0), x.sum(1)

        self.check(f, torch.rand(1030, 96, device=GPU_TYPE), fused=0)


@instantiate_parametrized_tests
class FinalBufferTest(MixOrderTestCase):
    """The final reduction goes to the buffer, shape and strides that were scheduled."""

    @parametrize("split_reductions", (False, True))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_keepdim(self, split_reductions, dtype):
        x = torch.randn(1030, 96, device=GPU_TYPE).to(dtype)
        self.check(
            lambda x: (x.sum(0, keepdim=True), x.sum(1, keepdim=True)),
            x,
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_several_columns(self, split_reductions):
        x = torch.randn(1030, 12, 8, device=GPU_TYPE)
        self.check(
            lambda x: (x.sum(0), x.sum((1, 2))), x, split_reductions=split_reductions
        )

    @parametrize("split_reductions", (False, True))
    def test_permuted_columns(self, split_reductions):
        x = torch.randn(1030, 12, 8, device=GPU_TYPE)
        self.check(
            lambda x: (x.transpose(1, 2).sum(0) + 1, x.sum((1, 2))),
            x,
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_slice_of_a_concatenation(self, split_reductions):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        y = torch.randn(5, device=GPU_TYPE)
        self.check(
            lambda x, y: (torch.cat([y, x.sum(0), y]), x.sum(1)),
            x,
            y,
            split_reductions=split_reductions,
        )

    def test_columns_of_a_concatenation(self):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        y = torch.randn(96, 1, device=GPU_TYPE)
        self.check(lambda x, y: (torch.cat([y, x.sum(0)[:, None]], 1), x.sum(1)), x, y)

    def test_mean_and_its_consumers(self):
        def f(x):
            mean = x.mean(0)
            return mean, x - mean, mean * 2, x.sum(1)

        self.check(f, torch.randn(1030, 96, device=GPU_TYPE))


class ReductionTypesTest(MixOrderTestCase):
    """Whatever joins a mix-order kernel is accumulated as it should be, or stays out."""

    def test_absorbed_any(self):
        # With one byte an element sum and any share fewer bytes than the pair of mixed
        # orders has elements, so that pair fuses first and any comes later.
        def f(x):
            return x.float().softmax(1), x.sum(0), (x.float() > 0).any(0)

        x = torch.randint(-128, 127, (4096, 256), device=GPU_TYPE).to(torch.int8)
        code = self.check(f, x)
        FileCheck().check_not(".any(dim=0)").run(code)

    def test_pair_of_amax(self):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        off = {"triton.mix_order_reduction_debug": {"extrema": False}}
        self.check(lambda x: (x.amax(0), x.sum(1)), x, fused=0, **off)


class OneSideTest(MixOrderTestCase):
    """Reductions over the rows are siblings: none reads what another returns."""

    def test_sum_of_deviations(self):
        # both sums over rows fit one loop, so they fuse; as partial accumulators the
        # second would read the first's result before the final reduction wrote it
        def f(x):
            return ((x - x.mean(0)) ** 2).sum(0), x.sum(1)

        x = torch.randn(1030, 96, device=GPU_TYPE)
        self.check(f, x, fused=0, split_reductions=False)


@instantiate_parametrized_tests
class SplitContiguousNodeTest(MixOrderTestCase):
    """A contiguous node that lowering split in two layers can be left alone."""

    @parametrize("shape", ((3, 8472), (64, 16384)))
    def test_rms_norm_backward(self, shape):
        def f(x, weight, dy, rstd):
            xhat = x * rstd
            wdy = weight * dy
            dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
            return dx, (dy * xhat).sum(0)

        rows, columns = shape
        x, dy = (torch.randn(shape, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(columns, device=GPU_TYPE)
        rstd = torch.rand(rows, 1, device=GPU_TYPE)
        keep = {"triton.mix_order_reduction_debug": {"cancel_split": False}}
        self.check(f, x, weight, dy, rstd, fused=0, **keep)


@instantiate_parametrized_tests
class DynamicRowsTest(MixOrderTestCase):
    """The split follows the rows at run time."""

    @staticmethod
    def sums(x):
        return x.sum(0), x.cos().sum(0), (x * 2).sum(0), x.sum(1)

    # 23/24 + 97/24 is less than 5 in floating point
    @parametrize("split_size", (None, 24))
    def test_dynamic(self, split_size):
        x = torch.randn(97, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, 0)
        code = self.check(
            self.sums, x, **{"triton.mix_order_reduction_split_size": split_size}
        )
        self.assertNotIn("math.floor", code)

    def test_two_dynamic_dimensions(self):
        x = torch.randn(14, 74, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, (0, 1))
        self.check(lambda x: (*self.sums(x.flatten(0, 1)),), x)

    def test_unbacked(self):
        # a row count that only the data knows scores no shared bytes: nothing is fused
        f = torch.compile(self.sums, fullgraph=True)
        with inductor_config.patch(FUSE):
            for rows in (1030, 33, 1, 0):
                x = torch.randn(rows, 96, device=GPU_TYPE)
                torch._dynamo.decorators.mark_unbacked(x, 0)
                self.compare(self.sums, f(x), (x,), ulps=8)
        self.assertEqual(metrics.codegen_mix_order_reduction, 0)


class RowResultTest(MixOrderTestCase):
    """What is done to a row's result is done in the loop over rows."""

    def after_the_loop(self, code):
        return code.split("tl.store(ws_ptr")[1].split("'''")[0]

    def test_argmax(self):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        code = self.check(lambda x: (x.argmax(1, keepdim=True), x.sum(0)), x)
        self.assertNotIn(".to(tl.", self.after_the_loop(code))

    def test_no_upcast(self):
        x = torch.randn(1030, 96, device=GPU_TYPE).bfloat16()
        code = self.check(
            lambda x: (x.sum(1), x.sum(0)),
            x,
            **{"triton.codegen_upcast_to_fp32": False},
        )
        self.assertNotIn(".to(tl.", self.after_the_loop(code))


class WorkspaceReuseTest(MixOrderTestCase):
    """The workspace is freed before the epilogue of the same node allocates."""

    def test_workspace_of_one_split(self):
        # one split of float32 partials is as large as the epilogue's float32 output
        x = torch.randn(16, 96, device=GPU_TYPE).bfloat16()
        self.check(lambda x: (x.sum(0).float(), x.sum(1)), x)


class EpilogueTest(MixOrderTestCase):
    """What was fused with the reduction over rows comes after the kernel."""

    def test_two_domains(self):
        # the contiguous node reads z through a view, so that the cosine of all of z
        # fuses with the other one, as does what follows the other one's result
        def f(z):
            return z.view(1030, 96).sum(1), z.sum(1) * 2, z.cos()

        self.check(f, torch.randn(96, 1030, device=GPU_TYPE), split_reductions=False)


class BlockPointerTest(MixOrderTestCase):
    """Block pointers follow the loop over rows."""

    def test_use_block_ptr(self):
        x = torch.randn(1030, 128, device=GPU_TYPE)
        code = self.check(
            lambda x: (x.sum(1), x.sum(0)), x, **{"triton.use_block_ptr": True}
        )
        advances = r"(?s)make_block_ptr.*xoffset \+= (XBLOCK|RSPLIT_STRIDE)\n"
        self.assertRegex(code, advances)


class NotCooperativeTest(MixOrderTestCase):
    """The programs of a mix-order kernel already share the rows."""

    def test_force_cooperative_reductions(self):
        x = torch.randn(1030, 128, device=GPU_TYPE)
        code = self.check(
            lambda x: (x.sum(1), x.sum(0)),
            x,
            **{"triton.force_cooperative_reductions": True},
        )
        FileCheck().check("MixOrderReductionGrid").run(code)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
