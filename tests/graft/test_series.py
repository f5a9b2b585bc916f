"""The stack as it is read: its eight series, their patches' subjects, and the pages about them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hosted import wheel_checkout

from graft import stack
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import Stack, commits, export, modules_page, pins, read_series
from graft.stack.alone import alone
from graft.stack.conflicts import CLEAN
from graft.stack.git import git

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
OF_TYPES = ("OpsValue", "WorkspaceArg")  # that annotations name, and nothing imports from there
MOST_PATCHES, SUBJECT_LENGTH, PAGE_LINES, TERMS = 30, 60, 60, 15


def test_series_are_named_in_order() -> None:
    found = stack.load(pins.load())
    assert tuple(series.name for series in found.series) == SERIES
    assert [series.name for series in found.series if series.alone] == [*SERIES[-2:]]
    in_them = [name for series in found.series for name in series.patches]
    assert in_them == [patch.name for patch in found.patches]
    assert len(in_them) <= MOST_PATCHES


def test_a_series_is_found_by_its_name_or_slug() -> None:
    found = stack.load(pins.load())
    for name in SERIES:
        assert found.series_of(name) is found.series_of(name.replace(" ", "-"))
    with pytest.raises(UsageError) as wrong:
        found.series_of("tilings")
    assert all(name in wrong.value.message for name in SERIES)


@pytest.mark.parametrize(
    "lines",
    [["# series: a", "# series: b", "x.patch"], ["# series: a", "x", "# series: a", "y"]],
)
def test_series_that_are_wrong(lines: list[str]) -> None:
    with pytest.raises(GraftError, match="series a in here has"):
        read_series(lines, "here")


@pytest.mark.parametrize("name", SERIES)
def test_each_series_applies_without_the_later_ones(name: str, prefixes: commits.Repo) -> None:
    """Behind it, every module compiles, and what it imports of the package is there."""
    found = stack.load(pins.load())
    series = found.series_of(name)
    at = [patch.name for patch in found.patches].index(series.patches[-1])
    prefixes.git("checkout", "-q", "--detach", prefixes.commits("stack")[at])
    check(prefixes.path, found.up_to(series))


def test_each_patch_defines_the_names_of_its_tests(prefixes: commits.Repo) -> None:
    for commit in prefixes.commits("stack"):
        prefixes.git("checkout", "-q", "--detach", commit)
        changed = prefixes.git("diff", "--name-only", "HEAD~1", "HEAD").split()
        tests = [path for path in changed if path.startswith("test/") and path.endswith(".py")]
        assert not undefined(prefixes.path, tests), prefixes.message(commit)


@pytest.mark.parametrize("name", SERIES[-2:])
def test_each_of_the_last_series_applies_alone(name: str, tmp_path: Path) -> None:
    checkout = tmp_path / "pytorch"
    whole, commit = wheel_checkout(checkout)
    released = {
        path: (checkout / path).read_bytes() for path in whole.files if (checkout / path).exists()
    }
    found = alone(whole, name, released, tmp_path / "alone")
    made, branch, _ = export.export(checkout, found)
    assert [each.state for each in made.outcomes] == [CLEAN] * len(found.patches)
    assert [each.patch.name for each in made.outcomes] == [*whole.series_of(name).patches]
    git("checkout", "-q", branch, cwd=checkout)
    check(checkout, found)
    changed = git("diff", "--name-only", commit, branch, cwd=checkout).split()
    assert sorted(changed) == sorted(found.files)


def test_a_series_that_needs_others_is_not_alone(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="row split needs those before it"):
        alone(stack.load(pins.load()), "row split", {}, tmp_path)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> commits.Repo:
    """The stack as commits, on the whole package as released."""
    folder = tmp_path_factory.mktemp("prefixes")
    whole, _ = wheel_checkout(folder / "pytorch")
    there = (folder / "pytorch/torch").rglob("*.py")
    released = {
        path.relative_to(folder / "pytorch").as_posix(): path.read_bytes() for path in there
    }
    return commits.make(folder / "repo", released, whole.patches)


def check(top: Path, found: Stack) -> None:
    """That the modules of a stack, in the folder `top`, could be imported."""
    files = [path for path in found.tree_files if path.endswith(".py")]
    wrong = [line for line in undefined(top, files) if not any(f"`{n}`" in line for n in OF_TYPES)]
    assert not wrong, wrong
    for path in files:
        for node in ast.walk(ast.parse((top / path).read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = (top / path).parents[node.level - 1]
                check_import(node, folder.joinpath(*(node.module or "").split(".")), path)


def undefined(top: Path, files: Sequence[str]) -> list[str]:
    """Names without a definition, and what does not parse."""
    command = [sys.executable, "-m", "ruff", "check", "-q", "--isolated", "--no-cache"]
    rules = ["--select=F821,F822,F823,E9", "--output-format=concise", *files]
    done = subprocess.run([*command, *rules], cwd=top, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def check_import(node: ast.ImportFrom, module: Path, path: str) -> None:
    if "_inductor" not in module.parts or "fb" in module.parts:
        return  # another package, or what no release has
    file = module.with_suffix(".py")
    assert file.exists() or module.is_dir(), f"{path}: no {module.name}"
    text = file.read_text("utf-8") if file.exists() else " ".join(p.stem for p in module.iterdir())
    if file.exists() or not (module / "__init__.py").read_bytes():
        for alias in node.names:
            if alias.name in OF_TYPES:
                continue
            assert re.search(rf"\b{alias.name}\b", text), f"{path}: no {module.name}.{alias.name}"


def test_subjects_are_short_and_test_plans_name_the_patchs_files() -> None:
    for patch in stack.load(pins.load()).patches:
        subject = re.sub(r"^\[PATCH\] |^\[inductor\] ", "", patch.subject)
        assert len(subject) <= SUBJECT_LENGTH, subject
        _, _, plan = patch.message.partition("\nTest plan:")
        told = set(re.findall(r"\btest_\w+\.py", plan))
        changed = {Path(change.path).name for change in patch.files}
        assert told, subject
        assert told <= changed, f"{subject}: {told - changed} of its test plan are not the patch's"


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


def test_the_modules_page_is_the_stacks() -> None:
    """`graft refresh` writes it; every module of the overlay is in it, with what it is."""
    found = stack.load(pins.load())
    text = (ROOT / modules_page.PAGE).read_text("utf-8")
    assert text == modules_page.due(found), "stale: graft refresh"
    for path in (ROOT / "overlay/torch/_inductor").rglob("*.py"):
        name = path.relative_to(ROOT / "overlay/torch/_inductor").as_posix()
        assert re.search(rf"^- `{re.escape(name)}`: .{{20,}}\.$", text, re.M), name


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("One. Two.", "One."),
        ("A row of 0.5 KiB, as\n``x``: held.\n\nMore.", "A row of 0.5 KiB, as `x`: held."),
        ("The tile, as here::\n\n    x + 1\n\nMore.", "The tile, as here."),
        ("without branches. libdevice's", "without branches."),
    ],
)
def test_the_first_sentence(docstring: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(f'"""\n{docstring}\n"""\n')
    assert modules_page.sentence(tmp_path / "module.py") == expected


# Words of this project's own, for what Inductor's developers have words for; `docs/figures` has
# them, and says there what they mean.
PRIVATE = (
    r"begins? anywhere|\bdealt\b|half[- ]typed?|half types|slow functions?|\babsorb|\bmend(?!\w)"
    r"|\bmended\b|in the lab\b|has the like"
)


def prose(path: Path) -> str:
    """A page without code, the targets of links, and tables of other stacks' patches."""
    text = re.sub(r"<!-- pin: .*?<!-- /pin -->", "", path.read_text("utf-8"), flags=re.S)
    return re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", "", text, flags=re.S)


