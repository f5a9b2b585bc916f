"""
The loops by which a block reduction reads, and of what goes on with it.

How the blocks were written decides what loops they have::

    t = x.t().contiguous()                      # x [M, N]
    blocks = t.reshape(N, -1, 32)               # loops [N, M / 32] and [N, M / 32, 32]
    blocks = t.reshape(-1, 32)                  # loops [N * M / 32] and [N * M / 32, 32]

The second reads x through ``//`` and ``%``. The pointwise node that scales the blocks is
fused with the reduction where both have the same loops, and where its tiling is that of a
reduction; and a tile of whole lines of what is read, next to blocks that go on in memory,
needs [M / 32, N]. So loops are split where an index needs it, and go as the reduction
reads: along the dimension of stride 1 last. The nodes that go on with the same values, or
with those of blocks, get the loops of the reduction, by what both of them read.

Each node computes what it did before: its loops are counted otherwise. Nodes that have
these loops are left alone, as are those of which an index stays with a ``//`` or a ``%``.

A block of two dimensions, as the 128 x 128 values of a weight that have one scale::

    blocks = x.view(M // 128, 128, N // 128, 128)   # amax over (1, 3)

is reduced along rows of x that end with the block. What scales the values has the loops of
x, so that it would read x again in another kernel. It gets the loops of the reduction, where
it can be in one kernel with it and has to be stored anyway, and reads and writes along the
same rows.
"""

from __future__ import annotations

from typing import Any, Optional, TYPE_CHECKING

import sympy

from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

from . import config
from .block_reduction_loops import (
    accessed,
    count_as,
    counted_as,
    equal,
    in_order,
    loops_as,
    MAX_SPLITS,
    split_at,
    split_loops,
    Strides,
    without_needless_modulo,
)
from .block_reduction_tile import may_have_tile, tiles_blocks
from .device_model import DeviceModel, LINE_BYTES
from .loop_body import LoopBody
from .row_accesses import SECTOR_BYTES
from .runtime.hints import DeviceProperties
from .utils import get_dtype_size, sympy_index_symbol, sympy_product, sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import BaseSchedulerNode, SchedulerNode


# Rows of blocks are read in multiples of half a line, and written in those of a sector.
READ_BYTES = LINE_BYTES // 2
# Blocks that an SM has at a time, of programs with half of its threads each.
BLOCKS_PER_SM = 2


def _main_read(body: LoopBody) -> Optional[tuple[str, Strides]]:
    """What a reduction reads of the most elements, if it reads that along a loop."""
    hint = V.graph.sizevars.optimization_hint
    best: Optional[tuple[int, str, Strides]] = None
    for name, index, is_write in accessed(body):
        if is_write or (found := Strides.of(index, body.var_ranges)) is None:
            continue
        ranges = (n for v, n in body.var_ranges.items() if v in index.free_symbols)
        size = hint(sympy_product(ranges))
        if best is None or size > best[0]:
            best = size, name, found
    if best is None:
        return None
    _, name, found = best
    along = [v for v in body.iter_vars if equal(found.strides[v], 1)]
    if len(along) != 1 or any(equal(found.strides[v], 1) for v in body.reduce_vars):
        return None
    return name, found


def _as_read(body: LoopBody, read: Strides) -> list[int]:
    """The order of the loops by which ``read`` goes through memory."""
    hint = V.graph.sizevars.optimization_hint
    strides = [hint(read.strides[v]) for v in body.iter_vars]
    # What is not read from one value to the next stays in front.
    return sorted(range(len(strides)), key=lambda i: (strides[i] != 0, -strides[i]))


def _loops_of(
    node: SchedulerNode, done: OrderedSet[SchedulerNode]
) -> dict[SchedulerNode, LoopBody]:
    """
    The reduction ``node`` and what goes on with its values or results, each with its new
    loops; those of ``done`` keep theirs. Empty where no values are written along the blocks,
    and none have loops that are no blocks': blocks are written as they are read by one kernel
    in the loops that they have.
    """
    if len(node._body.reduce_vars) != 1:
        return {}
    body = split_loops(node._body)
    read = _main_read(body)
    if read is None:
        return {}
    body = in_order(body, _as_read(body, read[1]))
    if (read := _main_read(body)) is None:
        return {}
    name, strides = read
    loops: dict[SchedulerNode, LoopBody] = {node: body}
    of_values = {name: [strides]}
    of_blocks: dict[str, list[Strides]] = {}
    blocks, values = node.group[1][0], sympy_product(node.group[1])
    sizes = {"blocks": [*body.sizes[0]], "values": [*body.sizes[0], *body.sizes[1]]}
    gains = False
    queue = [node]
    while queue:
        each = queue.pop(0)
        for buffer, index, is_write in accessed(loops[each]):
            if is_write and (at := Strides.of(index, loops[each].var_ranges)):
                if equal(each.group[1][0], blocks):
                    ranges = {v: at.ranges[v] for v in loops[each].iter_vars}
                    at = Strides(at.start, {v: at.strides[v] for v in ranges}, ranges)
                    of_blocks.setdefault(buffer, []).append(at)
                else:
                    of_values.setdefault(buffer, []).append(at)
                    gains |= at.strides[loops[each].iter_vars[-1]] == 1
        for user in _users(each):
            if user in loops or user.is_reduction():
                continue
            numel = user.group[1][0]
            if equal(numel, blocks):
                new = loops_as(user._body, of_blocks, sizes["blocks"])
            elif equal(numel, values):
                new = loops_as(user._body, of_values, sizes["values"])
            else:
                continue
            if new is not None and (user not in done or new is user._body):
                if equal(numel, values) and new is not user._body:
                    # in loops of its own it may be a kernel of its own
                    gains |= _comes_next(user, node, loops)
                loops[user] = new
                queue.append(user)
    changed = body is not node._body or any(
        new is not each._body and not equal(each.group[1][0], blocks)
        for each, new in loops.items()
    )
    return loops if gains and changed else {}


