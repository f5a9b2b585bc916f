"""The worker's preparation on the CPU: CUDA's calls stand still, and the clock is the host's."""

import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn

from graft.bench import clock, peers, worker
from graft.bench.autograd import Backward
from graft.bench.clock import Replay
from graft.bench.gpu_lock import GpuLock
from graft.bench.step_profile import StepProfile
from graft.cases import Case

CPU = torch.device("cpu")


class HostClock:
    """Runs in place of captures."""

    def capture(self, fn):
        return Replay(fn, fn(), captured=True, kernels=1, memops=0)

    def time_us(self, launch, samples):
        out = []
        for _ in range(samples):
            started = time.perf_counter()
            launch()
            out.append((time.perf_counter() - started) * 1e6)
        return out


def profiled(step, steps):
    step()
    return StepProfile({"triton_poi_a_0": (1.0, 2.0), "gemm": (1.0, 1.0)})


@pytest.fixture
def bench(monkeypatch):
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *args: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *args: 350)
    monkeypatch.setattr(worker.step_profile, "profiled", profiled)
    monkeypatch.setattr(worker, "waits_for_the_gpu", lambda step: False)
    made = worker.Worker()
    made.device, made.clock, made.impl = CPU, HostClock(), "eager"

    def offer(fn, inputs=None, model=None, dropout=False):
        case = Case(
            "case",
            "",
            fn,
            inputs or (lambda shape, dtype, device: (torch.randn(shape, dtype=dtype),)),
            {"default": [(8, 4)]},
            model=model,
            dropout=dropout,
        )
        monkeypatch.setattr(worker, "_find", lambda name: case)
        return made

    return offer


def prepare(made, dtype="fp32", **more):
    request = {"do": "prepare", "case": "case", "shape": [8, 4], "dtype": dtype, "seed": 1}
    return made(request | more)


def test_a_case_has_its_facts_and_then_times(bench):
    made = bench(lambda x: (x.sum(0), x * 2))
    facts = prepare(made)
    assert facts["bytes"] == (8 * 4 + 4 + 8 * 4) * 4
    assert facts["peak_bytes"] == 250
    assert facts["kernels"] == 1
    assert [out["output"] for out in facts["outputs"]] == ["0", "1"]
    assert len(made({"do": "measure", "samples": 5})["us"]) == 5
    made({"do": "release"})
    with pytest.raises(worker.CaseError, match="nothing is prepared"):
        made({"do": "measure", "samples": 5})


def test_inputs_are_those_of_the_seed(bench):
    seen = []
    made = bench(lambda x: seen.append(x.float().sum().item()) or x)
    prepare(made)
    first = list(seen)
    seen.clear()
    prepare(made)
    assert seen == first


def test_a_wrong_output_is_an_error_with_its_checks(bench, monkeypatch):
    made = bench(lambda x: x.sum(0))
    made.impl = "liger"
    monkeypatch.setattr(peers, "kernel", lambda *args: lambda x: lambda: x.sum(0) * 1.5)
    with pytest.raises(worker.CaseError, match=r"output 0: error 0\.5") as error:
        prepare(made)
    assert error.value.kind == "wrong"
    assert error.value.facts["outputs"][0]["error"] == 0.5
    assert made.replay is None


def test_a_peer_without_a_kernel_is_absent(bench, monkeypatch):
    made = bench(lambda x: x.sum(0))
    made.impl = "liger"
    with pytest.raises(worker.CaseError, match="liger has no kernel for case") as error:
        prepare(made)
    assert error.value.kind == "absent"


@pytest.mark.parametrize(
    ("raised", "kind", "fatal"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "oom", False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crash", True),
        (ValueError("no such thing"), "error", False),
    ],
)
def test_what_a_case_raises_has_its_kind(bench, raised, kind, fatal):
    def fn(x):
        raise raised

    with pytest.raises(worker.CaseError) as error:
        prepare(bench(fn))
    assert (error.value.kind, error.value.fatal) == (kind, fatal)
    assert "more" not in str(error.value)


@pytest.mark.parametrize(
    "words", ["CUDA out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling x"]
)
def test_memory_that_is_short_is_named_whoever_says_so(bench, words):
    def fn(x):
        raise RuntimeError(words)

    with pytest.raises(worker.CaseError) as error:
        prepare(bench(fn))
    assert (error.value.kind, error.value.fatal) == ("oom", False)


