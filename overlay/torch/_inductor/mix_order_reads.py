"""
How many buffers a mix-order kernel may read.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

import torch
from torch.utils._ordered_set import OrderedSet

from . import config
from .dependencies import MemoryDep
from .mix_order_plan import predicts_registers


if TYPE_CHECKING:
    from .scheduler import BaseSchedulerNode


# where triton.mix_order_reduction_max_reads is None and registers are not predicted
DEFAULT_MAX_READS = 10


def most_reads(device: Optional[torch.device]) -> int:
    """
    How many buffers a mix-order kernel for ``device`` may read, by
    ``triton.mix_order_reduction_max_reads``; 0 is no limit.
    """
    max_reads = config.triton.mix_order_reduction_max_reads
    if max_reads is None:
        return 0 if predicts_registers(device) else DEFAULT_MAX_READS
    return max_reads


def why_too_many_reads(*nodes: BaseSchedulerNode) -> Optional[str]:
    """
    Why the mix-order kernel of ``nodes`` reads too many buffers to fit registers;
    None when it does not, or ``triton.mix_order_reduction_max_reads`` sets no limit.
    Each buffer is loaded in every iteration of the loop over rows, one that is updated
    in place too, so buffers written by the nodes count when they are read.
    """
    max_reads = most_reads(nodes[0].get_device())
    reads = OrderedSet(
        dep.name
        for node in nodes
        for snode in node.get_nodes()
        for dep in snode.read_writes.reads
        if isinstance(dep, MemoryDep)
    )
    if 0 < max_reads < len(reads):
        return f"reads {len(reads)} buffers, more than {max_reads}"
    return None
