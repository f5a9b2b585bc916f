"""Stock and patched never share what Inductor and Triton cache.

Inductor's keys hold a hash of its own source, so they differ by themselves; its folders, the
generated files in them, and Triton's keys do not. So a patched tree sets, where the user has not,
folders of its own for each stack hash when its Python starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

MARK = "torchinductor_graft_"
"""How the name of such a folder begins; nothing else's does."""

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME", "TRITON_CACHE_DIR")
"""Variables that may lead into it. Inductor derives the last one from the first."""

# What a tree's Python runs when it starts. TRITON_HOME rather than TRITON_CACHE_DIR: Inductor
# chooses a folder for each device below its own, but only where TRITON_CACHE_DIR is not set.
_STARTUP = '''\
"""Made by graft. The base's packages come after this tree's, and caches are this tree's own."""

import os
import site

for folder in {site_dirs!r}:
    site.addsitedir(folder)

tmp = os.environ.get("TMPDIR") or "/tmp"
cache = os.path.join(tmp, "{mark}%d_{key}" % os.getuid())
for name in {variables!r}:
    value = os.environ.get(name, "")
    # A value that another tree's Python set is not the user's.
    if "{mark}" in value and not value.startswith(cache):
        del os.environ[name]
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
os.environ.setdefault("TRITON_HOME", cache)
'''


def startup(site_dirs: tuple[Path, ...], stack_hash: str) -> str:
    """The module that a tree's Python imports when it starts."""
    return _STARTUP.format(
        site_dirs=[str(folder) for folder in site_dirs],
        mark=MARK,
        key=stack_hash[:12],
        variables=list(VARIABLES),
    )


def folder(stack_hash: str, env: Mapping[str, str] | None = None) -> Path:
    """Where a tree of this stack caches, unless the user sets TORCHINDUCTOR_CACHE_DIR."""
    tmp = (os.environ if env is None else env).get("TMPDIR") or "/tmp"
    return Path(tmp) / f"{MARK}{os.getuid()}_{stack_hash[:12]}"


def stock_environ(env: Mapping[str, str]) -> dict[str, str]:
    """`env` without the folders that a patched tree's Python put there.

    For whoever starts the stock Python from a patched one: the child would inherit them.
    """
    return {k: v for k, v in env.items() if not (k in VARIABLES and MARK in v)}
