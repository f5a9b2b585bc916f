"""
Loops over long rows in pointwise kernels.

A pointwise kernel has one index for all of a tensor. Where rows begin apart, or share
values, as the gradient of a cross entropy shares its target and the row's logarithm, an
element's row and column are a quotient and a rest, and what the row shares is loaded,
and computed, again for each few elements. Where the number of columns is odd, a thread
has two adjacent ones in different rows, and accesses them one at a time, though each row
may be aligned.

As the loop of a reduction that reduces nothing, a program has a row: what the row shares
is loaded once, the column is the loop's index, and all blocks of the row but the last
are whole.
"""

from __future__ import annotations

import operator
from typing import Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet

from . import config
from .dependencies import MemoryDep
from .device_model import DeviceModel
from .looped_reduction import MAX_ACCESSES, SHORT_COLUMNS
from .looped_rows import FEW_ROWS
from .mix_order_accesses import accessed_numel
from .repeated_passes import FUNCTIONS
from .runtime.hints import DeviceProperties
from .vector_width import adjacent_columns, aligned_columns, largest_divisor
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import SchedulerNode


# Issue slots of an element, up to whose time in bytes a kernel with one index waits for what
# it computes: a slow function, a quotient and what rows share are 24 to 43. One that waits
# for memory has more loads in flight than a loop: in bfloat16 an element moves for 32 slots
# on an H200, and for 45 on an H100, where loops take 1.0 to 1.3 times as long.
COMPUTED_SLOTS = 32


def is_worth_a_loop(rows: int, columns: int, device: DeviceModel) -> bool:
    """Whether there are enough rows, as hinted, for programs of one each, and they are long."""
    enough = FEW_ROWS * device.sms
    return device.type == "cuda" and columns > SHORT_COLUMNS and rows >= enough


def pointwise_row_loop(
    nodes: Sequence[SchedulerNode],
) -> Optional[tuple[sympy.Expr, sympy.Expr]]:
    """
    The rows and the columns of a pointwise kernel of ``nodes`` that loops over rows; None
    where it has one index.

    It loops where rows share what is loaded, their columns can be loaded several at once,
    and elements cost more than to be moved: accesses that one index makes narrower, more
    of them than it makes wider, or a slow function of elements of few bytes.
    """
    from .codegen.simd import SIMDKernel

    where = nodes[0].get_device()
    if where is None or where.type != "cuda":
        return None
    if config.triton.force_cooperative_reductions or any(
        node.is_reduction() for node in nodes
    ):
        return None
    device = DeviceModel.of(DeviceProperties.create(where))
    deps = [dep for node in nodes for dep in node.read_writes.reads_and_writes()]
    if not all(isinstance(dep, MemoryDep) and not dep.is_indirect() for dep in deps):
        return None
    (_, (numel, _)) = nodes[0].group
    is_equal = V.graph.sizevars.statically_known_equals
    if not all(is_equal(node.group[1][0], numel) for node in nodes):
        return None
    whole = [dep for dep in deps if is_equal(accessed_numel(dep), numel)]
    # of the loops, which an access may be contiguous over
    innermost = [sizes[-1] for node in nodes if (sizes := node.get_ranges()[0])]
    columns = min((int(n) for n in innermost if n.is_Integer), default=0)
    if not columns or not 0 < len(OrderedSet(whole)) <= MAX_ACCESSES:
        return None
    rows = V.graph.sizevars.simplify(sympy.floor(numel / columns))
    hint = V.graph.sizevars.optimization_hint(rows, fallback=0)
    if not is_worth_a_loop(hint, columns, device):
        return None
    groups = (rows, sympy.Integer(columns))
    if not all(
        SIMDKernel.is_compatible(groups, node.get_ranges(), groups[1]) for node in nodes
    ):
        return None
    shares = any(has_a_value_a_row(dep, rows) for dep in deps)
    looped = [adjacent_columns(dep, groups[1]) for dep in whole]
    flat = [adjacent_elements(dep, groups[1]) for dep in whole]
    narrower = any(map(operator.lt, flat, looped)) and (
        sum(1 / n for n in looped) <= sum(1 / n for n in flat)
    )
    slow = any(node._body.has_op(name) for node in nodes for name in FUNCTIONS)
    most_bytes = COMPUTED_SLOTS / device.slots_per_byte
    computes = slow and moved_bytes(whole, nodes) <= most_bytes
    return groups if shares and max(looped) > 1 and (narrower or computes) else None


def adjacent_elements(dep: MemoryDep, columns: sympy.Expr) -> int:
    """Those that a thread can load at once by one index over rows of ``columns``."""
    flat = dep.normalize()
    vector = aligned_columns(flat)
    return vector if flat.is_contiguous() else largest_divisor(columns, vector)


def moved_bytes(whole: Sequence[MemoryDep], nodes: Sequence[SchedulerNode]) -> int:
    """Bytes of an element in the buffers of ``whole`` that a kernel of ``nodes`` moves."""
    names = OrderedSet(node.get_name() for node in nodes)
    is_local = V.graph.scheduler.can_buffer_be_removed_through_fusion
    return sum(
        V.graph.get_dtype(name).itemsize
        for name in OrderedSet(dep.name for dep in whole)
        if not is_local(name, names)
    )


def has_a_value_a_row(dep: MemoryDep, rows: sympy.Expr) -> bool:
    """Whether ``dep`` reads a value for each row."""
    return V.graph.sizevars.statically_known_equals(accessed_numel(dep), rows)
