"""
The Triton kernel of a reduction over blocks, with the tile that its coalescing analysis chose.

It is persistent where there is such a tile. A ``YFirstTile`` has its programs go along y, and
only then along x; with an ``AsReadTile`` rows are loaded before tiles.
"""

from __future__ import annotations

import functools
from typing import Optional, TYPE_CHECKING, Union

from ..as_read_tile import AsReadTile, is_row
from ..block_reduction_order import YFirstTile
from ..runtime import triton_heuristics
from ..vector_width import limit_alignment
from ..virtualized import V
from .triton import IndexingOptions, TritonKernel


if TYPE_CHECKING:
    from ..block_reduction_tile import BlockReductionTile
    from ..row_program import RowProgram
    from ..utils import IndentedBuffer
    from .simd import IterationRangesRoot
    from .triton import BlockDescriptorOptions


class BlockReductionKernel(TritonKernel):
    @functools.cached_property
    def block_reduction_tile(self) -> Optional[BlockReductionTile]:
        return V.choices.block_reduction_tile(self.features, self.tiling)

    @property
    def y_first(self) -> bool:
        return (
            self.persistent_reduction
            and not self.is_combo_kernel
            and isinstance(self.block_reduction_tile, YFirstTile)
        )

    def row_program(self) -> Optional[RowProgram]:
        # what reads and writes across the rows has a tile of them
        is_tiled = isinstance(self.block_reduction_tile, AsReadTile)
        return None if is_tiled else super().row_program()

    def should_use_persistent_reduction(self) -> bool:
        if self.inside_reduction and self.block_reduction_tile is not None:
            return True
        return super().should_use_persistent_reduction()

    def _get_grid_type(self) -> type[triton_heuristics.GridExpr]:
        return triton_heuristics.YFirstGrid if self.y_first else super()._get_grid_type()

    def iteration_ranges_get_pid(self, entry: IterationRangesRoot) -> str:
        if not self.y_first:
            return super().iteration_ranges_get_pid(entry)
        op = {"y": "%", "x": "//"}[entry.prefix]
        pid = f"(tl.program_id(0) {op} tl.cdiv(ynumel, YBLOCK))"
        return pid if self.index_dtype == "tl.int32" else f"{pid}.to({self.index_dtype})"

    def needs_yz_grid_overflow(self, entry: IterationRangesRoot) -> bool:
        return not self.y_first and super().needs_yz_grid_overflow(entry)

    def _has_constant_mask(self, tree: IterationRangesRoot) -> bool:
        if super()._has_constant_mask(tree):
            return True
        # y is of an axis without a limit
        return (
            self.y_first
            and self.optimize_mask
            and tree.grid_dim == 1
            and V.graph.sizevars.statically_known_multiple_of(
                tree.numel, self.max_block(tree.prefix)
            )
        )

    @property
    def tile_in_reduction(self) -> Optional[BlockReductionTile]:
        """The tile, while a persistent reduction is written."""
        if not (self.inside_reduction and self.persistent_reduction):
            return None
        return self.block_reduction_tile

    def get_load_buffer(
        self, indexing: Union[IndexingOptions, BlockDescriptorOptions]
    ) -> IndentedBuffer:
        buffer = super().get_load_buffer(indexing)
        rows_first = (
            buffer is self.loads
            and isinstance(self.tile_in_reduction, AsReadTile)
            and isinstance(indexing, IndexingOptions)
            and is_row(indexing)
        )
        return self.indexing_code if rows_first else buffer

    def _get_heuristic(self) -> str:
        # codegen_kernel asks when all that is in these two is there, and writes them then
        if self.triton_meta and self.inductor_meta and (tile := self.tile_in_reduction):
            tile.launch_plan().add_to(self.inductor_meta)
            _, _, signature, _ = self.args.python_argdefs()
            limit_alignment(self.triton_meta["configs"][0], signature, tile.alignment)
        return super()._get_heuristic()
