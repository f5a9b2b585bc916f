"""Where this repository is, and its folder of sources."""

from __future__ import annotations

from pathlib import Path

SRC = Path(__file__).resolve().parents[1]
"""What goes on the path of a Python that is to import this tool."""

ROOT = SRC.parent
"""The root of this repository."""
