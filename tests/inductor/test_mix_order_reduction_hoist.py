# Owner(s): ["module: inductor"]

import torch
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU

try:
    from .test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        FUSE_ALL,
        MixOrderTestCase,
        randn,
        rms_norm_args,
        rms_norm_backward,
    )


def sums(x, weight):
    y = x * weight
    return y.sum(0), y.sum(1)


@instantiate_parametrized_tests
class RowInvariantTest(MixOrderTestCase):
    """What every row reads is loaded once, before the loop over rows."""

    fuse = FUSE_ALL

    def test_weight(self):
        code = self.check(rms_norm_backward, *rms_norm_args(133, 96))
        self.assertEqual(self.loads(code), (1, 3))

    @parametrize(
        "form", ("columns", "one_row", "scalar", "one", "expanded", "bool")
    )
    def test_shared_by_all_rows(self, form):
        weight = {
            "columns": lambda: randn(96),
            "one_row": lambda: randn(1, 96),
            "scalar": lambda: randn(),
            "one": lambda: randn(1),
            "expanded": lambda: randn(1).expand(133, 96),
            "bool": lambda: randn(96) > 0,
        }[form]()
        code = self.check(sums, randn(133, 96), weight)
        self.assertEqual(self.loads(code), (1, 1))

    def test_some_of_several_columns(self):
        def f(x, weight):
            y = x * weight
            return y.sum(0), y.sum((1, 2))

        code = self.check(f, randn(133, 12, 8), randn(8))
        self.assertEqual(self.loads(code), (1, 1))
        code = self.check(f, randn(133, 12, 8), randn(12, 1), fused=2)
        self.assertEqual(self.loads(code), (1, 1))

    def test_shared_by_no_rows(self):
        code = self.check(
            lambda x, weight, b: (*sums(x, weight), (x * b).sum(0)),
            randn(132, 96),
            randn(132, 1),
            randn(96),
        )
        # b alone
        self.assertEqual(self.loads(code), (1, 2))

    def test_shared_by_some_rows(self):
        def f(x, weight, b):
            y = x.view(2, 66, 96) * weight
            return *sums(y.view(132, 96), b), y.sum((0, 1))

        # the third sum, attached, would load the weight by an index of its own
        options = {"triton.mix_order_reduction_producer_sums": False}
        code = self.check(f, randn(132, 96), randn(66, 96), randn(96), **options)
        self.assertEqual(self.loads(code), (1, 2))

    def test_padded(self):
        # its mask is computed in the loop
        def f(x, weight, b):
            return sums(x, torch.nn.functional.pad(weight, (3, 5)) + b)

        code = self.check(f, randn(133, 96), randn(88), randn(96))
        self.assertEqual(self.loads(code), (1, 2))

    def test_gathered(self):
        # the index is loaded once, what it points to where the index is known
        index = torch.randint(0, 64, (96,), device=GPU_TYPE)
        code = self.check(
            lambda x, table, index: sums(x, table[index]),
            randn(133, 96),
            randn(64),
            index,
        )
        self.assertEqual(self.loads(code), (1, 2))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
