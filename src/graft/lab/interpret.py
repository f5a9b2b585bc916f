"""Run what Inductor generated for a GPU on CPU tensors, each kernel under Triton's interpreter.

The wrapper is the generated one, to the letter; so are the kernels' sources, their grids, and the
configurations that their heuristics propose. Only these differ from a launch on the GPU:

- memory that the wrapper allocates is poisoned (`builder.poison_value`), so that an element which
  nothing wrote shows in the result;
- of several configurations, which a GPU would time against each other, the one asked for runs: the
  first unless told otherwise;
- operators that Inductor leaves to ATen run on the CPU.

`TRITON_INTERPRET=1` must be in the environment before Triton is imported: `require()` says so.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from graft.errors import GraftError
from graft.lab.aten import OnCpu

# Measured on one core of a server CPU: an operation on a block of one element, and what an
# element more adds to it. The estimate only has to tell seconds from minutes.
OVERHEAD_S_PER_LINE = 12e-6
ELEMENT_S_PER_LINE = 4e-9


class OverBudget(GraftError):
    """The kernels of a call would take longer under the interpreter than the call may."""


@dataclass(frozen=True)
class Launch:
    """One kernel that ran: its grid in programs, its configuration, and how long it took."""

    kernel: str
    grid: tuple[int, int, int]
    configuration: dict[str, int]
    time_s: float
    reads_out_of_bounds: int


@dataclass
class Execution:
    """How calls are run, and what ran.

    `configuration` is the index in each kernel's own list; a kernel with fewer takes its last.
    `budget_s` bounds the estimated time of a call; None does not.
    """

    configuration: int = 0
    budget_s: float | None = None
    launches: list[Launch] = field(default_factory=list)
    estimated_s: float = 0.0

    @property
    def reads_out_of_bounds(self) -> int:
        return sum(launch.reads_out_of_bounds for launch in self.launches)


_executions: list[Execution] = [Execution()]


@contextlib.contextmanager
def executing(configuration: int = 0, budget_s: float | None = None) -> Iterator[Execution]:
    """Calls of compiled functions inside run as the arguments say; yields the record of them."""
    execution = Execution(configuration, budget_s)
    _executions.append(execution)
    try:
        yield execution
    finally:
        _executions.pop()


def require() -> None:
    """Raises GraftError unless this process can interpret kernels."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise GraftError(
            "kernels are interpreted only with TRITON_INTERPRET=1 set before Triton is imported",
            next="TRITON_INTERPRET=1 python …",
        )
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        raise GraftError(
            f"Triton's interpreter needs numpy < 2.4, this is {np.__version__}",
            next="pip install 'numpy<2.4'",
        )


@functools.cache
def install() -> None:
    """Make this process interpret every kernel that Inductor loads; for the life of the process."""
    require()
    from torch._inductor.runtime import triton_heuristics

    from graft.lab import builder

    builder.install()
    triton_heuristics.CachingAutotuner.run = _run
    guards = torch._C._dynamo.guards
    guards._empty_strided_cuda = empty_poisoned


def empty_poisoned(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What the wrapper's `empty_strided_cuda` returns: a CPU tensor whose every byte is poison."""
    from graft.lab.builder import poison_value

    tensor = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
    flat = torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())
    if dtype.is_floating_point and dtype.itemsize == 1:
        # NaN in every 8-bit float type; e8m0, which has no sign, has it elsewhere
        flat.view(torch.uint8).fill_(0xFF if dtype == torch.float8_e8m0fnu else 0x7F)
    else:
        flat.fill_(poison_value(dtype))
    return tensor


@functools.lru_cache(maxsize=4096)
def _body_lines(source: str) -> int:
    """How many operations one pass over the kernel's body is, about."""
    body = source[source.rfind("\ndef ") :]
    return sum(1 for line in body.splitlines() if " = " in line or "tl." in line)


