"""The described GPUs: what they are, and how they are found."""

import dataclasses

import pytest

from graft.lab import devices


def test_there_are_four_with_their_targets():
    targets = {key: device.capability for key, device in devices.DEVICES.items()}
    assert targets == {"A100": 80, "H100": 90, "H200": 90, "B200": 100}


@pytest.mark.parametrize("device", devices.DEVICES.values(), ids=lambda device: device.key)
def test_numbers_are_those_of_a_gpu_and_have_sources(device):
    assert device.registers_per_sm == 65536
    assert 100 < device.sm_count < 200
    assert device.shared_memory_per_block_optin_bytes < device.shared_memory_per_sm_bytes
    assert 30 * devices.MIB < device.l2_bytes < 200 * devices.MIB
    assert 2000 < device.bandwidth_GBs < 10000
    assert len(device.sources) >= 3
    # What Triton multiplies out again: two transfers a cycle over the bus.
    again = device.memory_clock_khz * device.memory_bus_bits * 2 / 1e6 / 8
    assert again == pytest.approx(device.bandwidth_GBs, rel=1e-4)


def test_they_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        devices.H200.sm_count = 1


@pytest.mark.parametrize("name", ["H200", "h200", "NVIDIA H200", " H200 "])
def test_find_takes_short_and_full_names(name):
    assert devices.find(name) is devices.H200


@pytest.mark.parametrize(("name", "near"), [("H20", "H200"), ("b20", "B200"), ("a10", "A100")])
def test_find_suggests_the_nearest(name, near):
    with pytest.raises(devices.UnknownGpu, match=f"the nearest is {near}") as wrong:
        devices.find(name)
    assert wrong.value.next == f"graft explain --gpu {near}"
    assert wrong.value.nearest == near


def test_find_suggests_none_that_is_not_near():
    with pytest.raises(devices.UnknownGpu) as wrong:
        devices.find("RTX5090")
    assert "nearest" not in wrong.value.message
    assert wrong.value.next == "graft explain --gpu H200"


@pytest.mark.parametrize(
    ("cuda_name", "device"),
    [
        ("NVIDIA H200", devices.H200),
        ("NVIDIA H100 80GB HBM3", devices.H100),
        ("NVIDIA A100-SXM4-80GB", devices.A100),
        ("NVIDIA B200", devices.B200),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_match_knows_cuda_s_names(cuda_name, device):
    assert devices.match(cuda_name) is device
