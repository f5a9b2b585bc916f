"""torchao's own casts to block- and row-scaled formats, of [M, N] along either dimension.

What these cases call is torchao's code: `mxfp*` and `nvfp4` are `prototype.mx_formats`, `fp8_*`
are the casts of `Float8Linear`'s rowwise recipe, `fp8_block*` those of its blockwise training
prototype. All are its plain torch, which is there to be compiled; what it wrote in Triton or CUDA
is no case. `dim1` casts along the rows of x and returns its values transposed, as its linears'
backward wants them.

Its functions assert their dtypes and read bits, so there is no float64 reference: it is eager,
or eager with the operands of what is in front in float32.
"""

import math

import torch
import torch.nn.functional as F

from graft.cases import Case
from graft.cases.scaled import FP4_BLOCK, MX_BLOCK, block_bytes, matrix, swizzled_bytes, two

SHAPES = {
    "default": [(8192, 4096)],
    "large": [(16384, 16384), (8192, 4096), (4096, 14336)],
}
ROWS_COLUMNS = {
    "default": [(26624, 1024)],
    "large": [(26624, 1024), (16384, 4096), (8192, 8192)],
}
EXPERTS = {"default": [(16, 2048, 4096)]}
FP8_BLOCK = 128


def _columns(cast):
    """`cast`, which returns scales and values along rows, along columns; values transposed."""

    def along(x, *more):
        scales, values = cast(x.transpose(-1, -2).contiguous(), *more)
        return scales, values.transpose(-1, -2)

    return along


def _both(cast):
    """Both ways, as a gradient is cast in the backward of a linear layer."""
    columns = _columns(cast)

    def both(x, *more):
        return *cast(x, *more), *columns(x, *more)

    return both


def _mx(format, mode="floor", swizzled=False):
    def cast(x):
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        return to_mx(x, format, MX_BLOCK, ScaleCalculationMode(mode), swizzled)

    return cast


def mxfp8_tiles(x):
    """Weights of experts [E, M, N] in tiles of 32 by 32, values column-major."""
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    return quant._mxfp8_quantize_reference_3d(
        x,
        block_size=MX_BLOCK,
        scale_block_dim1=MX_BLOCK,
        scale_block_dim2=MX_BLOCK,
        scaling_mode="rceil",
        blocked_scale_output=False,
    )


def _nvfp4(x, scale):
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    return nvfp4_quantize(x, FP4_BLOCK, scale)


def _nvfp4_amax(x):
    """With the scale of scales of the tensor itself."""
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    return _nvfp4(x, per_tensor_amax_to_scale(torch.max(torch.abs(x))))


