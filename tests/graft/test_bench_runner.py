"""The runner with real worker processes that speak the protocol and fail on command."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from graft.bench import results, runner
from graft.bench.plan import Contender, Point
from graft.bench.protocol import Remote, WorkerLost
from graft.errors import GraftError

FAKE = Path(__file__).with_name("bench_fake_worker.py")
PYTHON = (sys.executable,)
STOCK = Contender("stock", "compile", PYTHON, {"us": 200.0})
PATCHED = Contender("patched", "compile", PYTHON, {"us": 100.0})


def points(*cases):
    return [Point(case, (i + 1, 64), "bf16") for i, case in enumerate(cases)]


class Bench:
    """A run against fake workers in a folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out.json"
        self.log = folder / "fake.log"
        self.notes = []
        self.env = {**os.environ, "FAKE_LOG": str(self.log)}

    def settings(self, **changes):
        changes = {"rounds": 4, "samples": 8, "timeout_s": 20.0, "env": self.env, **changes}
        return runner.Settings(worker=(str(FAKE),), **changes)

    def head(self, settings, contenders):
        return {
            "schema": results.SCHEMA,
            "pin": "v2.11.0",
            "stack_hash": "0" * 64,
            "patches": [],
            "date": "2026-01-01T00:00:00+00:00",
            "commands": ["graft bench fake"],
            "clock": settings.as_dict(),
            "contenders": {c.label: {"impl": c.impl, "knobs": dict(c.knobs)} for c in contenders},
            "gpus": [],
            "complete": False,
        }

    def run(self, cases, contenders=(STOCK, PATCHED), gpus=("0",), **changes):
        settings = self.settings(**changes)
        journal = results.Journal(self.out, self.head(settings, contenders))
        todo = points(*cases)
        try:
            runner.run(todo, contenders, gpus, settings, journal, on_note=self.notes.append)
        finally:
            complete = all(point.key in journal.done for point in todo)
            journal.fold({"complete": complete}, [point.key for point in todo])
        return {row["case"]: row for row in results.load(self.out)["rows"]}

    def served(self, verb):
        lines = [line.split(" ") for line in self.log.read_text().splitlines()]
        return [(gpu, case) for gpu, _, done, case in lines if done == verb]

    def alive(self):
        pids = {int(line.split(" ")[1]) for line in self.log.read_text().splitlines()}
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_row_has_times_ratio_limit_and_facts(bench):
    row = bench.run(["plain"])["plain"]
    stock, patched = row["times"]["stock"], row["times"]["patched"]
    assert stock["us"]["n"] == patched["us"]["n"] == 32
    assert row["limit_us"] == 0.1  # 400 kB at 4000 GB/s
    assert patched["sol"] == round(0.1 / patched["us"]["median"], 4)
    assert stock["kernels"] == 2
    assert stock["mix_order"] == 1
    assert "estimate_us" not in stock


def test_drift_leaves_the_ratio_alone(bench):
    """The fake's clock drifts by 10 % a turn: medians move, the paired ratio does not."""
    row = bench.run(["plain"])["plain"]
    assert row["times"]["stock"]["between_rounds"] > 0.2
    ratio = row["speedup"]["patched"]
    assert ratio["n"] == 4
    assert 1.99 < ratio["q1"] <= ratio["median"] <= ratio["q3"] < 2.01


def test_contenders_take_turns_and_turn_the_order_around(bench):
    bench.run(["plain"])
    lines = [line.split(" ")[1:3] for line in bench.log.read_text().splitlines()]
    turns = [pid for pid, verb in lines if verb == "measure"]
    first, second = turns[:2]
    assert turns == [first, second, second, first] * 2


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("crash", "crash", "exit code 7"),
        ("oom", "oom", "CUDA out of memory"),
        ("fatal", "crash", "an illegal memory access"),
    ],
)
def test_a_case_that_fails_is_a_row_and_the_run_goes_on(bench, case, kind, words):
    rows = bench.run(["before", case, "after"])
    error = rows[case]["times"]["patched"]["error"]
    assert error["kind"] == kind
    assert words in error["message"]
    assert "us" in rows["after"]["times"]["patched"]
    assert "speedup" not in rows[case]


