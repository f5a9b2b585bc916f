"""`graft bench models`: its catalogue, its runs on fake workers, and what its files say."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from test_bench_runner import FAKE, PATCHED, STOCK, bench  # noqa: F401

from graft import cases
from graft.bench import generated, kernel_groups, models_report, results, runner, tables
from graft.bench.plan import Point
from graft.cases import models
from graft.cli import bench_command, models_command
from graft.errors import GraftError, UsageError
from graft.places import ROOT

SIDES = models_report.Sides("stock", "patched")


# --- the catalogue -------------------------------------------------------------------------------


def test_the_catalogue_has_what_was_asked_of_it():
    known = models.catalogue()
    assert len(known) >= 24
    assert {model.library for model in known.values()} == set(models.LIBRARIES)
    assert {model.group for model in known.values()} == set(models.GROUPS)
    assert len({model.kind for model in known.values()}) >= 4
    held_out = [model for model in known.values() if model.group == "held_out"]
    assert len(held_out) >= 8
    assert all(model.cost_s > 0 for model in known.values())


def test_models_are_chosen_by_name_and_group():
    names = [model.name for model in models.select(["bert", "gpt2"])]
    assert names == ["bert", "gpt2"]
    assert {model.group for model in models.select([], "held_out")} == {"held_out"}
    with pytest.raises(UsageError, match="unknown model 'brt'; did you mean bert"):
        models.select(["brt"])
    with pytest.raises(UsageError, match="none of gpt2 is held_out"):
        models.select(["gpt2"], "held_out")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('group = "both"', "group 'both'; one of tuned, held_out, unseen"),
        ('make = "hub.Bert"', "library 'hub'; one of transformers, timm"),
        ('batch = "words"', "batch 'words'"),
        ("depth = 3", "depth"),
    ],
)
def test_an_entry_that_is_none_is_named(tmp_path, line, words):
    lines = {
        "group": 'group = "tuned"',
        "kind": 'kind = "language"',
        "make": 'make = "timm.vit"',
        "batch": 'batch = "classes"',
        "shape": "shape = [2, 4]",
    }
    lines[line.split(" ")[0]] = line
    file = tmp_path / "models.toml"
    file.write_text("[one]\n" + "\n".join(lines.values()))
    with pytest.raises(GraftError, match=re.escape(words)) as error:
        models.catalogue(file)
    assert "[one]" in error.value.message


@pytest.mark.parametrize("name", ["mistral", "resnet50"])
def test_a_model_whose_library_is_missing_says_so(monkeypatch, name):
    library = models.catalogue()[name].library
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        GraftError, match=f"{name} calls {library}, which .* cannot import"
    ) as error:
        cases.find(name)
    assert "[models]" in str(error.value.next)


def test_a_library_that_is_missing_is_named_with_its_models():
    chosen = [SimpleNamespace(name="a", library="transformers")]
    contender = SimpleNamespace(python=(sys.executable, "-S", "-I"))
    with pytest.raises(GraftError, match=r"transformers cannot be imported .* its models are a"):
        models_command._libraries(chosen, [contender], ())


def test_the_list_has_every_model():
    shown = CliRunner().invoke(bench_command.bench, ["models", "--list"])
    assert shown.exit_code == 0
    assert [line.split(" ")[0] for line in shown.output.splitlines()] == list(models.catalogue())


# --- runs ----------------------------------------------------------------------------------------


def test_sides_that_share_caches_compile_one_after_the_other(bench):  # noqa: F811
    row = bench.run(["step"], shared=True)["step"]
    prepared = [
        line.split(" ")[1:3]
        for line in bench.log.read_text().splitlines()
        if line.split(" ")[2] in ("prepare", "compiled")
    ]
    (first, *_), (second, *_) = prepared[0], prepared[2]
    assert [pid for pid, _ in prepared] == [first, first, second, second]
    assert first != second
    assert bench.served("unchecked") == [("0", "step")]  # the base's
    # Who is second compiles less: the time says nothing of a side.
    assert all("compile_s" not in time for time in row["times"].values())
    assert results.load(bench.out)["clock"]["shared"] is True


def test_who_found_too_little_memory_prepares_again(bench):  # noqa: F811
    row = bench.run(["step_short_once"], shared=True)["step_short_once"]
    assert all("us" in time for time in row["times"].values())
    assert len(bench.served("prepare")) == 4


def test_sides_that_compile_apart_say_how_long_that_takes(bench):  # noqa: F811
    row = bench.run(["step"], serial=True)["step"]
    assert [time["compile_s"] for time in row["times"].values()] == [1.5, 1.5]
    assert bench.served("unchecked") == []
    assert "shared" not in results.load(bench.out)["clock"]


def test_shared_caches_are_one_folder_a_lane(tmp_path):
    def folders(**how):
        settings = runner.Settings(**how)
        gpu = runner.Gpu("0", tmp_path / "lock")
        lane = runner.Lane(gpu, [STOCK, PATCHED], settings, tmp_path, frozenset({0, 1}))
        envs = [seat._environment() for seat in lane.seats]
        return [{env[name] for env in envs} for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_HOME")]

    assert [len(found) for found in folders(shared=True)] == [1, 1]
    assert [len(found) for found in folders()] == [2, 2]


def test_a_step_s_kernels_are_in_its_row_in_groups(bench):  # noqa: F811
    row = bench.run(["step"])["step"]
    assert all("generated" not in time for time in row["times"].values())
    (group,) = row["generated"]["groups"]
    assert group["kernels"] == [["poi_a_00000001", {"stock": [2, 200.0], "patched": [2, 100.0]}]]
    # The fake's copies go at 4000 GB/s.
    assert group["limit_us"] == round(4000 * 2 / 4000 / 1e3, 1)
    assert bench.served("last") == [("0", "step")] * 2


def test_what_failed_is_measured_again_and_what_did_not_is_not(bench):  # noqa: F811
    first = bench.run(["plain", "fault_beside"])
    assert "error" in first["fault_beside"]["times"]["patched"]
    prepared = len(bench.served("prepare"))
    second = bench.run(["plain", "fault_beside"])
    assert all("us" in time for time in second["fault_beside"]["times"].values())
    assert bench.served("prepare")[prepared:] == [("0", "fault_beside")] * 2


def test_an_error_is_measured_once_in_a_run(bench):  # noqa: F811
    bench.run(["wrong"])
    assert results.load(bench.out)["complete"]
    bench.run(["wrong"])
    assert bench.served("prepare") == [("0", "wrong")] * 4


def costly(bench, costs, **changes):  # noqa: F811
    """A run of points with what they are thought to take; the keys of those that were measured."""
    settings = bench.settings(**changes)
    journal = results.Journal(bench.out, bench.head(settings, (STOCK, PATCHED)))
    points = [
        Point(f"slow{i}", (i + 1, 64), "bf16", cost_s=cost_s) for i, cost_s in enumerate(costs)
    ]
    error = None
    try:
        runner.run(points, (STOCK, PATCHED), ("0",), settings, journal)
    except GraftError as found:
        error = found
    return [row["case"] for row in journal.rows], error


def test_nothing_begins_that_would_not_be_done_in_time(bench):  # noqa: F811
    done, error = costly(bench, [1000.0, 0.1, 2000.0, 0.1], seconds=100.0)
    assert done == ["slow1", "slow3"]
    assert "2 of 4 points are not measured within 100 s" in error.message
    assert "goes on where this one ended" in error.next


def test_without_a_limit_everything_begins_in_its_order(bench):  # noqa: F811
    done, error = costly(bench, [1000.0, 0.1])
    assert (done, error) == (["slow0", "slow1"], None)


# A command that has two models of the fake's, on a GPU that is not there.
COMMAND = """
import runpy, sys
from graft.cases import models
from graft.cli import models_command
from graft.cases.models import Model
def entry(name, cost_s, dropout=False):
    return Model(name, "tuned", "vision", "timm.x", "classes", (2, 4), {}, dropout, cost_s)
