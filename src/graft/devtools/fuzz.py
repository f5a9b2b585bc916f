"""Generated graphs, compiled and run, against eager in float64.

    python -m graft.devtools.fuzz --seed 1 --graphs 5000 --device cuda --out rows.jsonl
    python -m graft.devtools.fuzz --seed 1 --graphs 40 --device lab --out rows.jsonl

On a GPU, graphs with an even number are of full size in default mode, odd ones are small and in
non-strict mode; `--mode` picks one, or another family: `graph` says which there are. In the lab
all are small, in non-strict mode, and run under Triton's interpreter. Graph number `i` of a seed is
always the same graph.

What a right graph is, `graft.lab.numerics` says.

A row of the output file is a graph. What fails is made smaller while it fails in the same way,
and printed as Python. `blame` says whether it fails without mix-order fusion, too; with `--stock
.venv/bin/python`, what does is run there as well, and `blame` says "stack" where that is right.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graft.devtools.programs import Program, generate, generate_scans, generate_sums, smaller
from graft.errors import first_line
from graft.lab.numerics import DEFAULT, NON_STRICT, Machine, Outcome, compare

# The rows that a dynamic program's second run has more than its first.
GROWTH = {"small": 5, "full": 37}
GRAPH_TIMEOUT_S = 180
# A failure's smallest program is looked for with at most this many compilations.
SHRINK_TRIES = 40
MODES = ("default", "non-strict", "both", "sums", "full-sums", "scans", "full-scans")
# Kinds of rows that say nothing of the compiled graph.
UNJUDGED = ("ok", "eager", "budget", "memory")


def _inputs(machine: Machine, program: Program, seed: int, grow: int = 0) -> list[Any]:
    import torch

    on = "cuda" if machine.kind == "cuda" else "cpu"
    generator = torch.Generator(device=on).manual_seed(seed)
    tensors = [x.make(on, generator, grow) for x in program.inputs]
    if program.dynamic:
        for x, tensor in zip(program.inputs, tensors):
            if x.row_axis is not None:
                torch._dynamo.maybe_mark_dynamic(tensor, x.row_axis)
    return tensors


def check(machine: Machine, program: Program, options: dict[str, Any], seed: int = 0) -> Outcome:
    """Compile `program`, run it, and compare.

    Where the GPU's memory does not suffice, beside other workers', nothing was said of it.
    """
    try:
        return _check(machine, program, options, seed)
    except Exception as error:
        if is_out_of_memory(error):
            return Outcome("memory", detail=first_line(error))
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Of the allocator, the driver or the host, as such or as Inductor wraps it."""
    return isinstance(error, MemoryError) or "out of memory" in str(error)


def _check(machine: Machine, program: Program, options: dict[str, Any], seed: int) -> Outcome:
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch._dynamo.reset()
    metrics.reset()
    counters.clear()
    function = program.function()
    compiled = torch.compile(function, options=options or None)
    growth = [0]
    if program.dynamic:
        small = max(max(x.shape) for x in program.inputs) < 4096
        growth.append(GROWTH["small" if small else "full"])
    worst = Outcome("ok")
    for grow in growth:
        try:
            expected = _run(_reference(program), _widened(_inputs(machine, program, seed, grow)))
            eager = _run(function, _inputs(machine, program, seed, grow))
        except Exception as refusal:
            if is_out_of_memory(refusal):
                raise
            return Outcome("eager", detail=first_line(refusal))
        try:
            found = _run(compiled, _inputs(machine, program, seed, grow))
            again = _run(compiled, _inputs(machine, program, seed, grow))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if type(error).__name__ == "OverBudget":
                return Outcome("budget", metrics.codegen_mix_order_reduction, first_line(error))
            return Outcome("error", metrics.codegen_mix_order_reduction, first_line(error))
        mix_order = metrics.codegen_mix_order_reduction
        names = [*program.outputs, *(f"{x.name} after" for x in program.inputs)]
        for name, values in zip(names, zip(found, again, eager, expected, strict=True)):
            outcome = dataclasses.replace(compare(name, *values), mix_order=mix_order)
            if outcome.failed:
                return outcome
            worst = max(worst, outcome, key=lambda o: o.ratio)
    attached = counters["inductor"]["mix_order_producer_sums"]
    return dataclasses.replace(worst, mix_order=mix_order, producer_sums=attached)


def _reference(program: Program) -> Callable[..., Any]:
    return program.function(reference=True)


def _widened(tensors: Sequence[Any]) -> list[Any]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def _run(function: Callable[..., Any], inputs: list[Any]) -> list[Any]:
    return [*function(*inputs), *inputs]


def shrink(
    machine: Machine, program: Program, options: dict[str, Any], outcome: Outcome, guilty: str
) -> tuple[Program, Outcome]:
    """The smallest program found that fails in the same way, by the same one's fault."""

    def alike(other: Outcome) -> bool:
        return way(other) == way(outcome) and other.ratio >= min(outcome.ratio / 4, 4)

    tries = 0
    progress = True
    while progress:
        progress = False
        for candidate in smaller(program):
            if tries == SHRINK_TRIES:
                return program, outcome
            tries += 1
            found = check(machine, candidate, options)
            if alike(found) and blame(machine, candidate, options, found) == guilty:
                program, outcome, progress = candidate, found, True
                break
    return program, outcome


