# Owner(s): ["module: inductor"]
"""Registers of a mix-order kernel: what is predicted, what it is compiled with."""

import contextlib
import dataclasses
import functools
import logging
import math
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
import torch._inductor.config as inductor_config
from torch._inductor import (
    metrics,
    mix_order_plan,
    mix_order_spills,
    mix_order_trace,
)
from torch._inductor.mix_order_plan import launch_configs
from torch._inductor.mix_order_pressure import (
    Demand,
    LaunchConfig,
    Layout,
    MANY_WARPS,
    MOST_OPERATIONS,
    Pressure,
    pressure,
)
from torch._inductor.mix_order_row_loop import RowSplit
from torch._inductor.mix_order_trace import Op, Trace, Width
from torch._inductor.runtime.registers import all_registers
from torch._inductor.runtime.triton_compat import Config, OutOfResources, PTXASError
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.scheduler import MixOrderReduction, Scheduler
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
        centered_and_sums,
        DEBUG,
        FUSE,
        FUSE_ALL,
        MAX_READS,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
        with_split,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        centered_and_sums,
        DEBUG,
        FUSE,
        FUSE_ALL,
        MAX_READS,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
        with_split,
    )


# A smaller configuration where one does not fit, or spills


class LoadedKernel:
    """A compiled kernel that is loaded if its configuration fits."""

    def __init__(self, config, fits, spills):
        self.config = config
        self.fits = fits
        self.spills = spills

    def make_launcher(self):
        if not self.fits(self.config.kwargs):
            raise OutOfResources(300 * 1024, 227 * 1024, "shared memory")
        return SimpleNamespace(
            config=self.config, n_spills=self.spills(self.config.kwargs)
        )


@instantiate_parametrized_tests
class SmallerConfigLaunchersTest(TestCase):
    """A kernel is compiled again, smaller, when it does not fit, or spills."""

    def launcher(
        self,
        fits=lambda kwargs: True,
        row_split=True,
        assembles=None,
        spills=lambda kwargs: 0,
        **kwargs,
    ):
        """The configuration that is launched, and all that were compiled, in order."""
        compiled = []
        meta = {"tma_min_block_sizes": kwargs.pop("least", {})}
        plan = {"launch_plan": {"num_programs": 132}}

        def compiles(config):
            compiled.append((config.kwargs["XBLOCK"], config.kwargs["NUM_STAGES"]))
            if len(compiled) > 1 and assembles and not assembles(config.kwargs):
                raise PTXASError("too much shared data")
            return LoadedKernel(config, fits, spills)

        autotuner = MagicMock(
            spec=CachingAutotuner,
            launchers=[],
            inductor_meta={**plan, **meta} if row_split else meta,
            triton_meta={"device": 0},
            device_props=SimpleNamespace(index=0, type="cuda"),
            fn=SimpleNamespace(fn=None),
            _precompile_config=compiles,
            _reload_kernel=lambda: SimpleNamespace(fn=SimpleNamespace(fn=compiles)),
        )
        for name in ("_make_launcher", "_make_launchers"):
            if method := getattr(CachingAutotuner, name, None):  # of some releases
                setattr(autotuner, name, functools.partial(method, autotuner))
        config = Config(kwargs, num_warps=8, num_stages=1)
        autotuner.compile_results = [compiles(config)]
        with patch(
            "torch._dynamo.device_interface.DeviceGuard",
            lambda *args: contextlib.nullcontext(),
        ):
            autotuner._make_launchers()
        (launched,) = autotuner.launchers
        self.assertEqual(launched.config.num_warps, 8)
        (result,) = autotuner.compile_results
        self.assertIs(result.config, launched.config)
        return launched.config.kwargs, compiled

    def smaller(self, fits, **kwargs):
        """The same, of a kernel that has a configuration that fits."""
        try:
            return self.launcher(fits, **kwargs)
        except (RuntimeError, PTXASError) as error:
            self.fail(f"none is launched: {error}")

    def test_fits(self):
        _, compiled = self.launcher(lambda kwargs: True, XBLOCK=2, NUM_STAGES=3)
        self.assertEqual(compiled, [(2, 3)])

    def test_a_stage_less(self):
        kwargs, compiled = self.smaller(
            lambda kwargs: kwargs["NUM_STAGES"] < 3, XBLOCK=2, NUM_STAGES=4
        )
        self.assertEqual(compiled, [(2, 4), (2, 3), (2, 2)])
        self.assertEqual(kwargs, {"XBLOCK": 2, "NUM_STAGES": 2})

    def test_fewer_rows(self):
        _, compiled = self.smaller(
            lambda kwargs: kwargs["XBLOCK"] == 1, XBLOCK=4, NUM_STAGES=2
        )
        self.assertEqual(compiled, [(4, 2), (4, 1), (2, 1), (1, 1)])

    def test_one_that_is_not_assembled(self):
        kwargs, _ = self.smaller(
            lambda kwargs: kwargs["NUM_STAGES"] < 4,
            assembles=lambda kwargs: kwargs["NUM_STAGES"] != 3,
            XBLOCK=2,
            NUM_STAGES=4,
        )
        self.assertEqual(kwargs, {"XBLOCK": 2, "NUM_STAGES": 2})

    def test_none_that_is_assembled(self):
        with self.assertRaisesRegex(RuntimeError, "No valid triton configs. PTXASError"):
            self.launcher(
                lambda kwargs: False,
                assembles=lambda kwargs: False,
                XBLOCK=2,
                NUM_STAGES=2,
            )

    def test_rows_that_a_tensor_descriptor_needs(self):
        _, compiled = self.smaller(
            lambda kwargs: kwargs["NUM_STAGES"] == 1, XBLOCK=4, NUM_STAGES=2
        )
        self.assertEqual(compiled, [(4, 2), (4, 1)])
        with self.assertRaisesRegex(RuntimeError, "shared memory"):
            self.launcher(
                lambda kwargs: kwargs["XBLOCK"] < 4,
                least={"XBLOCK": 4},
                XBLOCK=4,
                NUM_STAGES=2,
            )

    @parametrize("spilled", (0, 1, 4, 7))
    def test_fewer_rows_that_spill_less(self, spilled):
        kwargs, compiled = self.launcher(
            spills=lambda kwargs: spilled if kwargs["XBLOCK"] == 2 else 4,
            XBLOCK=4,
            NUM_STAGES=3,
        )
        launched = 2 if spilled < 4 else 4
        self.assertEqual(kwargs, {"XBLOCK": launched, "NUM_STAGES": 3})
        self.assertEqual(compiled, [(4, 3), (2, 3)])

    @parametrize("what", ("a_row", "no_spills", "another_kernel", "a_descriptor"))
    def test_no_fewer_rows(self, what):
        rows = 1 if what == "a_row" else 4
        _, compiled = self.launcher(
            spills=lambda kwargs: what != "no_spills",
            row_split=what != "another_kernel",
            least={"XBLOCK": 4} if what == "a_descriptor" else {},
            XBLOCK=rows,
            NUM_STAGES=3,
        )
        self.assertEqual(compiled, [(rows, 3)])

    def test_fewer_rows_that_are_not_assembled(self):
        kwargs, _ = self.launcher(
            spills=lambda kwargs: 4,
            assembles=lambda kwargs: False,
            XBLOCK=4,
            NUM_STAGES=3,
        )
        self.assertEqual(kwargs, {"XBLOCK": 4, "NUM_STAGES": 3})

    def test_nothing_fits(self):
        with self.assertRaisesRegex(RuntimeError, "shared memory"):
            self.launcher(lambda kwargs: False, XBLOCK=2, NUM_STAGES=2)

    def test_other_kernels(self):
        with self.assertRaisesRegex(RuntimeError, "shared memory"):
            self.launcher(lambda kwargs: False, False, XBLOCK=2, NUM_STAGES=1)


