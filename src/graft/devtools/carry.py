"""`graft bench carry REVISION`: what was measured of an earlier stack whose code is the same.

A part of `bench/publish.toml` whose result is of the stack at `REVISION` counts as of the stack as
it is where all of its points have the same code on both, to the letter, for the GPU that they are
of. In what form codegen hands its decisions to the heuristics does not count: the configurations,
grids and compile options that these choose do. Models are not compared: the lab has no libraries of
models.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from graft.bench import carried, parts, publish
from graft.devtools import same_code, snapshots
from graft.devtools.codes import POINTS
from graft.devtools.same_code import Wanted
from graft.errors import GraftError, UsageError
from graft.lab import devices
from graft.places import ROOT
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
    """Compare what the parts called `names` measured (all without one); keep what is the same.

    Raises UsageError for a part or revision that there is not, and where no result is of that
    stack; GraftError where a part's code is another.
    """
    published = parts.load(root)
    built = tree.load(prefix)
    publish.check_tree(built, root)
    sides = tuple(
        snapshots.find(name, built.base, built.pin, built.prefix, root, "graft bench carry HEAD~1")
        for name in (revision, ".")
    )
    before, now = sides
    due = []
    for part in publish.choose(names, published):
        shown = parts.kept(root / part.result, part.command, root)
        if shown and shown.is_whole and shown.stack_hash == before.hash and not part.models:
            due.append((part, shown.stack_hash))
    if not due:
        raise UsageError(
            f"no part is whole and of {revision}, stack {before.hash[:12]}",
            "graft bench publish --list",
        )
    wanted = Wanted(
        groups=(POINTS,),
        gpus=(devices.find(published.gpu).key,),
        without=frozenset({"comments", "meta"}),
    )
    other = []
    for part, measured in due:
        found = same_code.compare(
            (before, now),
            built.base,
            replace(wanted, only=(f"{POINTS}/{part.name}/",)),
            workers=workers,
            say=say,
        )
        (counts,) = found.counts.values()
        if counts["same"] == counts.total():
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            carried.keep(root / part.result, measured, now.hash, today, root)
            say(f"{part.name}: {counts['same']} codes, the same")
        else:
            other.append(part)
            said = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            items = ", ".join(each.item.partition("/")[2] for each in found.differences)
            say(f"{part.name}: {said}: {items}")
    publish.write_tables(root, say)
    if other:
        raise GraftError(
            f"other code: {' '.join(part.name for part in other)}",
            publish.command(other),
        )
