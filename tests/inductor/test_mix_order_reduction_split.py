# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import metrics
from torch._inductor.exc import InductorError
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
    DEBUG: {"register_pressure": False},
    "split_reductions": True,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}


def rms_norm_backward(x, dy, weight):
    """The row statistic is made of x again; dweight does not need it."""
    rstd = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    wdy = weight * dy
    c = (wdy * x).mean(-1, keepdim=True)
    return (wdy - x * rstd * rstd * c) * rstd, (dy * x).sum(0)


@instantiate_parametrized_tests
class CancelSplitTest(TestCase):
    """
    Few long rows are split at lowering. In non-strict mode a mix-order reduction
    has them whole: one kernel, whatever follows the second layer included.
    """

    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, fused=1, kernels=1, tol=1e-3, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE, **options}):
            try:
                actual, (code,) = run_and_get_code(torch.compile(f), *args)
            except InductorError as error:
                self.fail(f"does not compile: {error}")
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        # and one that finishes what each mix-order kernel began
        self.assertEqual(metrics.generated_kernel_count, kernels + fused)
        for act, ref in zip(actual, expect):
            self.assertEqual(act.dtype, ref.dtype)
            self.assertEqual(act.stride(), ref.stride())
            if ref.is_floating_point():
                scale = max(1.0, ref.abs().max().item())
                self.assertEqual(act, ref, atol=tol * scale, rtol=tol)
            else:
                self.assertTrue(torch.equal(act, ref))
        return code

    # 8209 is prime: the last part is shorter, so the parts are masked
    @parametrize("shape", ((13, 8472), (13, 8209), (64, 16384), (263, 16384)))
    def test_rms_norm_backward(self, shape):
        x, dy = (torch.randn(shape, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(shape[1], device=GPU_TYPE)
        self.check(rms_norm_backward, x, dy, weight)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_result_of_the_second_layer(self, dtype):
        # the parts are float32: the cast to the result's type is the second layer's
        x = torch.randn(13, 8472, device=GPU_TYPE).to(dtype)
        f = lambda x: (x.sum(1), x.sum(0), x.sum(1, keepdim=True) * 2)  # noqa: E731
        self.check(f, x, tol=1e-2)

    def test_types(self):
        def f(x):
            return x.amax(1), x.amin(1), (x > 3.9).any(1), x.prod(1), x.sum(0)

        x = 1 + torch.randn(13, 8472, device=GPU_TYPE) / 4096
        x[1] += 4
        x[1] /= 5
        x[2, 7] = 4
        self.check(f, x, tol=5e-3)

    def test_nan_of_amax(self):
        x = torch.randn(13, 8472, device=GPU_TYPE)
        x[1, 8000] = float("nan")
        f = lambda x: (x.amax(1).isnan(), x.cos().sum(0).isnan())  # noqa: E731
        self.check(f, x)

    def test_integers(self):
        x = torch.randint(-(2**30), 2**30, (13, 8472), device=GPU_TYPE)
        self.check(lambda x: (x.sum(1), x.amax(1), x.sum(0)), x)

    def test_layer_norm_backward(self):
        def f(x, dy, weight):
            mean = x.mean(-1, keepdim=True)
            wdy = weight * dy
            c1 = wdy.mean(-1, keepdim=True)
            c2 = (wdy * x).mean(-1, keepdim=True)
            return wdy - c1 - (x - mean) * c2, (dy * x).sum(0), dy.sum(0)

        x, dy = (torch.randn(13, 8472, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(8472, device=GPU_TYPE)
        self.check(f, x, dy, weight)

    def test_reader_that_is_padded(self):
        # its load of the row's sum is in a masked body
        def f(x):
            total = x.sum(1)
            return F.pad(total.cos(), (2, 3)), x.sum(0), F.pad(total, (0, 1)) + 1

        self.check(f, torch.randn(13, 8472, device=GPU_TYPE), kernels=3)

    def test_reader_that_is_another_reduction(self):
        # the maximum has a kernel of its own: nothing joins a mix-order kernel in front
        def f(x):
            shifted = x - x.amax(1, keepdim=True)
            return shifted - shifted.exp().sum(1, keepdim=True).log(), x.sum(0)

        self.check(f, torch.randn(13, 8472, device=GPU_TYPE), kernels=2)

    def test_dynamic_rows(self):
        x, dy = (torch.randn(13, 8472, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(8472, device=GPU_TYPE)
        for tensor in (x, dy):
            torch._dynamo.mark_dynamic(tensor, 0)
        self.check(rms_norm_backward, x, dy, weight)

    def test_a_dependency_keeps_the_split(self):
        # the sum over rows needs the row's maximum: no kernel can have both
        x = torch.randn(13, 8472, device=GPU_TYPE)
        f = lambda x: (x - x.amax(1, keepdim=True)).sum(0)  # noqa: E731
        self.check(lambda x: (f(x),), x, fused=0, kernels=3)

    @parametrize("knob", ("cancel_split", "mix_order_reduction"))
    def test_off(self, knob):
        # declined, and the code is that without mix-order reductions
        x, dy = (torch.randn(13, 8472, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(8472, device=GPU_TYPE)
        off = {
            "cancel_split": {DEBUG: {"cancel_split": False}},
            "mix_order_reduction": {"triton.mix_order_reduction": False},
        }[knob]
        self.check(rms_norm_backward, x, dy, weight, fused=0, kernels=4, **off)

    def test_strict(self):
        x = torch.randn(64, 16384, device=GPU_TYPE)
        strict = {
            "triton.mix_order_reduction_non_strict_mode": False,
            "triton.mix_order_reduction_cost_model": False,
        }
        self.check(lambda x: (x.sum(1), x.sum(0)), x, fused=0, kernels=3, **strict)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