known = {m.name: m for m in (entry("step_short", 1.0), entry("step_long", 2.0))}
models.catalogue = lambda: known
models_command._libraries = lambda *args: {"timm": "1.0"}
sys.argv[0] = sys.argv[1]
del sys.argv[1]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(bench, *args):  # noqa: F811
    argv = [sys.executable, "-c", COMMAND, str(FAKE), "1", "models", "--out", str(bench.out), *args]
    env = {**bench.env, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)


def test_the_command_begins_with_what_takes_longest_and_goes_on_after_a_cut(bench):  # noqa: F811
    done = command(bench, "--jobs-per-gpu", "1")
    assert done.returncode == 0, done.stderr
    found = results.load(bench.out)
    assert found["complete"]
    assert found["libraries"] == {"timm": "1.0"}
    assert found["commands"] == ["graft bench models --jobs-per-gpu 1"]
    assert [case for _, case in bench.served("prepare")] == ["step_long"] * 2 + ["step_short"] * 2
    assert "mean of 2" in done.stdout
    # As a kill leaves it: a journal with the first row, and no file.
    head = json.dumps({**found, "rows": [], "complete": False})
    row = next(row for row in found["rows"] if row["case"] == "step_long")
    bench.out.unlink()
    results.part_of(bench.out).write_text(f"{head}\n{json.dumps(row)}\n")
    prepared = len(bench.served("prepare"))
    again = command(bench, "--jobs-per-gpu", "1")
    assert again.returncode == 0, again.stderr
    assert bench.served("prepare")[prepared:] == [("0", "step_short")] * 2
    assert results.load(bench.out)["complete"]


