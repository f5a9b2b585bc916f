# Owner(s): ["module: inductor"]
"""Passes over the graph: sums by one-hot rows, matrices that are padded once."""

import re
import types
import unittest
import unittest.mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.device_model import DeviceModel
from torch._inductor.fx_passes import bucketed_sum
from torch._inductor.fx_passes.bucketed_sum import Costs
from torch._inductor.fx_passes.positions import Window, window_of
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.window_sum import window_sum_eager
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


INF, NAN = float("inf"), float("nan")
aten = torch.ops.aten
SIMPLIFY = "simplify_one_hot_sums"
on_cuda = unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")


# Sums of what is scattered into a constant


ONE_HOT = {SIMPLIFY: True, "pattern_matcher": True, "split_reductions": False}
ROWS, CLASSES = 30, 136


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


@on_cuda
@instantiate_parametrized_tests
class OneHotSumLossTest(OneHotSumTestCase):
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
        with inductor_config.patch({**ONE_HOT, **options}):
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


@on_cuda
@instantiate_parametrized_tests
class OneHotSumSumTest(OneHotSumTestCase):
    """Sums of what is scattered into a constant."""

    def run_code(self, f, *args):
        torch._dynamo.reset()
        with inductor_config.patch(ONE_HOT):
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

        def values(index, scale):
            zeros = torch.zeros(21, 40, dtype=scale.dtype, device=scale.device)
            return zeros.scatter_add(1, index, scale).sum(-1)

        for f in (product, condition, two_conditions, quotient, difference, values):
            self.check(f, self.index(), self.scale(21, 1), count=1)

    @parametrize("form", ("scatter_add", "scatter", "index_put"))
    def test_a_value_a_row(self, form):
        def f(index, values, scale):
            miss = 0.0 if form == "scatter_add" else 0.5
            rows = torch.full((21, 40), miss, dtype=scale.dtype, device=scale.device)
            if form == "index_put":
                place = torch.arange(21, device=index.device), index.squeeze(1)
                rows = rows.index_put(place, values.squeeze(1))
            else:
                rows = getattr(rows, form)(1, index, values)
            return ((rows + 0.25) * scale).sum(-1)

        self.check(f, self.index(), self.scale(21, 1), self.scale(21, 1))

    @parametrize("miss", (0.0, 0.25))
    def test_layout(self, miss):
        """Sums are laid out as those of the rows are, whatever the values are."""

        def f(index, values):
            rows = torch.zeros(3, 7, 17000, device=values.device)
            rows = rows.scatter_add(2, index, values)
            return (rows + miss if miss else rows).sum(-1)

        index = torch.arange(21, device=GPU_TYPE).view(3, 7, 1)
        actual, _ = self.run_code(f, index, self.scale(7, 3, 1).transpose(0, 1))
        self.assertEqual(actual.stride(), (7, 1))

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


# Rows of one value


ONE_VALUE = {
    "gather": lambda x, i: x.gather(-1, i[..., None]).squeeze(-1),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[..., None], -1),
    "log_softmax": lambda x, i: x.log_softmax(-1).gather(-1, i[..., None]),
    "policy": lambda x, i: x.gather(-1, i[..., None]).squeeze(-1) - x.logsumexp(-1),
    "maximum": lambda x, i: x.max(-1).values,
    "median": lambda x, i: x.median(-1).values,
    "first": lambda x, i: x.topk(1).values,
    "rows": lambda x, i: x.flatten(0, -2)[
        torch.arange(i.numel(), device=x.device), i.flatten()
    ],
    "positions": lambda x, i: x.view(-1, 6, x.shape[-1])[
        torch.arange(5, device=x.device)[:, None],
        torch.arange(6, device=x.device),
        i.view(-1, 6),
    ],
    "expanded": lambda x, i: x.view(-1, 6, x.shape[-1])[
        torch.arange(5, device=x.device)[:, None].expand(5, 6),
        torch.arange(6, device=x.device).expand(5, 6),
        i.view(-1, 6) - 40,
    ],
    "last_token": lambda x, i: x.view(-1, 6, x.shape[-1])[
        torch.arange(5, device=x.device), i.view(-1, 6)[:, 0] % 6
    ],
}


