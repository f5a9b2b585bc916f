# Owner(s): ["module: inductor"]

import os
import unittest

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.test_case import run_tests
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU

try:
    from .test_mix_order_reduction_utils import (
        CPP_WRAPPER,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        rms_norm_args,
        rms_norm_backward,
    )
except ImportError:
    from test_mix_order_reduction_utils import (
        CPP_WRAPPER,
        FUSE_ALL,
        MixOrderTestCase,
        nvidia_only,
        rms_norm_args,
        rms_norm_backward,
    )


interpreted = os.environ.get("TRITON_INTERPRET") == "1"
on_a_gpu = unittest.skipIf(interpreted, "the interpreter runs no C++: needs a GPU")


def half_backward(x, weight, dy, rstd):
    dx, dweight = rms_norm_backward(x, weight, dy, rstd)
    return dx.to(x.dtype), dweight


def biased_backward(x, weight, dy, rstd):
    return *half_backward(x, weight, dy, rstd), dy.float().sum(0)


@nvidia_only
@instantiate_parametrized_tests
class CppWrapperTest(MixOrderTestCase):
    fuse = FUSE_ALL

    @parametrize("f", (half_backward, biased_backward))
    @parametrize("aot", (False, True))
    def test_generated(self, f, aot):
        """Two launches, and nothing of the final reduction as text."""
        code = self.generate_cpp(f, *rms_norm_args(133, 96, torch.bfloat16), aot=aot)
        self.assertEqual(metrics.codegen_mix_order_reduction, 1)
        *_, body = code.partition("// Call mix order reduction kernel")
        calls = [line for line in body.splitlines() if "call_triton_" in line]
        self.assertEqual(len(calls), 2)
        for call in calls:
            self.assertIn("workspace_0", call)
        self.assertNotIn("# Call mix order", code)
        self.assertNotIn(".sum(", code)

    @on_a_gpu
    def test_runs(self):
        args = rms_norm_args(1031, 1024, torch.bfloat16)
        with inductor_config.patch({**self.fuse, **CPP_WRAPPER}):
            compiled = torch.compile(half_backward, fullgraph=True)
            actual = compiled(*args)
            self.assertEqual(metrics.codegen_mix_order_reduction, 1)
            self.compare(half_backward, actual, args)
            for left, right in zip(actual, compiled(*args)):
                self.assertTrue(torch.equal(left, right))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
