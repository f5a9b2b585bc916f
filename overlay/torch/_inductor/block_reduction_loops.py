"""
The loops of a block reduction over a transposed input, and of what goes on with it.

How the blocks were written decides what loops they have::

    t = x.t().contiguous()                      # x [M, N]
    blocks = t.reshape(N, -1, 32)               # loops [N, M / 32] and [N, M / 32, 32]
    blocks = t.reshape(-1, 32)                  # loops [N * M / 32] and [N * M / 32, 32]

The second reads x through ``//`` and ``%``. The pointwise node that scales the blocks is
fused with the reduction where both have the same loops, and where its tiling is that of a
reduction; and a tile of whole lines of what is read, next to blocks that go on in memory,
needs [M / 32, N]. So loops are split where an index needs it, and go as the reduction
reads: along the dimension of stride 1 last. The nodes that go on with the same values, or
with those of blocks, get the loops of the reduction, by what both of them read.

Each node computes what it did before: its loops are counted otherwise. Nodes that have
these loops are left alone, as are those of which an index stays with a ``//`` or a ``%``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

from . import config, dependencies
from .block_reduction_tile import may_have_tile
from .loop_body import LoopBody, MemoryUsageType
from .tiling_utils import has_indirect_access
from .utils import sympy_product, sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import BaseSchedulerNode, SchedulerNode


# Loops are split this many times at most: a flattened [B, M, N] takes 3.
MAX_SPLITS = 8
ACCESSES = (
    MemoryUsageType.LOAD,
    MemoryUsageType.STORE,
    MemoryUsageType.STORE_REDUCTION,
)


@dataclasses.dataclass
class Strides:
    """
    An index as ``start`` and a stride for each of the loops' variables.

    ranges: how far the variables go
    """

    start: sympy.Expr
    strides: dict[sympy.Symbol, sympy.Expr]
    ranges: dict[sympy.Symbol, sympy.Expr]

    @classmethod
    def of(cls, index: sympy.Expr, ranges: dict[Any, Any]) -> Optional[Strides]:
        """None for what is no sum of multiples of the variables."""
        index = index.replace(Identity, lambda x: x)
        if has_indirect_access(index):
            return None
        zero = dict.fromkeys(ranges, 0)
        start = sympy_subs(index, zero)
        strides = {v: sympy_subs(index, {**zero, v: 1}) - start for v in ranges}
        total = start + sum(v * stride for v, stride in strides.items())
        if sympy.expand(total - index) != 0:
            return None
        return cls(start, strides, ranges)


def _equal(a: Any, b: Any) -> bool:
    return V.graph.sizevars.statically_known_equals(a, b)


def _stays_below(base: sympy.Expr, bound: sympy.Expr, ranges: dict[Any, Any]) -> bool:
    """Whether ``base`` is in [0, bound) for all values of the variables of ``ranges``."""
    sizevars = V.graph.sizevars
    found = Strides.of(base, ranges)
    if found is None or not sizevars.statically_known_geq(found.start, 0):
        return False
    if not all(sizevars.statically_known_geq(s, 0) for s in found.strides.values()):
        return False
    last = {v: n - 1 for v, n in ranges.items()}
    most = sizevars.simplify(sympy.expand(sympy_subs(base, last)))
    return sizevars.statically_known_lt(most, bound)


def without_needless_modulo(
    index: sympy.Expr, ranges: dict[sympy.Symbol, sympy.Expr]
) -> sympy.Expr:
    """``index`` without the ``//`` and ``%`` that do nothing within ``ranges``."""

    def floor_div(base: sympy.Expr, divisor: sympy.Expr) -> sympy.Expr:
        if _stays_below(base, divisor, ranges):
            return sympy.S.Zero
        return FloorDiv(base, divisor)

    def modular(base: Any, divisor: Any, modulus: Any) -> sympy.Expr:
        if _stays_below(base, divisor * modulus, ranges):
            return floor_div(base, divisor) if divisor != 1 else base
        return ModularIndexing(base, divisor, modulus)

    return index.replace(FloorDiv, floor_div).replace(ModularIndexing, modular)


def _split_at(
    index: sympy.Expr, ranges: dict[sympy.Symbol, sympy.Expr], variables: Sequence[Any]
) -> Optional[tuple[sympy.Symbol, sympy.Expr]]:
    """
    One of ``variables``, and elements of it after which a ``//`` of ``index`` goes on, or
    a ``%`` begins again.
    """
    sizevars = V.graph.sizevars
    for each in index.atoms(FloorDiv, ModularIndexing):
        base, divisor, *modulus = each.args
        found = Strides.of(base, ranges)
        if found is None:
            continue
        for v in variables:
            stride = found.strides[v]
            if stride == 0:
                continue
            for bound in (divisor, *(divisor * m for m in modulus)):
                if not sizevars.statically_known_multiple_of(bound, stride):
                    continue
                inner = FloorDiv(bound, stride)
                if (
                    sizevars.statically_known_gt(inner, 1)
                    and sizevars.statically_known_lt(inner, ranges[v])
                    and sizevars.statically_known_multiple_of(ranges[v], inner)
                ):
                    return v, inner
    return None


