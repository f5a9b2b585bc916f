"""The GPUs that kernels are compiled for offline, each with where its numbers come from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from graft.errors import GraftError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

WARP_SIZE = 32
MAX_THREADS_PER_BLOCK = 1024
MAX_REGISTERS_PER_THREAD = 255
# Registers are handed to a warp in units of 256 (CUDA occupancy calculator, 8.0 to 10.0).
REGISTER_UNIT_PER_WARP = 256
# Bytes of shared memory that CUDA itself takes of each block (CUDA C++ Programming Guide,
# 'Compute Capability 8.x'), and the unit that it is handed out in (CUDA occupancy calculator).
SHARED_MEMORY_RESERVED_BYTES = 1 * KIB
SHARED_MEMORY_UNIT_BYTES = 128


@dataclass(frozen=True)
class Device:
    """A GPU, as `cudaGetDeviceProperties` would describe it.

    `bandwidth_GBs` is the data sheet's memory bandwidth in 10^9 bytes a second; what a copy
    reaches is less. `sources` says, for each group of numbers, where it was read.
    """

    key: str
    name: str
    major: int
    minor: int
    sm_count: int
    registers_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    shared_memory_per_sm_bytes: int
    shared_memory_per_block_optin_bytes: int
    l2_bytes: int
    memory_bytes: int
    bandwidth_GBs: float
    memory_bus_bits: int
    sm_clock_mhz: int
    sources: tuple[str, ...]

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for sm_90."""
        return self.major * 10 + self.minor

    @property
    def memory_clock_khz(self) -> int:
        """The clock that, at two transfers a cycle over the bus, gives `bandwidth_GBs`."""
        return round(self.bandwidth_GBs * 8 * 1e6 / (2 * self.memory_bus_bits))


_GUIDE = (
    "registers, threads, blocks and shared memory per SM and per block: "
    "CUDA C++ Programming Guide, 'Technical Specifications per Compute Capability'"
)

A100 = Device(
    key="A100",
    name="NVIDIA A100-SXM4-80GB",
    major=8,
    minor=0,
    sm_count=108,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    shared_memory_per_sm_bytes=164 * KIB,
    shared_memory_per_block_optin_bytes=163 * KIB,
    l2_bytes=40 * MIB,
    memory_bytes=80 * GIB,
    bandwidth_GBs=2039.0,
    memory_bus_bits=5120,
    sm_clock_mhz=1410,
    sources=(
        "SMs, L2, bus, clock: NVIDIA A100 Tensor Core GPU Architecture (whitepaper), table 4",
        "bandwidth: NVIDIA A100 80GB data sheet (SXM), 2,039 GB/s",
        _GUIDE,
    ),
)

H100 = Device(
    key="H100",
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    sm_count=132,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    shared_memory_per_sm_bytes=228 * KIB,
    shared_memory_per_block_optin_bytes=227 * KIB,
    l2_bytes=50 * MIB,
    memory_bytes=80 * GIB,
    bandwidth_GBs=3352.0,
    memory_bus_bits=5120,
    sm_clock_mhz=1980,
    sources=(
        "SMs, L2, bus: NVIDIA H100 Tensor Core GPU Architecture (whitepaper), H100 SXM5",
        "bandwidth: NVIDIA H100 data sheet (SXM), 3.35 TB/s; clock: nvidia-smi, clocks.max.sm",
        _GUIDE,
    ),
)

H200 = Device(
    key="H200",
    name="NVIDIA H200",
    major=9,
    minor=0,
    sm_count=132,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    shared_memory_per_sm_bytes=228 * KIB,
    shared_memory_per_block_optin_bytes=227 * KIB,
    l2_bytes=60 * MIB,
    memory_bytes=141 * 10**9,
    bandwidth_GBs=4800.0,
    memory_bus_bits=6144,
    sm_clock_mhz=1980,
    sources=(
        "bandwidth, memory: NVIDIA H200 data sheet, 4.8 TB/s and 141 GB",
        "SMs, L2, clock: cudaGetDeviceProperties and nvidia-smi on an H200",
        _GUIDE,
    ),
)

B200 = Device(
    key="B200",
    name="NVIDIA B200",
    major=10,
    minor=0,
    sm_count=148,
    registers_per_sm=65536,
    max_threads_per_sm=2048,
    max_blocks_per_sm=32,
    shared_memory_per_sm_bytes=228 * KIB,
    shared_memory_per_block_optin_bytes=227 * KIB,
    l2_bytes=126 * MIB,
    memory_bytes=180 * 10**9,
    bandwidth_GBs=8000.0,
    memory_bus_bits=8192,
    sm_clock_mhz=1965,
    sources=(
        "bandwidth, memory: NVIDIA Blackwell data sheet (HGX B200), 8 TB/s and 180 GB a GPU",
        "SMs, L2, clock: cudaGetDeviceProperties and nvidia-smi as published for the B200",
        _GUIDE,
    ),
)

DEVICES: dict[str, Device] = {device.key: device for device in (A100, H100, H200, B200)}


class UnknownGpu(GraftError):
    """No described GPU has that name; ``nearest`` is the key of the one to take instead."""

    def __init__(self, message: str, nearest: str) -> None:
        super().__init__(message, next=f"graft explain --gpu {nearest}")
        self.nearest = nearest


def find(name: str) -> Device:
    """The described GPU called `name` (`h200`, `H200` or CUDA's own `NVIDIA H200`).

    Raises UnknownGpu when there is none, with the nearest name if one is near.
    """
    wanted = name.strip().lower()
    for device in DEVICES.values():
        if wanted in (device.key.lower(), device.name.lower()):
            return device
    close = difflib.get_close_matches(name.strip().upper(), DEVICES, n=1, cutoff=0.5)
    raise UnknownGpu(
        f"no described GPU is called {name!r}; there are {', '.join(DEVICES)}"
        + (f"; the nearest is {close[0]}" if close else ""),
        *(close or ["H200"]),
    )


def match(cuda_name: str) -> Device | None:
    """The described GPU for the name that CUDA gives a real one, or None."""
    for device in DEVICES.values():
        if cuda_name == device.name or device.key in cuda_name.upper().replace("-", " ").split():
            return device
    return None


def present() -> Device:
    """The real GPU of this process, by its description here, or by what CUDA says of it.

    Raises GraftError where there is none.
    """
    import torch

    if not torch.cuda.is_available():
        raise GraftError(
            "this machine has no GPU that torch can use", next="graft explain --gpu H200"
        )
    found = torch.cuda.get_device_properties(0)
    described = match(found.name)
    if described is not None:
        return described
    return Device(
        key=found.name,
        name=found.name,
        major=found.major,
        minor=found.minor,
        sm_count=found.multi_processor_count,
        registers_per_sm=found.regs_per_multiprocessor,
        max_threads_per_sm=found.max_threads_per_multi_processor,
        max_blocks_per_sm=32,
        shared_memory_per_sm_bytes=found.shared_memory_per_multiprocessor,
        shared_memory_per_block_optin_bytes=found.shared_memory_per_block_optin,
        l2_bytes=found.L2_cache_size,
        memory_bytes=found.total_memory,
        bandwidth_GBs=0.0,
        memory_bus_bits=1,
        sm_clock_mhz=0,
        sources=("cudaGetDeviceProperties; 32 blocks an SM assumed; bandwidth not known",),
    )
