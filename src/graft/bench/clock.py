"""The clock: CUDA-graph replays between CUDA events, with a cold L2 cache before each.

Everything runs on one side stream: a capture needs one, and the backward that autograd runs
stays on the stream of its forward.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from graft.bench.stats import Spread, spread

# A write of this many times the L2 cache leaves none of the inputs in it.
FLUSH_L2_FACTOR = 4
# Flushes ahead of the first sample, about 60 us each: the host queues all of a turn's samples while
# they run, also where it is late because something compiles beside it. A launch that comes after
# its start event has passed would be timed with the wait for it.
_HEAD_START = 10
# Two buffers of 2 GiB: a copy that takes about 1 ms on a GPU of 4 TB/s, so that a launch
# (2 us) is under 1 % of it, and no cache holds any of it.
_COPY_BYTES = 2 << 30
_COPY_SAMPLES = 30

_NODE_KERNEL, _NODE_MEMCPY, _NODE_MEMSET = 0, 1, 2  # CUgraphNodeType


@dataclass
class Replay:
    """Work that can be launched again and again: a captured graph, or a plain function.

    `work` is what was captured: a graph reads what it holds (the tensors that a forward saved),
    and does not keep that itself. `kernels` and `memops` count the graph's kernel nodes and its
    copy and set nodes (None where nothing was captured). `outputs` are the tensors that every
    launch writes.
    """

    launch: Callable[[], Any]
    outputs: Any
    captured: bool
    work: Callable[[], Any] | None = None
    kernels: int | None = None
    memops: int | None = None


class Clock:
    """Times work on one GPU. Create one a process; it holds the buffer that flushes the L2."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self.flush_bytes = FLUSH_L2_FACTOR * l2_bytes
        self._flush = torch.empty(self.flush_bytes // 4, dtype=torch.int32, device=device)

    def capture(self, fn: Callable[[], Any]) -> Replay:
        """`fn` as a CUDA graph. It must have run before on this clock's stream.

        Where it cannot be captured (it waits for the GPU, or copies from unpinned memory), the
        result launches it as it stands, and its times include gaps between launches.
        """
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                outputs = fn()
            graph.instantiate()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            torch.cuda.synchronize(self.device)
            _end_capture(self.device)
            return Replay(fn, fn(), captured=False)
        kinds = _node_kinds(graph.raw_cuda_graph())
        return Replay(
            graph.replay,
            outputs,
            captured=True,
            work=fn,
            kernels=kinds.count(_NODE_KERNEL),
            memops=kinds.count(_NODE_MEMCPY) + kinds.count(_NODE_MEMSET),
        )

    def time_us(self, launch: Callable[[], Any], samples: int) -> list[float]:
        """Microseconds of `samples` launches, each after a flush of the L2 cache.

        All are queued before the first wait, with a head start, and a flush outlasts a launch: the
        GPU never waits for the host in between.
        """
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in ("start", "end")] for _ in range(samples)
        ]
        for _ in range(_HEAD_START):
            self._flush.zero_()
        for start, end in events:
            self._flush.zero_()
            start.record()
            launch()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) * 1e3 for start, end in events]

    def copy_gb_per_s(self) -> Spread:
        """Device-to-device copy bandwidth, bytes read plus bytes written, in 1e9 B/s."""
        source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=self.device).fill_(1)
        target = torch.empty_like(source)
        target.copy_(source)
        times = self.time_us(lambda: target.copy_(source), _COPY_SAMPLES)
        return spread([2 * _COPY_BYTES / us / 1e3 for us in times])


def _end_capture(device: torch.device) -> None:
    """A capture that broke off leaves the generator in it, and nothing could be drawn any more."""
    generator = torch.cuda.default_generators[device.index or 0]
    with contextlib.suppress(RuntimeError):
        generator.graphsafe_set_state(generator.clone_state())


def waits_for_the_gpu(fn: Callable[[], Any]) -> bool:
    """Run `fn`; whether it waits for the GPU on the way: such work cannot be captured."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn()
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _node_kinds(graph: int) -> list[int]:
    """The CUgraphNodeType of each node of a CUgraph, through the driver's own functions."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    if cuda.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        raise RuntimeError("cuGraphGetNodes failed")
    nodes = (ctypes.c_void_p * count.value)()
    if count.value and cuda.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        raise RuntimeError("cuGraphGetNodes failed")
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        if cuda.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            raise RuntimeError("cuGraphNodeGetType failed")
        kinds.append(kind.value)
    return kinds
