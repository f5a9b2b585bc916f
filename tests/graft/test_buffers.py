"""What a wrapper has allocated at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graft.bench import outcome_tables
from graft.devtools import buffers

WRAPPER = """\
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda

def call(args):
    primals_1, mul_3, tangents_1 = args
    args.clear()
    assert_size_stride(primals_1, (256, ), (1, ))
    with torch.cuda._DeviceGuard(0):
        buf0 = empty_strided_cuda((256, 256), (256, 1), torch.float32)
        triton_a.run(mul_3, buf0, 65536, stream=stream0)
        del mul_3
        buf1 = reinterpret_tensor(buf0, (65536, ), (1, ), 0); del buf0  # reuse
        workspace_0 = empty_strided_cuda((1000, ), (1, ), torch.float32)
        triton_b.run(workspace_0, buf1, stream=stream0)
        del workspace_0
        buf2 = torch.ops.aten.f.default(buf1)
        buf3 = buf2[0]
        assert_size_stride(buf3, (128, 0), (1, 1))
        del buf2
        del primals_1
        buf4 = buf1; del buf1  # reuse
    return (buf4, )

def benchmark_compiled_module(times=10, repeat=10):
    primals_1 = rand_strided((256, ), (1, ), device='cuda:0', dtype=torch.float32)
    mul_3 = rand_strided((128, 256), (256, 1), device='cuda:0', dtype=torch.bfloat16)
    tangents_1 = rand_strided((), (), device='cuda:0', dtype=torch.float32)
"""


def test_what_is_there_at_a_time() -> None:
    found = buffers.most(WRAPPER)
    given = 1024 + 2 * 128 * 256 + buffers.BLOCK
    assert found.bytes == given + 4 * 256 * 256, "what is deleted is not there with a workspace"
    assert found.line.startswith("buf0 = empty_strided_cuda")
    larger = WRAPPER.replace("(1000, )", "(65536, )")
    assert buffers.most(larger).bytes == 1024 + buffers.BLOCK + 2 * 4 * 65536
    assert "workspace_0" in buffers.most(larger).line
    alive = WRAPPER.replace("; del buf0", "").replace("(1000, )", "(65536, )")
    assert buffers.most(alive).bytes == buffers.most(larger).bytes, "two names of one buffer"


def test_strides_and_blocks() -> None:
    assert buffers._bytes([3, 5], [8, 1], "float32") == buffers.BLOCK
    assert buffers._bytes([300, 5], [8, 1], "bfloat16") == 5120
    assert buffers._bytes([300, 0], [8, 1], "bfloat16") == 0


def test_both_sides_of_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert buffers.main(["rms_norm_backward", "--gpu", "A100", "--json", str(out)]) == 0
    (said,) = capsys.readouterr().out.splitlines()
    rows = json.loads(out.read_text("utf-8"))["buffers"]["rms_norm_backward"]
    assert rows["stock"].keys() == rows["patched"].keys()
    (stock,), (patched,) = (side.values() for side in rows.values())
    assert min(stock["bytes"], patched["bytes"]) > 2 * 2**20
    head, _, row = outcome_tables.table(out, "buffers").splitlines()
    assert head.count("|") == row.count("|")
    assert row.endswith(f"| {said.split()[-1]} |")


def test_a_wrong_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert buffers.main(["rms_norm_backwrd"]) == 2
    assert "did you mean rms_norm_backward?" in capsys.readouterr().err
