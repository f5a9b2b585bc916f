"""
How a looped online softmax combines the columns of a thread.

A loop over a row keeps a maximum and a sum of exponentials for each column of its block,
and combines each element with those of its column: an exponential to scale the smaller
one by, comparisons that say which that is, and again what infinities want. What a thread
holds of a row can share a maximum. Then an element costs a comparison, and an exponential
that is added, and the rest is once for all of them.

They are those that are a thread's already: as many adjacent columns as it loads at once,
and the same a number of times, as far apart as all threads load. Any other choice
exchanges values between threads in each iteration.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, TYPE_CHECKING

from . import config
from .looped_reduction import decides_warps, LoopConfig
from .vector_width import accesses, aligned_columns
from .virtualized import V


if TYPE_CHECKING:
    from .codegen.triton import TritonKernel


@dataclasses.dataclass(frozen=True)
class SharedMaxima:
    """
    vector: adjacent columns that a thread loads at once
    loop: the columns that share a maximum, and the warps with which those are a thread's
    """

    vector: int
    loop: LoopConfig

    @classmethod
    def of(cls, kernel: TritonKernel) -> Optional[SharedMaxima]:
        """Of a looped kernel; None where each column of a block has its own maximum."""
        features = kernel.features
        if not config.triton.online_softmax_share_maxima or not decides_warps(kernel):
            return None
        loop = V.choices.online_softmax_config(features)
        whole = accesses(features, features.numel * features.reduction_numel)
        vector = max(
            (aligned_columns(dep) for deps in whole.values() for dep in deps), default=0
        )
        if loop is None or not vector:
            return None
        # The accesses' loops over rows and columns may be one: a row begins anywhere
        # where the next one does.
        known_multiple = V.graph.sizevars.statically_known_multiple_of
        while not known_multiple(features.reduction_numel, vector):
            vector //= 2
        return cls(min(vector, loop.columns_per_thread), loop)

    def accumulator_size(self, kernel: TritonKernel) -> str:
        """The shape of an accumulator of which a thread has one column."""
        columns = self.loop.columns_per_thread
        rows, block = kernel.dense_size_list()
        return f"[{rows}, {block} // {columns} if {block} > {columns} else 1]"
