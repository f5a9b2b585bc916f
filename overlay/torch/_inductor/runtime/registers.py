"""How many registers a thread may have."""

from __future__ import annotations

from typing import Optional, TYPE_CHECKING

from .hints import _NUM_THREADS_PER_WARP


if TYPE_CHECKING:
    from .hints import DeviceProperties


MAX_REGISTERS_PER_THREAD = 255


def all_registers(device: DeviceProperties, num_warps: int) -> Optional[int]:
    """
    Registers a thread of a program of ``num_warps`` that has a multiprocessor of
    ``device`` to itself; None where the device does not say how many there are.
    """
    if not device.regs_per_multiprocessor:
        return None
    threads = num_warps * _NUM_THREADS_PER_WARP
    return min(MAX_REGISTERS_PER_THREAD, device.regs_per_multiprocessor // threads)
