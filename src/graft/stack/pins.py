"""A pin: the one PyTorch release that a series is made for, as data."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graft.errors import GraftError, UsageError, nearest
from graft.places import ROOT
from graft.stack.git import blob_id

if TYPE_CHECKING:
    from graft.stack.trees.bases import Base

DEFAULT_PIN = "v2.11.0"

_HEX40 = re.compile(r"[0-9a-f]{40}\Z")


@dataclass(frozen=True)
class Pin:
    """A release: its tag, version and commit, and the git blob id of each file that is touched.

    `files` maps ``torch/_inductor/config.py`` to 40 hexadecimal digits.
    """

    name: str
    version: str
    commit: str
    files: Mapping[str, str]


def parse(text: str, name: str, where: str) -> Pin:
    """The pin that `text` (TOML) describes. Raises GraftError naming `where` and what is wrong."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as wrong:
        raise GraftError(f"{where} is not TOML: {wrong}") from wrong
    version, commit, files = data.get("version"), data.get("commit"), data.get("files", {})
    if not isinstance(version, str):
        raise GraftError(f'{where}: expected version = "2.11.0", found {version!r}')
    if not isinstance(commit, str) or not _HEX40.match(commit):
        raise GraftError(f"{where}: expected commit = 40 hexadecimal digits, found {commit!r}")
    for path, blob in files.items():
        if not isinstance(blob, str) or not _HEX40.match(blob):
            raise GraftError(f"{where}: expected a git blob id for {path}, found {blob!r}")
    return Pin(name, version, commit, dict(sorted(files.items())))


def render(pin: Pin) -> str:
    """The text of a pin's file, the same for the same pin."""
    lines = [
        f"# PyTorch {pin.version}: the release that patches/{pin.name} is made for.",
        f'version = "{pin.version}"',
        f'commit = "{pin.commit}"',
        "",
        "# Git blob ids of the files that the stack touches or builds on.",
        "# A base whose file differs is refused, by name.",
        "[files]",
    ]
    lines += [f'"{path}" = "{blob}"' for path, blob in sorted(pin.files.items())]
    return "\n".join(lines) + "\n"


def file(name: str = DEFAULT_PIN, root: Path = ROOT) -> Path:
    """Where the pin called `name` is kept."""
    return root / "pins" / f"{name}.toml"


def names(root: Path = ROOT) -> list[str]:
    """The pins that there are."""
    return sorted(path.stem for path in (root / "pins").glob("*.toml"))


def own(name: str, pin: str) -> str:
    """What the default pin calls `name` (build, .venv, edit), and another one `name`-`pin`."""
    return name if pin == DEFAULT_PIN else f"{name}-{pin}"


def load(name: str = DEFAULT_PIN, root: Path = ROOT) -> Pin:
    """Read ``pins/<name>.toml``. Raises UsageError for an unknown name."""
    path = file(name, root)
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError as missing:
        raise UsageError(
            f"there is no pin {name}{nearest(name, names(root))}",
            next="./build.sh --pin NAME, with a name from pins/",
        ) from missing
    return parse(text, name, f"pins/{path.name}")


def with_files(pin: Pin, base: Base, paths: list[str]) -> Pin:
    """`pin` with the blob ids that `base` has for `paths` added (what ``graft refresh`` writes).

    Raises GraftError for a path that the base does not have.
    """
    added = {}
    for path in paths:
        try:
            added[path] = blob_id((base.torch_dir.parent / path).read_bytes())
        except FileNotFoundError as missing:
            raise GraftError(
                f"torch {base.version} has no {path} (looked in {base.torch_dir}), "
                "so no pin can name it"
            ) from missing
    return replace(pin, files=dict(sorted({**pin.files, **added}.items())))


def save(pin: Pin, root: Path = ROOT) -> bool:
    """Write a pin's file, at once or not at all. False if it already said just that."""
    path, text = file(pin.name, root), render(pin)
    if path.exists() and path.read_text("utf-8") == text:
        return False
    aside = path.with_suffix(".toml.new")
    aside.write_text(text, "utf-8")
    os.replace(aside, path)
    return True


def check_base(pin: Pin, base: Base) -> None:
    """Raise GraftError unless `base` is the pinned release, naming each file that differs."""
    released = base.version.partition("+")[0]
    if released != pin.version:
        raise GraftError(
            f"{base.python} has torch {base.version}, and {pin.name} is for torch {pin.version}",
            next=f"./build.sh --python PY --offline, with a Python that has torch=={pin.version}",
        )
    if base.git_version != pin.commit:
        raise GraftError(
            f"torch {base.version} of {base.python} was built from commit "
            f"{base.git_version or 'unknown'}, and {pin.name} is {pin.commit}",
            next=f"pip install torch=={pin.version} (a release, not a nightly or your own build)",
        )
    problems = differing(pin, base.torch_dir)
    if problems:
        raise GraftError(
            f"torch in {base.torch_dir} is not the released {pin.version}: {'; '.join(problems)}",
            next=f"pip install --force-reinstall --no-deps torch=={pin.version}, "
            "then the same command",
        )


def differing(pin: Pin, torch_dir: Path) -> list[str]:
    """One entry for each pinned file that `torch_dir` has otherwise, or not at all."""
    problems = []
    for path, blob in pin.files.items():
        try:
            found = blob_id((torch_dir.parent / path).read_bytes())
        except OSError:
            problems.append(f"{path} is missing")
            continue
        if found != blob:
            problems.append(f"{path} differs (blob {found[:12]}, the pin has {blob[:12]})")
    return problems
