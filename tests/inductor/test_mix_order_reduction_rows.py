# Owner(s): ["module: inductor"]
"""How rows are split over programs, loaded, and fetched ahead."""

import ast
import dataclasses
import itertools
import math
import re
import unittest
from unittest.mock import patch

import sympy

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics, mix_order_plan
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import triton_mix_order
from torch._inductor.mix_order_pressure import Pressure
from torch._inductor.mix_order_row_cost import RowCost
from torch._inductor.mix_order_row_loop import RowSplit
from torch._inductor.mix_order_row_split import row_split
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.launch_plan import LaunchPlan
from torch._inductor.runtime.runtime_utils import next_power_of_2
from torch._inductor.runtime.triton_compat import Config
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        DEBUG,
        device_model,
        device_properties,
        FUSE_ALL,
        H200,
        MixOrderTestCase,
        nvidia_only,
        randn,
        Reload,
        rms_norm_args,
        rms_norm_backward,
        SPLIT_SIZE,
        with_split,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        DEBUG,
        device_model,
        device_properties,
        FUSE_ALL,
        H200,
        MixOrderTestCase,
        nvidia_only,
        randn,
        Reload,
        rms_norm_args,
        rms_norm_backward,
        SPLIT_SIZE,
        with_split,
    )


BF16, FP32 = torch.bfloat16, torch.float32
HALF_TYPES = (torch.bfloat16, torch.float16)


# Persistent programs


def sums(x, weight):
    y = x * weight
    return y.sum(0), y.sum(1)


class LaunchPlanTest(TestCase):
    """What codegen decided, as it travels in the generated source."""

    def test_what_is_decided_adds_up(self):
        meta = {"no_x_dim": False}
        LaunchPlan(num_programs=264).add_to(meta)
        LaunchPlan(max_xblock=2, row_tiles=[(2, 8, 3)]).add_to(meta)
        self.assertEqual(
            meta["launch_plan"],
            {"num_programs": 264, "max_xblock": 2, "row_tiles": [(2, 8, 3)]},
        )
        plan = LaunchPlan.of(ast.literal_eval(repr(meta)))
        self.assertEqual(plan, LaunchPlan(264, 2, row_tiles=[(2, 8, 3)]))

    def test_nothing_is_decided(self):
        meta = {}
        LaunchPlan().add_to(meta)
        self.assertEqual(LaunchPlan.of(meta), LaunchPlan())
        self.assertEqual(LaunchPlan.of({}), LaunchPlan())

    def test_what_nobody_decides(self):
        with self.assertRaisesRegex(TypeError, "xblocks"):
            LaunchPlan.of({"launch_plan": {"xblocks": 2}})

    def test_configs(self):
        plan = LaunchPlan(row_tiles=[(2, 8, 3), (1, 4, 3)])
        (first,) = plan.row_tile_configs(1, autotune=False)
        self.assertEqual(first.kwargs, {"XBLOCK": 2, "NUM_STAGES": 3})
        self.assertEqual(first.num_warps, 8)
        found = plan.row_tile_configs(2, autotune=True)
        self.assertEqual([each.kwargs["XBLOCK"] for each in found], [2, 2])
        self.assertEqual([each.num_warps for each in found], [8, 4])


