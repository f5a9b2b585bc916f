"""What a stack generates for a case, by `python -m graft.devtools.codes GPU CACHES`.

A process for many cases: each is captured in a fork of it, which has imported and warmed up what
all of them need, so that no case sees what an earlier one left. On standard input a request a line,
`{"item": "graphs/1/17"}`, or `{"list": "cases", …}`; on standard output its answer.

An item is `cases/NAME/DTYPE`, `operators/CASE` (`graft.lab.operators`), `graphs/SEED/NUMBER`
(`graft.lab.fuzz`), `points/PART/NAME/SHAPE/DTYPE`, a row of a published result, or `models/NAME`,
a step of `bench/models.toml`. Its code is a list of sections, each of one of the `PARTS`:

- `wrapper`: the module that Inductor writes for a graph, without the kernels' sources;
- `kernel`: a Triton kernel's source, without what codegen hands to the heuristics;
- `meta`: that, the kernel's `inductor_meta`, a line an entry;
- `configs`: what the heuristics make of it: each configuration, the grid, the constants and the
  options that Triton would compile it with, and what would be tried where it does not fit;
- `comments`: whole-line comments of wrapper and kernels.

Nothing is compiled by Triton, and nothing run.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import importlib.util
import json
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from graft.errors import first_line

GROUPS = ("cases", "operators", "graphs")
POINTS = "points"
"""The group of what `bench/results` has of cases; where it is asked for."""

MODELS = "models"
"""The group of other people's models whose library is installed; where it is asked for."""

PARTS = ("wrapper", "kernel", "meta", "configs", "comments")
GRAPH_MODES = ("default", "non-strict", "sums", "full-sums")
"""Of generated graph number `i`: number `i` modulo 4."""

OPERATOR_SAMPLES = 2
"""Of an operator, dtype and form: what `graft opinfo` takes."""

LIMIT_S = 300.0
"""For an item: a model's step takes half a minute."""

WARM_UP = (
    *(f"cases/{name}/bf16" for name in ("rms_norm_backward", "softmax_grad", "cross_entropy_grad")),
    *(f"graphs/0/{number}" for number in range(4)),
)
"""What each process captures first, so that a fork of it need not import and build as much. None
is an operator: those run autograd's threads, which forks cannot take over."""

Section = tuple[str, str, str]
"""A title, a part, a text."""

_KERNEL_SOURCE = re.compile(r"(async_compile\.triton\('\w+', )'''.*?'''", re.DOTALL)
# Where a kernel's file was, and which of the process's graphs this was.
_COMMENT_OF_A_PROCESS = re.compile(r"\s*# (kernel path|AOT ID): ")


class NoGraphError(Exception):
    """There is nothing to compile: PyTorch refuses the case, or it has no graph."""


# --- items ---------------------------------------------------------------------------------------


def listed(
    group: str, *, dtypes: Sequence[str] = ("bf16",), seed: int = 1, graphs: int = 1000
) -> list[str]:
    """The items of a group. `dtypes` are for the cases (one that has none of them: its first),
    `seed` and `graphs` for the graphs. A case or model whose package is not installed is left
    out."""
    if group == "graphs":
        return [f"graphs/{seed}/{index}" for index in range(graphs)]
    if group == POINTS:
        return list(dict.fromkeys(_points()))
    if group == MODELS:
        from graft.cases import models

        return [
            f"{MODELS}/{model.name}"
            for model in models.catalogue().values()
            if importlib.util.find_spec(model.library) is not None
        ]
    if group == "operators":
        from graft.upstream import operators

        return [f"operators/{case}" for case in operators.cases(OPERATOR_SAMPLES)]
    from graft import cases

    return [
        f"cases/{case.name}/{dtype}"
        for case in cases.load_all().values()
        if cases.available(case)
        for dtype in [each for each in dtypes if each in case.dtypes] or case.dtypes[:1]
    ]


