# Owner(s): ["module: inductor"]

import ast
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.test_case import run_tests
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
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
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        randn,
    )


SPLIT_SIZE = "triton.mix_order_reduction_split_size"


class TestBase(MixOrderTestCase):
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
class OneKernelTest(TestBase):
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
class EpilogueTest(TestBase):
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
class OptionsTest(TestBase):
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


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
