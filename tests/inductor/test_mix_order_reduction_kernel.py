# Owner(s): ["module: inductor"]
"""The kernel of a mix-order reduction: its numerics, its partials and final reduction."""

import ast
import os
import re
import unittest
from unittest.mock import patch

import torch
import torch._functorch.config
import torch._inductor.config as inductor_config
from torch._inductor import memory, metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_row_cost import RowCost
from torch._inductor.mix_order_row_split import row_split
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.nn.functional import pad
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        centered_and_sums,
        CPP_WRAPPER,
        DEBUG,
        FUSE,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        Reload,
        rms_norm_args,
        rms_norm_backward,
        SPLIT_SIZE,
        with_split,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        centered_and_sums,
        CPP_WRAPPER,
        DEBUG,
        FUSE,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        Reload,
        rms_norm_args,
        rms_norm_backward,
        SPLIT_SIZE,
        with_split,
    )


HALF_TYPES = (torch.bfloat16, torch.float16)
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
on_a_gpu = unittest.skipIf(interpreted, "the interpreter runs no C++: needs a GPU")


# Results, against eager in float64


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

    def test_scan_of_few_long_rows(self):
        # it is split over programs by itself, and its kernel reduces nothing else
        x = torch.randint(-4, 5, (2, 20401), device=GPU_TYPE).float()
        self.check(lambda x: (x.cumsum(1), x.argmax(1)), x, fused=0)


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

        def split(device, reduction_numel_hint, numel_hint, inner_reduction):
            return 3 if reduction_numel_hint == columns else 1

        split, whole = staticmethod(split), staticmethod(lambda *_: False)
        with (
            patch.object(InductorChoices, "reduction_split_factor", split),
            patch.object(InductorChoices, "leaves_rows_whole", whole, create=True),
        ):
            self.check(f, x, weight, dy, rstd, fused=0)


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

    def test_rolled(self):
        """The last rows, as many as there are, come first."""
        x = torch.randn(48, 33, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, 0)

        def f(x):
            y = x.roll(4, 0)
            return y.sum(0), y.sum(1)

        self.check(f, x)


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
    """The workspace is freed before the epilogue of the same node allocates, and at once."""

    def test_workspace_of_one_split(self):
        # one split of float32 partials is as large as the epilogue's float32 output
        x = torch.randn(16, 96, device=GPU_TYPE).bfloat16()
        self.check(lambda x: (x.sum(0).float(), x.sum(1)), x)

    def test_freed_while_a_product_runs(self):
        """Another kernel's workspace would be as large."""

        def f(x, weight):
            y = (x * x.sum(0)) @ weight
            return x.sum(1), y.sum(0), y.sum(1)

        x = torch.randn(1030, 96, device=GPU_TYPE)
        weight = torch.randn(96, 96, device=GPU_TYPE)
        code = self.check(f, x, weight, fused=2)
        FileCheck().check("del workspace_0").check("extern_kernels").check(
            "workspace_1 = empty_strided"
        ).run(code)


class NumericsEpilogueTest(MixOrderTestCase):
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
        advances = r"xoffset \+= (XBLOCK|RSPLIT_STRIDE)\n"
        # the Triton of 2.15 has none, and the option asks for nothing
        if hasattr(torch._inductor.runtime.triton_compat.tl, "advance"):
            advances = r"(?s)make_block_ptr.*" + advances
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


# Masked loads of what the kernel stored


@instantiate_parametrized_tests
class MaskedLoadOfAStoreTest(TestCase):
    """A kernel reads, through a mask, what it has stored itself."""

    @parametrize("value", (0.0, 7.0))
    @parametrize("what", ("pointwise", "reduction"))
    def test_end_is_padded_again(self, what, value):
        def f(x):
            y = torch.softmax(x, -1) if what == "reduction" else x.cos() + 2
            return y, pad(y[:-1], (0, 0, 0, 1), value=value)

        x = torch.randn(37, 64, device=GPU_TYPE)
        metrics.reset()
        actual = torch.compile(f, fullgraph=True)(x)
        # not all releases fuse the padding
        self.assertLessEqual(metrics.generated_kernel_count, 2)
        self.assertEqual(actual, f(x))


# Under cpp_wrapper and in AOTInductor


def half_backward(x, weight, dy, rstd):
    dx, dweight = rms_norm_backward(x, weight, dy, rstd)
    return dx.to(x.dtype), dweight


def biased_backward(x, weight, dy, rstd):
    return *half_backward(x, weight, dy, rstd), dy.float().sum(0)


@nvidia_only
@instantiate_parametrized_tests
class CppWrapperCppWrapperTest(MixOrderTestCase):
    fuse = FUSE_ALL

    @parametrize("f", (half_backward, biased_backward))
    @parametrize("aot", (False, True))
    def test_generated(self, f, aot):
        """Two launches, and nothing of the final reduction as text."""
        code = self.generate_cpp(f, *rms_norm_args(133, 96, torch.bfloat16), aot=aot)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        *_, body = code.partition("// Call mix order reduction kernel")
        calls = [line for line in body.splitlines() if "call_triton_" in line]
        self.assertEqual(len(calls), 2)
        for call in calls:
            self.assertIn("workspace_0", call)
        self.assertNotIn("# Call mix order", code)
        self.assertNotIn(".sum(", code)

    @on_a_gpu
    def test_runs(self):
        args = rms_norm_args(1031, 1024, torch.bfloat16)
        with inductor_config.patch({**self.fuse, **CPP_WRAPPER}):
            compiled = torch.compile(half_backward, fullgraph=True)
            actual = compiled(*args)
            self.assertEqual(metrics.codegen_mix_order_reduction, 1)
            self.compare(half_backward, actual, args)
            for left, right in zip(actual, compiled(*args)):
                self.assertTrue(torch.equal(left, right))


