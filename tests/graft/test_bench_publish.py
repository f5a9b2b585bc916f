"""`graft bench publish`: parts, what is stale, runs that are cut, and input that is not right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from graft.bench import parts, publish, results
from graft.cli import bench_command
from graft.errors import GraftError, UsageError
from graft.stack import pins
from graft.stack.trees import tree

from .test_bench_results import result, row, saved

HASH = "0" * 64
H200 = "NVIDIA H200"
FAKE = Path(__file__).with_name("bench_fake_worker.py")
LIST = """
gpu = "NVIDIA H200"

[first]
title = "norms"
command = "graft bench fake --shapes norms14 --peers DIR --rounds 6"
result = "bench/results/first.json"
minutes = 1.5

[second]
title = "steps"
command = "graft bench other --shapes default"
result = "bench/results/second.json"
minutes = 2
"""
# Writes a row a 50 ms; OUT.part meanwhile, OUT at the end or at SIGTERM; FAKE_ROWS in all.
GRAFT = f"""\
#!{sys.executable}
import json, os, signal, sys, time
from pathlib import Path
at = sys.argv.index("--out")
command, out = " ".join(["graft", *sys.argv[1:at]]), Path(sys.argv[at + 1])
part = out.with_name(out.name + ".part")
with open(os.environ["FAKE_LOG"], "a") as log: log.write(command + chr(10))
if os.environ.get("FAKE_FAILS") in command.split(): sys.exit("no such library")
head = {{"schema": 1, "stack_hash": "{HASH}", "date": "2026-11-24T00:00:00", "commands": [command],
        "contenders": {{"stock": {{}}, "helion": {{"absent": "is not installed"}}}}}}
there = [line for line in part.read_text().splitlines()] if part.exists() else [json.dumps(head)]
def write(): part.write_text(chr(10).join(there) + chr(10))
def end(*_): write(); os._exit(143)
signal.signal(signal.SIGTERM, end)
while len(there) <= int(os.environ["FAKE_ROWS"]):
    there.append(json.dumps({{"case": str(len(there))}})); write(); time.sleep(0.05)
    if "--seconds" in sys.argv and len(there) == 2: sys.exit(0)
