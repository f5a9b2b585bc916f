"""
Block reductions of a tensor along both of its dimensions, in one kernel.

Training in block-scaled formats casts a matrix in blocks of its rows, and in blocks of its
columns transposed. Each is a kernel that reads the matrix. The kernel of the columns has a
``BlockReductionTile`` of [blocks of rows, columns, rows of a block]: its lanes lie along the
columns, and a tile has whole blocks of these too. So it can reduce them as well, by a
reshape of the tile in registers and shuffles within a warp, and write both results.

In that kernel the nodes of the rows have the loops of what is reduced of the columns:
``y``, ``x`` and ``r0_``. A reduction of theirs is one of each ``across`` values along ``x``,
and gives its result to all of them; what has a value a block is stored by the first.
"""

from __future__ import annotations

import math
from typing import Any, Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

from . import config, dependencies
from .block_reduction_loops import accessed, AcrossBody, count_as, main_read, Strides
from .block_reduction_tile import LANE_BYTES, may_have_tile, tile_of
from .device_model import DeviceModel
from .loop_body import LoopBody
from .runtime.hints import _NUM_THREADS_PER_WARP, DeviceProperties
from .tiling_utils import analyze_memory_coalescing
from .utils import get_dtype_size, sympy_product, sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from .scheduler import BaseSchedulerNode, Scheduler


# What is reduced by shuffles to the bits that any other order gives.
REDUCTIONS = OrderedSet(["max", "min"])
# Issue slots of a step of a reduction between lanes: a shuffle goes at a quarter of the
# rate of other instructions, and one of these follows.
SHUFFLE_SLOTS = 5


class Directions:
    """
    The loops of a block reduction of columns, and how nodes of rows are counted by them.

    node: the reduction of columns, of loops [blocks of rows, columns] and [rows of a block]
    across: columns of a block of rows
    """

    def __init__(self, node: Any, across: sympy.Expr) -> None:
        body = node._body
        self.sizes = [*body.sizes[0], *body.sizes[1]]
        self.across = across
        u = sympy.symbols("u0:4", integer=True, nonnegative=True)
        self.rows, self.blocks, self.column, self.row = u
        rows, columns, block = self.sizes
        self.ranges = {
            self.rows: rows,
            self.blocks: FloorDiv(columns, across),
            self.column: across,
            self.row: block,
        }
        self.known: dict[str, list[Strides]] = {}

    def know(self, name: str, index: sympy.Expr, blocks: bool = False) -> None:
        """``index`` of buffer ``name``, which has a value of ``blocks`` or of elements."""
        left_out = [self.column] if blocks else []
        ranges = {v: n for v, n in self.ranges.items() if v not in left_out}
        if (found := Strides.of(index, ranges)) is not None:
            self.known.setdefault(name, []).append(found)

    def variables_of(self, body: LoopBody) -> Optional[dict[Any, sympy.Expr]]:
        """The variables of ``body`` by those of these loops, by a buffer that both read."""
        numel = sympy_product(body.var_ranges.values())
        for name, index, is_write in accessed(body):
            mine = Strides.of(index, body.var_ranges)
            if is_write or mine is None:
                continue
            for other in self.known.get(name, ()):
                same = V.graph.sizevars.statically_known_equals(
                    sympy_product(other.ranges.values()), numel
                )
                if same and (found := count_as(mine, other)) is not None:
                    return found
        return None

    def index(self, index: sympy.Expr, variables: Any) -> sympy.Expr:
        """``index`` of these variables by the three of the kernel's loops."""
        rows, columns, row = variables
        found = Strides.of(index, self.ranges)
        if found is not None and V.graph.sizevars.statically_known_equals(
            found.strides[self.blocks], found.strides[self.column] * self.across
        ):
            strides = found.strides
            return (
                found.start
                + rows * strides[self.rows]
                + columns * strides[self.column]
                + row * strides[self.row]
            )
        return sympy_subs(
            index,
            {
                self.rows: rows,
                self.blocks: FloorDiv(columns, self.across),
                self.column: ModularIndexing(columns, 1, self.across),
                self.row: row,
            },
        )

    def body_of(self, body: LoopBody) -> Optional[AcrossBody]:
        """``body`` of a node of rows with the loops of the columns."""
        if body.subblocks or body.indirect_vars:
            return None
        found = self.variables_of(body)
        if found is None:
            return None
        of_blocks = bool(body.reduce_vars) or not any(
            self.column in e.free_symbols for e in found.values()
        )
        (iter_vars, _), ranges = dependencies.index_vars_no_squeeze(
            self.sizes, [], prefix="p"
        )
        by_loops = {v: self.index(e, iter_vars) for v, e in found.items()}
        new = AcrossBody(
            body,
            [
                [by_loops[v] for v in body.iter_vars],
                [by_loops[v] for v in body.reduce_vars],
            ],
            ranges,
            iter_vars,
            [],
            allow_same_symbol_in_index=True,
        )
        new.across, new.of_blocks = int(self.across), of_blocks
        for name, index in body.indexing_exprs.items():
            in_ranges = sympy.expand(sympy_subs(index, found))
            new.indexing_exprs[name] = self.index(in_ranges, iter_vars)
        for name, index, is_write in accessed(body):
            if is_write:
                self.know(name, sympy_subs(index, found), of_blocks)
        return new


