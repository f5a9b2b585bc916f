"""
Programs of several short rows, of up to 1024 columns, with as many columns a thread as the
runtime's have.

An SM begins and ends a program of one warp no faster than others wait for their loads, so rows of
few bytes, as of a sum of bf16 that stores none, wait for that instead of memory. Where the rows of
the runtime's program have fewer bytes than an SM moves meanwhile, a program has several times as
many rows, and warps.

Rows of 192 to 255 columns that compute functions have half of the runtime's four, in one warp.

Where a warp each of about 1024 columns leaves an SM room for more, as of 2048 rows, two warps have
a row: half of the columns wait for one another.
"""

from __future__ import annotations

import math
from typing import Optional, TYPE_CHECKING

from .device_model import DeviceModel
from .row_accesses import bytes_of_row, has_whole_vectors, SCANS_AND_SORTS, unaligned_bytes
from .row_program import RowProgram, UPSTREAM_COLUMNS
from .runtime.hints import DeviceProperties
from .runtime.runtime_utils import next_power_of_2
from .virtualized import V


if TYPE_CHECKING:
    import sympy

    from .codegen.simd_kernel_features import SIMDKernelFeatures
    from .persistent_reduction import Loops


# The runtime (``_persistent_reduction_configs``) tunes rows of fewer columns than the first, and
# has a warp for ``UPSTREAM_COLUMNS`` of others, if there are no fewer rows than the second.
TUNED_COLUMNS, RUNTIME_ROWS = 256, 1024
# Columns of a row, unaligned or of full precision, at least, whose function of each element makes
# the runtime's four rows of a warp wait longer than two.
LEAST_PAIRED = 192
# Programs of an SM, at least, that wait for one another to begin.
LEAST_PROGRAMS = 16
# Warps of a program, at most.
MOST_WARPS = 8
# Columns, as a share of ``UPSTREAM_COLUMNS``, of which two warps wait less than one. Of fewer they
# wait as long for each other.
TWO_WARPS_SHARE = 3 / 4


def may_be_paired(features: SIMDKernelFeatures) -> bool:
    """Whether rows have as many columns as pairs, and are unaligned or in whole vectors."""
    sizevars, columns = V.graph.sizevars, features.reduction_numel
    return (
        sizevars.statically_known_geq(columns, LEAST_PAIRED)
        and sizevars.statically_known_leq(columns, TUNED_COLUMNS - 1)
        and (unaligned_bytes(features) > 0 or has_whole_vectors(features))
    )


def pair_of(row: Loops, rows: sympy.Expr) -> Optional[RowProgram]:
    """Two of ``rows``; None where the runtime's are as good."""
    is_short = LEAST_PAIRED <= row.rnumel < TUNED_COLUMNS
    computes = row.functions and (row.is_half_unaligned or row.is_words)
    many = V.graph.sizevars.statically_known_geq(rows, RUNTIME_ROWS)
    return RowProgram(2, 1) if is_short and computes and many else None


def several_rows(features: SIMDKernelFeatures) -> Optional[RowProgram]:
    """Those of a program that an SM begins in the time of their bytes, or one of few rows; None
    where the runtime's are, or nothing is known of it, or more than bytes takes the time."""
    properties = DeviceProperties.create(V.graph.get_current_device_or_throw())
    device = DeviceModel.of(properties)
    columns, rows = features.reduction_numel, features.numel
    if not (columns.is_Integer and device.memory_GBs):
        return None
    if any(map(features.contains_op, SCANS_AND_SORTS)):
        return None
    padded = next_power_of_2(int(columns))
    if not TUNED_COLUMNS <= padded <= UPSTREAM_COLUMNS:
        return None
    of_a_warp = UPSTREAM_COLUMNS // padded
    least = max(RUNTIME_ROWS, LEAST_PROGRAMS * device.sms * of_a_warp)
    sizevars = V.graph.sizevars
    if not sizevars.statically_known_geq(rows, least):
        has_one_warp = sizevars.statically_known_gt(rows, RUNTIME_ROWS // 2)
        is_few = has_one_warp and sizevars.statically_known_lt(rows, least)
        is_wide = columns > TWO_WARPS_SHARE * UPSTREAM_COLUMNS
        return RowProgram(1, 2) if is_wide and is_few else None
    stats = features.memory_stats().persistent
    row_bytes = sum(bytes_of_row(each.dim[-1]) for each in (stats.reads, stats.writes))
    moved = device.program_ns * device.memory_GBs * device.row_share / device.sms
    program_bytes = of_a_warp * row_bytes * int(columns)
    if program_bytes == 0:
        return None
    warps = min(next_power_of_2(math.ceil(moved / program_bytes)), MOST_WARPS)
    return RowProgram(warps * of_a_warp, warps) if warps > 1 else None
