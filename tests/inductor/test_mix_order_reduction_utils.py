# Owner(s): ["module: inductor"]
"""What the tests of mix-order reduction share."""

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.exc import InductorError
from torch._inductor.test_case import TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.inductor_utils import GPU_TYPE
from torch.utils._pytree import tree_map_only


# Fuse whatever can be fused: a test is about what a fused kernel does.
FUSE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=GPU_TYPE).to(dtype)


def rms_norm_backward(x, weight, dy, rstd):
    xhat = x * rstd
    wdy = weight * dy
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx, (dy * xhat).sum(0)


def rms_norm_args(rows, columns, dtype=torch.float32):
    x, dy = (randn(rows, columns, dtype=dtype) for _ in range(2))
    return x, randn(columns, dtype=dtype), dy, torch.rand(rows, 1, device=GPU_TYPE)


class MixOrderTestCase(TestCase):
    fuse = FUSE

    def setUp(self):
        super().setUp()
        metrics.reset()

    def compare(self, f, actual, args, ulps=2):
        """
        ``actual`` is what eager returns for ``f(*args)`` in shape, stride and dtype,
        and no further from eager in float64 than eager is in the same dtype, or
        ``ulps``.
        """
        reference = f(
            *tree_map_only(
                torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, args
            )
        )
        eager = f(*args)
        self.assertEqual(len(actual), len(eager))
        for act, expect, ref in zip(actual, eager, reference):
            self.assertEqual(act.shape, expect.shape)
            self.assertEqual(act.stride(), expect.stride())
            self.assertEqual(act.dtype, expect.dtype)
            if not act.is_floating_point():
                self.assertTrue(torch.equal(act, expect))
                continue
            error = (act.double() - ref.double()).norm()
            eager_error = (expect.double() - ref.double()).norm()
            ulp = torch.finfo(act.dtype).eps * ref.double().norm()
            self.assertLessEqual(error, max(1.1 * eager_error, ulps * ulp))

    def check(self, f, *args, fused=1, ulps=2, **options):
        """
        Compile ``f``, expect ``fused`` mix-order kernels and what eager returns.
        Returns the generated code.
        """
        with inductor_config.patch({**self.fuse, **options}):
            try:
                actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
            except InductorError as error:
                self.fail(f"does not compile: {error}")
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        self.compare(f, actual, args, ulps)
        return "\n".join(code)

    def kernel(self, code):
        """The one mix-order kernel: what is before its loop over rows, and the loop."""
        kernels = [k for k in code.split("async_compile.triton(") if "RSPLIT_SIZE" in k]
        self.assertEqual(len(kernels), 1)
        before, _, loop = kernels[0].partition("for _ in tl.range(0, split_size")
        return before, loop.partition("''', device")[0]

    def loads(self, code):
        """How many loads are before the loop over rows, and how many are in it."""
        return tuple(part.count("tl.load(") for part in self.kernel(code))