def estimate_s(
    source: str, grid: Sequence[int], constants: dict[str, int], sizes: dict[str, Any]
) -> float:
    """How long the interpreter needs for a launch, in seconds; right within a factor of about 3.

    `constants` are the configuration's (XBLOCK, RSPLIT_SIZE, …), `sizes` the integer arguments
    (xnumel, r0_numel, …).
    """
    iterations = grid[0] * grid[1] * grid[2]
    elements = 1
    for name, value in constants.items():
        if re.fullmatch(r"[XYZ]BLOCK", name):
            elements *= value
    if "RSPLIT_SIZE" in constants:
        iterations *= -(-constants["RSPLIT_SIZE"] // constants["XBLOCK"])
    for name, numel in sizes.items():
        if not re.fullmatch(r"r\d_numel", name):
            continue
        block = constants.get(f"{name[:2].upper()}_BLOCK")
        if block is None:
            elements *= 1 << max(int(numel) - 1, 0).bit_length()
        else:
            elements *= block
            iterations *= -(-int(numel) // block)
    lines = _body_lines(source)
    return iterations * lines * (OVERHEAD_S_PER_LINE + elements * ELEMENT_S_PER_LINE)


def _run(self: Any, *args: Any, stream: Any = None, **kwargs: Any) -> None:
    """In the place of `CachingAutotuner.run`."""
    execution = _executions[-1]
    config = self.configs[min(execution.configuration, len(self.configs) - 1)]
    if self.inductor_meta.get("grid_type") == "CooperativeReductionGrid":
        raise GraftError(
            f"{self.fn.__name__} is a cooperative reduction: its programs wait for each other, "
            "and the interpreter runs them one after the other"
        )
    values, grid = self._interpret_args_grid(args, config)
    names = [name for name in self.fn.arg_names if name not in config.kwargs]
    arguments = dict(zip(names, values)) | kwargs
    signature = self.triton_meta["signature"]
    if execution.budget_s is not None:
        execution.estimated_s += estimate_s(
            self.fn.src if hasattr(self.fn, "src") else _source(self.fn.fn),
            grid,
            config.kwargs,
            {k: v for k, v in arguments.items() if isinstance(v, int)},
        )
        if execution.estimated_s > execution.budget_s:
            raise OverBudget(
                f"{self.fn.__name__} on a grid of {grid} brings this call to an estimated "
                f"{execution.estimated_s:.0f} s under the interpreter; "
                f"{execution.budget_s:g} s are allowed"
            )
    started = time.perf_counter()
    reads_out_of_bounds = launch(self.fn, arguments | config.kwargs, signature, grid)
    execution.launches.append(
        Launch(
            self.inductor_meta.get("kernel_name", self.fn.__name__),
            grid,
            dict(config.kwargs),
            time.perf_counter() - started,
            reads_out_of_bounds,
        )
    )


@functools.lru_cache(maxsize=4096)
def _source(function: Callable[..., Any]) -> str:
    import inspect

    return inspect.getsource(function)


def launch(
    kernel: Any, arguments: dict[str, Any], signature: dict[str, str], grid: Sequence[int]
) -> int:
    """Run an interpreted kernel over `grid`; returns how many elements it read out of bounds.

    `arguments` are CPU tensors, numbers and constants by name; `signature` gives their types as
    Triton writes them ("*fp32", "i64", "constexpr").
    """
    import triton.language as tl
    from triton.runtime import interpreter

    from graft.lab import builder

    machine = builder.install()
    function = kernel.rewrite()
    known = set(kernel.arg_names)
    values: dict[str, Any] = {}
    tensors: list[torch.Tensor] = []
    for name, value in arguments.items():
        if name not in known:
            continue
        type_ = signature.get(name, "constexpr")
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            if value.dtype == torch.float8_e8m0fnu:  # to Triton, as to Inductor, its bits
                value = value.view(torch.uint8)
            value = interpreter._implicit_cvt(value)
        elif type_ == "i64":
            handle = interpreter.TensorHandle(np.array([value], np.int64), tl.int64)
            value = tl.tensor(handle, tl.int64)
        elif type_ != "constexpr":
            value = interpreter._implicit_cvt(value)
        values[name] = value
    machine.memory.hold(tensors)
    machine.set_grid_dim(*grid)
    with np.errstate(all="ignore"), torch.no_grad(), _without_modes():
        for x in range(grid[0]):
            for y in range(grid[1]):
                for z in range(grid[2]):
                    machine.set_grid_idx(x, y, z)
                    function(**values)
    return machine.memory.reads_out_of_bounds


def _without_modes() -> contextlib.AbstractContextManager[Any]:
    return torch.utils._python_dispatch._disable_current_modes()


def call(compiled: Callable[[list[Any]], Any], inputs: Sequence[Any]) -> Any:
    """Call a compiled graph (boxed, as Inductor's are) on CPU tensors; returns its outputs."""
    with OnCpu():
        return compiled(list(inputs))


def run(source: str, inputs: Sequence[Any]) -> Sequence[Any]:
    """Execute a wrapper that Inductor generated, given as text, on CPU tensors.

    Its kernels must be defined in it, as in what `run_and_get_code` and `output_code` show.
    """
    from torch._inductor.codecache import PyCodeCache

    install()
    return call(PyCodeCache.load(source).call, inputs)
