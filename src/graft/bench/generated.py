"""The kernels that Inductor generates: what each must move, and what it writes.

A step's kernels are told apart by name, so that the profiler's times can be laid beside them. While
they are collected, a name ends in a hash of the kernel's source, not in a number: what is the same
to the letter has one name, in every graph and on either side, and is compiled and tuned once where
caches are shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from graft.bench.step_profile import StepProfile

INDIRECT, MASKED = "indirect", "masked"
# Digits of the hash in a name.
_SUFFIX = 8


@dataclass
class Kernel:
    """A generated kernel.

    `bytes` are what one launch must move: each buffer that it reads, once, as far as its index
    reaches, and each that it writes. Where that is an upper bound, `bounds` says why: `indirect`
    (which elements, the data says: as many as are asked for count, or as there are, if these are
    fewer), `masked` (a part of the reads is masked). `writes` names the nodes of the FX graphs
    whose values it leaves in memory.
    """

    name: str
    source: str
    bytes: int
    bounds: tuple[str, ...]
    writes: tuple[str, ...]
    calls: int = 1

    def again(self, other: Kernel) -> None:
        """The same code, called for other nodes."""
        self.writes = tuple(dict.fromkeys((*self.writes, *other.writes)))
        self.bytes = (self.bytes * self.calls + other.bytes) // (self.calls + 1)
        self.calls += 1


@dataclass
class Generated:
    """The kernels of the graphs that were compiled while they were `collected`."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    tuners: dict[str, Any] = field(default_factory=dict)
    graphs: list[Any] = field(default_factory=list)

    def facts(self, profile: StepProfile) -> list[dict[str, Any]]:
        """Of each kernel that a step launches: name, launches, us a step, bytes a launch.

        With `bounds` and `writes` where there are any. What is slowest comes first.
        """
        out = []
        for name, (launches, us) in profile.kernels().items():
            if name not in self.kernels:
                continue
            kernel = self.kernels[name]
            entry: dict[str, Any] = {
                "name": name,
                "launches": launches,
                "us": us,
                "bytes": kernel.bytes,
            }
            if kernel.bounds:
                entry["bounds"] = list(kernel.bounds)
            entry["writes"] = list(kernel.writes)
            out.append(entry)
        return sorted(out, key=lambda entry: -entry["us"])

    def save(self, folder: Path, facts: Iterable[Mapping[str, Any]]) -> None:
        """Each kernel of `facts` as a file below `folder`: what is known of it, and its source."""
        folder.mkdir(parents=True, exist_ok=True)
        for entry in facts:
            kernel = self.kernels[entry["name"]]
            known = {**entry, **_tuned(self.tuners.get(kernel.name))}
            text = f"# {json.dumps(known)}\n{kernel.source}"
            (folder / f"{kernel.name}.py").write_text(text)


@contextlib.contextmanager
def collected() -> Iterator[Generated]:
    """What is generated within. A cached graph generates nothing: caches must be off."""
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.virtualized import V

    found = Generated()
    define, load = TritonScheduling.define_kernel, CachingAutotuner._make_launchers

    def defined(self: Any, src_code: str, node_schedule: Sequence[Any], kernel: Any) -> str:
        suffix = hashlib.sha256(src_code.encode()).hexdigest()[:_SUFFIX]
        with mock.patch.object(PythonWrapperCodegen, "next_kernel_suffix", return_value=suffix):
            name: str = define(self, src_code, node_schedule, kernel)
        if not any(graph is V.graph for graph in found.graphs):
            found.graphs.append(V.graph)
        made = _kernel(name, src_code, node_schedule, kernel, _graph_name(found.graphs, V.graph))
        if name in found.kernels:
            found.kernels[name].again(made)
        else:
            found.kernels[name] = made
        return name

    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.tuners[str(self.inductor_meta.get("kernel_name", ""))] = self
        return load(self, *args, **kwargs)

    with (
        mock.patch.object(TritonScheduling, "define_kernel", defined),
        mock.patch.object(CachingAutotuner, "_make_launchers", loaded),
    ):
        yield found
    found.graphs.clear()


