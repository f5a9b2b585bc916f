"""
How many columns of its block a thread of a looped inner reduction has, and how many warps.

The runtime gives a block of 2048 columns 16 warps, a thread four of them. With more
columns a thread has less to exchange with others and fewer loads to wait for, and what is
done once a thread is done less often. Against that stand the rows. With fewer warps more
of them are on the GPU at a time: there have to be as many, and where a later loop reads
its row again, all of them have to fit in the L2 cache.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

from . import config
from .mix_order_producer_sum_cost import L2_MIB
from .runtime.hints import ReductionHint
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.simd_kernel_features import SIMDKernelFeatures
    from .codegen.triton import TritonKernel
    from .runtime.hints import DeviceProperties


# Warps of an SM: with at most 32 registers a thread there are as many.
WARPS_PER_SM = 64
# Rows, an SM, with which programs of four warps leave it half empty, and with which
# programs of 16 do: there the runtime's block, which no thread waits for, is as good.
FEW_ROWS, FEWEST_ROWS = 8, 2
# Of the L2 cache, what rows that are read again may take. A loop that is bound by what it
# computes can wait for some of them.
L2_SHARE_HALF, L2_SHARE = 1.3, 0.8
DEFAULT_L2_MIB = 40
# Columns of a row that takes two blocks of programs of four warps at most, and tensors of
# such rows: with more, or with wider types, fewer warps are as often slower.
SHORT_COLUMNS = 4096
SHORT_TENSORS = 4


@dataclasses.dataclass(frozen=True)
class LoopedRows:
    """
    What a looped reduction does with ``rows`` of ``columns``, both static or as hinted.

    read_again: bytes of a column that more than one loop reads
    tensors: of all rows and columns, that are read or written
    half: whether tensors of all rows and columns have two bytes an element at most
    """

    rows: int
    columns: int
    read_again: int
    half: bool
    tensors: int = 1


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """The columns of a block that a thread has, and the warps of a program."""

    columns_per_thread: int
    num_warps: int


def decides_warps(kernel: TritonKernel) -> bool:
    """Whether ``kernel`` is a loop over rows whose warps are not for others to decide."""
    return (
        kernel.features.get_reduction_hint() == ReductionHint.INNER
        and len(kernel.dense_size_list()) == 2
        and not kernel.persistent_reduction
        and not kernel.cooperative_reduction
        and not kernel.is_combo_kernel
    )


def looped_rows(features: SIMDKernelFeatures) -> LoopedRows:
    """Of a kernel with one reduction dimension."""
    hint = V.graph.sizevars.optimization_hint
    is_multiple = V.graph.sizevars.statically_known_multiple_of
    reading = [
        loop.bytes_per_thread
        for loop in features.memory_stats().looped.reads.loop
        if loop.count_per_thread
    ]
    whole = features.numel * features.reduction_numel
    itemsizes = [
        V.graph.get_dtype(name).itemsize
        for name in features.buf_accesses()
        if V.graph.sizevars.statically_known_equals(V.graph.get_numel(name), whole)
    ]
    return LoopedRows(
        rows=hint(features.numel, fallback=0),
        columns=hint(features.reduction_numel, fallback=0),
        read_again=max(reading) if len(reading) > 1 else 0,
        half=bool(itemsizes) and all(
            size == 2 or (size == 1 and is_multiple(features.reduction_numel, 4))
            for size in itemsizes
        ),
        tensors=len(itemsizes),
    )


def online_softmax_config(
    row: LoopedRows, device: DeviceProperties
) -> Optional[LoopConfig]:
    """
    Of a loop with an online softmax; None where the runtime decides, and each column has
    a maximum of its own.
    """
    sms = device.multi_processor_count or 1
    share = L2_SHARE_HALF if row.half else L2_SHARE
    cached = share * L2_MIB.get(device.cc, DEFAULT_L2_MIB) * 2**20
    if row.rows < FEW_ROWS * sms:
        enough = row.half and row.rows >= FEWEST_ROWS * sms
        return LoopConfig(8, 16) if enough else None
    for each in (LoopConfig(16, 4), LoopConfig(8, 8)):
        rows = min(row.rows, sms * WARPS_PER_SM // each.num_warps)
        if rows * row.columns * row.read_again <= cached:
            return each
    return LoopConfig(8, 8) if row.half else None


def short_loop_config(
    row: LoopedRows, device: DeviceProperties
) -> Optional[LoopConfig]:
    """Of a loop over rows of half types; None where the runtime decides."""
    sms = device.multi_processor_count or 1
    if (
        row.half
        and row.columns <= SHORT_COLUMNS
        and row.tensors <= SHORT_TENSORS
        and row.rows >= FEW_ROWS * sms
    ):
        return LoopConfig(16, 4)
    return None


def loop_config(kernel: TritonKernel) -> Optional[LoopConfig]:
    """Of any kernel; None where the runtime decides."""
    if kernel.shared_maxima:
        return kernel.shared_maxima.loop
    if (
        config.triton.short_loops_few_warps
        and kernel.inside_reduction
        and decides_warps(kernel)
        and not kernel.features.reduction_numel.free_symbols
    ):
        return V.choices.short_loop_config(kernel.features)
    return None
