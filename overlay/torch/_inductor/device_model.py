"""
A GPU, as the cost models see it: what it is, and what was fitted to its time.

A number is one of three kinds, and each field says which, with its unit and its source:

- what a device says of itself, which `DeviceModel.of` takes from ``DeviceProperties`` and the
  driver;
- what its architecture has: an instance of `ARCHITECTURES` for each compute capability;
- what was fitted on one GPU, an H200 or an H100: a default of the field, which every GPU takes.

For another GPU, add an instance to `ARCHITECTURES`, with what its architecture has, and with
what was fitted on it in place of those defaults: each field says what to measure or to fit.
Where products of one compute capability differ, as in their L2, it is the least of them.

What is a kernel's or a policy's, as the columns that a thread has, stands with that policy,
also where an H200 was what it was tried on: shares and bounds, which have no unit of a device.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Optional, TYPE_CHECKING

import torch

from .utils import get_gpu_dram_gbps


if TYPE_CHECKING:
    from .runtime.hints import DeviceProperties


# Bytes of a line of L1 and L2 (CUDA C++ Best Practices Guide, coalesced access).
LINE_BYTES = 128


@dataclasses.dataclass(frozen=True)
class DeviceModel:
    """A GPU. SM: streaming multiprocessor."""

    type: str = "cuda"
    """As ``DeviceProperties.type``: ``hip`` is not ``cuda``."""

    # of the device

    sms: int = 1
    """SMs. The device's."""

    registers_per_sm: int = 65536
    """32-bit registers of an SM. The device's; by default those of compute capability
    7.0 to 12.1 (CUDA C++ Programming Guide, technical specifications)."""

    warps_per_sm: int = 64
    """Warps of an SM. The device's; by default those of compute capability 8.0, 9.0 and
    10.0. They are reached with at most 32 registers a thread."""

    memory_GBs: Optional[float] = None
    """Memory bandwidth by the data sheet, 10^9 bytes a second, from the bus and the clock
    that the driver says; None where it does not."""

    slots_per_byte: float = 8
    """Issue slots of an element in the time of a byte of memory traffic: SMs x
    ``lanes_per_sm`` x clock / (``copy_share`` x ``memory_GBs``). Where the driver does not
    say the clock or the bandwidth, an H200's: 132 x 128 x 1.98 GHz / 4.2 TB/s."""

    # of the architecture

    shared_memory_kib: int = 48
    """KiB of shared memory that one block can have (CUDA C++ Programming Guide, technical
    specifications); by default what any has."""

    l2_mib: int = 0
    """MiB of the L2 cache; by default nothing is taken to stay in it. An H200
    reports 60. What goes by it was fitted with the H100's 50, so that is its number."""

    lanes_per_sm: int = 128
    """Instructions of a thread that an SM issues a clock: four schedulers, a warp each (CUDA
    C++ Programming Guide, arithmetic instructions: 128 float32 adds a clock of compute
    capabilities 8.6 to 12.0)."""

    prefetch_bytes: int = 0
    """Bytes that are fetched into the L2 cache ahead, an SM, at most; 0 of GPUs that have no
    instruction that fetches a range of memory, which are those before compute capability
    9.0: one for each line of the cache is slower than none. With more than 96 KiB an H200's
    cache loses them before they are read."""

    # fitted on an H200

    l2_passed: float = 2
    """Of the L2 cache, the bytes that a kernel moves with which the next one finds none of them
    there: of 1.3 times as many a softmax of a softmax finds some, of 2.6 none. Persistent
    reductions that move as much or more, and store half of it, take 0.96 to 1.01 of the time on
    an H200 if what they read stays (66 kernels; ``read_eviction``). Of another: the same."""

    set_stride_bytes: int = 2048
    """Bytes from one column to the next, of which a multiple is slow for a tile of several rows
    that lie across: its sectors are then in few sets of the cache. Of a multiple of half as
    many it is not."""

    flight_bytes: int = 64 * 1024
    """Bytes of loads in flight, an SM, while one program computes. An H200 (4.2 TB/s, 132
    SMs, latency below 1 us) is within 3 % of its best with this, and slower with half of
    it. Of another: bandwidth x latency / SMs, or the least with which a copy is as fast."""

    several_flight_bytes: int = 48 * 1024
    """As ``flight_bytes``, of several programs, which load at different times: 4 to 11 % are
    lost on an H200 with less."""

    tile_us: float = 0.27
    """us for each tile that a program has after another, without its bytes. With the next
    three fitted to the times of 111 kernels of 65 to 16384 columns on an H200, each with
    all, a half and a quarter of its programs; of another to the same kernels."""

    tile_us_per_byte: float = 0.97e-5
    """us for each byte of such a tile. Fitted: less than at one SM's share of the bandwidth,
    as most of it is loaded while the tile before is computed."""

    program_us: float = 0.78e-3
    """us for each program whose partial accumulators the final reduction reads."""

    partial_us_per_byte: float = 0.4e-6
    """us for each byte of the partial accumulators of a program."""

    launch_us: float = 3.73
    """us that a kernel takes however little it does, in a graph of kernels;
    `launch_bytes` is the part of it between two.
    With the next four fitted to half of the shapes of a grid, backwards of RMSNorm and
    LayerNorm and sums over both dimensions, in bf16 and float32 on an H200 (CUDA-graph
    replays, L2 flushed): 256 to 2^20 rows of 64 to 16384 columns. Of another to the same."""

    row_share: float = 0.747
    """What a kernel that reads along the rows, fused or not, reaches of ``memory_GBs``."""

    column_share: float = 0.664
    """What one reaches of it that reads across the rows, and finds some of them in L2."""

    kiloprogram_us: float = 1.76
    """us of the final reduction, which reads its programs' partials one after another, for
    each 1024 of them. Not ``program_us``, which was fitted beside bytes of each program."""

    partial_KiB_us: float = 0.055
    """us of making, writing and reading the partials of all programs, for each KiB that a
    program has."""

    launch_bytes: int = 8 * 2**20
    """Bytes of memory traffic in the time between two kernels of a CUDA graph, where the
    last programs of one finish and the first of the next begin: 2 us of an H200. Of another:
    its copy bandwidth in as long."""

    l2_byte: float = 0.75
    """Time of a byte from L2 by that of a byte from memory: 5.5 TB/s and 4.2 TB/s were read
    on an H200."""

    shared_row_byte: float = 0.4
    """Time of a byte that rows share, which a mix-order kernel loads for each of them, and a
    pointwise kernel finds in L1, by that of a byte from memory. Of 80 kernels on an H200 one
    has to have 0.34 or more of this, or summing in it is slower, and one 0.45 or less."""

    gathered_byte: float = 1.3
    """What a gathered byte, which is not fetched ahead as its place is read from a tensor or
    adjoins none of its row, takes beside its traffic, in the time of a byte from memory: 1.3 to 9
    in five gathers on an H200. With less than 0.8 they are slower as mix-order kernels."""

    copy_share: float = 0.875
    """What a copy reaches of ``memory_GBs``: 4.2 TB/s of 4.8 on an H200."""

    program_ns: float = 83
    """ns in which an SM begins and ends a program of one warp: a sum of 60000 rows of bf16 takes as
    long for 640 to 1024 columns, 41.5 us on an H200 with a program a row. Of another: the same."""

    function_slot_bytes: float = 0.36
    """Bytes of memory traffic in the time of an issue slot of a slow function, with what is
    around it: libdevice's erf and tanh, of 28 and 24 slots, take as long as 10 and 9 bytes
    in the backward of a GELU on an H200."""

    issuing_warps: int = 6
    """Warps of an SM that issue in all slots: in the backward of a max pool with the sums of
    a batch norm, 4 reach 62 % or more of them, and 8 reach 89 %, on an H200."""

    # fitted on an H100

    warp_slot_ns: float = 0.147
    """ns in which an SM issues an instruction of a warp: four schedulers, at 1.7 GHz.
    With the next five it ranks the loops over rows: fitted to 494 shapes of 13 kernels
    of 10001 to 128256 columns on an H100, each with up to 10 loops (CUDA-graph replays, L2
    flushed). Of another to the same."""

    iteration_ns: float = 112
    """ns that an iteration of a looped reduction waits, beside its loads."""

    load_ns: float = 47
    """ns that it waits for each load of a thread."""

    row_end_ns: float = 141
    """ns of the reduction over the warps of a program, where a loop ends."""

    l2_held: float = 0.74
    """Of the L2 cache, the rows that resident programs read again, with which they are in it."""

    l2_lost: float = 2.5
    """Of the same, that with which none is: in between the more the more there are."""

    @property
    def l2_bytes(self) -> int:
        """Bytes of the L2 cache."""
        return self.l2_mib * 2**20

    @classmethod
    def of(cls, device: DeviceProperties) -> DeviceModel:
        """The model of a device; of one that is not NVIDIA's the defaults, with its SMs."""
        if device.type != "cuda":
            return cls(type=device.type, sms=device.multi_processor_count or 1)
        return _of_cuda(device)


