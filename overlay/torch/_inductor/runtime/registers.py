"""How many registers a thread may have."""

# On NVIDIA's GPUs, which alone are asked for registers.
THREADS_PER_WARP = 32
MAX_REGISTERS_PER_THREAD = 255
MIN_REGISTERS_PER_THREAD = 24  # of what ptxas compiles
# A thread has a multiple of these.
REGISTER_UNIT = 8
# Of a thread, for addresses, masks, row statistics and temporaries.
OTHER_REGISTERS = 28


def all_registers(per_multiprocessor: int, num_warps: int, programs: int = 1) -> int:
    """
    Registers a thread of one of ``programs``, of ``num_warps`` each, that share a
    multiprocessor with ``per_multiprocessor`` registers; fewer of them where that is
    fewer than any has.
    """
    threads = programs * num_warps * THREADS_PER_WARP
    units = per_multiprocessor // (threads * REGISTER_UNIT)
    share = min(MAX_REGISTERS_PER_THREAD, units * REGISTER_UNIT)
    return max(MIN_REGISTERS_PER_THREAD, share)
