"""What pages show: of which stack it is, who is faster in words, and which files it comes from."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from graft import places, stack
from graft.bench import claims, parts, provenance, results, tables
from graft.cli import bench_command
from graft.errors import GraftError
from graft.stack import pins

from .test_bench_results import result, row, saved, time

ROOT = pins.ROOT
RESULTS = ROOT / "bench" / "results"
MARKER = re.compile(r"^<!-- table: ([^>]*) -->$", re.M)
# What constants are fitted to may be larger than what is shown.
FITTED = {"pressure.jsonl.gz"}
LARGEST, LARGEST_PLAIN = 10**6, 2**16


def block(spec: str) -> str:
    return f"<!-- table: {spec} -->\n<!-- /table -->\n"


def with_peer(*times: tuple[float, float, float | str]) -> list[results.Row]:
    """Rows with a time of stock, of patched and of Helion, which may be an error."""
    out = []
    for i, (stock, patched, helion) in enumerate(times):
        made = row("norm", (i + 1, 8), stock, patched)
        failed = {"error": {"kind": "wrong", "message": "no"}}
        made["times"]["helion"] = time(helion) if isinstance(helion, float) else failed
        out.append(made)
    return out


def peers_file(path: Path, *times: tuple[float, float, float | str], **changes: object) -> Path:
    about = {label: {"impl": label, "knobs": {}} for label in ("stock", "patched", "helion")}
    results.save(result(*with_peer(*times), contenders=about, **changes), path)
    return path


# --- sentences ------------------------------------------------------------------------------------


def sentence(root: Path, words: str = "of=helion to=patched") -> str:
    return tables.table(["r.json", "view=sentence", *words.split()], root, "page")


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ([(9.0, 4.0, 2.0), (9.0, 2.0, 1.0)], "takes 0.500 of patched's time; helion is faster"),
        ([(9.0, 2.0, 4.0), (9.0, 1.0, 2.0)], "takes 2.000 of patched's time; patched is faster"),
        ([(9.0, 2.0, 4.0), (9.0, 2.0, 1.0)], "1.000 of patched's time; neither is faster"),
    ],
)
def test_a_sentence_says_who_is_faster(
    tmp_path: Path, times: list[tuple[float, float, float | str]], said: str
) -> None:
    peers_file(tmp_path / "r.json", *times)
    assert said in sentence(tmp_path)


def test_a_sentence_counts_points(tmp_path: Path) -> None:
    times = [(9.0, 1.0, 0.5), (9.0, 1.0, 0.97), (9.0, 1.0, 0.99), (9.0, 1.0, 1.1), (9.0, 1.0, "x")]
    peers_file(tmp_path / "r.json", *times)
    said = sentence(tmp_path)
    assert said.startswith("Geometric mean over 4 points: helion takes 0.")
    assert "helion is faster, by more than 2 % at 2 points; patched is at 1." in said
    assert said.endswith("At 1 point more one of them has no time.")


def test_the_same_code_is_neither_faster_nor_slower(tmp_path: Path) -> None:
    rows = [row("a", (i, 8), 2.0, 1.0) for i in (1, 2, 3)]
    for label in ("stock", "patched"):
        rows[0]["times"][label]["code"] = "ab"
    saved(tmp_path / "r.json", *rows)
    said = sentence(tmp_path, "of=patched to=stock")
    assert "patched takes 0.500 of stock's time; patched is faster, by more than 2 % at 2" in said
    assert "Both run the same code at 1 point." in said


def test_a_ratio_to_stock_is_the_paired_one(tmp_path: Path) -> None:
    rows = [row("a", (4, 8), 2.0, 1.0)]
    rows[0]["speedup"]["patched"]["median"] = 4.0
    saved(tmp_path / "r.json", *rows)
    assert "patched takes 0.250 of stock's" in sentence(tmp_path, "of=patched to=stock")
    assert "stock takes 4.000 of patched's" in sentence(tmp_path, "of=stock to=patched")


# --- summaries ------------------------------------------------------------------------------------


def step(case: str, group: str, stock: float, patched: float) -> results.Row:
    made = row(case, (4, 8), stock, patched, group=group)
    made["times"]["stock"]["triton_us"] = 30.0
    made["times"]["patched"]["triton_us"] = 20.0
    return made


def test_a_summary_has_cases_and_kinds_of_steps(tmp_path: Path) -> None:
    saved(tmp_path / "n.json", row("rms", (4, 8), 2.0, 1.0), row("rms", (8, 8), 8.0, 1.0))
    saved(tmp_path / "s.json", step("gpt", "default", 110.0, 100.0))
    saved(tmp_path / "m.json", step("t5", "tuned", 9.0, 9.0), step("vit", "held_out", 9.0, 6.0))
    spec = ["n.json", "s.json", "m.json", "view=summary"]
    assert tables.table(spec, tmp_path, "page").splitlines()[2:] == [
        "| rms, bf16 | 2 | 4.000 | 2.000 | 4x8 |",
        "| s: step | 1 | 1.100 | 1.100 | gpt |",
        "| s: generated kernels | 1 | 1.500 | 1.500 | gpt |",
        "| m, tuned: step | 1 | 1.000 | 1.000 | t5 |",
        "| m, tuned: generated kernels | 1 | 1.500 | 1.500 | t5 |",
        "| m, held out: step | 1 | 1.500 | 1.500 | vit |",
        "| m, held out: generated kernels | 1 | 1.500 | 1.500 | vit |",
    ]
    each = tables.table(["m.json", "view=models"], tmp_path, "page").splitlines()
    assert each[2].startswith("| t5 | tuned | 9.0 | 9.0 | 1.00")
    assert len({line.count("|") for line in each}) == 1


def test_a_step_that_waits_for_launches_counts_by_its_kernels(tmp_path: Path) -> None:
    made = step("hubert", "held_out", 100.0, 90.0)
    for label, rest, busy in (("stock", 70.0, 1.6), ("patched", 40.0, 1.5)):
        made["times"][label] |= {"captured": False, "gpu_busy": busy, "rest_us": rest}
    saved(tmp_path / "m.json", made)
    first, *_ = tables.table(["m.json", "view=summary"], tmp_path, "page").splitlines()[2:]
    assert first == "| m, held out: step | 1 | 1.667 | 1.667 | hubert |"
    each = tables.table(["m.json", "view=models"], tmp_path, "page").splitlines()
    assert "| 1.667 | kernels |" in each[2]


# --- of which stack -------------------------------------------------------------------------------

LIST = """
gpu = "NVIDIA H200"
[models]
title = "models"
command = "graft bench models"
result = "bench/results/none_yet.json"
minutes = 1
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose stack is `cc…`, with a file of it and one of another."""
    monkeypatch.setattr(parts, "tree_hash", lambda root: "cc" * 32)
    (tmp_path / "docs").mkdir()
    (tmp_path / "bench" / "results").mkdir(parents=True)
    parts.file(tmp_path).write_text(LIST)
    saved(tmp_path / "ours.json", row("ours", (4, 8), 2.0, 1.0), stack_hash="cc" * 32)
    saved(tmp_path / "other.json", row("other", (4, 8), 2.0, 1.0), stack_hash="dd" * 32)
    return tmp_path


def test_a_file_of_another_gpu_has_the_title_of_the_part(root: Path) -> None:
    name = "bench/results/h100_none_yet.json"
    saved(root / name, step("t5", "tuned", 9.0, 6.0))
    first = tables.table([name, "view=summary"], root, "page").splitlines()[2]
    assert first == "| models, tuned: step | 1 | 1.500 | 1.500 | t5 |"


def test_a_page_says_of_which_stack_and_date_a_table_is(root: Path) -> None:
    text = block("other.json view=cases") + block("other.json view=sentence")
    due = tables.update(text, root, "docs/measured.md")
    assert "| other | bf16 | 1 |" in due
    assert due.count("Stack dddddddddddd, 2026-01-01.") == 2
    assert "\n\nStack dddddddddddd, 2026-01-01.\n<!-- /table -->" in due
    assert tables.update(due, root, "docs/measured.md") == due


def test_readme_shows_the_stack_as_it_is_alone(root: Path) -> None:
    text = block("ours.json other.json bench/results/none_yet.json view=summary")
    due = tables.update(text, root, "README.md")
    assert "| ours, bf16 | 1 |" in due
    assert "| other" not in due
    assert "Stack cccccccccccc; measured 2026-01-01." in due
    none = tables.update(block("other.json view=cases"), root, "README.md")
    assert tables.NONE_CURRENT in none
    assert "|" not in none
    assert tables.update(none, root, "README.md") == none


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_a_file_that_no_part_makes_is_missed(root: Path, page: str) -> None:
    with pytest.raises(GraftError, match=r"none\.json: No such file"):
        tables.update(block("none.json view=cases"), root, page)


def test_what_is_not_measured_yet_is_said(root: Path) -> None:
    due = tables.update(block("bench/results/none_yet.json"), root, "docs/measured.md")
    assert "Not measured yet: `graft bench publish --part models`." in due


def test_only_pages_that_are_named_are_looked_at(root: Path) -> None:
    (root / "README.md").write_text(block("ours.json"))
    (root / "docs" / "a.md").write_text(block("ours.json"))
    found = [page.name for page, *_ in tables.stale(root, only=tables.CURRENT)]
    assert found == ["README.md"]


def test_a_page_says_of_which_stack_the_files_are_that_it_names(root: Path) -> None:
    folder = root / "bench" / "results"
    (folder / "steps").mkdir()
    saved(folder / "steps" / "a.json", row("a", (4, 8), 2.0, 1.0), stack_hash="ab" * 32)
    for name in ("b.jsonl.gz", "c.jsonl.gz", "unnamed.jsonl.gz"):
        (folder / name).write_bytes(gzip.compress(b"{}\n"))
    (root / "bench" / "made.toml").write_text(
        '"b.jsonl.gz" = { stacks = ["'
        + "cd" * 6
        + '", "'
        + "ef" * 6
        + '"], date = "2026-11-22" }\n'
    )
    page = "By `bench/results/steps/a.json` and `b.jsonl.gz`, again `steps/a.json`.\n"
    marker = "<!-- table: view=files -->\n<!-- /table -->\n"
    due = tables.update(page + marker, root, "docs/a.md")
    said = "Made with: `a.json`: stack abababababab, 2026-01-01; "
    said += "`b.jsonl.gz`: stacks cdcdcdcdcdcd and efefefefefef, 2026-11-22."
    assert said in due
    assert tables.update(due, root, "docs/a.md") == due
    with pytest.raises(GraftError, match=r"docs/a.md names c.jsonl.gz, which does not say") as e:
        tables.update("`c.jsonl.gz`\n" + marker, root, "docs/a.md")
    assert "bench/made.toml" in (e.value.next or "")
    with pytest.raises(GraftError, match="names no result file, and has a marker"):
        tables.update(marker, root, "docs/a.md")
    (root / "bench" / "made.toml").write_text("[")
    with pytest.raises(GraftError, match="made.toml is not TOML"):
        tables.update(due, root, "docs/a.md")


# --- files ----------------------------------------------------------------------------------------


def test_compressed_results_are_results(tmp_path: Path) -> None:
    plain = saved(tmp_path / "r.json", row("a", (4, 8), 2.0, 1.0))
    packed = saved(tmp_path / "r.json.gz", row("a", (4, 8), 2.0, 1.0))
    assert results.load(packed) == results.load(plain)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    again = saved(tmp_path / "again.json.gz", row("a", (4, 8), 2.0, 1.0))
    assert again.read_bytes() == packed.read_bytes()
    packed.write_bytes(packed.read_bytes()[:100])
    with pytest.raises(GraftError, match="cut off in the middle of what is compressed"):
        results.load(packed)
    packed.write_bytes(b"no such thing")
    with pytest.raises(GraftError, match=r"r\.json\.gz: "):
        results.load(packed)


# --- this repository ------------------------------------------------------------------------------


def committed(*paths: str) -> list[Path]:
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *paths], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    found = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    return [path for path in found if path.is_file()]


def test_readme_shows_figures_of_the_stack_alone() -> None:
    """Its tables are of the tree's stack, or none; what stands outside of them has no ratio."""
    text = (ROOT / "README.md").read_text()
    hash = parts.tree_hash()
    assert hash is not None
    for found in tables.BLOCK.finditer(text):
        stamp = (
            r"Stack ([0-9a-f]{12})(?:, or an earlier one that generates the same code)?; "
            r"measured 20[\d-]+(?:, 20[\d-]+)*\.\n"
        )
        stacks = set(re.findall(stamp, found[0]))
        assert stacks == {hash[:12]} or (not stacks and tables.NONE_CURRENT in found[0])
    prose = tables.BLOCK.sub("", text)
    assert not re.findall(r"\d times as (?:fast|long)|\d % (?:less|more|faster|slower)", prose)
    assert "bench/results/" not in prose


