"""
Which few long rows of an inner reduction are not split, so that a program has each.

One SM loads a row that a program has, and all SMs load one that is split. But each reduction
of that is a kernel more, and so is what is made of the row. So the fewer rows, the shorter
they have to be.

That was measured of rows that are contiguous. A channel of a batch norm, [N, C, H, W] over
N, H and W, is as many pieces as there are images, and its programs wait for each: of
[96, 128, 56, 56], fused with what reads it again, they take 1.3 of the time of the split
reduction and the kernel of its reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import sympy

    from .runtime.hints import DeviceProperties


# Columns, where all SMs but those of a row are idle. With fewer idle ones it is as many by
# their share; with so many busy ones any number of columns.
COLUMNS = 20 * 1024
BUSY_SHARE = 5 / 6


def leaves_rows_whole(
    device: DeviceProperties,
    rows: int,
    columns: int,
    indices: Iterable[sympy.Expr],
    reduction_vars: Sequence[sympy.Symbol],
    ranges: Mapping[sympy.Symbol, sympy.Expr],
) -> bool:
    """
    Of an inner reduction of ``rows`` rows of ``columns``, both static or as hinted, which
    reads at ``indices`` of variables that have ``ranges``.
    """
    if device.type != "cuda":
        return False
    idle = 1 - rows / (BUSY_SHARE * device.multi_processor_count)
    return columns * idle <= COLUMNS and all(
        spans(index, reduction_vars, ranges) <= columns for index in indices
    )


def spans(
    index: sympy.Expr,
    reduction_vars: Sequence[sympy.Symbol],
    ranges: Mapping[sympy.Symbol, sympy.Expr],
) -> int:
    """Elements from the first that a row reads at ``index`` to its last, both included."""
    sizevars = V.graph.sizevars
    strides = sizevars.stride_hints(
        sizevars.simplify_with_ranges(index, dict(ranges)),
        reduction_vars,
        list(ranges),
    )
    sizes = (
        sizevars.optimization_hint(ranges[variable], fallback=1)
        for variable in reduction_vars
    )
    return 1 + sum(abs(stride) * (size - 1) for stride, size in zip(strides, sizes))