@unittest.skipIf(not HAS_GPU, "no GPU")
@instantiate_parametrized_tests
class OneHotRowsTest(TestCase):
    """Zeros with one value a row are compared, not stored and scattered into."""

    def gradient(self, f, x, *args, scatters=0, dynamic=False):
        """The compiled one, which is as right as eager's, and its code."""
        torch._dynamo.reset()
        x = x.detach().requires_grad_()

        def gradient(f, x):
            out = f(x, *args).float()
            weights = torch.linspace(-1, 1, out.numel(), device=x.device)
            (grad,) = torch.autograd.grad((out.flatten() * weights).sum(), x)
            return grad

        expect = gradient(f, x.double().detach().requires_grad_())
        eager = gradient(f, x)
        with inductor_config.patch({"force_disable_caches": True}):
            compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
            actual, codes = run_and_get_code(gradient, compiled, x)
        self.assertEqual((actual.shape, actual.stride()), (eager.shape, eager.stride()))
        self.assertEqual(actual.dtype, eager.dtype)
        eps = 4 * torch.finfo(x.dtype).eps
        self.assertEqual(actual.double(), expect.double(), atol=eps, rtol=eps)
        code = "\n".join(codes)
        self.assertEqual(code.count("tl.atomic_add(") + code.count("scatter.src("), scatters)
        return code

    def inputs(self, dtype=torch.float32, rows=(30,), columns=40):
        x = torch.randn(*rows, columns, device=GPU_TYPE).to(dtype)
        return x, torch.randint(columns, rows, device=GPU_TYPE)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("f", list(ONE_VALUE))
    def test_gradients(self, f, dtype):
        self.gradient(ONE_VALUE[f], *self.inputs(dtype))

    def test_first_dimension(self):
        x, index = self.inputs(rows=(30, 5))
        self.gradient(lambda x, i: x.gather(0, i), x, index[:1, :, None].expand(1, 5, 40) % 30)

    @parametrize("on", (False, True))
    def test_one_kernel(self, on):
        """What adds another gradient computes it: neither zeros nor adds are kernels."""
        x, index = self.inputs()
        with inductor_config.patch({SIMPLIFY: on}):
            code = self.gradient(ONE_VALUE["policy"], x, index, scatters=not on)
        backward = code[code.rindex("AsyncCompile()") :]
        self.assertEqual(len(re.findall(r"\.run\(", backward)), 1 if on else 3)

    @parametrize("columns", (1, 2, 40, 1025))
    def test_columns(self, columns):
        self.gradient(ONE_VALUE["gather"], *self.inputs(columns=columns))

    def test_batches(self):
        self.gradient(ONE_VALUE["log_softmax"], *self.inputs(rows=(2, 3, 5)))

    @parametrize("f", ("gather", "rows"))
    def test_dynamic(self, f):
        self.gradient(ONE_VALUE[f], *self.inputs(), dynamic=True)

    def test_index_of_32_bits(self):
        x, index = self.inputs()
        f = lambda x, i: x[torch.arange(30, device=x.device), i]  # noqa: E731
        self.gradient(f, x, index.int())

    def test_indices_from_the_end(self):
        x, index = self.inputs()
        f = lambda x, i: x[torch.arange(30, device=x.device), i]  # noqa: E731
        self.gradient(f, x, index - 40)

    @parametrize("value", (INF, -INF, NAN))
    def test_special_values(self, value):
        def f(values, index):
            return torch.zeros(30, 40, device=GPU_TYPE).scatter_add(1, index, values)

        _, index = self.inputs()
        values = torch.full((30, 1), value, device=GPU_TYPE)
        actual, (code,) = run_and_get_code(torch.compile(f), values, index[:, None])
        self.assertEqual(actual, f(values, index[:, None]))
        self.assertNotIn("tl.atomic_add(", code)

    @parametrize("dtype", (torch.float16, torch.int64, torch.bool))
    def test_a_background(self, dtype):
        def f(values, index):
            x = torch.full((30, 40), 3, device=GPU_TYPE, dtype=dtype)
            return x.scatter(1, index, values), x.index_put(
                (torch.arange(30, device=GPU_TYPE), index[:, 0]), values[:, 0]
            )

        _, index = self.inputs()
        values = torch.randn(30, 1, device=GPU_TYPE).to(dtype)
        actual, (code,) = run_and_get_code(torch.compile(f), values, index[:, None])
        self.assertEqual(actual, f(values, index[:, None]))
        self.assertEqual(len(re.findall(r"\.run\(", code)), 1)

    def test_as_ever(self):
        """Two values a row, a row without one, rows in another order, and other zeros."""
        x, index = self.inputs()
        two = torch.stack((index, index.flip(0)), 1)
        self.gradient(lambda x, i: x.gather(-1, i), x, two, scatters=1)
        self.gradient(lambda x, i: x[:20].gather(-1, i), x, index[:20, None])
        self.gradient(lambda x, i: x.gather(-1, i), x, index[:20, None], scatters=1)
        order = torch.randperm(30, device=GPU_TYPE)
        self.gradient(lambda x, i: x[order, i], x, index, scatters=1)
        every_other = torch.arange(0, 30, 2, device=GPU_TYPE)
        self.gradient(lambda x, i: x[every_other, i[:15]], x, index, scatters=1)

        def added(values, index):
            return torch.ones(30, 40, device=GPU_TYPE).scatter_add(1, index, values)

        args = torch.randn(30, 1, device=GPU_TYPE), index[:, None]
        actual, (code,) = run_and_get_code(torch.compile(added), *args)
        self.assertEqual(actual, added(*args))
        self.assertIn("tl.atomic_add(", code)

    def test_two_gathers(self):
        """Of one tensor: both gradients are computed where they are added."""
        x, index = self.inputs()

        def f(x, i):
            return x.gather(-1, i[:, None]) * x.gather(-1, i.flip(0)[:, None])

        self.gradient(f, x, index)


