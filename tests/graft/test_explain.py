"""Stock against patched: what is compared, what is printed, and what is said when it fails."""

import io
import json
import sys
from importlib.util import find_spec

import click.testing
import pytest
from rich.console import Console

from graft.cli import explain_command, graft
from graft.errors import GraftError, UsageError
from graft.lab import explain, explain_screen
from graft.lab.worker import Request

# --- answers as a worker gives them --------------------------------------------------------------


def kernel(key, kind="pointwise", launches=1, loads=3, sums=0, nbytes=1_000_000, name=None):
    return {
        "key": key,
        "name": name or f"triton_{kind}_{key}",
        "kind": kind,
        "launches": launches,
        "load_count": loads,
        "partial_sums": sums,
        "bytes": nbytes,
        "xnumel": 4096,
        "rnumel": 512,
        "source": "",
    }


def assembly(registers=32, spill=0, occupancy=1.0, error=None):
    return {
        "registers_per_thread": registers,
        "spill_bytes": spill,
        "occupancy": occupancy,
        "error": error,
    }


def answer(*kernels, assemblies=None, refusals=(), times=None, wrapper="def call(): ..."):
    return {
        "gpu": "NVIDIA H200",
        "compiled": [
            {
                "name": "backward",
                "wrapper": wrapper,
                "kernels": list(kernels),
                "metrics": {"codegen_mix_order_reduction": 1},
                "refusals": [{"reason": reason, "pairs": pairs} for reason, pairs in refusals],
                "extern_calls": 2,
                "seconds": 1.5,
            }
        ],
        "assemblies": assemblies or {},
        "times_us": times or {},
    }


def report(stock, patched, described=True):
    return explain.Report(
        "a_case", (4096, 512), "bf16", "NVIDIA H200", described,
        explain.Side(stock), explain.Side(patched),
    )  # fmt: skip


WIDE = kernel("wide", "mix-order", launches=2, loads=18, sums=1, nbytes=900_000_000)
NARROW = kernel("narrow", "mix-order", launches=2, loads=9, sums=1, nbytes=400_000_000)
SPLIT = kernel("split", launches=2, nbytes=600_000_000)
CAST = kernel("cast", launches=3)
CHANGED = report(
    answer(WIDE, CAST, assemblies={"wide": [assembly(255, 16, 0.125), assembly(200, 0, 0.25)]}),
    answer(
        NARROW,
        SPLIT,
        CAST,
        assemblies={"narrow": [assembly(80, 0, 0.375)]},
        refusals=[
            ("reads 11 buffers, more than 10", [["op1", "op2"]]),
            ("reads 26 buffers, more than 10", [["op3", "op4"], ["op3", "op5"]]),
        ],
    ),
)


def printed(*args, width=150, **options):
    console = Console(width=width, record=True, file=io.StringIO())
    explain_screen.show(*args, console, **options)
    return console.export_text()


# --- what is compared ----------------------------------------------------------------------------


def test_kernels_are_gone_new_or_the_same():
    assert [k.key for k in CHANGED.gone] == ["wide"]
    assert [k.key for k in CHANGED.new] == ["narrow", "split"]
    assert [k.key for k in CHANGED.same] == ["cast"]


def test_a_kernel_s_launches_are_those_of_all_its_names():
    both = answer(kernel("a", name="triton_0"), kernel("a", launches=4, name="triton_7"))
    (only,) = explain.Side(both).kernels
    assert only.launches == 5
    assert only.time_us is None


def test_times_of_all_its_names_are_added():
    both = answer(
        kernel("a", name="triton_0"),
        kernel("a", name="triton_7"),
        times={"triton_0": 1.5, "triton_7": 2.0, "gemm": 9.0},
    )
    (only,) = explain.Side(both).kernels
    assert only.time_us == 3.5


def test_configurations_that_do_not_compile_do_not_count():
    side = explain.Side(
        answer(CAST, assemblies={"cast": [assembly(0, 999, 0.0, "no"), assembly(40)]})
    )
    (only,) = side.kernels
    assert only.taken("registers_per_thread") == [40]
    assert only.spill_bytes == 0