# --- kernels -------------------------------------------------------------------------------------


def kernel(name, us, bytes_=0, writes=(), launches=1, **more):
    return {
        "name": f"triton_{name}",
        "us": us,
        "bytes": bytes_,
        "launches": launches,
        "writes": list(writes),
        **more,
    }


def test_kernels_that_write_the_same_values_are_a_group():
    found = {
        "stock": [
            kernel("red_a_00000001", 30.0, 4_000_000, ["b0:sum"]),
            kernel("poi_b_00000002", 40.0, 8_000_000, ["b0:dx"]),
            kernel("poi_c_00000003", 9.0, 2_000_000, ["f0:y"], 2),
        ],
        "patched": [
            kernel("per_d_00000004", 50.0, 10_000_000, ["b0:sum", "b0:dx"], bounds=["masked"]),
            kernel("poi_c_00000003", 9.5, 2_000_000, ["f0:y"], 2),
            kernel("poi_e_00000005", 1.0, 2_000, ["f0:z"]),
        ],
    }
    out = kernel_groups.summary(found, 4000.0)
    assert out == {
        "groups": [
            {
                "limit_us": 2.5,
                "bounds": ["masked"],
                "kernels": [
                    ["red_a_00000001", {"stock": [1, 30.0]}],
                    ["poi_b_00000002", {"stock": [1, 40.0]}],
                    ["per_d_00000004", {"patched": [1, 50.0]}],
                ],
            },
            {
                "limit_us": 1.0,
                "kernels": [["poi_c_00000003", {"stock": [2, 9.0], "patched": [2, 9.5]}]],
            },
        ],
        "others": {"groups": 1, "us": {"stock": 0.0, "patched": 1.0}},
    }


def test_a_long_name_keeps_what_it_begins_with_and_its_hash():
    name = kernel_groups.short_name(f"triton_per_fused_{'native_layer_norm_' * 9}12345678")
    assert re.fullmatch(r"per_fused_(native_|layer_|norm_)*\w*…_12345678", name)
    assert len(name) <= 62
    assert kernel_groups.short_name("triton_poi_fused_add_0a0b0c0d") == "poi_fused_add_0a0b0c0d"


def entry(us, triton_us=10.0, **more):
    spread = {"median": us, "q1": us, "q3": us, "n": 30}
    facts = {"captured": True, "gpu_busy": 0.99, "peak_bytes": 100 << 20}
    return {"us": spread, "triton_us": triton_us, "rest_us": 5.0, **facts, **more}


def row(name, stock, patched, group="tuned", **more):
    times = {"stock": stock, "patched": patched}
    return {"case": name, "group": group, "shape": [2, 4], "dtype": "bf16", "times": times, **more}


def result(*rows, **more):
    return {
        "schema": results.SCHEMA,
        "pin": "v2.11.0",
        "stack_hash": "0" * 64,
        "patches": [],
        "date": "2026-01-01T00:00:00+00:00",
        "commands": ["graft bench models"],
        "clock": {},
        "contenders": {"stock": {}, "patched": {}},
        "gpus": [],
        "rows": list(rows),
        "complete": True,
        **more,
    }


GROUPS = {
    "groups": [
        {"limit_us": 10.0, "kernels": [["poi_a_1", {"stock": [2, 20.0], "patched": [2, 15.0]}]]},
        {
            "limit_us": 10.0,
            "bounds": ["indirect"],
            "kernels": [["red_b_2", {"stock": [1, 50.0]}], ["per_c_3", {"patched": [3, 40.0]}]],
        },
        {"limit_us": 3.0, "kernels": [["poi_only_4", {"stock": [1, 7.0]}]]},
    ]
}


