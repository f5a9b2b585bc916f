r"""The GPU kernels of a training step, by name, for several contenders that take turns on one GPU.

    python bench/step_kernels.py CASE --out FILE stock patched \
        off=stock:triton.mix_order_reduction=False

A contender is `stock` or `patched`, or NAME=SIDE with options of Inductor behind colons. Each is a
process; all compile at once, and then take turns: 4 steps unmeasured, 8 timed by events, 3 under
the profiler. FILE gets, for each contender and turn, `step_us` of the 8, the GPU time of generated
kernels (`triton_us`) and of the rest, and each kernel's launches and microseconds a step.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
WARM_UP, TIMED, PROFILED = 4, 8, 3
# For the others to compile, and for their turns.
PATIENCE_S = 180


def contender(text: str) -> tuple[str, str, dict[str, Any]]:
    """`NAME=SIDE:option=value...` -> name, side, options."""
    head, *options = text.split(":")
    name, _, side = head.partition("=")
    pairs = (option.partition("=") for option in options)
    return name, side or name, {key: ast.literal_eval(value) for key, _, value in pairs}


class Turns:
    """Files in a folder, one a turn that may begin."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def wait(self, number: int) -> None:
        """Raises TimeoutError where the turns before it do not end."""
        until = time.monotonic() + PATIENCE_S
        while number and not (self.folder / str(number)).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"turn {number} did not begin in {PATIENCE_S} s")
            time.sleep(0.02)

    def end(self, number: int) -> None:
        (self.folder / str(number + 1)).touch()


def measured(step: Callable[[], Any]) -> dict[str, Any]:
    """What one turn finds of a step."""
    from graft.bench import step_profile

    for _ in range(WARM_UP):
        step()
    step_us = step_profile.timed_us(step, TIMED)
    profile = step_profile.profiled(step, PROFILED)
    return {
        "step_us": step_us,
        "triton_us": profile.time_us(step_profile.is_generated),
        "rest_us": profile.time_us(lambda name: not step_profile.is_generated(name)),
        "kernels": profile.kernels(),
    }


def child(request: dict[str, Any]) -> None:
    """One contender: compile, then measure in its turns, after each of which it writes."""
    import torch

    from graft import cases

    case, device = cases.find(request["case"]), torch.device("cuda")
    torch.manual_seed(0)
    model = case.model(device)
    inputs = case.inputs(case.default_shape, cases.DTYPES["bf16"], device)
    forward = torch.compile(
        lambda *args: case.fn(model, *args), dynamic=False, options=request["options"] or None
    )

    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward(*inputs).backward()

    turns, rounds = Turns(request["turns"]), []
    step()
    torch.cuda.synchronize()
    for turn in request["numbers"]:
        turns.wait(turn)
        rounds.append(measured(step))
        turns.end(turn)
        answer = {
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "rounds": rounds,
        }
        Path(request["answer"]).write_text(json.dumps(answer))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(json.loads(sys.argv[2]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case")
    parser.add_argument("contenders", nargs="+", metavar="CONTENDER")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prefix", type=Path, default=ROOT / "build")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from graft import caches, pins, stack, tree

    pythons = tree.pythons(options.prefix)
    pin = pins.load()
    result: dict[str, Any] = {
        "pin": pin.name,
        "stack_hash": stack.load(pin).hash,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python bench/step_kernels.py", options.case, *options.contenders]),
        "contenders": {},
    }
    chosen = [contender(text) for text in options.contenders]
    with tempfile.TemporaryDirectory(prefix="graft-step-") as folder:
        running = {}
        for index, (name, side, knobs) in enumerate(chosen):
            numbers = range(index, len(chosen) * options.rounds, len(chosen))
            request = {
                "case": options.case,
                "options": knobs,
                "turns": folder,
                "numbers": list(numbers),
                "answer": str(Path(folder, f"{name}.json")),
            }
            running[name] = subprocess.Popen(
                [*pythons[side], __file__, "--child", json.dumps(request)],
                env={**caches.stock_environ(os.environ), "PYTHONPATH": str(ROOT / "src")},
            )
        codes = {name: process.wait() for name, process in running.items()}
        for name, side, knobs in chosen:
            answer = Path(folder, f"{name}.json")
            found = json.loads(answer.read_text()) if answer.exists() else {"rounds": []}
            result["contenders"][name] = {"side": side, "knobs": knobs, **found}
            for turn in found["rounds"]:
                middle = sorted(turn["step_us"])[TIMED // 2]
                print(
                    f"{name:12} step {middle:10.1f} us, generated kernels"
                    f" {turn['triton_us']:9.1f}, the rest {turn['rest_us']:9.1f}"
                )
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return max(codes.values())


if __name__ == "__main__":
    sys.exit(main())
