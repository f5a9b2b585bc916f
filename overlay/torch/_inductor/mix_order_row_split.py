"""
How the rows of a mix-order reduction are split over the programs of its kernel.

A fixed number of programs, a few for each SM, stays on the GPU for the whole
kernel. Each reduces tiles of ``XBLOCK`` rows, every so many or a run of them, in a
software-pipelined loop, and writes its partial accumulators once. So no wave is
ragged, the workspace does not grow with the rows, and a dynamic number of rows
needs no other kernel.

``row_split`` is a function of what one row costs, of how many there are, of the GPU and of
the debug options. What it weighs, per SM:

- bytes in flight: loads of the next tiles must cover the latency of memory.
- warps: those that stay on it hide the latency of what is computed.
- registers: an accumulator and a row that every iteration reads are live
  throughout, and so are, from the loads to the stores, the tiles of a row. Where
  they do not fit, a row is loaded twice: once for its reductions, and again, from
  a cache, for what depends on them.
- shared memory: holds the stages.
"""

from __future__ import annotations

import math
from typing import Optional, TYPE_CHECKING

from .mix_order_debug import debug_options
from .mix_order_program_count import count_programs, idle_share
from .mix_order_row_loop import RowSplit
from .runtime.registers import (
    all_registers,
    MAX_REGISTERS_PER_THREAD,
    OTHER_REGISTERS,
)
from .runtime.runtime_utils import ceildiv, last_power_of_2


if TYPE_CHECKING:
    from .device_model import DeviceModel
    from .mix_order_row_cost import RowCost


# Programs an SM: with other numbers blocks are dealt to the SMs unevenly.
PROGRAMS_PER_SM = (1, 2, 3, 4, 8, 16)
# Bytes of the largest tile of several rows: a stage of shared memory.
MAX_TILE_BYTES = 48 * 1024
# Columns of a tile of several rows, at least: 16-byte loads by every thread of a few
# warps. Few large programs are as fast as many small ones, with a smaller workspace.
MIN_TILE = 2048
MIN_TILE_NARROW = 1024  # rows of at most 256
# Columns of a tile that a thread holds.
ELEMENTS_PER_THREAD = 32
SLOW_ELEMENTS_PER_THREAD = 8
SLOW_MAX_WARPS = 16
SLOW_WARPS_PER_SM = 32
# Of programs with a run of rows each, those that have no tile in the last round: from this
# share on, rows that are loaded again are dealt out, which is 2 % faster on an H200, or as
# fast. With a smaller share it is from 2 % faster to 4 % slower.
IDLE_SHARE = 1 / 64
# Of a program whose row, in a tile of its own, all but fills the registers of an SM.
WIDE_ROW_WARPS = 8
# Of its registers, besides accumulators and rows, in tiles.
WIDE_ROW_OTHER_TILES = 0.6
# Of what would be loaded again of a row, the share that may lack registers where the row is
# kept: what is spilled is stored and loaded. By the bytes that a thread loads at once, where
# two stages wait in shared memory, and where nothing does. Other things take a share of each
# tile.
KEPT_LACKING_SHARE = {16: 0.5, 8: 0.6}
UNSTAGED_LACKING_SHARE = 0.25
KEPT_OTHER_TILES = 0.15
# Columns that a warp holds of a row of half types, 16 bytes a thread: a warp more than a
# row has of these holds other rows of the tile.
COLUMNS_PER_WARP = 32 * 8
# Rows that begin anywhere are loaded an element at a time. Those of half types cannot be
# copied asynchronously, so nothing is in flight while a tile is computed but what other
# programs load: several small ones an SM hide it. What is beyond the columns is not loaded.
UNSTAGED_COLUMNS_PER_THREAD = 24
UNSTAGED_WARPS_PER_SM = 16
# where no tensor is stored
UNSTAGED_SUM_COLUMNS_PER_THREAD = 32
UNSTAGED_SUM_WARPS_PER_SM = 32
# Columns up to which tiles of such rows are dealt out if they are not fetched ahead: of 9
# kernels on an H200, one was as fast so and 8 were 2 to 15 % faster. Of 9 with more columns,
# 4 were 3 to 5 % faster, and the others 2 to 14 % slower.
UNSTAGED_DEALT_COLUMNS = 2048
# Copies of fewer bytes, of rows aligned by no more, take longer than to fetch the rows and to
# load them. Of 8 bytes and few columns they do not, nor of fewer with many accumulators.
ALIGNED_COPY_BYTES = 8
ALIGNED_COPY_COLUMNS = 2048
NARROW_COPY_COLUMNS = 256
NARROW_COPY_ACCUMULATORS = 4
# Of rows that are fetched ahead. From so many warps on, a program of two rows waits longer
# for itself than two programs of one: those are 9 % faster on an H200, the mean of 26
# kernels, where their registers fit, and up to 87 % slower where they do not. Where nothing
# but sums is kept, programs of two rows are 7 % faster than those of one, the mean of 10.
UNSTAGED_HALVED_WARPS = 8
# What a program of one row, and of as many warps, may need of its share of the registers:
# three such kernels are 3 to 8 % faster than programs of two rows. Those that need more,
# or have fewer warps, are mostly slower, up to 37 %.
MOST_NEEDED = 17 / 16
MIN_STAGES, MAX_STAGES = 3, 4
COMFORTABLE_REGISTERS = 232  # a thread, where more warps can have fewer each
# KiB of shared memory that reductions over warps need, beside the stages.
OTHER_SHARED_MEMORY_KIB = 3


