"""Options that several commands of `graft bench` have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

out: Decorator = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Result file. What is there already is not measured again.",
)
again: Decorator = click.option(
    "--again", is_flag=True, help="Discard what --out holds and measure anew."
)
gpus: Decorator = click.option(
    "--gpus", default="", help="Indices by commas; all that are visible by default."
)
# None is graft.cli's default, which asks where the command itself is.
prefix: Decorator = click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    default=None,
    show_default="build/",
    help="The patched tree.",
)


def jobs(default: int, what: str) -> Decorator:
    """How many of `what` are under way on a GPU."""
    return click.option(
        "--jobs-per-gpu",
        "jobs",
        default=default,
        show_default=True,
        type=click.IntRange(1),
        help=f"{what} under way on a GPU: compiles overlap, what happens on the GPU never does.",
    )


def peers(of: str) -> Decorator:
    """A folder of wheels of `of` and of what they need."""
    return click.option(
        "--peers",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        help=f"A folder of wheels of {of} need.",
    )