# The final reduction


class FinalReductionTestBase(MixOrderTestCase):
    fuse = FUSE_ALL

    def check(self, f, *args, kernels=2, **options):
        """
        And expect ``kernels`` kernels in all, and nothing that the wrapper itself
        computes.
        """
        code = super().check(f, *args, **options)
        self.assertEqual(len(self.calls(code)), kernels)
        self.assertNotRegex(code, r"\.\w+\(dim=0")
        return code

    def final(self, code):
        """The kernel that reads the workspace."""
        users = self.calls(code, "workspace_0")
        self.assertEqual(len(users), 2, "the writer and the reader of the workspace")
        return self.source(code, users[1])


@instantiate_parametrized_tests
class FinalReductionOneKernelTest(FinalReductionTestBase):
    """All partial accumulators are reduced by one generated kernel."""

    def test_several_partials(self):
        def f(x):
            return x.sum(0), x.cos().sum(0), (x * x).sum(0), x.sum(1)

        self.check(f, randn(1030, 96))

    @parametrize("dtype", (torch.float16, torch.bfloat16))
    def test_cast(self, dtype):
        code = self.check(
            lambda x, y: (x.sum(0), (x * y).sum(0), x.sum(1)),
            randn(1030, 96, dtype=dtype),
            randn(1030, 96, dtype=dtype),
        )
        self.assertNotIn(".copy_(", code)

    # columns of a program: as many as leave programs for the GPU
    @parametrize("columns,xblock", ((96, 4), (512, 8), (2048, 16)))
    @parametrize("more", (0, 5))
    def test_all_rows_at_once(self, columns, xblock, more):
        def f(x):
            return x.sum(0), x.sum(1), *((x * (2 + i)).sum(0) for i in range(more))

        code = self.check(f, randn(1030, columns))
        nsplit = int(re.search(r"r0_numel = (\d+)", self.final(code))[1])
        config = re.search(r"fixed_config\(\s*config=(\{.*?\})", code)
        self.assertIsNotNone(config, "the final reduction has no configuration")
        config = ast.literal_eval(config[1])
        self.assertEqual(config["XBLOCK"], xblock)
        if not more:
            self.assertGreaterEqual(config["R0_BLOCK"], min(nsplit, 1024))
        elements = (1 + more) * xblock * config["R0_BLOCK"]
        self.assertLessEqual(elements, 96 * 32 * config["num_warps"])

    def test_mixed_result_dtypes(self):
        def f(x, y):
            return x.sum(0), (x.float() * y).sum(0), x.sum(1)

        self.check(f, randn(1030, 96, dtype=torch.bfloat16), randn(1030, 96))

    @parametrize("split_reductions", (False, True))
    def test_keepdim(self, split_reductions):
        self.check(
            lambda x: (x.sum(0, keepdim=True), x.sum(1, keepdim=True)),
            randn(1030, 96),
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_several_columns(self, split_reductions):
        self.check(
            lambda x: (x.sum(0), x.sum((1, 2))),
            randn(1030, 12, 8),
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_permuted_columns(self, split_reductions):
        """Columns are stored, and used, in an order that is not that of the workspace."""

        def f(x, y):
            s = x.permute(2, 1, 0).sum(2)
            return s, s + y, s.t() * y.t(), x.sum((1, 2))

        self.check(
            f,
            randn(1030, 12, 8),
            randn(8, 12),
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_slice_of_a_concatenation(self, split_reductions):
        self.check(
            lambda x, y: (torch.cat([y, x.sum(0), y]), x.sum(1)),
            randn(1030, 96),
            randn(5),
            kernels=3,
            split_reductions=split_reductions,
        )

    def test_columns_of_a_concatenation(self):
        self.check(
            lambda x, y: (torch.cat([y, x.sum(0)[:, None]], 1), x.sum(1)),
            randn(1030, 96),
            randn(96, 1),
            kernels=3,
        )

    def test_prod(self):
        # rounding errors add up over the rows in any order
        x = 1 + randn(1030, 64) / 1024
        self.check(lambda x: (x.prod(0), x.sum(1)), x, ulps=8 * 1030**0.5)

    @parametrize("dtype", (torch.int64, torch.int32, torch.uint8, torch.bool))
    def test_integers(self, dtype):
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max
        x = torch.randint(0, high, (1030, 96), device=GPU_TYPE).to(dtype)
        self.check(lambda x: (x.sum(0), x.sum(0) + 1, x.sum(1)), x)

    @parametrize("dtype", (torch.int32, torch.uint8))
    def test_narrow_integers(self, dtype):
        """What follows sees the result as it is stored, wrapped around."""

        def f(x):
            s = x.sum(0, dtype=dtype)
            return s, s.to(torch.int64), s > 0, x.sum(1)

        x = torch.randint(1 << 20, 1 << 30, (1030, 96), device=GPU_TYPE)
        # what follows loads it
        self.check(f, x, kernels=3)

    def test_double(self):
        self.check(
            lambda x: (x.sum(0), x.sum(1)), randn(1030, 96, dtype=torch.float64)
        )

    def test_mean(self):
        self.check(lambda x: (x.mean(0), x.mean(1)), randn(1030, 96))

    @parametrize("split_reductions", (False, True))
    def test_one_program(self, split_reductions):
        """One partial is copied, and cast, not reduced."""
        code = self.check(
            lambda x: (x.sum(0), x.sum(0) * 2, x.sum(1)),
            randn(16, 96, dtype=torch.bfloat16),
            split_reductions=split_reductions,
            **{SPLIT_SIZE: 16},
        )
        self.assertNotIn("tl.sum", self.final(code))

    @parametrize("split_size", (None, 24))
    def test_dynamic_rows(self, split_size):
        def f(x):
            return x.sum(0), (x * x).sum(0) * 2, x.sum(1)

        compiled = torch.compile(f, fullgraph=True)
        with (
            inductor_config.patch({**self.fuse, SPLIT_SIZE: split_size}),
            torch._dynamo.config.patch(error_on_recompile=True),
            torch.fx.experimental._config.patch(backed_size_oblivious=True),
        ):
            for rows in (97, 331, 25, 24, 1):
                x = randn(rows, 8192)
                torch._dynamo.mark_dynamic(x, 0)
                if rows == 97:
                    actual, (code,) = run_and_get_code(compiled, x)
                    self.assertEqual(len(self.calls(code)), 2)
                    self.assertNotIn(".sum(dim=0", code)
                else:
                    actual = compiled(x)
                self.compare(f, actual, (x,), ulps=4)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)

    def test_two_mix_order_kernels(self):
        def f(x, y):
            return x.sum(0), x.sum(1), y.sum(0), y.sum(1)

        code = self.check(f, randn(1030, 96), randn(517, 200), fused=2, kernels=4)
        calls = self.calls(code)
        self.assertEqual(len(set(calls)), 4)


@instantiate_parametrized_tests
class FinalReductionEpilogueTest(FinalReductionTestBase):
    """What Inductor fuses with a reduction is in the kernel of the final reduction."""

    @parametrize("split_reductions", (False, True))
    def test_reads_another_buffer(self, split_reductions):
        def f(x, grad):
            s = x.sum(0)
            return grad + s, s.sigmoid(), x.sum(1)

        self.check(
            f, randn(1030, 96), randn(96), split_reductions=split_reductions
        )

    @parametrize("split_reductions", (False, True))
    def test_of_two_partials(self, split_reductions):
        def f(x, y):
            a, b = x.sum(0), (x * y).sum(0)
            return a * b, x.sum(1)

        self.check(
            f, randn(1030, 96), randn(1030, 96), split_reductions=split_reductions
        )

    @parametrize("split_reductions", (False, True))
    def test_dependent(self, split_reductions):
        """An epilogue that reads another one, which is returned too."""

        def f(x, y):
            s = x.sum(0)
            a = s + y
            b = torch.cat([a, s])
            return a, a.exp() * s, b, x.sum(1)

        self.check(
            f,
            randn(1030, 96) / 32,
            randn(96),
            # the concatenation keeps it from the kernel of a second layer
            kernels=3 if split_reductions else 2,
            ulps=8,
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_used_by_a_later_kernel(self, split_reductions):
        def f(x, y):
            s = x.sum(0) * 2
            return s, x.sum(1), (y * s).sum(1)

        self.check(
            f,
            randn(1030, 96),
            randn(77, 96),
            kernels=3,
            ulps=4,
            split_reductions=split_reductions,
        )

    @parametrize("split_reductions", (False, True))
    def test_whole_tensor(self, split_reductions):
        """What works on the whole tensor is a kernel of its own."""

        def f(x):
            mean = x.mean(0)
            return mean, x - mean, mean * 2, x.sum(1)

        self.check(
            f, randn(1030, 96), kernels=3, split_reductions=split_reductions
        )

    @parametrize("split_reductions", (False, True))
    def test_reads_the_contiguous_side(self, split_reductions):
        """The kernel's other result has been computed when the epilogue runs."""

        def f(x):
            return x.sum(0) + x.sum(1)[:96], x.sum(1)

        self.check(
            f,
            randn(1030, 96),
            # fused with a second layer alone
            kernels=2 if split_reductions else 3,
            ulps=4,
            split_reductions=split_reductions,
        )

    @parametrize("other", ("flipped", "one", "same"))
    def test_index_of_another_partial(self, other):
        """
        Two second layers, not fused, whose kernels become one: an epilogue of one
        reads the other's result where it is not in its registers.
        """

        def f(x, y):
            a, b = x.sum(0), (x * y).sum(0)
            if other == "same":
                return a, b + a, x.sum(1)
            return a, b + (a.flip(0) if other == "flipped" else a[5]), x.sum(1)

        self.check(
            f,
            randn(1030, 96),
            randn(1030, 96),
            kernels=2 if other == "same" else 3,
            ulps=4,
            split_reductions=True,
        )

    def test_other_ranges(self):
        """What was fused over all of the second layer's loops is a kernel of its own."""

        class Split16(InductorChoices):
            @staticmethod
            def reduction_split_factor(device, rnumel, numel, inner_reduction):
                return 16 if rnumel == 1024 else 1

        def f(x, y):
            s = x.sum(0)
            return y + s[:, None], s, x.sum(1)

        with V.set_choices_handler(Split16()):
            self.check(
                f,
                randn(1024, 96),
                randn(96, 16),
                kernels=3,
                split_reductions=True,
                fx_graph_cache=False,
            )

    def test_reads_what_is_computed_later(self):
        """Not pulled before what it reads: the second layer comes later in the graph."""

        def f(x, y):
            s = x.sum(0)
            t = y.sum(0)
            return s * t, x.sum(1), y.cos().sum(1)

        self.check(
            f,
            randn(2060, 96),
            randn(1030, 96),
            fused=2,
            kernels=4,
            ulps=4,
            split_reductions=True,
        )

    @parametrize("split_reductions", (False, True))
    def test_mutates(self, split_reductions):
        """An accumulated gradient: a read of the old value comes before."""

        def f(x, grad):
            s = x.sum(0)
            old = grad * 2
            grad.add_(s)
            return old, x.sum(1)

        x, grad = randn(1030, 96), randn(96)
        expect, actual = grad.clone(), grad.clone()
        with inductor_config.patch({**self.fuse, "split_reductions": split_reductions}):
            result, (code,) = run_and_get_code(torch.compile(f), x, actual)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        self.assertNotIn(".sum(dim=0", code)
        self.assertEqual(result, f(x, expect), atol=1e-3, rtol=1e-5)
        self.assertEqual(actual, expect, atol=1e-3, rtol=1e-5)

    def test_mutated_in_between(self):
        """What an epilogue reads is updated after the kernel, before the epilogue."""

        def f(x, grad, y):
            s = x.sum(0)
            rows = x.sum(1)
            grad.mul_((y * y).sum())
            return s + grad, rows

        x, grad, y = randn(1030, 96), randn(96), randn(7, 33)
        expect, actual = grad.clone(), grad.clone()
        with inductor_config.patch({**self.fuse, "split_reductions": True}):
            result, (code,) = run_and_get_code(torch.compile(f), x, actual, y)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        self.assertNotIn(".sum(dim=0", code)
        self.assertEqual(result, f(x, expect, y), atol=1e-2, rtol=1e-4)
        self.assertEqual(actual, expect, atol=1e-2, rtol=1e-4)


@instantiate_parametrized_tests
class FinalReductionOptionsTest(FinalReductionTestBase):
    """The final reduction is a kernel like any other."""

    @staticmethod
    def f(x, y, grad):
        s = (x * y).sum(0)
        return x.sum(0), s + grad, x.sum(1)

    def args(self):
        return randn(1030, 96), randn(1030, 96), randn(96)

    @parametrize("split_reductions", (False, True))
    @parametrize(
        "option",
        (
            "memory_planning",
            "combo_kernels",
            "benchmark_kernel",
            "triton.use_block_ptr",
            "triton.prefer_nd_tiling",
            "triton.tile_reductions",
            "triton.multi_kernel",
            "triton.persistent_reductions",
            "deterministic",
            "emulate_precision_casts",
            "allow_buffer_reuse",
            "inplace_buffers",
            "triton.cooperative_reductions",
            "triton.force_cooperative_reductions",
        ),
    )
    def test_option(self, option, split_reductions):
        value = option not in (
            "allow_buffer_reuse",
            "inplace_buffers",
            "triton.persistent_reductions",
        )
        if option == "triton.multi_kernel":
            value = 1
        code = self.check(
            self.f,
            *self.args(),
            split_reductions=split_reductions,
            **{option: value},
        )
        if option == "benchmark_kernel":
            self.assertEqual(code.count("def get_args():"), 3)

    @parametrize("split_reductions", (False, True))
    def test_programmatic_dependent_launch(self, split_reductions):
        """What reads the workspace waits for the kernel that writes it."""
        if GPU_TYPE != "cuda" or torch.cuda.get_device_capability()[0] < 9:
            self.skipTest("needs a GPU, or a lab with one, of compute capability 9")

        def f(before, x, y):
            mean = x.mean(0)
            return before.amax(0), mean, y + mean.cos(), x.sum(1)

        code = self.generate(
            f,
            randn(64, 50),
            randn(1030, 96),
            randn(7, 96),
            split_reductions=split_reductions,
            **{"triton.enable_pdl": True},
        )
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        final = self.final(code)
        wait, load = final.index("gdc_wait()"), final.index("tl.load(in_ptr0")
        self.assertLess(wait, load)


# What every row reads is loaded before the loop


def sums(x, weight):
    y = x * weight
    return y.sum(0), y.sum(1)


@instantiate_parametrized_tests
class RowInvariantTest(MixOrderTestCase):
    """What every row reads is loaded once, before the loop over rows."""

    fuse = FUSE_ALL

    def test_weight(self):
        code = self.check(rms_norm_backward, *rms_norm_args(133, 96))
        self.assertEqual(self.loads(code), (1, 3))

    @parametrize(
        "form", ("columns", "one_row", "scalar", "one", "expanded", "bool")
    )
    def test_shared_by_all_rows(self, form):
        weight = {
            "columns": lambda: randn(96),
            "one_row": lambda: randn(1, 96),
            "scalar": lambda: randn(),
            "one": lambda: randn(1),
            "expanded": lambda: randn(1).expand(133, 96),
            "bool": lambda: randn(96) > 0,
        }[form]()
        code = self.check(sums, randn(133, 96), weight)
        self.assertEqual(self.loads(code), (1, 1))

    def test_some_of_several_columns(self):
        def f(x, weight):
            y = x * weight
            return y.sum(0), y.sum((1, 2))

        code = self.check(f, randn(133, 12, 8), randn(8))
        self.assertEqual(self.loads(code), (1, 1))
        code = self.check(f, randn(133, 12, 8), randn(12, 1), fused=2)
        self.assertEqual(self.loads(code), (1, 1))

    def test_shared_by_no_rows(self):
        code = self.check(
            lambda x, weight, b: (*sums(x, weight), (x * b).sum(0)),
            randn(132, 96),
            randn(132, 1),
            randn(96),
        )
        # b alone
        self.assertEqual(self.loads(code), (1, 2))

    def test_shared_by_some_rows(self):
        def f(x, weight, b):
            y = x.view(2, 66, 96) * weight
            return *sums(y.view(132, 96), b), y.sum((0, 1))

        # the third sum, attached, would load the weight by an index of its own
        options = {"triton.mix_order_reduction_producer_sums": False}
        code = self.check(f, randn(132, 96), randn(66, 96), randn(96), **options)
        self.assertEqual(self.loads(code), (1, 2))

    def test_padded(self):
        # its mask is computed in the loop
        def f(x, weight, b):
            return sums(x, torch.nn.functional.pad(weight, (3, 5)) + b)

        code = self.check(f, randn(133, 96), randn(88), randn(96))
        self.assertEqual(self.loads(code), (1, 2))

    def test_gathered(self):
        # the index is loaded once, what it points to where the index is known
        index = torch.randint(0, 64, (96,), device=GPU_TYPE)
        code = self.check(
            lambda x, table, index: sums(x, table[index]),
            randn(133, 96),
            randn(64),
            index,
        )
        self.assertEqual(self.loads(code), (1, 2))


# The layout of what every row reads


WIDENED = "[XBLOCK, R0_BLOCK])), "


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
        self.assertEqual(before.count(WIDENED), 1)
        self.assertNotIn(WIDENED, loop)

    @parametrize("rows", (13, 37, 133))
    def test_weight_of_another_type(self, rows):
        code = self.check(weighted, randn(rows, 96, dtype=torch.bfloat16), randn(96))
        self.assertEqual(self.kernel(code)[0].count(WIDENED), 1)

    def test_knob(self):
        args = rms_norm_args(133, 96)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"expand_row_invariants": False}})
        self.assertNotIn(WIDENED, code)

    def test_bool(self):
        self.check(weighted, randn(133, 96), randn(96) > 0)

    def test_scalar_is_no_tile(self):
        code = self.check(weighted, randn(133, 96), randn(1))
        self.assertNotIn(WIDENED, code)

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
        self.assertEqual(self.kernel(code)[0].count(WIDENED), 1)

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


