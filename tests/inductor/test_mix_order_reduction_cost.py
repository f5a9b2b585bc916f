# Owner(s): ["module: inductor"]

import dataclasses
import logging
from unittest.mock import patch

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics, mix_order_profit
from torch._inductor.choices import InductorChoices
from torch._inductor.device_model import DeviceModel, SM_90
from torch._inductor.mix_order_profit import estimate, Work
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


COST_MODEL = "triton.mix_order_reduction_cost_model"
DEBUG = "triton.mix_order_reduction_debug"
SPLIT_SIZE = "triton.mix_order_reduction_split_size"
NON_STRICT = "triton.mix_order_reduction_non_strict_mode"
DECIDE = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_max_reads": 0,
    DEBUG: {"register_pressure": False},
    "triton.mix_order_reduction_autotune_split_size": False,
    NON_STRICT: False,
    SPLIT_SIZE: None,
    COST_MODEL: True,
    "split_reductions": True,
    "deterministic": False,
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    # which would sum in what makes the tensor
    "triton.mix_order_reduction_producer_sums": False,
}
H200_GBs = 4800.0


def gpu(memory_GBs):
    """An H200, but for its bandwidth."""
    return dataclasses.replace(SM_90, sms=132, memory_GBs=memory_GBs)


def norm(rows, columns, itemsize=2, partials=1):
    """The work of a norm's backward: x and dy are read, dx is written."""
    tile = rows * columns * itemsize
    return Work(
        row_bytes=3 * tile,
        column_bytes=2 * tile,
        shared_bytes=2 * tile,
        foregone_bytes=0,
        unfused_launches=3,
        fused_launches=2,
        programs=min(rows, 132),
        partial_bytes=4 * columns * partials,
    )


class EstimateTest(TestCase):
    """The pure function: from work, bandwidth and constants to two times."""

    def estimate(self, work, memory_GBs=H200_GBs, **changes):
        work = dataclasses.replace(work, **changes)
        return estimate(work, gpu(memory_GBs))

    def test_what_pays(self):
        for shape in (
            (4096, 8192),
            (8192, 8192),
            (4096, 4096),
            (2048, 8192),
            (4096, 16384),
            # a launch less is much where there is little to do
            (768, 768),
        ):
            self.assertTrue(self.estimate(norm(*shape)).pays, msg=str(shape))
        # partials of 128 KiB for few rows
        self.assertFalse(self.estimate(norm(128, 16384, partials=2)).pays)

    def test_what_is_shared_is_read_once(self):
        work = norm(32768, 1024)
        shared, alone = self.estimate(work), self.estimate(work, shared_bytes=0)
        saved_us = work.shared_bytes / (H200_GBs * DeviceModel.row_share) * 1e-3
        self.assertAlmostEqual(alone.fused_us - shared.fused_us, saved_us)
        self.assertEqual(alone.unfused_us, shared.unfused_us)

    def test_partials(self):
        work = norm(32768, 1024)
        few, many = (
            self.estimate(work, partial_bytes=n * 4096).fused_us for n in (1, 8)
        )
        self.assertLess(few, many)
        few, many = (self.estimate(work, programs=n).fused_us for n in (132, 2112))
        self.assertLess(few, many)

    def test_launches(self):
        work = norm(32768, 1024)
        one, three = (self.estimate(work, fused_launches=n).fused_us for n in (1, 3))
        self.assertAlmostEqual(three - one, 2 * DeviceModel.launch_us)

    def test_fusions_foregone(self):
        work = norm(131072, 1024)
        self.assertTrue(self.estimate(work).pays)
        foregone = self.estimate(work, foregone_bytes=work.row_bytes)
        self.assertFalse(foregone.pays)

    def test_read_again(self):
        """What the kernel of the rows reads anyway is free there, and nowhere else."""
        work = norm(32768, 768)
        self.assertTrue(self.estimate(work).pays)
        again = self.estimate(work, reread_bytes=2 * work.shared_bytes)
        self.assertFalse(again.pays)
        self.assertEqual(again.unfused_us, self.estimate(work).unfused_us)

    def test_bandwidth(self):
        work = norm(131072, 1024)
        slow, fast = (self.estimate(work, GBs) for GBs in (H200_GBs, 2 * H200_GBs))
        self.assertLess(fast.unfused_us - fast.fused_us, slow.unfused_us - slow.fused_us)


