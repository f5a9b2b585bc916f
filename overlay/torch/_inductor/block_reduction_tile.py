"""
The tile of a persistent block reduction that reads along one dimension and writes
along another, as the scaling of a transposed matrix in blocks does::

    amax = x.t().contiguous().reshape(N, -1, 32).abs().amax(-1)

It reads along ``x`` and writes along ``r0_``, so its values change their layout between
threads, through shared memory. Triton gives the layout of the loads to all that follows,
the reduction too. With 16-byte loads 8 lanes hold a line, so the lanes and warps that
are left lie along ``r0_``: each reduction then crosses warps, and their stores to shared
memory are 8 words apart, in the same banks. On an H200 that is what the kernel does: at
[16384, 16384] bf16 memory is idle three quarters of the time.

Here a warp loads a line with all of its lanes, 4 bytes each, and warps lie along what
continues the blocks in memory: a thread has a block to itself, or shares it with few,
and reduces it in registers. What one program writes is a longer run of memory.

What is read and written along which dimension, and how it goes on in memory, comes from
the coalescing analysis, for reads and writes in one iteration space.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Optional, TYPE_CHECKING

import sympy

import torch
from torch.utils._ordered_set import OrderedSet

from . import config
from .device_model import LINE_BYTES
from .runtime.launch_plan import LaunchPlan
from .runtime.registers import THREADS_PER_WARP
from .runtime.runtime_utils import next_power_of_2
from .tiling_utils import has_indirect_access
from .upstream_names import WARPS_ALONG_INNERMOST
from .utils import get_dtype_size, sympy_product, sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .codegen.triton import IndexingOptions, TritonKernel
    from .tiling_utils import CoalesceVarAnalysis, FusedNormalizedReadsWrites


# Bytes that a lane loads: a warp's lanes have a line between them.
LANE_BYTES = LINE_BYTES // THREADS_PER_WARP
# Bytes that a program writes in a row, if it can. On an H200 blocks of 128 bytes take 5 %
# to 15 % longer one by one than two by two, and four by four are no better than that.
RUN_BYTES = 256
# A tile is 8192 values: 32 a thread, of 8 warps. Twice as many a thread is 2 % to 5 %
# slower, half as many too; a tile twice as large up to a third.
ELEMENTS_PER_THREAD = 32
NUM_WARPS = 8
MAX_WARPS = 16  # for blocks over 256 values, of which a tile has half a line
MAX_BLOCK = 2 * MAX_WARPS * ELEMENTS_PER_THREAD
# An access counts if it is this part of all bytes; less is not worth a tile.
MAIN_SHARE = 8


@dataclasses.dataclass(frozen=True)
class Access:
    """
    How a kernel reads or writes one index.

    buffers: whose index it is
    itemsize: bytes of an element, of the widest of them
    nbytes: bytes that it moves
    run: elements of RUN_BYTES in a row, by dimension ("y", "x", "r0_"), from the
        dimension of stride 1 on; fewer where no dimension continues them
    row_alignment: bytes, up to a line, of which any two rows are a multiple apart
    """

    buffers: OrderedSet[str]
    itemsize: int
    nbytes: int
    run: dict[str, int]
    row_alignment: int = LINE_BYTES

    @property
    def along(self) -> Optional[str]:
        """The dimension of stride 1, if there is one."""
        return next(iter(self.run), None)


@dataclasses.dataclass(frozen=True)
class BlockReductionTile:
    """
    blocks: XBLOCK and, where the kernel has that dimension, YBLOCK
    num_warps: of a program
    alignment: bytes that the compiler may assume of a buffer's address, which is what a
        lane loads of it at once
    """

    blocks: dict[str, int]
    num_warps: int
    alignment: dict[str, int]

    def launch_plan(self) -> LaunchPlan:
        """What the runtime needs for the kernel's configuration."""
        return LaunchPlan(tile=(self.blocks, self.num_warps))


def _split_variables(
    variables: Sequence[sympy.Symbol],
    ranges: dict[sympy.Symbol, sympy.Expr],
    numels: dict[str, sympy.Expr],
) -> Optional[dict[str, list[sympy.Symbol]]]:
    """
    ``variables``, outermost first, as those of each of ``numels``, outermost first: of
    each the innermost first. None where they are not split at the same places.
    """
    equals = V.graph.sizevars.statically_known_equals
    left = list(variables)
    split: dict[str, list[sympy.Symbol]] = {}
    for prefix, numel in reversed(numels.items()):
        taken: list[sympy.Symbol] = []
        while left and not equals(sympy_product(ranges[v] for v in taken), numel):
            taken.append(left.pop())
        if not equals(sympy_product(ranges[v] for v in taken), numel):
            return None
        split[prefix] = taken
    return None if any(not equals(ranges[v], 1) for v in left) else split


