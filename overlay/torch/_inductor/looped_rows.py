"""
Which of several loops over the rows of an inner reduction takes least time, as predicted.

A program has a row, and loads a block of its columns at a time, in each pass over it. What
differs with the columns of a thread and the warps of a program:

- issue: what is done once an iteration counts once for all columns of a thread, and what is
  masked of the last block is done for nothing
- latency: an iteration waits for its loads. Other programs of the SM compute meanwhile, if
  there are as many rows. A row alone on its SM has 32 warps, with 16 bytes a thread.
- memory: a later pass finds its row in the L2 cache if the rows of all resident programs fit.
  Programs of more warps are fewer: of [8192, 65536] in bf16 those of eight warps have 138 MB,
  and read from memory twice; those of 32 have 35.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Optional, TYPE_CHECKING

from .runtime.registers import OTHER_REGISTERS, THREADS_PER_WARP
from .vector_width import VECTOR_BYTES


if TYPE_CHECKING:
    from .device_model import DeviceModel


# Columns of a row, beyond which the time is predicted.
SHORT_ROW = 16384
# Rows, an SM, with which programs of four warps leave it half empty.
FEW_ROWS = 8
# Of the time of the usual loop, what another has to save: by the rest of the error, less is
# as often a loss.
LEAST_GAIN = 0.05
# Slots of an iteration of a warp, and of each load or store of a thread, beside those that
# are counted of an element: addresses, masks, the branch.
ITERATION_SLOTS, ACCESS_SLOTS = 16, 2.8
# Tensors that are read again, with more of which a thread has registers of as many warps again.
MOST_KEPT = 2
# Adjacent columns of a thread with which its loads are vectors.
VECTOR = 4
# What the last block may mask where an SM has several programs, as a share of the row: all of
# them end with it.
MOST_WAITED = 1 / 32
# Warps of a program, at most.
MOST_WARPS = 32
# Programs of an SM, at least, where registers of float64 decide how many there are, and it has as
# many rows: two wait for their rows' ends at the same time, and take 1.05 to 1.2 times as long.
LEAST_PROGRAMS = 3


@dataclasses.dataclass(frozen=True)
class LoopedRows:
    """
    What a looped reduction does with ``rows`` of ``columns``, both static or as hinted.

    read_again: bytes of a column that more than one loop reads
    narrow: whether what has a value for each row and column has two bytes, or one where
        each row begins at a word
    accesses: that a loop has to a column, at most, by loads and stores
    loops: passes over a row
    moved: bytes of all that is loaded and stored, each once
    all_accesses: by loads and stores of a column, of all loops
    vector: adjacent columns that a thread loads or stores at once
    slots: issue slots of a column, of all loops
    kept: tensors that more than one loop reads
    widest: bytes of a column, of the widest tensor
    online: whether a column has a maximum and a sum of exponentials
    alone: whether no other reduction is beside those
    welford: whether a column has three accumulators
    doubles: accumulators of a column that are in float64, of two registers each
    again: whether several loops compute what they need of a column
    """

    rows: int
    columns: int
    read_again: int
    narrow: bool
    accesses: int
    loops: int = 1
    moved: int = 0
    all_accesses: int = 1
    vector: int = 1
    slots: int = 0
    kept: int = 0
    widest: int = 2
    online: bool = False
    alone: bool = False
    welford: bool = False
    doubles: int = 0
    again: bool = False


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """
    The columns of a block that a thread has, and the warps of a program.

    sharing_programs: those that share the registers of an SM, of which a thread is told its share;
        0: it is not
    """

    columns_per_thread: int
    num_warps: int
    sharing_programs: int = 0

    @property
    def block(self) -> int:
        """Columns of a block."""
        return 32 * self.columns_per_thread * self.num_warps

    @property
    def is_alone(self) -> bool:
        """Whether the registers of an SM are for one program."""
        return self.columns_per_thread == 16 and self.num_warps == 32

    def masked(self, columns: int) -> float:
        """Of the last block of a row, what no column has, as a share of the row."""
        return -columns % self.block / columns


# Of a block of 2048, whose 16 warps the runtime decides.
RUNTIME_LOOP = LoopConfig(4, 16)
LOOPS = tuple(
    LoopConfig(*each)
    for each in (
        *((16, 4), (8, 8), (16, 8), (4, 16), (8, 16), (16, 16)),
        *((4, 32), (8, 32), (16, 32)),
    )
)


def rows_at_once(device: DeviceModel) -> int:
    """Rows that are there at a time, however many warps a program has."""
    return device.sms * max(device.warps_per_sm // MOST_WARPS, 1)


def programs_per_sm(row: LoopedRows, loop: LoopConfig, device: DeviceModel) -> int:
    """At a time, by their warps, and by registers where those of float64 are more than others."""
    programs = device.warps_per_sm // loop.num_warps
    if row.doubles:
        registers = OTHER_REGISTERS + loop.columns_per_thread * (1 + 2 * row.doubles)
        threads = loop.num_warps * THREADS_PER_WARP
        programs = min(programs, device.registers_per_sm // (registers * threads))
    return max(programs, 1)


def lasts(row: LoopedRows, loop: LoopConfig, device: DeviceModel) -> float:
    """By how much longer ``row`` takes for what its last wave of programs and last block lack."""
    waves = row.rows / (device.sms * programs_per_sm(row, loop, device))
    return math.ceil(waves) / waves * (1 + loop.masked(row.columns))


def can_have(row: LoopedRows, loop: LoopConfig, device: DeviceModel) -> bool:
    """Whether ``loop`` is one of those that were measured, and of ``row`` does not spill."""
    columns, num_warps = loop.columns_per_thread, loop.num_warps
    if row.doubles:
        rows = math.ceil(row.rows / device.sms)
        if programs_per_sm(row, loop, device) < min(LEAST_PROGRAMS, rows):
            return False
    if num_warps < 16 and not (row.online and row.rows >= FEW_ROWS * device.sms):
        return False
    one = loop.is_alone
    if row.vector < VECTOR:
        if row.online and row.widest > 2 and row.kept <= MOST_KEPT:
            return not one
        # ptxas unrolls the loop, and has loads of several tensors in flight
        return loop.block <= 4096 and not (num_warps == 32 and row.kept > 1)
    # narrower tensors make vectors of more columns: a load of a warp skips what the next has
    apart = min(columns, row.vector) * row.widest  # bytes from a thread to the next
    # of rows that the runtime's block divides, the mask is all that there is to wait for
    waits = (
        not (row.online or row.welford or RUNTIME_LOOP.masked(row.columns))
        and row.rows > rows_at_once(device)
        and loop.masked(row.columns) > MOST_WAITED
    )
    return (
        not (one and (row.welford or row.kept > 1))
        and not waits
        and apart <= (2 if one and not row.online else 1) * VECTOR_BYTES
    )


def loop_us(row: LoopedRows, loop: LoopConfig, device: DeviceModel) -> float:
    """The predicted time of a kernel of ``row``, in us. Needs ``device.memory_GBs``."""
    assert device.memory_GBs is not None
    columns, num_warps = loop.columns_per_thread, loop.num_warps
    loads = columns / min(row.vector, columns)  # of a thread, for each access
    iterations = math.ceil(row.columns / loop.block)

    accesses = row.all_accesses * loads
    slots = row.loops * ITERATION_SLOTS + columns * row.slots + accesses * ACCESS_SLOTS
    issue_us = iterations * num_warps * slots * device.warp_slot_ns / 1e3
    wait_ns = iterations * (device.iteration_ns + loads * device.load_ns)
    wait_us = row.loops * (wait_ns + device.row_end_ns) / 1e3

    resident = programs_per_sm(row, loop, device)
    programs = min(resident, math.ceil(row.rows / device.sms))
    rounds = row.rows / (device.sms * programs)
    if rounds <= 2:  # beyond, the programs of an SM end at different times
        rounds = math.ceil(rounds)
    rows_us = row.rows / device.sms * issue_us
    compute_us = max(rounds * (wait_us + issue_us), rows_us)

    if loop.is_alone or row.kept > MOST_KEPT:
        resident = max(resident // 2, 1)
    again = min(row.rows, device.sms * resident) * row.columns * row.read_again
    held, lost = (share * device.l2_bytes for share in (device.l2_held, device.l2_lost))
    missed = min(max((again - held) / (lost - held), 0.0), 1.0) if lost else 1.0
    moved = row.moved + row.rows * row.columns * row.read_again * missed
    memory_us = moved / (device.memory_GBs * device.row_share * 1e3)
    return device.launch_us + math.hypot(compute_us, memory_us)


def long_loop(
    row: LoopedRows, usual: Optional[LoopConfig], device: DeviceModel
) -> Optional[LoopConfig]:
    """
    The loop over ``row`` that takes least time, or the ``usual`` one (None: the runtime's)
    where none saves enough, or nothing is predicted.
    """
    if row.columns <= SHORT_ROW or not device.memory_GBs:
        return usual
    enough = (1 - LEAST_GAIN) * loop_us(row, usual or RUNTIME_LOOP, device)
    candidates = [each for each in LOOPS if can_have(row, each, device)]
    if row.doubles:  # the usual ones are of columns with fewer registers
        enough = math.inf
    # most have ten loads and reductions, for which the runtime halves the block of its loop
    if row.again and not row.narrow:
        enough = loop_us(row, usual or RUNTIME_LOOP, device)
        candidates = [each for each in candidates if each.num_warps == MOST_WARPS]
    times = {each: loop_us(row, each, device) for each in candidates}
    # none where types of two and of eight bytes are far apart
    best = min(times, key=times.__getitem__, default=None)
    return best if best and times[best] < enough else usual
