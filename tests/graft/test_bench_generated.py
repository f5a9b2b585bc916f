"""Kernels as they are collected while Inductor generates them: names, bytes, values written."""

import re
from types import SimpleNamespace

import pytest
import torch
from lab_process import LabProcess
from torch._inductor.virtualized import V

from graft.bench import generated
from graft.cases import Case

ROWS, COLUMNS = 4096, 1000


# --- in the lab's process ------------------------------------------------------------------------


def in_lab_install():
    from graft.lab import devices, fakegpu

    fakegpu.install(devices.find("H200"))


def in_lab_collect(name, kind):
    """Name, bytes, bounds, values and calls of each kernel of a function of this file."""
    from graft.lab import capture, compile

    def inputs(shape, dtype, device):
        x = torch.empty(shape, dtype=dtype, device=device)
        return x, torch.empty(shape[0], dtype=torch.int64, device=device)

    case = Case("case", "", globals()[name], inputs, {"default": [(ROWS, COLUMNS)]})
    with generated.collected() as found:
        capture.trace(case, (ROWS, COLUMNS), kind, compile.into([]))
    return [
        [k.name, k.bytes, list(k.bounds), list(k.writes), k.calls] for k in found.kernels.values()
    ]


def doubled(x, index):
    return x * 2


def picked(x, index):
    return x.gather(1, index[:, None])


# --- the tests -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab():
    process = LabProcess(__file__, interpret=False)
    process("install")
    yield process
    process.close()


def test_a_kernel_moves_each_buffer_once(lab):
    ((name, bytes_, bounds, writes, calls),) = lab("collect", "doubled", "bf16")
    assert name.startswith("triton_poi_fused_mul_")
    assert bytes_ == 2 * ROWS * COLUMNS * 2
    assert (bounds, writes, calls) == ([], ["f0:mul"], 1)


def test_the_same_source_has_the_same_name_and_another_has_not(lab):
    def names(function, kind):
        return [name for name, *_ in lab("collect", function, kind)]

    (first,) = names("doubled", "bf16")
    assert re.search(r"_[0-9a-f]{8}$", first)
    assert names("doubled", "bf16") == [first]
    assert names("doubled", "fp32") != [first]


def test_what_is_indirect_counts_what_is_asked_for(lab):
    ((_, bytes_, bounds, _, _),) = lab("collect", "picked", "bf16")
    assert bounds == ["indirect"]
    assert bytes_ == ROWS * (8 + 2 + 2)


def test_what_was_mutated_is_as_large_as_it_was():
    """A buffer has the name of what mutated it last, which may be as small as its padding."""
    sizes = {"buf1": 4096 * 2032, "buf2": 4096 * 7}
    graph = SimpleNamespace(
        scheduler=SimpleNamespace(mutation_real_name={"buf2": "buf1"}),
        get_numel=sizes.__getitem__,
        get_dtype=lambda name: torch.bfloat16,
        sizevars=SimpleNamespace(optimization_hint=lambda size, **how: size),
    )
    with V.set_graph_handler(graph):
        assert generated._buffer_bytes("buf1") == 4096 * 2032 * 2
        assert generated._buffer_bytes("buf2") == 4096 * 2032 * 2
