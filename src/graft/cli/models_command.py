"""`graft bench models`: other people's models, as they train, in stock and patched PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from graft import places
from graft.cli import bench_options, options
from graft.errors import GraftError, UsageError


@click.command()
@click.argument("names", nargs=-1)
@click.option(
    "--group", type=click.Choice(["tuned", "held_out", "unseen"]), help="One group alone."
)
@click.option("--list", "list_only", is_flag=True, help="List the models.")
@click.option(
    "--kernels",
    "kernels_of",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Rank the generated kernels of a result file by their time over their limit.",
)
@click.option("--top", default=40, show_default=True, help="Rows of --kernels; 0 is all.")
@click.option(
    "--check",
    "checked",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Exit 1 where a model of a result file is slower, or takes more memory.",
)
@click.option("--max-loss", default="1%", show_default=True, help="What --check lets be lost.")
@click.option(
    "--against",
    default="stock,patched",
    show_default=True,
    help="Who runs; the first is what the others are compared with.",
)
@click.option("--set", "settings", multiple=True, metavar="[LABEL:]KNOB=VALUE", help="A knob.")
@bench_options.out
@bench_options.again
@click.option(
    "--sources",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for the source of each generated kernel.",
)
@click.option(
    "--seconds", type=float, help="Begin nothing that would not be done by then; resumable."
)
@bench_options.gpus
@bench_options.jobs(8, "Models")
@bench_options.peers("transformers, timm and what they")
@click.option("--rounds", default=10, show_default=True, help="Turns of each contender.")
@click.option("--samples", default=3, show_default=True, help="Timed steps in a turn.")
@click.option("--timeout", default=420.0, show_default=True, help="Seconds until a worker hangs.")
@click.option(
    "--serial",
    is_flag=True,
    help="Each side compiles and tunes all by itself, and rows say how long that took.",
)
@bench_options.prefix
def models(
    names: tuple[str, ...],
    group: str | None,
    list_only: bool,
    kernels_of: Path | None,
    top: int,
    checked: Path | None,
    max_loss: str,
    against: str,
    settings: tuple[str, ...],
    out: Path | None,
    again: bool,
    sources: Path | None,
    seconds: float | None,
    gpus: str,
    jobs: int,
    peers: Path | None,
    rounds: int,
    samples: int,
    timeout: float,
    serial: bool,
    prefix: Path | None,
) -> None:
    """Train models of transformers and timm, of bench/models.toml; all, or NAMES.

    Step, generated kernels, memory, compile time, and gradients against eager.
    """
    from graft.bench import peers as peer_libraries
    from graft.bench import plan, results, runner
    from graft.cases import models as catalogue
    from graft.cli import bench_command as bench
    from graft.stack.trees import tree

    prefix = prefix or options.default_prefix()
    shown = kernels_of or checked
    if shown:
        found = results.load(shown)
        _say_of_which_stack(found, prefix)
        if kernels_of:
            _show_kernels(found, names, top)
        else:
            _check(found, names, max_loss)
        return
    chosen = catalogue.select(names, group)
    if list_only:
        _list(chosen)
        return
    bench.check_turns(rounds, samples)
    where = bench.chosen_gpus(gpus, [chosen[0].name])
    there = tree.load(prefix)
    contenders = plan.contenders(against, tree.pythons(prefix), settings)
    paths = (str(peer_libraries.unpack(peers, places.ROOT / ".graft" / "peers")),) if peers else ()
    libraries = _libraries(chosen, contenders, paths)
    setup = runner.Settings(
        rounds=rounds,
        samples=samples,
        timeout_s=timeout,
        serial=serial,
        shared=not serial,
        spread=True,
        jobs=jobs,
        seconds=seconds,
        sources=sources.absolute() if sources else None,
        peer_paths=paths,
    )
    words = ["graft", "bench", "models", *names, *(["--group", group] if group else [])]
    words += ["--against", against] if against != "stock,patched" else []
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--serial"] if serial else []
    words += ["--jobs-per-gpu", str(jobs)]
    head = bench.head_of(there, " ".join(words), setup, contenders) | {"libraries": libraries}
    journal = results.Journal(out, head, again)
    # What compiles longest begins first, so that nothing is waited for at the end.
    points = [
        plan.Point(model.name, model.shape, "bf16", model.group, cost_s=model.cost_s)
        for model in sorted(chosen, key=lambda model: -model.cost_s)
    ]
    try:
        bench.measure(points, contenders, where, setup, journal, out)
    finally:
        if journal.rows:
            _show_models({**journal.head, "rows": journal.rows})


def _libraries(
    chosen: Sequence[Any], contenders: Sequence[Any], paths: Sequence[str]
) -> dict[str, str]:
    """The versions of the libraries that the models are of. Raises GraftError for a missing one."""
    from graft.bench import libraries
    from graft.cases.models import LIBRARIES

    needed = {
        name: models
        for name in LIBRARIES
        if (models := [model.name for model in chosen if model.library == name])
    }
    return libraries.versions(needed, contenders, paths, "models")


def _list(chosen: Sequence[Any]) -> None:
    for model in chosen:
        shape = "x".join(map(str, model.shape))
        random = "dropout" if model.dropout else ""
        click.echo(
            f"{model.name:14} {model.group:9} {model.kind:12} {shape:12} {model.batch:11}"
            f" {random:8} {model.make}"
        )


def _only(result: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The result, of `names` alone, where there are any. Raises UsageError for one that is not."""
    from graft.errors import nearest

    known = [row["case"] for row in result["rows"]]
    for name in names:
        if name not in known:
            raise UsageError(f"the file has no model {name!r}{nearest(name, known)}")
    return {**result, "rows": [r for r in result["rows"] if not names or r["case"] in names]}