def test_pages_have_upstreams_words() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/patches/*.md")]
    for page in [*pages, ROOT / "bench/README.md"]:
        found = re.findall(PRIVATE, prose(page), re.I)
        assert found == [], f"{page.relative_to(ROOT)}: {found}"


def test_a_page_says_what_it_is_about_and_when_it_can_go() -> None:
    for page in (ROOT / "docs/patches").glob("*.md"):
        title, blank, search, *rest = page.read_text("utf-8").splitlines()
        assert (title[:2], blank, search[:1]) == ("# ", "", "*"), page.name
        text = "\n".join(rest)
        at = [
            text.index(f"**{part}") for part in ("Problem.", "Mechanism", "Upstream.", "Can go**")
        ]
        assert at == sorted(at), page.name
        # a function, a setting or a release that can be looked at
        assert re.search(r"`[\w.-]+`|\bpin\b", text[at[-1] :]), page.name


def test_every_page_of_figures_is_in_their_index() -> None:
    pages = {path.name for path in (ROOT / "docs/figures").glob("*.md")} - {"README.md"}
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/figures/README.md").read_text("utf-8"))
    assert sorted(listed) == sorted(pages)


def test_links_between_pages() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"


def test_readme_can_be_read() -> None:
    """Its first screen has the two commands and one table; no paragraph has more than two links."""
    text = (ROOT / "README.md").read_text("utf-8")
    for part in re.split(r"\n\s*\n|\n(?=[-|#] ?)", text):
        assert len(re.findall(r"\]\([^)]+\)", part)) <= 2, part


def test_glossary() -> None:
    rows = re.findall(r"^\| ", (ROOT / "docs/glossary.md").read_text("utf-8"), re.M)
    assert len(rows) - 2 <= TERMS
