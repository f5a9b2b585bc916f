"""
Reduced dimensions in the order of memory.

A reduction over several dimensions goes over them in the order in which the tensor has
them. That is no matter where one kernel reduces: the scheduler orders its loops. Lowering
splits a long reduction in parts before that, ranges of the flat index, and a part then goes
across memory where the layout has another order. Group norm over channels last reduces
[C / G, H * W], whose strides are 1 and C: each part was a channel of some pixels, an element
of each line of memory.

Where all elements are reduced, ``Reduction.check_for_split_dense_dim_reindexing`` has the
dense dimension innermost, by its place among the tensor's.
"""

from __future__ import annotations

import collections
import contextlib
import math
from typing import Optional, TYPE_CHECKING
from unittest.mock import patch

from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from . import dependencies, ir
from .utils import is_gpu
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def in_memory_order(
    x: ir.TensorBox, reduced: Collection[int], reduction_type: Optional[str]
) -> Sequence[int]:
    """
    The dimensions of ``x``; those ``reduced``, outermost first as what is read has them.

    As they are where an index of them is the result, where a reduction (but for Welford's,
    which has no type here) leaves one element, on a CPU, and where sizes are unbacked.
    """
    size = x.get_size()
    dimensions = range(len(size))
    device = x.get_device()
    kept = [i for i in dimensions if i not in reduced]
    if (
        len([i for i in reduced if size[i] != 1]) < 2
        or device is None
        or not is_gpu(device.type)
        or free_unbacked_symbols(size)
    ):
        return dimensions
    if reduction_type is not None and (
        reduction_type.startswith("arg")
        or all(V.graph.sizevars.statically_known_equals(size[i], 1) for i in kept)
    ):
        return dimensions
    return kept + _order_of_most_bytes(x, [i for i in dimensions if i in reduced])


def _order_of_most_bytes(x: ir.TensorBox, reduced: list[int]) -> list[int]:
    """
    ``reduced``, the largest stride first: of the reads along all of them, by bytes. The order
    given where there is none, or as many bytes are read in that.
    """
    votes = collections.Counter({tuple(reduced): 0})
    variables, ranges = dependencies.index_vars_squeeze(x.get_size())
    along = [variables[0][i] for i in reduced if variables[0][i] != 0]
    for read in _reads(x):
        index = V.graph.sizevars.simplify_with_ranges(read.index, ranges)
        if not index.free_symbols.issuperset(along):
            continue  # broadcast along some: no order of all
        if free_unbacked_symbols(index):
            continue
        hints = V.graph.sizevars.stride_hints(index, along, list(ranges))
        if 0 in hints:
            continue  # a view that is no product of a stride
        stride = dict(zip(along, map(abs, hints)))
        # what has one element goes first, as it moves nothing
        order = sorted(reduced, key=lambda i: -stride.get(variables[0][i], math.inf))
        votes[tuple(order)] += V.graph.get_dtype(read.name).itemsize
    # of equal votes the first that was entered
    (found, _), *_ = votes.most_common()
    return list(found)


def _reads(x: ir.TensorBox) -> list[dependencies.MemoryDep]:
    """
    What ``x`` is loaded or computed from. Buffers without a layout count with the one that
    ``decide_layout`` would give them. It is not asked to: it is early for that where the
    reduction is not split.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(ir.FlexibleLayout, "allow_indexing", True))
        found = _traced(x)
        decided = {}
        for read in found:
            buffer = V.graph.name_to_buffer.get(read.name)
            if not isinstance(buffer, ir.ComputedBuffer):
                continue
            layout, order = buffer.layout, buffer.get_fill_order()
            if order and isinstance(layout, ir.FlexibleLayout):
                decided[read.name] = layout.as_fill_order(order)
        if not decided:
            return found
        for name, fixed in decided.items():
            buffer = V.graph.name_to_buffer[name]
            stack.enter_context(patch.object(buffer, "layout", fixed))
        return _traced(x)


def _traced(x: ir.TensorBox) -> list[dependencies.MemoryDep]:
    reads = dependencies.extract_read_writes(x.make_loader(), x.get_size()).reads
    return [
        read
        for read in sorted(reads, key=lambda read: read.name)
        if isinstance(read, dependencies.MemoryDep)
    ]
