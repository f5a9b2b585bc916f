# Owner(s): ["module: inductor"]

import torch
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU


try:
    from .test_mix_order_reduction_utils import (
        centered_and_sums,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        centered_and_sums,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


DEBUG = "triton.mix_order_reduction_debug"
HALF_TYPES = (torch.bfloat16, torch.float16)


def extrema(x):
    y = x - x.mean(-1, keepdim=True)
    return y, x.amax(0), x.amin(0)


def product(x):
    return x - x.mean(-1, keepdim=True), x.prod(0)


@nvidia_only
@instantiate_parametrized_tests
class DropPaddingTest(MixOrderTestCase):
    """Columns that a row is padded by are left out of what is stored of partials."""

    fuse = FUSE_ALL

    def dropped(self, code):
        """What the accumulators of the one mix-order kernel have there, each its own."""
        _, loop = self.kernel(code)
        name, found = "accum{} = tl.where(r0_mask, accum{}, ", []
        while (at := loop.find(name.format(len(found), len(found)))) >= 0:
            self.assertLess(at, loop.index(f", accum{len(found)}, r0_mask)"))
            found.append(loop[at:].splitlines()[0].split(", ")[-1][:-1])
        return found

    @parametrize("dtype", HALF_TYPES)
    @parametrize("columns", (1152, 1280, 1536, 5120, 10240))
    def test_columns(self, columns, dtype):
        code = self.check(rms_norm_backward, *rms_norm_args(134, columns, dtype))
        self.assertEqual(self.dropped(code), ["0"])

    def test_every_partial(self):
        xs = [randn(134, 4608, dtype=torch.bfloat16) for _ in range(3)]
        self.assertEqual(self.dropped(self.check(centered_and_sums, *xs)), ["0"] * 2)

    @parametrize(
        "f,identities",
        ((extrema, ['float("-inf")', 'float("inf")']), (product, ["1"])),
    )
    def test_identity(self, f, identities):
        code = self.check(f, randn(134, 1280, dtype=torch.bfloat16))
        self.assertEqual(self.dropped(code), identities)

    # no padding; all threads of the program have some column; as wide as what is stored;
    # rows are loaded again; and they begin anywhere
    @parametrize(
        "columns,dtype",
        (
            (1024, torch.bfloat16),
            (768, torch.bfloat16),
            (1280, torch.float32),
            (15360, torch.bfloat16),
            (1281, torch.bfloat16),
        ),
    )
    def test_nothing_to_drop(self, columns, dtype):
        args = rms_norm_args(20000, columns, dtype)
        self.assertEqual(self.dropped(self.generate(rms_norm_backward, *args)), [])

    def test_knob(self):
        args = rms_norm_args(134, 1280, torch.bfloat16)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"drop_padding": False}})
        self.assertEqual(self.dropped(code), [])


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