def test_a_kernel_that_does_not_compile_is_named():
    broken = answer(CAST, WIDE, assemblies={"cast": [assembly(error="no"), assembly(error="no")]})
    assert [k.key for k in explain.Side(broken).uncompilable] == ["cast"]
    assert "patched: triton_pointwise_cast does not compile: no" in printed(
        report(answer(CAST, WIDE), broken)
    )
    assert "does not compile" not in printed(report(answer(CAST), answer(CAST)))


# --- what is printed -----------------------------------------------------------------------------


def row(text, label):
    (line,) = [line for line in text.splitlines() if label in line]
    return line.split(label)[1].split()


def test_the_screen_shows_what_changed_first():
    text = printed(CHANGED)
    assert "a_case 4096 x 512 bf16 on NVIDIA H200, described" in text
    assert row(text, "launches of generated kernels") == ["5", "7"]
    assert row(text, "most loads of a mix-order kernel") == ["18", "9"]
    assert row(text, "most registers a thread of a mix-order kernel") == ["255", "80"]
    assert row(text, "launches of kernels that spill") == ["2", "0"]
    assert row(text, "their partial sums") == ["2", "2"]
    assert row(text, "bytes that they move, GB") == ["1.80", "2.00"]
    assert "changed: 1 kernels gone, 2 new" in text
    lines = [line for line in text.splitlines() if line[:1] in "+-" and line.strip()]
    assert [line[0] for line in lines] == ["-", "+", "+"]
    assert "200-255" in lines[0]
    assert "12-25%" in lines[0]
    assert "cast" not in text


@pytest.mark.parametrize(
    ("gone", "new", "shown"), [(20, 20, "------++++++"), (2, 20, "--" + 10 * "+")]
)
def test_the_screen_shows_of_both_sides(gone, new, shown):
    sides = [
        answer(*(dict(CAST, key=f"{side}{number}") for number in range(count)))
        for side, count in (("stock", gone), ("patched", new))
    ]
    text = printed(report(*sides))
    lines = [line[0] for line in text.splitlines() if line[:2] in ("+ ", "- ")]
    assert "".join(lines) == shown
    assert f"and {gone + new - len(shown)} more" in text


def test_reasons_that_differ_in_a_number_are_one_row():
    assert row(printed(CHANGED), "reads 11-26 buffers, more than 10") == ["0", "3"]


def test_a_reason_may_hold_braces():
    one = answer(CAST, refusals=[("memory deps {c0: 5} did not match", [["op1", "op2"]])])
    assert "memory deps {c0: 5} did not match" in printed(report(one, one))


def test_without_a_change_it_says_so_and_shows_the_kernels():
    text = printed(report(answer(WIDE, CAST), answer(WIDE, CAST)))
    assert "the stack changes no kernel of it" in text
    assert "mix-order_wide" in text
    assert "pointwise_cast" in text


def test_it_is_one_screen_until_all_is_asked_for():
    many = [kernel(f"k{i}") for i in range(60)]
    changed = report(answer(*many), answer(WIDE))
    assert len(printed(changed).splitlines()) < 45
    assert "and 49 more" in printed(changed)
    assert (
        sum("pointwise_k" in line for line in printed(changed, every_kernel=True).splitlines())
        == 60
    )


def test_times_are_shown_on_a_real_gpu_only():
    timed = answer(CAST, times={CAST["name"]: 1500.0, "gemm": 500.0})
    assert row(printed(report(timed, timed, described=False)), "GPU time of a step, ms") == [
        "2.000",
        "2.000",
    ]
    assert "GPU time" not in printed(CHANGED)


def test_a_legend_says_what_the_columns_are_and_that_none_is_a_time():
    legend = " ".join(printed(CHANGED).partition("columns: ")[2].split("refused")[0].split())
    for word in ("MB", "registers", "spilled bytes", "warps", "are no loss", "times need a GPU"):
        assert word in legend
    assert "us of all calls" not in legend
    timed = report(
        answer(WIDE, times={WIDE["name"]: 1.0}), answer(NARROW, times={"x": 1.0}), described=False
    )
    legend = " ".join(printed(timed).partition("columns: ")[2].split())
    assert "us of all calls" in legend
    assert "are no loss" not in legend