def test_a_broken_context_is_not_asked_for_its_memory(bench, monkeypatch):
    def fn(x):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    made = bench(fn)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: fn(None))
    with pytest.raises(worker.CaseError) as error:
        prepare(made)
    assert error.value.fatal


def test_work_that_is_not_captured_gives_its_memory_back_after_a_turn(bench, monkeypatch):
    launches = []
    made = bench(lambda x: launches.append(1) or x * 2)
    given = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(len(launches)))
    for captured, lead in ((True, 1), (False, 2)):
        prepare(made)
        made.replay.captured = captured
        launches.clear()
        given.clear()
        assert len(made({"do": "measure", "samples": 3})["us"]) == 3
        assert len(launches) == 3 + lead
        assert given == ([] if captured else [3 + lead])


def test_a_backward_is_prepared_from_its_forward(bench):
    def inputs(shape, dtype, device):
        return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)

    facts = prepare(bench(Backward(lambda x: x.exp(), (0,)), inputs), "bf16")
    assert facts["bytes"] == 3 * 8 * 4 * 2
    assert len(facts["outputs"]) == 1


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.out(self.norm(x))


def step(model, x, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return nn.functional.cross_entropy(model(x).flatten(0, -2), labels.flatten())


def step_inputs(shape, dtype, device):
    return torch.randn(*shape, 16), torch.randint(0, 5, shape)


def test_a_step_is_checked_against_float64_gradients(bench):
    made = bench(step, step_inputs, lambda device: Tiny())
    facts = prepare(made, "bf16")
    loss, worst = facts["outputs"]
    assert loss["output"] == "loss"
    assert 1e-5 < worst["error"] < 2e-2  # bf16's, so that the reference is not bf16 itself
    # The profile is taken in turns, when no other contender uses the GPU, and in the first two.
    assert "rest_us" not in facts
    for _ in range(worker._PROFILED_TURNS):
        found = made({"do": "measure", "samples": 1})["facts"]
        assert (found["triton_us"], found["rest_us"], found["captured"]) == (2.0, 1.0, True)
        assert found["gpu_busy"] == round(3.0 / found["launched_us"], 3)
    assert made({"do": "measure", "samples": 1})["facts"] == {}


class Dropping(Tiny):
    def __init__(self):
        super().__init__()
        self.evaluated = 0

    def forward(self, x):
        self.evaluated += not self.training
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("checks", [True, False])
def test_a_step_that_drops_is_checked_as_it_evaluates_if_at_all(bench, checks):
    model = Dropping()
    made = bench(step, step_inputs, lambda device: model, dropout=True)
    facts = prepare(made, "bf16", checks=checks)
    assert ("outputs" in facts) == checks
    assert (model.evaluated > 0) == checks
    assert model.training


def test_a_step_that_waits_for_the_gpu_is_not_captured(bench, monkeypatch):
    monkeypatch.setattr(worker, "waits_for_the_gpu", lambda step: True)
    made = bench(step, step_inputs, lambda device: Tiny())
    prepare(made, "bf16")
    assert made({"do": "measure", "samples": 1})["facts"]["captured"] is False


def test_a_profile_without_kernels_is_none(bench, monkeypatch):
    made = bench(step, step_inputs, lambda device: Tiny())
    prepare(made, "bf16")
    first = made({"do": "measure", "samples": 1})["facts"]
    monkeypatch.setattr(worker.step_profile, "profiled", lambda step, steps: StepProfile({}))
    second = made({"do": "measure", "samples": 1})["facts"]
    assert second["triton_us"] == first["triton_us"] == 2.0
    prepare(made, "bf16")
    found = made({"do": "measure", "samples": 1})["facts"]
    assert sorted(found) == ["captured", "launched_us"]


def test_after_the_last_turn_a_step_holds_no_graph(bench):
    made = bench(step, step_inputs, lambda device: Tiny())
    prepare(made, "bf16")
    assert not made.replay.captured  # not before its first turn
    made({"do": "measure", "samples": 1})
    assert made.replay.captured
    made({"do": "measure", "samples": 1, "last": True})
    assert not made.replay.captured


def test_work_waits_for_the_gpu_where_it_raises_in_the_mode_that_says_so(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits():
        assert modes[-1] == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    assert clock.waits_for_the_gpu(waits)
    assert not clock.waits_for_the_gpu(lambda: None)
    assert modes == ["error", 1] * 2

    def short():
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        clock.waits_for_the_gpu(short)


def test_a_steps_reference_is_the_mean_over_the_batch():
    torch.manual_seed(0)
    model, inputs = Tiny(), step_inputs((6, 4), torch.float32, CPU)
    case = Case("c", "", step, step_inputs, {"default": [(6, 4)]}, model=lambda device: model)
    refs = worker._step_reference(case, model, inputs)
    whole = Tiny().double()
    whole.load_state_dict(model.state_dict())
    loss = nn.functional.cross_entropy(
        whole(inputs[0].double()).flatten(0, -2), inputs[1].flatten()
    )
    loss.backward()
    torch.testing.assert_close(refs["loss"], loss.detach())
    torch.testing.assert_close(refs["out.weight"], whole.out.weight.grad)
    assert "unused.weight" not in refs


def test_an_unknown_knob_is_named():
    with pytest.raises(worker.CaseError, match=r"has no triton\.nonsense"):
        worker.Worker().hello("compile", {"triton.nonsense": 1})


DEBUG = "triton.mix_order_reduction_debug"


def test_entries_of_a_dictionary_are_put_together():
    known = {"triton.x": 1, DEBUG: {"a": 1}, "list": [1]}
    assert worker._patch({"triton.x": 2}, known) == {"triton.x": 2}
    both = worker._patch({f"{DEBUG}.b": False, f"{DEBUG}.c": 3}, known)
    assert both == {DEBUG: {"a": 1, "b": False, "c": 3}}
    assert worker._patch({f"{DEBUG}.b": 2, DEBUG: {"d": 4}}, known) == {DEBUG: {"d": 4, "b": 2}}
    for name in ("list.b", "triton.b", "b", f"{DEBUG}s.b"):
        with pytest.raises(worker.CaseError, match=f"config has no {name}"):
            worker._patch({name: 1}, known)


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({f"{DEBUG}.prefetch": False}, "has no 'prefetch'; its options are .*prefetch_rows"),
        ({f"{DEBUG}.prefetch_rows": 0}, "prefetch_rows is 0, and should be of type bool"),
        ({DEBUG: {"prefetch": False}}, "has no 'prefetch'"),
    ],
)
def test_a_debug_option_that_is_none_is_named(knobs, why):
    with pytest.raises(worker.CaseError, match=why):
        worker.Worker().hello("compile", knobs)


