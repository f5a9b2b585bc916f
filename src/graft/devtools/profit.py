"""The model of what mix-order fusion costs and saves, fitted to measured times and judged.

Result files of `graft bench` say what was measured, with a contender that never fuses and one that
always does; the lab says what work that was. Half of the shapes are held out of the fit, in every
case and dtype.

    graft bench rms_norm_backward layer_norm_backward sum_both --shapes grid --dtype bf16,fp32 \\
        --against off=patched,fused=patched --out grid.json \\
        --set fused:triton.mix_order_reduction_non_strict_mode=True \\
        --set off:triton.mix_order_reduction=False
    build/bin/python -m graft.devtools.profit work works.jsonl.gz grid.json   (a second a row)
    build/bin/python -m graft.devtools.profit fit works.jsonl.gz grid.json
    build/bin/python -m graft.devtools.profit report works.jsonl.gz grid.json

`work` adds what the file lacks; `fit` prints constants, and judges them; `report` judges those that
the tree has.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from graft.errors import GraftError, UsageError

FUSED, UNFUSED = "fused", "off"
# Of `DeviceModel`, what is fitted: the rest is the device's.
FITTED = ("launch_us", "row_share", "column_share", "kiloprogram_us", "partial_KiB_us")
ITERATIONS = 200
# Of a logarithm of a ratio of two times: what counts half as much as a tie.
_TIE = 0.2
# Of an error of a time, where one of a tie's ratio is 1.
_TIMES_WEIGHT = 0.3
# Of how far a constant is from where it was, for what the data says nothing of.
_STAY_WEIGHT = 0.05
# A time whose middle half is spread over more of its median is no measurement.
_SPREAD = 0.1

Key = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True)
class Point:
    """One shape of one case: the work of its mix-order kernel, and both times in us.

    ``work`` is None where the kernel is not made whatever it costs: it would spill.
    """

    key: Key
    work: Any
    memory_GBs: float
    fused_us: float
    unfused_us: float

    @property
    def name(self) -> str:
        """As the tables of `graft bench` have it."""
        case, dtype, shape = self.key
        return f"{case} {'x'.join(map(str, shape))} {dtype}"

    @property
    def held_out(self) -> bool:
        """Half of the shapes are, whatever the case."""
        return zlib.crc32(repr(self.key[2]).encode()) % 2 == 1


def rows(paths: Sequence[Path]) -> dict[Key, tuple[float, float]]:
    """
    Case, dtype and shape of each row of result files, and both times in us: those of the
    last file that has them.
    """
    from graft.bench import results

    found: dict[Key, tuple[float, float]] = {}
    for path in paths:
        data = results.load(path)
        for label in (FUSED, UNFUSED):
            if label not in data["contenders"]:
                raise UsageError(
                    f"{path} has no contender {label!r}; it has {', '.join(data['contenders'])}"
                )
        for row in data["rows"]:
            times = [row["times"].get(label, {}).get("us") for label in (FUSED, UNFUSED)]
            if all(times) and all(us["q3"] - us["q1"] < _SPREAD * us["median"] for us in times):
                key = (row["case"], row["dtype"], tuple(row["shape"]))
                found[key] = times[0]["median"], times[1]["median"]
    return found


def describe(paths: Sequence[Path]) -> None:
    """Describe, to this process, the GPU that result files were measured on."""
    from graft.bench import results
    from graft.lab import devices, fakegpu

    names = {gpu.get("name") for path in paths for gpu in results.load(path)["gpus"]}
    found = [device for device in devices.DEVICES.values() if device.name in names]
    if len(found) != 1 or len(names) != 1:
        raise GraftError(f"expected one GPU that the lab describes, found {names}")
    fakegpu.install(found[0])


def points(works: Path, paths: Sequence[Path]) -> list[Point]:
    """The rows of result files, with the work of the kernel that each would have."""
    import torch
    from torch._inductor.mix_order_profit import Work, device_model

    known = read(works)
    bandwidth = device_model(torch.device("cuda", 0)).memory_GBs
    assert bandwidth is not None
    made = []
    for key, (fused_us, unfused_us) in rows(paths).items():
        if key not in known:
            raise GraftError(
                f"{works} has no work of {key}",
                next=f"python -m graft.devtools.profit work {works} …",
            )
        found = known[key]
        work = None if found is None else Work(**found)
        made.append(Point(key, work, bandwidth, fused_us, unfused_us))
    return made


def read(path: Path) -> dict[Key, dict[str, int] | None]:
    """The work of each case, dtype and shape; None where nothing is fused."""
    known: dict[Key, dict[str, int] | None] = {}
    if path.exists():
        with gzip.open(path, "rt") as file:
            for line in map(json.loads, file):
                known[line["case"], line["dtype"], tuple(line["shape"])] = line["work"]
    return known


def work(path: Path, keys: Sequence[Key]) -> None:
    """Append to `path` the work of those of `keys` that it does not have."""
    from graft import cases

    missing = sorted(set(keys) - set(read(path)))
    with gzip.open(path, "at") as file:
        for number, (case, dtype, shape) in enumerate(missing):
            found = work_of(cases.find(case), shape, dtype)
            facts = None if found is None else asdict(found)
            line = {"case": case, "dtype": dtype, "shape": shape, "work": facts}
            file.write(json.dumps(line) + "\n")
            if number % 50 == 0:
                print(f"{number} of {len(missing)}", file=sys.stderr, flush=True)


class _Fused(BaseException):
    """Stops a compilation at its first mix-order kernel."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work


