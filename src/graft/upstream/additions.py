"""A three-way merge of what only adds, where the text that it was added behind is missing."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def merged(text: str) -> str | None:
    """`text`, with git's markers of style diff3, resolved: ours, and what theirs adds to the base.

    None where theirs does more than add lines.
    """
    lines = text.splitlines(keepends=True)
    done: list[str] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("<<<<<<< "):
            done.append(lines[at])
            at += 1
            continue
        base = _index(lines, at, "||||||| ")
        theirs = _index(lines, base, "=======")
        end = _index(lines, theirs, ">>>>>>> ")
        matcher = difflib.SequenceMatcher(
            None, lines[base + 1 : theirs], lines[theirs + 1 : end], autojunk=False
        )
        steps = [step for step in matcher.get_opcodes() if step[0] != "equal"]
        if any(step[0] != "insert" for step in steps):
            return None
        done += lines[at + 1 : base]
        for _, _, _, first, last in steps:
            done += lines[theirs + 1 + first : theirs + 1 + last]
        at = end + 1
    return "".join(done)


def _index(lines: Sequence[str], start: int, mark: str) -> int:
    return next(at for at in range(start, len(lines)) if lines[at].startswith(mark))
