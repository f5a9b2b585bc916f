# Owner(s): ["module: inductor"]

import torch
import torch._inductor.config as inductor_config
from torch._inductor.test_case import run_tests
from torch._inductor.utils import run_and_get_code
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


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
