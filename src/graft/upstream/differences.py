"""Where the outcomes of upstream's own tests differ on purpose, in tests/upstream-differences.toml.

    [[difference]]
    pin = "v2.11.0"
    test = "inductor/test_perf.py::NumBytesMetricTests::test_reduction"
    stock = "passed"
    patched = "skipped"
    patch = "a-patch-of-the-series.patch"
    reason = "what the patch means by it"

`test` may hold the wildcards of a shell. A difference that hunks on the test itself can make good
does not belong here, but into the patch.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from graft.errors import GraftError, nearest
from graft.places import ROOT
from graft.stack import Stack
from graft.testing.runner import OUTCOMES


@dataclass(frozen=True)
class Difference:
    """A test whose outcome a patch changes on purpose, and why."""

    test: str
    stock: str
    patched: str
    patch: str
    reason: str

    def means(self, test: str, outcomes: tuple[str, str]) -> bool:
        """Whether it explains these outcomes, stock's and patched's."""
        return self.covers(test) and outcomes == (self.stock, self.patched)

    def covers(self, test: str) -> bool:
        """Whether it is about this test."""
        return fnmatch.fnmatchcase(test, self.test)


def file(root: Path = ROOT) -> Path:
    """Where the differences are kept."""
    return root / "tests" / "upstream-differences.toml"


def load(stack: Stack, root: Path = ROOT) -> tuple[Difference, ...]:
    """Those of the stack's pin; none where there is no file.

    Raises GraftError for a line that lacks a field or a reason, has an outcome that is none, or
    names a patch that the series has not.
    """
    path = file(root)
    if not path.exists():
        return ()
    shown = path.relative_to(root)
    try:
        entries = tomllib.loads(path.read_text("utf-8")).get("difference", [])
    except tomllib.TOMLDecodeError as wrong:
        raise GraftError(f"{shown} is not TOML: {wrong}") from wrong
    ours = [entry for entry in entries if entry.get("pin") == stack.pin.name]
    if any("pin" not in entry for entry in entries):
        raise GraftError(f"{shown}: a difference names no pin", f'pin = "{stack.pin.name}"')
    return tuple(
        _read(entry, [patch.name for patch in stack.patches], str(shown)) for entry in ours
    )


def _read(entry: dict[str, object], patches: Sequence[str], shown: str) -> Difference:
    names = [each.name for each in fields(Difference)]
    where = f"{shown}: the difference of {entry.get('test')}"
    texts = {}
    for name in names:
        value = entry.get(name)
        if not isinstance(value, str) or not value.strip():
            raise GraftError(f"{where} has no {name}; expected {', '.join(names)}")
        texts[name] = value
    if unknown := set(entry) - {*names, "pin"}:
        raise GraftError(f"{where} has {unknown.pop()}; expected {', '.join(names)}")
    for name in ("stock", "patched"):
        outcomes = (*OUTCOMES, "missing")
        if texts[name] not in outcomes:
            raise GraftError(f"{where}: {name} = {texts[name]!r}; expected {', '.join(outcomes)}")
    if texts["patch"] not in patches:
        raise GraftError(
            f"{where} names {texts['patch']}, which the series has not"
            f"{nearest(texts['patch'], patches)}"
        )
    return Difference(**texts)
