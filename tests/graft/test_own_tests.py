"""Which tests of a file are changed from one text to another."""

from __future__ import annotations

import pytest

from graft.stack import own_tests

FILE = """\
import unittest
LIMIT = 3
OTHER = 4

def helper(x):
    return x + LIMIT

def unused(x):
    return x

class Case(unittest.TestCase):
    fuse = {}

    def setUp(self):
        pass

    def check(self, x):
        self.assertEqual(x, OTHER)

    def inherited(self):
        pass

class FirstTest(Case):
    def test_rows(self):
        helper(1)

    def test_rows_of_two(self):
        self.check(4)

    def test_neither(self):
        unused = 1

class SecondTest(Case):
    fuse = {1: 2}

    def test_rows(self):
        self.inherited()

    def test_choice(self):
        Choice()

class Choice:
    def choose(self):
        return 1

def test_alone():
    assert helper(1) == 4
"""
NODES = [
    *("FirstTest::test_rows_n_3", "FirstTest::test_rows_of_two", "FirstTest::test_neither"),
    *("SecondTest::test_rows", "SecondTest::test_choice", "test_alone[x::y]"),
]
FIRST, SECOND = NODES[:3], NODES[3:5]


@pytest.mark.parametrize(
    ("old", "new", "expect"),
    [
        ("import unittest\n", "import unittest\nimport re  # of what is new\n", []),
        ("helper(1)\n\n", "helper(2)\n\n", [NODES[0]]),
        ("self.check(4)", "self.check(5)", [NODES[1]]),
        ("LIMIT = 3", "LIMIT = 5", [NODES[0], NODES[5]]),
        ("OTHER = 4", "OTHER = 5", [NODES[1]]),
        ("return x + LIMIT", "return LIMIT + x", [NODES[0], NODES[5]]),
        ("def unused(x):\n    return x", "def unused(x):\n    return 2", []),
        ("    fuse = {}", "    fuse = {3: 4}", [*FIRST, *SECOND]),
        ("    fuse = {1: 2}", "    fuse = {3: 4}", SECOND),
        ("def setUp(self):\n        pass", "def setUp(self):\n        1", [*FIRST, *SECOND]),
        ("inherited(self):\n        pass", "inherited(self):\n        1", [NODES[3]]),
        ("        return 1\n", "        return 2\n", [NODES[4]]),
        ("class SecondTest(Case)", "@slow\nclass SecondTest(Case)", SECOND),
    ],
)
def test_changed(old: str, new: str, expect: list[str]) -> None:
    assert FILE.count(old) == 1
    nodes = [f"tests/test_x.py::{node}" for node in NODES]
    found = own_tests.changed(FILE, FILE.replace(old, new), nodes)
    assert found == [f"tests/test_x.py::{node}" for node in expect]


def test_what_is_new() -> None:
    more = FILE.replace(
        "class SecondTest", "    def test_new(self):\n        pass\n\nclass SecondTest"
    )
    nodes = [f"x.py::{node}" for node in NODES]
    assert own_tests.changed(FILE, more, [*nodes, "x.py::FirstTest::test_new_n_1"]) == [
        "x.py::FirstTest::test_new_n_1"
    ]
    assert own_tests.changed("", FILE, nodes) == nodes


def test_what_is_not_found_is_run() -> None:
    """As tests that a module makes by a function."""
    made = "tests/x.py::MadeTest::test_it"
    assert own_tests.changed(FILE, FILE, [made]) == [made]