def _fp8(x, dim, rounded):
    """Scales and values of rows (-1) or columns (0); the rowwise recipe has rounded scales."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scales = tensor_to_scale(
        x,
        torch.float8_e4m3fn,
        scaling_granularity=ScalingGranularity.AXISWISE,
        axiswise_dim=dim,
        round_scales_to_power_of_2=rounded,
    )
    return scales, to_fp8_saturated(x.to(torch.float32) * scales, torch.float8_e4m3fn)


def fp8_rows(x, rounded=True):
    return _fp8(x, -1, rounded)


def fp8_columns(x, rounded=True):
    """Values as `torch._scaled_mm` wants those of its second operand: column-major."""
    scales, values = _fp8(x, 0, rounded)
    return scales, values.t().contiguous().t()


def fp8_both(x, rounded=True):
    return *fp8_rows(x, rounded), *fp8_columns(x, rounded)


def fp8_both_silu(x, gate):
    """Scales as they are: compiled, the product is not rounded, which may halve a rounded one."""
    return fp8_both(F.silu(x) * gate, rounded=False)


def fp8_both_silu_in_float32(x, gate):
    return fp8_both_silu(x.float(), gate.float())


def _fp8_block(x):
    """Blocks of 1 x 128."""
    from torchao.prototype.blockwise_fp8_training import kernels

    values, scales = kernels.torch_blockwise_scale_act_quant_lhs(x, FP8_BLOCK)
    return scales, values


def fp8_blocks(x):
    """Blocks of 128 x 128."""
    from torchao.prototype.blockwise_fp8_training import kernels

    values, scales = kernels.torch_blockwise_scale_weight_quant(x, FP8_BLOCK)
    return scales, values


def fp8_blocks_transposed(x):
    """The same, values column-major, as a weight is read in the forward."""
    scales, values = fp8_blocks(x)
    return scales, values.t().contiguous().t()


def _with_scale(shape, dtype, device):
    """A calibrated scale of scales, that of a tensor whose largest magnitude is 5."""
    return (*matrix(shape, dtype, device), torch.full((), 5.0 / (448 * 6), device=device))


def _row_bytes(rows, columns, reads=1):
    def bytes_moved(shape, dtype):
        elements = math.prod(shape)
        scales = rows * shape[0] + columns * shape[1]
        return elements * (reads * dtype.itemsize + rows + columns) + scales * 4

    return bytes_moved


def _case(name, summary, fn, bytes_moved, make=matrix, shapes=SHAPES, in_float32=None):
    return Case(
        f"torchao_{name}",
        summary,
        fn,
        make,
        shapes,
        ("bf16", "fp32"),
        bytes_moved,
        library="torchao",
        reads_bits=True,
        in_float32=in_float32,
    )


_E4M3, _E2M1 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
_WAYS = {"dim0": (lambda cast: cast, 1), "dim1": (_columns, 1), "both": (_both, 2)}
_FORMATS = {
    "mxfp8": ("e4m3 in blocks of 32", _mx(_E4M3), {}),
    "mxfp8_rceil": ("the same, scales rounded up", _mx(_E4M3, "rceil"), {}),
    "mxfp6_e2m3": ("e2m3, a byte each, in blocks of 32", _mx("fp6_e2m3"), {}),
    "mxfp6_e3m2": ("e3m2, a byte each, in blocks of 32", _mx("fp6_e3m2"), {}),
    "mxfp4": ("packed e2m1 in blocks of 32", _mx(_E2M1), {"value": 0.5}),
    "nvfp4": (
        "packed e2m1 in blocks of 16",
        _nvfp4,
        {"value": 0.5, "block": FP4_BLOCK, "more": 4},
    ),
    "nvfp4_amax": (
        "the same, with the tensor's own scale of scales",
        _nvfp4_amax,
        {"value": 0.5, "block": FP4_BLOCK},
    ),
    "fp8_block": ("e4m3 in blocks of 1 x 128", _fp8_block, {"scale": 4, "block": FP8_BLOCK}),
}

CASES = [
    *(
        _case(
            f"{format}_{way}",
            f"{summary}, {way}",
            turn(cast),
            block_bytes(directions, **{"value": 1, "scale": 1, **sizes}),
            _with_scale if format == "nvfp4" else matrix,
        )
        for format, (summary, cast, sizes) in _FORMATS.items()
        for way, (turn, directions) in _WAYS.items()
    ),
    _case(
        "mxfp8_swizzled_dim0",
        "e4m3 in blocks of 32, scales in tiles, dim0",
        _mx(_E4M3, swizzled=True),
        swizzled_bytes(0),
    ),
    _case(
        "mxfp8_swizzled_dim1",
        "e4m3 in blocks of 32, scales in tiles, dim1",
        _columns(_mx(_E4M3, swizzled=True)),
        swizzled_bytes(1),
    ),
    _case(
        "mxfp8_tiles",
        "weights of experts in tiles of 32 x 32, column-major",
        mxfp8_tiles,
        block_bytes(1, 1, 1, MX_BLOCK**2),
        shapes=EXPERTS,
    ),
    _case(
        "fp8_blocks",
        "e4m3 in blocks of 128 x 128",
        fp8_blocks,
        block_bytes(1, 1, 4, FP8_BLOCK**2),
    ),
    _case(
        "fp8_blocks_transposed",
        "the same, values column-major",
        fp8_blocks_transposed,
        block_bytes(1, 1, 4, FP8_BLOCK**2),
    ),
    _case("fp8_rows", "e4m3 by rows", fp8_rows, _row_bytes(1, 0), shapes=ROWS_COLUMNS),
    _case(
        "fp8_columns",
        "e4m3 by columns, column-major",
        fp8_columns,
        _row_bytes(0, 1),
        shapes=ROWS_COLUMNS,
    ),
    _case("fp8_both", "both of one tensor", fp8_both, _row_bytes(1, 1), shapes=ROWS_COLUMNS),
    _case(
        "fp8_both_silu",
        "both of silu(x) * gate",
        fp8_both_silu,
        _row_bytes(1, 1, 2),
        two,
        ROWS_COLUMNS,
        fp8_both_silu_in_float32,
    ),
]