# The width of vectors, where types differ


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


# Partial accumulators of tiles


FUSE_ALL_READS = {
    **FUSE_ALL,
    # so that all inputs are loaded in the kernel
    "realize_reads_threshold": 100,
    "realize_acc_reads_threshold": 100,
    "realize_opcount_threshold": 100,
}
TILE_ACCUMULATOR = "accum0 = tl.full([XBLOCK, R0_BLOCK]"
ROW_ACCUMULATOR = "accum0 = tl.full([R0_BLOCK]"


def residual_backward(x, dy, *residuals):
    """RMSNorm's backward whose input is a sum: a buffer to load for each summand."""
    for residual in residuals:
        x = x + residual
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1)
    return (dy - x * (x * dy).mean(-1, keepdim=True)) * rstd, (dy * x).sum(0)


def extrema_of_sum(x, *others):
    y = x
    for other in others:
        y = y + other
    return y * y.sum(-1, keepdim=True), y.amax(0), y.amin(0)


def product_of_product(x, *others):
    y = x
    for other in others:
        y = y * other
    return y * y.sum(-1, keepdim=True), y.prod(0)


def tensors(count, *shape, dtype=torch.float32):
    return [randn(*shape, dtype=dtype) for _ in range(count)]


@nvidia_only
@instantiate_parametrized_tests
class AccumulateTilesTest(MixOrderTestCase):
    """Partial accumulators where the rows of a tile are in several warps."""

    fuse = FUSE_ALL_READS

    def check(self, f, args, accumulator, reduction="tl.sum"):
        before, loop = self.kernel(super().check(f, *args))
        self.assertIn(accumulator, before)
        after = f"accum0 = {reduction}(accum0, 0)[None, :]"
        self.assertEqual(after in loop, accumulator == TILE_ACCUMULATOR)

    # of 8 rows: a tile and a bit, two, and more
    @parametrize("rows", (9, 16, 133))
    def test_rows_in_several_warps(self, rows):
        self.check(residual_backward, tensors(10, rows, 128), TILE_ACCUMULATOR)

    def test_half_types(self):
        args = tensors(10, 133, 128, dtype=torch.bfloat16)
        self.check(residual_backward, args, TILE_ACCUMULATOR)

    def test_extrema(self):
        self.check(extrema_of_sum, tensors(10, 133, 128), TILE_ACCUMULATOR, "triton_helpers.max2")

    def test_extrema_propagate_nan(self):
        args = tensors(10, 133, 128)
        args[3][77, 5] = float("nan")
        with inductor_config.patch(FUSE_ALL_READS):
            compiled = torch.compile(extrema_of_sum, fullgraph=True)
            (_, largest, smallest), (code,) = run_and_get_code(compiled, *args)
        self.assertIn(TILE_ACCUMULATOR, code)
        for actual in (largest, smallest):
            self.assertEqual(actual.isnan().nonzero().tolist(), [[5]])

    def test_product(self):
        self.check(product_of_product, tensors(10, 9, 128), TILE_ACCUMULATOR, "triton_helpers.prod")

    def test_a_row_for_all_warps(self):
        self.check(residual_backward, tensors(2, 133, 2048), ROW_ACCUMULATOR)

    def test_one_warp(self):
        self.check(residual_backward, tensors(2, 133, 64), ROW_ACCUMULATOR)

    def test_repeats(self):
        args = tensors(10, 133, 128)
        with inductor_config.patch(FUSE_ALL_READS):
            compiled = torch.compile(residual_backward, fullgraph=True)
            first, code = run_and_get_code(compiled, *args)
            self.assertIn(TILE_ACCUMULATOR, "\n".join(code))
            for left, right in zip(first, compiled(*args)):
                self.assertTrue(torch.equal(left, right))