def _users(node: SchedulerNode) -> list[SchedulerNode]:
    """The generated nodes that read what ``node`` writes."""
    return [
        user.node
        for output in node.get_outputs()
        for user in output.users
        if isinstance(getattr(user.node, "_body", None), LoopBody) and not user.is_weak
    ]


def _in_pieces(
    index: sympy.Expr, body: LoopBody
) -> Optional[tuple[Strides, dict[Any, sympy.Expr]]]:
    """
    ``index`` with the variables of the reduction split where a ``//`` goes on or a ``%``
    begins again, and each piece by these variables. None for what is no sum of multiples.
    """
    ranges = {**body.var_ranges}
    pieces: dict[Any, sympy.Expr] = {v: v for v in body.reduce_vars}
    index = index.replace(Identity, lambda x: x)
    for _ in range(MAX_SPLITS):
        if (found := split_at(index, ranges, [*pieces])) is None:
            break
        v, inner = found
        of = pieces.pop(v)
        size = ranges.pop(v)
        outer, within = (sympy_index_symbol(f"{v}_{part}") for part in ("outer", "within"))
        ranges |= {outer: FloorDiv(size, inner), within: inner}
        pieces |= {outer: FloorDiv(of, inner), within: ModularIndexing(of, 1, inner)}
        index = without_needless_modulo(
            sympy_subs(index, {v: outer * inner + within}), ranges
        )
    strides = Strides.of(index, ranges)
    return None if strides is None else (strides, pieces)


def _rows(strides: Strides, pieces: dict[Any, sympy.Expr]) -> int:
    """The stretches of memory that a reduction goes over, if it goes along them; or 0."""
    hint = V.graph.sizevars.optimization_hint
    read = [(strides.strides[v], strides.ranges[v]) for v in pieces]
    found, end = 0, None
    for stride, size in sorted(((s, n) for s, n in read if s != 0), key=lambda e: hint(e[0])):
        if end is None and not equal(stride, 1):
            return 0
        found += end is None or not equal(stride, end)
        end = stride * size
    return found


def _read_of_rows(
    body: LoopBody,
) -> Optional[tuple[str, Strides, dict[Any, sympy.Expr]]]:
    """
    What a reduction reads of the most elements, if those are parts of rows: with the pieces
    of the reduction's variables, as `_in_pieces` returns them.
    """
    hint = V.graph.sizevars.optimization_hint
    best: Optional[tuple[int, str, Strides, dict[Any, sympy.Expr]]] = None
    for name, index, is_write in accessed(body):
        if is_write:
            continue
        if (found := _in_pieces(index, body)) is None:
            return None
        strides, pieces = found
        size = hint(
            sympy_product(n for v, n in strides.ranges.items() if strides.strides[v] != 0)
        )
        if best is None or size > best[0]:
            best = size, name, strides, pieces
    if best is None or _rows(*best[2:]) < 2:
        return None
    return best[1:]


def _values_as(
    body: LoopBody,
    reduction: LoopBody,
    name: str,
    read: Strides,
    pieces: dict[Any, sympy.Expr],
) -> Optional[LoopBody]:
    """
    ``body`` of a pointwise node with the loops of ``reduction``, if it reads ``name`` at the
    index ``read``, and all that it reads and writes of the values is along the same rows; or
    None.
    """
    body = split_loops(body)
    indices = [
        (buffer, is_write, Strides.of(index, body.var_ranges))
        for buffer, index, is_write in accessed(body)
    ]
    shared = (
        (mine, count_as(mine, read))
        for buffer, is_write, mine in indices
        if buffer == name and not is_write and mine is not None
    )
    mine, found = next((each for each in shared if each[1] is not None), (None, None))
    if mine is None or found is None:
        return None
    along = next((v for v in body.iter_vars if equal(mine.strides[v], 1)), None)
    if along is None:
        return None
    for buffer, is_write, other in indices:
        if other is None:
            return None
        stride = other.strides[along]
        if not is_write and equal(stride, 0):
            continue
        run = body.var_ranges[along] * get_dtype_size(V.graph.get_dtype(buffer))
        whole = SECTOR_BYTES if is_write else READ_BYTES
        if not (
            equal(stride, 1)
            and V.graph.sizevars.statically_known_multiple_of(run, whole)
        ):
            return None
    variables = [*reduction.iter_vars, *reduction.reduce_vars]
    by_variables = {v: sympy_subs(e, pieces) for v, e in found.items()}
    sizes = [*reduction.sizes[0], *reduction.sizes[1]]
    return counted_as(body, by_variables, variables, sizes)


