# Owner(s): ["module: inductor"]

import unittest

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


SIMPLIFY = "simplify_one_hot_sums"
OPTIONS = {SIMPLIFY: True, "pattern_matcher": True, "split_reductions": False}
ROWS, CLASSES = 30, 136
INF, NAN = float("inf"), float("nan")


def reductions(code):
    """The kernels that reduce."""
    heuristics = ("reduction", "persistent_reduction", "cooperative_reduction")
    return sum(code.count(f"@triton_heuristics.{name}(") for name in heuristics)


def logits_and_targets(dtype=torch.float32, shape=(ROWS, CLASSES), ignored=True):
    logits = torch.randn(shape, device=GPU_TYPE).to(dtype)
    size = (shape[0], *shape[2:])
    targets = torch.randint(shape[1], size, device=GPU_TYPE)
    if ignored:
        targets.view(-1)[::5] = -100
    return logits, targets


class OneHotSumTestCase(TestCase):
    def assertNear(self, actual, expect, exact):
        """``actual`` is as near ``exact`` as ``expect`` is, which is eager's."""
        for attribute in ("dtype", "shape"):
            self.assertEqual(getattr(actual, attribute), getattr(expect, attribute))
        self.assertEqual(actual.stride(), expect.stride())
        self.assertFalse(actual.isnan().any())
        error = (actual.double() - exact).norm()
        ulp = torch.finfo(actual.dtype).eps * exact.norm()
        self.assertLessEqual(
            error, torch.maximum(2 * (expect.double() - exact).norm(), ulp)
        )


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class LossTest(OneHotSumTestCase):
    """The backward of a cross entropy, by logits [rows, classes]."""

    def check(self, loss, logits, targets, count=0, dynamic=(), **options):
        """``count`` kernels of the backward reduce."""

        def gradient(f, logits):
            logits = logits.detach().requires_grad_()
            for dim in dynamic:
                torch._dynamo.mark_dynamic(logits, dim)
            f(logits, targets).backward()
            return logits.grad

        torch._dynamo.reset()
        if 0 in dynamic:
            torch._dynamo.mark_dynamic(targets, 0)
        with inductor_config.patch({**OPTIONS, **options}):
            compiled = torch.compile(loss, fullgraph=True)
            actual, codes = run_and_get_code(gradient, compiled, logits)
        self.assertEqual(len(codes), 2)
        self.assertEqual(reductions(codes[1]), count)
        self.assertNear(actual, gradient(loss, logits), gradient(loss, logits.double()))

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("reduction", ("mean", "sum", "none"))
    def test_reduction(self, reduction, dtype):
        def loss(x, y):
            losses = F.cross_entropy(x, y, reduction=reduction)
            return losses.square().sum()

        self.check(loss, *logits_and_targets(dtype))

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_off(self, dtype):
        self.check(F.cross_entropy, *logits_and_targets(dtype), 1, **{SIMPLIFY: False})

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_logits_in_single_precision(self, dtype):
        def loss(x, y):
            return F.cross_entropy(x.float(), y)

        self.check(loss, *logits_and_targets(dtype))

    @parametrize("ignore_index", (-100, 3, CLASSES + 7))
    def test_ignore_index(self, ignore_index):
        logits, targets = logits_and_targets(ignored=False)
        targets[::3] = ignore_index

        def loss(x, y):
            return F.cross_entropy(x, y, ignore_index=ignore_index)

        self.check(loss, logits, targets)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("reduction", ("mean", "none"))
    def test_weight(self, reduction, dtype):
        weight = torch.rand(CLASSES, device=GPU_TYPE).to(dtype)

        def loss(x, y):
            w = weight.to(x.dtype)
            return F.cross_entropy(x, y, weight=w, reduction=reduction).sum()

        self.check(loss, *logits_and_targets(dtype))

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_label_smoothing(self, dtype):
        def loss(x, y):
            return F.cross_entropy(x, y, label_smoothing=0.1)

        # the number of targets that count
        self.check(loss, *logits_and_targets(dtype), count=1)

    def test_label_smoothing_and_weight(self):
        # elsewhere in its row an element has its class's weight
        weight = torch.rand(CLASSES, device=GPU_TYPE)

        def loss(x, y):
            w = weight.to(x.dtype)
            return F.cross_entropy(x, y, weight=w, label_smoothing=0.1)

        self.check(loss, *logits_and_targets(), count=1)

    @parametrize("label_smoothing", (0.0, 0.1))
    def test_z_loss(self, label_smoothing):
        def loss(x, y):
            z = torch.logsumexp(x, -1).square().mean()
            return F.cross_entropy(x, y, label_smoothing=label_smoothing) + z / 100

        # the number of targets that count
        count = 1 if label_smoothing else 0
        self.check(loss, *logits_and_targets(), count=count)

    def test_images(self):
        logits, targets = logits_and_targets(shape=(2, 37, 3, 5))
        self.check(F.cross_entropy, logits, targets)

    @parametrize("weighted", (False, True))
    @parametrize("dims", ((0,), (1,), (0, 1)))
    def test_dynamic(self, dims, weighted):
        def loss(x, y):
            weight = torch.arange(x.shape[1], device=x.device) % 7 + 0.5
            weight = weight.to(x.dtype) if weighted else None
            return F.cross_entropy(x, y, weight=weight)

        # rows of any length are not known to be of whole vectors
        count = 1 if 1 in dims else 0
        self.check(loss, *logits_and_targets(), count=count, dynamic=dims)

    @parametrize("dims", ((0,), (1,), (0, 1)))
    def test_dynamic_label_smoothing(self, dims):
        def loss(x, y):
            return F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum")

        self.check(loss, *logits_and_targets(), dynamic=dims)

    @parametrize("label_smoothing", (0.0, 0.1))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_rows_that_are_not_vectors(self, dtype, label_smoothing):
        # a loop costs less than what they share for each element, but not two loops
        def loss(x, y):
            return F.cross_entropy(
                x, y, label_smoothing=label_smoothing, reduction="sum"
            )

        count = 0 if label_smoothing else 1
        self.check(loss, *logits_and_targets(dtype, (ROWS, 131)), count=count)

    def test_every_target_ignored(self):
        logits, targets = logits_and_targets()

        def loss(x, y):
            return F.cross_entropy(x, y, reduction="sum")

        self.check(loss, logits, torch.full_like(targets, -100))


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class SumTest(OneHotSumTestCase):
    """Sums of what is compared with 0, 1, ..."""

    def run_code(self, f, *args, **options):
        torch._dynamo.reset()
        with inductor_config.patch({**OPTIONS, **options}):
            compiled = torch.compile(f, fullgraph=True)
            actual, (code,) = run_and_get_code(compiled, *args)
        return actual, code

    def check(self, f, *args, count=0):
        actual, code = self.run_code(f, *args)
        self.assertEqual(reductions(code), count)
        exact = f(*(x.double() if x.is_floating_point() else x for x in args))
        self.assertNear(actual, f(*args), exact)

    def index(self, dtype=torch.int64):
        """Of rows of 40 columns: the last five are not in their rows."""
        index = torch.arange(21, device=GPU_TYPE) * 2 - 1
        index[-3:] = torch.tensor([40, -3, 1 << 30])
        if dtype == torch.int64:
            index[-4] = (1 << 32) + 5
        return index.to(dtype)[:, None]

    def scale(self, *shape):
        return torch.rand(shape, device=GPU_TYPE) + 0.5

    @parametrize("keepdim", (False, True))
    @parametrize("dtype", (torch.int32, torch.int64))
    @parametrize("miss", (0.0, 0.25))
    def test_index_out_of_range(self, miss, dtype, keepdim):
        def f(index, scale):
            hits = index == torch.arange(40, device=index.device)
            return (torch.where(hits, -1.5, miss) * scale).sum(-1, keepdim=keepdim)

        self.check(f, self.index(dtype), self.scale(21, 1))

    def test_first_dimension(self):
        def f(index, scale):
            hits = torch.arange(40, device=index.device)[:, None] == index
            return (hits.to(scale.dtype) * scale).sum(0)

        self.check(f, self.index().T.contiguous(), self.scale(1, 21))

    @parametrize("dtype", (torch.int32, torch.int64))
    def test_column_vector(self, dtype):
        # no column is read for an index that is not in its row
        def f(index, scale, vector):
            hits = index == torch.arange(40, device=index.device)
            return (hits.to(scale.dtype) * (scale * vector)).sum(-1)

        self.check(f, self.index(dtype), self.scale(21, 1), self.scale(40))

    def test_divided_by_a_column_vector(self):
        # 0 / 0 in every row but one
        def f(index, vector):
            hits = index == torch.arange(40, device=index.device)
            return (hits.to(vector.dtype) / vector).sum(-1)

        vector = self.scale(40)
        self.check(f, self.index(), vector, count=1)
        vector[3] = 0
        actual = self.run_code(f, self.index(), vector)[0]
        self.assertEqual(actual, f(self.index(), vector), equal_nan=True)

    def test_rows_of_one_value(self):
        def f(index):
            hits = index == torch.arange(40, device=index.device)
            return hits.float().sum(-1)

        self.check(f, self.index())

    def test_from_another_start(self):
        def f(index, scale):
            hits = index == torch.arange(1, 41, device=index.device)
            return (hits.to(scale.dtype) * scale).sum(-1)

        self.check(f, self.index(), self.scale(21, 1), count=1)

    def test_another_dimension(self):
        def f(index, scale):
            hits = index == torch.arange(40, device=index.device)
            return (hits.to(scale.dtype) * scale).sum(0)

        self.check(f, self.index(), self.scale(21, 1), count=1)

    def test_rows_of_many_values(self):
        def f(index, x):
            hits = index == torch.arange(40, device=index.device)
            return (hits.to(x.dtype) * x).sum(-1)

        self.check(f, self.index(), self.scale(21, 40), count=1)

    def test_two_indices(self):
        def f(index, other):
            places = torch.arange(40, device=index.device)
            return ((index == places).float() + 2 * (other == places).float()).sum(-1)

        self.check(f, self.index(), self.index().flip(0).contiguous(), count=1)

    def test_one_row_of_data(self):
        # which may be infinite: not the weights of classes
        def f(index, x):
            hits = index == torch.arange(40, device=index.device)
            return (hits.to(x.dtype) * x).sum(-1)

        index = self.index()[2:3].clone()
        x = self.scale(1, 40)
        self.check(f, index, x, count=1)
        x[0, 20] = -INF
        self.assertEqual(self.run_code(f, index, x)[0], f(index, x), equal_nan=True)

    @parametrize("value", (INF, -INF, NAN))
    def test_special_values(self, value):
        # 0 times what is not finite is no number
        def f(index, scale):
            hits = index == torch.arange(40, device=index.device)
            return (torch.where(hits, -1.0, 0.0) * scale).sum(-1)

        scale = self.scale(21, 1)
        scale[3] = scale[-1] = value
        index = self.index()
        actual, code = self.run_code(f, index, scale)
        self.assertEqual(reductions(code), 0)
        self.assertEqual(actual, f(index, scale), equal_nan=True)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
