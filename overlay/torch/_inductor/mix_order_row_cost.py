"""
What a row of a mix-order kernel costs: what of it is loaded, accumulated and stored, from
the nodes of both sides. How the rows are split follows from this and from the GPU alone.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from .dependencies import MemoryDep
from .mix_order_accesses import accessed_numel
from .mix_order_reduction import accumulate_dtype
from .runtime.runtime_utils import ceildiv
from .utils import get_dtype_size, sympy_product
from .vector_width import aligned_columns, VECTOR_BYTES
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    import sympy

    from .scheduler import BaseSchedulerNode


# Functions whose branches take long, one element's after another's, and want more warps
# to hide that than loads do. erf has none, and is slower with more warps.
SLOW_FUNCTIONS = OrderedSet(["tanh"])
COPY_BYTES = 4  # an asynchronous copy, at least


@dataclasses.dataclass(frozen=True)
class RowCost:
    """
    What a row of a mix-order kernel costs.

    columns: of a row
    rnumel: columns, padded to a power of two (R0_BLOCK)
    stream_bytes: bytes a column that each row loads, over all loads
    streams: loads of each row: one of a buffer, or as many as there are places at which an
        element reads it, as in a window
    stores_rows: whether there is an output of all rows and columns
    accumulators: 4-byte accumulators a column, live throughout
    invariants: 4-byte values a column that all rows read, live throughout
    slow: whether some of ``SLOW_FUNCTIONS`` is computed of each element
    staged: whether asynchronous copies can load the rows
    copy_bytes: of adjacent columns that one copy can have, 16 at most
    adjoin: whether the rows are whole buffers, so that each follows the one before
    lacks_registers: whether a thread is predicted to need more than it may have
    apart: whether the elements of a row are loaded one at a time
    keeps_rows: whether a row of half types had better be kept than loaded twice
    pairs_rows: whether a program of two rows had better have a multiprocessor than two of one
    wide_values: whether values are computed and accumulated in 8 bytes, as sums of integers are
    repeated_bytes: of stream_bytes, those of a buffer that another load has brought from memory
    """

    columns: int
    rnumel: int
    stream_bytes: int
    streams: int
    stores_rows: bool
    accumulators: int
    invariants: int
    slow: bool = False
    staged: bool = True
    copy_bytes: int = VECTOR_BYTES
    adjoin: bool = True
    lacks_registers: bool = False
    apart: bool = False
    keeps_rows: bool = False
    pairs_rows: bool = False
    wide_values: bool = False
    repeated_bytes: int = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes a column of each row that come from memory."""
        return self.stream_bytes - self.repeated_bytes

    @property
    def width(self) -> int:
        """Of the elements of a row in the mean, in 2 bytes: 1 for half types."""
        return ceildiv(self.stream_bytes, 2 * max(1, self.streams))

    @property
    def row_tiles(self) -> int:
        """Tiles of 4-byte values that hold a row of each buffer, one of half types too."""
        return self.streams * max(1, self.width // 2)


def row_cost(
    contiguous: Sequence[BaseSchedulerNode],
    other: Sequence[BaseSchedulerNode],
    xnumel: sympy.Expr,
    rnumel: sympy.Expr,
    rblock: int,
) -> RowCost:
    """
    From the nodes of both sides: those that reduce ``[xnumel, rnumel]`` over columns,
    and the others, whose reductions become the partial accumulators.
    """
    reductions = [node for node in other if node.is_reduction()]
    # What follows the other node's reductions follows the final ones: in another kernel.
    in_kernel = [*contiguous, *reductions]
    statically_known_equals = V.graph.sizevars.statically_known_equals
    hint = V.graph.sizevars.optimization_hint
    nodes = [*contiguous, *other]
    written = OrderedSet(name for node in nodes for name in node.get_buffer_names())
    columns = hint(rnumel, fallback=rblock)
    streamed: dict[str, int] = {}
    places: dict[str, dict[Any, OrderedSet[sympy.Expr]]] = {}
    copy_bytes, adjoin, most_adjacent = 0, True, 0
    invariant: OrderedSet[str] = OrderedSet()
    square = statically_known_equals(xnumel, rnumel)
    for node, dep in ((each, dep) for each in in_kernel for dep in each.read_writes.reads):
        if not isinstance(dep, MemoryDep) or dep.name in written:
            continue
        read = _read(dep, xnumel, rnumel, columns)
        if read.is_of_rows:
            size = get_dtype_size(V.graph.get_dtype(dep.name))
            streamed[dep.name] = size
            # nodes may number the same elements by other loops
            at = places.setdefault(dep.name, {}).setdefault(node, OrderedSet())
            at.add(dep.index)
            copy_bytes = max(copy_bytes, read.adjacent * size)
            most_adjacent = max(most_adjacent, read.adjacent)
            adjoin &= read.is_whole
        elif statically_known_equals(read.numel, rnumel) and not (
            square and follows_rows(dep, node in contiguous)
        ):
            invariant.add(dep.name)
    accumulator_bytes = []
    for snode in reductions:
        dtype = accumulate_dtype(snode.node.get_dtype())  # type: ignore[union-attr]
        assert dtype is not None
        accumulator_bytes.append(get_dtype_size(dtype))
    stores_rows = any(
        isinstance(dep, MemoryDep)
        and (
            dep.is_indirect()  # rows that are scattered are rows as well
            or statically_known_equals(dep.get_numel(), xnumel * rnumel)
        )
        for node in in_kernel
        for dep in node.read_writes.writes
    )
    loads = {name: max(map(len, at.values())) for name, at in places.items()}
    return RowCost(
        columns=columns,
        rnumel=rblock,
        stream_bytes=sum(size * loads[name] for name, size in streamed.items()),
        streams=sum(loads.values()),
        stores_rows=stores_rows,
        accumulators=sum(accumulator_bytes) // 4,
        invariants=len(invariant),
        slow=any(
            snode._body.has_op(name)  # type: ignore[attr-defined]
            for node in in_kernel
            for snode in node.get_nodes()
            for name in SLOW_FUNCTIONS
        ),
        staged=copy_bytes >= COPY_BYTES or not streamed,
        copy_bytes=copy_bytes or VECTOR_BYTES,
        adjoin=adjoin,
        apart=most_adjacent == 1,
        wide_values=max(accumulator_bytes, default=0) > 4,
        repeated_bytes=sum(
            size * (loads[name] - 1) for name, size in streamed.items()
        ),
    )


@dataclasses.dataclass(frozen=True)
class _Read:
    """
    What a mix-order kernel reads of a buffer.

    numel: elements
    is_of_rows: whether they are tiles of rows, not a few values a row or a column
    is_whole: whether they are the buffer, so that each row follows the one before
    adjacent: columns of a row that a thread can load at once
    """

    numel: sympy.Expr
    is_of_rows: bool
    is_whole: bool
    adjacent: int

    @classmethod
    def of(
        cls, dep: MemoryDep, xnumel: sympy.Expr, rnumel: sympy.Expr, columns: int
    ) -> _Read:
        statically_known_equals = V.graph.sizevars.statically_known_equals
        hint = V.graph.sizevars.optimization_hint
        numel = accessed_numel(dep)
        # the loops of rows that are split unevenly go beyond the last
        buffer_numel = V.graph.get_numel(dep.name)
        if hint(buffer_numel, fallback=0) < hint(numel, fallback=0):
            numel = buffer_numel
        # Rows that are gathered, of which several are one, or that are made of parts, are
        # tiles as well. A value a row, of rows that are split in two layers, is none: it
        # may have a loop of as many rows as there are columns, and more rows in all.
        few = 2 * max(hint(xnumel, fallback=0), columns)
        is_of_rows = hint(numel, fallback=0) > few or (
            (
                dep.is_indirect()
                or not any(statically_known_equals(numel, n) for n in (rnumel, xnumel))
            )
            and any(
                statically_known_equals(size, rnumel) and dep.index.coeff(var) == 1
                for var, size in dep.ranges.items()
            )
        )
        is_whole = not dep.is_indirect() and statically_known_equals(buffer_numel, numel)
        # what masks the end of a row is known of as many columns at once, too
        adjacent = math.gcd(aligned_columns(dep), columns) if is_of_rows else 1
        return cls(numel, is_of_rows, is_whole, adjacent)


# of one graph, whose nodes are candidates for many kernels
_reads: weakref.WeakKeyDictionary[Any, dict[Any, _Read]] = weakref.WeakKeyDictionary()


def _read(
    dep: MemoryDep, xnumel: sympy.Expr, rnumel: sympy.Expr, columns: int
) -> _Read:
    known = _reads.setdefault(V.graph.scheduler, {})
    key = (dep, xnumel, rnumel, columns)
    if key not in known:
        known[key] = _Read.of(*key)
    return known[key]


def follows_rows(dep: MemoryDep, contiguous: bool) -> bool:
    """
    Whether what ``dep`` reads for a side of a square tensor has a value a row, not one a
    column, which its size does not tell. The loops over rows come first in the contiguous
    node, and those over columns in the other; ``dep`` has its loops up to the last one
    that it moves with, so it is broadcast over an earlier one or it is not.
    """
    broadcast = not V.graph.sizevars.statically_known_equals(
        sympy_product(dep.ranges.values()), accessed_numel(dep)
    )
    return broadcast != contiguous
