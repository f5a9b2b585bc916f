"""
Loops of a body that are counted otherwise: split where an index needs it, in another order,
or as those of another body that reads the same.

Each node computes what it did before.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Optional, TYPE_CHECKING

import sympy

from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

from . import dependencies
from .loop_body import LoopBody, MemoryUsageType
from .tiling_utils import has_indirect_access
from .utils import sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence


# Loops are split this many times at most: a flattened [B, M, N] takes 3.
MAX_SPLITS = 8
ACCESSES = (
    MemoryUsageType.LOAD,
    MemoryUsageType.STORE,
    MemoryUsageType.STORE_REDUCTION,
)


@dataclasses.dataclass(frozen=True)
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
        return _strides(index, tuple(ranges.items()))


# nodes and layers read alike, and each is asked for a few times
@functools.lru_cache(1024)
def _strides(index: sympy.Expr, ranges: tuple[tuple[Any, Any], ...]) -> Optional[Strides]:
    index = index.replace(Identity, lambda x: x)
    if has_indirect_access(index):
        return None
    zero = {v: 0 for v, _ in ranges}
    start = sympy_subs(index, zero)
    strides = {v: sympy_subs(index, {**zero, v: 1}) - start for v in zero}
    total = start + sum(v * stride for v, stride in strides.items())
    if sympy.expand(total - index) != 0:
        return None
    return Strides(start, strides, dict(ranges))


def equal(a: Any, b: Any) -> bool:
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


def split_at(
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
            split_at(index, body.var_ranges, body.iter_vars)
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
    if not equal(mine.start, other.start):
        return None
    left = {v: s for v, s in other.strides.items() if not equal(other.ranges[v], 1)}
    found: dict[Any, sympy.Expr] = {}
    without = []
    for v, stride in mine.strides.items():
        covered: sympy.Expr = sympy.S.One
        found[v] = sympy.S.Zero
        if stride == 0:
            without.append(v)
            continue
        while not equal(covered, mine.ranges[v]):
            w = next((w for w, s in left.items() if equal(stride * covered, s)), None)
            if w is None:
                return None
            found[v] += w * covered
            covered = covered * other.ranges[w]
            del left[w]
    without = [v for v in without if not equal(mine.ranges[v], 1)]
    if without or left:
        if len(without) != 1 or len(left) != 1:
            return None
        (v,), ((w, stride),) = without, left.items()
        if stride != 0 or not equal(mine.ranges[v], other.ranges[w]):
            return None
        found[v] = w
    return found


def loops_as(
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
                return counted_as(body, found, [*other.ranges], sizes)
    return None


def counted_as(
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
