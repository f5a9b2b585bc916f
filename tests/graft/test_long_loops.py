"""The loops over long rows that the tree chooses, by the times of all loops that were tried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from graft.devtools import long_loops
from graft.places import ROOT

MEASURED = ROOT / "bench" / "results" / "long_loops.jsonl.gz"


@pytest.fixture(scope="module")
def points():
    return long_loops.read(MEASURED)


@pytest.fixture(scope="module")
def device():
    from torch._inductor.device_model import DeviceModel

    return DeviceModel(**long_loops.H100)


def test_the_loops_that_are_chosen_are_near_the_best(points, device):
    judged = long_loops.judge(points, device)
    usual = long_loops.judge(points, replace(device, memory_GBs=None))
    assert usual.of_usual == pytest.approx(1)  # nothing is chosen without a bandwidth
    assert judged.of_usual < 0.9
    assert judged.of_best - 1 < (usual.of_best - 1) / 2


def test_few_are_slower_than_the_usual_loop(points, device):
    judged = long_loops.judge(points, device)
    assert judged.slower < len(points) / 20
    assert judged.worst < 1.2


def test_the_fit_makes_wrong_constants_better(points, device):
    some = points[::10]
    wrong = replace(device, warp_slot_ns=10 * device.warp_slot_ns)
    fitted = long_loops.fit(some, wrong, lambda _: None)
    assert long_loops.loss(some, fitted) < long_loops.loss(some, wrong)


@pytest.mark.parametrize("argv", [[], ["report"], ["other", str(MEASURED)]])
def test_what_is_asked_wrongly(argv, capsys):
    assert long_loops.main(argv)
    assert "error: expected report or fit" in capsys.readouterr().err


def test_a_file_that_is_none(tmp_path: Path, capsys):
    path = tmp_path / "none.jsonl.gz"
    assert long_loops.main(["report", str(path)])
    assert str(path) in capsys.readouterr().err


def test_report(capsys):
    assert long_loops.main(["report", str(MEASURED)]) == 0
    assert "of the usual one's" in capsys.readouterr().out
