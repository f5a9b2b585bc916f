"""What compiled code returned, judged by eager in float64, on a GPU or under Triton's interpreter.

A graph is right if each output, and each input after the call, has eager's shape, strides and
dtype, and

- integers and bools are those of eager, or of eager with float64 inputs;
- floats are finite where both of those are, with a relative error, `norm(found - expected) /
  norm(expected)` with `expected` in float64, of at most 1.1 times that of eager in the same dtype,
  or 2 ulp of the output's type; and no element is off by more than 8 times what eager's worst
  element, or 2 ulp, is. A float64 graph has no wider reference: its sums may differ from eager's
  by `FLOAT64_ULP`;
- a second run of the same inputs gives the same bits.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

EAGER_MARGIN = 1.1
OUTPUT_ULP = 2
# The order of summation moves single elements by a few ulp; a row too many or too few moves one
# by more than this.
ELEMENT_MARGIN = 8
FLOAT64_ULP = 512
LAB_BUDGET_S = 60.0
NON_STRICT = {"triton.mix_order_reduction_non_strict_mode": True}
DEFAULT: dict[str, Any] = {}


@dataclass(frozen=True)
class Outcome:
    """`kind` is ok, wrong, unstable, error, eager (PyTorch itself refuses), budget or memory.

    `mix_order` counts the mix-order kernels that were generated, `producer_sums` what was attached
    to kernels; `detail` says what is wrong, and `ratio` is the largest error over what was allowed
    (0 where no floats were compared).
    """

    kind: str
    mix_order: int = 0
    detail: str = ""
    ratio: float = 0.0
    producer_sums: int = 0

    @property
    def failed(self) -> bool:
        return self.kind in ("wrong", "unstable", "error")


class Machine:
    """Where programs run: a real GPU ("cuda") or the lab, which this process then becomes."""

    def __init__(self, kind: str) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self.cache = tempfile.mkdtemp(prefix="graft-fuzz-")
        self.kind = kind
        if kind == "lab":
            os.environ["TRITON_INTERPRET"] = "1"
            from graft.lab import backend

            backend.install(budget_s=LAB_BUDGET_S)
        import torch

        if kind == "cuda" and not torch.cuda.is_available():
            raise SystemExit(
                "error: no GPU here\nnext: python -m graft.devtools.fuzz --device lab …"
            )
        torch._inductor.config.compile_threads = 1
        torch._inductor.config.fx_graph_cache = False
        torch._functorch.config.enable_autograd_cache = False
        torch._dynamo.config.verbose = False


def compare(
    name: str, found: Any, again: Any, eager: Any, expected: Any, scale: float = 0.0
) -> Outcome:
    """One output: as eager in shape, strides and dtype; as `expected` in value; twice the same.

    Errors are relative to `expected`, or to `scale` where it is less: what a sum's rounding is of
    the order of, though its terms cancel.
    """
    import torch

    for what in ("shape", "dtype"):
        if getattr(found, what) != getattr(eager, what):
            return Outcome(
                "wrong", detail=f"{name}: {what} {getattr(found, what)} for {getattr(eager, what)}"
            )
    if strides(found) != strides(eager):
        return Outcome("wrong", detail=f"{name}: strides {found.stride()} for {eager.stride()}")
    if not torch.equal(_bits(found), _bits(again)):
        return Outcome("unstable", detail=f"{name}: two runs differ")
    if not found.is_floating_point():
        if expected.is_floating_point():  # a cast of a float: eager's own rounding decides
            expected = eager
        bad = (found != eager) & (found != expected)
        if bad.any():
            return Outcome("wrong", detail=f"{name}: {int(bad.sum())} of {bad.numel()} differ")
        return Outcome("ok")
    expected = expected.double()
    both = expected.isfinite() & eager.isfinite()
    if not (found.isnan() | ~(expected.isnan() & eager.isnan())).all():
        return Outcome("wrong", detail=f"{name}: a number where eager has NaN")
    if not both.any():
        return Outcome("ok")
    if not found[both].isfinite().all():
        count = int((~found[both].isfinite()).sum())
        return Outcome("wrong", detail=f"{name}: {count} of {found.numel()} not finite")
    eps = torch.finfo(found.dtype).eps
    ulp = (FLOAT64_ULP if found.dtype == torch.float64 else OUTPUT_ULP) * eps
    target = expected[both]
    error, worst = _errors(found[both], target, max(eps, scale))
    eager_error, eager_worst = _errors(eager[both], target, max(eps, scale))
    allowed = max(EAGER_MARGIN * eager_error, ulp)
    allowed_worst = ELEMENT_MARGIN * max(EAGER_MARGIN * eager_worst, ulp)
    ratio = max(error / allowed, worst / allowed_worst)
    detail = (
        f"{name}: error {error:.2e}, eager's {eager_error:.2e}, allowed {allowed:.2e}; "
        f"of an element {worst:.2e}, eager's {eager_worst:.2e}, allowed {allowed_worst:.2e}"
    )
    return Outcome("wrong" if ratio > 1 else "ok", 0, detail, ratio)


def _errors(values: Any, target: Any, least: float) -> tuple[float, float]:
    """`norm(values - target) / norm(target)`, and the largest over the elements.

    What cancels to less than `least` is rounding, not a value: inputs are of the order of 1.
    """
    difference = (values.double() - target).abs()
    rms = target.pow(2).mean().sqrt().clamp_min(least)
    worst = (difference / target.abs().clamp_min(rms)).max()
    return float(difference.pow(2).mean().sqrt() / rms), float(worst)


def strides(tensor: Any) -> tuple[int, ...]:
    """The strides that mean something: those of dimensions longer than 1."""
    if tensor.numel() == 0:
        return ()
    return tuple(s for s, size in zip(tensor.stride(), tensor.shape) if size > 1)


def _bits(tensor: Any) -> Any:
    import torch

    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(
        {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    )
