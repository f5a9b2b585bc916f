# Owner(s): ["module: inductor"]

import ast
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.exc import InductorError
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU
from torch.utils._pytree import tree_map_only


FUSE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "triton.mix_order_reduction_max_reads": 0,
    "triton.mix_order_reduction_autotune_split_size": False,
    # few rows are split, which is another patch's business
    "split_reductions": False,
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


class TestBase(TestCase):
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
        with inductor_config.patch({**FUSE, **options}):
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

    def meta(self, code):
        """What the kernel carries of its row split."""
        match = re.search(r"'row_split': (\{.*?\})", self.kernel(code)[0])
        self.assertIsNotNone(match, "the kernel has no row split")
        return ast.literal_eval(match[1])


def sums(x, weight):
    y = x * weight
    return y.sum(0), y.sum(1)


@instantiate_parametrized_tests
class RowInvariantTest(TestBase):
    """What every row reads is loaded once, before the loop over rows."""

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

        code = self.check(f, randn(132, 96), randn(66, 96), randn(96))
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


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
