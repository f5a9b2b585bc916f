"""What an error says, in a line."""

from __future__ import annotations

import pytest

from graft.errors import MOST_NAMES, nearest, said

IN_ANOTHER_PROCESS = """An exception occurred in a subprocess:

Name=triton_red_fused_mean_16
Traceback (most recent call last):
  File "subproc_pool.py", line 1, in do_job
    result = job()
  File "compiler.py", line 243, in compile
    options = backend.parse_options(options)
AssertionError: num_warps must be a power of 2

Set TORCHDYNAMO_VERBOSE=1 for the internal stack trace.
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ""),
        ("\n  refused \n and why\n", "refused"),
        (IN_ANOTHER_PROCESS, "AssertionError: num_warps must be a power of 2"),
        ("Traceback (most recent call last):\n  cut", "Traceback (most recent call last):"),
        ("at 12:4:\n    x = tl.load(p)\n    ^\nno such mask", "no such mask"),
        ("x" * 400, "x" * 300),
    ],
)
def test_a_line_of_it(text: str, expected: str) -> None:
    assert said(RuntimeError(text)) == expected


def test_of_many_names_some_are_shown() -> None:
    names = [f"case_{n:03}" for n in range(MOST_NAMES + 5)]
    assert nearest("casee_004", names) == "; did you mean case_004?"
    found = nearest("xyzzy", names)
    assert found.endswith(f"case_{MOST_NAMES - 1:03} and 5 more")
    assert nearest("xyzzy", names[:2]) == "; there are: case_000, case_001"
