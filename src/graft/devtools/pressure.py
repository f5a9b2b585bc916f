"""Register pressure: kernels, what `ptxas` makes of them, and what the stack's model says.

`collect` makes fused kernels for a described GPU, compiles them, and keeps what the model is given
(the operations of the nodes, the configurations) beside what `ptxas` answered. `retrace` makes what
the model is given again, after a change of the patches, without compiling. `fit` finds coefficients
on all kernels but those of `HELD_OUT_SEEDS`; `validate` judges each of these by a fit on others;
`report` judges the coefficients that the tree has, the held out kernels apart.

    build/bin/python -m graft.devtools.pressure collect H200 400 1 h200.jsonl    (2 s a kernel)
    build/bin/python -m graft.devtools.pressure fit bench/results/pressure.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import Any
from unittest import mock

from graft.devtools.pressure_programs import Program, make, programs
from graft.errors import GraftError, UsageError

NON_STRICT = {
    "triton.mix_order_reduction": True,
    "triton.mix_order_reduction_non_strict_mode": True,
    "triton.mix_order_reduction_max_reads": 0,
    "force_disable_caches": True,
    "compile_threads": 1,
}


def collect(gpu: str, count: int, seed: int, path: Path, outputs: int = 0) -> None:
    """Append `count` kernels for `gpu` to `path`, a line each; what is there is kept.

    The programs are those of `seed`, with up to so many more `outputs`.
    """
    from graft.lab import devices, fakegpu

    device = devices.find(gpu)
    fakegpu.install(device)
    import torch._inductor.config as inductor_config

    done = {line["program_id"] for line in read(path)} if path.exists() else set()
    start = time.monotonic()
    made = len(done)
    with inductor_config.patch(NON_STRICT), _nothing_refused():
        for number, program in enumerate(programs(seed, outputs)):
            if made >= count:
                break
            if number in done:
                continue
            for line in _collected(seed, number, program, device):
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                made += 1
                print(
                    f"{gpu} {made} {line['columns']} {time.monotonic() - start:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )


@contextmanager
def _nothing_refused() -> Iterator[None]:
    """Fuse what would spill too, and compile it as it would be launched.

    Without the policy itself no kernel would be given more registers for what it needs.
    """
    from torch._inductor import choices

    with mock.patch.object(choices, "why_spills", return_value=None):
        yield


def _collected(seed: int, number: int, program: Program, device: Any) -> Iterator[dict[str, Any]]:
    from torch._inductor.mix_order_debug import debug_options

    from graft.lab import assemble

    try:
        kernels = _kernels(program)
    except Exception as error:  # a program that cannot be traced says nothing about registers
        print(f"{program}: {error}", file=sys.stderr)
        return
    for index, (kernel, made) in enumerate(kernels):
        found = assemble.assemble(kernel, device)
        yield {
            "seed": seed,
            "program_id": number,
            "kernel": index,
            "gpu": device.key,
            "program": asdict(program),
            **made,
            "even_vectors": debug_options().even_vectors,
            "configs": [_config(each) for each in found],
        }


def _kernels(program: Program) -> list[tuple[Any, dict[str, Any]]]:
    """The mix-order kernels of `program`, not compiled, each with what the model is given."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from graft.lab import capture
    from graft.lab import compile as compiling

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    torch._dynamo.reset()
    module, inputs = make(program, mode)
    with watching() as traces:
        (compiled,) = compiling.graphs([capture.Graph("forward", module, tuple(inputs))])
    kernels = [kernel for kernel in compiled.kernels if kernel.kind == compiling.MIX_ORDER]
    return list(zip(kernels, traces, strict=True))


def _config(assembly: Any) -> dict[str, Any]:
    kwargs = dict(part.split(" ") for part in assembly.config.split(", "))
    return {
        "xblock": int(kwargs["XBLOCK"]),
        "loop_stages": int(kwargs.get("NUM_STAGES", 1)),
        "num_warps": assembly.num_warps,
        "registers": assembly.registers_per_thread,
        "spill_bytes": assembly.spill_bytes,
        "shared_bytes": assembly.shared_memory_bytes,
        "error": assembly.error,
    }


