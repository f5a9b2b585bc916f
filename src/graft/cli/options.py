"""What several commands have in common: options, and how they say how far they are."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graft.errors import UsageError, nearest
from graft.places import ROOT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

_LOG_EVERY_S = 30.0


class Commands(click.Group):
    """A group that suggests the nearest name for an unknown one."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(ctx, name) is None:
            raise UsageError(
                f"{ctx.command_path} has no command {name}{nearest(name, self.list_commands(ctx))}",
                next=f"{ctx.command_path} --help",
            )
        return super().resolve_command(ctx, args)


class OutputFile(click.Path):
    """A file to write in the end: that it can be is seen before minutes of work."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not os.access(folder, os.W_OK):
            why = "cannot be written to" if folder.is_dir() else "is no folder"
            raise UsageError(f"{path}: {folder} {why}", "a file in a folder that is there")
        return path


def default_prefix() -> Path:
    """The tree whose ``bin/graft`` this is, or build/."""
    from graft.stack.trees import tree

    here = Path(sys.argv[0]).resolve().parent.parent
    return here if (here / tree.MANIFEST).is_file() else ROOT / "build"


prefix = click.option(
    "--prefix",
    type=click.Path(path_type=Path),
    default=default_prefix,
    show_default="build/",
    help="The patched tree.",
)
pin = click.option("--pin", "pin_name", default=None, help="The pin, if not the tree's.")
series = click.option(
    "--series", metavar="NAME", help="One series, by its name in patches/<pin>/series."
)


def progress(console: Console, status: Status) -> Callable[[str], None]:
    """What shows how far a long command is: its status, or, in a log, a line each half minute."""
    last = time.monotonic()

    def say(line: str) -> None:
        nonlocal last
        if console.is_terminal:
            status.update(line)
        elif time.monotonic() - last >= _LOG_EVERY_S:
            last = time.monotonic()
            click.echo(line)

    return say
