"""A pin is read strictly, written the same each time, and held against a base by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tinytorch import COMMIT, SITE, TORCH, make_pin, make_python

from graft.errors import GraftError, UsageError
from graft.stack import pins
from graft.stack.git import blob_id
from graft.stack.trees import bases


def test_the_shipped_pin_reads_and_renders_as_it_is_kept() -> None:
    for name in pins.names():
        pin = pins.load(name)
        assert pins.render(pin) == pins.file(name).read_text("utf-8")
        assert pin.name == f"v{pin.version}"
    assert pins.DEFAULT_PIN in pins.names()


def test_an_unknown_pin_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no pin v2\.11\.1; did you mean v2\.11\.0") as caught:
        pins.load("v2.11.1")
    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version =", "is not TOML"),
        (f'commit = "{COMMIT}"', 'expected version = "2.11.0", found None'),
        ('version = "2.11.0"\ncommit = "70d99e9"', "expected commit = 40 hexadecimal digits"),
        (
            f'version = "2.11.0"\ncommit = "{COMMIT}"\n[files]\n"torch/a.py" = "12"',
            "expected a git blob id for torch/a.py, found '12'",
        ),
    ],
)
def test_a_damaged_pin_is_named(text: str, says: str) -> None:
    with pytest.raises(GraftError, match="pins/x.toml") as caught:
        pins.parse(text, "x", "pins/x.toml")
    assert says in caught.value.message


def test_save_writes_only_a_change(tmp_path: Path) -> None:
    (tmp_path / "pins").mkdir()
    pin = make_pin()
    assert pins.save(pin, tmp_path)
    assert not pins.save(pin, tmp_path)
    assert pins.load(root=tmp_path) == pin
    assert [path.name for path in (tmp_path / "pins").iterdir()] == ["v2.11.0.toml"]


def test_with_files_takes_the_blob_of_the_base(tmp_path: Path) -> None:
    base = bases.probe(make_python(tmp_path / "base"))
    path = "torch/functional.py"
    pin = pins.with_files(make_pin(), base, [path])
    assert pin.files[path] == blob_id(TORCH[path].encode())
    assert list(pin.files) == sorted(pin.files)
    with pytest.raises(GraftError, match=r"has no torch/nowhere\.py"):
        pins.with_files(pin, base, ["torch/nowhere.py"])


def test_a_base_is_held_against_the_pin(tmp_path: Path) -> None:
    base = bases.probe(make_python(tmp_path / "base"))
    pin = make_pin()
    pins.check_base(pin, base)
    pins.check_base(pin, replace(base, version="2.11.0"))
    with pytest.raises(GraftError, match=r"has torch 2\.12\.0, and v2\.11\.0 is for torch 2\.11"):
        pins.check_base(pin, replace(base, version="2.12.0"))
    with pytest.raises(GraftError, match=f"was built from commit abc, and v2.11.0 is {COMMIT}"):
        pins.check_base(pin, replace(base, git_version="abc"))
    site = tmp_path / "base" / SITE
    (site / "torch/_inductor/config.py").write_text("changed\n")
    (site / "torch/_inductor/scheduler.py").unlink()
    with pytest.raises(GraftError) as caught:
        pins.check_base(pin, base)
    assert "torch/_inductor/config.py differs" in caught.value.message
    assert "torch/_inductor/scheduler.py is missing" in caught.value.message
    assert "simd.py" not in caught.value.message
    assert caught.value.next
