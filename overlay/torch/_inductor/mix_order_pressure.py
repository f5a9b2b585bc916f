"""
How many registers a thread of a mix-order kernel needs, from what it computes.

A kernel's need of registers is a sum. Partial accumulators live throughout the loop
over rows. The peak of what else is live comes at a reduction of a row, at which all
threads wait: tiles that are needed after it are held, what was loaded as it came, what
was computed in the type in which that is done. A sum over the rows that does not wait
for the reduction is added up before it. Where rows are loaded again no tile is held, but
ptxas issues all loads of a pass before it computes, whatever it has to spill for them.
To that come the addresses of those loads, each of two registers, and what each tensor
takes. Where the need is more than a thread may have, ptxas spills.
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
    What a kernel holds in registers at its peak, in 32-bit registers a thread unless
    said otherwise.

    accumulators: of the partials, throughout
    hoisted: column vectors that were loaded before the loop over rows, throughout
    tiles: live across a row reduction, unless rows are loaded again
    second_layout: a tile, and for each row reduction its rows, where the column vectors
        that it is computed with have another layout, so that some is computed in both
    loads: in flight for the row reductions of a pass, where rows are loaded again
    addresses: a number, of these loads
    outputs: of a row that is loaded again, beyond what those loads took: a load from
        memory can not pass a store, so that either what is loaded for the outputs is
        held before the first store or what is to be stored, whichever is less
    converted: a tile, where what is stored changes its layout before
    pointers: a number, of loads and stores
    """

    accumulators: float
    hoisted: float
    tiles: float
    second_layout: float
    loads: float
    addresses: float
    outputs: float
    converted: float
    pointers: float

    @classmethod
    def of(cls, ops: Sequence[Op], columns: int, launch: LaunchConfig) -> Demand:
        """Of the kernel that computes ``ops`` on rows of ``columns``."""
        layout = Layout.of(ops, columns, launch)
        vector, tile = layout.elements[Width.COLUMNS], layout.elements[Width.TILE]
        accumulators = sum(op.bits for op in ops if op.name == "partial") / 32
        hoisted = sum(op.bits for op in _accesses(ops, "load", Width.COLUMNS)) / 32
        passes = _row_passes(ops) if launch.reload else []
        loads = max((sum(map(layout.bits, each)) for each in passes), default=0)
        outputs = 0.0
        if launch.reload and launch.num_stages == 1:
            stores = _accesses(ops, "store", Width.TILE)
            last = _loaded_for(
                ops,
                (i for i, op in enumerate(ops) if op.name == "store"),
                (Width.TILE,) if launch.hoist else (Width.TILE, Width.COLUMNS),
            )
            outputs = min(sum(map(layout.bits, each)) for each in (last, stores))
        return cls(
            accumulators=accumulators * (tile if launch.accumulate_tiles else vector),
            hoisted=launch.hoist * hoisted * vector,
            tiles=(not launch.reload) * _live_at_reduction(ops, layout) * tile,
            second_layout=layout.second
            * (tile + launch.xblock * sum(op.name == "row_reduction" for op in ops)),
            loads=loads / 32 * tile,
            addresses=max(
                (sum(1 / layout.access(op) for op in each) for each in passes), default=0
            )
            * tile,
            outputs=max(0, outputs - loads) / 32 * tile,
            converted=layout.converted * tile,
            pointers=sum(
                op.name in ("load", "store") and op.width != Width.SCALAR for op in ops
            ),
        )


def _accesses(ops: Iterable[Op], name: str, width: Width) -> list[Op]:
    """The loads or the stores, as ``name`` says, of values of ``width``."""
    return [op for op in ops if op.name == name and op.width == width]


def _row_passes(ops: Sequence[Op]) -> list[list[Op]]:
    """
    The tiles that each pass over a row loads for row reductions, where rows are loaded
    again. A reduction that needs another is in a later pass.
    """
    row_pass: list[int] = []
    for op in ops:
        before = max((row_pass[j] for j in op.inputs), default=0)
        row_pass.append(before + (op.name == "row_reduction"))
    return [
        _loaded_for(
            ops,
            (
                i
                for i, op in enumerate(ops)
                if op.name == "row_reduction" and row_pass[i] == each
            ),
            (Width.TILE,),
        )
        for each in range(1, max(row_pass, default=0) + 1)
    ]


def _loaded_for(
    ops: Sequence[Op], wanted: Iterable[int], widths: Sequence[Width]
) -> list[Op]:
    """
    The values of ``widths`` that are loaded for the operations ``wanted``, when the
    row reductions before them are known.
    """
    needed = OrderedSet(wanted)
    roots = OrderedSet(needed)
    for i in reversed(range(len(ops))):
        if i in needed and (ops[i].name != "row_reduction" or i in roots):
            needed.update(ops[i].inputs)
    return [ops[i] for i in needed if ops[i].name == "load" and ops[i].width in widths]


