"""
How a mix-order kernel goes over its rows: what ``row_split`` decides, and what codegen
writes of it.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING, Union

from . import config
from .mix_order_debug import debug_options
from .runtime.hints import DeviceProperties, TRITON_MAX_BLOCK
from .runtime.launch_plan import LaunchPlan


if TYPE_CHECKING:
    from collections.abc import Mapping

    from .device_model import DeviceModel


MAX_WARPS = 32


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """
    num_programs: programs of the kernel, and rows of its workspace
    programs_per_sm: what num_programs was made from, which may be fewer
    xblock: rows of a tile
    num_warps: of a program
    num_stages: of the loop over tiles
    reload: whether a row is loaded again when its reductions are known
    hoist: whether what every row reads is loaded once, before the loop
    accumulate_tiles: whether a partial accumulator is a whole tile, reduced over its
        rows once, after the loop
    staged: whether asynchronous copies load the rows
    in_turn: whether tiles are dealt out to the programs in turn, so that what is loaded
        at a time adjoins in memory
    all_registers: whether a thread is told what the programs of an SM leave it, as it may
        need more than ptxas gives it, or take more than that
    prefetch: whether the rows of the next tile are fetched into the L2 cache
    drop_padding: whether the columns that a row is padded by are left out of the
        accumulators before they are stored
    why: the reasons, by the names above; what is not named follows from the others
    """

    num_programs: int
    programs_per_sm: int
    xblock: int
    num_warps: int
    num_stages: int
    reload: bool
    hoist: bool
    accumulate_tiles: bool
    staged: bool = True
    in_turn: bool = True
    all_registers: bool = False
    prefetch: bool = False
    drop_padding: bool = False
    why: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def max_xblock(self) -> int:
        """
        Rows that a tile may have, autotuned or not. Where the rows are a multiple of it
        they need no mask, and never where it is 1: a program ends at the last row.
        """
        bounded = (
            debug_options().bound_tiles
            # descriptors have a least size of their own, and block pointers of more than a
            # dimension, for which it says which rows are whole, cannot store a row's result
            and not (config.triton.use_tensor_descriptor or config.triton.use_block_ptr)
        )
        return self.xblock if bounded else TRITON_MAX_BLOCK["X"]

    def launch_plan(self) -> LaunchPlan:
        """
        What the runtime needs: the programs, and the tiles from which autotuning chooses,
        the first one being that of no autotuning. The workspace holds a row a program, so
        all have the same number of programs.
        """
        row_tiles = [
            (xblock, num_warps, num_stages)
            for xblock, num_warps, num_stages in (
                (self.xblock, self.num_warps, self.num_stages),
                (self.xblock, self.num_warps * 2, self.num_stages),
                (self.xblock, self.num_warps // 2, self.num_stages),
                (self.xblock, self.num_warps, self.num_stages - 1),
                (self.xblock // 2, self.num_warps, self.num_stages),
            )
            if xblock > 0 and 0 < num_warps <= MAX_WARPS and num_stages > 0
        ]
        return LaunchPlan(
            num_programs=self.num_programs,
            max_xblock=self.max_xblock,
            sharing_programs=self.all_registers * self.programs_per_sm,
            row_tiles=row_tiles,
        )

    def codegen_step(self) -> str:
        """
        The line of the kernel that says how many rows there are from a program's tile to
        its next, or, where they adjoin, how many it has.
        """
        if takes_turns(self):
            return f"RSPLIT_STRIDE = {self.num_programs} * XBLOCK"
        return f"RSPLIT_SIZE = tl.cdiv(tl.cdiv(xnumel, XBLOCK), {self.num_programs}) * XBLOCK"


def takes_turns(split: Optional[RowSplit]) -> bool:
    """Whether the tiles of rows are dealt out to the programs in turn."""
    return split is not None and split.in_turn and debug_options().deal_tiles


def row_loop(split: Optional[RowSplit]) -> tuple[list[str], str]:
    """The head of a program's loop over its tiles, and by how many rows they advance."""
    if takes_turns(split):
        loop = "for _ in tl.range(xoffset, xnumel, RSPLIT_STRIDE, num_stages=NUM_STAGES):"
        return [loop], "RSPLIT_STRIDE"
    return [
        "split_size = min(RSPLIT_SIZE, xnumel - xoffset)",
        "for _ in tl.range(0, split_size, XBLOCK, num_stages=NUM_STAGES):",
    ], "XBLOCK"


def splits_rows(device: Union[DeviceProperties, DeviceModel]) -> bool:
    """Whether kernels for ``device`` are persistent, not one program RSPLIT_SIZE rows."""
    return (
        debug_options().persistent_row_split
        and config.triton.mix_order_reduction_split_size is None
        and device.type == "cuda"
    )


def row_pass_eviction_policy(row_pass: int, policy: str) -> str:
    """
    The eviction policy of a load in a kernel that loads rows again: the first pass
    keeps what the next one reads. The policies of successive passes differ, or the
    compiler would take both loads for one and keep its value in registers.
    """
    if policy:  # broadcast
        return policy if row_pass % 2 == 0 else ""
    return (
        ", eviction_policy='evict_last'",
        ", eviction_policy='evict_first'",
        "",
    )[row_pass % 3]
