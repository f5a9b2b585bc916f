# Owner(s): ["module: inductor"]
"""Values of which each two neighbours become one: casts to packed 4-bit formats."""

import unittest
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from test_reduction_tiling import randn, TILED
from torch._inductor import metrics, tiling_utils
from torch._inductor.fx_passes import packed_pairs
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU


on_cuda = unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")
is_2_15 = hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes")


def codes(x):
    """x of magnitudes up to 6 to 4 bits, by more operations than are inlined twice."""
    magnitude = x.abs()
    code = (x < 0).to(torch.uint8) << 3
    for bound in (0.25, 1.25, 2.5, 5.0):
        code = code + (magnitude > bound).to(torch.uint8)
    for bound in (0.75, 1.75, 3.5):
        code = code + (magnitude >= bound).to(torch.uint8)
    return code


def scaled(x, block):
    """x in blocks, by a power of two each, which is exact; and its exponents."""
    blocks = x.reshape(*x.shape[:-1], -1, block).float()
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = ((amax.view(torch.int32) >> 23) & 0xFF).clamp(3, 250) - 2
    return blocks * ((254 - exponent) << 23).view(torch.float32), exponent.to(torch.uint8)


def flat(code):
    """As torchao packs."""
    pairs = code.contiguous().view(-1)
    return pairs[::2] | pairs[1::2] << 4


def by_slices(code):
    return code[..., ::2] | code[..., 1::2] << 4


def by_pairs(code):
    pairs = code.reshape(*code.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def odd_first(code):
    pairs = code.unflatten(-1, (-1, 2))
    return (pairs[..., 0] << 4) + pairs[..., 1]


def cast(x, block=32, pack=flat):
    values, exponent = scaled(x, block)
    code = codes(values.reshape(x.shape))
    return pack(code).reshape(*x.shape[:-1], -1), exponent.squeeze(-1)


@instantiate_parametrized_tests
@on_cuda
class PackedPairsTest(TestCase):
    def setUp(self):
        super().setUp()
        metrics.reset()
        torch._dynamo.reset()

    def check(self, f, *args, kernels=1, **options):
        """``f`` compiles to ``kernels`` kernels, and returns eager's bits in its layout."""
        with inductor_config.patch({**TILED, **options}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        expected = f(*args)
        for act, expect in zip(actual, expected, strict=True):
            self.assertEqual(act.stride(), expect.stride())
            self.assertEqual(act.dtype, expect.dtype)
            self.assertTrue(torch.equal(act, expect))
        self.assertEqual(metrics.generated_kernel_count, kernels)
        return code

    @parametrize("pack", (flat, by_slices, by_pairs, odd_first))
    @parametrize("block", (16, 32))
    def test_rows(self, pack, block):
        x = randn(24, 96, dtype=torch.bfloat16)
        self.check(lambda x: cast(x, block, pack), x)

    @parametrize("pack", (flat, by_pairs))
    def test_columns(self, pack):
        x = randn(128, 160, dtype=torch.bfloat16)
        # whose loops differ there, and are not fused
        kernels = 2 if is_2_15 else 1
        self.check(lambda x: cast(x.t().contiguous(), 32, pack), x, kernels=kernels)

    @parametrize("dtype", (torch.float16, torch.float32))
    def test_dtypes(self, dtype):
        self.check(cast, randn(40, 64, dtype=dtype))

    def test_batches(self):
        self.check(cast, randn(3, 5, 64))

    def test_special_values(self):
        x = randn(8, 64)
        x[0] = 0
        x[1, 3], x[2, 4], x[3, 5] = float("inf"), float("-inf"), float("nan")
        self.check(cast, x)

    def test_what_comes_before_and_is_of_other_shapes(self):
        def f(x, bias, gain):
            y = torch.relu(x + bias) * gain[:, None]
            return cast(y, 32)

        self.check(f, randn(24, 64), randn(64), randn(24))

    def test_a_bias_in_blocks(self):
        def f(x, bias):
            values, exponent = scaled(x, 16)
            code = codes(values + bias.reshape(-1, 16).round())
            return flat(code), exponent

        self.check(f, randn(24, 64), randn(64))

    def test_smallest_values(self):
        def f(x):
            blocks = x.reshape(x.shape[0], -1, 16)
            least = blocks.amin(-1, keepdim=True)
            return flat(codes(blocks - least)), least.squeeze(-1)

        self.check(f, randn(24, 64).round())

    def test_constant_scales(self):
        self.check(lambda x: (flat(codes(x * 0.5)),), randn(24, 64))

    def test_dynamic_rows(self):
        x = randn(24, 64)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(cast, x)

    def test_odd_blocks_and_other_uses_stay(self):
        def of_odd_blocks(x):
            blocks = x.reshape(x.shape[0], -1, 3)
            amax = blocks.abs().amax(-1, keepdim=True)
            return flat(codes((blocks / amax).reshape(x.shape))), amax

        def with_codes(x):
            code = codes(x)
            return flat(code), code

        def apart(x):
            pairs = codes(x).unflatten(-1, (-1, 2))
            return pairs[..., 0].contiguous(), pairs[..., 1] + 1

        for f, size in ((of_odd_blocks, 48), (with_codes, 64), (apart, 64)):
            x = torch.randint(-4, 5, (16, size), device=GPU_TYPE).float()
            x[:, ::3] = 4
            metrics.reset()
            with inductor_config.patch(TILED):
                actual = torch.compile(f, fullgraph=True)(x)
            for act, expect in zip(actual, f(x), strict=True):
                self.assertTrue(torch.equal(act, expect))

    def test_off(self):
        x = randn(24, 64)
        kernels = 2 if is_2_15 else 3
        self.check(cast, x, kernels=kernels, **{"triton.block_reduction_tiles": False})


@on_cuda
class PackedPairsPassTest(TestCase):
    def split(self, f, *args):
        graph = make_fx(f, tracing_mode="fake")(*args).graph
        # where a GPU is described its tensors are the CPU's
        with mock.patch.object(packed_pairs, "is_for_triton", lambda value: True):
            return packed_pairs.split_packed_pairs(graph)

    def test_numbers_are_not_packed(self):
        def rotated(x):
            pairs = (x * 2).unflatten(-1, (-1, 2))
            return pairs[..., 0] - pairs[..., 1]

        x = randn(8, 16)
        self.assertEqual(self.split(rotated, x), 0)
        self.assertEqual(self.split(lambda x: by_pairs(x & 15), x.to(torch.int32)), 1)

    def test_what_is_read_is_not_computed(self):
        code = torch.zeros(8, 16, dtype=torch.uint8, device=GPU_TYPE)
        self.assertEqual(self.split(by_pairs, code), 0)

    def test_both_of_each_pair(self):
        code = torch.zeros(8, 16, dtype=torch.uint8, device=GPU_TYPE)
        self.assertEqual(self.split(lambda x: (x + 1)[:, ::2] | 1, code), 0)
        self.assertEqual(self.split(lambda x: (x + 1)[:, 2::2] | 1, code), 0)

    def test_results_need_a_pointwise_use(self):
        code = torch.zeros(8, 16, dtype=torch.uint8, device=GPU_TYPE)

        def f(x):
            y = x + 1
            return y[:, ::2], y[:, 1::2] << 4

        self.assertEqual(self.split(f, code), 0)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
