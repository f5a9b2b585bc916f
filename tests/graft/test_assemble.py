"""Registers, spills and occupancy of kernels, for GPUs that are described."""

import pytest
import torch
from lab_process import LabProcess

from graft.lab import assemble, devices


def in_lab_assemble(gpu, name, shape):
    """Assemblies of each kernel, by kind, in order."""
    from dataclasses import asdict

    from graft import cases
    from graft.lab import capture, compile, fakegpu

    device = devices.find(gpu)
    fakegpu.install(device)
    found = []
    capture.trace(cases.find(name), tuple(shape), "fp32", compile.into(found))
    return [
        [kernel.kind, [asdict(each) for each in assemble.assemble(kernel, device)]]
        for graph in found
        for kernel in graph.kernels
    ]


def in_lab_spill():
    """A mix-order kernel of wide rows, each row left to one warp."""
    from graft import cases
    from graft.lab import capture, compile, fakegpu

    fakegpu.install(devices.H200)
    found = []
    case = cases.find("layer_norm_backward")
    capture.trace(case, (16384, 2048), "fp32", compile.into(found))
    tuner = assemble.load(found[0].kernels[0])
    config = tuner.configs[0]
    config.num_warps = 1
    with torch._inductor.config.patch(use_static_triton_launcher=False):
        measured = assemble._measured(tuner._precompile_config(config), devices.H200)
    return [measured.registers_per_thread, measured.spill_bytes]


@pytest.fixture(scope="module", params=["A100", "H200", "B200"])
def lab(request):
    process = LabProcess(__file__, interpret=False)
    yield request.param, process
    process.close()


def test_every_configuration_of_every_kernel_is_assembled(lab):
    gpu, process = lab
    kernels = process("assemble", gpu, "rms_norm_backward", [32768, 768])
    assert kernels[0][0] == "mix-order"
    for kind, assemblies in kernels:
        assert assemblies, kind
        for each in assemblies:
            assert each["error"] is None
            assert 6 <= each["registers_per_thread"] <= devices.MAX_REGISTERS_PER_THREAD
            assert 0 < each["occupancy"] <= 1
            assert "XBLOCK" in each["config"]
    (_, first), *_ = kernels
    assert "NUM_STAGES" in first[0]["config"]
    # A row is summed over several warps, through shared memory.
    assert first[0]["shared_memory_bytes"] > 0


def test_a_kernel_that_spills_says_so():
    process = LabProcess(__file__, interpret=False)
    registers, spill_bytes = process("spill")
    process.close()
    # Far over the limit ptxas keeps few registers, and nearly everything in local memory.
    assert registers in (64, devices.MAX_REGISTERS_PER_THREAD)
    assert spill_bytes > 100


@pytest.mark.parametrize(
    ("registers", "warps", "shared_kib", "blocks"),
    [
        # CUDA's occupancy calculator, compute capability 9.0.
        (32, 8, 0, 8),
        (32, 4, 0, 16),
        (33, 8, 0, 6),
        (64, 8, 0, 4),
        (128, 8, 0, 2),
        (255, 8, 0, 1),
        (255, 2, 0, 4),
        (16, 1, 0, 32),
        (168, 2, 2, 6),
        (32, 4, 48, 4),
        (32, 4, 113, 2),
        (32, 4, 114, 1),
        (32, 4, 227, 1),
        (32, 4, 228, 0),
    ],
)
def test_occupancy_is_cuda_s(registers, warps, shared_kib, blocks):
    assert assemble.blocks_per_sm(devices.H200, registers, warps, shared_kib * 1024) == blocks


def test_less_shared_memory_holds_fewer_blocks():
    assert assemble.blocks_per_sm(devices.A100, 32, 4, 80 * 1024) == 2
    assert assemble.blocks_per_sm(devices.A100, 32, 4, 82 * 1024) == 1
    assert assemble.blocks_per_sm(devices.A100, 32, 4, 164 * 1024) == 0