def _is_stored(node: SchedulerNode) -> bool:
    """
    Whether all that ``node`` writes is in memory whatever is fused with it: it is a result,
    or read by a kernel that is not generated.
    """
    return all(
        any(
            not isinstance(getattr(user.node, "_body", None), LoopBody)
            for user in output.users
        )
        for output in node.get_outputs()
    )


def _comes_next(
    user: SchedulerNode, node: SchedulerNode, loops: dict[SchedulerNode, LoopBody]
) -> bool:
    """Whether nothing but nodes of ``loops`` is between ``node`` and its ``user``."""
    by_name = node.scheduler.name_to_fused_node
    return all(
        (between := by_name.get(name)) is not None
        and (between in loops or node.get_name() not in between.ancestors)
        for name in user.ancestors
    )


def _stays_in_l2(node: SchedulerNode, bodies: Sequence[LoopBody]) -> bool:
    """
    Whether there is a block of ``node`` for each SM, and what all SMs read and write of their
    blocks at a time is in the L2 cache until it is read again.
    """
    hint = V.graph.sizevars.optimization_hint
    blocks, values = (hint(n) for n in node.group[1])
    device = DeviceModel.of(DeviceProperties.create(node.get_device()))
    of_values = {
        buffer: get_dtype_size(V.graph.get_dtype(buffer))
        for body in bodies
        for buffer, index, _ in accessed(body)
        if hint(sympy_product(n for v, n in body.var_ranges.items() if v in index.free_symbols))
        >= blocks * values
    }
    at_a_time = BLOCKS_PER_SM * device.sms * values * sum(of_values.values())
    return blocks >= device.sms and at_a_time <= device.l2_mib << 20


def _loops_of_rows(
    node: SchedulerNode, done: OrderedSet[SchedulerNode]
) -> dict[SchedulerNode, LoopBody]:
    """
    The reduction ``node`` of blocks of two dimensions and what goes on with its results, and
    with the values, each with its new loops. Empty where nothing reads the values again.
    """
    body = split_loops(node._body)
    if (read := _read_of_rows(body)) is None:
        return {}
    loops: dict[SchedulerNode, LoopBody] = {node: body}
    of_values: list[LoopBody] = []
    of_blocks: dict[str, list[Strides]] = {}
    blocks, values = node.group[1][0], sympy_product(node.group[1])
    queue = [node]
    while queue:
        each = queue.pop(0)
        for buffer, index, is_write in accessed(loops[each]):
            ranges = {v: loops[each].var_ranges[v] for v in loops[each].iter_vars}
            if is_write and (at := Strides.of(index, ranges)):
                of_blocks.setdefault(buffer, []).append(at)
        for user in _users(each):
            if (
                user in loops
                or user in done
                or user.is_reduction()
                or not _comes_next(user, node, loops)
            ):
                continue
            if equal(user.group[1][0], blocks):
                if new := loops_as(user._body, of_blocks, body.sizes[0]):
                    loops[user] = new
                    queue.append(user)
            elif (
                equal(user.group[1][0], values)
                and _is_stored(user)
                and (new := _values_as(user._body, body, *read))
            ):
                loops[user] = new
                of_values.append(new)
    changed = any(new is not each._body for each, new in loops.items())
    if not of_values or not changed or not _stays_in_l2(node, [body, *of_values]):
        return {}
    return loops


def follow_reads(nodes: Sequence[BaseSchedulerNode]) -> None:
    """
    Give the block reductions of ``nodes``, and what goes on with them, the loops by which
    they read.
    """
    if not config.triton.block_reduction_tiles:
        return
    done: OrderedSet[Any] = OrderedSet()
    for node in nodes:
        if (
            not isinstance(getattr(node, "_body", None), LoopBody)
            or not node.is_reduction()
            or not tiles_blocks(node.get_device(), node.group[1][1])
        ):
            continue
        loops: dict[SchedulerNode, LoopBody] = {}
        if may_have_tile(node.get_device(), node.group[1][1]):
            loops = _loops_of(node, done)
        for each, new in (loops or _loops_of_rows(node, done)).items():
            done.add(each)
            if new is each._body:
                continue
            each._body, each._sizes = new, new.sizes
            each.refresh_dependencies(
                normalize=not config.loop_ordering_after_fusion,
                need_clear_tiling_cache=True,
            )
