"""The interpreter against what a GPU does: memory, conversions, libdevice, reductions, budgets."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
from lab_process import LabProcess


@pytest.fixture(scope="module")
def lab() -> Any:
    process = LabProcess(__file__)
    yield process
    process.close()


if os.environ.get("TRITON_INTERPRET") == "1":
    import numpy as np
    import torch
    import triton
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_helpers import libdevice

    from graft.errors import GraftError
    from graft.lab import builder, interpret

    interpret.install()

    @triton.jit
    def copy_kernel(source, target, count, BLOCK: tl.constexpr):
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source + index), index < count)

    @triton.jit
    def eighths_kernel(source, narrow, wide, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        value = tl.load(source + index).to(narrow.dtype.element_ty)
        tl.store(narrow + index, value)
        tl.store(wide + index, value.to(tl.float32))

    @triton.jit
    def masked_kernel(source, target, count, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        value = tl.load(source + index, index < count, other=7.0)
        tl.store(target + index, value)

    @triton.jit
    def atomic_kernel(index, values, target, before, count, BLOCK: tl.constexpr):
        lane = tl.arange(0, BLOCK)
        at, value = tl.load(index + lane), tl.load(values + lane)
        old = tl.atomic_add(target + at, value, lane < count)
        tl.store(before + lane, old)

    @triton.jit
    def atomic_constant_kernel(index, target, count, BLOCK: tl.constexpr):
        lane = tl.arange(0, BLOCK)
        one = tl.full([1], 1.5, tl.float32)
        tl.atomic_add(target + tl.load(index + lane), tl.broadcast_to(one, [BLOCK]), lane < count)

    @triton.jit
    def atomic_max_kernel(index, values, target, BLOCK: tl.constexpr):
        lane = tl.arange(0, BLOCK)
        tl.atomic_max(target + tl.load(index + lane), tl.load(values + lane))

    @triton.jit
    def descriptor_kernel(source, target, rows, columns, BLOCK: tl.constexpr):
        shape, strides = [rows, columns], [columns, 1]
        read = tl.make_tensor_descriptor(source, shape, strides, [BLOCK, BLOCK])
        write = tl.make_tensor_descriptor(target, shape, strides, [BLOCK, BLOCK])
        write.store([0, 0], read.load([0, 0]) * 2)

    @triton.jit
    def overrun_kernel(
        source, target, xnumel, r0_numel, XBLOCK: tl.constexpr, RSPLIT: tl.constexpr
    ):
        columns = tl.arange(0, 16)[None, :]
        rows = tl.program_id(0) * RSPLIT + tl.arange(0, XBLOCK)[:, None]
        total = tl.full([16], 0, tl.float32)[None, :]
        for _ in tl.range(0, min(RSPLIT, xnumel - tl.program_id(0) * RSPLIT), XBLOCK):
            mask = rows < xnumel
            value = tl.load(source + columns + r0_numel * rows, mask, other=0.0)
            rows += XBLOCK
            total = total + tl.sum(libdevice.exp(value), 0)
        tl.store(target + tl.program_id(0) * r0_numel + columns, total)

    @triton.jit
    def alike_kernel(source, target, BLOCK: tl.constexpr):
        """Operations of one name and one type each, on other values; two times each."""
        index = tl.arange(0, BLOCK)
        place = target + tl.program_id(0) * 8 * BLOCK + index
        for _ in tl.static_range(2):
            x = tl.load(source + index)
            y = x + tl.program_id(0)
            tl.store(place, x * x)
            tl.store(place + BLOCK, x * y)
            tl.store(place + 2 * BLOCK, tl.where(x > 2, x, y))
            tl.store(place + 3 * BLOCK, tl.where(x > 3, y, x))
            tl.store(place + 4 * BLOCK, x * 2.0)
            tl.store(place + 5 * BLOCK, x * 3.0)
            tl.store(place + 6 * BLOCK, (x / 4).to(tl.int32) / 3)
            tl.store(place + 7 * BLOCK, libdevice.fmod(y, x + 1) + x[None, :].reshape(BLOCK))

    @triton.jit
    def both(x, y):
        return tl.minimum(x, y), tl.maximum(x, y)

    @triton.jit
    def doubled_of_a_high_program(x):
        if tl.program_id(0) > 1:
            x = x * 2
        return x

    @triton.jit
    def counted(x, count):
        for _ in range(count):
            x += 1
        return x

    @triton.jit
    def place(target, number, BLOCK: tl.constexpr):
        return target + (tl.program_id(0) * 4 + number) * BLOCK + tl.arange(0, BLOCK)

    @triton.jit
    def device_functions_kernel(source, target, BLOCK: tl.constexpr):
        """Functions with two results, with a branch, with a loop, and without a tensor."""
        x = tl.load(source + tl.arange(0, BLOCK))
        low, high = both(x, tl.program_id(0) - x)
        tl.store(place(target, 0, BLOCK), low)
        tl.store(place(target, 1, BLOCK), high)
        tl.store(place(target, 2, BLOCK), doubled_of_a_high_program(x))
        tl.store(place(target, 3, BLOCK), counted(x, tl.program_id(0)))

    @triton.jit
    def libdevice_kernel(source, target, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        x = tl.load(source + index)
        tl.store(target + index, libdevice.rsqrt(x))
        tl.store(target + BLOCK + index, libdevice.exp(x))
        tl.store(target + 2 * BLOCK + index, libdevice.tanh(x))
        tl.store(target + 3 * BLOCK + index, libdevice.pow(x, x))
        tl.store(target + 4 * BLOCK + index, libdevice.erf(x))

    @triton.jit
    def reduce_kernel(source, target, places, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        x = tl.load(source + rows * COLUMNS + columns)
        out = tl.arange(0, ROWS)
        tl.store(target + out, triton_helpers.prod(x, 1))
        tl.store(target + ROWS + out, triton_helpers.max2(x, 1))
        _, at = triton_helpers.max_with_index(x, tl.broadcast_to(columns, [ROWS, COLUMNS]), 1)
        tl.store(places + out, at)
        tl.store(target + 2 * ROWS + out, tl.sum(x, 1))

    @triton.jit
    def scan_kernel(source, target, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        x = tl.load(source + index)
        result = tl.associative_scan(x, 0, triton_helpers.maximum)
        tl.store(target + index, result)

    @triton.jit
    def carried_kernel(source, target, count):
        total = tl.full([8], 0, tl.float32)
        for i in tl.range(0, count):
            value = tl.load(source + 8 * i + tl.arange(0, 8))
            total = total + value
        tl.store(target + tl.arange(0, 8), total)

    @triton.jit
    def unrolled_kernel(source, target, count: tl.constexpr):
        total = tl.full([8], 0, tl.float32)
        for i in tl.static_range(0, count):
            total = total + tl.load(source + 8 * i + tl.arange(0, 8))
        tl.store(target + tl.arange(0, 8), total)

    @triton.jit
    def prefetch_kernel(source, target, offset, size):
        first = source.to(tl.int64) + offset + tl.program_id(0)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
            [first & -16, size + tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        tl.store(target, tl.load(source))

    @triton.jit
    def assembly_kernel(source, target):
        value = tl.load(source)
        done = tl.inline_asm_elementwise(
            "abs.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
        tl.store(target, done)

    @triton.jit
    def float_assembly_kernel(source, target, BLOCK: tl.constexpr):
        x = tl.load(source + tl.arange(0, BLOCK))
        reciprocal = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f, f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        result = tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f, f, f, f",
            [reciprocal, x, -1.0], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        tl.store(target + tl.arange(0, BLOCK), reciprocal)
        tl.store(target + BLOCK + tl.arange(0, BLOCK), result)

    def launch(kernel: Any, grid: tuple[int, int, int] = (1, 1, 1), **arguments: Any) -> int:
        signature = {k: "i32" for k, v in arguments.items() if isinstance(v, int) and k.islower()}
        return interpret.launch(kernel, arguments, signature, grid)


def in_lab_read_outside() -> Any:
    source, target = torch.arange(5.0), torch.empty(8)
    outside = launch(copy_kernel, source=source, target=target, count=8, BLOCK=8)
    return target[:5].tolist(), target[5:].isnan().tolist(), outside


def test_read_outside_of_the_arguments_is_poison(lab: LabProcess) -> None:
    inside, beyond, count = lab("read_outside")
    assert inside == [0, 1, 2, 3, 4]
    assert beyond == [True] * 3
    assert count == 3


def in_lab_masked() -> Any:
    target = torch.empty(8)
    outside = launch(masked_kernel, source=torch.arange(5.0), target=target, count=5, BLOCK=8)
    return target.tolist(), outside


def test_lanes_that_are_masked_off_are_not_read(lab: LabProcess) -> None:
    assert lab("masked") == [[0, 1, 2, 3, 4, 7, 7, 7], 0]


def in_lab_descriptor() -> Any:
    source = torch.arange(24.0).view(6, 4)
    target = torch.zeros(6, 4)
    launch(descriptor_kernel, source=source, target=target, rows=6, columns=4, BLOCK=8)
    return bool(torch.equal(target, 2 * source))


def test_a_descriptor_loads_and_stores_what_there_is(lab: LabProcess) -> None:
    assert lab("descriptor")


def in_lab_write_outside() -> str:
    with pytest.raises(builder.OutOfBoundsWrite) as error:
        launch(copy_kernel, source=torch.zeros(8), target=torch.zeros(5), count=8, BLOCK=8)
    return error.value.message


def test_write_outside_of_the_arguments_raises(lab: LabProcess) -> None:
    assert "outside of the tensors" in lab("write_outside")


def in_lab_atomic(dtype: str) -> Any:
    kind = getattr(torch, dtype)
    index = torch.tensor([0, 2, 0, 1, 0, 2, 3, 3])
    values = torch.tensor([256, 2, 1, 3, 1, 4, 100, 100]).to(kind)
    target, before = torch.ones(4, dtype=kind), torch.full((8,), -1, dtype=kind)
    launch(
        atomic_kernel, index=index, values=values, target=target, before=before, count=6, BLOCK=8
    )
    return target.tolist(), before.tolist()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "int64"])
def test_atomic_additions_to_one_place_follow_each_other(lab: LabProcess, dtype: str) -> None:
    target, before = lab("atomic", dtype)
    # bfloat16 has 8 bits: 257 is 256, and so is 256 + 1
    total, first = (256, 256) if dtype == "bfloat16" else (259, 257)
    second = 256 if dtype == "bfloat16" else 258
    assert target == [total, 4, 7, 1]
    assert before == [1, 1, first, 1, second, 3, 0, 0]


def in_lab_atomic_constant() -> Any:
    target = torch.zeros(2)
    index = torch.tensor([0, 1, 1, 1])
    launch(atomic_constant_kernel, index=index, target=target, count=4, BLOCK=4)
    bits = torch.tensor([-5, 7], dtype=torch.int32)
    values = torch.tensor([-7, 1, 9, 3], dtype=torch.int32)
    index = torch.tensor([0, 0, 1, 1])
    launch(atomic_max_kernel, index=index, values=values, target=bits, BLOCK=4)
    outside = torch.tensor([0, 9, 0, 0])
    try:
        launch(atomic_constant_kernel, index=outside, target=target, count=4, BLOCK=4)
    except GraftError as error:
        return target.tolist(), bits.tolist(), str(error)
    return None


def test_an_atomic_of_a_constant_and_one_outside_of_the_arguments(lab: LabProcess) -> None:
    target, bits, said = lab("atomic_constant")
    assert target == [1.5, 4.5]
    assert bits == [1, 9]
    assert "outside of the tensors" in said


def in_lab_prefetch(offset: int, size: int) -> Any:
    source, target = torch.arange(64.0), torch.empty(1)  # 256 bytes
    try:
        outside = launch(prefetch_kernel, source=source, target=target, offset=offset, size=size)
    except builder.OutOfBoundsPrefetch as error:
        return error.message
    return target.tolist(), outside


@pytest.mark.parametrize(("offset", "size"), [(0, 256), (16, 240), (250, 16), (300, 0), (999, -16)])
def test_a_prefetch_changes_nothing(lab: LabProcess, offset: int, size: int) -> None:
    assert lab("prefetch", offset, size) == [[0.0], 0]


@pytest.mark.parametrize(("offset", "size"), [(0, 272), (-16, 32), (256, 16)])
def test_a_prefetch_outside_of_the_arguments_raises(
    lab: LabProcess, offset: int, size: int
) -> None:
    assert f"fetched {size} bytes, some of them outside" in lab("prefetch", offset, size)


def in_lab_float_assembly() -> Any:
    source, target = torch.tensor([3.0, -0.0, 1e-40, torch.inf]), torch.empty(8)
    launch(float_assembly_kernel, source=source, target=target, BLOCK=4)
    return target.tolist()


def test_float_assembly_rounds_once(lab: LabProcess) -> None:
    third, *others = lab("float_assembly")
    inf = float("inf")
    assert others[:3] == [-inf, inf, 0]
    assert third == 0.3333333432674408
    # the rounding of the reciprocal is what is left
    assert others[3] == 2.0**-25


def in_lab_assembly() -> str:
    with pytest.raises(Exception, match="cannot run inline assembly") as error:
        launch(assembly_kernel, source=torch.zeros(1), target=torch.zeros(1))
    return str(error.value)


def test_other_assembly_is_refused(lab: LabProcess) -> None:
    assert "abs.f32" in lab("assembly")


def in_lab_overrun(rows: int) -> float:
    target = torch.empty(math.ceil(rows / 8), 16)
    launch(
        overrun_kernel, (math.ceil(rows / 8), 1, 1), source=torch.zeros(rows, 16),
        target=target, xnumel=rows, r0_numel=16, XBLOCK=4, RSPLIT=8,
    )  # fmt: skip
    return float(target.sum(0)[3])


@pytest.mark.parametrize(("rows", "counted"), [(16, 16), (13, 16), (9, 12), (1, 4)])
def test_rows_beyond_the_end_count_as_the_kernel_says(
    lab: LabProcess, rows: int, counted: int
) -> None:
    # exp(0) for each row of the last block of XBLOCK rows, whether it exists or not.
    assert lab("overrun", rows) == counted


def in_lab_bfloat16() -> list[int]:
    bits = torch.randint(0, 2**32, (200_000,), dtype=torch.int64).to(torch.uint32)
    halfway = torch.arange(2**16, dtype=torch.int64) * 2**16 + 2**15
    values = torch.cat([bits, halfway.to(torch.uint32)]).view(torch.float32)
    finite = values[~values.isnan()]
    expected = finite.to(torch.bfloat16).view(torch.uint16).numpy()
    found = builder.bfloat16_of_float32(finite.numpy())
    back = builder.float32_of_bfloat16(found)
    exact = finite.to(torch.bfloat16).float().numpy()
    nans = builder.bfloat16_of_float32(np.array([np.nan, -np.nan], np.float32))
    return [
        int((found != expected).sum()),
        int((back != exact).sum()),
        int(np.isnan(builder.float32_of_bfloat16(nans)).sum()),
    ]


def in_lab_alike() -> Any:
    x = torch.arange(4, dtype=torch.float32)
    target = torch.empty(3, 8, 4)
    signature = {"source": "*fp32", "target": "*fp32", "BLOCK": "constexpr"}
    arguments = {"source": x, "target": target, "BLOCK": 4}
    interpret.launch(alike_kernel, arguments, signature, (3, 1, 1))
    for program, result in enumerate(target):
        y = x + program
        chosen = (torch.where(x > 2, x, y), torch.where(x > 3, y, x))
        more = (x * 2, x * 3, (x / 4).int() / 3, torch.fmod(y, x + 1) + x)
        expected = torch.stack((x * x, x * y, *chosen, *more))
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    known = builder.install().operations.known
    return len(known), sum(found is None for found in known.values())


def test_operations_that_are_alike_are_told_apart(lab: LabProcess) -> None:
    """What is recorded of an operation is used for those of the same types, and for no others."""
    before, _ = lab("alike")
    known, unknown = lab("alike")
    assert known == before > 20  # nothing is worked out again
    assert unknown < known / 4


def in_lab_device_functions() -> Any:
    arguments = {"target": torch.empty(4, 4, 4), "BLOCK": 4}
    signature = {"source": "*fp32", "target": "*fp32", "BLOCK": "constexpr"}
    for start in (0, 7):
        x = torch.arange(start, start + 4, dtype=torch.float32)
        interpret.launch(device_functions_kernel, arguments | {"source": x}, signature, (4, 1, 1))
        for program, result in enumerate(arguments["target"]):
            y = program - x
            doubled = x * 2 if program > 1 else x
            expected = torch.stack((torch.minimum(x, y), torch.maximum(x, y), doubled, x + program))
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
    recorded: dict[str, list[bool]] = {}
    for (member, *_), steps in builder.install().operations.known.items():
        if member.args:  # a device function
            recorded.setdefault(member.args[0].__name__, []).append(steps is not None)
    return recorded


def test_device_functions_are_recorded_unless_they_ask_what_a_tensor_holds(lab: LabProcess) -> None:
    found = lab("device_functions")
    assert found["both"] == [True]
    assert found["place"] == [True, True, True, True]  # one for each number
    assert found["counted"] == found["doubled_of_a_high_program"] == [False]


def test_bfloat16_rounds_to_nearest_even(lab: LabProcess) -> None:
    assert lab("bfloat16") == [0, 0, 2]


def in_lab_bfloat16_kernel() -> list[bool]:
    torch.manual_seed(0)
    source = torch.randn(64)
    target = torch.empty(64, dtype=torch.bfloat16)
    launch(copy_kernel, source=source, target=target, count=64, BLOCK=64)
    back = torch.empty(64)
    launch(copy_kernel, source=target, target=back, count=64, BLOCK=64)
    return [torch.equal(target, source.bfloat16()), torch.equal(back, source.bfloat16().float())]


def test_kernel_stores_bfloat16(lab: LabProcess) -> None:
    assert lab("bfloat16_kernel") == [True, True]


def in_lab_libdevice(dtype: str) -> list[float]:
    x = torch.linspace(0.25, 3, 64, dtype=getattr(torch, dtype))
    target = torch.empty(5, 64, dtype=x.dtype)
    launch(libdevice_kernel, source=x, target=target, BLOCK=64)
    wide = x.double()
    expected = torch.stack([wide.rsqrt(), wide.exp(), wide.tanh(), wide.pow(wide), wide.erf()])
    return ((target - expected).abs() / expected).amax(1).tolist()


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 4e-7), ("float64", 1e-15)])
def test_libdevice(lab: LabProcess, dtype: str, bound: float) -> None:
    assert max(lab("libdevice", dtype)) < bound


def in_lab_libdevice_unknown() -> str:
    with pytest.raises(GraftError) as error:
        builder.libdevice_function("__nv_yn")
    return error.value.message


def test_libdevice_without_stand_in_says_so(lab: LabProcess) -> None:
    assert "__nv_yn" in lab("libdevice_unknown")


def in_lab_reduce() -> list[bool]:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    x[1, 3], x[2, 5], x[2, 9] = float("nan"), 9.0, 9.0
    target, places = torch.empty(3, 4), torch.empty(4, dtype=torch.int32)
    launch(reduce_kernel, source=x, target=target, places=places, ROWS=4, COLUMNS=16)
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    return [
        torch.allclose(target[0], x.prod(1), **close),
        torch.allclose(target[1], x.amax(1), **close),
        torch.equal(places.long(), x.argmax(1)),
        torch.allclose(target[2], x.sum(1), **close),
    ]


def test_reductions_with_nan_and_ties(lab: LabProcess) -> None:
    assert lab("reduce") == [True] * 4


def in_lab_scan() -> bool:
    torch.manual_seed(0)
    x = torch.randn(32)
    target = torch.empty(32)
    launch(scan_kernel, source=x, target=target, BLOCK=32)
    return torch.equal(target, x.cummax(0).values)


def test_scan(lab: LabProcess) -> None:
    assert lab("scan")


def in_lab_carried(dtype: str, unrolled: bool = False) -> str:
    source = torch.ones(3, 8, dtype=getattr(torch, dtype))
    target = torch.empty(8, dtype=source.dtype)
    try:
        launch(
            unrolled_kernel if unrolled else carried_kernel, source=source, target=target, count=3
        )
    except builder.LoopTypeError as error:
        return error.message
    return str(target.tolist()[0])


def in_lab_eighths(dtype: str, source: str) -> Any:
    """Elements that are not PyTorch's, of 8192 of all magnitudes; what is over, and NaN."""
    torch.manual_seed(0)
    dtype, kind = getattr(torch, dtype), getattr(torch, source)
    x = torch.randn(8192) * torch.exp2(torch.randint(-18, 10, (8192,)))
    x[:5] = torch.tensor([7.85, 1e6, -1e6, float("inf"), float("nan")])
    x = x.to(kind)
    narrow, wide = torch.empty(8192, dtype=dtype), torch.empty(8192)
    launch(eighths_kernel, source=x, narrow=narrow, wide=wide, BLOCK=8192)
    most = torch.finfo(dtype).max
    expected = x.float().clamp(-most, most).to(dtype)
    same = narrow.view(torch.uint8) == expected.view(torch.uint8)
    back = torch.equal(wide.nan_to_num(1e9), narrow.float().nan_to_num(1e9))
    return [int((~same).sum()), back, narrow[:5].float().tolist()[:3]]


