"""
The order in which the programs of a block reduction go over their tiles.

A kernel with a ``BlockReductionTile`` reads along x, and what it writes along r0_ goes on
along y. Programs go along x first, so those that run at a time read whole rows and write
short runs into as many rows of the result as there are columns. Along y first, what they
write at a time is longer runs; and then a tile of twice the columns pays.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .as_read_tile import as_read_tile, is_looped_as_fast
from .block_reduction_tile import (
    Access,
    accesses_of_blocks,
    BlockReductionTile,
    choose_tile,
    main_accesses,
    size_hints,
)
from .device_model import DeviceModel
from .repeated_passes import computes_functions
from .runtime.hints import DeviceProperties
from .runtime.launch_plan import LaunchPlan
from .runtime.registers import all_registers
from .utils import ceildiv
from .virtualized import V


if TYPE_CHECKING:
    import sympy

    from .codegen.simd_kernel_features import SIMDKernelFeatures


# Twice the columns, of 2 bytes in 8 a lane, are 4 % to 11 % faster, if 2 warps hold a
# block; if 8 do, for blocks of 128, they are 12 % slower. At 27 programs a multiprocessor
# they are 2 % faster, at 15 they are 2 % slower.
WIDE_ITEMSIZE = 2
WIDE_WARPS_PER_BLOCK = 2
WIDE_PROGRAMS_PER_SM = 20
# A thread has its share of the registers of so many warps, 80 where there are 65536. The
# compiler takes 80 to 89 for the same values, by the sizes alone.
WIDE_WARPS_PER_SM = 24
# What may be computed of each value so that it fits in these: before a reduction, which
# then keeps what was read, and after it. Functions of many instructions spill.
REDUCED_OPS = OrderedSet(["to_dtype", "abs", "reduction", "store_reduction"])
RESULT_OPS = OrderedSet(["to_dtype", "abs", "neg", "add", "sub", "mul", "truediv"])
RESULT_OPS |= OrderedSet(["round", "minimum", "maximum", "store"])


@dataclasses.dataclass(frozen=True)
class YFirstTile(BlockReductionTile):
    """
    The tile of a kernel whose programs go along y, and only then along x.

    max_registers: of a thread, None for what the compiler chooses
    """

    max_registers: Optional[int] = None

    def launch_plan(self) -> LaunchPlan:
        """What the runtime needs for the kernel's configuration, and to compile it."""
        plan = super().launch_plan()
        return dataclasses.replace(plan, maxnreg=self.max_registers or 0)


def ordered_tile(
    features: SIMDKernelFeatures, tiling: dict[str, sympy.Expr]
) -> Optional[BlockReductionTile]:
    """
    The tile of a persistent reduction that reads along one dimension, and its programs in the
    order of what they write; or None for any other kernel.
    """
    if (analysis := features.coalesce_analysis) is None or (
        found := accesses_of_blocks(analysis.norm_read_writes, tiling)
    ) is None:
        return None
    reads, writes = found
    sizes = size_hints(tiling)
    properties = DeviceProperties.create(V.graph.get_current_device_or_throw())
    device = DeviceModel.of(properties)
    if as_read := as_read_tile(reads, writes, sizes, device):
        is_light = not computes_functions(features)
        return None if is_light and is_looped_as_fast(reads, writes, sizes) else as_read
    if (tile := choose_tile(reads, writes, sizes)) is None:
        return None
    may_widen = computes_little(features, reads)
    return follow_writes(tile, reads, writes, sizes, device, may_widen)


def computes_little(features: SIMDKernelFeatures, reads: list[Access]) -> bool:
    """
    Whether a kernel's reductions are of what it ``reads``, or of its magnitude, so that a
    thread keeps that, and not what was computed from it in float32; and whether the rest
    computes little of each value. What it computes of a block does not count.
    """
    read = OrderedSet(name for a in reads for name in a.buffers)
    names = OrderedSet(read)
    for node in features.scheduler_nodes():
        body = node._body
        if body.subblocks:
            return False
        if node.is_reduction():
            if not OrderedSet(dep.name for dep in node.read_writes.reads) <= read:
                return False
            allowed = REDUCED_OPS
        else:
            allowed = RESULT_OPS
        of_values: OrderedSet[Any] = OrderedSet()
        for each in body.root_block.graph.nodes:
            if each.target == "load":
                if each.args[1] in names:
                    of_values.add(each)
            elif each.op == "call_method" and of_values.intersection(
                each.all_input_nodes
            ):
                if each.target not in allowed:
                    return False
                of_values.add(each)
                if each.target == "store":
                    names.add(each.args[1])
    return True


def follow_writes(
    tile: BlockReductionTile,
    reads: list[Access],
    writes: list[Access],
    sizes: dict[str, int],
    device: DeviceModel,
    may_widen: bool = True,
) -> BlockReductionTile:
    """
    ``tile`` of a kernel of ``sizes`` with these ``reads`` and ``writes``, its programs
    along y first where it reads along x and writes blocks that x does not continue; then
    also with twice the columns, of ``WIDE_ITEMSIZE``, where it ``may_widen``, one block
    is few warps', and the multiprocessors of ``device`` have programs enough. Other tiles as
    they are.
    """
    main_reads, main_writes = main_accesses(reads, writes)
    if (
        "y" not in sizes
        or any(a.along != "x" for a in main_reads)
        or not any(a.along == "r0_" for a in main_writes)
        or any("x" in a.run for a in main_writes)
    ):
        return tile
    xblock, yblock = 2 * tile.blocks["XBLOCK"], tile.blocks["YBLOCK"]
    programs = ceildiv(sizes["x"], xblock) * ceildiv(sizes["y"], yblock)
    if (
        not may_widen
        or any(sum(len(a.buffers) for a in m) > 1 for m in (main_reads, main_writes))
        or any(a.itemsize != WIDE_ITEMSIZE or a.run["x"] < xblock for a in main_reads)
        or tile.num_warps > WIDE_WARPS_PER_BLOCK * yblock
        or programs < WIDE_PROGRAMS_PER_SM * device.sms
    ):
        return YFirstTile(tile.blocks, tile.num_warps, tile.alignment)
    return YFirstTile(
        {**tile.blocks, "XBLOCK": xblock},
        tile.num_warps,
        {name: 2 * nbytes for name, nbytes in tile.alignment.items()},
        all_registers(device.registers_per_sm, WIDE_WARPS_PER_SM),
    )
