"""Packages whose own code cases and models call: whether the contenders' Pythons have them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from graft.errors import GraftError
from graft.places import ROOT
from graft.stack.trees import caches

# What is installed of the packages, by a Python that need not be able to import them.
_PROBE = """
import importlib.metadata as m, json, sys
found = {d.metadata["Name"]: d.version for d in m.distributions()}
print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))
"""


def versions(
    needed: Mapping[str, Sequence[str]],
    contenders: Sequence[Any],
    paths: Sequence[str],
    what: str,
) -> dict[str, str]:
    """The versions of packages; `needed` has, by package, what of `what` (cases, models) calls it.

    `paths` are folders of packages. Raises GraftError for a missing one.
    """
    if not needed:
        return {}
    env = caches.stock_environ(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (*paths, env.get("PYTHONPATH"))))
    found: dict[str, str] = {}
    for python in dict.fromkeys(contender.python for contender in contenders):
        done = subprocess.run(
            [*python, "-c", _PROBE, *needed], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = "".join(done.stderr.strip().splitlines()[-1:])
            raise GraftError(f"{python[0]} does not run: {said}", next="./build.sh")
        there = json.loads(done.stdout)
        missing = [name for name in needed if there[name] is None]
        if missing:
            base = contenders[0].python[0]
            raise GraftError(
                f"{' and '.join(missing)} cannot be imported by {python[0]}; its {what} are"
                f" {', '.join(needed[missing[0]])}",
                next=f"{base} -m pip install -e '{ROOT}[{what}]'; or --peers DIR with wheels",
            )
        found |= there
    return found
