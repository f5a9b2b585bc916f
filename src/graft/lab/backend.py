"""`torch.compile` for a GPU that is described, not present, with numbers that can be checked.

After `install()`, in a process of its own:

- tensors that a test makes with `device="cuda"` are CPU tensors;
- a function given to `torch.compile` is captured by Dynamo on them; AOTAutograd, Inductor's passes
  and its code generation then see the described GPU, as they would on a machine that has it, so
  that counters, `config` options, `run_and_get_code` and `FileCheck` mean what they mean there;
- a call of the compiled function runs the generated wrapper on the CPU tensors, each kernel under
  Triton's interpreter (`graft.lab.interpret`).

A call that would take longer than its budget is not interpreted. It raises `OverBudget`, or, where
the caller has opted in, its graph is run by eager PyTorch instead and the tally says so: then the
code was generated at full size and its counters are real, and its numerics were not checked.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from graft.errors import GraftError
from graft.lab import fakegpu, interpret
from graft.lab.aten import OnCpu
from graft.lab.devices import H200, Device

DEFAULT_BUDGET_S = 10.0
# A graph over this many bytes of inputs is not even tried: its kernels take minutes, and trying
# means a copy of the inputs first.
MAX_INPUT_BYTES = 256 * 2**20


@dataclass
class Tally:
    """Calls of compiled graphs: `interpreted` by kernels, `code_only` by eager PyTorch instead."""

    interpreted: int = 0
    code_only: int = 0

    def reset(self) -> None:
        self.interpreted = self.code_only = 0


@dataclass(frozen=True)
class Settings:
    """How calls are run: each kernel's configuration by number, and what a call may take."""

    configuration: int = 0
    budget_s: float = DEFAULT_BUDGET_S
    over_budget: str = "raise"


tally = Tally()
_settings = Settings()
_last_launches: list[interpret.Launch] = []


def last_launches() -> list[interpret.Launch]:
    """The kernels that the latest interpreted call ran."""
    return list(_last_launches)


def configuration(index: int) -> contextlib.AbstractContextManager[None]:
    """Calls inside use each kernel's configuration number `index`, or its last."""
    return _with_settings(replace(_settings, configuration=index))


def budget(seconds: float, over: str) -> contextlib.AbstractContextManager[None]:
    """Calls inside may take `seconds`; `over` is "raise" or "eager"."""
    return _with_settings(replace(_settings, budget_s=seconds, over_budget=over))


@contextlib.contextmanager
def _with_settings(settings: Settings) -> Iterator[None]:
    global _settings
    before, _settings = _settings, settings
    try:
        yield
    finally:
        _settings = before


def install(
    device: Device = H200, budget_s: float = DEFAULT_BUDGET_S, over_budget: str = "raise"
) -> None:
    """Do all that this module says, for the life of the process.

    `budget_s` bounds a call's estimated time; `over_budget` is "raise" or "eager". Raises
    GraftError as `fakegpu.install` and `interpret.require` do.
    """
    global _settings
    if over_budget not in ("raise", "eager"):
        raise GraftError(f"over_budget is {over_budget!r}; expected 'raise' or 'eager'")
    _settings = Settings(0, budget_s, over_budget)
    interpret.require()
    fakegpu.install(device)
    interpret.install()
    _keep_seeds_on_cpu()
    _compile_on(torch.device("cuda", 0))
    _make_tensors_on_cpu()


# --- compiling -----------------------------------------------------------------------------------


