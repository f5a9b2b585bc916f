"""
The programs of an inner reduction, persistent or looped, as the runtime is told of them; and what
codegen does for persistent ones: when they load what rows share, whether they mask rows, and how
they compute the mean of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, TYPE_CHECKING

from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from . import config
from .row_accesses import (
    has_rows_of_full_precision,
    reads_across_rows,
    unaligned_bytes,
)
from .runtime.hints import ReductionHint
from .runtime.launch_plan import LaunchPlan
from .vector_width import row_vectors
from .virtualized import ops, OpsWrapper, V


if TYPE_CHECKING:
    from collections.abc import Callable

    import sympy

    import torch

    from .codegen.common import CSEVariable
    from .codegen.triton import TritonKernel


# Columns of a row, at most, that upstream's persistent inner reductions pad as they are.
UPSTREAM_COLUMNS = 1024
# Columns beyond which rows have other programs (``wide_rows``).
WIDE_COLUMNS = 8192


class RowProgram(NamedTuple):
    """
    The rows of a program that holds them at once, and its warps.

    loads_late: whether what rows share is loaded where it is used, mostly after a reduction.
        ptxas does not move loads of one mask before others, so until they are used they have
        no registers
    unmasked: whether rows that all programs have are not masked, as they are not if loaded late
    sharing_programs: those that share the registers of an SM, of which a thread is told its share;
        0: it is not
    """

    rows: int
    num_warps: int
    loads_late: bool = False
    unmasked: bool = False
    sharing_programs: int = 0


def whole_rows(kernel: TritonKernel) -> Optional[int]:
    """
    The rows that all programs of ``kernel`` have, if their number is known to be a multiple: then
    none is masked. None where rows are masked, as where autotuning tries others, or a descriptor
    has more.
    """
    program = kernel.row_program()
    autotuned = (
        kernel.is_combo_kernel  # whose programs have the runtime's rows, as those have
        or kernel.cooperative_reduction
        or config.triton.use_tensor_descriptor
        or config.max_autotune
        or config.max_autotune_pointwise
        or config.coordinate_descent_tuning
    )
    if program is None or autotuned or not (program.loads_late or program.unmasked):
        return None
    return program.rows


def add_launch_plan(kernel: TritonKernel, inductor_meta: dict[str, Any]) -> None:
    """Tell the runtime of the programs of an inner reduction, if it is persistent."""
    if program := kernel.row_program():
        LaunchPlan(
            rows=program.rows,
            num_warps=program.num_warps,
            whole_programs=whole_rows(kernel) is not None,
            sharing_programs=program.sharing_programs,
        ).add_to(inductor_meta)


def match_vectors(kernel: TritonKernel, attributes: Any) -> None:
    """
    Have the compiler load what unaligned rows share as it loads the rows, by what ``attributes``
    say of the arguments. In as many columns a thread as an aligned operand could have, it has
    another layout: all rows of a tile go to that and back through shared memory, or one row has it
    too, and a warp's loads lie apart. Loops and rows of more than ``WIDE_COLUMNS`` were as often
    slower with this.
    """
    features = kernel.features
    if (
        kernel.persistent_reduction
        and not kernel.mix_order_reduction
        and features.get_reduction_hint(kernel.tiling_scores) == ReductionHint.INNER
        and V.graph.sizevars.statically_known_leq(features.reduction_numel, WIDE_COLUMNS)
        and not reads_across_rows(features)
        and unaligned_bytes(features)
    ):
        _, _, signature, _ = kernel.args.python_argdefs()
        row_vectors(attributes, signature, features)


def loads_late(kernel: TritonKernel, index: sympy.Expr) -> bool:
    """Whether ``kernel`` loads a value of each column alone by ``index``, where it is used."""
    program = kernel.row_program()
    return (
        program is not None
        and program.loads_late
        and free_symbol_is_type(index, SymT.R0_INDEX)
        and not free_symbol_is_type(index, SymT.XBLOCK)
    )


def welford_of_rows(
    kernel: TritonKernel, dtype: torch.dtype, value: CSEVariable, two_sums: Callable[..., Any]
) -> tuple[CSEVariable, ...]:
    """
    Mean, sum of squared deviations and number of columns of each row of ``value``, as a
    persistent kernel computes them: by ``two_sums`` of ``(dtype, value)``, or by three.

    A thread adds its columns one after the other, so of a long row of equal values the mean is
    off by several units in the last place. A norm multiplies that by up to 300, the root of its
    epsilon, and a loop's Welford mean is exact there. What is left of the row has a mean
    that says by how much. Half types do not show it.
    """
    columns = kernel.features.reduction_numel
    if (
        kernel.mix_order_reduction
        or V.graph.sizevars.statically_known_leq(columns, UPSTREAM_COLUMNS)
        or not has_rows_of_full_precision(kernel.features)
    ):
        return two_sums(dtype, value)

    def mean_of(value: CSEVariable) -> CSEVariable:
        total = ops.reduction(dtype, dtype, "sum", value)
        kernel.inside_reduction = False
        quotient = ops.truediv(total, ops.index_expr(columns, dtype))
        kernel.inside_reduction = True
        return quotient

    mean = mean_of(value)
    rest = mean_of(ops.sub(value, mean))
    kernel.inside_reduction = False
    mean = ops.add(mean, rest)
    rnumel = ops.index_expr(columns, dtype)
    kernel.inside_reduction = True
    deviation = ops.sub(value, mean)
    square = ops.mul(deviation, deviation)
    deviations = ops.reduction(dtype, dtype, "sum", square)
    return OpsWrapper._unwrap((mean, deviations, rnumel))
