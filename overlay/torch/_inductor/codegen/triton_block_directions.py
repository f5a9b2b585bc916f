"""
The Triton kernel of block reductions along both dimensions of a matrix: `BlockDirections`.

A tile is loaded as it is, and what is computed of its values alone is computed for both. What is
computed of blocks of columns has the shape [rows, blocks, columns of a block], of blocks of rows
[blocks, rows of a block, columns]. A reduction keeps its dimension, so that what follows is
computed once a block. Where that meets values, they are reshaped; and stored as a tile again.
"""

from __future__ import annotations

import contextlib
from typing import Any, TYPE_CHECKING

import sympy
from typing_extensions import Self

import torch.utils._pytree as pytree

from ..ops_handler import WrapperHandler
from ..turned_results import codegen_turned
from ..utils import sympy_index_symbol, sympy_subs
from ..virtualized import V
from .common import CSEVariable, DeferredLine
from .simd_kernel_features import SIMDKernelFeatures
from .triton import (
    FixedTritonConfig,
    get_triton_reduction_function,
    TritonKernel,
    TritonScheduling,
)


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from ..block_directions import BlockDirections, Plan
    from ..scheduler import SchedulerNode
    from ..utils import IndentedBuffer
    from .simd import IterationRangesRoot, SIMDScheduling


TILE = ("YBLOCK", "XBLOCK")
# Of the shape by blocks, that of what goes along a block.
AXES = {"x": 2, "y": 1}
# The numbers of the blocks of a tile along x or y, and how they lie in it.
NUMBERS = {prefix: sympy_index_symbol(f"blocks_{prefix}") for prefix in "xy"}
TURNED = {"x": "[None, :]", "y": "[:, None]"}


class BlockDirectionsFeatures(SIMDKernelFeatures):
    def __init__(self, node: BlockDirections) -> None:
        matrix = node.plan.matrix
        super().__init__([*node.get_nodes()], sympy.Integer(matrix.rows * matrix.columns))
        self.plan = node.plan


