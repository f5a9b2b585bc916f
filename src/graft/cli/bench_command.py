"""`graft bench`: measure, models, compare, report, tables."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from graft import places
from graft.cli import bench_options, options
from graft.errors import GraftError, UsageError
from graft.processes import ended_by_sigterm


class BenchGroup(options.Commands):
    """`graft bench CASES...` measures; the others are commands of it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=BenchGroup, context_settings={"help_option_names": ["-h", "--help"]})
def bench() -> None:
    """Measure stock, patched and peers side by side: graft bench CASES...

    CASES are names, globs (*_grad), or files of bench/cases (kernels). See graft bench run -h.
    """


@bench.command(name="run")
@click.argument("cases", nargs=-1)
@click.option(
    "--against",
    default="stock,patched",
    show_default=True,
    help="Who runs; the first is what the others are compared with. stock, patched, "
    "eager, liger, quack, helion, or LABEL=patched for one more run of a side.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="[LABEL:]KNOB=VALUE",
    help="A knob of torch._inductor.config, or KNOB.ENTRY of a dictionary there; the patched "
    "side's, unless a label says.",
)
@click.option(
    "--shapes",
    "wanted_shapes",
    default="default",
    show_default=True,
    help="Groups (default, norms14, grid, suite...) or shapes (4096x8192), by commas.",
)
@click.option("--dtype", "dtypes", default="", help="bf16, fp16, fp32, by commas; all by default.")
@bench_options.out
@bench_options.again
@bench_options.gpus
@bench_options.jobs(1, "Points")
@bench_options.peers("peers and of what they")
@click.option(
    "--autotune-peers", is_flag=True, help="Let Helion search, in place of its heuristic."
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A better-benchmark checkout; CASES are then its kernels, by glob or number.",
)
@click.option("--rounds", default=10, show_default=True, help="Turns of each contender.")
@click.option("--samples", default=5, show_default=True, help="Timed launches in a turn.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds until a worker hangs.")
@click.option(
    "--serial", is_flag=True, help="Compile one after the other, for compile times that compare."
)
@click.option("--list", "list_only", is_flag=True, help="List the cases and their shapes.")
@bench_options.prefix
def run_command(
    cases: tuple[str, ...],
    against: str,
    settings: tuple[str, ...],
    wanted_shapes: str,
    dtypes: str,
    out: Path | None,
    again: bool,
    gpus: str,
    jobs: int,
    peers: Path | None,
    autotune_peers: bool,
    corpus: Path | None,
    rounds: int,
    samples: int,
    timeout: float,
    serial: bool,
    list_only: bool,
    prefix: Path | None,
) -> None:
    """Compile, check against eager in float64, and time CASES."""
    from graft.bench import peers as peer_libraries
    from graft.bench import plan, results, runner
    from graft.stack.trees import tree

    if list_only:
        _list_cases()
        return
    if int(os.environ.get("LOCAL_RANK", "0")):
        return  # torchrun's first rank measures for all
    if not cases and not corpus:
        raise UsageError("no case to measure", next="graft bench --list")
    check_turns(rounds, samples)
    points = _points(cases, wanted_shapes, dtypes, corpus)
    chosen = chosen_gpus(gpus, cases)
    prefix = prefix or options.default_prefix()
    there = tree.load(prefix)
    contenders = plan.contenders(against, tree.pythons(prefix), settings)
    paths = (str(peer_libraries.unpack(peers, places.ROOT / ".graft" / "peers")),) if peers else ()
    called = {} if corpus else _libraries(points, contenders, paths)
    setup = runner.Settings(
        rounds=rounds,
        samples=samples,
        timeout_s=timeout,
        serial=serial,
        jobs=jobs,
        autotune=autotune_peers,
        peer_paths=paths,
    )
    command = _command(
        cases, against, settings, wanted_shapes, dtypes, peers, corpus, autotune_peers, serial, jobs
    )
    head = head_of(there, command, setup, contenders)
    if called:
        head["libraries"] = called
    journal = results.Journal(out, head, again)
    measure(points, contenders, chosen, setup, journal, out)


def check_turns(rounds: int, samples: int) -> None:
    """Raise UsageError for too few turns or samples."""
    from graft.bench import runner

    if rounds * samples < runner.MIN_SAMPLES or rounds < 2 or samples < 1:
        raise UsageError(f"{rounds} rounds of {samples} samples are under 30 samples or 2 rounds")


