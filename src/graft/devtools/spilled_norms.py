r"""Backwards of norms with much fused into them: fused, not fused, and as the stack decides.

    build/bin/python -m graft.devtools.spilled_norms OUT --seed 2001 --count 90
    build/bin/python -m graft.devtools.spilled_norms OUT \
        --again bench/results/spilled_pairs.jsonl.gz

The programs are the first `count` that `graft.devtools.pressure_programs` draws with a seed, of
fewer rows, or those of an earlier OUT. OUT gets a line for each program and contender: microseconds
(CUDA graph, L2 flushed, the median of three turns' medians of 9), spilled bytes, registers and
warps of its mix-order kernels, what was decided, and how far the norms of its outputs are from
those of the first contender.

Workers compile side by side, a program each, and when all are ready time theirs one after another:
nothing else is on the GPU then.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

TURNS, SAMPLES = 3, 9
_KNOB = "triton.mix_order_reduction"
# Knobs of Inductor, and constants of its mix_order_plan, or mix_order_spills.
CONTENDERS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "off": ({_KNOB: False}, {}),
    "default": ({}, {}),
    # all pairs, and all that they would absorb, whatever they spill
    "fused": (
        {f"{_KNOB}_non_strict_mode": True, f"{_KNOB}_debug": {"register_pressure": False}},
        {},
    ),
    # all pairs that are not refused for something else than what they spill
    "pairs": (
        {},
        {
            "MAX_SPILLED_SHARE": math.inf,
            "MAX_SPILLED_TWICE_SHARE": math.inf,
            "MAX_SPILLED_APART_SHARE": math.inf,
        },
    ),
    # what makes rows that are loaded twice lack registers, too
    "absorbed": ({}, {"MAX_LACKING_ABSORBED": math.inf}),
    # or nothing that makes them lack any
    "never": ({}, {"MAX_LACKING_ABSORBED": 0}),
}


Numbered = tuple[int, int, Any]  # the seed, which of those drawn with it, the program


def drawn(seed: int, count: int) -> list[Numbered]:
    """Drawn with up to 4 outputs more than otherwise, of as few rows as fill a GPU."""
    from graft.devtools import pressure_programs

    def fewer_rows(each: Any) -> Any:
        rows = 4096 if each.columns > 6000 else 8192 if each.columns > 2048 else 16384
        return replace(each, rows=rows)

    found = islice(pressure_programs.programs(seed, outputs=4), count)
    return [(seed, number, fewer_rows(each)) for number, each in enumerate(found)]


def measured(path: Path) -> list[Numbered]:
    """Those of an earlier OUT, compressed or not, each once."""
    from graft.devtools.pressure import read
    from graft.devtools.pressure_programs import Program

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


@contextmanager
def watching() -> Iterator[tuple[list[list[int]], list[dict[str, Any]]]]:
    """Of mix-order kernels made inside: spilled bytes, registers and warps; and what was decided.

    A decision is of a pair, or of a node to absorb: whether it was refused, rows are loaded twice
    and elements alone, how many registers a thread would lack, and of a pair how many bytes a
    program would for each that it saves.
    """
    from torch._inductor import mix_order_spills as spills
    from torch._inductor.mix_order_plan import (
        launch_configs,
        shared_itemsizes,
        spilled_bytes,
    )
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    kernels: list[list[int]] = []
    decisions: list[dict[str, Any]] = []
    precompile, why_spills = CachingAutotuner.precompile, spills._why_spills

    def precompiling(self: Any, *args: Any, **options: Any) -> None:
        precompile(self, *args, **options)
        programs = self.inductor_meta.get("launch_plan", {}).get("num_programs")
        if programs and not options.get("warm_cache_only"):
            (result,) = self.compile_results
            kernel = result.kernel
            kernels.append([kernel.n_spills * 4, kernel.n_regs, result.config.num_warps])

    def deciding(plan: Any, contiguous: Any, other: Any, absorbs: bool) -> str | None:
        why = why_spills(plan, contiguous, other, absorbs)
        cost, split, found = plan.cost, plan.split, plan.registers
        made: dict[str, Any] = {"refused": why is not None, "reload": split.reload}
        made |= {"apart": cost.apart, "lacks": round(min(each.excess for each in found), 1)}
        itemsizes = shared_itemsizes(contiguous, other)
        if not absorbs and itemsizes:
            if cost.apart:
                itemsizes = [max(4, size) for size in itemsizes]
            configs = launch_configs(split)
            spilled = min(
                spilled_bytes(each, launch) / launch.xblock
                for each, launch in zip(found, configs, strict=True)
            )
            made["per_saved"] = round(spilled / (cost.columns * sum(itemsizes)), 3)
        decisions.append(made)
        return why

    with (
        mock.patch.object(CachingAutotuner, "precompile", precompiling),
        mock.patch.object(spills, "_why_spills", deciding),
    ):
        yield kernels, decisions


def prepare(
    program: Any, contenders: list[str], clock: Any
) -> tuple[list[dict[str, Any]], list[Any]]:
    """A row for each contender, and of those that ran what launches it again."""
    import torch
    import torch._inductor.config as inductor_config
    from torch._inductor import mix_order_plan, mix_order_spills

    arguments = inputs(program)
    rows: list[dict[str, Any]] = []
    replays: list[Any] = []
    first: list[float] | None = None
    for name in contenders:
        torch._dynamo.reset()
        knobs, constants = CONTENDERS[name]
        row: dict[str, Any] = {"contender": name}
        rows.append(row)
        try:
            with ExitStack() as stack:
                for constant, value in constants.items():
                    plan = hasattr(mix_order_plan, constant)
                    module = mix_order_plan if plan else mix_order_spills
                    stack.enter_context(mock.patch.object(module, constant, value))
                kernels, decisions = stack.enter_context(watching())
                stack.enter_context(inductor_config.patch(knobs))
                compiled = torch.compile(program.fn, dynamic=False)
                norms = [float(each.float().norm()) for each in compiled(*arguments)]
            replay = clock.capture(lambda compiled=compiled: compiled(*arguments))
        except Exception as error:  # what a compiler raises is the result
            row["error"] = repr(error)[:300]
            continue
        first = first or norms
        pairs = zip(norms, first, strict=True)
        row["apart"] = max(abs(a - b) / (abs(b) + 1e-30) for a, b in pairs)
        row |= {"mix_order": kernels, "decisions": decisions, "kernels": replay.kernels}
        replays.append((row, replay))
    return rows, replays


def work(
    out: Path, programs: list[Numbered | None], contenders: list[str], ready: Any, lock: Any
) -> None:
    """A line for each program and contender, appended to `out`; all workers have as many programs.

    `ready` is a barrier for all workers, `lock` one that they share.
    """
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    import torch
    import torch._inductor.config as inductor_config

    from graft.bench.clock import Clock

    inductor_config.force_disable_caches = True
    clock = Clock(torch.device("cuda"))
    for each in programs:
        rows: list[dict[str, Any]] = []
        replays: list[Any] = []
        with torch.cuda.stream(clock.stream):
            if each is not None:
                try:
                    rows, replays = prepare(each[2], contenders, clock)
                except torch.cuda.OutOfMemoryError as error:  # of the inputs: the others go on
                    rows = [{"contender": name, "error": repr(error)[:300]} for name in contenders]
            torch.cuda.synchronize()
            ready.wait()
            with lock:
                times: list[list[float]] = [[] for _ in replays]
                for _ in range(TURNS):
                    for found, (_, replay) in zip(times, replays, strict=True):
                        found.append(median(clock.time_us(replay.launch, SAMPLES)))
                for found, (row, _) in zip(times, replays, strict=True):
                    row["us"] = round(median(found), 2)
                if each is not None:
                    seed, number, program = each
                    what = {"seed": seed, "number": number, "program": asdict(program)}
                    with out.open("a") as file:
                        for row in rows:
                            file.write(json.dumps({**what, **row}) + "\n")
            ready.wait()
        replays.clear()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def finish(running: list[Any]) -> str | None:
    """Wait for the workers; what failed, if one did: the others, which wait for it, are ended."""
    pending = {each.sentinel: each for each in running}
    while pending:
        for sentinel in multiprocessing.connection.wait(list(pending)):
            ended = pending.pop(sentinel)
            ended.join()
            if ended.exitcode != 0:
                for each in pending.values():
                    each.terminate()
                    each.join()
                return f"{ended.name} failed with exit code {ended.exitcode}"
    return None


def positive(text: str) -> int:
    """A number of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return int(text)


