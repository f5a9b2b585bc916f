"""Random graphs with reductions over the leading and the trailing dimensions of one tensor.

A `Program` is plain data and prints as a PyTorch function. `generate`, `generate_sums` and
`generate_scans` make one from a source of random numbers; `smaller` proposes simpler ones, for
finding the smallest that still fails.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int64", "int32")

# Sizes on and beside what the heuristics of mix-order reductions compare with: XBLOCK (1 to 16),
# RSPLIT_SIZE (16 to 128), persistent blocks (powers of two), 4096 rows, 2 rows a column,
# 5 * 2**20 elements, 16384 columns.
SMALL_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 200, 257)
SMALL_COLUMNS = (1, 2, 3, 7, 8, 16, 31, 32, 33, 48, 64, 96, 127, 128, 129, 200, 256, 257, 512)
SMALL_ELEMENTS = 40_000
FULL_COLUMNS = (
    8, 16, 31, 32, 33, 48, 64, 96, 127, 128, 129, 192, 255, 256, 257, 384, 500, 511, 512, 513,
    640, 768, 768, 1000, 1023, 1024, 1025, 1536, 2048, 2049, 3072, 4096,
)  # fmt: skip
FULL_ELEMENTS = 40_000_000


@dataclass(frozen=True)
class Input:
    """An argument: `layout` is contiguous, transposed (stored with its dimensions reversed) or
    sliced (a part of a larger tensor); `row_axis` is the dimension that grows in the second run
    of a dynamic program, or None. An index has a size that it is `below`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = "contiguous"
    row_axis: int | None = None
    below: int | None = None

    def make(self, device: str, generator: torch.Generator, grow: int = 0) -> torch.Tensor:
        """Values in [-1, 1], an index, or integers that float32 cannot hold; `grow` more rows."""
        shape = list(self.shape)
        if self.row_axis is not None:
            shape[self.row_axis] += grow
        stored = {
            "contiguous": shape,
            "transposed": shape[::-1],
            "sliced": [*shape[:-1], shape[-1] + 3],
        }[self.layout]
        dtype = getattr(torch, self.dtype)
        if self.dtype == "bool":
            values = torch.rand(stored, generator=generator, device=generator.device) > 0.5
        elif self.dtype in INTEGERS:
            high = self.below or (2**40 if self.dtype == "int64" else 2**20)
            low = 0 if self.below else -high
            values = torch.randint(
                low, high, stored, generator=generator, device=generator.device, dtype=dtype
            )
        else:
            values = torch.rand(stored, generator=generator, device=generator.device) * 2 - 1
        values = values.to(device=device, dtype=dtype)
        if self.layout == "transposed":
            return values.permute(*range(values.dim() - 1, -1, -1))
        return values[..., 1 : shape[-1] + 1] if self.layout == "sliced" else values

    def meta(self) -> torch.Tensor:
        """Without values; what an index is below is an attribute, for `_AsOnADevice`."""
        made = torch.empty(self.shape, dtype=getattr(torch, self.dtype), device="meta")
        made.below = self.below  # type: ignore[attr-defined]
        return made


@dataclass(frozen=True)
class Step:
    """`target = expression`; a step without a target is for its effect (an update in place)."""

    target: str
    expression: str

    def reads(self) -> set[str]:
        return set(re.findall(r"\b[a-z]\d+\b", self.expression))

    def __str__(self) -> str:
        return f"{self.target} = {self.expression}" if self.target else self.expression


@dataclass(frozen=True)
class Program:
    """A function of its inputs. `str(program)` is its text; `dynamic` marks the row axes so."""

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    dynamic: bool = False

    def __str__(self) -> str:
        names = ", ".join(x.name for x in self.inputs)
        lines = [f"    {step}" for step in self.steps]
        return "\n".join([f"def graph({names}):", *lines, f"    return {', '.join(self.outputs)},"])

    def script(self, options: dict[str, Any]) -> str:
        """A file that runs it, for a person to paste."""
        inputs = [
            f"{x.name} = ...  # {x.dtype}{list(x.shape)}"
            + (f", below {x.below}" if x.below else "")
            + (f", {x.layout}" if x.layout != "contiguous" else "")
            + (
                f", dimension {x.row_axis} dynamic"
                if self.dynamic and x.row_axis is not None
                else ""
            )
            for x in self.inputs
        ]
        names = ", ".join(x.name for x in self.inputs)
        return "\n".join(
            [str(self), *inputs, f"torch.compile(graph, options={options!r})({names})"]
        )

    def function(self, reference: bool = False) -> Callable[..., tuple[torch.Tensor, ...]]:
        """The function; as `reference`, every cast to a floating type is one to float64."""
        text = str(self)
        if reference:
            text = re.sub(r"torch\.(bfloat16|float16|float32)\b", "torch.float64", text)
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(text, "<graph>", "exec"), scope)
        return scope["graph"]


