"""What the tool and its tests need beside torch: pyproject.toml says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from graft.places import ROOT


def load(root: Path = ROOT, groups: tuple[str, ...] = ("dev", "upstream", "report")) -> list[str]:
    """The requirements of the tool itself and of these optional groups."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    wanted: list[str] = list(project["dependencies"])
    for group in groups:
        wanted += project["optional-dependencies"][group]
    return wanted


def normal(requirement: str) -> str:
    """The name that a requirement or a wheel's file begins with, as registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~;\[ ]", requirement)[0]).lower()


def names(root: Path = ROOT) -> list[str]:
    """The names alone."""
    return [normal(each) for each in load(root)]


def with_wheel(wheels: Path, root: Path = ROOT) -> list[str]:
    """Those requirements that a folder of wheels has a wheel of, whatever its version."""
    there = {normal(file.name.split("-")[0]) for file in wheels.glob("*.whl")}
    return [each for each in load(root) if normal(each) in there]
