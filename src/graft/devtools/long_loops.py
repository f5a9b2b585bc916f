"""The predicted time of loops over long rows, fitted to measured times and judged.

    build/bin/python -m graft.devtools.long_loops report bench/results/long_loops.jsonl.gz
    build/bin/python -m graft.devtools.long_loops fit bench/results/long_loops.jsonl.gz

A line of the file is a shape of a kernel: what `LoopedRows` says of it, the loop that it has
without a prediction (null: the runtime's), and the us of each loop that was tried, in CUDA graphs
with L2 flushed. `report` judges the constants that the tree has by the loops that they choose;
`fit` prints those that no step makes better on half of the shapes, and judges them on the other
half. Both are for the GPU that was measured.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graft.errors import GraftError, UsageError

# Of `DeviceModel`, what is fitted.
FITTED = ("warp_slot_ns", "iteration_ns", "load_ns", "row_end_ns", "l2_held", "l2_lost")
# Of one turn of the fit, by how much a constant is larger or smaller.
STEPS = (0.7, 0.9, 0.97, 1.03, 1.1, 1.4)
# Of a GPU in a file: 132 SMs, 50 MiB of L2, 3.35 TB/s.
H100: dict[str, Any] = {"sms": 132, "l2_mib": 50, "memory_GBs": 3350.0}


@dataclass(frozen=True)
class Point:
    """A shape: `row` is a `LoopedRows`, `usual` a `LoopConfig`, `us` the time of each."""

    key: str
    row: Any
    usual: Any
    us: dict[Any, float]

    def chosen(self, device: Any) -> Any:
        """The loop that the tree takes on `device`, of those that were timed."""
        from torch._inductor.looped_rows import long_loop

        loop = long_loop(self.row, self.usual, device) or self.usual
        return loop if loop in self.us else self.usual

    @property
    def held_out(self) -> bool:
        return bool(zlib.crc32(self.key.encode()) % 2)


@dataclass(frozen=True)
class Judged:
    """Geometric means, and the largest loss, over some shapes."""

    shapes: int
    of_best: float
    of_usual: float
    slower: int
    worst: float
    worst_key: str

    def __str__(self) -> str:
        return (
            f"{self.shapes} shapes: {self.of_best:.3f} of the best loop's time, "
            f"{self.of_usual:.3f} of the usual one's; {self.slower} over 1.02 of it, "
            f"{self.worst:.3f} at {self.worst_key}"
        )


def read(path: Path) -> list[Point]:
    """The shapes of a file. Raises GraftError where it cannot be read."""
    from torch._inductor.looped_rows import RUNTIME_LOOP, LoopConfig, LoopedRows

    points = []
    try:
        with gzip.open(path, "rt") as file:
            for line in file:
                found = json.loads(line)
                row = LoopedRows(**found["row"])
                us = {LoopConfig(*map(int, k.split("x"))): v for k, v in found["us"].items()}
                usual = LoopConfig(*found["usual"]) if found["usual"] else RUNTIME_LOOP
                key = f"{found['case']} {row.rows}x{row.columns} {found['dtype']}"
                if usual in us:
                    points.append(Point(key, row, usual, us))
    except (OSError, ValueError, KeyError, TypeError) as wrong:
        raise GraftError(
            f"{path}: {wrong}", "name a file as bench/results/long_loops.jsonl.gz"
        ) from wrong
    return points


def judge(points: Sequence[Point], device: Any) -> Judged:
    """How the loops that `device` chooses compare with the usual and with the best ones."""
    chosen = [point.us[point.chosen(device)] for point in points]
    usual = [us / point.us[point.usual] for us, point in zip(chosen, points, strict=True)]
    best = [us / min(point.us.values()) for us, point in zip(chosen, points, strict=True)]
    worst = max(range(len(points)), key=usual.__getitem__)
    return Judged(
        len(points),
        statistics.geometric_mean(best),
        statistics.geometric_mean(usual),
        sum(ratio > 1.02 for ratio in usual),
        usual[worst],
        points[worst].key,
    )


def loss(points: Sequence[Point], device: Any) -> float:
    """What `fit` makes small: time over the best, losses to the usual, and errors of times."""
    from torch._inductor.looped_rows import loop_us

    total = 0.0
    for point in points:
        us = point.us[point.chosen(device)]
        total += math.log(us / min(point.us.values()))
        total += max(math.log(us / point.us[point.usual]) - 0.01, 0)
        errors = [abs(math.log(loop_us(point.row, k, device) / v)) for k, v in point.us.items()]
        total += 0.1 * statistics.mean(errors)
    return total / len(points)


def fit(points: Sequence[Point], device: Any, turn: Callable[[float], None]) -> Any:
    """`device` with those constants that no step makes better."""
    least, better = loss(points, device), True
    while better:
        better = False
        for name in FITTED:
            for step in STEPS:
                tried = replace(device, **{name: getattr(device, name) * step})
                if (now := loss(points, tried)) < least - 1e-5:
                    device, least, better = tried, now, True
        turn(least)
    return device


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) != 2 or argv[0] not in ("report", "fit"):
            raise UsageError("expected report or fit, and a file", "see the module's first lines")
        from torch._inductor.device_model import DeviceModel

        points, device = read(Path(argv[1])), DeviceModel(**H100)
        if argv[0] == "report":
            print(judge(points, device))
            return 0
        device = fit([p for p in points if not p.held_out], device, lambda now: print(f"{now:.4f}"))
        print(" ".join(f"{name}={getattr(device, name):.3g}" for name in FITTED))
        print("held out:", judge([p for p in points if p.held_out], device))
        return 0
    except GraftError as wrong:
        print(wrong.report(), file=sys.stderr)
        return wrong.code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
