"""What becomes of a patch on other files: its state in a word, and the places in their lines."""

from __future__ import annotations

import re
from collections.abc import Callable

from graft.stack import FileChange

CLEAN, MOVED, CONFLICT, THERE = "clean", "moved", "conflict", "already there"
"""The files are those that the patch was made for; they differ, and it applies; it does not apply;
nothing is left of it to do."""


def offset(change: FileChange, now: FileChange | None) -> str:
    """How far the hunks of a file went: ``<path> +12, -3 lines``.

    `now` is what the patch does to that file where it was applied; None where it does nothing.
    """
    if now is None:
        return f"{change.path} (under another name, or there already)"
    if len(now.hunks) != len(change.hunks):
        return change.path
    offsets = [new.old_start - old.old_start for old, new in zip(change.hunks, now.hunks)]
    shown = ", ".join(f"{each:+d}" for each in dict.fromkeys(offsets) if each)
    return f"{change.path} {shown} lines" if shown else change.path


def stages(git: Callable[..., str]) -> dict[str, set[str]]:
    """The files that are not merged, with what there is of each: 1 base, 2 ours, 3 theirs.

    `git` runs git in the work tree and returns what it prints.
    """
    found: dict[str, set[str]] = {}
    for entry in git("ls-files", "-u", "-z").split("\0")[:-1]:
        info, _, path = entry.partition("\t")
        found.setdefault(path, set()).add(info.split()[2])
    return found


def unmerged(git: Callable[..., str]) -> tuple[str, ...]:
    """The lines in conflict, as they are numbered in the file that the patch was put on."""
    places: list[str] = []
    for path, has in stages(git).items():
        if "2" not in has:
            places.append(f"{path} (is not there)")
        elif "3" not in has:
            places.append(f"{path} (removed by the patch)")
        else:
            diff = git("diff", "--ours", "-U0", "--no-color", "--no-ext-diff", "--", path)
            places += [f"{path}:{lines}" for lines in _ranges(diff)] or [path]
    return tuple(places)


def _ranges(diff: str) -> list[str]:
    """The lines in conflict, from what ``git diff --ours -U0`` says of a file with markers.

    The diff is from our file to the marked one, so that between ``<<<<<<<`` and ``=======`` there
    is what it left in place: ``120-134``, or ``120`` for one line or a place between two.
    """
    ranges: list[str] = []
    old = start = 0
    for line in diff.splitlines():
        if hunk := re.match(r"@@ -(\d+)(?:,(\d+))? \+", line):
            # With a count of 0 the number is of the line before.
            old = int(hunk[1]) + (hunk[2] == "0")
        elif line.startswith("+<<<<<<<"):
            start = old
        elif line.startswith("+=======") and start:
            ranges.append(f"{start}-{old - 1}" if old - 1 > start else f"{start}")
            start = 0
        elif line.startswith("-") and not line.startswith("--- "):
            old += 1
    return ranges
