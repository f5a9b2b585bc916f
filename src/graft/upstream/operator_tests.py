"""A test for each case of `graft.upstream.operators`, for `graft opinfo` to run on either side.

pytest is given a file that imports this one. GRAFT_OPINFO_DEVICE is "cuda" or "lab",
GRAFT_OPINFO_SAMPLES and GRAFT_OPINFO_FORMS what `operators.cases` takes. Where GRAFT_TEST_LIST
names the tests that are wanted (`graft.testing.plugin`), no other is made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from graft.lab.numerics import Machine
from graft.upstream import operators
from graft.upstream.operators import Case

MACHINE = Machine(os.environ["GRAFT_OPINFO_DEVICE"])  # before anything imports torch


def _cases() -> list[Case]:
    wanted = os.environ.get("GRAFT_TEST_LIST")
    if wanted is None:
        forms = os.environ["GRAFT_OPINFO_FORMS"].split(",")
        return operators.cases(int(os.environ["GRAFT_OPINFO_SAMPLES"]), forms)
    with open(wanted, encoding="utf-8") as file:
        found = re.findall(r"::test_operator\[(.+)\]$", file.read(), re.M)
    return [Case.parse(text) for text in found]


@pytest.mark.parametrize("case", _cases(), ids=str)
@pytest.mark.filterwarnings("ignore")
def test_operator(case: Case, record_property: Callable[[str, object], None]) -> None:
    outcome = operators.check(MACHINE, case)
    record_property("mix_order", outcome.mix_order)
    record_property("ratio", outcome.ratio)
    if outcome.failed:
        pytest.fail(f"{outcome.kind}: {outcome.detail}", pytrace=False)
    if outcome.kind != "ok":
        pytest.skip(f"{outcome.kind}: {outcome.detail}")
