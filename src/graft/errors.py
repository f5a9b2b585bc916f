"""What a user sees when something is wrong: what it is, and what to type next."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable
from pathlib import Path


class GraftError(Exception):
    """A check failed, or an input is not as it has to be.

    ``message`` names the file or value and what was expected; ``next`` is the command to type
    (None where there is none); ``code`` is the exit code of the process.
    """

    code = 1

    def __init__(self, message: str, next: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next = next

    def __str__(self) -> str:
        return self.message

    def report(self) -> str:
        """The one ``error:`` entry and the one ``next:`` line that a command prints."""
        lines = [f"error: {self.message}"]
        if self.next:
            lines.append(f"next: {self.next}")
        return "\n".join(lines)


class UsageError(GraftError):
    """The command was called in a way that it cannot be."""

    code = 2


MOST_NAMES = 20
"""Of a longer list an error shows no more."""

FULL = {errno.ENOSPC, errno.EDQUOT}
"""What a file system says that has no room left."""

READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
"""What one says that may not be written to."""


def refused(wrong: OSError, where: Path, elsewhere: str) -> GraftError:
    """What a file system refused, with the folder that it is about; `where` if it names none.

    `elsewhere` is what to type where that folder cannot be written.
    """
    path = Path(os.path.abspath(wrong.filename or where))
    folder = path if path.is_dir() else path.parent
    if wrong.errno in FULL:
        return GraftError(f"no space left in {folder}", "make room there, then the same command")
    if wrong.errno in READ_ONLY:
        return GraftError(f"cannot write in {folder}: {wrong.strerror}", elsewhere)
    return GraftError(f"{wrong.strerror or wrong}: {path}", "fix it, then the same command")


def nearest(name: str, known: Iterable[str]) -> str:
    """``'; did you mean X?'`` for a misspelt `name`, or what there is, up to `MOST_NAMES`."""
    names = sorted(known)
    folded = {each.casefold(): each for each in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {folded[close[0]]}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"; there are: {', '.join(names[:MOST_NAMES])}{more}" if names else "; there are none"


def first_line(error: BaseException, limit: int = 300) -> str:
    """An error's type, and what it says, in at most `limit` characters."""
    return f"{type(error).__name__}: {said(error)}"[:limit]


def said(error: BaseException, limit: int = 300) -> str:
    """What an error says, in a line of at most `limit` characters.

    That is its first one. Of a traceback in it, as of what failed in another process, it is what
    that one ends with; of Triton's, which begins with a place and the source there, the last.
    """
    lines = [line.rstrip() for line in str(error).splitlines() if line.strip()]
    begins = [i for i, line in enumerate(lines) if line.lstrip().startswith("Traceback (most")]
    if begins:
        found = [line for line in lines[begins[-1] + 1 :] if not line.startswith(" ")] or lines
    else:
        found = lines[-1:] if lines and re.fullmatch(r"at \d+:\d+:", lines[0].strip()) else lines
    return found[0].strip()[:limit] if found else ""
