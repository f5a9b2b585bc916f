"""The commands. Each is thin: it reads its options, calls one module, and prints.

Modules are imported inside the commands, so that each starts with no more than it needs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from graft.cli import bytecode, options
from graft.cli.bench_command import bench
from graft.cli.models_command import models
from graft.errors import FULL, READ_ONLY, GraftError, UsageError, refused
from graft.places import ROOT


@click.group(cls=options.Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=None, version="0.1.0", prog_name="graft")
def graft() -> None:
    """Graft a stack of patches on a pinned PyTorch, and show what it changes."""


def main() -> None:
    """Run a command; print an error and what to do next; exit 0, 1 (a check failed) or 2."""
    bytecode.keep()
    try:
        code = graft.main(prog_name="graft", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except GraftError as wrong:
        click.echo(wrong.report(), err=True)
        sys.exit(wrong.code)
    except click.exceptions.NoArgsIsHelpError as wrong:
        click.echo(wrong.format_message())
        sys.exit(2)
    except click.ClickException as wrong:
        ctx: Any = getattr(wrong, "ctx", None)
        path = ctx.command_path if ctx else "graft"
        click.echo(UsageError(wrong.format_message(), next=f"{path} --help").report(), err=True)
        sys.exit(UsageError.code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as wrong:
        if wrong.errno not in FULL | READ_ONLY:
            raise
        click.echo(_refused(wrong).report(), err=True)
        sys.exit(GraftError.code)


def _refused(wrong: OSError) -> GraftError:
    """What a file system refused, in this checkout or in another folder."""
    from graft.stack.journal import writable_copy

    here = Path(os.path.abspath(wrong.filename or "."))
    copy = writable_copy(ROOT) if here.is_relative_to(ROOT) else "the same command elsewhere"
    return refused(wrong, here, copy)


# --- the tree ------------------------------------------------------------------------------------


@graft.command()
@options.prefix
def status(prefix: Path) -> None:
    """Say what a tree is: base, pin, patches, knobs and their values, stack hash."""
    from graft import machine, stack
    from graft.stack import pins, workbench
    from graft.stack.trees import tree

    there = tree.load(prefix)
    series = stack.load(pins.load(there.pin))
    click.echo(f"tree    {there.prefix}")
    if edited := workbench.followed(there):
        click.echo(f"follows {edited}  (graft refresh, or ./build.sh, makes it the stack's again)")
    click.echo(f"base    {there.base.describe()}")
    click.echo(f"pin     {there.pin}")
    stale = "" if there.stack_hash == series.hash else "  (the series has changed: ./build.sh)"
    click.echo(f"stack   {there.stack_hash[:12]}{stale}")
    for problem in stack.differing_copies(series):
        click.echo(f"copy    {problem}  (graft refresh)")
    click.echo(f"patches {len(there.patches)}")
    heads = {each.patches[0]: each.name for each in series.series}
    for name in there.patches:
        if name in heads:
            click.echo(f"  # {heads[name]}")
        click.echo(f"  {name}")
    found = _knobs(there)
    click.echo(f"knobs   {len(found)}")
    for line in found:
        click.echo(f"  {line}")
    click.echo(f"caches  {there.cache_dir}")
    for note in machine.notes(there.base.cuda):
        click.echo(f"note: {note}")


def _knobs(there: Any) -> list[str]:
    from graft.stack import knobs

    try:
        found = knobs.added(there.base.torch_dir.parent, there.site_packages)
    except (OSError, SyntaxError):
        return []  # a damaged tree: graft verify names what
    return [f"torch._inductor.config.{knob.name} = {knob.value}" for knob in found]


@graft.command()
@options.prefix
@click.option("--each", is_flag=True, help="Also prove that each patch is needed by its tests.")
@click.option("--patch", "only", multiple=True, help="With --each: only these patches.")
@options.series
@click.option(
    "--changed",
    "since",
    is_flag=False,
    flag_value="",
    metavar="[REV]",
    help="With --each: only patches that differ from REV's (default: origin's main, or HEAD^).",
)
@click.option(
    "--complete",
    is_flag=True,
    help="With --patch or --changed: after each, the tests of all before it too, as for all.",
)
def verify(
    prefix: Path,
    each: bool,
    only: tuple[str, ...],
    series: str | None,
    since: str | None,
    complete: bool,
) -> None:
    """Check base, tree, series and copies against each other, blob by blob."""
    from graft import stack
    from graft.stack import pins
    from graft.stack.trees import tree

    there = tree.load(prefix)
    pin = pins.load(there.pin)
    whole = stack.load(pin)
    tree.verify(there, whole)
    stack.check_copies(whole)
    click.echo(
        f"{there.prefix}: {len(pin.files)} files of the base, {len(there.files)} of the tree, "
        f"{len(whole.new_files)} copies and every link are what {pin.name} and its "
        f"{len(whole.patches)} patches say (stack {there.stack_hash[:12]})"
    )
    if each:
        if series:
            only += whole.series_of(series).patches
        _verify_each(there, whole, only, since, complete)
    elif only or series or since is not None or complete:
        raise UsageError(
            "--patch, --series, --changed and --complete go with --each", "graft verify --each ..."
        )


def _verify_each(
    there: Any, series: Any, only: tuple[str, ...], since: str | None, complete: bool
) -> None:
    from graft.stack import each

    chosen = set(only) if only else None
    if since is not None:
        changed = each.changed(series, since or None)
        chosen = {name for name in changed if chosen is None or name in chosen}
        click.echo(f"changed patches: {', '.join(sorted(chosen)) or 'none'}")
    unworthy = []
    complete = complete or chosen is None
    for verdict in each.verify(there.base, series, chosen, complete=complete, say=click.echo):
        without = f"; without its hunks: {verdict.without}" if verdict.without else ""
        click.echo(f"{verdict.patch}: whole: {verdict.whole}{without}")
        for problem in verdict.problems:
            click.echo(f"  {problem}")
        unworthy += [] if verdict.ok else [verdict.patch]
    if unworthy:
        raise GraftError(
            f"not worth their place: {', '.join(unworthy)}",
            "graft edit, fix patch or tests, then graft refresh",
        )


@graft.command()
@options.prefix
def clean(prefix: Path) -> None:
    """Remove a tree, its caches, and what an interrupted build left."""
    from graft.stack.trees import tree

    removed = tree.clean(prefix)
    click.echo(f"removed {prefix}" if removed else f"nothing to remove in {prefix}")


@graft.command()
@options.prefix
@click.option("-o", "--output", type=options.OutputFile(), help="The file to write.")
def pack(prefix: Path, output: Path | None) -> None:
    """Write a tree as one file that installs it on a host with the pinned torch."""
    from graft import stack
    from graft.stack import pins
    from graft.stack.trees import pack as packing
    from graft.stack.trees import tree

    there = tree.load(prefix)
    series = stack.load(pins.load(there.pin))
    tree.verify(there, series)
    written = packing.write(there, series.pin, output)
    click.echo(f"{written}: {written.stat().st_size / 1024:.0f} KB, {len(there.files)} files")
    click.echo(f"on the other host: python3 {written.name} --help")


# --- measuring -----------------------------------------------------------------------------------

bench.add_command(models)
graft.add_command(bench)


# --- the stack -----------------------------------------------------------------------------------


@graft.command()
@options.prefix
@options.pin
@click.option(
    "--source",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A PyTorch checkout at the pin's commit: brings PyTorch's own tests.",
)
@click.option("--discard", is_flag=True, help="Remove the edit with whatever it has.")
@click.argument("files", nargs=-1)
def edit(
    prefix: Path,
    pin_name: str | None,
    source: Path | None,
    discard: bool,
    files: tuple[str, ...],
) -> None:
    """Open the stack as a git repository with a commit a patch; the tree follows it.

    FILES are files of PyTorch outside torch/_inductor that are to be changed too.
    """
    from graft.stack import workbench
    from graft.stack.trees import tree

    if discard:
        if source or files:
            raise UsageError("--discard goes with nothing else", "graft edit --discard")
        removed = workbench.discard(prefix)
        click.echo(f"removed {removed}" if removed else "there is no edit to remove")
        return
    pin = pin_name or tree.load(prefix).pin
    opened = workbench.edit(prefix, pin=pin, source=source, files=files)
    count = len(opened.repo.commits())
    click.echo(f"{opened.path}: the released files, then {count} commits, one a patch")
    click.echo(f"{prefix} follows it: a change there is live in {prefix}/bin/python")
    click.echo("commit, amend, reorder, split and drop with git; then graft refresh")


@graft.command()
@options.prefix
@options.pin
def refresh(prefix: Path, pin_name: str | None) -> None:
    """Write the patch files from the edit, or from overlay/ and tests/inductor/."""
    from graft.bench import figures
    from graft.stack import refresh as writer
    from graft.stack.trees import tree

    done = writer.refresh(prefix, figures, pin=pin_name or tree.load(prefix).pin)
    for path in done.written:
        click.echo(f"wrote   {path}")
    for path in done.removed:
        click.echo(f"removed {path}")
    if not (done.written or done.removed):
        click.echo("the patch files say what the edit and the copies say; nothing to write")
    click.echo(f"{prefix} is the stack's")


@graft.command("export")
@options.pin
@options.series
@click.option("--branch", metavar="NAME", help="The branch (default: graft/<pin>).")
@click.option("--onto", metavar="REV", help="Then rebase onto this commit of the checkout.")
@click.option("--force", is_flag=True, help="Move a branch that graft export did not make.")
@click.argument("checkout", type=click.Path(path_type=Path))
def export_(
    pin_name: str | None,
    series: str | None,
    branch: str | None,
    onto: str | None,
    force: bool,
    checkout: Path,
) -> None:
    """Put the stack on a branch of a PyTorch checkout, a commit a patch, ready for review.

    Its current branch, index and files are left alone.
    """
    from graft.cli import export_command

    export_command.run_export(checkout, pin_name, branch, onto, force, series)


@graft.command()
@options.pin
@options.series
@click.option("--send/--dry-run", default=False, help="Send it (default: show what would be sent).")
@click.option("--remote", metavar="NAME", help="Where to (default: PyTorch's own, or origin).")
@click.option("--fork", metavar="REMOTE", help="Push branches there instead; print their pages.")
@click.option("--no-fetch", is_flag=True, help="Onto the remote's branch as the checkout has it.")
@click.option("-m", "--message", help="What was changed, for pull requests that are updated.")
@click.option("-u", "--update-fields", is_flag=True, help="Also bring their titles and texts up.")
@click.option("--draft", is_flag=True, help="Make new pull requests drafts.")
@click.option("--label", help="Labels of new pull requests, by commas.")
@click.option("--reviewer", help="Reviewers of new pull requests, by commas.")
@click.option("--force", is_flag=True, help="Overwrite what others pushed to the same places.")
@click.argument("checkout", type=click.Path(path_type=Path))
def submit(
    pin_name: str | None,
    series: str | None,
    send: bool,
    remote: str | None,
    fork: str | None,
    no_fetch: bool,
    checkout: Path,
    **options: Any,
) -> None:
    """Send the stack to upstream: a pull request a patch, by ghstack. Shows it first.

    The next submission updates the same pull requests. Without write access, see --fork.
    """
    from graft.cli import export_command

    export_command.run_submit(
        checkout,
        pin_name,
        remote,
        fork,
        send=send,
        fetch=not no_fetch,
        series=series,
        **options,
    )


@graft.group()
def pin() -> None:
    """The releases that there is a series for."""


@pin.command("add")
@options.prefix
@click.argument("version")
@click.option("--from", "old", default=None, help="The pin whose series is tried (the tree's).")
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="A Python that has that torch (default: a venv is made, without its dependencies).",
)
@click.option(
    "--files",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder with the wheel's files, torch/ in it.",
)
@click.option("--dry-run", is_flag=True, help="Report alone: write no pin and no series.")
@click.option("--report", "page", type=options.OutputFile(), help="Put it into this page.")
def pin_add(
    prefix: Path,
    version: str,
    old: str | None,
    python: Path | None,
    files: Path | None,
    dry_run: bool,
    page: Path | None,
) -> None:
    """Make a pin of torch VERSION, with what of the series applies to it three-way."""
    from rich.console import Console

    from graft.upstream import new_pin, trial_report
    from graft.upstream import pin_add as adding

    if python and files:
        raise UsageError("--python and --files are two ways to say the same; give one")
    trial = adding.of_version(
        prefix, version, old=old, python=python, files=files, dry_run=dry_run, say=click.echo
    )
    trial_report.show(trial, Console())
    if page:
        trial_report.report(trial, page)
    if not dry_run:
        written = new_pin.write(trial)
        click.echo(f"wrote pins/{trial.new.name}.toml and {len(written) - 2} patches")
        click.echo(f"next: ./build.sh --pin {trial.new.name} --python PY, with torch {version}")


@graft.command("upstream-tests")
@options.prefix
@click.option(
    "--checkout",
    "--source",
    "source",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A PyTorch checkout at the pin's commit.",
)
@click.option(
    "--file",
    "paths",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A test file by itself.",
)
@options.device
@click.option("--timeout", "limit_s", type=float, help="Seconds for a test (default 600).")
@click.option("-k", "keyword", help="Only these tests, as pytest's -k.")
@click.option("--workers", type=int, default=1, show_default=True, help="Processes a GPU.")
@click.option("--gpu-only", is_flag=True, help="Leave upstream's tests of the CPU out.")
@click.option(
    "--patched-first", is_flag=True, help="Run on stock what does not pass on patched alone."
)
@click.option(
    "--state",
    "kept",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where results are kept as they come (default: the user's cache).",
)
@click.option("--anew", is_flag=True, help="Forget what an earlier run kept.")
@click.option("--seconds", type=float, help="End after so long; the same command goes on.")
@click.option("--json", "file", type=options.OutputFile(), help="Write the result here.")
@click.argument("files", nargs=-1)
def upstream_tests(
    prefix: Path,
    source: Path | None,
    paths: tuple[Path, ...],
    device: str,
    limit_s: float | None,
    keyword: str | None,
    workers: int,
    gpu_only: bool,
    patched_first: bool,
    kept: Path | None,
    anew: bool,
    seconds: float | None,
    file: Path | None,
    files: tuple[str, ...],
) -> None:
    """Run PyTorch's own tests of the pinned commit on stock and on patched, side by side.

    FILES are names under test/inductor (default: those of what the stack is about).
    """
    from rich.console import Console

    from graft import stack
    from graft.stack import pins
    from graft.stack.trees import tree
    from graft.upstream import comparison, tests

    there = tree.load(prefix)
    series = stack.load(pins.load(there.pin))
    tree.verify(there, series)
    console = Console()
    with console.status("") as status:
        found = tests.compare(
            there,
            series,
            files,
            source=source,
            paths=paths,
            device=device,
            limit_s=tests.LIMIT_S if limit_s is None else limit_s,
            keyword=keyword,
            workers=workers,
            gpu_only=gpu_only,
            patched_first=patched_first,
            kept=kept,
            anew=anew,
            seconds=seconds,
            say=options.progress(console, status),
        )
    comparison.show(found, console)
    _judge(found, found.as_json(), file, "test", "tests", "graft upstream-tests")


def _judge(
    found: Any, data: dict[str, Any], file: Path | None, one: str, many: str, command: str
) -> None:
    """Write `data` into `file`, if there is one; raise GraftError for what is no good end."""
    from graft.upstream import comparison

    if file:
        comparison.write(data, file)
    if found.broken:
        raise GraftError(f"{len(found.broken)} {many} pass on stock and fail on patched")
    comparison.check_read(found)
    if found.pending:
        raise GraftError(f"{found.pending} {many} were not reached", "the same command goes on")
    if not found.rows:
        raise GraftError(f"no {one} was found", f"{command}, without -k")


@graft.command()
@options.prefix
@options.device
@click.option("--samples", type=int, help="Of each operator, dtype and form; 0: all (default 2).")
@click.option("--form", "forms", multiple=True, help="alone, sums or large (default: each).")
@click.option("-k", "keyword", help="Only these cases, as pytest's -k.")
@click.option("--workers", type=int, help="Processes a GPU (default: one a core but two).")
@click.option(
    "--state",
    "kept",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where rows are kept as they come (default: the user's cache).",
)
@click.option("--anew", is_flag=True, help="Forget what an earlier run kept.")
@click.option("--seconds", type=float, help="End after so long; the same command goes on.")
@click.option("--json", "file", type=options.OutputFile(), help="Write the result here.")
def opinfo(
    prefix: Path,
    device: str,
    samples: int | None,
    forms: tuple[str, ...],
    keyword: str | None,
    workers: int | None,
    kept: Path | None,
    anew: bool,
    seconds: float | None,
    file: Path | None,
) -> None:
    """Run PyTorch's reductions, norms, softmaxes and losses, stock and patched, against eager.

    By their sample inputs, forward and backward.
    """
    from rich.console import Console

    from graft import stack
    from graft.stack import pins
    from graft.stack.trees import tree
    from graft.upstream import opinfo as operators

    there = tree.load(prefix)
    series = stack.load(pins.load(there.pin))
    tree.verify(there, series)
    console = Console()
    with console.status("") as status:
        found = operators.compare(
            there,
            series,
            device=device,
            samples=operators.SAMPLES if samples is None else samples,
            forms=forms or operators.FORMS[: 2 if device == "lab" else 3],
            keyword=keyword,
            workers=workers,
            kept=kept,
            anew=anew,
            seconds=seconds,
            say=options.progress(console, status),
        )
    operators.show(found, console)
    _judge(found, operators.as_json(found), file, "case", "cases", "graft opinfo")


# --- explaining ----------------------------------------------------------------------------------


@graft.command()
@options.prefix
@click.argument("case", required=False)
@click.option("--gpu", help="Describe this GPU instead: A100, H100, H200, B200.")
@click.option("--shape", help="Sizes, as in 32768,768.")
@click.option("--dtype", default="bf16", show_default=True, help="bf16, fp16 or fp32.")
@click.option("--dynamic", is_flag=True, help="Make the first size symbolic.")
@click.option("--json", "file", type=options.OutputFile(), help="Write all of it here.")
@click.option("--kernels", is_flag=True, help="Every kernel, not one screen.")
@click.option("--check", is_flag=True, help="On a GPU: is its code what is compiled offline?")
@click.option("--list", "listing", is_flag=True, help="The cases that there are.")
def explain(
    prefix: Path,
    case: str | None,
    gpu: str | None,
    shape: str | None,
    dtype: str,
    dynamic: bool,
    file: Path | None,
    kernels: bool,
    check: bool,
    listing: bool,
) -> int:
    """Show what the stack changes in what Inductor generates for CASE, or for file.py:function."""
    from graft.cli import explain_command

    if listing:
        return explain_command.list_cases()
    if check:
        return explain_command.check(prefix, case, dtype)
    return explain_command.explain(
        prefix,
        case,
        gpu=gpu,
        shape=shape,
        dtype=dtype,
        dynamic=dynamic,
        file=file,
        every_kernel=kernels,
    )


@graft.command("same-code")
@options.prefix
@click.argument("a")
@click.argument("b")
@click.option(
    "--group",
    "groups",
    multiple=True,
    help="cases, operators, graphs (default), points or models.",
)
@click.option("--gpu", "gpus", multiple=True, help="A100, H100, H200 or B200 (default: all).")
@click.option("--cases", "only", multiple=True, help="Only what has this in its name.")
@click.option("--dtype", "dtypes", multiple=True, help="Of the cases (default: bf16).")
@click.option("--graphs", type=int, default=1000, show_default=True, help="Generated graphs.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the generated graphs.")
@click.option("--limit", type=int, help="At most so many of each group.")
@click.option("--without", multiple=True, help="Parts that do not count: meta, comments, …")
@click.option("--workers", type=int, help="Processes at a time (default: one a core).")
@click.option("--seconds", type=float, help="End after so long; the same command goes on.")
@click.option("--anew", is_flag=True, help="Forget what earlier runs captured of A and B.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder for the differences (default: .graft/same-code/differences).",
)
@click.option("--json", "file", type=options.OutputFile(), help="Write the result here.")
def same_code(
    prefix: Path,
    a: str,
    b: str,
    groups: tuple[str, ...],
    gpus: tuple[str, ...],
    only: tuple[str, ...],
    dtypes: tuple[str, ...],
    graphs: int,
    seed: int,
    limit: int | None,
    without: tuple[str, ...],
    workers: int | None,
    seconds: float | None,
    anew: bool,
    out: Path | None,
    file: Path | None,
) -> None:
    """Say whether stacks A and B generate the same code, to the letter, for described GPUs.

    A and B are commits of this repository, or folders: `.` is this checkout as it stands, with its
    edit or what was changed in overlay/. What is captured of a stack is kept for the next run.
    """
    from rich.console import Console

    from graft.cli import same_code_command
    from graft.devtools import same_code as comparing
    from graft.lab import devices

    wanted = comparing.Wanted(
        groups=groups or comparing.GROUPS,
        gpus=tuple(map(options.described_gpu, gpus)) or tuple(devices.DEVICES),
        only=only,
        dtypes=dtypes or ("bf16",),
        seed=seed,
        graphs=graphs,
        limit=limit,
        without=frozenset(without),
    )
    wanted.check()
    console = Console()
    with console.status("") as status:
        same_code_command.same_code_of(
            a,
            b,
            prefix,
            wanted,
            workers=workers,
            seconds=seconds,
            anew=anew,
            out=out,
            file=file,
            console=console,
            say=options.progress(console, status),
        )


if __name__ == "__main__":
    main()