# Sums by few buckets


BUCKETED = {SIMPLIFY: True, "pattern_matcher": True, "max_fusion_size": 64}
# Of any number of adds, however long they take.
ALWAYS = Costs(adds_of_a_launch=1, clocks_per_add=float("inf"))


def bias(table, index, scores):
    """``table`` [buckets, heads] by pairs of positions, added to [batch, heads, q, k]."""
    return scores + F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)


def rows(table, index, values):
    return values + F.embedding(index, table)


@on_cuda
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
        with inductor_config.patch({**BUCKETED, **options}):
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

    def check_masked(self, f, index, values, sums):
        torch._dynamo.reset()
        with inductor_config.patch(BUCKETED), torch.no_grad():
            actual, (code,) = run_and_get_code(torch.compile(f), index, values)
        self.assertEqual("tl.atomic_add" in code, not sums)
        self.assertEqual(actual.double(), f(index, values.double()), rtol=1e-5, atol=1e-5)

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
        with inductor_config.patch(BUCKETED):
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
        with inductor_config.patch(BUCKETED):
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
        with inductor_config.patch(BUCKETED), torch.no_grad():
            _, (code,) = run_and_get_code(torch.compile(f), *args)
        self.assertIn("tl.atomic_add", code)

    @parametrize("excluded", ((), (2,), (-7,), (1, 3)))
    def test_mask_of_buckets(self, excluded):
        # what is of no bucket is no error; two that are left out are left to the scatter
        def f(index, values):
            mask = (index >= 0) & (index < 5)
            for bucket in excluded:
                mask = mask & (index != bucket)
            zeros = values.new_zeros(5, *values.shape[index.ndim :])
            mask = mask.unsqueeze(-1)
            return aten._unsafe_masked_index_put_accumulate(zeros, mask, [index], values)

        index = self.index(16, 64, buckets=11) - 3
        index[0, :2] = torch.tensor([2**32 + 1, -(2**32) + 1], device=GPU_TYPE)
        values = self.randn(16, 64, 3)
        self.check_masked(f, index, values, sums=len(excluded) < 2)

    @parametrize("of", ("a part of the buckets", "the values", "another dimension"))
    def test_other_masks(self, of):
        def f(index, values):
            mask = {
                "a part of the buckets": ((index >= 0) & (index < 4)).unsqueeze(-1),
                "the values": ((index >= 0) & (index < 5)).unsqueeze(-1) & (values > 0),
                "another dimension": ((index >= 0) & (index < 5)).unsqueeze(0),
            }[of]
            zeros = values.new_zeros(5, values.shape[1])
            return aten._unsafe_masked_index_put_accumulate(zeros, mask, [index], values)

        index = self.index(64, buckets=8) - 1
        self.check_masked(f, index, self.randn(64, 64), sums=False)

    def test_no_positions(self):
        # nor a kernel
        args = self.table(), self.index(0), self.randn(0, 3)
        self.check(rows, *args, grad=self.randn(0, 3))