def _reduction_of(node: BaseSchedulerNode) -> Optional[Any]:
    """The first reduction of a fused node, if all of its nodes are generated."""
    snodes = node.get_nodes()
    if not all(isinstance(getattr(n, "_body", None), LoopBody) for n in snodes):
        return None
    found = [n for n in snodes if n.is_reduction()]
    if not found or any(len(n._body.reduce_vars) != 1 for n in found):
        return None
    return found[0] if may_have_tile(node.get_device(), found[0].group[1][1]) else None


def _is_of_rows(node: Any, name: str) -> bool:
    """Whether reduction ``node`` reads ``name`` along what it reduces."""
    body = node._body
    for buffer, index, is_write in accessed(body):
        if buffer == name and not is_write:
            found = Strides.of(index, body.var_ranges)
            return found is not None and found.strides[body.reduce_vars[0]] == 1
    return False


def _reduction_types(node: BaseSchedulerNode) -> OrderedSet[str]:
    return OrderedSet(
        n.node.get_reduction_type() for n in node.get_nodes() if n.is_reduction()
    )


def _pays(name: str, across: int) -> bool:
    """
    Whether reading ``name`` once more, in a kernel more, takes longer than reductions of
    ``across`` of its elements between lanes; in bytes of memory traffic.
    """
    itemsize = get_dtype_size(V.graph.get_dtype(name))
    device = V.graph.get_current_device_or_throw()
    model = DeviceModel.of(DeviceProperties.create(device))
    numel = V.graph.sizevars.optimization_hint(V.graph.get_numel(name))
    in_l2 = numel * itemsize <= model.l2_mib * 2**20
    saved = numel * itemsize * (model.l2_byte if in_l2 else 1) + model.launch_bytes
    elements_per_lane = max(1, LANE_BYTES // itemsize)
    lanes = min(_NUM_THREADS_PER_WARP, max(1, across // elements_per_lane))
    slots = elements_per_lane - 1 + math.log2(lanes) * SHUFFLE_SLOTS
    return numel * slots / elements_per_lane / model.slots_per_byte < saved


def _bodies(
    columns: BaseSchedulerNode, rows: BaseSchedulerNode, choose: Any
) -> Optional[list[AcrossBody]]:
    """
    The bodies of the nodes of ``rows`` with the loops of those of ``columns``; None where
    one kernel cannot have both or should not.
    """
    of_columns, of_rows = _reduction_of(columns), _reduction_of(rows)
    if of_columns is None or of_rows is None:
        return None
    read = main_read(of_columns._body)
    if read is None or len(of_columns._body.iter_vars) != 2:
        return None
    name, strides = read
    across = of_rows.group[1][1]
    sizevars = V.graph.sizevars
    if (
        not _is_of_rows(of_rows, name)
        or strides.strides[of_columns._body.iter_vars[-1]] != 1
        or not sizevars.statically_known_multiple_of(
            of_columns._body.sizes[0][1], across
        )
        or not sizevars.statically_known_equals(
            sympy_product(of_columns.group[1]), sympy_product(of_rows.group[1])
        )
        or not _reduction_types(rows) <= REDUCTIONS
        or not _pays(name, int(across))
    ):
        return None
    xblock = choose(columns)
    if xblock is None or xblock % int(across) or int(across) & (int(across) - 1):
        return None
    directions = Directions(of_columns, across)
    iter_vars = [*of_columns._body.iter_vars, *of_columns._body.reduce_vars]
    by_loops = dict(
        zip(
            iter_vars,
            (
                directions.rows,
                directions.blocks * across + directions.column,
                directions.row,
            ),
        )
    )
    for buffer, index, is_write in accessed(of_columns._body):
        if not is_write:
            directions.know(buffer, sympy.expand(sympy_subs(index, by_loops)))
    bodies: list[AcrossBody] = []
    for node in rows.get_nodes():
        body = directions.body_of(node._body)
        if body is None:
            return None
        bodies.append(body)
    return bodies


def xblock_of(node: BaseSchedulerNode) -> Optional[int]:
    """Columns of the tile of the kernel of fused ``node``, if it is tiled by [y, x, r0_]."""
    from .codegen.simd import SIMDScheduling

    analysis = analyze_memory_coalescing(node)
    numel, reduction_numel = node.group[1]
    if analysis is None:
        return None
    found = V.choices.block_reduction_tiling(analysis, reduction_numel)
    if found is None or not SIMDScheduling.tiling_is_compatible(
        node.get_nodes(), numel, reduction_numel, found[0]
    ):
        return None
    tile = tile_of(analysis.norm_read_writes, found[0])
    return None if tile is None else tile.blocks["XBLOCK"]


def join_directions(
    scheduler: Scheduler, nodes: list[BaseSchedulerNode]
) -> list[BaseSchedulerNode]:
    """``nodes``, fused, with block reductions of both dimensions of a tensor in one."""
    if (
        not config.triton.block_reduction_tiles
        or not config.triton.coalesce_tiling_analysis
        or (config.triton.max_tiles or 3) < 3
        # whose tiles need not have whole blocks
        or config.max_autotune
        or config.max_autotune_pointwise
        or config.coordinate_descent_tuning
        or config.combo_kernels
        or config.cpp_wrapper
    ):
        return nodes
    candidates = [n for n in nodes if _reduction_of(n) is not None]
    if len(candidates) < 2:
        return nodes
    joined = False
    for columns in candidates:
        for rows in candidates:
            if (
                columns is rows
                or columns not in nodes
                or rows not in nodes
                or columns.get_device() != rows.get_device()
                or columns.ancestors & rows.get_operation_names()
                or rows.ancestors & columns.get_operation_names()
                or scheduler.will_fusion_create_cycle(columns, rows)
            ):
                continue
            with V.graph.set_current_device(columns.get_device()):
                bodies = _bodies(columns, rows, xblock_of)
            if bodies is None:
                continue
            nodes = _join(scheduler, nodes, columns, rows, bodies)
            joined = True
            break
    return scheduler.topological_sort_schedule(nodes) if joined else nodes


def _join(
    scheduler: Scheduler,
    nodes: list[BaseSchedulerNode],
    columns: Any,
    rows: Any,
    bodies: list[AcrossBody],
) -> list[BaseSchedulerNode]:
    from .scheduler import FusedSchedulerNode

    for node, body in zip(rows.get_nodes(), bodies):
        node._body, node._sizes = body, body.sizes
        node.group = node.group[0], (sympy_product(body.sizes[0]), sympy.S.One)
        node.refresh_dependencies(normalize=False, need_clear_tiling_cache=True)
    fused = FusedSchedulerNode(scheduler, [*columns.get_nodes(), *rows.get_nodes()])
    for node in fused.get_nodes():
        scheduler.name_to_fused_node[node.get_name()] = fused
    scheduler.name_to_fused_node[fused.get_name()] = fused
    at = max(nodes.index(columns), nodes.index(rows))
    return [
        fused if i == at else n
        for i, n in enumerate(nodes)
        if i == at or n not in (columns, rows)
    ]


def of_columns(node: Any) -> Any:
    """``node`` without the nodes of rows that it has taken in."""
    from .scheduler import FusedSchedulerNode

    kept = [
        n
        for n in node.get_nodes()
        if not isinstance(getattr(n, "_body", None), AcrossBody)
    ]
    if len(kept) == len(node.get_nodes()):
        return node
    return FusedSchedulerNode(node.scheduler, kept)
