# Owner(s): ["module: inductor"]

import ast
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.hints import DeviceProperties
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
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


DEBUG = "triton.mix_order_reduction_debug"
SPLIT_SIZE = "triton.mix_order_reduction_split_size"


def sums(x, weight):
    y = x * weight
    return y.sum(0), y.sum(1)


@nvidia_only
@instantiate_parametrized_tests
class PersistentRowsTest(MixOrderTestCase):
    """A fixed number of programs, each with one run of rows."""

    fuse = FUSE_ALL

    def meta(self, code):
        """What the kernel carries of its row split."""
        match = re.search(r"'row_split': (\{.*?\})", self.kernel(code)[0])
        self.assertIsNotNone(match, "the kernel has no row split")
        return ast.literal_eval(match[1])

    # of 8 rows: a tile and a bit, 2, 2 and a bit, and more
    @parametrize("rows", (9, 16, 17, 133, 1031))
    def test_rows(self, rows):
        code = self.check(rms_norm_backward, *rms_norm_args(rows, 96))
        meta = self.meta(code)
        (xblock, _, _), *_ = meta["configs"]
        self.assertLessEqual(meta["NUM_PROGRAMS"], -(-rows // xblock))

    @parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
    def test_dtypes(self, dtype):
        code = self.check(sums, randn(133, 96, dtype=dtype), randn(96, dtype=dtype))
        self.meta(code)

    @parametrize("rows", (200, 331))
    def test_workspace_does_not_grow(self, rows):
        code = self.check(sums, randn(rows, 8192), randn(8192))
        programs = self.meta(code)["NUM_PROGRAMS"]
        properties = DeviceProperties.create(torch.device(GPU_TYPE))
        self.assertEqual(programs % properties.multi_processor_count, 0)
        self.assertIn(
            f"workspace_0 = empty_strided_cuda(({programs * 8192}, ), (1, ), torch.float32)",
            code,
        )

    def test_epilogue_is_no_part_of_a_row(self):
        """
        What is added to the sums over the rows follows the final reduction. The kernel
        is the same with it and without, and norms that share weights share a kernel.
        """

        def f(x, *more):
            columns = x.sum(0)
            for each in more:
                columns = columns + each
            return x.sum(1), columns

        x = randn(2200, 768)
        alone = self.meta(self.check(f, x))
        more = [randn(768) for _ in range(8)]
        metrics.reset()
        self.assertEqual(self.meta(self.check(f, x, *more)), alone)

    def costs(self, f, *args, **options):
        """What a row costs that the row split is made for."""
        found = []

        class Costs(InductorChoices):
            @staticmethod
            def mix_order_row_split(cost, *args, **kwargs):
                found.append(cost)
                return InductorChoices.mix_order_row_split(cost, *args, **kwargs)

        with V.set_choices_handler(Costs()):
            self.check(f, *args, fx_graph_cache=False, **options)
        return found

    # 16384 rows are summed in two layers, 128 rows of the first each: as many as columns;
    # and of 16385 the last layer has fewer
    @parametrize("rows", (133, 16384, 16385))
    def test_a_value_a_row_is_no_stream(self, rows):
        costs = self.costs(
            rms_norm_backward, *rms_norm_args(rows, 128), split_reductions=True
        )
        self.assertEqual({cost.streams for cost in costs}, {2})

    # where there are as many rows as columns, their number does not tell which it is
    @parametrize("rows,columns", ((133, 128), (128, 128), (1024, 1024)))
    def test_a_value_a_row_is_not_every_rows(self, rows, columns):
        args = rms_norm_args(rows, columns)
        costs = self.costs(rms_norm_backward, *args, split_reductions=True)
        self.assertEqual({cost.invariants for cost in costs}, {1})

    def test_parts_of_a_row_are_streams(self):
        # as the backward of q, k and v of one projection puts its parts together
        def f(q, k, v):
            pad = torch.nn.functional.pad
            x = pad(q, (0, 192)) + pad(k, (96, 96)) + pad(v, (192, 0))
            return x.sum(0), x - x.mean(-1, keepdim=True)

        costs = self.costs(f, *(randn(133, 96) for _ in range(3)))
        self.assertEqual({cost.streams for cost in costs}, {3})

    def test_scattered_rows_are_stored(self):
        # as the backward of an embedding puts the gradient of its rows
        def f(table, rows, x):
            gradient = x - x.mean(-1, keepdim=True)
            return table.index_put((rows,), gradient, accumulate=True), x.sum(0)

        rows = torch.arange(133, device=GPU_TYPE).flip(0)
        costs = self.costs(f, torch.zeros(140, 96, device=GPU_TYPE), rows, randn(133, 96))
        self.assertEqual({cost.stores_rows for cost in costs}, {True})

    def test_dynamic_rows(self):
        f = torch.compile(sums, fullgraph=True)
        weight = randn(4096)
        with (
            inductor_config.patch(self.fuse),
            torch._dynamo.config.patch(error_on_recompile=True),
            torch.fx.experimental._config.patch(backed_size_oblivious=True),
        ):
            for rows in (200, 133, 17, 1, 0):
                x = randn(rows, 4096)
                torch._dynamo.mark_dynamic(x, 0)
                if rows == 200:
                    actual, (code,) = run_and_get_code(f, x, weight)
                else:
                    actual = f(x, weight)
                self.compare(sums, actual, (x, weight))
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        self.meta(code)

    def test_pipelined(self):
        code = self.check(sums, randn(133, 4096), randn(4096))
        self.assertIn("num_stages=NUM_STAGES", self.kernel(code)[1].partition("\n")[0])
        (_, _, num_stages), *_ = self.meta(code)["configs"]
        self.assertGreater(num_stages, 1)

    # a padded tile loads less
    @parametrize("columns,stages", ((640, 4), (1024, 3), (5120, 4), (8192, 3)))
    def test_stages(self, columns, stages):
        if DeviceProperties.create(torch.device(GPU_TYPE)).cc not in (80, 90, 100):
            self.skipTest("less shared memory holds fewer stages")
        args = rms_norm_args(133, columns, torch.bfloat16)
        code = self.check(rms_norm_backward, *args)
        (_, _, num_stages), *_ = self.meta(code)["configs"]
        self.assertEqual(num_stages, stages)

    @parametrize("option", (DEBUG, SPLIT_SIZE))
    def test_not_persistent(self, option):
        args = randn(133, 96), randn(96)
        self.meta(self.check(sums, *args))
        value = 16 if option == SPLIT_SIZE else {"persistent_row_split": False}
        code = self.check(sums, *args, fused=2, **{option: value})
        self.assertNotIn("'row_split'", code)
        self.assertIn("RSPLIT_SIZE : tl.constexpr", self.kernel(code)[0])

    def test_block_pointers(self):
        code = self.check(sums, randn(133, 128), randn(128), **{"triton.use_block_ptr": True})
        self.meta(code)
        self.assertIn("xoffset += ", code)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
