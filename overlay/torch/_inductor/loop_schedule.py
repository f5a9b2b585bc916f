"""
Which of its loops over the rows generates each node of a reduction kernel.

A row that is too long to be persistent has a loop for each reduction that others wait for. Nodes
come in an order in which each follows what it reads. Generated in that order, a reduction may have
a loop of its own, though an earlier one has all that it needs; ordered by the reductions that they
wait for, there are as few loops as there can be.

A pointwise node is in the first loop that has what it needs; for later loops that read it, it is
stored and loaded. A loop that reads the same buffers anyway can keep it in registers. So where
fewer bytes are loaded and stored then, a node that only later loops read moves to the first of
them, and one that several loops read is computed in each. The gradient of a cross entropy, which
needs no sum of its row, moves so beside that of another loss of the same logits, which does.

The schedule is made before it is known whether a row is persistent, so rows that may be
(``persistent_reduction_max_numel``) keep the order of their nodes. So do rows of a dynamic number
of columns, and kernels that write something twice or have block pointers or tensor descriptors.
"""

from __future__ import annotations

import copy
from typing import Any, TYPE_CHECKING

from torch.utils._ordered_set import OrderedSet

from . import config, ir
from .codegen.simd_kernel_features import DisableReduction, EnableReduction
from .dependencies import MemoryDep
from .device_model import DeviceModel
from .issue_slots import count_slots
from .mix_order_accesses import accessed_numel
from .runtime.hints import DeviceProperties
from .scheduler import SchedulerNode
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import sympy


# What begins a part of a schedule: the even parts are loops, what is between them has a value a row.
MARKERS = (EnableReduction, DisableReduction)


def schedule_in_loops(
    generate: Callable[..., list[Any]],
    nodes: Sequence[SchedulerNode],
    rows: sympy.Expr,
    columns: sympy.Expr,
) -> list[Any]:
    """
    The schedule that ``generate`` makes of the ``nodes`` of a kernel, in their order, or, where
    less is loaded and stored, in one with fewer loops and with pointwise nodes in others.
    """
    schedule = generate(nodes, rows, columns)
    if DisableReduction not in schedule or not can_change(nodes, columns):
        return schedule
    best = unchanged = LoopSchedule(schedule, rows, columns)
    for order in (schedule, generate(by_reductions(nodes, rows), rows, columns)):
        for recomputes in (True, False):
            loops = LoopSchedule(order, rows, columns, recomputes)
            for node in reversed(loops.part_of):
                loops.place(node)
            if loops.cost < best.cost and loops.is_safe():
                best = loops
    return schedule if best is unchanged else best.schedule()


def can_change(nodes: Sequence[SchedulerNode], columns: sympy.Expr) -> bool:
    """Whether ``nodes``, of rows of ``columns``, may be generated in another order."""
    where = nodes[0].get_device()
    most = config.triton.persistent_reduction_max_numel
    return (
        V.graph.sizevars.statically_known_gt(columns, most)
        and where is not None
        and DeviceProperties.create(where).type == "cuda"  # "hip" has no model
        and config.cuda_backend == "triton"
        # a block pointer is defined where a buffer is first stored, and others may use it
        and not config.triton.use_block_ptr
        and not config.triton.use_tensor_descriptor
        # what is written twice has an order that reads and writes do not tell
        and not any(node.has_aliasing_or_mutation() for node in nodes)
    )


def ends_a_loop(node: SchedulerNode) -> bool:
    """Whether a loop has the value of ``node`` only when it has ended."""
    return (
        node.is_reduction()
        and isinstance(node.node, ir.ComputedBuffer)
        and not isinstance(node.node.data, ir.Scan)
    )


def by_reductions(
    nodes: Sequence[SchedulerNode], rows: sympy.Expr
) -> list[SchedulerNode]:
    """
    ``nodes`` by the number of loops before the one that has what they need. What has a value a row
    comes before that loop.
    """
    waits: dict[str, int] = {}
    ends = OrderedSet(node.get_name() for node in nodes if ends_a_loop(node))
    for node in nodes:
        waits[node.get_name()] = max(
            (waits[name] + (name in ends) for name in node.ancestors if name in waits),
            default=0,
        )

    def place(node: SchedulerNode) -> tuple[int, bool]:
        return waits[node.get_name()], node.group[1] != (rows, 1)

    return sorted(nodes, key=place)


