"""
Outputs for which a kernel allocates nothing, in the estimate of peak memory.

The estimate chooses between orders of the nodes. It has what a kernel reads until after
the kernel, and all that its nodes write beside it. But what its own nodes alone read is
never in memory, and an output takes the buffer that it is computed from where nothing
reads that later (``SchedulerNode.decide_inplace_update``). The gradient of a model's
logits is as large as they are: counted beside them, it was the peak of every order, and
hid in which of them the rest of the backward has more.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Union

from torch.utils._ordered_set import OrderedSet

from . import config
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .memory import BufferInfo, FreeableInputBuffer
    from .scheduler import BaseSchedulerNode, SchedulerBuffer


def not_allocated(
    nodes: Sequence[BaseSchedulerNode], buffers: Sequence[BufferInfo]
) -> list[BufferInfo]:
    """
    What ``buffers``, the timeline of ``nodes`` in their order, has too much of: an entry
    of negative bytes for the step in which the output, and what it replaces, is counted.
    """
    at_step = {each.buffer.get_name(): each for each in buffers}
    return [
        dataclasses.replace(
            output,
            size_alloc=-output.size_alloc,
            size_free=-output.size_alloc,
            end_step=step,
        )
        for step, node in enumerate(nodes)
        if not (node.is_extern() or node.is_template())
        for output in _of_kernel(node, step, at_step)
    ]


def _of_kernel(
    node: BaseSchedulerNode, step: int, at_step: dict[str, BufferInfo]
) -> Iterator[BufferInfo]:
    """Outputs of ``node``, which runs at ``step``, that take no new memory."""
    taken: OrderedSet[str] = OrderedSet()
    for each in node.get_nodes():
        for output in (at_step[buffer.get_name()] for buffer in each.get_outputs()):
            if output.size_alloc == 0:
                continue
            if output.end_step == step:
                yield output
                continue
            for read in each.read_writes.reads if config.inplace_buffers else ():
                replaced = at_step.get(read.name)
                if (
                    replaced is not None
                    and read.name not in taken
                    and replaced.end_step == step
                    and replaced.size_free == output.size_alloc
                    and _may_be_written(replaced.buffer)
                    and each.can_inplace(read)
                    and _is_read_in_one_place(read.name, node, each)
                ):
                    taken.add(read.name)
                    yield output
                    break


def _may_be_written(buffer: Union[SchedulerBuffer, FreeableInputBuffer]) -> bool:
    """Whether it is this graph's, or was donated to it."""
    scheduler, name = V.graph.scheduler, buffer.get_name()
    return name in scheduler.name_to_buf or name in scheduler.name_to_donated_buffer


def _is_read_in_one_place(
    name: str, node: BaseSchedulerNode, writer: BaseSchedulerNode
) -> bool:
    """Whether all of ``node`` with the loops of ``writer`` read the same element."""
    reads = OrderedSet(
        read
        for each in node.get_nodes()
        if each.group == writer.group  # type: ignore[attr-defined]
        for read in each.read_writes.reads
        if read.name == name
    )
    return len(reads) == 1
