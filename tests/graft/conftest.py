"""What several of the tool's tests stand on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import standin
from hypothesis import settings

from graft.stack.trees import bases

# The same examples in every run of CI; others at each run by hand.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def origin(tmp_path_factory: pytest.TempPathFactory) -> tuple[bases.Base, Path]:
    """A stand-in for an installed torch, and a checkout of the same commit."""
    folder = tmp_path_factory.mktemp("standin")
    commit = standin.make_checkout(folder / "checkout")
    return bases.probe(standin.make_base(folder / "base", commit)), folder / "checkout"