@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("dtype", "most"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)], ids=["e4m3", "e5m2"]
)
def test_8_bit_floats_round_to_the_nearest_even_and_saturate(
    lab: LabProcess, dtype: str, most: float, source: str
) -> None:
    assert lab("eighths", dtype, source) == [0, True, [8.0, most, -most]]


def test_a_type_that_changes_in_a_loop_is_refused_as_the_compiler_does(lab: LabProcess) -> None:
    assert lab("carried", "float32") == "3.0"
    assert lab("carried", "float16") == "3.0"
    assert "loop-carried variable total" in lab("carried", "float64")
    assert lab("carried", "float64", True) == "3.0"


def in_lab_poison() -> Any:
    source = """
import torch
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
def call(args):
    args.clear()
    return tuple(
        empty_strided_cuda((2, 3), (5, 1), dtype)
        for dtype in (
            torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn, torch.float8_e8m0fnu
        )
    )
"""
    floats, halves, integers, eights, exponents = interpret.run(source, [])
    return [
        list(floats.stride()),
        bool(floats.isnan().all()),
        bool(halves.isnan().all()),
        bool((integers == builder.POISON_INTEGER).all()),
        bool(eights.float().isnan().all()),
        bool(exponents.float().isnan().all()),
    ]


def test_what_nothing_wrote_is_poison(lab: LabProcess) -> None:
    assert lab("poison") == [[5, 1], True, True, True, True, True]


