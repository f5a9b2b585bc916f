"""A graph -> the wrapper and kernels that Inductor generates for it, and what it did not fuse."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._guards import TracingContext, detect_fake_mode, tracing

from graft.lab import capture, fakegpu

METRICS = (
    "generated_kernel_count",
    "codegen_mix_order_reduction",
    "rejected_mix_order_reduction_fusion",
    "ir_nodes_pre_fusion",
)
MIX_ORDER = "mix-order"
_POINTER = re.compile(r"tl\.(load|store|atomic_add)\((\w+)")
_EXTERN = re.compile(r"^\s+(?:\w+ = )?(?:extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.MULTILINE)


@dataclass(frozen=True)
class Access:
    """What a kernel does through one of its pointers.

    `count` is how often the source loads or stores it; `bytes` is what moves if each element moves
    once.
    """

    pointer: str
    dtype: str
    numel: int
    bytes: int
    count: int


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel that Inductor generated.

    `kind` is "mix-order", "persistent", "looped", "pointwise" or "other"; `partial_sums` the number
    of partial accumulators that a mix-order kernel leaves in its workspace, each for one more
    reduction: in the wrapper, or in a kernel; `launches` the calls in the wrapper.
    """

    name: str
    kind: str
    source: str
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    xnumel: int
    rnumel: int
    partial_sums: int
    workspace_bytes: int
    launches: int

    @property
    def load_count(self) -> int:
        """`tl.load`s in the source."""
        return sum(access.count for access in self.loads)

    @property
    def load_bytes(self) -> int:
        return sum(access.bytes for access in self.loads)

    @property
    def store_bytes(self) -> int:
        return sum(access.bytes for access in self.stores)

    @property
    def bytes(self) -> int:
        """Bytes of one launch; the workspace is written here and read to finish what it holds."""
        return self.load_bytes + self.store_bytes + 2 * self.workspace_bytes

    @property
    def code(self) -> str:
        """The source without what differs between identical kernels: the name and comments."""
        return anonymous(self.source, self.name)


def anonymous(source: str, name: str) -> str:
    """`source` with the kernel's own name replaced and whole-line comments left out."""
    lines = source.replace(name, "triton_").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


@dataclass(frozen=True)
class Refusal:
    """Fusions into or of mix-order reductions that were considered and refused, for one reason."""

    reason: str
    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Compiled:
    """What Inductor made of one graph.

    `extern_calls` counts calls in the wrapper to what Inductor does not generate (matrix products,
    attention). `seconds` is Inductor's own time, Triton's not included.
    """

    name: str
    wrapper: str
    kernels: tuple[Kernel, ...]
    metrics: dict[str, int]
    refusals: tuple[Refusal, ...]
    extern_calls: int
    seconds: float


@dataclass
class _Record:
    wrapper: str = ""
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    refused: dict[str, dict[tuple[str, str], None]] = field(default_factory=dict)


