# Owner(s): ["module: inductor"]

import unittest

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor.custom_graph_pass import CustomGraphPass
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
aten = torch.ops.aten


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


def smoothed(logits, targets):
    return F.cross_entropy(logits, targets, label_smoothing=0.1)


def scattered(index, miss, hit, dtype):
    """``hit`` at the indices of 21 rows of 40 columns, ``miss`` elsewhere."""
    values = torch.full((21, 40), miss, dtype=dtype, device=index.device)
    return values.scatter(1, index, hit)


class OneHotSumTestCase(TestCase):
    def assertNear(self, actual, expect, exact):
        """
        ``actual`` is as near ``exact`` as ``expect`` is, which is eager's, but for the last
        bits of a sum over as many columns as there are here.
        """
        for attribute in ("dtype", "shape"):
            self.assertEqual(getattr(actual, attribute), getattr(expect, attribute))
        self.assertEqual(actual.stride(), expect.stride())
        self.assertFalse(actual.isnan().any())
        error = (actual.double() - exact).norm()
        rounded = torch.finfo(actual.dtype).eps * exact.norm()
        summed = 4 * torch.finfo(torch.float32).eps * exact.norm()
        eager = 2 * (expect.double() - exact).norm()
        self.assertLessEqual(error, max(eager, rounded, summed))


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
    @parametrize("reduction", ("sum", "none"))
    def test_reduction(self, reduction, dtype):
        def loss(x, y):
            losses = F.cross_entropy(x, y, reduction=reduction, label_smoothing=0.1)
            return losses.square().sum()

        self.check(loss, *logits_and_targets(dtype))

    @parametrize("on", (False, True))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_mean(self, dtype, on):
        # the number of targets that count is a sum too
        count = 1 if on else 2
        self.check(smoothed, *logits_and_targets(dtype), count, **{SIMPLIFY: on})

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_logits_in_single_precision(self, dtype):
        def loss(x, y):
            return smoothed(x.float(), y)

        self.check(loss, *logits_and_targets(dtype), count=1)

    @parametrize("ignore_index", (-100, 3, CLASSES + 7))
    def test_ignore_index(self, ignore_index):
        logits, targets = logits_and_targets(ignored=False)
        targets[::3] = ignore_index

        def loss(x, y):
            return F.cross_entropy(
                x, y, ignore_index=ignore_index, label_smoothing=0.1, reduction="sum"
            )

        self.check(loss, logits, targets)

    def test_every_target_ignored(self):
        logits, targets = logits_and_targets()

        def loss(x, y):
            return F.cross_entropy(x, y, reduction="sum", label_smoothing=0.1)

        self.check(loss, logits, torch.full_like(targets, -100))

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_z_loss(self, dtype):
        def loss(x, y):
            return smoothed(x, y) + torch.logsumexp(x, -1).square().mean() / 100

        self.check(loss, *logits_and_targets(dtype), count=1)

    def test_images(self):
        self.check(smoothed, *logits_and_targets(shape=(2, 37, 3, 5)), count=1)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_rows_that_are_not_vectors(self, dtype):
        self.check(smoothed, *logits_and_targets(dtype, (ROWS, 131)), count=1)

    @parametrize("dims", ((0,), (1,), (0, 1)))
    def test_dynamic(self, dims):
        def loss(x, y):
            return F.cross_entropy(x, y, label_smoothing=0.1, reduction="sum")

        self.check(loss, *logits_and_targets(), dynamic=dims)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("reduction", ("mean", "sum", "none"))
    def test_targets_alone(self, reduction, dtype):
        # elsewhere its row is zero
        def loss(x, y):
            return F.cross_entropy(x, y, reduction=reduction).sum()

        self.check(loss, *logits_and_targets(dtype), count=1)

    @parametrize("label_smoothing", (0.0, 0.1))
    def test_weight(self, label_smoothing):
        # elsewhere in its row an element has its class's weight
        weight = torch.rand(CLASSES, device=GPU_TYPE)

        def loss(x, y):
            w = weight.to(x.dtype)
            return F.cross_entropy(
                x, y, weight=w, label_smoothing=label_smoothing, reduction="sum"
            )

        self.check(loss, *logits_and_targets(), count=1)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class SumTest(OneHotSumTestCase):
    """Sums of what is scattered into a constant."""

    def run_code(self, f, *args):
        torch._dynamo.reset()
        with inductor_config.patch(OPTIONS):
            compiled = torch.compile(f, fullgraph=True)
            actual, (code,) = run_and_get_code(compiled, *args)
        return actual, code

    def check(self, f, *args, count=0):
        actual, code = self.run_code(f, *args)
        self.assertEqual(reductions(code), count)
        exact = f(*(x.double() if x.is_floating_point() else x for x in args))
        self.assertNear(actual, f(*args), exact)

    def index(self):
        """An index of 40 columns for each of 21 rows."""
        return (torch.arange(21, device=GPU_TYPE) * 7 % 40)[:, None]

    def scale(self, *shape):
        return torch.rand(shape, device=GPU_TYPE) + 0.5

    @parametrize("keepdim", (False, True))
    @parametrize("hit", (0.0, -1.5))
    def test_scaled(self, hit, keepdim):
        def f(index, scale):
            values = scattered(index, 0.25, hit, scale.dtype)
            return (values * scale).sum(-1, keepdim=keepdim)

        self.check(f, self.index(), self.scale(21, 1))

    def test_integers(self):
        def f(index, scale):
            return (scattered(index, 2, 7, torch.int64) / scale).sum(-1)

        self.check(f, self.index(), self.scale(21, 1))

    def test_condition(self):
        def f(index, left, right):
            hits = scattered(index, False, True, torch.bool)
            return torch.where(hits, left, -right).sum(-1)

        self.check(f, self.index(), self.scale(21, 1), self.scale(21, 1))

    def test_first_dimension(self):
        def f(index, scale):
            values = torch.full((40, 21), 0.25, dtype=scale.dtype, device=scale.device)
            return (values.scatter(0, index, 0.75) * scale).sum(0)

        self.check(f, self.index().T.contiguous(), self.scale(1, 21))

    def test_rows_of_one_value(self):
        def f(index):
            return scattered(index, 0.25, 0.75, torch.float32).sum(-1)

        self.check(f, self.index())

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_expanded_number(self, dtype):
        # in two dimensions it takes part in the dtype of the product
        def f(index, scale):
            values = scattered(index, 0.25, 0.75, dtype)
            return (values * scale.expand(21, 40)).sum(-1)

        self.check(f, self.index(), self.scale())

    def test_zero_elsewhere(self):
        def product(index, scale):
            return (scattered(index, 0, 0.75, scale.dtype) * scale).sum(-1)

        def condition(index, scale):
            hits = scattered(index, False, True, torch.bool)
            return torch.where(hits, scale, 0).sum(-1)

        def two_conditions(index, scale):
            hits = scattered(index, False, True, torch.bool)
            return torch.where(scale > 1, hits.to(scale.dtype), 0).sum(-1)

        def quotient(index, scale):
            hits = scattered(index, False, True, torch.bool)
            return (-hits.to(scale.dtype) / scale).sum(-1)

        def difference(index, scale):
            hits = scattered(index, 0, 1, scale.dtype)
            return (hits * scale - hits / scale).sum(-1)

        for f in (product, condition, two_conditions, quotient, difference):
            self.check(f, self.index(), self.scale(21, 1), count=1)

    def test_zero_by_cancellation(self):
        # is not known to be zero
        def f(index, scale):
            return ((scattered(index, 1, 3, scale.dtype) - 1) * scale).sum(-1)

        self.check(f, self.index(), self.scale(21, 1))

    def test_another_dimension(self):
        def f(index, scale):
            return (scattered(index, 0.25, 0.75, scale.dtype) * scale).sum(0)

        self.check(f, self.index(), self.scale(21, 1), count=1)

    @parametrize("dim", (None, (), (0, 1)))
    def test_all_dimensions(self, dim):
        def f(index, scale):
            return torch.sum(scattered(index, 0.25, 0.75, scale.dtype) * scale, dim)

        self.check(f, self.index(), self.scale(21, 1), count=1)

    def test_norm(self):
        # its sum is given None for dims
        self.check(torch.linalg.vector_norm, self.scale(21, 40), count=1)

    @parametrize("shape", ((21, 40), (40,)))
    def test_rows_of_many_values(self, shape):
        def f(index, x):
            return (scattered(index, 0.25, 0.75, x.dtype) * x).sum(-1)

        self.check(f, self.index(), self.scale(*shape), count=1)

    def test_two_indices(self):
        def f(index, other, scale):
            left, right = (
                scattered(x, 0.25, 0.75, scale.dtype) for x in (index, other)
            )
            return (left * scale + right).sum(-1)

        args = self.index(), self.index().flip(0).contiguous(), self.scale(21, 1)
        self.check(f, *args, count=1)

    def test_several_indices_a_row(self):
        def f(index, scale):
            return (scattered(index, 0.25, 0.75, scale.dtype) * scale).sum(-1)

        index = torch.cat((self.index(), 39 - self.index()), 1)
        self.check(f, index, self.scale(21, 1), count=1)

    def test_rows_without_an_index(self):
        def f(index, scale):
            return (scattered(index, 0.25, 0.75, scale.dtype) * scale).sum(-1)

        self.check(f, self.index()[:20].clone(), self.scale(21, 1), count=1)

    def test_no_columns(self):
        def f(index, scale):
            values = torch.full((0, 0), 0.25, device=scale.device)
            return (values.scatter(1, index, 0.75) * scale.expand(0, 0)).sum(-1)

        self.check(f, self.index()[:0], self.scale(0, 1))

    @parametrize("columns", (1, 2))
    def test_columns_that_may_be_one(self, columns):
        # there is nothing else in the row, which would be infinite
        def f(index, scale, x):
            return (scale / torch.zeros_like(x).scatter(1, index, 0.5)).sum(-1)

        x = torch.rand(21, columns, device=GPU_TYPE)
        torch._dynamo.decorators.mark_unbacked(x, 1)
        args = self.index() % columns, self.scale(21, 1), x
        actual, _ = self.run_code(f, *args)
        self.assertEqual(actual, f(*args))

    @parametrize("inserted", (aten.scatter, aten.mul, aten.sum))
    def test_nodes_of_another_pass(self, inserted):
        # which has not said what their values are
        class Forget(CustomGraphPass):
            def __call__(self, graph):
                for node in graph.nodes:
                    if getattr(node.target, "overloadpacket", None) is inserted:
                        node.meta.clear()

            def uuid(self):
                return str(inserted)

        def f(index, scale):
            return (scattered(index, 0.25, 0.75, scale.dtype) * scale).sum(-1)

        with inductor_config.patch(joint_custom_pre_pass=Forget()):
            self.check(f, self.index(), self.scale(21, 1), count=1)

    @parametrize("value", (INF, -INF, NAN))
    def test_special_values(self, value):
        def f(index, scale):
            return (scattered(index, 0.25, -0.5, scale.dtype) * scale).sum(-1)

        scale = self.scale(21, 1)
        scale[3] = scale[-1] = value
        index = self.index()
        actual, code = self.run_code(f, index, scale)
        self.assertEqual(reductions(code), 0)
        self.assertEqual(actual, f(index, scale), equal_nan=True)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
