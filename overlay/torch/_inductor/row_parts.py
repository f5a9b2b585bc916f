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

Where those are far from filling the GPU, as three images of a prime size by 48 channels,
lowering's own parts are better all the same.
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
# at least. Of a small tensor, whose programs are about one wave, there are no fewer parts then:
# each is as long as it is waited for.
SHORTEST, LOWERING_SHORTEST = 4096, 8192
SMALL_WAVES = 1.5
# Parts, by how many lowering aims at: so many times as few, or as many.
RANGE = 4
# Before its first element and after its last, a program takes the time of so many.
STARTUP = 1024
# Threads of a program of the runtime's loop.
THREADS = 512
# Estimates of time that are so close are one.
CLOSE = 1.05
# By how much what is masked and wraps is slower, at most: where lowering's parts are estimated
# to be faster than the best of whole indices by more, they stay.
STRADDLING = 3
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
    if (
        properties.type != "cuda"
        or rows == 0
        or not all(isinstance(each, (int, sympy.Integer)) for each in ranges)
    ):
        return parts
    extents = [int(each) for each in ranges if each != 1]
    columns = math.prod(extents)
    is_short = columns <= parts * LOWERING_SHORTEST
    waves = rows * parts / programs_at_a_time(properties)
    is_small = is_short and waves < SMALL_WAVES
    fewest = parts if is_small else max(2, parts / RANGE)
    whole = [
        each
        for each in whole_parts(extents)
        if fewest <= each <= parts * RANGE and columns // each >= SHORTEST
    ]
    if is_short and parts in whole:
        return parts
    costs = {
        each: cost(properties, rows * each) * (1 + STARTUP * each / columns)
        for each in (parts, *whole)
    }
    costs[parts] *= 1 if parts in whole else STRADDLING
    least = min(costs.values())
    close = [each for each in costs if costs[each] <= least * CLOSE]
    return min(close, key=lambda each: abs(math.log(each / parts)))


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


def programs_at_a_time(properties: DeviceProperties) -> int:
    """Of the runtime's loop, how many the GPU has threads for."""
    threads = properties.max_threads_per_multi_processor or 2048
    return properties.multi_processor_count * max(1, threads // THREADS)


def cost(properties: DeviceProperties, programs: int) -> float:
    """
    How many times as long ``programs`` equal ones take as if they filled the GPU to the end:
    by what they load, times by what they compute.
    """
    sms, at_a_time = properties.multi_processor_count, programs_at_a_time(properties)
    waves, rest = divmod(programs, at_a_time)
    loaded = waves * at_a_time + (max(rest, at_a_time // 2) if rest else 0)
    computed = ceildiv(programs, sms) * sms
    return loaded / programs * computed / programs