# A model that takes shared memory to be without end.
StagesWithoutEnd = with_split(xblock=2, num_stages=16)


class SmallerConfigKernelTest(MixOrderTestCase):
    def test_too_many_stages(self):
        with V.set_choices_handler(StagesWithoutEnd()):
            self.check(rms_norm_backward, *rms_norm_args(1030, 4096))


# The register model


FUSE_ANY_SPLIT = {
    **FUSE,
    "triton.mix_order_reduction_split_size": None,
    "triton.mix_order_reduction_autotune_split_size": False,
    MAX_READS: None,
}
EIGHT_WARPS = LaunchConfig(xblock=1, num_warps=8)
RELOAD = LaunchConfig(xblock=1, num_warps=8, reload=True)


def tile_load(bits=16):
    return Op("load", (), Width.TILE, 32, bits)


def norm_backward(partials=1, tiles=0, rows=0):
    """dy * x summed over a row, dx of it, and ``partials`` sums over the rows."""
    ops = [tile_load(), tile_load()]
    ops += [Op("mul", (0, 1), Width.TILE, 32), Op("row_reduction", (2,), Width.ROWS, 32)]
    ops += [Op("mul", (1, 3), Width.TILE, 32), Op("store", (4,), Width.TILE, 0, 16)]
    ops += [Op("partial", (2,), Width.COLUMNS, 32) for _ in range(partials)]
    for load in (tile_load(), Op("load", (), Width.ROWS, 32, 32)):
        for _ in range(tiles if load.width == Width.TILE else rows):
            ops += [load, Op("store", (len(ops),), load.width, 0, 16)]
    return ops


