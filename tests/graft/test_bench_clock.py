"""What the clock keeps of the work that it captured, with a graph that records nothing."""

import contextlib
import gc
import weakref

import pytest
import torch

from graft.bench import clock as clock_module
from graft.bench.clock import Clock


class Graph:
    def __init__(self, keep_graph):
        assert keep_graph

    def instantiate(self):
        pass

    def raw_cuda_graph(self):
        return 0

    def replay(self):
        pass


class Saved:
    """In place of the tensors that a forward saved for its backward."""


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    monkeypatch.setattr(clock_module, "_node_kinds", lambda graph: [0, 0, 2])
    made = Clock.__new__(Clock)
    made.stream = None
    return made


def test_what_a_graph_reads_lives_as_long_as_the_replay(clock):
    saved = Saved()
    alive = weakref.ref(saved)
    replay = clock.capture(lambda saved=saved: id(saved))
    del saved
    gc.collect()
    assert alive() is not None
    assert (replay.captured, replay.kernels, replay.memops) == (True, 2, 1)
    del replay
    gc.collect()
    assert alive() is None
