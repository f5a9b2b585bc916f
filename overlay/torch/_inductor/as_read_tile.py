"""
The tile of a persistent reduction that writes along the dimension that it reads along, and
reduces another, as softmax over classes and norms over channels do, with channels first::

    torch.softmax(x, 1)                         # x [B, C, N]: over C, read along N
    blocks = x.unflatten(0, (-1, 32))           # amax of blocks of rows, and x / amax

Upstream benchmarks persistent kernels of 1 to 128 columns up to 64 values, and loops over more,
which read x once for each reduction and once more. With 16-byte loads few lanes lie along
the columns, so that each reduction crosses lanes and warps.

Here a program has all values of 32 columns or more. No value changes its layout, so lanes may
lie along both dimensions, 8 bytes each, and few warps have many values each.

A norm's weight is a row of its own, [1, R0_BLOCK]. Triton's layout pass goes on from the last
load of a kernel, and would have the tile change to that row's layout and back. So rows are
loaded before tiles.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from .block_reduction_tile import (
    Access,
    BlockReductionTile,
    ELEMENTS_PER_THREAD,
    main_accesses,
)
from .device_model import DeviceModel, LINE_BYTES
from .row_accesses import HALF_BYTES, SECTOR_BYTES
from .runtime.registers import all_registers, THREADS_PER_WARP
from .runtime.runtime_utils import next_power_of_2
from .utils import ceildiv


if TYPE_CHECKING:
    from .codegen.triton import IndexingOptions


# Bytes that a lane loads of the widest type.
LANE_BYTES = 8
# Columns of a program: 64, a line of fp16 or bf16, of up to LONG_BLOCK values; of more, which would
# need too many registers, 32. With fewer an H200 is slower.
COLUMNS = 64
MIN_COLUMNS = 32
LONG_BLOCK = 128
# Values of a program, at least, which two warps have; and at most, of several blocks that are
# written one after the other.
MIN_VALUES = 2048
MAX_VALUES = 16384
BLOCKS_IN_A_ROW = 4
# Values of a tile beyond those of the reduction, for each of those.
PADDING = 1 / 4
# Registers of a thread for what is not the values that it reads.
OTHER_REGISTERS = 56
# Up to so many warps a thread has ELEMENTS_PER_THREAD values, and then twice as many.
FEW_WARPS = 4
# Programs that a multiprocessor has, at least, before columns are halved for more.
PROGRAMS_PER_SM = 4


@dataclasses.dataclass(frozen=True)
class AsReadTile(BlockReductionTile):
    """The tile of a kernel that writes as it reads, and loads rows before tiles."""


def as_read_tile(
    reads: list[Access],
    writes: list[Access],
    sizes: dict[str, int],
    device: DeviceModel,
) -> Optional[AsReadTile]:
    """
    The tile of a kernel of ``sizes`` ("y" or not, "x", "r0_") with these ``reads`` and
    ``writes`` on ``device``. None where they are not along one dimension other than "r0_",
    where there is no line to read, where multiprocessors would have no program, or where
    parts of sectors are written of several results.
    """
    main_reads, main_writes = main_accesses(reads, writes)
    if (along := _dimension(main_reads, main_writes, sizes)) is None:
        return None
    main = [*main_reads, *main_writes]
    values = next_power_of_2(sizes["r0_"])
    blocks = {prefix: 1 for prefix in sizes if prefix != "r0_"}
    blocks[along] = MIN_COLUMNS if values > LONG_BLOCK else max(COLUMNS, MIN_VALUES // values)

    def programs() -> int:
        return math.prod(ceildiv(sizes[prefix], block) for prefix, block in blocks.items())

    while blocks[along] > MIN_COLUMNS and programs() < PROGRAMS_PER_SM * device.sms:
        blocks[along] //= 2
    if programs() < device.sms:
        return None
    widest = max(a.itemsize for a in main)
    read = sum(a.itemsize * len(a.buffers) for a in main_reads)
    if (
        not _fit_in_registers(values * blocks[along], read, device)
        and blocks[along] * widest > LINE_BYTES // 2
    ):
        blocks[along] //= 2
    begins_anywhere = any(a.row_alignment == a.itemsize for a in main)
    if begins_anywhere and values * MIN_COLUMNS > MAX_VALUES:
        return None  # each value has an address, and registers are spilled
    # Results of blocks that go on along another dimension are longer runs.
    for prefix in OrderedSet(a.along for a in writes) - OrderedSet([along, "r0_", None]):
        while (
            blocks[prefix] < BLOCKS_IN_A_ROW
            and values * math.prod(blocks.values()) < MAX_VALUES
            and programs() >= 2 * PROGRAMS_PER_SM * device.sms
        ):
            blocks[prefix] *= 2
    lane = max(1, LANE_BYTES // widest)
    return AsReadTile(
        {prefix.upper() + "BLOCK": block for prefix, block in blocks.items()},
        _num_warps(values * math.prod(blocks.values())),
        {name: lane * a.itemsize for a in main for name in a.buffers},
    )


def is_looped_as_fast(reads: list[Access], writes: list[Access], sizes: dict[str, int]) -> bool:
    """
    Whether a loop that computes little is as fast as an ``AsReadTile``: one of half types in rows
    of whole lines, of which the tile would be padded by a quarter or more.
    """
    values = next_power_of_2(sizes["r0_"])
    return (
        values > 2 * LONG_BLOCK
        and values > (1 + PADDING) * sizes["r0_"]
        and all(
            a.itemsize <= HALF_BYTES and a.row_alignment == LINE_BYTES
            for accesses in main_accesses(reads, writes)
            for a in accesses
        )
    )


def _dimension(
    main_reads: list[Access], main_writes: list[Access], sizes: dict[str, int]
) -> Optional[str]:
    """The dimension along which all of these are, in lines, where it is worth a tile."""
    main = [*main_reads, *main_writes]
    dimensions = OrderedSet(a.along for a in main)
    if not main_reads or not main_writes or len(dimensions) != 1:
        return None
    (along,) = dimensions
    if along not in sizes or along == "r0_":
        return None
    if any(a.run[along] < LINE_BYTES // a.itemsize for a in main):
        return None
    written = sum(len(a.buffers) for a in main_writes)
    if written > 1 and any(a.row_alignment < SECTOR_BYTES for a in main_writes):
        return None
    return along


def _num_warps(values: int) -> int:
    """Warps of a program of so many values."""
    num_warps = max(1, values // (THREADS_PER_WARP * ELEMENTS_PER_THREAD))
    return num_warps if num_warps <= FEW_WARPS else max(FEW_WARPS, num_warps // 2)


def _fit_in_registers(values: int, nbytes: int, device: DeviceModel) -> bool:
    """Whether a program has the registers for values of so many bytes, all that it reads."""
    num_warps = _num_warps(values)
    of_values = values * nbytes // (num_warps * THREADS_PER_WARP * 4)
    return of_values + OTHER_REGISTERS <= all_registers(device.registers_per_sm, num_warps)


def is_row(indexing: IndexingOptions) -> bool:
    """Whether a load is of a value for each of the reduction's, the same for all columns."""
    return indexing.has_rindex() and not free_symbol_is_type(
        indexing.index, (SymT.XBLOCK, SymT.YBLOCK)
    )
