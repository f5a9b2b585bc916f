# Owner(s): ["module: inductor"]
"""Sums over rows in the kernel that writes the tensor."""

import ast
import dataclasses
import inspect
import re
import textwrap
from unittest import mock

import sympy

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics, mix_order_producer_sum_cost
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import TritonOverrides
from torch._inductor.dependencies import MemoryDep
from torch._inductor.device_model import DeviceModel
from torch._inductor.issue_slots import (
    DIVISION_SLOTS,
    INDIRECT_SLOTS,
    INTEGER_SLOTS,
    SLOTS,
)
from torch._inductor.mix_order_producer_sum_cost import (
    is_across,
    ProducerSum,
    why_not_producer_sum,
)
from torch._inductor.mix_order_row_cost import RowCost
from torch._inductor.mix_order_row_split import row_split
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU
from torch.utils._ordered_set import OrderedSet


try:
    from .test_mix_order_reduction_utils import (
        device_properties,
        FUSE_ALL,
        MAX_READS,
        MixOrderTestCase,
        nvidia_only,
        randn,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        device_properties,
        FUSE_ALL,
        MAX_READS,
        MixOrderTestCase,
        nvidia_only,
        randn,
    )


KNOB = "triton.mix_order_reduction_producer_sums"
OPTIONS = {
    **FUSE_ALL,
    KNOB: True,
    "emulate_precision_casts": False,
    "shape_padding": False,
}
ROWS, COLUMNS = 1030, 96


def backward(g, xhat, rstd, weight):
    """dx of a LayerNorm, and the sums that are the gradients of weight and bias."""
    wg = g * weight
    row = wg.mean(-1, keepdim=True)
    dx = rstd * (wg - row - xhat * (wg * xhat).mean(-1, keepdim=True))
    dims = tuple(range(g.dim() - 1))
    return dx, (g * xhat).sum(dims), g.sum(dims)


def arguments(*shape, dtype=torch.float32):
    shape = shape or (ROWS, COLUMNS)
    rstd = torch.rand((*shape[:-1], 1), device=GPU_TYPE).to(dtype)
    return (
        randn(*shape, dtype=dtype),
        randn(*shape, dtype=dtype),
        rstd,
        randn(shape[-1], dtype=dtype),
    )


def norm_backward(*args):
    dx, *sums = backward(*args)
    return dx, *sums, dx.sum(0)


def softmax(x):
    y = torch.softmax(x, -1)
    return y, y.sum(0)


def gelu_backward(g, x):
    dx = torch.ops.aten.gelu_backward(g, x)
    return dx, dx.sum(0)


def max_pool_backward(g, offsets, x):
    """Of windows of 3 x 3 that overlap, with the sum for a bias; x is [N, C, H, W]."""
    size, window = list(x.shape[2:]), ([3, 3], [2, 2], [1, 1], [1, 1])
    kernel, stride, padding, dilation = window
    indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices(
        offsets, kernel, size, stride, padding, dilation
    )
    dx = torch.ops.aten.max_pool2d_with_indices_backward(
        g, x, *window, False, indices
    )
    return dx, dx.sum((0, 2, 3))


def upsample(x, skip):
    y = skip + torch.nn.functional.interpolate(x, scale_factor=2)
    return y, y.sum((0, 2, 3))


def images(*shapes, dtype=torch.bfloat16):
    return [
        torch.empty(shape, dtype=dtype, device=GPU_TYPE).to(
            memory_format=torch.channels_last
        )
        for shape in shapes
    ]


