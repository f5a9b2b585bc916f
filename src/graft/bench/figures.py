"""The figures in a patch's message, written from a result file when the stack is refreshed.

``bench/figures.toml`` says which: the words of a table as a page's marker has them
(`graft.bench.tables`), by patch.

    ["cap-the-reads-of-a-mix-order-reduction-kernel.patch"]
    table = "bench/results/h200_read_cap.json case=scaled_residual"

In the message they are a line ``Figures (NVIDIA H200, torch 2.11.0)``, an empty line, and the
table, up to the next empty line. A message without such a line gets it before its test plan.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.bench import results, tables
from graft.errors import GraftError, nearest
from graft.places import ROOT
from graft.stack import Stack

_BLOCK = re.compile(r"^Figures \([^\n]*\)\n\n(?:\|[^\n]*\n)*", re.M)
_PLAN = re.compile(r"^Test plan:", re.M | re.I)


def file(root: Path = ROOT) -> Path:
    """Where it is said which figures a message has."""
    return root / "bench" / "figures.toml"


def load(root: Path = ROOT) -> dict[str, str]:
    """The block of figures of each patch that has some, by the patch's name.

    Raises GraftError for an entry that is no table of a result file.
    """
    path = file(root)
    if not path.exists():
        return {}
    try:
        entries = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as wrong:
        raise GraftError(f"bench/{path.name} is not TOML: {wrong}") from wrong
    return {name: _block(name, entry, root) for name, entry in entries.items()}


def _block(name: str, entry: Any, root: Path) -> str:
    words = entry.get("table") if isinstance(entry, dict) else None
    if not isinstance(words, str) or set(entry) != {"table"}:
        raise GraftError(
            f"bench/figures.toml: expected table = 'bench/results/FILE.json ...' for {name}"
        )
    spec = words.split()
    table = tables.table(spec, root, f"bench/figures.toml, {name}")
    result = results.load(root / spec[0])
    gpus = dict.fromkeys(gpu["name"] for gpu in result["gpus"])
    versions = dict.fromkeys(
        f"torch {each['torch'].partition('+')[0]}"
        for each in result["contenders"].values()
        if each.get("torch")
    )
    return f"Figures ({', '.join([*gpus, *versions])})\n\n{table}\n"


def reworded(message: str, block: str | None) -> str:
    """`message` with the `block` of its figures as due; without one, as it is."""
    if block is None:
        return message
    if _BLOCK.search(message):
        return _BLOCK.sub(lambda _: block, message, count=1)
    plan = _PLAN.search(message)
    if plan:
        return f"{message[: plan.start()]}{block}\n{message[plan.start() :]}"
    return f"{message.rstrip()}\n\n{block}"


def check(blocks: Mapping[str, str], names: list[str]) -> None:
    """Raise GraftError for figures of a patch that the series has not."""
    for name in blocks:
        if name not in names:
            raise GraftError(
                f"bench/figures.toml names {name}, and the series has no such patch"
                f"{nearest(name, names)}",
                "fix or remove the entry",
            )


def reworded_all(names: list[str], messages: list[str], root: Path = ROOT) -> list[str]:
    """The messages of the patches called `names`, with their figures as due.

    Raises GraftError as `load` and `check` do.
    """
    blocks = load(root)
    check(blocks, names)
    return [reworded(text, blocks.get(name)) for name, text in zip(names, messages, strict=True)]


def write_pages(root: Path = ROOT) -> list[str]:
    """Write the tables of the pages whose figures are of the stack as it is; their names."""
    written = []
    for page, _, due in list(tables.stale(root, only=tables.CURRENT)):
        page.write_text(due, "utf-8")
        written.append(page.relative_to(root).as_posix())
    return written


def stale(stack: Stack, root: Path = ROOT) -> list[str]:
    """The patches whose messages and result files disagree.

    Raises GraftError as `load` and `check` do.
    """
    names = [patch.name for patch in stack.patches]
    messages = [patch.message for patch in stack.patches]
    due = reworded_all(names, messages, root)
    return [name for name, old, new in zip(names, messages, due) if old != new]