def work_of(case: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """The work of the first mix-order kernel of `case`, were each made; None where there is none.

    Needs `fakegpu.install` first, and a case without a model.
    """
    import torch
    import torch._inductor.config as inductor_config
    from torch._inductor import mix_order_profit, scheduler
    from torch._inductor.choices import InductorChoices

    from graft.cases import DTYPES
    from graft.lab import capture
    from graft.lab import compile as compiling

    works: list[Any] = []
    measure = mix_order_profit.work_of

    def measured(contiguous: Any, other: Any) -> Any:
        works.append(measure(contiguous, other))
        return works[-1]

    def pays(contiguous: Any, other: Any) -> None:
        mix_order_profit.why_not_profitable(contiguous, other)

    def creating(self: Any, node1: Any, node2: Any) -> None:
        raise _Fused(works[-1])

    options = {
        "force_disable_caches": True,
        "triton.mix_order_reduction": True,
        "triton.mix_order_reduction_non_strict_mode": False,
        "triton.mix_order_reduction_cost_model": True,
    }
    module, inputs = _traced(
        case.fn, lambda: case.inputs(shape, DTYPES[dtype], torch.device("cuda"))
    )
    with (
        inductor_config.patch(options),
        mock.patch.object(
            InductorChoices, "why_mix_order_reduction_does_not_pay", staticmethod(pays)
        ),
        mock.patch.object(mix_order_profit, "work_of", measured),
        mock.patch.object(scheduler.FusedMixOrderReductions, "__init__", creating),
    ):
        try:
            compiling.graphs([capture.Graph("forward", module, tuple(inputs))])
        except _Fused as fused:
            return fused.work
    return None


def _traced(fn: Any, make: Any) -> tuple[Any, Any]:
    """`fn` as Inductor receives it, on fake inputs, and those."""
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        inputs = make()
    traced = make_fx(fn, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    return traced, inputs


def fitted(values: Sequence[float]) -> Any:
    """A device's model with `values` for what is fitted."""
    from torch._inductor.device_model import DeviceModel

    named: dict[str, Any] = dict(zip(FITTED, map(float, values), strict=True))
    return DeviceModel(**named)


def fit(found: list[Point]) -> list[float]:
    """Constants that minimise the squared errors of the logarithms of both times' ratio.

    A point counts by how near a tie it is, since only there can a choice go wrong; the times
    themselves count a little, so that the constants stay what they are called. Gauss and Newton's
    method on the logarithms of the constants, which are positive, from those that the tree has.
    """
    import numpy as np
    from torch._inductor import mix_order_profit as model
    from torch._inductor.device_model import DeviceModel

    fused, unfused = np.log([(p.fused_us, p.unfused_us) for p in found]).T
    near = 1 / (1 + ((unfused - fused) / _TIE) ** 2)

    def residuals(logarithms: Any) -> Any:
        gpu = fitted(np.exp(logarithms))
        times = [model.estimate(p.work, replace(gpu, memory_GBs=p.memory_GBs)) for p in found]
        fused_error, unfused_error = (
            np.log([(each.fused_us, each.unfused_us) for each in times])
            - np.stack([fused, unfused], axis=1)
        ).T
        return np.concatenate(
            [
                np.sqrt(near) * (unfused_error - fused_error),
                _TIMES_WEIGHT * fused_error,
                _TIMES_WEIGHT * unfused_error,
                _STAY_WEIGHT * (logarithms - start),
            ]
        )

    start = np.log([getattr(DeviceModel, name) for name in FITTED])
    at, damping = start, 1e-2
    for _ in range(ITERATIONS):
        base = residuals(at)
        step = 1e-4
        jacobian = np.stack(
            [(residuals(at + step * unit) - base) / step for unit in np.eye(len(at))], axis=1
        )
        hessian = jacobian.T @ jacobian + damping * np.eye(len(at))
        move = np.linalg.solve(hessian, -jacobian.T @ base)
        if (residuals(at + move) ** 2).sum() < (base**2).sum():
            at, damping = at + move, damping / 3
            if np.abs(move).max() < 1e-6:
                break
        else:
            damping *= 4
    return [float(value) for value in np.exp(at)]


def judge(found: list[Point], gpu: Any) -> list[str]:
    """A line for each half, and one for each wrong choice that costs more than 2 %."""
    from torch._inductor import mix_order_profit as model

    lines = []
    for half, held_out in (("fitted on", False), ("held out", True)):
        part = [p for p in found if p.held_out == held_out]
        losses, always = [], []
        for point in part:
            each = model.Estimate(0.0, math.inf)
            if point.work is not None:
                each = model.estimate(point.work, replace(gpu, memory_GBs=point.memory_GBs))
            better = min(point.fused_us, point.unfused_us)
            losses.append((point.fused_us if each.pays else point.unfused_us) / better)
            always.append(point.fused_us / better)
            if losses[-1] > 1.02:
                lines.append(
                    f"  {point.name}: fused {point.fused_us:.1f} (model {each.fused_us:.1f}), "
                    f"unfused {point.unfused_us:.1f} (model {each.unfused_us:.1f}) us"
                )
        for what, over in (("chosen", losses), ("all fused", always)):
            mean = math.exp(sum(map(math.log, over)) / max(1, len(over)))
            lines.append(
                f"{half:9} points {len(part):4}  {what:9} over the better: mean {mean:.4f}, "
                f"worst {max(over, default=1.0):.3f}, over 2 %: {sum(x > 1.02 for x in over)}"
            )
    return lines


def main() -> None:
    """The command line that the module's docstring shows."""
    if len(sys.argv) < 4 or sys.argv[1] not in ("work", "fit", "report"):
        raise UsageError(
            "expected work, fit or report, a file of works, and result files",
            "python -m graft.devtools.profit fit WORKS RESULT…",
        )
    command, works, *results = sys.argv[1], *map(Path, sys.argv[2:])
    describe(results)
    if command == "work":
        work(works, list(rows(results)))
        return
    found = points(works, results)
    from torch._inductor.device_model import DeviceModel

    gpu = DeviceModel()
    if command == "fit":
        fitted_on = [p for p in found if not p.held_out and p.work is not None]
        gpu = fitted(fit(fitted_on))
    for name in FITTED:
        print(f"    {name}: float = {getattr(gpu, name):.4g}")
    print("\n".join(judge(found, gpu)))


if __name__ == "__main__":
    try:
        main()
    except GraftError as wrong:
        sys.exit(wrong.report())
