"""One request, one process: `python -m graft.lab.worker REQUEST.json RESPONSE.json`.

Run by the stock Python or the patched one; what it compiles is what that Python's torch generates.
Progress goes to standard output, a JSON object a line: {"done": 3, "of": 40, "what": "..."}.

Before it assembles, a worker says which kernels it has, {"kernels": [...], "heuristics": "..."},
and reads a line from standard input: the keys of those that it shall assemble, so that two workers
need not both assemble what both have. The end of the input means all.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from graft.errors import GraftError

_PROFILED_STEPS = 3


@dataclass(frozen=True)
class Request:
    """What to compile and what to find out.

    `gpu` is a described GPU's key, or None for the real one. `assemble` asks for registers and
    occupancy, `time` for each kernel's time (real GPU only). `knobs` are Inductor's options.
    `graphs` is a file of saved graphs to compile in the place of a case; `save` a file to save the
    graphs that a described GPU is given.
    """

    case: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str = "bf16"
    gpu: str | None = None
    dynamic: bool = False
    assemble: bool = False
    time: bool = False
    knobs: Mapping[str, Any] = field(default_factory=dict)
    graphs: str | None = None
    save: str | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        """Raises GraftError for a key that a request does not have."""
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise GraftError(f"a request has no {', '.join(unknown)}; it has {sorted(known)}")
        shape = data.get("shape")
        return cls(**{**data, "shape": None if shape is None else tuple(shape)})


def code_key(code: str) -> str:
    """Names a kernel by its code, whatever Inductor called it."""
    return hashlib.sha256(code.encode()).hexdigest()[:16]


Progress = Callable[[int, int, str], None]
# Of the keys of all kernels, those that this process assembles.
Choose = Callable[[Sequence[str]], Sequence[str]]


def serve(request: Request, progress: Progress, choose: Choose = list) -> dict[str, Any]:
    """Do what `request` says. Raises GraftError for what it names wrongly."""
    import torch

    from graft import cases
    from graft.lab import capture, compile, devices, fakegpu, saved

    started = time.perf_counter()
    if request.gpu is None:
        device = devices.present()
    else:
        device = devices.find(request.gpu)
        fakegpu.install(device)
    progress(0, 1, "importing")
    compiled: list[compile.Compiled] = []
    step = None
    with torch._inductor.config.patch(dict(request.knobs)):
        if request.graphs is not None:
            compiled += compile.graphs(saved.load(Path(request.graphs)))
        else:
            if request.case is None:
                raise GraftError("a request names a case or a file of graphs")
            case = cases.find(request.case)
            shape = request.shape or case.default_shape
            counted = _counting(compile.into(compiled), progress)
            if request.gpu is None:
                step = capture.prepare(case, shape, request.dtype, counted, dynamic=request.dynamic)
                step()
            else:
                graphs = capture.trace(case, shape, request.dtype, counted, dynamic=request.dynamic)
                if request.save is not None:
                    saved.save(graphs, Path(request.save))
        compile_seconds = time.perf_counter() - started
        assemblies = _assemble(compiled, device, choose, progress) if request.assemble else {}
        times_us: dict[str, float] = {}
        if request.time and step is not None:
            progress(0, 1, "timing")
            times_us = _profile(step)
    return {
        "torch": torch.__version__,
        "torch_file": torch.__file__,
        "gpu": device.name,
        "gpu_key": device.key,
        "described": request.gpu is not None,
        "compiled": [_graph_json(each) for each in compiled],
        "assemblies": {key: [asdict(each) for each in found] for key, found in assemblies.items()},
        "times_us": times_us,
        "seconds": compile_seconds,
    }


def _counting(compiler: Any, progress: Progress) -> Any:
    count = 0

    def inner(module: Any, inputs: Sequence[Any], **options: Any) -> Any:
        nonlocal count
        count += 1
        progress(count, count + 1, "compiling")
        return compiler(module, inputs, **options)

    return inner


def _assemble(
    compiled: Sequence[Any], device: Any, choose: Choose, progress: Progress
) -> dict[str, Any]:
    """Identical kernels, of identical blocks, are assembled once."""
    from graft.lab import assemble

    unique = {code_key(kernel.code): kernel for graph in compiled for kernel in graph.kernels}
    found = {}
    chosen = choose(list(unique))
    for index, key in enumerate(chosen):
        progress(index, len(chosen), "assembling")
        found[key] = assemble.assemble(unique[key], device)
    return found


def heuristics_key() -> str:
    """Names what decides, beside a kernel's source, how it is assembled: Inductor's runtime."""
    from torch._inductor import runtime

    digest = hashlib.sha256()
    for folder in runtime.__path__:
        for path in sorted(Path(folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _graph_json(graph: Any) -> dict[str, Any]:
    data = asdict(graph)
    for kernel, kept in zip(data["kernels"], graph.kernels, strict=True):
        kernel.update(
            key=code_key(kept.code),
            load_count=kept.load_count,
            load_bytes=kept.load_bytes,
            store_bytes=kept.store_bytes,
            bytes=kept.bytes,
        )
    return data


def _profile(step: Callable[[], Any]) -> dict[str, float]:
    """Microseconds that each GPU kernel takes in one step, all its launches together."""
    import torch
    from torch.autograd import DeviceType

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(_PROFILED_STEPS):
            step()
        torch.cuda.synchronize()
    return {
        event.key: event.self_device_time_total / _PROFILED_STEPS
        for event in profile.key_averages()
        if event.device_type == DeviceType.CUDA and event.self_device_time_total > 0
    }


def main(argv: Sequence[str]) -> int:
    """Returns 0 with the answer in RESPONSE.json, 1 with {"error": ..., "next": ...} in it."""
    request_file, response_file = map(Path, argv)

    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    def progress(done: int, of: int, what: str) -> None:
        say(done=done, of=of, what=what)

    def choose(keys: Sequence[str]) -> Sequence[str]:
        say(kernels=list(keys), heuristics=heuristics_key())
        line = sys.stdin.readline()
        return json.loads(line) if line.strip() else keys

    with tempfile.TemporaryDirectory(prefix="graft-lab-") as caches:
        # A request sees nothing that an earlier one left.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
        os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
        try:
            request = Request.from_json(json.loads(request_file.read_text()))
            answer = serve(request, progress, choose)
            # Kernels name the file that they were cached in; those files are gone in a moment.
            text = json.dumps(answer).replace(caches, "")
        except GraftError as wrong:
            text = json.dumps({"error": wrong.message, "next": wrong.next})
    response_file.write_text(text)
    return 1 if text.startswith('{"error"') else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