# what reads dx elsewhere than where a row's columns are
CONSUMERS = {
    "rows": lambda dx: dx.sum(1),
    "all": lambda dx: dx.sum(),
    "some_rows": lambda dx: dx[1:].sum(0),
    "even_rows": lambda dx: dx[::2].sum(0),
    "some_columns": lambda dx: dx[:, :48].sum(0),
    "reversed_rows": lambda dx: (dx.flip(0) * dx).sum(0),
    "reversed_columns": lambda dx: dx.flip(1).sum(0),
    "rolled_rows": lambda dx: (dx.roll(1, 0) * dx).sum(0),
    "rolled_columns": lambda dx: dx.roll(1, 1).sum(0),
    "other_rows": lambda dx: dx.view(2 * ROWS, COLUMNS // 2).sum(0),
    "permuted_rows": lambda dx: (
        dx.view(10, 103, COLUMNS).transpose(0, 1).reshape(ROWS, COLUMNS) * dx
    ).sum(0),
    "groups": lambda dx: dx.view(10, 103, COLUMNS).sum(1),
    "two_groups": lambda dx: dx.view(ROWS, 2, COLUMNS // 2).sum((0, 1)),
    "gathered": lambda dx: (dx[torch.arange(ROWS, device=dx.device) // 2] * dx).sum(0),
    "padded": lambda dx: torch.nn.functional.pad(dx[:-1], (0, 0, 0, 1)).sum(0),
    "two_places": lambda dx: (dx[1:] - dx[:-1]).sum(0),
}

COLUMN_ORDERS = {
    "transposed": lambda dx: dx.view(ROWS, 12, 8).transpose(1, 2).sum(0),
    "kept": lambda dx: dx.view(ROWS, 12, 8).sum(0),
    "rows_last": lambda dx: dx.t().sum(1),
}


class ProducerSumTestBase(MixOrderTestCase):
    fuse = OPTIONS
    ulps = 4

    def check(self, f, *args, kernels=2, fused=1, partials=3, **options):
        """
        And expect ``kernels`` kernels in all, and that the first mix-order kernel keeps
        ``partials``.
        """
        code = super().check(f, *args, fused=fused, **options)
        self.assertEqual(len(self.calls(code)), kernels)
        if fused:
            self.assertEqual(self.partials(code), partials)
        return code

    def mix_order(self, code):
        """The source of the first mix-order kernel."""
        return self.source(code, self.calls(code, "workspace_0")[0])

    def partials(self, code):
        return self.mix_order(code).count("tl.store(ws_ptr")

    def loads(self, code):
        """Loads of whole rows by the mix-order kernel, by their number or by an index."""
        return len(re.findall(r"tl\.load\(.*(x0|tmp).*r0_mask", self.mix_order(code)))


@instantiate_parametrized_tests
class AttachTest(ProducerSumTestBase):
    """What a mix-order kernel writes is summed in it."""

    @parametrize("split_reductions", (False, True))
    @parametrize("reduction", ("sum", "mean"))
    def test_sum(self, reduction, split_reductions):
        def f(*args):
            dx, *sums = backward(*args)
            return dx, *sums, getattr(dx, reduction)(0)

        code = self.check(f, *arguments(), split_reductions=split_reductions)
        self.assertEqual(self.loads(code), 2)

    def test_knob(self):
        self.check(norm_backward, *arguments(), kernels=3, partials=2, **{KNOB: False})

    def test_one_kernel_where_it_is_split(self):
        """At full size the consumer is split over two layers, which both go."""
        args, split = arguments(16384, 512), {"split_reductions": True}
        off = self.generate(norm_backward, *args, **split, **{KNOB: False})
        torch._dynamo.reset()
        on = self.generate(norm_backward, *args, **split)
        self.assertEqual(len(self.calls(off)), 4)
        self.assertEqual(len(self.calls(on)), 2)
        self.assertEqual(self.partials(on), 3)

    @parametrize("keepdim", (False, True))
    def test_view(self, keepdim):
        def f(*args):
            dx, *sums = backward(*args)
            flat = dx.view(-1, COLUMNS)
            return flat.t(), *sums, flat.sum(0, keepdim=keepdim).view(COLUMNS)

        self.check(f, *arguments(103, 10, COLUMNS))

    def test_through_casts_scales_adds_and_masks(self):
        def f(mask, skip, *args):
            dx, *sums = backward(*args)
            dx = torch.where(mask, dx + skip, 0.0)
            return dx, *sums, (dx * 2).sum(0), (dx.double() + 1).float().sum(0)

        mask = torch.rand(ROWS, COLUMNS, device=GPU_TYPE) > 0.1
        self.check(f, mask, randn(ROWS, COLUMNS), *arguments(), partials=4)

    def test_what_the_consumer_alone_reads(self):
        def f(y, row, column, *args):
            dx, *sums = backward(*args)
            return dx, *sums, (dx * y + row * column).sum(0)

        self.check(
            f, randn(ROWS, COLUMNS), randn(ROWS, 1), randn(COLUMNS), *arguments()
        )

    def test_several_consumers(self):
        def f(y, *args):
            dx, *sums = backward(*args)
            return dx, *sums, dx.sum(0), (dx * y).sum(0), (dx * dx).mean(0)

        self.check(f, randn(ROWS, COLUMNS), *arguments(), partials=5)

    def test_extrema(self):
        def f(*args):
            dx, *sums = backward(*args)
            return dx, *sums, dx.amax(0)

        self.check(f, *arguments())

    @parametrize("split_reductions", (False, True))
    def test_epilogue(self, split_reductions):
        def f(grad, *args):
            dx, *sums = backward(*args)
            s = dx.sum(0)
            return dx, *sums, (s * 0.5 + grad).to(torch.bfloat16), s.sigmoid()

        self.check(f, randn(COLUMNS), *arguments(), split_reductions=split_reductions)

    @parametrize("split_reductions", (False, True))
    def test_feeds_another_kernel(self, split_reductions):
        def f(y, *args):
            dx, *sums = backward(*args)
            return dx, *sums, (y * dx.sum(0)).sum(1)

        self.check(
            f,
            randn(77, COLUMNS),
            *arguments(),
            kernels=3,
            split_reductions=split_reductions,
        )

    def test_feeds_its_own_rows(self):
        """What was fused with a sum that needs another is not taken apart."""

        def f(*args):
            dx, *sums = backward(*args)
            centred = dx - dx.mean(0)
            return dx, *sums, centred, (centred * centred).sum(0)

        self.check(f, *arguments(), kernels=3, partials=2)

    def test_other_readers(self):
        def f(w, *args):
            dx, *sums = backward(*args)
            return dx @ w, dx.cos(), *sums, dx.sum(0)

        code = self.generate(f, randn(COLUMNS, 32), *arguments())
        self.assertEqual(len(self.calls(code)), 2)
        self.assertEqual(self.partials(code), 3)

    def test_is_not_written_for_the_sums_alone(self):
        def f(y, *args):
            dx, *sums = backward(*args)
            return *sums, dx.sum(0), (dx * y).sum(0)

        code = self.check(f, randn(ROWS, COLUMNS), *arguments(), partials=4)
        self.assertEqual(self.mix_order(code).count("tl.store(out_ptr"), 0)

    def test_two_kernels(self):
        """Each of two producers has its own."""

        def f(a, b):
            da, *asums = backward(*a)
            db, *bsums = backward(*b)
            return da, *asums, da.sum(0), db, *bsums, db.sum(0)

        self.check(f, arguments(), arguments(515, 192), kernels=4, fused=2)

    def test_chain(self):
        """The second kernel reads what the first writes, and has its sum."""

        def f(a, b):
            da, *asums = backward(*a)
            db, *bsums = backward(da + b[0], *b[1:])
            return da, *asums, da.sum(0), db, *bsums, db.sum(0)

        self.check(f, arguments(), arguments(), kernels=4, fused=2, partials=2, ulps=16)

    def test_the_same_elements_by_an_index(self):
        """A sibling that gathers what the kernel gathers belongs to it as well."""

        def f(index, g, *args):
            dx, *sums = backward(g[index], *args)
            return dx, *sums, dx.sum(0)

        index = torch.randperm(ROWS, device=GPU_TYPE)
        code = self.check(f, index, *arguments())
        self.assertEqual(self.loads(code), 2)

    def test_rows_loaded_again(self):
        """Where a row is loaded again for what is stored, the sum is of what is stored."""
        self.check(norm_backward, *arguments(21, 8192))

    @parametrize("split_size", (8, 16))
    def test_rows_split_by_size(self, split_size):
        self.check(
            norm_backward,
            *arguments(),
            **{"triton.mix_order_reduction_split_size": split_size},
        )

    @parametrize("split_reductions", (False, True))
    def test_repeatable(self, split_reductions):
        args = arguments()
        options = {"deterministic": True, "split_reductions": split_reductions}
        self.check(norm_backward, *args, **options)
        with inductor_config.patch({**OPTIONS, **options}):
            compiled = torch.compile(norm_backward, fullgraph=True)
            for first, second in zip(compiled(*args), compiled(*args)):
                self.assertTrue(torch.equal(first, second))

    def test_dynamic_rows(self):
        compiled = torch.compile(norm_backward, fullgraph=True)
        with (
            inductor_config.patch(OPTIONS),
            torch._dynamo.config.patch(error_on_recompile=True),
            torch.fx.experimental._config.patch(backed_size_oblivious=True),
        ):
            for rows in (97, 331, 24, 1):
                args = arguments(rows, 512)
                for arg in args[:3]:
                    torch._dynamo.mark_dynamic(arg, 0)
                if rows == 97:
                    actual, (code,) = run_and_get_code(compiled, *args)
                    self.assertEqual(len(self.calls(code)), 2)
                    self.assertEqual(self.partials(code), 3)
                else:
                    actual = compiled(*args)
                self.compare(norm_backward, actual, args)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)


@instantiate_parametrized_tests
class StoredValueTest(ProducerSumTestBase):
    """What is summed is what was stored."""

    @parametrize("dtype", (torch.float16, torch.bfloat16))
    @parametrize("split_reductions", (False, True))
    def test_half(self, dtype, split_reductions):
        def f(*args):
            dx, *sums = backward(*args)
            return dx, *sums, dx.sum(0), dx.sum(0, dtype=torch.float32)

        args = arguments(dtype=dtype)
        self.check(f, *args, partials=4, split_reductions=split_reductions)
        with inductor_config.patch({**OPTIONS, "split_reductions": split_reductions}):
            dx, *_, total = torch.compile(f, fullgraph=True)(*args)
        # nearer to the sum of the rounded values than rounding moves it
        ref = dx.double().sum(0)
        self.assertLess((total.double() - ref).abs().max(), 1e-5 * ref.abs().max())

    def test_double(self):
        self.check(norm_backward, *arguments(dtype=torch.float64))

    def test_dtypes_of_one_workspace(self):
        def f(*args):
            dx, *sums = backward(*args)
            return dx, *sums, dx.double().sum(0).float()

        self.check(f, *arguments(), kernels=3, partials=2)


@instantiate_parametrized_tests
class RowProducerTest(ProducerSumTestBase):
    """A kernel that reduces rows alone becomes a mix-order kernel."""

    @parametrize("split_reductions", (False, True))
    def test_sum_of_its_output(self, split_reductions):
        self.check(
            softmax, randn(ROWS, COLUMNS), partials=1, split_reductions=split_reductions
        )

    def test_knob(self):
        self.check(softmax, randn(ROWS, COLUMNS), fused=0, **{KNOB: False})

    def test_row_statistics(self):
        """What needs a row's result, and not the tensor that is made of it."""

        def f(g, x, weight):
            rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
            return x * rstd * weight, (g * x * rstd).sum(0), g.sum(0)

        self.check(
            f,
            randn(ROWS, COLUMNS),
            randn(ROWS, COLUMNS),
            randn(COLUMNS),
            partials=2,
        )

    def test_row_statistics_of_a_norm_backward(self):
        def f(g, x, weight):
            rstd = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)
            dx, *sums = backward(g, x * rstd, rstd, weight)
            return dx, *sums, dx.sum(0)

        self.check(f, randn(ROWS, COLUMNS), randn(ROWS, COLUMNS), randn(COLUMNS))

    def test_square(self):
        """Which loops are the rows is in the indices, not in their number."""

        def g(x):
            y = torch.softmax(x, -1)
            return y, y.t().contiguous().sum(0)

        self.check(softmax, randn(64, 64), partials=1)
        metrics.reset()
        self.check(g, randn(64, 64), fused=0, kernels=1)

    def test_the_producer_needs_it(self):
        """A square's columns are summed for its rows."""

        def f(x):
            total = (x * x).sum(0)
            return (x * torch.rsqrt(total + 1e-5)).sum(1)

        self.check(lambda x: (f(x),), randn(64, 64), fused=0)

    def test_looped(self):
        """Rows that no persistent kernel holds."""
        self.check(softmax, randn(7, 16400), fused=0)


@instantiate_parametrized_tests
class PointwiseProducerTest(ProducerSumTestBase):
    """A kernel that reduces nothing becomes a mix-order kernel, too."""

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_gradient_of_a_bias(self, dtype):
        args = (randn(ROWS, COLUMNS, dtype=dtype), randn(ROWS, COLUMNS, dtype=dtype))
        self.check(gelu_backward, *args, partials=1, split_reductions=True)

    @parametrize("dtype, fused", ((torch.float32, 1), (torch.bfloat16, 0)))
    def test_functions_that_take_longer_than_the_memory(self, dtype, fused):
        args = (torch.empty(24576, 3072, dtype=dtype, device=GPU_TYPE) for _ in "gx")
        self.generate(gelu_backward, *args, split_reductions=True)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)

    # rows of an index, and elements; what is rolled is where the kernel computes
    @parametrize("gather,fused", (("rows", 0), ("elements", 0), ("rolled", 1)))
    def test_places_that_are_read(self, gather, fused):
        def f(x, index, rows):
            if gather == "rows":
                y = x[rows] + x
            elif gather == "elements":
                y = x.gather(1, index)
            else:
                y = x.view(512, 128, 512).roll(3, 1).view_as(x) + x
            return y, y.sum(0)

        x = torch.empty(65536, 512, dtype=torch.bfloat16, device=GPU_TYPE)
        index = torch.empty(x.shape, dtype=torch.int64, device=GPU_TYPE)
        self.generate(f, x, index, index[:, 0].contiguous(), split_reductions=True)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)

    def test_windows(self):
        g = randn(6, 32, 4, 4, dtype=torch.bfloat16)
        # of a window, what is never beyond the image
        inside = torch.tensor([4, 5, 7, 8], device=GPU_TYPE, dtype=torch.int8)
        offsets = inside[torch.randint(0, 4, g.shape, device=GPU_TYPE)]
        x = randn(6, 32, 8, 8, dtype=torch.bfloat16)
        args = (each.to(memory_format=torch.channels_last) for each in (g, offsets, x))
        self.check(max_pool_backward, *args, partials=1, split_reductions=True)

    # a row for each of 512 images of 784 rows is loaded 784 times
    @parametrize("images,fused", ((1, 1), (512, 0)))
    def test_rows_that_share(self, images, fused):
        def f(x, scale, shift):
            y = x * scale + shift
            return y, y.sum((0, 1)), (y * x).sum((0, 1))

        x = torch.empty(512, 784, 72, dtype=torch.bfloat16, device=GPU_TYPE)
        rows = (torch.empty(images, 1, 72, device=GPU_TYPE) for _ in range(2))
        self.generate(f, x, *rows, split_reductions=True)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)

    def test_knob(self):
        args = (randn(ROWS, COLUMNS), randn(ROWS, COLUMNS))
        options = {"split_reductions": True, KNOB: False}
        self.check(gelu_backward, *args, fused=0, kernels=3, **options)

    def test_several_outputs_and_sums(self):
        # of integers: what is rounded to bfloat16 is the same in all precisions
        def f(x, y, row, column):
            a = x * (y + 1).abs() * y.relu() + row
            b = (a * column).to(torch.bfloat16)
            return a, b, x.sum((0, 1)), a.sum((0, 1)), (b * y).sum((0, 1))

        x, y = (randn(103, 10, COLUMNS).round() for _ in range(2))
        args = (x, y, randn(103, 10, 1).round(), randn(COLUMNS).round())
        self.check(f, *args, partials=3, split_reductions=True, ulps=8)

    def test_dynamic_rows(self):
        compiled = torch.compile(gelu_backward, fullgraph=True)
        with (
            inductor_config.patch(OPTIONS),
            torch._dynamo.config.patch(error_on_recompile=True),
        ):
            for rows in (97, 331, 24):
                args = (randn(rows, 512), randn(rows, 512))
                for arg in args:
                    torch._dynamo.mark_dynamic(arg, 0)
                self.compare(gelu_backward, compiled(*args), args)

    @parametrize(
        "columns, fused",
        (
            (8, 0),  # narrower than a tile
            (17, 1),
            (16400, 0),  # wider than a program holds
        ),
    )
    def test_columns(self, columns, fused):
        rows = 16 if columns > 1024 else ROWS
        args = (randn(rows, columns), randn(rows, columns))
        options = {**OPTIONS, "split_reductions": True}
        if columns > 1024:
            self.generate(gelu_backward, *args, **options)
            self.assertEqual(metrics.codegen_mix_order_reduction, fused)
            return
        with inductor_config.patch(options):
            actual = torch.compile(gelu_backward, fullgraph=True)(*args)
        self.assertEqual(metrics.codegen_mix_order_reduction, fused)
        self.compare(gelu_backward, actual, args)

    def test_one_element(self):
        def f(x):
            y = 1 - x
            return y, (y * x).sum(0)

        self.check(f, randn(1, 1), fused=0, kernels=1)

    def test_transposed(self):
        """What is written across what is read is tiled in another way."""

        def f(g, x):
            dx = torch.ops.aten.gelu_backward(g, x.t())
            return dx, dx.sum(0)

        args = (randn(ROWS, COLUMNS), randn(COLUMNS, ROWS))
        with inductor_config.patch({**OPTIONS, "split_reductions": True}):
            actual = torch.compile(f, fullgraph=True)(*args)
        self.assertEqual(metrics.codegen_mix_order_reduction, 0)
        self.compare(f, actual, args)

    def test_scatter(self):
        """What adds to elements in any order has no value until it has run."""

        def f(index, x):
            y = torch.zeros(ROWS, COLUMNS, device=x.device).index_add(0, index, x)
            return y, y.sum(0)

        index = torch.arange(ROWS, device=GPU_TYPE)
        code = self.generate(f, index, randn(ROWS, COLUMNS))
        self.assertNotIn("ws_ptr", code)


