"""
Which few long rows of an inner reduction are not split, so that a program has each.

One SM loads a row that a program has, and all SMs load one that is split. But each reduction
of that is a kernel more, and so is what is made of the row. So the fewer rows, the shorter
they have to be.

Where nothing is made of the row, as where a loss has its sum alone, one kernel is saved. A
program has that time for the bytes of a row of one tensor, and not for those of several, or of
wide types.

A row need not be contiguous: a channel of a batch norm, [N, C, H, W] over N, H and W, is in
as many pieces as there are images. What is made of such rows waits for them once more. It
gains where it finds them in the L2 cache, and loses where they come from memory again. There
the reductions of one kernel are to be alike: of what is reduced beside another tensor, as the
gradient of a batch norm, all that a kernel reads counts. And a line of the cache that two rows
have parts of is loaded for both: what is made of rows in such short pieces is faster split.
"""

from __future__ import annotations

import operator
from typing import Optional, TYPE_CHECKING
from unittest.mock import patch

import sympy

import torch
from torch.utils._ordered_set import OrderedSet

from .dependencies import extract_read_writes, index_vars_squeeze, MemoryDep
from .device_model import DeviceModel, LINE_BYTES
from .ir import ComputedBuffer, convert_shape_to_inductor, FlexibleLayout, Pointwise
from .utils import is_view, sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .ir import Reduction
    from .runtime.hints import DeviceProperties


# Columns, where all SMs but those of a row are idle. With fewer idle ones it is as many by
# their share; with so many busy ones any number of columns. It was found with rows of one
# tensor, of up to four bytes a column: of a row of which nothing is made, that is all.
COLUMNS = 20 * 1024
ROW_BYTES = 4 * COLUMNS
BUSY_SHARE = 5 / 6


def leaves_rows_whole(
    properties: DeviceProperties, rows: int, columns: int, reduction: Reduction
) -> bool:
    """Of an inner ``reduction`` of ``rows`` rows of ``columns``, both static or as hinted."""
    if properties.type != "cuda":
        return False
    device = DeviceModel.of(properties)
    idle = 1 - rows / (BUSY_SHARE * device.sms)
    if columns * idle > COLUMNS:
        return False
    sizes = reduction.get_size(), reduction.get_reduction_size()
    # the same variables as those of the dependencies
    (row_vars, column_vars), _ = index_vars_squeeze(*sizes)
    symbols = {each for each in row_vars if isinstance(each, sympy.Symbol)}
    with patch.object(FlexibleLayout, "allow_indexing", True):
        reads = extract_read_writes(reduction.inner_fn, *sizes).reads
    extents = {
        dep: extent(dep, column_vars)
        for dep in reads
        if isinstance(dep, MemoryDep) and dep.index.free_symbols >= symbols
    }
    of_columns = [dep for dep, each in extents.items() if each > 1]
    elements = rows * columns
    if idle > 0 and columns * idle * bytes_of_column(of_columns, elements) > ROW_BYTES:
        # what has a value for a row is mostly what the row was reduced to before
        reduced_before = len(of_columns) < len(extents)
        if not reduced_before and not is_used_along_rows(elements):
            return False
    if all(each <= columns for each in extents.values()):
        return True
    if idle > 0:
        return False
    pieces = (
        adjacent(dep, column_vars) * V.graph.get_dtype(dep.name).itemsize for dep in of_columns
    )
    if min(pieces, default=LINE_BYTES) < LINE_BYTES and is_used_along_rows(elements):
        return False
    itemsize = sum(V.graph.get_dtype(dep.name).itemsize for dep in of_columns)
    return (
        elements * itemsize <= device.l2_bytes
        and elements * bytes_beside(rows, elements) <= device.l2_bytes
    )


def bytes_of_column(reads: Iterable[MemoryDep], elements: int) -> int:
    """
    Of what a kernel loads and stores of each column, which has ``reads``, and what makes them
    of as many ``elements``.
    """
    names = OrderedSet(dep.name for dep in reads)
    found = list(names)
    for name in found:
        buffer = V.graph.try_get_buffer(name)
        if not isinstance(buffer, ComputedBuffer) or not isinstance(buffer.data, Pointwise):
            continue
        for dep in buffer.get_read_writes().reads:
            if not isinstance(dep, MemoryDep) or dep.name in names:
                continue
            numel = V.graph.sizevars.optimization_hint(dep.get_numel(), fallback=0)
            if numel >= elements:
                names.add(dep.name)
                found.append(dep.name)
    return sum(V.graph.get_dtype(name).itemsize for name in names)


