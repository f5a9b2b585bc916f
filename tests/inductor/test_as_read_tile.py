# Owner(s): ["module: inductor"]
"""The tile of reductions over a dimension that is not the last, whose results are written as read."""

import dataclasses
import re
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from test_reduction_tiling import (
    access,
    BlockReductionTestBase,
    on_cuda,
    randn,
    TILED,
)
from torch._inductor import block_reduction_order
from torch._inductor import as_read_tile as as_read
from torch._inductor.as_read_tile import as_read_tile
from torch._inductor.codegen import triton_utils
from torch._inductor.device_model import DeviceModel
from torch._inductor.test_case import run_tests, TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.inductor_utils import HAS_GPU


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


FORMS = (
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


def blocks_of_rows(x):
    blocks = x.reshape(-1, 32, x.shape[1])
    amax = blocks.abs().amax(1, keepdim=True)
    return (blocks / amax).reshape(x.shape), amax.squeeze(1)


def flattened(x):
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
    @parametrize("f", FORMS)
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
    @parametrize("f", (blocks_of_rows, flattened))
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


SIZES = {"x": 2**18, "r0_": 128}
READ = access(2**26, 2, x=128)
WRITE = dataclasses.replace(READ, buffers=READ.buffers.copy())
TWO = dataclasses.replace(WRITE, buffers=type(WRITE.buffers)(["buf0", "buf1"]))


@instantiate_parametrized_tests
class ChooseAsReadTileTest(TestCase):
    """``as_read_tile`` alone, in bytes and elements, of 132 multiprocessors."""

    def choose(self, reads=(READ,), writes=(WRITE,), **sizes):
        return as_read_tile(
            [*reads], [*writes], {**SIZES, **sizes}, DeviceModel(sms=132)
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
        self.assertEqual(tile.alignment, dict.fromkeys(READ.buffers, 8))

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

        def looped(values, reads=READ, writes=WRITE):
            return as_read.is_looped_as_fast([reads], [writes], {**SIZES, "r0_": values})

        self.assertTrue(looped(320))
        self.assertFalse(looped(410))
        self.assertTrue(looped(768))
        self.assertFalse(looped(150))
        self.assertFalse(looped(768, access(2**26, 4, x=128)))
        self.assertFalse(looped(768, dataclasses.replace(READ, row_alignment=64)))
        self.assertFalse(looped(768, writes=dataclasses.replace(WRITE, row_alignment=64)))

    @parametrize("values,rows,num_warps", ((16, 4, 4), (32, 4, 4), (64, 4, 8), (128, 2, 8), (256, 2, 8)))
    def test_results_of_blocks_in_another_order(self, values, rows, num_warps):
        """Programs have several, which are written one after the other."""
        tile = self.choose(
            writes=[WRITE, access(2**21, 2, y=128)], y=512, r0_=values
        )
        self.assertEqual((tile.blocks["YBLOCK"], tile.num_warps), (rows, num_warps))

    def test_a_dimension_that_is_not_read_along(self):
        """The programs of both count."""
        tile = self.choose(x=64 * 66, y=8)
        self.assertEqual(tile.blocks, {"YBLOCK": 1, "XBLOCK": 64})

    def test_lanes_load_as_many_elements_of_each(self):
        """As many as 8 bytes have of the widest."""
        wide = access(2**27, 4, x=64)
        tile = self.choose([READ], [wide])
        self.assertEqual(tile.alignment, {"buf67108864": 4, "buf134217728": 8})

    @parametrize("alignment,tiled", ((2, False), (16, False), (32, True), (128, True)))
    def test_parts_of_sectors(self, alignment, tiled):
        """One result may have them, two may not."""
        one, two = (dataclasses.replace(w, row_alignment=alignment) for w in (WRITE, TWO))
        self.assertIsNotNone(self.choose(writes=[one]))
        self.assertEqual(self.choose(writes=[two]) is not None, tiled)

    @parametrize(
        "reads,writes",
        (
            ([access(2**26, 2, r0_=128)], [access(2**26, 2, r0_=128)]),
            ([READ], [access(2**26, 2, r0_=128)]),
            ([READ, access(2**26, 2, r0_=128)], [WRITE]),
            ([READ], [access(2**21, 2, x=128)]),
            ([access(2**26, 2, x=32)], [WRITE]),
            ([access(2**26, 2)], [WRITE]),
        ),
        name_fn=lambda reads, writes: f"{len(reads)}_{reads[-1].run}_{writes[0].run}"
        + f"_{writes[0].nbytes}",
    )
    def test_other_kernels_have_none(self, reads, writes):
        self.assertIsNone(self.choose(reads, writes))


if __name__ == "__main__":
    if HAS_GPU:
        run_tests()
