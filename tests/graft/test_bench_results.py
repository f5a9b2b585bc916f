"""Result files, comparisons, tables and statistics: the parts that are pure."""

import copy
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.bench import agreement, compare, plan, results, shapes, stats, tables
from graft.cli.bench_command import bench
from graft.errors import GraftError, UsageError
from graft.stack import pins


def time(us, **more):
    return {"us": {"median": us, "q1": us * 0.99, "q3": us * 1.01, "n": 50}, **more}


def row(case, shape, stock, patched, dtype="bf16", group="norms14"):
    """A row; a time that is text is the kind of an error."""
    times = {
        label: time(us, sol=round(10 / us, 4))
        if isinstance(us, float)
        else {"error": {"kind": us, "message": "no"}}
        for label, us in (("stock", stock), ("patched", patched))
    }
    out = {"case": case, "group": group, "shape": list(shape), "dtype": dtype, "gpu": "0"}
    out |= {"times": times, "bytes": 4_000_000, "limit_us": 10.0}
    if isinstance(stock, float) and isinstance(patched, float):
        ratio = round(stock / patched, 4)
        out["speedup"] = {"patched": {"median": ratio, "q1": ratio, "q3": ratio, "n": 10}}
    return out


def result(*rows, **changes):
    about = {"impl": "compile", "knobs": {}, "torch": "2.11.0+cu130", "triton": "3.6.0"}
    return {
        "schema": results.SCHEMA,
        "pin": "v2.11.0",
        "stack_hash": "ab" * 32,
        "patches": ["one.patch"],
        "date": "2026-01-01T00:00:00+00:00",
        "commands": ["graft bench rms_norm_backward --shapes norms14"],
        "clock": {"rounds": 10, "samples": 5, "serial": False},
        "contenders": {"stock": dict(about), "patched": dict(about)},
        "gpus": [
            {
                "index": "0",
                "name": "NVIDIA H200",
                "driver": "580.1",
                "copy_gb_per_s": {"median": 4250.0, "q1": 4240.0, "q3": 4260.0, "n": 30},
            }
        ],
        "complete": True,
        "rows": list(rows),
        **changes,
    }


def saved(path, *rows, **changes):
    results.save(result(*rows, **changes), path)
    return path


# --- statistics --------------------------------------------------------------------------------


def test_spread_has_median_and_quartiles():
    assert stats.spread([5, 1, 4, 2, 3]) == stats.Spread(3, 2, 4, 5)
    assert stats.spread([7.0]).q3 == 7.0
    with pytest.raises(ValueError, match="no samples"):
        stats.spread([])


@given(
    st.lists(st.floats(1, 1e6), min_size=2, max_size=20),
    st.floats(0.1, 10),
    st.lists(st.floats(0.5, 2), min_size=20, max_size=20),
)
def test_a_drift_of_both_sides_leaves_the_paired_ratio(times, factor, drift):
    base = [[t * d] * 3 for t, d in zip(times, drift, strict=False)]
    other = [[t * d / factor] * 3 for t, d in zip(times, drift, strict=False)]
    assert stats.paired_ratio(base, other).median == pytest.approx(factor)


def test_rounds_that_are_not_paired_are_refused():
    with pytest.raises(ValueError, match="not paired"):
        stats.paired_ratio([[1.0]], [[1.0], [2.0]])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1))
def test_the_geometric_mean_of_ratios_and_of_their_inverses_agree(values):
    assert stats.geomean(values) * stats.geomean(1 / v for v in values) == pytest.approx(1)


# --- shapes and plans --------------------------------------------------------------------------


def test_the_grid_is_as_large_and_as_wide_as_it_says():
    grid = shapes.GRID
    assert len(grid) == len(set(grid)) >= 300
    rows, columns = {m for m, _ in grid}, {n for _, n in grid}
    assert (min(rows), max(rows)) == (256, 2**20)
    assert (min(columns), max(columns)) == (64, 16384)
    assert sum(m % 2 for m, _ in grid) > 100
    assert sum(n % 2 for _, n in grid) > 20


