r"""A training step under DistributedDataParallel, compiled, against eager; and its GPU kernels.

    build/bin/torchrun --standalone --nproc-per-node 2 bench/ddp_step.py --out FILE \
        [--case scaled_residual] [--set triton.mix_order_reduction_max_reads=0]

Every rank has its own batch. The reference is eager without DDP: each rank's gradients, averaged
over the ranks in float32. Rank 0 writes: the loss and the gradients' error (norm of the difference
over norm of the reference: of all together, and of the worst parameter), whether the ranks hold the
same gradients bit by bit, `step_us` of 8 steps, and under the profiler the GPU time of generated
kernels, of NCCL's and of the rest. With --set options apply to Inductor; stock's figures are those
of the stock Python's `-m torch.distributed.run`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from graft import cases  # noqa: E402
from graft.bench import step_profile  # noqa: E402

WARM_UP, TIMED, PROFILED = 4, 8, 3


class Step(nn.Module):
    """A case's loss as a module, as DDP wants it."""

    def __init__(self, case: cases.Case, model: nn.Module) -> None:
        super().__init__()
        self.case, self.model = case, model

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.case.fn(self.model, *inputs)
        return loss


def run(step: Any, module: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
    module.zero_grad(set_to_none=True)
    loss = step(*inputs)
    loss.backward()
    return loss.detach()


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """In float32, by the name that the parameter has in a Step."""
    return {
        name.removeprefix("module."): parameter.grad.float()
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def same_on_all_ranks(values: dict[str, torch.Tensor]) -> bool:
    mine = torch.cat([value.flatten() for value in values.values()]).view(torch.int32)
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return torch.equal(least, most)


def owner(name: str) -> str:
    """Who wrote the kernel of this name: `triton` (Inductor), `nccl` or the `rest`."""
    return "triton" if step_profile.is_generated(name) else "nccl" if "nccl" in name else "rest"


def measure(step: Any, module: nn.Module, inputs: list[torch.Tensor]) -> dict[str, Any]:
    for _ in range(WARM_UP):
        run(step, module, inputs)
    torch.cuda.synchronize()
    dist.barrier()
    step_us = step_profile.timed_us(lambda: run(step, module, inputs), TIMED)
    profile = step_profile.profiled(lambda: run(step, module, inputs), PROFILED)

    def time_us(who: str) -> float:
        return profile.time_us(lambda name: owner(name) == who)

    return {
        "step_us": step_us,
        **{f"{who}_us": time_us(who) for who in ("triton", "nccl", "rest")},
        "kernels": profile.kernels(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="scaled_residual")
    parser.add_argument("--set", dest="options", action="append", default=[])
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    pairs = (text.partition("=") for text in asked.options)
    options = {key: ast.literal_eval(value) for key, _, value in pairs}

    rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    case = cases.find(asked.case)
    torch.manual_seed(0)
    model = case.model(device)
    torch.manual_seed(1 + rank)
    inputs = list(case.inputs(case.default_shape, cases.DTYPES["bf16"], device))

    eager = Step(case, copy.deepcopy(model))
    loss = mean_over_ranks(run(eager, eager, inputs)).item()
    reference = {name: mean_over_ranks(g) for name, g in gradients(eager).items()}
    del eager
    torch.cuda.empty_cache()

    ddp = DistributedDataParallel(Step(case, model), device_ids=[device.index])
    step = torch.compile(ddp, dynamic=False, options=options or None)
    compiled_loss = mean_over_ranks(run(step, ddp, inputs)).item()
    found = gradients(ddp)
    errors = {name: (found[name] - g).norm().item() for name, g in reference.items()}
    norms = {name: g.norm().item() for name, g in reference.items()}
    result = {
        "command": " ".join(["bench/ddp_step.py", *(f"--set {text}" for text in asked.options)]),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "ranks": dist.get_world_size(),
        "loss": {"eager": loss, "compiled": compiled_loss},
        "gradients_error": sum(e**2 for e in errors.values()) ** 0.5
        / sum(n**2 for n in norms.values()) ** 0.5,
        "worst_parameter": max((errors[name] / (norms[name] or 1.0), name) for name in errors),
        "same_on_all_ranks": same_on_all_ranks(found),
        **measure(step, ddp, inputs),
    }
    if rank == 0:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        shown = {key: value for key, value in result.items() if key != "kernels"}
        print(json.dumps(shown, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
