# Owner(s): ["module: inductor"]

import dataclasses
import re

import torch
import torch._functorch.config
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
        nvidia_only,
        randn,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_backward,
    )


ROWS, COLUMNS = 133, 96
OPTIONS = {
    **FUSE_ALL,
    "inplace_buffers": True,
    "allow_buffer_reuse": True,
    # by no measurement
    "shape_padding": False,
    "triton.mix_order_reduction_producer_sums": False,
}


class Reload(InductorChoices):
    """Loads every row again, however narrow."""

    @staticmethod
    def mix_order_row_split(*args, **kwargs):
        split = InductorChoices.mix_order_row_split(*args, **kwargs)
        return dataclasses.replace(split, reload=True)


class ManyThreads(InductorChoices):
    """Of which several hold one element."""

    @staticmethod
    def mix_order_row_split(*args, **kwargs):
        split = InductorChoices.mix_order_row_split(*args, **kwargs)
        return dataclasses.replace(split, xblock=1, num_warps=8)


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

    fuse = OPTIONS

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
        (kernel,) = (k for k in code.split("async_compile.triton(") if "RSPLIT_" in k)
        arguments = re.search(r"def triton_\w+\((.*?)\)", kernel)[1]
        allocated = re.findall(rf"= empty_strided_cuda\(\({rows}, {COLUMNS}\)", code)
        found = set(re.findall(r"in_out_ptr\d+", arguments)), len(allocated)
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


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
