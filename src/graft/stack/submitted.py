"""What was sent of each patch, and where to: ``patches/<pin>/submitted.toml``.

A send that may be interrupted is noted before it starts (`coming`) and settled by the next one,
which asks the remote what it has.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from graft.errors import GraftError
from graft.places import ROOT
from graft.stack.pins import Pin

_HEAD = "# What was sent of each patch, by repository; written by graft submit.\n"


@dataclass(frozen=True)
class Pull:
    """A pull request: its number, and the tree (ghstack-source-id) that it was brought to.

    `coming` is the tree that a send under way, or interrupted, brings it to; `comment_id` the
    comment about the stack, where the repository has ghstack write one.
    """

    number: int
    source_id: str
    coming: str | None = None
    comment_id: int | None = None


@dataclass(frozen=True)
class Branch:
    """A branch of a fork: its name, and the commit that it was pushed to (`coming`: as above)."""

    name: str
    commit: str
    coming: str | None = None


@dataclass(frozen=True)
class Submitted:
    """By repository (``owner/name``), by patch file: pull requests, and branches of forks."""

    pulls: Mapping[str, Mapping[str, Pull]]
    branches: Mapping[str, Mapping[str, Branch]]

    def with_pulls(self, repository: str, pulls: Mapping[str, Pull]) -> Submitted:
        """The same, with these for one repository."""
        return replace(self, pulls={**self.pulls, repository: dict(pulls)})

    def with_branches(self, repository: str, branches: Mapping[str, Branch]) -> Submitted:
        """The same, with these for one repository."""
        return replace(self, branches={**self.branches, repository: dict(branches)})

    def render(self) -> bytes | None:
        """The text of the file, the same for the same content; None where there is nothing."""
        text = ""
        for kind, tables in (("pull_requests", self.pulls), ("branches", self.branches)):
            for repository, entries in sorted(tables.items()):
                for patch, entry in sorted(entries.items()):
                    text += f"\n[{kind}.{_quoted(repository)}.{_quoted(patch)}]\n"
                    text += "".join(
                        f"{key} = {value if isinstance(value, int) else _quoted(value)}\n"
                        for key, value in vars(entry).items()
                        if value is not None
                    )
        return f"{_HEAD}{text}".encode() if text else None


def _quoted(text: str) -> str:
    return json.dumps(text)  # a JSON string is a TOML one


def file(pin: Pin, root: Path = ROOT) -> Path:
    """Where it is kept."""
    return root / "patches" / pin.name / "submitted.toml"


def load(pin: Pin, root: Path = ROOT) -> Submitted:
    """What was sent of the pin's patches. Raises GraftError for a file that cannot be read."""
    path = file(pin, root)
    shown = f"patches/{pin.name}/{path.name}"
    try:
        data = tomllib.loads(path.read_text("utf-8"))
        pulls = {
            repository: {patch: Pull(**entry) for patch, entry in entries.items()}
            for repository, entries in data.pop("pull_requests", {}).items()
        }
        branches = {
            repository: {patch: Branch(**entry) for patch, entry in entries.items()}
            for repository, entries in data.pop("branches", {}).items()
        }
    except FileNotFoundError:
        return Submitted({}, {})
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as wrong:
        raise GraftError(f"{shown} is not what graft submit writes: {wrong}", _MEND) from wrong
    if data:
        raise GraftError(f"{shown} has {', '.join(data)}, which graft submit does not write", _MEND)
    return Submitted(pulls, branches)


_MEND = "git checkout it as it was"


def renamed(sent: Submitted, names: Mapping[str, str]) -> Submitted:
    """The same, of patches whose files have new names (old -> new)."""
    return Submitted(
        {r: {names.get(p, p): e for p, e in entries.items()} for r, entries in sent.pulls.items()},
        {
            r: {names.get(p, p): e for p, e in entries.items()}
            for r, entries in sent.branches.items()
        },
    )
