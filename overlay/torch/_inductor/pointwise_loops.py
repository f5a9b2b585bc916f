"""
Which loop over the rows a pointwise node of a reduction kernel is generated in.

A kernel has a loop for each row statistic that others wait for. A node is in the first loop
that has what it needs, and where later loops alone read it, the first one stores it and they
load it. In the loop of its readers it stays in registers, and reads what they mostly read
anyway. So does the gradient of a cross entropy, which needs no sum of its row, beside that
of another loss of the same logits, which does.
"""

from __future__ import annotations

from typing import Any, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from . import ir
from .codegen.simd_kernel_features import DisableReduction, EnableReduction
from .dependencies import MemoryDep
from .mix_order_accesses import accessed_numel
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import sympy

    from .scheduler import SchedulerNode


# What begins a part of a schedule: an even one is a loop, an odd one is between two loops.
MARKERS = (EnableReduction, DisableReduction)


def in_loops_of_readers(schedule: list[Any], numel: sympy.Expr) -> list[Any]:
    """
    ``schedule``, of a kernel with loops over ``numel`` elements, where a pointwise node that
    later loops alone read is in the first of those, if less is loaded and stored then.
    """
    if DisableReduction not in schedule:
        return schedule
    loops = Loops(schedule, numel)
    for node in reversed(loops.part_of):
        loops.defer(node)
    return loops.schedule()


class Loops:
    """
    Those of a schedule.

    parts: its nodes, by the markers between them
    part_of: the index of each node's part
    readers: of each node, those that read what it writes
    """

    def __init__(self, schedule: list[Any], numel: sympy.Expr) -> None:
        self.numel = numel
        self.parts: list[list[SchedulerNode]] = [[]]
        for entry in schedule:
            if entry in MARKERS:
                self.parts.append([])
            else:
                self.parts[-1].append(entry)
        self.part_of = {node: i for i, part in enumerate(self.parts) for node in part}
        self.names = OrderedSet(node.get_name() for node in self.part_of)
        self.writer = {
            name: node for node in self.part_of for name in node.get_buffer_names()
        }
        self.readers: dict[SchedulerNode, OrderedSet[SchedulerNode]] = {
            node: OrderedSet() for node in self.part_of
        }
        for node in self.part_of:
            for dep in node.read_writes.reads:
                if dep.name in self.writer:
                    self.readers[self.writer[dep.name]].add(node)
        # what is written twice has an order that reads and writes do not tell
        self.is_ordered = any(
            node.has_aliasing_or_mutation() for node in self.part_of
        )

    def schedule(self) -> list[Any]:
        result: list[Any] = [*self.parts[0]]
        for i, part in enumerate(self.parts[1:], 1):
            result += [MARKERS[i % 2], *part]
        return result

    def defer(self, node: SchedulerNode) -> None:
        """Move ``node``, and what it alone needs, to the first loop that reads it, if it pays."""
        of = self.part_of[node]
        to = min((self.part_of[each] for each in self.readers[node]), default=of)
        if to == of or to % 2 or not self.can_move(node):
            return
        group = OrderedSet([node])
        for each in reversed(self.parts[of]):
            if self.can_move(each) and self.is_read_by(each, group, to):
                group.add(each)
        rest = [each for each in self.parts[of] if each not in group]
        if rest and self.saved_bytes(group, to) > self.added_bytes(group, rest, to):
            self.parts[to] = [*reversed(group), *self.parts[to]]
            self.parts[of] = rest
            self.part_of.update(dict.fromkeys(group, to))

    def can_move(self, node: SchedulerNode) -> bool:
        return (
            not self.is_ordered
            and self.part_of[node] % 2 == 0
            and isinstance(node.node, ir.ComputedBuffer)
            and isinstance(node.node.data, ir.Pointwise)
        )

    def is_read_by(
        self, node: SchedulerNode, group: OrderedSet[SchedulerNode], to: int
    ) -> bool:
        """Whether a node of ``group`` reads ``node``, and else none before the part ``to``."""
        readers = self.readers[node]
        return bool(readers & group) and all(
            self.part_of[each] >= to for each in readers - group
        )

    def saved_bytes(self, group: OrderedSet[SchedulerNode], to: int) -> int:
        """Of an element that ``to`` no longer loads, and that no loop stores for it."""
        result = 0
        for name, size in self.whole(group, writes=True).items():
            readers = self.readers[self.writer[name]] - group
            loops = OrderedSet(self.part_of[each] for each in readers)
            if to in loops:
                result += size * (1 + (max(loops) == to and self.is_local(name)))
        return result

    def added_bytes(
        self, group: OrderedSet[SchedulerNode], rest: Sequence[SchedulerNode], to: int
    ) -> int:
        """Of an element that ``to`` loads for ``group``, and that ``rest`` needs as well."""
        rest_needs = {**self.whole(rest), **self.whole(rest, writes=True)}
        loaded = self.whole(self.parts[to])
        return sum(
            size * (1 + (name in self.writer and self.is_local(name)))
            for name, size in self.whole(group).items()
            if name in rest_needs and name not in loaded
        )

    def is_local(self, name: str) -> bool:
        """Whether the kernel alone reads a buffer, so that one loop need not store it."""
        scheduler = V.graph.scheduler
        return scheduler.can_buffer_be_removed_through_fusion(name, self.names)

    def whole(
        self, nodes: Iterable[SchedulerNode], writes: bool = False
    ) -> dict[str, int]:
        """Bytes of an element of each buffer that ``nodes`` read, or write, for all elements."""
        known_equal = V.graph.sizevars.statically_known_equals
        return {
            dep.name: V.graph.get_dtype(dep.name).itemsize
            for node in nodes
            for dep in (node.read_writes.writes if writes else node.read_writes.reads)
            if isinstance(dep, MemoryDep)
            and known_equal(accessed_numel(dep), self.numel)
        }
