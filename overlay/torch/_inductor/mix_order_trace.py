"""
What a mix-order kernel computes, as one list of operations, before it is generated.

The loop bodies of the nodes are walked in the order in which they would be
generated. What is computed twice is listed once, and a buffer that one node writes
and another reads is a value, as in the kernel. Each operation knows how wide its
result is: a tile ``[XBLOCK, R0_BLOCK]``, a column vector ``[1, R0_BLOCK]``, a row's
value ``[XBLOCK, 1]``, or a scalar.

A node is a candidate for many kernels. Its loop body is walked once (``_Recorder``), and what
it asks for is replayed for each.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import weakref
from typing import Any, Callable, Optional, TYPE_CHECKING, Union
from unittest.mock import patch

import sympy

import torch
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.symbol import make_symbol, symbol_is_type, SymT

from . import ir
from .gathers import whole_reduction
from .ops_handler import DefaultHandler
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import SchedulerNode


class Width(enum.IntEnum):
    """Which of a tile's two dimensions a value has."""

    SCALAR = 0
    ROWS = 1
    COLUMNS = 2
    TILE = 3


PREDICATES = OrderedSet(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "isnan",
        "isinf",
    ]
)


@dataclasses.dataclass(frozen=True)
class Op:
    """
    One operation. ``inputs`` are positions in the list; ``bits`` is an element's
    size in registers; ``memory_bits`` its size in memory, of a load or a store.
    ``name`` is that of ``ops``, or ``row_reduction`` (a barrier: what comes after
    needs the whole row), ``partial`` (added to an accumulator), ``store``.
    """

    name: str
    inputs: tuple[int, ...]
    width: Width
    bits: int
    memory_bits: int = 0


def register_bits(dtype: torch.dtype) -> int:
    """The size of an element of ``dtype`` as it is computed: half types in float32."""
    if dtype in (torch.bool, torch.int8, torch.uint8):
        return 8
    return max(32, dtype.itemsize * 8)


@dataclasses.dataclass(frozen=True)
class _Value:
    position: int


@dataclasses.dataclass(frozen=True)
class _Place:
    """
    An index, however the loops are numbered: its ``start``, which of a tile's dimensions it
    moves along, its number of symbols, and the values that are places in it.
    """

    start: sympy.Expr
    width: Width
    symbols: int
    indirect: tuple[_Value, ...]


@dataclasses.dataclass(frozen=True)
class _Call:
    """Of a method of ``Trace``; ``values`` is how many it returns."""

    method: str
    args: tuple[Any, ...]
    values: int


# of the nodes of one graph, each of which is a candidate for many kernels
_recorded: weakref.WeakKeyDictionary[Any, dict[Any, tuple[_Call, ...]]] = (
    weakref.WeakKeyDictionary()
)


# what reads alike has the same index, in the numbers of its loops
@functools.lru_cache(1024)
def _start(index: sympy.Expr) -> sympy.Expr:
    """``index`` where its loops, and the places that it takes from values, are at zero."""
    begin = [
        each
        for each in index.free_symbols
        if symbol_is_type(each, (SymT.INDEX, SymT.INDIRECT))
    ]
    return index.subs(dict.fromkeys(begin, sympy.S.Zero))