def quarters(found):
    """How many shapes lie in each quarter of the plane, by the logarithms of their sizes."""
    counts = {}
    for m, n in found:
        quarter = (m >= 2**13, n >= 2**10)
        counts[quarter] = counts.get(quarter, 0) + 1
    return [counts.get((high, wide), 0) for high in (False, True) for wide in (False, True)]


def test_any_part_of_the_grid_has_shapes_from_everywhere():
    every = [count / len(shapes.GRID) for count in quarters(shapes.GRID)]
    for start in range(0, len(shapes.GRID) - 90, 45):
        part = shapes.GRID[start : start + 90]
        assert quarters(part) == pytest.approx([count * 90 for count in every], abs=16)


def test_shapes_held_out_are_a_third_from_everywhere():
    fitted, held_out = shapes.GRID_FITTED, shapes.GRID_HELD_OUT
    assert sorted(fitted + held_out) == sorted(shapes.GRID)
    assert len(held_out) == pytest.approx(len(shapes.GRID) / 3, abs=1)
    assert min(quarters(held_out)) > 20
    # The split is cited with figures: it does not move.
    assert held_out[:3] == ((131072, 1536), (3073, 1536), (524288, 64))


def test_a_cut_run_has_some_of_each_case():
    def points(case):
        return [plan.Point(case, (i, 1), dtype) for i in range(2) for dtype in ("bf16", "fp32")]

    turns = plan.in_turn([*points("a"), *points("b")])
    rows = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert [(point.dtype, point.case, point.shape[0]) for point in turns] == [
        (dtype, *row) for dtype in ("bf16", "fp32") for row in rows
    ]


def test_shapes_resolve_groups_and_literals_and_name_what_they_are_not():
    own = {"default": [(8, 4)], "mine": [(1, 2), (3, 4)]}
    assert shapes.resolve("mine,5x6", own, "c") == [
        ("mine", (1, 2)),
        ("mine", (3, 4)),
        ("given", (5, 6)),
    ]
    assert len(shapes.resolve("norms14", own, "c")) == 14
    for wrong, words in (("nope", "no shape group 'nope'"), ("5x6x7", "of the form MxN")):
        with pytest.raises(UsageError, match=words):
            shapes.resolve(wrong, own, "c")
    with pytest.raises(UsageError, match="norms14"):
        shapes.resolve("norms14", {"default": [(1, 2, 3)]}, "c")


PYTHONS = {"stock": ["/a/python"], "patched": ["/b/python"]}


def test_contenders_take_their_side_and_their_knobs():
    found = plan.contenders(
        "stock,patched,off=patched,liger",
        PYTHONS,
        ["triton.x=3", "off:triton.x=None", "stock:y='a'", "z=word"],
    )
    assert [(c.label, c.impl, c.python[0]) for c in found] == [
        ("stock", "compile", "/a/python"),
        ("patched", "compile", "/b/python"),
        ("off", "compile", "/b/python"),
        ("liger", "liger", "/a/python"),
    ]
    assert [dict(c.knobs) for c in found] == [
        {"y": "a"},
        {"triton.x": 3, "z": "word"},
        {"triton.x": None},
        {},
    ]


@pytest.mark.parametrize(
    ("against", "settings", "words"),
    [
        ("stock,nobody", [], "'nobody' is no contender"),
        ("stock,stock", [], "named twice"),
        ("", [], "names nobody"),
        ("stock", ["x"], "expected knob=value"),
        ("stock", ["x=1"], "no contender 'patched'"),
        ("stock,eager", ["eager:x=1"], "has no knobs"),
    ],
)
def test_contenders_that_make_no_sense_are_named(against, settings, words):
    with pytest.raises(UsageError, match=words):
        plan.contenders(against, PYTHONS, settings)


# --- result files ------------------------------------------------------------------------------


