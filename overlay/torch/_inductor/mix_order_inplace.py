"""
Which buffer a mix-order kernel may write its output into.

The reductions over the rows read what the rows read, and nothing orders them before the
node that writes dx. In the kernel there is an order all the same. A program loads the
elements of its own tiles, no others, and in each pass over a tile it loads before it
stores. So a buffer that nothing reads afterwards can take an output of its size, as in
the kernels that would reduce the rows and the columns apart; that is a tensor of all
rows and columns less at the peak of memory.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING, Union

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import free_symbol_is_type, SymT

from .loop_body import MemoryUsageType
from .mix_order_accesses import access
from .runtime.registers import THREADS_PER_WARP


if TYPE_CHECKING:
    import sympy

    from .codegen.simd import SIMDKernel
    from .dependencies import Dep
    from .loop_body import LoopBody
    from .mix_order_row_loop import RowSplit
    from .scheduler import SchedulerBuffer, SchedulerDonatedBuffer, SchedulerNode


def inplace_reads(kernel: SIMDKernel, writer: SchedulerNode) -> list[Dep]:
    """
    The reads whose buffers may take an output of ``writer``: its own, and then what a
    mix-order ``kernel`` loads for its other nodes. A cast of dx reads dx alone, and the
    gradient that dx is made of has the cast's type.
    """
    reads = [*writer.read_writes.reads]
    if getattr(kernel, "row_split", None) is None:
        return reads
    nodes = [*row_passes(kernel)]
    written = OrderedSet(name for node in nodes for name in node.get_buffer_names())
    beside = {read.name: read for node in nodes for read in node.read_writes.reads}
    own = OrderedSet(read.name for read in reads)
    return reads + [r for name, r in beside.items() if name not in own | written]


def read_before_written(
    kernel: SIMDKernel,
    writer: SchedulerNode,
    output: SchedulerBuffer,
    read: Union[SchedulerBuffer, SchedulerDonatedBuffer],
) -> Optional[OrderedSet[str]]:
    """
    The nodes of the mix-order ``kernel`` that read ``read`` beside ``writer``, where each
    has loaded an element when ``writer`` stores that element of ``output``. None where
    one has not, or may not have, and of other kernels.
    """
    row_split = getattr(kernel, "row_split", None)
    if row_split is None or not has_one_owner(row_split, kernel):
        return None
    name = read.get_name()
    stores = accesses(writer, output.get_name(), MemoryUsageType.STORE)
    if stores is None or len(stores) != 1:
        return None
    passes = row_passes(kernel)
    readers: OrderedSet[str] = OrderedSet()
    for node, row_pass in passes.items():
        loads = accesses(node, name, MemoryUsageType.LOAD)
        if loads == []:
            continue
        if loads is None or any(load != stores[0] for load in loads):
            return None
        if row_pass > passes[writer]:
            return None  # it would load what was stored
        readers.add(node.get_name())
    return readers - writer.get_operation_names()


def has_one_owner(row_split: RowSplit, kernel: SIMDKernel) -> bool:
    """
    Whether one thread alone holds each element of a tile, in every configuration. A tile
    of fewer elements than threads is held several times, and a thread that is late would
    load what another one stored.
    """
    columns = kernel._get_persistent_RBLOCK(kernel.numels["r0_"])
    return all(
        xblock * columns >= num_warps * THREADS_PER_WARP
        for xblock, num_warps, _ in row_split.launch_plan().row_tiles
    )


def row_passes(kernel: SIMDKernel) -> dict[SchedulerNode, int]:
    """
    In which pass over a tile each node of ``kernel`` is: one where a row's values are
    kept, and where they are loaded again one more for each row statistic that others
    wait for.
    """
    # a circle: codegen.simd_kernel_features imports this module in turn
    from .codegen.simd_kernel_features import DisableReduction, EnableReduction

    row_pass = 0
    passes: dict[SchedulerNode, int] = {}
    for entry in kernel.features.node_schedule:
        if entry is EnableReduction:
            row_pass += kernel.row_split.reload  # type: ignore[union-attr]
        elif entry is not DisableReduction:
            passes[entry] = row_pass  # type: ignore[index]
    return passes


def accesses(
    node: SchedulerNode, name: str, usage: MemoryUsageType
) -> Optional[list[tuple[sympy.Expr, ...]]]:
    """
    Index and loops of what ``node`` loads or stores of the buffer ``name`` in its kernel;
    None if a mask decides whether it does, or a value where.
    """
    body: LoopBody = node._body
    entries = [e for e in body.memory_usage[usage] if e.buffer_name == name]
    if not entries:
        return []
    if any(
        call.args[1] == name
        for block in body.subblocks.values()
        for call in block.graph.find_nodes(op="call_method", target="load")
    ):
        return None
    sizes = [size for group in body.sizes for size in group]
    loops = dict(zip([*body.iter_vars, *body.reduce_vars], sizes))
    deps = [access(body, entry, loops) for entry in entries]
    if any(entry.mode is not None for entry in entries) or any(
        free_symbol_is_type(dep.index, (SymT.TMP, SymT.INDIRECT)) for dep in deps
    ):
        return None
    return [(dep.index, *dep.size) for dep in deps]
