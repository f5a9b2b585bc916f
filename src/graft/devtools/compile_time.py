"""How long Inductor takes to generate the code of training steps, stock against patched.

    PYTHONPATH=src build/bin/python -m graft.devtools.compile_time --rounds 5 --json FILE
    PYTHONPATH=src build/bin/python -m graft.devtools.compile_time llama_step --gpu A100
    PYTHONPATH=src build/bin/python -m graft.devtools.compile_time --earlier ../earlier/build

A case's graphs are captured once, for a described GPU. Each round compiles them on either side,
each time in a process of its own, which has compiled a small graph before: imports do not count.
With `--earlier`, the tree of another stack is a third side.
Times are CPU seconds from graphs to the kernels' sources, without Dynamo, AOTAutograd and Triton.
`view=compile` shows what `--json` wrote (`graft.bench.outcome_tables`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from graft import cases as known
from graft.bench import outcome_tables
from graft.devtools import sides
from graft.errors import GraftError
from graft.lab import devices, explain
from graft.places import ROOT
from graft.stack.trees import tree

CASES = ("scaled_residual", "gpt2_step", "llama_step", "seed_model")
SMALL = "rms_norm_backward"
MODULE = "graft.devtools.compile_time"


def capture(python: Sequence[str], case: str, gpu: str, path: Path) -> None:
    """Save the graphs of `case` at its default shape. Raises GraftError as a worker does."""
    request = {"case": case, "gpu": gpu, "save": str(path)}
    explain.ask({case: (python, request)}, together=True)


def compile_s(python: Sequence[str], gpu: str, small: Path, graphs: Path) -> float:
    """CPU seconds in which `python`'s torch compiles `graphs`, after `small` ones."""
    args = ["--in-here", str(small), str(graphs), "--gpu", gpu]
    return float(sides.answer(graphs.stem, python, MODULE, args)["seconds"])


def compile_here(gpu: str, small: Path, graphs: Path) -> float:
    """In a process that compiles nothing else."""
    from graft.lab import compile, devices, fakegpu, saved

    fakegpu.install(devices.find(gpu))
    compile.graphs(saved.load(small))
    loaded = saved.load(graphs)
    before = time.process_time()
    compile.graphs(loaded)
    return time.process_time() - before


def compare(
    cases: Sequence[str], gpu: str, rounds: int, pythons: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, list[float]]]:
    """Print a line for each of `cases`, the sides in turn; CPU seconds by case and side.

    Raises GraftError.
    """
    devices.find(gpu)
    for case in cases:
        known.find(case)
    found = {}
    with tempfile.TemporaryDirectory(prefix="graft-compile-time-") as folder:
        small, *files = (Path(folder) / f"{case}.json" for case in (SMALL, *cases))
        for path in (small, *files):
            capture(pythons["stock"], path.stem, gpu, path)
        for path in files:
            seconds: dict[str, list[float]] = {side: [] for side in pythons}
            for _ in range(rounds):
                for side in pythons:
                    seconds[side].append(compile_s(pythons[side], gpu, small, path))
            print(summary(path.stem, seconds), flush=True)
            found[path.stem] = seconds
    return found


def summary(case: str, seconds: Mapping[str, Sequence[float]]) -> str:
    """A line: the medians, and the median ratio of the rounds with the least and the most."""
    line = f"{case:<18}"
    for side, found in seconds.items():
        line += f" {side} {statistics.median(found):6.2f} s "
    for base in seconds:
        if base != "patched":
            ratio, least, most = outcome_tables.ratios(seconds, base)
            line += f" patched / {base} {ratio:.3f} [{least:.3f}, {most:.3f}]"
    return line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--gpu", default=explain.DEFAULT_GPU)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefix", type=Path, default=ROOT / "build")
    parser.add_argument("--earlier", type=Path, help="the tree of another stack")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    parser.add_argument("--in-here", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; expected 1 or more")
    if args.in_here:
        with tempfile.TemporaryDirectory(prefix="graft-compile-time-") as caches:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
            print(json.dumps({"seconds": compile_here(args.gpu, *args.in_here)}))
        return 0
    try:
        pythons = tree.pythons(args.prefix)
        about = sides.about(args.prefix, args.gpu)
        if args.earlier:
            about["earlier"] = tree.load(args.earlier).stack_hash
            earlier = tree.pythons(args.earlier)["patched"]
            pythons = {"stock": pythons["stock"], "earlier": earlier, "patched": pythons["patched"]}
        found = compare(args.cases, args.gpu, args.rounds, pythons)
        if args.json:
            sides.write(args.json, **about, steps=found)
    except GraftError as wrong:
        print(wrong.report(), file=sys.stderr)
        return wrong.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
