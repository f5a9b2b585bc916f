"""
Block reductions along both dimensions of a matrix, as one kernel.

Training in a block-scaled format casts a matrix by blocks of its rows for one product, and by
blocks of its columns, transposed, for another. Each cast is a kernel that reads all of the
matrix. Their loops have nothing in common but the matrix, so they are not fused.

Here each node of both kernels gets loops over the matrix, or over its blocks, and the kernel
has a tile of it that holds whole blocks along both dimensions: it is read once, and what is
stored along either dimension is contiguous in that store.

This is done when all other fusion is done, of what would be two kernels otherwise.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet

from .block_matrix import COLUMN, COLUMN_BLOCK, Matrix, ROW, ROW_BLOCK
from .block_reduction_loops import accessed, count_as, split_loops, Strides, with_loops
from .block_reduction_tile import tiles_blocks
from .loop_body import LoopBody
from .scheduler import FusedSchedulerNode, SchedulerNode
from .sizevars import join_dimensions
from .turned_results import of_one_dtype, Turned, turned_results
from .upstream_names import place_as, why_kept_apart
from .utils import get_dtype_size, sympy_product, sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .codegen.simd import SIMDScheduling
    from .scheduler import BaseSchedulerNode, Scheduler


# Rows and columns of a tile: where no result has more than a byte; long rows where rows or
# columns share a value; others. Of seven tiles and two orders of programs the last two gain on
# an H100, or lose 1.5 % at most, and the first takes 0.86 to 0.99 of the second's time on an
# H200. With more values or less a thread, or more rows, a tile changes its layout through more
# shared memory, and is up to twice as slow.
BYTE_TILE, LONG_TILE, SQUARE_TILE = (32, 64), (32, 128), (64, 64)
VALUES_PER_WARP = 64 * 32
# Of shorter blocks and longer ones one kernel takes as long as two, or up to twice.
BLOCKS = (32, 64)
REDUCTIONS = OrderedSet(["max", "min", "sum"])
# Operations on values alone, and accesses, are those of which a tile may have another shape.
NOT_OF_VALUES = OrderedSet(
    [
        "bucketize",
        "device_assert_async",
        "frexp",
        "index_expr",
        "indirect_indexing",
        "inline_asm_elementwise",
        "load_seed",
        "masked",
        "masked_subblock",
        "partial_accumulate",
        "rand",
        "randint64",
        "randn",
        "scan",
        "sort",
    ]
)
# What else is computed before a reduction, as a slow function, Triton computes again in each
# layout rather than change it: with results of more than a byte two kernels are faster.
ARITHMETIC = OrderedSet(
    [
        "abs",
        "add",
        "constant",
        "get_index",
        "load",
        "maximum",
        "minimum",
        "mul",
        "neg",
        "output",
        "reduction",
        "square",
        "store",
        "store_reduction",
        "sub",
        "to_dtype",
    ]
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """
    matrix: that a kernel goes over
    along: by the name of each of its nodes: "x" where its blocks are of columns, "y" of rows
    of_blocks: the names of those that have a value for each block
    tile: rows and columns of a program
    turned: by buffer, the results that a second kernel turns
    """

    matrix: Matrix
    along: dict[str, str]
    of_blocks: OrderedSet[str]
    tile: tuple[int, int]
    turned: dict[str, Turned]

    @property
    def num_warps(self) -> int:
        (rows, columns) = self.tile
        return rows * columns // VALUES_PER_WARP


class BlockDirections(FusedSchedulerNode):
    """The nodes of two kernels, with loops by ``plan``."""

    plan: Plan

    @classmethod
    def create(
        cls, scheduler: Scheduler, plan: Plan, bodies: dict[SchedulerNode, LoopBody]
    ) -> BlockDirections:
        for node, body in bodies.items():
            node._body, node._sizes = body, body.sizes
        found = cls(scheduler, [*bodies])
        found.plan = plan
        return found

    def codegen_kernel(self, scheduling: SIMDScheduling) -> None:
        # which needs nodes of the scheduler
        from .codegen.triton_block_directions import BlockDirectionsScheduling

        BlockDirectionsScheduling(scheduling, self).codegen()


def reductions_of(node: BaseSchedulerNode) -> list[SchedulerNode]:
    """The block reductions of a kernel that may go with those of another; or none."""
    nodes = node.get_nodes()
    if (
        type(node) not in (SchedulerNode, FusedSchedulerNode)
        or not node.is_reduction()
        or node.has_aliasing_or_mutation()
        or not all(isinstance(getattr(each, "_body", None), LoopBody) for each in nodes)
        or any(each._body.has_op(op) for each in nodes for op in NOT_OF_VALUES)
    ):
        return []
    found = [each for each in nodes if each.is_reduction()]
    for each in found:
        (_, block) = each.group[1]
        if not (
            each.node.get_reduction_type() in REDUCTIONS
            and len(each._body.reduce_vars) == 1
            and tiles_blocks(each.get_device(), block)
            and block in BLOCKS
        ):
            return []
    return found


def matrices_of(
    columns: SchedulerNode, rows: SchedulerNode
) -> Iterator[tuple[str, Strides, Matrix]]:
    """
    The tensors of which ``columns`` may reduce blocks of columns, and ``rows`` of rows, with
    their strides by `Matrix.ranges`. Columns are adjacent, and sizes are static. One that is
    read as it is and transposed, as a square one that is made symmetric, may be each.
    """
    columns_body, rows_body = (split_loops(each._body) for each in (columns, rows))
    (column,), (row,) = columns_body.reduce_vars, rows_body.reduce_vars
    for (name, of_columns), (other, of_rows) in itertools.product(
        reads_of_all(columns_body), reads_of_all(rows_body)
    ):
        stride = of_rows.strides[row]
        if name != other or of_columns.strides[column] != 1 or stride <= 1:
            continue
        size = int(
            sympy_product(
                n for v, n in of_rows.ranges.items() if 0 < of_rows.strides[v] < stride
            )
        )
        numel = int(sympy_product(of_rows.ranges.values()))
        row_block, column_block = int(of_rows.ranges[row]), int(of_columns.ranges[column])
        if (
            numel != sympy_product(of_columns.ranges.values())
            or size % column_block
            or numel % (size * row_block)
        ):
            continue
        matrix = Matrix(numel // size, size, row_block, column_block)
        strides = {
            ROW_BLOCK: row_block * stride,
            ROW: stride,
            COLUMN_BLOCK: sympy.Integer(column_block),
            COLUMN: sympy.S.One,
        }
        yield name, Strides(of_columns.start, strides, matrix.ranges), matrix


def reads_of_all(body: LoopBody) -> list[tuple[str, Strides]]:
    """What ``body`` reads at the index of all values, by numbers alone."""
    return [
        (name, at)
        for name, at in strides_of(body)
        if at is not None and 0 not in at.strides.values() and is_static(at)
    ]


def is_static(found: Strides) -> bool:
    """Whether all sizes and strides are numbers, and none is negative."""
    numbers = map(sympy.sympify, [*found.strides.values(), *found.ranges.values()])
    return all(n.is_Integer and n >= 0 for n in numbers)


def strides_of(body: LoopBody) -> list[tuple[str, Optional[Strides]]]:
    """What ``body`` reads, with its strides, if it has any."""
    return [
        (name, Strides.of(index, body.var_ranges))
        for name, index, is_write in accessed(body)
        if not is_write
    ]


@dataclasses.dataclass
class Direction:
    """
    The nodes of one of the kernels, as they are given loops over ``matrix``.

    along: "x" where its blocks are of columns, "y" where they are of rows
    known: by buffer, the strides with which it is read or written by `Matrix.ranges`
    bodies: with their loops
    of_blocks: nodes that have a value for each block
    """

    matrix: Matrix
    along: str
    known: dict[str, Strides]
    bodies: dict[SchedulerNode, LoopBody] = dataclasses.field(default_factory=dict)
    of_blocks: OrderedSet[str] = dataclasses.field(default_factory=OrderedSet)
    written: dict[str, sympy.Expr] = dataclasses.field(default_factory=dict)

    @property
    def within(self) -> sympy.Symbol:
        """What goes along a block."""
        return COLUMN if self.along == "x" else ROW

    @property
    def results(self) -> dict[SchedulerNode, Strides]:
        """The nodes that have one for each block, with where it is stored."""
        found = {}
        for node in self.bodies:
            (name, *_) = node.get_buffer_names()
            of_blocks = node.is_reduction() or node.get_name() in self.of_blocks
            if of_blocks and (at := self.known.get(name)) and is_static(at):
                found[node] = at
        return found

    def add(self, node: SchedulerNode) -> bool:
        """Whether ``node`` is computed of the same blocks."""
        matrix, numel = self.matrix, sympy_product(node.group[1])
        whole = numel == matrix.rows * matrix.columns
        blocks = sympy_product(matrix.sizes(self.along))
        if not whole and (numel != blocks or node.is_reduction()):
            return False
        body = split_loops(node._body)
        for found in self.variables(body, whole):
            # a reduction is of blocks of this direction, and not of the other one
            if any(found[v] != self.within for v in body.reduce_vars):
                continue
            indices = [
                (name, sympy.expand(sympy_subs(index, found)), is_write)
                for name, index, is_write in accessed(body)
            ]
            if all(is_write or self.reads(name, at, whole) for name, at, is_write in indices):
                break
        else:
            return False
        for name, at, is_write in indices:
            if is_write:
                self.written[name] = at
                ranges = matrix.ranges
                if not whole:
                    del ranges[self.within]
                strides = Strides.of(at, ranges)
                if strides is not None:
                    self.known[name] = strides
        self.bodies[node] = self.with_loops(body, found, whole)
        if not whole:
            self.of_blocks.add(node.get_name())
        return True

    def reads(self, name: str, at: sympy.Expr, whole: bool) -> bool:
        """Whether what is read there is there in this kernel, or before it."""
        if name in self.written:
            # of the same value
            return sympy.expand(at - self.written[name]) == 0
        return whole or not at.free_symbols

    def variables(
        self, body: LoopBody, whole: bool
    ) -> Iterator[dict[Any, sympy.Expr]]:
        """Those of ``body`` by `Matrix.ranges`, by each of what it reads that is known."""
        for name, mine in strides_of(body):
            known = self.known.get(name)
            if mine is None or known is None:
                continue
            # a value of a block is of no value in it
            of_blocks = known.strides.get(self.within, 0) == 0
            if of_blocks == whole:
                continue
            if not whole:
                strides = {v: s for v, s in known.strides.items() if v != self.within}
                ranges = {v: known.ranges[v] for v in strides}
                known = Strides(known.start, strides, ranges)
            found = count_as(mine, known)
            if found is not None and all(v in found for v in body.var_ranges):
                yield found

    def with_loops(
        self, body: LoopBody, found: dict[Any, sympy.Expr], whole: bool
    ) -> LoopBody:
        matrix = self.matrix
        sizes = [matrix.rows, matrix.columns] if whole else matrix.sizes(self.along)

        def reindex(iter_vars: Any, reduce_vars: Any) -> Any:
            y, x = iter_vars
            pieces = matrix.pieces(y, x, None if whole else self.along)
            return [
                [join_dimensions(sympy.expand(sympy_subs(found[v], pieces))) for v in each]
                for each in (body.iter_vars, body.reduce_vars)
            ]

        new = with_loops(body, (sizes, []), reindex)
        new.indexing_exprs = {
            name: join_dimensions(sympy.expand(index))
            for name, index in new.indexing_exprs.items()
        }
        return new


def both_directions(
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    columns: SchedulerNode,
    rows: SchedulerNode,
) -> Optional[tuple[Plan, dict[SchedulerNode, LoopBody]]]:
    """
    How a kernel computes ``node1`` by blocks of columns, which its node ``columns`` reduces,
    and ``node2`` by blocks of rows, as ``rows`` does; or None.
    """
    for name, strides, matrix in matrices_of(columns, rows):
        if (tile := tile_of(matrix, node1, node2)) is None:
            continue
        if found := planned(node1, node2, {name: strides}, matrix, tile):
            return found
    return None


def planned(
    node1: BaseSchedulerNode,
    node2: BaseSchedulerNode,
    known: dict[str, Strides],
    matrix: Matrix,
    tile: tuple[int, int],
) -> Optional[tuple[Plan, dict[SchedulerNode, LoopBody]]]:
    """The plan of both nodes by ``known``, what both read of ``matrix``, if they follow it."""
    bodies: dict[SchedulerNode, LoopBody] = {}
    of_blocks: OrderedSet[str] = OrderedSet()
    along: dict[str, str] = {}
    turned: dict[str, Turned] = {}
    names = node1.get_operation_names() | node2.get_operation_names()
    for prefix, node in (("x", node1), ("y", node2)):
        direction = Direction(matrix, prefix, {**known})
        if not all(direction.add(each) for each in node.get_nodes()):
            return None
        bodies |= direction.bodies
        of_blocks |= direction.of_blocks
        along |= dict.fromkeys((each.get_name() for each in direction.bodies), prefix)
        turned |= turned_results(matrix, prefix, tile, direction.results, names)
    return Plan(matrix, along, of_blocks, tile, of_one_dtype(turned)), bodies


def before_reductions(node: BaseSchedulerNode) -> list[LoopBody]:
    """Of what a kernel reduces, and computes to reduce it."""
    nodes = node.get_nodes()
    reduced = OrderedSet(
        dep.name for each in nodes if each.is_reduction() for dep in each.read_writes.reads
    )
    return [
        each._body
        for each in nodes
        if each.is_reduction() or each.get_buffer_names() & reduced
    ]


def tile_of(
    matrix: Matrix, node1: BaseSchedulerNode, node2: BaseSchedulerNode
) -> Optional[tuple[int, int]]:
    """
    Rows and columns of the tile of a kernel of both nodes, of which ``node2`` stores along the
    rows; or None where the blocks have more of them, the matrix less, or two kernels are faster.
    """
    scheduler, numel = node1.scheduler, matrix.rows * matrix.columns
    names = node1.get_operation_names() | node2.get_operation_names()
    stored = (
        name
        for each in node2.get_nodes()
        if not each.is_reduction() and sympy_product(each.group[1]) == numel
        for name in each.get_buffer_names()
    )
    itemsizes = [
        get_dtype_size(V.graph.get_dtype(name))
        for name in stored
        if not scheduler.can_buffer_be_removed_through_fusion(name, names)
    ]
    tile, bodies = BYTE_TILE, before_reductions(node1) + before_reductions(node2)
    if max(itemsizes, default=1) > 1:
        if any(body.op_counts.keys() - ARITHMETIC for body in bodies):
            return None
        shared = any(reads_shared(body, numel) for body in bodies)
        tile = LONG_TILE if shared else SQUARE_TILE
    blocks, sizes = (matrix.row_block, matrix.column_block), (matrix.rows, matrix.columns)
    return tile if all(b <= n <= size for b, n, size in zip(blocks, tile, sizes)) else None


def reads_shared(body: LoopBody, numel: int) -> bool:
    """Whether ``body``, of ``numel`` values, reads one for several of them, not for all."""
    elements = (
        sympy_product(n for v, n in body.var_ranges.items() if v in index.free_symbols)
        for _, index, is_write in accessed(body)
        if not is_write
    )
    return any(1 < n < numel for n in elements)


def may_fuse(
    scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, matrix: Matrix
) -> bool:
    """
    Whether both nodes, which share ``matrix``, may be one by what upstream asks of others:
    the memory that is held for longer, and how far apart they are.
    """
    if why_kept_apart(scheduler, node1, node2):
        return False
    given = (scheduler, node1, node2, matrix.rows * matrix.columns)
    return V.choices.can_fuse(*given) and V.choices.can_fuse_horizontal(*given)


def fuse_directions(
    scheduler: Scheduler, nodes: Sequence[BaseSchedulerNode]
) -> list[BaseSchedulerNode]:
    """``nodes``, with one for two that reduce blocks along both dimensions of a matrix."""
    left = [*nodes]
    candidates = [(node, each[0]) for node in left if (each := reductions_of(node))]
    for (node1, columns), (node2, rows) in itertools.permutations(candidates, 2):
        if (
            node1 not in left
            or node2 not in left
            or node1.get_device() != node2.get_device()
            or not node1.used_buffer_names() & node2.used_buffer_names()
            or node1.get_operation_names() & node2.ancestors
            or node2.get_operation_names() & node1.ancestors
            or (found := both_directions(node1, node2, columns, rows)) is None
            or scheduler.will_fusion_create_cycle(node1, node2)
            or not may_fuse(scheduler, node1, node2, found[0].matrix)
        ):
            continue
        both = BlockDirections.create(scheduler, *found)
        scheduler.name_to_fused_node.update(
            (each.get_name(), both) for each in both.get_nodes()
        )
        place_as(scheduler, both, node1)
        left[left.index(node1)] = both
        left.remove(node2)
    return left if len(left) == len(nodes) else scheduler.topological_sort_schedule(left)