def is_used_along_rows(elements: int) -> bool:
    """
    Whether what the current node reduces ``elements`` to is used for as many, by itself or
    by what is made of it; of no node True.
    """
    if V.graph.current_node is None:
        return True
    nodes = [V.graph.current_node]
    seen = OrderedSet(nodes)
    for node in nodes:
        users = [user for user in node.users if user not in seen]
        if any(numel_hint(user.meta.get("val")) >= elements for user in users):
            return True
        seen.update(users)
        nodes += users
    return False


def bytes_beside(rows: int, elements: int) -> int:
    """
    Bytes of a column, of all tensors of so many ``elements`` that the current node reduces to
    ``rows``, and that other nodes reduce alike beside one of them; of no node 0.

    What needs the result of a kernel that cannot be fused, as a convolution, is another
    kernel's.
    """
    node = V.graph.current_node
    if node is None:
        return 0
    end = first_of_another_kernel(node)
    found = tensors_of(node, elements)
    seen = OrderedSet(found)
    nodes = list(found)
    for each in nodes:
        for user in each.users:
            if user in seen or (end is not None and not user < end):
                continue
            seen.add(user)
            if is_elementwise(user) and numel_hint(user.meta.get("val")) == elements:
                nodes.append(user)
            elif has_tag(user, torch.Tag.reduction) and reduced_to(user) == rows:
                found.update(tensors_of(user, elements))
    return sum(each.meta["val"].dtype.itemsize for each in found)


def has_tag(node: torch.fx.Node, tag: torch.Tag) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and tag in node.target.tags


def is_elementwise(node: torch.fx.Node) -> bool:
    """Or a view, or one of several results."""
    target = node.target
    return (
        has_tag(node, torch.Tag.pointwise)
        or target is operator.getitem
        or (isinstance(target, torch._ops.OpOverload) and is_view(target))
    )


def reduced_to(node: torch.fx.Node) -> int:
    """Elements of the first result of a reduction."""
    value = node.meta.get("val")
    return numel_hint(value[0] if isinstance(value, (tuple, list)) else value)


def tensors_of(node: torch.fx.Node, elements: int) -> OrderedSet[torch.fx.Node]:
    """Those of so many ``elements`` from which, element by element, inputs of ``node`` are made."""
    found: OrderedSet[torch.fx.Node] = OrderedSet()
    seen, nodes = OrderedSet([node]), [node]
    for each in nodes:
        if each is not node and not is_elementwise(each):
            found.add(each)
            continue
        given = OrderedSet(each.all_input_nodes) - seen
        seen |= given
        nodes += [n for n in given if numel_hint(n.meta.get("val")) == elements]
    return found


def first_of_another_kernel(node: torch.fx.Node) -> Optional[torch.fx.Node]:
    """The first that needs the result of ``node``, and cannot be fused with it."""
    made, each = OrderedSet([node]), node.next
    while each.op != "root":
        if any(given in made for given in each.all_input_nodes):
            if not is_elementwise(each) and not has_tag(each, torch.Tag.reduction):
                return each
            made.add(each)
        each = each.next
    return None


def numel_hint(value: object) -> int:
    """Elements of the tensor that a node results in; 0 of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return 0
    numel = sympy_product(convert_shape_to_inductor(value.shape))
    return V.graph.sizevars.optimization_hint(numel, fallback=0)


def strides_and_sizes(
    dep: MemoryDep, column_vars: Sequence[sympy.Symbol]
) -> list[tuple[int, int]]:
    """The strides and sizes of the columns' variables."""
    sizevars = V.graph.sizevars
    index = sizevars.simplify_with_ranges(dep.index, dep.ranges)
    strides = sizevars.stride_hints(index, column_vars, list(dep.ranges))
    sizes = (
        sizevars.optimization_hint(dep.ranges.get(variable, 1), fallback=1)
        for variable in column_vars
    )
    return [*zip(strides, sizes)]


def extent(dep: MemoryDep, column_vars: Sequence[sympy.Symbol]) -> int:
    """Elements from the first that a row reads by ``dep`` to its last, both included."""
    hints = strides_and_sizes(dep, column_vars)
    return 1 + sum(abs(stride) * (size - 1) for stride, size in hints)


def adjacent(dep: MemoryDep, column_vars: Sequence[sympy.Symbol]) -> int:
    """Columns of a row that are adjacent in memory as ``dep`` reads them."""
    found = 1
    for stride, size in sorted(strides_and_sizes(dep, column_vars)):
        if stride == found:
            found *= size
    return found