class Recomputed(SchedulerNode):
    """A node in one more loop than the scheduler knows of, which neither stores nor allocates."""

    @classmethod
    def of(cls, node: SchedulerNode) -> Recomputed:
        again = copy.copy(node)
        again.__class__ = cls
        return again  # type: ignore[return-value]

    def decide_inplace_update(self) -> None:
        pass

    def mark_run(self) -> None:
        pass

    def codegen(self, index_vars: Sequence[Sequence[sympy.Expr]]) -> None:
        kernel, names = V.kernel, self.get_buffer_names()
        # the loop has the values, which were of an earlier one
        kernel.cse.invalidated_stores -= names
        super().codegen(index_vars)
        kernel.num_store -= len(names)  # that are not generated


class LoopSchedule:
    """
    The loops of a kernel, and the nodes that each generates.

    parts: the nodes of the schedule, by the markers between them
    part_of: the index of each node's part
    order: of the nodes, by name, in which each follows what it reads
    readers: of each node, those that read what it writes
    recomputes: whether a node may be in several loops
    """

    def __init__(
        self,
        schedule: list[Any],
        rows: sympy.Expr,
        columns: sympy.Expr,
        recomputes: bool = False,
    ) -> None:
        self.recomputes = recomputes
        self.columns = columns
        self.numel = rows * columns
        self.parts: list[list[SchedulerNode]] = [[]]
        for entry in schedule:
            if entry in MARKERS:
                self.parts.append([])
            else:
                self.parts[-1].append(entry)
        self.part_of = {node: i for i, part in enumerate(self.parts) for node in part}
        self.order = {node.get_name(): i for i, node in enumerate(self.part_of)}
        self.names = OrderedSet(self.order)
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

    @property
    def cost(self) -> tuple[int, int]:
        """Bytes of an element that all loops load and store, and how many loops there are."""
        stored = self.stored
        stores = sum(
            size
            for name, size in self.whole(self.part_of, writes=True).items()
            if name in stored
        )
        loads = sum(sum(self.loads(i).values()) for i in range(0, len(self.parts), 2))
        return loads + stores, sum(map(bool, self.parts[::2]))

    def loads(self, part: int) -> dict[str, int]:
        """Bytes of an element of what a loop loads of all elements."""
        written = self.whole(self.parts[part], writes=True)
        reads = self.whole(self.parts[part])
        return {name: size for name, size in reads.items() if name not in written}

    @property
    def stored(self) -> OrderedSet[str]:
        """The buffers that others read, or a loop that does not have their values."""
        loaded = OrderedSet(
            name for i in range(0, len(self.parts), 2) for name in self.loads(i)
        )
        return OrderedSet(
            name for name in self.writer if name in loaded or not self.is_local(name)
        )

    def is_safe(self) -> bool:
        """
        Whether nothing is stored in place of what a recomputed node reads behind it, and no
        recomputed node would be stored again.
        """
        stored = self.stored
        before: list[SchedulerNode] = []
        for node in (each for part in self.parts for each in self.in_order(part)):
            if isinstance(node, Recomputed) and (
                stored & node.get_buffer_names()
                or stored & self.taken_from(self.loaded_again(node), before)
            ):
                return False
            before.append(node)
        return True

    def loaded_again(self, node: SchedulerNode) -> OrderedSet[str]:
        """
        What a recomputed node loads. Values of rows stay in registers between loops, but not
        those that are loaded under a mask, nor, of a kernel of one row, at a constant index.
        """
        if node._body.subblocks or V.graph.sizevars.statically_known_equals(
            self.numel, self.columns
        ):
            return self.read_by(node)
        return OrderedSet(self.whole([node]))

    def taken_from(
        self, names: OrderedSet[str], nodes: Iterable[SchedulerNode]
    ) -> OrderedSet[str]:
        """
        The results of ``nodes``, in their order, that may be in the buffers ``names``. A result
        may take the buffer of what it reads, if both have a value for each element, or neither
        has, or of what that took the buffer of.
        """
        taken: OrderedSet[str] = OrderedSet()
        for node in nodes:
            found = self.read_by(node) & (names | taken)
            reads, writes = self.whole([node]), self.whole([node], writes=True)
            for name in node.get_buffer_names():
                if any((name in writes) == (each in reads) for each in found):
                    taken.add(name)
        return taken

    def read_by(self, node: SchedulerNode) -> OrderedSet[str]:
        return OrderedSet(dep.name for dep in node.read_writes.reads)

    def in_order(self, part: Iterable[SchedulerNode]) -> list[SchedulerNode]:
        return sorted(part, key=lambda node: self.order[node.get_name()])

    def schedule(self) -> list[Any]:
        """With each node of a part behind what it reads there, as in the first one."""
        result: list[Any] = []
        for i, part in enumerate(self.parts):
            if i % 2 and result and result[-1] is EnableReduction:
                result.pop()  # a loop of which nothing is left
            elif i:
                result.append(MARKERS[i % 2])
            result += self.in_order(part)
        return result

    def place(self, node: SchedulerNode) -> None:
        """Move ``node`` to the first loop that reads it, or compute it in each, if that pays."""
        of = self.part_of[node]
        parts = sorted({self.part_of[each] for each in self.readers[node]})
        later = [part for part in parts if part != of]
        if not later or any(part % 2 for part in later) or not self.is_pointwise(node):
            return
        if of not in parts:
            self.defer(node, later[0])
        if self.part_of[node] == of or len(later) > 1:
            self.recompute(node)

    def is_pointwise(self, node: SchedulerNode) -> bool:
        return (
            node in self.part_of
            and self.part_of[node] % 2 == 0
            and isinstance(node.node, ir.ComputedBuffer)
            and isinstance(node.node.data, ir.Pointwise)
        )

    def defer(self, node: SchedulerNode, to: int) -> None:
        """
        Move ``node``, and what it alone needs, to the loop ``to``, the first that reads it, where
        that saves more bytes than it adds.
        """
        of = self.part_of[node]
        group = OrderedSet([node])
        for each in reversed(self.parts[of]):
            if self.is_pointwise(each) and self.is_read_by(each, group, to):
                group.add(each)
        rest = [each for each in self.parts[of] if each not in group]
        if rest and self.saved_bytes(group, to) > self.added_bytes(group, rest, to):
            names = OrderedSet(each.get_name() for each in group)
            others = [each for each in self.parts[to] if each.get_name() not in names]
            self.parts[to] = [*group, *others]
            self.parts[of] = rest
            self.part_of.update(dict.fromkeys(group, to))

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
            self.bytes_to_load(name, size)
            for name, size in self.whole(group).items()
            if name in rest_needs and name not in loaded
        )

    def recompute(self, node: SchedulerNode) -> None:
        """
        Compute ``node``, which the kernel alone reads, in each later loop that reads it, with what
        it needs, where that takes less time than to store and to load it.
        """
        of, columns = self.part_of[node], self.columns
        (size,) = self.whole([node], writes=True).values() or (0,)
        is_local = all(map(self.is_local, node.get_buffer_names()))
        if not (size and is_local and self.recomputes):
            return
        parts = {self.part_of[each] for each in self.readers[node]}
        needed = {part: self.needed(node, part) for part in sorted(parts - {of})}
        saved, slots = size, 0
        for part, nodes in needed.items():
            loaded = self.whole(self.parts[part])
            written = self.whole(nodes, writes=True)
            saved += size - sum(
                self.bytes_to_load(name, each)
                for name, each in self.whole(nodes).items()
                if name not in loaded and name not in written
            )
            slots += sum(count_slots(each._body, columns).slots for each in nodes)
        device = DeviceModel.of(DeviceProperties.create(node.get_device()))
        if saved * device.slots_per_byte <= slots:
            return
        for part, nodes in needed.items():
            self.parts[part] = [*map(Recomputed.of, nodes), *self.parts[part]]
        if of not in parts:  # nor in the loop that was the first to be able to
            self.parts[of].remove(node)
            self.part_of[node] = part = min(needed)
            self.parts[part] = [
                node if each.get_name() == node.get_name() else each
                for each in self.parts[part]
            ]

    def needed(self, node: SchedulerNode, part: int) -> list[SchedulerNode]:
        """
        What ``part`` lacks of ``node``, and before it of what that reads of earlier loops, but for
        what is stored in any case.
        """
        found: OrderedSet[SchedulerNode] = OrderedSet()
        there = OrderedSet(each.get_name() for each in self.parts[part])

        def add(each: SchedulerNode) -> None:
            for dep in each.read_writes.reads:
                writer = self.writer.get(dep.name)
                if (
                    writer is not None
                    and self.part_of[writer] < part
                    and self.is_pointwise(writer)
                    and self.is_local(dep.name)
                ):
                    add(writer)
            if each.get_name() not in there:
                found.add(each)

        add(node)
        return [*found]

    def bytes_to_load(self, name: str, size: int) -> int:
        """In one more loop, with those to store what the kernel alone has."""
        return size * (1 + (name in self.writer and self.is_local(name)))

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
            and (dep.is_indirect() or known_equal(accessed_numel(dep), self.numel))
        }