@nvidia_only
class AccumulateTilesPolicyTest(TestCase):
    def test_when(self):
        """Tiles, and registers for them, where a warp holds no part of some row."""
        device = DeviceModel.of(DeviceProperties.create(torch.device(GPU_TYPE)))
        for rnumel in (64, 128, 256, 512, 1024, 2048, 8192):
            for streams in (2, 5, 9):
                for accumulators in (1, 2, 5):
                    cost = RowCost(
                        columns=rnumel,
                        rnumel=rnumel,
                        stream_bytes=2 * streams,
                        streams=streams,
                        stores_rows=True,
                        accumulators=accumulators,
                        invariants=1,
                    )
                    split = row_split(cost, device, rows=100_000)
                    self.assertTrue(hasattr(split, "accumulate_tiles"))
                    several = split.xblock > 1 and split.num_warps > 1
                    self.assertEqual(
                        split.accumulate_tiles,
                        several and split.num_warps * 256 > rnumel,
                    )
                    if split.accumulate_tiles:
                        tile = split.xblock * rnumel
                        threads = split.num_warps * 32
                        self.assertLess(accumulators * tile / threads, 255)


# The padding of partial accumulators


def centered_and_extrema(x):
    y = x - x.mean(-1, keepdim=True)
    return y, x.amax(0), x.amin(0)


