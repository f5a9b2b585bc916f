"""Cases that call torchao: what is said where it is missing, and what its casts compile to."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from lab_process import LabProcess

from graft import cases
from graft.bench import gate, libraries
from graft.cli import bench_command
from graft.devtools import codes
from graft.errors import GraftError

NAMES = [name for name, case in cases.load_all().items() if case.library == "torchao"]
HERE = all(cases.available(cases.load_all()[name]) for name in NAMES)
needs_torchao = pytest.mark.skipif(not HERE, reason="needs torchao: pip install -e '.[cases]'")
# One of each format, along either dimension.
COMPILED = (
    "torchao_mxfp8_dim1",
    "torchao_mxfp8_rceil_dim0",
    "torchao_mxfp6_e3m2_dim1",
    "torchao_mxfp4_dim1",
    "torchao_nvfp4_dim0",
    "torchao_fp8_block_dim1",
    "torchao_fp8_both",
)

if os.environ.get("TRITON_INTERPRET") == "1":
    import torch

    from graft.lab import backend

    backend.install(budget_s=30)


def in_lab_differing(name: str, shape: list[int]) -> list[Any]:
    """Of each output: whether its layout is eager's, and how many elements are not, to the bit."""
    case = cases.find(name)
    torch.manual_seed(0)
    inputs = case.inputs(tuple(shape), torch.bfloat16, torch.device("cpu"))
    x = inputs[0]
    x[:, ::7] *= 100
    x.view(-1)[: x.shape[1]] = 0  # blocks without a largest magnitude
    eager = case.fn(*inputs)
    torch._dynamo.reset()
    found = torch.compile(case.fn, fullgraph=True)(*inputs)
    return [
        [gate._layout(a, b, True), int((_bits(a) != _bits(b)).sum())]
        for a, b in zip(found, eager, strict=True)
    ]


def _bits(x: Any) -> Any:
    return x.contiguous().view({1: torch.uint8, 4: torch.int32}[x.element_size()])


@pytest.fixture(scope="module")
def lab() -> Any:
    process = LabProcess(__file__)
    yield process
    process.close()


@needs_torchao
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_is_eager_to_the_bit(lab: LabProcess, name: str) -> None:
    assert all(each == [None, 0] for each in lab("differing", name, [128, 256]))


def test_cases_are_listed_without_it() -> None:
    shown = CliRunner().invoke(bench_command.bench, ["run", "--list"])
    assert shown.exit_code == 0
    assert len(NAMES) > 20
    assert all(f"  {name} " in shown.output for name in NAMES)


def test_a_case_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(GraftError, match="torchao_mxfp8_dim1 calls torchao, which") as error:
        cases.find("torchao_mxfp8_dim1")
    assert len(error.value.message.splitlines()) == 1
    assert "pip install" in error.value.next
    assert "[cases]" in error.value.next


def test_codes_leave_out_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "available", lambda case: case.library is None)
    listed = {item.split("/")[1] for item in codes.listed("cases")}
    assert "block_scale_32_dim1" in listed
    assert not listed & set(NAMES)


def test_a_bench_names_the_package_and_its_cases() -> None:
    points = [SimpleNamespace(case=name) for name in ("softmax", "torchao_mxfp8_dim0")]
    contender = SimpleNamespace(python=(sys.executable, "-S", "-I"))
    words = r"torchao cannot be imported .* its cases are torchao_mxfp8_dim0"
    with pytest.raises(GraftError, match=words) as error:
        bench_command._libraries(points, [contender], ())
    assert "--peers DIR" in error.value.next
    assert bench_command._libraries(points[:1], [contender], ()) == {}


def test_a_folder_of_packages_counts(tmp_path: Any) -> None:
    about = tmp_path / "torchao-0.18.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: torchao\nVersion: 0.18.0\n")
    contender = SimpleNamespace(python=(sys.executable,))
    found = libraries.versions({"torchao": ["a"]}, [contender], (str(tmp_path),), "cases")
    assert found == {"torchao": "0.18.0"}
