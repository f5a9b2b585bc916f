"""What several commands have in common: options, and how they say how far they are."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

_LOG_EVERY_S = 30.0
_TYPED = "graft.typed"  # of a context: the words behind `graft`


class Command(click.Command):
    """A command that says how it is called where its words cannot be read."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as wrong:  # click leaves it out where an option has no value
            wrong.ctx = wrong.ctx or ctx
            raise


class Commands(click.Group):
    """A group that suggests the nearest name for an unknown one, and knows what was typed."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as wrong:
            name = f" {ctx.invoked_subcommand}" if ctx.invoked_subcommand else ""
            wrong.next = wrong.next or f"{ctx.command_path}{name} --help"
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta.setdefault(_TYPED, [*args])
        return super().parse_args(ctx, args)

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


def again(option: str, old: str, new: str) -> str:
    """The command as it was typed, with `new` for the `old` value of `option`."""
    typed = click.get_current_context().meta.get(_TYPED, [])
    words = [
        new
        if word == old and before == option
        else f"{option}={new}"
        if word == f"{option}={old}"
        else word
        for before, word in zip(["", *typed], typed, strict=False)
    ]
    return shlex.join(["graft", *words])


def described_gpu(name: str) -> str:
    """The key of the described GPU that --gpu names.

    Raises GraftError for another name, with the whole command and the nearest name as what to type.
    """
    from graft.lab import devices

    try:
        return devices.find(name).key
    except devices.UnknownGpu as wrong:
        raise GraftError(wrong.message, again("--gpu", name, wrong.nearest)) from wrong


class OutputFile(click.Path):
    """A file to write in the end: that it can be is seen before minutes of work."""

    def __init__(self) -> None:
        super().__init__(path_type=Path, dir_okay=False)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        folder = path.absolute().parent
        if not os.access(folder, os.W_OK):
            why = "cannot be written to" if folder.is_dir() else "is no folder"
            option = param.opts[-1] if param is not None else "-o"
            again = f"the same command with {option} DIR/{path.name}, a folder that you can write"
            raise UsageError(f"{path}: {folder} {why}", again)
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
device = click.option(
    "--device",
    type=click.Choice(["cuda", "lab"]),
    default="cuda",
    show_default=True,
    help="lab: without a GPU, under Triton's interpreter.",
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