out.write_text(json.dumps({{**head, "complete": True, "rows": [json.loads(r) for r in there[1:]]}}))
part.unlink()
"""


class Project:
    """Two parts, a tree whose `graft` measures nothing, and what was said."""

    def __init__(self, root: Path) -> None:
        self.root, self.said, self.log = root, [], root / "log"
        self.prefix = root / "build"
        self.results = root / "bench" / "results"
        self.results.mkdir(parents=True)
        parts.file(root).write_text(LIST)
        (self.prefix / "bin").mkdir(parents=True)
        script = self.prefix / "bin" / "graft"
        script.write_text(GRAFT)
        script.chmod(0o755)

    def publish(self, *names: str, gpus: tuple[str, ...] = (H200,), **options: object) -> bool:
        self.said.clear()
        return publish.publish(
            self.prefix,
            names,
            gpus=lambda: list(gpus),
            say=self.said.append,
            root=self.root,
            **options,  # type: ignore[arg-type]
        )

    def ran(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = Project(tmp_path)
    there = SimpleNamespace(prefix=made.prefix, stack_hash=HASH)
    monkeypatch.setattr(tree, "load", lambda prefix: there)
    monkeypatch.setenv("FAKE_LOG", str(made.log))
    monkeypatch.setenv("FAKE_ROWS", "2")
    return made


def test_parts_are_measured_once(project: Project) -> None:
    assert project.publish()
    assert project.ran() == [
        "graft bench fake --shapes norms14 --rounds 6",
        "graft bench other --shapes default",
    ]
    assert "first: bench/results/first.json written, without helion" in project.said
    assert [row["case"] for row in json.loads((project.results / "first.json").read_text())["rows"]]
    assert project.publish()
    assert len(project.ran()) == 2
    assert project.said[0] == f"first: fresh: stack {HASH[:12]}, 2026-11-24, without helion"
    assert project.publish("second", again=True)
    assert len(project.ran()) == 3


def test_peers_come_from_their_folder(project: Project, tmp_path: Path) -> None:
    wheels = tmp_path / "some wheels"
    (part, _) = parts.load(project.root).parts
    words = publish.argv(project.prefix, part, Path("o.json"), wheels)
    assert words[words.index("--peers") + 1] == str(wheels)
    assert "DIR" not in words
    assert words[-2:] == ["--out", "o.json"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "fresh: "),
        ({"stack_hash": "1" * 64}, f"stale: stack {'1' * 12}, 2026-01-01"),
        ({"complete": False}, "not all points"),
        ({"commands": ["graft bench other --shapes default"]}, "another command"),
    ],
)
def test_what_is_stale_is_said(project: Project, changes: dict[str, object], said: str) -> None:
    about = {"stack_hash": HASH, "commands": ["graft bench fake --shapes norms14"], **changes}
    saved(project.results / "first.json", row("a", (4, 8), 2.0, 1.0), **about)
    first, second, total = publish.listed(HASH, project.root).splitlines()
    assert first.startswith("first    1.5 min  ")
    assert said in first
    assert second == "second   2.0 min  not measured"
    left = 2.0 if not changes else 3.5
    assert total == f"{left} of 3.5 minutes are to be measured; stack {HASH[:12]}"


def test_a_run_that_is_stopped_goes_on(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_ROWS", "40")
    monkeypatch.setattr(publish, "_LEAST_S", 0.0)
    old = saved(project.results / "first.json", row("a", (4, 8), 2.0, 1.0))
    before = old.read_bytes()
    assert not project.publish(seconds=publish._TO_END_S + 1.5)
    assert project.said[-1] == "next: the same command"
    assert "; of a new one " in project.said[-3]
    assert "first second, 3.5 minutes" in project.said[-2]
    assert old.read_bytes() == before
    (journal,) = publish.folder(project.root).glob("*.part")
    rows = len(journal.read_text().splitlines()) - 1
    assert 0 < rows < 40
    monkeypatch.setenv("FAKE_ROWS", str(rows + 1))
    assert project.publish("first")
    assert len(json.loads(old.read_text())["rows"]) == rows + 1


def test_what_stops_by_itself_is_told_when(project: Project) -> None:
    listed = parts.file(project.root)
    listed.write_text(LIST.replace("bench fake --shapes norms14", "bench models"))
    assert not project.publish("first", seconds=100.0)
    assert project.said[-1] == "next: the same command"
    assert "; of a new one 1 row" in project.said[-3]
    assert project.publish("first")
    assert len(json.loads((project.results / "first.json").read_text())["rows"]) == 2


def test_measuring_anew_goes_on_too(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert project.publish("first")
    monkeypatch.setenv("FAKE_ROWS", "40")
    monkeypatch.setattr(publish, "_LEAST_S", 0.0)
    assert not project.publish("first", again=True, seconds=publish._TO_END_S + 1.5)
    assert "fresh" in publish.listed(HASH, project.root).splitlines()[0]
    assert "; of a new one " in publish.listed(HASH, project.root).splitlines()[0]
    assert project.publish("first")
    assert len(json.loads((project.results / "first.json").read_text())["rows"]) == 40


def test_none_is_begun_with_no_time_left(project: Project) -> None:
    assert not project.publish(seconds=5.0)
    assert project.ran() == []
    assert "not measured yet: first second, 3.5 minutes" in project.said


def test_what_another_stack_left_is_not_gone_on_with(project: Project) -> None:
    work = publish.folder(project.root) / "first.json.part"
    work.parent.mkdir(parents=True)
    head = {"schema": 1, "stack_hash": "1" * 64, "date": "2026", "commands": ["graft bench fake"]}
    work.write_text(json.dumps(head) + "\n" + json.dumps({"case": "other"}) + "\n")
    assert project.publish("first")
    shown = json.loads((project.results / "first.json").read_text())
    assert [each["case"] for each in shown["rows"]] == ["1", "2"]


def test_what_was_measured_elsewhere_is_copied_without_a_gpu(project: Project) -> None:
    assert project.publish()
    for part in parts.load(project.root).parts:
        (project.root / part.result).unlink()
    page = project.root / "README.md"
    saved(project.root / "any.json", row("a", (4, 8), 2.0, 1.0))
    page.write_text("<!-- table: any.json -->\n<!-- /table -->\n")
    (publish.folder(project.root) / "second.json").unlink()
    with pytest.raises(GraftError, match="not measured: second"):
        project.publish(gpus=())
    assert "README.md: tables written" in project.said
    assert project.publish()
    assert len(project.ran()) == 3
    assert {path.name for path in project.results.iterdir()} == {"first.json", "second.json"}


def test_a_part_that_fails_is_named_after_the_others(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "fake")
    with pytest.raises(GraftError, match="of 2 parts 1 failed, and say why above: first") as error:
        project.publish()
    assert error.value.next == "graft bench publish --part first"
    assert [path.name for path in project.results.iterdir()] == ["second.json"]


def test_no_gpu_and_another_gpu_are_named(project: Project) -> None:
    with pytest.raises(GraftError, match="none answers here; not measured: first second"):
        project.publish(gpus=())
    with pytest.raises(GraftError, match="is of NVIDIA H200, and here is NVIDIA A100"):
        project.publish(gpus=("NVIDIA A100",))
    assert project.ran() == []


def test_a_tree_of_another_stack_is_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "tree_hash", lambda root, pin: "2" * 64)
    with pytest.raises(GraftError, match=r"has stack 000000000000 and patches/ 222222222222") as e:
        project.publish()
    assert e.value.next == "./build.sh"


def test_a_part_that_is_none_is_named(project: Project) -> None:
    with pytest.raises(UsageError, match="no part 'frist'; did you mean first") as error:
        project.publish("frist")
    assert error.value.next == "graft bench publish --list"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[first", "is not TOML"),
        ("[first]\n", "gpu is None"),
        ('gpu = "G"\n[first]\ntitle = "t"\n', "first: expected title, command, result, minutes"),
        (LIST.replace("1.5", '"1.5"'), "first: minutes is '1.5'"),
        (LIST.replace("graft bench fake", "rm -r"), "expected graft bench"),
        (LIST.replace("results/first", "../first"), "expected bench/results/FILE.json"),
    ],
)
def test_a_list_that_is_wrong_is_named(project: Project, text: str, told: str) -> None:
    parts.file(project.root).write_text(text)
    with pytest.raises(GraftError, match=told):
        parts.load(project.root)


def test_sigterm_ends_what_is_measured(project: Project, tmp_path: Path) -> None:
    code = f"""
        from pathlib import Path
        from types import SimpleNamespace
        from graft.stack.trees import tree
        from graft.bench import publish
        root = Path({str(project.root)!r})
        tree.load = lambda prefix: SimpleNamespace(prefix=prefix, stack_hash={HASH!r})
        publish.publish(root / "build", gpus=lambda: [{H200!r}], say=print, root=root)
    """
    env = {**os.environ, "FAKE_ROWS": "2000", "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], env=env)
    journal = publish.folder(project.root) / "first.json.part"
    limit = time.monotonic() + 30
    while not journal.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    assert child.wait(30) == 143
    rows = journal.read_text()
    time.sleep(0.3)
    assert journal.read_text() == rows


def test_the_runner_writes_what_a_part_asks_for(project: Project) -> None:
    """`graft bench` itself, on a GPU that is not there: its file is of the part's command."""
    (part, _) = parts.load(project.root).parts
    command = (
        "graft bench softmax --shapes 4x8 --dtype bf16 --against stock,patched,liger --peers DIR"
    )
    out = project.root / "out.json"
    words = [*command.replace(" --peers DIR", "").split()[2:], "--out", str(out)]
    fake = [sys.executable, str(FAKE), "1", *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(fake, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept = parts.kept(out, command)
    assert kept is not None
    assert kept.is_of(HASH)
    assert kept.absent == ("liger",)
    assert not parts.kept(out, part.command).command  # type: ignore[union-attr]


def test_the_command_lists_parts_and_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    hash = parts.tree_hash()
    monkeypatch.setattr(tree, "load", lambda _: SimpleNamespace(prefix=Path("b"), stack_hash=hash))
    monkeypatch.setattr(bench_command, "cuda_device_names", list)
    run = CliRunner().invoke
    shown = run(bench_command.bench, ["publish", "--list"])
    assert shown.exit_code == 0
    for part in parts.load().parts:
        assert f"\n{part.name} " in f"\n{shown.output}"
    assert isinstance(run(bench_command.bench, ["publish", "--part", "none"]).exception, UsageError)


# --- the list of this repository ------------------------------------------------------------------


def test_all_parts_fit_into_25_minutes() -> None:
    assert sum(part.minutes for part in parts.load().parts) <= 25


def test_parts_are_commands_that_graft_bench_takes() -> None:
    from graft.bench import plan
    from graft.cases import load_all

    every = load_all()
    files = {name: plan.case_file(case) for name, case in every.items()}
    for part in parts.load().parts:
        words = part.command.replace("DIR", str(pins.ROOT)).split()[2:]
        if words[0] in bench_command.bench.commands:
            bench_command.bench.commands[words[0]].make_context(words[0], words[1:])
            continue
        given = bench_command.bench.commands["run"].make_context("run", words).params
        chosen = plan.select(given["cases"], every, files)
        dtypes = [each for each in given["dtypes"].split(",") if each]
        assert plan.points(chosen, given["wanted_shapes"], dtypes)


def test_results_of_parts_are_plain_and_named_once() -> None:
    names = [part.result for part in parts.load().parts]
    assert len(set(names)) == len(names)


def test_a_result_that_is_damaged_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(results.render(result())[:50])
    assert parts.kept(path, "graft bench a") is None
    path.write_text("[]")
    assert parts.kept(path, "graft bench a") is None