def head_of(there: Any, command: str, setup: Any, contenders: Sequence[Any]) -> dict[str, Any]:
    """A result without rows: of the tree that is `there`, by `command`."""
    from graft.bench import results

    return {
        "schema": results.SCHEMA,
        "pin": there.pin,
        "stack_hash": there.stack_hash,
        "patches": list(there.patches),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commands": [command],
        "clock": setup.as_dict(),
        "contenders": {c.label: {"impl": c.impl, "knobs": dict(c.knobs)} for c in contenders},
        "gpus": [],
        "complete": False,
    }


@bench.command()
@click.argument("before")
@click.argument("after")
@click.option("--max-loss", default="2%", show_default=True, help="What may be lost.")
@click.option(
    "--contender",
    default="patched",
    show_default=True,
    help="Whose times, where a file is given without :LABEL.",
)
@click.option("--across-pins", is_flag=True, help="Compare files of different pins or GPUs.")
def compare(before: str, after: str, max_loss: str, contender: str, across_pins: bool) -> None:
    """Compare A.json with B.json, or FILE.json:stock with FILE.json:patched.

    Of two files, what is the same in both (stock; patched, where the stack is the same; peers) was
    run twice: how far apart the two runs are is said too.

    Exits 1 when a point lost more than --max-loss, or fails where it had a time.
    """
    from graft.bench import compare as comparing

    loss = comparing.parse_loss(max_loss)
    sides = [comparing.parse_side(text, contender) for text in (before, after)]
    found = comparing.compare(sides[0], sides[1], across_pins)
    click.echo(comparing.render(found, loss))
    if comparing.failed(found, loss):
        raise SystemExit(1)