def in_lab_device_named() -> str:
    source = """
import torch
def call(args):
    x, = args
    return torch.ops.aten.full.default([2], 3.0, device=torch.device("cuda", 0)) + x,
"""
    (out,) = interpret.run(source, [torch.ones(2)])
    return f"{out.device.type} {out.tolist()}"


def test_aten_runs_on_the_cpu_whatever_the_wrapper_names(lab: LabProcess) -> None:
    assert lab("device_named") == "cpu [4.0, 4.0]"


def in_lab_estimate() -> list[float]:
    source = "\ndef kernel(a):\n" + "    x = 1\n" * 10
    mix = {"XBLOCK": 1, "RSPLIT_SIZE": 16}
    return [
        interpret.estimate_s(source, (4, 1, 1), mix, {"xnumel": 64, "r0_numel": 768}),
        interpret.estimate_s(source, (40, 1, 1), mix, {"xnumel": 640, "r0_numel": 768}),
        interpret.estimate_s(source, (1, 1, 1), {"XBLOCK": 1, "R0_BLOCK": 64}, {"r0_numel": 640}),
        interpret.estimate_s(source, (10, 1, 1), {"XBLOCK": 1, "R0_BLOCK": 64}, {"r0_numel": 64}),
    ]


def test_estimate_counts_every_pass_over_the_body(lab: LabProcess) -> None:
    small, large, looped, flat = lab("estimate")
    assert large == pytest.approx(10 * small)
    assert looped == pytest.approx(flat)


def test_without_the_variable_it_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    from graft.errors import GraftError
    from graft.lab import interpret

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(GraftError, match="TRITON_INTERPRET=1"):
        interpret.require()
