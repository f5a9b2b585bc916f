"""Tables of outcomes in the docs: what they say of a result file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graft.bench import outcome_tables, tables
from graft.errors import GraftError
from graft.stack import pins

DATA = {
    "files": {
        "inductor/test_x.py": {
            "tests": 3,
            "differ": 1,
            "broken": 0,
            "stock": {"passed": 2, "failed": 1},
            "patched": {"passed": 3},
        }
    },
    "forms": {
        "sums": {
            "cases": 9,
            "skipped": 1,
            "stock": 4,
            "patched": 2,
            "new": 0,
            "fused_stock": 6,
            "fused_patched": 7,
        }
    },
    "failing": [
        {
            "case": f"op-float32-{at}-sums",
            "new": False,
            "outcomes": outcomes,
            "messages": [message, message],
        }
        for at, (outcomes, message) in enumerate(
            [
                (
                    ["failed", "passed"],
                    "Failed: error: RuntimeError: at index 3 | 4\n…",
                ),
                (["failed", "failed"], "Failed: error: RuntimeError: at index 5 | 4"),
                (["failed", "failed"], "Failed: wrong: output 1: dtype torch.float32 for x"),
                (["failed", "passed"], "Failed: wrong: output 1: error 5.2e-07, eager's 3.8e-07"),
                (["failed", "passed"], "Failed: unstable: output 0: two runs differ"),
                (["error", "passed"], "over its time limit of 60 s"),
            ]
        )
    ],
}


@pytest.mark.parametrize(
    ("view", "lines"),
    [
        ("tests", ["| test_x.py | 3 | 2 passed, 1 failed | 3 passed | 1 | 0 |"]),
        ("operators", ["| sums | 9 | 1 | 4 | 2 | 0 | 6 | 7 |"]),
        (
            "reasons",
            [
                "| RuntimeError: at index N \\| N | 2 | 1 |",
                "| another dtype than eager's | 1 | 1 |",
                "| further from float64 than eager, and than 2 ulp | 1 | 0 |",
                "| over its time limit of N s | 1 | 0 |",
                "| two runs differ | 1 | 0 |",
            ],
        ),
    ],
)
def test_a_page_says_what_the_file_says(tmp_path: Path, view: str, lines: list[str]) -> None:
    (tmp_path / "out.json").write_text(json.dumps(DATA))
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n<!-- table: out.json view={view} -->\nold\n<!-- /table -->\n")
    ((_, _, due),) = tables.stale(tmp_path)
    assert due.splitlines()[5:-1] == lines
    page.write_text(due)
    assert not list(tables.stale(tmp_path))


@pytest.mark.parametrize(
    ("text", "told"), [("{}", "no forms"), ("x", "no forms"), (None, "No such file")]
)
def test_files_that_are_none(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "out.json").write_text(text)
    with pytest.raises(GraftError, match=told):
        outcome_tables.table(tmp_path / "out.json", "operators")


def test_the_repository_s_result_files_name_no_machine() -> None:
    for path in (pins.ROOT / "tests" / "results").glob("*.json"):
        text = path.read_text()
        assert not any(word in text for word in ('"/', " /root/", "/home/", "/tmp/"))