def main() -> None:
    """The command line that the module's docstring shows."""
    prog = "python -m graft.devtools.spilled_norms"
    parser = argparse.ArgumentParser(prog=prog, description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=2001)
    parser.add_argument("--count", type=positive, default=90)
    parser.add_argument("--again", type=Path, metavar="FILE", help="those of an earlier OUT")
    parser.add_argument(
        "--against",
        default="off,default,pairs,absorbed",
        metavar="NAMES",
        help=f"of {', '.join(CONTENDERS)}",
    )
    workers = max(1, (os.cpu_count() or 2) - 1)
    parser.add_argument("--workers", type=positive, default=workers)
    asked = parser.parse_args()
    contenders = asked.against.split(",")
    if unknown := [name for name in contenders if name not in CONTENDERS]:
        parser.error(f"{', '.join(unknown)}: none of {', '.join(CONTENDERS)}")
    if asked.out.exists():
        sys.exit(f"{asked.out} exists\nnext: name another file, or remove it")
    found = measured(asked.again) if asked.again else drawn(asked.seed, asked.count)
    # workers wait for each other
    programs: list[Numbered | None] = [*found, *[None] * (-len(found) % asked.workers)]
    spawn = multiprocessing.get_context("spawn")
    ready, lock = spawn.Barrier(asked.workers), spawn.Lock()
    running = [
        spawn.Process(
            target=work,
            args=(asked.out, programs[i :: asked.workers], contenders, ready, lock),
        )
        for i in range(asked.workers)
    ]
    for each in running:
        each.start()
    if failure := finish(running):
        sys.exit(f"{failure}; {asked.out} has what was measured")


if __name__ == "__main__":
    main()
