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
WORD = "triton_helpers.half_of_word(tl.load("
HALF_TYPES = (torch.bfloat16, torch.float16)


def half_args(rows, columns, dtype=torch.bfloat16):
    x, weight, dy, rstd = rms_norm_args(rows, columns, dtype)
    return x, weight, dy, rstd.to(dtype)


def scaled(x, scale):
    y = x * scale
    return y.sum(0), (y - y.mean(-1, keepdim=True)).to(x.dtype)


@nvidia_only
@instantiate_parametrized_tests
class LoadWordsTest(MixOrderTestCase):
    """A half-typed value of a row is loaded with the four bytes that it is in."""

    fuse = FUSE_ALL

    def words(self, code):
        """Loads by words before the loop over rows, and in it."""
        return tuple(part.count(WORD) for part in self.kernel(code))

    @parametrize("dtype", HALF_TYPES)
    @parametrize("rows,columns", ((8, 64), (134, 96), (134, 1024), (1030, 264)))
    def test_statistic(self, dtype, rows, columns):
        code = self.check(rms_norm_backward, *half_args(rows, columns, dtype))
        self.assertEqual(self.words(code), (0, 1))

    @parametrize("dtype", HALF_TYPES)
    def test_every_value(self, dtype):
        # denormals, infinities and NaN, of both signs, in both halves of a word
        patterns = torch.arange(-(2**15), 2**15, device=GPU_TYPE, dtype=torch.int16)
        scale = patterns.repeat_interleave(2).roll(1)[::16].view(dtype)[:, None]
        scale = scale.contiguous()

        x = torch.eye(8, dtype=dtype, device=GPU_TYPE).repeat(len(scale) // 8, 1)

        def f(x, scale):
            y = torch.where(x > 0, scale, 0)
            return y.sum(0), y.sum(-1)

        with inductor_config.patch(self.fuse):
            (_, actual), (code,) = run_and_get_code(torch.compile(f), x, scale)
        self.assertEqual(self.words(code), (0, 1))
        self.assertEqual(actual, scale[:, 0], rtol=0, atol=0, equal_nan=True)

    def test_reloaded_rows(self):
        code = self.generate(rms_norm_backward, *half_args(1030, 16384))
        self.assertIn("RSPLIT", code)
        self.assertEqual(self.words(code)[0], 0)
        self.assertGreater(self.words(code)[1], 0)

    def test_knob(self):
        args = half_args(134, 96)
        code = self.check(rms_norm_backward, *args, **{DEBUG: {"load_words": False}})
        self.assertNotIn(WORD, code)

    def test_float32(self):
        code = self.check(rms_norm_backward, *rms_norm_args(134, 96, torch.bfloat16))
        self.assertNotIn(WORD, code)

    @parametrize("dtype", HALF_TYPES)
    @parametrize("rows,columns", ((9, 64), (133, 96), (133, 1024), (1031, 264)))
    def test_odd(self, rows, columns, dtype):
        # the last word is not all the buffer's: its element is loaded before the loop
        code = self.check(rms_norm_backward, *half_args(rows, columns, dtype))
        before, loop = self.kernel(code)
        self.assertEqual(self.words(code), (0, 1))
        self.assertIn(f" + ({rows} - 1), {rows} > 0)", before)
        self.assertIn(f" != ({rows} - 1)", loop)

    def test_odd_is_not_read_beyond(self):
        # the element that follows the last is another's
        x = randn(133, 96, dtype=torch.bfloat16)
        storage = torch.full((134,), float("nan"), dtype=x.dtype, device=GPU_TYPE)
        scale = storage[:133].view(133, 1)
        scale.copy_(randn(133, 1))
        code = self.check(scaled, x, scale)
        self.assertEqual(self.words(code), (0, 1))

    def test_dynamic_rows(self):
        with inductor_config.patch(self.fuse):
            f = torch.compile(rms_norm_backward)
            for rows in (134, 133, 1031, 2, 4096):
                args = half_args(rows, 96)
                for arg in (args[0], args[2], args[3]):
                    torch._dynamo.mark_dynamic(arg, 0)
                self.compare(rms_norm_backward, f(*args), args)
        args = half_args(134, 96)
        for arg in (args[0], args[2], args[3]):
            torch._dynamo.mark_dynamic(arg, 0)
        code = self.check(rms_norm_backward, *args)
        self.assertEqual(self.words(code), (0, 1))

    @parametrize("elements", (1, 133, 134))
    def test_beyond_the_layout(self, elements):
        # as_strided reads what follows the elements of an input in its storage
        def f(x, scale):
            return scaled(x, scale.as_strided((133, 1), (2, 1)))

        base = randn(268, dtype=torch.bfloat16)
        x, scale = randn(133, 96, dtype=torch.bfloat16), base[:elements]
        with inductor_config.patch(self.fuse):
            actual, (code,) = run_and_get_code(torch.compile(f), x, scale)
        self.assertEqual(self.words(code), (0, 1))
        expect = scaled(x, base[:266].view(133, 2)[:, :1])
        self.assertEqual(actual, expect, atol=0.1, rtol=0.02)

    def test_programmatic_dependent_launch(self):
        # the kernel before may write the values
        x, scale = randn(133, 96, dtype=torch.bfloat16), randn(133, 1)
        options = {"triton.enable_pdl": True}
        code = self.generate(scaled, x, scale.bfloat16(), **options)
        before, loop = self.kernel(code)
        self.assertLess(before.index("gdc_wait()"), before.index(" + (133 - 1)"))
        self.assertNotIn("gdc_wait()", loop)

    def test_even_dynamic_rows(self):
        def f(x, scale):
            y = (x * scale).flatten(0, 1)
            return y.sum(0), y.sum(-1)

        x, scale = randn(67, 2, 96, dtype=torch.bfloat16), randn(67, 2, 1)
        scale = scale.bfloat16()
        for arg in (x, scale):
            torch._dynamo.mark_dynamic(arg, 0)
        code = self.check(f, x, scale)
        self.assertEqual(self.words(code), (0, 1))

    def test_unaligned(self):
        x = randn(134, 96, dtype=torch.bfloat16)
        scale = randn(136, 1, dtype=torch.bfloat16)[1:135]
        code = self.check(scaled, x, scale)
        self.assertNotIn(WORD, code)

    @parametrize("stride", (3, 2))
    def test_strided(self, stride):
        # 133 rows on: the last element is in the last half of a word, or in the first
        x = randn(134, 96, dtype=torch.bfloat16)
        scale = randn(134, stride, dtype=torch.bfloat16)[:, :1]
        code = self.check(scaled, x, scale)
        self.assertEqual(self.words(code), (0, 1))

    def test_a_row_of_several(self):
        def f(x, scale):
            y = x * scale.repeat_interleave(7, 0)
            return y.sum(0), y.sum(-1)

        x, scale = randn(7 * 20, 96, dtype=torch.bfloat16), randn(20, 1)
        self.check(f, x, scale.bfloat16())

    def test_gathered(self):
        def f(x, table, index):
            return scaled(x, table[index][:, None])

        index = torch.randint(0, 64, (134,), device=GPU_TYPE)
        x, table = randn(134, 96, dtype=torch.bfloat16), randn(64)
        code = self.check(f, x, table.bfloat16(), index)
        self.assertNotIn(WORD, code)

    def test_rows_that_are_not_aligned(self):
        # they are waited for as well
        code = self.generate(rms_norm_backward, *half_args(1030, 97))
        self.assertNotIn(WORD, code)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
