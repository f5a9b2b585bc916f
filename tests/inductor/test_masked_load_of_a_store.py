# Owner(s): ["module: inductor"]

import torch
from torch._inductor import metrics
from torch._inductor.test_case import run_tests, TestCase
from torch.nn.functional import pad
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


@instantiate_parametrized_tests
class MaskedLoadOfAStoreTest(TestCase):
    """A kernel reads, through a mask, what it has stored itself."""

    @parametrize("value", (0.0, 7.0))
    @parametrize("what", ("pointwise", "reduction"))
    def test_end_is_padded_again(self, what, value):
        def f(x):
            y = torch.softmax(x, -1) if what == "reduction" else x.cos() + 2
            return y, pad(y[:-1], (0, 0, 0, 1), value=value)

        x = torch.randn(37, 64, device=GPU_TYPE)
        metrics.reset()
        actual = torch.compile(f, fullgraph=True)(x)
        self.assertEqual(metrics.generated_kernel_count, 1)
        self.assertEqual(actual, f(x))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