def code(item: str) -> list[Section]:
    """The code of an item. Needs `fakegpu.install` first.

    Raises NoGraphError, and what the compilation raises.
    """
    from graft.lab import compile

    group, _, name = item.partition("/")
    compiled: list[compile.Compiled] = []
    kinds = {
        "cases": _case,
        "operators": _operator,
        "graphs": _graph,
        POINTS: _point,
        MODELS: _model,
    }
    capture = kinds[group]
    capture(name, compile.into(compiled, refusals=False))
    if not compiled:
        raise NoGraphError("it has no graph")
    found: list[Section] = []
    for number, graph in enumerate(compiled):
        found += _sections(f"{number} {graph.name}", graph)
    return found


def _case(name: str, compiler: Any) -> None:
    from graft import cases
    from graft.lab import capture

    name, _, dtype = name.rpartition("/")
    case = cases.find(name)
    capture.trace(case, case.default_shape, dtype, compiler)


def _points() -> Iterator[str]:
    """Of every row of a case in a result, as it is there."""
    from graft import cases
    from graft.bench import results

    known = {name for name, case in cases.load_all().items() if cases.available(case)}
    for name, path in results.named().items():
        for row in results.load(path)["rows"]:
            if row["case"] in known:
                shape = "x".join(map(str, row["shape"]))
                yield f"{POINTS}/{name}/{row['case']}/{shape}/{row['dtype']}"


def _point(name: str, compiler: Any) -> None:
    from graft import cases
    from graft.lab import capture

    _, case, shape, dtype = name.split("/")
    capture.trace(cases.find(case), tuple(map(int, shape.split("x"))), dtype, compiler)


def _model(name: str, compiler: Any) -> None:
    from graft.cases import models
    from graft.lab import capture

    (model,) = models.select([name])
    capture.trace(models.case(model), model.shape, "bf16", compiler)


def _graph(name: str, compiler: Any) -> None:
    import torch

    from graft.devtools import fuzz
    from graft.lab import capture

    seed, index = map(int, name.split("/"))
    program, options = fuzz.graph(seed, index, GRAPH_MODES[index % len(GRAPH_MODES)])

    def inputs() -> list[Any]:
        generator = torch.Generator().manual_seed(0)
        tensors = [x.make("cuda", generator) for x in program.inputs]
        if program.dynamic:
            for x, tensor in zip(program.inputs, tensors):
                if x.row_axis is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, x.row_axis)
        return tensors

    with torch._inductor.config.patch(dict(options)):
        capture.trace_function(program.function(), inputs, compiler, dynamic=program.dynamic)


def _operator(name: str, compiler: Any) -> None:
    import torch

    from graft.devtools import fuzz
    from graft.lab import capture
    from graft.upstream import operators

    case = operators.Case.parse(name)
    try:
        function, call = operators.described(case)
    except Exception as refusal:
        raise NoGraphError(f"{type(refusal).__name__}: {refusal}") from refusal
    options = fuzz.NON_STRICT if case.form == "sums" else fuzz.DEFAULT

    def on_gpu(x: Any) -> Any:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return made.requires_grad_(x.requires_grad)

    def inputs() -> tuple[Any, ...]:
        moved = call.mapped(on_gpu)
        return (*moved.arguments, moved.zeros)

    with torch._inductor.config.patch(dict(options)):
        capture.trace_function(function, inputs, compiler)


# --- sections ------------------------------------------------------------------------------------


def _sections(title: str, graph: Any) -> Iterator[Section]:
    from graft.lab.generated_code import code_lines

    wrapper = _KERNEL_SOURCE.sub(r"\1...", graph.wrapper)
    yield f"graph {title}", "wrapper", "\n".join(code_lines(wrapper))
    yield f"graph {title}, comments", "comments", _comments(wrapper)
    for kernel in graph.kernels:
        of = f"graph {title}, kernel {kernel.name}"
        source, meta = without_meta(kernel.source)
        yield of, "kernel", "\n".join(code_lines(source))
        yield f"{of}, inductor_meta", "meta", "\n".join(meta)
        yield f"{of}, configurations", "configs", "\n".join(_configurations(kernel))
        yield f"{of}, comments", "comments", _comments(source)


