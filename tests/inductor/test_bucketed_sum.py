# Owner(s): ["module: inductor"]

import types
import unittest
import unittest.mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor.device_model import DeviceModel
from torch._inductor.fx_passes import bucketed_sum
from torch._inductor.fx_passes.bucketed_sum import Costs
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


SIMPLIFY = "simplify_one_hot_sums"
OPTIONS = {SIMPLIFY: True, "pattern_matcher": True, "max_fusion_size": 64}
# Of any number of adds, however long they take.
ALWAYS = Costs(adds_of_a_launch=1, clocks_per_add=float("inf"))
INF, NAN = float("inf"), float("nan")


def bias(table, index, scores):
    """``table`` [buckets, heads] by pairs of positions, added to [batch, heads, q, k]."""
    return scores + F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)


def rows(table, index, values):
    return values + F.embedding(index, table)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class BucketedSumTest(TestCase):
    """The gradient of a table [buckets, columns]."""

    costs = ALWAYS

    def setUp(self):
        super().setUp()
        torch.manual_seed(0)
        pays = bucketed_sum.pays
        patched = unittest.mock.patch.object(
            bucketed_sum, "pays", lambda scatter, device: pays(scatter, device, self.costs)
        )
        patched.start()
        self.addCleanup(patched.stop)

    def gradient(self, f, table, *args, grad=None):
        table = table.detach().requires_grad_()
        out = f(table, *args)
        out.backward(torch.ones_like(out) if grad is None else grad.to(out.dtype))
        return table.grad

    def check(self, f, table, *args, sums=True, grad=None, dynamic=(), **options):
        """The gradient is as near float64's as eager's is, and the same again."""
        torch._dynamo.reset()
        for x, dim in dynamic:
            torch._dynamo.mark_dynamic(x, dim)
        with inductor_config.patch({**OPTIONS, **options}):
            compiled = torch.compile(f, fullgraph=True)
            actual, codes = run_and_get_code(self.gradient, compiled, table, *args, grad=grad)
            again = self.gradient(compiled, table, *args, grad=grad)
        self.assertEqual("tl.atomic_add" in codes[-1], not sums)
        expect = self.gradient(f, table, *args, grad=grad)
        self.assertEqual(actual.dtype, expect.dtype)
        self.assertEqual(actual.stride(), expect.stride())
        if sums:
            self.assertEqual(actual, again, rtol=0, atol=0, equal_nan=True)
        if not actual.isfinite().all():
            self.assertEqual(actual, expect, equal_nan=True)
            return actual
        self.compare(actual, expect, f, table, *args, grad=grad)
        return actual

    def compare(self, actual, expect, f, table, *args, grad):
        """``actual`` is no further from float64's gradient than twice ``expect`` is."""
        exact = self.gradient(
            f,
            table.double(),
            *(x.double() if x.is_floating_point() else x for x in args),
            grad=grad,
        )
        eps = torch.finfo(actual.dtype).eps
        bound = max(2 * (expect - exact).norm().item(), 4 * eps * exact.norm().item())
        self.assertLessEqual((actual - exact).norm().item(), bound)

    def table(self, buckets=5, columns=3, dtype=torch.float32):
        return torch.randn(buckets, columns, device=GPU_TYPE).to(dtype)

    def index(self, *size, buckets=5, dtype=torch.int64):
        return torch.randint(buckets, size, device=GPU_TYPE).to(dtype)

    def randn(self, *size, dtype=torch.float32):
        return torch.randn(size, device=GPU_TYPE).to(dtype)

    @parametrize("on", (False, True))
    def test_bias(self, on):
        args = self.table(), self.index(32, 64), self.randn(2, 3, 32, 64)
        grad = self.randn(2, 3, 32, 64)
        self.check(bias, *args, grad=grad, sums=on, **{SIMPLIFY: on})

    @parametrize("length", (31, 33, 40))
    def test_bias_of_no_whole_chunks(self, length):
        args = self.table(), self.index(length, 37), self.randn(2, 3, length, 37)
        self.check(bias, *args, grad=self.randn(2, 3, length, 37))

    @parametrize("length", (64, 91))
    def test_rows(self, length):
        args = self.table(2, 24), self.index(3, length, buckets=2), self.randn(3, length, 24)
        self.check(rows, *args, grad=self.randn(3, length, 24))

    @parametrize("dtype", (torch.int32, torch.int64))
    def test_type_of_index(self, dtype):
        args = self.table(), self.index(64, dtype=dtype), self.randn(64, 3)
        self.check(rows, *args, grad=self.randn(64, 3))

    @parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
    def test_type(self, dtype):
        args = self.table(dtype=dtype), self.index(130), self.randn(130, 3, dtype=dtype)
        self.check(rows, *args, grad=self.randn(130, 3))

    @parametrize("padding", (0, 4, -2))
    def test_padding(self, padding):
        def f(table, index, scores):
            found = F.embedding(index, table, padding_idx=padding)
            return scores + found.permute(2, 0, 1).unsqueeze(0)

        args = self.table(), self.index(32, 64), self.randn(2, 3, 32, 64)
        actual = self.check(f, *args, grad=self.randn(2, 3, 32, 64))
        self.assertEqual(actual[padding].abs().max(), 0)

    def test_scaled_by_frequency(self):
        def f(table, index, values):
            found = F.embedding(index, table, scale_grad_by_freq=True)
            return values + found

        # how often, which is counted in integers, is scattered as it was
        args = self.table(), self.index(128), self.randn(128, 3)
        self.check(f, *args, grad=self.randn(128, 3))

    def test_indexed(self):
        # as Swin has it
        def f(table, index, scores):
            found = table[index.view(-1)].view(*index.shape, -1)
            return scores + found.permute(2, 0, 1).contiguous().unsqueeze(0)

        args = self.table(), self.index(32, 64), self.randn(2, 3, 32, 64)
        self.check(f, *args, grad=self.randn(2, 3, 32, 64))

    def test_indexed_from_the_end(self):
        def f(table, index, values):
            return values + table[index]

        args = self.table(), self.index(128) - 5, self.randn(128, 3)
        self.check(f, *args, grad=self.randn(128, 3))

    def test_vector(self):
        def f(table, index, values):
            return values + table[index]

        args = self.randn(5), self.index(128), self.randn(128)
        self.check(f, *args, grad=self.randn(128))

    def test_empty_bucket(self):
        args = self.table(), self.index(128, buckets=3), self.randn(128, 3)
        actual = self.check(rows, *args, grad=self.randn(128, 3))
        self.assertEqual(actual[3:].abs().max(), 0)

    @parametrize("value", (INF, -INF, NAN))
    def test_special_values(self, value):
        index = torch.arange(128, device=GPU_TYPE) % 5
        grad = self.randn(128, 3)
        grad[7, 1] = value
        actual = self.check(rows, self.table(), index, self.randn(128, 3), grad=grad)
        self.assertEqual((~actual.isfinite()).sum(), 1)

    def test_two_layers(self):
        def f(table, index, scores):
            found = F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)
            return ((scores + found).softmax(-1) + found).softmax(-1)

        args = self.table(), self.index(32, 64), self.randn(2, 3, 32, 64)
        self.check(f, *args, grad=self.randn(2, 3, 32, 64))

    @parametrize("dim", (0, 1, 2))
    def test_dynamic(self, dim):
        scores, index = self.randn(2, 3, 32, 37), self.index(32, 37)
        dynamic = [(scores, 0)] if dim == 0 else [(scores, 1 + dim), (index, dim - 1)]
        grad = self.randn(2, 3, 32, 37)
        self.check(bias, self.table(), index, scores, grad=grad, dynamic=dynamic)

    def test_other_sizes_of_one_kernel(self):
        compiled = torch.compile(bias, fullgraph=True, dynamic=True)
        with inductor_config.patch(OPTIONS):
            for q, k in ((32, 37), (16, 64), (45, 51)):
                args = self.table(), self.index(q, k), self.randn(2, 3, q, k)
                grad = self.randn(2, 3, q, k)
                actual = self.gradient(compiled, *args, grad=grad)
                expect = self.gradient(bias, *args, grad=grad)
                self.compare(actual, expect, bias, *args, grad=grad)

    def test_one_kernel_reads_once(self):
        index, scores = self.index(64, 64, buckets=32), self.randn(1, 3, 64, 64)
        table = self.table(32, 3).requires_grad_()
        torch._dynamo.reset()
        with inductor_config.patch(OPTIONS):
            out = torch.compile(bias, fullgraph=True)(table, index, scores)
            _, (code,) = run_and_get_code(out.backward, self.randn(*out.shape))
        self.assertEqual(code.count("num_reduction': 32"), 1)

    def test_many_buckets(self):
        args = self.table(33, 3), self.index(128, buckets=33), self.randn(128, 3)
        self.check(rows, *args, sums=False, grad=self.randn(128, 3))

    def test_unchecked_index(self):
        # whose elements a scatter checks
        def f(x, index, values):
            return torch.zeros_like(values[:5]).index_put((index,), values * x, True)

        args = self.randn(1), self.index(128), self.randn(128, 3)
        torch._dynamo.reset()
        with inductor_config.patch(OPTIONS), torch.no_grad():
            _, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertIn("tl.atomic_add", code)

    def test_no_positions(self):
        # nor a kernel
        args = self.table(), self.index(0), self.randn(0, 3)
        self.check(rows, *args, grad=self.randn(0, 3))


@instantiate_parametrized_tests
class CostTest(TestCase):
    """What pays on a GPU of 132 SMs."""

    def pays(self, buckets, positions, columns, **costs):
        scatter = types.SimpleNamespace(
            buckets=buckets, index_size=(positions,), row_size=(columns,)
        )
        return bucketed_sum.pays(scatter, DeviceModel(sms=132), Costs(**costs))

    @parametrize("heads", (1, 8, 12))
    def test_relative_bias(self, heads):
        self.assertTrue(self.pays(32, 512 * 512, heads))

    def test_token_types(self):
        self.assertTrue(self.pays(2, 32 * 512, 768))

    def test_few_adds(self):
        # Swin's windows; 512 positions of a batch's tokens
        self.assertFalse(self.pays(25, 49 * 49, 12))
        self.assertFalse(self.pays(32, 512, 768))

    def test_long_rows_of_many_buckets(self):
        self.assertFalse(self.pays(32, 1 << 20, 768))

    def test_costs(self):
        self.assertFalse(self.pays(32, 512 * 512, 8, clocks_per_add=0.1))
        self.assertFalse(self.pays(32, 512 * 512, 8, adds_of_a_launch=10**6))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
