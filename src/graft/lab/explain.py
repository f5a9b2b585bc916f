"""What the stack changes in what Inductor generates: stock against patched, kernel by kernel."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.lab.generated_code import code_lines
from graft.places import ROOT
from graft.stack.trees import caches

DEFAULT_CASE = "scaled_residual"
DEFAULT_GPU = "H200"
# The cases whose code `--check` compares with a real GPU's.
SHIPPED = ("rms_norm_backward", "layer_norm_backward", "seed_model", "scaled_residual")
# What one worker needs for a model of a few hundred kernels, at its peak.
WORKER_MEMORY_BYTES = 3 * 2**30

SIDES = ("stock", "patched")

# Called with a side, how much of its work is done (0.0 to 1.0) and what it does now.
Progress = Callable[[str, float, str], None]


@dataclass(frozen=True)
class Side:
    """What one torch made of a case, as the worker answered."""

    answer: Mapping[str, Any]

    @cached_property
    def kernels(self) -> list[Kernel]:
        """Distinct kernels, in the order of their first appearance, with all their launches."""
        launches: Counter[str] = Counter()
        first: dict[str, tuple[str, Mapping[str, Any]]] = {}
        names: dict[str, set[str]] = {}
        for graph in self.answer["compiled"]:
            for kernel in graph["kernels"]:
                first.setdefault(kernel["key"], (graph["name"], kernel))
                launches[kernel["key"]] += kernel["launches"]
                names.setdefault(kernel["key"], set()).add(kernel["name"])
        times: Mapping[str, float] = self.answer["times_us"]
        return [
            Kernel(
                graph=graph,
                facts=facts,
                launches=launches[key],
                assemblies=tuple(self.answer["assemblies"].get(key, ())),
                time_us=sum(times.get(name, 0.0) for name in names[key]) if times else None,
            )
            for key, (graph, facts) in first.items()
        ]

    @property
    def uncompilable(self) -> list[Kernel]:
        """Kernels that compile at no configuration: Inductor raises where it comes to them."""
        return [kernel for kernel in self.kernels if kernel.compile_error]

    @property
    def mix_order(self) -> list[Kernel]:
        return [kernel for kernel in self.kernels if kernel.kind == "mix-order"]

    @property
    def refusals(self) -> Counter[str]:
        """Refused fusions with mix-order reductions, by reason; each pair once a graph."""
        found: Counter[str] = Counter()
        for graph in self.answer["compiled"]:
            for refusal in graph["refusals"]:
                found[refusal["reason"]] += len(refusal["pairs"])
        return found

    @property
    def compile_seconds(self) -> float:
        """Inductor's time over all graphs; Triton's compiles are not in it."""
        return float(sum(graph["seconds"] for graph in self.answer["compiled"]))

    @property
    def extern_calls(self) -> int:
        return sum(graph["extern_calls"] for graph in self.answer["compiled"])


@dataclass(frozen=True)
class Kernel:
    """A distinct kernel of a case; `launches` counts all calls of it and of identical ones."""

    graph: str
    facts: Mapping[str, Any]
    launches: int
    assemblies: tuple[Mapping[str, Any], ...]
    time_us: float | None

    @property
    def key(self) -> str:
        return str(self.facts["key"])

    @property
    def name(self) -> str:
        return str(self.facts["name"])

    @property
    def kind(self) -> str:
        return str(self.facts["kind"])

    @property
    def loads(self) -> int:
        return int(self.facts["load_count"])

    @property
    def partial_sums(self) -> int:
        return int(self.facts["partial_sums"])

    @property
    def bytes(self) -> int:
        """Bytes of all launches."""
        return int(self.facts["bytes"]) * self.launches

    def taken(self, what: str) -> list[Any]:
        """One property of the machine code at each configuration that compiles."""
        return [each[what] for each in self.assemblies if not each["error"]]

    @property
    def spill_bytes(self) -> int:
        return max(self.taken("spill_bytes"), default=0)

    @property
    def compile_error(self) -> str | None:
        """What Triton says of it, where it compiles at no configuration."""
        errors = [each["error"] for each in self.assemblies]
        return str(errors[0]) if errors and all(errors) else None


@dataclass(frozen=True)
class Report:
    """A case on a GPU, stock and patched."""

    case: str
    shape: tuple[int, ...]
    dtype: str
    gpu: str
    described: bool
    stock: Side
    patched: Side

    @property
    def gone(self) -> list[Kernel]:
        """Kernels that stock generates and the patched torch does not."""
        kept = {kernel.key for kernel in self.patched.kernels}
        return [kernel for kernel in self.stock.kernels if kernel.key not in kept]

    @property
    def new(self) -> list[Kernel]:
        """Kernels that the patched torch generates and stock does not."""
        kept = {kernel.key for kernel in self.stock.kernels}
        return [kernel for kernel in self.patched.kernels if kernel.key not in kept]

    @property
    def same(self) -> list[Kernel]:
        kept = {kernel.key for kernel in self.stock.kernels}
        return [kernel for kernel in self.patched.kernels if kernel.key in kept]

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "gpu": self.gpu,
            "described": self.described,
            "gone": [kernel.key for kernel in self.gone],
            "new": [kernel.key for kernel in self.new],
            "stock": dict(self.stock.answer),
            "patched": dict(self.patched.answer),
        }


# --- asking --------------------------------------------------------------------------------------


def real_gpu() -> str | None:
    """The name of a GPU that torch can use here, or None (also for a CUDA build with no driver)."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def explain(
    pythons: Mapping[str, Sequence[str]],
    case: str,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: str = "bf16",
    gpu: str | None = None,
    dynamic: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compile `case` with both Pythons (`tree.pythons`), each in its own process.

    `gpu` is a described GPU, or None for the real one, where kernels are timed too. Raises
    GraftError for what a worker could not do.
    """
    from graft import cases

    found = cases.find(case)
    shape = shape or found.default_shape
    found.check_shape(shape)
    found.check_dtype(dtype)
    request = {
        "case": case,
        "shape": list(shape),
        "dtype": dtype,
        "gpu": gpu,
        "dynamic": dynamic,
        "assemble": True,
        "time": gpu is None,
    }
    # Side by side on one GPU, each would slow the other's kernels.
    together = gpu is not None and _memory_bytes() > 2 * WORKER_MEMORY_BYTES
    answers = ask(
        {side: (pythons[side], request) for side in SIDES}, together=together, progress=progress
    )
    stock, patched = (Side(answers[side]) for side in SIDES)
    return Report(
        case=case,
        shape=shape,
        dtype=dtype,
        gpu=str(stock.answer["gpu"]),
        described=gpu is not None,
        stock=stock,
        patched=patched,
    )


def ask(
    requests: Mapping[str, tuple[Sequence[str], Mapping[str, Any]]],
    *,
    together: bool,
    progress: Progress | None = None,
) -> dict[str, dict[str, Any]]:
    """Answers of one worker a request, `{label: (python, request)}`; all at once if `together`."""
    if not together:
        answers: dict[str, dict[str, Any]] = {}
        for label, each in requests.items():
            answers |= ask({label: each}, together=True, progress=progress)
        return answers
    workers: dict[str, _Worker] = {}
    try:
        for label, (python, request) in requests.items():
            workers[label] = _Worker(label, python, request, progress)
        share_out(list(workers.values()))
        answers = {label: worker.answer() for label, worker in workers.items()}
    finally:
        for worker in workers.values():
            worker.stop()
    if shared(workers.values()):
        assembled = {k: v for answer in answers.values() for k, v in answer["assemblies"].items()}
        for label, worker in workers.items():
            answers[label]["assemblies"] = {k: assembled[k] for k in worker.kernels}
    return answers


def shared(workers: Iterable[_Worker]) -> bool:
    """Whether equal kernels are assembled equally: the workers' heuristics are the same files."""
    return len({worker.heuristics for worker in workers} - {None}) == 1


