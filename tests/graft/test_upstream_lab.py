"""graft upstream-tests --device lab: upstream's tests see a GPU, and its code is checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graft.testing import runner
from graft.upstream import tests

torch = pytest.importorskip("torch")

FILE = """\
import torch
from torch._inductor.test_case import TestCase
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.inductor_utils import GPU_TYPE, HAS_GPU

assert HAS_GPU


class GPUTests(TestCase):
    def test_right(self):
        x = torch.randn(3, 65, device=GPU_TYPE)
        result, (code,) = run_and_get_code(torch.compile(lambda x: x.softmax(-1)), x)
        self.assertIn("tl.load", code)
        self.assertEqual(result, x.softmax(-1))

    def test_wrong(self):
        x = torch.randn(3, 65, device=GPU_TYPE)
        self.assertEqual(torch.compile(torch.sin)(x), torch.cos(x))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the lab needs a machine without a GPU")
def test_a_gpu_is_described_to_upstreams_tests(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    found = runner.run([sys.executable], ["test_here.py"], cwd=tmp_path, env=tests.LAB)
    by_name = {test.rpartition("::")[2]: each.outcome for test, each in found.results.items()}
    assert by_name == {"test_right": "passed", "test_wrong": "failed"}
