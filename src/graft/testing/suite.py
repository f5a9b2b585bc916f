"""The project's tests, each folder of them in a process of its own.

``tests/inductor`` may describe a GPU to torch before anything else imports it, and
``tests/graft`` must not see that. Needs pytest; where pytest-xdist is there, runs as many at a time
as there are cores, two to four.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SUITES = {"cpu": ("tests/graft", "tests/inductor"), "gpu": ("tests/inductor",)}
"""What tox.ini's environments run when no path is named."""


QUICK = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}
"""Keeps Inductor's test utilities from asking which vector instructions a CPU has, by compilers and
by programs that import torch: over 10 s of CPU time in every process that imports them."""


def commands(which: str, args: Sequence[str], root: Path, parallel: bool) -> list[list[str]]:
    """pytest's arguments for each process: `args` are options, paths, or both.

    Paths are sorted into the suites that they are of; without any, all of `which` run.
    """
    processes = max(2, min(4, len(os.sched_getaffinity(0))))

    def shared(suite: str, rest: Sequence[str]) -> list[str]:
        """A test that needs what its neighbours made stays in their process: those of the file,
        or, of upstream's classes, of the class."""
        if not parallel or which != "cpu":
            return [*options, *rest]
        by = "loadscope" if suite == "tests/inductor" else "loadfile"
        return ["-n", str(processes), "--dist", by, *options, *rest]

    paths = [each for each in args if (root / each.partition("::")[0]).exists()]
    options = [each for each in args if each not in paths]
    if not paths:
        return [shared(suite, [suite]) for suite in SUITES[which]]
    inductor = [each for each in paths if "inductor" in Path(each.partition("::")[0]).parts]
    others = [each for each in paths if each not in inductor]
    chosen = (("tests/graft", others), ("tests/inductor", inductor))
    return [shared(suite, paths) for suite, paths in chosen if paths]


def main(argv: Sequence[str]) -> int:
    """``python suite.py cpu|gpu [pytest arguments]``; returns the first exit code that is not 0."""
    root = Path(__file__).resolve().parents[3]
    parallel = importlib.util.find_spec("xdist") is not None
    env = {**QUICK, **os.environ}
    codes = [
        subprocess.run(
            [sys.executable, "-m", "pytest", *each], cwd=root, env=env, check=False
        ).returncode
        for each in commands(argv[0], argv[1:], root, parallel)
    ]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
