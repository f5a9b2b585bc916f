"""What was compiled: whether two contenders run the same code.

Inductor tunes a kernel over a few configurations by a short clock of its own, and near a tie two
processes may choose differently. Then the same code has two times, some 10 % apart: a difference
that no change of code made, and that a reader of results should know from one that a change made.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from unittest import mock

from graft.lab.generated_code import code_lines

# What a generated file says of the installation that generated it.
_INSTALLATION = re.compile(r"'(?:backend_hash|triton_hash)': '[^']*',? ?")


@contextlib.contextmanager
def collected() -> Iterator[list[str]]:
    """The source of each graph that is compiled within, in order."""
    from torch._inductor.graph import GraphLowering

    sources: list[str] = []
    with mock.patch.object(GraphLowering, "save_output_code", staticmethod(sources.append)):
        yield sources


def digest(sources: Iterable[str]) -> str:
    """Of the sources without comments and blank lines, and without hashes of the installation."""
    found = hashlib.sha256()
    for source in sources:
        for line in code_lines(source):
            found.update(_INSTALLATION.sub("", line).encode() + b"\n")
        found.update(b"\0")
    return found.hexdigest()[:12]