@pytest.mark.parametrize("page", ["README.md", "docs/measured.md"])
def test_what_is_shown_is_published(page: str) -> None:
    published = parts.load()
    for spec in MARKER.findall((ROOT / page).read_text()):
        for name in [word for word in spec.split() if "=" not in word]:
            assert published.of(name), f"{page}: no part of bench/publish.toml makes {name}"


def test_what_is_published_is_shown() -> None:
    text = (ROOT / "docs" / "measured.md").read_text() + (ROOT / "README.md").read_text()
    for part in parts.load().parts:
        assert re.search(rf"^<!-- table: [^>]*{re.escape(part.result)}\b", text, re.M), part.name


def test_every_result_is_referred_to() -> None:
    """By a page, a test or code: a file that nothing is said of says nothing."""
    texts = "\n".join(
        path.read_text("utf-8", "replace")
        for path in committed("*.md", "*.py", "*.toml", "*.patch")
        if RESULTS not in path.parents and path != Path(__file__)
    )
    named = set(re.findall(r"[\w.-]+\.jsonl?(?:\.gz)?(?!\w)", texts))
    orphans = [path.name for path in committed("bench/results") if path.name not in named]
    assert orphans == []


def test_every_result_that_pages_name_is_there() -> None:
    for page in tables.pages(ROOT):
        for name in re.findall(r"`bench/results/([^`\s*]+)`", page.read_text()):
            assert (RESULTS / name).exists(), f"{page.name} names {name}"


