"""
What a load varies with, also one by an index of data.

A dependency of a gather names a symbol for the place that was loaded, not the loops that
the place varies with. So a sum of gathered rows seems to read the same row again and again:
lowering does not split it, and the scheduler takes its rows for broadcast ones. Here a
gather is read as if its places were in order: each is where it was itself loaded from.
``x[index[i], j]`` with rows of 96 columns is a load at ``96 * i + j``.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Optional, TYPE_CHECKING
from unittest.mock import patch

import sympy

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import make_symbol, SymT

from .dependencies import index_vars_squeeze
from .ops_handler import DefaultHandler
from .utils import sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .ir import ComputedBuffer, Reduction, TensorBox
    from .scheduler import BaseSchedulerNode


@dataclasses.dataclass(frozen=True)
class Load:
    """
    Of the buffer ``name``, at ``index``; of a gather that as if in order, and what the
    places that were loaded for it vary with. None of what is no gather.
    """

    name: str
    index: sympy.Expr
    places: Optional[OrderedSet[sympy.Symbol]] = None


class _Loads(DefaultHandler):
    """
    An ops handler that notes loads. A value is the set of indices that it was loaded at,
    or that those were from which it was made; one that is computed is its own index.
    """

    def __init__(self) -> None:
        self.found: list[Load] = []
        self.loaded: OrderedSet[sympy.Expr] = OrderedSet()
        # of each symbol of a place: its index in order, and what it varies with if loaded
        self.ordered: dict[sympy.Symbol, sympy.Expr] = {}
        self.places: dict[sympy.Symbol, OrderedSet[sympy.Symbol]] = {}

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = (*args, *kwargs.values())
        return OrderedSet().union(*(v for v in values if isinstance(v, OrderedSet)))

    def load(self, name: str, index: sympy.Expr) -> OrderedSet[sympy.Expr]:
        index = sympy.sympify(index)
        symbols = [each for each in self.ordered if each in index.free_symbols]
        places = None
        if symbols:
            index = sympy_subs(index, self.ordered)
            places = OrderedSet().union(*(self.places[each] for each in symbols))
        self.found.append(Load(name, index, places))
        self.loaded.add(index)
        return OrderedSet([index])

    def index_expr(self, expr: sympy.Expr, dtype: Any) -> OrderedSet[sympy.Expr]:
        return OrderedSet([sympy_subs(sympy.sympify(expr), self.ordered)])

    # of 2.15, one whose value is computed with
    value_expr = index_expr

    def indirect_indexing(self, index: Any, *args: Any, **kwargs: Any) -> sympy.Symbol:
        symbol = make_symbol(SymT.INDIRECT, len(self.ordered))
        self.ordered[symbol] = sympy.Add(*index)
        self.places[symbol] = OrderedSet().union(
            *(each.free_symbols for each in index & self.loaded)
        )
        return symbol

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        value = body()
        return self._default("masked", (mask, getattr(value, "value", value)), {})

    def frexp(self, x: Any) -> tuple[Any, Any]:
        return x, x


def loads_of(
    inner_fn: Callable[..., Any], loops: Sequence[Sequence[sympy.Expr]]
) -> list[Load]:
    """Those of what ``inner_fn`` computes."""
    # a circle: ir imports this module in turn
    from .ir import FlexibleLayout

    handler = _Loads()
    with (
        V.set_ops_handler(handler),
        patch.object(FlexibleLayout, "allow_indexing", True),
    ):
        inner_fn(*loops)
    return handler.found


def gathers_of_all(
    inner_fn: Callable[..., Any], *sizes: Sequence[sympy.Expr]
) -> list[Load]:
    """The gathers that vary with each of the loops, of ``sizes``."""
    loops, ranges = index_vars_squeeze(*sizes)
    return [
        each
        for each in loads_of(inner_fn, loops)
        if each.places is not None and ranges.keys() <= each.index.free_symbols
    ]


def gathered_indices(reduction: Reduction) -> list[sympy.Expr]:
    """
    Those at which ``reduction`` gathers, in the variables that ``index_vars_squeeze`` makes
    of its sizes.
    """
    sizes = reduction.get_size(), reduction.get_reduction_size()
    return [each.index for each in gathers_of_all(reduction.inner_fn, *sizes)]


def broadcast_indices(reduction: Reduction) -> list[sympy.Expr]:
    """Those of its loads that vary with some loop of the reduction, in the same variables."""
    sizes = reduction.get_size(), reduction.get_reduction_size()
    loops, _ = index_vars_squeeze(*sizes)
    found = loads_of(reduction.inner_fn, loops)
    return [each.index for each in found if each.index.free_symbols & {*loops[1]}]


def gathered_rows(buffer: ComputedBuffer) -> list[sympy.Expr]:
    """Where the reduction ``buffer`` begins to gather."""
    if not any(dep.is_indirect() for dep in buffer.get_read_writes().reads):
        return []
    data = buffer.data
    (_, reduced), _ = index_vars_squeeze(data.get_size(), data.get_reduction_size())
    begin = {each: sympy.S.Zero for each in reduced if each != 0}
    return [sympy_subs(index, begin) for index in gathered_indices(data)]


def gathers_along_rows(x: TensorBox) -> bool:
    """Whether a place is loaded for each element of a row of ``x``, to gather it from."""
    (loops,), _ = index_vars_squeeze(x.get_size())
    found = loads_of(x.make_loader(), [loops])
    return any(loops[-1] in each.places for each in found if each.places)


_whole: weakref.WeakKeyDictionary[BaseSchedulerNode, OrderedSet[str]] = (
    weakref.WeakKeyDictionary()
)


def gathered_whole(node: BaseSchedulerNode) -> OrderedSet[str]:
    """The buffers of which a reduction in ``node`` gathers an element for each of its loops."""
    # a circle: ir imports this module in turn
    from .ir import Reduction

    if node not in _whole:
        _whole[node] = OrderedSet(
            gather.name
            for each in node.get_nodes()
            if each.is_reduction() and isinstance(each.node.data, Reduction)  # no scan
            for gather in gathers_of_all(*whole_reduction(each.node))
        )
    return _whole[node]


def whole_reduction(buffer: ComputedBuffer) -> tuple[Any, ...]:
    """What ``buffer`` reduces, and its sizes; of two layers those of the whole."""
    if buffer._original_inner_fn is None:
        data = buffer.data
        return data.inner_fn, data.get_size(), data.get_reduction_size()
    return (
        buffer._original_inner_fn,
        buffer._original_ranges,
        buffer._original_reduction_ranges,
    )
