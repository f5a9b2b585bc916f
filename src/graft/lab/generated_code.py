"""The text that Inductor generates, as what it says: two texts with these lines are one code."""

from __future__ import annotations


def code_lines(text: str) -> list[str]:
    """Of `text`, without comments, blank lines and what a line has of spaces at its end."""
    stripped = (line.rstrip() for line in text.splitlines())
    return [line for line in stripped if line and not line.lstrip().startswith("#")]