def test_repeatable_compares_bits():
    x = torch.tensor([1.0, float("nan"), -0.0])
    assert worker._same_bits(x, x.clone())
    assert not worker._same_bits(x, torch.tensor([1.0, float("nan"), 0.0]))
    assert worker._same_bits(x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn))


# --- the GPU's lock ------------------------------------------------------------------------------


@pytest.fixture
def gpu(tmp_path):
    """A lock, and a function that says whether somebody else could take it."""
    path = tmp_path / "gpu.lock"
    lock = GpuLock(path)

    def free(path=path):
        with path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    lock.free = free
    lock.turn_may_begin = lambda: free(tmp_path / "gpu.lock.turns")
    return lock


def test_whoever_holds_the_gpu_goes_first_on_the_hosts_cores(gpu):
    def niceness():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def may_be_raised():
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -10)
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(1) as third:
        raised = third.submit(may_be_raised).result()
    with ThreadPoolExecutor(1) as other:  # as the thread of a backward
        before = niceness(), other.submit(niceness).result()
        with gpu:
            held = niceness(), other.submit(niceness).result()
        after = niceness(), other.submit(niceness).result()
    assert before == after
    assert held == ((-10, -10) if raised else before), "all threads, or where it may not, none"


def watched(backend_sees, run_sees):
    def backend(graph, inputs):
        backend_sees()

        def run(*args):
            run_sees()
            return graph(*args)

        return run

    return backend


def test_the_gpu_is_free_while_something_compiles_and_taken_when_it_runs(gpu):
    seen = []
    backend = watched(lambda: seen.append(gpu.free()), lambda: seen.append(gpu.free()))
    gpu.acquire()
    with worker._compiling(gpu):
        assert not gpu.free()
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
        assert not gpu.free()
    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(3))
    assert seen == [True, False, False, False]


