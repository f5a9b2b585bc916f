# Owner(s): ["module: inductor"]

import ast
import re

import torch
import torch._inductor.config as inductor_config
from torch._inductor.runtime.coordinate_descent_tuner import CoordescTuner
from torch._inductor.runtime.triton_compat import Config
from torch._inductor.test_case import run_tests
from torch._inductor.utils import run_and_get_code
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


BF16, FP32 = torch.bfloat16, torch.float32


def both(x):
    y = x * x
    return y.sum(0), y.sum(1)


@nvidia_only
@instantiate_parametrized_tests
class KernelTest(MixOrderTestCase):
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
        (meta,) = re.findall(r"'row_split': (\{.*?\})", code)
        row_split = ast.literal_eval(meta)
        xblock, num_warps, num_stages = row_split["configs"][0]
        tuner = CoordescTuner(
            is_mix_order_reduction=True, inductor_meta={"row_split": row_split}
        )

        def valid(xblock):
            kwargs = {"XBLOCK": xblock, "NUM_STAGES": num_stages}
            return tuner.is_valid_config(Config(kwargs, num_warps=num_warps))

        self.assertTrue(valid(xblock))
        self.assertFalse(valid(2 * xblock))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