def test_pages_say_of_which_stack_the_files_are_that_they_name() -> None:
    for page in tables.pages(ROOT):
        text = page.read_text()
        if any(provenance.cited(text, ROOT)):
            assert "<!-- table: view=files -->" in text, page.name


def test_results_say_of_which_stack_and_day_they_are() -> None:
    for path in committed("bench/results"):
        said = provenance.stamp(path, ROOT)
        day = r"\d{4}-\d\d-\d\d(, with the same code)?"
        assert re.fullmatch(rf"Stacks? [0-9a-f]{{12}}.*, {day}( \(the same .*)?", said), path.name


def test_a_result_of_another_pin_says_so(tmp_path: Path) -> None:
    """Below a table that has results of both."""
    path = tmp_path / "bench/results/norms.json"
    path.parent.mkdir(parents=True)
    for pin, said in (("v2.11.0", ""), ("v2.0.0", "v2.0.0, ")):
        path.write_text(json.dumps({"stack_hash": "ab" * 32, "pin": pin, "date": "2026-11-24"}))
        assert provenance.stamp(path, tmp_path) == f"Stack abababababab, {said}2026-11-24"


def test_results_are_small() -> None:
    plain = {part.result for part in parts.load().parts}
    for path in committed("bench/results"):
        size = path.stat().st_size
        assert size <= LARGEST or path.name in FITTED, f"{path.name}: {size}"
        shown = path.relative_to(ROOT).as_posix() in plain
        assert shown or path.suffix == ".gz" or size <= LARGEST_PLAIN, f"gzip -9n {path}"


