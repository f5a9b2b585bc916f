"""The most that a step's buffers take at a time, stock against patched, as its code says.

    PYTHONPATH=src build/bin/python -m graft.devtools.buffers bert mistral --json FILE

Each graph is compiled for a described GPU. Its wrapper says when a buffer, or the workspace of a
kernel, is allocated, and when the last name of one is deleted; what it is given is there until the
wrapper deletes it, parameters to the end. Where no graph has more than stock's, no step has. It has
no rounding by PyTorch's caching allocator: `max_memory_allocated` counts the block that a buffer is
in, of which up to 1 MB may be more than the buffer.
`view=buffers` shows what `--json` wrote (`graft.bench.outcome_tables`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from graft import cases as known
from graft.devtools import sides
from graft.errors import GraftError
from graft.lab import devices, explain
from graft.places import ROOT
from graft.stack.trees import tree

MODULE = "graft.devtools.buffers"
BLOCK = 512
"""Bytes of which the allocator gives a multiple."""

_GIVEN = re.compile(
    r"(\w+) = rand_strided\((\(.*?\)), (\(.*?\)), device='\w+:\d+', dtype=torch\.(\w+)\)"
)
_ALLOCATED = re.compile(r"(\w+) = empty_strided_\w+\((\(.*?\)), (\(.*?\)), torch\.(\w+)\)")
# of what another library returns, whose type is not said
_RETURNED = re.compile(r"assert_size_stride\((buf\d+), (\(.*?\)), (\(.*?\))[,)]")
_SAME = re.compile(r"(\w+) = (?:reinterpret_tensor\()?(\w+)(?:,.*)?$")
_DELETED = re.compile(r"del (\w+)$")


@dataclasses.dataclass(frozen=True)
class Most:
    """The most bytes of a graph's buffers, and the line of its wrapper that had them first."""

    bytes: int
    line: str


def most(wrapper: str) -> Most:
    """Of the graph whose generated code is `wrapper`, with the part that calls it by itself."""
    sizes: list[int] = []
    names: list[set[str]] = []
    of: dict[str, int] = {}

    def add(name: str, shape: str, stride: str, dtype: str) -> None:
        of[name] = len(sizes)
        sizes.append(_bytes(_numbers(shape), _numbers(stride), dtype))
        names.append({name})

    for name, shape, stride, dtype in _GIVEN.findall(wrapper):
        add(name, shape, stride, dtype)
    taken = found = sum(sizes)
    line = "call"
    for line_of, statement in _statements(wrapper[wrapper.index("def call(") :]):
        if allocated := _ALLOCATED.match(statement):
            add(allocated[1], allocated[2], allocated[3], allocated[4])
            taken += sizes[-1]
        elif (returned := _RETURNED.match(statement)) and returned[1] not in of:
            add(returned[1], returned[2], returned[3], "bfloat16")
            taken += sizes[-1]
        elif (same := _SAME.match(statement)) and same[2] in of:
            of[same[1]] = of[same[2]]
            names[of[same[1]]].add(same[1])
        elif (deleted := _DELETED.match(statement)) and deleted[1] in of:
            if deleted[1].startswith("primals"):
                continue
            at = of.pop(deleted[1])
            names[at].discard(deleted[1])
            taken -= sizes[at] if not names[at] else 0
        if taken > found:
            found, line = taken, line_of
    return Most(found, line)


def _statements(code: str) -> Iterator[tuple[str, str]]:
    for line in code.splitlines():
        for statement in line.partition("  #")[0].strip().split("; "):
            yield line.strip(), statement.strip().removesuffix(";")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _bytes(shape: Sequence[int], stride: Sequence[int], dtype: str) -> int:
    import torch

    elements = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    taken = getattr(torch, dtype).itemsize * (elements if math.prod(shape) else 0)
    return -(-taken // BLOCK) * BLOCK


def here(name: str, gpu: str) -> dict[str, dict[str, object]]:
    """By graph, what the case or model `name` has, as this process's torch compiles it."""
    from graft.lab import capture, compile, fakegpu

    fakegpu.install(devices.find(gpu))
    case = known.find(name)
    graphs: list[compile.Compiled] = []
    capture.trace(case, case.default_shape, "bf16", compile.into(graphs, refusals=False))
    generated = [graph for graph in graphs if graph.wrapper]  # others compute nothing
    names = [graph.name for graph in generated]
    return {
        f"{name} {i}" if names.count(name) > 1 else name: dataclasses.asdict(most(graph.wrapper))
        for i, (name, graph) in enumerate(zip(names, generated, strict=True))
    }


def compare(
    names: Sequence[str], gpu: str, pythons: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, dict[str, dict[str, object]]]]:
    """What `here` says by name and side; prints a line for each graph. Raises GraftError."""
    devices.find(gpu)
    for name in names:
        known.find(name)
    rows: dict[str, dict[str, dict[str, dict[str, object]]]] = {}
    for name in names:
        rows[name] = {}
        for side, python in pythons.items():
            args = ["--in-here", name, "--gpu", gpu]
            rows[name][side] = sides.answer(f"{name} on {side}", python, MODULE, args)
        stock, patched = rows[name]["stock"], rows[name]["patched"]
        if stock.keys() != patched.keys():
            raise GraftError(f"{name}: graphs {', '.join(stock)} and {', '.join(patched)}")
        for graph in stock:
            one, other = (int(str(side[graph]["bytes"])) / 1e6 for side in (stock, patched))
            words = f"stock {one:9.3f} MB  patched {other:9.3f} MB  {other - one:+.3f}"
            print(f"{name:<14}{graph:<12}{words}", flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--gpu", default=explain.DEFAULT_GPU)
    parser.add_argument("--prefix", type=Path, default=ROOT / "build")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--in-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.in_here:
        print(json.dumps(here(args.cases[0], args.gpu)))
        return 0
    try:
        about = sides.about(args.prefix, args.gpu)
        rows = compare(args.cases, args.gpu, tree.pythons(args.prefix))
        if args.json:
            sides.write(args.json, **about, buffers=rows)
    except GraftError as wrong:
        print(wrong.report(), file=sys.stderr)
        return wrong.code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