def _compile_on(device: torch.device) -> None:
    import torch._functorch.aot_autograd as aot_autograd
    import torch._inductor.compile_fx as compile_fx

    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False
    torch._inductor.config.compile_threads = 1

    process_inputs = aot_autograd.process_inputs
    compile_graph = compile_fx._compile_fx_inner
    compile_captured = compile_fx.compile_fx

    @functools.wraps(process_inputs)
    def process_inputs_on_gpu(flat_args: Any, *args: Any, **kwargs: Any) -> Any:
        made = process_inputs(flat_args, *args, **kwargs)
        if isinstance(made, tuple):  # 2.15: the inputs, then what it says of them
            fakes, *said = made
            return ([_on(device, x) for x in fakes], *said)
        return [_on(device, x) for x in made]

    @functools.wraps(compile_captured)
    def compile_captured_on_gpu(model_: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model_, torch.fx.GraphModule):
            _name_device(model_, device)
        return compile_captured(model_, *args, **kwargs)

    @functools.wraps(compile_graph)
    def compile_graph_for_cpu(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        reference = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        compiled = compile_graph(gm, inputs, **kwargs)
        runner = getattr(compiled, "current_callable", None)
        if runner is None:  # a graph without a call: nothing was generated
            return _boxed(functools.partial(interpret.call, compiled))
        compiled.current_callable = _Runner(runner, reference)
        return compiled

    aot_autograd.process_inputs = process_inputs_on_gpu
    compile_fx.compile_fx = compile_captured_on_gpu
    compile_fx._compile_fx_inner = compile_graph_for_cpu


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(args: list[Any]) -> Any:
        return function(args)

    setattr(run, "_boxed_call", True)  # noqa: B010
    return run


def _on(device: torch.device, value: Any) -> Any:
    """A fake CPU tensor as one on `device`, on the same storage; anything else unchanged."""
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    mode = value.fake_mode
    with torch.no_grad(), in_kernel_invocation_manager(mode):
        meta = torch.ops.aten.alias.default(value)
    moved = FakeTensor(mode, meta, device)
    return moved.requires_grad_(value.requires_grad)


def _name_device(gm: torch.fx.GraphModule, device: torch.device) -> None:
    """Dynamo wrote the tensors' device, the CPU, into the graph's arguments: name the GPU."""

    def named(argument: Any) -> Any:
        return device if argument == torch.device("cpu") or argument == "cpu" else argument

    for module in gm.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            node.args = tree_map_only((torch.device, str), named, node.args)
            node.kwargs = tree_map_only((torch.device, str), named, node.kwargs)
        module.recompile()


@dataclass
class _Runner:
    """A compiled graph on CPU tensors: interpreted within the budget, else as the settings say."""

    compiled: Callable[[list[Any]], Any]
    reference: torch.fx.GraphModule

    def __call__(self, args: list[Any]) -> Any:
        try:
            outputs = self.interpret(args)
            tally.interpreted += 1
        except interpret.OverBudget:
            if _settings.over_budget == "raise":
                raise
            outputs = _eagerly(self.reference, args)
            tally.code_only += 1
        args.clear()
        return outputs

    def interpret(self, args: list[Any]) -> Any:
        """Raises OverBudget, with the inputs as they were."""
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        size = sum(x.nbytes for x in tensors)
        if size > MAX_INPUT_BYTES:
            raise interpret.OverBudget(
                f"{size >> 20} MiB of inputs; the interpreter tries {MAX_INPUT_BYTES >> 20} MiB"
            )
        # The wrapper may have written to its inputs before a later kernel is refused.
        before = [(x, x.clone()) for x in tensors]
        with interpret.executing(_settings.configuration, _settings.budget_s) as execution:
            try:
                outputs = interpret.call(self.compiled, args)
            except interpret.OverBudget:
                for tensor, saved in before:
                    tensor.copy_(saved)
                raise
        _last_launches[:] = execution.launches
        return outputs


def _eagerly(graph: torch.fx.GraphModule, args: Sequence[Any]) -> Any:
    """What the graph that Inductor was given computes, by eager PyTorch on the CPU."""
    with OnCpu():
        return torch.fx.Interpreter(graph).run(*args)


# --- making tensors ------------------------------------------------------------------------------

_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full"),
    *("full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like"),
    *("randint", "randint_like", "randn", "randn_like", "randperm", "scalar_tensor", "tensor"),
    *("tril_indices", "triu_indices", "zeros", "zeros_like"),
)
_METHODS = (
    "to",
    "new_empty",
    "new_empty_strided",
    "new_full",
    "new_ones",
    "new_tensor",
    "new_zeros",
)


def _cpu_for(value: Any) -> Any:
    """The CPU in the place of the described GPU, unless fake tensors are being made."""
    if isinstance(value, torch.device):
        named = value.type == "cuda"
    else:
        named = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    if named and (torch.compiler.is_dynamo_compiling() or not _tracing()):
        return torch.device("cpu")
    return value


def _tracing() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


def _redirected(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for(kwargs["device"])
        return function(*args, **kwargs)

    return make


def _redirected_to(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for(kwargs["device"])
        return function(self, *[_cpu_for(x) for x in args], **kwargs)

    return to


def _make_tensors_on_cpu() -> None:
    # Dynamo finds torch's functions by identity: it must have seen the real ones.
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    for name in _METHODS:
        setattr(torch.Tensor, name, _redirected_to(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(torch.device("cpu"))
    torch.nn.Module.to = _redirected_to(torch.nn.Module.to)
    torch.nn.Module.cuda = lambda self, device=None: self.to(torch.device("cpu"))
    torch.Generator = _GeneratorOnCpu


class _GeneratorOnCpu(torch._C.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return torch._C.Generator(_cpu_for(device))


def _keep_seeds_on_cpu() -> None:
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        setattr(torch.cuda, name, lambda *args: None)
