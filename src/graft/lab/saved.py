"""Captured graphs as data: a JSON file that names aten's operators, sizes, strides and dtypes.

What is kept is what Inductor's code depends on. Stack traces and other traces of where a graph came
from are not.
"""

from __future__ import annotations

import importlib
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from graft.errors import GraftError
from graft.lab.capture import Graph

FORMAT = 1
# Constants that a graph carries (not its inputs) are small: indices, scalars.
_LARGEST_CONSTANT = 4096


def save(graphs: Sequence[Graph], path: Path) -> None:
    """Write `graphs`. Raises GraftError for what cannot be saved: a graph that holds other graphs,
    a large constant, or a size that is known only when it runs."""
    data = {"format": FORMAT, "graphs": [_graph(graph) for graph in graphs]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> list[Graph]:
    """Read what `save` wrote, as fake tensors on the device that they were captured on.

    Needs that device, real or described. Raises GraftError for a file that is none of ours.
    """
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise GraftError(f"{path} has format {data['format']!r}; this reads {FORMAT}")
        return [_Reader(graph).graph() for graph in data["graphs"]]
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise GraftError(f"{path} is not a file of saved graphs: {wrong!r}") from wrong


# --- writing -------------------------------------------------------------------------------------


def _graph(graph: Graph) -> dict[str, Any]:
    nodes = []
    inputs = iter(graph.inputs)
    symbols: dict[str, int] = {}
    for node in graph.module.graph.nodes:
        saved: dict[str, Any] = {"op": node.op, "name": node.name}
        if node.op == "placeholder":
            saved["input"] = _value(next(inputs), symbols)
        elif node.op == "get_attr":
            saved["constant"] = _constant(getattr(graph.module, node.target), node.target)
        elif node.op == "call_function":
            saved["target"] = _target(node.target)
            saved["kwargs"] = {key: _argument(value) for key, value in node.kwargs.items()}
        if node.op in ("call_function", "output"):
            saved["args"] = [_argument(value) for value in node.args]
        original = node.meta.get("original_aten")
        if isinstance(original, torch._ops.OpOverload):
            saved["original_aten"] = _target(original)
        nodes.append(saved)
    return {
        "name": graph.name,
        "options": graph.options,
        "donated": graph.donated,
        "symbols": symbols,
        "nodes": nodes,
    }


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}::{target._opname}.{target._overloadname}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise GraftError(f"a graph with {target.name()} cannot be saved: it holds other graphs")
    return f"{target.__module__}:{target.__name__}"


def _argument(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, (list, tuple)):
        return {"tuple" if isinstance(value, tuple) else "list": [_argument(v) for v in value]}
    if isinstance(value, slice):
        return {"slice": [_argument(v) for v in (value.start, value.stop, value.step)]}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise GraftError(f"an argument of type {type(value).__name__} cannot be saved: {value!r}")


def _value(value: Any, symbols: dict[str, int]) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
            "size": [_size(each, symbols) for each in value.shape],
            "stride": [_size(each, symbols) for each in value.stride()],
            "offset": _size(value.storage_offset(), symbols),
        }
    return {"integer": _size(value, symbols)}


