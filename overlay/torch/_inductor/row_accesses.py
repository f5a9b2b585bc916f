"""
What a reduction kernel loads of its rows: how it lies in memory, what is reduced, and
what each loop over a row needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, Max, Min, ModularIndexing

from .dependencies import MemoryDep
from .device_model import LINE_BYTES
from .mix_order_accesses import accessed_numel
from .utils import sympy_product
from .vector_width import accesses, adjacent_columns, VECTOR_BYTES
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from .codegen.simd_kernel_features import SIMDKernelFeatures, StatsForDim
    from .mix_order_trace import Op


# Bytes of an element of half types.
HALF_BYTES = 2
# Bytes of the widest elements of rows that a thread loads one or two at a time, if unaligned.
WORD_BYTES = 4
# Bytes of which memory reads and writes all, or none.
SECTOR_BYTES = LINE_BYTES // 4
# Strides of what is read in order, or backwards.
ADJACENT = (1, -1)
# as symbolic shapes have them, and as index expressions do
BOUNDS = (Max, Min, sympy.Max, sympy.Min)
ONLINE_SOFTMAX = "online_softmax_reduce"
# What is no reduction, and was not measured.
SCANS_AND_SORTS = "scan", "sort"


def is_computed_again(features: SIMDKernelFeatures) -> bool:
    """Whether several loops compute the same node (``loop_schedule``)."""
    nodes = features.scheduler_nodes()
    return len(OrderedSet(node.get_name() for node in nodes)) < len([*nodes])


def reduction_types(features: SIMDKernelFeatures) -> OrderedSet[str]:
    """Those of all reductions of a kernel."""
    return OrderedSet(
        node.node.get_reduction_type()  # type: ignore[union-attr, misc]
        for node in features.reduction_nodes()
    )


def has_reduction(features: SIMDKernelFeatures, *kinds: str) -> bool:
    """Whether a kernel has a reduction of one of the ``kinds``."""
    return bool(reduction_types(features) & OrderedSet(kinds))


def has_online_softmax(features: SIMDKernelFeatures) -> bool:
    return has_reduction(features, ONLINE_SOFTMAX)


def doubles(features: SIMDKernelFeatures) -> int:
    """Reductions in float64, of rows that are narrower."""
    if has_rows_of_doubles(features):
        return 0
    dtypes = [node.node.get_dtype() for node in features.reduction_nodes()]  # type: ignore[union-attr]
    return sum(
        dtype.is_floating_point and dtype.itemsize > WORD_BYTES for dtype in dtypes
    )


def vector_columns(features: SIMDKernelFeatures) -> int:
    """Columns that a thread has at once of any tensor: of all, as of the widest; 0 of none."""
    columns = features.reduction_numel
    whole = accesses(features, features.numel * columns)
    return max(
        (adjacent_columns(dep, columns) for deps in whole.values() for dep in deps),
        default=0,
    )


def loaded(features: SIMDKernelFeatures) -> list[MemoryDep]:
    """What a kernel reads, but for what it writes itself."""
    nodes = features.scheduler_nodes()
    stored = {dep.name for node in nodes for dep in node.read_writes.writes}
    return [
        dep
        for node in nodes
        for dep in node.read_writes.reads
        if isinstance(dep, MemoryDep) and dep.name not in stored
    ]


# What has branches in the machine code that Triton 3.6 makes of it for compute capability 9.0,
# on float32.
BRANCHING_FUNCTIONS = (
    *("acosh", "asinh", "atan", "atan2", "atanh", "cos", "erfinv", "fmod", "lgamma"),
    *("log1p", "pow", "remainder", "sin", "sinh", "sqrt", "tan"),
)


def has_function(features: SIMDKernelFeatures, *names: str) -> bool:
    """Whether a kernel computes one of these functions."""
    return any(
        node._body.has_op(name) for node in features.scheduler_nodes() for name in names
    )


def shared_by_rows(features: SIMDKernelFeatures) -> OrderedSet[str]:
    """The buffers that a kernel reads which have a value for each column alone."""
    columns = features.reduction_numel
    known_equal = V.graph.sizevars.statically_known_equals
    if known_equal(features.numel, 1):
        return OrderedSet()
    return OrderedSet(
        dep.name
        for dep in loaded(features)
        if known_equal(accessed_numel(dep), columns)
        and any(known_equal(size, columns) for size in dep.ranges.values())
    )


def is_reduced(features: SIMDKernelFeatures, names: OrderedSet[str]) -> bool:
    """Whether a reduction of a kernel depends on its reads of the buffers ``names``."""
    readers = OrderedSet(
        node.get_name()
        for node in features.scheduler_nodes()
        if any(dep.name in names for dep in node.read_writes.reads)
    )
    return any(
        node.get_name() in readers or node.ancestors & readers
        for node in features.reduction_nodes()
    )


def is_of_rows(features: SIMDKernelFeatures, dep: MemoryDep) -> bool:
    """Whether ``dep`` has a value for each row and column."""
    numel = features.numel * features.reduction_numel
    return V.graph.sizevars.statically_known_equals(accessed_numel(dep), numel)


def bytes_of_row(stats: StatsForDim) -> int:
    """Those that each column has, of what is loaded or stored along the columns."""
    return stats.bytes_per_thread - stats.bytes_per_thread_broadcast


def loaded_rows(features: SIMDKernelFeatures) -> list[tuple[MemoryDep, torch.dtype]]:
    """What a kernel reads that has a value for each row and column, and its type."""
    return [
        (dep, V.graph.get_dtype(dep.name))
        for dep in loaded(features)
        if is_of_rows(features, dep)
    ]


def has_rows_of_doubles(features: SIMDKernelFeatures) -> bool:
    """Whether rows that are loaded are wider than ``WORD_BYTES``."""
    return any(dtype.itemsize > WORD_BYTES for _, dtype in loaded_rows(features))


def unaligned_bytes(features: SIMDKernelFeatures) -> int:
    """
    Of an element of the rows that are loaded, the widest, where all of them begin within a
    vector, and none is wider than ``WORD_BYTES``; else 0.
    """
    columns, rows = features.reduction_numel, loaded_rows(features)
    widest = max((dtype.itemsize for _, dtype in rows), default=0)
    begins_within = all(
        adjacent_columns(dep, columns) * max(dtype.itemsize, HALF_BYTES) < VECTOR_BYTES
        for dep, dtype in rows
    )
    return widest if begins_within and widest <= WORD_BYTES else 0


def has_whole_vectors(features: SIMDKernelFeatures) -> bool:
    """Whether all rows that are loaded are of full precision, and a thread loads whole vectors."""
    columns, rows = features.reduction_numel, loaded_rows(features)
    return bool(rows) and all(
        is_full(dtype) and adjacent_columns(dep, columns) * dtype.itemsize >= VECTOR_BYTES
        for dep, dtype in rows
    )


def is_full(dtype: torch.dtype) -> bool:
    """Whether a type is a floating-point one wider than ``HALF_BYTES``."""
    return dtype.is_floating_point and dtype.itemsize > HALF_BYTES


def has_rows_of_full_precision(features: SIMDKernelFeatures) -> bool:
    """Whether rows that are loaded, or gathered, are of full precision."""
    return any(
        is_full(V.graph.get_dtype(dep.name))
        and (dep.is_indirect() or is_of_rows(features, dep))
        for dep in loaded(features)
    )


def reads_across_rows(features: SIMDKernelFeatures) -> bool:
    """Whether adjacent elements of an input are of adjacent rows, or it is gathered at a stride
    of the columns."""
    return any(lies_across(features, dep) for dep in loaded(features))


def lies_across(features: SIMDKernelFeatures, dep: MemoryDep) -> bool:
    """
    Whether adjacent elements of ``dep`` are not those of adjacent columns, the innermost
    variable, but of another's, and the next row is in the same sector; or of an index that is
    loaded.
    """
    *others, columns = dep.ranges or (None,)
    index = nearby(dep.index)
    if index.coeff(columns) in (0, *ADJACENT) or not moves_along_rows(features, dep):
        return False
    if dep.is_indirect():
        return True
    if not any(index.coeff(var) in ADJACENT for var in others):
        return False
    apart = abs(row_stride(features, dep, index)) * V.graph.get_dtype(dep.name).itemsize
    return V.graph.sizevars.statically_known_lt(apart, SECTOR_BYTES)


def row_stride(features: SIMDKernelFeatures, dep: MemoryDep, index: sympy.Expr) -> sympy.Expr:
    """
    Elements from a row of ``dep``, by ``index``, to the next that does not share them. A
    variable may be of columns and of rows, where those follow one another in memory.
    """
    columns, sizevars = features.reduction_numel, V.graph.sizevars
    for var, size in reversed(dep.ranges.items()):
        if sizevars.statically_known_multiple_of(columns, size) and columns != 1:
            columns = columns / size
            continue
        if not sizevars.statically_known_multiple_of(size, columns):
            break
        if stride := index.coeff(var):
            return stride * columns
        columns = sympy.S.One
    return sympy.oo


def moves_along_rows(features: SIMDKernelFeatures, dep: MemoryDep) -> bool:
    """Whether no inner variable is left out of ``dep``, as of what is broadcast along columns."""
    elements = features.numel * features.reduction_numel
    found = sympy_product(dep.ranges.values())
    return V.graph.sizevars.statically_known_equals(found, elements)


def nearby(index: sympy.Expr) -> sympy.Expr:
    """
    ``index`` where no quotient changes, no remainder begins anew and nothing is clamped, as of
    most elements and those beside them: a part of a concatenation, or of a padded tensor, has
    quotients and remainders, and a table of distances has bounds.
    """
    index = index.replace(lambda each: isinstance(each, BOUNDS), unclamped)
    index = index.replace(
        ModularIndexing,
        lambda base, divisor, _: base if divisor == 1 else sympy.S.Zero,
    )
    return index.replace(FloorDiv, lambda *_: sympy.S.Zero).expand(identity=True)


def is_read_both_ways(features: SIMDKernelFeatures) -> bool:
    """Whether rows are read across, and no less is read and written along them."""
    scores = features.tiling_scores
    return (
        bool(scores)
        and scores.keys() == {"x", "r0_"}
        and scores["r0_"] >= scores["x"]
        and reads_across_rows(features)
    )


def unclamped(bounded: sympy.Expr) -> sympy.Expr:
    """What a maximum or a minimum bounds, if that is one expression with variables."""
    inner = [arg for arg in bounded.args if arg.free_symbols]
    return inner[0] if len(inner) == 1 else bounded


def row_passes(ops: Sequence[Op]) -> list[OrderedSet[int]]:
    """
    The operations of each loop over a row: what its reductions need, or, of the last, what
    is stored, but for what is known of the row by then.
    """
    level: list[int] = []
    for op in ops:
        before = max((level[j] for j in op.inputs), default=0)
        level.append(before + (op.name == "row_reduction"))
    passes = []
    for each in range(1, max(level, default=0) + 2):
        last = each > max(level, default=0)
        needed = OrderedSet(
            i
            for i, op in enumerate(ops)
            if (op.name == "store" and last)
            or (op.name == "row_reduction" and level[i] == each)
        )
        roots = OrderedSet(needed)
        for i in reversed(range(len(ops))):
            if i in needed and (ops[i].name != "row_reduction" or i in roots):
                needed.update(ops[i].inputs)
        passes.append(needed)
    return passes
