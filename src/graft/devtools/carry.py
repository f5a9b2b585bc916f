"""`graft bench carry REVISION`: what was measured of an earlier stack whose code is the same.

A file of `bench/results` that is of the stack at `REVISION` counts as of the stack as it is where
all of its points have the same code on both, to the letter, for the GPU that they are of. In what
form codegen hands its decisions to the heuristics does not count: the configurations, grids and
compile options that these choose do. Models, and cases, of a library that is not here are not
compared.

Of a result some of whose points have other code, those that have the same become a run that was
cut: `graft bench publish`, or the command of what is no part of `bench/publish.toml`, goes on with
it, and measures the others.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from graft.bench import carried, parts, publish, results
from graft.devtools import same_code, snapshots
from graft.devtools.codes import MODELS, POINTS, listed
from graft.devtools.same_code import Wanted
from graft.errors import GraftError, UsageError, nearest
from graft.lab import devices
from graft.places import ROOT
from graft.stack.pins import DEFAULT_PIN
from graft.stack.trees import tree


def carry(
    revision: str,
    prefix: Path,
    names: Sequence[str] = (),
    *,
    workers: int | None = None,
    say: Callable[[str], None],
    root: Path = ROOT,
) -> None:
    """Compare what the results called `names` measured (all without one); keep what is the same.

    A name is a file's, as `h200_norms14`, or that of a part of `bench/publish.toml`. Raises
    UsageError for a name or revision that there is not, and where no result is of that stack and
    the tree's pin; GraftError where a result's code is another.
    """
    published = {part.result: part for part in parts.load(root).parts}
    built = tree.load(prefix)
    publish.check_tree(built, root, built.pin)
    sides = tuple(
        snapshots.find(name, built.base, built.pin, built.prefix, root, "graft bench carry HEAD~1")
        for name in (revision, ".")
    )
    before, now = sides
    due = {}
    for name, path in _chosen(names, published, root).items():
        data = results.load(path)
        part = published.get(path.relative_to(root).as_posix())
        if (data["stack_hash"], data["pin"]) == (before.hash, built.pin):
            due[name] = path, part, data
    if not due:
        raise UsageError(
            f"no result is of {revision}, {built.pin}, stack {before.hash[:12]}",
            "graft bench publish --list",
        )
    wanted = Wanted(without=frozenset({"comments", "meta"}))
    there = Counter(item.split("/")[1] for item in listed(POINTS))
    here = {*listed(MODELS)}
    other = {}
    for name, (path, part, data) in due.items():
        points = len({results.key(row) for row in data["rows"]})
        models = tuple(dict.fromkeys(f"{MODELS}/{row['case']}" for row in data["rows"]))
        of_models = data["commands"][0].startswith("graft bench models")
        missing = len({*models} - here) if of_models else points - there[name]
        if missing > 0:
            what = "models of a library that is" if of_models else "cases"
            say(f"{name}: not compared, {missing} of {points} are no {what} here")
            continue
        groups, only = ((MODELS,), models) if of_models else ((POINTS,), (f"{POINTS}/{name}/",))
        found = same_code.compare(
            (before, now),
            built.base,
            replace(wanted, groups=groups, gpus=(_gpu(data, path),), only=only),
            workers=workers,
            say=say,
        )
        (counts,) = found.counts.values()
        if counts["same"] == counts.total():
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            carried.keep(path, data["stack_hash"], now.hash, today, root)
            say(f"{name}: {counts['same']} codes, the same")
        else:
            begun = None
            said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            items = {each.item for each in found.differences}
            say(f"{name}: {said}: {', '.join(each.partition('/')[2] for each in items)}")
            same = [row for row in data["rows"] if _item(name, row, of_models) not in items]
            if same and len(same) == points - len(items) == counts["same"]:
                begun = publish.work_of(path, root)
                publish.begin(begun, data, same, now.hash)
                say(f"{name}: {len(same)} of {points} points need not be measured anew")
            other[part.name if part else name] = part, data, begun
    publish.write_tables(root, say)
    if other:
        raise GraftError(f"other code: {' '.join(other)}", _again(other.values(), built.prefix))


def _item(name: str, row: results.Row, of_models: bool) -> str:
    """What `graft.devtools.codes` calls a row of the result `name`."""
    if of_models:
        return f"{MODELS}/{row['case']}"
    shape = "x".join(map(str, row["shape"]))
    return f"{POINTS}/{name}/{row['case']}/{shape}/{row['dtype']}"


def _chosen(
    names: Sequence[str], published: Mapping[str, parts.Part], root: Path
) -> dict[str, Path]:
    """The results called `names`, by their files' names."""
    files = results.named(root)
    by_part = {part.name: results.name(Path(result)) for result, part in published.items()}
    for name in names:
        if name not in files and name not in by_part:
            raise UsageError(
                f"bench/results has no {name!r}, and bench/publish.toml no such part"
                f"{nearest(name, [*files, *by_part])}",
                "graft bench publish --list",
            )
    chosen = {by_part.get(name, name) for name in names}
    return {name: path for name, path in files.items() if not names or name in chosen}


def _again(
    other: Iterable[tuple[parts.Part | None, results.Result, Path | None]], prefix: Path
) -> str:
    """What measures results anew: the parts at once, the others by the commands they are of."""
    published, commands = [], []
    for part, data, begun in other:
        if part:
            published.append(part)
        else:
            rest = "" if data["pin"] == DEFAULT_PIN else f" --prefix {prefix}"
            rest += f" --out {begun}" if begun else ""
            commands += [f"{command}{rest}" for command in data["commands"]]
    return "; ".join([publish.command(published), *commands] if published else commands)


def _gpu(data: results.Result, path: Path) -> str:
    """The described GPU that a result is of."""
    name = next((gpu["name"] for gpu in data["gpus"]), "")
    device = devices.match(name)
    if device is None:
        raise GraftError(f"{path.name}: no described GPU is {name!r}, so nothing compiles for it")
    return device.key