# --- comparisons by hand --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "111 points: 31 by more than 2 %;\n1.07 times as fast as Helion by its heuristic. Five are",
        "stay loops: at 5120 columns\nHelion's softmax is 1.8 times as fast.",
        "takes 4 % more than the\nbest peer's time less 10 %.",
        "Liger is slower here.",
        "With `helion`, 2 % faster.",
        "`a` (`b/c`): 1.07 times as fast as Helion (`d/e`).",
        "We are ahead of QuACK.",
        "1.5, 1.6 and, sums over both\ndimensions, 1.3 times as fast as stock in the mean.",
        "the four take 8 to 26 % less time than stock",
        "One is 7 % slower than stock.",
        "| case | helion | 1.2 |",
        "<!-- table: r.json -->\n| 1 |\n<!-- /table -->\n\nHelion is faster.",
    ],
)
def test_a_comparison_by_hand_is_found(text: str) -> None:
    assert len(list(claims.found(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "<!-- table: r.json view=sentence -->\nhelion is faster, by 2 %.\n<!-- /table -->\n",
        "Helion takes the configuration of its heuristic.",
        "```\ngraft bench --against stock,helion   # 2 times as fast\n```\n",
        "A loop is faster; stock has two.",
        "`view=sentence of=helion` writes who is faster.",
        "| `graft bench` | stock, patched and peers side by side |",
    ],
)
def test_what_is_no_comparison_is_left_alone(text: str) -> None:
    assert list(claims.found(text)) == []


def test_no_page_compares_by_hand() -> None:
    claims.check(ROOT)


def test_no_message_of_a_patch_compares_by_hand() -> None:
    for patch in stack.load(pins.load()).patches:
        assert list(claims.found(patch.message)) == [], patch.name


def test_the_command_names_the_page_and_the_words(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "docs" / "a.md").write_text("Ours is 2 times as fast as Helion.\n")
    monkeypatch.setattr(places, "ROOT", root)
    error = CliRunner().invoke(bench_command.bench, ["tables", "--check"]).exception
    assert isinstance(error, GraftError)
    assert "docs/a.md compares in words of its own: 'Ours is 2 times" in error.message
    assert "view=sentence" in (error.next or "")
