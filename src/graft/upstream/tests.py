"""`graft upstream-tests`: Inductor's own tests of the pinned commit, on stock and on patched.

Both sides run the same files, from a folder of their own each. Where a patch changes one of
upstream's tests on purpose, the patched side runs the changed file, and the result says so.
"""

from __future__ import annotations

import datetime
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from graft.errors import UsageError
from graft.places import ROOT
from graft.stack import Stack
from graft.stack.trees.tree import Tree
from graft.stack.workbench import check_checkout
from graft.upstream import differences, gone_names, sides, sources
from graft.upstream.comparison import Comparison
from graft.upstream.sides import How

DEFAULT_FILES = (
    "test_mix_order_reduction.py",
    "test_loop_ordering.py",
    "test_online_softmax.py",
    "test_cooperative_reductions.py",
    "test_torchinductor_strided_blocks.py",
    "test_kernel_benchmark.py",
    "test_perf.py",
    "test_torchinductor.py",
    "test_torchinductor_dynamic_shapes.py",
    "test_gpu_cpp_wrapper.py",
    "test_aot_inductor.py",
)
LIMIT_S = 600.0
"""For one test: those with max-autotune take minutes."""

GPU_ONLY = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": "cuda"}
"""What makes upstream's files leave their tests of the CPU out."""

LAB = {"PYTEST_PLUGINS": "graft.lab.plugin", "TRITON_INTERPRET": "1"}
"""What describes a GPU to them."""


def compare(
    built: Tree,
    stack: Stack,
    files: Sequence[str] = (),
    *,
    source: Path | None = None,
    paths: Sequence[Path] = (),
    device: str = "cuda",
    limit_s: float = LIMIT_S,
    keyword: str | None = None,
    workers: int = 1,
    gpu_only: bool = False,
    kept: Path | None = None,
    anew: bool = False,
    seconds: float | None = None,
    patched_first: bool = False,
    say: Callable[[str], None] = lambda line: None,
    root: Path = ROOT,
) -> Comparison:
    """Run upstream's test `files` on the base and on the tree.

    The files come from `source`, a checkout at the pin's commit; or from `paths`, test files by
    themselves, all of which are run, and which may be of another commit; or from a sparse fetch of
    that commit, kept in the user's cache. `device` is "cuda", or "lab" for kernels under Triton's
    interpreter. `limit_s` is for each test, `keyword` is pytest's ``-k``,
    `workers` are processes a GPU (of CUDA_VISIBLE_DEVICES, or all). Results are kept in the folder
    `kept` (default: in the user's cache) as they come, and a run takes up what an earlier one of
    the same kept, unless `anew`; after `seconds` it ends with what it has. With `patched_first`
    stock runs what does not pass on patched alone. Raises UsageError for a
    file or a checkout that is not as expected, GraftError without a GPU, without network where one
    is needed, and where a side cannot run at all.
    """
    begin = time.monotonic()
    if paths and (files or source):
        raise UsageError("--file gives the tests by itself: leave FILES and --checkout out")
    if workers < 1:
        raise UsageError(f"{workers} processes a GPU; expected 1 or more")
    meant = differences.load(stack, root)
    extra = (LAB if device == "lab" else {}) | (GPU_ONLY if gpu_only else {})
    with tempfile.TemporaryDirectory(prefix="graft-upstream-") as aside:
        folder = Path(aside)
        both = sides.halves(built, folder, extra)
        stock, patched = (half.folder for half in both)
        gpus, gpu_name = sides.check_able(both, needs_gpu=device == "cuda")
        if paths:
            wanted = sources.copy(paths, stock)
        else:
            wanted = [sources.in_upstream(file) for file in files or DEFAULT_FILES]
            if source is not None:
                check_checkout(source, stack.pin)
            else:
                source = sources.fetch(stack.pin, wanted, say)
            sources.unpack(source, stack.pin, wanted, stock)
        shutil.copytree(stock, patched)
        gone: dict[str, list[str]] = {}
        refused: dict[str, list[str]] = {}
        changed = sources.apply(stack, patched, refused if paths else None)
        if paths:  # which may be of another era
            for half in both:
                lacking = gone_names.stand_in(half.python, half.env, half.folder, wanted)
                for path, names in lacking.items():
                    gone[path] = list(dict.fromkeys([*gone.get(path, ()), *names]))
        about = {"gpu": gpu_name, "limit_s": limit_s, "gpu_only": gpu_only}
        how = How(
            workers,
            limit_s,
            keyword or "",
            kept or default_state(stack),
            anew,
            None if seconds is None else begin + seconds,
            say,
            patched_first=patched_first,
        )
        found = sides.compare(both, gpus, wanted, how, built, stack, about, meant=meant)
        about = {
            "pin": stack.pin.name,
            "stack": stack.hash,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": built.base.version,
            "python": built.base.python_version,
            **about,
            "gpus": len(gpus),
            "workers": workers,
            "keyword": keyword or "",
            **({"patched_first": True} if patched_first else {}),
            "seconds": round(time.monotonic() - begin),
        }
        asked = {path: by for path, by in changed.items() if path in wanted}
        return replace(
            found, changed=asked, gone=gone, refused=refused, of_pin=not paths, about=about
        )


def default_state(stack: Stack) -> Path:
    """Where results are kept: in the user's cache, by pin."""
    return sources.cache_folder(stack.pin).parent / f"upstream-tests-{stack.pin.name}"
