# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.mix_order_debug import debug_options, DebugOptions
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


DEBUG = "triton.mix_order_reduction_debug"
FUSE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "triton.mix_order_reduction_max_reads": 0,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}
STRICT = {
    "triton.mix_order_reduction_non_strict_mode": False,
    "triton.mix_order_reduction_cost_model": False,
}


def rms_norm_backward(x, dy, weight, rstd):
    xhat = x * rstd
    wdy = weight * dy
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx, (dy * xhat).sum(0)


@instantiate_parametrized_tests
class SquareTest(TestCase):
    """Equal groups are of mixed orders when what both read whole says so."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, fused=1, kernels=1, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        # and one that finishes what each mix-order kernel began
        self.assertEqual(metrics.generated_kernel_count, kernels + fused)
        for act, ref in zip(actual, expect):
            self.assertEqual(act.stride(), ref.stride())
            self.assertEqual(act, ref, atol=1e-3, rtol=1e-3)
        return code

    @parametrize("split_reductions", (False, True))
    @parametrize("n", (96, 768, 4096, 8192))
    def test_rms_norm_backward(self, n, split_reductions):
        x, dy = (torch.randn(n, n, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(n, device=GPU_TYPE)
        rstd = torch.rand(n, 1, device=GPU_TYPE)
        self.check(
            rms_norm_backward, x, dy, weight, rstd, split_reductions=split_reductions
        )

    @parametrize("split_reductions", (False, True))
    def test_rows_of_three_dimensions(self, split_reductions):
        x = torch.randn(12, 8, 96, device=GPU_TYPE)
        f = lambda x: (x.sum(2), x.sum((0, 1)))  # noqa: E731
        self.check(f, x, split_reductions=split_reductions)

    @parametrize("split_reductions", (False, True))
    def test_absorbed_later(self, split_reductions):
        # each goes to the side of its order, whatever order they come in
        def f(x, y):
            z = x * y
            return (
                z.sum(0),
                z.cos().sum(1),
                z.exp().sum(0),
                z.sum(1),
                z.sin().sum(0),
                x + y,
            )

        x, y = (torch.randn(96, 96, device=GPU_TYPE) for _ in range(2))
        code = self.check(f, x, y, split_reductions=split_reductions)
        # three partial accumulators, two sums of rows
        self.assertEqual(code.count("tl.store(ws_ptr"), 3)

    @parametrize("dim", (0, 1))
    def test_one_order(self, dim):
        x = torch.randn(96, 96, device=GPU_TYPE)
        f = lambda x: (x.sum(dim), x.cos().sum(dim))  # noqa: E731
        self.check(f, x, fused=0, split_reductions=False)

    @parametrize("dtype, fused", ((torch.float32, 0), (torch.float16, 1)))
    def test_more_bytes_in_one_order(self, dtype, fused):
        # x is read in two orders, y in one
        def f(x, y):
            return (x + y).sum(1), (x.t() * y).sum(1)

        x = torch.randn(96, 96, device=GPU_TYPE)
        y = torch.randn(96, 96, device=GPU_TYPE).to(dtype)
        self.check(f, x, y, fused=fused, split_reductions=False)

    def test_both_orders_in_one_node(self):
        # x says nothing about the order of the second
        def f(x):
            return x.sum(1), (x + x.t()).sum(1)

        self.check(
            f, torch.randn(96, 96, device=GPU_TYPE), fused=0, split_reductions=False
        )

    @parametrize("square, kernels", ((True, 2), (False, 1)))
    def test_not_flattened(self, square, kernels):
        # One loop for both would save no more than reading w twice, and one of them
        # would read x across its rows. Strict mode has no mix-order kernel for x.
        def f(x, w):
            return (x * w).sum(1), (x * w).sum(0)

        x = torch.randn(96, 96, device=GPU_TYPE)
        w = torch.randn((), device=GPU_TYPE)
        self.check(
            f,
            x,
            w,
            fused=0,
            kernels=kernels,
            split_reductions=False,
            score_fusion_memory_threshold=1,
            **STRICT,
            **{DEBUG: {"square": square}},
        )

    def test_off(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        self.check(
            lambda x: (x.sum(1), x.sum(0)), x, fused=0, kernels=2, **{DEBUG: {"square": False}}
        )

    def test_dynamic(self):
        # as many columns as a size that is not known: not a persistent reduction
        x = torch.randn(96, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, (0, 1))
        f = lambda x: (x.cos().sum(1), x.sum(0))  # noqa: E731
        self.check(f, x, fused=0, kernels=2, split_reductions=False)

    def test_dynamic_rows(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(lambda x: (x.sum(1), x.sum(0)), x, split_reductions=False)


class DebugOptionsTest(TestCase):
    """What ``triton.mix_order_reduction_debug`` may have."""

    def test_others_are_as_they_were(self):
        self.assertEqual(debug_options(), DebugOptions())
        with inductor_config.patch({DEBUG: {"square": False}}):
            self.assertEqual(debug_options(), DebugOptions(square=False))

    def test_what_is_none(self):
        for entries, why in (
            ({"squares": False}, "has no 'squares'; its options are .*square"),
            ({"__class__": False}, "has no '__class__'"),
            ({"square": 0}, "square is 0, and should be of type bool"),
        ):
            with inductor_config.patch({DEBUG: entries}):
                self.assertRaisesRegex(ValueError, why, debug_options)

    def test_options_of_compile(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        for square in (True, False):
            torch._dynamo.reset()
            metrics.reset()
            options = {**FUSE, DEBUG: {"square": square}}
            torch.compile(lambda x: (x.sum(1), x.sum(0)), options=options)(x)
            self.assertEqual(metrics.codegen_mix_order_reduction, square)

    def test_caches_tell_them_apart(self):
        x = torch.randn(96, 96, device=GPU_TYPE)
        codes = []
        for square in (True, False, True):
            torch._dynamo.reset()
            options = {**FUSE, "fx_graph_cache": True, DEBUG: {"square": square}}
            with inductor_config.patch(options):
                f = torch.compile(lambda x: (x.sum(1), x.sum(0)))
                codes += run_and_get_code(f, x)[1]
        self.assertNotEqual(codes[0], codes[1])
        self.assertEqual(codes[0], codes[2])


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
