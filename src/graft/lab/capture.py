"""A function or a training step -> the graphs that Inductor is given.

Dynamo, AOTAutograd, Inductor's joint passes and the partitioner all run as they do in
`torch.compile`. On a described GPU the tensors are fake and nothing is executed; on a real one the
step runs, forward and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from graft.cases import DTYPES, Case, Shape
from graft.errors import GraftError
from graft.lab import between_graphs, fakegpu

# As `torch._inductor.compile_fx.compile_fx_inner`: (graph, example inputs, **options) -> callable.
Compiler = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class Graph:
    """One graph as Inductor receives it: aten's operators on the GPU's tensors.

    `inputs` are what Inductor is given beside it: tensors, fake ones on a described GPU, and
    integers, symbolic where a size is dynamic. `options` are the keywords of `compile_fx_inner`
    that are data. `donated` are the inputs, by position, whose memory a backward may use again.
    """

    name: str
    module: torch.fx.GraphModule
    inputs: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=dict)
    donated: tuple[int, ...] = ()


_GPU = torch.device("cuda", 0)
_DATA_OPTIONS = ("is_backward", "is_inference", "static_input_idxs")


def graph(module: torch.fx.GraphModule, inputs: Sequence[Any], options: dict[str, Any]) -> Graph:
    """What an `inner_compile` was called with, named for the part of the step that it is."""
    from torch._inductor.utils import get_donated_idxs

    kept = {key: options[key] for key in _DATA_OPTIONS if options.get(key) is not None}
    donated: tuple[int, ...] = ()
    if kept.get("is_backward"):
        name = "backward"
        donated = tuple(get_donated_idxs() or ())
    elif kept.get("is_inference"):
        name = "graph"
    else:
        name = "forward"
    return Graph(name, module, tuple(inputs), kept, donated)


def trace(
    case: Case,
    shape: Shape,
    dtype: str,
    compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
) -> list[Graph]:
    """The graphs of `case` on the described GPU, in the order that Inductor compiles them.

    `compiler` compiles each as it comes (the backward's tensors have the strides that the compiled
    forward gave them); without one, nothing is compiled. Where `dynamic`, the first size of `shape`
    is symbolic. Needs `fakegpu.install` first.
    """
    case.check_shape(shape)
    case.check_dtype(dtype)
    if fakegpu.installed() is None:
        raise GraftError("no GPU is described in this process (graft.lab.fakegpu.install)")
    graphs: list[Graph] = []

    def inner(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        # Compiling changes the graph; what is kept is the graph as it came.
        graphs.append(graph(_copy(module), inputs, options))
        return _skip if compiler is None else compiler(module, inputs, **options)

    _trace(case, shape, DTYPES[dtype], inner, dynamic)
    return graphs


def prepare(
    case: Case,
    shape: Shape,
    dtype: str,
    compiler: Compiler,
    *,
    dynamic: bool = False,
) -> Callable[[], Any]:
    """The case on the real GPU, as something to call: forward and, for a training step, backward.

    The first call compiles each graph with `compiler`, an `inner_compile`.
    """
    from torch._inductor.compile_fx import compile_fx

    case.check_shape(shape)
    case.check_dtype(dtype)

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(module, inputs, inner_compile=compiler)

    inputs = case.inputs(shape, DTYPES[dtype], _GPU)
    _mark(inputs, dynamic)
    if case.model is not None:
        inputs = (case.model(_GPU), *inputs)
    torch._dynamo.reset()
    compiled = torch.compile(case.fn, backend=backend, dynamic=None if dynamic else False)
    leaves = [leaf for each in inputs for leaf in _leaves(each) if leaf.requires_grad]

    def step() -> Any:
        for leaf in leaves:
            leaf.grad = None  # adding to an earlier gradient is no part of the step
        with tracing():
            result = compiled(*inputs)
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.backward(torch.ones_like(result))
        return result

    return step


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, nn.Module):
        return list(value.parameters())
    return [value] if isinstance(value, torch.Tensor) else []


def _skip(*args: Any) -> None:
    """A compiled graph that is never called."""


def _copy(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    with torch.utils._python_dispatch._disable_current_modes():
        return torch.fx.GraphModule(module, _copy_graph(module.graph))


def _copy_graph(source: torch.fx.Graph) -> torch.fx.Graph:
    target = torch.fx.Graph()
    output = target.graph_copy(source, {})
    target.output(output)
    last = next(iter(reversed(target.nodes)))
    last.meta = dict(next(iter(reversed(source.nodes))).meta)
    return target


def _trace(case: Case, shape: Shape, dtype: torch.dtype, inner: Compiler, dynamic: bool) -> None:
    # A model and what it takes are made outside of the fake mode, where a module can still be
    # converted (`.to`, `.half`); meta tensors are free.
    meta = torch.device("meta")
    model = case.model(meta) if case.model else None
    given = case.inputs(shape, dtype, meta) if model is not None else ()

    def inputs() -> tuple[Any, ...]:
        describe = _describer(_GPU)
        if model is None:
            made = case.inputs(shape, dtype, _GPU)
        else:
            made = tree_map_only(torch.Tensor, describe, given)
        _mark(made, dynamic)
        if model is None:
            return made
        _describe_module(model, describe)
        return (model, *made)

    trace_function(case.fn, inputs, inner, dynamic=dynamic)


def trace_function(
    fn: Callable[..., Any],
    inputs: Callable[[], Sequence[Any]],
    inner: Compiler,
    *,
    dynamic: bool = False,
) -> None:
    """Give each graph of `fn` to `inner` as Inductor compiles it. Needs `fakegpu.install` first.

    `inputs` makes the arguments, fake tensors on the described GPU; it is called in a fake mode.
    Where `dynamic`, sizes that it marked are symbolic.
    """
    from torch._inductor.compile_fx import compile_fx

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Dynamo's own fake tensors carry the symbolic sizes; the inputs themselves do not.
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        compile_fx(module, [node.meta["example_value"] for node in placeholders], inner)
        return module.forward

    torch._dynamo.reset()
    sizes = _shape_env()
    with tracing(), between_graphs.impls(sizes), FakeTensorMode(shape_env=sizes):
        compiled = torch.compile(fn, backend=backend, dynamic=None if dynamic else False)
        compiled(*inputs())


def _shape_env() -> Any:
    """One in which what a branch asks of a tensor's values is not so.

    Python between two graphs branches on values that a fake tensor does not have: whether a layer
    is dropped, or a label is out of range. The step goes on as where neither is.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    class Env(ShapeEnv):
        def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            except GuardOnDataDependentSymNode:
                if not isinstance(orig_expr, sympy.Eq):
                    raise
                return sympy.false

    return Env()


