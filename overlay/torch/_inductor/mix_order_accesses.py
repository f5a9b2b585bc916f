"""
What the nodes of a mix-order kernel read and write in its loops, element by element.

In a kernel, a load of what the kernel stored is the value that was stored, whatever the
index. ``reads_where_written`` is what makes that true, and ``load_as_stored`` rounds the
value as memory would.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from . import ir
from .dependencies import MemoryDep
from .loop_body import MemoryUsageType
from .mix_order_reduction import final_buffer
from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable

    import sympy

    from .loop_body import LoopBody, MemoryEntry
    from .scheduler import BaseSchedulerNode, SchedulerNode


def accessed_numel(dep: MemoryDep) -> sympy.Expr:
    """Elements that `dep` touches: loops that do not move its index are broadcast over."""
    return sympy_product(
        size for var, size in dep.ranges.items() if var in dep.index.free_symbols
    )


def domain(other_node: BaseSchedulerNode) -> tuple[sympy.Expr, ...]:
    """``[xnumel, rnumel]`` of a mix-order kernel, by the reductions of its other node."""
    # a circle: scheduler imports this module in turn
    from .scheduler import MixOrderReduction

    return tuple(reversed(MixOrderReduction.get_numel_rnumel(other_node)))


def reads_where_written(
    consumer: SchedulerNode,
    producer: BaseSchedulerNode,
    numels: tuple[sympy.Expr, ...],
) -> bool:
    """
    Whether the reduction ``consumer`` reads each buffer that ``producer`` writes where
    it is written: in the kernel's ``[xnumel, rnumel]``, element by element, or, of a
    row's result, row by row.

    A kernel maps the loops of a node to its domain in their order, row-major. So two
    accesses are the same if they are as functions of the element's number, which is
    what ``normalize`` makes of them when it merges loops. The loops of the consumer
    are those it has in the kernel: first what it reduces, then what it keeps.
    """
    xnumel, rnumel = numels
    written = {
        name: snode
        for snode in producer.get_nodes()
        for name in snode.get_buffer_names()
    }
    names = OrderedSet(
        dep.name for dep in consumer.read_writes.reads if dep.name in written
    )
    if not names:
        return True

    body, elements = kernel_loops(consumer, of_other_node=True)
    rows = {var: elements[var] for var in body.reduce_vars}
    if any(
        load.args[1] in names
        for block in body.subblocks.values()
        for load in block.graph.find_nodes(op="call_method", target="load")
    ):
        return False  # the mask of a masked load is that of an access to memory
    equal = V.graph.sizevars.statically_known_equals
    for name in names:
        writer = written[name]._body  # type: ignore[attr-defined]
        stores = [
            entry
            for usage in (MemoryUsageType.STORE, MemoryUsageType.STORE_REDUCTION)
            for entry in writer.memory_usage[usage]
            if entry.buffer_name == name
        ]
        if len(stores) != 1 or stores[0].mode is not None:
            return False
        loops = dict(zip(writer.iter_vars, writer.sizes[0]))
        numel = sympy_product(loops.values())
        if equal(numel, xnumel):
            reader_loops = rows
        elif equal(numel, xnumel * rnumel):
            reader_loops = elements
        else:
            return False
        store = access(writer, stores[0], loops)
        loads = [
            access(body, entry, reader_loops)
            for entry in body.memory_usage[MemoryUsageType.LOAD]
            if entry.buffer_name == name
        ]
        if (
            free_symbol_is_type(store.index, (SymT.TMP, SymT.INDIRECT))
            or not loads
            or any(load != store for load in loads)
        ):
            return False
    return True


def access(
    body: LoopBody, entry: MemoryEntry, loops: dict[sympy.Symbol, sympy.Expr]
) -> MemoryDep:
    """An access of ``body``, with its ``loops`` merged as far as they can be."""
    return MemoryDep(
        entry.buffer_name or "",
        body.indexing_exprs[entry.index_name],
        tuple(loops),
        tuple(loops.values()),
    ).normalize()


def kernel_loops(
    snode: SchedulerNode, of_other_node: bool
) -> tuple[LoopBody, dict[sympy.Symbol, sympy.Expr]]:
    """
    The body of ``snode`` in a mix-order kernel, and its loops in the order in which the
    kernel numbers its elements: rows, then columns, which the reductions of the other
    node keep.
    """
    body = whole_body(snode)
    loops = [
        dict(zip(body.iter_vars, body.sizes[0])),
        dict(zip(body.reduce_vars, body.sizes[1])),
    ]
    if of_other_node:
        loops.reverse()
    return body, {**loops[0], **loops[1]}


# of the nodes of one graph, whose accesses are compared with many others'
_whole_bodies: weakref.WeakKeyDictionary[LoopBody, LoopBody] = (
    weakref.WeakKeyDictionary()
)


def whole_body(snode: SchedulerNode) -> LoopBody:
    """The loops of the reduction ``snode``, as if it had not been split in two layers."""
    buffer = snode.node
    assert isinstance(buffer, ir.ComputedBuffer)
    if buffer._split_size is None:
        return snode._body
    if (known := _whole_bodies.get(snode._body)) is not None:
        return known
    final = final_buffer(snode)
    assert final is not None
    with buffer.with_original_inner_fn():
        buffer.layout = final.get_layout()
        _, body = buffer.simplify_and_reorder()
    # what it is until it is cancelled
    buffer.get_default_sizes_body.clear_cache(buffer)
    assert body is not None
    _whole_bodies[snode._body] = body
    return body


def whole_accesses(
    node: BaseSchedulerNode, numel: sympy.Expr, of_other_node: bool = False
) -> OrderedSet[MemoryDep]:
    """The accesses in a mix-order kernel's loops by which ``node`` reads or writes
    ``numel`` elements of a buffer."""
    accesses: OrderedSet[MemoryDep] = OrderedSet()
    for snode in node.get_nodes():
        if of_other_node and not snode.is_reduction():
            continue  # the epilogue runs after the kernel
        body, loops = kernel_loops(snode, of_other_node)  # type: ignore[arg-type]
        for usage in (MemoryUsageType.LOAD, MemoryUsageType.STORE):
            for entry in body.memory_usage[usage]:
                dep = access(body, entry, loops)
                if V.graph.sizevars.statically_known_equals(dep.get_numel(), numel):
                    accesses.add(dep)
    return accesses


def load_as_stored(body: LoopBody, names: Iterable[str]) -> None:
    """
    Make ``body`` load ``names``, which its kernel stores, as they are in memory. A value
    of a half type is kept in float32 until it is stored, and its sum over the rows is to
    be that of the rounded values, whether it is attached or not.
    """
    narrow = {
        name: dtype
        for name in names
        if (dtype := V.graph.get_dtype(name)).is_floating_point and dtype.itemsize < 4
    }
    if not narrow:
        return
    for block in (body.root_block, *body.subblocks.values()):
        for node in block.graph.find_nodes(op="call_method", target="load"):
            ops, name, _ = node.args
            if name not in narrow:
                continue
            with block.graph.inserting_after(node):
                rounded = block.graph.call_method(
                    "to_dtype", (ops, node, narrow[name]), {"use_compute_types": False}
                )
            with block.graph.inserting_after(rounded):
                loaded = block.graph.call_method(
                    "to_dtype", (ops, rounded, narrow[name])
                )
            node.replace_all_uses_with(
                loaded, delete_user_cb=lambda user, skip=rounded: user is not skip
            )
