"""graft same-code: what counts as the same, where a stack is found, and stacks that do differ."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import standin
import tinytorch
from lab_process import LabProcess
from rich.console import Console
from standin import Project

from graft.cli import same_code_command
from graft.devtools import code_store, codes, same_code, snapshots
from graft.devtools.codes import Section
from graft.devtools.same_code import Comparison, Difference, Wanted, differing, renumbered
from graft.devtools.snapshots import Snapshot
from graft.errors import GraftError, UsageError
from graft.places import ROOT
from graft.stack import pins
from graft.stack.git import blob_id
from graft.stack.trees import bases, tree

# --- the same ------------------------------------------------------------------------------------

SUM = """\
def triton_red_fused_sum_1(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp2 = tl.load(in_ptr0 + (x0), xmask)
    _tmp4 = tl.full([XBLOCK], 0, tl.float32)
    tmp3 = tmp2 * 0.5
    tmp4 = tl.sum(tmp3 + _tmp4, 1)[:, None]
    tl.store(out_ptr0 + (x0), tmp4, xmask)
"""
CALL = """\
buf0 = empty_strided_cuda((8, ), (1, ), torch.float32)
triton_red_fused_sum_1.run(arg0_1, buf0, 8, stream=stream0)
buf3 = empty_strided_cuda((8, ), (1, ), torch.float32)
triton_poi_fused_add_2.run(buf0, buf3, 8, stream=stream0)
return (buf3, buf0, )
"""
CODE: list[Section] = [
    ("graph 0 forward", "wrapper", CALL),
    ("graph 0 forward, comments", "comments", "# one\n# two"),
    ("graph 0 forward, kernel triton_red_fused_sum_1", "kernel", SUM),
    ("graph 0 forward, kernel triton_red_fused_sum_1, inductor_meta", "meta", "'num_load': 1"),
    ("graph 0 forward, kernel triton_red_fused_sum_1, configurations", "configs", "XBLOCK 4"),
    ("graph 0 forward, kernel triton_poi_fused_add_2", "kernel", "def triton_poi_fused_add_2(): 0"),
]


def changed(old: str, new: str, part: str | None = None) -> list[Section]:
    """`CODE` with a text replaced, in titles too."""
    found = [
        (title.replace(old, new), its, text.replace(old, new) if part in (None, its) else text)
        for title, its, text in CODE
    ]
    assert found != CODE
    return found


def both_ways(a: list[Section], b: list[Section], without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The parts in which they differ, whichever comes first."""
    there, back = differing(a, b, without), differing(b, a, without)
    assert there[0] == back[0]
    assert bool(there[0]) == bool(there[1])
    return there[0]


def test_what_is_equal_or_numbered_otherwise_is_the_same() -> None:
    assert both_ways(CODE, list(CODE)) == ()
    assert both_ways(CODE, changed("buf3", "buf17")) == ()
    assert both_ways(CODE, changed("triton_red_fused_sum_1", "triton_red_fused_sum_7")) == ()
    renamed = [(t, p, x.replace("tmp2", "tmp9").replace("tmp4", "tmp12")) for t, p, x in CODE]
    assert renamed != CODE
    assert both_ways(CODE, renamed) == ()


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("return (buf3, buf0, )", "return (buf0, buf3, )", "wrapper"),  # the same names, swapped
        (
            "triton_poi_fused_add_2.run(buf0, buf3",
            "triton_poi_fused_add_2.run(buf3, buf3",
            "wrapper",
        ),
        ("0.5", "0.25", "kernel"),
        ("tmp3 + _tmp4", "tmp2 + _tmp4", "kernel"),
        ("xmask)", "xmask, eviction_policy='evict_first')", "kernel"),
        ("'num_load': 1", "'num_load': 2", "meta"),
        ("XBLOCK 4", "XBLOCK 8", "configs"),
        ("# two", "# three", "comments"),
    ],
)
def test_a_real_difference_is_found_and_its_part_named(old: str, new: str, part: str) -> None:
    other = changed(old, new, part)
    assert both_ways(CODE, other) == (part,)
    assert both_ways(CODE, other, without=(part,)) == ()
    lines = differing(CODE, other)[1]
    assert any(line.startswith("+") and new.splitlines()[0] in line for line in lines)


