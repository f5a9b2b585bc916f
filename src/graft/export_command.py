"""What `graft export` and `graft submit` print."""

from __future__ import annotations

from pathlib import Path

import click

from graft import export, pins, stack
from graft.export import Export
from graft.pins import DEFAULT_PIN


def run_export(
    path: Path, pin: str | None, branch: str | None, onto: str | None, force: bool
) -> None:
    """Put the series on a branch, and say what became of each patch."""
    series = stack.load(pins.load(pin or DEFAULT_PIN))
    made, name, moved = export.export(path, series, branch=branch, onto=onto, force=force)
    show(made)
    made.check()
    base = made.onto.name if made.onto else series.pin.commit[:12]
    says = "" if moved else " already"
    click.echo(f"{name} is{says} these {len(made.commits)} commits on {base}")
    click.echo(f"git -C {path} log {base}..{name}")


def show(made: Export) -> None:
    """A line a patch: what became of it, and where."""
    width = max(len(each.state) for each in made.outcomes)
    for each in made.outcomes:
        click.echo(f"{each.state:{width}}  {each.patch.name}")
        for place in each.places:
            click.echo(f"{'':{width}}    {place}")
