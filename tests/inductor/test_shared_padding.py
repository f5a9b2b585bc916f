# Owner(s): ["module: inductor"]

import re
import unittest

import torch
import torch._inductor.config as inductor_config
from torch._dynamo.utils import counters
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


# Inductor gives rows of over 1024 columns room behind them.
ROWS, CHANNELS, VOCABULARY = 128, 32, 2001


def operands(code):
    """Of each matrix product, the buffers that it reads."""
    calls = re.findall(r"extern_kernels\.(?:add)?mm\((.*), out=", code)
    return [set(re.findall(r"\b((?:buf|arg|primals_)\d+\w*)\b", call)) for call in calls]


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@inductor_config.patch(
    {"shape_padding": True, "force_shape_pad": True, "inplace_padding": True}
)
@instantiate_parametrized_tests
class SharedPaddingTest(TestCase):
    """A matrix is padded once for the products that use it as it is and transposed."""

    def inputs(self, dtype=torch.bfloat16, vocabulary=VOCABULARY):
        def make(*size):
            return torch.randn(size, device=GPU_TYPE).to(dtype)

        return (
            make(ROWS, vocabulary),
            make(vocabulary, CHANNELS),
            make(ROWS, CHANNELS),
        )

    def check(self, f, args, paddings_in_place):
        """Outputs against float64; returns the code."""
        torch._dynamo.reset()
        counters.clear()
        actual, codes = run_and_get_code(torch.compile(f), *args)
        exact = f(*(arg.double() for arg in args))
        for out, ref in zip(actual, exact):
            scale = torch.finfo(args[0].dtype).eps * ref.abs().max().item()
            self.assertEqual(out.double(), ref.double(), atol=16 * scale, rtol=0)
        self.assertEqual(counters["inductor"]["inplace_padding"], paddings_in_place)
        return codes[-1]

    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_a_gradient_s_two_products(self, dtype):
        def f(logits, weight, hidden):
            grad = logits.sigmoid()
            return grad @ weight, grad.t() @ hidden

        code = self.check(f, self.inputs(dtype), paddings_in_place=1)
        first, second = operands(code)
        self.assertEqual(len(first & second), 1)
        # the gradient's room behind its rows is filled, and nothing is copied but the weight
        self.assertEqual(code.count("empty_strided_cuda((2008, 128)"), 0)

    def test_a_sum_beside_them(self):
        def f(logits, weight, hidden):
            grad = logits.sigmoid()
            return grad @ weight, grad.t() @ hidden, grad.float().sum(0)

        self.check(f, self.inputs(), paddings_in_place=1)

    def test_a_transposed_product_alone(self):
        def f(logits, weight, hidden):
            return (logits.sigmoid().t() @ hidden,)

        self.check(f, self.inputs(), paddings_in_place=1)

    def test_one_copy_of_an_input(self):
        # an input has no room: one copy serves both
        def f(grad, weight, hidden):
            return grad @ weight, grad.t() @ hidden

        code = self.check(f, self.inputs(), paddings_in_place=0)
        first, second = operands(code)
        self.assertEqual(len(first & second), 1)

    def test_what_is_not_a_product_s(self):
        # padded for itself: the padding is computed with what uses it
        def f(logits, weight, hidden):
            grad = torch.nn.functional.pad(logits.sigmoid(), (0, 7))
            return grad * 2, grad.t() + 1

        with inductor_config.patch(shape_padding=False):
            self.check(f, self.inputs(), paddings_in_place=0)

    @parametrize("padding", ((0, 7), (0, 7, 0, 0), (0, 0, 0, 7), (1, 2, 3, 4)))
    def test_paddings_as_written(self, padding):
        def f(logits, weight, hidden):
            pad = torch.nn.functional.pad
            x = logits.sigmoid()
            a, b = pad(x, padding), pad(x.t(), [*padding[2:], *[0, 0][: 4 - len(padding)], *padding[:2]])
            return a @ a.t(), b @ b.t(), pad(x, padding, value=1.0)

        args = [x.float() for x in self.inputs(vocabulary=121)]
        with inductor_config.patch(shape_padding=False):
            self.check(f, args, paddings_in_place=0)

    def test_dynamic_rows(self):
        def f(logits, weight, hidden):
            grad = logits.sigmoid()
            return grad @ weight, grad.t() @ hidden

        args = self.inputs()
        torch._dynamo.mark_dynamic(args[0], 0)
        torch._dynamo.mark_dynamic(args[2], 0)
        compiled = torch.compile(f)
        for rows in (ROWS, 72):
            some = (args[0][:rows].contiguous(), args[1], args[2][:rows].contiguous())
            if rows == ROWS:
                some = args
            for out, ref in zip(compiled(*some), f(*(x.double() for x in some))):
                scale = torch.finfo(out.dtype).eps * ref.abs().max().item()
                self.assertEqual(out.double(), ref.double(), atol=4 * scale, rtol=0)

    def test_a_training_step(self):
        head = torch.nn.Linear(CHANNELS, VOCABULARY, device=GPU_TYPE)
        x = torch.randn(ROWS, CHANNELS, device=GPU_TYPE)
        target = torch.randint(0, VOCABULARY, (ROWS,), device=GPU_TYPE)

        def loss(x, weight, bias, target):
            with torch.autocast(GPU_TYPE, torch.bfloat16):
                return torch.nn.functional.cross_entropy(
                    torch.nn.functional.linear(x, weight, bias), target
                )

        if torch.version.cuda is None or not torch.cuda.is_available():
            self.skipTest("autograd needs a GPU")
        params = [p.detach().requires_grad_() for p in (x, head.weight, head.bias)]
        grads = torch.autograd.grad(torch.compile(loss)(*params, target), params)
        eager = torch.autograd.grad(loss(*params, target), params)
        for out, ref in zip(grads, eager):
            self.assertEqual(out, ref, atol=2e-2 * ref.abs().max().item(), rtol=0)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