def test_two_names_never_become_one_and_a_missing_kernel_is_found() -> None:
    merged = changed("buf3", "buf0")
    assert both_ways(CODE, merged) == ("wrapper",)
    assert "kernel" in both_ways(CODE, CODE[:-1])
    assert both_ways(CODE, changed("fused_sum_1", "fused_mean_1")) != ()
    swapped = [CODE[0], CODE[1], CODE[5], *CODE[2:5]]
    assert both_ways(CODE, swapped) != ()  # another order of definition


def test_numbers_are_of_a_graph_and_of_a_kernel() -> None:
    twice = [*CODE, *[(t.replace("0 forward", "1 backward"), p, x) for t, p, x in CODE]]
    first, second = renumbered(twice)[0], renumbered(twice)[len(CODE)]
    assert first[2] == second[2]
    assert "buf#0" in first[2]
    assert "triton_red_fused_sum_#0.run" in first[2]


def test_the_diff_is_the_shorter_of_both_ways_of_numbering() -> None:
    lines = [f"buf{n} = f{n % 7}(arg{n}_1)" for n in range(40)]
    a: list[Section] = [("graph 0", "wrapper", "\n".join(lines))]
    shifted = [f"buf{n + 1} = f{n % 7}(arg{n}_1)" for n in range(40)]
    shifted[20] = "buf21 = g(arg20_1)"
    parts, diff = differing(a, [("graph 0", "wrapper", "\n".join(shifted))])
    assert parts == ("wrapper",)
    assert sum(line[:1] in "+-" for line in diff) == 4  # two headers, a line out, a line in


# --- the store -----------------------------------------------------------------------------------


def test_a_store_keeps_equal_codes_once_and_goes_on(tmp_path: Path) -> None:
    with code_store.opened(tmp_path) as store:
        one = store.add("a", "H200", {"item": "graphs/1/0", "seconds": 1.5, "sections": CODE})
        two = store.add("b", "B200", {"item": "graphs/1/0", "seconds": 1, "sections": CODE})
        store.add("a", "H200", {"item": "graphs/1/1", "error": "it fell"})
        store.add("a", "H200", {"item": "graphs/1/2", "none": "no graph"})
        assert one.hash == two.hash
        assert store._database.execute("select count(*) from codes").fetchone() == (1,)
    with code_store.opened(tmp_path) as store:
        kept = store.results("a", "H200")
        assert {item: each.outcome for item, each in kept.items()} == {
            "graphs/1/0": "code", "graphs/1/1": "failed", "graphs/1/2": "none",
        }  # fmt: skip
        assert kept["graphs/1/1"].hash == "it fell"
        assert store.sections(one.hash) == CODE
        store.forget(["a"])
        assert store.results("a", "H200") == {}
        assert len(store.results("b", "B200")) == 1


def test_a_store_forgets_the_stacks_used_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_store, "KEPT_SIDES", 2)
    with code_store.opened(tmp_path) as store:
        for number, side in enumerate("abc"):
            store.use([side])
            store.add(side, "H200", {"item": "x", "sections": [["t", "kernel", str(number)]]})
        store.use(["c"])
        assert [bool(store.results(side, "H200")) for side in "abc"] == [False, True, True]
        assert store._database.execute("select count(*) from codes").fetchone() == (2,)


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "codes.sqlite").write_text("no database" * 100)
    with (
        pytest.raises(GraftError, match="codes.sqlite cannot be read"),
        code_store.opened(tmp_path),
    ):
        pass


# --- where a stack is ----------------------------------------------------------------------------


@pytest.fixture
def project(origin: tuple[bases.Base, Path], tmp_path: Path) -> Project:
    made = standin.make_project(tmp_path / "project", *origin)
    made.edit()
    config = made.path("_inductor__config").read_text()
    made.commit(
        "[inductor] Count reads\n\nWhy.\n",
        _inductor__config=config + "read_cap = 10\n",
        _inductor__reads="LIMIT = 1\n",
        inductor__test_reads="def test_reads():\n    pass\n",
    )
    made.refresh()
    standin.run_git(made.root, "init", "-q", "-b", "main")
    standin.run_git(made.root, "add", "pins", "patches", "overlay", "tests")
    standin.run_git(made.root, "commit", "-q", "-m", "one patch")
    return made


