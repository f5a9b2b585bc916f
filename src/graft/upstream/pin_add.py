"""`graft pin add`: a pin of another release, and what becomes of the series on it.

The release's files are had (`release`), the series is tried on them (`trial`), and the
patches that apply without those that do not are written, all or none (`new_pin`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from graft import stack as stacks
from graft.errors import UsageError
from graft.places import ROOT
from graft.stack import pins
from graft.stack.trees import tree
from graft.upstream import new_pin, release
from graft.upstream.release import Release
from graft.upstream.trial import Trial, attempt


def of_version(
    prefix: Path,
    version: str,
    *,
    old: str | None = None,
    python: Path | None = None,
    files: Path | None = None,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
    root: Path = ROOT,
) -> Trial:
    """Try the series of the pin `old` (default: that of the tree at `prefix`) on torch `version`.

    Its files are those of `python`, of the folder `files`, or of an installation that is made for
    it. The old release's are those of the tree's base. Raises as `attempt` and where those come
    from do, and, unless it is a `dry_run`, for a pin that is there.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        short = re.fullmatch(r"\d+\.\d+", version)
        raise UsageError(
            f"{version} is no version of torch; expected three numbers, as 2.12.1",
            f"graft pin add {version}.0" if short else "graft pin add 2.12.1",
        )
    built = tree.load(prefix)
    stack = stacks.load(pins.load(old or built.pin, root), root)
    if version == stack.pin.version:
        raise UsageError(f"the series is that of {version}", "graft pin add with another version")
    pins.check_base(stack.pin, built.base)
    if not dry_run:
        new_pin.check_absent(version, root)
    if files:
        new = release.of_folder(files, version)
    elif python:
        new = release.of_python(python, version)
    else:
        new = release.install(version, root, say)
    base = built.base
    return attempt(stack, Release(base.version, base.git_version, base.torch_dir.parent), new)
