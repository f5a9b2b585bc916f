"""
What the loops over a row do more than once, which a persistent kernel does once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from . import ir
from .mix_order_pressure import Demand, LaunchConfig, Layout
from .mix_order_trace import Trace, Width
from .row_accesses import has_function, has_online_softmax, has_reduction, row_passes


if TYPE_CHECKING:
    from .codegen.simd_kernel_features import SIMDKernelFeatures


# Warps of a program whose row has more than 8192 columns, or more tiles than eight warps hold.
WIDE_WARPS = 16
# Functions that are worth computing once.
FUNCTIONS = ("exp", "exp2", "log", "sigmoid", "tanh", "erf", "rsqrt", "sqrt", "pow")
# Functions of one value a row, in norms.
ROOTS = ("rsqrt", "sqrt")
# What takes a loop no time beside its loads, if it is done again.
LIGHT = ("abs", "add", "constant", "load", "mul", "neg", "sub", "to_dtype")


def computes_functions(features: SIMDKernelFeatures) -> bool:
    """Whether a kernel computes functions of elements, as an online softmax does."""
    names = OrderedSet(FUNCTIONS) - OrderedSet(ROOTS)
    return has_online_softmax(features) or has_function(features, *names)


@dataclasses.dataclass(frozen=True)
class Again:
    """
    What the loops over a row do more than once, which a persistent kernel does once.

    functions: whether they compute functions of elements
    light: whether they compute nothing but sums and products
    loads: of tensors that have an element for each of rows and columns
    welford: whether one has Welford's algorithm, which divides; a persistent kernel has
        two sums
    live: registers of a thread of a persistent kernel of ``WIDE_WARPS``, of what it holds
        where its warps wait for a reduction
    column: among that, registers for each column
    tiles: the same without what every row reads
    """

    functions: bool = False
    light: bool = False
    loads: int = 0
    welford: bool = False
    live: float = 0
    column: float = 0
    tiles: float = 0

    @classmethod
    def of(cls, features: SIMDKernelFeatures) -> Again:
        """Of a kernel of static columns; nothing of one that scans or sorts."""
        nodes = features.scheduler_nodes()
        if not all(
            isinstance(node.node, ir.ComputedBuffer)
            and isinstance(node.node.data, (ir.Pointwise, ir.Reduction))
            for node in nodes
        ):
            return NOTHING_AGAIN
        ops = Trace.of(features.numel, nodes, ())
        columns = int(features.reduction_numel)
        launch = LaunchConfig(xblock=1, num_warps=WIDE_WARPS, hoist=False)
        seen, again = OrderedSet[int](), OrderedSet[int]()
        for each in row_passes(ops):
            again |= seen & each
            seen |= each
        names = [ops[i].name for i in again if ops[i].width == Width.TILE]
        # without what every row reads, which can be loaded after a reduction
        of_row = dataclasses.replace(launch, hoist=True)
        per_thread = Layout.of(ops, columns, of_row).elements[Width.TILE]
        live = Demand.of(ops, columns, launch).tiles
        return cls(
            any(name in FUNCTIONS for name in names),
            all(name in LIGHT for name in names),
            names.count("load"),
            has_reduction(features, "welford_reduce", "welford_combine"),
            live,
            live / per_thread,
            Demand.of(ops, columns, of_row).tiles / per_thread,
        )


NOTHING_AGAIN = Again()