class BlockDirectionsKernel(TritonKernel):
    plan: Plan

    def __init__(self, tiling: dict[str, sympy.Expr], **kwargs: Any) -> None:
        self.plan = plan = kwargs["features"].plan
        rows, columns = plan.tile
        config = {"YBLOCK": rows, "XBLOCK": columns}
        config |= {"num_warps": plan.num_warps, "num_stages": 1}
        super().__init__(tiling, **kwargs, fixed_config=FixedTritonConfig(config))
        self.current_along = "x"
        # by buffer, where the workspace has what is stored turned
        self.offsets: dict[str, sympy.Expr] = {}

    @property
    def along(self) -> str:
        """The dimension of the blocks of which the current node is computed."""
        return self.plan.along[self.current_node.get_name()]

    @property
    def is_of_blocks(self) -> bool:
        """Whether it has a value for each of them."""
        return self.current_node.get_name() in self.plan.of_blocks

    def shape(self, *, of_blocks: bool = False) -> tuple[int, ...]:
        """Of the values of a tile by blocks, or of a value for each block."""
        (rows, columns), block = self.plan.tile, self.plan.matrix.block(self.along)
        within = 1 if of_blocks else block
        if self.along == "x":
            return rows, columns // block, within
        return rows // block, within, columns

    def iteration_ranges_codegen_header(
        self, entry: IterationRangesRoot, code: IndentedBuffer
    ) -> None:
        """And the numbers of the blocks of a tile along it."""
        super().iteration_ranges_codegen_header(entry, code)
        prefix, block = entry.prefix, self.plan.matrix.block(entry.prefix)
        numbers = f"{prefix}offset // {block} + tl.arange(0, {prefix.upper()}BLOCK // {block})"
        code.writeline(f"{NUMBERS[prefix]} = ({numbers}){TURNED[prefix]}")

    def split_and_set_ranges(self, lengths: Any) -> list[list[sympy.Expr]]:
        (sizes, _), matrix = lengths, self.plan.matrix
        whole = [matrix.rows, matrix.columns]
        (y, x), none = super().split_and_set_ranges((whole, []))
        if [*sizes] == matrix.sizes("x"):
            return [[y, NUMBERS["x"]], none]
        if [*sizes] == matrix.sizes("y"):
            return [[NUMBERS["y"], x], none]
        assert [*sizes] == whole, sizes
        return [[y, x], none]

    def broadcast(self, value: CSEVariable, shape: Sequence[Any]) -> CSEVariable:
        if [*map(str, value.shape or ())] == [*map(str, shape)]:
            return value
        line = f"tl.broadcast_to({value}, {bracketed(shape)})"
        return self.cse.generate(
            self.compute, line, dtype=value.dtype, shape=tuple(shape)
        )

    def reshape(self, value: CSEVariable, shape: Sequence[Any]) -> CSEVariable:
        line = f"tl.reshape({value}, {bracketed(shape)})"
        return self.cse.generate(
            self.compute, line, dtype=value.dtype, shape=tuple(shape)
        )

    def by_blocks(self, value: CSEVariable) -> CSEVariable:
        """``value`` of a tile by its blocks; of a number, or by blocks, as it is."""
        if len(value.shape or ()) != len(TILE) or all(str(n) == "1" for n in value.shape):
            return value
        return self.reshape(self.broadcast(value, TILE), self.shape())

    @contextlib.contextmanager
    def set_current_node(self, node: SchedulerNode) -> Iterator[None]:
        """And store what is computed of blocks of columns before any of blocks of rows is."""
        with super().set_current_node(node):
            if self.along != self.current_along:
                # its values need no registers from here on
                self.codegen_body()
                self.current_along = self.along
            yield

    def __enter__(self) -> Self:
        super().__enter__()
        by_blocks = ByBlocks(V.get_ops_handler())
        self.exit_stack.enter_context(V.set_ops_handler(by_blocks))
        return self

    def reduction(
        self, dtype: torch.dtype, src_dtype: torch.dtype, reduction_type: Any, value: Any
    ) -> CSEVariable:
        axis = AXES[self.along]
        value = self.broadcast(self.by_blocks(value), self.shape())
        reduced = f"{get_triton_reduction_function(reduction_type)}({value}, {axis})"
        # keeps its dimension
        kept = ", ".join("None" if i == axis else ":" for i in range(3))
        shape = self.shape(of_blocks=True)
        return self.cse.generate(
            self.compute, f"{reduced}[{kept}]", dtype=value.dtype, shape=shape
        )

    def store(
        self, name: str, index: sympy.Expr, value: CSEVariable, mode: Any = None
    ) -> None:
        if self.is_of_blocks:
            return self.store_reduction(name, index, value)
        if len(value.shape or ()) == len(self.shape()):
            value = self.reshape(self.broadcast(value, self.shape()), TILE)
        return super().store(name, index, value, mode)

    def store_reduction(self, name: str, index: sympy.Expr, value: CSEVariable) -> None:
        """A value for each block, where ``index`` is by the numbers of blocks or by values."""
        along, block = self.along, self.plan.matrix.block(self.along)
        (tree,) = (each for each in self.range_trees if each.prefix == along)
        first = tree.lookup(sympy.S.One, tree.numel).symbol()
        if turned := self.plan.turned.get(name):
            (other,) = (each for each in self.range_trees if each is not tree)
            index = NUMBERS[along] * turned.sizes[1]
            index += other.lookup(sympy.S.One, other.numel).symbol()
            dtype = V.graph.get_dtype(name)
            pointer, _, self.offsets[name] = self.args.workspace(
                sympy.Integer(turned.numel), False, dtype
            )
            index += self.offsets[name]
        else:
            index, pointer = sympy_subs(index, {first: block * NUMBERS[along]}), None
        index = self.codegen_indexing(V.graph.sizevars.simplify(index))
        shape = self.shape(of_blocks=True)
        value = self.broadcast(value, shape)
        value = self.reshape(value, [n for i, n in enumerate(shape) if i != AXES[along]])
        masks = []
        for each in self.range_trees:
            if not self._has_constant_mask(each):
                number, size = NUMBERS[along], tree.numel // block
                inside = f"({number} < {size})" if each is tree else f"{each.prefix}mask"
                masks.append(inside)
        pointer = pointer or self.args.output(name)
        line = f"tl.store({pointer} + ({self.index_to_str(index)}), {value}"
        line += f", {' & '.join(masks) or None})"
        self.stores.writeline(DeferredLine(name, line))

    def call_kernel(self, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        # the kernels that turn what it has read the workspace
        super().call_kernel(name, node, deallocate_ws=False)


class ByBlocks(WrapperHandler):
    """Reshapes values of a tile where an operation has others by blocks."""

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, CSEVariable)]
        if any(len(v.shape or ()) > len(TILE) for v in given):
            by_blocks = V.kernel.by_blocks
            args, kwargs = pytree.tree_map_only(CSEVariable, by_blocks, (args, kwargs))
        return super()._default(name, args, kwargs)


def bracketed(shape: Sequence[Any]) -> str:
    return f"[{', '.join(map(str, shape))}]"


class BlockDirectionsScheduling(TritonScheduling):
    """Generates the kernel of one node, in place of ``scheduling``."""

    kernel_type = BlockDirectionsKernel  # type: ignore[assignment]

    def __init__(self, scheduling: SIMDScheduling, node: BlockDirections) -> None:
        super().__init__(None)
        self.scheduler = scheduling.scheduler
        self.scheduling, self.node = scheduling, node
        self.features = BlockDirectionsFeatures(node)

    def get_tiling_and_scores(self, *args: Any, **kwargs: Any) -> Any:
        matrix = self.features.plan.matrix
        sizes = {"y": matrix.rows, "x": matrix.columns}
        return {prefix: sympy.Integer(n) for prefix, n in sizes.items()}, None

    def create_kernel_choices(self, *args: Any, **kwargs: Any) -> list[Any]:
        (self.kernel,) = kernels = super().create_kernel_choices(*args, **kwargs)
        return kernels

    def codegen(self) -> None:
        """Generate the kernel and its call, and those that turn some of its results."""
        self.codegen_node_schedule(self.features)
        for arg in self.kernel.args.workspace_args:
            given = self.node.get_nodes(), self.features.plan.turned, arg, self.kernel.offsets
            codegen_turned(self.scheduling, *given)
        self.kernel.deallocate_workspaces()
