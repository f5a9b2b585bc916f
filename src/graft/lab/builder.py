"""What Triton's interpreter must do as a GPU does, and does not.

Triton's interpreter evaluates each operation of a kernel with numpy. Five things keep it from
telling the truth about the kernels that Inductor generates, and this module puts them right:

- **Memory.** Every address is looked up in the tensors that the launch was given. A read outside
  of them gives poison and is counted; a write outside of them raises.
- **bfloat16.** numpy has none. Triton's interpreter truncates on the way from float32 and does
  arithmetic on the bits; here conversions round to the nearest even, as `cvt.rn` does.
- **8-bit floats.** Triton's interpreter loses the carry of a mantissa that rounds up to the next
  power of two, and ties; here conversions round to the nearest even and saturate, as
  `cvt.rn.satfinite` does.
- **libdevice.** Calls into it return nothing in the interpreter; here they are PyTorch's CPU
  functions in the same precision.
- **Reductions and scans** with a combining function run element by element in Python; here each
  combining step is done for the whole block at once.

An operation is worked out once for each combination of types: `graft.lab.recorded`.

Importing this module needs `TRITON_INTERPRET=1` in the environment before Triton is imported.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton import ir
from triton.language.extra import libdevice as generic_libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from graft.errors import GraftError
from graft.lab.recorded import Operations, number

# Not 0, not -1, no index of any buffer that a test can afford, and not representable in float32.
POISON_INTEGER = 0x5A5A_5A5A_5A5A_5A5B


class OutOfBoundsWrite(GraftError):
    """A kernel wrote to an address that belongs to none of its arguments."""


class OutOfBoundsPrefetch(GraftError):
    """A kernel fetched memory into a cache that belongs to none of its arguments."""


class LoopTypeError(GraftError):
    """A kernel that the compiler would refuse: a variable changes its type in a loop."""


def poison_value(dtype: torch.dtype) -> float | int | bool:
    """What an unwritten element of `dtype` holds: NaN, True, or the low bits of POISON_INTEGER."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    bits = torch.iinfo(dtype).bits
    return POISON_INTEGER & ((1 << (bits - 1)) - 1)


@dataclass
class Region:
    """The bytes of one storage, `[start, end)` as addresses."""

    start: int
    end: int
    data: np.ndarray
    views: dict[np.dtype[Any], np.ndarray] = field(default_factory=dict)

    def view(self, dtype: np.dtype[Any]) -> np.ndarray:
        """All whole elements of `dtype` in the storage, counted from its first byte."""
        found = self.views.get(dtype)
        if found is None:
            whole = len(self.data) // dtype.itemsize * dtype.itemsize
            found = self.views[dtype] = self.data[:whole].view(dtype)
        return found