def share_out(workers: Sequence[_Worker]) -> None:
    """Have each kernel assembled by one of the workers that have it, once all have compiled."""
    for worker in workers:
        worker.compiled.wait()
    chosen: dict[str, _Worker] = {}
    counts: Counter[str] = Counter()
    if shared(workers):
        for worker in workers:
            for key in worker.kernels:
                owners = [each for each in workers if key in each.kernels]
                if key not in chosen:
                    chosen[key] = min(owners, key=lambda each: counts[each.label])
                    counts[chosen[key].label] += 1
    for worker in workers:
        if chosen:
            worker.choose([key for key in worker.kernels if chosen[key] is worker])
        else:
            worker.choose(worker.kernels)


class _Worker:
    """A running `python -m graft.lab.worker`."""

    def __init__(
        self,
        label: str,
        python: Sequence[str],
        request: Mapping[str, Any],
        progress: Progress | None,
    ) -> None:
        self.label = label
        self.progress = progress
        # Set when the worker has said which kernels it has, or has ended.
        self.compiled = threading.Event()
        self.kernels: list[str] = []
        self.heuristics: str | None = None
        self.folder = tempfile.TemporaryDirectory(prefix="graft-explain-")
        root = Path(self.folder.name)
        self.response = root / "response.json"
        (root / "request.json").write_text(json.dumps(request))
        self.errors = (root / "errors").open("w+")
        self.process = subprocess.Popen(
            [*python, "-m", "graft.lab.worker", str(root / "request.json"), str(self.response)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment(described=request.get("gpu") is not None),
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
                if "kernels" in said:
                    self.kernels, self.heuristics = said["kernels"], said["heuristics"]
                    self.compiled.set()
                elif self.progress is not None:
                    self.progress(self.label, said["done"] / said["of"], said["what"])
            except (ValueError, TypeError, KeyError, ZeroDivisionError):
                continue  # something that the case itself prints
        self.compiled.set()

    def choose(self, keys: Sequence[str]) -> None:
        """Let the worker assemble these of its kernels."""
        assert self.process.stdin is not None
        # A worker that has nothing to assemble, or has failed, reads nothing.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(list(keys)) + "\n")
            self.process.stdin.close()

    def answer(self) -> dict[str, Any]:
        self.process.wait()
        self.reader.join()
        if self.response.is_file():
            answer: dict[str, Any] = json.loads(self.response.read_text())
            if "error" in answer:
                raise GraftError(f"{self.label}: {answer['error']}", next=answer["next"])
            if self.progress is not None:
                self.progress(self.label, 1.0, "done")
            return answer
        self.errors.seek(0)
        last = [line for line in self.errors.read().splitlines() if line.strip()][-12:]
        raise GraftError(
            f"{self.label}: the worker ended with {self.process.returncode}:\n  "
            + "\n  ".join(last)
        )

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        self.folder.cleanup()


def environment(*, described: bool) -> dict[str, str]:
    """For a worker: this tool's code, and no GPU where one is described."""
    env = caches.stock_environ(os.environ)
    paths = [str(ROOT / "src"), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    if described:
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env


def _memory_bytes() -> int:
    """Memory that a new process may use; a lot, where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return sys.maxsize
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else sys.maxsize


# --- checking ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Whether compiled offline for a GPU the code is what was generated on it: a case, a torch."""

    case: str
    side: str
    graphs: int
    kernels: int
    difference: str | None

    @property
    def is_same(self) -> bool:
        return self.difference is None


def check(
    pythons: Mapping[str, Sequence[str]],
    names: Iterable[str] = SHIPPED,
    *,
    dtype: str = "bf16",
    progress: Progress | None = None,
) -> list[Check]:
    """Compile each case on the real GPU, and for its description with no GPU visible; compare.

    Raises GraftError where there is no GPU, or one that is not described.
    """
    from graft.lab import devices

    device = devices.present()
    if device.key not in devices.DEVICES:
        raise GraftError(
            f"{device.name} is not described; there are {', '.join(devices.DEVICES)}",
        )
    found = []
    for name in names:
        for side in SIDES:
            python = pythons[side]
            base = {"case": name, "dtype": dtype}
            answers = ask(
                {
                    "on the GPU": (python, {**base, "gpu": None}),
                    "described": (python, {**base, "gpu": device.key}),
                },
                together=True,
                progress=progress,
            )
            found.append(compare(name, side, answers["on the GPU"], answers["described"]))
    return found


def compare(case: str, side: str, real: Mapping[str, Any], lab: Mapping[str, Any]) -> Check:
    """Wrappers and kernels of two answers, as text, without comments."""
    graphs, kernels = real["compiled"], [k for g in real["compiled"] for k in g["kernels"]]
    difference = None
    if [g["name"] for g in graphs] != [g["name"] for g in lab["compiled"]]:
        difference = (
            f"graphs {[g['name'] for g in graphs]} on the GPU, "
            f"{[g['name'] for g in lab['compiled']]} offline"
        )
    else:
        for there, here in zip(graphs, lab["compiled"], strict=True):
            difference = _difference(there["name"], there["wrapper"], here["wrapper"])
            if difference:
                break
    return Check(case, side, len(graphs), len(kernels), difference)


def _difference(name: str, there: str, here: str) -> str | None:
    real, lab = code_lines(there), code_lines(here)
    if real == lab:
        return None
    lines = difflib.unified_diff(real, lab, f"{name} on the GPU", f"{name} offline", "", "", 1)
    return "\n".join(line[:200] for line in list(lines)[:20])
