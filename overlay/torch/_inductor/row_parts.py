"""
In how many parts a long row of an inner reduction is split.

Lowering aims at a number of elements for each thread, and takes as many parts as that makes:
nine of a channel of [64, 64, 128, 128], say. The last one is shorter then. All that is loaded
has a mask for its sake, and each index wraps, since a part begins and ends within an image.
Parts that are equal, and hold whole images or whole rows of one, have neither. There, all of
them are one tensor with one dimension more.

Of such parts, those are best whose programs end together. An SM has as many programs at a time
as it has threads for, and half of them load as fast as all. So what is left for a last wave
takes as long as half a wave at least, however little it is. And where programs compute more
than they load, the SM that has most of them ends last. Against many parts stand what each
does before and after its loop, and the reduction of what they leave.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import sympy

from .runtime.runtime_utils import ceildiv


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .runtime.hints import DeviceProperties


# Elements of a part, at least: two blocks of the runtime's loop. Lowering takes twice as many
# at least, and wants no fewer parts then: each of a small tensor is as long as it is waited for.
SHORTEST, LOWERING_SHORTEST = 4096, 8192
# Parts, by how many lowering aims at: so many times as few, or as many.
RANGE = 4
# Elements that a program takes the time of before its first and after its last.
STARTUP = 1024
# Threads of a program of the runtime's loop.
THREADS = 512
# Estimates of time that are so close are one.
CLOSE = 1.05
# Elements of a half type that a thread loads at once.
VECTOR = 8


def even_parts(
    properties: DeviceProperties,
    rows: int,
    ranges: Sequence[sympy.Expr],
    parts: int,
) -> int:
    """
    Parts of each of ``rows`` rows of an inner reduction over ``ranges``, which lowering would
    split into ``parts``: equal ones, that hold whole indices of all ranges but one, if there
    are any about as many.
    """
    if properties.type != "cuda" or not all(map(_is_static, ranges)):
        return parts
    columns = math.prod(map(int, ranges))
    is_small = columns <= parts * LOWERING_SHORTEST
    fewest = parts if is_small else max(2, parts / RANGE)
    whole = [
        each
        for each in whole_parts([int(each) for each in ranges])
        if fewest <= each <= parts * RANGE and columns // each >= SHORTEST
    ]
    if is_small and parts in whole:
        return parts
    costs = {
        each: cost(properties, rows * each) * (1 + STARTUP * each / columns)
        for each in whole
    }
    least = min(costs.values(), default=0)
    close = [each for each in costs if costs[each] <= least * CLOSE]
    return min(close, key=lambda each: abs(math.log(each / parts)), default=parts)


def whole_parts(ranges: Sequence[int]) -> Iterator[int]:
    """
    In ascending order, the numbers of equal parts of a row of ``ranges`` of which each is some
    of the indices of one range, for one index of each range before it. Parts of the last range
    begin at a vector, where all of it does.
    """
    before = 1
    for i, extent in enumerate(ranges):
        step = math.gcd(extent, VECTOR) if i == len(ranges) - 1 else 1
        divisors = sympy.divisors(extent // step)
        yield from (before * each for each in divisors if each > 1)
        before *= extent


def cost(properties: DeviceProperties, programs: int) -> float:
    """
    How many times as long ``programs`` equal ones take as if they filled the GPU to the end:
    by what they load, times by what they compute.
    """
    sms = properties.multi_processor_count
    at_a_time = sms * max(
        1, (properties.max_threads_per_multi_processor or 2048) // THREADS
    )
    waves, rest = divmod(programs, at_a_time)
    loaded = waves * at_a_time + (max(rest, at_a_time // 2) if rest else 0)
    computed = ceildiv(programs, sms) * sms
    return loaded / programs * computed / programs


def _is_static(extent: sympy.Expr) -> bool:
    return isinstance(extent, int) or extent.is_Integer
