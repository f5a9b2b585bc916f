"""
Functions of many instructions, of a small tensor: computed once where it is broadcast.

What is pointwise is computed where it is read, again for each element of a tensor that
it is broadcast to. For most functions that is cheaper than to load it. But the cosines
of rotary embeddings, [tokens, channels], are read for each batch and head, and a cosine
with the power that its angle is made of takes a hundred instructions and more. So does
the scale of a block of values where it is a quotient in float64. A gather along a row, as
that of a bias by relative position, takes a load of eight bytes, the arithmetic of an index
in int64, and a load that is not coalesced.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING
from unittest import mock

import sympy

import torch
from torch.utils._ordered_set import OrderedSet

from . import config
from .dependencies import index_vars_squeeze
from .gathers import gathers_along_rows
from .ops_handler import OpCounterCSE
from .utils import is_gpu, sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from .ir import Pointwise, StorageBox, TensorBox


# Those that take 30 instructions or more on a GPU, many with branches.
SLOW_FUNCTIONS = OrderedSet(
    [
        *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh"),
        *("cos", "cosh", "sin", "sinh", "tan", "tanh"),
        *("erfc", "erfinv", "lgamma", "pow"),
    ]
)
# Those that take as many in float64, by Newton's method.
SLOW_IN_FLOAT64 = OrderedSet(["truediv", "div_rn", "reciprocal", "sqrt", "rsqrt"])
# How often an element is used, at least: to store one takes as long as to load some.
MIN_USES = 8
# Elements of the tensor, at least: a thread computes one of fewer for all that it has.
MIN_NUMEL = 32
# Elements that are computed, at least: fewer take as long as to launch a kernel, 2 to 3 us.
MIN_COMPUTED = 1 << 22


def realize_slow_functions(x: TensorBox, uses: int) -> None:
    """
    Give ``x`` a kernel of its own if it computes a slow function, or gathers, and each of
    its elements is used ``uses`` times, which are enough. What views a part of a tensor is
    as it was: the rest might never be used.
    """
    from .ir import BaseView, get_device_type, Pointwise, StorageBox

    if not config.realize_slow_functions or uses < MIN_USES:
        return
    box = x.data
    while isinstance(box, BaseView):
        box = box.data
    if not (
        isinstance(box, StorageBox)
        and isinstance(box.data, Pointwise)
        and is_gpu(get_device_type(box))
    ):
        return
    sizevars = V.graph.sizevars
    numel = sympy_product(box.get_size())
    elements = sizevars.optimization_hint(numel, fallback=0)
    if (
        elements >= MIN_NUMEL
        and elements * uses >= MIN_COMPUTED
        and sizevars.statically_known_equals(sympy_product(x.get_size()), numel)
        and (computes_slow_function(box.data) or gathers_along_rows(x))
    ):
        box.realize()
        order = order_of_reads(x)
        if order != fill_order(box):
            box.freeze_layout_with_fill_order(order)


def fill_order(box: StorageBox) -> list[int]:
    """The dimensions of ``box`` as it would be computed, the innermost in memory first."""
    from .ir import ComputedBuffer, FlexibleLayout

    found = None
    if isinstance(box.data, ComputedBuffer):
        with mock.patch.object(FlexibleLayout, "allow_indexing", True):
            found = box.data.get_fill_order()
    return [*found] if found else [*reversed(range(len(box.get_size())))]


def order_of_reads(x: TensorBox) -> list[int]:
    """
    The dimensions of what ``x`` is, or is a view of, the one that the innermost dimension of
    ``x`` moves along first. What reads it is coalesced so, which is more than what computes it:
    the angles of rotary embeddings are a matrix product, transposed.
    """
    from .ir import BaseView

    (loops,), _ = index_vars_squeeze(x.get_size())
    depths = {loop: depth for depth, loop in enumerate(loops)}
    view, places = x.data, loops
    while isinstance(view, BaseView):
        places = view.make_reindexer()(places)
        view = view.data

    def innermost(dimension: int) -> int:
        symbols = sympy.sympify(places[dimension]).free_symbols
        return max((depths.get(each, -1) for each in symbols), default=-1)

    dimensions = [*reversed(range(len(places)))]
    moved = [each for each in dimensions if innermost(each) >= 0]
    order = sorted(moved, key=innermost, reverse=True)
    return order + [each for each in dimensions if each not in moved]


def computes_slow_function(data: Pointwise) -> bool:
    """Whether an element of ``data`` is computed by one of 30 instructions or more."""
    from .ir import FlexibleLayout

    counter = _SlowFunctions()
    with (
        V.set_ops_handler(counter),
        mock.patch.object(FlexibleLayout, "allow_indexing", True),
    ):
        data.inner_fn(*data.inner_fn_args())
    return counter.found


class _SlowFunctions(OpCounterCSE):
    """Sees a slow function among what it counts; ``float64`` names values of that type."""

    def __init__(self) -> None:
        super().__init__(V.MockHandler())
        self.found = False
        self.float64: OrderedSet[str] = OrderedSet()

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super()._default(name, args, kwargs)
        if name in ("to_dtype", "constant"):
            is_float64 = args[1] == torch.float64
        else:
            is_float64 = any(
                isinstance(arg, str) and arg in self.float64 for arg in args
            )
        if is_float64:
            self.float64.add(result)
        if name in SLOW_FUNCTIONS or (is_float64 and name in SLOW_IN_FLOAT64):
            self.found = True
        return result

    def load(self, name: str, index: sympy.Expr) -> str:
        result = super().load(name, index)
        if V.graph.get_dtype(name) == torch.float64:
            self.float64.add(result)
        return result


def sigmoidal(name: str, otherwise: str) -> str:
    """
    What a Triton kernel calls for erf, tanh or sigmoid: ``triton_helpers`` on NVIDIA's
    GPUs, whose approximate instructions they are made of, ``otherwise`` elsewhere.
    """
    device = V.graph.get_current_device_or_throw().type
    nvidia = device == "cuda" and torch.version.hip is None
    return f"{'triton_helpers' if nvidia else otherwise}.{name}"