def _size(value: Any, symbols: dict[str, int]) -> int | str:
    """An integer, or the expression of a symbolic one, whose symbols are noted with their hints."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    if not expression.free_symbols:
        return int(expression)
    for symbol in expression.free_symbols:
        hint = value.node.shape_env.backed_var_to_val.get(symbol)
        if hint is None:
            raise GraftError(f"the size {expression} is known only when the graph runs")
        symbols[str(symbol)] = int(hint)
    return str(expression)


def _constant(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise GraftError(f"{name} of a graph is no tensor with values; it cannot be saved")
    if value.numel() > _LARGEST_CONSTANT:
        raise GraftError(f"{name} has {value.numel()} elements; {_LARGEST_CONSTANT} can be saved")
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "values": value.cpu().tolist(),
    }


# --- reading -------------------------------------------------------------------------------------


class _Reader:
    """Rebuilds one graph and propagates its fake tensors again."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.data = data
        self.shapes = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shapes)
        self.symbols = {name: self._symbol(name, hint) for name, hint in data["symbols"].items()}
        self.nodes: dict[str, fx.Node] = {}
        self.inputs: list[Any] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.into = fx.Graph()

    def graph(self) -> Graph:
        from torch.fx.passes.fake_tensor_prop import FakeTensorProp

        for saved in self.data["nodes"]:
            self.nodes[saved["name"]] = self._node(saved)
        module = fx.GraphModule(torch.nn.Module(), self.into)
        for name, value in self.constants.items():
            setattr(module, name, value)
        FakeTensorProp(module, self.mode).propagate_dont_convert_inputs(*self.inputs)
        options, donated = dict(self.data["options"]), tuple(self.data["donated"])
        return Graph(self.data["name"], module, tuple(self.inputs), options, donated)

    def _symbol(self, name: str, hint: int) -> sympy.Symbol:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        symbol = self.shapes.create_symbol(hint, ConstantSource(name), DimDynamic.DYNAMIC)
        return symbol

    def _node(self, saved: Mapping[str, Any]) -> fx.Node:
        op = saved["op"]
        if op == "placeholder":
            node = self.into.placeholder(saved["name"])
            self.inputs.append(self._input(saved["input"]))
        elif op == "get_attr":
            constant = saved["constant"]
            self.constants[saved["name"]] = torch.tensor(
                constant["values"], dtype=getattr(torch, constant["dtype"])
            )
            node = self.into.get_attr(saved["name"])
        elif op == "output":
            node = self.into.output(self._read(saved["args"][0]))
        else:
            node = self.into.create_node(
                op,
                _resolve(saved["target"]),
                tuple(self._read(value) for value in saved["args"]),
                {key: self._read(value) for key, value in saved["kwargs"].items()},
                name=saved["name"],
            )
        if "original_aten" in saved:
            node.meta["original_aten"] = _resolve(saved["original_aten"])
        return node

    def _input(self, saved: Mapping[str, Any]) -> Any:
        if "integer" in saved:
            return self._integer(saved["integer"])
        size = [self._integer(each) for each in saved["size"]]
        stride = [self._integer(each) for each in saved["stride"]]
        offset = self._integer(saved["offset"])
        with self.mode:
            # Storage for a view that starts at an offset must reach past it.
            span = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
            dtype, device = getattr(torch, saved["dtype"]), torch.device(saved["device"])
            if isinstance(offset, int) and offset == 0:
                return torch.empty_strided(size, stride, dtype=dtype, device=device)
            return torch.empty(span, dtype=dtype, device=device).as_strided(size, stride, offset)

    def _integer(self, saved: int | str) -> Any:
        if isinstance(saved, int):
            return saved
        expression = sympy.sympify(saved, locals=dict(self.symbols))
        hint = int(expression.subs({s: self.data["symbols"][n] for n, s in self.symbols.items()}))
        return self.shapes.create_symintnode(expression, hint=hint)

    def _read(self, saved: Any) -> Any:
        if not isinstance(saved, dict):
            return saved
        ((kind, value),) = saved.items()
        readers: dict[str, Callable[[Any], Any]] = {
            "node": lambda name: self.nodes[name],
            "list": lambda items: [self._read(each) for each in items],
            "tuple": lambda items: tuple(self._read(each) for each in items),
            "slice": lambda items: slice(*map(self._read, items)),
            "torch": lambda name: getattr(torch, name),
            "device": torch.device,
            "float": float,
        }
        return readers[kind](value)


def _resolve(target: str) -> Any:
    if "::" in target:
        namespace, _, rest = target.partition("::")
        name, _, overload = rest.partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    module, _, name = target.partition(":")
    if module == operator.__name__ or module in ("_operator", "math", "torch"):
        return getattr(importlib.import_module(module), name)
    raise GraftError(f"a saved graph calls {target}, which is none of aten's operators")