def _comments(text: str) -> str:
    lines = (line for line in text.splitlines() if line.lstrip().startswith("#"))
    return "\n".join(line for line in lines if not _COMMENT_OF_A_PROCESS.match(line))


def without_meta(source: str) -> tuple[str, list[str]]:
    """A kernel's source with `...` for its `inductor_meta`, and that, a line an entry.

    The source as it is, and no line, where it has none.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source, []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "inductor_meta":
            value = node.value
            if not isinstance(value, ast.Dict):
                continue
            segment = ast.get_source_segment(source, value)
            assert segment is not None
            entries = [
                f"{'**' if key is None else ast.unparse(key)}: {ast.unparse(entry)}"
                for key, entry in zip(value.keys, value.values, strict=True)
            ]
            return source.replace(segment, "...", 1), entries
    return source, []


class _AskedError(Exception):
    """In the place of machine code."""


def _configurations(kernel: Any) -> Iterator[str]:
    """What the heuristics decide for a kernel, and what Triton would be asked to compile."""
    from torch._inductor.runtime import triton_heuristics as heuristics

    from graft.lab import assemble

    tuner = assemble.load(kernel)
    if tuner is None:
        return
    yield f"{tuner.heuristic_type}, size hints {tuner.size_hints}, {type(tuner).__name__}"
    yield f"mutated {tuner.mutated_arg_names}, zeroed {tuner.reset_to_zero_arg_names}"
    asked: list[str] = []

    def compile(source: Any, target: Any, options: Mapping[str, Any]) -> Any:
        check_options(target, options)
        constants = {str(key): value for key, value in source.constants.items()}
        asked.append(f"  constants {constants}, options {dict(options)}")
        raise no_room

    no_room = heuristics.OutOfResources(1, 0, "shared memory")
    configs = list(tuner.configs)
    with mock.patch.object(heuristics.triton, "compile", compile):
        for config in configs:
            yield _config(config)
            yield _grid(heuristics, tuner, config)
            with contextlib.suppress(heuristics.OutOfResources):
                tuner._precompile_config(config)
            yield from asked
            asked.clear()
        # Compiled, and then too large for the device that it is loaded on.
        tuner.compile_results = [_TooLarge(configs[-1], no_room)]
        with contextlib.suppress(RuntimeError, heuristics.OutOfResources):
            tuner._make_launchers()
        if asked:
            yield "where it does not fit:"
            yield from asked


def check_options(target: Any, options: Mapping[str, Any]) -> None:
    """Raise what Triton does of compile options that it refuses, as no warps."""
    from triton.compiler.compiler import make_backend

    make_backend(target).parse_options(dict(options))


class _TooLarge:
    """A compiled kernel that does not fit."""

    def __init__(self, config: Any, error: Exception) -> None:
        self.config, self.error = config, error

    def make_launcher(self) -> Any:
        raise self.error


def _config(config: Any) -> str:
    facts = {key: value for key, value in sorted(vars(config).items()) if key != "pre_hook"}
    return f"config {facts}"


def _grid(heuristics: Any, tuner: Any, config: Any) -> str:
    if "grid_type" not in tuner.inductor_meta:
        return "  grid of the caller"
    grid = heuristics.GridExpr.from_meta(tuner.inductor_meta, config)
    return f"  grid {[*grid.prefix, grid.x_grid, grid.y_grid, grid.z_grid]}"


# --- the process ---------------------------------------------------------------------------------


def answer(item: str) -> dict[str, Any]:
    """The code of an item, or why there is none, as the process answers."""
    started = time.process_time()
    try:
        found: dict[str, Any] = {"sections": code(item)}
    except NoGraphError as nothing:
        found = {"none": str(nothing)}
    except Exception as error:
        found = {"error": error_text(error)}
    return {"item": item, "seconds": round(time.process_time() - started, 3), **found}


def _answer_in_fork(item: str) -> dict[str, Any]:
    import torch

    # Makes torch's pool of threads anew; autograd's threads, all at once, would trip over the one
    # that the fork left behind.
    torch.set_num_threads(1)
    return answer(item)


def error_text(error: BaseException) -> str:
    """What went wrong, in a line, of the cause where the compiler wraps it."""
    return first_line(getattr(error, "inner_exception", error))


def forked(make: Callable[[], dict[str, Any]], limit_s: float = LIMIT_S) -> dict[str, Any]:
    """What `make` returns in a fork of this process; why there is nothing, where it ends early."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "wb") as out:
                out.write(json.dumps(make()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    deadline = time.monotonic() + limit_s
    parts = []
    try:
        while True:
            ready, _, _ = select.select([reader], [], [], max(deadline - time.monotonic(), 0))
            if not ready:
                os.kill(pid, signal.SIGKILL)
                break
            part = os.read(reader, 1 << 20)
            if not part:
                break
            parts.append(part)
    finally:
        os.close(reader)
        _, status = os.waitpid(pid, 0)
    if status == 0:
        made: dict[str, Any] = json.loads(b"".join(parts))
        return made
    ended = os.waitstatus_to_exitcode(status)
    timed_out = ended == -signal.SIGKILL and time.monotonic() >= deadline
    why = f"longer than {limit_s:.0f} s" if timed_out else f"the process ended with {ended}"
    return {"error": why}


def main(argv: Sequence[str]) -> int:
    """Answers requests until its input ends."""
    gpu, caches = argv
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints must not be taken for an answer
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    os.environ["TRITON_CACHE_DIR"] = os.path.join(caches, "triton")
    import torch

    from graft.lab import devices, fakegpu

    torch.set_num_threads(1)
    fakegpu.install(devices.find(gpu))
    _be_quiet()
    captured = 0
    for line in sys.stdin:
        request = json.loads(line)
        if "list" in request:
            group = request.pop("list")
            reply: dict[str, Any] = {"items": listed(group, **request)}
        else:
            if captured == 1:  # for one item it would take longer than it saves
                _warm_up()
            captured += 1
            item = request["item"]
            if item.startswith("operators/"):
                from graft.upstream import operators

                operators.operators()  # a second, of which a fork would keep nothing
            reply = {"item": item, **forked(functools.partial(_answer_in_fork, item))}
        print(json.dumps(reply).replace(caches, ""), file=answers, flush=True)
    return 0


def _warm_up() -> None:
    """Import and build once what every fork would; what fails here fails there, and is said."""
    import torch

    from graft.lab import capture, compile

    def train(x: Any, weight: Any, target: Any) -> Any:
        functional = torch.nn.functional
        x = functional.layer_norm(x, (256,), weight)
        x = functional.batch_norm(functional.gelu(x), None, None, training=True)
        return functional.cross_entropy(functional.dropout(x.softmax(-1)), target)

    def inputs() -> tuple[Any, ...]:
        x, weight = torch.empty(512, 256, device="cuda"), torch.empty(256, device="cuda")
        target = torch.empty(512, dtype=torch.int64, device="cuda")
        return x.requires_grad_(), weight.requires_grad_(), target

    for item in WARM_UP:
        answer(item)
    capture.trace_function(train, inputs, compile.into([], refusals=False))
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()  # so that a fork's collector leaves the pages of this process alone


def _be_quiet() -> None:
    """A kernel that is not compiled is an exception to the heuristics, with its source logged."""
    import logging

    # Nor are the shapes that an operator refuses worth a traceback each.
    for name in ("torch._inductor.runtime.triton_heuristics", "torch._subclasses.fake_tensor"):
        logging.getLogger(name).disabled = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
