# Owner(s): ["module: inductor"]

import dataclasses
import itertools
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.choices import InductorChoices
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_row_split import row_split, RowCost, RowSplit
from torch._inductor.runtime.hints import DeviceProperties
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


REGISTERS_PER_SM = 65536
# compute capability, SMs
DEVICES = [(80, 108), (86, 84), (90, 132), (100, 148), (120, 188), (61, 20)]


def device(cc, sms):
    return DeviceModel.of(
        DeviceProperties(
            type="cuda",
            index=0,
            multi_processor_count=sms,
            cc=cc,
            major=cc // 10,
            regs_per_multiprocessor=REGISTERS_PER_SM,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            warp_size=32,
        )
    )


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
            gpu = device(cc, sms)
            for cost in itertools.islice(costs(), skip, None, 7):
                for rows in (None, 0, 1, 5, 4096, 1 << 22):
                    split = row_split(cost, gpu, rows)
                    try:
                        self.assert_possible(cost, gpu, rows, split)
                    except AssertionError as error:
                        raise AssertionError(f"{cost} {cc} {rows}: {split}") from error

    def test_autotuned_programs(self):
        gpu = device(90, 132)
        for cost in itertools.islice(costs(), 0, None, 7):
            for programs_per_sm in (1, 2, 8, 32):
                split = row_split(cost, gpu, None, programs_per_sm)
                self.assertEqual(split.programs_per_sm, programs_per_sm)
                self.assertEqual(split.num_programs, 132 * programs_per_sm)
                self.assertGreaterEqual(split.num_stages, 1)

    def test_monotone(self):
        """Of costlier rows, no more are in a tile, and what does not fit never fits again."""
        gpu = device(90, 132)
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
        gpu = device(90, 132)
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
                cost, device(90, 132), None, row_split(cost, device(90, 132), None)
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
                dataclasses.replace(cost, **more), device(90, 132), None
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
            found = row_split(cost, device(90, 132), None)
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
        gpu = device(90, 132)
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
        gpu = device(90, 132)
        for cost in itertools.islice(costs(), 0, None, 3):
            split = row_split(cost, gpu, None)
            meta = split.inductor_meta()
            self.assertEqual(meta["NUM_PROGRAMS"], split.num_programs)
            first, *others = meta["configs"]
            self.assertEqual(first, (split.xblock, split.num_warps, split.num_stages))
            self.assertNotIn(first, others)
            for xblock, num_warps, num_stages in others:
                self.assertTrue(0 < xblock <= split.xblock)
                self.assertTrue(0 < num_warps <= 32)
                self.assertTrue(0 < num_stages <= split.num_stages)


class Reload(InductorChoices):
    """Loads every row again, however narrow."""

    @staticmethod
    def mix_order_row_split(*args, **kwargs):
        split = InductorChoices.mix_order_row_split(*args, **kwargs)
        return dataclasses.replace(split, reload=True)


class ReloadWithoutHoisting(InductorChoices):
    @staticmethod
    def mix_order_row_split(*args, **kwargs):
        split = InductorChoices.mix_order_row_split(*args, **kwargs)
        return dataclasses.replace(split, reload=True, hoist=False)


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

    def test_without_hoisting(self):
        code = self.reload(
            rms_norm_backward, *rms_norm_args(133, 96), choices=ReloadWithoutHoisting
        )
        self.assertEqual(self.loads(code), (0, 7))

    def twice(self, code):
        """Some of a row is loaded again, by loads that the compiler can not take for one."""
        loads = re.findall(r"tl\.load\((\w+) \+ (.*)", self.kernel(code)[1])
        pointers = [pointer for pointer, _ in loads]
        self.assertLess(len(set(pointers)), len(pointers))
        self.assertEqual(len(set(loads)), len(loads))

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


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
