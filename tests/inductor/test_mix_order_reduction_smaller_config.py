# Owner(s): ["module: inductor"]

import contextlib
import dataclasses
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

from torch._inductor.choices import InductorChoices
from torch._inductor.runtime.triton_compat import (
    Config,
    OutOfResources,
    PTXASError,
)
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.virtualized import V
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        MixOrderTestCase,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        MixOrderTestCase,
        rms_norm_args,
        rms_norm_backward,
    )


class Result:
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
class LaunchersTest(TestCase):
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

        def compiles(config):
            compiled.append((config.kwargs["XBLOCK"], config.kwargs["NUM_STAGES"]))
            if len(compiled) > 1 and assembles and not assembles(config.kwargs):
                raise PTXASError("too much shared data")
            return Result(config, fits, spills)

        autotuner = MagicMock(
            spec=CachingAutotuner,
            launchers=[],
            inductor_meta={"row_split": {}, **meta} if row_split else meta,
            triton_meta={"device": 0},
            fn=SimpleNamespace(fn=None),
            _precompile_config=compiles,
            _reload_kernel=lambda: SimpleNamespace(fn=SimpleNamespace(fn=compiles)),
        )
        autotuner._make_launchers = lambda: CachingAutotuner._make_launchers(autotuner)
        autotuner.compile_results = [compiles(Config(kwargs, num_warps=8))]
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
            self.launcher(lambda kwargs: False, False, XBLOCK=2, NUM_STAGES=2)


class Stages(InductorChoices):
    """A model that takes shared memory to be without end."""

    @staticmethod
    def mix_order_row_split(*args):
        split = InductorChoices.mix_order_row_split(*args)
        return dataclasses.replace(split, xblock=2, num_stages=16)


class KernelTest(MixOrderTestCase):
    def test_too_many_stages(self):
        with V.set_choices_handler(Stages()):
            self.check(rms_norm_backward, *rms_norm_args(1030, 4096))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