class _Recorder(DefaultHandler):
    """
    An ops handler that notes what a loop body asks for, with ``_Place`` for an index.
    ``rows`` is xnumel; the loops of a pointwise node run over its rows, then its columns.
    """

    def __init__(self, rows: sympy.Expr) -> None:
        self.calls: list[_Call] = []
        self.rows = rows
        self._values = 0
        self._widths: dict[sympy.Symbol, Width] = {}
        self._indirect: dict[sympy.Symbol, _Value] = {}

    @classmethod
    def of(cls, node: SchedulerNode, side: str, rows: sympy.Expr) -> tuple[_Call, ...]:
        """Of the loop body of ``node``, on this side of a kernel."""
        known = _recorded.setdefault(node._body, {})
        if (side, rows) not in known:
            recorder = cls(rows)
            with V.set_ops_handler(recorder):
                recorder._node(node, side)
            known[side, rows] = tuple(recorder.calls)
        return known[side, rows]

    def _symbols(
        self, sizes: Sequence[sympy.Expr], width: Optional[Width] = None
    ) -> list[sympy.Expr]:
        """Loop variables; without ``width``, of a tensor with ``rows`` rows."""
        symbols: list[sympy.Expr] = []
        numel = sympy.S.One
        for size in sizes:
            symbol = make_symbol(SymT.INDEX, len(self._widths))
            if width is not None:
                self._widths[symbol] = width
            elif V.graph.sizevars.statically_known_leq(numel * size, self.rows):
                self._widths[symbol] = Width.ROWS
            elif V.graph.sizevars.statically_known_geq(numel, self.rows):
                self._widths[symbol] = Width.COLUMNS
            else:
                self._widths[symbol] = Width.TILE
            numel *= size
            symbols.append(symbol)
        return symbols

    def _node(self, node: SchedulerNode, side: str) -> None:
        buffer = node.node
        assert isinstance(buffer, ir.ComputedBuffer)
        kept, reduced = Width.ROWS, Width.COLUMNS
        if side == "partial":
            kept, reduced = reduced, kept
        if not node.is_reduction():
            node._body(self._symbols(node._body.sizes[0]), [])
        elif buffer._original_inner_fn is None:
            iteration, reduction = node._body.sizes
            node._body(self._symbols(iteration, kept), self._symbols(reduction, reduced))
        else:
            # its loops are those of one layer of two: take the whole reduction
            data = buffer.data
            inner_fn, iteration, reduction = whole_reduction(buffer)
            loops = self._symbols(iteration, kept), self._symbols(reduction, reduced)
            with patch.object(ir.FlexibleLayout, "allow_indexing", True):
                value = inner_fn(*loops)
            result = self.reduction(
                data.dtype, data.src_dtype, data.reduction_type, value.value
            )
            self.store_reduction(buffer.get_name(), sympy.S.Zero, result)

    def _place(self, index: sympy.Expr) -> _Place:
        index = sympy.sympify(index)  # a lowering's own function has integers
        symbols = index.free_symbols
        width = Width.SCALAR
        for symbol in symbols:
            width = Width(width | self._widths.get(symbol, Width.SCALAR))
        return _Place(
            _start(index),
            width,
            len(symbols),
            tuple(value for each, value in self._indirect.items() if each in symbols),
        )

    def _call(self, method: str, *args: Any, values: int = 1) -> Any:
        self.calls.append(_Call(method, args, values))
        results = tuple(_Value(self._values + i) for i in range(values))
        self._values += values
        return results[0] if values == 1 else results

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call("op", name, *args, *kwargs.values())

    def load(self, name: str, index: sympy.Expr) -> _Value:
        return self._call("load", name, self._place(index))

    def to_dtype(self, x: _Value, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
        return self._call("to_dtype", x, dtype)

    def constant(self, value: Any, dtype: torch.dtype) -> _Value:
        return self._call("constant", value, dtype)

    def index_expr(self, expr: sympy.Expr, dtype: torch.dtype) -> _Value:
        return self._call("index_expr", self._place(expr), dtype)

    # of 2.15, one whose value is computed with
    value_expr = index_expr

    def indirect_indexing(self, index: Any, *args: Any, **kwargs: Any) -> sympy.Symbol:
        symbol = make_symbol(SymT.INDIRECT, len(self._indirect))
        self._indirect[symbol] = index
        return symbol

    def masked(self, mask: _Value, body: Callable[[], Any], other: Any) -> Any:
        value = body()
        return self._call("op", "where", mask, getattr(value, "value", value))

    def reduction(
        self, dtype: torch.dtype, src_dtype: Any, reduction_type: str, value: Any
    ) -> Any:
        values = {"welford_reduce": 3, "welford_combine": 3, "online_softmax_reduce": 2}
        count = values.get(reduction_type, 1)
        return self._call("reduction", dtype, reduction_type, value, count, values=count)

    def store(self, name: str, index: sympy.Expr, value: _Value, mode: Any = None) -> None:
        self._call("store", name, self._place(index), value, values=0)

    def store_reduction(self, name: str, index: sympy.Expr, value: _Value) -> None:
        self._call("store_reduction", name, self._place(index), value, values=0)

    def frexp(self, x: _Value) -> tuple[_Value, _Value]:
        value = self._default("frexp", (x,), {})
        return value, value

    def scan(self, dtypes: Any, combine_fn: Any, values: tuple[Any, ...]) -> Any:
        return tuple(self._default("scan", (value,), {}) for value in values)

    def sort(self, dtypes: Any, values: tuple[Any, ...], *args: Any) -> Any:
        return tuple(self._default("sort", (value,), {}) for value in values)

    def check_bounds(self, *args: Any) -> None:
        pass

    def device_assert_async(self, *args: Any) -> None:
        pass

    def output(self, *args: Any) -> None:
        pass


class Trace:
    """
    What a kernel computes, in ``ops``. Buffers that are ``internal`` to it are values, and
    not stored.
    """

    def __init__(self, internal: OrderedSet[str]) -> None:
        self.ops: list[Op] = []
        self._internal = internal
        self._side = "row_reduction"
        self._known: dict[Any, _Value] = {}
        self._written: dict[str, _Value] = {}

    @classmethod
    def of(
        cls,
        rows: sympy.Expr,
        contiguous: Sequence[SchedulerNode],
        other: Sequence[SchedulerNode],
    ) -> tuple[Op, ...]:
        """
        The kernel of the contiguous side's nodes and of the other side's reductions;
        what follows the latter comes after the kernel.
        """
        nodes = [*contiguous, *other]
        names = OrderedSet(node.get_name() for node in nodes)
        removable = nodes[0].scheduler.can_buffer_be_removed_through_fusion
        internal = OrderedSet(
            name
            for node in nodes
            for name in node.get_buffer_names()
            if removable(name, names)
        )
        trace = cls(internal)
        for node in contiguous:
            trace._replay(_Recorder.of(node, trace._side, rows))
        trace._side = "partial"
        for node in other:
            if node.is_reduction():
                trace._replay(_Recorder.of(node, trace._side, rows))
        return tuple(trace.ops)

    def _replay(self, calls: Sequence[_Call]) -> None:
        results: list[_Value] = []

        def known(arg: Any) -> Any:
            if isinstance(arg, _Value):
                return results[arg.position]
            if isinstance(arg, _Place) and arg.indirect:
                return dataclasses.replace(arg, indirect=known(arg.indirect))
            return tuple(map(known, arg)) if isinstance(arg, tuple) else arg

        for call in calls:
            result = getattr(self, call.method)(*map(known, call.args))
            if call.values:
                results.extend(result if call.values > 1 else (result,))

    def _add(self, op: Op, key: Any = None) -> _Value:
        key = (op, key)
        if key not in self._known:
            self._known[key] = _Value(len(self.ops))
            self.ops.append(op)
        return self._known[key]

    def _width_of(self, place: _Place) -> Width:
        width = place.width
        for value in place.indirect:
            width = Width(width | self.ops[value.position].width)
        return width

    def op(self, name: str, *args: Any) -> _Value:
        values = [self.ops[arg.position] for arg in args if isinstance(arg, _Value)]
        width = Width.SCALAR
        bits = 8 if name in PREDICATES else 0
        for value in values:
            width = Width(width | value.width)
            if name not in PREDICATES:
                bits = max(bits, value.bits)
        inputs = tuple(arg.position for arg in args if isinstance(arg, _Value))
        rest = tuple(str(arg) for arg in args if not isinstance(arg, _Value))
        return self._add(Op(name, inputs, width, bits or 32), rest)

    def load(self, name: str, place: _Place) -> _Value:
        if name in self._written:
            return self._written[name]
        dtype = V.graph.get_dtype(name)
        op = Op(
            "load", (), self._width_of(place), register_bits(dtype), dtype.itemsize * 8
        )
        # An element is loaded once, however the loops of a node number it; another
        # part of the buffer is another load.
        return self._add(op, (name, place.start))

    def to_dtype(self, x: _Value, dtype: torch.dtype) -> _Value:
        op = self.ops[x.position]
        if op.bits == register_bits(dtype) and op.bits >= 32:
            return x
        return self._add(
            Op("to_dtype", (x.position,), op.width, register_bits(dtype)), dtype
        )

    def constant(self, value: Any, dtype: torch.dtype) -> _Value:
        op = Op("constant", (), Width.SCALAR, register_bits(dtype))
        return self._add(op, str(value))

    def index_expr(self, place: _Place, dtype: torch.dtype) -> _Value:
        op = Op("index_expr", (), self._width_of(place), register_bits(dtype))
        return self._add(op, (op.width, place.symbols))

    def reduction(
        self, dtype: torch.dtype, reduction_type: str, value: Any, count: int
    ) -> Union[_Value, tuple[_Value, ...]]:
        values = value if isinstance(value, tuple) else (value,)
        inputs = tuple(each.position for each in values)
        width = Width.ROWS if self._side == "row_reduction" else Width.COLUMNS
        op = Op(self._side, inputs, width, register_bits(dtype))
        # each partial has its own accumulator, whatever it adds up
        key = reduction_type if self._side == "row_reduction" else len(self.ops)
        results = tuple(self._add(op, (key, i)) for i in range(count))
        return results if count > 1 else results[0]

    def store(self, name: str, place: _Place, value: _Value) -> None:
        self._written[name] = value
        if name not in V.graph.removed_buffers and name not in self._internal:
            bits = V.graph.get_dtype(name).itemsize * 8
            width = Width(self.ops[value.position].width | self._width_of(place))
            self._add(Op("store", (value.position,), width, 0, bits), name)

    def store_reduction(self, name: str, place: _Place, value: _Value) -> None:
        if self._side == "row_reduction":
            self.store(name, place, value)
