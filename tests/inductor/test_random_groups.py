# Owner(s): ["module: inductor"]

import unittest
import unittest.mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import random_groups
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing import FileCheck
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


GROUPED, SINGLE = "triton_helpers.rand_groups(", "triton_helpers.rand("


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@inductor_config.patch(fallback_random=False)
@instantiate_parametrized_tests
class RandomGroupsTest(TestCase):
    """A tile computes each four of its random numbers by one call of Philox."""

    def run_code(self, f, *args, seed=7, **options):
        torch._dynamo.reset()
        torch.manual_seed(seed)
        with inductor_config.patch({"fx_graph_cache": False, **options}):
            out, (code,) = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        return out, code

    def one_by_one(self):
        return unittest.mock.patch.object(random_groups, "find_groups", lambda *_: None)

    def numbers(self, size, **options):
        def f(x):
            return torch.rand_like(x)

        return self.run_code(f, torch.empty(size, device=GPU_TYPE), **options)

    @parametrize("size", ((4096,), (37, 64), (5, 12, 20), (1021,), (3,)))
    def test_pointwise(self, size):
        grouped, code = self.numbers(size)
        FileCheck().check(GROUPED).run(code)
        with self.one_by_one():
            single, code = self.numbers(size)
        FileCheck().check(SINGLE).run(code)
        # a number is its offset's, whoever computes it
        self.assertEqual(grouped, single, atol=0, rtol=0)

    @parametrize("persistent", (True, False))
    @parametrize("columns", (768, 1000, 1536))
    def test_rows(self, persistent, columns):
        def f(x):
            y = F.dropout(x, 0.25, True)
            return y, y.sum(1), (y * y).amax(1)

        x = torch.rand(6, columns, device=GPU_TYPE) + 1
        options = {"triton.persistent_reductions": persistent}
        grouped, code = self.run_code(f, x, **options)
        FileCheck().check(GROUPED).run(code)
        with self.one_by_one():
            single, code = self.run_code(f, x, **options)
        FileCheck().check(SINGLE).run(code)
        self.assertEqual(grouped[0], single[0], atol=0, rtol=0)
        self.assertEqual(grouped[0].sum(1), grouped[1], atol=1e-3, rtol=1e-5)
        kept = grouped[0] != 0
        self.assertEqual(grouped[0][kept], (x / 0.75)[kept], atol=1e-6, rtol=1e-6)

    @parametrize("columns", (770, 127))
    def test_rows_that_begin_within_a_group(self, columns):
        def f(x):
            return F.dropout(x, 0.5, True).sum(1)

        x = torch.ones(6, columns, device=GPU_TYPE)
        _, code = self.run_code(f, x)
        FileCheck().check_not(GROUPED).check(SINGLE).run(code)

    def test_another_order_than_the_tile_s(self):
        # numbers along the columns, for a tile whose last dimension is the rows
        def f(x):
            return torch.rand_like(x).t().contiguous()

        x = torch.empty(64, 96, device=GPU_TYPE)
        transposed, _ = self.run_code(f, x)
        plain, _ = self.numbers((64, 96))
        self.assertEqual(transposed, plain.t(), atol=0, rtol=0)

    def test_numbers_of_a_row_for_all_rows(self):
        def f(x):
            return x + torch.rand(x.shape[1], device=x.device), x.sum(1)

        x = torch.zeros(8, 256, device=GPU_TYPE)
        (out, _), _ = self.run_code(f, x)
        plain, _ = self.numbers((256,))
        self.assertEqual(out, plain.expand(8, 256), atol=0, rtol=0)

    def test_distribution(self):
        numbers, _ = self.numbers((1 << 16,))
        self.assertTrue(bool(((numbers >= 0) & (numbers < 1)).all()))
        places = numbers.view(-1, 4).double()
        # each place of a group is uniform, and none is another's
        self.assertEqual(places.mean(0), torch.full((4,), 0.5).double(), atol=0.01, rtol=0)
        variance = torch.full((4,), 1 / 12).double()
        self.assertEqual(places.var(0), variance, atol=0.005, rtol=0)
        self.assertEqual(torch.corrcoef(places.t()), torch.eye(4).double(), atol=0.04, rtol=0)
        following = torch.stack([places[:-1, 3], places[1:, 0]])
        self.assertEqual(torch.corrcoef(following), torch.eye(2).double(), atol=0.04, rtol=0)
        self.assertGreater(numbers.unique().numel(), (1 << 16) * 0.99)

    def test_seeds(self):
        first, _ = self.numbers((512,), seed=1)
        again, _ = self.numbers((512,), seed=1)
        other, _ = self.numbers((512,), seed=2)
        self.assertEqual(first, again, atol=0, rtol=0)
        self.assertLess((first == other).sum().item(), 8)

    def test_dynamic_shapes(self):
        def f(x):
            return F.dropout(x, 0.5, True)

        compiled = torch.compile(f, dynamic=True)
        for rows in (17, 64):
            out = compiled(torch.ones(rows, 128, device=GPU_TYPE))
            self.assertTrue(bool(((out == 0) | (out == 2)).all()))
            self.assertEqual((out == 0).float().mean().item(), 0.5, atol=0.1, rtol=0)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
