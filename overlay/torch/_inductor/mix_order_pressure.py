"""
How many registers a thread of a mix-order kernel needs, from what it computes.

A kernel's need of registers is a sum. Partial accumulators live throughout the loop
over rows. The peak of what else is live comes at a reduction of a row, at which all
threads wait: tiles that are needed after it are held, what was loaded as it came, what
was computed in the type in which that is done. A sum over the rows that does not wait
for the reduction is added up before it. Where rows are loaded again no tile is held, but
ptxas issues all loads from memory of a pass before it computes, whatever it has to spill
for them; those from shared memory, into which stages of the loop copy, it does not,
unless a function has branches, behind which it moves no load.
To that come a tile that is being computed, what is to be stored, and what branches, each
tensor, each operation, vectors beside rows that are loaded again and partials of rows that
begin anywhere take. Where the need is more than a thread may have, ptxas spills.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .device_model import DeviceModel
from .mix_order_row_cost import COPY_BYTES, SLOW_FUNCTIONS
from .mix_order_trace import Op, Width
from .runtime.registers import all_registers, THREADS_PER_WARP
from .runtime.runtime_utils import next_power_of_2
from .vector_width import even_columns, VECTOR_BYTES


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


# A norm's backward has 8 or 10. With more than eight warps, a chain of more, as of an
# activation before the norm, is of one element after another: of 27 such kernels of 16 warps,
# for 3001 to 8192 columns, 23 lack 14 of their 128 registers at most, and were predicted to
# lack up to 121; those with sines, powers or a polynomial lack 22 to 40.
MOST_OPERATIONS, MANY_WARPS = 10, 8


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """
    What the need depends on of a configuration that would be launched: rows of a
    tile, warps, stages of the loop over tiles, and whether a row is loaded again when
    its reductions are known, what all rows read once, before the loop, and a partial
    accumulator a whole tile; whether a thread has as many columns of each tile as of the
    widest type, not of the narrowest; how many programs are told that they share the
    registers of a multiprocessor; and whether what pads a row is left out of its
    accumulators before they are stored.
    """

    xblock: int
    num_warps: int
    num_stages: int = 1
    reload: bool = False
    hoist: bool = True
    accumulate_tiles: bool = False
    even_vectors: bool = True
    sharing: int = 1
    drop_padding: bool = False


@dataclasses.dataclass(frozen=True)
class Demand:
    """
    What a kernel holds in registers at its peak, in 32-bit registers a thread unless
    said otherwise.

    accumulators: of the partials, throughout
    hoisted: column vectors that were loaded before the loop over rows, for each row of a
        tile, throughout
    tiles: live across a row reduction, unless rows are loaded again, with the column
        vectors that each row loads
    held: where accumulators are whole tiles, what was loaded
    loads: in flight from memory, for what waits for no row reduction; where rows are
        loaded again, of a pass
    computed: a tile
    stored: tiles, as they are stored, which may write what is loaded, so that all loads
        come before
    branches: tiles of random numbers, whose generator has registers of its own; and of what
        is loaded from shared memory before functions that have branches, around which what
        is live is held
    pointers: a number, of loads and stores
    vectors: a number, of column vectors where rows are loaded again, in each pass or before
    unaligned: a number, of partials of rows whose elements cannot be stored as float32 in
        16 bytes: they have addresses and masks of their own
    operations: a number, on tiles, of each element of a lane, in all warps; the more
        there are for the registers of a multiprocessor, the more does ptxas have under
        way, of many warps up to ``MOST_OPERATIONS`` of an element. A third more where each
        row loads the column vectors, for what is made of them
    """

    accumulators: float
    hoisted: float
    tiles: float
    held: float
    loads: float
    computed: float
    stored: float
    branches: float
    pointers: float
    vectors: float
    unaligned: float
    operations: float

    @classmethod
    def of(cls, ops: Sequence[Op], columns: int, launch: LaunchConfig) -> Demand:
        """Of the kernel that computes ``ops`` on rows of ``columns``."""
        layout = Layout.of(ops, columns, launch)
        vector, tile = layout.elements[Width.COLUMNS], layout.elements[Width.TILE]
        partials = [op.bits / 32 for op in ops if op.name == "partial"]
        vectors = [op.bits / 32 for op in _accesses(ops, "load", Width.COLUMNS)]
        # of what each row loads
        widths = (Width.TILE,) if launch.hoist else (Width.TILE, Width.COLUMNS)
        if launch.reload:
            tiles = 0.0
            passes = _row_passes(ops, widths)
        else:
            tiles = _live_at_reduction(ops, layout, widths)
            passes = [_not_waiting(ops, widths)]

        def most(passes: Iterable[Sequence[Op]]) -> float:
            return max(map(layout.registers, passes), default=0)

        loaded = most(
            [op for op in each if not layout.staged(op, launch.num_stages)]
            for each in passes
        )
        on_tiles = [op.name for op in ops if op.width == Width.TILE]
        slow = any(name in SLOW_FUNCTIONS for name in on_tiles)
        random = sum(name in _RANDOM for name in on_tiles)
        operations = sum(name not in _NOT_COMPUTED for name in on_tiles)
        if launch.num_warps > MANY_WARPS:
            operations = min(operations, MOST_OPERATIONS)
        # what is loaded once, and needed after a reduction, is live there anyway
        staged = most(passes) - loaded if slow and launch.reload else 0.0
        return cls(
            accumulators=sum(partials)
            * (tile if launch.accumulate_tiles else vector)
            * layout.padding,
            hoisted=launch.hoist * sum(vectors) * tile,
            tiles=tiles,
            held=launch.accumulate_tiles
            * layout.registers(_accesses(ops, "load", Width.TILE)),
            loads=loaded,
            computed=tile,
            stored=layout.registers(_accesses(ops, "store", Width.TILE)),
            branches=random * tile + staged,
            pointers=sum(
                op.name in ("load", "store") and op.width != Width.SCALAR for op in ops
            ),
            vectors=float(launch.reload * len(vectors)),
            unaligned=float((layout.run < _PARTIALS_AT_ONCE) * len(partials)),
            operations=tile
            * launch.num_warps
            * (1 if launch.hoist else 4 / 3)
            * operations,
        )


def _accesses(ops: Iterable[Op], name: str, width: Width) -> list[Op]:
    """The loads or the stores, as ``name`` says, of values of ``width``."""
    return [op for op in ops if op.name == name and op.width == width]


def _row_passes(ops: Sequence[Op], widths: Sequence[Width]) -> list[list[Op]]:
    """
    The values of ``widths`` that each pass over a row loads, where rows are loaded
    again. A reduction that needs another is in a later pass, and what is no reduction of
    a row in the last.
    """
    row_pass: list[int] = []
    for op in ops:
        before = max((row_pass[j] for j in op.inputs), default=0)
        row_pass.append(before + (op.name == "row_reduction"))
    results = [
        [
            i
            for i, op in enumerate(ops)
            if op.name == "row_reduction" and row_pass[i] == each
        ]
        for each in range(1, max(row_pass, default=0) + 1)
    ]
    results.append(
        [i for i, op in enumerate(ops) if op.name in ("partial", "store")]
    )
    return [_loaded_for(ops, each, widths) for each in results]


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
    where that element of every thread is, and take nothing. ``run`` is how many elements
    of a row follow each other at an aligned address.

    Partial accumulators are stored 16 bytes at once at most, four columns of float32,
    and in a layout of their own where a tile's has more columns a thread than that, or
    than are aligned. They go through shared memory for it, padding and all, so that it is
    accumulated unless it is dropped: they have ``padding`` times as many elements.
    """

    vector: int
    lanes: int
    run: int
    padding: float
    elements: dict[Width, int]

    @classmethod
    def of(cls, ops: Sequence[Op], columns: int, launch: LaunchConfig) -> Layout:
        """Of the accesses of ``ops``, to rows of ``columns`` that follow each other."""
        r0_block = next_power_of_2(columns)
        threads = launch.num_warps * THREADS_PER_WARP
        run = columns & -columns
        most = max(1, launch.xblock * r0_block // threads)
        if launch.xblock > 1:
            # a tile of one row is laid out as if it were aligned
            most = min(run, most)
        itemsizes = OrderedSet(
            op.memory_bits // 8
            for name in ("load", "store")
            for op in _accesses(ops, name, Width.TILE)
        ) or OrderedSet([4])
        if launch.even_vectors and len(itemsizes) > 1:
            vector = min(even_columns(itemsizes), most)
        else:
            vector = min(VECTOR_BYTES // min(itemsizes), most)
        lanes = min(threads, max(1, r0_block // vector))
        whole, rest = divmod(columns, lanes * vector)
        in_row = whole * vector + min(vector, rest)
        rows = max(1, launch.xblock // (threads // lanes))
        partial_bits = max((op.bits for op in ops if op.name == "partial"), default=32)
        stored_apart = vector > min(run, VECTOR_BYTES * 8 // partial_bits)
        padded = stored_apart and not launch.drop_padding
        return cls(
            vector,
            lanes,
            run,
            r0_block // lanes / in_row if padded else 1.0,
            {
                Width.TILE: in_row * rows,
                Width.COLUMNS: in_row,
                Width.ROWS: rows,
                Width.SCALAR: 0,
            },
        )

    def access(self, op: Op) -> int:
        """Elements that a thread loads or stores at once."""
        return max(1, min(self.vector, self.run, VECTOR_BYTES * 8 // op.memory_bits))

    def bits(self, op: Op) -> int:
        """
        Of registers, of an element that is loaded, before it is computed with: elements
        of less than 4 bytes share a register where they are loaded at once.
        """
        return max(op.memory_bits, 32 // self.access(op))

    def registers(self, accesses: Iterable[Op]) -> float:
        """Of 32 bits, that hold what a thread loads or stores."""
        return sum(self.bits(op) * self.elements[op.width] for op in accesses) / 32

    def staged(self, op: Op, num_stages: int) -> bool:
        """Whether a loop of ``num_stages`` loads ``op`` from shared memory."""
        return num_stages > 1 and self.access(op) * op.memory_bits >= COPY_BYTES * 8


def _known(ops: Sequence[Op]) -> list[int]:
    """After how many row reductions each operation has what it needs, itself counted."""
    known: list[int] = []
    reductions = 0
    for op in ops:
        known.append(max((known[j] for j in op.inputs), default=0))
        if op.name == "row_reduction":
            reductions += 1
            known[-1] = reductions
    return known


def _not_waiting(ops: Sequence[Op], widths: Sequence[Width]) -> list[Op]:
    """
    The values of ``widths`` that are loaded for nothing that is stored, or that waits for
    a row reduction.
    """
    known = _known(ops)
    waiting = OrderedSet(
        i for i, op in enumerate(ops) if known[i] or op.name == "store"
    )
    for i in reversed(range(len(ops))):
        if i in waiting and ops[i].name != "row_reduction":
            waiting.update(ops[i].inputs)
    return [
        op
        for i, op in enumerate(ops)
        if op.name == "load" and op.width in widths and i not in waiting
    ]


def _live_at_reduction(
    ops: Sequence[Op], layout: Layout, loaded: Sequence[Width]
) -> float:
    """
    32-bit registers of the tiles, and of what else is ``loaded`` for each row, that are
    live across a row reduction, that at which most are. Loads are issued first, and a
    sum over rows is added up as soon as the row reductions are known that it needs.
    """
    known = _known(ops)
    reductions = max(known, default=0)
    # after how many row reductions an operation is done, and used last
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
    values = []
    for i, op in enumerate(ops):
        if op.name == "load" and op.width in loaded:
            bits = layout.bits(op)
        elif op.width == Width.TILE and op.name not in _RECOMPUTED:
            bits = op.bits
        else:
            continue
        values.append((done[i], used[i], bits * layout.elements[op.width]))
    return max(
        (
            sum(bits for first, last, bits in values if first < each <= last) / 32
            for each in range(1, reductions + 1)
        ),
        default=0,
    )


_RECOMPUTED = ("constant", "index_expr")
_NOT_COMPUTED = ("load", "store", *_RECOMPUTED)
_RANDOM = ("rand", "randn")
# of float32, in 16 bytes
_PARTIALS_AT_ONCE = VECTOR_BYTES // 4


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


# Fitted on 7238 kernels of norms' backwards on 128 to 16384 columns, compiled for sm_80,
# sm_90 and sm_100 by the ptxas of Triton 3.6.0, and judged on others.
COEFFICIENTS = Coefficients(
    base=-14.05,
    each=Demand(
        accumulators=1.141,
        hoisted=0.6903,
        tiles=0.9992,
        held=0.3945,
        loads=0.5169,
        computed=0.544,
        stored=0.1004,
        branches=1.05,
        pointers=0.6093,
        vectors=5.614,
        unaligned=3.423,
        operations=0.0097,
    ),
    over_64_bytes=-3.913,
    over_256_bytes=40.43,
)


@dataclasses.dataclass(frozen=True)
class Pressure:
    """
    Registers a thread: what the kernel needs, and what a thread may have. ``spills``
    is whether it would spill, ``too_high`` whether so much that it should do less, and
    ``excess`` how many there are not.
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
    def excess(self) -> float:
        return max(0.0, self.need - self.limit)

    @property
    def registers_per_thread(self) -> int:
        return round(min(self.need, self.limit))


def pressure(
    ops: Sequence[Op],
    columns: int,
    launch: LaunchConfig,
    registers_per_multiprocessor: int = DeviceModel.registers_per_sm,
) -> Pressure:
    """
    Of the kernel that computes ``ops`` on rows of ``columns`` (R0_BLOCK is the next
    power of two), launched as ``launch``.
    """
    limit = all_registers(registers_per_multiprocessor, launch.num_warps, launch.sharing)
    return Pressure(COEFFICIENTS.need(Demand.of(ops, columns, launch)), limit)