def row_split(
    cost: RowCost,
    device: DeviceModel,
    rows: Optional[int],
    programs_per_sm: Optional[int] = None,
    most_rows: Optional[int] = None,
) -> RowSplit:
    """
    ``rows`` is None when they are dynamic: then they are taken to fill the GPU.
    ``programs_per_sm`` is chosen here, but for autotuning. A tile has ``most_rows`` rows
    at most.
    """
    registers_per_sm = device.registers_per_sm
    if not cost.slow and (not cost.staged or copies_little(cost, device)):
        split = unstaged_row_split(
            cost, device, rows, registers_per_sm, programs_per_sm, most_rows
        )
        if split is not None and (split.prefetch or not cost.staged):
            return split
    row_bytes = cost.rnumel * max(1, cost.stream_bytes)
    if row_bytes * 2 <= MAX_TILE_BYTES and cost.rnumel > MIN_TILE and not cost.slow:
        xblock = last_power_of_2(MAX_TILE_BYTES // row_bytes)
        why = {"xblock": f"of {row_bytes} bytes, as many as {MAX_TILE_BYTES} hold"}
    else:
        smallest = MIN_TILE if cost.rnumel > 256 else MIN_TILE_NARROW
        xblock = max(1, smallest // cost.rnumel)
        why = {"xblock": f"of {cost.rnumel} columns, {smallest} in all, or one"}
    if most_rows is not None and most_rows < xblock:
        xblock = most_rows
        why = {"xblock": "more do not fit in registers"}
    tile = xblock * cost.rnumel

    # What is stored is computed when a row's reductions are known, so its inputs live
    # until then, with a product or two, or one where slow functions are computed one after
    # another; without, each is reduced as it comes.
    live_tiles = cost.streams + (1 if cost.slow else 2) if cost.stores_rows else 1

    def accumulate_tiles(num_warps: int) -> bool:
        # A sum over rows that are in several warps goes through shared memory and two
        # barriers, in every iteration, for what a few more registers can keep.
        return xblock > 1 and num_warps > 1 and num_warps * COLUMNS_PER_WARP > cost.rnumel

    def throughout(num_warps: int) -> int:
        accumulator = tile if accumulate_tiles(num_warps) else cost.rnumel
        return cost.accumulators * accumulator + cost.invariants * cost.rnumel

    def live_registers(num_warps: int) -> int:
        return registers(throughout(num_warps) + live_tiles * tile, num_warps)

    least_warps = [min(tile, 32 * 1024) // (32 * ELEMENTS_PER_THREAD)]
    if cost.slow:
        wanted = min(tile // (32 * SLOW_ELEMENTS_PER_THREAD), SLOW_MAX_WARPS)
        least_warps = [max(wanted, *least_warps), *least_warps]
    num_warps = next(
        (
            num_warps
            for least in least_warps
            for most in (COMFORTABLE_REGISTERS, MAX_REGISTERS_PER_THREAD)
            for num_warps in (1, 2, 4, 8, 16, 32)
            if num_warps >= least
            and live_registers(num_warps)
            <= min(most, all_registers(registers_per_sm, num_warps))
        ),
        None,
    )
    if num_warps is None and xblock > 1:
        # fewer rows at once are better than all of them twice
        return row_split(cost, device, rows, programs_per_sm, xblock // 2)
    hoist, wide, lacking, padded = True, False, False, False
    width = cost.width
    if num_warps is None and cost.stores_rows and not cost.slow:
        kept = kept_columns(cost, WIDE_ROW_WARPS)
        tiles: float = cost.row_tiles + cost.accumulators
        # Half types are widened, which takes a tile more for each partial. What every row
        # reads may be loaded again sooner than the row.
        tiles += cost.accumulators if width == 1 else WIDE_ROW_OTHER_TILES
        for hoist in (False,) if width == 1 else (True, False):
            values = math.ceil((tiles + hoist * cost.invariants) * kept)
            wide = registers(values, WIDE_ROW_WARPS) <= MAX_REGISTERS_PER_THREAD
            if wide:
                break
        else:
            stages = wide_row_stages(cost, shared_bytes(device))
            wide = lacking = keeps_row(cost, kept, stages)
        if wide:
            num_warps = WIDE_ROW_WARPS
    reload = num_warps is None
    if wide:
        why["reload"] = "a row all but fills the registers of an SM"
        if lacking:
            why["reload"] = "what a row lacks of registers costs less than to load it again"
    elif num_warps is None:
        why["reload"] = "a row does not fit in registers"
    else:
        why["num_warps"] = f"{live_registers(num_warps)} registers a thread are live"
    if num_warps is None:
        padded = width == 1 and cost.columns < cost.rnumel
        num_warps = 16 if width == 1 and not padded else 8
        hoist = not padded and throughout(num_warps) + width * tile <= registers_per_sm

    # what a tile loads from memory; the padding does not
    tile_bytes = max(1, xblock * cost.columns * cost.stream_bytes)
    if programs_per_sm is None:
        programs_per_sm = 1
        wanted = 1
        if cost.rnumel <= MIN_TILE:
            wanted = ceildiv(device.flight_bytes, (MIN_STAGES - 1) * tile_bytes)
            wanted = last_power_of_2(wanted * 4 // 3)
        if cost.slow and not reload:
            wanted = max(wanted, SLOW_WARPS_PER_SM // num_warps)
        fit = registers_per_sm // (live_registers(num_warps) * num_warps * 32)
        most = max(1, min(fit, wanted))
        programs_per_sm = max(n for n in PROGRAMS_PER_SM if n <= most)
        why["programs_per_sm"] = (
            f"{wanted} cover the latency of memory, registers are there for {fit}"
        )

    # more stages make up for a padded tile, where no other program does, or too few fit
    flight = device.flight_bytes if programs_per_sm == 1 else device.several_flight_bytes
    num_stages = 1 + ceildiv(flight, tile_bytes * programs_per_sm)
    num_stages = max(MIN_STAGES, min(MAX_STAGES, num_stages))
    shared = shared_bytes(device) // programs_per_sm
    stages = shared // max(1, tile * cost.stream_bytes)
    if wide:
        stages = wide_row_stages(cost, shared)
        # what lacks registers had better be loaded from shared memory, if it can be
        if (cost.apart or width == 1) if lacking else copies_little(cost, device):
            stages = 1
    elif reload and stages // 2 >= MIN_STAGES:
        # the loads of both passes are staged
        stages //= 2
    elif reload:
        # Two stages hold the loads of the first pass alone. One is better where they
        # fit in registers: the second pass has more cache.
        fit = throughout(num_warps) + cost.streams * tile <= registers_per_sm
        num_stages = 1 if fit or padded else 2

    why["num_stages"] = (
        f"{num_stages} cover the latency of memory, shared memory is there for {stages}"
    )
    num_stages = max(1, min(num_stages, stages))
    # Two stages leave memory idle. What fetches ahead takes registers, too.
    ahead = num_stages > 2 or (num_stages == 2 and cost.lacks_registers and not reload)
    prefetch = not (cost.staged and ahead) and can_prefetch(
        cost, device, xblock, programs_per_sm
    )
    if prefetch and wide and width == 1 and num_stages == 2:
        num_stages = 1
        why["num_stages"] = "the L2 cache holds the next row without its padding"
    # Accumulators of whole tiles, and values of 8 bytes, take more than is counted above.
    share = all_registers(registers_per_sm, num_warps, programs_per_sm)
    shares = debug_options().share_registers and (
        share == MAX_REGISTERS_PER_THREAD
        or not (accumulate_tiles(num_warps) or cost.wide_values)
    )
    if prefetch:
        why["prefetch"] = f"{num_stages} stages have too little in flight"
    num_programs = count_programs(device, programs_per_sm, rows, xblock)
    return RowSplit(
        num_programs=num_programs,
        programs_per_sm=programs_per_sm,
        xblock=xblock,
        num_warps=num_warps,
        num_stages=num_stages,
        reload=reload,
        hoist=hoist,
        accumulate_tiles=accumulate_tiles(num_warps),
        staged=cost.staged,
        in_turn=prefetch
        or (
            cost.staged
            and (
                not reload or idle_share(rows, xblock, num_programs) >= IDLE_SHARE
            )
        ),
        all_registers=shares
        or takes_all_registers(reload or cost.lacks_registers, programs_per_sm),
        prefetch=prefetch,
        drop_padding=debug_options().drop_padding
        and not reload
        and width == 1
        and kept_columns(cost, num_warps) < cost.rnumel,
        why=why,
    )


def takes_all_registers(lacks: bool, programs_per_sm: int) -> bool:
    """Whether a thread is given all registers of an SM, which it may lack some of."""
    return debug_options().all_registers and lacks and programs_per_sm == 1


def kept_columns(cost: RowCost, num_warps: int) -> int:
    """
    Columns of a row that ``num_warps`` keep registers for: whole loads of all threads, of
    16 bytes each. That what is padded beyond those is not there is known at compile time.
    """
    load = num_warps * COLUMNS_PER_WARP // max(1, cost.width)
    return min(cost.rnumel, ceildiv(cost.columns, load) * load)


def unstaged_row_split(
    cost: RowCost,
    device: DeviceModel,
    rows: Optional[int],
    registers_per_sm: int,
    programs_per_sm: Optional[int],
    most_rows: Optional[int],
) -> Optional[RowSplit]:
    """
    Of rows that are not ``staged``; None where the tiles of one do not fit in registers.
    """
    if cost.stores_rows:
        xblock, live_tiles = max(2, 512 // cost.rnumel), [cost.streams + 1]
        most_columns, warps_per_sm = UNSTAGED_COLUMNS_PER_THREAD, UNSTAGED_WARPS_PER_SM
    else:
        # all loads are in flight; where they do not fit, one is reduced after another
        xblock, live_tiles = max(1, 1024 // cost.rnumel), [cost.streams, 1]
        most_columns = UNSTAGED_SUM_COLUMNS_PER_THREAD
        warps_per_sm = UNSTAGED_SUM_WARPS_PER_SM
    xblock = min(xblock, most_rows or xblock)
    xblocks = [xblock >> i for i in range(xblock.bit_length())]

    def fits(xblock: int, num_warps: int, count: int = 1, live: int = live_tiles[0]) -> bool:
        """Whether an SM has the registers for ``count`` programs."""
        tiles = cost.accumulators + cost.invariants + live * xblock
        most: float = all_registers(registers_per_sm, num_warps, count)
        wide_row = xblock == 1 and num_warps >= UNSTAGED_HALVED_WARPS
        if cost.stores_rows and wide_row and count > 1:
            most *= MOST_NEEDED
        return registers(tiles * cost.columns, num_warps) <= most

    def programs(xblock: int, num_warps: int) -> int:
        most = max(1, warps_per_sm // num_warps)
        fitting = (n for n in PROGRAMS_PER_SM if n <= most and fits(xblock, num_warps, n))
        return max(fitting, default=1)

    found = next(
        (
            (xblock, num_warps)
            for live in live_tiles
            for xblock in xblocks
            for num_warps in (1, 2, 4, 8, 16, 32)
            if xblock * cost.columns <= most_columns * num_warps * 32
            and fits(xblock, num_warps, live=live)
        ),
        None,
    )
    if found is None:
        return None
    xblock, num_warps = found
    prefetch = can_prefetch(cost, device, xblock, programs(xblock, num_warps))
    share_registers = debug_options().share_registers
    if prefetch and share_registers and programs_per_sm is None and most_rows is None:
        if not cost.stores_rows:
            if xblock == 1 and num_warps < warps_per_sm and fits(2, num_warps * 2):
                xblock, num_warps = 2, num_warps * 2
        elif (
            xblock == 2
            and not cost.pairs_rows
            and num_warps >= UNSTAGED_HALVED_WARPS
            and fits(1, num_warps // 2, warps_per_sm * 2 // num_warps)
        ):
            xblock, num_warps = 1, num_warps // 2
    if programs_per_sm is None:
        programs_per_sm = programs(xblock, num_warps)
    prefetch = prefetch and can_prefetch(cost, device, xblock, programs_per_sm)
    shared = (
        share_registers
        and not cost.wide_values
        and fits(xblock, num_warps, programs_per_sm)
    )
    return RowSplit(
        num_programs=count_programs(device, programs_per_sm, rows, xblock),
        programs_per_sm=programs_per_sm,
        xblock=xblock,
        num_warps=num_warps,
        num_stages=1,
        reload=False,
        hoist=True,
        accumulate_tiles=False,
        staged=False,
        in_turn=prefetch or cost.columns <= UNSTAGED_DEALT_COLUMNS,
        all_registers=shared
        or takes_all_registers(cost.lacks_registers, programs_per_sm),
        prefetch=prefetch,
        why={
            "num_stages": "rows are loaded an element at a time, or copied a few bytes at a time",
            "num_warps": f"{most_columns} columns a thread at most",
            "programs_per_sm": f"{warps_per_sm} warps an SM hide the latency, if they fit",
            **({"prefetch": "nothing is in flight while a tile is computed"} if prefetch else {}),
        },
    )


def shared_bytes(device: DeviceModel) -> int:
    """Of shared memory that a program can have for stages."""
    return (device.shared_memory_kib - OTHER_SHARED_MEMORY_KIB) * 1024


def wide_row_stages(cost: RowCost, shared: int) -> int:
    """
    Stages of a program of one row that ``shared`` bytes of shared memory hold: one more
    than there are buffers, which are three for two tiles.
    """
    tile_bytes = cost.rnumel * max(1, cost.stream_bytes)
    return 1 + 2 * shared // (3 * tile_bytes)


def keeps_row(cost: RowCost, kept: int, stages: int) -> bool:
    """
    Whether a row, of which there would be ``kept`` columns in registers, is kept though they
    do not fit, and spilled in part. Shared memory holds so many ``stages`` of it.
    """
    if not debug_options().keep_rows:
        return False
    if cost.apart:
        return True
    if cost.width == 1:
        return cost.keeps_rows
    tiles = (1 + KEPT_OTHER_TILES) * (cost.row_tiles + cost.accumulators)
    # what all rows read is loaded as they are, and all but one of it beside them
    tiles += max(0, cost.invariants - 1)
    lacks = registers(math.ceil(tiles * kept), WIDE_ROW_WARPS) - MAX_REGISTERS_PER_THREAD
    share = KEPT_LACKING_SHARE.get(cost.copy_bytes, 0.0)
    if stages < 2:
        share = min(share, UNSTAGED_LACKING_SHARE)
    return lacks <= share * cost.row_tiles * kept / (WIDE_ROW_WARPS * 32)


def copies_little(cost: RowCost, device: DeviceModel) -> bool:
    """
    Whether rows that asynchronous copies can load are loaded sooner, a few bytes at a time
    as well, where they are fetched ahead.
    """
    if not can_prefetch_rows(device):
        return False
    if cost.copy_bytes == ALIGNED_COPY_BYTES and cost.columns <= ALIGNED_COPY_COLUMNS:
        return False
    if cost.columns <= NARROW_COPY_COLUMNS and cost.accumulators >= NARROW_COPY_ACCUMULATORS:
        return False
    least = debug_options().min_copy_bytes
    return cost.staged and cost.adjoin and cost.copy_bytes < least


def can_prefetch_rows(device: DeviceModel) -> bool:
    """Whether kernels for ``device`` may fetch rows into the L2 cache."""
    return (
        debug_options().prefetch_rows
        and device.prefetch_bytes > 0
    )


def can_prefetch(
    cost: RowCost, device: DeviceModel, xblock: int, programs_per_sm: int
) -> bool:
    """Whether the rows of the next tiles can be fetched into the L2 cache."""
    tile_bytes = xblock * cost.columns * cost.stream_bytes
    return can_prefetch_rows(device) and programs_per_sm * tile_bytes <= device.prefetch_bytes


def registers(values: int, num_warps: int) -> int:
    """Of a thread, when a program of ``num_warps`` keeps ``values``."""
    return ceildiv(values, num_warps * 32) + OTHER_REGISTERS
