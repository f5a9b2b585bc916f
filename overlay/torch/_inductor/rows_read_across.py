"""
Rows that are read across, and programs of several of them.

Where adjacent elements of an input are of adjacent rows, as of a transposed bias, or each column
is gathered from a row of its own, the columns of a row are each in another sector of memory. A
program of one row loads a sector for every column, of which it uses an element. Those of the rows
beside it are in the same sectors: a program of several rows loads each once.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from . import ir
from .device_model import DeviceModel
from .mix_order_accesses import accessed_numel
from .row_accesses import has_reduction, loaded, moves_along_rows, WORD_BYTES
from .row_program import RowProgram
from .runtime.hints import DeviceProperties
from .runtime.registers import MAX_REGISTERS_PER_THREAD, THREADS_PER_WARP
from .runtime.runtime_utils import ceildiv, last_power_of_2, next_power_of_2
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.simd_kernel_features import SIMDKernelFeatures


# Rows of such a program, at most: those of a sector of float32. Twice as many are 0.97 to 1.09
# times as fast where the rows are short, and slower where they are long.
ROWS = 8
# With fewer, loops are as good.
LEAST_ROWS = 4
# Columns of a row that a thread has, the most that its registers have room for.
COLUMNS_PER_THREAD = (64, 32)
# Warps, at least; one has twice the columns, or half of the rows.
LEAST_WARPS = 2
# Programs of an SM, of which each has its share of the registers for what it loads.
PROGRAMS_PER_SM = 2


def rows_together(features: SIMDKernelFeatures) -> Optional[RowProgram]:
    """
    The program of rows, which are read across. None where one would not hold several, where there
    are too few for all SMs, and where a kernel scatters: its atomic additions to one sector wait
    for one another.
    """
    columns, rows = features.reduction_numel, features.numel
    device = DeviceProperties.create(V.graph.get_current_device_or_throw())
    if columns.free_symbols or device.type != "cuda":
        return None
    model = DeviceModel.of(device)
    if V.graph.sizevars.optimization_hint(rows) < ROWS * model.sms or scatters(features):
        return None
    padded, words = next_power_of_2(int(columns)), words_of_column(features)
    together = min(ROWS, model.registers_per_sm // (PROGRAMS_PER_SM * words * padded))
    held = [n for n in COLUMNS_PER_THREAD if n * words <= MAX_REGISTERS_PER_THREAD]
    if together < LEAST_ROWS or not held:
        return None
    together = last_power_of_2(together)
    warps = together * padded // (held[0] * THREADS_PER_WARP)
    return RowProgram(together, max(LEAST_WARPS, warps))


def scatters(features: SIMDKernelFeatures) -> bool:
    return any(
        isinstance(node.node, ir.ComputedBuffer) and isinstance(node.node.data, ir.Scatter)
        for node in features.scheduler_nodes()
    )


def words_of_column(features: SIMDKernelFeatures) -> int:
    """
    32-bit words that are loaded for a column, but for what all rows share; and one of what
    Welford's algorithm is computed of, which is kept for the deviations from its mean.
    """
    columns = features.reduction_numel
    words = int(has_reduction(features, "welford_reduce"))
    for dep in dict.fromkeys(loaded(features)):
        if dep.is_indirect() or (
            moves_along_rows(features, dep)
            and V.graph.sizevars.statically_known_gt(accessed_numel(dep), columns)
        ):
            words += ceildiv(V.graph.get_dtype(dep.name).itemsize, WORD_BYTES)
    return words
