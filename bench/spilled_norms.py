r"""Backwards of norms with much fused into them: fused, not fused, and as the stack decides.

    build/bin/python bench/spilled_norms.py OUT --seed 2001 --count 90
    build/bin/python bench/spilled_norms.py OUT --again bench/results/spilled_pairs.jsonl.gz

The programs are the first `count` that `graft.lab.pressure_programs` draws with a seed, of fewer
rows, or those of an earlier OUT. OUT gets a line for each program and contender: microseconds
(CUDA graph, L2 flushed, the median of three turns' medians of 9), spilled bytes, registers and
warps of its mix-order kernels, and how far the norms of its outputs are from those of the first
contender.

Workers compile side by side; whoever works on the GPU holds its lock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
TURNS, SAMPLES = 3, 9
_KNOB = "triton.mix_order_reduction"
_FUSED = {f"{_KNOB}_non_strict_mode": True, f"{_KNOB}_register_pressure": False}
CONTENDERS: dict[str, dict[str, Any]] = {
    "off": {_KNOB: False},
    "default": {},
    "fused": _FUSED,
    # ptxas takes as few as it likes
    "few": {**_FUSED, f"{_KNOB}_all_registers": False, f"{_KNOB}_share_registers": False},
}


Numbered = tuple[int, int, Any]  # the seed, which of those drawn with it, the program


def drawn(seed: int, count: int) -> list[Numbered]:
    """Drawn with up to 4 outputs more than otherwise, of as few rows as fill a GPU."""
    from graft.lab import pressure_programs

    def fewer_rows(each: Any) -> Any:
        rows = 4096 if each.columns > 6000 else 8192 if each.columns > 2048 else 16384
        return replace(each, rows=rows)

    found = islice(pressure_programs.programs(seed, outputs=4), count)
    return [(seed, number, fewer_rows(each)) for number, each in enumerate(found)]


def measured(path: Path) -> list[Numbered]:
    """Those of an earlier OUT, compressed or not, each once."""
    from graft.lab.pressure import read
    from graft.lab.pressure_programs import Program

    found = {(line["seed"], line["number"]): line["program"] for line in read(path)}
    return [(*which, Program.from_json(fields)) for which, fields in found.items()]


def inputs(program: Any) -> list[Any]:
    """Random tensors for `program`."""
    import torch

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.rand(shape, device="cuda") > 0.2
        if dtype == torch.int64:
            return torch.randint(0, 1 << 30, shape, device="cuda")
        return torch.randn(shape, device="cuda", dtype=dtype)

    return [make(shape, dtype) for shape, dtype in program.specs()]


def measure(program: Any, clock: Any, lock: Any) -> list[dict[str, Any]]:
    """A row for each contender, which take turns."""
    import torch
    import torch._inductor.config as inductor_config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels: list[list[int]] = []
    precompile = CachingAutotuner.precompile

    def watched(self: Any, *args: Any, **options: Any) -> None:
        precompile(self, *args, **options)
        if "row_split" in self.inductor_meta and not options.get("warm_cache_only"):
            (result,) = self.compile_results
            kernel = result.kernel
            kernels.append([kernel.n_spills * 4, kernel.n_regs, result.config.num_warps])

    arguments = inputs(program)
    rows: list[dict[str, Any]] = []
    replays: list[tuple[dict[str, Any], Any, list[float]]] = []
    first: list[float] | None = None
    CachingAutotuner.precompile = watched
    try:
        for name, options in CONTENDERS.items():
            torch._dynamo.reset()
            kernels.clear()
            row: dict[str, Any] = {"contender": name}
            rows.append(row)
            try:
                with inductor_config.patch(options):
                    compiled = torch.compile(program.fn, dynamic=False)
                    norms = [float(each.float().norm()) for each in compiled(*arguments)]
            except Exception as error:  # what a compiler raises is the result
                row["error"] = repr(error)[:300]
                continue
            first = first or norms
            pairs = zip(norms, first, strict=True)
            row["apart"] = max(abs(a - b) / (abs(b) + 1e-30) for a, b in pairs)
            row["mix_order"] = [*kernels]  # spilled bytes, registers, warps
            replay = clock.capture(lambda compiled=compiled: compiled(*arguments))
            row["kernels"] = replay.kernels
            replays.append((row, replay, []))
        for _ in range(TURNS):
            for _, replay, times in replays:
                with lock:
                    times.append(median(clock.time_us(replay.launch, SAMPLES)))
        for row, _, times in replays:
            row["us"] = round(median(times), 2)
    finally:
        CachingAutotuner.precompile = precompile
    return rows


def work(out: Path, programs: list[Numbered]) -> None:
    """A line for each program and contender, appended to `out`."""
    import torch
    import torch._inductor.config as inductor_config

    from graft.bench.clock import Clock
    from graft.bench.gpu_lock import GpuLock

    inductor_config.force_disable_caches = True
    clock = Clock(torch.device("cuda"))
    lock = GpuLock(out.with_suffix(".lock"))
    for seed, number, program in programs:
        with torch.cuda.stream(clock.stream):
            rows = measure(program, clock, lock)
        with out.open("a") as file:
            for row in rows:
                line = {"seed": seed, "number": number, "program": asdict(program), **row}
                file.write(json.dumps(line) + "\n")
        torch.cuda.empty_cache()


def main() -> None:
    """The command line that the module's docstring shows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=2001)
    parser.add_argument("--count", type=int, default=90)
    parser.add_argument("--again", type=Path, metavar="FILE", help="those of an earlier OUT")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker is not None:
        programs = measured(asked.again) if asked.again else drawn(asked.seed, asked.count)
        work(asked.out, programs[asked.worker :: asked.workers])
        return
    if asked.out.exists():
        sys.exit(f"{asked.out} exists\nnext: name another file, or remove it")
    command = [sys.executable, *sys.argv, "--workers", str(asked.workers)]
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen([*command, "--worker", str(worker)], env=environment)
        for worker in range(asked.workers)
    ]
    failed = sum(each.wait() != 0 for each in running)
    asked.out.with_suffix(".lock").unlink(missing_ok=True)
    if failed:
        sys.exit(f"{failed} of {asked.workers} workers failed; {asked.out} has what was measured")


if __name__ == "__main__":
    main()