@dataclass(frozen=True)
class _Value:
    """What the generator knows of a variable; `exact`: no rounding on the way to it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    exact: bool

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


_REFUSALS = (
    RuntimeError, IndexError, TypeError, NotImplementedError, ValueError, AssertionError,
)  # fmt: skip


class _AsOnADevice(TorchFunctionMode):
    """Refuses what only meta tensors do: the variance of integers, a sort along a dimension that is
    not there, an index out of range."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name in ("var", "std") and not args[0].is_floating_point():
            raise TypeError(f"{name} of {args[0].dtype}")
        if name == "sort":
            args[0].size(args[1])
        for size, index in _looked_up(name, args):
            if (getattr(index, "below", None) or 0) > size:
                raise IndexError(f"{name} of {size}, below {index.below}")
        result = func(*args, **(kwargs or {}))
        if name == "__invert__":  # counts from the end
            result.below = getattr(args[0], "below", None)
        return result


def _looked_up(name: str, args: Any) -> Iterator[tuple[int, Any]]:
    """What is looked up in which size."""
    match name, args:
        case "__getitem__", (x, tuple() as indices):
            yield from zip(x.shape, indices)
        case ("__getitem__", (x, index)) | ("embedding", (index, x)):
            yield x.shape[0], index
        case "index_select" | "gather", (x, dim, index):
            yield x.shape[dim], index