def into(results: list[Compiled], *, refusals: bool = True) -> capture.Compiler:
    """An `inner_compile` that compiles each graph with Inductor and appends what came of it.

    Without `refusals`, what was not fused is not looked at, nor the scheduler's own classes.
    On a described GPU the kernels are generated and not compiled; the callable that it returns
    cannot be called. On a real one it is Inductor's own.
    """

    def inner(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx_inner

        name = capture.graph(module, inputs, options).name
        before = _metrics()
        with _recording(refusals) as record:
            start = time.perf_counter()
            compiled = compile_fx_inner(module, inputs, **options)
            seconds = time.perf_counter() - start
        after = _metrics()
        launches = Counter(re.findall(r"(\w+)\.run\(", record.wrapper))
        results.append(
            Compiled(
                name=name,
                wrapper=record.wrapper,
                kernels=tuple(
                    Kernel(name=kernel, launches=launches[kernel], **facts)
                    for kernel, facts in record.kernels.items()
                ),
                metrics={key: after[key] - before[key] for key in after},
                refusals=tuple(
                    Refusal(reason, tuple(pairs)) for reason, pairs in record.refused.items()
                ),
                extern_calls=len(_EXTERN.findall(record.wrapper)),
                seconds=seconds,
            )
        )
        return compiled

    return inner


def graphs(saved: Sequence[capture.Graph]) -> list[Compiled]:
    """Compile graphs that were captured before, in order. Each graph is used up."""
    results: list[Compiled] = []
    compiler = into(results)
    for graph in saved:
        # Where AOTAutograd leaves what the backward's compiler may reuse.
        context = TracingContext(detect_fake_mode(graph.inputs))
        context.fw_metadata = SimpleNamespace(bw_donated_idxs=list(graph.donated))
        with capture.tracing(), tracing(context):
            compiler(graph.module, graph.inputs, **graph.options)
    return results


def _metrics() -> dict[str, int]:
    from torch._inductor import metrics

    return {name: getattr(metrics, name) for name in METRICS if hasattr(metrics, name)}


@contextlib.contextmanager
def _recording(refusals: bool) -> Iterator[_Record]:
    """Record wrapper, kernels and, where asked for, refusals of graphs compiled inside."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.graph import GraphLowering

    record = _Record()
    define = TritonScheduling.define_kernel

    def define_kernel(self: Any, src_code: str, node_schedule: Any, kernel: Any) -> str:
        name: str = define(self, src_code, node_schedule, kernel)
        record.kernels.setdefault(name, _facts(kernel))
        return name

    build = AsyncCompile.triton

    def triton(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Any:
        record.kernels.setdefault(kernel_name, _no_facts())["source"] = source_code
        _add_accesses(record.kernels[kernel_name], source_code)
        if fakegpu.installed() is not None:
            return None
        return build(self, kernel_name, source_code, device_str)

    def save_output_code(code: str) -> None:
        record.wrapper = code

    with (
        mock.patch.object(TritonScheduling, "define_kernel", define_kernel),
        mock.patch.object(AsyncCompile, "triton", triton),
        mock.patch.object(GraphLowering, "save_output_code", save_output_code),
        _watching_refusals(record) if refusals else contextlib.nullcontext(),
    ):
        yield record


# --- kernels -------------------------------------------------------------------------------------


def _no_facts() -> dict[str, Any]:
    return {
        "kind": "other",
        "source": "",
        "loads": (),
        "stores": (),
        "xnumel": 0,
        "rnumel": 0,
        "partial_sums": 0,
        "workspace_bytes": 0,
    }


def _facts(kernel: Any) -> dict[str, Any]:
    """What Inductor knows of a kernel while it generates it; sizes are hints where symbolic."""
    from torch._inductor.codegen.simd import SIMDKernel

    facts = _no_facts()
    if not isinstance(kernel, SIMDKernel):
        return facts
    if kernel.mix_order_reduction:
        facts["kind"] = MIX_ORDER
    elif not kernel.inside_reduction:
        facts["kind"] = "pointwise"
    else:
        facts["kind"] = "persistent" if kernel.persistent_reduction else "looped"
    sizes = {prefix: _hint(size) for prefix, size in kernel.numels.items()}
    facts["rnumel"] = _product(size for prefix, size in sizes.items() if prefix.startswith("r"))
    facts["xnumel"] = _product(size for prefix, size in sizes.items() if not prefix.startswith("r"))
    facts["partial_sums"] = len(getattr(kernel, "saved_partial_accumulate", ()))
    facts["workspace_bytes"] = sum(
        _hint(argument.count) * argument.dtype.itemsize
        for argument in kernel.args.workspace_args
        if argument.inner_name.startswith("ws")
    )
    facts["_buffers"] = _buffers(kernel)
    return facts


def _buffers(kernel: Any) -> dict[str, tuple[str, int, int]]:
    """For each pointer: dtype, elements that a launch touches, and their bytes."""
    from torch._inductor.codegen.common import RemovedArg
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V

    pointers: dict[str, str] = {}
    for buffers in (kernel.args.input_buffers, kernel.args.output_buffers):
        for outer, inner in buffers.items():
            if not isinstance(inner, RemovedArg):
                pointers[inner] = outer
    for inplaced in kernel.args.inplace_buffers.values():
        if not isinstance(inplaced, RemovedArg):
            pointers[inplaced.inner_name] = inplaced.other_names[-1]
    accesses = kernel.features.buf_accesses()
    launch_numel = _product(_hint(size) for size in kernel.numels.values())
    found = {}
    for inner, outer in pointers.items():
        dtype = V.graph.get_dtype(outer)
        numel = _hint(V.graph.get_numel(outer))
        if numel > launch_numel:
            # A slice of a larger buffer: each distinct index touches at most a launch's elements.
            deps = accesses.get(outer, ())
            indices = {dep.index if isinstance(dep, MemoryDep) else None for dep in deps}
            numel = min(numel, max(len(indices), 1) * launch_numel)
        found[inner] = (str(dtype).removeprefix("torch."), numel, numel * dtype.itemsize)
    return found


def _add_accesses(facts: dict[str, Any], source: str) -> None:
    """Count the loads and stores in the source, by pointer."""
    buffers = facts.pop("_buffers", {})
    counts = Counter(_POINTER.findall(source))

    def accesses(*kinds: str) -> tuple[Access, ...]:
        found = []
        for (kind, pointer), count in counts.items():
            if kind in kinds and not pointer.startswith("ws_ptr"):
                dtype, numel, nbytes = buffers.get(pointer, ("", 0, 0))
                found.append(Access(pointer, dtype, numel, nbytes, count))
        return tuple(found)

    facts["loads"], facts["stores"] = accesses("load"), accesses("store", "atomic_add")


def _product(sizes: Any) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _hint(size: Any) -> int:
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size, fallback=0))


# --- refusals ------------------------------------------------------------------------------------


class _Reasons(logging.Handler):
    """Keeps the last reason that the scheduler logged for a pair that it does not fuse."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.latest: Any = None

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record.msg, "reason"):  # a scheduler.WhyNoFuse
            self.latest = record.msg


