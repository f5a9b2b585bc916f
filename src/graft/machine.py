"""What this machine has beside Python: a CUDA driver, a C compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path


def has_cuda_driver() -> bool:
    """Whether the CUDA driver's library is here (it comes with the kernel driver)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def c_compiler() -> str | None:
    """The C compiler that Triton would take: $CC, else gcc, else clang."""
    if chosen := os.environ.get("CC"):
        return shutil.which(chosen.split()[0])
    return shutil.which("gcc") or shutil.which("clang")


def notes(cuda: str | None) -> list[str]:
    """What a user should know of this machine before running anything, one line each.

    `cuda` is the version of CUDA that torch is built for (None: it is not).
    """
    found = []
    if cuda and not has_cuda_driver():
        found.append(
            f"torch is a CUDA {cuda} build and there is no CUDA driver here: graft explain "
            "and the tests compile offline, for GPUs that are described"
        )
    if c_compiler() is None:
        named = f"$CC is {os.environ['CC']}, which is not there" if os.environ.get("CC") else ""
        found.append(
            f"there is no C compiler ({named or 'neither gcc nor clang'}), and Triton needs one to "
            "launch kernels: apt-get install gcc, or set CC"
        )
    return found