def test_kernels_are_ranked_by_what_they_lose():
    found = models_report.groups(result(row("m", entry(2.0), entry(1.0), generated=GROUPS)))
    assert [group.lost_us for group in found] == [30.0, 5.0, 0.0]
    head, lines = models_report.kernels(found, SIDES)
    cells = [dict(zip(head, line, strict=True)) for line in lines]
    assert cells[0]["kernels"] == "per_c_3"
    assert cells[0]["stock, us"] == "50.0"
    assert cells[0]["stock / patched"] == "1.25"
    assert cells[0]["time / limit"] == "4.00"
    assert cells[0]["launches"] == "3"
    assert cells[0]["bound"] == "indirect"
    # What one side alone computes has no time on the other, and loses nothing there.
    assert (cells[2]["patched, us"], cells[2]["stock, us"]) == ("", "7.0")
    with pytest.raises(GraftError, match="no row has generated kernels"):
        models_report.groups(result(row("m", entry(2.0), entry(1.0))))


def test_a_line_of_the_kernels_fits_into_200_columns():
    long = f"{'x' * 60}_12345678"
    many = [[f"{long}{i}", {"stock": [100, 10000.5], "patched": [100, 10000.5]}] for i in range(30)]
    groups = {"groups": [{"limit_us": 9999.9, "bounds": ["indirect", "masked"], "kernels": many}]}
    found = models_report.groups(
        result(row("efficientnetv3", entry(2.0), entry(1.0), generated=groups))
    )
    _, lines = models_report.kernels(found, SIDES)
    assert sum(len(cell) + 3 for cell in lines[0]) < 200


# --- what lost -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stock", "patched", "words"),
    [
        (entry(100.0), entry(100.9), []),
        (entry(100.0), entry(102.0), ["m: step 2.0% slower, by its graph"]),
        (entry(100.0), entry(99.0, 10.3), ["m: generated kernels 3.0% slower"]),
        (entry(100.0), entry(99.0, peak_bytes=110 << 20), ["m: peak memory 10 MB over stock's"]),
        (entry(100.0), entry(99.0, peak_bytes=101 << 20), []),
        (entry(100.0), entry(99.0, wrong="loss: error 1"), ["m: patched is wrong: loss: error 1"]),
        (entry(100.0, wrong="so"), entry(99.0, wrong="so"), []),
        (
            entry(100.0),
            {"error": {"kind": "oom", "message": "short"}},
            ["m: patched fails: oom: short"],
        ),
        ({"error": {"kind": "error", "message": "neither"}}, entry(99.0), []),
    ],
)
def test_what_is_worse_is_said(stock, patched, words):
    found = models_report.losses([row("m", stock, patched)], SIDES, 0.01)
    assert found == words


def test_a_step_that_the_host_holds_up_is_judged_by_its_kernels():
    launched = {"captured": False, "gpu_busy": 0.5}
    both = row("m", entry(100.0, **launched), entry(150.0, **launched))
    assert models_report.step_kind(both, SIDES) == "kernels"
    assert models_report.step_ratio(both, SIDES) == 1.0
    assert models_report.losses([both], SIDES, 0.01) == []
    for time in both["times"].values():
        time["gpu_busy"] = 0.97
    assert models_report.step_kind(both, SIDES) == "launches"
    assert models_report.step_ratio(both, SIDES) == pytest.approx(2 / 3)


def test_a_step_that_is_shorter_than_its_kernels_is_judged_by_them():
    drawn = {"captured": False, "gpu_busy": 1.57}
    both = row("m", entry(100.0, **drawn), entry(150.0, **{**drawn, "gpu_busy": 1.0}))
    assert models_report.step_kind(both, SIDES) == "kernels"
    assert models_report.losses([both], SIDES, 0.01) == []


def test_a_mean_counts_the_models_that_were_measured():
    failed = {"error": {"kind": "RuntimeError", "message": "it does not compile"}}
    rows = [row("a", entry(100.0), entry(50.0)), row("b", failed, failed)]
    _, lines = models_report.models(rows, SIDES)
    assert lines[-1][0] == "mean of 1"


