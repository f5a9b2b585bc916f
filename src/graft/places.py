"""Where this repository is, and its folder of sources."""

from __future__ import annotations

import tempfile
from pathlib import Path

SRC = Path(__file__).resolve().parents[1]
"""What goes on the path of a Python that is to import this tool."""

ROOT = SRC.parent
"""The root of this repository."""


def without_folders(text: str) -> str:
    """What an error says without this machine's folders: results are committed."""
    for folder, name in (
        (str(ROOT), "."),
        (tempfile.gettempdir(), "$TMP"),
        (str(Path.home()), "~"),
    ):
        text = text.replace(folder, name)
    return text
