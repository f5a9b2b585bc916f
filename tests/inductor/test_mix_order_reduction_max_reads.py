# Owner(s): ["module: inductor"]

import re

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import metrics
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


MAX_READS = "triton.mix_order_reduction_max_reads"
FUSE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    # a second layer is one more node that could be absorbed, and count as an attempt
    "split_reductions": False,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
}


class Block(torch.nn.Module):
    """A transformer's residual block: two RMSNorms with weights and scaled branches."""

    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = torch.nn.RMSNorm(dim), torch.nn.RMSNorm(dim)
        self.qkv = torch.nn.Linear(dim, 3 * dim, bias=False)
        self.proj = torch.nn.Linear(dim, dim, bias=False)
        self.up = torch.nn.Linear(dim, 2 * dim, bias=False)
        self.down = torch.nn.Linear(2 * dim, dim, bias=False)
        self.scale1 = torch.nn.Parameter(torch.rand(dim))
        self.scale2 = torch.nn.Parameter(torch.rand(dim))
        self.mix = torch.nn.Parameter(torch.rand(2, dim))

    def forward(self, x, x0):
        x = self.mix[0] * x + self.mix[1] * x0
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.scale1 * self.proj(torch.tanh(q) * k.sigmoid() * v)
        return x + self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))


def loads(code):
    """The number of loads in the loop over rows, for each mix-order kernel."""
    kernels = re.findall(
        r"for _ in tl.range\((.*?)\n''', device", code, re.S
    )
    return [kernel.count("tl.load(") for kernel in kernels]


@instantiate_parametrized_tests
class MaxReadsTest(TestCase):
    def setUp(self):
        super().setUp()
        metrics.reset()

    def residual(self, n, dynamic=False, **options):
        """
        A row sum, a column sum, and an epilogue on the first that adds ``n`` tensors:
        the kernel reads x, the row sum, though it writes that too, and the ``n``.
        """

        def f(x, *tensors):
            return x.sum(0), x * x.sum(1, keepdim=True) + sum(tensors)

        args = [torch.randn(1030, 96, device=GPU_TYPE) for _ in range(n + 1)]
        if dynamic:
            for arg in args:
                torch._dynamo.mark_dynamic(arg, 0)
        with inductor_config.patch({**FUSE, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertEqual(actual, f(*args), atol=1e-3, rtol=1e-3)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        # its first line numbers the graphs of the process
        return code.split("\n", 1)[1]

    @parametrize("dynamic", (False, True))
    def test_at_the_cap(self, dynamic):
        self.residual(3, dynamic, **{MAX_READS: 5})
        self.assertEqual(metrics.generated_kernel_count, 2)

    @parametrize("dynamic", (False, True))
    def test_one_over_the_cap(self, dynamic):
        self.residual(4, dynamic, **{MAX_READS: 5})
        self.assertEqual(metrics.generated_kernel_count, 3)
        self.assertGreater(metrics.rejected_mix_order_reduction_fusion, 0)

    def test_no_cap(self):
        # nothing to reject, or told not to: one code
        code = self.residual(9, **{MAX_READS: 1000})
        self.assertEqual(metrics.generated_kernel_count, 2)
        torch._dynamo.reset()
        metrics.reset()
        self.assertEqual(self.residual(9, **{MAX_READS: 0}), code)

    @parametrize("rows", (256, 32768))
    def test_transformer(self, rows):
        torch.manual_seed(0)
        dim = 96
        blocks = torch.nn.ModuleList(Block(dim) for _ in range(3)).to(GPU_TYPE)
        x = torch.randn(rows, dim, device=GPU_TYPE)

        def step(x):
            h = x
            for block in blocks:
                h = block(h, x)
            return h.square().mean()

        def gradients(f):
            blocks.zero_grad()
            f(x).backward()
            return [p.grad.clone() for p in blocks.parameters()]

        expect = gradients(step)
        with inductor_config.patch({**FUSE, MAX_READS: 6}):
            actual, codes = run_and_get_code(gradients, torch.compile(step))
        fused = loads("\n".join(codes))
        self.assertGreater(len(fused), 0)
        self.assertLessEqual(max(fused), 6)
        self.assertGreater(metrics.codegen_mix_order_reduction, 0)
        self.assertGreater(metrics.rejected_mix_order_reduction_fusion, 0)
        for act, grad in zip(actual, expect):
            self.assertEqual(act, grad, atol=1e-3 * grad.abs().max().item(), rtol=1e-3)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