def _mark(inputs: Sequence[Any], dynamic: bool) -> None:
    """Make the size that all inputs of a dynamic case share, the first, a symbol."""
    if not dynamic:
        return
    rows = inputs[0].shape[0]
    for value in inputs:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows:
            torch._dynamo.mark_dynamic(value, 0)


def _describer(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """What gives a fake tensor on `device` for a meta tensor, and the same for the same one."""
    made: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in made:
            where = device if tensor.is_meta else tensor.device
            like = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where
            )
            if isinstance(tensor, nn.Parameter):
                like = nn.Parameter(like, requires_grad=tensor.requires_grad)
            made[tensor] = like.requires_grad_(tensor.requires_grad)
        return made[tensor]

    return fake


def _describe_module(module: nn.Module, describe: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put fake tensors in the place of a meta module's parameters and buffers."""
    for child in module.modules():
        for kind in (child._parameters, child._buffers):
            for name, tensor in kind.items():
                if tensor is not None:
                    kind[name] = describe(tensor)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Settings under which every graph of a step is compiled, compiled now, and in this process."""
    import torch._dynamo.config as dynamo_config
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with (
        dynamo_config.patch(automatic_dynamic_local_pgo=False),
        functorch_config.patch(
            enable_autograd_cache=False,
            # Otherwise a backward with symbolic sizes waits until it is called.
            force_non_lazy_backward_lowering=True,
        ),
        inductor_config.patch(fx_graph_cache=False, compile_threads=1),
    ):
        yield