# L2: NVIDIA's architecture white papers (A100, H100 and H200, B200; a B300 has a B200's).
SM_80 = DeviceModel(shared_memory_kib=163, l2_mib=40)
SM_90 = DeviceModel(shared_memory_kib=227, l2_mib=50, prefetch_bytes=96 * 1024)
SM_100 = DeviceModel(shared_memory_kib=227, l2_mib=126, prefetch_bytes=96 * 1024)
ARCHITECTURES = {80: SM_80, 90: SM_90, 100: SM_100, 103: SM_100}
# Of others, of which nothing was measured, their shared memory is known,
# and from 9.0 on they fetch ahead as an H200 does.
SHARED_MEMORY_KIB = {70: 96, 75: 64, 86: 99, 87: 163, 89: 99}
SHARED_MEMORY_KIB |= {101: 227, 110: 227, 120: 99, 121: 99}


@functools.cache
def _of_cuda(device: DeviceProperties) -> DeviceModel:
    architecture = ARCHITECTURES.get(device.cc)
    if architecture is None:
        kib = SHARED_MEMORY_KIB.get(device.cc, DeviceModel.shared_memory_kib)
        architecture = DeviceModel(shared_memory_kib=kib)
        if device.cc >= 90:
            architecture = dataclasses.replace(
                architecture, prefetch_bytes=SM_90.prefetch_bytes
            )
    model = dataclasses.replace(
        architecture,
        sms=device.multi_processor_count or 1,
        registers_per_sm=device.regs_per_multiprocessor or architecture.registers_per_sm,
        warps_per_sm=(device.max_threads_per_multi_processor or 0)
        // (device.warp_size or 32)
        or architecture.warps_per_sm,
        memory_GBs=memory_GBs(device),
    )
    clock = sm_GHz(device)
    if clock is None or model.memory_GBs is None:
        return model
    slots = model.sms * model.lanes_per_sm * clock
    copy_GBs = model.copy_share * model.memory_GBs
    return dataclasses.replace(model, slots_per_byte=slots / copy_GBs)


def sm_GHz(device: DeviceProperties) -> Optional[float]:
    """The highest clock of an SM of ``device``, in 10^9 Hz; None where it is not known."""
    try:
        from triton.runtime import driver  # not there without Triton

        said = driver.active.utils.get_device_properties(device.index)
        return said["sm_clock_rate"] * 1e-6 or None
    except Exception:  # of a driver: whatever it does not know
        return None


def memory_GBs(device: DeviceProperties) -> Optional[float]:
    """
    The memory bandwidth of ``device`` by its data sheet, in 10^9 bytes a second; None
    where it is not known.
    """
    try:
        with torch.cuda.device(device.index):
            return float(get_gpu_dram_gbps()) or None
    except Exception:  # of a driver: whatever it does not know
        return None
