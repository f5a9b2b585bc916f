"""What a user sees when something is wrong: what it is, and what to type next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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


def nearest(name: str, known: Iterable[str]) -> str:
    """``'; did you mean X?'`` for a misspelt `name`, or the list of what there is."""
    names = sorted(known)
    folded = {each.casefold(): each for each in names}
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {folded[close[0]]}?"
    return f"; there are: {', '.join(names)}" if names else "; there are none"