def test_a_result_is_read_as_it_was_written(tmp_path):
    data = result(row("rms", (4, 8), 2.0, 1.0))
    results.save(data, tmp_path / "r.json")
    assert results.load(tmp_path / "r.json") == data
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_a_row_is_a_line(tmp_path):
    path = saved(tmp_path / "r.json", *(row("rms", (i, 8), 2.0, 1.0) for i in range(5)))
    lines = path.read_text().splitlines()
    assert sum(line.startswith('  {"case"') for line in lines) == 5


def test_a_file_cut_off_anywhere_is_named(tmp_path):
    path = saved(tmp_path / "r.json", row("rms", (4, 8), 2.0, 1.0))
    whole = path.read_text().rstrip()
    for cut in range(0, len(whole), 97):
        path.write_text(whole[:cut])
        with pytest.raises(GraftError, match=r"r\.json: cut off or damaged") as error:
            results.load(path)
        assert "--out" in error.value.next


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d.update(schema=99), "schema 99, expected 1"),
        (lambda d: d.pop("pin"), "pin is None, expected str"),
        (lambda d: d["rows"][0].pop("times"), "row 0: times"),
        (lambda d: d["rows"][0]["times"].update(x=time(1.0)), "x, no contender"),
        (lambda d: d["rows"][0]["times"].update(stock={}), "row 0, stock: no time"),
    ],
)
def test_a_damaged_file_is_named_with_the_field(tmp_path, damage, words):
    data = result(row("rms", (4, 8), 2.0, 1.0))
    damage(data)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(data))
    with pytest.raises(GraftError, match=words) as error:
        results.load(path)
    assert "r.json" in error.value.message


def head(**changes):
    data = result(**changes)
    return {name: value for name, value in data.items() if name != "rows"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pin": "v2.12.0"}, "pin is 'v2.11.0' there and 'v2.12.0' here"),
        ({"stack_hash": "cd" * 32}, "stack_hash"),
        ({"contenders": {"stock": {"impl": "compile", "knobs": {"x": 1}}}}, "contenders"),
    ],
)
def test_a_run_does_not_go_on_in_the_file_of_another(tmp_path, changes, words):
    path = saved(tmp_path / "r.json", row("rms", (4, 8), 2.0, 1.0))
    with pytest.raises(GraftError, match=words) as error:
        results.Journal(path, head(**changes))
    assert "--again" in error.value.next
    assert not results.Journal(path, head(**changes), again=True).done


