"""
The programs of a persistent inner reduction, and what codegen does for them: when they load what
rows share, and whether they mask rows.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, TYPE_CHECKING

from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from . import config


if TYPE_CHECKING:
    import sympy

    from .codegen.triton import TritonKernel


class RowProgram(NamedTuple):
    """
    The rows of a program that holds them at once, and its warps.

    loads_late: whether what rows share is loaded where it is used, mostly after a reduction,
        and rows that all programs have are not masked. ptxas does not move loads of one mask
        before others, so until they are used they have no registers
    """

    rows: int
    num_warps: int
    loads_late: bool = False


def whole_rows(kernel: TritonKernel) -> Optional[int]:
    """
    The rows that all programs of ``kernel`` have, if their number is known to be a multiple: then
    none is masked. None where rows are masked, as where autotuning tries others.
    """
    program = kernel.row_program()
    autotuned = (
        config.max_autotune
        or config.max_autotune_pointwise
        or config.coordinate_descent_tuning
    )
    return program.rows if program and program.loads_late and not autotuned else None


def loads_late(kernel: TritonKernel, index: sympy.Expr) -> bool:
    """Whether ``kernel`` loads a value of each column alone by ``index``, where it is used."""
    program = kernel.row_program()
    return (
        program is not None
        and program.loads_late
        and free_symbol_is_type(index, SymT.R0_INDEX)
        and not free_symbol_is_type(index, SymT.XBLOCK)
    )