def _say_of_which_stack(result: Mapping[str, Any], prefix: Path) -> None:
    """A note where the file's figures are of another stack than the tree's."""
    from graft.stack.trees import tree

    try:
        there = tree.load(prefix)
    except GraftError:
        return
    if there.stack_hash != result["stack_hash"]:
        click.echo(
            f"note: measured on {result['date'][:10]} with stack {result['stack_hash'][:12]};"
            f" the tree's is {there.stack_hash[:12]}"
        )


def _show_models(result: Mapping[str, Any]) -> None:
    from graft.bench import models_report

    head, lines = models_report.models(result["rows"], models_report.Sides.of(dict(result)))
    _print(head, lines, left=2)


def _show_kernels(result: dict[str, Any], names: Sequence[str], top: int) -> None:
    from graft.bench import models_report

    result = _only(result, names)
    sides = models_report.Sides.of(result)
    found = models_report.groups(result)
    head, lines = models_report.kernels(found[: top or None], sides)
    _print(head, lines, left=2)
    click.echo(
        f"{len(found)} groups of kernels, of which each writes the same values on both sides:"
        f" {sides.base} {sum(g.base_us or 0.0 for g in found) / 1e3:.2f} ms,"
        f" {sides.judged} {sum(g.us or 0.0 for g in found) / 1e3:.2f} ms,"
        f" limit {sum(g.limit_us for g in found) / 1e3:.2f} ms"
    )


def _check(result: dict[str, Any], names: Sequence[str], max_loss: str) -> None:
    from graft.bench import compare, models_report

    result = _only(result, names)
    _show_models(result)
    loss = compare.parse_loss(max_loss)
    lost = models_report.losses(result["rows"], models_report.Sides.of(result), loss)
    for text in lost:
        click.echo(text)
    if not result["complete"]:
        lost.append("")
        click.echo("the run is not complete")
    if lost:
        raise SystemExit(1)


def _print(head: Sequence[str], lines: Sequence[Sequence[str]], left: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for cells in lines:
        table.add_row(*cells)
    if not console.is_terminal:  # a file is as wide as its lines
        console = Console(width=240, markup=False, highlight=False)
    console.print(table)
