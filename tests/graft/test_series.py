"""The stack as it is read: its eight series, their patches' subjects, and the pages about them."""

from __future__ import annotations

import re
from pathlib import Path

from graft import stack
from graft.places import ROOT
from graft.stack import pins
from graft.stack.series import series_file

SERIES = (
    "correctness",
    "fusion reach",
    "row split",
    "wide and unaligned rows",
    "registers and profit",
    "producer sums",
    "row reductions and softmax",
    "tiling and pointwise",
)
MOST_PATCHES, SUBJECT_LENGTH, PAGE_LINES, TERMS = 30, 60, 60, 15


def named(text: str) -> dict[str, list[str]]:
    """The patches of each series, by the comment ``# series: NAME`` above its first one."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if mark := re.fullmatch(r"# series: (.+)", line):
            name = mark[1]
            assert name not in found, f"{name} is named twice"
            found[name] = []
        elif line and not line.startswith("#"):
            found[name].append(line.split()[0])
    return found


def test_series_are_named_in_order() -> None:
    found = named(series_file(pins.load()).read_text("utf-8"))
    assert tuple(found) == SERIES
    assert all(found.values())
    assert sum(map(len, found.values())) <= MOST_PATCHES


def test_subjects_are_short() -> None:
    for patch in stack.load(pins.load()).patches:
        subject = re.sub(r"^\[PATCH\] |^\[inductor\] ", "", patch.subject)
        assert len(subject) <= SUBJECT_LENGTH, subject
        assert "Test plan:" in patch.message, subject


def test_each_patch_has_a_page_and_a_place_in_the_list() -> None:
    patches = stack.load(pins.load()).patches
    pages = [f"{Path(patch.name).stem}.md" for patch in patches]
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs/patches").glob("*.md"))
    for patch, page in zip(patches, pages, strict=True):
        lines = (ROOT / "docs/patches" / page).read_text("utf-8").splitlines()
        assert lines[0] == f"# {patch.subject.removeprefix('[inductor] ')}"
        assert len(lines) <= PAGE_LINES, page
    listed = re.findall(r"\(patches/([\w-]+\.md)\)", (ROOT / "docs/series.md").read_text("utf-8"))
    assert listed == pages


def test_links_between_pages() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_glossary() -> None:
    rows = re.findall(r"^\| ", (ROOT / "docs/glossary.md").read_text("utf-8"), re.M)
    assert len(rows) - 2 <= TERMS