def with_loops(
    body: LoopBody, sizes: tuple[Sequence[Any], Sequence[Any]], reindex: Any
) -> LoopBody:
    """
    ``body`` with loops of ``sizes``. ``reindex`` takes the new variables, those of the
    iteration and those of the reduction, and returns what the old ones are.
    """
    (iter_vars, reduce_vars), ranges = dependencies.index_vars_no_squeeze(
        *sizes, prefix="p"
    )
    new = LoopBody(
        body,
        reindex(iter_vars, reduce_vars),
        ranges,
        iter_vars,
        reduce_vars,
        allow_same_symbol_in_index=True,
    )
    new.indexing_exprs = {
        name: without_needless_modulo(index, ranges)
        for name, index in new.indexing_exprs.items()
    }
    return new


def accessed(body: LoopBody) -> list[tuple[str, sympy.Expr, bool]]:
    """The buffers that ``body`` accesses: name, index, and whether it writes there."""
    return [
        (entry.buffer_name, body.indexing_exprs[entry.index_name], kind != MemoryUsageType.LOAD)
        for kind in ACCESSES
        for entry in body.memory_usage[kind]
        if entry.buffer_name is not None
    ]


def split_loop(body: LoopBody, variable: sympy.Symbol, inner: sympy.Expr) -> LoopBody:
    """``body`` with the loop of ``variable`` as two, the second of ``inner``."""
    at = body.iter_vars.index(variable)
    iteration = [*body.sizes[0]]
    iteration[at : at + 1] = [FloorDiv(iteration[at], inner), inner]

    def reindex(iter_vars: Any, reduce_vars: Any) -> Any:
        joined = iter_vars[at] * inner + iter_vars[at + 1]
        return [[*iter_vars[:at], joined, *iter_vars[at + 2 :]], reduce_vars]

    return with_loops(body, (iteration, body.sizes[1]), reindex)


def split_loops(body: LoopBody) -> LoopBody:
    """``body`` with its iteration split so that as few indices as may be need a modulo."""
    for _ in range(MAX_SPLITS):
        found = (
            _split_at(index, body.var_ranges, body.iter_vars)
            for _, index, _ in accessed(body)
        )
        first = next((each for each in found if each), None)
        if first is None:
            break
        body = split_loop(body, *first)
    return body


def in_order(body: LoopBody, order: Sequence[int]) -> LoopBody:
    """``body`` with the loops of its iteration in ``order``."""
    if [*order] == [*range(len(body.iter_vars))]:
        return body
    iteration = [body.sizes[0][i] for i in order]

    def reindex(iter_vars: Any, reduce_vars: Any) -> Any:
        return [[iter_vars[order.index(i)] for i in range(len(order))], reduce_vars]

    return with_loops(body, (iteration, body.sizes[1]), reindex)


def count_as(mine: Strides, other: Strides) -> Optional[dict[Any, sympy.Expr]]:
    """
    The variables of ``mine`` by those of ``other``, so that both indices are the same. One
    variable without a stride goes with one that has none there, if both are as large.
    None where that is not possible.
    """
    if not _equal(mine.start, other.start):
        return None
    left = {v: s for v, s in other.strides.items() if not _equal(other.ranges[v], 1)}
    found: dict[Any, sympy.Expr] = {}
    without = []
    for v, stride in mine.strides.items():
        covered: sympy.Expr = sympy.S.One
        found[v] = sympy.S.Zero
        if stride == 0:
            without.append(v)
            continue
        while not _equal(covered, mine.ranges[v]):
            w = next((w for w, s in left.items() if _equal(stride * covered, s)), None)
            if w is None:
                return None
            found[v] += w * covered
            covered = covered * other.ranges[w]
            del left[w]
    without = [v for v in without if not _equal(mine.ranges[v], 1)]
    if without or left:
        if len(without) != 1 or len(left) != 1:
            return None
        (v,), ((w, stride),) = without, left.items()
        if stride != 0 or not _equal(mine.ranges[v], other.ranges[w]):
            return None
        found[v] = w
    return found


def _loops_as(
    body: LoopBody, known: dict[str, list[Strides]], sizes: Sequence[Any]
) -> Optional[LoopBody]:
    """
    ``body`` of a pointwise node with loops of ``sizes``, in which a buffer of ``known`` is
    read at a known index; or None.
    """
    body = split_loops(body)
    for name, index, is_write in accessed(body):
        if is_write or (mine := Strides.of(index, body.var_ranges)) is None:
            continue
        for other in known.get(name, ()):
            if len(other.ranges) != len(sizes):
                continue
            if found := count_as(mine, other):
                return _counted_as(body, found, [*other.ranges], sizes)
    return None