def _strides(
    index: sympy.Expr, ranges: dict[sympy.Symbol, int]
) -> dict[sympy.Symbol, sympy.Expr]:
    """The elements that ``index`` goes on by with each variable, from where all are 0."""
    zero = dict.fromkeys(ranges, 0)
    start = sympy_subs(index, zero)
    return {v: sympy_subs(index, {**zero, v: 1}) - start for v in ranges}


def _row_alignment(
    itemsize: int,
    strides: dict[sympy.Symbol, sympy.Expr],
    ranges: dict[sympy.Symbol, int],
) -> int:
    """See ``Access``. One element where a stride is not known."""
    alignment = LINE_BYTES
    for v, stride in strides.items():
        if stride != 1 and ranges[v] > 1:
            elements = int(stride) if isinstance(stride, sympy.Integer) else 1
            alignment = math.gcd(alignment, elements * itemsize)
    return alignment


def _run(
    itemsize: int,
    strides: dict[sympy.Symbol, sympy.Expr],
    dimensions: dict[str, list[sympy.Symbol]],
    ranges: dict[sympy.Symbol, int],
) -> dict[str, int]:
    """Elements in a row of an index by dimension: see ``Access``."""
    wanted, covered = RUN_BYTES // itemsize, 1
    run: dict[str, int] = {}
    used = dict.fromkeys(dimensions, 0)
    while covered < wanted:
        for prefix, variables in dimensions.items():
            # A dimension goes on with its next variable after the whole of the last
            # one, so only where no other dimension came between.
            v = variables[used[prefix]] if used[prefix] < len(variables) else None
            if v is not None and strides[v] == covered and ranges[v] > 1:
                break
        else:
            return run
        take = min(ranges[v], -(-wanted // covered))
        run[prefix] = run.get(prefix, 1) * take
        used[prefix] += 1
        covered *= ranges[v]
    return run


def accesses(
    reads_writes: FusedNormalizedReadsWrites, tiling: dict[str, sympy.Expr]
) -> Optional[tuple[list[Access], list[Access]]]:
    """
    The reads and the writes of a kernel tiled as ``tiling``. None where an index is
    indirect, or where the tiling does not split the analysis' variables between them.
    """
    symbolic = reads_writes.var_ranges
    pointwise = {p: n for p, n in tiling.items() if not p.startswith("r")}
    reduction = {p: n for p, n in tiling.items() if p.startswith("r")}
    pw = _split_variables([*reads_writes.index_vars], symbolic, pointwise)
    red = _split_variables([*reads_writes.reduce_vars], symbolic, reduction)
    if pw is None or red is None:
        return None
    hint = V.graph.sizevars.optimization_hint
    ranges = {v: hint(n) for v, n in symbolic.items()}
    both: tuple[list[Access], list[Access]] = ([], [])
    for found, indices in zip(both, (reads_writes.reads, reads_writes.writes)):
        for index, buffers in indices.items():
            if has_indirect_access(index):
                return None
            itemsize = max(get_dtype_size(V.graph.get_dtype(b)) for b in buffers)
            elements = 1
            for v in OrderedSet(ranges) & index.free_symbols:
                elements *= ranges[v]
            strides = _strides(index, ranges)
            run = _run(itemsize, strides, {**pw, **red}, ranges)
            alignment = _row_alignment(itemsize, strides, ranges)
            found.append(
                Access(buffers, itemsize, elements * itemsize, run, alignment)
            )
    return both


def tiles_blocks_on(device: Optional[torch.device]) -> bool:
    """Whether block reductions on ``device``, and their casts, are generated otherwise."""
    return (
        config.triton.block_reduction_tiles
        and torch.version.hip is None
        and device is not None
        and device.type == "cuda"
    )


def tiles_blocks(device: Optional[torch.device], block: sympy.Expr) -> bool:
    """
    Whether reductions of ``block`` values, a size that is known, get the loops by which they
    read on ``device``.
    """
    return (
        tiles_blocks_on(device)
        and isinstance(block, (int, sympy.Integer))
        and block > 1
    )


def may_have_tile(device: Optional[torch.device], block: sympy.Expr) -> bool:
    """Whether a reduction of ``block`` values on ``device`` is one that may have a tile."""
    return (
        tiles_blocks(device, block)
        and config.triton.persistent_reductions
        and not config.triton.force_cooperative_reductions
        and block <= MAX_BLOCK
    )


def block_reduction_tiling(
    analysis: CoalesceVarAnalysis, reduction_numel: sympy.Expr
) -> Optional[tuple[dict[str, sympy.Expr], dict[str, int]]]:
    """
    The tiling {"y", "x", "r0_"} of a kernel that reads along one dimension and writes
    blocks shorter than RUN_BYTES, which another dimension continues, so that a tile can
    have more of them in a row; and its score by dimension. None for any other kernel.
    """
    reads_writes = analysis.norm_read_writes
    ranges = reads_writes.var_ranges
    variables = [*reads_writes.index_vars]
    for i in range(1, len(variables)):
        tiling = {
            "y": sympy_product(ranges[v] for v in variables[:i]),
            "x": sympy_product(ranges[v] for v in variables[i:]),
            "r0_": reduction_numel,
        }
        found = accesses_of_blocks(reads_writes, tiling)
        if found is None or choose_tile(*found, size_hints(tiling)) is None:
            continue
        _, writes = found
        if any(a.along == "r0_" and len(a.run) > 1 for a in writes):
            parts = {"y": variables[:i], "x": variables[i:]}
            parts["r0_"] = [*reads_writes.reduce_vars]
            return tiling, {
                prefix: sum(analysis.coalesced_by_var.get(v, 0) for v in part)
                for prefix, part in parts.items()
            }
    return None


def accesses_of_blocks(
    reads_writes: FusedNormalizedReadsWrites, tiling: dict[str, sympy.Expr]
) -> Optional[tuple[list[Access], list[Access]]]:
    """
    The reads and the writes of a reduction tiled as ``tiling``, if it may have a tile and
    the analysis can tell; or None.
    """
    if tuple(tiling) not in (("x", "r0_"), ("y", "x", "r0_")) or not may_have_tile(
        V.graph.get_current_device_or_throw(), tiling["r0_"]
    ):
        return None
    return accesses(reads_writes, tiling)


def size_hints(tiling: dict[str, sympy.Expr]) -> dict[str, int]:
    """The sizes of ``tiling``, which may be symbols."""
    hint = V.graph.sizevars.optimization_hint
    return {prefix: hint(numel) for prefix, numel in tiling.items()}


def main_accesses(
    reads: list[Access], writes: list[Access]
) -> tuple[list[Access], list[Access]]:
    """Those of ``reads`` and ``writes`` that are worth a tile."""
    least = sum(a.nbytes for a in itertools.chain(reads, writes)) // MAIN_SHARE
    return (
        [a for a in reads if a.nbytes >= least],
        [a for a in writes if a.nbytes >= least],
    )


def choose_tile(
    reads: list[Access], writes: list[Access], sizes: dict[str, int]
) -> Optional[BlockReductionTile]:
    """
    The tile of a kernel of ``sizes`` ("y" or not, "x", "r0_") with these ``reads`` and
    ``writes``, or None where it does not read along x or y and write along another
    dimension, where there is no line to read, or MAX_WARPS cannot hold a line of blocks.
    """
    main_reads, main_writes = main_accesses(reads, writes)
    read_along = OrderedSet(a.along for a in main_reads)
    if len(read_along) != 1:
        return None
    (along,) = read_along
    if (
        along not in sizes
        or along == "r0_"
        or any(a.along == along for a in main_writes)
        or all(a.along in (along, None) for a in writes)
    ):
        return None

    lane = max(max(1, LANE_BYTES // a.itemsize) for a in main_reads)
    if any(a.run[along] < LINE_BYTES // a.itemsize for a in main_reads):
        return None
    blocks = {prefix: 1 for prefix in sizes if prefix != "r0_"}
    blocks[along] = THREADS_PER_WARP * lane
    # A block is one thread's, or is shared by as few warps as can hold it.
    held = next_power_of_2(sizes["r0_"]) * lane * len(main_reads)
    num_warps = max(1, held // ELEMENTS_PER_THREAD)
    if num_warps > NUM_WARPS:
        blocks[along] //= 2
        num_warps //= 2
    if num_warps > MAX_WARPS:
        return None
    # What continues the blocks in memory first, then more of what is read.
    for prefix in sorted(blocks, key=lambda prefix: prefix == along):
        while blocks[prefix] < sizes[prefix] and num_warps < NUM_WARPS:
            blocks[prefix] *= 2
            num_warps *= 2
    return BlockReductionTile(
        {prefix.upper() + "BLOCK": block for prefix, block in blocks.items()},
        num_warps,
        {name: lane * a.itemsize for a in main_reads for name in a.buffers},
    )


def codegen_tile_load(
    kernel: TritonKernel, line: str, name: str, var: str, indexing: IndexingOptions
) -> str:
    """
    ``line``, which loads ``name`` from ``var``, with warps along what continues the blocks of
    a block reduction. Where Triton has them along the innermost dimension, which is the
    block, that is outermost while a tile is loaded.
    """
    # of a BlockReductionKernel
    tile = getattr(kernel, "tile_in_reduction", None)
    if not (
        WARPS_ALONG_INNERMOST
        and tile
        and name in tile.alignment
        and "YBLOCK" in tile.blocks
    ):
        return line
    index, mask = indexing.index_str, indexing.mask_str
    begin = f"tl.load({var} + ({index}), {mask}"
    assert line.startswith(begin), line
    hints = line[len(begin) :]
    if mask != "None":
        mask = f"tl.permute({mask}, (2, 0, 1))"
    load = f"tl.load({var} + (tl.permute({index}, (2, 0, 1))), {mask}{hints}"
    return f"tl.permute({load}, (1, 2, 0))"
