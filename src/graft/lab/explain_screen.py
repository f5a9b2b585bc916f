"""Prints what `graft explain` found: one screen, what changed first."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from graft.lab.explain import Check, Kernel, Report, Side
from graft.lab.explain import Progress as Callback

# Rows of a table before the rest is left to --kernels, so that all of it is one screen.
_ROWS = 12
# What a table of kernels says of each, by heading.
_COLUMNS: dict[str, Callable[[Kernel], str]] = {
    "calls": lambda kernel: str(kernel.launches),
    "kind": lambda kernel: kernel.kind,
    "xnumel": lambda kernel: str(kernel.facts["xnumel"]),
    "rnumel": lambda kernel: str(kernel.facts["rnumel"]),
    "loads": lambda kernel: str(kernel.loads),
    "sums": lambda kernel: str(kernel.partial_sums or ""),
    "MB": lambda kernel: f"{kernel.facts['bytes'] / 1e6:.1f}",
    "regs": lambda kernel: _range(kernel.taken("registers_per_thread")),
    "spill": lambda kernel: _range(kernel.taken("spill_bytes")),
    "occ": lambda kernel: _range([round(100 * s) for s in kernel.taken("occupancy")], "%"),
    "us": lambda kernel: f"{kernel.time_us or 0.0:.1f}",
}
# What a narrow terminal goes without, first to last.
_LEAST_NEEDED = (
    *("sums", "rnumel", "xnumel", "occ", "calls"),
    *("spill", "kind", "MB", "regs", "loads", "us"),
)
# Characters of a kernel's name that a narrow terminal keeps, before it keeps a column.
_NAME_WIDTH = 20
# A line of a file or a pipe is as long as what it says; no table is as wide as this.
_UNLIMITED = 10_000
# Where in a worker's life each thing that it does begins, and how much of it that takes.
_PHASES = {
    "importing": (0.0, 0.1),
    "compiling": (0.1, 0.5),
    "assembling": (0.6, 0.4),
    "timing": (0.95, 0.05),
    "done": (1.0, 0.0),
}


def console() -> Console:
    """For standard output: as wide as a terminal is; a file or a pipe gets all of each line."""
    return Console(width=None if sys.stdout.isatty() else _UNLIMITED)


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Callback]:
    """A bar a process while they run; nothing stays on the screen."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, int] = {}

        def update(side: str, share: float, what: str) -> None:
            if side not in tasks:
                tasks[side] = bars.add_task(side, total=1.0)
            start, length = _PHASES.get(what, (0.0, 0.0))
            bars.update(
                tasks[side],  # type: ignore[arg-type]
                completed=start + length * min(share, 1.0),
                description=f"{side}: {what}",
            )

        yield update


