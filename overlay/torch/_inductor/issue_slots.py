"""
How long a kernel computes an element, in issue slots, from the loop bodies of its nodes.

A scheduler of a GPU issues an instruction of a warp a clock. One on integers, and one
that compares or selects, keeps the half as wide pipe for such instructions busy for two.
What has one value for all elements of a row is not counted, nor are addresses, which a
thread computes once for the columns that it has of a row. What is done at places that are
read from a tensor is: to wrap and to check an index, and the arithmetic on it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TYPE_CHECKING

import sympy

import torch
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, Max, Min, ModularIndexing, PythonMod

from .utils import sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .loop_body import LoopBody, LoopBodyBlock


# Slots of what takes more than one: in the machine code that Triton 3.6 makes of each for
# compute capability 9.0, on float32, with 32 elements a thread (tanh: 8).
SLOTS = {
    "exp": 8,
    "expm1": 25,
    "log": 25,
    "log1p": 29,
    "log2": 27,
    "log10": 27,
    # as in runtime/sigmoidal.py
    "sigmoid": 5,
    "tanh": 15,
    "erf": 18,
    "erfc": 47,
    "erfinv": 41,
    "lgamma": 211,
    "sin": 81,
    "cos": 83,
    "tan": 79,
    "acos": 16,
    "asin": 22,
    "atan": 43,
    "atan2": 62,
    "sinh": 31,
    "cosh": 19,
    "asinh": 58,
    "acosh": 64,
    "atanh": 42,
    "bessel_j0": 138,
    "bessel_j1": 138,
    "bessel_y0": 331,
    "bessel_y1": 354,
    "modified_bessel_i0": 57,
    "modified_bessel_i1": 59,
    "erfcx": 63,
    "hypot": 15,
    "i0": 57,
    "i1": 59,
    "ldexp": 38,
    "nextafter": 32,
    "pow": 116,
    "sqrt": 15,
    "truediv": 7,
    "div_rn": 7,
    "fmod": 65,
    "mod": 22,
    "remainder": 22,
    # of integers
    "floordiv": 23,
    "truncdiv": 23,
    # ten rounds of Philox, on integers
    "rand": 75,
    "randn": 75,
}
# On the pipe for integers, which compares and selects as well, and has half the lanes
# (CUDA C++ Programming Guide, throughput of native arithmetic instructions).
INTEGER_SLOTS = 2
INTEGER_OPS = OrderedSet(
    [
        *("eq", "ne", "lt", "le", "gt", "ge", "where", "minimum", "maximum"),
        "fmaximum",
        *("and_", "or_", "xor", "logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
        *("bitwise_left_shift", "bitwise_right_shift"),
    ]
)
# To wrap an index from the end and to check it: an addition, four comparisons, a selection
# and the logic between them.
INDIRECT_SLOTS = 8 * INTEGER_SLOTS
# A quotient by a constant, rounded down, of what may be negative.
DIVISION_SLOTS = 8 * INTEGER_SLOTS


@dataclasses.dataclass(frozen=True)
class IssueSlots:
    """
    What an element of a loop body takes.

    slots: of all that it does
    computed: the operations, each value once
    gathered: the buffers of which it loads elements where another tensor says, or that do
        not adjoin along a row
    """

    slots: int
    computed: tuple[str, ...]
    gathered: OrderedSet[str]

    def of(self, names: Sequence[str]) -> int:
        """The slots of operations of ``names``."""
        return sum(op_slots(name) for name in self.computed if name in names)


def count_slots(body: LoopBody, columns: sympy.Expr) -> IssueSlots:
    """Of ``body``, of whose loops the innermost are over the ``columns`` of a row."""
    counter = _Counter(body, columns)
    slots = counter.slots(body.root_block)
    return IssueSlots(slots, tuple(counter.computed), counter.gathered)


class _Counter:
    """Counts once what is computed twice; columns differ in the symbols of ``elements``."""

    def __init__(self, body: LoopBody, columns: sympy.Expr) -> None:
        self.body = body
        self.elements: OrderedSet[sympy.Symbol] = OrderedSet(body.reduce_vars)
        for i, var in enumerate(body.iter_vars):
            inner = sympy_product([*body.sizes[0][i + 1 :], *body.sizes[1]])
            if not V.graph.sizevars.statically_known_geq(inner, columns):
                self.elements.add(var)
        self.indirect = {str(symbol): symbol for symbol in body.indirect_vars}
        self.known: dict[tuple[Any, ...], str] = {}
        self.computed: list[str] = []
        # names of what has a value of its own for each element, and of what was loaded or
        # made of that
        self.wide: OrderedSet[str] = OrderedSet()
        self.read: OrderedSet[str] = OrderedSet()
        self.gathered: OrderedSet[str] = OrderedSet()
        self.places: OrderedSet[sympy.Symbol] = OrderedSet()

    def slots(self, block: LoopBodyBlock) -> int:
        total = 0
        values: dict[Any, str] = {}
        indices: dict[Any, sympy.Expr] = {}
        for node in block.graph.nodes:
            name = str(node.target)
            args = [
                values[arg] if isinstance(arg, torch.fx.Node) else arg for arg in node.args
            ]
            is_wide = any(values[each] in self.wide for each in node.all_input_nodes)
            expr = None
            if name == "get_index":
                expr = indices[node] = self.body.indexing_exprs[args[0]]
                args = [expr]
                is_wide = not self.elements.isdisjoint(expr.free_symbols)
            key = (name, *map(_hashed, args), *map(str, node.kwargs.items()))
            is_new = key not in self.known
            values[node] = self.known.setdefault(key, f"%{len(self.known)}")
            if name in self.body.subblocks:
                inner = self.slots(self.body.subblocks[name])
                is_wide |= inner > 0
                total += inner
            inputs = [values[each] for each in node.all_input_nodes]
            if name == "load" or any(each in self.read for each in inputs):
                self.read.add(values[node])
                if name.removeprefix("set_") in self.indirect:
                    self.places.add(self.indirect[name.removeprefix("set_")])
            if not is_wide:
                continue
            if name == "load" and self.is_gathered(indices.get(node.args[2], sympy.S.Zero)):
                self.gathered.add(node.args[1])
            self.wide.add(values[node])
            if name.removeprefix("set_") in self.indirect:
                self.elements.add(self.indirect[name.removeprefix("set_")])
            if is_new and expr is not None:
                total += self.arithmetic_slots(expr)
            elif is_new:
                self.computed.append(name)
                by_one_for_all = name == "truediv" and args[2] not in self.wide
                total += 1 if by_one_for_all else op_slots(name)
        return total

    def is_gathered(self, index: sympy.Expr) -> bool:
        """Whether no copy can bring ahead what is loaded at ``index``."""
        return not self.places.isdisjoint(index.free_symbols) or all(
            index.coeff(var) != 1 for var in self.elements
        )

    def arithmetic_slots(self, index: sympy.Expr) -> int:
        """Of what ``index`` makes of places that were read, each part of it once."""
        read = self.elements.intersection(self.indirect.values())
        total = 0
        for part in OrderedSet(sympy.preorder_traversal(index)):
            if read.isdisjoint(part.free_symbols):
                continue
            if isinstance(part, (FloorDiv, ModularIndexing, PythonMod)):
                total += DIVISION_SLOTS
            elif isinstance(part, (sympy.Add, Min, Max)):
                total += INTEGER_SLOTS * (len(part.args) - 1)
        return total


def _hashed(arg: Any) -> Any:
    """``arg`` as part of a key. An index is one; to print it takes long."""
    return arg if isinstance(arg, sympy.Basic) else str(arg)


def op_slots(name: str) -> int:
    """Of an operation by the ``name`` that it has in a loop body."""
    if name in ("get_index", "index_expr", "value_expr"):
        return 0
    if name in ("constant", "output", "placeholder"):
        return 0
    if name.startswith("set_indirect"):
        return INDIRECT_SLOTS
    if name.startswith("masked_subblock"):
        return 0  # its load has the mask
    return SLOTS.get(name, INTEGER_SLOTS if name in INTEGER_OPS else 1)