@nvidia_only
@instantiate_parametrized_tests
class ProducerSumCppWrapperTest(ProducerSumTestBase):
    """A kernel that the C++ wrapper calls has the sums of what it writes, too."""

    @parametrize(
        "f, inputs", ((norm_backward, 4), (softmax, 1), (gelu_backward, 2))
    )
    @parametrize("aot", (False, True))
    def test_producer(self, f, inputs, aot):
        args = arguments()[:inputs]
        code = self.generate_cpp(f, *args, aot=aot, split_reductions=True)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        calls = re.findall(r"\bcall_triton_\w+\(.*", code)
        self.assertEqual(len(calls), 2)
        for call in calls:
            self.assertIn("workspace_0", call)


@instantiate_parametrized_tests
class DeclineTest(ProducerSumTestBase):
    """Where a consumer does not reduce what the kernel holds, nothing is attached."""

    @parametrize("consumer", tuple(CONSUMERS))
    def test_elsewhere(self, consumer):
        def f(*args):
            dx, *sums = backward(*args)
            return dx, *sums, CONSUMERS[consumer](dx)

        args = arguments()
        with inductor_config.patch({**OPTIONS, "split_reductions": True}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        self.assertEqual(self.partials("\n".join(code)), 2)
        self.compare(f, actual, args, ulps=128)

    @parametrize("consumer", tuple(COLUMN_ORDERS))
    @parametrize("split_reductions", (False, True))
    def test_order_of_columns(self, consumer, split_reductions):
        """Right, in the kernel or out of it."""

        def f(*args):
            dx, *sums = backward(*args)
            return dx, *sums, COLUMN_ORDERS[consumer](dx).contiguous()

        args = arguments()
        with inductor_config.patch({**OPTIONS, "split_reductions": split_reductions}):
            actual = torch.compile(f, fullgraph=True)(*args)
        self.compare(f, actual, args)

    @parametrize("across", (False, True))
    def test_across(self, across):
        """What the consumer alone reads across the rows wants tiles of both dimensions."""

        def f(x, z):
            y = x.softmax(-1)
            return y, (y * (z.t() if across else z)).sum(0)

        z = randn(COLUMNS, ROWS) if across else randn(ROWS, COLUMNS)
        fused, kernels = (0, 3) if across else (1, 2)
        options = {"partials": 1, "split_reductions": True}
        self.check(f, randn(ROWS, COLUMNS), z, fused=fused, kernels=kernels, **options)

    # the workspace of few rows is as large as they are, and no kernel is saved
    @parametrize("rows", (64, 4096))
    def test_few_rows(self, rows):
        def f(x):
            y = x.softmax(-1)
            return y, y.sum(0)

        self.generate(f, torch.empty(rows, 1024, device=GPU_TYPE), split_reductions=False)
        self.assertEqual(metrics.codegen_mix_order_reduction, rows > 64)

    def test_max_reads(self):
        def f(x, y, z, *args):
            dx, *sums = backward(*args)
            return dx, *sums, (dx * x + y * z).sum(0)

        args = (*(randn(ROWS, COLUMNS) for _ in range(3)), *arguments())
        self.check(f, *args, **{MAX_READS: 7})
        metrics.reset()
        torch._dynamo.reset()
        self.check(f, *args, kernels=3, partials=2, **{MAX_READS: 6})

    def test_a_node_between(self):
        """The consumer needs what another kernel makes of the output."""

        def f(w, *args):
            dx, *sums = backward(*args)
            return dx, *sums, (dx * (dx @ w)).sum(0)

        code = self.generate(f, randn(COLUMNS, COLUMNS), *arguments())
        self.assertEqual(self.partials(code), 2)

    def test_a_cycle_of_fused_nodes(self):
        """The consumer needs a node that was fused with what needs the producer."""

        def f(y, *args):
            dx, *sums = backward(*args)
            a, b = (y + dx[0]).amax(1), y.sum(1)
            return dx, *sums, a, (dx * b[:ROWS, None]).sum(0)

        args = (randn(2 * ROWS, COLUMNS), *arguments())
        code = self.generate(f, *args)
        self.assertEqual(self.partials(code), 2)

    @parametrize("when", ("before", "after"))
    def test_mutation(self, when):
        """The output is written over an input that the sum may read."""

        def f(x, *args):
            dx, *sums = backward(*args)
            if when == "before":
                x.copy_(dx)
                return *sums, x.sum(0)
            total = (dx * x).sum(0)
            x.copy_(dx)
            return *sums, total

        x, args = randn(ROWS, COLUMNS), arguments()
        with inductor_config.patch(OPTIONS):
            compiled = torch.compile(f, fullgraph=True)
            mine, theirs = x.clone(), x.double()
            actual = compiled(mine, *args)
        expect = f(theirs, *(arg.double() for arg in args))
        for act, exp in zip((*actual, mine), (*expect, theirs)):
            self.assertEqual(act.double(), exp, atol=1e-3, rtol=1e-4)

    def test_output_updated_later(self):
        def f(*args):
            dx, *sums = backward(*args)
            total = dx.sum(0)
            dx.mul_(2)
            return dx, *sums, total, dx.sum(0)

        args = arguments()
        with inductor_config.patch(OPTIONS):
            actual = torch.compile(f, fullgraph=True)(*args)
        self.compare(f, actual, args)


class ProducerSumModelTest(TestCase):
    """When it pays, as a function of costs."""

    H200 = device_properties()
    ROW = RowCost(
        columns=768,
        rnumel=1024,
        stream_bytes=8,
        streams=2,
        stores_rows=True,
        accumulators=2,
        invariants=1,
    )

    def cost(self, rows=32768, columns=768, **changes):
        size = 4 * rows * columns
        before = dataclasses.replace(
            self.ROW, columns=columns, rnumel=1 << (columns - 1).bit_length()
        )
        after = dataclasses.replace(before, accumulators=3)
        return dataclasses.replace(
            ProducerSum(
                depends=True,
                bytes_saved=size,
                bytes_written=size,
                bytes_added=0,
                bytes_shared=0,
                launches_saved=2,
                compute_bytes=0,
                slots=0,
                bytes_gathered=0,
                tiled=False,
                rows=rows,
                columns=columns,
                dynamic=False,
                before=before,
                after=after,
            ),
            **changes,
        )

    def why_not(self, cost, device=None):
        return why_not_producer_sum(cost, DeviceModel.of(device or self.H200))

    def test_pays(self):
        self.assertIsNone(self.why_not(self.cost()))

    def test_workspace(self):
        """Partials of as many rows as there are to sum save nothing."""
        cost = self.cost(rows=528, launches_saved=0)
        self.assertRegex(self.why_not(cost), "costs")
        self.assertIsNone(self.why_not(self.cost(rows=528)))

    def test_an_access_across_the_others(self):
        """Rows of 64 columns that are 147 * 147 apart load and store a few at a time."""
        n, pixel, channel = sympy.symbols("n pixel channel", integer=True)
        ranges = {n: 128, pixel: 21609, channel: 64}

        def dep(index):
            return MemoryDep("x", index, tuple(ranges), tuple(ranges.values()))

        image = n * 64 * 21632
        self.assertTrue(is_across(dep(image + channel * 21632 + pixel)))
        self.assertFalse(is_across(dep(image + channel + pixel * 64)))
        self.assertFalse(is_across(dep(image + channel * 2 + pixel * 128)))
        self.assertIsNone(self.why_not(self.cost()))
        self.assertRegex(self.why_not(self.cost(tiled=True)), "across")

    def test_rows_loaded_again(self):
        """One accumulator more, and rows have to be loaded twice."""
        cost = self.cost(rows=4096, columns=16384)
        streams = 4096 * 16384 * 12
        wide = dataclasses.replace(cost.after, stream_bytes=12, streams=3)
        narrow = dataclasses.replace(
            cost.before, rnumel=4096, stream_bytes=12, streams=3
        )
        gpu = DeviceModel.of(self.H200)
        self.assertLess(cost.bytes_saved + 2 * gpu.launch_bytes, streams * gpu.l2_byte)
        again = dataclasses.replace(cost, after=wide, before=narrow)
        self.assertRegex(self.why_not(again), "costs")
        self.assertIsNone(
            self.why_not(dataclasses.replace(cost, after=wide, before=wide))
        )

    def test_rows_that_share(self):
        """A pointwise kernel finds in L1 what a mix-order kernel loads for every row."""
        cost = self.cost(before=None)
        self.assertIsNone(self.why_not(cost))
        shared = dataclasses.replace(cost, bytes_shared=4 * cost.bytes_saved)
        self.assertRegex(self.why_not(shared), "costs")

    def test_independent_that_reads_more(self):
        cost = self.cost(depends=False, bytes_added=1)
        self.assertRegex(self.why_not(cost), "reads more")
        self.assertIsNone(self.why_not(self.cost(depends=False)))

    def test_functions_that_take_longer_than_the_memory(self):
        """An activation's backward of half types has less traffic to hide them behind."""
        for stream_bytes, pays in ((8, True), (4, False)):
            after = dataclasses.replace(
                self.ROW, stream_bytes=stream_bytes, accumulators=1, invariants=0
            )
            size = 24576 * 3072
            cost = self.cost(
                rows=24576,
                columns=3072,
                bytes_saved=size * stream_bytes // 2,
                bytes_written=size * stream_bytes // 2,
                before=None,
                after=dataclasses.replace(after, columns=3072, rnumel=4096),
            )
            self.assertIsNone(self.why_not(cost))
            slow = 24576 * 4096 * 28 * DeviceModel.function_slot_bytes
            cost = dataclasses.replace(cost, compute_bytes=int(slow))
            self.assertEqual(self.why_not(cost) is None, pays)
            self.assertIsNone(
                self.why_not(dataclasses.replace(cost, before=cost.after))
            )

    def test_operations_that_take_longer_than_the_memory(self):
        """On padded columns, where a kernel of its own computes no padding."""
        row = dataclasses.replace(self.ROW, columns=520, rnumel=1024)
        cost = self.cost(columns=520, before=None, after=row)
        gpu = DeviceModel.of(self.H200)
        split = row_split(row, gpu, 32768)
        load = split.num_warps * 128
        padded = -(-520 // load) * load
        self.assertLess(520, padded)
        issuing = split.num_warps * split.programs_per_sm
        self.assertGreaterEqual(issuing, gpu.issuing_warps)
        for slots, pays in ((8, True), (64, True), (64 * gpu.slots_per_byte, False)):
            busy = dataclasses.replace(cost, slots=slots)
            self.assertEqual(self.why_not(busy) is None, pays)
            # which computes them anyway
            self.assertIsNone(self.why_not(dataclasses.replace(busy, before=row)))
        whole = dataclasses.replace(
            busy, columns=padded, after=dataclasses.replace(row, columns=padded)
        )
        self.assertIsNone(self.why_not(whole))

    def test_few_warps(self):
        """They issue in some of the slots, where a kernel of its own does in all."""
        cost = self.cost(columns=4096, before=None)
        gpu = DeviceModel.of(self.H200)
        busy = dataclasses.replace(cost, slots=16 * gpu.slots_per_byte)
        for warps, pays in ((DeviceModel.issuing_warps, True), (2, False)):
            split = row_split(cost.after, gpu, 32768)
            split = dataclasses.replace(split, num_warps=warps, programs_per_sm=1)
            with mock.patch.object(mix_order_producer_sum_cost, "row_split") as found:
                found.return_value = split
                self.assertEqual(self.why_not(busy) is None, pays)

    def test_places_that_are_read(self):
        cost = self.cost(before=None)
        gathered = dataclasses.replace(cost, bytes_gathered=cost.bytes_saved)
        self.assertRegex(self.why_not(gathered), "costs")

    def test_l2(self):
        """What L2 would have served is worth less than what memory would have."""
        cost = self.cost(rows=2048, launches_saved=0, after=self.ROW, before=self.ROW)
        for cc in (90, 70):
            device = self.H200._replace(cc=cc)
            self.assertIsNone(self.why_not(cost, device=device))
            self.assertEqual(DeviceModel.of(device).l2_mib == 0, cc == 70)


@instantiate_parametrized_tests
class SlotsTest(ProducerSumTestBase):
    """How many issue slots an element of a producer takes."""

    def slots(self, f, *args):
        found = []

        class Recording(InductorChoices):
            def why_not_producer_sum(self, cost, device):
                found.append(cost.slots)
                return "only asked"

        with V.set_choices_handler(Recording()):
            self.generate(f, *args, split_reductions=True)
        return found[0]

    def rows(self, dtype=torch.float32):
        return torch.empty(8192, 256, dtype=dtype, device=GPU_TYPE)

    def of(self, f):
        """Of ``f`` of an element, beside its load, its store and what takes one slot."""

        def producer(x):
            y = f(x) + 1
            return y, y.sum(0)

        return self.slots(producer, self.rows()) - 3

    def test_functions(self):
        self.assertEqual(self.of(lambda x: -x), 1)
        self.assertEqual(self.of(torch.erf), SLOTS["erf"])
        self.assertEqual(self.of(lambda x: torch.where(x > 0, x, -x)), 2 + 2 + 1)

    def test_functions_have_their_slots(self):
        """Those of libdevice: all but what one instruction does."""
        names = "ceil copysign exp2 floor isinf isnan round rsqrt signbit trunc"
        (overrides,) = ast.parse(textwrap.dedent(inspect.getsource(TritonOverrides))).body
        functions = OrderedSet(
            each.name
            for each in overrides.body
            if isinstance(each, ast.FunctionDef) and "libdevice." in ast.unparse(each)
        )
        self.assertIn("sinh", functions)
        self.assertEqual(functions - OrderedSet(SLOTS), OrderedSet(names.split()))

    def test_one_price(self):
        """What functions are said to delay goes by their slots."""

        def of(f, name):
            found = []

            class Recording(InductorChoices):
                def why_not_producer_sum(self, cost, device):
                    found.append(cost.compute_bytes / (cost.rows * cost.columns))
                    return "only asked"

            def producer(x):
                y = f(x) + 1
                return y, y.sum(0)

            with V.set_choices_handler(Recording()):
                self.generate(producer, self.rows(), split_reductions=True)
            expect = SLOTS[name] * DeviceModel.function_slot_bytes
            self.assertAlmostEqual(found[0], expect, places=4)

        of(torch.erf, "erf")
        of(torch.tanh, "tanh")

    def test_functions_without_branches(self):
        """What they are said to take is not what functions with branches take."""
        slots = [SLOTS[name] for name in ("erf", "tanh", "sigmoid")]
        self.assertEqual(slots, [18, 15, 5])

    @parametrize(
        "approximate, columns, pays",
        (
            ("tanh", 3072, True),
            ("tanh", 4096, True),
            ("none", 4096, True),
            ("none", 3072, False),
        ),
    )
    def test_sums_behind_a_gelu(self, approximate, columns, pays):
        """In half types a backward that computes its padding too may lose by its sum."""
        found = []

        class Recording(InductorChoices):
            def why_not_producer_sum(self, cost, device):
                h200 = device._replace(multi_processor_count=132, cc=90)
                found.append(why_not_producer_sum(cost, DeviceModel.of(h200)))
                return "only asked"

        def f(grad, x):
            dx = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
            return dx, dx.sum(0)

        shape = 24576, columns
        args = (torch.empty(shape, dtype=torch.bfloat16, device=GPU_TYPE) for _ in "gx")
        with V.set_choices_handler(Recording()):
            self.generate(f, *args, split_reductions=True)
        self.assertEqual([reason is None for reason in found], [pays], found)

    def test_what_is_computed_twice(self):
        self.assertEqual(self.of(lambda x: x.tanh() * x.tanh()), SLOTS["tanh"] + 1)

    def test_quotients(self):
        self.assertEqual(self.of(lambda x: x / 9), 1)
        self.assertEqual(self.of(lambda x: (x + 9) / x), 1 + SLOTS["truediv"])

    def test_what_a_row_has_once(self):
        """A value of a row, and the place where a row is read."""

        def scaled(x, row):
            y = x * row.exp().cos()
            return y, y.sum(0)

        def gathered(table, index):
            y = table[index] + 1
            return y, y.sum(0)

        row = torch.empty(8192, 1, device=GPU_TYPE)
        self.assertEqual(self.slots(scaled, self.rows(), row), 3)
        index = torch.empty(8192, dtype=torch.int64, device=GPU_TYPE)
        self.assertEqual(self.slots(gathered, self.rows(), index), 3)

    def test_places_that_are_read(self):
        def gathered(x, index):
            y = x.gather(1, index) + 1
            return y, y.sum(0)

        index = self.rows(torch.int64)
        # with the load of the place, and its sum with the row's
        found = self.slots(gathered, self.rows(), index)
        self.assertEqual(found, 4 + INDIRECT_SLOTS + INTEGER_SLOTS)

    def test_windows(self):
        g, x = images((64, 64, 28, 28), (64, 64, 56, 56))
        (offsets,) = images((64, 64, 28, 28), dtype=torch.int8)
        found = self.slots(max_pool_backward, g, offsets, x)
        # of each of four windows the place, a comparison and a selection, at the least; at
        # most an index that is divided and checked
        self.assertGreater(found, 4 * (2 + 1 + 1 + 2))
        self.assertLess(found, 8 * (INDIRECT_SLOTS + DIVISION_SLOTS))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