def test_a_crash_says_the_last_words_of_the_worker(bench):
    assert "the last words" in bench.run(["crash"])["crash"]["times"]["stock"]["error"]["message"]


def test_a_worker_that_is_killed_says_what_to_try(bench):
    """As the kernel kills one on a host without memory."""
    message = bench.run(["killed"])["killed"]["times"]["stock"]["error"]["message"]
    assert "killed by SIGKILL" in message
    assert "fewer --jobs-per-gpu" in message
    assert "jobs-per-gpu" not in bench.run(["crash"])["crash"]["times"]["stock"]["error"]["message"]


def test_a_hang_is_killed_and_the_run_goes_on(bench):
    started = time.monotonic()
    rows = bench.run(["hang", "after"], timeout_s=1.0)
    assert time.monotonic() - started < 15
    assert rows["hang"]["times"]["stock"]["error"]["kind"] == "hang"
    assert "1 s" in rows["hang"]["times"]["stock"]["error"]["message"]
    assert "us" in rows["after"]["times"]["stock"]
    assert not bench.alive()


def test_one_side_that_is_wrong_keeps_its_errors_and_the_other_its_time(bench):
    row = bench.run(["wrong"])["wrong"]
    assert row["times"]["stock"]["error"]["kind"] == "wrong"
    assert row["times"]["stock"]["outputs"] == [{"error": 1.0}]
    assert "us" in row["times"]["patched"]
    assert "speedup" not in row


def test_a_crash_while_timing_costs_only_the_one_that_crashed(bench):
    rows = bench.run(["crash_timing", "after"])
    row = rows["crash_timing"]
    assert row["times"]["patched"]["error"]["kind"] == "crash"
    assert "timing" in row["times"]["patched"]["error"]["message"]
    assert row["times"]["stock"]["us"]["n"] == 32
    assert "us" in rows["after"]["times"]["patched"]


CONTENDERS = 2


def prepared_after_slow(bench, *cases):
    """The cases in the order of their preparations: each of `cases` comes after all slow ones."""
    prepared = [case for _, case in bench.served("prepare")]
    last = max(i for i, case in enumerate(prepared) if case.startswith("slow"))
    for case in cases:
        assert prepared[last:].count(case) >= CONTENDERS
    return prepared


def test_what_crashes_beside_others_is_measured_again_alone(bench):
    rows = bench.run(["slow1", "fault_beside", "slow2", "slow3", "crash"], jobs=2)
    assert all("us" in time for time in rows["fault_beside"]["times"].values())
    assert rows["crash"]["times"]["stock"]["error"]["kind"] == "crash"
    prepared = prepared_after_slow(bench, "fault_beside", "crash")
    for case in ("fault_beside", "crash"):
        assert prepared.count(case) == 2 * CONTENDERS
    assert sorted(prepared[-2 * CONTENDERS :]) == ["crash", "crash", "fault_beside", "fault_beside"]


def test_what_is_short_of_memory_beside_others_is_measured_again_alone(bench):
    rows = bench.run(["slow1", "short_twice", "slow2", "slow3", "oom"], jobs=2)
    assert all("us" in time for time in rows["short_twice"]["times"].values())
    assert rows["oom"]["times"]["stock"]["error"]["kind"] == "oom"
    prepared_after_slow(bench, "short_twice", "oom")


def test_what_crashes_alone_is_not_measured_again(bench):
    bench.run(["fault_beside"])
    assert [case for _, case in bench.served("prepare")] == ["fault_beside"] * 2


def test_an_absent_peer_is_absent_without_noise(bench):
    liger = Contender("liger", "liger", PYTHON)
    row = bench.run(["plain"], contenders=(STOCK, PATCHED, liger))["plain"]
    assert row["times"]["liger"] == {"absent": "liger-kernel is not installed"}
    assert "us" in row["times"]["patched"]
    assert results.load(bench.out)["contenders"]["liger"]["absent"]
    assert not [note for note in bench.notes if "liger" in note]


def test_an_unknown_knob_is_named(bench):
    odd = Contender("patched", "compile", PYTHON, {"unknown": 1})
    with pytest.raises(GraftError, match="no unknown"):
        bench.run(["plain"], contenders=(STOCK, odd))