def _graph_name(graphs: Sequence[Any], graph: Any) -> str:
    """`f0`, `b1`: forward or backward, and the how manieth graph it is."""
    place = next(i for i, each in enumerate(graphs) if each is graph)
    return f"{'b' if graph.is_backward else 'f'}{place}"


def _kernel(name: str, source: str, schedule: Sequence[Any], kernel: Any, graph: str) -> Kernel:
    from torch._inductor.dependencies import MemoryDep, WeakDep
    from torch._inductor.virtualized import V

    nodes = [node for node in schedule if hasattr(node, "read_writes")]
    gone = {
        *V.graph.removed_buffers,
        *V.graph.inplaced_to_remove,
        *kernel.removed_buffers,
        *kernel.inplaced_to_remove,
    }
    reads: dict[str, dict[Any, int]] = {}
    writes: dict[str, dict[Any, int]] = {}
    bounds: set[str] = set()
    own = {dep.name for node in nodes for dep in node.read_writes.writes}
    for node in nodes:
        for deps, into in ((node.read_writes.reads, reads), (node.read_writes.writes, writes)):
            for dep in deps:
                if dep.name in gone or isinstance(dep, WeakDep):
                    continue
                if into is reads and dep.name in own:
                    continue
                size = dep.numbytes_hint()
                if not size:
                    continue
                exact = isinstance(dep, MemoryDep)
                if exact and dep.is_indirect():
                    bounds.add(INDIRECT)
                    size = min(size, _bytes_of_range(dep))
                into.setdefault(dep.name, {})[dep.index if exact else None] = size
        body = getattr(node, "_body", None)
        if any(
            str(block).startswith("masked_subblock") for block in getattr(body, "subblocks", ())
        ):
            bounds.add(MASKED)
    moved = sum(
        min(_buffer_bytes(buffer), sum(sizes.values()))
        for accesses in (reads, writes)
        for buffer, sizes in accesses.items()
    )
    values = (_value(node) for node in nodes if any(w in writes for w in node.get_buffer_names()))
    named = dict.fromkeys(f"{graph}:{value}" for value in values if value)
    return Kernel(name, source, moved, tuple(sorted(bounds)), tuple(named))


def _buffer_bytes(name: str) -> int:
    """Of the buffer that there is under `name`: what is mutated has names of its own."""
    from torch._inductor.dependencies import StarDep
    from torch._inductor.virtualized import V

    real = V.graph.scheduler.mutation_real_name.get(name, name)
    return int(StarDep(real).numbytes_hint())


def _bytes_of_range(dep: Any) -> int:
    """One element for each of the range that an indirect access is made over."""
    from torch._inductor.utils import get_dtype_size
    from torch._inductor.virtualized import V

    numel = V.graph.sizevars.optimization_hint(math.prod(dep.size), fallback=0)
    return int(numel) * int(get_dtype_size(V.graph.get_dtype(dep.name)))


def _value(node: Any) -> str | None:
    """The FX node whose value a scheduler's node computes."""
    made = getattr(node, "node", None)
    if made is None:
        return None
    origin = made.get_origin_node()
    if origin is None:
        origins = list(getattr(made, "origins", ()))
        origin = max(origins, key=lambda each: each.name, default=None) if origins else None
    return None if origin is None else str(origin.name)


def _tuned(tuner: Any) -> dict[str, Any]:
    """The configuration that was chosen, and what of registers it takes."""
    launchers = getattr(tuner, "launchers", None)
    if not launchers:
        return {}
    launcher = launchers[0]
    config = launcher.config
    return {
        "config": {
            **config.kwargs,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        },
        "registers": getattr(launcher, "n_regs", None),
        "spills": getattr(launcher, "n_spills", None),
    }
