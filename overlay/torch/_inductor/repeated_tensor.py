"""
A copy of an expanded tensor, as a copy for each repeat.

``repeat_interleave`` and ``expand`` of a new dimension, as of the keys of grouped-query
attention [B, H, 1, T, D] to [B, H, G, T, D], are copied for an operator that wants them
dense. As one kernel over the result, the copy has ``G`` times the elements of what it
reads, and computes each ``G`` times; no reduction that comes before, as a norm's, has as
many elements, so none is fused with it, and all is read again. Each repeat for itself has
as many. So the result is a concatenation of its repeats, which are one kernel with what
comes before: it computes once and stores ``G`` times.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

import torch

from . import ir
from .utils import is_gpu, is_view, sympy_product
from .virtualized import V


if TYPE_CHECKING:
    from torch.fx import Node


aten = torch.ops.aten
# Repeats that their producer stores, at most; more are copied by a kernel of their own.
MAX_STORED_REPEATS = 8
# Bytes that follow one another in each repeat, at least, and in whole loads.
MIN_RUN_BYTES = 64
LOAD_BYTES = 16
EXTERN = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)


def clone_of_repeats(x: ir.TensorBox) -> Optional[ir.TensorBox]:
    """
    What the current node, a clone of ``x``, results in; None where one kernel over all of
    it is as good: where ``x`` is not repeated along one dimension alone, or the result is
    fused with what uses it and never stored.
    """
    node = V.graph.current_node
    device = x.get_device()
    if (
        node is None
        or node.target is not aten.clone.default
        or device is None
        or not is_gpu(device.type)
        or not all(is_stored_for(use) for use in node.users)
    ):
        return None
    dim = repeated_dim(node.args[0])  # type: ignore[arg-type]
    size = list(x.get_size())
    if dim is None or not x.get_read_names():
        return None
    run = sympy_product(size[dim + 1 :]) * x.get_dtype().itemsize
    sizevars = V.graph.sizevars
    if not (
        sizevars.statically_known_multiple_of(run, LOAD_BYTES)
        and sizevars.statically_known_geq(run, MIN_RUN_BYTES)
        and node.meta["val"].is_contiguous()
    ):
        return None

    result = ir.ConcatKernel(
        name=None,
        layout=ir.FixedLayout(
            device=device,
            dtype=x.get_dtype(),
            size=size,
            stride=ir.FlexibleLayout.contiguous_strides(size),
        ),
        inputs=[],
    )
    storage = ir.StorageBox(result)
    repeat = ir.TensorBox(ir.SliceView.create(x.data, dim, 0, 1, clamp=False))
    inputs = [
        ir.ConcatKernel.realize_into(
            repeat, ir.SliceView.create(storage, dim, i, i + 1, clamp=False)
        )
        for i in range(int(size[dim]))
    ]
    result.name = V.graph.register_buffer(result)
    result.inputs = ir.ConcatKernel.unwrap_storage(inputs)
    V.graph.register_operation(result)
    return ir.TensorBox(storage)


def repeated_dim(node: Node) -> Optional[int]:
    """The one dimension that the expand ``node`` repeats, a few times; None without."""
    if node.target is not aten.expand.default:
        return None
    source = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    size = node.meta["val"].shape
    if len(source) != len(size):
        return None
    dims = [dim for dim, sizes in enumerate(zip(source, size)) if not _same(*sizes)]
    if len(dims) != 1:
        return None
    repeats = size[dims[0]]
    if isinstance(repeats, int) and 1 < repeats <= MAX_STORED_REPEATS:
        return dims[0]
    return None


def _same(old: int | torch.SymInt, new: int | torch.SymInt) -> bool:
    # sizes of the same expression; no guard is needed to tell a 1 from others
    if isinstance(old, int) or isinstance(new, int):
        return isinstance(old, int) and isinstance(new, int) and old == new
    return old.node.expr == new.node.expr


def is_stored_for(use: Node) -> bool:
    """Whether ``use`` takes its input from memory, and fuses no kernel with it."""
    from .lowering import fallbacks, lowerings

    if use.op == "output":
        return True
    if use.op != "call_function":
        return False
    if use.target in fallbacks or use.target in EXTERN:
        return True
    if not isinstance(use.target, torch._ops.OpOverload):
        return False
    if is_view(use.target):
        return all(is_stored_for(user) for user in use.users)
    # is made a fallback when it is first met, as are operators that are not PyTorch's
    return use.target not in lowerings
