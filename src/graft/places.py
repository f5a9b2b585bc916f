"""Where this repository is, and its folder of sources."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SRC = Path(__file__).resolve().parents[1]
"""What goes on the path of a Python that is to import this tool."""

ROOT = SRC.parent
"""The root of this repository."""


def user_cache() -> Path:
    """Where this user's caches of this tool are: what may go at any time."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if cache.startswith("~"):  # of a user without a home
        cache = tempfile.gettempdir()
    return Path(cache) / "inductor-graft"


def without_folders(text: str) -> str:
    """What an error says without this machine's folders: results are committed."""
    for folder, name in (
        (str(ROOT), "."),
        (tempfile.gettempdir(), "$TMP"),
        (str(Path.home()), "~"),
    ):
        text = text.replace(folder, name)
    return text