def centered_and_product(x):
    return x - x.mean(-1, keepdim=True), x.prod(0)


@nvidia_only
@instantiate_parametrized_tests
class DropPaddingTest(MixOrderTestCase):
    """Columns that a row is padded by are left out of what is stored of partials."""

    fuse = FUSE_ALL

    def dropped(self, code):
        """What the accumulators of the one mix-order kernel have there, each its own."""
        _, loop = self.kernel(code)
        name, found = "accum{} = tl.where(r0_mask, accum{}, ", []
        while (at := loop.find(name.format(len(found), len(found)))) >= 0:
            self.assertLess(at, loop.index(f", accum{len(found)}, r0_mask)"))
            found.append(loop[at:].splitlines()[0].split(", ")[-1][:-1])
        return found

    @parametrize("dtype", HALF_TYPES)
    @parametrize("columns", (1152, 1280, 1536, 5120, 10240))
    def test_columns(self, columns, dtype):
        code = self.check(rms_norm_backward, *rms_norm_args(134, columns, dtype))
        self.assertEqual(self.dropped(code), ["0"])

    def test_every_partial(self):
        xs = [randn(134, 4608, dtype=torch.bfloat16) for _ in range(3)]
        self.assertEqual(self.dropped(self.check(centered_and_sums, *xs)), ["0"] * 2)

    @parametrize(
        "f,identities",
        ((centered_and_extrema, ['float("-inf")', 'float("inf")']), (centered_and_product, ["1"])),
    )
    def test_identity(self, f, identities):
        code = self.check(f, randn(134, 1280, dtype=torch.bfloat16))
        self.assertEqual(self.dropped(code), identities)

    # no padding; all threads of the program have some column; as wide as what is stored;
    # rows are loaded again; and they begin anywhere
    @parametrize(
        "columns,dtype",
        (
            (1024, torch.bfloat16),
            (768, torch.bfloat16),
            (1280, torch.float32),
            (15360, torch.bfloat16),
            (1281, torch.bfloat16),
        ),
    )
    def test_nothing_to_drop(self, columns, dtype):
        args = rms_norm_args(20000, columns, dtype)
        self.assertEqual(self.dropped(self.generate(rms_norm_backward, *args)), [])

    def test_knob(self):
        args = rms_norm_args(134, 1280, torch.bfloat16)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"drop_padding": False}})
        self.assertEqual(self.dropped(code), [])


