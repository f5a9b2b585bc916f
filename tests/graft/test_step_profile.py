"""What a step's measurements say of events whose names and times are known."""

import ast
import contextlib
import importlib.util
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from graft.bench import step_profile, worker
from graft.places import ROOT

NORM, NCCL = "triton_per_fused_rms_norm_0", "ncclDevKernel_AllReduce_Sum_f32"
# Of one step: name and microseconds.
STEP = [
    (NORM, 10.0),
    ("sm90_xmma_gemm", 40.5),
    (NORM, 14.04),
    ("Memcpy DtoD (Device -> Device)", 2.0),
    ("triton_poi_nccl_like_1", 1.0),
    (NCCL, 100.25),
    ("Memset (Device)", 0.5),
]
TRITON_US, NCCL_US, REST_US = 25.04, 100.25, 43.0


def event(name, us, device=DeviceType.CUDA, **more):
    return SimpleNamespace(
        name=name,
        device_type=device,
        time_range=SimpleNamespace(elapsed_us=lambda: us),
        **more,
    )


class Gpu:
    """Stands in for CUDA: a step takes a millisecond of its clock, and has the events of STEP."""

    def __init__(self):
        self.now_ms = 0.0
        self.steps = self.profiled = self.timed = 0
        self.waited = False
        self.profiling = False

    def step(self):
        self.steps += 1
        self.profiled += self.profiling
        self.now_ms += 1.0 + self.steps / 1000
        self.waited = False

    def synchronize(self, *args):
        self.waited = True

    @contextlib.contextmanager
    def profile(self, *, activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        self.profiling = True
        yield self
        assert self.waited, "what still runs is not in the profile"
        self.profiling = False

    def events(self):
        assert not self.profiling
        found = [event("cudaLaunchKernel", 5.0, DeviceType.CPU, is_user_annotation=False)]
        for _ in range(self.profiled):
            found += [event(*each, is_user_annotation=False) for each in STEP]
            found.append(event("ProfilerStep", 500.0, is_user_annotation=True))
        return found

    def event(self, *, enable_timing):
        assert enable_timing
        recorded = SimpleNamespace(at_ms=None)

        def record():
            recorded.at_ms = self.now_ms

        def elapsed_time(end):
            assert self.waited
            return end.at_ms - recorded.at_ms

        recorded.record, recorded.elapsed_time = record, elapsed_time
        return recorded


@pytest.fixture
def gpu(monkeypatch):
    fake = Gpu()
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.profiler, "profile", fake.profile)
    return fake


def script(name):
    """A script of bench/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bench" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_profile_is_a_step_s(gpu):
    profile = step_profile.profiled(gpu.step, 3)
    assert gpu.steps == 3
    assert profile.kernels() == {
        NORM: [2, 24.04],
        "sm90_xmma_gemm": [1, 40.5],
        "Memcpy DtoD (Device -> Device)": [1, 2.0],
        "triton_poi_nccl_like_1": [1, 1.0],
        NCCL: [1, 100.25],
        "Memset (Device)": [1, 0.5],
    }
    assert list(profile.kernels())[:2] == [NORM, "sm90_xmma_gemm"]
    assert profile.time_us(step_profile.is_generated) == round(TRITON_US, 1)
    assert profile.launches(step_profile.is_memop) == 2


def test_what_not_every_step_launches_is_a_mean():
    events = [event("a", 1.0), event("a", 2.0), event("a", 4.0), event("b", 3.0)]
    profile = step_profile.StepProfile.of(events, 2)
    assert profile.kernels() == {"a": [2, 3.5], "b": [0, 1.5]}
    assert profile.time_us(lambda name: True) == 5.0


def test_nothing_on_the_gpu_is_nothing():
    profile = step_profile.StepProfile.of([event("host", 1.0, DeviceType.CPU)], 3)
    assert profile.kernels() == {}
    assert profile.time_us(lambda name: True) == 0.0


def test_each_step_is_timed_alone(gpu):
    assert step_profile.timed_us(gpu.step, 3) == [1001.0, 1002.0, 1003.0]


def test_the_worker_s_facts(gpu):
    assert worker._split(step_profile.profiled(gpu.step, 5)) == {
        "triton_us": round(TRITON_US, 1),
        "rest_us": round(REST_US + NCCL_US, 1),
        "kernels": 5,
        "memops": 2,
    }
    assert gpu.steps == 5


def test_the_mean_of_profiles_is_over_all_of_them():
    first = step_profile.StepProfile({"a": (2.0, 3.0), "b": (1.0, 8.0)})
    second = step_profile.StepProfile({"a": (2.0, 5.0)})
    mean = step_profile.StepProfile.mean([first, second])
    assert mean.means == {"a": (2.0, 4.0), "b": (0.5, 4.0)}


def test_a_rank_of_ddp_step_tells_nccl_apart(gpu, monkeypatch):
    ddp = script("ddp_step")
    monkeypatch.setattr(ddp.dist, "barrier", lambda: None)
    monkeypatch.setattr(ddp, "run", lambda step, module, inputs: step(*inputs))
    found = ddp.measure(gpu.step, None, [])
    assert list(found) == ["step_us", "triton_us", "nccl_us", "rest_us", "kernels"]
    assert found["step_us"] == [1000.0 + i for i in range(5, 13)]
    assert found["triton_us"] == round(TRITON_US, 1)
    assert found["nccl_us"] == round(NCCL_US, 1)
    assert found["rest_us"] == REST_US
    assert found["kernels"][NCCL] == [1, 100.25]


def test_a_script_says_what_it_takes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ddp_step", "--help"])
    with pytest.raises(SystemExit) as ended:
        script("ddp_step").main()
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_it_runs_where_only_torch_is():
    names = set()
    for node in ast.walk(ast.parse(inspect.getsource(step_profile))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    assert {name.split(".")[0] for name in names} <= {"torch", *sys.stdlib_module_names}
