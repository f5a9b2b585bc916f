"""`torch.autograd.grad` for tensors on a GPU that is described, not present.

Recording a graph needs no GPU; the C++ engine that walks it backwards asks the CUDA driver for a
context first. This walks the same recorded nodes in the same order, adds gradients up in the same
order, and casts and reduces them as the engine does, so that what AOTAutograd traces is the same.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.fx import traceback as fx_traceback

Slot = tuple[Node, int]


def grad(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grad_outputs: Sequence[torch.Tensor | None] | None = None,
    *,
    allow_unused: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `outputs` with respect to `inputs`, each in the shape and dtype of its input.

    Without `grad_outputs` each output must be a scalar. Raises RuntimeError for an input that no
    output depends on, unless `allow_unused`.
    """
    if grad_outputs is None:
        grad_outputs = [None] * len(outputs)
    with torch.no_grad():
        seeds = [
            torch.ones_like(out) if g is None else g
            for out, g in zip(outputs, grad_outputs, strict=True)
        ]
        roots = [_slot(out) for out in outputs]
        wanted = [_slot(tensor) for tensor in inputs]
        found = _walk(roots, seeds, wanted)
    results = tuple(found.get(slot) for slot in wanted)
    if not allow_unused and any(result is None for result in results):
        raise RuntimeError("one of the inputs is not used in the graph of the outputs")
    return results


def _slot(tensor: torch.Tensor) -> Slot:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _walk(
    roots: Sequence[Slot], seeds: Sequence[torch.Tensor], wanted: Sequence[Slot]
) -> dict[Slot, torch.Tensor]:
    needed = _needed(roots, {node for node, _ in wanted})
    pending = _dependencies(roots, needed)
    buffers: dict[Node, dict[int, torch.Tensor]] = defaultdict(dict)
    captured: dict[Slot, torch.Tensor] = {}
    # The engine runs the ready node that was recorded last; the index only breaks ties.
    ready: list[tuple[int, int, Node]] = []

    def send(slots: Sequence[Slot | None], gradients: Sequence[torch.Tensor | None]) -> None:
        # All that a node gives is cast and reduced before any of it is added up.
        given = [
            (slot, _as_recorded(gradient, slot[0]._input_metadata[slot[1]]))
            for slot, gradient in zip(slots, gradients, strict=False)
            if slot is not None and gradient is not None
        ]
        for (node, number), gradient in given:
            buffer = buffers[node]
            buffer[number] = buffer[number] + gradient if number in buffer else gradient

    def arrived(node: Node) -> None:
        pending[node] -= 1
        if pending[node] == 0:
            heapq.heappush(ready, (-node._sequence_nr(), len(ready), node))

    send(roots, seeds)
    for node, _ in roots:
        if node in needed:
            arrived(node)
    while ready:
        _, _, node = heapq.heappop(ready)
        buffer = buffers.pop(node, {})
        for slot in wanted:
            if slot[0] is node and slot[1] in buffer:
                captured[slot] = buffer[slot[1]]
        edges = node.next_functions
        if not any(target in needed for target, _ in edges):
            continue
        gradients = _call(node, [buffer.get(i) for i in range(len(node._input_metadata))])
        send([(t, number) if t in needed else None for t, number in edges], gradients)
        for target, _ in edges:
            if target in needed:
                arrived(target)
    return captured


def _needed(roots: Sequence[Slot], wanted: set[Node]) -> set[Node]:
    """The nodes that lie between the roots and a wanted node, both included."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(node, False) for node, _ in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((t, False) for t, _ in node.next_functions if t is not None)
    needed: set[Node] = set()
    for node in order:
        if node in wanted or any(target in needed for target, _ in node.next_functions):
            needed.add(node)
    return needed


def _dependencies(roots: Sequence[Slot], needed: set[Node]) -> dict[Node, int]:
    """For each needed node, how many edges it waits for."""
    counts: dict[Node, int] = defaultdict(int)
    for node, _ in roots:
        if node in needed:
            counts[node] += 1
    for node in needed:
        for target, _ in node.next_functions:
            if target in needed:
                counts[target] += 1
    return counts


def _as_recorded(gradient: torch.Tensor, recorded: Any) -> torch.Tensor:
    """The gradient in the shape and dtype that the forward tensor had."""
    if tuple(gradient.shape) != tuple(recorded.shape):
        gradient = gradient.sum_to_size(recorded.shape)
    if gradient.dtype != recorded.dtype:
        gradient = gradient.to(recorded.dtype)
    return gradient


def _call(node: Node, gradients: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    # AOTAutograd hangs hooks on each node that tell the tracer which forward node it belongs to.
    # The engine would run them; here they are what they do.
    stack = list(node.metadata.get("traceback_", ()))  # type: ignore[attr-defined]
    fx_traceback.set_stack_trace(stack)
    fx_traceback.set_grad_fn_seq_nr(node._sequence_nr())
    try:
        apply: Any = node.apply if isinstance(node, BackwardCFunction) else node
        result = apply(*gradients)
    finally:
        fx_traceback.set_stack_trace([*stack, fx_traceback.GRADIENT_ACC_SPECIAL_STACK])
        fx_traceback.reset_grad_fn_seq_nr()
    return result if isinstance(result, tuple) else (result,)
