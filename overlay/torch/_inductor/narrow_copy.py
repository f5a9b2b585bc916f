"""
What a copy in another order reads: the narrow values of a cast, not the wide ones before it.

A value that takes many operations is stored, so that what reads it does not compute it
again. Where a scaled block is cast, these are all of the cast, and the value that is stored
may be the float32 one before it. In the same order the cast is fused and the wide value is
never in memory; a copy of the result in another order, as values of tiles that are written
back to their matrix, is another kernel, and reads four bytes for each that it writes. So
such a value waits for its cast, and what the cast gives is stored.
"""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

import torch

from .block_reduction_tile import tiles_blocks_on
from .utils import is_view


if TYPE_CHECKING:
    from torch.fx import Node


aten = torch.ops.aten
cast = torch.ops.prims.convert_element_type.default


def is_copied_narrower(node: Node) -> bool:
    """
    Whether nothing reads ``node`` but operations of its elements that end in a cast to a
    narrower type, which a clone in another order alone reads.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not tiles_blocks_on(value.device):
        return False
    size = value.dtype.itemsize
    user = _user(node)
    while user is not None and _is_of_elements(user) and _itemsize(user) == size:
        user = _user(user)
    if user is None or user.target is not cast or _itemsize(user) >= size:
        return False
    user, permuted = _user(user), False
    while (
        user is not None
        and isinstance(user.target, torch._ops.OpOverload)
        and is_view(user.target)
    ):
        permuted |= user.target is aten.permute.default
        user = _user(user)
    return permuted and user is not None and user.target is aten.clone.default


def _user(node: Node) -> Optional[Node]:
    """What alone reads ``node``, and as its first argument; None where there is no such node."""
    users = list(node.users)
    if len(users) != 1 or users[0].args[:1] != (node,):
        return None
    return users[0]


def _is_of_elements(node: Node) -> bool:
    """Whether an element of ``node`` is of one of its argument, and of constants."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and (target is cast or torch.Tag.pointwise in target.tags)
        and len(node.all_input_nodes) == 1
    )


def _itemsize(node: Node) -> int:
    value = node.meta.get("val")
    return value.dtype.itemsize if isinstance(value, torch.Tensor) else 0
