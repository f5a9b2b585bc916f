"""A trial in words: on the screen, and as a section of ``docs/new-pins.md``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from graft.stack.conflicts import CLEAN, CONFLICT, MOVED, THERE
from graft.upstream.trial import Trial

if TYPE_CHECKING:
    from rich.console import Console

STATES = (CLEAN, MOVED, THERE, CONFLICT)
_SECTION = "<!-- pin: {name} -->\n{body}<!-- /pin -->\n"


def summary(trial: Trial) -> str:
    """The counts in one line."""
    counts = ", ".join(f"{n} {state}" for state in STATES if (n := trial.count(state)))
    kept = len(trial.stack.patches)
    return (
        f"{trial.old.name} on {trial.new.version}: {len(trial.verdicts)} patches, "
        f"{counts or 'none'}; {kept} can be written"
    )


def show(trial: Trial, console: Console) -> None:
    """Print a line a patch, then the counts."""
    styles = {CONFLICT: "red", MOVED: "yellow", THERE: "cyan"}
    for verdict in trial.verdicts:
        kept = any(patch.name == verdict.patch.name for patch in trial.stack.patches)
        console.print(f"{verdict.state:14}{verdict.patch.name}", style=styles.get(verdict.state))
        for place in verdict.places:
            console.print(f"{'':14}{place}", highlight=False, soft_wrap=True)
        if verdict.left_out:
            console.print(f"{'':14}not written: {verdict.left_out}", highlight=False)
        elif not kept and verdict.state != CONFLICT:
            console.print(f"{'':14}not written: nothing is left of it", highlight=False)
    for path in trial.gone:
        console.print(f"gone: {path}", highlight=False)
    for path in trial.broken:
        console.print(f"no Python any more: {path}", style="red")
    console.print(summary(trial), highlight=False, soft_wrap=True)


def markdown(trial: Trial) -> str:
    """The section of a release in ``docs/new-pins.md``, without its markers."""
    lines = [
        f"## {trial.new.version}",
        "",
        f"`{trial.new.commit}`. {summary(trial)}. Stack {trial.tried[:12]}.",
        "",
    ]
    if trial.gone:
        names = ", ".join(f"`{path}`" for path in trial.gone)
        lines += [f"Files of {trial.old.name} that it does not have: {names}.", ""]
    if trial.broken:
        names = ", ".join(f"`{path}`" for path in trial.broken)
        lines += [f"No Python any more with what applies: {names}.", ""]
    lines += ["| patch | | where | written |", "| --- | --- | --- | --- |"]
    for verdict in trial.verdicts:
        kept = any(patch.name == verdict.patch.name for patch in trial.stack.patches)
        why = "yes" if kept else f"no: {verdict.left_out}" if verdict.left_out else "no"
        places = "; ".join(place.replace("|", "\\|") for place in verdict.places)
        name = verdict.patch.name.removesuffix(".patch")
        lines.append(f"| {name} | {verdict.state} | {places} | {why} |")
    return "\n".join(lines) + "\n"


def report(trial: Trial, page: Path) -> None:
    """Put the release's section into `page`, in place of the one that is there, or at the end."""
    text = page.read_text("utf-8") if page.exists() else ""
    section = _SECTION.format(name=trial.new.name, body=markdown(trial))
    mark = re.escape(f"<!-- pin: {trial.new.name} -->")
    found = re.compile(rf"^{mark}\n.*?^<!-- /pin -->\n", re.M | re.S)
    if found.search(text):
        text = found.sub(lambda _: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}" if text.strip() else section
    aside = page.with_name(f"{page.name}.new")
    aside.write_text(text, "utf-8")
    aside.replace(page)