@bench.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="One page, with plots.")
@click.option("--svg", "svg_file", type=click.Path(path_type=Path), help="The sorted ratios.")
@click.option(
    "--markdown",
    "markdown_file",
    type=click.Path(path_type=Path),
    help="Tables; on standard output where no file is asked for.",
)
def report(
    files: tuple[Path, ...],
    html_file: Path | None,
    svg_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Report result FILES as Markdown, SVG, or one self-contained HTML page."""
    from graft.bench import report as reports
    from graft.bench import results

    loaded = [(path.stem, results.load(path)) for path in files]
    for path, render in (
        (html_file, reports.html),
        (svg_file, reports.svg),
        (markdown_file, reports.markdown),
    ):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(render(loaded))
            click.echo(f"{path}: {path.stat().st_size / 1024:.0f} KB")
    if not (html_file or svg_file or markdown_file):
        click.echo(reports.markdown(loaded), nl=False)


@bench.command()
@click.option("--check", is_flag=True, help="Change nothing; exit 1 when a table is stale.")
def tables(check: bool) -> None:
    """Write the tables of README and docs from the result files that they name."""
    from graft.bench import claims
    from graft.bench import tables as pages

    stale = list(pages.stale(places.ROOT))
    for page, _, due in stale:
        click.echo(f"{page.relative_to(places.ROOT)}: {'stale' if check else 'written'}")
        if not check:
            page.write_text(due)
    if stale and check:
        raise GraftError("tables and result files disagree", next="graft bench tables")
    claims.check(places.ROOT)


@bench.command()
@click.option("--part", "names", multiple=True, metavar="NAME", help="These parts alone.")
@click.option("--list", "list_only", is_flag=True, help="The parts, their minutes, what is stale.")
@click.option("--seconds", type=click.FloatRange(0), help="Stop then; the same command goes on.")
@click.option("--again", is_flag=True, help="Measure anew what is of this stack, too.")
@bench_options.peers("peers and of what they")
@bench_options.prefix
def publish(
    names: tuple[str, ...],
    list_only: bool,
    seconds: float | None,
    again: bool,
    peers: Path | None,
    prefix: Path | None,
) -> None:
    """Measure what README and docs/measured.md show, of the stack as it is, and write the tables.

    bench/publish.toml has the parts. One that is of this stack already is left alone.
    """
    from graft.bench import publish as publishing
    from graft.stack.trees import tree

    prefix = prefix or options.default_prefix()
    if list_only:
        click.echo(publishing.listed(tree.load(prefix).stack_hash))
        return
    publishing.publish(
        prefix,
        names,
        again=again,
        seconds=seconds,
        peers=peers,
        gpus=cuda_device_names,
        say=click.echo,
    )


@bench.command()
@click.argument("revision")
@click.option(
    "--part",
    "names",
    multiple=True,
    metavar="NAME",
    help="These alone: parts of bench/publish.toml, or files of bench/results.",
)
@click.option("--workers", type=int, help="Processes at a time (default: one a core).")
@bench_options.prefix
def carry(revision: str, names: tuple[str, ...], workers: int | None, prefix: Path | None) -> None:
    """Keep what was measured of the stack at REVISION where the stack as it is has the same code.

    Each point of a result is compiled offline on both, for its GPU. Models are compiled
    where their libraries are installed.
    """
    from graft.devtools import carry as carrying

    carrying.carry(
        revision, prefix or options.default_prefix(), names, workers=workers, say=click.echo
    )


def _points(
    cases: Sequence[str], wanted_shapes: str, dtypes: str, corpus: Path | None
) -> list[Any]:
    from graft.bench import plan

    if corpus:
        from graft.bench import corpus as foreign

        return foreign.select(corpus.resolve(), cases, wanted_shapes)
    from graft.cases import load_all

    every = load_all()
    files = {name: plan.case_file(case) for name, case in every.items()}
    chosen = plan.select(cases, every, files)
    return plan.points(chosen, wanted_shapes, list(filter(None, dtypes.split(","))))


def _libraries(
    points: Sequence[Any], contenders: Sequence[Any], paths: Sequence[str]
) -> dict[str, str]:
    """The versions of the packages that cases call. Raises GraftError for a missing one."""
    from graft.bench import libraries
    from graft.cases import load_all

    every = load_all()
    needed: dict[str, list[str]] = {}
    for name in dict.fromkeys(point.case for point in points):
        if library := every[name].library:
            needed.setdefault(library, []).append(name)
    return libraries.versions(needed, contenders, paths, "cases")


def _list_cases() -> None:
    from graft.bench import plan, shapes
    from graft.cases import load_all

    file = ""
    for name, case in load_all().items():
        if plan.case_file(case) != file:
            file = plan.case_file(case)
            click.echo(f"{file}:")
        groups = ", ".join(
            f"{group} {shapes.text(tuple(found[0])) if len(found) == 1 else f'({len(found)})'}"
            for group, found in shapes.groups(case.shapes).items()
        )
        click.echo(f"  {name:29} {case.summary}\n{'':32}{','.join(case.dtypes)}; {groups}")


def chosen_gpus(wanted: str, cases: Sequence[str]) -> list[str]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them.

    Under torchrun, the first rank of the host runs the lanes of all of its ranks, and the other
    ranks end at once: a case then goes to whichever GPU is free. Raises GraftError without a GPU.
    """
    env = os.environ
    ranks = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if ranks != int(env.get("WORLD_SIZE", "1")):
        raise UsageError("graft bench spreads over the GPUs of one host: use torchrun --nnodes 1")
    count = cuda_device_count()
    if not count:
        case = cases[0] if cases else "rms_norm_backward"
        raise GraftError(
            "timing needs a CUDA GPU, and none answers here; what Inductor generates for one"
            " (code, registers, spills, bytes) can be had without",
            next=f"graft explain {case} --gpu H200",
        )
    visible = list(filter(None, env.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    names = visible or [str(i) for i in range(count)]
    chosen = names[:ranks] if ranks > 1 else names
    if wanted:
        indices = wanted.split(",")
        wrong = [i for i in indices if not i.isdigit() or int(i) >= len(names)]
        if wrong:
            raise UsageError(f"--gpus {wanted}: no GPU {wrong[0]}; there are {len(names)}, from 0")
        chosen = [names[int(i)] for i in indices]
    return chosen


def cuda_device_count() -> int:
    """GPUs that the CUDA driver answers for, without importing torch; 0 where there is none."""
    import ctypes

    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def cuda_device_names() -> list[str]:
    """The names of the GPUs that the CUDA driver answers for; none where there is none."""
    import ctypes

    names = []
    for index in range(cuda_device_count()):
        cuda, device, name = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_char * 256)()
        if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetName(name, 256, device):
            raise GraftError(f"the CUDA driver does not name GPU {index}", next="nvidia-smi")
        names.append(name.value.decode())
    return names


def _command(
    cases: Sequence[str],
    against: str,
    settings: Sequence[str],
    wanted_shapes: str,
    dtypes: str,
    peers: Path | None,
    corpus: Path | None,
    autotune: bool,
    serial: bool,
    jobs: int,
) -> str:
    """The command as a result file holds it: what decides the figures, and no machine's paths."""
    words = ["graft", "bench", *cases, "--shapes", wanted_shapes]
    words += ["--dtype", dtypes] if dtypes else []
    words += ["--against", against] if against != "stock,patched" else []
    words += [word for setting in settings for word in ("--set", setting)]
    words += ["--peers", "DIR"] if peers else []
    words += ["--corpus", "DIR"] if corpus else []
    words += ["--autotune-peers"] if autotune else []
    words += ["--serial"] if serial else []
    words += ["--jobs-per-gpu", str(jobs)] if jobs > 1 else []
    return " ".join(words)


def measure(
    points: Sequence[Any],
    contenders: Sequence[Any],
    gpus: Sequence[str],
    setup: Any,
    journal: Any,
    out: Path | None,
) -> None:
    """Run with a progress bar, and fold what there is into the result, whatever happens."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from graft.bench import plan, runner

    console = Console()
    plain: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    todo = [point for point in points if point.key not in journal.done]
    if len(todo) < len(points):
        console.print(f"{len(points) - len(todo)} of {len(points)} points are in {out} already")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    labels = [contender.label for contender in contenders]
    with progress:
        task = progress.add_task("bench", total=len(todo))

        def on_row(row: dict[str, Any]) -> None:
            progress.console.print(line(row, labels), **plain)
            progress.advance(task)

        def note(text: str) -> None:
            progress.console.print(text, **plain)

        try:
            with ended_by_sigterm():
                runner.run(plan.in_turn(points), contenders, gpus, setup, journal, on_row, note)
        finally:
            # Also after an error, Ctrl-C or SIGTERM: what was measured becomes a result file.
            complete = all(point.key in journal.done for point in points)
            if journal.rows:
                journal.fold({"complete": complete}, [point.key for point in points])
                if out:
                    note(f"{out}: {len(journal.rows)} points" + ("" if complete else ", not all"))
    rows = [row for row in journal.rows if row.get("speedup")]
    for text in summary(rows, labels):
        console.print(text, **plain)
    failed = sum("error" in time for row in journal.rows for time in row["times"].values())
    if failed:
        console.print(f"{failed} entries are errors, each in its row", **plain)
    for label, about in journal.head["contenders"].items():
        if "absent" in about:
            console.print(f"{label}: left out, {about['absent']}", **plain)


def summary(rows: Sequence[dict[str, Any]], labels: Sequence[str]) -> list[str]:
    """One line a case, dtype and contender: geometric mean, worst and best of its speedup."""
    from graft.bench import shapes
    from graft.bench.stats import geomean

    found: dict[tuple[str, str, str], list[tuple[float, str]]] = {}
    for row in rows:
        shape = shapes.text(tuple(row["shape"]))
        for label in labels[1:]:
            if label in row["speedup"]:
                ratio = row["speedup"][label]["median"]
                found.setdefault((row["case"], row["dtype"], label), []).append((ratio, shape))
    return [
        f"{case:28} {dtype:5} {label} x{geomean(ratio for ratio, _ in ratios):.3f}"
        f" over {labels[0]}, {len(ratios)} points;"
        f" worst {min(ratios)[0]:.3f} at {min(ratios)[1]}, best {max(ratios)[0]:.3f}"
        f" at {max(ratios)[1]}"
        for (case, dtype, label), ratios in found.items()
    ]


def line(row: dict[str, Any], labels: Sequence[str]) -> str:
    """A row as one line of the terminal."""
    from graft.bench import shapes

    shape = shapes.text(tuple(row["shape"]))
    words = [f"{row['case']:24} {shape:>14} {row['dtype']:5}"]
    if "limit_us" in row:
        words.append(f"limit {row['limit_us']:8.1f}")
    for label in labels:
        time = row["times"].get(label, {})
        if "us" in time:
            words.append(f"{label} {time['us']['median']:8.1f}")
        elif "error" in time:
            words.append(f"{label} {time['error']['kind']}: {time['error']['message'][:120]}")
    counts = [str(row["times"].get(label, {}).get("kernels") or "-") for label in labels]
    words.append(f"kernels {'/'.join(counts)}")
    for label, ratio in row.get("speedup", {}).items():
        words.append(f"{label} x{ratio['median']:.3f} [{ratio['q1']:.3f}, {ratio['q3']:.3f}]")
    return "  ".join(words)