def find(project: Project, name: str) -> Snapshot:
    return snapshots.find(name, project.base, project.pin.name, project.prefix, project.root)


def test_a_commit_and_the_checkout_are_the_same_stack(project: Project) -> None:
    at_head = find(project, "HEAD")
    assert at_head.hash == find(project, str(project.root)).hash == project.stack.hash
    assert at_head.contents["torch/_inductor/reads.py"] == b"LIMIT = 1\n"
    assert "HEAD" in at_head.what
    assert "1 patches" in at_head.what


def test_what_was_changed_in_overlay_counts(project: Project) -> None:
    copy = project.copy("torch/_inductor/reads.py")
    copy.write_text("LIMIT = 2\n")
    (copy.parent / "more.py").write_text("")
    here = find(project, str(project.root))
    assert here.hash != find(project, "main").hash
    assert here.contents["torch/_inductor/reads.py"] == b"LIMIT = 2\n"
    assert "torch/_inductor/more.py" in here.files
    assert "with reads.py" in here.what.replace("more.py, ", "")
    copy.unlink()
    assert "torch/_inductor/reads.py" not in find(project, str(project.root)).files


def test_the_edit_counts_where_the_tree_follows_it(project: Project) -> None:
    project.edit()
    assert find(project, str(project.root)).hash == find(project, "HEAD").hash
    project.path("_inductor__reads").write_text("LIMIT = 3\n")
    project.path("_inductor__utils").unlink()
    here = find(project, str(project.root))
    assert here.contents["torch/_inductor/reads.py"] == b"LIMIT = 3\n"
    assert here.files["torch/_inductor/utils.py"] == "0" * 40
    assert "2 of them not committed" in here.what
    project.copy("torch/_inductor/reads.py").write_text("LIMIT = 4\n")
    with pytest.raises(GraftError, match="has an edit, and changes in overlay/"):
        find(project, str(project.root))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no commit, branch or tag 'nowhere'"),
        ("./nowhere", "is no checkout of this repository"),
        ("HEAD^9", "no commit, branch or tag"),
    ],
)
def test_what_is_not_there_is_named(project: Project, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find(project, name)


def test_a_commit_without_the_series_is_named(project: Project) -> None:
    standin.run_git(project.root, "rm", "-rqf", "--cached", "patches")
    standin.run_git(project.root, "commit", "-q", "-m", "no patches")
    with pytest.raises(UsageError, match="has no pins/ and patches/v2.11.0"):
        find(project, "HEAD")


def test_a_tree_of_a_snapshot_is_made_once(project: Project) -> None:
    here = find(project, "HEAD")
    built = snapshots.build(here, project.base, project.root)
    assert (built.torch_dir / "_inductor/reads.py").read_bytes() == b"LIMIT = 1\n"
    made = (built.prefix / tree.MANIFEST).stat().st_ctime_ns
    assert snapshots.build(here, project.base, project.root) == built
    assert (built.prefix / tree.MANIFEST).stat().st_ctime_ns == made
    (built.torch_dir / "_inductor/reads.py").write_text("LIMIT = 9\n")  # somebody changed it
    again = snapshots.build(here, project.base, project.root)
    assert (again.torch_dir / "_inductor/reads.py").read_bytes() == b"LIMIT = 1\n"


def test_trees_of_old_snapshots_go(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "KEPT_TREES", 1)
    first = find(project, "HEAD")
    old = snapshots.build(first, project.base, project.root)
    files = {**first.files, "torch/_inductor/reads.py": blob_id(b"")}
    other = dataclasses.replace(
        first, files=files, contents={**first.contents, "torch/_inductor/reads.py": b""}
    )
    os.utime(old.prefix, (1, 1))
    new = snapshots.build(other, project.base, project.root)
    snapshots.prune({old.prefix}, project.root)
    assert old.prefix.is_dir()
    snapshots.prune(set(), project.root)
    assert not old.prefix.exists()
    assert new.prefix.is_dir()


# --- capturing -----------------------------------------------------------------------------------

KERNEL = """\
import triton
@triton_heuristics.pointwise(
    size_hints={'x': 8},
    inductor_meta={'grid_type': 'Grid1D', 'mutated_arg_names': [], 'row_split': {'a': (1, 2)}},
)
@triton.jit
def triton_(x): pass
"""


def test_what_codegen_hands_over_is_taken_out_of_the_source() -> None:
    source, meta = codes.without_meta(KERNEL)
    assert "inductor_meta=...," in source
    assert source.count("\n") == KERNEL.count("\n")
    assert "size_hints={'x': 8}," in source
    assert meta == [
        "'grid_type': 'Grid1D'",
        "'mutated_arg_names': []",
        "'row_split': {'a': (1, 2)}",
    ]
    assert codes.without_meta("def f(:") == ("def f(:", [])


def test_a_fork_that_ends_or_hangs_is_an_error() -> None:
    assert codes.forked(lambda: {"sections": "x" * 10**6})["sections"] == "x" * 10**6
    ended = codes.forked(lambda: os.kill(os.getpid(), signal.SIGKILL) or {})
    assert ended == {"error": "the process ended with -9"}
    started = time.monotonic()
    assert codes.forked(lambda: time.sleep(30) or {}, 0.2) == {"error": "longer than 0 s"}
    assert time.monotonic() - started < 10


@functools.cache
def warm_lab() -> None:
    """What each fork would import and build again."""
    from graft.lab import devices, fakegpu
    from graft.upstream import operators

    fakegpu.install(devices.H200)
    codes._be_quiet()
    codes._warm_up()
    operators.operators()


def in_lab_code(item: str) -> Any:
    warm_lab()
    return codes.forked(lambda: codes.answer(item), 120)


@pytest.fixture(scope="module")
def lab() -> Iterator[LabProcess]:
    process = LabProcess(__file__, interpret=False)
    yield process
    process.close()


ITEMS = (
    "cases/rms_norm_backward/bf16",
    "operators/nn.functional.layer_norm-bfloat16-0-sums",
    "operators/masked.amin-float32-45-large",  # whose trace computes with a constant
    "graphs/1/0",
    "graphs/1/3",
    "graphs/1/163",  # of pairs that no gate of 2.11.0 can be asked for
)


@pytest.mark.parametrize("item", ITEMS)
def test_a_capture_has_every_part_and_repeats(lab: LabProcess, item: str) -> None:
    first, second = lab("code", item), lab("code", item)
    assert first.get("error") is None
    sections = first["sections"]
    assert sections == second["sections"]
    assert {part for _, part, _ in sections} == set(codes.PARTS)
    kernels = [text for _, part, text in sections if part == "kernel"]
    configs = [text for _, part, text in sections if part == "configs"]
    assert len(kernels) == len(configs) > 0
    assert all("num_warps" in each and "options" in each and "grid" in each for each in configs)
    assert all("inductor_meta=..." in each for each in kernels)
    text = json.dumps(sections)
    assert "/tmp" not in text
    assert ".graft" not in text


def test_no_library_of_models_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base, _ = here()
    monkeypatch.setattr(same_code._Worker, "ask", lambda *_: {"items": []})
    wanted = Wanted(groups=(codes.MODELS,), gpus=("H200",))
    with (
        code_store.opened(tmp_path) as store,
        pytest.raises(GraftError, match="has no library of models") as caught,
    ):
        same_code._items(store, codes.MODELS, wanted, str(base.python), base)
    assert caught.value.next == f"{base.python} -m pip install -e '{ROOT}[models]'"


@pytest.mark.parametrize("warps", [0, 3])
def test_what_triton_refuses_is_an_error(warps: int) -> None:
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    codes.check_options(target, {"num_warps": 4})
    with pytest.raises(AssertionError, match="num_warps must be a power of 2"):
        codes.check_options(target, {"num_warps": warps})


def test_models_are_those_whose_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from graft.cases import models

    there = {"timm"}

    def find_spec(name: str) -> object | None:
        return object() if name in there else None

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    known = models.catalogue().values()
    timm = [f"models/{model.name}" for model in known if model.library == "timm"]
    assert codes.listed(codes.MODELS) == timm
    there.add("transformers")
    assert codes.listed(codes.MODELS) == [f"models/{model.name}" for model in known]


def test_what_is_listed_is_all_of_it() -> None:
    from graft import cases

    assert codes.listed("graphs", seed=3, graphs=2) == ["graphs/3/0", "graphs/3/1"]
    known = cases.load_all()
    listed = codes.listed("cases", dtypes=("bf16",))
    here = [name for name, case in known.items() if cases.available(case)]
    assert [item.split("/")[1] for item in listed] == here  # those without bf16 too
    both = codes.listed("cases", dtypes=("bf16", "fp32"))
    assert set(listed) < set(both)
    assert all(item.rpartition("/")[2] in known[item.split("/")[1]].dtypes for item in both)


# --- the whole of it -----------------------------------------------------------------------------


def here() -> tuple[bases.Base, Snapshot]:
    """This checkout's stack, as the patched Python that runs this test has its base."""
    prefix = Path(sys.executable).parent.parent
    if not (prefix / tree.MANIFEST).is_file():
        pytest.skip("needs a patched tree: build/bin/python")
    built = tree.load(prefix)
    return built.base, snapshots.find(str(pins.ROOT), built.base, built.pin, prefix)


def with_change(snapshot: Snapshot, path: str, old: bytes, new: bytes) -> Snapshot:
    data = snapshot.contents[path].replace(old, new)
    assert data != snapshot.contents[path]
    return dataclasses.replace(
        snapshot,
        what="changed",
        files={**snapshot.files, path: blob_id(data)},
        contents={**snapshot.contents, path: data},
    )


def test_a_changed_constant_is_found_and_what_was_captured_is_kept(tmp_path: Path) -> None:
    base, stack = here()
    other = with_change(
        stack,
        "torch/_inductor/config.py",
        b"mix_order_reduction_non_strict_mode = False",
        b"mix_order_reduction_non_strict_mode = False\n    an_unused_knob = 1",
    )
    broken = with_change(
        stack, "torch/_inductor/codegen/triton.py", b"rsqrt({x})", b"rsqrt(({x}) * 1)"
    )
    wanted = Wanted(("cases",), ("H200",), ("/rms_norm/",))

    def compare(a: Snapshot, b: Snapshot) -> Comparison:
        return same_code.compare((a, b), base, wanted, root=tmp_path)

    same = compare(stack, other)
    assert same.counts["cases", "H200"] == {"same": 1}
    assert same.all_same
    assert same.captured == {("cases", "A"): 1, ("cases", "B"): 1}
    differs = compare(stack, broken)
    assert differs.captured == {("cases", "B"): 1}  # A's code was kept
    assert differs.counts["cases", "H200"] == {"different": 1}
    (difference,) = differs.differences
    assert difference.parts == ("kernel",)
    assert any("* 1)" in line for line in difference.diff if line.startswith("+"))
    back = compare(broken, stack)
    assert not back.captured
    assert back.counts["cases", "H200"] == {"different": 1}
    twice = compare(stack, stack)
    assert twice.captured == {("cases", "B"): 1}
    assert twice.all_same


def test_a_side_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    base, stack = here()
    broken = with_change(stack, "torch/_inductor/config.py", b"import os", b"import nothing_such")
    with pytest.raises(GraftError, match="nothing_such"):
        same_code.compare(
            (broken, stack), base, Wanted(("graphs",), ("H200",), graphs=1), root=tmp_path
        )


def test_what_is_wanted_wrongly_is_named() -> None:
    for wanted, message in (
        (Wanted(("case",)), "no group case; did you mean cases"),
        (Wanted(without=frozenset(["comment"])), "no part comment"),
        (Wanted(graphs=-1), "--graphs takes 0 or more"),
    ):
        with pytest.raises(UsageError, match=message):
            wanted.check()


# --- telling -------------------------------------------------------------------------------------

NOWHERE = Snapshot("HEAD (0123), 3 patches", pins.load(), {}, {})


def found() -> Comparison:
    made = Comparison((NOWHERE, NOWHERE), Wanted(gpus=("H200",)))
    made.counts["graphs", "H200"] = Counter({"same": 7, "different": 2, "failed on one": 1})
    diff = ("--- A", "+++ B", "@@ -1 +1 @@", " x", "-XBLOCK 4", "+XBLOCK 8")
    made.differences += [
        Difference("graphs/1/3", "H200", "different", ("configs",), diff),
        Difference("graphs/1/4", "H200", "different", ("configs",), diff),
        Difference("operators/x-y-0-alone", "H200", "failed on one", (), ("- code", "+ failed: z")),
    ]
    made.captured["graphs", "A"], made.seconds["graphs", "A"] = 10, 5.0
    return made


def test_a_difference_is_a_file_and_the_screen_has_it_in_short(tmp_path: Path) -> None:
    stale = tmp_path / "out" / "H200" / "stale.diff"
    stale.parent.mkdir(parents=True)
    stale.write_text("")
    written = same_code.write(found(), tmp_path / "out")
    assert not stale.exists()
    assert [path.relative_to(tmp_path / "out").as_posix() for path in written] == [
        "H200/graphs-1-3.diff", "H200/graphs-1-4.diff", "H200/operators-x-y-0-alone.diff",
    ]  # fmt: skip
    text = written[0].read_text()
    assert text.startswith("# graphs/1/3 on H200: different configs\n# A: HEAD (0123)")
    assert text.endswith("-XBLOCK 4\n+XBLOCK 8\n")
    said = io.StringIO()
    same_code_command.show(found(), tmp_path / "out", Console(file=said, width=120))
    for words in (
        "graphs  H200  7     2          0               1",
        "3 differences (configs: 2)",
        "graphs/1/3 on H200: different (configs), and 1 like it",
        "+XBLOCK 8",
        "+ failed: z",
        "10 captured in 5 s of a core, 0.50 s each",
    ):
        assert words in said.getvalue(), said.getvalue()


def test_the_result_as_data() -> None:
    data = json.loads(json.dumps(same_code.as_json(found())))
    assert data["counts"] == [
        {"group": "graphs", "gpu": "H200", "same": 7, "different": 2, "failed on both": 0,
         "failed on one": 1, "nothing to compile": 0}
    ]  # fmt: skip
    assert data["captures"] == [{"group": "graphs", "side": "A", "items": 10, "seconds": 5.0}]
    assert [each["parts"] for each in data["differences"]] == [["configs"], ["configs"], []]


def test_the_command_fails_where_something_differs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nothing = Comparison((NOWHERE, NOWHERE), Wanted(gpus=("H200",)), pending=4)
    built = type("Built", (), {"base": None, "pin": "v2.11.0", "prefix": tmp_path})
    monkeypatch.setattr(same_code_command.tree, "load", lambda prefix: built)
    monkeypatch.setattr(same_code_command.snapshots, "find", lambda *where: NOWHERE)

    def run(comes: Comparison) -> Comparison:
        monkeypatch.setattr(same_code_command.same_code, "compare", lambda *a, **k: comes)
        return same_code_command.same_code_of(
            "HEAD", ".", tmp_path, Wanted(), workers=None, seconds=None, anew=False,
            out=tmp_path / "out", file=tmp_path / "result.json",
            console=Console(file=io.StringIO()), say=lambda line: None,
        )  # fmt: skip

    with pytest.raises(GraftError, match="3 codes are not the same"):
        run(found())
    assert len(json.loads((tmp_path / "result.json").read_text())["differences"]) == 3
    with pytest.raises(GraftError, match="4 were not reached"):
        run(nothing)
    assert run(dataclasses.replace(nothing, pending=0)).all_same


def test_the_command_names_what_there_is_not() -> None:
    done = tinytorch.run(
        sys.executable, "-m", "graft", "same-code", "HEAD", ".", "--gpu", "H300",
        PYTHONPATH=str(pins.ROOT / "src"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "no described GPU is called 'H300'" in done.stderr
    assert "next: graft same-code HEAD . --gpu H200" in done.stderr
