"""How many registers a thread may have."""

from .hints import _NUM_THREADS_PER_WARP


MAX_REGISTERS_PER_THREAD = 255
# A thread has a multiple of these.
REGISTER_UNIT = 8


def all_registers(per_multiprocessor: int, num_warps: int, programs: int = 1) -> int:
    """
    Registers a thread of one of ``programs``, of ``num_warps`` each, that share a
    multiprocessor with ``per_multiprocessor`` registers.
    """
    threads = programs * num_warps * _NUM_THREADS_PER_WARP
    units = per_multiprocessor // (threads * REGISTER_UNIT)
    return min(MAX_REGISTERS_PER_THREAD, units * REGISTER_UNIT)