def test_a_configuration_is_timed_behind_a_flush_that_outlasts_its_launch(gpu):
    from torch._inductor.runtime.benchmarking import benchmarker

    before = dict(vars(benchmarker))
    with worker._compiling(gpu):
        assert benchmarker.L2_cache_size == worker._FLUSHED_BYTES
    assert vars(benchmarker) == before


def test_a_kernel_is_loaded_beside_a_preparation_but_not_beside_a_turn(gpu, monkeypatch):
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    seen = []
    loads = lambda self: seen.append((gpu.free(), gpu.turn_may_begin()))  # noqa: E731
    monkeypatch.setattr(CachingAutotuner, "_make_launchers", loads)

    def compiles():
        CachingAutotuner._make_launchers(None)
        seen.append((gpu.free(), gpu.turn_may_begin()))

    gpu.acquire()
    with worker._compiling(gpu):
        backend = watched(compiles, lambda: None)
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    assert seen == [(True, False), (True, True)]
    assert CachingAutotuner._make_launchers is loads


def test_what_loads_waits_for_a_turn_and_no_turn_begins_beside_it(tmp_path):
    order = []
    turn = GpuLock(tmp_path / "gpu.lock")
    waits = threading.Event()
    other = GpuLock(tmp_path / "gpu.lock", waits=lambda begins: waits.set())

    def load():
        with other.loading():
            order.append("loads")

    with turn.timing():
        assert turn.held
        thread = threading.Thread(target=load)
        thread.start()
        assert waits.wait(60)
        order.append("timed")
    thread.join(60)
    assert order == ["timed", "loads"]
    assert not turn.held
    with turn, other.loading():  # beside another's preparation
        order.append("beside")
    assert order[-1] == "beside"
    # Who has the GPU already loads without asking: nobody's turn can be timed.
    with turn.timing(), turn.loading():
        order.append("own")
    assert order[-1] == "own"


def test_the_wait_for_the_gpu_is_no_compile_time(tmp_path):
    taken, waits = threading.Event(), threading.Event()
    gpu = GpuLock(tmp_path / "gpu.lock", waits=lambda begins: waits.set())

    def other():
        with GpuLock(tmp_path / "gpu.lock"):
            taken.set()
            assert waits.wait(60)
            time.sleep(0.3)

    def compiles():
        threading.Thread(target=other).start()
        assert taken.wait(60)
        time.sleep(0.1)

    gpu.acquire()
    started = time.perf_counter()
    with worker._compiling(gpu) as took:
        backend = watched(compiles, lambda: None)
        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(3))
    whole = time.perf_counter() - started
    assert gpu.waited_s >= 0.3
    assert 0.1 <= took() <= whole - gpu.waited_s + 0.01


def test_a_compile_that_fails_leaves_the_gpu_with_who_had_it(gpu):
    def fails(graph, inputs):
        raise ValueError("no")

    gpu.acquire()
    with pytest.raises(Exception, match="no"), worker._compiling(gpu):
        torch.compile(lambda x: x * 2, backend=fails)(torch.ones(3))
    assert gpu.held
    assert not gpu.free()


def test_a_backward_compiles_with_the_gpu_free_too(bench, gpu, monkeypatch):
    from torch._dynamo.backends.common import aot_autograd

    seen = []

    def compiler(graph, inputs):
        seen.append(gpu.free())
        return make_boxed_func(graph.forward)

    compile_ = torch.compile
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    monkeypatch.setattr(torch, "compile", lambda fn, **how: compile_(fn, backend=backend, **how))

    def inputs(shape, dtype, device):
        return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)

    made = bench(Backward(lambda x: x.exp(), (0,)), inputs)
    made.impl, made.gpu = "compile", gpu
    facts = prepare(made)
    assert seen == [True, True]
    assert facts["compile_s"] > 0
    assert facts["repeatable"]
    assert gpu.free()  # until the next request
    made({"do": "release"})


def test_others_get_the_gpu_when_its_work_is_done(tmp_path):
    order = []
    with GpuLock(tmp_path / "lock", settle=lambda: order.append("settled")) as lock:
        with lock.lent():
            order.append("lent")
        with lock.borrowed():
            assert lock.held
    assert order == ["settled", "lent", "settled"]
    assert lock.held_s > 0
