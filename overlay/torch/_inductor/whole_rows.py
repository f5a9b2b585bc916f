"""
Which few long rows of an inner reduction are not split, so that a program has each.

One SM loads a row that a program has, and all SMs load one that is split. But each reduction
of that is a kernel more, and so is what is made of the row. So the fewer rows, the shorter
they have to be.

A row need not be contiguous: a channel of a batch norm, [N, C, H, W] over N, H and W, is in
as many pieces as there are images. What is made of such rows waits for them once more. It
gains where it finds them in the L2 cache, and loses where they come from memory again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from unittest.mock import patch

import sympy

from .dependencies import extract_read_writes, index_vars_squeeze, MemoryDep
from .device_model import DeviceModel
from .ir import FlexibleLayout
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .ir import Reduction
    from .runtime.hints import DeviceProperties


# Columns, where all SMs but those of a row are idle. With fewer idle ones it is as many by
# their share; with so many busy ones any number of columns.
COLUMNS = 20 * 1024
BUSY_SHARE = 5 / 6


def leaves_rows_whole(
    properties: DeviceProperties, rows: int, columns: int, reduction: Reduction
) -> bool:
    """Of an inner ``reduction`` of ``rows`` rows of ``columns``, both static or as hinted."""
    if properties.type != "cuda":
        return False
    device = DeviceModel.of(properties)
    busy = rows / (BUSY_SHARE * device.sms)
    if columns * (1 - busy) > COLUMNS:
        return False
    sizes = reduction.get_size(), reduction.get_reduction_size()
    # the same variables as those of the dependencies
    (row_vars, column_vars), _ = index_vars_squeeze(*sizes)
    symbols = {each for each in row_vars if isinstance(each, sympy.Symbol)}
    with patch.object(FlexibleLayout, "allow_indexing", True):
        reads = extract_read_writes(reduction.inner_fn, *sizes).reads
    extents = {
        dep: extent(dep, column_vars)
        for dep in reads
        if isinstance(dep, MemoryDep) and dep.index.free_symbols >= symbols
    }
    if all(each <= columns for each in extents.values()):
        return True
    itemsize = sum(
        V.graph.get_dtype(dep.name).itemsize
        for dep, each in extents.items()
        if each > 1
    )
    return busy >= 1 and rows * columns * itemsize <= device.l2_bytes


def extent(dep: MemoryDep, column_vars: Sequence[sympy.Symbol]) -> int:
    """Elements from the first that a row reads by ``dep`` to its last, both included."""
    sizevars = V.graph.sizevars
    index = sizevars.simplify_with_ranges(dep.index, dep.ranges)
    strides = sizevars.stride_hints(index, column_vars, list(dep.ranges))
    sizes = (
        sizevars.optimization_hint(dep.ranges.get(variable, 1), fallback=1)
        for variable in column_vars
    )
    return 1 + sum(abs(stride) * (size - 1) for stride, size in zip(strides, sizes))
