"""A step's generated kernels as a row keeps them: in groups that compare.

A group is what writes the same values (nodes of the FX graphs) for all contenders: one kernel of
one contender may be three of another's. A row's `generated` is

- `groups`: of each `limit_us` a step (what must move over the copy bandwidth, of the contender that
  must move the least), `bounds` where that is an upper bound, and `kernels`: name, and by label
  launches and microseconds a step. One that several contenders have to the letter is there once;
- `others`: the number of groups that take under 5 us of everyone's step, and by label their
  microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Kernels = Sequence[Mapping[str, Any]]

# Under this, a group says nothing by itself: a launch takes 2 us.
_SMALL_US = 5.0
# Of a name without `triton_` and the hash at its end, this much is kept.
_NAME = 52


def summary(found: Mapping[str, Kernels], gb_per_s: float) -> dict[str, Any]:
    """The `generated` of a row, of the kernels by label (`Generated.facts`); slowest first."""
    groups = []
    count, small = 0, dict.fromkeys(found, 0.0)
    for part in connected(found):
        took = {label: math.fsum(kernel["us"] for kernel in part[label]) for label in found}
        if max(took.values()) < _SMALL_US:
            count += 1
            small = {label: us + took[label] for label, us in small.items()}
        else:
            groups.append((max(took.values()), _group(part, gb_per_s)))
    groups.sort(key=lambda entry: -entry[0])
    out: dict[str, Any] = {"groups": [group for _, group in groups]}
    if count:
        us = {label: round(value, 1) for label, value in small.items()}
        out["others"] = {"groups": count, "us": us}
    return out


def connected(found: Mapping[str, Kernels]) -> Iterator[dict[str, list[Mapping[str, Any]]]]:
    """The connected parts of all contenders' kernels: what writes the same value is connected."""
    every = [(label, kernel) for label, kernels in found.items() for kernel in kernels]
    parent = list(range(len(every)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, (_, kernel) in enumerate(every):
        for value in kernel.get("writes", ()):
            parent[root(i)] = root(first.setdefault(value, i))
    parts: dict[int, dict[str, list[Mapping[str, Any]]]] = {}
    for i, (label, kernel) in enumerate(every):
        parts.setdefault(root(i), {label: [] for label in found})[label].append(kernel)
    yield from parts.values()


def short_name(name: str) -> str:
    """A kernel's name without `triton_`, cut in the middle: `per_fused_add_native_…_1a2b3c4d`."""
    head, _, end = name.removeprefix("triton_").rpartition("_")
    if len(head) > _NAME:
        head = f"{head[: _NAME - 1]}…"
    return f"{head}_{end}"


def _group(part: Mapping[str, Kernels], gb_per_s: float) -> dict[str, Any]:
    limits = [
        math.fsum(kernel["bytes"] * kernel["launches"] for kernel in kernels) / gb_per_s / 1e3
        for kernels in part.values()
        if kernels
    ]
    bounds = {
        bound
        for kernels in part.values()
        for kernel in kernels
        for bound in kernel.get("bounds", ())
    }
    named: dict[str, dict[str, list[float]]] = {}
    for label, kernels in part.items():
        for kernel in kernels:
            took = [kernel["launches"], round(kernel["us"], 1)]
            named.setdefault(short_name(kernel["name"]), {})[label] = took
    out: dict[str, Any] = {"limit_us": round(min(limits), 1)}
    if bounds:
        out["bounds"] = sorted(bounds)
    return out | {"kernels": [[name, took] for name, took in named.items()]}
