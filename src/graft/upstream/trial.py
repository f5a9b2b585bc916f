"""A series tried on another release: a verdict a patch, and the stack of what applies.

Both releases' files and the series are commits of a throwaway repository, where each patch is
merged onto the new release three-way, so that a hunk follows its place, and a file its new name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from graft.errors import GraftError
from graft.stack import Stack, commits, release_numbers
from graft.stack.git import blob_id
from graft.stack.pins import Pin
from graft.upstream.release import Release
from graft.upstream.three_way import Grafter, Verdict


@dataclass(frozen=True)
class Trial:
    """The series of `old` on `new`: a verdict a patch, and the stack of what applies.

    `tried` is the hash of the stack that was tried; `gone` are files of the old pin that the new
    release has not; `broken` are the files that are no Python any more, once the stack is applied.
    """

    old: Pin
    new: Pin
    verdicts: tuple[Verdict, ...]
    stack: Stack
    tried: str
    gone: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    def count(self, state: str) -> int:
        """The patches of that state."""
        return sum(verdict.state == state for verdict in self.verdicts)


def attempt(stack: Stack, old: Release, new: Release) -> Trial:
    """Try the patches of `stack`, made for `old`, on `new`; nothing is written.

    Raises GraftError where the files of `old` are not the pin's.
    """
    touched = {*stack.pin.files, *stack.files}
    before, after = old.read(touched), new.read(touched)
    for path, blob in stack.pin.files.items():
        if path not in before or blob_id(before[path]) != blob:
            raise GraftError(
                f"{old.folder}/{path} is not that of torch {stack.pin.version}",
                f"pip install --force-reinstall --no-deps torch=={stack.pin.version}",
            )
    with tempfile.TemporaryDirectory(prefix="graft-pin-") as aside:
        repo = commits.make(Path(aside) / "repo", before, stack.patches)
        grafter = Grafter(repo, stack, release_numbers(new.version), after)
        verdicts, carried = grafter.judge()
        written, left_out = grafter.keep(verdicts, carried)
        pin = _pin(stack, new, after)
        made, broken = grafter.patches(pin, written)
        commits.make(Path(aside) / "again", after, made)  # they apply as they are, one by one
        verdicts = [replace(v, left_out=left_out.get(v.patch.name, "")) for v in verdicts]
        gone = tuple(path for path in stack.pin.files if path not in after)
        return Trial(stack.pin, pin, tuple(verdicts), Stack(pin, made), stack.hash, gone, broken)


def _pin(stack: Stack, new: Release, after: Mapping[str, bytes]) -> Pin:
    files = {path: blob_id(after[path]) for path in stack.pin.files if path in after}
    version = new.version.partition("+")[0]
    return Pin(f"v{version}", version, new.commit, files)
