"""
What the modules of this stack ask of PyTorch that its releases call, or do, otherwise.

This one is for PyTorch 2.11. The others are the same for all releases.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from torch.fx.experimental.symbolic_shapes import size_hint as optimization_hint


if TYPE_CHECKING:
    from .scheduler import BaseSchedulerNode, Scheduler


__all__ = [
    "ASSERTS_END_STAGES",
    "WARPS_ALONG_INNERMOST",
    "optimization_hint",
    "place_as",
    "why_kept_apart",
]

# Whether Triton, 3.6 here, gives a loop that asserts no stages.
ASSERTS_END_STAGES = False

# Whether Triton, 3.6 here, has the warps of a load along the innermost of the dimensions
# that it does not read along; otherwise along the outermost.
WARPS_ALONG_INNERMOST = False


def why_kept_apart(
    scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode
) -> Optional[str]:
    """Why two nodes may not be one kernel, whatever they compute; None where they may."""
    return None


def place_as(
    scheduler: Scheduler, fused: BaseSchedulerNode, node: BaseSchedulerNode
) -> None:
    """Nothing: nodes have no stream, and no memory pool, before code is generated."""
