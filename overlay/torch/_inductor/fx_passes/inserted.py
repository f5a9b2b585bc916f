"""Nodes that a pass inserts in place of another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..fx_utils import get_fake_args_kwargs


# What describes a node's own value, among its metadata.
OF_VALUE = ("val", "tensor_meta", "eager_input_vals")


def insert_like(
    node: Node, target: Callable[..., Any], *args: Any, **kwargs: Any
) -> Node:
    """
    A call of ``target`` at the graph's insertion point, with the metadata of ``node`` but
    for its value, which is that of the call.
    """
    made = node.graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in node.meta.items() if k not in OF_VALUE}
    _, fake_args, fake_kwargs = get_fake_args_kwargs(made)
    mode = torch._guards.detect_fake_mode(node.meta["val"]) or contextlib.nullcontext()
    with mode:
        made.meta["val"] = target(*fake_args, **fake_kwargs)
    return made