def _counted_as(
    body: LoopBody,
    found: dict[Any, sympy.Expr],
    variables: Sequence[sympy.Symbol],
    sizes: Sequence[Any],
) -> LoopBody:
    """``body`` with loops of ``sizes``, its variables ``found`` by these ``variables``."""
    of_variables = [found[v] for v in body.iter_vars]
    if of_variables == [*variables]:
        return body

    def reindex(iter_vars: Any, reduce_vars: Any) -> Any:
        new = dict(zip(variables, iter_vars))
        return [[sympy_subs(e, new) for e in of_variables], reduce_vars]

    return with_loops(body, (sizes, []), reindex)


def _main_read(body: LoopBody) -> Optional[tuple[str, Strides]]:
    """What a reduction reads of the most elements, if it reads that along a loop."""
    hint = V.graph.sizevars.optimization_hint
    best: Optional[tuple[int, str, Strides]] = None
    for name, index, is_write in accessed(body):
        if is_write or (found := Strides.of(index, body.var_ranges)) is None:
            continue
        ranges = (n for v, n in body.var_ranges.items() if v in index.free_symbols)
        size = hint(sympy_product(ranges))
        if best is None or size > best[0]:
            best = size, name, found
    if best is None:
        return None
    _, name, found = best
    along = [v for v in body.iter_vars if _equal(found.strides[v], 1)]
    if len(along) != 1 or any(_equal(found.strides[v], 1) for v in body.reduce_vars):
        return None
    return name, found


def _as_read(body: LoopBody, read: Strides) -> list[int]:
    """The order of the loops by which ``read`` goes through memory."""
    hint = V.graph.sizevars.optimization_hint
    strides = [hint(read.strides[v]) for v in body.iter_vars]
    # What is not read from one value to the next stays in front.
    return sorted(range(len(strides)), key=lambda i: (strides[i] != 0, -strides[i]))


def _loops_of(
    node: SchedulerNode, done: OrderedSet[SchedulerNode]
) -> dict[SchedulerNode, LoopBody]:
    """
    The reduction ``node`` and what goes on with its values or results, each with its new
    loops; those of ``done`` keep theirs. Empty where no values are written along the blocks:
    as they are read, the loops that blocks were written in are as fast.
    """
    body = split_loops(node._body)
    read = _main_read(body)
    if read is None:
        return {}
    body = in_order(body, _as_read(body, read[1]))
    if (read := _main_read(body)) is None:
        return {}
    name, strides = read
    loops: dict[SchedulerNode, LoopBody] = {node: body}
    of_values = {name: [strides]}
    of_blocks: dict[str, list[Strides]] = {}
    blocks, values = node.group[1][0], sympy_product(node.group[1])
    sizes = {"blocks": [*body.sizes[0]], "values": [*body.sizes[0], *body.sizes[1]]}
    along_blocks = False
    queue = [node]
    while queue:
        each = queue.pop(0)
        for buffer, index, is_write in accessed(loops[each]):
            if is_write and (at := Strides.of(index, loops[each].var_ranges)):
                if _equal(each.group[1][0], blocks):
                    ranges = {v: at.ranges[v] for v in loops[each].iter_vars}
                    at = Strides(at.start, {v: at.strides[v] for v in ranges}, ranges)
                    of_blocks.setdefault(buffer, []).append(at)
                else:
                    of_values.setdefault(buffer, []).append(at)
                    along_blocks |= at.strides[loops[each].iter_vars[-1]] == 1
        for user in _users(each):
            if user in loops or user.is_reduction():
                continue
            numel = user.group[1][0]
            if _equal(numel, blocks):
                new = _loops_as(user._body, of_blocks, sizes["blocks"])
            elif _equal(numel, values):
                new = _loops_as(user._body, of_values, sizes["values"])
            else:
                continue
            if new is not None and (user not in done or new is user._body):
                loops[user] = new
                queue.append(user)
    changed = body is not node._body or any(
        new is not each._body and not _equal(each.group[1][0], blocks)
        for each, new in loops.items()
    )
    return loops if along_blocks and changed else {}


def _users(node: SchedulerNode) -> list[SchedulerNode]:
    """The generated nodes that read what ``node`` writes."""
    return [
        user.node
        for output in node.get_outputs()
        for user in output.users
        if isinstance(getattr(user.node, "_body", None), LoopBody) and not user.is_weak
    ]


def follow_reads(nodes: Sequence[BaseSchedulerNode]) -> None:
    """
    Give the block reductions of ``nodes``, and what goes on with them, the loops by which
    they read.
    """
    if not config.triton.block_reduction_tiles:
        return
    done: OrderedSet[Any] = OrderedSet()
    for node in nodes:
        if (
            not isinstance(getattr(node, "_body", None), LoopBody)
            or not node.is_reduction()
            or not may_have_tile(node.get_device(), node.group[1][1])
            or len(node._body.reduce_vars) != 1
        ):
            continue
        for each, new in _loops_of(node, done).items():
            done.add(each)
            if new is each._body:
                continue
            each._body, each._sizes = new, new.sizes
            each.refresh_dependencies(
                normalize=not config.loop_ordering_after_fusion,
                need_clear_tiling_cache=True,
            )
