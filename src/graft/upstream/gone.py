"""What stands in for a name that a test file imports and this torch does not have.

A file of upstream's from another time names things that the release does not have yet, or no more.
One of them would keep all of its tests from running. `Gone` runs in the pythons that are compared:
the standard library alone.
"""

from __future__ import annotations

import unittest
from typing import Any


class Gone:
    """A name that is not there. What it decorates, or what derives from it, is skipped; it is
    false, and whatever else is asked of it raises NameError."""

    def __init__(self, name: str) -> None:
        self._gone = name

    @property
    def _reason(self) -> str:
        return f"{self._gone} is not in this torch"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]) and hasattr(args[0], "__name__"):
            return unittest.skip(self._reason)(args[0])
        return self  # a decorator's arguments

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        skipped = {"__unittest_skip__": True, "__unittest_skip_why__": self._reason}
        return (type("Gone", (unittest.TestCase,), skipped),)

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NameError(self._reason)

    def __enter__(self) -> Any:
        raise NameError(self._reason)

    def __exit__(self, *args: object) -> None:
        pass

    def __iter__(self) -> Any:
        raise NameError(self._reason)
