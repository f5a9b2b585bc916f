"""The gate before the clock: outputs against eager in float64, with eager's own error beside it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_LOW = (torch.float16, torch.bfloat16, torch.float32)

# Largest error allowed for an output's dtype: of the whole, ||out - ref|| / ||ref||, and of the
# worst element, |out - ref| / (|ref| + rms(ref)). A few units of rounding of the dtype: a sum in
# another order passes, one wrong row of a million does not (it moves the worst element by 1).
# Integers and 8-bit floats are results of rounding, where a tie may fall to the other side.
_TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-10, 1e-8),
    torch.float32: (1e-4, 1e-3),
    torch.float16: (2e-3, 1e-2),
    torch.bfloat16: (1e-2, 3e-2),
    torch.float8_e4m3fn: (3e-2, 0.15),
    torch.float8_e5m2: (6e-2, 0.3),
}
_EXACT = (1e-2, 0.5)
# Gradients of a step under bf16 autocast are fp32 numbers of bf16's precision, and single
# elements of them are differences of nearly equal ones.
STEP_TOLERANCE = (2e-2, 1.0)
# What eager in the same dtype gets wrong, an equally good result may get wrong too.
_EAGER_ALLOWANCE = 2.0
_EAGER_WORST_ALLOWANCE = 4.0


@dataclass(frozen=True)
class Check:
    """One output against the reference. `wrong` is None, or says what is wrong."""

    name: str
    error: float
    worst: float
    eager_error: float
    wrong: str | None

    def as_dict(self) -> dict[str, Any]:
        def short(value: float) -> float | None:
            return float(f"{value:.3g}") if math.isfinite(value) else None

        out: dict[str, Any] = {
            "output": self.name,
            "error": short(self.error),
            "worst": short(self.worst),
            "eager_error": short(self.eager_error),
        }
        if self.wrong:
            out["wrong"] = self.wrong
        return out


class _Float64(TorchDispatchMode):
    """Runs what asks for a lower floating dtype in float64, casts included.

    Casts to 8-bit floats and to integers stay: these are part of what a case computes. So does
    a reinterpretation of bits.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.view.dtype:
            args, kwargs = tree_map(self._raise, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _raise(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value in _LOW else value


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Within, functions of float64 tensors stay in float64, also where they cast or autocast."""
    with _no_autocast(), _Float64():
        yield


@contextlib.contextmanager
def float32() -> Iterator[None]:
    """Within, functions of float32 tensors do not autocast, nor multiply in TF32."""
    settings = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [each.allow_tf32 for each in settings]
    precision = torch.backends.cuda.matmul.fp32_precision
    try:
        for each in settings:
            each.allow_tf32 = False
        with _no_autocast():
            yield
    finally:
        for each, allowed in zip(settings, before, strict=True):
            each.allow_tf32 = allowed
        # Else "ieee", where nothing was set; Dynamo of 2.15 would compile what it has once more.
        torch.backends.cuda.matmul.fp32_precision = precision


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__
    torch.autocast.__enter__ = lambda self: self
    torch.autocast.__exit__ = lambda self, *exc: None
    try:
        yield
    finally:
        torch.autocast.__enter__ = enter
        torch.autocast.__exit__ = leave


def upcast(value: Any) -> Any:
    """A tensor of a lower floating dtype as float64, strides kept; all else as it is."""
    if isinstance(value, torch.Tensor) and value.dtype in _LOW:
        return value.double()
    return value


def reference(fn: Callable[..., Any], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """`fn`'s tensors from inputs in float64."""
    with float64():
        return tensors(fn(*tree_map(upcast, tuple(inputs))))


def reference_of(case: Any, inputs: Sequence[Any], eager: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the tensors of `case`'s function are held to, of which `eager` are those in eager."""
    if not getattr(case, "reads_bits", False):  # a corpus's case says nothing of it
        return reference(case.fn, inputs)
    return eager if case.in_float32 is None else tensors(case.in_float32(*inputs))


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def check(
    name: str,
    out: torch.Tensor,
    ref: torch.Tensor,
    eager: torch.Tensor,
    layout: bool = True,
    tolerance: tuple[float, float] | None = None,
    floor: float = 0.0,
) -> Check:
    """One output against `ref` of a higher precision, with `eager`'s error beside it.

    `tolerance` is of the whole and of the worst element; the dtype's, if not given. Errors are
    shares of `ref`, or of `floor` (a root mean square) where `ref` is smaller.

    Shape always has to be eager's; dtype and, past dimensions of one element, strides where
    `layout` says so (other people's kernels may return another dtype).
    """
    wrong = _layout(out, eager, layout)
    if out.shape != ref.shape:
        return Check(name, math.inf, math.inf, math.inf, wrong)
    error, worst = _errors(out, ref, floor)
    eager_error, eager_worst = _errors(eager, ref, floor)
    limit, worst_limit = tolerance or _TOLERANCE.get(eager.dtype, _EXACT)
    limit = max(limit, _EAGER_ALLOWANCE * eager_error)
    worst_limit = max(worst_limit, _EAGER_WORST_ALLOWANCE * eager_worst)
    if wrong is None and not error <= limit:
        wrong = f"error {error:.3g} over {limit:.3g} (eager's is {eager_error:.3g})"
    if wrong is None and not worst <= worst_limit:
        wrong = f"worst element off by {worst:.3g} of its size, over {worst_limit:.3g}"
    return Check(name, error, worst, eager_error, wrong)


def check_all(
    outs: Sequence[torch.Tensor],
    refs: Sequence[torch.Tensor],
    eagers: Sequence[torch.Tensor],
    layout: bool = True,
) -> list[Check]:
    """`check` for each output. Another number of outputs than eager's is one wrong check."""
    if len(outs) != len(eagers):
        inf = math.inf
        return [Check("outputs", inf, inf, inf, f"{len(outs)} outputs, eager has {len(eagers)}")]
    return [
        check(str(i), out, ref, eager, layout)
        for i, (out, ref, eager) in enumerate(zip(outs, refs, eagers, strict=True))
    ]


def poison(like: Sequence[torch.Tensor]) -> None:
    """Fill freed memory of the tensors' sizes with NaN (all bits set for integers).

    The allocator hands these blocks out next: an output that a kernel never writes does not
    then hold an earlier, right result.
    """
    blocks = []
    for tensor in like:
        block = torch.empty(tensor.nbytes, dtype=torch.uint8, device=tensor.device)
        blocks.append(block.fill_(0xFF))
    del blocks


def _layout(out: torch.Tensor, eager: torch.Tensor, strict: bool) -> str | None:
    if out.shape != eager.shape:
        return f"shape {tuple(out.shape)}, eager's is {tuple(eager.shape)}"
    if not strict:
        return None
    if out.dtype != eager.dtype:
        return f"dtype {out.dtype}, eager's is {eager.dtype}"
    ours, theirs = (
        [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]
        for t in (out, eager)
    )
    if ours != theirs and out.numel():
        return f"stride {out.stride()}, eager's is {eager.stride()}"
    return None


def _errors(out: torch.Tensor, ref: torch.Tensor, floor: float) -> tuple[float, float]:
    """Error of the whole and of the worst element; infinite where one has NaN and one has not."""
    if not ref.numel():
        return 0.0, 0.0
    out, ref = out.double(), ref.double()
    odd = ~torch.isfinite(ref)
    if bool(odd.any()):
        same = (out == ref) | (out.isnan() & ref.isnan())
        if not bool(same[odd].all()):
            return math.inf, math.inf
        out, ref = out.masked_fill(odd, 0.0), ref.masked_fill(odd, 0.0)
    off = (out - ref).abs()
    if not bool(torch.isfinite(off).all()):
        return math.inf, math.inf
    norm = max(torch.linalg.vector_norm(ref).item(), floor * math.sqrt(ref.numel()))
    error = torch.linalg.vector_norm(off).item()
    rms = norm / math.sqrt(ref.numel())
    worst = (off / (ref.abs() + rms)).nan_to_num(0.0).max().item()
    return (error / norm if norm else error), worst
