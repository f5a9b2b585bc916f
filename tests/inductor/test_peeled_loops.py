# Owner(s): ["module: inductor"]

import re
import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import looped_reduction
from torch._inductor.runtime import triton_heuristics
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


INF, NAN = float("inf"), float("nan")
COLUMNS, STRIDE = 5001, 5008
MASK = "r0_index < r0_numel"


def row_sum(x):
    return x.sum(-1)


def softmax(x):
    return torch.softmax(x, -1)


def logsumexp(x):
    return torch.logsumexp(x, -1)


def layer_norm(x):
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


def variance(x):
    return torch.var(x, -1)


def argmax(x):
    return x.argmax(-1)


def extrema(x):
    return torch.stack(torch.aminmax(x, dim=-1))


def vector_columns(code):
    """The adjacent columns that share a maximum, in whole blocks and in what is left alike."""
    (columns,) = {
        int(call)
        for call in re.findall(
            r"online_softmax_combine_columns\(.*?, (\d+), (?:True|False)\s*\)",
            code,
            re.DOTALL,
        )
    }
    return columns


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class PeeledLoopsTest(TestCase):
    """A loop over long rows has their whole blocks, and masks what is left alone."""

    def compile(self, f, *inputs, dynamic=False, **options):
        torch._dynamo.reset()
        options = {
            "split_reductions": False,
            "triton.persistent_reductions": False,
            "triton.cooperative_reductions": False,
            # which do not know of what is patched here
            "force_disable_caches": True,
            **options,
        }
        with (
            inductor_config.patch(options),
            mock.patch.object(looped_reduction, "FEW_ROWS", 0),
        ):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            actual, code = run_and_get_code(compiled, *inputs)
        return actual, "\n".join(code)

    def check(self, f, x, **options):
        """Also that loops over rows are peeled; returns the code."""
        actual, code = self.compile(f, x, **options)
        expect = f(x.double())
        self.assertEqual(actual.shape, expect.shape)
        eps = 8 * torch.finfo(x.dtype).eps
        finite = expect[expect.isfinite()] if expect.is_floating_point() else expect
        scale = finite.abs().max().item() if finite.numel() else 1
        self.assertEqual(
            actual.double(), expect.double(), atol=eps * scale, rtol=eps, equal_nan=True
        )
        self.check_code(code)
        return code

    def check_code(self, code):
        loops = re.findall(r"( +)for r0_offset in (.*)\n((?:\1 +.*\n|\n)*)", code)
        self.assertTrue(loops)
        for _, loop, body in loops:
            self.assertEqual(loop, "tl.range(0, R0_WHOLE, R0_BLOCK):")
            self.assertNotIn(MASK, body)
        rests = re.findall(r"( +)if R0_WHOLE < \d+:\n((?:\1 +.*\n|\n)*)", code)
        self.assertEqual(len(rests), len(loops))
        for _, body in rests:
            self.assertIn(MASK, body)

    def rows(self, columns=COLUMNS, stride=STRIDE, beyond=NAN, dtype=torch.bfloat16):
        """Five of them, with room behind that nobody may read."""
        x = torch.full((5, stride), beyond, device=GPU_TYPE, dtype=dtype)
        x[:, :columns] = torch.randn(5, columns, device=GPU_TYPE)
        return x[:, :columns]

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize(
        "f", (row_sum, softmax, logsumexp, layer_norm, variance, argmax, extrema)
    )
    def test_reductions(self, f, dtype):
        self.check(f, self.rows(dtype=dtype))

    @parametrize("beyond", (INF, -INF, NAN))
    @parametrize("f", (softmax, variance, argmax))
    def test_what_is_behind_rows(self, f, beyond):
        self.check(f, self.rows(beyond=beyond))

    @parametrize("value", (INF, -INF, NAN))
    @parametrize("column", (0, COLUMNS - 1))
    def test_special_values(self, column, value):
        x = self.rows(beyond=0)
        x[2, column] = value
        self.check(logsumexp, x)
        self.check(argmax, x)

    def test_rows_of_nothing(self):
        self.check(logsumexp, self.rows().fill_(-INF))

    @parametrize("columns", (4097, 5120, 6143))
    def test_columns(self, columns):
        """One more than the blocks have, half a block more, one less than another."""
        self.check(row_sum, self.rows(columns, 6144))

    @parametrize("block", (64, 512, 8192))
    def test_other_blocks(self, block):
        """As autotuning tries them, one of them larger than the row."""
        configs = triton_heuristics._reduction_configs

        def others(**kwargs):
            config, *_ = configs(**kwargs)
            config.kwargs["R0_BLOCK"] = block
            return [config]

        with mock.patch.object(triton_heuristics, "_reduction_configs", others):
            self.check(softmax, self.rows())
            self.check(layer_norm, self.rows())

    def test_masked_rows(self):
        """Of a block with more rows than there are."""
        configs = triton_heuristics._reduction_configs

        def others(**kwargs):
            config, *_ = configs(**kwargs)
            config.kwargs.update(XBLOCK=4, R0_BLOCK=512)
            return [config]

        with mock.patch.object(triton_heuristics, "_reduction_configs", others):
            self.check(variance, self.rows())

    def test_vectors(self):
        """Rows that are aligned are loaded so, whatever their length."""

        def loss(x):
            return torch.nn.functional.cross_entropy(x, targets)

        targets = torch.tensor([0, 5000, -100, 17, 3], device=GPU_TYPE)
        for stride, expected in ((5008, 8), (5004, 4), (5001, 1)):
            code = self.check(loss, self.rows(stride=stride))
            self.assertEqual(vector_columns(code), expected)

    @parametrize("columns", (COLUMNS, 5002, STRIDE))
    def test_narrower_stores(self, columns):
        """Rows are loaded as they are aligned, however those that are stored begin."""
        code = self.check(softmax, self.rows(columns))
        self.assertNotRegex(code, r"'tt.divisibility', [248]\]")
        self.assertEqual(vector_columns(code), 8)

    def test_rows_that_begin_anywhere(self):
        """They have one column at a time anyway; a softmax has less to compare."""
        x = torch.randn(5, COLUMNS, device=GPU_TYPE, dtype=torch.bfloat16)
        for f, peeled in ((row_sum, False), (layer_norm, False), (softmax, True)):
            _, code = self.compile(f, x)
            self.assertEqual("R0_WHOLE" in code, peeled)

    @parametrize("columns", (5120, 5002))
    def test_welford(self, columns):
        """Whose weights would be converted: only for the vectors that a mask takes apart."""
        x = self.rows(columns, 5120)
        for f, peeled in ((row_sum, True), (layer_norm, columns % 8 != 0)):
            actual, code = self.compile(f, x)
            self.assertEqual(actual, f(x), atol=0.05, rtol=0.05)
            self.assertEqual("R0_WHOLE" in code, peeled)

    def test_dynamic_rows(self):
        x = self.rows()
        torch._dynamo.mark_dynamic(x, 0)
        self.check(softmax, x, dynamic=None)

    def test_as_ever(self):
        """Short rows, whole blocks, dynamic rows, other orders, and what others loop over."""
        x = torch.randn(5, COLUMNS, device=GPU_TYPE)
        short = torch.randn(5, 4096, device=GPU_TYPE)
        for f, given, options in (
            (row_sum, short, {}),
            (row_sum, torch.randn(5, 6144, device=GPU_TYPE), {}),
            (row_sum, x, {"dynamic": True}),
            (row_sum, x, {"triton.use_block_ptr": True}),
            (lambda x: x.sum(0), x.T.contiguous(), {}),
            (lambda x: x.cumsum(-1), x, {}),
            (lambda x: (x.sum(-1), x[:, :4500].exp().sum(-1)), x, {"combo_kernels": True}),
        ):
            actual, code = self.compile(f, given, **options)
            self.assertEqual(actual, f(given), atol=1e-3, rtol=1e-4)
            self.assertNotIn("R0_WHOLE", code)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
