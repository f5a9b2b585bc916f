"""A kernel -> registers, spills, shared memory and occupancy, at each configuration it would try.

Triton compiles for the described target with the `ptxas` in its own wheel; the `cuobjdump` beside
it says what the machine code takes. No GPU and no driver are needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.errors import GraftError, first_line
from graft.lab.compile import Kernel
from graft.lab.devices import (
    REGISTER_UNIT_PER_WARP,
    SHARED_MEMORY_RESERVED_BYTES,
    SHARED_MEMORY_UNIT_BYTES,
    WARP_SIZE,
    Device,
)

_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")


@dataclass(frozen=True)
class Assembly:
    """A kernel's machine code at one configuration.

    `spill_bytes` is local memory a thread; `occupancy` the share of an SM's threads that can be
    resident, 0.0 where a block does not fit. `error` is the compiler's when there is no code.
    """

    config: str
    num_warps: int
    num_stages: int
    registers_per_thread: int
    spill_bytes: int
    shared_memory_bytes: int
    blocks_per_sm: int
    occupancy: float
    error: str | None = None


def assemble(kernel: Kernel, device: Device) -> tuple[Assembly, ...]:
    """Every configuration that the kernel's heuristic would try on `device`.

    Includes those that Inductor adds once it has seen how many registers a looped reduction takes.
    Needs `fakegpu.install(device)` first. Kernels that no heuristic of Inductor's configures give
    none.
    """
    import torch._inductor.config as inductor_config

    tuner = load(kernel)
    if tuner is None:
        return ()
    # Launchers load machine code into a driver; nothing here is launched.
    tuner._make_launchers = lambda: None
    found = []
    results = []
    # Loading the module has compiled the kernel where there is a GPU: then its results remember.
    configs = tuner.configs or [result.config for result in tuner.compile_results]
    # What the static launcher makes of a kernel keeps no machine code to look at.
    with inductor_config.patch(use_static_triton_launcher=False):
        for config in configs:
            try:
                result = tuner._precompile_config(config)
            except Exception as error:  # a compiler raises what it likes for what it cannot compile
                found.append(_failed(config, error))
                continue
            found.append(_measured(result, device))
            results.append(result)
        tried = len(results)
        tuner.compile_results = results
        tuner.configs = None
        tuner._dynamic_scale_rblock()
        found += [_measured(result, device) for result in tuner.compile_results[tried:]]
        return _that_spill_less(tuner, found, device)


def _that_spill_less(tuner: Any, found: list[Assembly], device: Device) -> tuple[Assembly, ...]:
    """`found`, or half the rows where the only configuration spills and those spill less.

    As the patched torch chooses when it loads a kernel, which is not done here.
    """
    try:
        from torch._inductor.runtime.smaller_config import fewer_rows
    except ImportError:  # a torch without it
        return tuple(found)
    results = tuner.compile_results
    if len(results) != 1 or not found[-1].spill_bytes:
        return tuple(found)
    fewer = fewer_rows(results[0].config, tuner.inductor_meta)
    if fewer is None:
        return tuple(found)
    smaller = _measured(tuner._precompile_config(fewer), device)
    return (smaller,) if smaller.spill_bytes < found[-1].spill_bytes else tuple(found)


def load(kernel: Kernel) -> Any:
    """The kernel's `CachingAutotuner`, or None where its source does not define one."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    tuner = getattr(PyCodeCache.load(kernel.source), kernel.name, None)
    return tuner if isinstance(tuner, CachingAutotuner) else None


def _describe(config: Any) -> str:
    return ", ".join(f"{key} {value}" for key, value in config.kwargs.items())


def _failed(config: Any, error: BaseException) -> Assembly:
    while error.__cause__ is not None:  # Triton names the caller, and its cause what is wrong
        error = error.__cause__
    return Assembly(
        config=_describe(config),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        registers_per_thread=0,
        spill_bytes=0,
        shared_memory_bytes=0,
        blocks_per_sm=0,
        occupancy=0.0,
        error=first_line(error),
    )


def _measured(result: Any, device: Device) -> Assembly:
    binary = result.kernel
    registers, spill_bytes, static_shared = usage(binary.asm["cubin"])
    # What Inductor reads when it decides whether to try a smaller block.
    binary.n_regs, binary.n_spills = registers, spill_bytes // 4
    shared = max(binary.metadata.shared, static_shared)
    warps = binary.metadata.num_warps
    blocks = blocks_per_sm(device, registers, warps, shared)
    return Assembly(
        config=_describe(result.config),
        num_warps=warps,
        num_stages=result.config.num_stages,
        registers_per_thread=registers,
        spill_bytes=spill_bytes,
        shared_memory_bytes=shared,
        blocks_per_sm=blocks,
        occupancy=blocks * warps * WARP_SIZE / device.max_threads_per_sm,
    )


def usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers a thread, bytes of local memory a thread, bytes of static shared memory a block.

    Raises GraftError where Triton's `cuobjdump` is missing or does not say.
    """
    tool = _cuobjdump()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        ran = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True
        )
    match = _USAGE.search(ran.stdout)
    if match is None:
        raise GraftError(f"{tool} says nothing of the resources of a kernel: {ran.stderr.strip()}")
    registers, stack, shared, local = map(int, match.groups())
    return registers, max(stack, local), shared


def _cuobjdump() -> Path:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.is_file():
        raise GraftError(f"Triton's wheel has no {tool.name} ({tool})", next="./build.sh")
    return tool


def blocks_per_sm(device: Device, registers: int, warps: int, shared_bytes: int) -> int:
    """Blocks of `warps` warps that an SM of `device` holds at once (CUDA's occupancy rules)."""
    if shared_bytes > device.shared_memory_per_block_optin_bytes:
        return 0
    per_warp = _round_up(registers * WARP_SIZE, REGISTER_UNIT_PER_WARP)
    # Registers are handed out by each of an SM's four partitions to its own warps.
    warps_by_registers = 4 * (device.registers_per_sm // 4 // per_warp) if per_warp else 10**6
    shared = _round_up(shared_bytes + SHARED_MEMORY_RESERVED_BYTES, SHARED_MEMORY_UNIT_BYTES)
    return min(
        warps_by_registers // warps,
        device.shared_memory_per_sm_bytes // shared,
        device.max_threads_per_sm // (warps * WARP_SIZE),
        device.max_blocks_per_sm,
    )


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