HEADINGS = ["kernel", *explain_screen._COLUMNS]
LONG = "fused_native_layer_norm_native_layer_norm_backward_add_mul_select_view"
REAL_SIZES = [
    dict(kernel(f"k{i}", "mix-order", 11, 18, 7, 1_610_600_000, f"triton_per_{LONG}_{i}"))
    | {"xnumel": 201_326_592, "rnumel": 40_960}
    for i in range(20)
]
REAL = report(
    answer(*REAL_SIZES, CAST, assemblies={"k3": [assembly(255, 4096, 0.75), assembly(31)]}),
    answer(CAST),
)


def table(text):
    """The headings of the first table of kernels, and its rows as lists of words."""
    lines = text.splitlines()
    (first, *_) = (i for i, line in enumerate(lines) if line.startswith("  kernel "))
    rows = [line for line in lines[first + 1 :] if line[:2] in ("- ", "+ ")]
    return lines[first].split(), rows


@pytest.mark.parametrize("width", [60, 80, 100, 120, 300])
def test_a_column_is_shown_whole_or_left_out_and_named(width):
    text = printed(REAL, width=width)
    headings, rows = table(text)
    assert headings == [title for title in HEADINGS if title in headings]
    assert len(rows) == 12
    assert all(len(line) <= width for line in text.splitlines())
    missing = [title for title in HEADINGS if title not in headings and title != "us"]
    if width == 300:
        assert missing == []
        assert f"- per_{LONG}_0 " in text
    else:
        # Most of a name would be no use without its number, the kernel's own.
        assert all(f"…_{i} " in text for i in range(12))
    if missing:
        note = f"and 8 more; {width} columns have no room for {', '.join(missing)}"
        assert note in " ".join(text.split())
    # A cut number would be another number.
    (kernel_3,) = [line.split() for line in rows if "_3 " in line]
    sizes = ["11", "mix-order", "201326592", "40960", "18", "7"]
    resources = ["1610.6", "31-255", "0-4096", "75-100%"]
    cells = dict(zip(HEADINGS[1:], sizes + resources, strict=False))
    assert kernel_3[2:] == [cells[title] for title in headings[1:]]


def test_eighty_columns_show_loads_bytes_registers_and_spills():
    headings, rows = table(printed(REAL, width=80))
    assert {"kernel", "calls", "kind", "loads", "MB", "regs", "spill"} <= set(headings)
    assert len(rows[0].split()[1]) >= 20


def test_a_time_goes_last():
    times = {kernel["name"]: 1234.5 for kernel in REAL_SIZES}
    timed = report(answer(*REAL_SIZES, times=times), answer(CAST), described=False)
    headings, rows = table(printed(timed, width=32))
    assert headings == ["kernel", "us"]
    assert rows[0].split()[-1] == "1234.5"


def test_nothing_is_said_of_kernels_that_stay_where_none_does():
    all_new = report(answer(WIDE), answer(NARROW))
    text = printed(all_new, every_kernel=True)
    assert text.count("xnumel") == 1
    assert printed(CHANGED, every_kernel=True).count("xnumel") == 2


def test_a_file_or_a_pipe_gets_whole_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(explain_command.tree, "pythons", lambda prefix: PYTHONS)
    monkeypatch.setattr(explain, "real_gpu", lambda: None)
    monkeypatch.setattr(explain, "explain", lambda *args, **options: REAL)
    text = run("rms_norm_backward", "--kernels").output
    headings, rows = table(text)
    assert headings == [title for title in HEADINGS if title != "us"]
    assert [line.split()[1] for line in rows] == [f"per_{LONG}_{i}" for i in range(20)]
    assert "no room for" not in text


def test_a_terminal_is_as_wide_as_it_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert explain_screen.console().width == 90


# --- the check -----------------------------------------------------------------------------------


def test_comments_and_blank_lines_are_no_difference():
    real = answer(CAST, wrapper="# kernel path: /a\ndef call():\n\n    run()\n")
    lab = answer(CAST, wrapper="# kernel path: /b\ndef call():\n    run()\n")
    found = explain.compare("a_case", "stock", real, lab)
    assert found.is_same
    assert (found.graphs, found.kernels) == (1, 1)


def test_other_code_is_shown():
    real = answer(CAST, wrapper="def call():\n    run(1)\n")
    lab = answer(CAST, wrapper="def call():\n    run(2)\n")
    found = explain.compare("a_case", "stock", real, lab)
    assert not found.is_same
    assert "-    run(1)" in found.difference
    assert "+    run(2)" in found.difference