@instantiate_parametrized_tests
class PressureModelTest(TestCase):
    """The pure function: from operations, columns and configuration to registers."""

    @parametrize(
        "columns, launch, bits, expect",
        (
            # (tile, column vector, row's value), as Triton's blocked layouts have them
            (4096, EIGHT_WARPS, 16, (16, 16, 1)),
            (4096, EIGHT_WARPS, 32, (16, 16, 1)),
            # a vector of bytes is 16 long: 128 threads reach along a row of 2048
            (1280, LaunchConfig(2, 8), 8, (16, 16, 1)),
            (256, LaunchConfig(4, 1), 16, (32, 8, 4)),
            # nothing of the last of four vectors of a thread is below 5120
            (5120, EIGHT_WARPS, 16, (24, 24, 1)),
            (128, LaunchConfig(4, 1), 16, (16, 8, 2)),
            # the last of two vectors: two elements of a thread are below 2050
            (2050, EIGHT_WARPS, 16, (10, 10, 1)),
            # rows begin anywhere: a tile of one is laid out as any, of several it is not
            (5003, EIGHT_WARPS, 16, (24, 24, 1)),
            (1001, LaunchConfig(2, 8), 16, (8, 4, 2)),
        ),
    )
    def test_layout(self, columns, launch, bits, expect):
        found = Layout.of([tile_load(bits)], columns, launch).elements
        widths = (Width.TILE, Width.COLUMNS, Width.ROWS)
        self.assertEqual(tuple(found[width] for width in widths), expect)

    def test_layout_of_several_types(self):
        column = Op("load", (), Width.COLUMNS, 32, 16)
        wide = Op("store", (0,), Width.TILE, 0, 32)
        for ops, expect in (
            ([tile_load()], 8),
            # all have as many columns as the widest in 16 bytes, also of what is stored
            ([tile_load(), wide], 4),
            ([tile_load(32), wide], 4),
            # what every row reads is laid out as they are
            ([tile_load(), column], 8),
            ([tile_load(32), column], 4),
        ):
            for launch in (EIGHT_WARPS, LaunchConfig(xblock=4, num_warps=8)):
                found = Layout.of(ops, 4096, launch)
                self.assertEqual(found.vector, expect, msg=f"{ops} {launch}")

    @parametrize(
        "columns, launch, bits, expect",
        (
            # of float32 a thread stores four columns at once, as it has them
            (5120, EIGHT_WARPS, 32, 20),
            # of eight columns the padding is accumulated as well
            (5120, EIGHT_WARPS, 16, 32),
            (8192, EIGHT_WARPS, 16, 32),
            # and where rows begin anywhere
            (5001, EIGHT_WARPS, 32, 32),
            (1001, LaunchConfig(2, 8), 16, 4),
        ),
    )
    def test_accumulators_of_another_layout_are_padded(self, columns, launch, bits, expect):
        ops = [tile_load(bits), Op("partial", (0,), Width.COLUMNS, 32)]
        self.assertEqual(Demand.of(ops, columns, launch).accumulators, expect)

    def test_what_is_live_at_a_reduction(self):
        # x and the residual are needed after it, and held as they were loaded, as is
        # the product in float32; dy is done with
        ops = [tile_load(), tile_load(), tile_load()]
        ops += [Op("mul", (0, 1), Width.TILE, 32)]
        ops += [Op("row_reduction", (3,), Width.ROWS, 32)]
        ops += [Op("mul", (1, 4), Width.TILE, 32), Op("add", (5, 2), Width.TILE, 32)]
        ops += [Op("store", (6,), Width.TILE, 0, 16)]
        demand = Demand.of(ops, 2048, EIGHT_WARPS)
        self.assertEqual(demand.tiles, 8 / 2 + 8 / 2)
        self.assertEqual(demand.accumulators, 0)
        ops += [Op("add", (6, 3), Width.TILE, 32), Op("store", (8,), Width.TILE, 0, 16)]
        demand = Demand.of(ops, 2048, EIGHT_WARPS)
        self.assertEqual(demand.tiles, 8 / 2 + 8 / 2 + 8)

    def test_partials_do_not_wait_for_a_reduction(self):
        ops = [tile_load(), tile_load()]
        ops += [Op("row_reduction", (0,), Width.ROWS, 32)]
        ops += [Op("mul", (0, 1), Width.TILE, 32), Op("partial", (3,), Width.COLUMNS, 32)]
        self.assertEqual(Demand.of(ops, 2048, EIGHT_WARPS).tiles, 0)
        # unless they need it
        ops += [Op("mul", (1, 2), Width.TILE, 32), Op("partial", (5,), Width.COLUMNS, 32)]
        self.assertEqual(Demand.of(ops, 2048, EIGHT_WARPS).tiles, 8 / 2)

    def test_no_tile_is_live_where_rows_are_loaded_again(self):
        ops = norm_backward()
        once, again = (Demand.of(ops, 8192, how) for how in (EIGHT_WARPS, RELOAD))
        self.assertEqual((once.tiles, again.tiles), (32 / 2, 0))
        # dy and x in 16 bits are in flight, or what is not held
        self.assertEqual((once.loads, again.loads), (32 / 2, 32))

    def test_what_is_staged_is_not_in_flight(self):
        ops = norm_backward()
        staged = dataclasses.replace(RELOAD, num_stages=2)
        self.assertEqual(Demand.of(ops, 8192, staged).loads, 0)
        # but for single elements of 16 bits, which nothing copies asynchronously
        self.assertEqual(Demand.of(ops, 8191, staged).loads, 2 * 32)
        self.assertEqual(Demand.of(ops, 8190, staged).loads, 0)

    def test_a_pass_loads_what_its_reductions_need(self):
        # the second reduction needs the first, so that its three tiles come later
        ops = [tile_load(), tile_load(), tile_load()]
        ops += [Op("row_reduction", (0,), Width.ROWS, 32)]
        ops += [Op("sub", (0, 3), Width.TILE, 32), Op("mul", (4, 1), Width.TILE, 32)]
        ops += [Op("mul", (5, 2), Width.TILE, 32)]
        ops += [Op("row_reduction", (6,), Width.ROWS, 32)]
        self.assertEqual(Demand.of(ops, 8192, RELOAD).loads, 3 * 32 / 2)
        self.assertEqual(Demand.of(ops[:4], 8192, RELOAD).loads, 32 / 2)

    def test_what_waits_for_no_reduction_is_in_flight(self):
        # the second tensor is summed over the rows as it comes, the first is held
        ops = [tile_load(), tile_load(), Op("row_reduction", (0,), Width.ROWS, 32)]
        ops += [Op("partial", (1,), Width.COLUMNS, 32)]
        ops += [Op("mul", (0, 2), Width.TILE, 32), Op("store", (4,), Width.TILE, 0, 16)]
        for launch, expect in (
            (EIGHT_WARPS, (32 / 2, 32 / 2)),
            (dataclasses.replace(EIGHT_WARPS, num_stages=3), (32 / 2, 0)),
            # the last pass loads both
            (RELOAD, (0, 2 * 32 / 2)),
        ):
            demand = Demand.of(ops, 8192, launch)
            self.assertEqual((demand.tiles, demand.loads), expect, msg=f"{launch}")

    def test_what_is_stored(self):
        ops = norm_backward()
        for launch in (EIGHT_WARPS, RELOAD):
            self.assertEqual(Demand.of(ops, 8192, launch).stored, 32 / 2)
            # an element of 16 bits at an odd address is stored alone
            self.assertEqual(Demand.of(ops, 8191, launch).stored, 32)
            wide = [*ops, Op("store", (4,), Width.TILE, 0, 32)]
            self.assertEqual(Demand.of(wide, 8192, launch).stored, 32 / 2 + 32)

    def test_what_is_staged_is_held_around_branches(self):
        ops = norm_backward()
        ops += [Op("tanh", (2,), Width.TILE, 32)]
        staged = dataclasses.replace(RELOAD, num_stages=2)
        self.assertEqual(Demand.of(ops, 8192, RELOAD).branches, 0)
        self.assertEqual(Demand.of(ops, 8192, staged).branches, 2 * 32 / 2)
        once = dataclasses.replace(staged, reload=False)
        self.assertEqual(Demand.of(ops, 8192, once).branches, 0)

    def test_unaligned_rows(self):
        # two elements of 16 bits share a register where they are loaded at once; four of
        # 32 bits are stored at once, or each partial has addresses and masks of its own
        for partials in (1, 3):
            for columns, registers, unaligned in (
                (8192, 32, 0),
                (8188, 32, 0),
                (8190, 32, partials),
                (8191, 64, partials),
            ):
                demand = Demand.of(norm_backward(partials), columns, RELOAD)
                self.assertEqual((demand.loads, demand.unaligned), (registers, unaligned))

    def test_vectors_beside_rows_that_are_loaded_again(self):
        ops = norm_backward()
        ops += [Op("load", (), Width.COLUMNS, 32, 16) for _ in range(3)]
        loop = dataclasses.replace(RELOAD, hoist=False)
        for launch, expect in ((EIGHT_WARPS, 0), (RELOAD, 3), (loop, 3)):
            self.assertEqual(Demand.of(ops, 8192, launch).vectors, expect)

    def test_what_was_loaded_is_held_for_accumulators_of_whole_tiles(self):
        ops = norm_backward()
        launch = LaunchConfig(xblock=4, num_warps=4)
        self.assertEqual(Demand.of(ops, 512, launch).held, 0)
        launch = dataclasses.replace(launch, accumulate_tiles=True)
        # 16 elements of dy and of x, in pairs
        self.assertEqual(Demand.of(ops, 512, launch).held, 2 * 16 / 2)

    def test_operations_on_tiles(self):
        # two products; neither what is loaded, stored or reduced, nor what a row computes
        ops = norm_backward()
        self.assertEqual(Demand.of(ops, 8192, EIGHT_WARPS).operations, 2 * 32 * 8)
        self.assertEqual(Demand.of(ops, 6144, EIGHT_WARPS).operations, 2 * 24 * 8)
        # as many of as many elements, by threads with half of the registers
        sixteen = dataclasses.replace(EIGHT_WARPS, num_warps=16)
        self.assertEqual(Demand.of(ops, 8192, sixteen).operations, 2 * 16 * 16)
        ops += [Op("constant", (), Width.TILE, 32), Op("mul", (3, 3), Width.ROWS, 32)]
        self.assertEqual(Demand.of(ops, 8192, EIGHT_WARPS).operations, 2 * 32 * 8)
        ops += [Op("add", (2, 4), Width.TILE, 32)]
        self.assertEqual(Demand.of(ops, 8192, EIGHT_WARPS).operations, 3 * 32 * 8)
        # and what is made of vectors, where each row loads them
        loop = dataclasses.replace(EIGHT_WARPS, hoist=False)
        self.assertEqual(Demand.of(ops, 8192, loop).operations, 4 * 32 * 8)

    @parametrize("num_warps", (8, 16))
    def test_a_chain_of_operations(self, num_warps):
        # by many warps, is one element's after another's
        launch = LaunchConfig(xblock=1, num_warps=num_warps)
        most = MOST_OPERATIONS if num_warps > MANY_WARPS else math.inf

        def operations(ops):
            return Demand.of(ops, 8192, launch).operations / 8192 * 32

        ops = norm_backward()
        known = operations(ops)
        for longer in range(1, 2 * MOST_OPERATIONS):
            ops += [Op("mul", (len(ops) - 1,) * 2, Width.TILE, 32)]
            self.assertEqual(operations(ops), min(known + longer, most))

    def test_random_numbers_take_registers(self):
        ops = [*norm_backward(), Op("rand", (), Width.TILE, 32)]
        for launch in (EIGHT_WARPS, dataclasses.replace(RELOAD, num_stages=2)):
            # unlike around branches, nothing is held
            self.assertEqual(Demand.of(ops, 8192, launch).branches, 32)

    def test_hoisted(self):
        ops = [*norm_backward(), Op("load", (), Width.COLUMNS, 32, 16)]
        loop = dataclasses.replace(EIGHT_WARPS, hoist=False)
        found = [Demand.of(ops, 8192, how).hoisted for how in (EIGHT_WARPS, loop)]
        self.assertEqual(found, [32, 0])
        # a thread has two rows of a tile of four
        rows = LaunchConfig(xblock=4, num_warps=4)
        self.assertEqual(Demand.of(ops, 512, rows).hoisted, 2 * 8)

    def test_what_is_not_hoisted_is_loaded_as_the_row_is(self):
        ops = [tile_load(), Op("load", (), Width.COLUMNS, 32, 16)]
        ops += [Op("mul", (0, 1), Width.TILE, 32)]
        ops += [Op("row_reduction", (2,), Width.ROWS, 32)]
        ops += [Op("mul", (1, 3), Width.TILE, 32), Op("store", (4,), Width.TILE, 0, 16)]
        for launch, hoisted, loop in (
            (EIGHT_WARPS, (32, 0, 32 / 2), (0, 32 / 2, 32 / 2)),
            (RELOAD, (32, 0, 32 / 2), (0, 0, 32)),
        ):
            for hoist, expect in ((True, hoisted), (False, loop)):
                launch = dataclasses.replace(launch, hoist=hoist)
                demand = Demand.of(ops, 8192, launch)
                found = (demand.hoisted, demand.tiles, demand.loads)
                self.assertEqual(found, expect, msg=f"{launch}")

    def test_what_takes_registers_besides(self):
        ops = norm_backward()
        demand = Demand.of(ops, 8192, EIGHT_WARPS)
        found = (demand.computed, demand.branches, demand.pointers)
        self.assertEqual(found, (32, 0, 3))
        ops += [Op("rand", (), Width.TILE, 32), Op("rand", (), Width.ROWS, 32)]
        ops += [Op("load", (), Width.SCALAR, 32, 32), Op("load", (), Width.ROWS, 32, 32)]
        demand = Demand.of(ops, 6144, EIGHT_WARPS)
        found = (demand.computed, demand.branches, demand.pointers)
        self.assertEqual(found, (24, 24, 4))

    def test_each_partial_lives_throughout(self):
        one, four = (
            Demand.of(norm_backward(partials), 8192, EIGHT_WARPS) for partials in (1, 4)
        )
        self.assertEqual(one.accumulators, 32)
        self.assertEqual(four.accumulators, 128)

    def test_a_row_statistic_is_not_a_tile(self):
        plain, tiles, rows = (
            pressure(ops, 8192, EIGHT_WARPS).need
            for ops in (norm_backward(), norm_backward(tiles=8), norm_backward(rows=8))
        )
        self.assertGreater(tiles - plain, 3 * (rows - plain))
        # each is a pointer or two
        self.assertGreater(rows, plain)

    def test_more_partials_spill_in_the_end(self):
        found = [
            pressure(norm_backward(partials), 8192, EIGHT_WARPS)
            for partials in range(1, 16)
        ]
        self.assertFalse(found[0].spills)
        self.assertEqual(found[0].excess, 0)
        needs = [each.need for each in found]
        self.assertEqual(needs, sorted(needs))
        self.assertEqual(found[-1].registers_per_thread, 255)
        self.assertEqual(found[-1].excess, needs[-1] - 255)
        # a little is no reason not to fuse
        for each in found:
            self.assertGreaterEqual(each.spills, each.too_high)

    def test_limit_follows_block_and_gpu(self):
        ops = norm_backward()
        self.assertEqual(pressure(ops, 8192, EIGHT_WARPS).limit, 255)
        self.assertEqual(pressure(ops, 8192, LaunchConfig(1, 16)).limit, 128)
        self.assertEqual(pressure(ops, 8192, LaunchConfig(1, 32)).limit, 64)
        self.assertEqual(pressure(ops, 8192, LaunchConfig(1, 16), 32768).limit, 64)