@contextmanager
def watching() -> Iterator[list[dict[str, Any]]]:
    """Rows, columns, operations and row split of each mix-order kernel generated inside."""
    from torch._inductor import scheduler
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.simd import SIMDScheduling
    from torch._inductor.mix_order_trace import Trace

    made: list[dict[str, Any]] = []
    generate = SIMDScheduling._codegen_mix_order_reduction
    split = InductorChoices.mix_order_row_split

    def generating(self: Any, node1: Any, node2: Any) -> None:
        rows, columns = scheduler.MixOrderReduction.get_numel_rnumel(node1)
        ops = Trace.of(rows, node1.get_nodes(), node2.get_nodes())
        packed = [[op.name, list(op.inputs), int(op.width), op.bits, op.memory_bits] for op in ops]
        made.append({"rows": int(rows), "columns": int(columns), "trace": packed})
        generate(self, node1, node2)

    def splitting(cost: Any, *args: Any, **options: Any) -> Any:
        found = split(cost, *args, **options)
        made[-1].update(cost=asdict(cost), split=asdict(found))
        return found

    with (
        mock.patch.object(SIMDScheduling, "_codegen_mix_order_reduction", generating),
        mock.patch.object(InductorChoices, "mix_order_row_split", staticmethod(splitting)),
    ):
        yield made


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that `collect` wrote, compressed or not."""
    opening: Any = gzip.open if path.suffix == ".gz" else open
    with opening(path, "rt") as file:
        for line in file:
            yield json.loads(line)


def retrace(files: list[Path], output: Path) -> None:
    """Write the kernels of `files` to `output` with what the model is given today.

    A kernel whose program is fused differently today is left out: what was compiled is another.
    """
    with _again(files, output) as (lines, _):
        for line, (_, made) in lines:
            line["trace"] = made["trace"]


def fewest(files: list[Path], output: Path) -> None:
    """Write the kernels of `files` to `output` with how few registers would do for each."""
    import torch._inductor.config as inductor_config
    from torch._inductor.runtime.registers import all_registers

    from graft.devtools.fewest_registers import fewest_registers
    from graft.lab import assemble

    with _again(files, output) as (lines, device):
        for line, (kernel, _) in lines:
            tuner = assemble.load(kernel)
            tuner._make_launchers = lambda: None
            with inductor_config.patch(use_static_triton_launcher=False):
                result = tuner._precompile_config(tuner.configs[0])
            most = all_registers(device.registers_per_sm, line["configs"][0]["num_warps"])
            line["fewest_registers"] = fewest_registers(
                result.kernel.asm["ptx"], device.capability, most, SPILL_BYTES
            )


@contextmanager
def _again(files: list[Path], output: Path) -> Iterator[tuple[Any, Any]]:
    """The lines of `files`, each with its kernel as it is made today, and the GPU that it is for.

    What the caller makes of the lines is written to `output` afterwards.
    """
    import torch._inductor.config as inductor_config

    from graft.lab import devices, fakegpu

    lines = [line for path in files for line in read(path)]
    keys = {line["gpu"] for line in lines}
    if len(keys) != 1:
        raise GraftError(f"a process describes one GPU, and these are of {sorted(keys)}")
    device = devices.find(keys.pop())
    fakegpu.install(device)
    kept = []

    def made() -> Iterator[tuple[dict[str, Any], Any]]:
        for line in lines:
            found = _kernels(Program.from_json(line["program"]))
            if len(found) <= line["kernel"]:
                continue
            kernel = found[line["kernel"]]
            if _same(kernel[1]["trace"], line["trace"]):
                kept.append(line)
                yield line, kernel

    with inductor_config.patch(NON_STRICT), _nothing_refused():
        yield made(), device
    output.write_text("".join(json.dumps(line) + "\n" for line in kept))
    print(f"{output}: {len(kept)} of {len(lines)} kernels")


def _same(one: list[Any], other: list[Any]) -> bool:
    """Whether two kernels reduce the same."""
    kinds = ("row_reduction", "partial")
    counts = [[sum(op[0] == kind for op in ops) for kind in kinds] for ops in (one, other)]
    return counts[0] == counts[1]


# --- the model -----------------------------------------------------------------------------------

# The scale, in registers, over which a spill becomes certain, and that of a register count's error.
_SPILL_SCALE = 12.0
_COUNT_SCALE = 70.0
# A spill that is not predicted costs as much as this many that were predicted and are none.
_MISS_WEIGHT = 4.0
# The share of spilling kernels that the lines let pass.
_MISSED = 0.01
# Up to this many bytes of local memory a thread are no spill: 16 words. A kernel that needs a
# register more than there are has a handful, and so have some with registers to spare.
SPILL_BYTES = 64
# From this many on a kernel should do less.
HIGH_BYTES = 256
# The programs of these seeds were not compiled before terms, coefficients and lines were fixed.
HELD_OUT_SEEDS = (*range(1701, 1705), *range(1711, 1715))
FOLDS = 8


@dataclass(frozen=True)
class Sample:
    """One kernel at one configuration: terms of the model, and what `ptxas` made of it.

    `fewest` is how few registers would do, where that was asked. Kernels of one program have one
    `fold`.
    """

    gpu: str
    held_out: bool
    terms: tuple[float, ...]
    limit: int
    spill_bytes: int
    fewest: int | None = None
    fold: int = 0

    @property
    def spilled(self) -> bool:
        """Whether it spilled for want of registers."""
        return self.spill_bytes > SPILL_BYTES


def samples(path: Path) -> list[Sample]:
    """What `path` has, without kernels that no GPU runs: those with too much shared memory.

    They are compiled again with fewer stages when they are loaded.
    """
    from torch._inductor import mix_order_pressure as model
    from torch._inductor.mix_order_trace import Op, Width

    from graft.lab import devices

    found = []
    for line in read(path):
        ops = [
            Op(name, tuple(inputs), Width(width), bits, memory_bits)
            for name, inputs, width, bits, memory_bits in line["trace"]
        ]
        program = json.dumps(line["program"], sort_keys=True)
        for config in line["configs"]:
            most_shared = devices.find(line["gpu"]).shared_memory_per_block_optin_bytes
            if config["error"] or config["shared_bytes"] > most_shared:
                continue
            launch = model.LaunchConfig(
                config["xblock"],
                config["num_warps"],
                config["loop_stages"],
                line["split"]["reload"],
                line["split"]["hoist"],
                line["split"].get("accumulate_tiles", False),
                line.get("even_vectors", False),
                line["split"]["programs_per_sm"] if line["split"].get("all_registers") else 1,
                line["split"].get("drop_padding", False),
            )
            demand = model.Demand.of(ops, line["columns"], launch)
            found.append(
                Sample(
                    gpu=line["gpu"],
                    held_out=line["seed"] in HELD_OUT_SEEDS,
                    terms=(1.0, *astuple(demand)),
                    limit=model.pressure(ops, line["columns"], launch).limit,
                    spill_bytes=config["spill_bytes"],
                    fewest=line.get("fewest_registers"),
                    fold=zlib.crc32(program.encode()) % FOLDS,
                )
            )
    return found


def fit(found: list[Sample], without: tuple[int, ...] = ()) -> list[float]:
    """Coefficients of the terms, and registers over the limit at which kernels spill too much.

    The terms at the positions `without` get none, and nor does one that would be negative: nothing
    that is held takes less than nothing. The lines are drawn where `_MISSED` of the kernels of
    `found` that spill over `SPILL_BYTES`, or `HIGH_BYTES`, need less.

    Minimises the logistic loss of 'spills' over need less limit, and the squared error of the
    need where it is known: convex, by Newton's method.
    """
    import numpy as np

    terms = np.array([sample.terms for sample in found])
    terms[:, list(without)] = 0.0
    limit = np.array([float(sample.limit) for sample in found])
    fewest = np.array([float(sample.fewest or 0) for sample in found])
    spilled = np.array([sample.spilled for sample in found])
    counted = fewest > 0
    weight = np.where(spilled, _MISS_WEIGHT, 1.0)
    target = np.where(spilled, limit + 40, np.where(counted, fewest, limit - 40))
    solution = np.linalg.lstsq(terms, target, rcond=None)[0]
    for _ in range(100):
        need = terms @ solution
        chance = 1 / (1 + np.exp(-np.clip((need - limit) / _SPILL_SCALE, -40, 40)))
        error = np.where(counted, need - fewest, 0.0) / _COUNT_SCALE**2
        gradient = terms.T @ (weight * (chance - spilled) / _SPILL_SCALE + error)
        curvature = weight * chance * (1 - chance) / _SPILL_SCALE**2 + counted / _COUNT_SCALE**2
        hessian = (terms.T * curvature) @ terms + 1e-6 * np.eye(terms.shape[1])
        step = np.linalg.solve(hessian, gradient)
        # a whole step may leave the region in which the logistic is a parabola
        solution = solution - step * min(1.0, 20.0 / max(1e-9, np.abs(terms @ step).max()))
    solution[list(without)] = 0.0
    negative = [i for i, value in enumerate(solution) if i and value < 0]
    if negative:
        return fit(found, (*without, *negative))
    over = terms @ solution - limit
    spill_bytes = np.array([sample.spill_bytes for sample in found])
    lines = []
    for bytes_ in (SPILL_BYTES, HIGH_BYTES):
        spilling = np.sort(over[spill_bytes > bytes_])
        lines.append(np.nextafter(spilling[int(_MISSED * len(spilling))], -np.inf))
    return [float(value) for value in (*solution, *lines)]


@dataclass(frozen=True)
class Tally:
    """Kernels, those that spill over so many bytes, those predicted to, and what these do."""

    kernels: int = 0
    real: int = 0
    predicted: int = 0
    right: int = 0
    any_spill: int = 0

    @classmethod
    def of(cls, found: list[Sample], terms: list[float], bytes_: int, registers: float) -> Tally:
        """Of predictions by `terms`: over `bytes_` where so many `registers` over the limit."""
        import numpy as np

        over = np.array([np.dot(sample.terms, terms) - sample.limit for sample in found])
        spill_bytes = np.array([sample.spill_bytes for sample in found])
        real, predicted = spill_bytes > bytes_, over > registers
        counted = (real, predicted, predicted & real, predicted & (spill_bytes > 0))
        return cls(len(found), *(int(each.sum()) for each in counted))

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        shares = (
            self.right / max(1, self.real),
            self.right / max(1, self.predicted),
            self.any_spill / max(1, self.predicted),
        )
        return (
            f"kernels {self.kernels:4} spill {self.real:4} predicted {self.predicted:4}  "
            "found {:.3f}  right {:.3f}  with any spill {:.3f}".format(*shares)
        )


def _tallies(found: list[Sample], coefficients: list[float]) -> dict[tuple[str, int], Tally]:
    """By GPU, and all, and size of a spill."""
    *terms, over_64_bytes, over_256_bytes = coefficients
    return {
        (gpu, bytes_): Tally.of(part, terms, bytes_, registers)
        for gpu in ("all", *sorted({sample.gpu for sample in found}))
        for bytes_, registers in ((SPILL_BYTES, over_64_bytes), (HIGH_BYTES, over_256_bytes))
        if (part := [sample for sample in found if gpu in ("all", sample.gpu)])
    }


def _lines(name: str, tallies: dict[tuple[str, int], Tally]) -> list[str]:
    return [
        f"{name:9} {gpu:5} over {bytes_:3} B  {tally}" for (gpu, bytes_), tally in tallies.items()
    ]


def judge(found: list[Sample], coefficients: list[float]) -> list[str]:
    """A line for fitted on and held out, each GPU and size of a spill: spills, found, right."""
    lines = []
    for name, held_out in (("fitted on", False), ("held out", True)):
        part = [sample for sample in found if sample.held_out == held_out]
        lines += _lines(name, _tallies(part, coefficients))
    return lines


def validate(found: list[Sample]) -> list[str]:
    """As `judge`, of each fold by coefficients and lines that were fitted on the others."""
    total: dict[tuple[str, int], Tally] = {}
    for fold in range(FOLDS):
        coefficients = fit([sample for sample in found if sample.fold != fold])
        part = [sample for sample in found if sample.fold == fold]
        for key, tally in _tallies(part, coefficients).items():
            total[key] = total.get(key, Tally()) + tally
    return _lines("validated", total)


def main() -> None:
    """The command line that the module's docstring shows."""
    command, *arguments = sys.argv[1:]
    if command == "collect":
        gpu, count, seed, file, *outputs = arguments
        collect(gpu, int(count), int(seed), Path(file), *map(int, outputs))
    elif command in ("retrace", "fewest"):
        *files, output = map(Path, arguments)
        (retrace if command == "retrace" else fewest)(files, output)
    elif command in ("fit", "validate", "report"):
        from torch._inductor import mix_order_pressure as model

        found = samples(Path(arguments[0]))
        learnt = [sample for sample in found if not sample.held_out]
        if command == "validate":
            print("\n".join(validate(learnt)))
            return
        if command == "fit":
            coefficients = fit(learnt)
        else:
            known = model.COEFFICIENTS
            coefficients = [known.base, *astuple(known.each)]
            coefficients += [known.over_64_bytes, known.over_256_bytes]
        names = ["base", *(field.name for field in fields(model.Demand))]
        names += ["over_64_bytes", "over_256_bytes"]
        for name, value in zip(names, coefficients, strict=True):
            print(f"    {name}={value:.4g},")
        print("\n".join(judge(found, coefficients)))
    else:
        raise UsageError(f"{command} is none of collect, retrace, fewest, fit, validate, report")


if __name__ == "__main__":
    try:
        main()
    except GraftError as wrong:
        sys.exit(wrong.report())
