# Owner(s): ["module: inductor"]

import os
import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch._inductor import metrics
from torch._inductor.codegen.cpp_wrapper_gpu import DeferredTritonCallWrapper
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.graph import GraphLowering
from torch._inductor.test_case import run_tests, TestCase
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


OPTIONS = {
    "cpp_wrapper": True,
    "triton.autotune_at_compile_time": True,
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "triton.mix_order_reduction_split_size": None,
    "split_reductions": False,
    "deterministic": False,
    "max_autotune": False,
    # neither of which is worth its time here
    "cpp.vec_isa_ok": True,
    "cpp_cache_precompile_headers": False,
}
interpreted = os.environ.get("TRITON_INTERPRET") == "1"
on_a_gpu = unittest.skipIf(interpreted, "the interpreter runs no C++: needs a GPU")
nvidia_only = unittest.skipIf(
    GPU_TYPE != "cuda" or torch.version.hip is not None, "not an NVIDIA GPU"
)


def rms_norm_backward(x, weight, dy, rstd):
    xhat = x.float() * rstd
    wdy = weight * dy.float()
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy.float() * xhat).sum(0)


def biased_backward(x, weight, dy, rstd):
    return *rms_norm_backward(x, weight, dy, rstd), dy.float().sum(0)


def norm_args(rows, columns, dtype=torch.bfloat16):
    x, dy = (torch.randn(rows, columns, device=GPU_TYPE).to(dtype) for _ in range(2))
    weight = torch.randn(columns, device=GPU_TYPE)
    return x, weight, dy, torch.rand(rows, 1, device=GPU_TYPE) + 0.5


class Generated(Exception):
    """The wrapper was generated, and shall not be built."""


@nvidia_only
@instantiate_parametrized_tests
class CppWrapperTest(TestCase):
    def setUp(self):
        super().setUp()
        metrics.reset()
        torch._dynamo.reset()

    def compare(self, actual, args):
        expect = rms_norm_backward(*(arg.double() for arg in args))
        eager = rms_norm_backward(*args)
        for act, ref, eag in zip(actual, expect, eager):
            self.assertEqual((act.shape, act.stride()), (eag.shape, eag.stride()))
            self.assertEqual(act.dtype, eag.dtype)
            error = (act.double() - ref).norm()
            ulp = torch.finfo(act.dtype).eps * ref.norm()
            self.assertLessEqual(error, max(1.1 * (eag.double() - ref).norm(), 2 * ulp))

    @parametrize("f", (rms_norm_backward, biased_backward))
    @parametrize("aot", (False, True))
    def test_generated(self, f, aot):
        """Two launches, and nothing of the final reduction as text."""
        generated = []

        def codegen(graph):
            with (
                mock.patch.object(
                    PythonWrapperCodegen, "generate_and_run_autotune_block"
                ),
                mock.patch.object(DeferredTritonCallWrapper, "generate"),
                mock.patch.object(graph, "aot_mode", aot),
            ):
                wrapper, _ = graph.codegen()
            generated.append((wrapper.value, metrics.codegen_mix_order_reduction))
            raise Generated

        args = norm_args(133, 96)
        with (
            inductor_config.patch(OPTIONS),
            mock.patch.object(GraphLowering, "codegen_with_cpp_wrapper", codegen),
            self.assertRaises(Exception) as raised,
        ):
            torch.compile(f, fullgraph=True)(*args)
        self.assertIn("Generated", repr(raised.exception))
        ((source, fused),) = generated
        self.assertEqual(fused, 1)
        *_, body = source.partition("// Call mix order reduction kernel")
        calls = [line for line in body.splitlines() if "call_triton_" in line]
        self.assertEqual(len(calls), 2)
        for call in calls:
            self.assertIn("workspace_0", call)
        self.assertNotIn("# Call mix order", source)
        self.assertNotIn(".sum(", source)

    @on_a_gpu
    def test_runs(self):
        args = norm_args(1031, 1024)
        with inductor_config.patch(OPTIONS):
            compiled = torch.compile(rms_norm_backward, fullgraph=True)
            actual = compiled(*args)
            self.assertEqual(metrics.codegen_mix_order_reduction, 1)
            self.compare(actual, args)
            for left, right in zip(actual, compiled(*args)):
                self.assertTrue(torch.equal(left, right))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