class TraceTest(TestCase):
    """The operations of the nodes of a kernel, from their loop bodies."""

    def trace(self, f, *args, **options):
        found = []
        fuse_nodes = Scheduler.fuse_nodes

        def fusing(scheduler, nodes):
            reductions = [node for node in nodes if node.is_reduction()]
            (rows,) = (
                node for node in reductions if MixOrderReduction.is_contiguous_node(node)
            )
            contiguous = [
                node
                for node in nodes
                if not node.is_reduction() or node is rows
                if MixOrderReduction.is_contiguous_node(node)
                if node.group[1][0] != args[0].shape[1]
            ]
            other = [node for node in reductions if node is not rows][:1]
            found.append(
                Trace.of(MixOrderReduction.get_numel_rnumel(rows)[0], contiguous, other)
            )
            return fuse_nodes(scheduler, nodes)

        with (
            inductor_config.patch({**FUSE_ANY_SPLIT, **options}),
            patch.object(Scheduler, "fuse_nodes", fusing),
        ):
            torch.compile(f)(*args)
        (ops,) = found
        return ops

    @staticmethod
    def count(ops, name, width):
        return sum(op.name == name and op.width == width for op in ops)

    def test_symbolic_rows_that_wrap_around(self):
        """``Mod`` by the number of rows, at the first of them."""
        x = torch.randn(1030, 96, device=GPU_TYPE)
        torch._dynamo.mark_dynamic(x, 0)

        def f(x):
            y = x.roll(4, 0)
            return y.sum(1), y.sum(0)

        ops = self.trace(f, x, split_reductions=False)
        self.assertEqual(self.count(ops, "load", Width.TILE), 1)

    def check(self, **options):
        def f(x, dy, weight, rstd):
            xhat = x * rstd
            wdy = weight * dy
            dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
            return dx, (dy * xhat).sum(0)

        x, dy = (torch.randn(1030, 96, device=GPU_TYPE) for _ in range(2))
        weight = torch.randn(96, device=GPU_TYPE)
        rstd = torch.rand(1030, 1, device=GPU_TYPE)
        return self.trace(f, x, dy, weight, rstd, **options)

    def test_what_the_kernel_alone_uses_is_not_stored(self):
        def f(x, dy):
            # long enough that it is not computed for each of its users
            y = x
            for _ in range(12):
                y = (y * x).relu() + dy.exp()
            return (y.sum(-1, keepdim=True) * y).half(), y.sum(0)

        x, dy = (torch.randn(1030, 96, device=GPU_TYPE) for _ in range(2))
        stored = [
            op.memory_bits
            for op in self.trace(f, x, dy)
            if op.name == "store" and op.width == Width.TILE
        ]
        self.assertEqual(stored, [16])

    def test_norm_backward(self):
        for split in (False, True):
            torch._dynamo.reset()
            ops = self.check(split_reductions=split)
            # each is loaded once, whatever loops read it
            self.assertEqual(self.count(ops, "load", Width.TILE), 2)
            self.assertEqual(self.count(ops, "load", Width.COLUMNS), 1)
            self.assertEqual(self.count(ops, "load", Width.ROWS), 1)
            self.assertEqual(self.count(ops, "row_reduction", Width.ROWS), 1)
            self.assertEqual(self.count(ops, "partial", Width.COLUMNS), 1)
            self.assertEqual(self.count(ops, "store", Width.TILE), 1)
            # x * rstd is computed once for both sides
            products = [op for op in ops if op.name == "mul" and 0 in op.inputs]
            self.assertEqual(len(products), len(set(products)))