@dataclasses.dataclass(frozen=True)
class Layout:
    """
    Triton's blocked layout of a tile: a ``vector`` of elements a thread, threads along
    the row first, of which a row has ``lanes``. ``elements`` are those of a value of
    each width that a thread holds; elements beyond the last column are known to be so
    where that element of every thread is, and take nothing.

    ``run`` is how many elements follow each other at an aligned address, ``second``
    whether column vectors have another layout, ``converted`` whether what is stored has.
    """

    vector: int
    lanes: int
    run: int
    second: bool
    converted: bool
    elements: dict[Width, int]

    @classmethod
    def of(cls, ops: Sequence[Op], columns: int, launch: LaunchConfig) -> Layout:
        """Of the accesses of ``ops``, to rows of ``columns`` that follow each other."""
        r0_block = next_power_of_2(columns)
        threads = launch.num_warps * _NUM_THREADS_PER_WARP
        run = columns & -columns
        most = min(run, max(1, launch.xblock * r0_block // threads))
        loads, stores, vectors = (
            OrderedSet(op.memory_bits // 8 for op in _accesses(ops, *which))
            for which in (
                ("load", Width.TILE),
                ("store", Width.TILE),
                ("load", Width.COLUMNS),
            )
        )
        even = launch.even_vectors and len(loads | stores) > 1

        def columns_of(itemsizes: OrderedSet[int]) -> int:
            return even_columns(loads | stores) if even else VECTOR_BYTES // min(itemsizes)

        vector = min(columns_of(loads or OrderedSet([4])), most)
        stored = min(columns_of(stores), most) if stores else 0
        second = False
        if vectors:
            own = min(VECTOR_BYTES // min(vectors), max(1, r0_block // threads))
            if launch.xblock == 1:
                # values of one shape, so of one layout: that of the longest vectors
                vector = max(vector, own)
            else:
                second = own != vector or r0_block < threads * vector
        lanes = min(threads, max(1, r0_block // vector))
        whole, rest = divmod(columns, lanes * vector)
        in_row = whole * vector + min(vector, rest)
        rows = max(1, launch.xblock // (threads // lanes))
        return cls(
            vector,
            lanes,
            run,
            second,
            stored not in (0, vector),
            {
                Width.TILE: in_row * rows,
                Width.COLUMNS: in_row,
                Width.ROWS: rows,
                Width.SCALAR: 0,
            },
        )

    def access(self, op: Op) -> int:
        """Elements that a thread loads or stores at once; all vectors are aligned."""
        run = self.run if op.width == Width.TILE else self.vector
        return max(1, min(self.vector, run, VECTOR_BYTES * 8 // op.memory_bits))

    def bits(self, op: Op) -> int:
        """
        Of registers, of an element that is loaded, before it is computed with: elements
        of less than 4 bytes share a register where they are loaded at once.
        """
        return max(op.memory_bits, 32 // self.access(op))


def _live_at_reduction(ops: Sequence[Op], layout: Layout) -> float:
    """
    32-bit registers of an element of each of the tiles that are live across a row
    reduction, that at which most are. Loads are issued first, and a sum over rows as
    soon as the row reductions are known that it needs.
    """
    # after how many row reductions an operation has what it needs
    known: list[int] = []
    reductions = 0
    for op in ops:
        known.append(max((known[j] for j in op.inputs), default=0))
        if op.name == "row_reduction":
            reductions += 1
            known[-1] = reductions
    # and after how many it is done, and used last
    done = [reductions] * len(ops)
    used = [0] * len(ops)
    for i in reversed(range(len(ops))):
        op = ops[i]
        if op.name == "load":
            done[i] = 0
        elif op.name == "row_reduction":
            done[i] = known[i] - 1
        elif op.name == "partial":
            done[i] = known[i]
        for j in op.inputs:
            done[j] = min(done[j], done[i])
            used[j] = max(used[j], done[i])
    tiles = [
        (done[i], used[i], layout.bits(op) if op.name == "load" else op.bits)
        for i, op in enumerate(ops)
        if op.width == Width.TILE and op.name not in _RECOMPUTED
    ]
    return max(
        (
            sum(bits for first, last, bits in tiles if first < each <= last) / 32
            for each in range(1, reductions + 1)
        ),
        default=0,
    )


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


# Fitted on 1163 kernels of norms' backwards on 128 to 16384 columns, compiled for sm_80,
# sm_90 and sm_100 by the ptxas of Triton 3.6.0, and judged on others.
COEFFICIENTS = Coefficients(
    base=-12.143,
    each=Demand(
        accumulators=1.124,
        hoisted=0.497,
        tiles=0.982,
        second_layout=1.565,
        loads=1.685,
        addresses=0.944,
        outputs=0.959,
        converted=0.933,
        pointers=3.506,
    ),
    over_64_bytes=-7.619,
    over_256_bytes=21.868,
)


# The registers that a pair may need more than there are, for which it is still fused:
# one kernel with a few values in L1 is faster than two that read the tensor, and long
# rows need less than it seems (LayerNorm backward of [4096, 16384] in float32: 88 bytes
# of local memory). Beyond it ptxas gives up: 32 registers, and kilobytes of it.
PAIR_OVER = 150


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
