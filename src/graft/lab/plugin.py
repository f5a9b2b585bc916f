"""The pytest plugin of tests that are not this repository's: a GPU is described to torch.

Before a test file imports it. What would take Triton's interpreter too long is generated, and its
results are eager's.
"""

from __future__ import annotations

from graft.lab import backend


def pytest_configure() -> None:
    """Describe it for the life of the process."""
    backend.install(over_budget="eager")
