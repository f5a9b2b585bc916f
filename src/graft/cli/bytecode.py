"""Bytecode of what a command's processes import, where Python is told to write none.

Containers often set PYTHONDONTWRITEBYTECODE, and have a torch without bytecode. Each process of a
command then compiles the source of torch and Inductor anew, 15 to 30 s of a core, and there are
hundreds of them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import MutableMapping

from graft.places import user_cache

_REFUSES, _FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def keep(env: MutableMapping[str, str] = os.environ, package: str = "torch") -> None:
    """Have the processes that get `env` write bytecode into a folder of the user's cache.

    Only where `env` refuses it, names no folder, and this Python's `package` has none: nothing is
    written beside anyone's source. Python checks bytecode against its source by size and time.
    """
    if not env.get(_REFUSES) or env.get(_FOLDER):
        return
    found = importlib.util.find_spec(package)
    if found is None or not found.origin:
        return
    if not os.path.exists(importlib.util.cache_from_source(found.origin)):
        del env[_REFUSES]
        env[_FOLDER] = str(user_cache() / "bytecode")