def test_other_graphs_are_a_difference():
    lab = answer(CAST)
    lab["compiled"] = []
    assert "graphs ['backward'] on the GPU, [] offline" in (
        explain.compare("a_case", "stock", answer(CAST), lab).difference
    )


def test_the_check_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(GraftError, match="no GPU that torch can use"):
        explain.check({}, ["rms_norm_backward"])


def test_the_check_returns_one_where_they_differ(monkeypatch, capsys):
    checks = [
        explain.Check("a_case", "stock", 2, 9, None),
        explain.Check("a_case", "patched", 2, 9, "-    run(1)\n+    run(2)"),
    ]
    monkeypatch.setattr(explain_command.tree, "pythons", lambda prefix: {})
    monkeypatch.setattr(explain_command.devices, "present", lambda: None)
    monkeypatch.setattr(explain, "real_gpu", lambda: "NVIDIA H200")
    monkeypatch.setattr(explain, "check", lambda *args, **options: checks)
    assert explain_command.check("build", None, "bf16") == 1
    out = capsys.readouterr().out
    assert "1 of 2: compiled offline for NVIDIA H200, the code is what was generated on it" in out
    assert "run(2)" in out
    checks.pop()
    assert explain_command.check("build", None, "bf16") == 0


def test_a_check_without_a_gpu_names_the_case(monkeypatch):
    def present():
        raise GraftError("no GPU")

    monkeypatch.setattr(explain_command.tree, "pythons", lambda prefix: {})
    monkeypatch.setattr(explain_command.devices, "present", present)
    with pytest.raises(GraftError, match="no GPU") as wrong:
        explain_command.check("build", "rms_norm", "bf16")
    assert wrong.value.next == "graft explain rms_norm --gpu H200"


# --- workers -------------------------------------------------------------------------------------

PYTHONS = {"stock": [sys.executable], "patched": [sys.executable]}


@pytest.fixture(scope="module")
def real():
    """One request, answered by two processes."""
    return explain.explain(PYTHONS, "rms_norm_backward", shape=(8192, 768), gpu="H100")


def test_both_sides_answer(real):
    assert real.gpu == "NVIDIA H100 80GB HBM3"
    assert real.described
    assert [k.key for k in real.gone + real.new] == []
    # what finishes the column sums: a kernel with the stack, the wrapper and a cast without
    finish = "looped" if find_spec("torch._inductor.mix_order_row_split") else "pointwise"
    assert [k.kind for k in real.same] == ["mix-order", finish]
    assert real.stock.compile_seconds > 0


def test_each_kernel_is_assembled_and_both_sides_know(real):
    for side in (real.stock, real.patched):
        assert all(k.taken("registers_per_thread") for k in side.kernels)
    assert real.stock.answer["assemblies"] == real.patched.answer["assemblies"]


DOUBLES = """
import torch

def case(device):
    def f(x):
        return torch.erf(x), torch.tanh(x), torch.sigmoid(x), torch.nn.functional.gelu(x)
    return f, [torch.empty(1000, dtype=torch.float64, device=device)]
"""


def test_float64_compiles(tmp_path):
    (tmp_path / "doubles.py").write_text(DOUBLES)
    found = explain.explain(PYTHONS, f"{tmp_path}/doubles.py:case", gpu="H200")
    assert found.patched.kernels
    assert not found.patched.uncompilable


def test_the_report_is_json(real):
    data = json.loads(json.dumps(real.to_json()))
    assert data["stock"]["compiled"][0]["kernels"][0]["source"]
    assert data["gone"] == []


def test_progress_reaches_the_end():
    seen = []
    request = {"case": "rms_norm_backward", "shape": [4096, 64], "gpu": "A100"}
    explain.ask(
        {"one": ([sys.executable], request)},
        together=True,
        progress=lambda side, share, what: seen.append((side, share, what)),
    )
    assert seen[0] == ("one", 0.0, "importing")
    assert seen[-1] == ("one", 1.0, "done")


class Worker:
    """A stand-in for a process that has said which kernels it has."""

    class compiled:
        @staticmethod
        def wait():
            return True

    def __init__(self, label, kernels, heuristics="same"):
        self.label, self.kernels, self.heuristics = label, kernels, heuristics

    def choose(self, keys):
        self.chosen = keys


