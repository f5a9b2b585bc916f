"""Order statistics of times, and of ratios between runs that took turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `n` samples, in the samples' own unit."""

    median: float
    q1: float
    q3: float
    n: int

    def as_dict(self, digits: int) -> dict[str, float]:
        """The spread as result files hold it, rounded to `digits` decimals."""
        return {
            "median": round(self.median, digits),
            "q1": round(self.q1, digits),
            "q3": round(self.q3, digits),
            "n": self.n,
        }


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles (inclusive method: the extremes are the 0th and 100th percentile).

    Raises ValueError without a sample.
    """
    if not samples:
        raise ValueError("no samples")
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, q1, q3, len(samples))


def paired_ratio(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> Spread:
    """Spread over rounds of median(base) / median(other): above 1, `other` is the faster.

    Each round holds the samples of one turn. Both sides ran every round next to each other, so
    a drift of the clock or of the temperature is in both medians and leaves the ratio.
    """
    if len(base) != len(other):
        raise ValueError(f"{len(base)} rounds against {len(other)}: not paired")
    return spread(
        [
            statistics.median(left) / statistics.median(right)
            for left, right in zip(base, other, strict=True)
        ]
    )


def geomean(values: Iterable[float]) -> float:
    """Geometric mean. Raises ValueError without a value or with one that is not positive."""
    logs = [math.log(value) for value in values]
    if not logs:
        raise ValueError("no values")
    return math.exp(sum(logs) / len(logs))
