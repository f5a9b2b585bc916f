"""
How many programs a mix-order kernel has, of those that run at a time.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

import sympy

from .mix_order_debug import debug_options
from .runtime.runtime_utils import ceildiv


if TYPE_CHECKING:
    from .device_model import DeviceModel
    from .mix_order_row_cost import RowCost
    from .mix_order_row_loop import RowSplit


STORED_SHARE = 0.5  # what is stored of a tile, of what is loaded
LEAST_GAIN_US = 0.2  # of fewer programs: what was predicted to gain less may lose
LEAST_PROGRAMS_PER_SM = 3 / 4  # with fewer, too many SMs have nothing to do


def static_rows(rows: sympy.Expr) -> Optional[int]:
    """Their number; None where it is dynamic."""
    return int(rows) if isinstance(rows, (int, sympy.Integer)) else None


def count_programs(
    device: DeviceModel, programs_per_sm: int, rows: Optional[int], xblock: int
) -> int:
    """Of a kernel: no more than there are tiles of ``xblock`` rows, where that is known."""
    most = device.sms * programs_per_sm
    return most if rows is None else max(1, min(most, ceildiv(rows, xblock)))


def predicted_us(
    split: RowSplit, cost: RowCost, device: DeviceModel, rows: int, num_programs: int
) -> float:
    """
    Of a kernel of ``num_programs``: the tiles of each, one after the other, and what the
    partial accumulators of all take, in the kernel and in the one that adds them up.
    """
    tiles = ceildiv(rows, split.xblock)
    tensors = 1 + STORED_SHARE * cost.stores_rows
    tile_bytes = tensors * split.xblock * cost.columns * cost.stream_bytes
    tile_us = device.tile_us + device.tile_us_per_byte * tile_bytes
    partial_bytes = 4 * cost.accumulators * cost.columns
    program_us = device.program_us + device.partial_us_per_byte * partial_bytes
    return ceildiv(tiles, num_programs) * tile_us + num_programs * program_us


def fewer_programs(
    split: RowSplit, cost: RowCost, device: DeviceModel, rows: Optional[int]
) -> RowSplit:
    """
    ``split`` with a half or a quarter of its programs, where the partial accumulators of the
    others would take longer than the tiles that each of those has more.
    """
    if rows is None or not debug_options().fewer_programs:
        return split

    def us(programs: int) -> float:
        return predicted_us(split, cost, device, rows, programs)

    most = split.num_programs
    least = LEAST_PROGRAMS_PER_SM * device.sms
    fewer = (n for n in (ceildiv(most, 2), ceildiv(most, 4)) if n >= least)
    best = min(fewer, key=us, default=most)
    if us(most) - us(best) <= LEAST_GAIN_US:
        return split
    why = f"{us(best):.1f} us are predicted, and {us(most):.1f} of all {most}"
    return dataclasses.replace(
        split, num_programs=best, why={**split.why, "num_programs": why}
    )


def idle_share(rows: Optional[int], xblock: int, num_programs: int) -> float:
    """Of ``num_programs`` with a run of as many tiles each, which have none to do."""
    tiles = ceildiv(rows or 0, xblock)
    runs = ceildiv(tiles, num_programs) * num_programs
    return 1 - tiles / runs if runs else 0.0
