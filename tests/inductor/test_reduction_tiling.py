# Owner(s): ["module: inductor"]
"""Tiles of reductions along one dimension of several, and of what is repeated."""

import ast
import dataclasses
import os
import re
import tempfile
import unittest
from contextlib import nullcontext
from unittest import mock

import sympy
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch._inductor import (
    as_read_tile as as_read,
    block_reads,
    block_reduction_order,
    block_reduction_tile,
    metrics,
    narrow_copy,
    repeated_tensor,
    row_values,
    tiling_utils,
)
from torch._inductor.as_read_tile import as_read_tile
from torch._inductor.block_reduction_loops import (
    count_as,
    Strides,
    without_needless_modulo,
)
from torch._inductor.block_reduction_order import follow_writes, YFirstTile
from torch._inductor.block_reduction_tile import Access, BlockReductionTile, choose_tile
from torch._inductor.codegen import triton_utils
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.device_model import DeviceModel
from torch._inductor.graph import GraphLowering
from torch._inductor.narrow_copy import is_copied_narrower
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.runtime.triton_heuristics import GridExpr, persistent_reduction
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.tiling_utils import extract_normalized_read_writes
from torch._inductor.turned_results import Turned
from torch._inductor.utils import run_and_get_code
from torch._inductor.virtualized import V
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing


try:
    from torch._inductor.runtime.triton_heuristics import match_target_block_product
except ImportError:  # 2.15
    from torch._inductor.heuristics.triton_codegen.reduction import (
        _match_target_block_product as match_target_block_product,
    )


interpreted = os.environ.get("TRITON_INTERPRET") == "1"
on_a_gpu = unittest.skipIf(interpreted, "the interpreter runs no C++: needs a GPU")
on_cuda = unittest.skipIf(GPU_TYPE != "cuda", "not a CUDA GPU")


# Block reductions


TILED = {
    "triton.coalesce_tiling_analysis": True,
    "triton.prefer_nd_tiling": False,
    "triton.tile_reductions": False,
    "triton.max_tiles": None,
    "triton.persistent_reductions": True,
    "triton.force_cooperative_reductions": False,
    "triton.block_reduction_tiles": True,
    "triton.mix_order_reduction": False,
    "split_reductions": False,
    "loop_ordering_after_fusion": True,
    "deterministic": False,
    "max_autotune": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
}


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=GPU_TYPE).to(dtype)