def way(outcome: Outcome) -> str:
    """How a graph fails, without the names and numbers of the one graph."""
    if outcome.kind == "error":
        return outcome.detail.split(":")[0]
    words = ("shape", "dtype", "strides", "not finite", "has NaN", "differ", "error")
    return f"{outcome.kind} {next((word for word in words if word in outcome.detail), '')}"


def blame(machine: Machine, program: Program, options: dict[str, Any], outcome: Outcome) -> str:
    """ "mix-order", or "inductor" where it fails without mix-order fusion as well.

    An error less than twice as large as without fusion is not fusion's: sums in another order
    differ by as much.
    """
    if not outcome.mix_order:
        return "inductor"
    unfused = check(machine, program, options | {"triton.mix_order_reduction": False})
    if unfused.failed and way(unfused) == way(outcome) != "wrong error":
        return "inductor"
    alike = way(outcome) == "wrong error" and unfused.ratio >= outcome.ratio / 2
    return "inductor" if alike else "mix-order"


def graph(seed: int, index: int, mode: str) -> tuple[Program, dict[str, Any]]:
    """Graph number `index` of a seed, with the options that it is compiled with.

    `mode` is "default", "non-strict", or "both": even numbers default, odd ones non-strict.
    "sums" and "full-sums" are graphs that sum what they write over its rows, "scans" and
    "full-scans" ones that scan, sort and look up beside their reductions.
    """
    if mode in ("scans", "full-scans"):
        rnd = random.Random(f"scans:{seed}:{index}")
        if mode == "scans":
            return generate_scans(rnd, "small"), NON_STRICT
        return generate_scans(rnd, "full"), DEFAULT
    if mode in ("sums", "full-sums"):
        rnd = random.Random(f"sums:{seed}:{index}")
        return generate_sums(rnd, "small" if mode == "sums" else "full"), NON_STRICT
    if mode == "both":
        mode = "non-strict" if index % 2 else "default"
    rnd = random.Random(f"{seed}:{index}")
    scale = "small" if mode == "non-strict" else "full"
    return generate(rnd, scale), NON_STRICT if mode == "non-strict" else DEFAULT


def _row(
    machine: Machine, args: argparse.Namespace, index: int, shrinks: Counter[str]
) -> dict[str, Any]:
    program, options = graph(args.seed, index, args.mode)
    started = time.perf_counter()
    outcome = check(machine, program, options)
    row: dict[str, Any] = {"index": index, **dataclasses.asdict(outcome)}
    if outcome.failed:
        guilty = row["blame"] = blame(machine, program, options, outcome)
        row["program"] = program.script(options)
        key = f"{way(outcome)} {guilty}"
        shrinks[key] += 1
        if shrinks[key] <= args.shrink:
            least, why = shrink(machine, program, options, outcome, guilty)
            row["smallest"] = least.script(options)
            row["smallest_detail"] = why.detail
    row["time_s"] = round(time.perf_counter() - started, 2)
    return row