def test_what_is_no_result_is_not_to_be_written_over(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("# Results\n")
    with pytest.raises(GraftError, match="cut off or damaged") as wrong:
        results.load(path)
    assert wrong.value.next.endswith("graft bench CASES --out FILE")


def test_two_commands_fill_one_file(tmp_path):
    path = tmp_path / "r.json"
    for i, command in enumerate(["graft bench a", "graft bench b"]):
        journal = results.Journal(path, head(commands=[command]))
        journal.append(row("rms", (i + 1, 8), 2.0, 1.0))
        journal.fold({}, [])
    data = results.load(path)
    assert data["commands"] == ["graft bench a", "graft bench b"]
    assert len(data["rows"]) == 2


@settings(deadline=None)  # it waits for the disk
@given(cut=st.integers(1, 400))
def test_a_journal_survives_a_cut_at_any_byte(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("journal") / "r.json"
    journal = results.Journal(path, head())
    for i in range(3):
        journal.append(row("rms", (i + 1, 8), 2.0, 1.0))
    part = path.with_name("r.json.part")
    text = part.read_text()
    part.write_text(text[:-cut])
    again = results.Journal(path, head())
    again.append(row("rms", (9, 8), 2.0, 1.0))
    kept = results.Journal(path, head()).done
    assert "rms 9x8 bf16" in kept
    assert "rms 1x8 bf16" in kept
    assert len(kept) >= 3 - cut // 300


# --- comparisons -------------------------------------------------------------------------------


def sides(tmp_path, before, after):
    saved(tmp_path / "a.json", *before)
    saved(tmp_path / "b.json", *after)
    return (
        compare.parse_side(str(tmp_path / "a.json"), "patched"),
        compare.parse_side(str(tmp_path / "b.json"), "patched"),
    )


def test_compare_finds_who_won_lost_broke_and_is_missing(tmp_path):
    before = [row("c", (i, 8), 9.0, 10.0) for i in range(1, 6)]
    after = [
        row("c", (1, 8), 9.0, 5.0),
        row("c", (2, 8), 9.0, 10.1),
        row("c", (3, 8), 9.0, 12.0),
        row("c", (4, 8), 9.0, "wrong"),
    ]
    found = compare.compare(*sides(tmp_path, before, after))
    assert [change.key for change in found.losses(0.02)] == ["c 3x8 bf16"]
    assert [change.key for change in found.wins(0.02)] == ["c 1x8 bf16"]
    assert found.broken == (("c 4x8 bf16", "wrong: no"),)
    assert found.missing == ("c 5x8 bf16",)
    text = compare.render(found, 0.02)
    assert "won  100.0%  c 1x8 bf16: 10.0 -> 5.0 us" in text
    assert "lost  20.0%  c 3x8 bf16: 10.0 -> 12.0 us" in text
    assert "B won 1 and lost 1 by more than 2.0%" in text
    assert "fails in B  c 4x8 bf16: wrong: no" in text
    assert "1 points of A have no time in B: c (1)" in text
    assert re.search(r"^  c \(norms14\) +1\.182 +3  0\.833 3x8 bf16  2\.000 1x8 bf16$", text, re.M)
    assert compare.failed(found, 0.25)  # broken
    clean = compare.compare(*sides(tmp_path, before[:3], after[:3]))
    assert compare.failed(clean, 0.02)
    assert not compare.failed(clean, 0.25)


def test_two_runs_of_the_same_thing_say_how_well_they_agree(tmp_path):
    first = [row("c", (i, 8), 100.0, 50.0) for i in range(1, 6)]
    again = [row("c", (i, 8), 100.0 + i, 50.0 + i / 2) for i in range(1, 6)]
    again[4] = row("c", (5, 8), 100.0, 60.0)
    a, b = sides(tmp_path, first, again)
    found = {(r.what, r.key): r.apart for r in agreement.repeats(a.result, b.result)}
    assert len(found) == 5 * 3
    assert found["stock", "c 3x8 bf16"] == pytest.approx(0.03)
    assert found["patched", "c 5x8 bf16"] == pytest.approx(0.2)
    assert found["stock / patched", "c 3x8 bf16"] == pytest.approx(0)
    assert found["stock / patched", "c 5x8 bf16"] == pytest.approx(0.2, abs=1e-3)
    text = compare.render(compare.compare(a, b), 0.02)
    assert "  c  stock              2.0%    4.0% at 4x8 bf16, n 5" in text
    assert "two runs agree within 2.5% in the median case (times)" in text
    assert "two runs agree within 0.0% in the median case (ratios)" in text
    assert "1 of 5 over 2.0%\n   20.0%  c 5x8 bf16, stock / patched: 2 and 1.667" in text


def test_only_what_is_the_same_was_run_twice(tmp_path):
    rows = [row("c", (1, 8), 1.0, 1.0)]
    before = result(*rows)
    assert agreement.repeated(before, before) == ["stock", "patched"]
    assert agreement.repeated(before, result(*rows, stack_hash="cd" * 32)) == ["stock"]
    other = copy.deepcopy(before["contenders"])
    other["stock"]["triton"] = "3.7.0"
    other["patched"]["knobs"] = {"x": 1}
    assert agreement.repeated(before, result(*rows, contenders=other)) == []
    # Stock against patched of one file is no repetition.
    path = saved(tmp_path / "a.json", *rows)
    one, two = (compare.parse_side(f"{path}:{label}", "") for label in ("stock", "patched"))
    assert "run twice" not in compare.render(compare.compare(one, two), 0.02)


def test_within_a_file_the_paired_ratio_counts(tmp_path):
    data = row("c", (1, 8), 10.0, 10.0)
    data["speedup"]["patched"]["median"] = 0.5
    path = saved(tmp_path / "a.json", data)
    stock, patched = (compare.parse_side(f"{path}:{label}", "") for label in ("stock", "patched"))
    assert compare.compare(stock, patched).changes[0].ratio == 0.5
    assert compare.compare(patched, stock).changes[0].ratio == 2.0


def test_the_same_code_neither_wins_nor_loses(tmp_path):
    def coded(row, code):
        for time in row["times"].values():
            time["code"] = code
        return row

    before = [coded(row("c", (i, 8), 9.0, 10.0), "abc") for i in range(1, 4)]
    after = [
        coded(row("c", (1, 8), 9.0, 12.0), "abc"),
        coded(row("c", (2, 8), 9.0, 10.1), "abc"),
        coded(row("c", (3, 8), 9.0, 12.0), "other"),
    ]
    found = compare.compare(*sides(tmp_path, before, after))
    assert [change.key for change in found.losses(0.02)] == ["c 3x8 bf16"]
    text = compare.render(found, 0.02)
    assert "same code at 2 points: 0.908, from 0.833 to 0.990; 1 apart by more than 2.0%" in text
    assert not compare.failed(compare.compare(*sides(tmp_path, before[:2], after[:2])), 0.02)


def test_files_of_other_pins_or_gpus_do_not_compare(tmp_path):
    rows = [row("c", (1, 8), 1.0, 1.0)]
    a = compare.parse_side(str(saved(tmp_path / "a.json", *rows)), "patched")
    other_pin = saved(tmp_path / "b.json", *rows, pin="v2.12.0")
    b = compare.parse_side(str(other_pin), "patched")
    with pytest.raises(GraftError, match=r"b\.json is of pin v2\.12\.0, .*a\.json of v2\.11\.0"):
        compare.compare(a, b)
    assert compare.compare(a, b, across_pins=True).changes
    gpus = copy.deepcopy(result()["gpus"])
    gpus.append({"index": "1", "error": "no such device"})  # took no part
    d = compare.parse_side(str(saved(tmp_path / "d.json", *rows, gpus=gpus)), "patched")
    assert compare.compare(a, d).changes
    gpus[0]["name"] = "NVIDIA A100"
    c = compare.parse_side(str(saved(tmp_path / "c.json", *rows, gpus=gpus)), "patched")
    with pytest.raises(GraftError, match="of GPU NVIDIA A100"):
        compare.compare(a, c)


def test_the_compare_command_exits_by_what_was_lost(tmp_path):
    a = saved(tmp_path / "a.json", row("c", (1, 8), 9.0, 10.0))
    b = saved(tmp_path / "b.json", row("c", (1, 8), 9.0, 10.3))
    run = CliRunner().invoke
    assert run(bench, ["compare", str(a), str(b)]).exit_code == 1
    assert run(bench, ["compare", str(a), str(b), "--max-loss", "5%"]).exit_code == 0
    assert run(bench, ["compare", f"{a}:patched", f"{a}:stock"]).exit_code == 0
    wrong = run(bench, ["compare", str(a), f"{b}:nobody"])
    assert isinstance(wrong.exception, UsageError)
    assert isinstance(
        run(bench, ["compare", str(a), str(b), "--max-loss", "lots"]).exception, UsageError
    )


# --- tables ------------------------------------------------------------------------------------

PAGE = """# Page

<!-- table: r.json case=rms dtype=bf16 -->
<!-- /table -->

    <!-- table: not one, it is indented -->

<!-- table: r.json view=cases -->
old text
<!-- /table -->
"""


@pytest.fixture
def pages(tmp_path):
    saved(
        tmp_path / "r.json",
        row("rms", (4, 8), 2.0, 1.0),
        row("rms", (8, 8), 3.0, "oom"),
        row("layer", (4, 8), 2.0, 4.0, dtype="fp32"),
    )
    (tmp_path / "README.md").write_text(PAGE)
    return tmp_path


def test_tables_are_written_from_files_and_then_agree(pages):
    ((page, _, due),) = tables.stale(pages)
    assert "| shape | limit, us | stock, us | patched, us | stock / patched | SOL, patched |" in due
    assert "| 4x8 | 10.0 | 2.0 | 1.0 | 2.00 | 1000% |" in due
    assert "| 8x8 | 10.0 | 3.0 | oom |  |  |" in due
    assert "| layer | fp32 | 1 | 0.500 | 0.500 | 4x8 |  |" in due
    assert "| rms | bf16 | 2 | 2.000 | 2.000 | 4x8 | patched: 1 |" in due
    assert "old text" not in due
    page.write_text(due)
    assert not list(tables.stale(pages))
    saved(pages / "r.json", row("rms", (4, 8), 2.5, 1.0), row("layer", (4, 8), 2.0, 4.0))
    assert list(tables.stale(pages))


@pytest.mark.parametrize(
    ("marker", "words"),
    [
        ("<!-- table: r.json -->\n", "lack <!-- /table -->"),
        ("<!-- table: r.json bad=1 -->\n<!-- /table -->\n", "bad is no option"),
        ("<!-- table: r.json case=none -->\n<!-- /table -->\n", "has no row"),
        ("<!-- table: r.json columns=helion -->\n<!-- /table -->\n", "has no contender helion"),
        ("<!-- table: none.json -->\n<!-- /table -->\n", "No such file"),
        ("<!-- table: r.json view=pie -->\n<!-- /table -->\n", "expected rows, cases, sentence"),
        ("<!-- table: r.json view=sentence of=a to=b -->\n<!-- /table -->\n", "has no contender"),
        ("<!-- table: r.json columns=stock view=sentence -->\n<!-- /table -->\n", "columns is no"),
        ("<!-- table: r.json r.json -->\n<!-- /table -->\n", "view=rows is of one file"),
        ("<!-- table: view=rows -->\n<!-- /table -->\n", "names no result file"),
    ],
)
def test_a_marker_that_means_nothing_is_named(pages, marker, words):
    (pages / "README.md").write_text(marker)
    with pytest.raises(GraftError, match=words):
        list(tables.stale(pages))


def test_the_tables_of_this_repository_agree_with_their_files():
    assert [page.name for page, _, _ in tables.stale(pins.ROOT)] == []


def test_a_table_of_two_runs_says_how_far_apart_they_are(tmp_path):
    first = [row("c", (4, 4), 10.0, 5.0), row("c", (8, 8), 20.0, 10.0), row("c", (2, 2), 1.0, 1.0)]
    second = [row("c", (4, 4), 10.0, 5.0), row("c", (8, 8), 22.0, 10.0), row("c", (9, 9), 1.0, 1.0)]
    results.save(result(*first), tmp_path / "a.json")
    results.save(result(*second), tmp_path / "b.json")
    spec = ["a.json", "view=agreement", "again=b.json"]
    assert tables.table(spec, tmp_path, "page").splitlines()[2:] == [
        "| c | stock | 2 | 5.0% | 10.0% | 8x8 |",
        "| c | patched | 2 | 0.0% | 0.0% | 4x4 |",
        "| c | stock / patched | 2 | 5.0% | 10.0% | 8x8 |",
    ]
    for wrong in (spec[:2], [*spec, "dtype=bf16"]):
        with pytest.raises(GraftError, match="takes again=FILE and no more"):
            tables.table(wrong, tmp_path, "page")


def test_committed_results_are_results_without_machine_paths():
    folder = Path(pins.ROOT, "bench", "results")
    for path in [*folder.rglob("*.json"), *folder.rglob("*.json.gz")]:
        if path.parent == folder:
            results.load(path)
        text = results.read_text(path)
        assert "/home/" not in text
        assert "/root" not in text
        assert "/tmp" not in text


def test_a_training_step_shows_its_split(tmp_path):
    step = row("llama_step", (4, 2048), 900.0, 800.0)
    step["times"]["stock"] |= {"triton_us": 300.4, "rest_us": 600.0}
    saved(tmp_path / "r.json", step)
    text = tables.table(["r.json"], tmp_path, "page")
    assert "| Triton, stock, us | rest, stock, us |" in text
    assert "| 300 | 600 |" in text
