# Owner(s): ["module: inductor"]

import re

import torch
from torch._inductor.device_model import DeviceModel
from torch._inductor.mix_order_row_split import row_split, RowCost
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.runtime_utils import next_power_of_2
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU


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
FETCH = re.compile(r"triton_helpers\.prefetch_rows\((.*)\)\n")


def fetches(split):
    """Whether a kernel that splits its rows so fetches them ahead."""
    return getattr(split, "prefetch", False)


@instantiate_parametrized_tests
class RowSplitTest(TestCase):
    """Which kernels fetch rows ahead, and how they split their rows then."""

    def split(self, columns, size=2, streams=2, cc=90, **cost):
        gpu = DeviceModel.of(
            DeviceProperties(
                type="cuda",
                index=0,
                multi_processor_count=132,
                cc=cc,
                regs_per_multiprocessor=65536,
            )
        )
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
class KernelTest(MixOrderTestCase):
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


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