# Outputs in the place of inputs


ROWS, COLUMNS = 133, 96
INPLACE = {
    **FUSE_ALL,
    "inplace_buffers": True,
    "allow_buffer_reuse": True,
    # by no measurement
    "shape_padding": False,
    "triton.mix_order_reduction_producer_sums": False,
}


# Of which several hold one element.
ManyThreads = with_split(xblock=1, num_warps=8)


def layer_norm_backward(x, weight, dy, mean, rstd):
    xhat = (x - mean) * rstd
    wdy = weight * dy
    a = wdy.mean(-1, keepdim=True)
    b = (wdy * xhat).mean(-1, keepdim=True)
    return (wdy - a - xhat * b) * rstd, (dy * xhat).sum(0), dy.sum(0)


class InplaceTestCase(MixOrderTestCase):
    """
    A buffer that dies in a kernel takes an output of it. Inputs of a graph may not be
    written, so what dies here is a product of matrices, as the gradient is that comes from
    the layer above.
    """

    fuse = INPLACE

    def inplace(
        self, f, *args, choices=InductorChoices, rows=ROWS, code=False, **options
    ):
        """
        The arguments of the mix-order kernel that are read and written, and how many
        tensors of all rows are allocated.
        """
        whole = code
        with V.set_choices_handler(choices()):
            code = self.check(f, *args, fx_graph_cache=False, **options)
        arguments = self.mix_order_kernel(code).arguments
        allocated = re.findall(rf"= empty_strided_cuda\(\({rows}, {COLUMNS}\)", code)
        found = {a for a in arguments if a.startswith("in_out_ptr")}, len(allocated)
        return (found, code) if whole else found

    def product(self, dtype=torch.float32, rows=ROWS):
        return randn(rows, 32, dtype=dtype), randn(32, COLUMNS, dtype=dtype)


