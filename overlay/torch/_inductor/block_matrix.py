"""A matrix whose rows and columns are in blocks: its indices, by either or by both."""

from __future__ import annotations

import dataclasses
from typing import Optional

import sympy

from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from .utils import sympy_index_symbol


# A matrix of [rows, columns] by its blocks: the block of a row, the row of a block, the block
# of a column, and the column of a block.
ROW_BLOCK, ROW, COLUMN_BLOCK, COLUMN = (
    sympy_index_symbol(name) for name in ("row_block", "row", "column_block", "column")
)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """
    What both kernels read, of ``rows`` of ``columns``, which are in blocks of ``row_block``
    rows for the one and of ``column_block`` columns for the other.
    """

    rows: int
    columns: int
    row_block: int
    column_block: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def ranges(self) -> dict[sympy.Symbol, int]:
        return {
            ROW_BLOCK: self.rows // self.row_block,
            ROW: self.row_block,
            COLUMN_BLOCK: self.columns // self.column_block,
            COLUMN: self.column_block,
        }

    def block(self, along: str) -> int:
        """The size of a block of columns, ``along`` "x", or of rows, along "y"."""
        return self.column_block if along == "x" else self.row_block

    def sizes(self, along: str) -> list[int]:
        """Of loops over the blocks along "x" or "y"."""
        if along == "x":
            return [self.rows, self.columns // self.column_block]
        return [self.rows // self.row_block, self.columns]

    def pieces(
        self, y: sympy.Expr, x: sympy.Expr, blocks: Optional[str] = None
    ) -> dict[sympy.Symbol, sympy.Expr]:
        """
        `ranges`' symbols of row ``y`` and column ``x``; of ``blocks`` along "x" or "y" this
        one is the number of the block.
        """
        found = {
            ROW_BLOCK: FloorDiv(y, self.row_block),
            ROW: ModularIndexing(y, 1, self.row_block),
            COLUMN_BLOCK: FloorDiv(x, self.column_block),
            COLUMN: ModularIndexing(x, 1, self.column_block),
        }
        if blocks == "x":
            found |= {COLUMN_BLOCK: x, COLUMN: sympy.S.Zero}
        if blocks == "y":
            found |= {ROW_BLOCK: y, ROW: sympy.S.Zero}
        return found
