"""
How many registers a thread of a mix-order kernel needs, from what it computes.

A kernel's need of registers is a sum. Partial accumulators live throughout the loop
over rows. The peak of what else is live comes at a reduction of a row, at which all
threads wait: tiles that are needed after it are held in full width, in the type in
which they are computed, and what was loaded but not yet used as it came. To that
come rows' values, pointers and the tile in flight. Where the need is more than a
thread may have, ptxas spills.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .mix_order_row_split import DEFAULT_REGISTERS_PER_SM, MAX_REGISTERS_PER_THREAD
from .mix_order_trace import Op, Width
from .runtime.hints import _NUM_THREADS_PER_WARP
from .runtime.runtime_utils import next_power_of_2
from .vector_width import even_columns, VECTOR_BYTES


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """
    What the need depends on of a configuration that would be launched: rows of a
    tile, warps, stages of the loop over tiles, and whether a row is loaded again when
    its reductions are known, what all rows read once, before the loop, and a partial
    accumulator a whole tile; and whether a thread has as many columns of each tile as
    of the widest type, not of the narrowest.
    """

    xblock: int
    num_warps: int
    num_stages: int = 1
    reload: bool = False
    hoist: bool = True
    accumulate_tiles: bool = False
    even_vectors: bool = True


@dataclasses.dataclass(frozen=True)
class Demand:
    """
    What a kernel holds in registers at its peak, in 32-bit registers a thread.

    accumulators: of the partials, throughout
    hoisted: column vectors that were loaded before the loop over rows, throughout
    tiles: live across a row reduction, unless rows are loaded again
    outputs: of a row that is loaded again: a load can not pass a store, so either what
        is loaded or what is to be stored is held, whichever is less
    loads: in flight for the row reductions, where rows are loaded again
    staged: of those, what comes out of shared memory
    reloads: in flight for what depends on the reductions, where rows are loaded again
    several_rows: a tile of more than one row that is loaded again
    unaligned: a tile that is loaded again an element at a time
    shuffled: accumulators, where the lanes of a warp have different rows
    row_values: what a row has one of
    pointers: a number, of loads and stores
    one_warp: 1 where no warp waits for another, so that rows are not held together
    """

    accumulators: float
    hoisted: float
    tiles: float
    outputs: float
    loads: float
    staged: float
    reloads: float
    several_rows: float
    unaligned: float
    shuffled: float
    row_values: float
    pointers: float
    one_warp: float

    @classmethod
    def of(cls, ops: Sequence[Op], columns: int, launch: LaunchConfig) -> Demand:
        """Of the kernel that computes ``ops`` on rows of ``columns``."""
        layout = Layout.of(ops, columns, launch)
        vector, tile = layout.elements[Width.COLUMNS], layout.elements[Width.TILE]
        again = launch.reload * tile
        loads = {
            width: [op for op in ops if op.name == "load" and op.width == width]
            for width in Width
        }
        stores = [op for op in ops if op.name == "store"]
        partials = [op for op in ops if op.name == "partial"]
        accumulators = sum(op.bits for op in partials) / 32
        accumulators *= tile if launch.accumulate_tiles else vector
        invariants = sum(op.bits for op in loads[Width.COLUMNS]) / 32 * vector
        stored = sum(op.memory_bits for op in stores if op.width == Width.TILE) / 32
        reloaded = _loaded_for(
            ops, (i for i, op in enumerate(ops) if op.name in ("partial", "store"))
        )
        staged = launch.num_stages > 1
        return cls(
            accumulators=accumulators,
            hoisted=launch.hoist * invariants,
            tiles=(not launch.reload) * _live_at_reduction(ops) * tile,
            outputs=again * min(stored, reloaded),
            loads=again * _loaded_for_reductions(ops, first=1 + staged),
            staged=again * staged * _loaded_for_reductions(ops, first=1),
            reloads=again * reloaded,
            several_rows=again * (launch.xblock > 1),
            unaligned=again * (layout.vector == 1),
            shuffled=(not launch.accumulate_tiles)
            * accumulators
            * (layout.lanes < _NUM_THREADS_PER_WARP),
            row_values=len(loads[Width.ROWS]) * layout.elements[Width.ROWS],
            pointers=sum(map(len, loads.values()))
            - len(loads[Width.SCALAR])
            + sum(op.width != Width.SCALAR for op in stores),
            one_warp=launch.num_warps == 1,
        )


def _loaded_for(ops: Sequence[Op], wanted: Iterable[int]) -> float:
    """
    32-bit registers, as in memory, of an element of each tile that is loaded for the
    operations ``wanted``, when the row reductions before them are known.
    """
    needed = OrderedSet(wanted)
    roots = OrderedSet(needed)
    bits = 0
    for i in reversed(range(len(ops))):
        if i not in needed:
            continue
        op = ops[i]
        if op.name == "load" and op.width == Width.TILE:
            bits += op.memory_bits
        if op.name != "row_reduction" or i in roots:
            needed.update(op.inputs)
    return bits / 32


def _loaded_for_reductions(ops: Sequence[Op], first: int) -> float:
    """
    The most that one pass over a row, from the ``first``, loads for row reductions, as
    above. A reduction that needs another is in a later pass.
    """
    passes: dict[int, int] = {}
    for i, op in enumerate(ops):
        passes[i] = max((passes[j] for j in op.inputs), default=0)
        passes[i] += op.name == "row_reduction"
    last = max(passes.values(), default=0)
    return max(
        (
            _loaded_for(
                ops,
                (
                    i
                    for i, op in enumerate(ops)
                    if op.name == "row_reduction" and passes[i] == each
                ),
            )
            for each in range(first, last + 1)
        ),
        default=0,
    )


@dataclasses.dataclass(frozen=True)
class Layout:
    """
    Triton's blocked layout of a tile: a ``vector`` of elements a thread, threads along
    the row first, of which a row has ``lanes``. ``elements`` are those of a value of
    each width that a thread holds; elements beyond the last column are known to be so
    where a whole vector of every thread is, and take nothing.
    """

    vector: int
    lanes: int
    elements: dict[Width, int]

    @classmethod
    def of(cls, ops: Sequence[Op], columns: int, launch: LaunchConfig) -> Layout:
        """Of the loads of ``ops``, from rows of ``columns`` that follow each other."""
        r0_block = next_power_of_2(columns)
        threads = launch.num_warps * _NUM_THREADS_PER_WARP
        tiles = [op for op in ops if op.name == "load" and op.width == Width.TILE]
        itemsizes = OrderedSet(op.memory_bits // 8 for op in tiles) or OrderedSet([4])
        vector = VECTOR_BYTES // min(itemsizes)
        if launch.even_vectors and len(itemsizes) > 1:
            vector = even_columns(itemsizes)
        vector = min(
            vector,
            columns & -columns,
            max(1, launch.xblock * r0_block // threads),
        )
        lanes = min(threads, max(1, r0_block // vector))
        vector = min(vector, max(1, r0_block // lanes))
        in_row = vector * -(-columns // (lanes * vector))
        rows = max(1, launch.xblock // (threads // lanes))
        return cls(
            vector,
            lanes,
            {
                Width.TILE: in_row * rows,
                Width.COLUMNS: in_row,
                Width.ROWS: rows,
                Width.SCALAR: 0,
            },
        )


def _live_at_reduction(ops: Sequence[Op]) -> float:
    """
    32-bit registers of an element of each of the tiles that are live across a row
    reduction, that at which most are. Loads are issued first; what was loaded and is
    not used before it is as in memory.
    """
    loads = [i for i, op in enumerate(ops) if op.name == "load"]
    order = loads + [i for i, op in enumerate(ops) if op.name != "load"]
    position = {i: at for at, i in enumerate(order)}
    first_use: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for i, op in enumerate(ops):
        for j in op.inputs:
            first_use[j] = min(first_use.get(j, len(ops)), position[i])
            last_use[j] = max(last_use.get(j, -1), position[i])

    peak = 0.0
    for i in order:
        if ops[i].name != "row_reduction":
            continue
        live = 0.0
        for j, used in last_use.items():
            op = ops[j]
            if (
                op.width == Width.TILE
                and op.name not in _RECOMPUTED
                and position[j] <= position[i] < used
            ):
                unused = op.name == "load" and first_use[j] > position[i]
                live += (op.memory_bits if unused else op.bits) / 32
        peak = max(peak, live)
    return peak


_RECOMPUTED = ("constant", "index_expr")


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """
    Registers a thread: ``base`` of any kernel, ``each`` for a unit of what it demands;
    and by how much more than a thread may have the need is where ptxas spills over 64
    bytes a thread, and where it spills over 256.
    """

    base: float
    each: Demand
    over_64_bytes: float
    over_256_bytes: float

    def need(self, demand: Demand) -> float:
        """Registers a thread, were there no limit."""
        return self.base + sum(
            getattr(self.each, field.name) * getattr(demand, field.name)
            for field in dataclasses.fields(Demand)
        )


# Fitted on 880 kernels of norms' backwards on 127 to 16384 columns, compiled for sm_80,
# sm_90 and sm_100 by the ptxas of Triton 3.6.0, and judged on others.
COEFFICIENTS = Coefficients(
    base=13.919,
    each=Demand(
        accumulators=1.001,
        hoisted=0.676,
        tiles=1.046,
        outputs=1.083,
        loads=0.681,
        staged=0.481,
        reloads=0.237,
        several_rows=0.878,
        unaligned=8.253,
        shuffled=0.372,
        row_values=4.174,
        pointers=0.908,
        one_warp=-63.394,
    ),
    over_64_bytes=-9.690,
    over_256_bytes=16.984,
)


# The registers that a pair may need more than there are, for which it is still fused:
# one kernel with a few values in L1 is faster than two that read the tensor, and long
# rows need less than it seems (LayerNorm backward of [4096, 16384] in float32: 89 more,
# and 88 bytes). Beyond it ptxas gives up: 32 registers, and kilobytes of local memory.
PAIR_OVER = 96


@dataclasses.dataclass(frozen=True)
class Pressure:
    """
    Registers a thread: what the kernel needs, and what a thread may have. ``spills``
    is whether it would spill, ``too_high`` whether so much that it should do less: a
    few words in a cache cost less than a row that is read once more.
    """

    need: float
    limit: int

    @property
    def spills(self) -> bool:
        return self.need > self.limit + COEFFICIENTS.over_64_bytes

    @property
    def too_high(self) -> bool:
        return self.need > self.limit + COEFFICIENTS.over_256_bytes

    @property
    def hopeless(self) -> bool:
        return self.need > self.limit + PAIR_OVER

    @property
    def registers_per_thread(self) -> int:
        return round(min(self.need, self.limit))


def pressure(
    ops: Sequence[Op],
    columns: int,
    launch: LaunchConfig,
    registers_per_multiprocessor: int = DEFAULT_REGISTERS_PER_SM,
) -> Pressure:
    """
    Of the kernel that computes ``ops`` on rows of ``columns`` (R0_BLOCK is the next
    power of two), launched as ``launch``.
    """
    limit = min(
        MAX_REGISTERS_PER_THREAD,
        registers_per_multiprocessor // (launch.num_warps * _NUM_THREADS_PER_WARP),
    )
    return Pressure(COEFFICIENTS.need(Demand.of(ops, columns, launch)), limit)
