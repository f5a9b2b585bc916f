"""A step on the GPU: the time of each, and what its kernels are, under the profiler.

Needs torch and the standard library alone, so that any Python with a torch can measure by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType

Step = Callable[[], Any]


def is_generated(name: str) -> bool:
    """Whether Inductor generated the kernel of this name."""
    return name.startswith("triton_")


def is_memop(name: str) -> bool:
    """Whether it is a copy or a fill, as the profiler names them, and no kernel."""
    return name.startswith(("Memcpy", "Memset"))


@dataclass(frozen=True)
class StepProfile:
    """What ran on the GPU, by name: launches and microseconds, of a step in the mean."""

    means: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, events: Iterable[Any], steps: int) -> StepProfile:
        """Of a profiler's events over `steps` steps, the GPU's alone.

        Ranges that a user named are among them, over kernels that are there themselves: left out.
        """
        means: dict[str, tuple[float, float]] = {}
        for event in events:
            if event.device_type == DeviceType.CUDA and not _is_annotation(event):
                launches, us = means.get(event.name, (0.0, 0.0))
                took_us = event.time_range.elapsed_us()
                means[event.name] = launches + 1 / steps, us + took_us / steps
        return cls(means)

    @classmethod
    def mean(cls, profiles: Sequence[StepProfile]) -> StepProfile:
        """Of profiles of the same number of steps each."""
        names = dict.fromkeys(name for profile in profiles for name in profile.means)
        means: dict[str, tuple[float, float]] = {}
        for name in names:
            found = [profile.means.get(name, (0.0, 0.0)) for profile in profiles]
            launches, us = (sum(column) / len(profiles) for column in zip(*found, strict=True))
            means[name] = launches, us
        return cls(means)

    def time_us(self, which: Callable[[str], bool]) -> float:
        """Microseconds of the names that `which` takes, to a tenth."""
        return round(sum((us for name, (_, us) in self.means.items() if which(name)), 0.0), 1)

    def launches(self, which: Callable[[str], bool]) -> int:
        """Launches of the names that `which` takes."""
        return round(sum(launches for name, (launches, _) in self.means.items() if which(name)))

    def kernels(self) -> dict[str, list[float]]:
        """Launches and microseconds by name, in the order of the first launches."""
        return {n: [round(launches), round(us, 2)] for n, (launches, us) in self.means.items()}


def profiled(step: Step, steps: int) -> StepProfile:
    """Run `steps` steps under the profiler, and wait for the GPU."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return StepProfile.of(profile.events(), steps)


def timed_us(step: Step, steps: int) -> list[float]:
    """Microseconds of each of `steps` steps by the GPU's own events, to a tenth.

    All are queued before the first wait.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end) * 1e3, 1) for start, end in events]


def _is_annotation(event: Any) -> bool:
    # A release may have events without the attribute.
    return bool(getattr(event, "is_user_annotation", False))
