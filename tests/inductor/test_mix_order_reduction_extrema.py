# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck
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


def extrema(x):
    return x.amax(0), x.amin(0), x.amax(1)


@instantiate_parametrized_tests
class ExtremaTest(TestCase):
    """amax and amin over the rows as partial accumulators: exact, as in eager."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, fused=1, exact=True, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        for act, ref in zip(actual, expect):
            self.assertEqual(act.dtype, ref.dtype)
            self.assertEqual(act.shape, ref.shape)
            tol = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-2, "rtol": 1e-3}
            self.assertEqual(act, ref, equal_nan=True, **tol)
        return code

    # 1025 rows: the last tile has rows beyond the end, whose 0 must not win
    @parametrize("split_reductions", (False, True))
    @parametrize("shift", (-9, 9))
    @parametrize("shape", ((1025, 96), (33, 64)))
    def test_rows_beyond_the_end(self, shape, shift, split_reductions):
        x = torch.randn(shape, device=GPU_TYPE) + shift
        self.check(extrema, x, split_reductions=split_reductions)

    @parametrize(
        "dtype",
        (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64),
    )
    def test_dtype(self, dtype):
        x = (torch.randn(1030, 96, device=GPU_TYPE) * 30).to(dtype)
        self.check(extrema, x)

    def test_ends_of_integers(self):
        ends = torch.iinfo(torch.int64)
        x = torch.full((1030, 96), ends.min, device=GPU_TYPE)
        x[:, ::2] = ends.max
        self.check(extrema, x)

    @parametrize("split_reductions", (False, True))
    def test_nan_and_infinities(self, split_reductions):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        x[1029, 0] = float("nan")
        x[0, 1] = float("nan")
        x[:, 2] = float("nan")
        x[:, 3] = float("inf")
        x[:, 4] = float("-inf")
        x[7, 5], x[8, 5] = float("inf"), float("-inf")
        x[7, 6], x[900, 6] = float("-inf"), float("nan")
        self.check(extrema, x, split_reductions=split_reductions)

    def test_beside_a_sum(self):
        # one workspace, an identity and a final reduction each
        x = torch.randn(1030, 96, device=GPU_TYPE) - 9
        code = self.check(
            lambda x: (x.amax(0), x.sum(0), x.amin(0), x.sum(1)), x, exact=False
        )
        FileCheck().check_count("tl.store(ws_ptr", 3, exactly=True).run(code)

    def test_keepdim_and_what_follows(self):
        def f(x):
            scale = x.abs().amax(0, keepdim=True)
            return scale, scale * 2, x.sum(1)

        x = torch.randn(1030, 96, device=GPU_TYPE).bfloat16()
        self.check(f, x, exact=False)

    def test_dynamic_rows(self):
        x = torch.randn(97, 96, device=GPU_TYPE) - 9
        torch._dynamo.mark_dynamic(x, 0)
        self.check(extrema, x)

    def test_off(self):
        x = torch.randn(1030, 96, device=GPU_TYPE)
        self.check(extrema, x, fused=0, **{DEBUG: {"extrema": False}})


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