class Memory:
    """The storages that a launch may touch."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.reads_out_of_bounds = 0

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the storages of `tensors` (on the CPU) the only memory there is."""
        regions: dict[int, Region] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            start, size = storage.data_ptr(), storage.nbytes()
            if start not in regions:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage)
                regions[start] = Region(start, start + size, flat.numpy())
        self.regions = list(regions.values())
        self.reads_out_of_bounds = 0

    def find(self, addresses: np.ndarray, itemsize: int) -> Region | None:
        """The one region that holds all of `addresses`, if there is one."""
        low, high = int(addresses.min()), int(addresses.max()) + itemsize
        for region in self.regions:
            if region.start <= low and high <= region.end:
                return region
        return None

    def read(self, addresses: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
        """The elements at `addresses`; poison where there are none."""
        if addresses.size == 0:
            return np.empty(addresses.shape, dtype)
        region = self.find(addresses, dtype.itemsize)
        if region is not None:
            return region.view(dtype)[_offsets(addresses, region, dtype)]
        values = np.frombuffer(b"\xff" * dtype.itemsize, dtype)[0]
        if dtype.kind in "iu":
            values = dtype.type(POISON_INTEGER & ((1 << (8 * dtype.itemsize - 1)) - 1))
        result = np.full(addresses.shape, values, dtype)
        known = np.zeros(addresses.shape, bool)
        for region in self.regions:
            inside = (addresses >= region.start) & (addresses + dtype.itemsize <= region.end)
            if inside.any():
                result[inside] = region.view(dtype)[_offsets(addresses[inside], region, dtype)]
                known |= inside
        self.reads_out_of_bounds += int(addresses.size - known.sum())
        return result

    def prefetch(self, address: int, size: int) -> None:
        """Fetch `size` bytes into a cache, which changes nothing. Raises OutOfBoundsPrefetch.

        A range begins at a multiple of 16 bytes, which may be before the first of its tensor.
        """
        if size > 0 and not any(
            region.start < address + 16 and address + size <= region.end for region in self.regions
        ):
            raise OutOfBoundsPrefetch(
                f"a kernel fetched {size} bytes, some of them outside of the tensors "
                "that it was given"
            )

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store `values` at `addresses`. Raises OutOfBoundsWrite."""
        if addresses.size == 0:
            return
        region = self.find(addresses, values.dtype.itemsize)
        if region is None:
            raise OutOfBoundsWrite(
                f"a kernel wrote {addresses.size} elements of {values.dtype}, "
                "some of them outside of the tensors that it was given"
            )
        region.view(values.dtype)[_offsets(addresses, region, values.dtype)] = values

    def update(
        self,
        addresses: np.ndarray,
        values: np.ndarray,
        updated: Callable[[np.ndarray, np.ndarray], np.ndarray],
    ) -> np.ndarray:
        """Store `updated(old, value)` at each of `addresses`; equal ones follow each other.

        All arguments are one-dimensional, and so is the result: what was there before each. Raises
        OutOfBoundsWrite.
        """
        before = np.empty_like(values)
        left = np.arange(addresses.size)
        while left.size:
            _, first = np.unique(addresses[left], return_index=True)
            now = left[first]
            before[now] = self.read(addresses[now], values.dtype)
            self.write(addresses[now], updated(before[now], values[now]))
            left = np.delete(left, first)
        return before


def _offsets(addresses: np.ndarray, region: Region, dtype: np.dtype[Any]) -> np.ndarray:
    shift = dtype.itemsize.bit_length() - 1
    return ((addresses - np.uint64(region.start)) >> np.uint64(shift)).view(np.int64)


def float32_of_bfloat16(bits: np.ndarray) -> np.ndarray:
    """bfloat16, as uint16 bits, to float32: exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_of_float32(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16, as uint16 bits, to the nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


_FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def float32_of_float8(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """An 8-bit float, as uint8 bits, to float32: exact."""
    return torch.from_numpy(np.array(bits, np.uint8)).view(dtype).float().numpy()


def float8_of_float32(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float32 to an 8-bit float, as uint8 bits, to the nearest even, saturated."""
    most = torch.finfo(dtype).max
    rounded = torch.from_numpy(np.array(values, np.float32)).clamp(-most, most).to(dtype)
    return rounded.view(torch.uint8).numpy()


# What libdevice computes, by its symbol's name without `__nv_` and the suffix of the type.
LIBDEVICE: dict[str, Callable[..., torch.Tensor]] = {
    "abs": torch.abs, "acos": torch.acos, "acosh": torch.acosh, "asin": torch.asin,
    "asinh": torch.asinh, "atan": torch.atan, "atan2": torch.atan2, "atanh": torch.atanh,
    "cbrt": lambda x: torch.sign(x) * torch.abs(x).pow(1 / 3), "ceil": torch.ceil,
    "copysign": torch.copysign, "cos": torch.cos, "cosh": torch.cosh,
    "cyl_bessel_i0": torch.special.i0, "cyl_bessel_i1": torch.special.i1, "erf": torch.erf,
    "erfc": torch.erfc, "erfcx": torch.special.erfcx, "erfinv": torch.erfinv, "exp": torch.exp,
    "exp2": torch.exp2, "expm1": torch.expm1, "fabs": torch.abs,
    "fdivide": torch.true_divide, "finite": torch.isfinite, "floor": torch.floor,
    "fma": lambda x, y, z: x * y + z, "fmod": torch.fmod,
    "hypot": torch.hypot, "isinf": torch.isinf, "isnan": torch.isnan,
    "j0": torch.special.bessel_j0, "j1": torch.special.bessel_j1, "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1, "ldexp": torch.ldexp, "lgamma": torch.lgamma,
    "fmul_rn": torch.mul, "dmul_rn": torch.mul,
    "llrint": torch.round, "log": torch.log, "log10": torch.log10, "log1p": torch.log1p,
    "log2": torch.log2, "nearbyint": torch.round, "nextafter": torch.nextafter, "pow": torch.pow,
    "powi": torch.pow, "rint": torch.round, "rsqrt": torch.rsqrt, "signbit": torch.signbit,
    "sin": torch.sin, "sinh": torch.sinh, "sqrt": torch.sqrt, "tan": torch.tan,
    "tanh": torch.tanh, "trunc": torch.trunc,
}  # fmt: skip


def libdevice_function(symbol: str) -> Callable[..., torch.Tensor]:
    """The stand-in for `__nv_expf`, `__nv_isnand`, …. Raises GraftError if there is none."""
    name = symbol.removeprefix("__nv_").removeprefix("fast_")
    for candidate in (name, name[:-1] if name[-1] in "fd" else name):
        if candidate in LIBDEVICE:
            return LIBDEVICE[candidate]
    raise GraftError(
        f"the interpreter has no stand-in for libdevice's {symbol}",
        next="add one to graft.lab.builder.LIBDEVICE",
    )


# Operations that only move bits or compare addresses: safe on bfloat16's uint16.
_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}


def _broadcast(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """`np.broadcast_to`, at a fraction of its time for what most operations ask."""
    if data.shape == shape:
        return data
    if data.ndim == len(shape) and data.flags.c_contiguous:
        strides = tuple(0 if size == 1 else step for size, step in zip(data.shape, data.strides))
        if all(size in (1, wanted) for size, wanted in zip(data.shape, shape)):
            return np.ndarray(shape, data.dtype, data, 0, strides)
    elif data.size == 1 and data.ndim < len(shape):
        return np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
    return np.broadcast_to(data, shape)


def _lanes(mask: Any, ptrs: Any) -> np.ndarray:
    """The lanes of `ptrs` that are on; a block pointer's mask comes as a plain array."""
    return _broadcast(mask if isinstance(mask, np.ndarray) else mask.data, ptrs.data.shape)


@dataclass(frozen=True)
class Assembled:
    """The results of inline assembly: nothing, of what is run for what it does."""

    value: np.ndarray | None = None

    def get_result(self, _: int) -> TensorHandle:
        if self.value is None:
            return TensorHandle(np.zeros(1, np.int32), tl.int32)
        return TensorHandle(self.value.astype(np.float32), tl.float32)


def _reciprocal(x: np.ndarray) -> np.ndarray:
    """Of `ftz`: numbers below the least normal one count as zero."""
    return np.copysign(1.0, x) / np.where(np.abs(x) < np.finfo(np.float32).tiny, 0.0, np.abs(x))


INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "fma.rn.f32 $0, $1, $2, $3;": lambda a, b, c: a * b + c,
    "rcp.approx.ftz.f32 $0, $1;": _reciprocal,
}
"""What Inductor writes of float32 in assembly, done in float64. It is rounded once."""


def _add_bfloat16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return bfloat16_of_float32(float32_of_bfloat16(a) + float32_of_bfloat16(b))


_ATOMIC: Mapping[Any, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    ir.ATOMIC_OP.ADD: np.add,
    ir.ATOMIC_OP.FADD: np.add,
    ir.ATOMIC_OP.MAX: np.maximum,
    ir.ATOMIC_OP.MIN: np.minimum,
    ir.ATOMIC_OP.UMAX: np.maximum,
    ir.ATOMIC_OP.UMIN: np.minimum,
    ir.ATOMIC_OP.AND: np.bitwise_and,
    ir.ATOMIC_OP.OR: np.bitwise_or,
    ir.ATOMIC_OP.XOR: np.bitwise_xor,
    ir.ATOMIC_OP.XCHG: lambda old, new: new,
}
"""What each makes of what was there and its value."""


class Builder(InterpreterBuilder):
    """Triton's interpreter, with a GPU's memory, conversions and libdevice."""

    def __init__(self) -> None:
        super().__init__()
        # A GPU wraps around; an address that does is found by `Memory`.
        self.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        self.memory = Memory()
        self.operations: Operations

    # How a line is cached is one argument of Triton 3.9, two of 3.6; a descriptor's load names it.
    def create_load(self, ptr: Any, *_: Any) -> TensorHandle:
        dtype = ptr.get_element_ty()
        return TensorHandle(self.memory.read(ptr.data, interpreter._get_np_dtype(dtype)), dtype)

    def create_masked_load(
        self, ptrs: Any, mask: Any, other: Any, *_: Any, **__: Any
    ) -> TensorHandle:
        dtype = ptrs.get_element_ty()
        np_dtype = interpreter._get_np_dtype(dtype)
        wanted = _lanes(mask, ptrs)
        if wanted.all():
            return TensorHandle(self.memory.read(ptrs.data, np_dtype), dtype)
        if other is None:
            result = np.zeros(ptrs.data.shape, np_dtype)
        else:
            result = np.array(_broadcast(other.data, ptrs.data.shape), np_dtype)
        result[wanted] = self.memory.read(ptrs.data[wanted], np_dtype)
        return TensorHandle(result, dtype)

    def create_store(self, ptr: Any, val: Any, *_: Any) -> None:
        np_dtype = interpreter._get_np_dtype(ptr.get_element_ty())
        self.memory.write(ptr.data, _broadcast(val.data, ptr.data.shape).astype(np_dtype))

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> None:
        np_dtype = interpreter._get_np_dtype(ptrs.get_element_ty())
        lanes = _lanes(mask, ptrs)
        values = _broadcast(value.data, ptrs.data.shape)[lanes]
        self.memory.write(ptrs.data[lanes], values.astype(np_dtype, copy=False))

    def create_atomic_rmw(
        self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        dtype = ptr.get_element_ty()
        if dtype == tl.bfloat16 and op != ir.ATOMIC_OP.FADD:
            raise NotImplementedError(f"an atomic {op} of bfloat16")
        lanes = _lanes(mask, ptr)
        values = _broadcast(val.data, ptr.data.shape)[lanes]
        result = np.zeros(ptr.data.shape, interpreter._get_np_dtype(dtype))
        result[lanes] = self.memory.update(
            ptr.data[lanes],
            values.astype(result.dtype, copy=False),
            _add_bfloat16 if dtype == tl.bfloat16 else _ATOMIC[op],
        )
        return TensorHandle(result, dtype)

    def cast_impl(self, src: Any, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16:
            values = float32_of_bfloat16(src.data)
        elif source in _FLOAT8:
            values = float32_of_float8(src.data, _FLOAT8[source])
        elif source.is_floating() and source.primitive_bitwidth == 8:
            return super().create_fp_to_fp(src, dst_type, None)
        else:
            values = src.data
        if target == tl.bfloat16:
            return TensorHandle(bfloat16_of_float32(values.astype(np.float32)), target)
        if target in _FLOAT8:
            return TensorHandle(float8_of_float32(values, _FLOAT8[target]), target)
        if target == tl.int1:
            return TensorHandle(values != 0, target)
        return TensorHandle(values.astype(interpreter._get_np_dtype(dst_type)), target)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        types = (src.dtype.scalar, dst_type.scalar)
        if any(type_.primitive_bitwidth == 8 and type_ not in _FLOAT8 for type_ in types):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> TensorHandle:
        if lhs.dtype.scalar == tl.bfloat16 and op not in _BITWISE:
            output = op(float32_of_bfloat16(lhs.data), float32_of_bfloat16(rhs.data))
            if output.dtype == np.float32:
                output = bfloat16_of_float32(output)
            return TensorHandle(output, tl.bfloat16)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: Any, op: Any) -> TensorHandle:
        if arg.dtype.scalar == tl.bfloat16:
            return TensorHandle(bfloat16_of_float32(op(float32_of_bfloat16(arg.data))), tl.bfloat16)
        return super().unary_op(arg, op)

    def create_splat(self, ret_ty: Any, arg: Any) -> TensorHandle:
        return TensorHandle(_broadcast(arg.data, tuple(ret_ty.shape)), arg.dtype.scalar)

    def create_broadcast(self, arg: Any, shape: Any) -> TensorHandle:
        return TensorHandle(_broadcast(arg.data, tuple(shape)), arg.dtype.scalar)

    def create_extern_elementwise(
        self, lib_name: str, lib_path: str, symbol: str, args: list[Any], ret_type: Any, pure: bool
    ) -> TensorHandle:
        values = np.broadcast_arrays(*(arg.data for arg in args))
        tensors = [torch.from_numpy(np.ascontiguousarray(value)) for value in values]
        target = ret_type.scalar
        result = libdevice_function(symbol)(*tensors).numpy()
        return TensorHandle(result.astype(interpreter._get_np_dtype(target), copy=False), target)

    def create_inline_asm(
        self, asm: str, _constraints: str, values: list[TensorHandle], *_: Any
    ) -> Assembled:
        if instruction := INSTRUCTIONS.get(asm.strip()):
            with np.errstate(all="ignore"):
                return Assembled(instruction(*(each.data.astype(np.float64) for each in values)))
        if "prefetch.L2.global [$1], $2" not in asm:
            raise GraftError(f"the interpreter cannot run inline assembly: {asm.strip()}")
        address, size = (int(value.data.item()) for value in values)
        self.memory.prefetch(address, size)
        return Assembled()


def _split(data: np.ndarray, axis: int, start: int, end: int) -> np.ndarray:
    index = [slice(None)] * data.ndim
    index[axis] = slice(start, end)
    return data[tuple(index)]


def _combine(
    op: interpreter.ReduceScanOpInterface, types: list[Any], left: list[Any], right: list[Any]
) -> list[np.ndarray]:
    tensors = [op.to_tensor(x, t) for x, t in zip([*left, *right], [*types, *types])]
    result = op.combine_fn(*tensors)
    result = result if isinstance(result, (tuple, list, tl.tuple)) else (result,)
    return [
        np.asarray(x.handle.data, interpreter._get_np_dtype(t)).reshape(y.shape)
        for x, t, y in zip(result, types, left)
    ]


def reduce_by_halves(op: interpreter.ReduceOps, inputs: tuple[Any, ...]) -> list[Any]:
    """A reduction along an axis by any combining function, half of the block at a time.

    The order is that of a tree, as on a GPU; a kernel may not depend on it.
    """
    inputs, axis = op.unravel(inputs, op.axis)
    types = [x.dtype.scalar for x in inputs]
    data = [x.handle.data for x in inputs]
    while (size := data[0].shape[axis]) > 1:
        half = size // 2
        left = [_split(x, axis, 0, half) for x in data]
        right = [_split(x, axis, half, 2 * half) for x in data]
        joined = _combine(op, types, left, right)
        if size % 2:
            rest = [_split(x, axis, size - 1, size) for x in data]
            joined = [np.concatenate(pair, axis) for pair in zip(joined, rest)]
        data = joined
    if op.axis is None:
        shape = (1,) * len(inputs[0].shape) if op.keep_dims else ()
        data = [x.reshape(shape) for x in data]
    elif not op.keep_dims:
        data = [x.squeeze(axis) for x in data]
    return [op.to_tensor(x if x.shape else x.item(), type_) for x, type_ in zip(data, types)]


def scan_along(op: interpreter.ScanOps, inputs: tuple[Any, ...]) -> list[Any]:
    """An inclusive scan along an axis, a slice of the block at a time."""
    types = [x.dtype.scalar for x in inputs]
    data = [x.handle.data for x in inputs]
    size = data[0].shape[op.axis]
    carried = [_split(x, op.axis, 0, 1) for x in data]
    slices = [carried]
    for i in range(1, size):
        here = [_split(x, op.axis, i, i + 1) for x in data]
        carried = _combine(op, types, carried, here)
        slices.append(carried)
    joined = [np.concatenate(parts, op.axis) for parts in zip(*slices)]
    return [op.to_tensor(x, type_) for x, type_ in zip(joined, types)]


def logical_not(value: Any) -> Any:
    """`not value` as the compiler reads it: of a tensor, element by element."""
    return value == 0 if isinstance(value, tl.tensor) else operator.not_(value)


def types_of(scope: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The types of those of `names` that are tensors in `scope`."""
    return {name: scope[name].type for name in names if isinstance(scope.get(name), tl.tensor)}


def check_carried(before: dict[str, Any], scope: dict[str, Any]) -> None:
    """The compiler refuses a variable that changes its type in a loop. Raises LoopTypeError."""
    for name, type_ in before.items():
        now = scope[name]
        if isinstance(now, tl.tensor) and now.type != type_:
            raise LoopTypeError(
                f"loop-carried variable {name} has initial type {type_} but is re-assigned to "
                f"{now.type} in the loop: the kernel does not compile"
            )


class _Rewriter(interpreter.ASTTransformer):
    """Triton's own rewriting, and what the compiler does that Python does not.

    `not` of a tensor is elementwise: Python would ask the block for one bool. What a loop carries
    keeps its type, unless it is unrolled: Python does not care.
    """

    def visit_For(self, node: ast.For) -> Any:
        self.generic_visit(node)
        if "static_range" in ast.unparse(node.iter):
            return node
        stored = {
            name.id
            for statement in node.body
            for name in ast.walk(statement)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        if not stored:
            return node
        before = f"_graft_types_{node.lineno}"
        scope = "locals()"
        remember = f"{before} = _graft_types_of({scope}, {tuple(sorted(stored))!r})"
        check = f"_graft_check_carried({before}, {scope})"
        node.body.append(ast.parse(check).body[0])
        return [ast.parse(remember).body[0], node]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Not):
            return node
        return ast.Call(ast.Name("_graft_logical_not", ast.Load()), [node.operand], [])

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        return super().visit_Assign(node)


class Semantic(TritonSemantic):
    """Triton's own, with a short way for the two cases that nearly every operation is."""

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        left, right = lhs.type, rhs.type
        if left.is_block():
            if right.is_block() and left.shape is right.shape:
                return lhs, rhs
        elif not right.is_block():
            return lhs, rhs
        return super().broadcast_impl_value(lhs, rhs)


_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_block_init = tl.block_type.__init__
_block_eq = tl.block_type.__eq__
_dtype_eq = tl.dtype.__eq__


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """`block_type.__init__`, once for each element type and shape: shapes are shared objects."""
    sizes = tuple(getattr(size, "value", size) for size in shape)
    key = (
        element_ty.name,
        getattr(element_ty, "address_space", 0),
        getattr(element_ty, "const", False),
        sizes,
    )
    known = _block_types.get(key)
    if known is None:
        _block_init(self, element_ty, shape)
        same = next((t["shape"] for k, t in _block_types.items() if k[3] == sizes), self.shape)
        self.shape = same
        self.tensor_shape = tl.tuple([tl.constexpr(size) for size in sizes])
        self.tensor_numel = tl.constexpr(self.numel)
        number(self)
        known = _block_types[key] = dict(self.__dict__)
    self.__dict__.update(known)


def _init_tensor(self: Any, handle: TensorHandle, type_: Any) -> None:
    """`tensor.__init__`, with the shape that the block type holds ready."""
    self.handle = handle
    self.type = type_
    self.dtype = type_.scalar
    if type_.is_block():
        self.shape, self.numel = type_.tensor_shape, type_.tensor_numel
    else:
        self.shape, self.numel = _SCALAR_SHAPE, _SCALAR_NUMEL


_SCALAR_SHAPE = tl.tuple([])
_SCALAR_NUMEL = tl.constexpr(1)


def _equal_blocks(self: Any, other: Any) -> bool:
    if isinstance(other, tl.block_type) and self.shape is other.shape:
        return bool(self.element_ty == other.element_ty)
    return _block_eq(self, other)


_np_dtype_of_scalar = functools.cache(interpreter._get_np_dtype)


def _np_dtype(type_: Any) -> np.dtype[Any]:
    scalar = type_.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_of_scalar(scalar)


def _make_types_cheap() -> None:
    """Most of what the interpreter does is to make and compare the types of its values."""
    tl.block_type.__init__ = _init_block_type
    tl.block_type.__eq__ = _equal_blocks
    tl.dtype.__eq__ = lambda self, other: self is other or _dtype_eq(self, other)
    tl.tensor.__init__ = _init_tensor
    tl.dtype.recorded_number = None
    interpreter._get_np_dtype = _np_dtype


_device_call = interpreter.InterpretedFunction.__call__


@functools.cache
def _device_function(function: Any) -> Callable[..., Any]:
    return install().operations.remember(functools.partial(_device_call, function))


def _call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`InterpretedFunction.__call__`, recorded."""
    return _device_function(self)(*args, **kwargs)


_installed: Builder | None = None


def install() -> Builder:
    """Put all this in the place of Triton's own, for the life of the process; once.

    Triton patches `triton.language` anew for each launch and for each call of a device function,
    at milliseconds a time. Here it stays patched.
    """
    global _installed
    if _installed is not None:
        return _installed
    builder = _installed = Builder()
    semantic = Semantic(builder)
    _make_types_cheap()
    interpreter.TritonSemantic = Semantic
    interpreter.interpreter_builder = builder
    interpreter.interpreter_semantic = semantic
    interpreter._graft_logical_not = logical_not
    interpreter._graft_types_of = types_of
    interpreter._graft_check_carried = check_carried
    interpreter.FunctionRewriter.ast_transformer = _Rewriter()
    interpreter.ReduceOps.generic_reduce = reduce_by_halves
    interpreter.ScanOps.generic_scan = scan_along

    builder.operations = operations = Operations(semantic)
    interpreter._patch_attr = lambda of, name, member, _builder, scope: scope.set_attr(
        of, name, operations.wrap(member)
    )
    scope = interpreter._LangPatchScope()
    for language in (tl, tl.core):
        interpreter._patch_builtin(language, builder, scope)
        interpreter._patch_builtin(language.tensor, builder, scope)
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
    tl.tensor.__index__ = operations.asks(lambda self: self.handle.data.item())
    tl.tensor.__bool__ = operations.asks(tl.tensor.__bool__)
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter._patch_builtin(tl.math, builder, scope)
    interpreter._patch_builtin(tl.core.tensor_descriptor_base, builder, scope)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    for name in dir(cuda_libdevice):
        if tl.core.is_builtin(getattr(cuda_libdevice, name)):
            function = getattr(cuda_libdevice, name)
            setattr(generic_libdevice, name, operations.wrap(function))
    return builder
