"""What the comparisons of stock and patched without a GPU share: a tool run by a side's torch."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graft.errors import GraftError
from graft.lab import explain
from graft.stack.trees import tree


def answer(what: str, python: Sequence[str], module: str, args: Sequence[str]) -> Any:
    """What `module` prints last, as JSON, when `python` runs it with `args`, for a described GPU.

    Raises GraftError, about `what`, with the last lines of a run that failed.
    """
    done = subprocess.run(
        [*python, "-m", module, *args],
        env=explain.environment(described=True),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise GraftError(f"{what}: " + "\n  ".join(done.stderr.splitlines()[-8:]))
    return json.loads(done.stdout.splitlines()[-1])


def about(prefix: Path, gpu: str) -> dict[str, str]:
    """What a comparison's file begins with: pin and stack of the tree at `prefix`, and the GPU."""
    there = tree.load(prefix)
    return {"pin": there.pin, "stack": there.stack_hash, "gpu": gpu}


def write(path: Path, **found: Any) -> None:
    """Write what was `found`, with the date."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": date, **found}, indent=1) + "\n", "utf-8")