def work(args: argparse.Namespace) -> None:
    """One worker: a line `{"started": i}` before each graph, its row after it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    machine = Machine(args.device)
    import torch

    shrinks: Counter[str] = Counter()
    for index in range(args.first, args.graphs, args.workers):
        print(json.dumps({"started": index}), file=answers, flush=True)
        with contextlib.redirect_stderr(io.StringIO()):
            row = _row(machine, args, index, shrinks)
        print(json.dumps(row), file=answers, flush=True)
        if row["kind"] == "memory":
            # after an error of the driver nothing runs here any more; another process goes on
            raise SystemExit(row["detail"])
        if args.device == "cuda":
            torch.cuda.empty_cache()  # the others' graphs need it


class Worker(threading.Thread):
    """Keeps one worker process going: a crash or a hang is a row, and the rest goes on."""

    def __init__(
        self,
        args: argparse.Namespace,
        number: int,
        report: Callable[[Any], None],
        python: str = sys.executable,
    ) -> None:
        super().__init__(daemon=True)
        self.args, self.number, self.report, self.python = args, number, report, python
        self.process: subprocess.Popen[str] | None = None
        self.judge: Worker | None = None
        self.stopped = False

    def stop(self) -> None:
        """End the process, at once, and start no other."""
        self.stopped = True
        if self.judge:
            self.judge.stop()
        if self.process:
            self.process.kill()
            self.process.wait()

    def is_right_on(self, python: Path, index: int) -> bool:
        """Whether graph `index` is right where `python` runs it."""
        rows: list[dict[str, Any]] = []
        one = argparse.Namespace(**vars(self.args))
        one.graphs, one.workers, one.shrink, one.stock = index + 1, 1, 0, None
        self.judge = Worker(one, index, rows.append, str(python))
        self.judge.stopped = self.stopped
        self.judge.run()
        return [row["kind"] for row in rows] == ["ok"]

    def run(self) -> None:
        first = self.number
        while first < self.args.graphs and not self.stopped:
            first = self._once(first) + self.args.workers

    def command(self, first: int) -> list[str]:
        """What runs graphs `first`, `first + workers`, …"""
        a = self.args
        return [
            self.python, "-m", "graft.devtools.fuzz", "--seed", str(a.seed), "--graphs",
            str(a.graphs), "--device", a.device, "--mode", a.mode, "--workers", str(a.workers),
            "--shrink", str(a.shrink), "--first", str(first), "--out", os.devnull,
        ]  # fmt: skip

    def _once(self, first: int) -> int:
        """Runs from graph `first`; returns the number of the last one that has a row."""
        a = self.args
        process = self.process = subprocess.Popen(
            self.command(first),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        if self.stopped:  # while it started
            process.kill()
        assert process.stdout
        assert process.stderr
        said: list[str] = []
        errors = threading.Thread(target=lambda: said.extend(process.stderr or ()), daemon=True)
        errors.start()
        alarm: threading.Timer | None = None
        hung = False

        def kill() -> None:
            nonlocal hung
            hung = True
            process.kill()

        running: int | None = None
        reported: int | None = None
        for line in process.stdout:
            if alarm:
                alarm.cancel()
            message = json.loads(line)
            if "started" in message:
                running = message["started"]
                alarm = threading.Timer(GRAPH_TIMEOUT_S * (1 + 4 * bool(a.shrink)), kill)
                alarm.start()
            else:
                reported = message["index"]
                # what crashed has no blame
                if "blame" in message and a.stock and self.is_right_on(a.stock, reported):
                    message["blame"] = "stack"
                self.report(message)
        if alarm:
            alarm.cancel()
        code = process.wait()
        errors.join(5)
        if code == 0 or self.stopped:
            return a.graphs
        if running is not None and reported == running:
            return running
        tail = " | ".join(line.strip() for line in said[-3:])
        program, options = graph(a.seed, first if running is None else running, a.mode)
        self.report(
            {
                "index": first if running is None else running,
                "kind": "timeout" if hung else "crash",
                "mix_order": 0,
                "detail": f"exit code {code}: {tail}"[:600],
                "program": program.script(options),
            }
        )
        # A process that ended before its first graph would do so again.
        return a.graphs if running is None else running


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """What a run found, in one paragraph."""
    kinds = Counter(row["kind"] for row in rows)
    fused = [row for row in rows if row["mix_order"]]
    failed = [row for row in rows if row["kind"] not in UNJUDGED]
    blamed = Counter(row.get("blame", row["kind"]) for row in failed)
    return (
        f"{len(rows)} graphs, {len(fused)} with a mix-order kernel "
        f"({sum(row['mix_order'] for row in rows)} kernels), "
        f"{sum(row.get('producer_sums', 0) > 0 for row in rows)} with producer sums; "
        + ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items()))
        + (f"; blame: {dict(blamed)}" if failed else "; none wrong")
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m graft.devtools.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--graphs", type=int, required=True)
    parser.add_argument("--device", choices=["cuda", "lab"], default="cuda")
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core but two")
    parser.add_argument("--shrink", type=int, default=2, help="failures of a kind made smaller")
    parser.add_argument("--seconds", type=float, default=0, help="stop after; 0: do not")
    parser.add_argument("--stock", type=Path, help="Python of the stock torch, to tell whose fault")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.mode = args.mode or ("both" if args.device == "cuda" else "non-strict")
    args.workers = args.workers or max((os.cpu_count() or 3) - 2, 1)
    if args.first is not None:
        work(args)
        return 0
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()
    started = time.monotonic()
    # What the workers cache lies here and goes with it, however they end.
    with args.out.open("w") as out, tempfile.TemporaryDirectory(prefix="graft-fuzz-") as folder:
        os.environ["TMPDIR"] = folder

        def report(row: dict[str, Any]) -> None:
            with lock:
                rows.append(row)
                print(json.dumps(row), file=out, flush=True)

        workers = [Worker(args, number, report) for number in range(args.workers)]
        for worker in workers:
            worker.start()
        shown = started
        while any(worker.is_alive() for worker in workers):
            time.sleep(0.5)
            now = time.monotonic()
            if now - shown > 20:
                shown = now
                with lock:
                    print(f"{now - started:.0f} s: {summary(rows)}", flush=True)
            if args.seconds and now - started > args.seconds:
                break
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join()  # none writes to what is closed and removed below
        with lock:
            print(f"{time.monotonic() - started:.0f} s: {summary(rows)}", flush=True)
            failed = [row for row in rows if row["kind"] not in UNJUDGED]
            for row in sorted(failed, key=lambda row: row["index"])[:20]:
                print(f"\n# graph {row['index']}: {row['kind']}, {row['detail']}")
                print(row.get("smallest", row["program"]))
            out.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
