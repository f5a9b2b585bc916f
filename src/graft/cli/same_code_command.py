"""What `graft same-code` does with its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graft.devtools import same_code, snapshots
from graft.devtools.same_code import KINDS, Comparison, Wanted
from graft.errors import GraftError
from graft.stack.trees import tree
from graft.upstream import comparison

SHOWN = 3
"""Differences whose lines are printed, unlike each other."""

SHOWN_LINES = 16
_STYLES = {"+": "green", "-": "red", "@": "cyan", "=": "bold"}


def same_code_of(
    a: str,
    b: str,
    prefix: Path,
    wanted: Wanted,
    *,
    workers: int | None,
    seconds: float | None,
    anew: bool,
    out: Path | None,
    file: Path | None,
    console: Console,
    say: Callable[[str], None],
) -> Comparison:
    """Compare, write the differences and `file`, print the tables.

    Raises GraftError where a code differs, or an item was not reached.
    """
    built = tree.load(prefix)
    names = (a, b)
    first, second = (snapshots.find(name, built.base, built.pin, built.prefix) for name in names)
    for name, side in zip("AB", (first, second), strict=True):
        console.print(f"{name}  {escape(side.what)}, stack {side.hash[:12]}", highlight=False)
    if first.hash == second.hash:
        console.print("the same files: captured twice, to see that nothing else decides")
    found = same_code.compare(
        (first, second),
        built.base,
        wanted,
        workers=workers,
        seconds=seconds,
        anew=anew,
        say=say,
    )
    folder = out or snapshots.folder() / "differences"
    same_code.write(found, folder)
    if file:
        comparison.write(same_code.as_json(found), file)
    show(found, folder, console)
    if found.differences:
        count = len(found.differences)
        raise GraftError(f"{count} codes are not the same", f"look into {folder}")
    if found.pending:
        raise GraftError(f"{found.pending} were not reached", "the same command goes on")
    return found


def show(found: Comparison, folder: Path, console: Console) -> None:
    """Print the counts, how long the captures took, and the differences in short."""
    table = Table("group", "GPU", *KINDS, box=None, pad_edge=False)
    for (group, gpu), counts in found.counts.items():
        bad = counts["different"] or counts["failed on one"]
        cells = [str(counts[kind]) for kind in KINDS]
        table.add_row(group, gpu, *cells, style="bold red" if bad else None)
    console.print(table)
    for (group, side), count in sorted(found.captured.items()):
        seconds = found.seconds[group, side]
        console.print(
            f"{group}, {side}: {count} captured in {seconds:.0f} s of a core, "
            f"{seconds / count:.2f} s each",
            highlight=False,
        )
    console.print(f"{found.wall_s:.0f} s; what was captured is kept", highlight=False)
    if found.differences:
        _show_differences(found.differences, folder, console)


def _show_differences(
    differences: Sequence[same_code.Difference], folder: Path, console: Console
) -> None:
    by_part = {part: sum(part in each.parts for each in differences) for part in same_code.PARTS}
    said = ", ".join(f"{part}: {count}" for part, count in by_part.items() if count)
    console.print(f"\n{len(differences)} differences ({said or 'none with code on both'})")
    unlike = list(same_code.distinct(differences))
    for each, count in unlike[:SHOWN]:
        more = f", and {count - 1} like it" if count > 1 else ""
        parts = f" ({', '.join(each.parts)})" if each.parts else ""
        console.print(f"\n[bold]{escape(each.item)} on {each.gpu}[/]: {each.kind}{parts}{more}")
        for line in each.diff[:SHOWN_LINES]:
            console.print(escape(line[:160]), style=_STYLES.get(line[:1]), highlight=False)
        if len(each.diff) > SHOWN_LINES:
            console.print(f"… {len(each.diff) - SHOWN_LINES} lines more", style="dim")
    if len(unlike) > SHOWN:
        console.print(f"\n{len(unlike) - SHOWN} more that are unlike these")
    console.print(f"each in a file of {folder}", soft_wrap=True)
