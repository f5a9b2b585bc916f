"""What a user is told of the machine before anything is run on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft import machine

CUDA = "13.0"


@pytest.mark.parametrize("driver", [True, False])
def test_a_cuda_build_without_a_driver_uses_the_lab(
    monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    monkeypatch.setattr(machine, "has_cuda_driver", lambda: driver)
    monkeypatch.setattr(machine, "c_compiler", lambda: "/usr/bin/gcc")
    notes = machine.notes(CUDA)
    assert (len(notes), "compile offline" in "".join(notes)) == (
        (0, False) if driver else (1, True)
    )
    assert machine.notes(None) == []


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "has_cuda_driver", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    [note] = machine.notes(CUDA)
    assert "no C compiler (neither gcc nor clang)" in note
    assert "apt-get install gcc" in note
    monkeypatch.setenv("CC", "icc -O2")
    assert "$CC is icc -O2, which is not there" in machine.notes(CUDA)[0]
    (tmp_path / "icc").write_text("#!/bin/sh\n")
    (tmp_path / "icc").chmod(0o755)
    assert machine.notes(CUDA) == []
    assert machine.c_compiler() == str(tmp_path / "icc")