@nvidia_only
@instantiate_parametrized_tests
class InplaceTest(InplaceTestCase):
    """Whatever reads the buffer does so in the kernel, first, and at the same place."""

    @parametrize("choices", (InductorChoices, Reload))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_rms_norm_backward(self, choices, dtype):
        def f(a, b, x, weight, rstd):
            dx, dweight = rms_norm_backward(x, weight, a @ b, rstd)
            return dx.to(x.dtype), dweight

        x, weight = randn(ROWS, COLUMNS, dtype=dtype), randn(COLUMNS, dtype=dtype)
        rstd = torch.rand(ROWS, 1, device=GPU_TYPE)
        args = *self.product(dtype), x, weight, rstd
        found = self.inplace(f, *args, choices=choices, ulps=16)
        self.assertEqual(found, ({"in_out_ptr0"}, 1))

    @parametrize("choices", (InductorChoices, Reload))
    @parametrize("residual", (False, True))
    def test_layer_norm_backward(self, choices, residual):
        def f(a, b, c, x, weight, mean, rstd):
            dx, *sums = layer_norm_backward(x, weight, a @ b, mean, rstd)
            return dx + a @ c if residual else dx, *sums

        a, b = self.product()
        x, weight, c = randn(ROWS, COLUMNS), randn(COLUMNS), torch.rand_like(b)
        args = a, b, c, x, weight, *(torch.rand(ROWS, 1, device=GPU_TYPE) for _ in "ab")
        found = self.inplace(f, *args, choices=choices, ulps=16)
        # either of two that die takes the one output
        self.assertEqual(found, ({"in_out_ptr0"}, 1 + residual))

    @parametrize("choices", (InductorChoices, Reload))
    @parametrize("gradient", ("dies", "is returned", "is read by another kernel"))
    def test_cast_of_dx(self, choices, gradient):
        """The type of dx is the stream's, that of its copy the gradient's."""

        def f(a, b, c, d, x, weight, rstd):
            dy = a @ b
            dx, dweight = rms_norm_backward(x, weight, dy, rstd)
            dx = dx * (c @ d)
            more = {"dies": [], "is returned": [dy]}.get(gradient, [dy @ dy.t()])
            return dx, dx.to(a.dtype), dweight, *more

        x, weight = randn(ROWS, COLUMNS), randn(COLUMNS, dtype=torch.bfloat16)
        rstd = torch.rand(ROWS, 1, device=GPU_TYPE)
        args = *self.product(torch.bfloat16), *self.product(), x, weight, rstd
        found = self.inplace(f, *args, choices=choices, ulps=16)
        dies = gradient == "dies"
        expect = {"in_out_ptr0", "in_out_ptr1"} if dies else {"in_out_ptr0"}
        self.assertEqual(found, (expect, 2 if dies else 3))

    @parametrize("rows", (13, 1000))
    def test_rows(self, rows):
        def f(a, b, x):
            dy = a @ b
            return dy * (dy * x).sum(1, keepdim=True), dy.sum(0), (dy * x).sum(0)

        args = *self.product(rows=rows), randn(rows, COLUMNS)
        found = self.inplace(f, *args, rows=rows, ulps=16)
        self.assertEqual(found, ({"in_out_ptr0"}, 1))

    @torch._functorch.config.patch(donated_buffer=True)
    def test_donated_buffer(self):
        """What the forward saved for the backward alone."""
        x, matrix = self.product()
        weight, bias = randn(COLUMNS), randn(COLUMNS)
        leaves = [t.requires_grad_() for t in (x, matrix, weight, bias)]

        def f(x, matrix, weight, bias):
            shape = (COLUMNS,)
            return torch.nn.functional.layer_norm(x @ matrix, shape, weight, bias)

        def step(f):
            return torch.autograd.grad(f(*leaves).square().sum(), leaves)

        expect = step(f)
        with inductor_config.patch({**self.fuse, "fx_graph_cache": False}):
            actual, (_, code) = run_and_get_code(step, torch.compile(f, fullgraph=True))
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        self.assertEqual(actual, expect, atol=1e-3, rtol=1e-4)
        self.assertIn("in_out_ptr0", self.kernel(code)[1])
        # dx took the place of the product
        self.assertNotIn(f"= empty_strided_cuda(({ROWS}, {COLUMNS})", code)

    def test_two_outputs(self):
        """Of two that may have the buffer one gets it."""

        def f(a, b, x):
            dy = a @ b
            s = (dy * x).sum(1, keepdim=True)
            return dy * s, dy + s, dy.sum(0)

        args = *self.product(), randn(ROWS, COLUMNS)
        found = self.inplace(f, *args, ulps=16)
        self.assertEqual(found, ({"in_out_ptr0"}, 2))

    @parametrize("reads", (False, True))
    def test_producer_sum(self, reads):
        """A kernel that sums what it writes, and what it reads."""

        def f(a, b):
            x = a @ b
            y = x.relu() * 2
            return y, y.sum(0), *([x.sum(0)] if reads else [])

        options = {
            "triton.mix_order_reduction_producer_sums": True,
            "split_reductions": True,
        }
        found = self.inplace(f, *self.product(rows=1030), rows=1030, ulps=16, **options)
        self.assertEqual(found, ({"in_out_ptr0"}, 1))

    @parametrize("reload", (False, True))
    def test_read_in_a_later_pass(self, reload):
        """Where a row is loaded again, the output of the last pass alone may be in place."""

        def f(a, b, x):
            dy = a @ b
            s = dy.sum(1, keepdim=True)
            y = dy * s * x
            return y, dy + y.sum(1, keepdim=True), (dy * x).sum(0)

        args = *self.product(), randn(ROWS, COLUMNS)
        choices = Reload if reload else InductorChoices
        found, code = self.inplace(f, *args, choices=choices, ulps=16, code=True)
        self.assertEqual(found, ({"in_out_ptr0"}, 2))
        kernel = self.kernel(code)[1]
        stores = re.findall(r"tl\.store\((\w+) \+ \(r0", kernel)
        self.assertEqual(len(stores), 2)
        loads = [m.start() for m in re.finditer(r"tl\.load\(in_out_ptr0", kernel)]
        self.assertEqual(len(loads), 3 if reload else 1)
        self.assertLess(max(loads), kernel.index("tl.store(in_out_ptr0"))


