"""
What is known of an index that is computed from positions, ``iota``, and numbers alone.

It is evaluated while the graph is compiled. Where it does not decrease, the positions of an
element follow each other: they are in a window, whose first position is linear in the element
but for the ends, so that no table is needed. Windows are as large as the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Optional

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import map_arg, Node


aten = torch.ops.aten
prims = torch.ops.prims

# What makes or reshapes an index, beside pointwise functions.
OF_POSITIONS = (
    prims.iota.default,
    prims.convert_element_type.default,
    aten.expand.default,
    aten.full.default,
    aten.scalar_tensor.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.view.default,
)
# Positions of an index that is evaluated, and what it may be.
MAX_POSITIONS = MAX_ELEMENTS = 1 << 16
# What is evaluated alike on all devices; a kernel does not round to halves on the way.
TYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.float64)
# Places of all windows, at most, for each element and each position of what an index may be.
MAX_PLACES = 2


@dataclass(frozen=True)
class Window:
    """
    Of each element, ``size`` positions from ``(step * element + offset) // divisor`` on, of
    which some may be none of those that there are.

    exact: whether all positions of all windows are of their element
    """

    step: int
    offset: int
    divisor: int
    size: int
    exact: bool

    def is_of_32_bits(self, elements: int) -> bool:
        """Whether what is computed for the last of so many ``elements`` is."""
        last = self.step * elements + abs(self.offset) + self.size * self.divisor
        return last < 1 << 31


class Positions:
    """What is known of a graph's nodes: those that are computed from positions alone."""

    def __init__(self) -> None:
        self.known: dict[tuple[Node, torch.dtype], Optional[torch.Tensor]] = {}
        self.windows: dict[tuple[tuple[Node, ...], int], Optional[Window]] = {}

    def value(self, node: Node, dtype: torch.dtype) -> Optional[torch.Tensor]:
        """
        The value of ``node``, on the CPU, or None. What is of single precision is computed in
        ``dtype`` and rounded once where it becomes an integer: a kernel may round the product
        of a product and a sum or not.
        """
        key = node, dtype
        if key not in self.known:
            self.known[key] = self._value(node, dtype)
        return self.known[key]

    def _value(self, node: Node, dtype: torch.dtype) -> Optional[torch.Tensor]:
        target, fake = node.target, node.meta.get("val")
        if (
            not isinstance(target, torch._ops.OpOverload)
            or not (torch.Tag.pointwise in target.tags or target in OF_POSITIONS)
            or torch.Tag.nondeterministic_seeded in target.tags
            or not isinstance(fake, torch.Tensor)
            or fake.dtype not in TYPES
            or not all(isinstance(size, int) for size in fake.shape)
            or fake.numel() > MAX_POSITIONS
        ):
            return None
        values = {each: self.value(each, dtype) for each in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        if fake.dtype == torch.float32:
            args = [as_single(arg, dtype) for arg in args]
        if target is prims.convert_element_type.default:
            source, to = args
            (of,) = node.all_input_nodes
            if to == torch.float32:
                to = dtype
            elif of.meta["val"].dtype == torch.float32:
                source = source.float()
            args = [source, to]
        kwargs = {
            **kwargs,
            **({"device": torch.device("cpu")} if "device" in kwargs else {}),
            **({"dtype": dtype} if kwargs.get("dtype") == torch.float32 else {}),
        }
        try:
            return target(*args, **kwargs)
        except RuntimeError:  # such as an integer's division by zero
            return None

    def is_true(self, mask: Node) -> bool:
        """Whether ``mask`` is known, and true of all positions."""
        with unset_fake_temporarily():
            value = self.value(mask, torch.float32)
            return value is not None and bool(value.all())

    def window(self, indices: tuple[Node, ...], elements: int) -> Optional[Window]:
        """Where the positions of each of so many ``elements`` are in all of ``indices``."""
        key = indices, elements
        if key not in self.windows:
            with unset_fake_temporarily():
                values = [
                    None if value is None else value.flatten().tolist()
                    for index in indices
                    for value in (
                        self.value(index, torch.float32),
                        self.value(index, torch.float64),
                    )
                ]
            known = [value for value in values if value is not None]
            complete = len(known) == len(values) and len({*map(len, known)}) == 1
            self.windows[key] = window_of(known, elements) if complete else None
        return self.windows[key]


def as_single(arg: Any, dtype: torch.dtype) -> Any:
    """An argument of what is of single precision, and computed in ``dtype``."""
    if isinstance(arg, torch.Tensor) and dtype == torch.float64:
        return arg.to(dtype)
    if isinstance(arg, float):
        return torch.tensor(arg, dtype=torch.float32).item()
    return arg


def window_of(indices: Sequence[list[int]], elements: int) -> Optional[Window]:
    """
    The smallest windows of which ``indices``, each what an index may be, are; None where one
    decreases, is beyond the elements, or where most of what windows hold would be of others.
    """
    positions = len(indices[0])
    if not positions or elements > MAX_ELEMENTS:
        return None
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index in indices:
        if index != sorted(index) or not 0 <= index[0] <= index[-1] < elements:
            return None
        for position, element in enumerate(index):
            first[element] = min(position, first.get(element, position))
            last[element] = max(position, last.get(element, position))

    def windows(step: int, divisor: int) -> Window:
        offset = min(at * divisor + divisor - 1 - step * x for x, at in first.items())
        size = max(at - (step * x + offset) // divisor + 1 for x, at in last.items())
        starts = [(step * x + offset) // divisor for x in range(elements)]
        exact = all(
            index[max(start, 0) : max(start + size, 0)].count(x)
            == len(range(max(start, 0), min(start + size, positions)))
            for x, start in enumerate(starts)
            for index in indices
        )
        return Window(step, offset, divisor, size, exact)

    # Positions for each element, of all elements or of those that have any; with corners
    # aligned, the last element is at the last position.
    used = max(first) - min(first) + 1
    steps = {
        Fraction(positions - corner, count - corner)
        for count in (elements, used)
        for corner in (0, 1)
        if count > corner and positions > corner
    }
    of_steps = [windows(step.numerator, step.denominator) for step in sorted(steps)]
    # Indices are of 32 bits where the tensors allow it.
    fit = [each for each in of_steps if each.is_of_32_bits(elements)]
    found = min(fit, key=lambda each: (each.size, each.divisor), default=None)
    if found is None or found.size * elements > MAX_PLACES * (positions * len(indices) + elements):
        return None
    return found