@instantiate_parametrized_tests
class BucketedSumCostTest(TestCase):
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


# Padding that products share


# Inductor gives rows of over 1024 columns room behind them.
PADDED_ROWS, CHANNELS, VOCABULARY = 128, 32, 2001


def operands(code):
    """Of each matrix product, the buffers that it reads."""
    calls = re.findall(r"extern_kernels\.(?:add)?mm\((.*), out=", code)
    return [set(re.findall(r"\b((?:buf|arg|primals_)\d+\w*)\b", call)) for call in calls]


@on_cuda
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
            make(PADDED_ROWS, vocabulary),
            make(vocabulary, CHANNELS),
            make(PADDED_ROWS, CHANNELS),
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
        for rows in (PADDED_ROWS, 72):
            some = (args[0][:rows].contiguous(), args[1], args[2][:rows].contiguous())
            if rows == PADDED_ROWS:
                some = args
            for out, ref in zip(compiled(*some), f(*(x.double() for x in some))):
                scale = torch.finfo(out.dtype).eps * ref.abs().max().item()
                self.assertEqual(out.double(), ref.double(), atol=4 * scale, rtol=0)

    def test_a_training_step(self):
        head = torch.nn.Linear(CHANNELS, VOCABULARY, device=GPU_TYPE)
        x = torch.randn(PADDED_ROWS, CHANNELS, device=GPU_TYPE)
        target = torch.randint(0, VOCABULARY, (PADDED_ROWS,), device=GPU_TYPE)

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


# Sums of what is scattered

MODES = {
    "bilinear": {"mode": "bilinear"},
    "corners": {"mode": "bilinear", "align_corners": True},
    "nearest": {"mode": "nearest"},
    "exact": {"mode": "nearest-exact"},
}


def numbers(*size, dtype=torch.float32):
    return torch.randn(size, device=GPU_TYPE).to(dtype)


def arange(n):
    return torch.arange(n, device=GPU_TYPE)


@unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
@instantiate_parametrized_tests
class ScatteredSumTest(TestCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(0)

    def gradient(self, f, x, grad):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, grad.to(x.dtype))[0]

    def check(self, f, x, summed=True, grad=None, kernels=None, dynamic=None):
        """
        The gradient of ``f`` is float64's but for rounding, with or without atomics, from so
        many ``kernels`` of the backward.
        """
        torch._dynamo.reset()
        if dynamic is not None:
            torch._dynamo.mark_dynamic(x, dynamic)
        grad = torch.randn_like(f(x.detach())) if grad is None else grad
        with inductor_config.patch({SIMPLIFY: True}):
            actual, codes = run_and_get_code(self.gradient, torch.compile(f), x, grad)
        exact = self.gradient(f, x.double(), grad)
        self.assertEqual("tl.atomic_add" in codes[-1], not summed)
        if kernels is not None:
            self.assertEqual(codes[-1].count("@triton.jit"), kernels)
        self.assertEqual((actual.dtype, actual.shape), (x.dtype, exact.shape))
        eps = torch.finfo(x.dtype).eps
        self.assertEqual(actual.double(), exact, rtol=2 * eps, atol=64 * eps)
        return actual

    @parametrize("size", ((16, 16), (37, 23), (5, 40)))
    @parametrize("mode", tuple(MODES))
    def test_interpolation(self, mode, size):
        x = numbers(2, 3, 8, 8)
        if size[0] % 2:
            x = x.to(memory_format=torch.channels_last)
        self.check(lambda x: F.interpolate(x, size, **MODES[mode]), x)

    @parametrize(
        "shape,size,mode",
        (
            ((2, 3, 5), (37,), "linear"),
            ((2, 3, 4), (200,), "linear"),  # windows that are reductions
            ((2, 4, 3, 5), (7, 9), "bicubic"),
            ((2, 3, 4, 3, 5), (7, 8, 9), "trilinear"),
            ((2, 3, 1, 5), (7, 9), "bilinear"),
            ((2, 3, 4, 5), (1, 9), "bilinear"),
        ),
    )
    def test_dimensions(self, shape, size, mode):
        self.check(lambda x: F.interpolate(x, size, mode=mode), numbers(*shape))

    @parametrize("dtype", (torch.bfloat16, torch.float16))
    def test_halves(self, dtype):
        x = numbers(2, 3, 6, 6, dtype=dtype)
        self.check(lambda x: F.interpolate(x, (13, 12), mode="bilinear"), x)

    def test_one_gradient_is_read_once(self):
        """Weights of two dimensions, and a sum over each, of the four corners' scatters."""
        self.check(
            lambda x: F.interpolate(x, (16, 16), mode="bilinear"),
            numbers(2, 3, 8, 8),
            kernels=3,  # the weights of both are of one kernel, launched twice
        )

    def test_copies_are_one_kernel(self):
        f = torch.nn.Upsample(scale_factor=2)
        self.check(f, numbers(2, 3, 8, 8), kernels=1)

    def test_scaled_and_added(self):
        def f(x):
            near = F.interpolate(x.relu(), (12, 12))
            return F.interpolate(x, (12, 12), mode="bilinear") * 1.5 + near

        self.check(f, numbers(2, 3, 6, 6))

    def test_one_after_the_other(self):
        """What one scatters is what another adds to, or the values of another."""

        def f(x):
            y = F.interpolate(x, (12, 12))
            return F.interpolate(y + F.interpolate(x, (12, 12), mode="bilinear"), (24, 24))

        self.check(f, numbers(2, 3, 6, 6))
        self.check(lambda x: x[:, arange(20) // 2][:, arange(40) // 2] + 1, numbers(3, 20))

    def test_dynamic_batch(self):
        f = torch.nn.Upsample(scale_factor=2, mode="bilinear")
        self.check(f, numbers(5, 3, 6, 6), dynamic=0)

    @parametrize(
        "index,summed",
        (
            (lambda: arange(20) // 3, True),
            (lambda: arange(20), True),
            (lambda: 2 * arange(20) // 5 + 1, True),
            (lambda: arange(20).view(1, 20) // 2, True),
            (lambda: 19 - arange(20), False),
            (lambda: arange(20) % 3, False),
            (lambda: arange(20) // 3 - 1, False),
            (lambda: arange(20).view(4, 5), False),
            (lambda: (arange(20).bfloat16() / 3).long(), False),
            (lambda: ((arange(19) + 1).double() * (1 - 1e-12)).long(), True),
            (lambda: (arange(20) * 0.65 + 0.9).long(), True),
        ),
    )
    def test_gather(self, index, summed):
        self.check(lambda x: x[:, index()], numbers(3, 20, 5), summed)

    def test_apart(self):
        rows = lambda x: x[arange(6)[:, None] // 2, :, arange(4)]  # noqa: E731
        self.check(rows, numbers(9, 5, 7), summed=False)

    def test_index_on_the_cpu(self):
        """With weights that are on the GPU."""
        weights = numbers(20)
        f = lambda x: x[:, torch.arange(20) // 3] * weights  # noqa: E731
        x, grad = numbers(3, 20), numbers(3, 20)
        actual = self.gradient(torch.compile(f), x, grad)
        self.assertEqual(actual, self.gradient(f, x, grad))

    def test_index_of_data(self):
        index = arange(20) // 3
        self.check(lambda x: x[:, index], numbers(3, 20, 5), summed=False)

    def test_deliberate_rounding(self):
        """To a type of which more than halves' rounding is lost."""

        def f(values):
            rounded = values.to(torch.float8_e4m3fn).float()
            return values.new_zeros(20, 5).index_put((arange(20) // 3,), rounded, True)

        values = numbers(20, 5)
        self.assertEqual(torch.compile(f)(values), f(values))

    @parametrize("shape", ((1, 5), (20, 1), (5,)))
    def test_broadcast_values(self, shape):
        def f(values):
            return values.new_zeros(20, 5).index_put((arange(20) // 3,), values, True)

        values = numbers(*shape)
        actual = torch.compile(f)(values)
        self.assertEqual(actual, f(values))

    def test_double(self):
        x = numbers(2, 3, 6, 6).double()
        self.check(lambda x: F.interpolate(x, (13, 12), mode="bilinear"), x)

    def test_position_embedding(self):
        tokens = numbers(2, 12, 8)
        f = lambda table: tokens + F.embedding(arange(12), table)  # noqa: E731
        self.check(f, numbers(12, 8), kernels=1)
        self.check(f, numbers(16, 8))

    def test_weights_of_no_dimension(self):
        """What is no product of a gradient and weights is summed as it is."""
        other = numbers(2, 3, 12, 12)

        def f(x):
            y = F.interpolate(x, (12, 12))
            return y * other + y.sin()

        self.check(f, numbers(2, 3, 6, 6))

    @parametrize("value", (float("inf"), float("nan")))
    def test_special_values(self, value):
        """They are of the elements that they are added to, and of no other."""
        grad = torch.ones(1, 1, 16, 16, device=GPU_TYPE)
        grad[0, 0, 9, 4] = value
        f = torch.nn.Upsample(scale_factor=2, mode="bilinear")
        x = numbers(1, 1, 8, 8)
        actual = self.gradient(torch.compile(f), x, grad)
        clean = self.gradient(f, x, torch.ones_like(grad))
        touched = torch.zeros(8, 8, dtype=torch.bool, device=GPU_TYPE)
        touched[4:6, 1:3] = True
        self.assertEqual(~actual[0, 0].isfinite(), touched)
        self.assertEqual(actual[0, 0][~touched], clean[0, 0][~touched])

    def test_same_bits(self):
        f = torch.compile(torch.nn.Upsample(scale_factor=2, mode="bilinear"))
        x, grad = numbers(2, 3, 8, 8), numbers(2, 3, 16, 16)
        first, again = (self.gradient(f, x, grad) for _ in range(2))
        self.assertEqual(first, again, rtol=0, atol=0)

    def test_off(self):
        f = torch.compile(torch.nn.Upsample(scale_factor=2))
        with inductor_config.patch({SIMPLIFY: False}):
            _, codes = run_and_get_code(
                self.gradient, f, numbers(2, 3, 8, 8), numbers(2, 3, 16, 16)
            )
        self.assertIn("tl.atomic_add", codes[-1])


class WindowTest(TestCase):
    """The positions of an element, and what is summed of them; no GPU."""

    def window(self, *indices, elements):
        return window_of([list(index) for index in indices], elements)

    def test_copies(self):
        index = [x // 3 for x in range(12)]
        expect = Window(step=3, offset=0, divisor=1, size=3, exact=True)
        self.assertEqual(self.window(index, elements=4), expect)

    def test_places_of_others(self):
        window = self.window([0, 0, 0, 1, 1, 2], elements=3)
        self.assertEqual((window.size, window.exact), (3, False))

    def test_elements_of_no_position(self):
        window = self.window([1, 4], elements=6)
        self.assertFalse(window.exact)

    def test_all_that_an_index_may_be(self):
        window = self.window([0, 0, 1, 1], [0, 1, 1, 1], elements=2)
        for index in ([0, 0, 1, 1], [0, 1, 1, 1]):
            for position, element in enumerate(index):
                first = (window.step * element + window.offset) // window.divisor
                self.assertTrue(first <= position < first + window.size)

    def test_none(self):
        self.assertIsNone(self.window([1, 0], elements=2))
        self.assertIsNone(self.window([0, 2], elements=2))
        self.assertIsNone(self.window([-1, 0], elements=2))
        self.assertIsNone(self.window([], elements=2))

    def test_most_of_others(self):
        """One element has nearly all, so that windows as large would be read in vain."""
        self.assertIsNone(self.window([0] * 90 + list(range(1, 11)), elements=11))

    def test_indices_of_64_bits(self):
        """``step * element`` is not, of two large sizes without a common divisor."""
        index = [x * 47000 // 60001 for x in range(60001)]
        self.assertIsNone(self.window(index, elements=47000))
        index = [x // 2 for x in range(60000)]
        self.assertEqual(self.window(index, elements=30000).step, 2)

    def test_many_elements(self):
        self.assertIsNone(self.window(range(100), elements=50_000_000))

    def test_sum(self):
        values = torch.arange(10.0).view(2, 5)
        weights = torch.tensor([[1.0, 0.5], [0.0, 2.0]])
        total = window_sum_eager(values, weights, 1, 2, 3, -1, 1, 2)
        # of element 0, positions -1 and 0; of element 1, positions 2 and 3
        expect = torch.stack([0 * values[:, 0], 0.5 * values[:, 2] + 2 * values[:, 3]], 1)
        self.assertEqual(total, expect)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
