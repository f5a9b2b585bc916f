"""What a result file holds for other stacks than the one that it is of: the same generated code.

`graft bench carry` compares the codes, to the letter, and `bench/same_code.json` keeps what it
found: by the name of a result file, the stack that it was measured with, and the latest that
generates the same. A file that is measured anew leaves its entry behind, which counts for nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

from graft.errors import GraftError
from graft.places import ROOT


def file(root: Path = ROOT) -> Path:
    """Where it is kept."""
    return root / "bench" / "same_code.json"


def stack(result: Path, measured: str, root: Path = ROOT) -> str | None:
    """The hash of the stack with the same code as `measured`, for what `result` holds.

    Raises GraftError for a file that is none.
    """
    entry = _load(root).get(result.name, {})
    return entry.get("same") if entry.get("measured") == measured else None


def keep(result: Path, measured: str, stack: str, date: str, root: Path = ROOT) -> None:
    """Keep that `stack` has the code of `measured`, as seen on `date`."""
    kept = _load(root)
    kept[result.name] = {"measured": measured, "same": stack, "date": date}
    text = json.dumps(dict(sorted(kept.items())), indent=1)
    file(root).write_text(text + "\n", "utf-8")


def _load(root: Path) -> dict[str, dict[str, str]]:
    try:
        kept = json.loads(file(root).read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as wrong:
        name = file(root).relative_to(root)
        raise GraftError(f"{name} is not JSON: {wrong}", f"git checkout {name}") from None
    return dict(kept)