@contextlib.contextmanager
def _watching_refusals(record: _Record) -> Iterator[None]:
    """Record each pair that a mix-order fusion was refused for, and why.

    The reason is the one in the `fusion` log; where nothing was logged, the release's gate that the
    pair's shape fails.
    """
    from torch._inductor import scheduler

    reasons = _Reasons()
    log: logging.Logger = scheduler.fusion_log
    level, propagate = log.level, log.propagate
    pairwise = scheduler.MixOrderReduction.can_fuse.__func__  # type: ignore[attr-defined]
    joining = scheduler.FusedMixOrderReductions.can_fuse_with

    def note(first: Any, second: Any, reason: str) -> None:
        pair = (first.get_name(), second.get_name())
        record.refused.setdefault(reason, {})[pair] = None

    def asked(ask: Callable[[], Any], first: Any, second: Any, otherwise: Any) -> Any:
        reasons.latest = None
        answer = ask()
        if not answer:
            said = reasons.latest
            reason = said.reason % said.args if said is not None else otherwise(first, second)
            if reason:
                note(first, second, reason)
        return answer

    def can_fuse(cls: Any, node1: Any, node2: Any, /, **how: Any) -> Any:
        return asked(lambda: pairwise(cls, node1, node2, **how), node1, node2, _gate)

    def can_fuse_with(self: Any, other: Any, *how: Any) -> Any:
        return asked(lambda: joining(self, other, *how), self, other, lambda first, second: None)

    log.setLevel(logging.DEBUG)
    log.propagate = False
    log.addHandler(reasons)
    try:
        with (
            mock.patch.object(scheduler.MixOrderReduction, "can_fuse", classmethod(can_fuse)),
            mock.patch.object(scheduler.FusedMixOrderReductions, "can_fuse_with", can_fuse_with),
        ):
            yield
    finally:
        log.removeHandler(reasons)
        log.setLevel(level)
        log.propagate = propagate


def _gate(node1: Any, node2: Any) -> str | None:
    """Which size gate of the release a pair of mixed reduction orders fails; None if it is no such
    pair.

    Upstream's `MixOrderReduction.can_fuse` says only no.
    """
    from torch._inductor.scheduler import MixOrderReduction as Mix
    from torch._inductor.virtualized import V

    if not torch._inductor.config.triton.mix_order_reduction:
        return None
    if not all(node.is_gpu() and node.is_reduction() for node in (node1, node2)):
        return None
    try:
        if not Mix.has_mix_reduction_orders(node1, node2):
            return None
    except AssertionError:  # a part of a tensor beside all of it: asked of equal sizes alone
        return None
    if not Mix.get_common_read(node1, node2):
        return None
    if (node1.ancestors & node2.get_operation_names()) or (
        node2.ancestors & node1.get_operation_names()
    ):
        return "one reduction needs the other"
    contiguous = next((n for n in (node1, node2) if Mix.is_contiguous_node(n)), None)
    if contiguous is None:
        return "neither side reads along its reduction"
    numels = Mix.get_numel_rnumel(contiguous)
    rows, columns = (V.graph.sizevars.optimization_hint(numel, fallback=0) for numel in numels)
    strict = not torch._inductor.config.triton.mix_order_reduction_non_strict_mode
    sizes = f"xnumel {rows}, rnumel {columns}"
    if strict and rows * columns < 5 * 2**20:
        return f"fewer than 5 Mi elements ({sizes})"
    if strict and rows < 2 * columns and torch.__version__.startswith("2.11."):
        return f"xnumel is under twice rnumel ({sizes})"
    if strict and rows < 4096:
        return f"xnumel is under 4096 ({sizes})"
    if columns > 16384:
        return f"rnumel is over 16384 ({sizes})"
    return f"neither a sum nor a product, or not a persistent reduction ({sizes})"
