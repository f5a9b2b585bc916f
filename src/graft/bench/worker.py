"""The process that compiles, checks and times cases on one GPU: `python -m graft.bench.worker`.

One a contender and GPU, by the stock interpreter or the patched one. It serves the requests of
`graft.bench.protocol`:

- `hello {impl, knobs, paths, autotune, lock}`: what runs here (GPU, driver, torch, triton), or
  `absent: why`;
- `copy`: the copy bandwidth;
- `prepare {case, shape, dtype, corpus, seed, sources, checks}`: compile, check, capture; the row's
  facts;
- `measure {samples, last}`: microseconds of each of the next samples of the prepared case; after
  the `last` ones, what a step holds of memory is given back;
- `release`: drop the prepared case and its memory.

It holds the GPU's lock for all of it, but for compiles and for `measure`: then whoever asks holds
it, over the turns of all contenders.
"""

from __future__ import annotations

import contextlib
import gc
import re
import site
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor import config as inductor_config
from torch._inductor import metrics

from graft.bench import code, gate, generated, peers, step_profile
from graft.bench.autograd import Backward
from graft.bench.clock import Clock, Replay, waits_for_the_gpu
from graft.bench.corpus import load as load_corpus
from graft.bench.gpu_lock import GpuLock
from graft.bench.protocol import Message, serve
from graft.cases import DTYPES
from graft.errors import first_line, said

_WARMUPS = 2
# A step is profiled in its first turns: in one alone, the GPU's clock may be in another state.
_PROFILED_STEPS, _PROFILED_TURNS = 5, 2
# Of the root mean square of all of a model's gradients: what is smaller is compared with this.
_NO_GRADIENT = 1e-2
# Launches at the start of a turn that are not timed. The first one after another process ran on
# the GPU is not like the others; work that is not captured also takes its memory anew, and the
# second launch is the first that finds all of it.
_LEAD_CAPTURED, _LEAD = 1, 2
# Written before a configuration is timed, as Triton's `do_bench` does. Inductor writes what L2
# holds, in 20 us on an H100. Where others compile, a launch takes longer than that, and of a short
# kernel the launch is timed: of 440 kernels 43 were tuned to what takes over 5 % longer than the
# best, up to three times as long; with this, one of 306.
_FLUSHED_BYTES = 1 << 28
# What libraries raise in place of torch.OutOfMemoryError when the memory is short.
_SHORT = re.compile(r"out of memory|_ALLOC_FAILED", re.IGNORECASE)
# After one of these the process has no working CUDA context any more.
_FATAL = re.compile(
    r"illegal memory access|illegal instruction|misaligned address|device-side assert"
    r"|unspecified launch failure|launch timed out|ECC|context is destroyed",
    re.IGNORECASE,
)


