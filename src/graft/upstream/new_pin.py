"""The files of a new pin: the pin itself, its series, its patches; all of them or none."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from graft import stack as stacks
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import Stack, journal, pins
from graft.stack.conflicts import CONFLICT
from graft.upstream.trial import Trial


def check_absent(version: str, root: Path = ROOT) -> None:
    """Raise UsageError if there is a pin of that version, or a series for it, already."""
    name = f"v{version}"
    for path in (pins.file(name, root), root / "patches" / name):
        if path.exists():
            shown = path.relative_to(root)
            raise UsageError(
                f"there is {shown} already",
                f"graft pin add {version} --dry-run; or remove pins/{name}.toml and patches/{name}",
            )


def write(trial: Trial, root: Path = ROOT) -> list[str]:
    """Write the pin, and the series of what applies; all of it or nothing. The files written.

    Raises UsageError for a pin that is there, GraftError for files that are no Python any more, and
    for patches that do not come out of git as they went in.
    """
    check_absent(trial.new.version, root)
    if trial.broken:
        raise GraftError(
            f"with what applies, {', '.join(trial.broken)} would be no Python any more",
            f"graft pin add {trial.new.version} --dry-run, and fix the patch in the old series",
        )
    home = root / "patches" / trial.new.name
    touched = {c.path for p in trial.stack.patches for c in p.files if c.in_tree and not c.is_new}
    missing = touched - trial.new.files.keys() - trial.stack.new_files.keys()
    pin = replace(trial.new, files={**trial.new.files, **_blobs(trial.stack, missing)})
    Stack(pin, trial.stack.patches).check()
    lines = [
        f"# The patches of PyTorch {pin.version}, in the order in which they apply; written by "
        "graft refresh.",
        f"# Made from those of {trial.old.name}; of which these are not here yet:",
    ]
    lines += [
        f"#   {verdict.patch.name}: {verdict.left_out or verdict.state}"
        for verdict in trial.verdicts
        if verdict.left_out or verdict.state == CONFLICT
    ] or ["#   none"]
    lines += [stacks.write_line(patch.name, patch.status) for patch in trial.stack.patches]
    changes: dict[Path, bytes | None] = {
        pins.file(pin.name, root): pins.render(pin).encode(),
        home / "series": "".join(f"{line}\n" for line in lines).encode(),
    }
    changes |= {home / patch.name: patch.text for patch in trial.stack.patches}
    with journal.alone(root):
        journal.write(root, changes)
    return [str(path.relative_to(root)) for path in changes]


def _blobs(stack: Stack, paths: Collection[str]) -> dict[str, str]:
    """The blob that the first patch which touches a path finds there."""
    found: dict[str, str] = {}
    for patch in stack.patches:
        for change in patch.files:
            if change.path in paths:
                found.setdefault(change.path, change.old_blob)
    return found