def scale(x, block=32):
    blocks = x.reshape(*x.shape[:-1], -1, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(x.shape), amax.squeeze(-1)


def scale_other(x, block=32):
    """x [M, N] in blocks of M; the result is transposed."""
    return scale(x.t().contiguous(), block)


class BlockReductionTestBase(TestCase):
    def setUp(self):
        super().setUp()
        metrics.reset()

    def check(self, f, *args, kernels=1, ulps=2, **options):
        """
        Compile ``f``, expect ``kernels`` kernels, or one of them, and what eager returns in
        shape, stride and dtype, no further from eager in float64 than eager is, or ``ulps``.
        Returns the generated code.
        """
        with inductor_config.patch({**TILED, **options}):
            actual, code = run_and_get_code(torch.compile(f, fullgraph=True), *args)
        numbers = kernels if isinstance(kernels, tuple) else (kernels,)
        self.assertIn(metrics.generated_kernel_count, numbers)
        expected = f(*args)
        reference = f(*(a.double() for a in args))
        self.assertEqual(len(actual), len(expected))
        for act, expect, ref in zip(actual, expected, reference):
            self.assertEqual(act.shape, expect.shape)
            self.assertEqual(act.stride(), expect.stride())
            self.assertEqual(act.dtype, expect.dtype)
            if not act.is_floating_point():
                self.assertTrue(torch.equal(act, expect))
                continue
            error = (act.double() - ref.double()).norm()
            eager_error = (expect.double() - ref.double()).norm()
            ulp = torch.finfo(act.dtype).eps * ref.double().norm()
            self.assertLessEqual(error, max(1.1 * eager_error, ulps * ulp))
        return "\n".join(code)

    def size_hints(self, code):
        """The size hints of the one kernel."""
        found = re.findall(r"size_hints=(\{.*?\})", code)
        self.assertEqual(len(found), 1)
        return {k: int(v) for k, v in re.findall(r"'(\w+)': (\d+)", found[0])}

    def tile(self, code):
        """Blocks and warps of the one kernel that has a tile, or None."""
        found = re.findall(r"'tile': (\(\{.*?\}, \d+\))", code)
        self.assertLessEqual(len(found), 1)
        if not found:
            return None
        blocks, num_warps = ast.literal_eval(found[0])
        return {**blocks, "num_warps": num_warps}

    def alignment(self, code):
        """Bytes that the compiler may assume of the address of the first input."""
        return int(re.findall(r"\(0,\): \[\['tt.divisibility', (\d+)\]\]", code)[0])


@instantiate_parametrized_tests
class BlockReductionTilingTest(BlockReductionTestBase):
    """What Inductor does with a block reduction over a transposed input, as it is."""

    @parametrize("shape", ((2048, 1024), (256, 64)))
    def test_transposed_blocks_are_tiled(self, shape):
        code = self.check(scale_other, randn(*shape, dtype=torch.bfloat16))
        m, n = shape
        self.assertEqual(self.size_hints(code), {"y": m // 32, "x": n, "r0_": 32})
        # along x where it reads, along the block where it writes
        self.assertIn(f"x1 + {n}*r0_2 + {32 * n}*y0", code)
        self.assertIn(f"r0_2 + 32*y0 + {m}*x1", code)

    def test_a_contiguous_one_is_not(self):
        code = self.check(scale, randn(64, 64))
        self.assertEqual(self.size_hints(code), {"x": 128, "r0_": 32})

    @parametrize("target", (256, 1024, 4096))
    def test_block_product_goes_to_the_axis_that_coalesces_most(self, target):
        sizes = {"y": 512, "x": 16384, "r0_": 64}
        scores = {"y": 2**20, "x": 2**29, "r0_": 2**24}
        blocks = match_target_block_product(sizes, scores, target)
        self.assertEqual(blocks["y"] * blocks["x"] * blocks["r0_"], target)
        self.assertEqual(blocks["x"], max(blocks.values()))
        scores = {"y": 2**29, "x": 2**20, "r0_": 2**24}
        blocks = match_target_block_product(sizes, scores, target)
        self.assertEqual(blocks["y"], max(blocks.values()))

    def test_reads_and_writes_have_one_iteration_space(self):
        seen = []

        def look(nodes):
            seen.extend(extract_normalized_read_writes(node) for node in nodes)
            return nodes

        self.check(scale_other, randn(256, 64), _post_fusion_custom_pass=look)
        (both,) = seen
        self.assertEqual(sorted(both.var_ranges.values()), [8, 32, 64])
        self.assertEqual([both.var_ranges[v] for v in both.reduce_vars], [32])
        every = {*both.index_vars, *both.reduce_vars}
        for index in [*both.reads, *both.writes]:
            self.assertTrue(index.free_symbols <= every, f"{index} of {every}")
        (read,) = both.reads
        self.assertEqual(sorted(read.coeff(v) for v in every), [1, 64, 2048])

    def test_tile_reductions(self):
        def total(x):
            return (x.sum(),)

        x = randn(32, 48)[:, :24]
        for tiled in (True, False):
            metrics.reset()
            torch._dynamo.reset()
            code = self.check(
                total,
                x,
                **{"triton.tile_reductions": tiled, "triton.prefer_nd_tiling": True},
            )
            hints = self.size_hints(code)
            self.assertEqual("r1_" in hints, tiled, hints)


def scale_of(block):
    return lambda x: scale_other(x, block)


def norm_other(x, block=32):
    blocks = x.t().contiguous().reshape(x.shape[1], -1, block)
    variance, mean = torch.var_mean(blocks, -1, keepdim=True)
    return (((blocks - mean) * torch.rsqrt(variance + 1e-5)).reshape(x.t().shape),)


def sum_other(x):
    return (x.t().contiguous().reshape(x.shape[1], -1, 32).sum(-1),)


def argmax_other(x):
    return (x.t().contiguous().reshape(x.shape[1], -1, 32).argmax(-1),)


def scale_batched(x):
    return scale(x.transpose(1, 2).contiguous())


@instantiate_parametrized_tests
class BlockReductionTileTest(BlockReductionTestBase):
    """
    A persistent reduction that reads along one dimension and writes along another: a
    warp loads a line, a thread has its block to itself, stores are longer runs.
    """

    def test_lines_of_what_is_read(self):
        code = self.check(scale_other, randn(1024, 64, dtype=torch.bfloat16))
        tile = {"YBLOCK": 4, "XBLOCK": 64, "num_warps": 8}
        self.assertEqual(self.tile(code), tile)
        self.assertEqual(self.alignment(code), 4)

    def hints(self, code):
        """The eviction policies of its loads."""
        loads = [line for line in code.splitlines() if "tl.load(in_ptr" in line]
        found = [re.search(r"eviction_policy='evict_(\w+)'", line) for line in loads]
        return [each and each[1] for each in found]

    @on_cuda
    def test_what_the_cache_keeps(self):
        """What is read, where as much is stored and it is more than the cache has."""
        x, options = randn(1024, 64, dtype=torch.bfloat16), {"fx_graph_cache": False}

        def largest(x):
            return (x.t().contiguous().reshape(64, -1, 32).abs().amax(-1),)

        def hints(f, l2_bytes):
            torch._dynamo.reset()
            metrics.reset()
            with mock.patch.object(DeviceModel, "l2_bytes", l2_bytes):
                return self.hints(self.check(f, x, **options))

        self.assertEqual(hints(scale_other, 1), ["last"])
        self.assertEqual(hints(largest, 1), hints(largest, 2**40))

    def test_off(self):
        options = {"triton.block_reduction_tiles": False}
        code = self.check(scale_other, randn(128, 32), **options)
        self.assertIsNone(self.tile(code))
        self.assertEqual(self.alignment(code), 16)

    @parametrize(
        "block,tile",
        (
            (16, {"YBLOCK": 8, "XBLOCK": 32, "num_warps": 8}),
            (64, {"XBLOCK": 128, "num_warps": 8}),
            (256, {"XBLOCK": 32, "num_warps": 8}),
            (512, {"XBLOCK": 16, "num_warps": 8}),
            (1024, {"XBLOCK": 16, "num_warps": 16}),
        ),
    )
    def test_blocks_of_any_size_are_persistent(self, block, tile):
        code = self.check(scale_of(block), randn(max(256, block), 64))
        self.assertIn("@triton_heuristics.persistent_reduction", code)
        self.assertEqual(self.tile(code), tile)

    def test_a_block_that_does_not_fit_is_looped(self):
        code = self.check(scale_of(2048), randn(2048, 32))
        self.assertIn("@triton_heuristics.reduction", code)
        self.assertIsNone(self.tile(code))

    @parametrize("f", (sum_other, argmax_other))
    def test_results_of_blocks_alone(self, f):
        code = self.check(f, randn(512, 64))
        tile = {"YBLOCK": 32, "XBLOCK": 8, "num_warps": 8}
        self.assertEqual(self.tile(code), tile)

    def test_an_unaligned_input(self):
        x = randn(128 * 64 + 1)[1:].view(128, 64)
        self.check(scale_other, x)

    @parametrize("n", (16, 31))
    def test_less_than_a_line_is_left_alone(self, n):
        self.assertIsNone(self.tile(self.check(scale_other, randn(128, n))))

    def test_a_contiguous_one_is_left_alone(self):
        self.assertIsNone(self.tile(self.check(scale, randn(64, 64))))

    def test_too_few_programs_that_write_as_they_read(self):
        """One kernel, whose tile needs a program for each multiprocessor."""

        def f(x):
            blocks = x.reshape(-1, 32, x.shape[1])
            amax = blocks.abs().amax(1, keepdim=True)
            return (blocks / amax).reshape(x.shape), amax

        self.assertIsNone(self.tile(self.check(f, randn(64, 64))))

    def test_deterministic(self):
        x = randn(128, 64, dtype=torch.bfloat16)
        self.assertIsNotNone(self.tile(self.check(scale_other, x, deterministic=True)))

    def test_looped_where_persistent_reductions_are_off(self):
        options = {"triton.persistent_reductions": False}
        code = self.check(scale_other, randn(128, 64, dtype=torch.bfloat16), **options)
        self.assertIn("@triton_heuristics.reduction", code)
        self.assertIsNone(self.tile(code))

    def test_max_autotune_has_others_beside_it(self):
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        meta = {
            "tiling_scores": {"y": 1, "x": 16, "r0_": 32},
            "launch_plan": {"tile": ({"YBLOCK": 4, "XBLOCK": 64}, 4)},
        }
        sizes = {"y": 256, "x": 4096, "r0_": 32}
        configs = [
            persistent_reduction(
                sizes,
                triton_meta={"device": device},
                inductor_meta={**meta, "max_autotune": autotune},
                return_configs=True,
            )
            for autotune in (False, True)
        ]
        self.assertEqual(configs[0][0].kwargs, {"YBLOCK": 4, "XBLOCK": 64})
        self.assertEqual([len(c) for c in configs], [1, 5])
        self.assertEqual(configs[1][0], configs[0][0])


def access(nbytes, itemsize, **run):
    return Access(OrderedSet([f"buf{nbytes}"]), itemsize, nbytes, run)


SIZES = {"y": 256, "x": 4096, "r0_": 32}
READ = access(2**26, 2, x=128)
WRITE = access(2**26, 2, r0_=32, y=4)


@instantiate_parametrized_tests
class ChooseTileTest(TestCase):
    """``choose_tile`` alone, in bytes and elements."""

    @parametrize(
        "itemsize,block,tile",
        (
            (2, 32, ({"YBLOCK": 4, "XBLOCK": 64}, 8)),
            (2, 16, ({"YBLOCK": 8, "XBLOCK": 64}, 8)),
            (2, 128, ({"YBLOCK": 1, "XBLOCK": 64}, 8)),
            (2, 512, ({"YBLOCK": 1, "XBLOCK": 32}, 16)),
            (2, 1024, None),
            (4, 32, ({"YBLOCK": 8, "XBLOCK": 32}, 8)),
            (4, 1024, ({"YBLOCK": 1, "XBLOCK": 16}, 16)),
            (1, 32, ({"YBLOCK": 2, "XBLOCK": 128}, 8)),
        ),
    )
    def test_blocks_and_warps(self, itemsize, block, tile):
        read = access(2**26, itemsize, x=256 // itemsize)
        write = access(2**26, itemsize, r0_=min(block, 256 // itemsize))
        found = choose_tile(
            [read], [write, access(2**21, 2, y=128)], {**SIZES, "r0_": block}
        )
        self.assertEqual((found.blocks, found.num_warps) if found else None, tile)

    def test_a_second_input_has_a_place_in_registers(self):
        reads = [READ, access(2**26 - 1, 2, x=128)]
        found = choose_tile(reads, [WRITE], SIZES)
        self.assertEqual(found.blocks, {"YBLOCK": 2, "XBLOCK": 64})
        self.assertEqual(set(found.alignment.values()), {4})

    def test_lanes_load_as_many_elements_of_each_input(self):
        wide = access(2**27, 4, x=64)
        found = choose_tile([READ, wide], [WRITE], SIZES)
        self.assertEqual(found.blocks["XBLOCK"], 64)
        self.assertEqual(found.alignment, {f"buf{2**26}": 4, f"buf{2**27}": 8})

    def test_small_inputs_do_not_count(self):
        reads = [READ, access(2**20, 4, r0_=32)]
        found = choose_tile(reads, [WRITE], SIZES)
        self.assertEqual(found.alignment, {f"buf{2**26}": 4})

    @parametrize(
        "reads,writes",
        (
            ([], [WRITE]),
            ([access(2**26, 2, r0_=32)], [access(2**26, 2, x=128)]),
            ([READ, access(2**26, 2, r0_=32)], [WRITE]),
            ([READ, access(2**26, 2)], [WRITE]),
            ([access(2**26, 2, x=32)], [WRITE]),
            ([READ], [access(2**26, 2, x=128)]),
            ([READ], [WRITE, access(2**26, 2, x=128)]),
            ([READ], [access(2**21, 2, x=128)]),
        ),
    )
    def test_other_kernels_have_none(self, reads, writes):
        self.assertIsNone(choose_tile(reads, writes, SIZES))


@instantiate_parametrized_tests
class ShortBlocksTest(BlockReductionTestBase):
    """Short blocks are tiled with what continues them in memory."""

    def hints(self, code):
        """Size hints of the kernel that has a tile."""
        kernels = [k for k in code.split("async_compile.triton(") if "'tile': (" in k]
        self.assertEqual(len(kernels), 1)
        return self.size_hints(kernels[0])

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @parametrize("f", (scale_other, norm_other))
    def test_lines_and_runs(self, f, dtype):
        lane, block = 4 // dtype.itemsize, 64 // dtype.itemsize
        x = randn(8 * block, 32 * lane, dtype=dtype)
        code = self.check(lambda x: f(x, block), x)
        yblock = 8 if dtype == torch.float32 else 4
        tile = {"YBLOCK": yblock, "XBLOCK": 32 * lane, "num_warps": 8}
        self.assertEqual(self.tile(code), tile)
        self.assertEqual(self.alignment(code), 4)

    @parametrize("shape", ((2, 128, 64), (3, 96, 72)))
    def test_batched(self, shape):
        code = self.check(scale_batched, randn(*shape, dtype=torch.bfloat16))
        self.assertEqual(self.tile(code)["XBLOCK"], 64)

    @parametrize("rows,block", ((200, 40), (96, 32), (72, 24)))
    def test_no_multiple_of_the_tile(self, rows, block):
        code = self.check(scale_of(block), randn(rows, 72, dtype=torch.bfloat16))
        self.assertEqual(self.tile(code)["XBLOCK"], 64)

    def test_a_number_of_blocks_that_is_no_good_size(self):
        code = self.check(scale_of(40), randn(200, 72, dtype=torch.bfloat16))
        self.assertEqual(self.hints(code), {"y": 8, "x": 128, "r0_": 64})

    def test_without_another_result(self):
        code = self.check(norm_other, randn(128, 64, dtype=torch.bfloat16))
        self.assertEqual(self.hints(code), {"y": 4, "x": 64, "r0_": 32})

    def test_prefer_nd_tiling(self):
        x = randn(128, 64, dtype=torch.bfloat16)
        code = self.check(scale_other, x, **{"triton.prefer_nd_tiling": True})
        self.assertEqual(self.hints(code), {"y": 4, "x": 64, "r0_": 32})

    def test_max_tiles(self):
        x = randn(128, 64, dtype=torch.bfloat16)
        code = self.check(scale_other, x, **{"triton.max_tiles": 2})
        self.assertEqual(self.hints(code), {"x": 256, "r0_": 32})

    @parametrize("dims", ((0,), (1,), (0, 1)))
    def test_dynamic(self, dims):
        """Sizes and strides are symbols; the block is not."""

        def f(x):
            b = x.permute(2, 0, 1).contiguous()
            amax = b.abs().amax(-1, keepdim=True)
            return b / amax, amax.squeeze(-1)

        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True)
        for blocks, n in ((4, 64), (6, 72)):
            x = randn(blocks, 32, n, dtype=torch.bfloat16)
            for dim in dims:
                torch._dynamo.mark_dynamic(x, (0, 2)[dim])
            if 0 not in dims:
                x = x[:4].contiguous()
                torch._dynamo.mark_dynamic(x, 2)
            if 1 not in dims:
                x = x[..., :64].contiguous()
                torch._dynamo.mark_dynamic(x, 0)
            with inductor_config.patch(TILED):
                actual, code = run_and_get_code(compiled, x)
            for act, expect in zip(actual, f(x)):
                self.assertEqual(act, expect)
                self.assertEqual(act.stride(), expect.stride())
            if code:
                hints = self.hints("\n".join(code))
                self.assertEqual(hints, {"y": 4, "x": 64, "r0_": 32})


def scale_gelu(x):
    """What is computed before the reduction is needed after it."""
    blocks = x.t().contiguous().reshape(x.shape[1], -1, 32)
    blocks = torch.nn.functional.gelu(blocks)
    return ((blocks / blocks.abs().amax(-1, keepdim=True)).reshape(x.t().shape),)


def gelu_of_scaled(x):
    """What is computed after the reduction takes registers too."""
    blocks = x.t().contiguous().reshape(x.shape[1], -1, 32)
    scaled = blocks / blocks.abs().amax(-1, keepdim=True)
    return (torch.nn.functional.gelu(scaled).reshape(x.t().shape),)


def mx_cast(x):
    """By a power of two, which is computed of a block alone."""
    blocks = x.t().contiguous().reshape(x.shape[1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True).float()
    exponent = torch.floor(torch.log2(amax.clamp(min=2**-126)))
    scaled = (blocks.float() / torch.exp2(exponent)).clamp(-1.5, 1.5)
    return scaled.to(x.dtype).reshape(x.t().shape), exponent.squeeze(-1)


def scale_and_shift(x):
    """Two results of the size of x."""
    blocks = x.t().contiguous().reshape(x.shape[1], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(x.t().shape), (blocks - amax).reshape(x.t().shape)


FIRST_Y = "yoffset = (tl.program_id(0) % tl.cdiv(ynumel, YBLOCK))"
THEN_X = "xoffset = (tl.program_id(0) // tl.cdiv(ynumel, YBLOCK))"
NO_WIDE = mock.patch.object(block_reduction_order, "WIDE_PROGRAMS_PER_SM", 2**30)
ALL_WIDE = mock.patch.object(block_reduction_order, "WIDE_PROGRAMS_PER_SM", 0)
NO_FOLLOW = mock.patch.object(
    block_reduction_order, "follow_writes", lambda tile, *args, **kwargs: tile
)


@instantiate_parametrized_tests
class FollowWritesTest(BlockReductionTestBase):
    """
    The programs of a block reduction go along y, which continues the blocks in memory,
    and have twice as many columns of half types where there are many of them.
    """

    def assert_y_first(self, code, expected=True):
        for text in (FIRST_Y, THEN_X, "'grid_type': 'YFirstGrid'"):
            self.assertEqual(text in code, expected, text)

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @parametrize("rows,columns", ((160, 513), (288, 72), (1056, 64), (96, 200)))
    def test_programs_go_along_y(self, rows, columns, dtype):
        """Not where the next row follows within the same 256 bytes."""
        code = self.check(scale_other, randn(rows, columns, dtype=dtype))
        self.assert_y_first(code, rows * dtype.itemsize >= 256)

    @parametrize("f", (norm_other, scale_other, mx_cast))
    @parametrize("rows,columns", ((288, 200), (544, 136), (160, 520)))
    def test_wide_tiles(self, rows, columns, f):
        x = randn(rows, columns, dtype=torch.bfloat16)
        with ALL_WIDE:
            code = self.check(f, x)
        self.assert_y_first(code)
        self.assertEqual(self.tile(code)["XBLOCK"], 128)
        self.assertEqual(self.alignment(code), 8)
        self.assertIn("'maxnreg': 80", code)

    @parametrize("f", (scale_gelu, gelu_of_scaled, scale_and_shift))
    def test_no_wide_tiles_where_registers_hold_more(self, f):
        x = randn(288, 200, dtype=torch.bfloat16)
        with ALL_WIDE:
            code = self.check(f, x, ulps=4)
        self.assert_y_first(code)
        self.assertEqual(self.tile(code)["XBLOCK"], 64)
        self.assertNotIn("'maxnreg'", code)

    @parametrize("columns", (130, 133))
    def test_wide_tiles_of_columns_that_are_not_aligned(self, columns):
        x = randn(128, columns, dtype=torch.bfloat16)
        with ALL_WIDE:
            code = self.check(scale_other, x)
        self.assertEqual(self.tile(code)["XBLOCK"], 128)

    def test_wide_tiles_of_an_unaligned_input(self):
        x = randn(128 * 136 + 1, dtype=torch.bfloat16)[1:].view(128, 136)
        with ALL_WIDE:
            self.check(scale_other, x)

    @parametrize("wide", (False, True))
    def test_batched(self, wide):
        with ALL_WIDE if wide else NO_WIDE:
            code = self.check(scale_batched, randn(3, 160, 136, dtype=torch.bfloat16))
        self.assert_y_first(code)
        self.assertEqual(self.tile(code)["XBLOCK"], 128 if wide else 64)

    def test_off(self):
        x = randn(288, 200, dtype=torch.bfloat16)
        with ALL_WIDE, NO_FOLLOW:
            code = self.check(scale_other, x)
        self.assert_y_first(code, False)
        tile = {"YBLOCK": 4, "XBLOCK": 64, "num_warps": 8}
        self.assertEqual(self.tile(code), tile)
        self.assertEqual(self.alignment(code), 4)

    def test_the_results_are_the_same(self):
        x = randn(288, 200, dtype=torch.bfloat16)
        results = []
        for follow in (False, True, False):
            torch._dynamo.reset()
            # caches do not know of what is patched here
            options = {**TILED, "force_disable_caches": True}
            order = nullcontext() if follow else NO_FOLLOW
            with inductor_config.patch(options), ALL_WIDE, order:
                results.append(torch.compile(scale_other)(x))
        for result in results[1:]:
            for act, expect in zip(result, results[0]):
                self.assertTrue(torch.equal(act, expect))

    @parametrize("yblock,xblock", ((1, 16), (2, 128), (16, 8)))
    def test_other_tiles(self, yblock, xblock):
        """As `max_autotune` may choose them."""
        blocks = {"YBLOCK": yblock, "XBLOCK": xblock}

        def other(tile, *args, **kwargs):
            return YFirstTile(blocks, tile.num_warps, tile.alignment)

        with mock.patch.object(block_reduction_order, "follow_writes", other):
            code = self.check(scale_other, randn(160, 72))
        self.assert_y_first(code)
        self.assertEqual(self.tile(code), {**blocks, "num_warps": 8})

    @parametrize("follow", (True, False))
    @parametrize("blocks", (10, 100))
    def test_more_blocks_than_an_axis_of_the_grid(self, blocks, follow):
        """An axis of 5 programs, in place of 65535."""
        limit = mock.Mock(return_value=5)
        with (
            mock.patch("torch._inductor.codegen.triton.get_max_y_grid", limit),
            mock.patch.object(triton_heuristics, "get_max_y_grid", limit),
            nullcontext() if follow else NO_FOLLOW,
        ):
            code = self.check(scale_of(20), randn(20 * blocks, 40))
        self.assert_y_first(code, follow)
        overflow = not follow
        self.assertEqual("tl.program_id(2)" in code, overflow)
        self.assertEqual("Grid2DWithYZOverflow" in code, overflow)

    @parametrize("cpp", (True, False))
    def test_grid(self, cpp):
        blocks = {"YBLOCK": 4, "XBLOCK": 64}
        meta = {"grid_type": "YFirstGrid"}
        grid = GridExpr.from_meta(meta, blocks, mode="cpp" if cpp else "python")
        self.assertEqual((grid.y_grid, grid.z_grid), (1, 1))
        expression = grid.x_grid.replace("/", "//") if cpp else grid.x_grid
        for y, x, programs in ((4, 64, 1), (5, 63, 2), (9, 129, 9), (2**20, 65, 2**19)):
            sizes = {"ynumel": y, "xnumel": x}
            self.assertEqual(eval(expression, sizes), programs)

    def test_dynamic(self):
        torch._dynamo.reset()
        compiled = torch.compile(scale_blocks, fullgraph=True)
        for blocks, n in ((4, 64), (9, 200), (33, 72)):
            x = randn(blocks, 32, n, dtype=torch.bfloat16)
            for dim in (0, 2):
                torch._dynamo.mark_dynamic(x, dim)
            with inductor_config.patch(TILED):
                actual, code = run_and_get_code(compiled, x)
            reference = scale_blocks(x.double())
            for act, expect, ref in zip(actual, scale_blocks(x), reference):
                self.assertEqual(act.stride(), expect.stride())
                self.assertEqual(act.double(), ref, atol=0, rtol=2**-7)
            if code:
                self.assert_y_first("\n".join(code))

    def test_combo_kernels_are_left_alone(self):
        def f(x, y):
            return *scale_other(x), *scale_other(y)

        x, y = randn(288, 72), randn(160, 96)
        code = self.check(f, x, y, combo_kernels=True)
        self.assertIn("'combo_grid_meta'", code)
        self.assert_y_first(code, False)

    @on_a_gpu
    def test_cpp_wrapper(self):
        x = randn(288, 200, dtype=torch.bfloat16)
        self.assert_y_first(self.check(scale_other, x, cpp_wrapper=True))

    def test_blocks_that_x_continues_are_left_alone(self):
        """A result [M / 32, N, 32]."""

        def f(x):
            blocks = x.reshape(-1, 32, x.shape[1]).transpose(1, 2).contiguous()
            return (blocks / blocks.abs().amax(-1, keepdim=True),)

        code = self.check(f, randn(288, 72, dtype=torch.bfloat16))
        self.assertIsNotNone(self.tile(code))
        self.assert_y_first(code, False)

    def test_results_of_blocks_alone_are_left_alone(self):
        code = self.check(sum_other, randn(512, 64))
        self.assertIsNotNone(self.tile(code))
        self.assert_y_first(code, False)


def both_ways(f):
    """``f`` by blocks of columns, and of rows, which are transposed."""
    return lambda x: (*f(x), *f(x.t().contiguous()))


def flattened(x, block=32):
    blocks = x.reshape(-1, block)
    amax = blocks.abs().amax(1).unsqueeze(1)
    return (blocks / amax).reshape(x.shape), amax


def flattened_both_ways(x):
    """Transposed back."""
    scaled, amax = flattened(x.t().contiguous())
    return *flattened(x), scaled.t(), amax


def scale_moved(x):
    """Of what is computed of the matrix."""
    return scale(x * 0.5 - 1)


def cast(x):
    """To a type of a byte, of the scaled values."""
    blocks = x.reshape(x.shape[0], -1, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    values = (blocks / amax).to(torch.float8_e4m3fn)
    return values.reshape(x.shape).view(torch.uint8), amax.squeeze(-1)


def centered_scale(x):
    """Two reductions of a block, of which the second needs the first."""
    blocks = x.reshape(x.shape[0], -1, 32)
    centered = blocks - blocks.sum(-1, keepdim=True) / 32
    amax = centered.abs().amax(-1, keepdim=True)
    return (centered / amax).reshape(x.shape), amax.squeeze(-1)


def ranges(x):
    """The least value and the range of a block, the latter stored as another type."""
    blocks = x.reshape(x.shape[0], -1, 32)
    least, most = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    return (blocks - least).reshape(x.shape), least, (most - least).half().squeeze(-1)


@on_cuda
@instantiate_parametrized_tests
class BothDirectionsTest(BlockReductionTestBase):
    """A matrix that is reduced by blocks of rows and of columns is read once."""

    def read(self, code, name="in_ptr0"):
        """How often a kernel loads what."""
        return code.count(f"tl.load({name} ")

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize(
        "f",
        (
            both_ways(scale),
            flattened_both_ways,
            both_ways(scale_moved),
            both_ways(centered_scale),
            both_ways(ranges),
        ),
    )
    def test_one_kernel(self, f, dtype):
        code = self.check(f, randn(128, 256, dtype=dtype))
        self.assertEqual(self.read(code), 1)
        self.assertIn("tl.reshape", code)

    @parametrize("blocks", ((32, 64), (64, 32), (64, 64)))
    def test_blocks(self, blocks):
        """Of rows and of columns are of their own sizes."""
        rows, columns = blocks
        self.check(
            lambda x: (*scale(x, columns), *scale_other(x, rows)), randn(128, 256)
        )

    @parametrize("shape", ((64, 128), (96, 160), (4128, 416), (192, 4160)))
    def test_no_multiple_of_the_tile(self, shape):
        self.check(both_ways(scale), randn(*shape))

    def test_rows_apart(self):
        """A matrix of which a row does not begin where another ends."""
        code = self.check(both_ways(scale), randn(128, 320)[:, 17:273])
        self.assertEqual(self.read(code), 1)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize(
        "f",
        (
            lambda x: x + x.t(),
            lambda x: x - x.t(),
            lambda x: x.t() * 2 + x,
            lambda x: x * x.t() - 1,
        ),
    )
    def test_beside_its_transpose(self, f, dtype):
        """Of a square matrix: what is read transposed has the strides of the other blocks."""

        def both(x):
            return *scale(f(x)), *scale_other(f(x))

        # of x - x.t(), the last row and the last column alone have no zero in a block
        x = randn(128, 128, dtype=dtype) + torch.arange(128, device=GPU_TYPE)
        self.check(both, x.to(dtype), kernels=(1, 2, 3))

    def test_kept_apart(self):
        """As of two streams, on 2.15."""
        reason = mock.Mock(return_value="streams differ")
        with mock.patch("torch._inductor.block_directions.why_kept_apart", reason):
            self.check(both_ways(scale), randn(128, 256), kernels=2)

    def test_rows_of_a_batch(self):
        code = self.check(lambda x: both_ways(scale)(x.flatten(0, 1)), randn(4, 32, 256))
        self.assertEqual(self.read(code), 1)

    def test_another_input(self):
        """And what has a value for each row, or for each column."""

        def f(x, y, row, column):
            x = (x + y) * row[:, None] + column
            return both_ways(scale)(x)

        inputs = randn(128, 256), randn(128, 256), randn(128), randn(256)
        code = self.check(f, *inputs, ulps=8)
        self.assertEqual(self.read(code, "in_ptr1"), 1)

    @parametrize(
        "f, tile",
        (
            (scale_moved, (64, 64)),
            (cast, (32, 64)),
            (lambda x: cast(F.silu(x)), (32, 64)),
            (lambda x: scale(x * x[:1]), (32, 128)),
        ),
    )
    def test_tile(self, f, tile):
        """By the bytes of results, and by what rows or columns share."""
        code = self.check(both_ways(f), randn(128, 256), ulps=8)
        rows, columns = tile
        self.assertIn(f"'YBLOCK': {rows}, 'XBLOCK': {columns}", code)

    @parametrize("products, kernels", ((1, 1), (80, 2)))
    def test_far_apart(self, products, kernels):
        """Casts that are far apart in the graph stay so: what is between may need memory."""

        def f(x, y):
            rows = scale(x)
            for _ in range(products):
                y = y @ y
            return (*rows, y, *scale_other(x))

        self.check(f, randn(128, 256), torch.eye(16, device=GPU_TYPE), kernels=kernels)

    def test_two_matrices(self):
        self.check(
            lambda x, y: (*both_ways(scale)(x), *both_ways(scale)(y)),
            randn(128, 256),
            randn(96, 160),
            kernels=2,
        )

    def test_matrices_of_one_another(self):
        """The blocks of the second are of what the first gives."""

        def f(x):
            a, b, c, d = both_ways(scale)(x)
            return b, c, d, *both_ways(scale)(a)

        self.check(f, randn(128, 256), kernels=(2, 3))

    @parametrize(
        "f",
        (
            # read along one dimension only
            lambda x: (*scale(x), *scale(x + 1)),
            # of all rows, not of blocks
            lambda x: (*scale(x), x.abs().amax(0)),
            # a slow function, in each layout
            both_ways(lambda x: scale(torch.tanh(x))),
            # the one needs the other
            lambda x: scale_other(scale(x)[0]),
        ),
    )
    def test_others_are_left_alone(self, f):
        code = self.check(f, randn(128, 256), kernels=(1, 2, 3))
        self.assertNotIn("blocks_y", code)

    @parametrize("shape", ((32, 256), (128, 32)))
    def test_less_than_a_tile_is_left_alone(self, shape):
        code = self.check(both_ways(scale), randn(*shape), kernels=2)
        self.assertNotIn("blocks_y", code)

    @parametrize("block", (16, 128))
    def test_other_blocks_are_left_alone(self, block):
        code = self.check(
            lambda x: (*scale(x), *scale_other(x, block)), randn(256, 256), kernels=2
        )
        self.assertNotIn("blocks_y", code)

    def test_dynamic_is_left_alone(self):
        x = randn(128, 256)
        torch._dynamo.mark_dynamic(x, 0)
        code = self.check(both_ways(scale), x, kernels=(2, 3))
        self.assertNotIn("blocks_y", code)

    def test_off(self):
        options = {"triton.block_reduction_tiles": False}
        code = self.check(both_ways(scale), randn(128, 256), kernels=2, **options)
        self.assertNotIn("blocks_y", code)

    def test_combo_kernels_are_left_alone(self):
        self.check(
            both_ways(scale), randn(128, 256), kernels=(1, 2), combo_kernels=True
        )

    def test_debugged(self):
        """What is written of the nodes needs no kernel of each."""
        with (
            tempfile.TemporaryDirectory() as folder,
            torch._dynamo.config.patch(debug_dir_root=folder),
        ):
            options = {"trace.enabled": True, "force_disable_caches": True}
            self.check(both_ways(scale), randn(128, 256), **options)
            self.assertTrue(any(files for _, _, files in os.walk(folder)))

    @on_a_gpu
    def test_cpp_wrapper(self):
        self.check(both_ways(scale), randn(128, 256), cpp_wrapper=True)


def turning():
    """Where a kernel more takes no time."""
    of = mock.Mock(return_value=block_reduction_order.DeviceModel(launch_bytes=0))
    return mock.patch("torch._inductor.turned_results.DeviceModel.of", of)


@on_cuda
@instantiate_parametrized_tests
class TurnedResultsTest(BlockReductionTestBase):
    """Results of blocks of both directions, which a second kernel brings into order."""

    def check_turned(self, f, *args, results, kernels, **options):
        with turning():
            code = self.check(f, *args, kernels=kernels, **options)
        numbers = results if isinstance(results, tuple) else (results,)
        self.assertIn(code.count("tl.store(ws_ptr "), numbers)
        return code

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("f", (both_ways(scale), flattened_both_ways, both_ways(scale_moved)))
    def test_a_kernel_for_each(self, f, dtype):
        x = randn(128, 192, dtype=dtype)
        self.check_turned(f, x, results=2, kernels=3)

    @parametrize("f", (both_ways(scale), both_ways(cast)))
    def test_one_kernel_of_the_same_sizes(self, f):
        self.check_turned(f, randn(128, 128), results=2, kernels=2)

    @parametrize("shape", ((64, 128), (96, 160), (4128, 416), (192, 4160)))
    def test_no_multiple_of_the_tile(self, shape):
        self.check_turned(both_ways(scale), randn(*shape), results=2, kernels=3)

    @parametrize("blocks", ((32, 64), (64, 32), (64, 64)))
    def test_blocks(self, blocks):
        rows, columns = blocks
        self.check_turned(
            lambda x: (*scale(x, columns), *scale_other(x, rows)),
            randn(128, 256),
            results=2,
            kernels=3,
        )

    def test_rows_apart(self):
        x = randn(128, 320)[:, 17:273]
        self.check_turned(both_ways(scale), x, results=2, kernels=3)

    def test_of_one_type(self):
        """The least values of blocks; their ranges, which are of another, at once."""
        code = self.check_turned(
            both_ways(ranges), randn(128, 192), results=2, kernels=3
        )
        self.assertIn("torch.float32)\n", code[code.index("workspace_0 = ") :])

    def test_of_reductions_and_of_what_follows(self):
        def f(x):
            scaled, amax = scale(x)
            return scaled, amax, amax * 2

        # 2.15 has a kernel for the double of one
        numbers = {"results": (3, 4), "kernels": (3, 4)}
        self.check_turned(both_ways(f), randn(128, 192), **numbers)

    def test_what_is_in_order_already(self):
        """The rows of blocks of columns follow each other."""

        def f(x):
            scaled, amax = scale_other(x)
            return *scale(x), scaled, amax.t().contiguous()

        self.check_turned(f, randn(128, 192), results=1, kernels=(2, 3))

    def test_what_the_kernel_alone_reads_is_left_alone(self):
        def f(x):
            return (scale(x)[0],)

        self.check_turned(both_ways(f), randn(128, 192), results=0, kernels=1)

    def test_little_is_left_alone(self):
        """Of as many bytes as pass in the time of a kernel."""
        code = self.check(both_ways(scale), randn(128, 192))
        self.assertNotIn("ws_ptr", code)

    @parametrize(
        "columns, itemsize, pays",
        ((2048, 1, False), (3072, 1, True), (3072, 4, False), (4096, 4, True)),
    )
    def test_pays(self, columns, itemsize, pays):
        """Of [4096, columns] by blocks of 32 rows, with 32 rows of a tile."""
        turned = Turned((128, columns), (1, 128))
        device = block_reduction_order.DeviceModel()
        self.assertEqual(turned.pays(128 * columns, itemsize, device), pays)

    def test_sectors(self):
        """A tile of bytes has 32 rows, and 64 columns: a sector for each of either."""
        found = {}

        def pays(turned, sectors, itemsize, device):
            found[turned.sizes] = sectors
            return False

        with mock.patch.object(Turned, "pays", pays):
            self.check(both_ways(cast), randn(128, 192))
        self.assertEqual(found, {(6, 128): 128 * 192 // 64, (4, 192): 128 * 192 // 32})

    def test_results_of_columns_are_stored_before_rows_are_reduced(self):
        code = self.check(both_ways(scale), randn(128, 192))
        lines = [line for line in code.splitlines() if "tl.store" in line or "max2" in line]
        kinds = ["max2" in line for line in lines]
        self.assertEqual(kinds, [True, False, False, True, False, False])

    @on_a_gpu
    def test_cpp_wrapper(self):
        x = randn(128, 192)
        with turning():
            self.check(both_ways(scale), x, kernels=3, cpp_wrapper=True)


def scale_blocks(x):
    """x [M / 32, 32, N]; the result is transposed."""
    b = x.permute(2, 0, 1).contiguous()
    amax = b.abs().amax(-1, keepdim=True)
    return b / amax, amax.squeeze(-1)


TILE = BlockReductionTile({"YBLOCK": 4, "XBLOCK": 64}, 8, {f"buf{2**26}": 4})
MANY = {"y": 512, "x": 16384, "r0_": 32}
H200, ONE_SM = (block_reduction_order.DeviceModel(sms=n) for n in (132, 1))


def y_first(tile):
    return YFirstTile(tile.blocks, tile.num_warps, tile.alignment)


@instantiate_parametrized_tests
class ChooseOrderTest(TestCase):
    """``follow_writes`` alone, in bytes and elements."""

    def test_many_programs_are_wide(self):
        found = follow_writes(TILE, [READ], [WRITE], MANY, H200)
        self.assertEqual(found.blocks, {"YBLOCK": 4, "XBLOCK": 128})
        self.assertEqual(found.alignment, {f"buf{2**26}": 8})
        self.assertIsInstance(found, YFirstTile)
        self.assertEqual(found.num_warps, 8)
        self.assertEqual(found.max_registers, 80)

    def test_registers_of_a_compiled_kernel(self):
        device = DeviceProperties.create(torch.device(GPU_TYPE))
        for meta in ({"maxnreg": 80}, {}):
            options = triton_heuristics.CachingAutotuner._create_compile_options(
                mock.Mock(device_props=device, inductor_meta={"launch_plan": meta}),
                mock.Mock(spec=["num_warps"]),
                {"num_warps": 8, "num_stages": 1, "debug": False},
            )
            self.assertEqual(options.get("maxnreg"), meta.get("maxnreg"))

    def test_two_results(self):
        writes = [WRITE, access(2**26 - 1, 2, r0_=32, y=4)]
        found = follow_writes(TILE, [READ], writes, MANY, ONE_SM)
        self.assertEqual(found, y_first(TILE))

    def test_what_is_computed_first(self):
        found = follow_writes(TILE, [READ], [WRITE], MANY, ONE_SM, may_widen=False)
        self.assertEqual(found, y_first(TILE))

    @parametrize(
        "y,x,wide",
        (
            (512, 16384, True),
            (1032, 5120, True),
            (128, 14336, True),
            (256, 4096, False),
        ),
    )
    def test_programs_a_multiprocessor(self, y, x, wide):
        sizes = {"y": y, "x": x, "r0_": 32}
        found = follow_writes(TILE, [READ], [WRITE], sizes, H200)
        self.assertEqual(found.blocks["XBLOCK"], 128 if wide else 64)
        self.assertIsInstance(found, YFirstTile)

    @parametrize(
        "itemsize,block,wide",
        ((2, 16, True), (2, 32, True), (2, 64, False), (2, 128, False), (4, 32, False)),
    )
    def test_registers(self, itemsize, block, wide):
        reads = [access(2**26, itemsize, x=256 // itemsize)]
        writes = [access(2**26, itemsize, r0_=block)]
        tile = choose_tile(reads, writes, {**MANY, "r0_": block})
        found = follow_writes(tile, reads, writes, {**MANY, "r0_": block}, ONE_SM)
        self.assertIsInstance(found, YFirstTile)
        xblock = tile.blocks["XBLOCK"]
        self.assertEqual(found.blocks["XBLOCK"], 2 * xblock if wide else xblock)

    def test_two_inputs_at_one_index(self):
        both = dataclasses.replace(READ, buffers=OrderedSet(["buf0", "buf1"]))
        found = follow_writes(TILE, [both], [WRITE], MANY, ONE_SM)
        self.assertEqual(found, y_first(TILE))

    def test_two_inputs(self):
        reads = [READ, access(2**26 - 1, 2, x=128)]
        tile = choose_tile(reads, [WRITE], MANY)
        found = follow_writes(tile, reads, [WRITE], MANY, ONE_SM)
        self.assertEqual(found, y_first(tile))

    def test_short_rows(self):
        found = follow_writes(TILE, [access(2**26, 2, x=64)], [WRITE], MANY, ONE_SM)
        self.assertEqual(found, y_first(TILE))

    @parametrize(
        "reads,writes,sizes",
        (
            ([READ], [WRITE], {"x": 4096, "r0_": 32}),
            ([access(2**26, 2, y=128)], [WRITE], MANY),
            ([READ], [access(2**26, 2, r0_=32, x=4)], MANY),
            ([READ], [access(2**26, 2, y=128)], MANY),
            ([READ], [access(2**21, 2, r0_=32)], MANY),
        ),
    )
    def test_others_stay(self, reads, writes, sizes):
        self.assertEqual(follow_writes(TILE, reads, writes, sizes, ONE_SM), TILE)


def heads_first(x, value):
    """x [B, T, H, D] by a value of each row, [B, H, T, D]."""
    return ((x * value).to(x.dtype).transpose(1, 2).contiguous(),)


def grouped_heads_first(x, value):
    """The same for two groups a head, as the keys of grouped-query attention."""
    (y,) = heads_first(x, value)
    return (y.repeat_interleave(2, 1),)


def no_variables(reads_writes):
    return OrderedSet()


def tiling_row_values(tile=True):
    """
    Give a pointwise tile a dimension for the sake of values of rows as well.

    From 2.15 on the analysis itself has none for what one dimension has coalesced, whatever
    the row's length.
    """
    variables = no_variables if tile else row_values.variables_of_row_values
    return mock.patch.object(row_values, "variables_of_row_values", variables)


# repeats are copied by kernels of their own
@mock.patch.object(repeated_tensor, "MAX_STORED_REPEATS", 1)
@instantiate_parametrized_tests
class RowValuesTest(BlockReductionTestBase):
    """Scattered values of rows are no reason for a dimension of a pointwise tile."""

    # as 2.15 has it
    one_dimension = hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes")

    def inputs(self, shape, dtype):
        return randn(*shape, dtype=dtype), randn(*shape[:-1], 1)

    def two_dimensions(self, y, x):
        """The size hints of a tile that has one for the values, where the release may."""
        return {"x": y * x} if self.one_dimension else {"y": y, "x": x}

    @parametrize("columns", (32, 64))
    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_one_dimension(self, dtype, columns):
        x, value = self.inputs((8, 16, 4, columns), dtype)
        code = self.check(grouped_heads_first, x, value)
        self.assertEqual(self.size_hints(code), {"x": 1024 * columns})

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_tile_row_values(self, dtype):
        inputs = self.inputs((8, 16, 4, 32), dtype)
        with tiling_row_values():
            code = self.check(grouped_heads_first, *inputs)
        self.assertEqual(self.size_hints(code), self.two_dimensions(32, 1024))

    @parametrize("shape", ((3, 7, 5, 33), (1, 129, 3, 65), (5, 1, 32, 40)))
    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_odd_sizes(self, shape, dtype):
        code = self.check(grouped_heads_first, *self.inputs(shape, dtype))
        self.assertEqual(list(self.size_hints(code)), ["x"])

    def test_the_results_are_the_same(self):
        inputs = self.inputs((8, 16, 4, 32), torch.bfloat16)
        results = []
        for tile in (False, True, False):
            torch._dynamo.reset()
            options = {**TILED, "force_disable_caches": True}
            with inductor_config.patch(options), tiling_row_values(tile):
                (result,) = torch.compile(grouped_heads_first)(*inputs)
            results.append(result)
        self.assertTrue(torch.equal(results[0], results[1]))
        self.assertTrue(torch.equal(results[0], results[2]))

    def test_values_that_one_dimension_has(self):
        """Without groups the tile is of rows and columns: a row has one value in it."""
        code = self.check(heads_first, *self.inputs((8, 16, 4, 32), torch.bfloat16))
        self.assertEqual(self.size_hints(code), self.two_dimensions(512, 32))

    def test_rows_of_fewer_elements(self):
        inputs = self.inputs((8, 16, 4, 16), torch.bfloat16)
        code = self.check(grouped_heads_first, *inputs)
        self.assertEqual(self.size_hints(code), self.two_dimensions(32, 512))

    def test_another_read_along_them(self):
        """A tensor [B, T, D, H] is contiguous where the values are."""

        def f(x, value, other):
            (y,) = grouped_heads_first(x, value)
            return (y + other.permute(0, 3, 1, 2).repeat_interleave(2, 1),)

        inputs = self.inputs((8, 16, 4, 32), torch.float32)
        code = self.check(f, *inputs, randn(8, 16, 32, 4))
        self.assertEqual(self.size_hints(code), {"y": 64, "x": 512})

    @parametrize("tile", (False, True))
    def test_dynamic(self, tile):
        torch._dynamo.reset()
        compiled = torch.compile(grouped_heads_first, fullgraph=True)
        options = {**TILED, "force_disable_caches": True}
        for tokens in (16, 24):
            inputs = self.inputs((8, tokens, 4, 32), torch.bfloat16)
            for tensor in inputs:
                torch._dynamo.mark_dynamic(tensor, 1)
            with inductor_config.patch(options), tiling_row_values(tile):
                (actual,), codes = run_and_get_code(compiled, *inputs)
            (expected,) = grouped_heads_first(*inputs)
            self.assertEqual(actual, expected)
            self.assertEqual(actual.stride(), expected.stride())
            for code in codes:
                hints = ["y", "x"] if tile and not self.one_dimension else ["x"]
                self.assertEqual(list(self.size_hints(code)), hints)


# Repeats of an expanded tensor


REPEATED = {"loop_ordering_after_fusion": True, "split_reductions": False}


def repeated_heads_first(x, groups):
    """[B, T, H, D] -> [B, H * groups, T, D]."""
    return x.transpose(1, 2).repeat_interleave(groups, 1)


def normed_keys(groups):
    return lambda x: repeated_heads_first(F.rms_norm(x, x.shape[-1:]), groups)


@on_cuda
@instantiate_parametrized_tests
class RepeatedTensorTest(TestCase):
    def check(self, f, x, kernels, stores, dynamic=False, **options):
        """Kernels of the code, and the stores of whole tensors in the last one."""
        torch._dynamo.reset()
        if dynamic:
            torch._dynamo.mark_dynamic(x, 1)
        with inductor_config.patch({**REPEATED, **options}):
            compiled = torch.compile(f, fullgraph=True)
            actual, code = run_and_get_code(compiled, x)
        expect, exact = f(x), f(x.double())
        self.assertEqual(actual.dtype, expect.dtype)
        self.assertEqual(actual.shape, expect.shape)
        self.assertEqual(actual.stride(), expect.stride())
        error = (actual.double() - exact).norm()
        ulp = torch.finfo(x.dtype).eps * exact.norm()
        self.assertLessEqual(
            error, torch.maximum(2 * (expect.double() - exact).norm(), ulp)
        )
        sources = re.findall(r"@triton\.jit\n(.*?)\n''', device_str", code[0], re.S)
        self.assertEqual(len(sources), kernels)
        self.assertEqual(len(re.findall(r"tl\.store\(out_ptr", sources[-1])), stores)
        return code[0]

    def keys(self, dtype=torch.bfloat16, shape=(2, 24, 3, 64)):
        return torch.randn(shape, device=GPU_TYPE).to(dtype)

    @parametrize("dtype", (torch.bfloat16, torch.float32))
    @parametrize("groups", (2, 3, 8))
    def test_norm(self, groups, dtype):
        self.check(normed_keys(groups), self.keys(dtype), 1, groups)

    def test_off(self):
        with mock.patch.object(repeated_tensor, "MAX_STORED_REPEATS", 1):
            self.check(normed_keys(2), self.keys(), 2, 1)

    @parametrize("groups", (2, 8))
    def test_no_norm(self, groups):
        code = self.check(lambda x: repeated_heads_first(x, groups), self.keys(), 1, groups)
        self.assertEqual(code.count("tl.load("), 1)

    def test_dynamic_tokens(self):
        self.check(normed_keys(2), self.keys(), 1, 2, dynamic=True)

    def test_too_many_repeats(self):
        self.check(normed_keys(9), self.keys(), 2, 1)

    def test_matrix_product(self):
        # takes it from memory, by way of views
        def f(x):
            keys = repeated_heads_first(x.relu(), 2)
            return keys @ keys.transpose(-1, -2)

        self.check(f, self.keys(torch.float32), 1, 2)

    def test_custom_operator(self):
        # is not known to be a fallback before it is lowered once
        with torch.library._scoped_library("repeated_tensor", "FRAGMENT") as library:
            library.define("double(Tensor x) -> Tensor")
            library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
            double = torch.ops.repeated_tensor.double

            def f(x):
                return double(normed_keys(2)(x))

            for _ in range(2):
                self.check(f, self.keys(torch.float32), 1, 2)

    def test_fused_with_what_uses_it(self):
        # the repeats are never stored
        self.check(lambda x: repeated_heads_first(x, 2) + 1, self.keys(), 1, 1)

    def test_short_runs(self):
        # of 16 elements of a half type, and of one
        self.check(
            lambda x: x.repeat_interleave(2, -2), self.keys(shape=(64, 2, 16)), 1, 1
        )
        self.check(lambda x: x.repeat_interleave(2, -1), self.keys(), 1, 1)

    def test_runs_that_are_not_aligned(self):
        self.check(
            lambda x: x.repeat_interleave(2, 0), self.keys(shape=(8, 5, 33)), 1, 1
        )

    def test_two_dimensions(self):
        def f(x):
            return x[:, None, :, None].expand(-1, 2, -1, 2, -1).clone()

        self.check(f, self.keys(shape=(4, 6, 64)), 1, 1)

    def test_nothing_is_read(self):
        # kernels of no common input would not be fused
        def f(x):
            rows = torch.arange(4, device=x.device, dtype=x.dtype)[:, None, None]
            return rows.expand(4, 2, 64).clone()

        self.check(f, self.keys(torch.float32, (4, 64)), 1, 1)


# Results written as they are read

def softmax(x):
    return (torch.softmax(x, 1),)


def log_softmax(x):
    return (torch.log_softmax(x.float(), 1),)


def normalize(x):
    return (F.normalize(x, dim=1),)


def standardize(x):
    variance, mean = torch.var_mean(x, 1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(variance + 1e-5), mean


def permuted_layer_norm(x):
    return (F.layer_norm(x.transpose(1, 2), (x.shape[1],)).transpose(1, 2).contiguous(),)


def to_int8(x):
    scale = x.float().abs().amax(1, keepdim=True) / 127
    return (x.float() / scale).round().to(torch.int8), scale


def behind_an_activation(x):
    return (torch.softmax(F.silu(x), 1),)


AS_READ_FORMS = (
    softmax,
    log_softmax,
    normalize,
    standardize,
    permuted_layer_norm,
    to_int8,
    behind_an_activation,
)


def layer_norm(x, weight, bias):
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    return (weight[:, None] * ((x - mean) / torch.sqrt(variance + 1e-5)) + bias[:, None],)


def added_norm(x, residual, weight, bias):
    total = x + residual
    return total, *layer_norm(total, weight, bias)


def gradient(dy, y):
    dot = (dy.float() * y.float()).sum(1, keepdim=True)
    return ((y.float() * (dy.float() - dot)).to(y.dtype),)


def rows_in_blocks(x):
    blocks = x.reshape(-1, 32, x.shape[1])
    amax = blocks.abs().amax(1, keepdim=True)
    return (blocks / amax).reshape(x.shape), amax.squeeze(1)


def flattened_and_back(x):
    """Transposed, in blocks of one dimension, and back again."""
    t = x.t().contiguous()
    blocks = t.reshape(-1, 32)
    amax = blocks.abs().amax(1).unsqueeze(1)
    return (blocks / amax).reshape(t.shape).t().contiguous(), amax


@on_cuda
@instantiate_parametrized_tests
class AsReadTileTest(BlockReductionTestBase):
    """Of a device with four multiprocessors, so that small tensors have a program for each."""

    def setUp(self):
        super().setUp()
        of = mock.patch.object(block_reduction_order, "DeviceModel")
        self.device = of.start()
        self.addCleanup(of.stop)
        self.device.of.return_value = DeviceModel(sms=4)

    def check_tiled(self, f, *args, **options):
        code = self.check(f, *args, **options)
        tile = self.tile(code)
        self.assertIsNotNone(tile)
        self.assertIn("@triton_heuristics.persistent_reduction", code)
        for x in {a.data_ptr(): a for a in args if a.dim() > 1}.values():
            self.assertGreaterEqual(x.numel() // x.shape[1], 4 * tile["XBLOCK"])
        return code

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @parametrize("f", AS_READ_FORMS)
    def test_forms(self, f, dtype):
        code = self.check_tiled(f, randn(2, 24, 150, dtype=dtype))
        self.assertEqual(len(re.findall(r"tl\.load\(", code)), 1)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("shape", ((1, 9, 131), (3, 100, 64), (2, 129, 67), (2, 520, 72)))
    def test_odd_sizes(self, shape, dtype):
        self.check_tiled(standardize, randn(*shape, dtype=dtype))

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_rows_are_loaded_before_tiles(self, dtype):
        """Triton goes on with the layout of the last load."""
        x, residual = randn(2, 2, 96, 80, dtype=dtype)
        rows = randn(2, 96, dtype=dtype)
        code = self.check_tiled(added_norm, x, residual, *rows)
        loads = re.findall(r"tl\.load\((in_ptr\d)", code)
        self.assertEqual(sorted(loads), ["in_ptr0", "in_ptr1", "in_ptr2", "in_ptr3"])
        self.assertEqual(sorted(loads[:2]), ["in_ptr2", "in_ptr3"])

    def test_rows_that_are_indirect(self):
        def f(x, table, index):
            weight = table[index]
            return (torch.softmax(x, 1) * weight[:, None],)

        x, table = randn(2, 24, 80), randn(50)
        index = torch.randint(50, (24,), device=x.device)
        self.check(lambda x, table: f(x, table, index), x, table)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_block_pointers(self, dtype):
        """Whose index is not known: rows are loaded where they are used."""
        args = (randn(2, 96, 80, dtype=dtype), *randn(2, 96, dtype=dtype))
        options = {"triton.use_block_ptr": True}
        code = self.check_tiled(layer_norm, *args, **options)
        with inductor_config.patch(options):
            # 2.15 asks Triton whether it has them
            has = getattr(triton_utils, "use_block_ptr_enabled", lambda: True)()
        self.assertEqual("tl.make_block_ptr(" in code, has)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_two_inputs(self, dtype):
        y = torch.softmax(randn(2, 24, 150), 1).to(dtype)
        self.check_tiled(gradient, randn(2, 24, 150, dtype=dtype), y)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    @parametrize("f", (rows_in_blocks, flattened_and_back))
    def test_blocks(self, f, dtype):
        code = self.check(f, randn(96, 72, dtype=dtype))
        tile = self.tile(code)
        self.assertEqual((tile["XBLOCK"], tile["num_warps"]), (32, 1))
        self.assertEqual(code.count("tl.load("), 1)

    def test_a_part_of_a_tensor(self):
        self.check_tiled(softmax, randn(2, 30, 160)[:, 3:27, 5:155])

    def test_an_unaligned_input(self):
        x = randn(2 * 24 * 150 + 1, dtype=torch.bfloat16)[1:].view(2, 24, 150)
        self.check_tiled(standardize, x)

    def test_four_dimensions(self):
        self.check_tiled(standardize, randn(2, 24, 10, 15))

    def test_what_is_infinite_or_not_a_number(self):
        x = randn(2, 24, 150)
        x[0, 3, 7] = float("inf")
        x[1, 5, 9] = float("nan")
        x[0, :, 11] = float("-inf")
        with inductor_config.patch(TILED):
            actual, code = run_and_get_code(torch.compile(softmax, fullgraph=True), x)
        self.assertIsNotNone(self.tile("\n".join(code)))
        self.assertEqual(actual, softmax(x))

    def test_a_dynamic_batch(self):
        x = randn(4, 24, 150)
        torch._dynamo.mark_dynamic(x, 0)
        self.check_tiled(standardize, x)

    def test_dynamic_columns(self):
        x = randn(2, 24, 150)
        torch._dynamo.mark_dynamic(x, 2)
        self.check(standardize, x)

    def test_a_reduction_of_unknown_size_is_left_alone(self):
        x = randn(2, 24, 150)
        torch._dynamo.mark_dynamic(x, 1)
        self.assertIsNone(self.tile(self.check(softmax, x, kernels=(1, 2))))

    @parametrize(
        "shape",
        ((2, 24, 31), (1, 24, 95), (2, 1100, 72)),
        name_fn=lambda s: f"{s[0]}x{s[1]}x{s[2]}",
    )
    def test_others_are_left_alone(self, shape):
        """Less than a line, fewer programs than multiprocessors, more values than fit."""
        code = self.check(standardize, randn(*shape), kernels=(1, 2))
        self.assertIsNone(self.tile(code))

    def test_what_is_not_written_as_it_is_read_is_left_alone(self):
        self.assertIsNone(self.tile(self.check(lambda x: (x.sum(1),), randn(2, 24, 150))))

    def test_the_last_dimension_is_left_alone(self):
        code = self.check(lambda x: (torch.softmax(x, 2),), randn(2, 150, 24))
        self.assertIsNone(self.tile(code))

    def test_off(self):
        options = {"triton.block_reduction_tiles": False}
        code = self.check(softmax, randn(2, 24, 150), kernels=(1, 2), **options)
        self.assertIsNone(self.tile(code))

    def test_looped_where_persistent_reductions_are_off(self):
        options = {"triton.persistent_reductions": False}
        code = self.check(softmax, randn(2, 24, 150), kernels=(1, 2), **options)
        self.assertIsNone(self.tile(code))

    @parametrize("values,kind", ((24, "persistent_reduction"), (200, "reduction")))
    def test_combo_kernels_are_left_alone(self, values, kind):
        """Long ones are loops, as upstream has them."""

        def f(x, y, *rows):
            return softmax(x)[0] * rows[0][:, None], softmax(y)[0] * rows[1][:, None]

        x, y, rows = randn(2, values, 150), randn(3, values, 150), randn(2, values)
        code = self.check(f, x, y, *rows, kernels=(1, 2), combo_kernels=True)
        self.assertIn("'combo_grid_meta'", code)
        self.assertIsNone(self.tile(code))
        self.assertEqual(set(re.findall(r"@triton_heuristics.(\w+)\(", code)), {kind})

    def test_deterministic(self):
        self.check_tiled(standardize, randn(2, 24, 150), deterministic=True)


ROW_SIZES = {"x": 2**18, "r0_": 128}
ROW_READ = access(2**26, 2, x=128)
ROW_WRITE = dataclasses.replace(ROW_READ, buffers=ROW_READ.buffers.copy())
TWO_WRITES = dataclasses.replace(ROW_WRITE, buffers=type(ROW_WRITE.buffers)(["buf0", "buf1"]))


@instantiate_parametrized_tests
class ChooseAsReadTileTest(TestCase):
    """``as_read_tile`` alone, in bytes and elements, of 132 multiprocessors."""

    def choose(self, reads=(ROW_READ,), writes=(ROW_WRITE,), **sizes):
        return as_read_tile(
            [*reads], [*writes], {**ROW_SIZES, **sizes}, DeviceModel(sms=132)
        )

    @parametrize(
        "values,columns,num_warps",
        (
            (2, 256, 1),
            (8, 256, 2),
            (16, 128, 2),
            (19, 64, 2),
            (32, 64, 2),
            (64, 64, 4),
            (100, 64, 4),
            (128, 64, 4),
            (192, 32, 4),
            (256, 32, 4),
            (512, 32, 8),
            (1000, 32, 16),
        ),
    )
    def test_blocks_and_warps(self, values, columns, num_warps):
        tile = self.choose(r0_=values)
        self.assertEqual((tile.blocks, tile.num_warps), ({"XBLOCK": columns}, num_warps))
        self.assertEqual(tile.alignment, dict.fromkeys(ROW_READ.buffers, 8))

    @parametrize("columns,expected", ((64 * 528, 64), (32 * 528, 32), (32 * 132, 32), (4192, None)))
    def test_programs_a_multiprocessor(self, columns, expected):
        """Fewer columns where there are few programs, and no tile where there are too few."""
        tile = self.choose(x=columns)
        self.assertEqual(tile and tile.blocks["XBLOCK"], expected)

    @parametrize(
        "values,reads,columns,num_warps",
        ((128, 3, 64, 4), (128, 4, 32, 4), (512, 3, 32, 8), (1000, 1, 32, 16), (1000, 2, 16, 8)),
    )
    def test_registers(self, values, reads, columns, num_warps):
        """Fewer columns where what is read of them does not fit."""
        wide = access(2**27, 4, x=64)
        names = type(wide.buffers)([f"buf{i}" for i in range(reads)])
        tile = self.choose([dataclasses.replace(wide, buffers=names)], [wide], r0_=values)
        self.assertEqual((tile.blocks["XBLOCK"], tile.num_warps), (columns, num_warps))

    @parametrize("itemsize", (2, 4))
    def test_rows_that_begin_anywhere(self, itemsize):
        """Where each value has an address, half as many fit in registers."""
        odd = dataclasses.replace(access(2**26, itemsize, x=128), row_alignment=itemsize)
        self.assertIsNotNone(self.choose([odd], [odd], r0_=512))
        self.assertIsNone(self.choose([odd], [odd], r0_=520))
        self.assertIsNone(self.choose([odd], r0_=520))
        even = dataclasses.replace(odd, row_alignment=2 * itemsize)
        self.assertIsNotNone(self.choose([even], [even], r0_=520))

    def test_looped_as_fast(self):
        """Half types in rows of whole lines, a quarter of which would be padding."""
        self.assertTrue(hasattr(as_read, "is_looped_as_fast"))

        def looped(values, reads=ROW_READ, writes=ROW_WRITE):
            return as_read.is_looped_as_fast([reads], [writes], {**ROW_SIZES, "r0_": values})

        self.assertTrue(looped(320))
        self.assertFalse(looped(410))
        self.assertTrue(looped(768))
        self.assertFalse(looped(150))
        self.assertFalse(looped(768, access(2**26, 4, x=128)))
        self.assertFalse(looped(768, dataclasses.replace(ROW_READ, row_alignment=64)))
        self.assertFalse(looped(768, writes=dataclasses.replace(ROW_WRITE, row_alignment=64)))

    @parametrize("values,rows,num_warps", ((16, 4, 4), (32, 4, 4), (64, 4, 8), (128, 2, 8), (256, 2, 8)))
    def test_results_of_blocks_in_another_order(self, values, rows, num_warps):
        """Programs have several, which are written one after the other."""
        tile = self.choose(
            writes=[ROW_WRITE, access(2**21, 2, y=128)], y=512, r0_=values
        )
        self.assertEqual((tile.blocks["YBLOCK"], tile.num_warps), (rows, num_warps))

    def test_a_dimension_that_is_not_read_along(self):
        """The programs of both count."""
        tile = self.choose(x=64 * 66, y=8)
        self.assertEqual(tile.blocks, {"YBLOCK": 1, "XBLOCK": 64})

    def test_lanes_load_as_many_elements_of_each(self):
        """As many as 8 bytes have of the widest."""
        wide = access(2**27, 4, x=64)
        tile = self.choose([ROW_READ], [wide])
        self.assertEqual(tile.alignment, {"buf67108864": 4, "buf134217728": 8})

    @parametrize("alignment,tiled", ((2, False), (16, False), (32, True), (128, True)))
    def test_parts_of_sectors(self, alignment, tiled):
        """One result may have them, two may not."""
        one, two = (dataclasses.replace(w, row_alignment=alignment) for w in (ROW_WRITE, TWO_WRITES))
        self.assertIsNotNone(self.choose(writes=[one]))
        self.assertEqual(self.choose(writes=[two]) is not None, tiled)

    @parametrize(
        "reads,writes",
        (
            ([access(2**26, 2, r0_=128)], [access(2**26, 2, r0_=128)]),
            ([ROW_READ], [access(2**26, 2, r0_=128)]),
            ([ROW_READ, access(2**26, 2, r0_=128)], [ROW_WRITE]),
            ([ROW_READ], [access(2**21, 2, x=128)]),
            ([access(2**26, 2, x=32)], [ROW_WRITE]),
            ([access(2**26, 2)], [ROW_WRITE]),
        ),
        name_fn=lambda reads, writes: f"{len(reads)}_{reads[-1].run}_{writes[0].run}"
        + f"_{writes[0].nbytes}",
    )
    def test_other_kernels_have_none(self, reads, writes):
        self.assertIsNone(self.choose(reads, writes))


# Loops over blocks, and casts

def flattened_transposed(x, block=32):
    t = x.t().contiguous()
    blocks = t.reshape(-1, block)
    amax = blocks.abs().amax(1).unsqueeze(1)
    return (blocks / amax).reshape(t.shape).t(), amax


def not_transposed_back(x, block=32):
    y, amax = flattened_transposed(x, block)
    return y.t(), amax


def three_dimensions(x, block=32):
    t = x.t().contiguous()
    blocks = t.reshape(t.shape[0], -1, block)
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).reshape(t.shape).t(), amax


def without_a_dimension(x, block=32):
    t = x.t().contiguous()
    blocks = t.reshape(t.shape[0], -1, block)
    amax = blocks.abs().amax(-1)
    return (blocks / amax[..., None]).view(t.shape), amax


def unflattened(x, block=32):
    blocks = x.t().unflatten(-1, (-1, block))
    amax = blocks.abs().amax(-1, keepdim=True)
    return (blocks / amax).flatten(-2).contiguous(), amax


def blocks_of_rows_transposed(x, block=32):
    blocks = x.view(-1, block, x.shape[1])
    amax = blocks.abs().amax(1, keepdim=True)
    return (blocks / amax).view(x.shape).t().contiguous(), amax.squeeze(1).t()


TRANSPOSED_FORMS = (
    flattened_transposed,
    not_transposed_back,
    three_dimensions,
    without_a_dimension,
    unflattened,
    blocks_of_rows_transposed,
)


def contiguous_again(x):
    y, amax = flattened_transposed(x)
    return y.contiguous(), amax


def there_and_back(x):
    """As what was quantized is read again: of the shape of ``x`` all the time."""
    amax = x.unflatten(0, (-1, 32)).abs().amax(1)
    scale = amax.repeat_interleave(32, 0)
    return (x / scale) * 3 + scale, amax


def rounded(x):
    blocks = x.unflatten(0, (-1, 32)).float()
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return (((blocks / scale).round() * scale).flatten(0, 1).to(x.dtype),)


def in_float32(x):
    blocks = x.t().contiguous().reshape(-1, 32).float()
    amax = blocks.abs().amax(1, keepdim=True)
    y = (blocks / amax).to(x.dtype).reshape(x.t().shape)
    return y.t(), amax.reshape(x.shape[1], -1)


def by_a_power_of_two(x):
    blocks = x.t().contiguous().reshape(-1, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(1, keepdim=True).float()))
    y = (blocks * torch.exp2(-exponent)).to(x.dtype).reshape(x.t().shape)
    return y.t(), (exponent + 127).to(torch.uint8).reshape(x.shape[1], -1)


def by_two_reductions(x):
    blocks = x.t().contiguous().reshape(-1, 32)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    return ((blocks - low) / (high - low)).reshape(x.t().shape).t(), low, high


def normed(x):
    blocks = x.t().contiguous().reshape(-1, 32)
    variance, mean = torch.var_mean(blocks, 1, keepdim=True)
    y = (blocks - mean) * torch.rsqrt(variance + 1e-5)
    return (y.reshape(x.t().shape).t(),)


def gated(x):
    """A product in front, which is computed where it is read."""
    return flattened_transposed(torch.sigmoid(x) * x)


@instantiate_parametrized_tests
class BlockReductionLoopsTest(BlockReductionTestBase):
    def check_tiled(self, f, x, block=32):
        code = self.check(f, x)
        self.assertIsNotNone(self.tile(code))
        self.assertEqual(self.size_hints(code)["r0_"], block)
        for line in code.split("\n"):
            if "tl.load(" in line or "tl.store(" in line:
                self.assertNotRegex(line, "//|%")
        return code

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    @parametrize("f", TRANSPOSED_FORMS)
    def test_forms(self, f, dtype):
        code = self.check_tiled(f, randn(256, 72, dtype=dtype))
        self.assertEqual(self.size_hints(code), {"y": 8, "x": 128, "r0_": 32})

    @parametrize("block", (16, 32, 64, 128))
    @parametrize("f", (flattened_transposed, three_dimensions))
    def test_blocks(self, f, block):
        x = randn(3 * block, 72, dtype=torch.bfloat16)
        self.check_tiled(lambda x: f(x, block), x, block)

    @parametrize("innermost", (False, True))
    @parametrize("f", (*TRANSPOSED_FORMS, by_two_reductions, gated))
    def test_where_warps_lie(self, f, innermost):
        """Blocks are outermost in a load where Triton has warps along what is innermost."""
        with mock.patch.object(block_reduction_tile, "WARPS_ALONG_INNERMOST", innermost):
            code = self.check_tiled(f, randn(7 * 32, 72, dtype=torch.bfloat16))
        self.assertEqual("tl.permute(tl.load(" in code, innermost)

    @parametrize("f", (in_float32, by_a_power_of_two, by_two_reductions, normed, gated))
    def test_what_is_computed_of_blocks(self, f):
        self.check_tiled(f, randn(160, 72, dtype=torch.bfloat16))

    @parametrize("f", (flattened_transposed, three_dimensions))
    def test_loops_of_one_size(self, f):
        """Their order alone is another."""
        self.check_tiled(f, randn(32 * 32, 32))

    @parametrize("f", (flattened_transposed, three_dimensions))
    def test_a_part_of_a_tensor(self, f):
        self.check_tiled(f, randn(128, 80)[:, :72])

    @parametrize("f", (flattened_transposed, three_dimensions))
    def test_an_unaligned_input(self, f):
        self.check_tiled(f, randn(128 * 72 + 1)[1:].view(128, 72))

    def test_batched(self):
        def f(x):
            t = x.transpose(1, 2).contiguous()
            blocks = t.reshape(-1, 32)
            amax = blocks.abs().amax(1, keepdim=True)
            return (blocks / amax).reshape(t.shape).transpose(1, 2), amax

        self.check_tiled(f, randn(3, 96, 72))

    @parametrize("dtype", (torch.float16, torch.bfloat16))
    @parametrize("f", (there_and_back, rounded))
    def test_a_result_as_it_is_read(self, f, dtype):
        """One kernel, which reads along x and writes along x."""
        code = self.check(f, randn(128, 64, dtype=dtype))
        self.assertIsNone(self.tile(code))
        self.assertEqual(self.size_hints(code), {"x": 256, "r0_": 32})
        self.assertEqual(code.count("tl.load("), 1)

    @parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
    def test_a_result_that_is_not_transposed(self, dtype):
        """It gets the loops of the reduction, and is in one kernel with it."""
        code = self.check(contiguous_again, randn(128, 64, dtype=dtype))
        self.assertEqual(self.size_hints(code)["r0_"], 32)
        self.assertEqual(code.count("tl.load("), 1)

    def test_a_result_as_it_is_read_of_a_batch(self):
        def f(x):
            blocks = x.unflatten(1, (-1, 32)).float()
            amax = blocks.abs().amax(2, keepdim=True)
            return (((blocks / amax * 3).floor() * amax).flatten(1, 2).to(x.dtype),)

        self.check(f, randn(3, 96, 72, dtype=torch.bfloat16))

    @parametrize("block", (64, 128, 512))
    def test_long_blocks_as_they_are_read(self, block):
        def f(x):
            blocks = x.unflatten(0, (-1, block)).float()
            scale = blocks.abs().amax(1, keepdim=True) / 127
            return (((blocks / scale).round() * scale).flatten(0, 1).to(x.dtype),)

        self.check(f, randn(2 * block, 64, dtype=torch.bfloat16))

    def test_blocks_of_rows(self):
        """As upstream fuses them, where it does."""

        def f(x):
            blocks = x.view(-1, 32, x.shape[1])
            amax = blocks.abs().amax(1, keepdim=True)
            return (blocks / amax).view(x.shape), amax

        code = self.check(f, randn(128, 64))
        sizes = self.size_hints(code)
        self.assertEqual(sizes, {"x": 256, "r0_": 32})
        torch._dynamo.reset()
        metrics.reset()
        # 2.15 has two kernels of it by itself
        upstream = 2 if hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes") else 1
        options = {"triton.block_reduction_tiles": False}
        code = self.check(f, randn(128, 64), kernels=upstream, **options)
        if upstream == 1:
            self.assertEqual(self.size_hints(code), sizes)

    def test_a_transposed_input_is_read_along_its_blocks(self):
        code = self.check(flattened_transposed, randn(64, 128).t())
        self.assertIsNone(self.tile(code))
        self.assertEqual(self.size_hints(code), {"x": 256, "r0_": 32})

    def test_blocks_of_more_than_one_column_are_left_alone(self):
        code = self.check(flattened_transposed, randn(48, 64))
        self.assertIsNone(self.tile(code))

    def test_off(self):
        options = {"triton.block_reduction_tiles": False}
        # 2.15 has one kernel of it by itself
        kernels = 1 if hasattr(tiling_utils, "analyze_memory_coalescing_for_nodes") else 2
        code = self.check(three_dimensions, randn(128, 64), kernels=kernels, **options)
        self.assertIsNone(self.tile(code))

    @parametrize("f", (flattened_transposed, three_dimensions))
    @parametrize("dims", ((0,), (1,), (0, 1)))
    def test_dynamic(self, f, dims):
        torch._dynamo.reset()
        compiled = torch.compile(f, fullgraph=True)
        for rows, columns in ((128, 64), (96, 72), (160, 200)):
            x = randn(rows, columns, dtype=torch.bfloat16)
            x = x[: rows if 0 in dims else 96, : columns if 1 in dims else 64]
            for dim in dims:
                torch._dynamo.mark_dynamic(x, dim)
            with inductor_config.patch(TILED):
                actual, _ = run_and_get_code(compiled, x)
            for act, expect in zip(actual, f(x)):
                self.assertEqual(act, expect)
                self.assertEqual(act.stride(), expect.stride())


FP8 = torch.float8_e4m3fn


def scaled(t, dims, dtype=FP8):
    """t by the largest magnitude along ``dims``."""
    scale = 448 / t.abs().amax(dims, keepdim=True)
    return (t * scale).clamp(-448, 448).to(dtype), scale


def of_two_dimensions(x, m, n):
    """x [M, N] in blocks of [m, n], reduced where they are."""
    values, scale = scaled(x.float().view(x.shape[0] // m, m, x.shape[1] // n, n), (1, 3))
    return values.view(x.shape), scale


def with_dimensions_unflattened(x, m, n):
    values, scale = scaled(x.unflatten(0, (-1, m)).unflatten(2, (-1, n)).float(), (1, 3))
    return values.flatten(2, 3).flatten(0, 1), scale.squeeze(3).squeeze(1)


def one_after_another(x, m, n):
    """The values of a block follow one another, and are written back to their matrix."""
    t = x.view(x.shape[0] // m, m, -1, n).permute(0, 2, 1, 3).reshape(-1, m * n)
    values, scale = scaled(t.float(), (1,))
    values = values.view(x.shape[0] // m, -1, m, n).permute(0, 2, 1, 3)
    return values.reshape(x.shape), scale


def a_row_of_blocks_after_another(x, m, n):
    t = x.view(x.shape[0] // m, m, -1, n).transpose(1, 2).contiguous().flatten(2)
    values, scale = scaled(t.float(), (2,))
    values = values.unflatten(2, (m, n)).transpose(1, 2).contiguous()
    return values.view(x.shape), scale


@instantiate_parametrized_tests
class BlocksOfTwoDimensionsTest(BlockReductionTestBase):
    """One for each multiprocessor at least: 12 x 11 blocks, of 132."""

    TRANSPOSED_FORMS = (
        of_two_dimensions,
        with_dimensions_unflattened,
        one_after_another,
        a_row_of_blocks_after_another,
    )

    def setUp(self):
        super().setUp()
        self.blocks = mock.patch.object(block_reads, "DeviceModel")
        self.device = self.blocks.start()
        self.addCleanup(self.blocks.stop)
        self.device.of.return_value = DeviceModel(sms=132, l2_mib=50)

    @parametrize("f", TRANSPOSED_FORMS)
    @parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
    def test_forms(self, f, dtype):
        x = randn(12 * 32, 11 * 32, dtype=dtype)
        self.check(lambda x: f(x, 32, 32), x)

    @parametrize("f", TRANSPOSED_FORMS)
    @parametrize("m,n", ((2, 64), (8, 32), (16, 128)))
    def test_blocks(self, f, m, n):
        self.check(lambda x: f(x, m, n), randn(12 * m, 11 * n))

    def test_loops(self):
        """Blocks that are too long to be persistent are read again, and stay in the L2 cache."""
        x = randn(12 * 64, 11 * 64, dtype=torch.bfloat16)
        self.check(lambda x: of_two_dimensions(x, 64, 64), x)

    def test_what_is_computed_first(self):
        def f(x, gate):
            return of_two_dimensions(torch.nn.functional.silu(x) * gate, 32, 32)

        self.check(f, randn(12 * 32, 11 * 32), randn(12 * 32, 11 * 32))

    def test_batched(self):
        def f(x):
            values, scale = scaled(x.view(2, 6, 32, 11, 32), (2, 4), torch.bfloat16)
            return values.view(x.shape), scale

        self.check(f, randn(2, 6 * 32, 11 * 32))

    def test_a_part_of_a_tensor(self):
        x = randn(12 * 32, 12 * 32)[:, 32:]
        self.check(lambda x: with_dimensions_unflattened(x, 32, 32), x)

    def test_dynamic(self):
        def f(x):
            return scaled(x.view(x.shape[0] // 32, 32, x.shape[1] // 32, 32), (1, 3))

        x = randn(12 * 32, 11 * 32)
        torch._dynamo.mark_dynamic(x, 0)
        self.check(f, x)

    def test_values_alone(self):
        x = randn(12 * 32, 11 * 32)
        self.check(lambda x: of_two_dimensions(x, 32, 32)[:1], x)

    @parametrize(
        "f,m,n",
        (
            (one_after_another, 32, 16),
            (one_after_another, 4, 49),
            (lambda x, m, n: (one_after_another(x, m, n)[0].t().contiguous(),), 32, 32),
        ),
    )
    def test_short_runs_are_not_written(self, f, m, n):
        """Less than a sector in a row, or a part of one, and a transposed result."""
        self.check(lambda x: f(x, m, n), randn(12 * m, 11 * n), kernels=2)

    def test_what_cannot_be_in_the_kernel_keeps_its_loops(self):
        """It is fused with the reduction of the rows, which comes after that of the blocks."""

        def f(x):
            blocks = x.view(12, 32, 11, 32)
            y = (blocks / blocks.abs().amax((1, 3), keepdim=True)).view(x.shape)
            amax = y.abs().amax(1, keepdim=True)
            return (y / amax).to(torch.bfloat16), amax

        self.check(f, randn(12 * 32, 11 * 32), kernels=2)

    def test_a_scale_of_scales(self):
        def f(x):
            blocks = x.view(12, 32, 11, 32)
            amax = blocks.abs().amax((1, 3), keepdim=True)
            return ((blocks * (amax.amax() / amax)).view(x.shape),)

        x, last = randn(12 * 32, 11 * 32), "def triton_poi"
        code = self.check(f, x, kernels=3).split(last)[-1]
        metrics.reset()
        off = self.check(f, x, kernels=3, **{"triton.block_reduction_tiles": False})
        self.assertEqual(code, off.split(last)[-1])

    def test_values_that_are_not_stored_stay_so(self):
        def f(x):
            blocks = x.view(12, 32, 11, 32)
            scale = 1 / blocks.abs().amax((1, 3), keepdim=True)
            x.view(12, 32, 11, 32).mul_(scale)
            return (scale,)

        x = randn(12 * 32, 11 * 32)
        with inductor_config.patch(TILED):
            _, (code,) = run_and_get_code(torch.compile(f, fullgraph=True), x)
        self.assertNotIn("empty_strided_cuda((384, 352)", code)

    @parametrize("device", ({"sms": 133}, {"l2_mib": 0}))
    def test_two_kernels_use_the_device_better(self, device):
        """Fewer blocks than multiprocessors, or blocks that leave the L2 cache."""
        self.device.of.return_value = dataclasses.replace(
            self.device.of.return_value, **device
        )
        x = randn(12 * 32, 11 * 32)
        self.check(lambda x: one_after_another(x, 32, 32), x, kernels=2)

    def test_off(self):
        x = randn(12 * 32, 11 * 32)
        self.check(
            lambda x: one_after_another(x, 32, 32),
            x,
            kernels=2,
            **{"triton.block_reduction_tiles": False},
        )


def scaled_cast(x, dtype, block=32):
    """Blocks by their largest magnitude, in float32, by more operations than are inlined."""
    blocks = x.float().view(x.shape[0], -1, block)
    y = blocks / blocks.abs().amax(-1, keepdim=True)
    for _ in range(16):  # two operations each, of 30
        y = y * 0.75 + 0.125
    return y.clamp(-2, 2).to(dtype).view(x.shape)


def transposed(y):
    return y.t().contiguous()


def column_major(y):
    return y.t().contiguous().t()


def untiled(y, tile=32):
    """The matrix [M, N] of tiles, one after another."""
    m, n = y.shape
    y = y.view(m // tile, n // tile, tile, tile)
    return y.permute(0, 2, 1, 3).contiguous().view(m, n)


@instantiate_parametrized_tests
class NarrowCopyTest(BlockReductionTestBase):
    WIDE = "(96, 5, 32), (160, 32, 1), torch.float32)"

    @parametrize("copy", (transposed, column_major, untiled))
    @parametrize("dtype", (torch.float8_e4m3fn, torch.bfloat16))
    def test_the_narrow_values_are_stored(self, copy, dtype):
        x = randn(96, 160, dtype=torch.bfloat16)
        # 2.15 has one kernel of both
        code = self.check(lambda x: (copy(scaled_cast(x, dtype)),), x, kernels=(1, 2))
        self.assertNotIn(self.WIDE, code)

    def test_off(self):
        x = randn(96, 160, dtype=torch.bfloat16)
        off = {"triton.block_reduction_tiles": False}
        code = self.check(
            lambda x: (untiled(scaled_cast(x, torch.bfloat16)),), x, kernels=2, **off
        )
        self.assertIn(self.WIDE, code)

    @parametrize(
        "f,expected",
        (
            (lambda y: transposed(y.clamp(-2, 2).half()), True),
            (lambda y: untiled(torch.relu(y).to(torch.float8_e5m2)), True),
            (lambda y: transposed(y.clamp(-2, 2)), False),
            (lambda y: transposed(y.double()), False),
            (lambda y: y.half().t(), False),
            (lambda y: y.half().contiguous(), False),
            (lambda y: transposed((y + y.exp()).half()), False),
            (lambda y: (y.half(), transposed(y.half())), False),
            (lambda y: transposed(y.half()).sum(), True),
        ),
    )
    def test_what_a_copy_reads(self, f, expected):
        graph = make_fx(lambda x: f(x * 2), select_decomp_table())(torch.randn(64, 96))
        (first,) = graph.graph.find_nodes(
            op="call_function", target=torch.ops.aten.mul.Tensor
        )
        self.assertFalse(is_copied_narrower(first))
        with mock.patch.object(narrow_copy, "tiles_blocks_on", lambda device: True):
            self.assertEqual(is_copied_narrower(first), expected)


class IndexTest(TestCase):
    """Indices alone, of variables 0 <= a < 6, 0 <= b < 4 and 0 <= c < 8."""

    def setUp(self):
        super().setUp()
        self.a, self.b, self.c = sympy.symbols("a b c", integer=True, nonnegative=True)
        self.ranges = {v: sympy.Integer(n) for v, n in self.sizes()}
        graph = GraphLowering(torch.fx.symbolic_trace(lambda: 0))
        self.enterContext(V.set_graph_handler(graph))

    def sizes(self):
        return ((self.a, 6), (self.b, 4), (self.c, 8))

    def strides(self, index, *variables):
        return Strides.of(index, {v: self.ranges[v] for v in variables or self.ranges})

    def test_modulo_that_does_nothing(self):
        a, b, c = self.a, self.b, self.c
        inner = 8 * b + c
        for index, expected in (
            (FloorDiv(inner, 32), 0),
            (ModularIndexing(inner, 1, 32), inner),
            (a + FloorDiv(inner, 32), a),
            (FloorDiv(inner, 31), FloorDiv(inner, 31)),
            (ModularIndexing(inner, 1, 31), ModularIndexing(inner, 1, 31)),
            (ModularIndexing(inner, 8, 4), FloorDiv(inner, 8)),
            (FloorDiv(inner - 1, 32), FloorDiv(inner - 1, 32)),
            (FloorDiv(c - b, 32), FloorDiv(c - b, 32)),
        ):
            self.assertEqual(without_needless_modulo(index, self.ranges), expected)

    def test_no_sum_of_multiples(self):
        a, b = self.a, self.b
        for index in (a * b, FloorDiv(a, 2), a**2, ModularIndexing(a + b, 1, 3)):
            self.assertIsNone(self.strides(index))

    def test_count_as(self):
        a, b, c = self.a, self.b, self.c
        p = sympy.Symbol("p", integer=True, nonnegative=True)
        q = sympy.Symbol("q", integer=True, nonnegative=True)
        other = self.strides(32 * a + 8 * b + c)
        for index, sizes, expected in (
            (p, (192, 1), {p: 32 * a + 8 * b + c, q: 0}),
            (8 * p + q, (24, 8), {p: 4 * a + b, q: c}),
            (p + 32 * q, (32, 6), {p: 8 * b + c, q: a}),
            (p + 1, (192, 1), None),
            (2 * p, (192, 1), None),
            (p, (96, 2), None),
            (p, (64, 3), None),
            (32 * p + q, (6, 16), None),
        ):
            ranges = dict(zip((p, q), map(sympy.Integer, sizes)))
            self.assertEqual(count_as(Strides.of(index, ranges), other), expected)

    def test_a_variable_that_is_not_read(self):
        a, b, c = self.a, self.b, self.c
        p = sympy.Symbol("p", integer=True, nonnegative=True)
        q = sympy.Symbol("q", integer=True, nonnegative=True)
        other = self.strides(4 * a + b)
        for sizes, expected in (
            ((24, 8), {p: 4 * a + b, q: c}),
            ((24, 4), None),
        ):
            ranges = dict(zip((p, q), map(sympy.Integer, sizes)))
            self.assertEqual(count_as(Strides.of(p, ranges), other), expected)


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
