"""How many registers a thread may have."""

from .hints import _NUM_THREADS_PER_WARP


MAX_REGISTERS_PER_THREAD = 255


def all_registers(per_multiprocessor: int, num_warps: int) -> int:
    """
    Registers a thread of a program of ``num_warps`` that has a multiprocessor to itself,
    with ``per_multiprocessor`` registers.
    """
    return min(
        MAX_REGISTERS_PER_THREAD,
        per_multiprocessor // (num_warps * _NUM_THREADS_PER_WARP),
    )