@nvidia_only
@instantiate_parametrized_tests
class NotInplaceTest(InplaceTestCase):
    """What reads a buffer after the kernel wrote to it would read something else."""

    def args(self, dtype=torch.float32):
        return *self.product(dtype), randn(ROWS, COLUMNS, dtype=dtype)

    def test_is_an_output(self):
        def f(a, b, x):
            dy = a @ b
            return dy, dy * (dy * x).sum(1, keepdim=True), dy.sum(0)

        found = self.inplace(f, *self.args(), ulps=16)
        self.assertEqual(found, (set(), 2))

    def test_another_kernel_reads_it(self):
        def f(a, b, x):
            dy = a @ b
            return dy * (dy * x).sum(1, keepdim=True), dy / dy.amax(0)

        found = self.inplace(f, *self.args(), ulps=16)
        self.assertEqual(found[0], set())

    def test_of_another_dtype(self):
        def f(a, b, x):
            dy = a @ b
            return dy.float() * (dy * x).sum(1, keepdim=True), dy.sum(0)

        found = self.inplace(f, *self.args(torch.bfloat16), ulps=16)
        self.assertEqual(found, (set(), 2))

    @parametrize(
        "moved",
        (
            lambda dy: dy.flip(0),
            lambda dy: dy.roll(1, 1),
            lambda dy: torch.nn.functional.pad(dy[1:], (0, 0, 0, 1)),
        ),
    )
    def test_reads_elsewhere(self, moved):
        """Other programs may have written there, or have yet to."""

        def f(a, b, x):
            dy = a @ b
            return dy * (dy * x).sum(1, keepdim=True), (moved(dy) * x).sum(0)

        found = self.inplace(f, *self.args(), ulps=16)
        self.assertEqual(found, (set(), 2))

    def test_several_threads_hold_an_element(self):
        def f(a, b, x):
            dy = a @ b
            return dy * (dy * x).sum(1, keepdim=True), dy.sum(0)

        for choices, inplace in (
            (InductorChoices, {"in_out_ptr0"}),
            (ManyThreads, set()),
        ):
            found = self.inplace(f, *self.args(), choices=choices, ulps=16)
            self.assertEqual(found[0], inplace)
            torch._dynamo.reset()
            metrics.reset()

    def test_knob(self):
        def f(a, b, x):
            dy = a @ b
            return dy * (dy * x).sum(1, keepdim=True), dy.sum(0)

        found = self.inplace(f, *self.args(), ulps=16, inplace_buffers=False)
        self.assertEqual(found[0], set())


@nvidia_only
@instantiate_parametrized_tests
class PeakEstimateTest(TestCase):
    """The estimate that chooses an order of the nodes has no memory for what takes none."""

    def saved(self, f, *args, **options):
        """Bytes less at each node of the last graph of ``f``, in its order."""

        def estimates():
            torch._dynamo.reset()
            found = []
            estimate = memory.estimate_peak_memory

            def watched(nodes, free, outputs):
                found.append(estimate(nodes, free, outputs))
                return found[-1]

            with (
                inductor_config.patch(
                    {
                        "reorder_for_peak_memory": True,
                        "inplace_buffers": True,
                        "fx_graph_cache": False,
                        "shape_padding": False,
                        **options,
                    }
                ),
                patch.object(memory, "estimate_peak_memory", watched),
                # of all orders that are tried the one that is given
                patch.object(memory.reorder_for_peak_memory, "__defaults__", ([],)),
            ):
                f(*args)
            return found[-1]

        peak, actual = estimates()
        self.assertEqual(peak, max(actual))
        with patch.object(memory, "not_allocated", lambda *_: [], create=True):
            _, all_outputs = estimates()
        return [more - less for more, less in zip(all_outputs, actual, strict=True)]

    def args(self):
        return randn(64, 32), randn(32, 64), randn(64, 8)

    @parametrize("inplace", (True, False))
    def test_last_read(self, inplace):
        """The second of three nodes writes where it reads."""

        def f(a, b, c):
            y = a @ b
            return y.sigmoid() @ c, *([] if inplace else [y.t() @ c])

        saved = self.saved(torch.compile(f), *self.args())
        self.assertEqual(sum(saved), 4 * 64 * 64 if inplace else 0)
        self.assertEqual(saved[1], sum(saved))

    def test_knob(self):
        def f(a, b, c):
            return (a @ b).sigmoid() @ c

        saved = self.saved(torch.compile(f), *self.args(), inplace_buffers=False)
        self.assertFalse(any(saved))

    @parametrize("of", ("another size", "two places", "an input"))
    def test_new_memory(self, of):
        def f(a, b, c):
            y = a @ b
            if of == "an input":
                return c.sigmoid().t() @ y
            return (y.to(torch.bfloat16) if of == "another size" else y + y.t()), c

        self.assertFalse(any(self.saved(torch.compile(f), *self.args())))

    def test_one_output_in_one_input(self):
        def f(a, b, c):
            y = a @ b
            return (y + 1) @ c, (y * 2).t() @ c

        saved = self.saved(torch.compile(f), *self.args())
        self.assertEqual(max(saved), 4 * 64 * 64)

    def test_stays_in_the_kernel(self):
        def f(a):
            y = a.sin()
            return y * y.sum(1, keepdim=True)

        realize = {"realize_opcount_threshold": 0, "realize_reads_threshold": 0}
        saved = self.saved(torch.compile(f), randn(64, 96), **realize)
        self.assertGreaterEqual(max(saved), 4 * 64 * 96)

    @parametrize("donated", (True, False))
    def test_donated_buffer(self, donated):
        leaves = [t.requires_grad_() for t in (*self.args(), randn(64))]

        def f(x, matrix, _, weight):
            return torch.nn.functional.layer_norm(x @ matrix, (64,), weight)

        compiled = torch.compile(f, fullgraph=True)

        def step():
            compiled(*leaves).square().sum().backward()

        with torch._functorch.config.patch(donated_buffer=donated):
            saved = self.saved(step, **INPLACE)
        self.assertEqual(max(saved) >= 4 * 64 * 64, donated)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
