"""PyTorch's operator database as graphs, compiled and run, against eager in float64.

The wheel carries it (`torch.testing._internal`): for each operator, sample inputs. Taken are every
reduction, norm, softmax and loss. A sample is run forward and backward in three forms:

- `alone`: as it is;
- `sums`: each output is followed by its sums over each dimension, and over all but the last; to the
  input, where it has a gradient, zeros are added that are broadcast along each dimension, so that
  the backward graph has the gradient's sums too. The samples are small and mostly square, and
  mix-order fusion declines both, and Inductor unrolls a sum of up to 8 terms: so the input's first
  and last dimension are `COPIES` times as long, where the operator takes it, and the graphs are
  compiled in non-strict mode;
- `large`: the same in default mode, with a leading dimension so long that the input has `LARGE`
  elements.

Right is what `graft.lab.numerics` says of a graph.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from graft.errors import first_line
from graft.lab import numerics
from graft.lab.numerics import Machine, Outcome

FORMS = ("alone", "sums", "large")
DTYPES = ("float32", "bfloat16")
COPIES = (7, 3)
LARGE = 6 * 2**20
"""Elements of a large input: mix-order fusion asks for 5 * 2**20 of them."""
LARGE_LAST = 13
"""How many times as long the last dimension of a large input is."""

_EAGER_RUNS = 4  # to see whether eager is repeatable

# By name: of these kinds, and not in the database as ReductionOpInfo, which all are taken.
_KINDS = re.compile(
    r"norm(alize)?$|norm_legit$|norm_with_update$|local_response_norm"
    r"|soft(max|min)|loss|cross_entropy|kl_div"
    r"|(cosine_similarity|pairwise_distance|pdist)$|^dist$"
    r"|(var|std)_mean$|median$|aminmax$|logsumexp$|quantile$|(^|\.)trace$|^trapezoid$|kthvalue$"
)
_REDUCING_VARIANT = re.compile(r"reduction_")  # of max and min, which are binary operators too
# The number of pairs of rows grows with their square.
_NOT_LARGE = ("nn.functional.pdist",)
# Their second argument is the shape of the input's last dimensions.
_WITH_SHAPE = re.compile(r"(layer|rms)_norm$")


@dataclass(frozen=True)
class Case:
    """Sample number `index` of an operator in a dtype, in one of `FORMS`."""

    operator: str
    dtype: str
    index: int
    form: str

    def __str__(self) -> str:
        return f"{self.operator}-{self.dtype}-{self.index}-{self.form}"

    @staticmethod
    def parse(text: str) -> Case:
        """The inverse of `str`. Raises ValueError for another text."""
        operator, dtype, index, form = text.rsplit("-", 3)
        if dtype not in DTYPES or form not in FORMS:
            raise ValueError(f"{text} is no case; expected OPERATOR-DTYPE-NUMBER-FORM")
        return Case(operator, dtype, int(index), form)


@cache
def operators() -> dict[str, Any]:
    """The operators that are taken, by name (with their variant's, after a dot)."""
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import ReductionOpInfo

    return {
        ".".join(filter(None, (op.name, op.variant_test_name))): op
        for op in op_db
        if isinstance(op, ReductionOpInfo)
        or _KINDS.search(op.name)
        or _REDUCING_VARIANT.match(op.variant_test_name)
    }


def cases(samples: int, forms: Sequence[str] = FORMS) -> list[Case]:
    """At most `samples` of each operator and dtype (0: all), spread over those that there are.

    Alone, a scalar is one more, where there is one: what takes a dimension of it has none. In such
    an order that any part of the list from its start is of all operators alike.
    """
    found: list[tuple[int, Case]] = []
    for name, op in operators().items():
        for dtype in DTYPES:
            inputs = [sample.input for sample in _samples(op, dtype)]
            dims = [_dim(each) for each in inputs]
            scalars = [at for at, each in enumerate(inputs) if getattr(each, "shape", None) == ()]
            for form in forms:
                fit = [at for at, dim in enumerate(dims) if form == "alone" or dim > 1]
                if form == "large" and name in _NOT_LARGE:
                    fit = []
                wanted = min(samples or len(fit), len(fit))
                taken = [fit[turn * len(fit) // wanted] for turn in range(wanted)]
                if form == "alone" and scalars and not set(scalars) & set(taken):
                    taken.append(scalars[0])
                found += [(turn, Case(name, dtype, at, form)) for turn, at in enumerate(taken)]
    return [case for _, case in sorted(found, key=lambda each: each[0])]


def _dim(input: Any) -> int:
    """Its dimensions; 0 for what is no tensor, or has no elements."""
    return input.dim() if hasattr(input, "dim") and input.numel() else 0


def _samples(op: Any, dtype: str) -> Iterator[Any]:
    """Sample inputs on the CPU, the same in every process; none in a dtype that the GPU lacks."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    wanted = getattr(torch, dtype)
    if wanted in op.dtypesIfCUDA:
        # what `op.sample_inputs` wraps: its wrapper looks through the whole stack for a test
        yield from op.sample_inputs_func(op, "cpu", wanted, op.supports_autograd)


@dataclass
class _Call:
    """Arguments of an operator; `zeros` are what is added to its input."""

    arguments: list[Any]  # input, args, kwargs
    zeros: list[Any]

    def mapped(self, change: Callable[[Any], Any]) -> _Call:
        """With `change` for each tensor."""
        import torch
        from torch.utils._pytree import tree_map_only

        return _Call(*tree_map_only(torch.Tensor, change, [self.arguments, self.zeros]))

    def in_double(self) -> _Call:
        """The same in float64, and with float64 where an argument names a floating dtype."""
        import torch
        from torch.utils._pytree import tree_map_only

        longer = self.mapped(_double)
        longer.arguments = tree_map_only(
            torch.dtype,
            lambda dtype: torch.float64 if dtype.is_floating_point else dtype,
            longer.arguments,
        )
        return longer

    def tensors(self) -> list[Any]:
        """Those of the arguments."""
        import torch
        from torch.utils._pytree import tree_leaves

        return [x for x in tree_leaves(self.arguments) if isinstance(x, torch.Tensor)]


def check(machine: Machine, case: Case) -> Outcome:
    """Compile the case's graphs, run them, and compare.

    Raises KeyError for an operator that there is not, IndexError for such a sample.
    """
    import torch
    from torch._inductor import metrics

    op = operators()[case.operator]
    sample = [*itertools.islice(_samples(op, case.dtype), case.index + 1)][case.index]
    torch._dynamo.reset()
    metrics.reset()
    on = "cuda" if machine.kind == "cuda" else "cpu"
    call = _Call([sample.input, list(sample.args), dict(sample.kwargs)], [])
    call = call.mapped(lambda x: x.detach().to(on).requires_grad_(x.requires_grad))
    function = _alone(op.op) if case.form == "alone" else _with_sums(op.op)
    options = numerics.NON_STRICT if case.form == "sums" else numerics.DEFAULT
    try:
        if case.form == "large":
            call = _enlarged(case, function, call, LARGE)
        elif case.form == "sums":
            call = _enlarged(case, function, call)
        if case.form != "alone":
            call = _with_zeros(call)
        eager = _run(function, call)
        try:
            expected = _run(function, call.in_double())
        except Exception:  # there is no float64 of it: eager's own result has to do
            expected = eager
    except Exception as refusal:
        return Outcome("eager", detail=first_line(refusal))
    if case.form != "alone" and not call.zeros and not any(x.dim() for x in eager.values()):
        return Outcome("eager", detail="there is nothing to sum")
    compiled = torch.compile(function, options=options or None)
    try:
        found, again = _run(compiled, call), _run(compiled, call)
    except Exception as error:
        kind = "budget" if type(error).__name__ == "OverBudget" else "error"
        inner = getattr(error, "inner_exception", error)  # of a BackendCompilerFailed
        return Outcome(kind, metrics.codegen_mix_order_reduction, first_line(inner))
    mix_order = metrics.codegen_mix_order_reduction
    worst = Outcome("ok")
    for name in eager:
        if name not in found:
            return Outcome("wrong", mix_order, f"{name} is missing")
        values = (found[name], again[name], eager[name], expected[name])
        outcome = numerics.compare(name, *values, scale=_scale(name, eager))
        if outcome.kind == "unstable" and not _repeats(function, call, name):
            continue  # which of equal elements is the median, say: eager picks one by chance
        if outcome.failed:
            return dataclasses.replace(outcome, mix_order=mix_order)
        worst = max(worst, outcome, key=lambda each: each.ratio)
    return dataclasses.replace(worst, mix_order=mix_order)


def described(case: Case) -> tuple[Callable[..., dict[str, Any]], _Call]:
    """The case's function, and its call on fake CPU tensors: `check` without any numbers.

    Raises what PyTorch raises where it refuses the case, and ValueError where there is nothing to
    sum.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = operators()[case.operator]
    sample = [*itertools.islice(_samples(op, case.dtype), case.index + 1)][case.index]
    call = _Call([sample.input, list(sample.args), dict(sample.kwargs)], [])
    function = _alone(op.op) if case.form == "alone" else _with_sums(op.op)
    mode = FakeTensorMode()
    call = call.mapped(lambda x: mode.from_tensor(x.detach()).requires_grad_(x.requires_grad))
    with mode:
        if case.form == "large":
            call = _enlarged(case, function, call, LARGE)
        elif case.form == "sums":
            call = _enlarged(case, function, call)
        if case.form != "alone":
            call = _with_zeros(call)
        eager = _run(function, call)
    if case.form != "alone" and not call.zeros and not any(x.dim() for x in eager.values()):
        raise ValueError("there is nothing to sum")
    return function, call


def _double(x: Any) -> Any:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def _run(function: Callable[..., Any], call: _Call) -> dict[str, Any]:
    """Outputs, gradients, and the arguments afterwards (some are updated in place), by name."""
    import torch

    # leaves of their own each time, with the strides that they have
    own = call.mapped(lambda x: x.detach().clone().requires_grad_(x.requires_grad))
    outputs: dict[str, Any] = function(*own.arguments, own.zeros)
    named = {name: x.detach() for name, x in outputs.items()}
    sources = [x for x in outputs.values() if x.requires_grad]
    leaves = {f"gradient {at}": x for at, x in enumerate(own.tensors())}
    leaves |= {f"gradient 0 summed, {at}": x for at, x in enumerate(own.zeros)}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    if sources and wanted:
        seeds = [_seed(x) for x in sources]
        found = torch.autograd.grad(sources, [*wanted.values()], seeds, allow_unused=True)
        named |= {name: x for name, x in zip(wanted, found) if x is not None}
    for at, x in enumerate(own.tensors()):
        if not x.requires_grad:
            named[f"argument {at} after"] = x
    return named


def _repeats(function: Callable[..., Any], call: _Call, name: str) -> bool:
    """Whether eager returns the same values for `name` in a few runs."""
    first, *others = (_run(function, call)[name] for _ in range(_EAGER_RUNS))
    both_nan = [(first != first) & (other != other) for other in others]
    return all(bool(((first == x) | nan).all()) for x, nan in zip(others, both_nan))


def _scale(name: str, eager: dict[str, Any]) -> float:
    """Of a sum: what it would be of the order of if its terms were independent of each other."""
    of, summed, _ = name.partition(" summed")
    if not summed or of not in eager or not eager[name].is_floating_point():
        return 0.0
    terms = eager[of].double()
    norm = float(terms[terms.isfinite()].norm())
    return norm / max(eager[name].numel(), 1) ** 0.5


def _seed(output: Any) -> Any:
    """The same gradient for an output in every dtype: numbers of few bits, not all alike."""
    import torch

    steps = torch.arange(output.numel(), device=output.device) % 13 - 6
    return (steps.to(output.dtype) / 8 + 1 / 16).reshape(output.shape)


def _alone(operator: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def function(input: Any, args: Any, kwargs: Any, zeros: Any) -> dict[str, Any]:
        return _tensors(operator(input, *args, **kwargs))

    return function


def _with_sums(operator: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    """The operator on its input plus `zeros`, then the sums of what it returns."""

    def function(input: Any, args: Any, kwargs: Any, zeros: Any) -> dict[str, Any]:
        for zero in zeros:
            input = input + zero
        named = _tensors(operator(input, *args, **kwargs))
        for name, x in list(named.items()):
            for at, axes in enumerate(_axes(x.dim())):
                named[f"{name} summed, {at}"] = x.sum(axes)
        return named

    return function


def _tensors(found: Any) -> dict[str, Any]:
    import torch

    each = found if isinstance(found, (tuple, list)) else [found]
    return {f"output {at}": x for at, x in enumerate(each) if isinstance(x, torch.Tensor)}


def _axes(dim: int) -> list[tuple[int, ...]]:
    """What is summed over: each dimension, and all but the last."""
    return [(axis,) for axis in range(dim)] + [tuple(range(dim - 1))] * (dim > 2)


def _with_zeros(call: _Call) -> _Call:
    """Zeros that broadcast to the input: their gradients are the sums of the input's."""
    import torch

    x = call.arguments[0]
    if not isinstance(x, torch.Tensor) or not x.requires_grad:
        return call
    shapes = [
        [1 if axis in axes else size for axis, size in enumerate(x.shape)]
        for axes in _axes(x.dim())
    ]
    return _Call(call.arguments, [x.detach().new_zeros(shape).requires_grad_() for shape in shapes])


_WAYS = ("alone", "alike", "rows")


def _enlarged(
    case: Case, function: Callable[..., Any], call: _Call, elements: int | None = None
) -> _Call:
    """The call with the first and the last dimension of its input as long as the form wants them.

    What has to change with the input is the operator's affair: the first way counts that eager
    PyTorch takes. Without any, the call as it is, or, where `elements` are asked for, what eager
    raised.
    """
    refusal: Exception = ValueError("its input cannot be enlarged")
    for last in (COPIES[1] if elements is None else LARGE_LAST, 1):
        first = COPIES[0]
        if elements is not None:
            first = -(-elements // (call.arguments[0].numel() * last))
        for way in _WAYS:
            longer = _longer(call, first, last, way, bool(_WITH_SHAPE.search(case.operator)))
            try:
                _run(function, longer)
            except Exception as refused:
                refusal = refused
            else:
                return longer
    if elements is not None:
        raise refusal
    return call


def _longer(call: _Call, first: int, last: int, way: str, with_shape: bool) -> _Call:
    """The call with an input `first` and `last` times as long in its first and last dimension.

    `way` says what follows it: nothing ("alone"); tensors of its shape, and weights of its last
    dimension ("alike"); tensors with as many rows ("rows").
    """
    import torch

    x = call.arguments[0]
    generator = torch.Generator(device=x.device).manual_seed(0)

    def repeated(tensor: Any, at_first: int, at_last: int) -> Any:
        counts = [at_first, *[1] * (tensor.dim() - 2), at_last] if tensor.dim() > 1 else [at_last]
        longer = tensor.detach().repeat(counts)
        if longer.is_floating_point():  # rows unlike each other, in the operator's domain still
            shrink = torch.rand(longer.shape, generator=generator, device=x.device) / 8
            longer *= 1 - shrink.to(longer.dtype)
        return longer.requires_grad_(tensor.requires_grad)

    def change(tensor: Any) -> Any:
        if tensor is x or (way == "alike" and tensor.shape == x.shape):
            return repeated(tensor, first, last)
        if way == "alike" and tensor.dim() and tensor.shape == x.shape[-tensor.dim() :]:
            return repeated(tensor, 1, last)
        if way == "rows" and tensor.dim() and tensor.shape[0] == x.shape[0]:
            return repeated(tensor, first, 1) if tensor.dim() > 1 else repeated(tensor, 1, first)
        return tensor

    longer = call.mapped(change)
    if with_shape and way == "alike" and longer.arguments[1]:
        shape, *rest = longer.arguments[1]
        longer.arguments[1] = [(*shape[:-1], shape[-1] * last), *rest]
    return longer
