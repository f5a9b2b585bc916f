"""What `graft bench publish` measures, as `bench/publish.toml` lists it: a table a part.

    gpu = "NVIDIA H200"

    [norms14]
    title = "norms of 14 shapes"
    command = "graft bench rms_norm_backward --shapes norms14 --dtype bf16 --peers DIR"
    result = "bench/results/h200_norms14.json"
    minutes = 2.5

`title` names its lines in a summary (`graft.bench.tables`). `command` is what the result file says
too, so `DIR` stands for the folder of the peers' wheels, and `--out` is left out. `minutes` are
those of one such GPU, with empty caches.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.bench import carried, results
from graft.errors import GraftError
from graft.places import ROOT
from graft.stack.pins import DEFAULT_PIN

_FIELDS: Mapping[str, type | tuple[type, ...]] = {
    "title": str,
    "command": str,
    "result": str,
    "minutes": (int, float),
}
# What a result file's command does not have, or has only where the peers came from a folder.
# How many compile side by side is of no account.
_NOT_KEPT = re.compile(r" --peers DIR| --rounds \d+| --jobs-per-gpu \d+")


@dataclass(frozen=True)
class Part:
    """One run of `graft bench`, and the file in `bench/results` that holds what it measured."""

    name: str
    title: str
    command: str
    result: str
    minutes: float

    @property
    def models(self) -> bool:
        """Whether it measures models of other libraries."""
        return self.command.startswith("graft bench models")

    @property
    def peers(self) -> bool:
        """Whether libraries are measured that can come as wheels in a folder."""
        return " --peers DIR" in self.command


@dataclass(frozen=True)
class Published:
    """The parts, in the order in which they are measured, and the GPU that they are of."""

    gpu: str
    parts: tuple[Part, ...]

    def of(self, result: str) -> Part | None:
        """The part that makes a result file, by its path from the root."""
        return next((part for part in self.parts if part.result == result), None)

    def like(self, result: str) -> Part | None:
        """The part that makes a result file, on its own GPU or on another."""
        made = _without_gpu(result)
        return next((part for part in self.parts if _without_gpu(part.result) == made), None)


def _without_gpu(result: str) -> str:
    """The name of a result file, without the GPU that it begins with."""
    return re.sub(r"^[a-z]+\d+_", "", Path(result).name)


@dataclass(frozen=True)
class Kept:
    """What a result file says of its run: how much of it there is, by which stack, and when.

    `command` is whether it is of the part's; `absent` are contenders that were left out;
    `same_code` the hash of a stack that generates the same code for all of it.
    """

    stack_hash: str
    date: str
    complete: bool
    points: int
    command: bool
    absent: tuple[str, ...] = ()
    same_code: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the part."""
        return self.complete and self.command

    def is_of(self, stack_hash: str) -> bool:
        """Whether it is all of the part as the stack is, or as one with the same code."""
        return self.is_whole and stack_hash in (self.stack_hash, self.same_code)


def file(root: Path = ROOT) -> Path:
    """Where the parts are listed."""
    return root / "bench" / "publish.toml"


def load(root: Path = ROOT) -> Published:
    """The parts. Raises GraftError for a list that is not there, or not as it has to be."""
    where = "bench/publish.toml"
    try:
        data = tomllib.loads(file(root).read_text("utf-8"))
    except OSError as error:
        raise GraftError(f"{where}: {error.strerror}", f"git checkout {where}") from None
    except tomllib.TOMLDecodeError as wrong:
        raise GraftError(f"{where} is not TOML: {wrong}") from wrong
    gpu = data.pop("gpu", None)
    if not isinstance(gpu, str):
        raise GraftError(f"{where}: gpu is {gpu!r}, expected a GPU's name, as NVIDIA H200")
    return Published(gpu, tuple(_part(name, entry) for name, entry in data.items()))


def _part(name: str, entry: Any) -> Part:
    where = f"bench/publish.toml, {name}"
    if not isinstance(entry, dict) or set(entry) != set(_FIELDS):
        raise GraftError(f"{where}: expected {', '.join(_FIELDS)}, and no more")
    for field, kind in _FIELDS.items():
        if not isinstance(entry[field], kind):
            raise GraftError(f"{where}: {field} is {entry[field]!r}")
    if not entry["command"].startswith("graft bench "):
        raise GraftError(f"{where}: expected graft bench …, found {entry['command']!r}")
    if not re.fullmatch(r"bench/results/[\w.-]+\.json(\.gz)?", entry["result"]):
        raise GraftError(f"{where}: expected bench/results/FILE.json, found {entry['result']!r}")
    return Part(name, **entry)


def tree_hash(root: Path = ROOT, pin: str = DEFAULT_PIN) -> str | None:
    """The hash of the stack that patches/ has for `pin`; None where there is no such pin."""
    from graft import stack
    from graft.stack import pins

    if not pins.file(pin, root).exists():
        return None
    return stack.load(pins.load(pin, root), root).hash


def kept(path: Path, command: str, root: Path = ROOT) -> Kept | None:
    """What a result file or a journal (`.part`) of `command` says of its run; None without one.

    A file that cannot be read is as none: it is measured anew.
    """
    try:
        text = results.read_text(path)
        lines = text.splitlines()
        data = json.loads(lines[0] if path.suffix == ".part" else text)
        journal = [line for line in lines if not line.startswith('{"schema"')]
        rows = len(journal) if path.suffix == ".part" else len(data.get("rows", ()))
        return Kept(
            stack_hash=data["stack_hash"],
            date=data["date"][:10],
            complete=path.suffix != ".part" and data.get("complete", True),
            points=rows,
            command=same(command, data.get("commands", [command])),
            absent=tuple(
                label
                for label, about in data.get("contenders", {}).items()
                if isinstance(about, dict) and "absent" in about
            ),
            same_code=carried.stack(path, data["stack_hash"], root),
        )
    except (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None


def same(command: str, found: Any) -> bool:
    """Whether a file whose commands are `found` is of `command` alone."""
    return {_NOT_KEPT.sub("", each) for each in found} == {_NOT_KEPT.sub("", command)}