def test_kernels_are_shared_out_evenly_each_to_one_that_has_it():
    stock, patched = Worker("stock", list("abcdef")), Worker("patched", list("abcdxy"))
    explain.share_out([stock, patched])
    assert sorted(stock.chosen + patched.chosen) == list("abcdefxy")
    assert set(stock.chosen) <= set(stock.kernels)
    assert set(patched.chosen) <= set(patched.kernels)
    assert abs(len(stock.chosen) - len(patched.chosen)) <= 1


def test_other_heuristics_share_nothing():
    stock, patched = Worker("stock", ["a"], "x"), Worker("patched", ["a"], "y")
    explain.share_out([stock, patched])
    assert (stock.chosen, patched.chosen) == (["a"], ["a"])


def test_a_worker_s_error_names_its_side():
    with pytest.raises(GraftError, match="stock: there is no case called 'nothing'"):
        explain.ask(
            {"stock": ([sys.executable], {"case": "nothing", "gpu": "A100"})}, together=True
        )


def test_a_worker_that_dies_says_its_last_words(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def bad(device):\n    raise ZeroDivisionError('in my function')\n")
    with pytest.raises(GraftError, match="in my function"):
        explain.ask(
            {"stock": ([sys.executable], {"case": f"{file}:bad", "gpu": "A100"})}, together=True
        )


def test_a_request_with_an_unknown_field_is_refused():
    with pytest.raises(GraftError, match="has no gpuu"):
        Request.from_json({"case": "x", "gpuu": "H200"})


# --- the command ---------------------------------------------------------------------------------


def run(*args):
    return click.testing.CliRunner().invoke(graft, ["explain", *args])


def test_the_list_has_what_ships():
    result = run("--list")
    assert result.exit_code == 0
    for name in explain.SHIPPED:
        assert name in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpu", "H20"], "the nearest is H200"),
        (["rms_norm_backwards"], "did you mean rms_norm_backward"),
        (["--shape", "a,b"], "got 'a,b'"),
        (["--shape", "0,4"], "no size 0"),
    ],
)
def test_wrong_words_are_named_before_anything_runs(args, message, monkeypatch):
    def ask(*args, **options):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(explain, "ask", ask)
    result = run(*args)
    assert isinstance(result.exception, GraftError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("typed", "next"),
    [
        (["seed_model", "--gpu", "H20"], "seed_model --gpu H200"),
        (["a file.py:step", "--gpu=b20", "--kernels"], "'a file.py:step' --gpu=B200 --kernels"),
        (["--shape", "8,4", "--gpu", "a10", "A10"], "--shape 8,4 --gpu A100 A10"),
    ],
)
def test_a_wrong_gpu_is_told_the_whole_command_with_a_right_one(typed, next):
    wrong = click.testing.CliRunner().invoke(graft, ["explain", *typed]).exception
    assert isinstance(wrong, GraftError)
    assert wrong.next == f"graft explain {next}"


@pytest.mark.parametrize(("text", "sizes"), [("32768,768", (32768, 768)), ("8x4", (8, 4))])
def test_a_shape_is_read(text, sizes):
    assert explain_command.parse_shape(text) == sizes


@pytest.mark.parametrize("text", ["", "3,", "-1,4", "3.5"])
def test_no_shape_is_refused(text):
    with pytest.raises(UsageError, match="32768,768"):
        explain_command.parse_shape(text)


def test_without_a_gpu_it_says_that_it_uses_the_lab(monkeypatch, tmp_path, real):
    monkeypatch.setattr(explain_command.tree, "pythons", lambda prefix: PYTHONS)
    monkeypatch.setattr(explain, "real_gpu", lambda: None)
    asked = {}

    def answer_at_once(pythons, case, **options):
        asked.update(options, case=case)
        return real

    monkeypatch.setattr(explain, "explain", answer_at_once)
    file = tmp_path / "out.json"
    result = run("rms_norm_backward", "--json", str(file))
    assert result.exit_code == 0, result.exception
    assert "no GPU that torch can use here: compiled offline for an H200" in result.output
    assert asked["gpu"] == "H200"
    assert json.loads(file.read_text())["case"] == "rms_norm_backward"