@instantiate_parametrized_tests
class PressurePolicyTest(TestCase):
    """What the prediction refuses, and what it lets pass."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def run_with(self, f, *args, **options):
        expect = f(*args)
        with inductor_config.patch({**FUSE_ANY_SPLIT, **options}):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        for act, ref in zip(actual, expect):
            scale = ref.abs().max().item()
            self.assertEqual(act, ref, atol=1e-3 * scale, rtol=1e-3)
        return code.count("tl.store(ws_ptr")

    @staticmethod
    def beside(x, *tensors):
        """Two sums, and outputs that read x and a tensor each."""
        return x.sum(1), x.sum(0), *(x * t for t in tensors)

    # None is no limit only where registers are predicted
    @parametrize("policy", (True, False))
    @parametrize("max_reads", (None, 0))
    def test_absorbed(self, policy, max_reads):
        args = [torch.randn(40, 8192, device=GPU_TYPE) for _ in range(18)]
        options = {DEBUG: {"register_pressure": policy}, MAX_READS: max_reads}
        self.assertEqual(self.run_with(self.beside, *args, **options), 1)
        refused = policy or max_reads is None
        self.assertEqual(metrics.generated_kernel_count, 3 if refused else 2)
        self.assertEqual(metrics.rejected_mix_order_reduction_fusion > 0, refused)

    @parametrize("policy", (True, False))
    def test_pair(self, policy):
        # the sums over rows are one node when the row's sum is asked
        def f(x, *tensors):
            return x.sum(1), x.sum(0), *((x * t).sum(0) for t in tensors)

        args = [torch.randn(40, 8192, device=GPU_TYPE) for _ in range(14)]
        options = {DEBUG: {"register_pressure": policy}, MAX_READS: 0}
        partials = self.run_with(f, *args, **options)
        self.assertEqual(partials, 0 if policy else 14)

    # A program of 256 threads spills 1 KiB for each register that a thread lacks. It may
    # spill twice a row of what both sides read, here 32 KiB for each tensor.
    @parametrize("shared,excess,fused", ((1, 64, 1), (1, 65, 0), (2, 65, 1), (2, 129, 0)))
    def test_pair_by_what_it_saves(self, shared, excess, fused):
        def one(x, t):
            return x.sum(0), (x * t).sum(1)

        def both(x, t):
            return (x * t).sum(0), (x * t).sum(1)

        args = [torch.randn(40, 8192, device=GPU_TYPE) for _ in range(2)]
        lacking = Pressure(255 + excess, 255)
        with patch.object(mix_order_plan, "pressure", lambda *args: lacking):
            partials = self.run_with(one if shared == 1 else both, *args)
        self.assertEqual(partials, fused)

    # The runtime has half of the rows where a kernel spills: it is refused where those do.
    @parametrize("absorbs", (True, False))
    @parametrize("fewer", (True, False))
    def test_fewer_rows_need_less(self, fewer, absorbs):
        def pressure(ops, columns, launch, registers):
            more = sum(op.name == "store" for op in ops) > 1 or not absorbs
            lacks = more and launch.xblock > fewer
            return Pressure(2000 if lacks else 100, 255)

        args = [torch.randn(64, 1024, device=GPU_TYPE) for _ in range(2)]
        with patch.object(mix_order_plan, "pressure", pressure):
            partials = self.run_with(self.beside, *args)
        self.assertEqual(partials, fewer or absorbs)
        refused = metrics.rejected_mix_order_reduction_fusion > 0
        self.assertEqual(refused, absorbs and not fewer)

    # Two programs of one row share a multiprocessor. Where they spill too much beside each
    # other one program of two rows has it.
    @parametrize("lacks, xblock", ((0, 1), (20, 1), (80, 2)))
    def test_two_programs_or_two_rows(self, lacks, xblock):
        of, splits = mix_order_plan.MixOrderPlan.of.__func__, []

        def watched(cls, *args, **options):
            plan = of(cls, *args, **options)
            splits.append(plan.split)
            self.assertEqual(plan.cost.pairs_rows, plan.split.xblock == 2)
            return plan

        def pressure(ops, columns, launch, registers):
            limit = all_registers(registers, launch.num_warps, launch.sharing)
            return Pressure(limit + lacks * (launch.sharing > 1), limit)

        args = [torch.randn(40, 4471, device=GPU_TYPE) for _ in range(2)]
        with (
            patch.object(mix_order_plan.MixOrderPlan, "of", classmethod(watched)),
            patch.object(mix_order_plan, "pressure", pressure),
        ):
            self.run_with(lambda x, t: ((x * t).sum(0), x * (x * t).sum(1, keepdim=True)), *args)
        self.assertEqual((splits[-1].xblock, splits[-1].programs_per_sm), (xblock, 3 - xblock))
        self.assertEqual(metrics.rejected_mix_order_reduction_fusion, 0)

    def test_integer_index(self):
        # the whole of a sum in two layers is listed by what a lowering gave it
        def f(x, column):
            y = x.select_scatter(column, 1, 2)
            return y.sum(0), (y * x).sum(1)

        args = torch.randn(1030, 96, device=GPU_TYPE), torch.randn(1030, device=GPU_TYPE)
        self.assertEqual(self.run_with(f, *args), 1)

    def test_row_statistics_are_cheap(self):
        # 20 of them and as many scalars are 40 reads, and no pressure
        def f(x, *small):
            y = x
            for s in small:
                y = y * s
            return x.sum(0), y * x.sum(1, keepdim=True)

        small = [torch.rand(40, 1, device=GPU_TYPE) + 0.5 for _ in range(20)]
        small += [torch.rand((), device=GPU_TYPE) + 0.5 for _ in range(20)]
        x = torch.randn(40, 4096, device=GPU_TYPE)
        self.assertEqual(self.run_with(f, x, *small), 1)
        self.assertEqual(metrics.generated_kernel_count, 2)
        self.assertEqual(metrics.rejected_mix_order_reduction_fusion, 0)

    def test_a_plan_is_made_once(self):
        of, same = mix_order_plan.MixOrderPlan.of.__func__, []

        def watched(cls, *args, **options):
            plan = of(cls, *args, **options)
            same.append(of(cls, *args, **options) is plan)
            return plan

        args = [torch.randn(40, 96, device=GPU_TYPE) for _ in range(2)]
        with patch.object(mix_order_plan.MixOrderPlan, "of", classmethod(watched)):
            self.run_with(lambda x, t: (x.sum(0), x.sum(1, keepdim=True) * t), *args)
        self.assertGreater(len(same), 1)  # legality and codegen
        self.assertTrue(all(same))

    def test_a_node_is_traced_once(self):
        """For all kernels that it might be of, on the same side."""
        of, node = mix_order_trace.Trace.of.__func__, mix_order_trace._Recorder._node
        kernels, traced = [], []

        def kernel(cls, *args):
            kernels.append(args)
            return of(cls, *args)

        def watched(self, snode, side):
            traced.append((snode._body, side))
            return node(self, snode, side)

        def f(x, dy, weight):
            wdy = weight * dy
            mean = (wdy * x).mean(1, keepdim=True)
            return wdy - x * mean, (dy * x).sum(0), dy.sum(0)

        args = [torch.randn(n, 96, device=GPU_TYPE) for n in (40, 40, 1)]
        with (
            patch.object(mix_order_trace.Trace, "of", classmethod(kernel)),
            patch.object(mix_order_trace._Recorder, "_node", watched),
        ):
            self.run_with(f, *args)
        nodes = sum(len(side) for _, *sides in kernels for side in sides)
        self.assertGreater(nodes, len(traced))
        self.assertEqual(len({(id(body), side) for body, side in traced}), len(traced))

    def test_a_plan_says_why_and_how_long(self):
        of, plans = mix_order_plan.MixOrderPlan.of.__func__, {}

        def watched(cls, *args, **options):
            plan = of(cls, *args, **options)
            plans[columns] = plan
            return plan

        fields = {field.name for field in dataclasses.fields(RowSplit)}
        for columns in (96, 1001, 4096, 9000):
            args = [torch.randn(40, columns, device=GPU_TYPE) for _ in range(2)]
            with patch.object(mix_order_plan.MixOrderPlan, "of", classmethod(watched)):
                self.run_with(lambda x, t: (x.sum(0), x.sum(1, keepdim=True) * t), *args)
            split, why = plans[columns].split, plans[columns].split.why
            self.assertLessEqual(why.keys(), fields)
            self.assertIn("num_stages", why)
            self.assertIn("reload" if split.reload else "num_stages", why)
            self.assertEqual("prefetch" in why, split.prefetch)
            for name, reason in why.items():
                self.assertIn(f"{name}: {reason}", str(plans[columns]))
        self.assertLess(0, plans[96].us)
        self.assertLess(plans[96].us, plans[9000].us)

    def test_epilogue_counts_before_it_is_absorbed(self):
        # without the output that is made of the row's sum the rows would be read twice
        asked, plans = [], []
        why_spills = mix_order_spills._why_spills

        def watched(plan, contiguous, other, absorbs):
            asked.append(sum(not node.is_reduction() for node in contiguous))
            plans.append((plan, absorbs))
            return why_spills(plan, contiguous, other, absorbs)

        args = [torch.randn(40, 96, device=GPU_TYPE) for _ in range(2)]
        with patch.object(mix_order_spills, "_why_spills", watched):
            self.run_with(lambda x, t: (x.sum(0), x.sum(1, keepdim=True) * t), *args)
        self.assertEqual(asked[0], 1)
        # and each plan is asked of once
        self.assertEqual(len({(id(plan), absorbs) for plan, absorbs in plans}), len(plans))

    def test_dynamic_rows(self):
        args = [torch.randn(40, 8192, device=GPU_TYPE) for _ in range(18)]
        for arg in args:
            torch._dynamo.mark_dynamic(arg, 0)
        compiled = torch.compile(self.beside)
        with inductor_config.patch(FUSE_ANY_SPLIT):
            compiled(*args)
            self.assertGreater(metrics.rejected_mix_order_reduction_fusion, 0)
            more = [torch.randn(50, 8192, device=GPU_TYPE) for _ in range(18)]
            with torch._dynamo.config.patch(error_on_recompile=True):
                actual = compiled(*more)
        for act, ref in zip(actual, self.beside(*more)):
            self.assertEqual(act, ref, atol=1e-2, rtol=1e-3)

    def test_log(self):
        args = [torch.randn(40, 8192, device=GPU_TYPE) for _ in range(18)]
        log = logging.getLogger("torch._inductor.scheduler.__fusion")
        with self.assertLogs(log, logging.DEBUG) as logged:
            self.run_with(self.beside, *args)
        said = "\n".join(logged.output)
        self.assertRegex(said, r"needs \d+ registers a thread of 255")


# All registers of a multiprocessor


# or all kernels are compiled with as many as there are
NOT_SHARED = {**FUSE_ALL, DEBUG: {"share_registers": False}}


@instantiate_parametrized_tests
class AllRegistersOptionsTest(TestCase):
    """What a kernel is compiled with."""

    def maxnreg(self, num_warps, plan=None, registers=65536, device="cuda"):
        meta = {"num_warps": num_warps, "num_stages": 1, "debug": False}
        autotuner = MagicMock(
            spec=CachingAutotuner,
            inductor_meta={} if plan is None else {"launch_plan": plan},
            device_props=SimpleNamespace(
                type=device, regs_per_multiprocessor=registers
            ),
        )
        options = CachingAutotuner._create_compile_options(
            autotuner, Config({}, num_warps=num_warps), meta
        )
        return options.get("maxnreg")

    @parametrize("num_warps,registers", ((4, 255), (8, 255), (16, 128), (32, 64)))
    def test_all_registers(self, num_warps, registers):
        plan = {"sharing_programs": 1}
        self.assertEqual(self.maxnreg(num_warps, plan), registers)

    def test_fewer_in_a_multiprocessor(self):
        plan = {"sharing_programs": 1}
        self.assertEqual(self.maxnreg(16, plan, registers=32768), 64)

    @parametrize("plan", (None, {}, {"sharing_programs": 0}))
    def test_other_kernels(self, plan):
        self.assertIsNone(self.maxnreg(8, plan))

    def test_what_the_device_does_not_say(self):
        self.assertIsNone(self.maxnreg(8, {"sharing_programs": 1}, registers=None))

    def test_another_compiler(self):
        self.assertIsNone(self.maxnreg(8, {"sharing_programs": 1}, device="hip"))


@nvidia_only
@instantiate_parametrized_tests
class AllRegistersKernelTest(MixOrderTestCase):
    """Which kernels are compiled with all registers."""

    fuse = NOT_SHARED

    def asks(self, columns, **options):
        args = rms_norm_args(1030, columns, torch.bfloat16)
        code = self.generate(rms_norm_backward, *args, **options)
        before, _ = self.kernel(code)
        self.assertIn("'launch_plan': {'num_programs': ", before)
        return "'sharing_programs': 1," in before

    def test_rows_loaded_again(self):
        self.assertTrue(self.asks(16384))

    # Of 4096 columns a program has a multiprocessor to itself, as of 6401, whose rows begin
    # anywhere; of 1024 there are others.
    @parametrize(
        "columns,lacking,asked",
        ((4096, 0, False), (4096, 1, True), (6401, 1, True), (1024, 1, False)),
    )
    def test_rows_loaded_once(self, columns, lacking, asked):
        predicted = Pressure(255 + lacking, 255)
        with patch.object(mix_order_plan, "pressure", lambda *args: predicted):
            self.assertEqual(self.asks(columns), asked)

    def test_what_is_not_predicted(self):
        options = {DEBUG: {"share_registers": False, "register_pressure": False}}
        lacking = Pressure(256, 255)
        with patch.object(mix_order_plan, "pressure", lambda *args: lacking):
            self.assertFalse(self.asks(4096, **options))

    def test_knob(self):
        options = {DEBUG: {"share_registers": False, "all_registers": False}}
        self.assertFalse(self.asks(16384, **options))


# A share of the registers


@instantiate_parametrized_tests
class ShareRegistersShareTest(TestCase):
    """Registers of a thread, where several programs share a multiprocessor."""

    @parametrize(
        "programs,num_warps,registers",
        ((1, 8, 255), (4, 2, 255), (3, 4, 168), (2, 8, 128), (8, 4, 64), (16, 4, 32)),
    )
    def test_share(self, programs, num_warps, registers):
        self.assertEqual(all_registers(65536, num_warps, programs), registers)
        self.assertLessEqual(programs * num_warps * 32 * registers, 65536)

    def test_least(self):
        # ptxas refuses 0, which would be these programs' share
        self.assertEqual(all_registers(65536, 32, 16), 24)

    def test_prediction(self):
        for sharing, limit in ((1, 255), (2, 128), (4, 64)):
            launch = LaunchConfig(xblock=2, num_warps=8, sharing=sharing)
            self.assertEqual(pressure((), 2050, launch).limit, limit)

    @parametrize("all_registers,limit", ((True, 64), (False, 255)))
    def test_prediction_of_a_row_split(self, all_registers, limit):
        split = SimpleNamespace(
            programs_per_sm=4,
            all_registers=all_registers,
            reload=False,
            hoist=True,
            accumulate_tiles=False,
            drop_padding=False,
            launch_plan=lambda: SimpleNamespace(row_tiles=[(2, 8, 1)]),
        )
        (launch,) = launch_configs(split)
        self.assertEqual((launch.xblock, launch.num_warps), (2, 8))
        self.assertEqual(pressure((), 2050, launch).limit, limit)


@nvidia_only
@instantiate_parametrized_tests
class ShareRegistersKernelTest(MixOrderTestCase):
    """Which kernels are compiled with a share of the registers."""

    fuse = FUSE_ALL

    def sharing(self, f, *args, **options):
        """Programs that share registers, of the one mix-order kernel."""
        return self.row_split(self.generate(f, *args, **options)).get("sharing_programs", 0)

    @parametrize("columns,programs", ((97, 16), (333, 16), (1001, 4)))
    def test_several_programs(self, columns, programs):
        args = rms_norm_args(20000, columns, torch.bfloat16)
        self.assertEqual(self.sharing(rms_norm_backward, *args), programs)

    @parametrize(
        "dtype,columns,programs",
        (
            (torch.bfloat16, 384, 4),
            (torch.bfloat16, 2048, 4),
            (torch.bfloat16, 4096, 1),
            (torch.float32, 1024, 2),
        ),
    )
    def test_rows_copied_ahead(self, dtype, columns, programs):
        args = rms_norm_args(20000, columns, dtype)
        self.assertEqual(self.sharing(rms_norm_backward, *args), programs)

    def test_accumulated_tiles(self):
        # three programs of four warps, which may need more than they have together
        xs = [randn(20000, 256, dtype=torch.bfloat16) for _ in range(7)]
        before, _ = self.kernel(self.generate(centered_and_sums, *xs))
        self.assertIn("tl.full([XBLOCK, R0_BLOCK]", before)
        self.assertEqual(self.sharing(centered_and_sums, *xs), 0)

    @parametrize("columns", (256, 257))
    def test_values_of_8_bytes(self, columns):
        # sums of integers, whose tiles take twice the registers that are counted
        def f(x, y):
            z = x * 3 + y
            return z.sum(0), z.sum(-1), (x * y).sum(0)

        x, y = (torch.ones(65536, columns, dtype=torch.int8, device=GPU_TYPE),) * 2
        self.assertEqual(self.sharing(f, x, y.clone()), 0)

    @parametrize("columns", (6401, 16384))
    def test_one_program(self, columns):
        args = rms_norm_args(20000, columns, torch.bfloat16)
        self.assertEqual(self.sharing(rms_norm_backward, *args), 1)

    def test_sums(self):
        def f(x):
            return x.sum(0), x.sum(-1)

        self.assertEqual(self.sharing(f, randn(20000, 1001, dtype=torch.bfloat16)), 8)

    def test_no_more_than_their_registers(self):
        # accumulators and tiles do not fit in a half of the registers
        xs = [randn(20000, 2801, dtype=torch.bfloat16) for _ in range(5)]
        self.assertEqual(self.sharing(centered_and_sums, *xs), 1)

    @parametrize("columns", (1001, 1024, 4096, 6401))
    def test_knob(self, columns):
        args = rms_norm_args(20000, columns, torch.bfloat16)
        off = {DEBUG: {"share_registers": False}}
        self.assertEqual(self.sharing(rms_norm_backward, *args, **off), 0)

    @parametrize("columns", (97, 384, 1001))
    def test_result(self, columns):
        self.check(rms_norm_backward, *rms_norm_args(1030, columns, torch.bfloat16))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
