"""The fewest registers a thread with which `ptxas` makes a kernel without spilling much.

How many a kernel has says little of how many it needs: where more are free, `ptxas` takes them to
have more loads in flight. So it is asked again, with fewer.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from graft.errors import GraftError

# What is found is at most this many more than the fewest.
TOLERANCE = 4
_FRAME = re.compile(r"(\d+) bytes stack frame")
# with the limit of a kernel that is given all registers: of two, ptxas takes the last
_THREADS = re.compile(r"(\.reqntid [^\n]*)(?:\n\.maxnreg [^\n]*)?")


def fewest_registers(ptx: str, capability: int, most: int, spill_bytes: int) -> int | None:
    """Within TOLERANCE, by bisection below `most`; None where it spills more even with those.

    Raises GraftError where `ptxas` refuses the kernel.
    """
    from torch._inductor.runtime.registers import MIN_REGISTERS_PER_THREAD

    if _spill_bytes(ptx, capability, most) > spill_bytes:
        return None
    spills, fits = MIN_REGISTERS_PER_THREAD, most
    while fits - spills > TOLERANCE:
        tried = (spills + fits) // 2
        if _spill_bytes(ptx, capability, tried) > spill_bytes:
            spills = tried
        else:
            fits = tried
    return fits


def _spill_bytes(ptx: str, capability: int, registers: int) -> int:
    """Local memory a thread, with so many registers; as Triton would compile the kernel."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    limited = _THREADS.sub(rf"\1\n.maxnreg {registers}", ptx)
    arch = sm_arch_from_capability(capability)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(limited)
        command = [get_ptxas(capability).path, "-lineinfo", "-v", f"--gpu-name={arch}"]
        ran = subprocess.run(
            [*command, str(source), "-o", f"{source}.cubin"], capture_output=True, text=True
        )
    match = _FRAME.search(ran.stderr)
    if ran.returncode or match is None:
        raise GraftError(f"ptxas refuses a kernel for {arch}: {ran.stderr.strip()}")
    return int(match[1])