@nvidia_only
@instantiate_parametrized_tests
class PersistentRowsTest(MixOrderTestCase):
    """A fixed number of programs, each with one run of rows."""

    fuse = FUSE_ALL

    # of 8 rows: a tile and a bit, 2, 2 and a bit, and more
    @parametrize("rows", (9, 16, 17, 133, 1031))
    def test_rows(self, rows):
        code = self.check(rms_norm_backward, *rms_norm_args(rows, 96))
        meta = self.row_split(code)
        (xblock, _, _), *_ = meta["row_tiles"]
        self.assertLessEqual(meta["num_programs"], -(-rows // xblock))

    @parametrize("dtype", (torch.float16, torch.bfloat16, torch.float64))
    def test_dtypes(self, dtype):
        code = self.check(sums, randn(133, 96, dtype=dtype), randn(96, dtype=dtype))
        self.row_split(code)

    @parametrize("rows", (200, 331))
    def test_workspace_does_not_grow(self, rows):
        code = self.check(sums, randn(rows, 8192), randn(8192))
        programs = self.row_split(code)["num_programs"]
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
        alone = self.row_split(self.check(f, x))
        more = [randn(768) for _ in range(8)]
        metrics.reset()
        self.assertEqual(self.row_split(self.check(f, x, *more)), alone)

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
        self.row_split(code)

    def test_pipelined(self):
        code = self.check(sums, randn(133, 4096), randn(4096))
        self.assertIn("num_stages=NUM_STAGES", self.kernel(code)[1].partition("\n")[0])
        (_, _, num_stages), *_ = self.row_split(code)["row_tiles"]
        self.assertGreater(num_stages, 1)

    @parametrize("ends_stages", (False, True))
    def test_bounds_of_gathered_rows_are_asserted_after_the_loop(self, ends_stages):
        """Where Triton has no stages for a loop that asserts."""

        def f(x, table, index):
            y = x * table[index]
            return y * y.sum(-1, keepdim=True), y.sum(0)

        index = torch.arange(133, device=GPU_TYPE) % 64 - 32
        with patch.object(triton_mix_order, "ASSERTS_END_STAGES", ends_stages):
            args = randn(133, 96), randn(64, 96), index
            code = self.check(f, *args, fx_graph_cache=False)
        (_, _, num_stages), *_ = self.row_split(code)["row_tiles"]
        self.assertGreater(num_stages, 1)
        asserted = re.findall(r"\n( *)tl.device_assert\((.*), \"index out of bounds", code)
        indent, condition = asserted[0]
        self.assertEqual(condition == "in_bounds0", ends_stages)
        self.assertEqual(len(indent), 4 if ends_stages else 8)
        self.assertEqual(len(asserted), 1)

    def test_bounds_of_scattered_rows_are_asserted_before_they_are_stored(self):
        def f(table, x, index):
            y = x - x.mean(-1, keepdim=True)
            return table.index_put((index,), y), x.sum(0)

        index = torch.arange(133, device=GPU_TYPE).flip(0) - 133
        with patch.object(triton_mix_order, "ASSERTS_END_STAGES", True):
            args = torch.zeros(133, 96, device=GPU_TYPE), randn(133, 96), index
            code = self.check(f, *args, fx_graph_cache=False)
        loop = self.kernel(code)[1]
        asserted, stored = (loop.index(each) for each in ("device_assert(", "tl.store("))
        self.assertLess(asserted, stored)
        self.assertNotIn("in_bounds0", code)

    # a padded tile loads less
    @parametrize("columns,stages", ((640, 4), (1024, 3), (5120, 4), (8192, 3)))
    def test_stages(self, columns, stages):
        if DeviceProperties.create(torch.device(GPU_TYPE)).cc not in (80, 90, 100):
            self.skipTest("less shared memory holds fewer stages")
        args = rms_norm_args(133, columns, torch.bfloat16)
        code = self.check(rms_norm_backward, *args)
        (_, _, num_stages), *_ = self.row_split(code)["row_tiles"]
        self.assertEqual(num_stages, stages)

    @parametrize("option", (DEBUG, SPLIT_SIZE))
    def test_not_persistent(self, option):
        args = randn(133, 96), randn(96)
        self.row_split(self.check(sums, *args))
        value = 16 if option == SPLIT_SIZE else {"persistent_row_split": False}
        code = self.check(sums, *args, fused=2, **{option: value})
        self.assertNotIn("'num_programs'", code)
        self.assertIn("RSPLIT_SIZE : tl.constexpr", self.kernel(code)[0])

    def test_block_pointers(self):
        code = self.check(sums, randn(133, 128), randn(128), **{"triton.use_block_ptr": True})
        self.row_split(code)
        self.assertIn("xoffset += ", code)


# Tiles in grid-stride order


# tiles of rows that are fetched ahead are dealt out anyway
NOT_FETCHED = {**FUSE_ALL, DEBUG: {"prefetch_rows": False}}


def both(x):
    y = x * x
    return y.sum(0), y.sum(1)


@nvidia_only
@instantiate_parametrized_tests
class DealTilesTest(MixOrderTestCase):
    """The tiles of rows are dealt out to the programs in turn."""

    fuse = NOT_FETCHED

    def deals(self, code):
        """Whether programs go on to a tile that other programs' tiles lie before."""
        before, loop = self.kernel(code)
        head = loop.partition("\n")[0]
        return {
            "xoffset = tl.program_id(0) * XBLOCK\n" in before,
            "xoffset = tl.program_id(0) * RSPLIT_SIZE\n" not in before,
            head.startswith("xoffset, xnumel, RSPLIT_STRIDE,"),
            "xindex += RSPLIT_STRIDE" in loop,
        }

    # of 8 rows a tile and a bit, 2 and a bit, and more, in programs of several and of none
    @parametrize("rows", (9, 17, 133, 400, 1031))
    @parametrize("columns,dtype", ((96, torch.bfloat16), (5000, torch.float32)))
    def test_rows(self, rows, columns, dtype):
        code = self.check(rms_norm_backward, *rms_norm_args(rows, columns, dtype))
        self.assertEqual(self.deals(code), {True})

    @parametrize("rows,columns,dealt", ((1031, 95, True), (301, 3001, False)))
    def test_rows_that_begin_anywhere(self, rows, columns, dealt):
        args = rms_norm_args(rows, columns, torch.bfloat16)
        code = self.check(rms_norm_backward, *args)
        self.assertEqual(self.deals(code), {dealt})

    # of each SM's program a whole number of rows, or some with a row more
    @parametrize("more", (0, 2))
    def test_rows_loaded_again(self, more):
        sms = torch.cuda.get_device_properties(GPU_TYPE).multi_processor_count
        args = rms_norm_args(2 * sms + more, 16384, torch.bfloat16)
        code = self.generate(rms_norm_backward, *args)
        self.assertEqual(self.deals(code), {more > 0})

    def test_knob(self):
        options = {DEBUG: {"deal_tiles": False, "prefetch_rows": False}}
        code = self.check(both, randn(400, 5000), **options)
        self.assertEqual(self.deals(code), {False})

    # a run of RSPLIT_SIZE rows is what the knob asks for
    def test_split_size(self):
        options = {"triton.mix_order_reduction_split_size": 16}
        code = self.check(both, randn(400, 512), **options)
        self.assertEqual(self.deals(code), {False})

    def test_dynamic_rows(self):
        compiled = torch.compile(both, fullgraph=True)
        with (
            inductor_config.patch(self.fuse),
            torch._dynamo.config.patch(error_on_recompile=True),
            torch.fx.experimental._config.patch(backed_size_oblivious=True),
        ):
            for rows in (400, 133, 9, 1, 0):
                x = randn(rows, 4096)
                torch._dynamo.mark_dynamic(x, 0)
                actual, code = run_and_get_code(compiled, x)
                self.compare(both, actual, (x,))
                for each in code:  # compiled once
                    self.assertEqual(self.deals(each), {True})

    @parametrize("option", ("use_block_ptr", "use_tensor_descriptor"))
    def test_block_pointers(self, option):
        code = self.check(both, randn(400, 512), **{f"triton.{option}": True})
        self.assertIn("xoffset += RSPLIT_STRIDE", code)


# Masks of rows


@nvidia_only
@instantiate_parametrized_tests
class RowMasksKernelTest(MixOrderTestCase):
    fuse = FUSE_ALL

    def masks_rows(self, code):
        """Whether the loop of the mix-order kernel does."""
        return "xmask" in self.kernel(code)[1].partition("ws_ptr")[0]

    # rows of over 4096 columns have a tile each; of 512, in bfloat16, there are 4 in a tile
    @parametrize(
        "rows,columns,dtype,masked",
        (
            (133, 8192, FP32, False),
            (9, 5000, FP32, False),
            (136, 512, BF16, False),
            (133, 512, BF16, True),
        ),
    )
    def test_rows_that_are_all_there(self, rows, columns, dtype, masked):
        code = self.check(both, randn(rows, columns, dtype=dtype))
        self.assertEqual(self.masks_rows(code), masked)

    @parametrize("rows", (9, 131, 133, 265, 400))
    def test_norm(self, rows):
        code = self.check(rms_norm_backward, *rms_norm_args(rows, 5000, FP32))
        self.assertFalse(self.masks_rows(code))

    @inductor_config.patch("triton.mix_order_reduction_debug", {"bound_tiles": False})
    def test_knob(self):
        code = self.check(both, randn(133, 8192))
        self.assertTrue(self.masks_rows(code))

    # its least size is the descriptors' to say
    @inductor_config.patch("triton.use_tensor_descriptor", True)
    def test_descriptors(self):
        code = self.check(both, randn(133, 8192))
        self.assertTrue(self.masks_rows(code))

    # rows of two dimensions, which are neither powers of two nor whole blocks
    @inductor_config.patch("triton.use_block_ptr", True)
    def test_block_pointers(self):
        def f(x):
            y = x * x
            return y.sum((0, 1)), y.sum(2)

        self.check(f, randn(19, 7, 5000).transpose(0, 1))

    def test_dynamic_rows(self):
        compiled = torch.compile(both, fullgraph=True)
        with inductor_config.patch(self.fuse):
            for rows in (265, 133, 9):
                x = randn(rows, 8192)
                torch._dynamo.mark_dynamic(x, 0)
                actual, code = run_and_get_code(compiled, x)
                self.compare(both, actual, (x,))
                for each in code:  # compiled once
                    self.assertFalse(self.masks_rows(each))

    @parametrize("rows,columns", ((133, 8192), (136, 512)))
    def test_coordinate_descent_keeps_to_the_tile(self, rows, columns):
        code = self.check(both, randn(rows, columns, dtype=BF16))
        row_split = self.row_split(code)
        xblock, num_warps, num_stages = row_split["row_tiles"][0]
        tuner = CoordescTuner(
            is_mix_order_reduction=True, inductor_meta={"launch_plan": row_split}
        )

        def valid(xblock):
            kwargs = {"XBLOCK": xblock, "NUM_STAGES": num_stages}
            return tuner.is_valid_config(Config(kwargs, num_warps=num_warps))

        self.assertTrue(valid(xblock))
        self.assertFalse(valid(2 * xblock))


# Rows that are loaded twice


REGISTERS_PER_SM = 65536
# compute capability, SMs
DEVICES = [(80, 108), (86, 84), (90, 132), (100, 148), (120, 188), (61, 20)]


def costs():
    """What rows of two to 16384 columns cost, in the norms of half and full types."""
    for log2, extra in itertools.product(range(1, 15), (0, 1)):
        rnumel = 2**log2
        columns = rnumel // 2 + 1 if extra else rnumel
        for streams, width in itertools.product((1, 2, 3, 6), (1, 2, 4, 8)):
            for accumulators, invariants, stores_rows in itertools.product(
                (1, 2, 4, 12), (0, 1, 3), (False, True)
            ):
                yield RowCost(
                    columns=columns,
                    rnumel=rnumel,
                    stream_bytes=streams * width,
                    streams=streams,
                    stores_rows=stores_rows,
                    accumulators=accumulators,
                    invariants=invariants,
                )


class ReloadTestCase(TestCase):
    def setUp(self):
        super().setUp()
        fields = [field.name for field in dataclasses.fields(RowSplit)]
        self.assertIn("reload", fields)


class RowSplitFunctionTest(ReloadTestCase):
    """row_split, over what rows may cost and GPUs may have."""

    def assert_possible(self, cost, device, rows, split):
        tile = split.xblock * cost.rnumel
        self.assertEqual(split.xblock & (split.xblock - 1), 0)
        self.assertEqual(split.num_warps & (split.num_warps - 1), 0)
        self.assertGreaterEqual(split.xblock, 1)
        self.assertGreaterEqual(split.num_warps, 1)
        self.assertLessEqual(split.num_warps, 32)
        self.assertGreaterEqual(split.num_stages, 1)
        self.assertGreaterEqual(split.programs_per_sm, 1)
        self.assertGreaterEqual(split.num_programs, 1)
        # a tile of several rows is small
        if split.xblock > 1:
            self.assertLessEqual(tile, 32 * 1024)
        if rows is None:
            self.assertEqual(
                split.num_programs,
                device.sms * split.programs_per_sm,
            )
        else:
            self.assertLessEqual(split.num_programs, max(1, -(-rows // split.xblock)))
        # one stage needs no shared memory for loads
        if split.num_stages > 1:
            shared = device.shared_memory_kib * 1024
            # with two stages, a kernel that reloads holds the first pass alone
            passes = 2 if split.reload and split.num_stages > 2 else 1
            stages = split.num_stages - (split.reload and passes == 1)
            if not split.reload:  # two tiles have three buffers
                stages = min(stages, 1.5 * (split.num_stages - 1))
            self.assertLessEqual(
                stages * passes * tile * cost.stream_bytes * split.programs_per_sm,
                shared,
            )
        if not split.reload:
            live = (cost.accumulators + split.hoist * cost.invariants) * cost.columns
            rows_live = cost.streams if cost.stores_rows else 1
            live += rows_live * split.xblock * cost.columns
            threads = split.num_warps * 32
            # half of what would be loaded twice may be spilled
            widest = max(1, cost.stream_bytes // max(4, 4 * cost.streams))
            values = rows_live * widest * cost.columns
            spilled = values // 2 if cost.columns > 4096 and cost.stores_rows else 0
            most = threads * min(255, REGISTERS_PER_SM // threads)
            self.assertLess(live, most + spilled)
            # all programs of an SM are there at once
            self.assertLess(live * split.programs_per_sm, REGISTERS_PER_SM + spilled)

    def test_possible(self):
        for skip, (cc, sms) in enumerate(DEVICES):
            gpu = device_model(cc, sms)
            for cost in itertools.islice(costs(), skip, None, 7):
                for rows in (None, 0, 1, 5, 4096, 1 << 22):
                    split = row_split(cost, gpu, rows)
                    try:
                        self.assert_possible(cost, gpu, rows, split)
                    except AssertionError as error:
                        raise AssertionError(f"{cost} {cc} {rows}: {split}") from error

    def test_autotuned_programs(self):
        gpu = H200
        for cost in itertools.islice(costs(), 0, None, 7):
            for programs_per_sm in (1, 2, 8, 32):
                split = row_split(cost, gpu, None, programs_per_sm)
                self.assertEqual(split.programs_per_sm, programs_per_sm)
                self.assertEqual(split.num_programs, 132 * programs_per_sm)
                self.assertGreaterEqual(split.num_stages, 1)

    def test_monotone(self):
        """Of costlier rows, no more are in a tile, and what does not fit never fits again."""
        gpu = H200
        for cost in itertools.islice(costs(), 0, None, 5):
            split = row_split(cost, gpu, None)
            for field in ("accumulators", "invariants"):
                more = row_split(
                    dataclasses.replace(cost, **{field: getattr(cost, field) + 1}),
                    gpu,
                    None,
                )
                self.assertGreaterEqual(more.reload, split.reload, f"{cost} {field}")
                self.assertLessEqual(more.xblock, split.xblock)
            wider = row_split(
                dataclasses.replace(cost, stream_bytes=cost.stream_bytes * 2), gpu, None
            )
            self.assertLessEqual(wider.xblock, split.xblock)
            programs = [row_split(cost, gpu, rows).num_programs for rows in (1, 9, 99, 9999)]
            self.assertEqual(programs, sorted(programs))

    def test_static_and_dynamic_rows_agree(self):
        gpu = H200
        for cost in itertools.islice(costs(), 0, None, 3):
            self.assertEqual(row_split(cost, gpu, 1 << 24), row_split(cost, gpu, None))

    def test_nothing_streamed(self):
        """Rows of what is gathered or generated, whose bytes are not known."""
        for rnumel in (2, 64, 512, 4096, 16384):
            cost = RowCost(
                columns=rnumel,
                rnumel=rnumel,
                stream_bytes=0,
                streams=0,
                stores_rows=True,
                accumulators=1,
                invariants=1,
            )
            self.assert_possible(
                cost, H200, None, row_split(cost, H200, None)
            )

    def test_reload(self):
        """Rows are loaded again when their tiles, with the accumulators, do not fit."""

        def reload(columns, **more):
            cost = RowCost(
                columns=columns,
                rnumel=columns,
                stream_bytes=4,
                streams=2,
                stores_rows=True,
                accumulators=1,
                invariants=1,
            )
            return row_split(
                dataclasses.replace(cost, **more), H200, None
            ).reload

        self.assertFalse(reload(4096))
        self.assertFalse(reload(8192))
        self.assertTrue(reload(8192, accumulators=4))
        self.assertTrue(reload(16384))
        self.assertFalse(reload(16384, stores_rows=False))

    def test_padded_rows(self):
        """
        Of 9000 to 14336 columns no thread keeps the padding, to 16384, of more than a
        load. What every row reads is loaded again before the row is.
        """

        def split(columns, width, accumulators):
            cost = RowCost(
                columns=columns,
                rnumel=16384,
                stream_bytes=4 * width,
                streams=2,
                stores_rows=True,
                accumulators=accumulators,
                invariants=1,
            )
            found = row_split(cost, H200, None)
            return found.reload, found.hoist, found.num_stages

        for columns in (9000, 12288, 14336):
            self.assertEqual(split(columns, 1, 1), (False, False, 3))
        self.assertEqual(split(9000, 2, 1), (False, True, 2))
        self.assertEqual(split(12288, 2, 2), (False, False, 2))
        # the partials of a LayerNorm's weight and bias: a stage of what is loaded twice
        self.assertEqual(split(12288, 1, 2), (True, False, 1))
        self.assertEqual(split(14336, 1, 2), (True, False, 1))
        self.assertEqual(split(16384, 1, 2), (True, True, 2))
        self.assertEqual(split(16384, 1, 1), (True, True, 1))

    def test_fewer_rows_before_all_of_them_twice(self):
        gpu = H200
        self.assertFalse(
            any(
                split.reload and split.xblock > 1
                for cost in costs()
                for split in [row_split(cost, gpu, None)]
            )
        )
        one_stream = RowCost(
            columns=4096,
            rnumel=4096,
            stream_bytes=2,
            streams=1,
            stores_rows=True,
            accumulators=1,
            invariants=0,
        )
        self.assertFalse(row_split(one_stream, gpu, None).reload)

    def test_configs(self):
        """The first is the choice; autotuning changes the programs of none."""
        gpu = H200
        for cost in itertools.islice(costs(), 0, None, 3):
            split = row_split(cost, gpu, None)
            plan = split.launch_plan()
            self.assertEqual(plan.num_programs, split.num_programs)
            first, *others = plan.row_tiles
            self.assertEqual(first, (split.xblock, split.num_warps, split.num_stages))
            self.assertNotIn(first, others)
            for xblock, num_warps, num_stages in others:
                self.assertTrue(0 < xblock <= split.xblock)
                self.assertTrue(0 < num_warps <= 32)
                self.assertTrue(0 < num_stages <= split.num_stages)


ReloadWithoutHoisting = with_split(reload=True, hoist=False)


@nvidia_only
@instantiate_parametrized_tests
class ReloadTest(ReloadTestCase, MixOrderTestCase):
    """Where a row does not fit in registers, it is loaded again once its reductions
    are known."""

    fuse = FUSE_ALL

    def reload(self, f, *args, choices=Reload, **options):
        with V.set_choices_handler(choices()):
            return self.check(f, *args, fx_graph_cache=False, **options)

    @parametrize("columns", (16384, 9000))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_wide_rows(self, columns, dtype):
        args = rms_norm_args(40, columns, dtype)
        code = self.check(
            rms_norm_backward, *args, **{"triton.mix_order_reduction_debug": {"keep_rows": False}}
        )
        # of the weight, if it fits, rstd, and x and dy, of 16384 columns in both passes
        expected = ((1, 5), (0, 7)) if columns == 16384 else ((1, 3), (0, 4))
        self.assertIn(self.loads(code), expected)

    def test_narrow_rows_fit(self):
        code = self.check(rms_norm_backward, *rms_norm_args(133, 96))
        self.assertEqual(self.loads(code), (1, 3))
        code = self.reload(rms_norm_backward, *rms_norm_args(133, 96), fused=2)
        self.assertEqual(self.loads(code), (1, 5))

    @parametrize("choices", (InductorChoices, Reload))
    def test_eviction_policies(self, choices):
        """The first pass keeps what the next one reads; rows read once have no policy."""
        args = rms_norm_args(133, 96)
        code = self.reload(rms_norm_backward, *args, choices=choices)
        kernel = self.mix_order_kernel(code)
        rows = [load for load in kernel.calls("tl.load", kernel.loop) if "r0_" in load[0]]
        again = [any("evict_first" in part for part in load) for load in rows]
        kept = [any("evict_last" in part for part in load) for load in rows]
        twice = choices is Reload
        self.assertEqual(again, [False, False, True, True] if twice else [False] * 2)
        self.assertEqual(kept, [True, True, False, False] if twice else [False] * 2)

    def test_without_hoisting(self):
        code = self.reload(
            rms_norm_backward, *rms_norm_args(133, 96), choices=ReloadWithoutHoisting
        )
        self.assertEqual(self.loads(code), (0, 7))

    def twice(self, code):
        """Some of a row is loaded again, by loads that the compiler can not take for one."""
        kernel = self.mix_order_kernel(code)
        loads = kernel.calls("tl.load", kernel.loop)
        pointers = {place.partition(" + ")[0] for place, *_ in loads}
        self.assertLess(len(pointers), len(loads))
        self.assertEqual(len(set(map(tuple, loads))), len(loads))

    def test_two_boundaries(self):
        """A row's reduction needs another one of it."""

        def f(x, dy):
            p = (x - x.amax(1, keepdim=True)).exp()
            p = p / p.sum(1, keepdim=True)
            ds = p * (dy - (p * dy).sum(1, keepdim=True))
            return ds, dy.sum(0), (x * dy).sum(0)

        code = self.reload(f, randn(133, 96), randn(133, 96), ulps=4)
        self.twice(code)
        # x for its maximum and the sum, for the second sum, and for what is stored
        self.assertEqual(self.loads(code), (0, 5))

    def test_variance(self):
        def f(x, dy):
            var, mean = torch.var_mean(x, 1, keepdim=True)
            xhat = (x - mean) * (var + 1e-5).rsqrt()
            return xhat, mean, (dy * x).sum(0), dy.sum(0)

        self.twice(self.reload(f, randn(133, 96), randn(133, 96), ulps=4))

    def test_several_outputs(self):
        """What is stored in a pass is not computed again in the next."""

        def f(x, dy, rstd):
            y = x * rstd
            z = y.sin() * y.sum(1, keepdim=True)
            return y, z, z * (z * dy).sum(1, keepdim=True), (x * dy).sum(0)

        args = randn(133, 96), randn(133, 96), randn(133, 1)
        self.twice(self.reload(f, *args, ulps=4))

    def test_updated_in_place(self):
        """A pass does not read again what an earlier one has overwritten."""

        def f(x, dy):
            s = (x * dy).sum(1, keepdim=True)
            partials = (x * dy).sum(0), dy.sum(0)
            x.mul_(s)
            dy.add_(x)
            return s, *partials, (x * dy).sum(1)

        args = randn(133, 96), randn(133, 96)
        expect_args, actual_args = ([t.clone() for t in args] for _ in range(2))
        with (
            inductor_config.patch({**self.fuse, "fx_graph_cache": False}),
            V.set_choices_handler(Reload()),
        ):
            actual, (code,) = run_and_get_code(torch.compile(f), *actual_args)
        expect = f(*expect_args)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        self.assertEqual(actual, expect, atol=1e-3, rtol=1e-4)
        self.assertEqual(actual_args, expect_args, atol=1e-3, rtol=1e-4)
        self.twice(code)

    def test_buffer_reused_in_place(self):
        """An output takes the place of its input, which an earlier pass read."""

        def f(a, dy):
            x = a.sum(2)
            s = (x * dy).sum(1, keepdim=True)
            return x * s, dy.sum(0)

        code = self.reload(f, randn(17, 64, 40), randn(17, 64), ulps=16)
        self.assertIn("in_out_ptr0", self.kernel(code)[1])
        self.twice(code)

    def test_masks(self):
        """Of a dropout, as bool."""

        def f(x, keep, dy):
            y = torch.where(keep, x * 2, 0)
            s = (y * dy).sum(1, keepdim=True)
            return torch.where(keep, dy * s, 0), (x + dy).sum(0), keep.sum(1)

        x, dy = randn(133, 96), randn(133, 96)
        self.twice(self.reload(f, x, x > 0.5, dy, ulps=4))

    def test_generated_dropout(self):
        """A seed gives both passes the same mask."""

        def f(x):
            keep = torch.rand_like(x) > 0.5
            y = torch.where(keep, x, 0)
            s = y.sum(1, keepdim=True)
            return torch.where(keep, y + s, 0), s, x.sum(0)

        x = torch.rand(133, 96, device=GPU_TYPE) + 1
        with (
            inductor_config.patch({**self.fuse, "fx_graph_cache": False}),
            V.set_choices_handler(Reload()),
        ):
            (z, s, _), (code,) = run_and_get_code(torch.compile(f), x)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        self.twice(code)
        self.assertEqual(torch.where(z != 0, x, 0).sum(1, keepdim=True), s)

    def test_integers(self):
        def f(x):
            s = x.sum(1, keepdim=True)
            return x * s, (x * x).sum(0), x.sum(0)

        x = torch.randint(-9, 9, (133, 96), device=GPU_TYPE)
        self.twice(self.reload(f, x))

    def test_several_columns(self):
        def f(x, weight):
            s = (x * weight).sum((1, 2), keepdim=True)
            return x * s * weight, x.sum(0)

        self.twice(self.reload(f, randn(133, 12, 8), randn(8), ulps=4))

    def test_gathered(self):
        def f(x, table, index):
            y = x * table[index]
            return y * y.sum(1, keepdim=True), y.sum(0)

        index = torch.randint(0, 64, (96,), device=GPU_TYPE)
        self.twice(self.reload(f, randn(133, 96), randn(64), index, ulps=4))


# Slow functions


def of_tanh(x, y):
    z = x * (1 - torch.tanh(y) ** 2)
    return z.sum(0), z.sum(1)


def of_product(x, y):
    z = x * (1 - y**2)
    return z.sum(0), z.sum(1)


@instantiate_parametrized_tests
class SlowFunctionsKernelTest(MixOrderTestCase):
    def configs(self, f, *shape, dtype=torch.bfloat16):
        metrics.reset()
        code = self.check(f, *(randn(*shape, dtype=dtype) for _ in "xy"))
        return self.row_split(code)["row_tiles"][0]

    def test_more_warps(self):
        xblock, num_warps, _ = self.configs(of_tanh, 300, 4096)
        fewer_xblock, fewer, _ = self.configs(of_product, 300, 4096)
        self.assertEqual((xblock, num_warps), (1, 16))
        self.assertGreater(num_warps // xblock, fewer // fewer_xblock)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("shape", ((1030, 96), (301, 1000), (37, 5003)))
    def test_values(self, shape, dtype):
        self.configs(of_tanh, *shape, dtype=dtype)


@instantiate_parametrized_tests
class SlowFunctionsPolicyTest(TestCase):
    def cost(self, columns, streams=2, itemsize=2, accumulators=1, stores_rows=True):
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=itemsize * streams,
            streams=streams,
            stores_rows=stores_rows,
            accumulators=accumulators,
            invariants=0,
            slow=True,
        )

    @parametrize("columns", (768, 1024, 3072, 4096))
    def test_warps_that_stay_on_an_sm(self, columns):
        split = row_split(self.cost(columns), H200, 100_000)
        self.assertEqual(split.num_warps * split.programs_per_sm, 32)
        fast = dataclasses.replace(self.cost(columns), slow=False)
        split = row_split(fast, H200, 100_000)
        self.assertEqual(split.num_warps * split.programs_per_sm, 8)

    @parametrize("columns", (64, 128, 512, 1024, 2048, 4096, 8192, 16384))
    @parametrize("itemsize", (2, 4))
    # of rows that are kept though they do not fit, those that are slow are not
    @inductor_config.patch("triton.mix_order_reduction_debug", {"keep_rows": False})
    def test_fits(self, columns, itemsize):
        for streams in (1, 2, 5, 9):
            for accumulators in (1, 3, 6):
                cost = self.cost(columns, streams, itemsize, accumulators)
                split = row_split(cost, H200, 100_000)
                warps = split.num_warps * split.programs_per_sm
                self.assertLessEqual(warps, 64)
                tile = split.xblock * cost.rnumel * cost.stream_bytes
                if split.num_stages > 1:  # one is not held in shared memory
                    stages = split.num_stages * split.programs_per_sm
                    self.assertLessEqual(tile * stages, 227 * 1024)
                fast = row_split(dataclasses.replace(cost, slow=False), H200, 100_000)
                if split.reload:
                    self.assertTrue(fast.reload)
                if not fast.reload:
                    self.assertLessEqual(
                        split.xblock / split.num_warps, fast.xblock / fast.num_warps
                    )


# Fewer programs, fewer partials


def both_sums(x):
    return x.sum(0), x.sum(-1)


H200_PROPERTIES = device_properties()


@instantiate_parametrized_tests
class FewerProgramsPolicyTest(TestCase):
    def cost(self, columns, size=2, accumulators=1, stores_rows=False):
        """Of sums over both dimensions, or, with rows that are stored, of a norm."""
        streams = 2 if stores_rows else 1
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=size * streams,
            streams=streams,
            stores_rows=stores_rows,
            accumulators=accumulators,
            invariants=1 if stores_rows else 0,
            staged=columns * size % 4 == 0,
        )

    def programs(self, cost, rows, device=H200_PROPERTIES):
        """With all programs, and by default, which changes nothing else."""
        with inductor_config.patch({DEBUG: {"fewer_programs": False}}):
            most = InductorChoices.mix_order_row_split(cost, rows, device)
        split = InductorChoices.mix_order_row_split(cost, rows, device)
        self.assertEqual(
            split, dataclasses.replace(most, num_programs=split.num_programs)
        )
        return most.num_programs, split.num_programs

    # the best of what was measured of each: all programs, a half or a quarter of them
    @parametrize(
        "rows,columns,share",
        (
            (4097, 513, 4),
            (2048, 2048, 2),
            (4097, 2048, 2),
            (8192, 512, 2),
            (1000, 512, 1),
            (4097, 65, 1),
            (4097, 128, 1),
            (500, 4096, 1),
        ),
    )
    def test_sums(self, rows, columns, share):
        most, programs = self.programs(self.cost(columns), rows)
        self.assertEqual(programs, -(-most // share))

    @parametrize(
        "rows,columns,size,share",
        ((500, 2048, 2, 2), (1000, 513, 4, 1), (8192, 1024, 2, 1), (2048, 4096, 2, 1)),
    )
    def test_rows_that_are_stored(self, rows, columns, size, share):
        cost = self.cost(columns, size, stores_rows=True)
        most, programs = self.programs(cost, rows)
        self.assertEqual(programs, -(-most // share))

    def test_more_partials_are_left_by_fewer_programs(self):
        programs = [
            self.programs(self.cost(2048, accumulators=count), 4097)
            for count in (1, 2, 3)
        ]
        self.assertEqual([most for most, _ in programs], [1056, 1056, 528])
        self.assertEqual([fewer for _, fewer in programs], [528, 528, 264])

    @parametrize("sms", (40, 84, 108, 132, 148))
    @parametrize("columns", (65, 513, 2048, 16384))
    def test_most_sms_have_a_program(self, columns, sms):
        fewer = 0
        for rows in (1, sms - 1, sms, 2 * sms, 1000, 2048, 4097, 30001):
            most, programs = self.programs(self.cost(columns), rows, device_properties(sms=sms))
            self.assertGreaterEqual(programs, min(most, sms * 3 // 4))
            self.assertGreaterEqual(4 * programs, most)
            fewer += programs < most
        if sms >= 108 and columns in (513, 2048):
            self.assertGreater(fewer, 0)

    @parametrize("programs_per_sm", (1, 4, 8, 16))
    def test_as_many_as_autotuning_asks_for(self, programs_per_sm):
        cost = self.cost(513)
        split = InductorChoices.mix_order_row_split(cost, 4097, H200_PROPERTIES, programs_per_sm)
        tiles = -(-4097 // split.xblock)
        self.assertEqual(split.num_programs, min(132 * programs_per_sm, tiles))

    def test_dynamic_rows(self):
        most, programs = self.programs(self.cost(513), sympy.Symbol("s0"))
        self.assertEqual(programs, most)


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


@nvidia_only
@unittest.skipIf(HAS_GPU and sms() < 108, "few SMs run no more programs than pay")
@instantiate_parametrized_tests
class FewerProgramsKernelTest(MixOrderTestCase):
    fuse = FUSE_ALL

    def programs(self, f, *args, **options):
        """Of the mix-order kernel of ``f``, whose results are right."""
        torch._dynamo.reset()
        metrics.reset()
        code = self.check(f, *args, **options)
        return self.row_split(code)["num_programs"]

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("rows", (2048, 2051))
    def test_sums(self, rows, dtype):
        x = randn(rows, 513, dtype=dtype)
        most = self.programs(both_sums, x, **{DEBUG: {"fewer_programs": False}})
        programs = self.programs(both_sums, x)
        self.assertLess(programs, most)
        self.assertGreaterEqual(4 * programs, most)

    def test_norm(self):
        args = rms_norm_args(500, 2048, torch.bfloat16)
        most = self.programs(rms_norm_backward, *args, **{DEBUG: {"fewer_programs": False}})
        self.assertEqual(self.programs(rms_norm_backward, *args), most // 2)


# Rows that begin anywhere


def both_of_two(x, y):
    return both(x * y)


@nvidia_only
@instantiate_parametrized_tests
class UnalignedRowsKernelTest(MixOrderTestCase):
    fuse = FUSE_ALL

    def stages(self, f, *args):
        """Of the first configuration of the mix-order kernel of ``f``."""
        metrics.reset()
        code = self.check(f, *args)
        return self.row_split(code)["row_tiles"][0][2]

    # rows of bfloat16 with an odd number of columns cannot be copied asynchronously
    @parametrize(
        "columns,dtype,staged",
        ((513, BF16, False), (516, BF16, True), (512, BF16, True), (516, FP32, True)),
    )
    def test_one_stage(self, columns, dtype, staged):
        x = randn(133, columns, dtype=dtype)
        self.assertEqual(self.stages(both, x) > 1, staged)

    # the first column, and the columns of the tensor that 96 are of
    @parametrize(
        "first,width,staged",
        ((0, 201, False), (1, 200, False), (2, 200, True), (0, 200, True)),
    )
    def test_rows_of_a_wider_tensor(self, first, width, staged):
        def f(x):
            return both(x[:, first : first + 96])

        x = randn(133, width, dtype=BF16)
        self.assertEqual(self.stages(f, x) > 1, staged)

    def test_some_rows_that_are_staged(self):
        def f(x, y):
            return both_of_two(x, y[:, :513])

        x, y = randn(133, 513, dtype=BF16), randn(133, 600)
        self.assertGreater(self.stages(f, x, y), 1)

    @parametrize("columns", (65, 127, 769, 2049))
    @parametrize("rows", (13, 133, 1030))
    def test_values(self, rows, columns):
        x, *more = rms_norm_args(rows, columns, BF16)
        metrics.reset()
        self.check(rms_norm_backward, x, *more)
        metrics.reset()
        self.check(both, x)

    @inductor_config.patch("triton.mix_order_reduction_debug", {"keep_rows": False})
    def test_rows_that_would_be_loaded_twice(self):
        # those of bfloat16 with an odd number of columns: three times as slow as unfused
        for columns, dtype, fused in ((16383, BF16, 0), (16384, BF16, 1)):
            metrics.reset()
            args = rms_norm_args(40, columns, dtype)
            self.check_fused(rms_norm_backward, *args, fused=fused)

    def test_dynamic_rows(self):
        x = randn(133, 513, dtype=BF16)
        torch._dynamo.mark_dynamic(x, 0)
        self.assertEqual(self.stages(both, x), 1)


@instantiate_parametrized_tests
class UnalignedRowsPolicyTest(TestCase):
    def cost(self, columns, streams=2, accumulators=1, stores_rows=True):
        fields = {field.name for field in dataclasses.fields(RowCost)}
        self.assertIn("staged", fields)
        return RowCost(
            columns=columns,
            rnumel=1 << (columns - 1).bit_length(),
            stream_bytes=2 * streams,
            streams=streams,
            stores_rows=stores_rows,
            accumulators=accumulators,
            invariants=1,
            staged=False,
        )

    @parametrize("columns", (513, 769, 1001, 2049, 3001, 5003))
    @parametrize("stores_rows,warps", ((True, 16), (False, 32)))
    def test_warps_that_stay_on_an_sm(self, columns, stores_rows, warps):
        streams = 2 if stores_rows else 1
        cost = self.cost(columns, streams, stores_rows=stores_rows)
        split = row_split(cost, H200, 100_000)
        self.assertEqual(split.num_stages, 1)
        self.assertFalse(split.reload)
        self.assertLessEqual(split.num_warps * split.programs_per_sm, warps)
        self.assertGreaterEqual(split.num_warps * split.programs_per_sm, warps // 2)
        # 32 columns a thread at most, whatever the padding
        self.assertLessEqual(split.xblock * columns, 32 * 32 * split.num_warps)

    @parametrize("columns", (333, 701, 1537, 3333, 4601))
    @parametrize("stores_rows", (False, True))
    @parametrize("accumulators", (1, 3, 5))
    def test_programs_that_registers_hold(self, accumulators, stores_rows, columns):
        streams = accumulators
        cost = self.cost(columns, streams, accumulators, stores_rows)
        split = row_split(cost, H200, 100_000)
        tiles = split.xblock * (streams + 1 if stores_rows else streams)
        # of one program: its values, and of each thread what other things take. It may need
        # a sixteenth more than its share
        needed = (accumulators + 1 + tiles) * columns + 28 * 32 * split.num_warps
        programs = H200.registers_per_sm * 17 // 16 // needed
        self.assertLessEqual(split.programs_per_sm, max(1, programs))
        most = (16 if stores_rows else 32) // split.num_warps
        self.assertGreaterEqual(split.programs_per_sm, min(programs, most) // 2)

    # more than the tiles of all loads fit in, as they are reduced one after another
    @parametrize("columns,accumulators", ((7305, 5), (6401, 7)))
    def test_sums_that_fit_a_tile_at_a_time(self, columns, accumulators):
        cost = self.cost(columns, 4, accumulators, stores_rows=False)
        split = row_split(cost, H200, 100_000)
        self.assertEqual((split.num_stages, split.programs_per_sm), (1, 1))
        self.assertFalse(split.reload)

    @parametrize("rows", (1, 5, 1000))
    def test_no_more_programs_than_tiles(self, rows):
        split = row_split(self.cost(2049), H200, rows)
        self.assertLessEqual(split.num_programs * split.xblock, rows + split.xblock - 1)

    def test_what_is_given(self):
        split = row_split(self.cost(513), H200, 100_000, 3, 1)
        self.assertEqual((split.programs_per_sm, split.num_programs), (3, 396))
        self.assertEqual((split.xblock, split.num_stages), (1, 1))

    @inductor_config.patch("triton.mix_order_reduction_debug", {"prefetch_rows": False})
    def test_many_buffers(self):
        # fewer rows at once, and where one does not fit, rows are loaded twice
        few = row_split(self.cost(5003), H200, 100_000)
        more = row_split(self.cost(5003, streams=6, accumulators=3), H200, 100_000)
        self.assertLess(more.xblock, few.xblock)
        most = row_split(self.cost(16383, streams=9, accumulators=4), H200, 100_000)
        self.assertTrue(most.reload)

    def test_rows_that_are_staged(self):
        cost = dataclasses.replace(self.cost(2049), staged=True)
        self.assertGreater(row_split(cost, H200, 100_000).num_stages, 1)


# Rows that are prefetched to L2


FETCH = re.compile(r"triton_helpers\.prefetch_rows\((.*)\)\n")


def fetches(split):
    """Whether a kernel that splits its rows so fetches them ahead."""
    return getattr(split, "prefetch", False)


@instantiate_parametrized_tests
class PrefetchRowSplitTest(TestCase):
    """Which kernels fetch rows ahead, and how they split their rows then."""

    def split(self, columns, size=2, streams=2, cc=90, **cost):
        gpu = device_model(cc=cc)
        values = {
            "columns": columns,
            "rnumel": next_power_of_2(columns),
            "stream_bytes": size * streams,
            "streams": streams,
            "stores_rows": True,
            "accumulators": 1,
            "invariants": 1,
        }
        return row_split(RowCost(**{**values, **cost}), gpu, 20000)

    @parametrize("columns", (96, 1024, 4096, 8192))
    def test_rows_copied_ahead(self, columns):
        split = self.split(columns)
        self.assertGreater(split.num_stages, 2)
        self.assertFalse(fetches(split))

    @parametrize("columns", (97, 1001, 2801, 5001, 8191))
    def test_rows_that_begin_anywhere(self, columns):
        split = self.split(columns, staged=False)
        self.assertTrue(fetches(split))
        self.assertTrue(split.in_turn)

    def test_rows_loaded_again(self):
        split = self.split(16384)
        self.assertTrue(split.reload)
        self.assertTrue(fetches(split))
        self.assertTrue(split.in_turn)

    @parametrize("lacks", (False, True))
    def test_two_stages(self, lacks):
        split = self.split(10240, size=4, lacks_registers=lacks)
        self.assertFalse(split.reload)
        self.assertEqual(split.num_stages, 2)
        self.assertEqual(fetches(split), not lacks)

    def test_one_stage_of_a_padded_row(self):
        split = self.split(10240, streams=3)
        self.assertEqual((split.num_stages, split.reload), (1, False))
        self.assertTrue(fetches(split))
        with torch._inductor.config.patch({DEBUG: {"prefetch_rows": False}}):
            self.assertEqual(self.split(10240, streams=3).num_stages, 2)

    def test_more_than_the_cache_holds(self):
        split = self.split(16384, size=4, streams=3)
        self.assertLessEqual(split.num_stages, 2)
        self.assertFalse(fetches(split))

    @parametrize("cc,prefetch", ((80, False), (89, False), (90, True), (100, True)))
    def test_capability(self, cc, prefetch):
        self.assertEqual(fetches(self.split(16384, cc=cc)), prefetch)
        self.assertEqual(fetches(self.split(2801, cc=cc, staged=False)), prefetch)

    # columns, the rows, warps and programs an SM without fetching ahead, and with it
    @parametrize(
        "columns,before,after",
        (
            (1001, (2, 4, 4), (2, 4, 4)),  # few warps
            (1537, (2, 8, 2), (1, 4, 4)),
            (3333, (2, 16, 1), (1, 8, 2)),
            (6401, (1, 16, 1), (1, 16, 1)),
        ),
    )
    def test_programs_of_one_row(self, columns, before, after):
        def shape(split):
            return split.xblock, split.num_warps, split.programs_per_sm

        split = self.split(columns, staged=False)
        self.assertEqual(shape(split), after)
        with torch._inductor.config.patch({DEBUG: {"share_registers": False}}):
            self.assertEqual(shape(self.split(columns, staged=False)), before)
        with torch._inductor.config.patch({DEBUG: {"prefetch_rows": False}}):
            self.assertEqual(shape(self.split(columns, staged=False)), before)

    def test_programs_whose_registers_would_not_fit(self):
        split = self.split(2801, staged=False, accumulators=3)
        self.assertEqual((split.xblock, split.num_warps), (2, 8))

    def test_sums(self):
        sums = {"stores_rows": False, "streams": 1, "invariants": 0, "staged": False}
        split = self.split(2801, **sums)
        self.assertEqual((split.xblock, split.num_warps), (2, 8))
        with torch._inductor.config.patch({DEBUG: {"prefetch_rows": False}}):
            split = self.split(2801, **sums)
        self.assertEqual((split.xblock, split.num_warps), (1, 4))

    def test_knob(self):
        with torch._inductor.config.patch({DEBUG: {"prefetch_rows": False}}):
            self.assertFalse(fetches(self.split(16384)))
            split = self.split(2801, staged=False)
        self.assertFalse(fetches(split))
        self.assertFalse(split.in_turn)


@nvidia_only
@instantiate_parametrized_tests
class PrefetchKernelTest(MixOrderTestCase):
    """What kernels fetch, and that they compute what they did."""

    fuse = FUSE_ALL

    def fetches(self, code):
        """The arguments of each fetch in the loop over rows."""
        _, loop = self.kernel(code)
        return FETCH.findall(loop)

    @parametrize("dtype", (torch.bfloat16, torch.float16))
    @parametrize("rows", (33, 133, 1030))
    def test_rows_that_begin_anywhere(self, dtype, rows):
        code = self.check(rms_norm_backward, *rms_norm_args(rows, 97, dtype))
        self.assertEqual(len(self.fetches(code)), 2)
        self.assertIn("r0_numel * 2, xoffset, xnumel, XBLOCK", self.fetches(code)[0])

    def test_rows_loaded_again(self):
        code = self.generate(rms_norm_backward, *rms_norm_args(1030, 16384, torch.bfloat16))
        self.assertEqual(len(self.fetches(code)), 2)

    def test_rows_in_runs(self):
        args = rms_norm_args(133, 97, torch.bfloat16)
        options = {"triton.mix_order_reduction_debug": {"deal_tiles": False}}
        code = self.check(rms_norm_backward, *args, **options)
        end = "tl.program_id(0) * RSPLIT_SIZE + split_size"
        self.assertIn(f"xoffset, {end}, XBLOCK", self.fetches(code)[0])

    def test_dynamic_rows(self):
        args = rms_norm_args(133, 97, torch.bfloat16)
        for arg in (args[0], args[2], args[3]):
            torch._dynamo.mark_dynamic(arg, 0)
        code = self.check(rms_norm_backward, *args)
        self.assertEqual(len(self.fetches(code)), 2)

    def test_masks(self):
        def f(x, mask):
            y = torch.where(mask, x, 0)
            return y.sum(0), y.sum(-1)

        x, mask = randn(133, 97, dtype=torch.bfloat16), randn(133, 97) > 0
        code = self.check(f, x, mask)
        sizes = sorted(fetch.split(", ")[1] for fetch in self.fetches(code))
        self.assertEqual(sizes, ["r0_numel * 1", "r0_numel * 2"])

    def test_rows_in_the_middle(self):
        def f(x):
            y = x[20:153]
            return y.sum(0), y.sum(-1)

        code = self.check(f, randn(160, 97, dtype=torch.bfloat16))
        (fetch,) = self.fetches(code)
        self.assertTrue(fetch.startswith("in_ptr0 + (1940), "), fetch)

    @parametrize("every,first,last", ((1, 3, 100), (2, 0, 97)))
    def test_rows_that_do_not_adjoin(self, every, first, last):
        def f(x):
            y = x[::every, first:last]
            return y.sum(0), (y - y.float().mean(-1, keepdim=True)).to(x.dtype)

        x = randn(266, last + first, dtype=torch.bfloat16)
        self.assertEqual(self.fetches(self.check(f, x)), [])

    def test_rows_that_are_gathered(self):
        def f(x, y, index):
            return rms_norm_backward(x, y[0], y[index], x.float()[:, :1])

        x, y = (randn(133, 97, dtype=torch.bfloat16) for _ in range(2))
        index = torch.randint(0, 133, (133,), device=x.device)
        (fetch,) = self.fetches(self.check(f, x, y, index))
        self.assertIn("in_ptr", fetch)

    @parametrize("descriptors", ("use_block_ptr", "use_tensor_descriptor"))
    def test_descriptors(self, descriptors):
        args = rms_norm_args(1030, 97, torch.bfloat16)
        code = self.generate(rms_norm_backward, *args, **{f"triton.{descriptors}": True})
        self.assertEqual(self.fetches(code), [])

    def test_in_place(self):
        def f(x, y):
            x.add_(y)
            return x.sum(0), x.sum(-1)

        def run(x, y):
            return (*f(x := x.clone(), y), x)

        x, y = (randn(133, 97, dtype=torch.bfloat16) for _ in range(2))
        self.check(run, x, y)

    def test_knob(self):
        args = rms_norm_args(133, 97, torch.bfloat16)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"prefetch_rows": False}})
        self.assertEqual(self.fetches(code), [])


# Rows that are copied asynchronously


@instantiate_parametrized_tests
class CopyBytesRowSplitTest(TestCase):
    """Which rows are copied asynchronously, and which are fetched ahead instead."""

    def split(self, columns, size, cc=90, rows=20000, **cost):
        gpu = device_model(cc=cc)
        values = {
            "columns": columns,
            "rnumel": next_power_of_2(columns),
            "stream_bytes": 2 * size,
            "streams": 2,
            "stores_rows": True,
            "accumulators": 1,
            "invariants": 1,
            "copy_bytes": math.gcd(columns * size, 16),
        }
        return row_split(RowCost(**{**values, **cost}), gpu, rows)

    def copied(self, split):
        """Whether the loop over tiles has stages; if not, the next one is fetched."""
        self.assertEqual(split.prefetch, split.num_stages == 1)
        self.assertEqual(split.staged, split.num_stages > 1)
        return split.staged

    # 16 bytes; 8 of few columns, and of more; 4
    @parametrize(
        "columns,size,copied",
        (
            (1000, 2, True),
            (4100, 4, True),
            (516, 2, True),
            (1002, 4, True),
            (1028, 2, True),
            (2052, 2, False),
            (3334, 4, False),
            (130, 2, False),
            (5002, 2, False),
            (129, 4, False),
            (7001, 4, False),
        ),
    )
    def test_rows(self, columns, size, copied):
        self.assertEqual(self.copied(self.split(columns, size)), copied)
        sums = {"stores_rows": False, "streams": 1, "stream_bytes": size, "invariants": 0}
        self.assertEqual(self.copied(self.split(columns, size, **sums)), copied)
        with inductor_config.patch({DEBUG: {"min_copy_bytes": 4}}):
            self.assertTrue(self.copied(self.split(columns, size)))

    # whose next rows no instruction can ask for
    @parametrize("cost", ({"adjoin": False}, {"cc": 80}, {"slow": True}))
    def test_rows_that_are_not_fetched(self, cost):
        self.assertGreater(self.split(3333, 4, **cost).num_stages, 1)
        self.assertFalse(self.split(3333, 4, **cost).prefetch)

    # rows of few columns and many partials
    @parametrize("columns,accumulators,copied", ((129, 3, False), (129, 4, True), (257, 4, False)))
    def test_narrow_rows(self, columns, accumulators, copied):
        split = self.split(columns, 4, accumulators=accumulators)
        self.assertEqual(self.copied(split), copied)

    def test_prefetch_knob(self):
        with inductor_config.patch({DEBUG: {"prefetch_rows": False}}):
            self.assertGreater(self.split(3333, 4).num_stages, 1)

    @parametrize("columns,size", ((12290, 2), (14002, 2), (10241, 4), (12290, 4)))
    def test_wide_rows(self, columns, size):
        split = self.split(columns, size)
        self.assertEqual((split.num_stages, split.reload), (1, False))
        with inductor_config.patch({DEBUG: {"min_copy_bytes": 4}}):
            self.assertGreater(self.split(columns, size).num_stages, 1)


@nvidia_only
@instantiate_parametrized_tests
class CopyBytesKernelTest(MixOrderTestCase):
    """What kernels fetch, and that they compute what they did."""

    fuse = FUSE_ALL

    def fetched(self, code):
        """How many tensors a kernel fetches the next rows of."""
        _, loop = self.kernel(code)
        fetched = loop.count("triton_helpers.prefetch_rows(")
        *_, num_stages = self.row_split(code)["row_tiles"][0]
        self.assertEqual(num_stages == 1, fetched > 0)
        return fetched

    @parametrize("columns,dtype", ((130, BF16), (97, FP32), (1034, BF16), (1033, FP32)))
    @parametrize("rows", (13, 133, 1030))
    def test_values(self, rows, columns, dtype):
        args = rms_norm_args(rows, columns, dtype)
        self.assertEqual(self.fetched(self.check(rms_norm_backward, *args)), 2)

    @parametrize("columns,dtype", ((136, BF16), (132, BF16), (96, FP32), (98, FP32)))
    def test_rows_that_are_copied(self, columns, dtype):
        args = rms_norm_args(133, columns, dtype)
        self.assertEqual(self.fetched(self.check(rms_norm_backward, *args)), 0)

    # the other side's loops are split in two layers, and go beyond the last row
    @parametrize("rows", (8192, 20011))
    def test_rows_that_are_split_unevenly(self, rows):
        args = rms_norm_args(rows, 97)
        code = self.generate(rms_norm_backward, *args, split_reductions=True)
        self.assertEqual(self.fetched(code), 2)

    def test_rows_of_two_types(self):
        # elements of 4 bytes beside those that cannot be copied
        x, weight, dy, rstd = rms_norm_args(133, 97)
        code = self.check(rms_norm_backward, x.to(BF16), weight, dy, rstd)
        self.assertEqual(self.fetched(code), 2)

    @parametrize("first,width", ((0, 201), (4, 201)))
    def test_rows_of_a_wider_tensor(self, first, width):
        def f(x):
            y = x[:, first : first + 97] * 2
            return y.sum(0), y.sum(1)

        self.assertEqual(self.fetched(self.check(f, randn(133, width))), 0)

    def test_gathered_rows(self):
        def f(x, y, index):
            return rms_norm_backward(x, y[0], y[index], x[:, :1])

        x, y = randn(133, 97), randn(133, 97)
        index = torch.randint(0, 133, (133,), device=x.device)
        self.assertEqual(self.fetched(self.check(f, x, y, index)), 0)

    def test_dynamic_rows(self):
        args = rms_norm_args(133, 97)
        for arg in (args[0], args[2], args[3]):
            torch._dynamo.mark_dynamic(arg, 0)
        self.assertEqual(self.fetched(self.check(rms_norm_backward, *args)), 2)

    def test_knob(self):
        args = rms_norm_args(133, 97)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"min_copy_bytes": 4}})
        self.assertEqual(self.fetched(code), 0)


# Half types that are loaded as 32-bit words


WORD = "triton_helpers.half_of_word(tl.load("


def half_args(rows, columns, dtype=torch.bfloat16):
    x, weight, dy, rstd = rms_norm_args(rows, columns, dtype)
    return x, weight, dy, rstd.to(dtype)


def scaled(x, scale):
    y = x * scale
    return y.sum(0), (y - y.mean(-1, keepdim=True)).to(x.dtype)


@nvidia_only
@instantiate_parametrized_tests
class LoadWordsTest(MixOrderTestCase):
    """A half-typed value of a row is loaded with the four bytes that it is in."""

    fuse = FUSE_ALL

    def words(self, code):
        """Loads by words before the loop over rows, and in it."""
        return tuple(part.count(WORD) for part in self.kernel(code))

    @parametrize("dtype", HALF_TYPES)
    @parametrize("rows,columns", ((8, 64), (134, 96), (134, 1024), (1030, 264)))
    def test_statistic(self, dtype, rows, columns):
        code = self.check(rms_norm_backward, *half_args(rows, columns, dtype))
        self.assertEqual(self.words(code), (0, 1))

    @parametrize("dtype", HALF_TYPES)
    def test_every_value(self, dtype):
        # denormals, infinities and NaN, of both signs, in both halves of a word
        patterns = torch.arange(-(2**15), 2**15, device=GPU_TYPE, dtype=torch.int16)
        scale = patterns.repeat_interleave(2).roll(1)[::16].view(dtype)[:, None]
        scale = scale.contiguous()

        x = torch.eye(8, dtype=dtype, device=GPU_TYPE).repeat(len(scale) // 8, 1)

        def f(x, scale):
            y = torch.where(x > 0, scale, 0)
            return y.sum(0), y.sum(-1)

        with inductor_config.patch(self.fuse):
            (_, actual), (code,) = run_and_get_code(torch.compile(f), x, scale)
        self.assertEqual(self.words(code), (0, 1))
        self.assertEqual(actual, scale[:, 0], rtol=0, atol=0, equal_nan=True)

    def test_reloaded_rows(self):
        code = self.generate(rms_norm_backward, *half_args(1030, 16384))
        self.assertIn("RSPLIT", code)
        self.assertEqual(self.words(code)[0], 0)
        self.assertGreater(self.words(code)[1], 0)

    def test_knob(self):
        args = half_args(134, 96)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"load_words": False}})
        self.assertNotIn(WORD, code)

    def test_float32(self):
        code = self.check(rms_norm_backward, *rms_norm_args(134, 96, torch.bfloat16))
        self.assertNotIn(WORD, code)

    @parametrize("dtype", HALF_TYPES)
    @parametrize("rows,columns", ((9, 64), (133, 96), (133, 1024), (1031, 264)))
    def test_odd(self, rows, columns, dtype):
        # the last word is not all the buffer's: its element is loaded before the loop
        code = self.check(rms_norm_backward, *half_args(rows, columns, dtype))
        before, loop = self.kernel(code)
        self.assertEqual(self.words(code), (0, 1))
        self.assertIn(f" + ({rows} - 1), {rows} > 0)", before)
        self.assertIn(f" != ({rows} - 1)", loop)

    def test_odd_is_not_read_beyond(self):
        # the element that follows the last is another's
        x = randn(133, 96, dtype=torch.bfloat16)
        storage = torch.full((134,), float("nan"), dtype=x.dtype, device=GPU_TYPE)
        scale = storage[:133].view(133, 1)
        scale.copy_(randn(133, 1))
        code = self.check(scaled, x, scale)
        self.assertEqual(self.words(code), (0, 1))

    def test_dynamic_rows(self):
        with inductor_config.patch(self.fuse):
            f = torch.compile(rms_norm_backward)
            for rows in (134, 133, 1031, 2, 4096):
                args = half_args(rows, 96)
                for arg in (args[0], args[2], args[3]):
                    torch._dynamo.mark_dynamic(arg, 0)
                self.compare(rms_norm_backward, f(*args), args)
        args = half_args(134, 96)
        for arg in (args[0], args[2], args[3]):
            torch._dynamo.mark_dynamic(arg, 0)
        code = self.check(rms_norm_backward, *args)
        self.assertEqual(self.words(code), (0, 1))

    @parametrize("elements", (1, 133, 134))
    def test_beyond_the_layout(self, elements):
        # as_strided reads what follows the elements of an input in its storage
        def f(x, scale):
            return scaled(x, scale.as_strided((133, 1), (2, 1)))

        base = randn(268, dtype=torch.bfloat16)
        x, scale = randn(133, 96, dtype=torch.bfloat16), base[:elements]
        with inductor_config.patch(self.fuse):
            actual, (code,) = run_and_get_code(torch.compile(f), x, scale)
        self.assertEqual(self.words(code), (0, 1))
        expect = scaled(x, base[:266].view(133, 2)[:, :1])
        self.assertEqual(actual, expect, atol=0.1, rtol=0.02)

    def test_programmatic_dependent_launch(self):
        # the kernel before may write the values
        x, scale = randn(133, 96, dtype=torch.bfloat16), randn(133, 1)
        options = {"triton.enable_pdl": True}
        code = self.generate(scaled, x, scale.bfloat16(), **options)
        before, loop = self.kernel(code)
        self.assertLess(before.index("gdc_wait()"), before.index(" + (133 - 1)"))
        self.assertNotIn("gdc_wait()", loop)

    def test_even_dynamic_rows(self):
        def f(x, scale):
            y = (x * scale).flatten(0, 1)
            return y.sum(0), y.sum(-1)

        x, scale = randn(67, 2, 96, dtype=torch.bfloat16), randn(67, 2, 1)
        scale = scale.bfloat16()
        for arg in (x, scale):
            torch._dynamo.mark_dynamic(arg, 0)
        code = self.check(f, x, scale)
        self.assertEqual(self.words(code), (0, 1))

    def test_unaligned(self):
        x = randn(134, 96, dtype=torch.bfloat16)
        scale = randn(136, 1, dtype=torch.bfloat16)[1:135]
        code = self.check(scaled, x, scale)
        self.assertNotIn(WORD, code)

    @parametrize("stride", (3, 2))
    def test_strided(self, stride):
        # 133 rows on: the last element is in the last half of a word, or in the first
        x = randn(134, 96, dtype=torch.bfloat16)
        scale = randn(134, stride, dtype=torch.bfloat16)[:, :1]
        code = self.check(scaled, x, scale)
        self.assertEqual(self.words(code), (0, 1))

    def test_a_row_of_several(self):
        def f(x, scale):
            y = x * scale.repeat_interleave(7, 0)
            return y.sum(0), y.sum(-1)

        x, scale = randn(7 * 20, 96, dtype=torch.bfloat16), randn(20, 1)
        self.check(f, x, scale.bfloat16())

    def test_gathered(self):
        def f(x, table, index):
            return scaled(x, table[index][:, None])

        index = torch.randint(0, 64, (134,), device=GPU_TYPE)
        x, table = randn(134, 96, dtype=torch.bfloat16), randn(64)
        code = self.check(f, x, table.bfloat16(), index)
        self.assertNotIn(WORD, code)

    def test_rows_that_are_not_aligned(self):
        # they are waited for as well
        code = self.generate(rms_norm_backward, *half_args(1030, 97))
        self.assertNotIn(WORD, code)


# Rows that are kept beyond the registers


@instantiate_parametrized_tests
class KeepRowsRowSplitTest(TestCase):
    """Which rows are kept that do not fit in registers: of norms' backwards on an H200."""

    def split(self, columns, size, accumulators=2, streams=2, cc=90, programs=None, **cost):
        gpu = device_model(cc=cc)
        cost = RowCost(
            columns=columns,
            rnumel=16384,
            stream_bytes=streams * size,
            streams=streams,
            stores_rows=True,
            accumulators=accumulators,
            invariants=1,
            staged=columns * size % 4 == 0,
            copy_bytes=math.gcd(columns * size, 16),
            apart=columns % 2 == 1,
            **cost,
        )
        return row_split(cost, gpu, 20000, programs)

    def how(self, *args, **cost):
        split = self.split(*args, **cost)
        return split.reload, split.num_warps, split.num_stages

    @parametrize("columns,size", ((12289, 2), (16383, 2), (12289, 4), (16383, 4)))
    def test_elements_that_are_loaded_one_at_a_time(self, columns, size):
        # once is enough
        self.assertEqual(self.how(columns, size), (False, 8, 1))
        self.assertFalse(self.split(columns, size).hoist)
        with inductor_config.patch({DEBUG: {"keep_rows": False}}):
            self.assertTrue(self.split(columns, size).reload)

    # of float32, with the accumulators of the partials
    @parametrize(
        "columns,streams,accumulators,kept",
        (
            (13312, 2, 2, True),
            (15360, 2, 2, True),
            (16384, 2, 2, False),
            (16384, 2, 1, True),
            (12292, 4, 4, False),
            # aligned by 8 bytes
            (15362, 2, 2, True),
            (14002, 2, 6, False),
        ),
    )
    def test_float32(self, columns, streams, accumulators, kept):
        split = self.split(columns, 4, accumulators, streams)
        self.assertEqual(split.reload, not kept)
        if kept:  # from shared memory
            self.assertEqual((split.num_warps, split.num_stages), (8, 2))
        with inductor_config.patch({DEBUG: {"keep_rows": False}}):
            self.assertTrue(self.split(columns, 4, accumulators, streams).reload)

    # whose shared memory holds no two stages
    @parametrize("columns,kept", ((13312, True), (15360, False)))
    def test_float32_in_one_stage(self, columns, kept):
        split = self.split(columns, 4, cc=80)
        self.assertEqual((split.reload, split.num_stages), (not kept, 1))

    # autotuned programs share what there is
    @parametrize("programs,stages", ((1, 2), (2, 1)))
    def test_stages_of_several_programs(self, programs, stages):
        self.assertEqual(self.how(13312, 4, programs=programs), (False, 8, stages))

    @parametrize("columns", (12296, 12290, 16384))
    def test_half_types(self, columns):
        # by what is predicted of both
        self.assertTrue(self.split(columns, 2).reload)
        self.assertEqual(self.how(columns, 2, keeps_rows=True), (False, 8, 1))
        with inductor_config.patch({DEBUG: {"keep_rows": False}}):
            self.assertTrue(self.split(columns, 2, keeps_rows=True).reload)

    def test_warps_that_load_twice(self):
        # those of whole rows have a stage of what is loaded first
        self.assertEqual(self.how(14336, 2), (True, 8, 1))
        self.assertEqual(self.how(16384, 2), (True, 16, 2))

    def test_what_fits(self):
        for columns in (12288, 14336):
            once = self.split(columns, 2, 1)
            self.assertEqual(self.split(columns, 2, 1, keeps_rows=True), once)


def layer_norm_backward(x, weight, dy, rstd):
    dx, total = rms_norm_backward(x, weight, dy, rstd)
    return dx - dx.mean(-1, keepdim=True), total, dy.sum(0)


@nvidia_only
@instantiate_parametrized_tests
class KeepRowsKernelTest(MixOrderTestCase):
    """What is kept, by what is predicted, and that kernels compute what they did."""

    fuse = FUSE_ALL

    def predict(self, kept, again):
        """Registers that a kernel lacks which keeps a row, and one that loads it twice."""

        def pressure(ops, columns, launch, *args):
            return Pressure(255 + (again if launch.reload else kept), 255)

        return patch.object(mix_order_plan, "pressure", pressure)

    def loads(self, code):
        """How many times the loop over rows loads each row."""
        _, loop = self.kernel(code)
        return loop.count("tl.load(in_ptr0 ")

    # it must lack 13 registers less, unless none
    @parametrize(
        "kept,again,loads",
        ((0, 0, 1), (-20, -30, 1), (20, 40, 1), (20, 30, 2), (20, 0, 2), (0, 5, 1)),
    )
    def test_half_types(self, kept, again, loads):
        args = rms_norm_args(13, 16384, BF16)
        with self.predict(kept, again):
            code = self.generate(rms_norm_backward, *args)
        self.assertEqual(self.loads(code), loads)

    def test_not_predicted(self):
        args = rms_norm_args(13, 16384, BF16)
        code = self.generate(rms_norm_backward, *args, **{DEBUG: {"register_pressure": False}})
        self.assertEqual(self.loads(code), 2)

    # A program of 256 threads spills 1 KiB for each register that a thread lacks. It may spill
    # 0.9 times a row of what both sides read, of four bytes an element, which are two tensors
    # of 64 KiB here.
    @parametrize("dtype", (BF16, FP32))
    @parametrize("excess,fused", ((115, 1), (116, 0)))
    def test_elements_that_are_loaded_one_at_a_time(self, excess, fused, dtype):
        args = rms_norm_args(40, 16383, dtype)
        with self.predict(excess, 0):
            self.check_fused(rms_norm_backward, *args, fused=fused)

    # loaded twice, it may spill as much as if they were not loaded alone, of as many bytes
    @parametrize("excess,fused", ((153, 1), (154, 0)))
    def test_elements_that_are_loaded_one_at_a_time_twice(self, excess, fused):
        args = rms_norm_args(40, 16383, FP32)
        options = {DEBUG: {"keep_rows": False}}
        with self.predict(1000, excess):
            self.check_fused(rms_norm_backward, *args, fused=fused, **options)

    # 1.2 times where rows are loaded twice, of two bytes an element, by 512 threads
    @parametrize("excess,fused", ((38, 1), (39, 0)))
    def test_pair_that_loads_rows_twice(self, excess, fused):
        args = rms_norm_args(40, 16384, BF16)
        with self.predict(1000, excess):
            self.check_fused(rms_norm_backward, *args, fused=fused)

    # a sixteenth of the registers, where rows are loaded twice
    @parametrize(
        "kept,again,absorbed", ((1000, 15, 1), (1000, 17, 0), (17, 1000, 1), (40, 1000, 1))
    )
    def test_output_of_rows_that_are_loaded_twice(self, kept, again, absorbed):
        def f(x, weight, dy, rstd, scale):
            return *rms_norm_backward(x, weight, dy, rstd), x * scale

        args = rms_norm_args(13, 16384, BF16)
        with self.predict(kept, again):
            code = self.generate(f, *args, torch.ones_like(args[1]))
        self.assertEqual(code.count("@triton.jit"), 3 - absorbed)

    @parametrize("function,fused", ((torch.tanh, 0), (torch.erf, 1)))
    @parametrize("policy", (True, False))
    def test_slow_functions_of_rows_that_are_loaded_twice(self, policy, function, fused):
        def f(x, weight, dy, rstd):
            return rms_norm_backward(x, weight, function(dy), rstd)

        args = rms_norm_args(13, 16384)
        options = {DEBUG: {"register_pressure": policy}}
        self.check_fused(f, *args, fused=fused or not policy, **options)

    def test_slow_functions_of_a_row_s_value(self):
        def f(x, dy, rstd):
            s = (x * dy).sum(-1, keepdim=True)
            return torch.tanh(s), x * s * rstd + dy, (x * dy).sum(0), dy.sum(0)

        x, _, dy, rstd = rms_norm_args(13, 16384)
        self.check(f, x, dy, rstd)

    # float32 beside bytes, which are half types in the mean
    def test_types_that_are_loaded_one_at_a_time(self):
        def f(x, keep, dy, rstd):
            y = torch.where(keep, x, 0) * rstd
            return y * (y * dy).sum(-1, keepdim=True) + dy, (y * dy).sum(0), dy.sum(0)

        x, _, dy, rstd = rms_norm_args(13, 16383)
        code = self.generate(f, x, x > 0, dy, rstd, **{DEBUG: {"register_pressure": False}})
        self.assertEqual(self.loads(code), 1)

    @parametrize("columns,dtype", ((12289, BF16), (12301, FP32), (15362, FP32), (12296, BF16)))
    @parametrize("f", (rms_norm_backward, layer_norm_backward))
    def test_values(self, f, columns, dtype):
        self.check(f, *rms_norm_args(13, columns, dtype))


class WindowTest(MixOrderTestCase):
    """A buffer that an element reads at several places has as many loads."""

    fuse = FUSE_ALL

    def costs(self, f, *args):
        found = []

        class Recording(InductorChoices):
            def mix_order_row_split(self, cost, *args):
                found.append(cost)
                return InductorChoices.mix_order_row_split(cost, *args)

        with V.set_choices_handler(Recording()):
            self.generate(f, *args, split_reductions=True)
        return found[-1]

    @nvidia_only
    def test_loads(self):
        def window(x, g):
            padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
            y = g + padded[:-2] + padded[1:-1] + padded[2:]
            return y, y.sum(0)

        def one_place(x, g):
            y = g + x
            return y, y.sum(0)

        args = [torch.empty(65536, 256, device=GPU_TYPE) for _ in range(2)]
        cost = self.costs(window, *args)
        self.assertEqual((cost.streams, cost.stream_bytes, cost.memory_bytes), (4, 16, 8))
        cost = self.costs(one_place, *args)
        self.assertEqual((cost.streams, cost.stream_bytes, cost.memory_bytes), (2, 8, 8))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