class _Builder:
    """Adds steps, each tried on meta tensors first: what PyTorch refuses is not added."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self.inputs = tuple(inputs)
        self.steps: list[Step] = []
        self.values: dict[str, _Value] = {}
        self.meta: dict[str, torch.Tensor] = {}
        for x in inputs:
            self.meta[x.name] = x.meta()
            self.values[x.name] = _Value(x.name, x.shape, x.dtype, exact=True)

    def add(self, expression: str, exact: bool = False) -> _Value | None:
        try:
            with _AsOnADevice():
                result = eval(expression, {"torch": torch}, self.meta)
        except _REFUSALS:
            return None
        name = f"v{len(self.steps)}"
        self.steps.append(Step(name, expression))
        self.meta[name] = result
        dtype = str(result.dtype).removeprefix("torch.")
        value = self.values[name] = _Value(name, tuple(result.shape), dtype, exact)
        return value

    def effect(self, expression: str) -> bool:
        try:
            eval(expression, {"torch": torch}, self.meta)
        except _REFUSALS:
            return False
        self.steps.append(Step("", expression))
        return True


def _weighted(rnd: random.Random, choices: Mapping[Any, float]) -> Any:
    return rnd.choices(list(choices), list(choices.values()))[0]


def _sizes(rnd: random.Random, scale: str) -> tuple[int, int]:
    """Rows and columns."""
    if scale == "small":
        while True:
            rows, columns = rnd.choice(SMALL_ROWS), rnd.choice(SMALL_COLUMNS)
            # Reductions of at most 8 elements are unrolled: worth a look, not half of the time.
            if min(rows, columns) <= 8 and rnd.random() < 0.8:
                continue
            if rows * columns <= SMALL_ELEMENTS:
                return rows, columns
    columns = rnd.choice(FULL_COLUMNS)
    least = max(4096, 2 * columns, -(-5 * 2**20 // columns))
    most = max(FULL_ELEMENTS // columns, least + 2)
    rows = _weighted(
        rnd,
        {
            least: 2.0,
            least + 1: 2.0,
            least + 17: 1.0,
            least - 1: 0.3,
            (least // 128 + 1) * 128: 2.0,
            (least // 1056 + 3) * 1056 + 5: 1.0,
            rnd.randint(least, min(most, 2 * least)): 4.0,
            rnd.randint(least, most): 1.0,
        },
    )
    return rows, columns


def _split(rnd: random.Random, size: int) -> tuple[int, ...]:
    """One dimension, or two whose product it is."""
    factors = [f for f in (2, 3, 4, 8, 16, 24, 32) if size % f == 0 and size > f]
    if not factors or rnd.random() < 0.6:
        return (size,)
    factor = rnd.choice(factors)
    return (size // factor, factor)


_UNARY = {
    "{}.exp()": 2, "-{}": 1, "{}.abs()": 1, "{}.tanh()": 1, "{}.sigmoid()": 1, "{}.relu()": 1,
    "{0} * {0}": 2, "{}.cos()": 2, "{} + 1.0": 3, "{} * 0.5": 1, "1.0 - {}": 1,
    "torch.nn.functional.silu({})": 1,
}  # fmt: skip
_EXACT_UNARY = {"-{}", "{}.abs()", "{}.relu()"}
_INTEGER_UNARY = {"{} + 1": 1, "-{}": 1, "{} * 3": 1, "{}.abs()": 1}
_LEADING = {
    "sum": 0.62, "mean": 0.2, "prod": 0.06, "amax": 0.04, "amin": 0.02, "any": 0.02,
    "argmax": 0.01, "var": 0.02, "std": 0.01,
}  # fmt: skip
_ACCUMULATING = {"sum": 0.72, "mean": 0.22, "prod": 0.06}
_TRAILING = {
    "sum": 0.42, "mean": 0.15, "amax": 0.12, "amin": 0.05, "prod": 0.05, "any": 0.04,
    "argmax": 0.05, "var": 0.06, "std": 0.06,
}  # fmt: skip

# Of a value {0}, along its dimension {1}. {2} is a small count, {3} an index, {4} a slice of all of
# each earlier dimension.
_SCANS = {
    "{0}.cumsum({1})": 6, "torch.logcumsumexp({0}, {1})": 1, "({0} * 0.01 + 1.0).cumprod({1})": 2,
}  # fmt: skip
_MOVES = {
    "{0}.cummax({1}).values": 2, "{0}.cummin({1}).values": 1, "{0}.sort({1}).values": 2,
    "{0}.sort({1}, descending=True).values": 1, "{0}.topk({2}, {1}).values": 1,
    "{0}.flip({1})": 1, "torch.roll({0}, {2}, {1})": 2, "{0}.repeat_interleave({2}, {1})": 1,
}  # fmt: skip
_LOOKUPS = {
    "{0}[{4}{3}]": 3, "{0}[{4}~{3}]": 1, "torch.index_select({0}, {1}, {3})": 2,
    "{0}.gather({1}, {3})": 3, "torch.nn.functional.embedding({3}, {0})": 2,
}  # fmt: skip


def _pointwise(rnd: random.Random, b: _Builder, value: _Value, others: Sequence[_Value]) -> _Value:
    same = [o for o in others if o.name != value.name and o.dtype == value.dtype]
    if same and rnd.random() < 0.4:
        other = rnd.choice(same)
        if value.is_float and value.exact and rnd.random() < 0.2:
            text = f"torch.where({value.name} > 0, {value.name}, {other.name})"
            return b.add(text, exact=other.exact) or value
        op = "^" if value.dtype == "bool" else rnd.choice("+*-")
        return b.add(f"{value.name} {op} {other.name}", exact=not value.is_float) or value
    if value.is_float:
        text = _weighted(rnd, _UNARY)
        return b.add(text.format(value.name), exact=value.exact and text in _EXACT_UNARY) or value
    if value.dtype == "bool":
        return b.add(f"~{value.name}", exact=True) or value
    return b.add(_weighted(rnd, _INTEGER_UNARY).format(value.name), exact=True) or value


def _cast(rnd: random.Random, b: _Builder, value: _Value) -> _Value:
    targets = {"float32": 4, "bfloat16": 2, "float16": 1, "float64": 1}
    if not value.is_float:
        targets |= {"int64": 3}
    target = _weighted(rnd, targets)
    order = ("bool", "bfloat16", "float32", "float64")
    wider = (
        value.dtype in order and target in order and order.index(target) >= order.index(value.dtype)
    )
    return b.add(f"{value.name}.to(torch.{target})", exact=value.exact and wider) or value


def _reduce(
    rnd: random.Random, b: _Builder, value: _Value, dims: Sequence[int], kinds: dict[str, float]
) -> _Value | None:
    kind = _weighted(rnd, kinds)
    keepdim = ", keepdim=True" if rnd.random() < 0.3 else ""
    if not value.is_float and kind in ("mean", "var", "std"):
        kind = "sum"
    if kind in ("argmax", "any") and not value.exact:
        kind = "sum"
    if kind == "argmax" and value.dtype == "bool":  # PyTorch has none
        kind = "any"
    if len(dims) > 1:  # PyTorch takes one dimension for these
        kind = {"prod": "sum", "argmax": "amax"}.get(kind, kind)
    single = len(dims) == 1 and (kind in ("prod", "argmax") or rnd.random() < 0.7)
    over = dims[0] if single else tuple(dims)
    if kind == "prod" and value.is_float:  # near 1, or it would be 0 or infinite
        value = b.add(f"{value.name} * 0.01 + 1.0") or value
    if kind == "any":
        name = value.name if value.dtype == "bool" else f"({value.name} > 0)"
        return b.add(f"{name}.any({over}{keepdim})", exact=True)
    if kind in ("var", "std"):
        correction = rnd.choice(["", ", correction=0"])
        return b.add(f"{value.name}.{kind}({over}{correction}{keepdim})")
    exact = not value.is_float or (value.exact and kind in ("amax", "amin", "argmax"))
    return b.add(f"{value.name}.{kind}({over}{keepdim})", exact=exact)


def _reshaped(rnd: random.Random, b: _Builder, value: _Value, lead: int) -> tuple[_Value, int]:
    """A view, slice or permutation of a value, and how many of its dimensions are leading ones."""
    dims = len(value.shape)
    kind = _weighted(
        rnd, {"flat": 3, "rows": 2, "columns": 2, "step": 1, "swap": 2, "unsqueeze": 1}
    )
    name, exact = value.name, value.exact
    if kind == "flat":
        trail = value.shape[lead:]
        found = b.add(f"{name}.reshape(-1, {', '.join(map(str, trail))})", exact)
        return (found, 1) if found else (value, lead)
    if kind == "rows" and value.shape[0] > 2:
        return b.add(f"{name}[{rnd.choice(['1:', ':-1', '1:-1'])}]", exact) or value, lead
    if kind == "columns" and value.shape[-1] > 2:
        return b.add(f"{name}[..., {rnd.choice(['1:', ':-1'])}]", exact) or value, lead
    if kind == "step" and value.shape[-1] > 3:
        return b.add(f"{name}[..., ::2]", exact) or value, lead
    if kind == "swap" and dims - lead == 2:
        return b.add(f"{name}.transpose({dims - 2}, {dims - 1})", exact) or value, lead
    if kind == "swap" and lead == 2:
        return b.add(f"{name}.transpose(0, 1)", exact) or value, lead
    if kind == "unsqueeze" and dims < 4:
        return b.add(f"{name}.unsqueeze({lead})", exact) or value, lead
    return value, lead


def generate(rnd: random.Random, scale: str = "small") -> Program:
    """A program whose reductions have a chance of being fused in mixed order.

    `scale` is "small" (for the interpreter, in non-strict mode) or "full" (what default mode asks
    for: at least 4096 rows, 2 a column, 5 * 2**20 elements).
    """
    rows, columns = _sizes(rnd, scale)
    leading, trailing = _split(rnd, rows), _split(rnd, columns)
    lead = len(leading)
    shape = (*leading, *trailing)
    dtype = _weighted(
        rnd,
        {
            "float32": 35,
            "bfloat16": 30,
            "float16": 12,
            "float64": 8,
            "int64": 6,
            "int32": 4,
            "bool": 5,
        },
    )
    layouts = {"contiguous": 91, "transposed": 4, "sliced": 5}
    inputs = [Input("x0", shape, dtype, _weighted(rnd, layouts), 0)]
    if rnd.random() < 0.45:
        other = dtype if rnd.random() < 0.7 else _weighted(rnd, {"float32": 2, "bfloat16": 1})
        inputs.append(Input("x1", shape, other, _weighted(rnd, layouts), 0))
    if rnd.random() < 0.4:
        name = f"x{len(inputs)}"
        if rnd.random() < 0.6:
            inputs.append(Input(name, trailing, dtype))
        else:
            inputs.append(Input(name, (*leading, *[1] * len(trailing)), dtype, "contiguous", 0))
    b = _Builder(inputs)
    updated = _update_in_place(rnd, b, 0.06)

    start = b.values["x0"]
    if rnd.random() < 0.3:
        start, lead = _reshaped(rnd, b, start, lead)
    pool = [start, *(v for v in b.values.values() if v.shape == start.shape and v is not start)]
    pool = [v for v in pool if v.shape == start.shape]
    for _ in range(rnd.randint(0, 4)):
        value = rnd.choice(pool)
        made = _cast(rnd, b, value) if rnd.random() < 0.15 else _pointwise(rnd, b, value, pool)
        if made.shape == start.shape:
            pool.append(made)
    if start.is_float and rnd.random() < 0.35:  # a statistic of each row that all of it uses
        value = rnd.choice([v for v in pool if v.is_float])
        dims = tuple(range(lead, len(start.shape)))
        row = b.add(f"({value.name} * {value.name}).mean({dims}, keepdim=True)")
        scaled = row and b.add(f"{value.name} * torch.rsqrt({row.name} + 1e-5)")
        if scaled:
            pool.append(scaled)

    leading_dims, trailing_dims = list(range(lead)), list(range(lead, len(start.shape)))
    results: list[_Value] = []
    jobs = [(leading_dims, _LEADING), (trailing_dims, _TRAILING)]
    jobs += rnd.choices(jobs, k=rnd.choice([0, 0, 1, 1, 2]))
    if rnd.random() < 0.8:  # mostly with a reduction that fuses
        jobs[0] = (leading_dims, _ACCUMULATING)
    rnd.shuffle(jobs)
    for over, kinds in jobs:
        result = _reduce(rnd, b, rnd.choice(pool), over, kinds)
        if result:
            results.append(result)
    if not updated:
        _update_in_place(rnd, b, 0.08, results)
    outputs = _after(rnd, b, results, pool)
    program = Program(b.inputs, tuple(b.steps), tuple(outputs), rnd.random() < 0.25)
    return prune(program)


def generate_sums(rnd: random.Random, scale: str = "small") -> Program:
    """A program that writes a tensor, made of its rows' statistics or not, and sums over its rows
    what it makes of that tensor: element by element, or of a part, a view or another order of it.

    `scale` is as in `generate`.
    """
    rows, columns = _sizes(rnd, scale)
    leading, trailing = _split(rnd, rows), _split(rnd, columns)
    shape = (*leading, *trailing)
    dtype = _weighted(rnd, {"float32": 50, "bfloat16": 30, "float16": 12, "float64": 8})
    layouts = {"contiguous": 93, "transposed": 3, "sliced": 4}
    inputs = [Input("x0", shape, dtype, _weighted(rnd, layouts), 0)]
    for chance, size, axis in (
        (0.7, shape, 0),
        (0.3, shape, 0),
        (0.5, trailing, None),
        (0.3, (*leading, *[1] * len(trailing)), 0),
    ):
        if rnd.random() < chance:
            other = dtype if rnd.random() < 0.8 else _weighted(rnd, {"float32": 2, "bfloat16": 1})
            inputs.append(Input(f"x{len(inputs)}", size, other, "contiguous", axis))
    b = _Builder(inputs)
    lead = len(leading)
    leading_dims, trailing_dims = list(range(lead)), list(range(lead, len(shape)))

    pool = list(b.values.values())
    made = b.values["x0"]
    for _ in range(rnd.randint(0, 2)):
        made = _joined(rnd, b, made, pool)
    if rnd.random() < 0.8:
        of = _joined(rnd, b, made, pool)
        row = b.add(f"({of.name} * {of.name}).mean({tuple(trailing_dims)}, keepdim=True)")
        scaled = row and b.add(f"{made.name} * torch.rsqrt({row.name} + 1e-5)")
        made = scaled or made
    results: list[_Value] = []
    if rnd.random() < 0.7:  # the producer has sums of its own
        for _ in range(rnd.randint(1, 2)):
            of = _joined(rnd, b, b.values["x0"], pool)
            result = _reduce(rnd, b, of, leading_dims, _ACCUMULATING)
            if result:
                results.append(result)
    if rnd.random() < 0.3:
        made = _cast(rnd, b, made)
    written = made
    pool.append(written)

    for _ in range(rnd.randint(1, 3)):
        value, over = written, leading_dims
        if rnd.random() < 0.35:
            value, count = _reshaped(rnd, b, value, lead)
            over = list(range(count))
        for _ in range(_weighted(rnd, {0: 4, 1: 4, 2: 2})):
            same = [v for v in pool if v.shape == value.shape]
            cast = rnd.random() < 0.2
            value = _cast(rnd, b, value) if cast else _joined(rnd, b, value, same or [value])
        if rnd.random() < 0.1:
            over = trailing_dims
        kinds = _ACCUMULATING if rnd.random() < 0.9 else _LEADING
        result = _reduce(rnd, b, value, over, kinds)
        if result:
            results.append(result)
    if not results:
        results.append(b.add(f"{written.name}.sum(0)") or written)
    _update_in_place(rnd, b, 0.06, results)
    outputs = _after(rnd, b, results, [written])
    if rnd.random() < 0.75:
        outputs.append(written.name)
    if rnd.random() < 0.2:
        other_reader = b.add(f"{written.name}.cos()")
        outputs += [other_reader.name] if other_reader else []
    if rnd.random() < 0.06 and b.effect(f"{written.name}.mul_(2)"):
        outputs.append(written.name)
    names = tuple(dict.fromkeys(outputs))
    return prune(Program(b.inputs, tuple(b.steps), names, rnd.random() < 0.25))


def generate_scans(rnd: random.Random, scale: str = "small") -> Program:
    """A program that scans, sorts and looks up what it reads, along any dimension, and reduces both
    what it made and what it made it of.

    `scale` is as in `generate`; a quarter have their rows and columns exchanged: few long rows.
    """
    rows, columns = _sizes(rnd, scale)
    if rnd.random() < 0.25:
        rows, columns = columns, rows
    leading, trailing = _split(rnd, rows), _split(rnd, columns)
    shape, lead = (*leading, *trailing), len(leading)
    dtype = _weighted(
        rnd,
        {
            "float32": 40,
            "bfloat16": 30,
            "float16": 14,
            "float64": 6,
            "int64": 5,
            "int32": 2,
            "bool": 3,
        },
    )
    layouts = {"contiguous": 91, "transposed": 4, "sliced": 5}
    table = (rnd.choice(SMALL_ROWS), *shape[1:])
    inputs = [
        Input("x0", shape, dtype, _weighted(rnd, layouts), 0),
        Input("x1", shape, dtype if rnd.random() < 0.7 else "float32", row_axis=0),
        Input("x2", table, dtype),
        Input("x3", shape[:1], rnd.choice(INTEGERS), row_axis=0, below=table[0]),
    ]
    for dim in (0, len(shape) - 1):
        grows, below = None if dim else 0, shape[dim]
        inputs += [
            Input(f"x{len(inputs)}", (below,), rnd.choice(INTEGERS), row_axis=grows, below=below),
            Input(f"x{len(inputs) + 1}", shape, "int64", row_axis=0, below=below),
        ]
    inputs.append(Input(f"x{len(inputs)}", (*shape[:-1], 1), "int64", row_axis=0, below=shape[-1]))
    b = _Builder(inputs)
    updated = _update_in_place(rnd, b, 0.04)

    pool = [b.values["x0"], b.values["x1"]]
    if rnd.random() < 0.3:
        pool.append(b.add("x2[x3]", exact=True) or pool[0])
    moved: list[_Value] = []
    for _ in range(rnd.randint(1, 3)):
        for _ in range(rnd.randint(0, 2)):
            value = rnd.choice(pool)
            cast = rnd.random() < 0.15
            pool.append(_cast(rnd, b, value) if cast else _pointwise(rnd, b, value, pool))
        made = _moved(rnd, b, rnd.choice([*pool, pool[0]]))
        moved.append(made)
        if made.shape == shape:
            pool.append(made)

    dims = list(range(len(shape)))
    jobs = [(dims[:lead], _ACCUMULATING), (dims[lead:], _TRAILING)]
    jobs += rnd.choices([(dims[:lead], _LEADING), jobs[1]], k=rnd.choice([0, 0, 1, 2]))
    results: list[_Value] = []
    for over, kinds in rnd.sample(jobs, k=len(jobs) - (rnd.random() < 0.2)):
        result = _reduce(rnd, b, rnd.choice([*pool, *moved]), over, kinds)
        if result:
            results.append(result)
    if not updated:
        _update_in_place(rnd, b, 0.04, results)
    outputs = _after(rnd, b, results, pool)
    outputs += [value.name for value in moved if rnd.random() < 0.5]
    outputs = outputs or [moved[-1].name]
    names = tuple(dict.fromkeys(outputs))
    return prune(Program(b.inputs, tuple(b.steps), names, rnd.random() < 0.25))


def _moved(rnd: random.Random, b: _Builder, value: _Value) -> _Value:
    """A scan, a sort or a lookup of a value along one of its dimensions."""
    dims = len(value.shape)
    dim = rnd.randrange(dims)
    text = _weighted(rnd, rnd.choice([_SCANS, _MOVES, _LOOKUPS]))
    if not value.is_float and text in _SCANS:  # the others are of floats
        text = "{0}.cumsum({1})"
    if value.dtype == "bool" and "topk" in text:  # PyTorch has none on a CPU
        text = "{0}.sort({1}).values"
    whole = "gather" in text
    fits = [
        x.name
        for x in b.inputs
        if x.below and x.below <= value.shape[dim] and (len(x.shape) == dims) == whole
    ]
    if text in _LOOKUPS and not fits:
        return value
    index = rnd.choice(fits) if text in _LOOKUPS else ""
    exact = not value.is_float or (value.exact and text not in _SCANS)
    filled = text.format(value.name, dim, rnd.randint(2, 5), index, ":, " * dim)
    return b.add(filled, exact) or value


def _joined(rnd: random.Random, b: _Builder, value: _Value, pool: Sequence[_Value]) -> _Value:
    """`value`, or what a pointwise operation makes of it, perhaps with others of its shape or
    shapes that it broadcasts."""
    roll = rnd.random()
    if roll < 0.3:
        return value
    others = [o for o in pool if o.name != value.name and o.is_float]
    if others and roll < 0.75:
        text = rnd.choice(["{} * {}", "{} + {}", "{} - {}", "torch.where({1} > 0, {0}, 0.0)"])
        made = b.add(text.format(value.name, rnd.choice(others).name))
        return made if made and made.shape == value.shape else value
    return b.add(_weighted(rnd, _UNARY).format(value.name)) or value


def _update_in_place(
    rnd: random.Random, b: _Builder, chance: float, results: Sequence[_Value] = ()
) -> bool:
    if rnd.random() >= chance:
        return False
    target = rnd.choice([x for x in b.inputs if not x.below])
    fits = [r for r in results if r.shape == target.shape and r.dtype == target.dtype]
    if fits:
        return b.effect(f"{target.name}.copy_({rnd.choice(fits).name})")
    part = [r for r in results if r.dtype == target.dtype and r.shape == target.shape[1:]]
    if part:
        return b.effect(f"{target.name}[0].copy_({rnd.choice(part).name})")
    update = rnd.choice(["add_(1)", "mul_(2)"])
    done = target.dtype != "bool" and b.effect(f"{target.name}.{update}")
    if done:
        old = b.values[target.name]
        b.values[target.name] = dataclasses.replace(old, exact=not old.is_float)
    return done


def _after(
    rnd: random.Random, b: _Builder, results: Sequence[_Value], pool: Sequence[_Value]
) -> list[str]:
    """Pointwise, casts and joins on what was reduced; the names of all outputs."""
    outputs: list[str] = []
    for value in results:
        roll = rnd.random()
        vectors = [
            v for v in b.values.values() if v.shape == value.shape and v.dtype == value.dtype
        ]
        if roll < 0.2 and value.is_float:
            text = rnd.choice(["{} * 0.5", "{} + 1.0", "-{}", "{}.abs()", "{0} * {0}"])
            value = b.add(text.format(value.name)) or value
        elif roll < 0.3 and len(vectors) > 1 and value.dtype != "bool":
            value = b.add(f"{value.name} + {rnd.choice(vectors).name}", not value.is_float) or value
        elif roll < 0.4 and value.shape:
            other = rnd.choice(vectors)
            joined = rnd.choice(["torch.cat", "torch.stack"])
            value = b.add(f"{joined}([{value.name}, {other.name}])", value.exact) or value
        elif roll < 0.48 and value.is_float:
            value = _cast(rnd, b, value)
        elif roll < 0.53 and value.shape:
            value = b.add(f"{value.name}.reshape(-1)", value.exact) or value
        outputs.append(value.name)
    if rnd.random() < 0.25:
        made = [v.name for v in pool if v.name.startswith("v")]
        if made:
            outputs.append(rnd.choice(made))
    return list(dict.fromkeys(outputs))


def prune(program: Program) -> Program:
    """Without the steps and inputs that no output and no update in place needs."""
    inputs = {x.name for x in program.inputs}
    needed = set(program.outputs)
    kept: list[Step] = []
    for step in reversed(program.steps):
        if not step.target or step.target in needed:
            kept.append(step)
            needed |= step.reads()
    used = tuple(x for x in program.inputs if x.name in needed & inputs)
    return dataclasses.replace(
        program, inputs=used or program.inputs[:1], steps=tuple(reversed(kept))
    )


def smaller(program: Program) -> Iterator[Program]:
    """Simpler programs: fewer outputs, fewer steps, plainer inputs, static, fewer rows and columns.

    Each is one change away, and valid; the largest changes come first.
    """
    for i in range(len(program.outputs)):
        if len(program.outputs) > 1:
            rest = program.outputs[:i] + program.outputs[i + 1 :]
            yield prune(dataclasses.replace(program, outputs=rest))
    if program.dynamic:
        yield dataclasses.replace(program, dynamic=False)
    for candidate in _without_a_step(program):
        if _valid(candidate):
            yield candidate
    for i, x in enumerate(program.inputs):
        for plainer in (
            dataclasses.replace(x, layout="contiguous"),
            dataclasses.replace(x, dtype=x.dtype if x.below or x.dtype == "bool" else "float32"),
        ):
            if plainer != x:
                inputs = (*program.inputs[:i], plainer, *program.inputs[i + 1 :])
                candidate = dataclasses.replace(program, inputs=inputs)
                if _valid(candidate):
                    yield candidate
    for candidate in _with_fewer_elements(program):
        if _valid(candidate):
            yield candidate


def _without_a_step(program: Program) -> Iterator[Program]:
    for i, step in enumerate(program.steps):
        rest = program.steps[:i] + program.steps[i + 1 :]
        if not step.target:
            yield prune(dataclasses.replace(program, steps=rest))
            continue
        for name in sorted(step.reads()):
            pattern = re.compile(rf"\b{step.target}\b")
            steps = tuple(
                dataclasses.replace(s, expression=pattern.sub(name, s.expression)) for s in rest
            )
            outputs = tuple(name if o == step.target else o for o in program.outputs)
            if not any(o.startswith("x") for o in outputs):
                outputs = tuple(dict.fromkeys(outputs))
                yield prune(dataclasses.replace(program, steps=steps, outputs=outputs))


def _with_fewer_elements(program: Program) -> Iterator[Program]:
    sizes = sorted({size for x in program.inputs for size in x.shape if size > 1}, reverse=True)
    for size in sizes:
        for less in dict.fromkeys([2 ** (size.bit_length() - 1), size // 2, size - 1]):
            if 0 < less < size:
                inputs = tuple(
                    dataclasses.replace(
                        x,
                        shape=tuple(less if s == size else s for s in x.shape),
                        below=less if x.below == size else x.below,
                    )
                    for x in program.inputs
                )
                steps = tuple(
                    dataclasses.replace(
                        s, expression=re.sub(rf"(?<=[ (]){size}(?=[,)])", str(less), s.expression)
                    )
                    for s in program.steps
                )
                yield dataclasses.replace(program, inputs=inputs, steps=steps)


def _valid(program: Program) -> bool:
    try:
        with _AsOnADevice():
            outputs = program.function()(*(x.meta() for x in program.inputs))
    except _REFUSALS:
        return False
    return all(math.prod(o.shape) > 0 for o in outputs)
