"""
The loops of a block reduction over a transposed input, and of what goes on with it.

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
x, so that it would read x again in another kernel. It gets the loops of the reduction too,
where it writes along the rows that it reads.
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
from .device_model import DeviceModel
from .loop_body import LoopBody
from .runtime.hints import DeviceProperties
from .utils import get_dtype_size, sympy_index_symbol, sympy_product, sympy_subs
from .virtualized import V


if TYPE_CHECKING:
    from collections.abc import Sequence

    from .scheduler import BaseSchedulerNode, SchedulerNode


# What memory is written by: a row of a block is a multiple of it.
SECTOR_BYTES = 32


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
    loops; those of ``done`` keep theirs. Empty where no values are written along the blocks:
    as they are read, the loops that blocks were written in are as fast.
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
    along_blocks = False
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
                    along_blocks |= at.strides[loops[each].iter_vars[-1]] == 1
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
                loops[user] = new
                queue.append(user)
    changed = body is not node._body or any(
        new is not each._body and not equal(each.group[1][0], blocks)
        for each, new in loops.items()
    )
    return loops if along_blocks and changed else {}


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


def _read_of_rows(
    body: LoopBody,
) -> Optional[tuple[str, Strides, dict[Any, sympy.Expr]]]:
    """
    What a reduction reads of the most elements, if that are parts of rows: with the pieces of
    the reduction's variables, as `_in_pieces` returns them.
    """
    hint = V.graph.sizevars.optimization_hint
    best: Optional[tuple[int, str, Strides, dict[Any, sympy.Expr]]] = None
    for name, index, is_write in accessed(body):
        if is_write or (found := _in_pieces(index, body)) is None:
            continue
        strides, pieces = found
        size = hint(
            sympy_product(n for v, n in strides.ranges.items() if strides.strides[v] != 0)
        )
        if best is None or size > best[0]:
            best = size, name, strides, pieces
    if best is None:
        return None
    _, name, strides, pieces = best
    read = [strides.strides[v] for v in pieces if strides.strides[v] != 0]
    if len(read) < 2 or not any(equal(stride, 1) for stride in read):
        return None
    return name, strides, pieces


def _stays_in_l2(node: SchedulerNode, name: str) -> bool:
    """
    Whether there is a block for each SM, and what all of them read is in the L2 cache until
    it is read again.
    """
    hint = V.graph.sizevars.optimization_hint
    blocks, values = (hint(n) for n in node.group[1])
    device = DeviceModel.of(DeviceProperties.create(node.get_device()))
    nbytes = values * get_dtype_size(V.graph.get_dtype(name))
    return blocks >= device.sms and nbytes * device.sms <= device.l2_mib << 20


def _values_as(
    body: LoopBody,
    reduction: LoopBody,
    name: str,
    read: Strides,
    pieces: dict[Any, sympy.Expr],
) -> Optional[LoopBody]:
    """
    ``body`` of a pointwise node with the loops of ``reduction``, if it reads ``name`` at the
    index ``read``, and writes along the rows that it reads, in whole sectors; or None.
    """
    body = split_loops(body)
    for buffer, index, is_write in accessed(body):
        mine = Strides.of(index, body.var_ranges)
        if buffer != name or is_write or mine is None:
            continue
        if (found := count_as(mine, read)) is not None:
            break
    else:
        return None
    along = next((v for v in body.iter_vars if equal(mine.strides[v], 1)), None)
    if along is None:
        return None
    for buffer, index, is_write in accessed(body):
        run = body.var_ranges[along] * get_dtype_size(V.graph.get_dtype(buffer))
        whole = V.graph.sizevars.statically_known_multiple_of(run, SECTOR_BYTES)
        if not is_write:
            if buffer == name and not whole:
                return None
            continue
        written = Strides.of(index, body.var_ranges)
        if written is None or not equal(written.strides[along], 1) or not whole:
            return None
    variables = [*reduction.iter_vars, *reduction.reduce_vars]
    by_variables = {v: sympy_subs(e, pieces) for v, e in found.items()}
    sizes = [*reduction.sizes[0], *reduction.sizes[1]]
    return counted_as(body, by_variables, variables, sizes)


def _loops_of_rows(
    node: SchedulerNode, done: OrderedSet[SchedulerNode]
) -> dict[SchedulerNode, LoopBody]:
    """
    The reduction ``node`` of blocks of two dimensions and what goes on with its results, and
    with the values, each with its new loops. Empty where nothing reads the values again.
    """
    body = split_loops(node._body)
    read = _read_of_rows(body)
    if read is None or not _stays_in_l2(node, read[0]):
        return {}
    loops: dict[SchedulerNode, LoopBody] = {node: body}
    of_blocks: dict[str, list[Strides]] = {}
    blocks, values = node.group[1][0], sympy_product(node.group[1])
    queue = [node]
    reads_again = False
    while queue:
        each = queue.pop(0)
        for buffer, index, is_write in accessed(loops[each]):
            ranges = {v: loops[each].var_ranges[v] for v in loops[each].iter_vars}
            if is_write and (at := Strides.of(index, ranges)):
                of_blocks.setdefault(buffer, []).append(at)
        for user in _users(each):
            if user in loops or user in done or user.is_reduction():
                continue
            if equal(user.group[1][0], blocks):
                if new := loops_as(user._body, of_blocks, body.sizes[0]):
                    loops[user] = new
                    queue.append(user)
            elif equal(user.group[1][0], values) and (
                new := _values_as(user._body, body, *read)
            ):
                loops[user] = new
                reads_again = True
    return loops if reads_again else {}


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