def rms_norm_backward(x, dy, weight, rstd):
    xhat = x * rstd
    wdy = weight * dy
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy * xhat).sum(0)


@instantiate_parametrized_tests
class DecisionTest(TestCase):
    """What is fused by default, with an H200's bandwidth whatever GPU is here."""

    def setUp(self):
        super().setUp()
        metrics.reset()

    def inputs(self, rows, columns):
        x, dy = (
            torch.randn(rows, columns, device=GPU_TYPE, dtype=torch.bfloat16)
            for _ in range(2)
        )
        weight = torch.randn(columns, device=GPU_TYPE, dtype=torch.bfloat16)
        return x, dy, weight, torch.rand(rows, 1, device=GPU_TYPE)

    def run_with(self, f, *args, memory_GBs=H200_GBs, tol=2e-2, **options):
        """Fused kernels and code of ``f``, after its results were compared."""
        torch._dynamo.reset()
        metrics.reset()
        expect = f(*args)
        with (
            inductor_config.patch({**DECIDE, **options}),
            patch.object(mix_order_profit, "device_model", lambda device: gpu(memory_GBs)),
        ):
            actual, (code,) = run_and_get_code(torch.compile(f), *args)
        for act, ref in zip(actual, expect):
            scale = max(1.0, ref.abs().max().item())
            self.assertEqual(act, ref, atol=tol * scale, rtol=tol)
        return metrics.codegen_mix_order_reduction, code

    # the first two are small enough to be interpreted where there is no GPU
    @parametrize(
        "shape, fused",
        (((300, 768), 1), ((16, 2048), 0), ((4096, 4096), 1), ((2048, 8192), 1)),
    )
    def test_rms_norm_backward(self, shape, fused):
        found, _ = self.run_with(rms_norm_backward, *self.inputs(*shape))
        self.assertEqual(found, fused)

    def test_a_view_that_is_cast(self):
        # its loops are those of the rows when they are merged, which a later round asks
        def f(x, dy, weight, rstd):
            xhat = x * rstd
            wdy = weight * dy
            dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
            return dx, dx.view(-1, 768).to(x.dtype), (dy * xhat).sum((0, 1))

        x, dy, weight, rstd = self.inputs(300, 768)
        args = [each.view(4, 75, -1) for each in (x, dy, rstd)]
        found, _ = self.run_with(f, *args[:2], weight, args[2])
        self.assertEqual(found, 1)
        self.assertEqual(metrics.generated_kernel_count, 2)

    @parametrize("shape, fused", (((300, 768), 0), ((8192, 640), 1)))
    @parametrize(
        "why", ("knob", "rows are not split", "one split size", "unknown GPU")
    )
    def test_old_gates(self, shape, fused, why):
        options = {
            "knob": {COST_MODEL: False},
            "rows are not split": {DEBUG: {"persistent_row_split": False}},
            "one split size": {SPLIT_SIZE: 16},
            "unknown GPU": {"memory_GBs": None},
        }[why]
        args = self.inputs(*shape)
        found, _ = self.run_with(rms_norm_backward, *args, **options)
        self.assertEqual(found, fused)

    @parametrize("model", (True, False))
    def test_non_strict_mode_does_not_ask(self, model):
        args = self.inputs(16, 2048)
        options = {NON_STRICT: True, COST_MODEL: model}
        found, _ = self.run_with(rms_norm_backward, *args, **options)
        self.assertEqual(found, 1)

    def test_choice_can_be_overridden(self):
        class Always(InductorChoices):
            @staticmethod
            def why_mix_order_reduction_does_not_pay(contiguous, other):
                return None

        with V.set_choices_handler(Always()):
            found, _ = self.run_with(rms_norm_backward, *self.inputs(16, 2048))
        self.assertEqual(found, 1)

    @parametrize("rows", (64, 1024))
    @parametrize("made", (True, False))
    def test_producer_that_would_fuse(self, rows, made):
        # made of enough that it is a buffer, which a kernel of a row's sum alone would
        # write but not read
        def f(y, *tensors):
            if tensors:
                y = sum(t.sin() for t in (y, *tensors))
            return y.sum(0), y.sum(1)

        tensors = [torch.randn(rows, 1536, device=GPU_TYPE) for _ in range(9)]
        found, _ = self.run_with(f, *(tensors if made else tensors[:1]))
        self.assertEqual(found, not made and rows > 64)

    def test_dynamic_rows_are_not_guarded(self):
        compiled = torch.compile(lambda x: (x.sum(0), x.cos().sum(1)))
        x, fewer = (torch.randn(n, 96, device=GPU_TYPE) for n in (5000, 40))
        torch._dynamo.mark_dynamic(x, 0)
        with (
            inductor_config.patch(DECIDE),
            patch.object(mix_order_profit, "device_model", lambda device: gpu(H200_GBs)),
        ):
            compiled(x)
            with torch._dynamo.config.patch(error_on_recompile=True):
                actual = compiled(fewer)
        self.assertEqual(actual[0], fewer.sum(0), atol=1e-3, rtol=1e-3)

    def test_bandwidth_is_not_in_the_source(self):
        # neither of a kernel that fuses nor of one that does not concern the model
        def f(x):
            return x.sum(0), x.sum(1), x[:5].cos()

        x = torch.randn(40, 96, device=GPU_TYPE)
        sources = [
            self.run_with(f, x, memory_GBs=GBs)[1].split("\n", 1)[1]
            for GBs in (H200_GBs, 1.01 * H200_GBs)
        ]
        self.assertEqual(*sources)

    def log(self, shape):
        log = logging.getLogger("torch._inductor.scheduler.__fusion")
        model = logging.getLogger("torch._inductor.mix_order_profit.__fusion")
        with (
            self.assertLogs(log, logging.DEBUG) as refused,
            self.assertLogs(model, logging.DEBUG) as fused,
        ):
            model.debug("asked")
            log.debug("asked")
            self.run_with(rms_norm_backward, *self.inputs(*shape))
        return "\n".join(refused.output), "\n".join(fused.output)

    def test_log(self):
        refused, fused = self.log((16, 2048))
        self.assertRegex(refused, r"does not pay: [\d.]+ us fused, [\d.]+ us not")
        self.assertNotRegex(fused, "us fused")
        refused, fused = self.log((300, 768))
        self.assertRegex(fused, r"mix-order reduction of .*: [\d.]+ us fused, [\d.]+ us not")

    def works(self, f, *args):
        works = []
        work_of = mix_order_profit.work_of

        def watched(contiguous, other):
            works.append(work_of(contiguous, other))
            return works[-1]

        with patch.object(mix_order_profit, "work_of", watched):
            self.run_with(f, *args)
        return works

    @parametrize("again", (False, True))
    def test_work_that_waits_for_both(self, again):
        """A tensor scaled by its rows and by its columns is read after both."""

        def f(x):
            rows, columns = x.amax(1, keepdim=True), x.amax(0, keepdim=True)
            return x / rows, x / columns if again else columns

        x = torch.randn(64, 96, device=GPU_TYPE)
        (work, *_) = self.works(f, x)
        self.assertEqual(work.reread_bytes, 64 * 96 * 4 if again else 0)
        self.assertEqual(work.fused_launches, 2 + again)

    def test_work(self):
        (work, *_) = self.works(rms_norm_backward, *self.inputs(64, 96))
        tile, vector, stat = 64 * 96 * 2, 96 * 2, 64 * 4
        self.assertEqual(work.programs, 8)
        # x, dy, weight, rstd, dx, and the row's sum, written and read
        self.assertEqual(work.row_bytes, 3 * tile + vector + 2 * stat)
        # what both read along the rows; the output is 4 bytes a column
        self.assertEqual(work.column_bytes, 2 * tile + stat)
        self.assertEqual(work.shared_bytes, 2 * tile)
        self.assertEqual(work.foregone_bytes, 0)
        self.assertEqual(work.partial_bytes, 4 * 96)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