def test_gpus_share_the_cases(bench):
    rows = bench.run(["slow"] * 1 + [f"slow{i}" for i in range(11)], gpus=("0", "1"))
    assert len(rows) == 12
    assert {gpu for gpu, _ in bench.served("prepare")} == {"0", "1"}
    prepared = [case for _, case in bench.served("prepare")]
    assert len(prepared) == 2 * 12  # each case on one GPU, by both contenders
    gpus = results.load(bench.out)["gpus"]
    assert [gpu["index"] for gpu in gpus] == ["0", "1"]
    assert {row["gpu"] for row in rows.values()} <= {"0", "1"}


def test_a_gpu_on_which_nothing_starts_is_named_and_left_out(bench):
    bench.env["FAKE_GPU_BROKEN"] = "1"
    rows = bench.run(["a", "b", "c"], gpus=("0", "1"))
    assert len(rows) == 3
    assert {row["gpu"] for row in rows.values()} == {"0"}
    assert any("GPU 1" in note and "no such device" in note for note in bench.notes)
    broken = results.load(bench.out)["gpus"][1]
    assert "no such device" in broken["error"]


def test_a_gpu_that_dies_gives_its_case_to_the_others(bench):
    bench.env["FAKE_GPU_DIES"] = "1"
    rows = bench.run([f"slow{i}" for i in range(8)], gpus=("0", "1"))
    timed = [row for row in rows.values() if "us" in row["times"]["stock"]]
    assert len(rows) == len(timed) == 8  # also what it was at when it died
    assert {row["gpu"] for row in rows.values()} == {"0"}
    assert any("GPU 1" in note for note in bench.notes)
    assert "no such device" in results.load(bench.out)["gpus"][1]["error"]


def test_without_a_gpu_left_what_was_measured_is_kept(bench):
    bench.env["FAKE_GPU_DIES"] = "0"
    with pytest.raises(GraftError, match="no GPU is left, and 2 of 3 points"):
        bench.run(["a", "b", "c"])
    kept = results.load(bench.out)
    assert len(kept["rows"]) == 1
    assert not kept["complete"]


def test_a_run_goes_on_where_another_ended(bench):
    bench.run(["a", "b"])
    bench.log.unlink()
    rows = bench.run(["a", "b", "c"])
    assert set(rows) == {"a", "b", "c"}
    assert {case for _, case in bench.served("prepare")} == {"c"}


def test_nothing_left_to_do_starts_no_worker(bench):
    bench.run(["a"])
    before = results.load(bench.out)
    bench.log.unlink()
    bench.run(["a"])
    assert not bench.log.exists()
    assert results.load(bench.out) == before


