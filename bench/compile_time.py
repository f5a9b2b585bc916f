"""What the stack adds to Inductor's time: stock and patched in turn, without a GPU.

    python bench/compile_time.py [--pairs 5] [--out FILE] [CASE...]

Each compile is a process of its own, in the lab, on a described H200: what is counted is the CPU
time of Inductor over all graphs of the case, Triton's compiles not included. In every other pair
the patched torch goes first. Prints, and writes as JSON, the median of the pairs' ratios and the
interval from the second smallest to the second largest (for 5 pairs, 62 % of confidence, for 8,
93 %, as for any sign test).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from graft import stack  # noqa: E402
from graft.stack import pins
from graft.stack.trees import caches, tree

CASES = ("rms_norm_backward", "layer_norm_backward", "gpt2_step", "scaled_residual")
# The worker's own clock, counting CPU time: other processes do not slow it.
WORKER = """
import sys, time
time.perf_counter = time.process_time
from graft.lab import worker
sys.exit(worker.main(sys.argv[1:]))
"""


def seconds(python: list[str], case: str, gpu: str) -> float:
    """CPU seconds of Inductor for `case`. Raises CalledProcessError where the worker fails."""
    with tempfile.TemporaryDirectory(prefix="graft-compile-") as folder:
        request, response = Path(folder, "request.json"), Path(folder, "response.json")
        request.write_text(json.dumps({"case": case, "gpu": gpu}))
        subprocess.run(
            [*python, "-c", WORKER, str(request), str(response)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**caches.stock_environ(os.environ), "PYTHONPATH": str(ROOT / "src")},
        )
        graphs = json.loads(response.read_text())["compiled"]
    return float(sum(graph["seconds"] for graph in graphs))


def measure(pythons: dict[str, list[str]], case: str, gpu: str, pairs: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {side: [] for side in pythons}
    for index in range(pairs):
        for side in list(pythons) if index % 2 == 0 else list(pythons)[::-1]:
            found[side].append(round(seconds(pythons[side], case, gpu), 3))
    ratios = sorted(p / s for s, p in zip(found["stock"], found["patched"], strict=True))
    within = ratios[1:-1] if len(ratios) > 2 else ratios
    return {
        "case": case,
        "cpu_seconds": found,
        "ratio": {
            "median": round(statistics.median(ratios), 4),
            "low": round(within[0], 4),
            "high": round(within[-1], 4),
            "n": len(ratios),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--prefix", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pythons = tree.pythons(options.prefix)
    pin = pins.load()
    result = {
        "pin": pin.name,
        "stack_hash": stack.load(pin).hash,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python bench/compile_time.py --pairs {options.pairs} "
        + " ".join(options.cases),
        "gpu": f"{options.gpu}, described",
        "rows": [],
    }
    for case in options.cases:
        row = measure(pythons, case, options.gpu, options.pairs)
        result["rows"].append(row)
        ratio = row["ratio"]
        print(
            f"{case:24} patched / stock {ratio['median']:.4f}"
            f" ({ratio['low']:.4f} to {ratio['high']:.4f}, {ratio['n']} pairs)",
            flush=True,
        )
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