def show(report: Report, console: Console, every_kernel: bool = False) -> None:
    """One screen; with `every_kernel`, all kernels and all reasons."""
    # A file's own function has sizes and dtypes of its own.
    size = f" {' x '.join(map(str, report.shape))} {report.dtype}" if report.shape else ""
    where = f"{report.gpu}, described" if report.described else report.gpu
    console.print(f"[bold]{report.case}[/]{size} on {where}")
    console.print(_summary(report))
    rows = None if every_kernel else _ROWS
    if report.gone or report.new:
        console.print(f"changed: {len(report.gone)} kernels gone, {len(report.new)} new")
        gone, new = _first(report.gone), _first(report.new)
        if rows:
            gone = gone[: max(rows // 2, rows - len(new))]
            new = new[: rows - len(gone)]
        changed = [("-", kernel) for kernel in gone] + [("+", kernel) for kernel in new]
        console.print(_kernels(changed, len(report.gone) + len(report.new), console.width))
    else:
        console.print("the stack changes no kernel of it")
    same = [(" ", kernel) for kernel in _first(report.same)]
    if same and (every_kernel or not (report.gone or report.new)):
        console.print(_kernels(same[:rows], len(same), console.width))
    shown = [*report.gone, *report.new, *report.same]
    if shown and (every_kernel or report.gone or report.new or same):
        console.print(_legend(shown, report.described))
    if report.stock.refusals or report.patched.refusals:
        console.print(_refusals(report, rows))
    for name, side in (("stock", report.stock), ("patched", report.patched)):
        for kernel in side.uncompilable:
            error = Text(f"{name}: {kernel.name} does not compile: {kernel.compile_error}", "red")
            console.print(error, soft_wrap=True)
    if not every_kernel:
        console.print(Text("every kernel: --kernels; the sources: --json FILE", style="dim"))


def show_checks(checks: Sequence[Check], gpu: str, console: Console) -> None:
    """A line a case and torch, then the differences."""
    for each in checks:
        verdict = "same" if each.is_same else "[red]DIFFERENT[/]"
        console.print(
            f"{each.case:24} {each.side:8} {each.graphs} graphs, "
            f"{each.kernels:3} kernels: {verdict}"
        )
    for each in checks:
        if each.difference:
            console.print(Text(f"{each.case}, {each.side}:\n{each.difference}"))
    same = sum(each.is_same for each in checks)
    console.print(
        f"{same} of {len(checks)}: compiled offline for {gpu}, the code is what was generated on it"
    )


def _first(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Mix-order kernels first, then by the bytes that they move."""
    return sorted(kernels, key=lambda kernel: (kernel.kind != "mix-order", -kernel.bytes))


def _summary(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for side in ("stock", "patched"):
        table.add_column(side, justify="right")
    rows: list[tuple[str, Callable[[Side], str]]] = [
        ("launches of generated kernels", lambda s: str(sum(k.launches for k in s.kernels))),
        ("  distinct kernels", lambda s: str(len(s.kernels))),
        ("  mix-order", lambda s: str(sum(k.launches for k in s.mix_order))),
        ("  most loads of a mix-order kernel", lambda s: _most(k.loads for k in s.mix_order)),
        (
            "  their partial sums",
            lambda s: str(sum(k.partial_sums * k.launches for k in s.mix_order)),
        ),
        (
            "  most registers a thread of a mix-order kernel",
            lambda s: _most(r for k in s.mix_order for r in k.taken("registers_per_thread")),
        ),
        (
            "  launches of kernels that spill",
            lambda s: str(sum(k.launches for k in s.kernels if k.spill_bytes)),
        ),
        ("  bytes that they move, GB", lambda s: f"{sum(k.bytes for k in s.kernels) / 1e9:.2f}"),
        ("other calls (matrix products, attention)", lambda s: str(s.extern_calls)),
        ("refused mix-order fusions", lambda s: str(sum(s.refusals.values()))),
        ("Inductor's compile time, s", lambda s: f"{s.compile_seconds:.1f}"),
    ]
    if not report.described:
        rows.append(("GPU time of a step, ms", lambda s: f"{_total_us(s) / 1e3:.3f}"))
    for label, value in rows:
        before, after = value(report.stock), value(report.patched)
        changed = before != after and "compile time" not in label
        table.add_row(label, before, f"[bold]{after}[/]" if changed else after)
    return table


def _total_us(side: Side) -> float:
    return float(sum(side.answer["times_us"].values()))


def _most(values: Iterator[int]) -> str:
    return str(max(values, default="-"))  # type: ignore[type-var]


def _kernels(shown: Sequence[tuple[str, Kernel]], of: int, width: int) -> Group:
    """A row a kernel, in `width` characters: a column is shown whole or left out, and named.

    There are `of` kernels.
    """
    names = [kernel.name.removeprefix("triton_") for _, kernel in shown]
    cells = {title: [cell(kernel) for _, kernel in shown] for title, cell in _COLUMNS.items()}
    if all(kernel.time_us is None for _, kernel in shown):
        del cells["us"]
    widths = {title: max(map(len, (title, *column))) for title, column in cells.items()}
    longest = max(map(len, ("kernel", *names)))
    kept = _that_fit(widths, width - len("+ ") - min(longest, _NAME_WIDTH))
    room = width - len("+ ") - sum(1 + widths[title] for title in kept)
    name_width = min(longest, max(room, len("kernel")))
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="dim")
    table.add_column("", width=1)
    table.add_column("kernel", no_wrap=True, width=name_width)
    for title in kept:
        side: Literal["left", "right"] = "left" if title == "kind" else "right"
        table.add_column(title, justify=side, no_wrap=True, width=widths[title])
    style = {"-": "red", "+": "green"}
    for row, (mark, _) in enumerate(shown):
        facts = [cells[title][row] for title in kept]
        table.add_row(mark, _short(names[row], name_width), *facts, style=style.get(mark))
    notes = []
    if more := of - len(shown):
        notes.append(f"and {more} more")
    if missing := [title for title in cells if title not in kept]:
        notes.append(f"{width} columns have no room for {', '.join(missing)}")
    return Group(table, Text("; ".join(notes), style="dim")) if notes else Group(table)


def _legend(kernels: Sequence[Kernel], described: bool) -> Text:
    """What the columns are, and that none of them is a time where there is none."""
    words = "columns: MB a call; registers and spilled bytes a thread; warps on an SM, of the most"
    if any(kernel.time_us is not None for kernel in kernels):
        words += "; us of all calls"
    elif described:
        words += (
            "\nmore registers and less occupancy are no loss: few large programs have as many "
            "loads in flight; times need a GPU"
        )
    return Text(words, style="dim")


def _that_fit(widths: Mapping[str, int], width: int) -> list[str]:
    """The headings to keep of `widths`, so that all fit in `width`, a space before each."""
    kept = list(widths)
    for title in _LEAST_NEEDED:
        if sum(1 + widths[each] for each in kept) > width and title in kept:
            kept.remove(title)
    return kept


def _short(name: str, width: int) -> str:
    """At most `width` of `per_fused_mean_mul_3`, its number kept."""
    if len(name) <= width:
        return name
    number = name[name.rindex("_") :] if "_" in name else ""
    return name[: max(width - len(number) - 1, 0)] + "…" + number


def _range(values: Sequence[int], unit: str = "") -> str:
    """One number, or the least and the most over the configurations that would be tried."""
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low}{unit}" if low == high else f"{low}-{high}{unit}"


def _refusals(report: Report, rows: int | None) -> Group:
    stock, patched = _alike(report.stock.refusals), _alike(report.patched.refusals)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("refused with a mix-order reduction, because")
    table.add_column("stock", justify="right")
    table.add_column("patched", justify="right")
    patterns = sorted(
        {*stock, *patched},
        key=lambda p: (_count(stock, p) == _count(patched, p), -_count(stock, p), p),
    )
    for pattern in patterns[:rows]:
        reason = _reason([*stock.get(pattern, {}), *patched.get(pattern, {})])
        table.add_row(reason, str(_count(stock, pattern)), str(_count(patched, pattern)))
    more = len(patterns) - len(patterns[:rows])
    return Group(table, Text(f"and {more} more reasons", style="dim")) if more else Group(table)


_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")


def _alike(reasons: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Reasons that differ in their numbers alone, together."""
    found: dict[str, dict[str, int]] = {}
    for reason, count in reasons.items():
        found.setdefault(_NUMBER.sub("#", reason), {})[reason] = count
    return found


def _count(reasons: Mapping[str, Mapping[str, int]], pattern: str) -> int:
    return sum(reasons.get(pattern, {}).values())


def _reason(reasons: Sequence[str]) -> str:
    """The first reason, with the least and the most of each number that differs in the others."""
    numbers = zip(*([int(n) for n in _NUMBER.findall(reason)] for reason in reasons), strict=True)
    ranges = (_range(each) for each in numbers)
    return _NUMBER.sub(lambda match: next(ranges), reasons[0])