class CaseError(Exception):
    """Why a case has no time: `kind` is wrong, oom, absent, crash or error.

    `facts` are what was found out before, such as the errors of a wrong case's outputs.
    """

    def __init__(
        self, kind: str, message: str, fatal: bool = False, facts: Message | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.fatal = fatal
        self.facts = facts or {}

    def __str__(self) -> str:
        return str(self.args[0])


class Worker:
    """Holds at most one prepared case. Its methods are the verbs of the protocol."""

    def __init__(self, waits: Callable[[bool], None] = lambda begins: None) -> None:
        self.device = torch.device("cuda", 0)
        self.gpu = GpuLock()
        self._waits = waits
        self.impl = "compile"
        self.knobs: dict[str, Any] = {}
        self.autotune = False
        self.replay: Replay | None = None
        self._inputs: Any = None  # a graph reads them and does not hold them
        self._step: Callable[[], Any] | None = None  # of a model
        self._profiles: list[step_profile.StepProfile] = []  # of that step
        self._profiles_left = 0
        self._launched_us: list[float] = []  # of that step, as the host launches it
        self._generated: generated.Generated | None = None  # the kernels of that step
        self._sources: Path | None = None  # where these are kept
        self._checks = True
        self._tried = False  # whether the step's capture was tried
        self.clock: Clock | None = None

    def __call__(self, message: Message) -> Message:
        verb = message.pop("do")
        methods: dict[str, Callable[..., Message]] = {
            "hello": self.hello,
            "copy": self.copy,
            "prepare": self.prepare,
            "measure": self.measure,
            "release": self.release,
        }
        held_s = self.gpu.held_s
        try:
            reply = methods[verb](**message)
        finally:
            self.gpu.release()
        return {**reply, "held_s": round(self.gpu.held_s - held_s, 4)}

    def hello(
        self,
        impl: str,
        knobs: dict[str, Any],
        paths: Sequence[str] = (),
        autotune: bool = False,
        lock: str | None = None,
    ) -> Message:
        """Take the contender's role; `paths` are folders of packages that peers need."""
        self.gpu = GpuLock(Path(lock) if lock else None, self._waits, _settle)
        for path in paths:
            site.addsitedir(path)
            sys.path.insert(0, path)
        knobs = _patch(knobs, inductor_config.get_config_copy())
        _check(knobs)
        if not torch.cuda.is_available():
            raise CaseError("gpu", "torch.cuda finds no GPU")
        self.impl, self.knobs, self.autotune = impl, knobs, autotune
        about: Message = {"python": sys.version.split()[0]}
        if impl in peers.PEERS:
            absent = peers.absence(impl)
            if absent:
                return {"absent": absent}
            about["version"] = peers.version(impl)
        self.gpu.acquire()
        self.clock = Clock(self.device)
        torch.cuda.set_stream(self.clock.stream)
        if impl == "compile":
            with _compiling(self.gpu):
                _warm_compiler(self.device)
        self.gpu.release()
        # A collection after each case need not look at all of torch again: 0.2 s each.
        gc.collect()
        gc.freeze()
        return about | _environment(self.device, self.clock)

    def copy(self) -> Message:
        self.gpu.acquire()
        found = self._clock.copy_gb_per_s().as_dict(1)
        torch.cuda.empty_cache()
        return found

    def prepare(
        self,
        case: str,
        shape: list[int],
        dtype: str,
        corpus: str | None = None,
        seed: int = 0,
        sources: str | None = None,
        checks: bool = True,
    ) -> Message:
        """Compile, check against eager, capture. A wrong case is a CaseError with its checks.

        The kernels of a training step are kept below the folder `sources`, where given. Without
        `checks`, a step is not checked where that would be a compile of its own.
        """
        if self.replay is not None:
            self.release()
        self._sources = Path(sources) if sources else None
        self._checks = checks
        try:
            # Before the GPU is taken: a model's library takes seconds to import.
            found = load_corpus(Path(corpus), case) if corpus else _find(case)
            self.gpu.acquire()
            with contextlib.ExitStack() as stack:
                if self.impl == "compile":
                    stack.enter_context(inductor_config.patch(self.knobs))
                facts = self._prepare(found, tuple(shape), dtype, seed)
            # What eager and the float64 reference needed: the next contender needs it too.
            torch.cuda.empty_cache()
            return facts
        except Exception as error:
            failure = _failure(error)
        # Outside the handler: its traceback holds the case's tensors until here.
        if not failure.fatal:
            self.release()
        raise failure

    def measure(self, samples: int, last: bool = False) -> Message:
        if self.replay is None:
            raise CaseError("error", "nothing is prepared")
        try:
            # In a turn, when no other contender is on the GPU: kernels that share it take longer.
            facts = self._profiled() if self._step else {}
            replay = self._captured_step() if self._step else self.replay
            lead = _LEAD_CAPTURED if replay.captured else _LEAD
            times = self._clock.time_us(replay.launch, samples + lead)[lead:]
            if self._step and last:
                replay = self.replay = Replay(self._step, None, captured=False)
            if not replay.captured:
                torch.cuda.empty_cache()  # a model's activations are the next contender's memory
        except RuntimeError as error:
            kind = "oom" if _is_short(error) else "crash"
            raise CaseError(kind, said(error), fatal=True) from error
        return {"us": [round(us, 3) for us in times], "facts": facts}

    def _profiled(self) -> Message:
        """What the profiler finds in the first turns of a step, all of them together.

        A profile without a kernel is none: the row then lacks what it would have said.
        """
        assert self._step is not None
        if self._profiles_left == 0:
            return {}
        self._profiles_left -= 1
        self._launched_us += self._clock.time_us(self._step, _PROFILED_STEPS + _LEAD)[_LEAD:]
        found = step_profile.profiled(self._step, _PROFILED_STEPS)
        torch.cuda.empty_cache()
        self._profiles += [found] if found.means else []
        launched_us = statistics.median(self._launched_us)
        facts: Message = {
            "captured": self._captured_step().captured,
            "launched_us": round(launched_us, 1),
        }
        if not self._profiles:
            return facts
        profile = step_profile.StepProfile.mean(self._profiles)
        facts |= _split(profile)
        facts["gpu_busy"] = round((facts["triton_us"] + facts["rest_us"]) / launched_us, 3)
        if self._generated is not None:
            facts["generated"] = self._generated.facts(profile)
            if self._sources:
                self._generated.save(self._sources, facts["generated"])
        return facts

    def _captured_step(self) -> Replay:
        """The step as a CUDA graph; where it waits for the GPU, as the host launches it.

        Captured in its first turn, as late as can be: until the last, the graph keeps the memory of
        all activations.
        """
        assert self._step is not None
        assert self.replay is not None
        if not self._tried:
            self._tried = True
            if not waits_for_the_gpu(self._step):
                torch.cuda.empty_cache()
                self.replay = self._clock.capture(self._step)
        return self.replay

    def release(self) -> Message:
        self.gpu.acquire()
        self.replay = self._inputs = self._step = self._generated = None
        self._profiles, self._launched_us, self._tried = [], [], False
        self._profiles_left = 0
        torch._dynamo.reset()
        with self.gpu.lent():
            gc.collect()
        torch.cuda.empty_cache()
        return {}

    @property
    def _clock(self) -> Clock:
        if self.clock is None:
            raise CaseError("error", "no hello before this request")
        return self.clock

    def _prepare(self, case: Any, shape: tuple[int, ...], dtype: str, seed: int) -> Message:
        torch.manual_seed(seed)
        if case.model is not None:
            # Kernels that a cache has are not generated, and would not be known.
            with (
                inductor_config.patch(fx_graph_cache=False),
                _functorch_config(enable_autograd_cache=False),
            ):
                return self._prepare_step(case, shape, DTYPES[dtype])
        with _functorch_config(donated_buffer=False):  # a backward runs again and again
            return self._prepare_function(case, shape, dtype)

    def _prepare_function(self, case: Any, shape: tuple[int, ...], dtype: str) -> Message:
        inputs = case.inputs(shape, DTYPES.get(dtype), self.device)
        eager = gate.tensors(case.fn(*inputs))
        refs = gate.reference_of(case, inputs, eager)

        metrics.reset()
        torch.cuda.empty_cache()  # what the reference needed: who has the GPU next needs it too
        gate.poison([*eager, *gate.tensors(inputs)])
        with _compiling(self.gpu) as took, code.collected() as sources:
            run = self._callable(case, inputs)
            outs = gate.tensors(run())
            torch.cuda.synchronize()
        facts = self._facts(took(), sources)

        layout = self.impl == "compile" and not isinstance(case.fn, Backward)
        checks = gate.check_all(outs, refs, eager, layout)
        facts["outputs"] = [check.as_dict() for check in checks]
        wrong = [f"output {check.name}: {check.wrong}" for check in checks if check.wrong]
        if wrong and not getattr(case, "random", False):
            raise CaseError("wrong", "; ".join(wrong), facts=facts)
        facts["bytes"] = (
            case.bytes_moved(shape, DTYPES[dtype])
            if case.bytes_moved is not None
            else sum(t.nbytes for t in _distinct([*gate.tensors(inputs), *eager]))
        )
        expected = [out.clone() for out in outs]
        del outs, refs, eager

        facts["peak_bytes"] = self._peak(run)
        for _ in range(_WARMUPS):
            run()
        torch.cuda.synchronize()
        self.replay = self._clock.capture(run)
        self._inputs = inputs
        estimate = min(self._clock.time_us(self.replay.launch, 3))
        again = gate.tensors(self.replay.outputs)
        facts |= {
            "kernels": self.replay.kernels,
            "memops": self.replay.memops,
            "captured": self.replay.captured,
            "estimate_us": round(estimate, 2),
        }
        if self.impl == "compile":
            facts["repeatable"] = all(map(_same_bits, again, expected))
        return facts

    def _callable(self, case: Any, inputs: Sequence[Any]) -> Callable[[], Any]:
        """What is timed: the case, compiled or not or a peer's, bound to its inputs."""
        if self.impl in peers.PEERS:
            kernel = peers.kernel(self.impl, case.name, self.autotune)
            if kernel is None:
                raise CaseError("absent", f"{self.impl} has no kernel for {case.name}")
            return kernel(*inputs)
        compiled: Callable[..., Any] = (
            (lambda fn: fn)
            if self.impl == "eager"
            else (lambda fn: torch.compile(fn, dynamic=False, fullgraph=True))
        )
        if isinstance(case.fn, Backward):
            return case.fn.prepare(compiled(case.fn.forward), inputs)
        fn = compiled(case.fn)
        return lambda: fn(*inputs)

    def _facts(self, compile_s: float, sources: Sequence[str]) -> Message:
        if self.impl != "compile":
            return {}
        return {
            "code": code.digest(sources),
            "compile_s": round(compile_s, 3),
            "generated_kernels": metrics.generated_kernel_count,
            "mix_order": metrics.codegen_mix_order_reduction,
        }

    def _peak(self, run: Callable[[], Any]) -> int:
        """Bytes allocated at the height of one run, above what was there before it."""
        with self.gpu.lent():
            gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        return torch.cuda.max_memory_allocated(self.device) - before

    def _prepare_step(self, case: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Message:
        """A training step: forward, loss, backward. Its split comes from the profiler.

        A model that drops at random is timed as it trains, and checked as it evaluates, which
        drops nothing: that is compiled apart, and only for `checks`.
        """
        if self.impl in peers.PEERS:
            raise CaseError("absent", f"{self.impl} runs no whole training step")
        model = case.model(self.device)
        inputs = case.inputs(shape, dtype, self.device)
        params = {n: p for n, p in model.named_parameters() if p.requires_grad}

        def loss_of(*args: Any) -> torch.Tensor:
            out: torch.Tensor = case.fn(model, *args)
            return out

        def step(forward: Callable[..., torch.Tensor]) -> torch.Tensor:
            model.zero_grad(set_to_none=True)
            loss = forward(*inputs)
            loss.backward()
            return loss.detach()

        def results(loss: torch.Tensor) -> dict[str, torch.Tensor]:
            grads = {name: p.grad for name, p in params.items() if p.grad is not None}
            return {"loss": loss, **{name: grad.detach() for name, grad in grads.items()}}

        metrics.reset()
        torch._dynamo.reset()
        forward = loss_of
        if self.impl == "compile":
            forward = torch.compile(loss_of, dynamic=False)
        with (
            _compiling(self.gpu) as took,
            code.collected() as sources,
            generated.collected() as kernels,
        ):
            outs = results(step(forward))
            torch.cuda.synchronize()
        facts = self._facts(took(), sources)
        self._generated = kernels if self.impl == "compile" else None

        if self._checks or not case.dropout:
            model.train(not case.dropout)
            if case.dropout:
                del outs
                with _compiling(self.gpu):
                    outs = results(step(forward))
            model.zero_grad(set_to_none=True)
            if case.whole_batch:
                with gate.float32():
                    refs = results(step(loss_of))
            else:
                refs = _step_reference(case, model, inputs)
            eager = results(step(loss_of))
            model.train()
            facts |= _step_checks(outs, refs, eager, case.whole_batch)
            del refs, eager
        del outs
        facts["peak_bytes"] = self._peak(lambda: step(forward))
        for _ in range(_WARMUPS):
            step(forward)
        torch.cuda.synchronize()
        self.replay = Replay(lambda: step(forward), None, captured=False)
        self._step, self._profiles_left = self.replay.launch, _PROFILED_TURNS
        facts |= {
            "estimate_us": round(min(self._clock.time_us(self.replay.launch, 2)), 2),
        }
        return facts


def _step_checks(
    outs: dict[str, torch.Tensor],
    refs: dict[str, torch.Tensor],
    eager: dict[str, torch.Tensor],
    told: bool,
) -> Message:
    """The loss and the gradient that is furthest off, for the hundreds that there are.

    What is wrong is a CaseError, or, where `told`, the fact `wrong`: of a model that nobody here
    wrote, the time is of interest all the same.
    """
    if outs.keys() != refs.keys():
        raise CaseError("wrong", f"gradients of {sorted(outs.keys() ^ refs.keys())} differ")
    # A gradient that is zero but for rounding (of a key's bias) has no digits to compare.
    grads = [grad for name, grad in refs.items() if name != "loss"]
    squares = sum(float(grad.double().square().sum()) for grad in grads)
    floor = _NO_GRADIENT * (squares / max(1, sum(grad.numel() for grad in grads))) ** 0.5
    checks = [
        gate.check(
            name,
            outs[name],
            refs[name],
            eager[name],
            False,
            gate.STEP_TOLERANCE,
            0.0 if name == "loss" else floor,
        )
        for name in refs
    ]
    worst = max(checks[1:], key=lambda check: (check.wrong is not None, check.error))
    facts: Message = {"outputs": [check.as_dict() for check in (checks[0], worst)]}
    wrong = "; ".join([f"{check.name}: {check.wrong}" for check in checks if check.wrong][:3])
    if wrong and not told:
        raise CaseError("wrong", wrong, facts=facts)
    return facts | ({"wrong": wrong} if wrong else {})


def _settle() -> None:
    """Wait until the GPU has done what this process asked of it, or can do nothing any more."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()


def _failure(error: Exception) -> CaseError:
    """What a preparation raised, as the reply's error, without the traceback."""
    if isinstance(error, CaseError):
        return CaseError(error.kind, str(error), error.fatal, error.facts)
    if _is_short(error):
        return CaseError("oom", said(error))
    fatal = bool(_FATAL.search(str(error)))
    return CaseError("crash" if fatal else "error", first_line(error), fatal)


def _is_short(error: Exception) -> bool:
    """Whether the GPU's memory was short, whoever said so."""
    return isinstance(error, torch.OutOfMemoryError) or bool(_SHORT.search(str(error)))


def _find(name: str) -> Any:
    from graft import cases

    return cases.find(name)


def _patch(knobs: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """What `config.patch` takes for `knobs`, of a configuration where they are as in `known`.

    `name.entry` is an entry of the dictionary `name`, beside those that it has. Raises CaseError
    for names that are none.
    """
    found: dict[str, Any] = {knob: value for knob, value in knobs.items() if knob in known}
    unknown = []
    for knob, value in knobs.items():
        if knob in known:
            continue
        name, _, entry = knob.rpartition(".")
        if isinstance(known.get(name), dict):
            found[name] = {**found.get(name, known[name]), entry: value}
        else:
            unknown.append(knob)
    if unknown:
        raise CaseError("knob", f"torch._inductor.config has no {', '.join(unknown)}")
    return found


def _check(knobs: Mapping[str, Any]) -> None:
    """Raises CaseError where a debug option has a name or a type that is none."""
    try:
        from torch._inductor.mix_order_debug import debug_options
    except ImportError:  # a stock one, or an older stack
        return
    with inductor_config.patch(dict(knobs)):
        try:
            debug_options()
        except ValueError as error:
            raise CaseError("knob", str(error)) from None


def _functorch_config(**changes: Any) -> Any:
    from torch._functorch import config

    return config.patch(**changes)


@contextlib.contextmanager
def _compiling(gpu: GpuLock) -> Iterator[Callable[[], float]]:
    """Lend the GPU to others while something compiles within; the result says how long it took.

    Seconds of all that is done within, compiles and first runs, without the waits for the GPU.
    Dynamo says when a compile begins and ends, also that of a backward which waits for its first
    run. A peer's own Triton kernels have no such calls. A finished kernel is loaded to the GPU
    in the middle of a compile: not while a turn or a configuration is timed. Inductor times there
    whether padding a matrix product pays: then the GPU is taken for that long.
    """
    from torch._dynamo.callback import CallbackArgs, callback_handler
    from torch._inductor.fx_passes import pad_mm
    from torch._inductor.runtime.benchmarking import benchmarker
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def begins(args: CallbackArgs) -> None:
        gpu.release()

    def ends(args: CallbackArgs) -> None:
        gpu.acquire()

    started, waited_s = time.perf_counter(), gpu.waited_s
    ended: list[float] = []
    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_within(CachingAutotuner, "_make_launchers", gpu.loading))
        stack.enter_context(_within(CachingAutotuner, "benchmark_all_configs", gpu.timing))
        stack.enter_context(patch.dict(vars(benchmarker), L2_cache_size=_FLUSHED_BYTES))
        stack.enter_context(_within(pad_mm, "_should_pad", gpu.borrowed))
        with contextlib.suppress(ImportError):
            from triton.runtime.jit import JITFunction

            stack.enter_context(_within(JITFunction, "_do_compile", gpu.lent))
        try:
            yield lambda: ended[0]
        finally:
            for callbacks, mine in (
                (callback_handler.start_callbacks, begins),
                (callback_handler.end_callbacks, ends),
            ):
                if mine in callbacks:  # a reset of Dynamo drops them
                    callbacks.remove(mine)
            ended.append(time.perf_counter() - started - (gpu.waited_s - waited_s))


@contextlib.contextmanager
def _within(
    owner: Any, name: str, context: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[None]:
    """Each call of `name` of the class or module `owner` is within a `context()` of its own."""
    method = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    setattr(owner, name, wrapped)
    try:
        yield
    finally:
        setattr(owner, name, method)


def _warm_compiler(device: torch.device) -> None:
    """Start the compile processes and load what the first compile loads, so that no case pays."""
    x = torch.ones(64, 64, device=device)
    torch.compile(lambda x: (x * 2).sum(1), dynamic=False)(x)
    torch.cuda.synchronize()
    torch._dynamo.reset()


def _environment(device: torch.device, clock: Clock) -> Message:
    import triton

    props = torch.cuda.get_device_properties(device)
    return {
        "torch": torch.__version__,
        "git": torch.version.git_version,
        "triton": triton.__version__,
        "gpu": props.name,
        "capability": [props.major, props.minor],
        "sms": props.multi_processor_count,
        "memory_bytes": props.total_memory,
        "l2_bytes": props.L2_cache_size,
        "flush_bytes": clock.flush_bytes,
        "driver": _driver(),
    }


def _driver() -> str:
    """The driver's version as the kernel module says it, or what CUDA of it supports."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
        if found:
            return found.group(1)
    return f"CUDA {torch.version.cuda}"


def _distinct(found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each storage once: views of one tensor move its bytes once."""
    return list({t.untyped_storage().data_ptr(): t for t in found}.values())


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    pair = (value.contiguous().reshape(-1).view(torch.uint8) for value in (left, right))
    return torch.equal(*pair)


def _step_reference(case: Any, model: Any, inputs: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Loss and gradients in float64, one element of the batch at a time.

    The whole batch's float64 activations would not fit. The loss is a mean over the batch, so
    that loss and gradients are the means of the elements'.
    """
    import copy

    model64 = copy.deepcopy(model).double()
    batch = inputs[0].shape[0]
    total = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    with gate.float64():
        for i in range(batch):
            loss = case.fn(model64, *(gate.upcast(value[i : i + 1]) for value in inputs))
            (loss / batch).backward()
            total += loss.detach() / batch
    grads = {n: p.grad for n, p in model64.named_parameters() if p.grad is not None}
    return {"loss": total, **grads}


def _split(profile: step_profile.StepProfile) -> Message:
    """GPU time of a step by who wrote the kernel: Inductor's Triton kernels, and the rest."""
    return {
        "triton_us": profile.time_us(step_profile.is_generated),
        "rest_us": profile.time_us(lambda name: not step_profile.is_generated(name)),
        "kernels": profile.launches(lambda name: not step_profile.is_memop(name)),
        "memops": profile.launches(step_profile.is_memop),
    }


if __name__ == "__main__":
    serve(Worker)
