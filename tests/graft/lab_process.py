"""A process that interprets kernels, for tests: `TRITON_INTERPRET` cannot be set in their own.

`LabProcess(__file__)` starts one; `lab("name", *arguments)` calls the function `in_lab_name` of
that file in it, with arguments and result as JSON. With `interpret=False` it compiles kernels
instead. `python lab_process.py FILE` is its far end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[2] / "src"


class LabProcess:
    """One process for many calls: importing torch takes seconds."""

    def __init__(self, file: str, python: str = sys.executable, interpret: bool = True) -> None:
        folders = [str(SRC), str(Path(file).parent), str(Path(__file__).parent)]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [python, __file__, file],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": path},
        )

    def __call__(self, name: str, *arguments: Any) -> Any:
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([name, arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, f"the lab process ended with {self.process.wait()}"
        result, error = json.loads(answer)
        assert error is None, error
        return result

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(30)


def main(file: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints must not be taken for an answer
    module = importlib.import_module(Path(file).stem)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = [getattr(module, f"in_lab_{name}")(*arguments), None]
        except Exception:
            answer = [None, traceback.format_exc()]
        print(json.dumps(answer), file=answers, flush=True)
    gc.freeze()  # a process that ends searches all of torch for garbage, for seconds


if __name__ == "__main__":
    main(sys.argv[1])