def test_the_table_has_means_by_group_and_compile_times_where_they_compare():
    rows = [
        row("a", entry(100.0), entry(50.0)),
        row("b", entry(100.0, 40.0), entry(200.0, 10.0)),
        row("c", entry(90.0), entry(30.0, peak_bytes=50 << 20), "held_out"),
    ]
    head, lines = models_report.models(rows, SIDES)
    assert not any(title.startswith("compile") for title in head)
    place = head.index("stock / patched")
    assert [line[place] for line in lines] == ["2.000", "0.500", "3.000", "1.000", "3.000"]
    assert lines[3][:2] == ["mean of 2", "tuned"]
    peaks = [i for i, title in enumerate(head) if title == "stock / patched"][2]
    assert [line[peaks] for line in lines] == ["1.000", "1.000", "2.000", "1.000", "2.000"]
    other = head.index("stock / patched", place + 1)
    assert lines[3][other] == "2.000"
    for time in rows[0]["times"].values():
        time["compile_s"] = 3.25
    head, lines = models_report.models(rows, SIDES)
    assert lines[0][head.index("compile, patched, s")] == "3.2"


def saved(tmp_path, *rows, **more):
    file = tmp_path / "models.json"
    results.save(result(*rows, **more), file)
    return file


@pytest.mark.parametrize(
    ("patched_us", "complete", "code", "words"),
    [
        (99.0, True, 0, ""),
        (105.0, True, 1, "m: step 5.0% slower, by its graph"),
        (99.0, False, 1, "the run is not complete"),
    ],
)
def test_check_exits_by_what_is_worse(tmp_path, patched_us, complete, code, words):
    file = saved(tmp_path, row("m", entry(100.0), entry(patched_us)), complete=complete)
    shown = CliRunner().invoke(bench_command.bench, ["models", "--check", str(file)])
    assert shown.exit_code == code, shown.output
    assert words in shown.output


def test_a_file_of_another_stack_says_so(tmp_path, monkeypatch):
    file = saved(tmp_path, row("m", entry(100.0), entry(99.0), generated=GROUPS))
    monkeypatch.setattr(
        "graft.stack.trees.tree.load", lambda prefix: SimpleNamespace(stack_hash="f" * 64)
    )
    shown = CliRunner().invoke(bench_command.bench, ["models", "--kernels", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "note: measured on 2026-01-01 with stack 000000000000; the tree's is f" in shown.output
    assert "3 groups of kernels" in shown.output
    monkeypatch.setattr(
        "graft.stack.trees.tree.load", lambda prefix: SimpleNamespace(stack_hash="0" * 64)
    )
    shown = CliRunner().invoke(bench_command.bench, ["models", "--kernels", str(file)])
    assert "note" not in shown.output
    wrong = CliRunner().invoke(bench_command.bench, ["models", "--kernels", str(file), "n"])
    assert isinstance(wrong.exception, UsageError)


def test_pages_show_models_and_their_kernels(tmp_path):
    saved(
        tmp_path,
        row("a", entry(100.0), entry(50.0), generated=GROUPS),
        row("b", entry(100.0), entry(50.0), "held_out"),
    )

    def lines(*words):
        return tables.table(["models.json", *words], tmp_path, "page").splitlines()

    assert len(lines("view=models")) == 2 + 2 + 2
    assert [line.split(" ")[1] for line in lines("view=models", "group=held_out")[2:]] == [
        "b",
        "mean",
    ]
    assert len(lines("view=kernels")) == 2 + 3
    assert len(lines("view=kernels", "top=1")) == 2 + 1
    with pytest.raises(GraftError, match="columns is no option"):
        lines("view=models", "columns=stock")
    with pytest.raises(GraftError, match="top=x is no number"):
        lines("view=kernels", "top=x")


# --- what is generated ---------------------------------------------------------------------------


def test_a_file_of_sources_is_named_by_its_kernel(tmp_path):
    found = generated.Generated()
    found.kernels["triton_poi_a_1"] = generated.Kernel("triton_poi_a_1", "code", 8, (), ("f0:a",))
    found.save(tmp_path / "m", [{"name": "triton_poi_a_1", "us": 2.0}])
    first, code = Path(tmp_path / "m" / "triton_poi_a_1.py").read_text().split("\n")
    assert json.loads(first.removeprefix("# ")) == {"name": "triton_poi_a_1", "us": 2.0}
    assert code == "code"