KILLED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
sys.path[:0] = {path!r}
from pathlib import Path
from test_bench_runner import Bench
bench = Bench(Path({folder!r}))
bench.run([f"slow{{i}}" for i in range(400)])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_loses_at_most_the_row_it_was_at(bench, how):
    path = [str(FAKE.parent), *sys.path]
    code = KILLED.format(path=path, folder=str(bench.folder))
    env = {**os.environ, "TMPDIR": str(bench.folder)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    part = bench.out.with_name("out.json.part")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if part.exists() and part.read_text().count('"case"') >= 5:
            break
        time.sleep(0.01)
    process.send_signal(how)
    process.wait(20)
    whole = part.read_text() if part.exists() else bench.out.read_text()
    kept = whole.count('"case"')
    assert 5 <= kept < 400
    if part.exists():  # as a kill in the middle of a write leaves it
        part.write_text(whole + '{"case": "slow399", "sha')
    deadline = time.monotonic() + 10
    while bench.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not bench.alive()  # workers end when the runner's end of the pipe closes
    bench.log.unlink()
    rows = bench.run([f"slow{i}" for i in range(kept + 3)])
    assert len(rows) == kept + 3
    assert len(bench.served("prepare")) <= 2 * 4
    assert not part.exists()


def test_the_journal_names_the_gpu_before_the_first_row(bench):
    """A run that is cut says by itself what it ran on."""
    settings = bench.settings()
    journal = results.Journal(bench.out, bench.head(settings, (STOCK, PATCHED)))
    seen = []

    def cut(row):
        seen.append(results.load(results.part_of(bench.out)))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(points("a", "b"), (STOCK, PATCHED), ("0",), settings, journal, cut)
    (gpu,) = seen[0]["gpus"]
    assert (gpu["name"], gpu["sms"], gpu["driver"]) == ("Fake", 132, "1.0")
    assert gpu["copy_gb_per_s"]["median"] == 4000.0
    assert seen[0]["contenders"]["stock"]["torch"] == "2.11.0"
    assert [row["case"] for row in seen[0]["rows"]] == ["a"]
    assert not seen[0]["complete"]
    # The next run takes it over, also when it ends before it has found out anything.
    for _ in range(2):
        journal = results.Journal(bench.out, bench.head(settings, (STOCK, PATCHED)))
    assert journal.fold({}, [])["gpus"] == seen[0]["gpus"]


def test_a_file_is_not_continued_on_another_gpu(bench):
    bench.run(["a"])
    bench.env["FAKE_GPU_NAME"] = "Other"
    with pytest.raises(GraftError, match=r"out\.json was measured on Fake, and here is .*Other"):
        bench.run(["a", "b"])
    kept = results.load(bench.out)
    assert [row["case"] for row in kept["rows"]] == ["a"]
    assert [gpu["name"] for gpu in kept["gpus"]] == ["Fake"]


def test_contenders_that_lack_memory_beside_others_prepare_alone(bench):
    third = Contender("third", "compile", PYTHON, {"us": 50.0})
    row = bench.run(["oom_beside"], contenders=(STOCK, PATCHED, third))["oom_beside"]
    assert all("us" in time for time in row["times"].values())
    assert len(bench.served("prepare")) == 6  # three at a time, then one after the other


def seen(bench):
    return [json.loads(file.read_text()) for file in bench.folder.glob("seen-*.json")]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_worker_runs_on_the_cores_of_its_lane(bench, monkeypatch):
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    monkeypatch.setattr(runner, "share", lambda cores, lanes: [frozenset({c}) for c in cores])
    bench.run(["a"], gpus=("0", "1"))
    assert sorted(worker["cores"] for worker in seen(bench)) == [[c] for c in cores for _ in "sp"]


def test_cores_are_shared_by_lanes():
    assert runner.share(range(64), 4)[1] == frozenset(range(16, 32))
    assert runner.share(range(7), 3) == [{0, 1}, {2, 3}, {4, 5, 6}]
    assert runner.share([4, 5, 6], 2) == [{4, 5, 6}] * 2  # one each would be too few
    assert runner.share([0, 1], 1) == [{0, 1}]


def test_stopping_a_run_leaves_no_worker(bench):
    settings = bench.settings()
    journal = results.Journal(bench.out, bench.head(settings, (STOCK, PATCHED)))

    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run(points("a", "b"), (STOCK, PATCHED), ("0",), settings, journal, stop)
    assert not bench.alive()
    assert threading.active_count() < 5


# --- several points of a GPU at a time -----------------------------------------------------------


def events(bench):
    """What the workers noted, in order: (pid, what, case)."""
    lines = [line.split(" ") for line in bench.log.read_text().splitlines()]
    return [(int(pid), what, case) for _, pid, what, case in lines]


def test_points_of_a_gpu_compile_side_by_side(bench):
    rows = bench.run([f"slow{i}" for i in range(12)], jobs=3)
    assert all("us" in time for row in rows.values() for time in row["times"].values())
    compiling, most = set(), 0
    for _, what, case in events(bench):
        if what in ("compiles", "compiled"):
            (compiling.add if what == "compiles" else compiling.discard)(case)
            most = max(most, len(compiling))
    assert most >= 2
    assert len({pid for pid, what, _ in events(bench) if what == "hello"}) == 6
    (gpu,) = results.load(bench.out)["gpus"]
    assert gpu["copy_gb_per_s"]["median"] == 4000.0
    assert len(bench.served("copy")) == 1


def test_nobody_else_works_on_a_gpu_while_it_prepares_or_times(bench):
    bench.run([f"slow{i}" for i in range(12)], jobs=3)
    holder, timed, turns = None, set(), 0
    for pid, what, _ in events(bench):
        if what == "measure":
            assert holder is None
            timed, turns = timed | {pid}, turns + 1
            if turns == 2 * 4:  # a point's turns: both contenders, each round
                assert len(timed) == 2
                timed, turns = set(), 0
        elif what == "takes":
            assert holder is None
            assert not turns, "in the middle of a point's turns"
            holder = pid
        elif what == "lets-go":
            assert holder == pid
            holder = None


def test_a_run_says_how_busy_its_gpus_were(bench):
    bench.run([f"slow{i}" for i in range(4)], gpus=("0", "1"), jobs=2)
    words = r"GPU {}: (\d) points in \d+ s, ready after \d+ s; held for \d+ s to prepare"
    found = [re.match(words.format(i), note) for i, note in enumerate(bench.notes)]
    assert sum(int(match[1]) for match in found) == 4


@pytest.mark.parametrize("first", ["stock", "patched"])
def test_waiting_for_the_gpu_is_no_hang_but_keeping_it_is(bench, first):
    """Whoever of the two has it."""
    bench.env["FAKE_LATE"] = {"stock": "100.0", "patched": "200.0"}[first]
    rows = bench.run(["hang_with_gpu", "a", "b"], jobs=2, timeout_s=2.0)
    for time_of in rows["hang_with_gpu"]["times"].values():
        assert time_of["error"]["kind"] == "hang"
    for case in "ab":
        assert all("us" in time_of for time_of in rows[case]["times"].values())


def test_no_more_lanes_than_points(bench):
    bench.run(["a", "b"], jobs=8)
    assert len(bench.served("hello")) == 4


# --- the command, on GPUs that are not there -----------------------------------------------------

GRID = ("sum_both", "--shapes", "grid", "--dtype", "bf16")


def command(bench, *args, launcher=(), gpus=4):
    paths = (str(FAKE.parents[2] / "src"), os.environ.get("PYTHONPATH", ""))
    env = {**bench.env, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    env["TMPDIR"] = str(bench.folder)
    return subprocess.Popen(
        [sys.executable, *launcher, str(FAKE), str(gpus), *args, "--out", str(bench.out)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_is_killed_goes_on_when_it_is_typed_again(bench, how):
    bench.env["FAKE_SLOW"] = "1"
    process = command(bench, *GRID)
    part = results.part_of(bench.out)
    deadline = time.monotonic() + 60
    while not (part.exists() and part.read_text().count('"case"') >= 9):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(how)
    said = process.communicate(timeout=30)[0]
    kept = results.load(part if how == signal.SIGKILL else bench.out)
    assert 9 <= len(kept["rows"]) < 371
    assert not kept["complete"]
    assert {gpu["name"] for gpu in kept["gpus"]} == {"Fake"}
    if how == signal.SIGTERM:
        assert process.returncode == 128 + signal.SIGTERM
        assert "points, not all" in said
    bench.env.pop("FAKE_SLOW")
    bench.log.unlink()
    again = command(bench, *GRID)
    said = again.communicate(timeout=60)[0]
    assert again.returncode == 0, said
    assert f"{len(kept['rows'])} of 371 points are in" in said
    done = results.load(bench.out)
    assert len(done["rows"]) == 371
    assert done["complete"]
    assert len(bench.served("prepare")) == 2 * (371 - len(kept["rows"]))


def test_torchrun_spreads_the_points_over_its_gpus(bench):
    """One rank runs the lanes of all, and its workers are no ranks."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "3", "--no-python")
    run = command(bench, *GRID, launcher=(*launcher, sys.executable))
    said = run.communicate(timeout=120)[0]
    assert run.returncode == 0, said
    done = results.load(bench.out)
    assert len(done["rows"]) == 371
    assert {row["gpu"] for row in done["rows"]} == {"0", "1", "2"}
    assert len(bench.served("prepare")) == 2 * 371
    assert len(seen(bench)) == 6
    for worker in seen(bench):
        assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(worker["env"])


def said(process):
    """What a command printed, its exit code first."""
    text = process.communicate(timeout=60)[0]
    return f"exit code {process.returncode}\n{text}"


def test_a_gpu_that_fails_is_named_and_its_points_go_to_the_others(bench):
    bench.env["FAKE_GPU_BROKEN"], bench.env["FAKE_GPU_DIES"] = "1", "2"
    text = said(command(bench, "sum_both", "--shapes", "norms14", "--dtype", "bf16"))
    assert text.startswith("exit code 0\n")
    assert "GPU 1: stock: worker ended (exit code 1): no such device; left out" in text
    assert "GPU 2: " in text
    done = results.load(bench.out)
    assert done["complete"]
    assert len(done["rows"]) == 14
    assert {row["gpu"] for row in done["rows"]} <= {"0", "3"}
    assert all("us" in time for row in done["rows"] for time in row["times"].values())
    assert ["error" in gpu for gpu in done["gpus"]] == [False, True, True, False]


def test_without_any_gpu_that_works_it_says_so(bench):
    bench.env["FAKE_GPU_BROKEN"] = "0"
    text = said(command(bench, "sum_both", gpus=1))
    assert text.startswith("exit code 1\n")
    assert "error: no GPU is left, and 3 of 3 points are not measured (GPU 0: stock:" in text
    assert not bench.out.exists()


def test_a_peer_of_a_wrong_version_is_named_and_left_out(bench):
    bench.env["FAKE_PEER"] = "liger-kernel 0.1.0 is installed, 0.8.5 expected"
    text = said(command(bench, "sum_both", "--dtype", "bf16", "--against", "stock,patched,liger"))
    assert text.startswith("exit code 0\n")
    assert "liger: left out, liger-kernel 0.1.0 is installed, 0.8.5 expected" in text
    done = results.load(bench.out)
    assert done["contenders"]["liger"]["absent"] == bench.env["FAKE_PEER"]
    assert "us" in done["rows"][0]["times"]["patched"]


def test_jobs_are_in_the_command_that_a_file_holds(bench):
    text = said(command(bench, "sum_both", "--dtype", "bf16", "--jobs-per-gpu", "2", gpus=1))
    assert text.startswith("exit code 0\n")
    assert results.load(bench.out)["commands"][0].endswith(" --jobs-per-gpu 2")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text: text.replace("v2.11.0", "v2.12.0"), "of another run: pin is 'v2.12.0' there"),
        (lambda text: text[: len(text) // 2], "cut off or damaged"),
    ],
    ids=["another pin", "cut off"],
)
def test_a_file_of_another_pin_or_cut_off_is_not_touched(bench, damage, words):
    bench.run(["a", "b"])
    text = damage(bench.out.read_text())
    bench.out.write_text(text)
    shown = said(command(bench, "sum_both", "--dtype", "bf16"))
    assert shown.startswith("exit code 1\n")
    assert words in shown
    assert "--again" in shown[shown.index("next: ") :]
    assert bench.out.read_text() == text
    assert not results.part_of(bench.out).exists()


# --- the protocol --------------------------------------------------------------------------------


def remote(tmp_path, code):
    return Remote([sys.executable, "-c", code], dict(os.environ), tmp_path / "log")


def test_a_worker_that_speaks_out_of_turn_is_lost(tmp_path):
    with pytest.raises(WorkerLost, match="no reply") as lost:
        remote(tmp_path, "print('hello')").receive(10)
    assert lost.value.kind == "crash"


def test_a_signal_is_named(tmp_path):
    worker = remote(tmp_path, "import os; os.abort()")
    with pytest.raises(WorkerLost, match="SIGABRT"):
        worker.receive(10)


def test_a_worker_ends_when_its_input_closes(tmp_path):
    worker = remote(tmp_path, "import sys; sys.stdin.read(); open(sys.argv[0] or 'x')")
    started = time.monotonic()
    worker.close()
    assert time.monotonic() - started < 4


def test_rows_hold_no_machine_paths(bench):
    bench.run(["crash"])
    text = bench.out.read_text()
    assert str(bench.folder) not in text
    assert json.loads(text)["complete"]


def test_a_worker_that_was_given_up_is_lost(tmp_path):
    gpu = runner.Gpu("0", tmp_path / "lock")
    contender = Contender("stock", "compile", (sys.executable,), {})
    cores = frozenset({0})
    seat = runner._Seat(contender, gpu, runner.Settings(), tmp_path, tmp_path, cores, 1)
    for ask in (lambda: seat.send({"do": "measure"}), lambda: seat.receive(1.0)):
        with pytest.raises(WorkerLost, match="was ended") as lost:
            ask()
        assert lost.value.kind == "crash"
