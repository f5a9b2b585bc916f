"""What `graft bench` says to input that is not right, and how it picks GPUs, peers, kernels."""

import json
import zipfile

import pytest
from click.testing import CliRunner

from graft.bench import corpus, peers
from graft.bench.plan import case_file, select
from graft.cases import load_all
from graft.cli import bench_command
from graft.errors import GraftError, UsageError
from graft.stack.trees import tree


def run(*args):
    return CliRunner().invoke(bench_command.bench, list(args))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_without_a_gpu_it_says_what_explain_can_do(monkeypatch):
    monkeypatch.setattr(bench_command, "cuda_device_count", lambda: 0)
    error = run("softmax").exception
    assert isinstance(error, GraftError)
    assert "timing needs a CUDA GPU" in error.message
    assert error.next == "graft explain softmax --gpu H200"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rms_nrm"], "unknown case 'rms_nrm'; did you mean rms_norm?"),
        (["softmax", "--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["jsd", "--dtype", "fp16"], "jsd takes bf16, fp32"),
        (["softmax", "--shapes", "huge"], "no shape group 'huge'"),
        (["softmax", "--rounds", "3"], "under 30 samples"),
        ([], "no case to measure"),
    ],
)
def test_what_is_wrong_is_named(args, words):
    error = run("run", *args).exception
    assert isinstance(error, UsageError)
    assert words in error.message


def test_the_list_has_every_case():
    shown = run("--list")
    assert shown.exit_code == 0, shown
    for name in load_all():
        assert f"  {name} " in shown.output


def test_cases_are_chosen_by_name_glob_and_file():
    every = load_all()
    files = {name: case_file(case) for name, case in every.items()}

    def names(*wanted):
        return [case.name for case in select(wanted, every, files)]

    assert names("softmax") == ["softmax"]
    forms = [f"mx_dim1{form}" for form in ("_flat", "_flat16", "_flat64", "_flat128")]
    forms += [f"mx_dim1{form}" for form in ("_view", "_back", "_rows", "_rounded")]
    ways = ["mx_dim0", "mx_dim1", *forms]
    both = ["mx_both", "mx_both_flat", "mx_both_fp8"]
    assert names("mx_*") == names("block_scaling") == [*ways, *both]
    assert len([name for name in names("kernels") if not name.endswith("_grad")]) == 17
    assert names("rms_norm_backward", "softmax", "softmax") == ["rms_norm_backward", "softmax"]


def test_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.setattr(bench_command, "cuda_device_count", lambda: 4)
    assert bench_command.chosen_gpus("", ["c"]) == ["0", "1", "2", "3"]
    assert bench_command.chosen_gpus("1,3", ["c"]) == ["1", "3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert bench_command.chosen_gpus("0,2", ["c"]) == ["4", "6"]
    with pytest.raises(UsageError, match="no GPU 9; there are 4"):
        bench_command.chosen_gpus("9", ["c"])


def test_under_torchrun_one_rank_runs_the_lanes_of_all(monkeypatch):
    monkeypatch.setattr(bench_command, "cuda_device_count", lambda: 4)
    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    assert bench_command.chosen_gpus("", ["c"]) == ["0", "1"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="one host"):
        bench_command.chosen_gpus("", ["c"])
    monkeypatch.setenv("LOCAL_RANK", "1")  # has nothing to do, nor to say
    other = run("no_such_case")
    assert (other.exit_code, other.output) == (0, "")


def test_a_tree_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_command, "cuda_device_count", lambda: 1)
    error = run("softmax", "--prefix", str(tmp_path / "none")).exception
    assert isinstance(error, GraftError)
    assert "none" in error.message
    with pytest.raises(GraftError):
        tree.load(tmp_path / "none")


# --- peers -------------------------------------------------------------------------------------


def wheel(folder, name, version):
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as out:
        out.writestr(f"{name}/__init__.py", "")
        info = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        out.writestr(f"{name}-{version}.dist-info/METADATA", info)
        out.writestr(f"{name}-{version}.data/purelib/{name}_extra.py", "")


def test_wheels_are_unpacked_once(tmp_path):
    wheel(tmp_path / "wheels", "liger_kernel", "0.8.5")
    target = peers.unpack(tmp_path / "wheels", tmp_path / "into")
    assert (target / "liger_kernel" / "__init__.py").exists()
    assert (target / "liger_kernel_extra.py").exists()
    (target / "mark").touch()
    assert (peers.unpack(tmp_path / "wheels", tmp_path / "into") / "mark").exists()


def test_a_peer_is_absent_of_another_version_or_there(tmp_path, monkeypatch):
    assert peers.absence("liger") == "liger-kernel is not installed"
    for version, said in (
        ("0.1.0", "liger-kernel 0.1.0 is installed, 0.8.5 expected"),
        ("0.8.5", None),
    ):
        wheel(tmp_path / version, "liger_kernel", version)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(peers.unpack(tmp_path / version, tmp_path / "into")))
            assert peers.absence("liger") == said


def test_folders_that_hold_no_wheels_are_named(tmp_path):
    with pytest.raises(GraftError, match="holds no wheels"):
        peers.unpack(tmp_path, tmp_path / "into")
    (tmp_path / "x.whl").write_text("no zip")
    with pytest.raises(GraftError, match=r"x\.whl is no wheel"):
        peers.unpack(tmp_path, tmp_path / "into")


def test_every_peer_kernel_is_of_a_case():
    for kernels in (peers._LIGER, peers._QUACK):
        assert set(kernels) <= set(load_all())


# --- other people's kernels --------------------------------------------------------------------

HARNESS = """
import json, torch
from pathlib import Path
def load_shape_configs(file):
    return {str(i): p for i, p in enumerate(json.loads(
        (Path(file).parent / "shapes.json").read_text())["points"])}
def make_inputs_from_config(config):
    return [torch.ones(config["size"]), config["size"]]
"""
REPRO = """
import torch
class Repro(torch.nn.Module):
    def forward(self, x, size):
        return x.sum(0), x.sum(1){extra}
"""


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "repro_harness.py").write_text(HARNESS)
    for name, extra in (("sum_b", ""), ("sum_a", ""), ("rand_c", "  # aten.rand")):
        folder = tmp_path / "repros" / "canonical" / name
        folder.mkdir(parents=True)
        (folder / "repro.py").write_text(REPRO.format(extra=extra))
        (folder / "shapes.json").write_text(
            json.dumps({"points": [{"size": [2, 3]}, {"size": [4, 5]}]})
        )
    return tmp_path


def test_repros_are_chosen_by_glob_number_and_point(checkout):
    def chosen(*wanted, points="first"):
        return [(p.case, p.shape) for p in corpus.select(checkout, wanted, points)]

    assert chosen("sum_*") == [("sum_a", (0,)), ("sum_b", (0,))]
    assert chosen("0") == [("rand_c", (0,))]
    assert chosen("1-2", points="all") == [(n, (i,)) for n in ("sum_a", "sum_b") for i in (0, 1)]
    assert chosen("sum_a", points="1") == [("sum_a", (1,))]
    with pytest.raises(UsageError, match="names no kernel of 3"):
        chosen("nope")
    with pytest.raises(GraftError, match="no checkout of better-benchmark"):
        corpus.select(checkout / "repros", ["*"], "first")


def test_a_repro_is_loaded_with_its_own_inputs(checkout):
    case = corpus.load(checkout, "sum_a")
    inputs = case.inputs((1,), None, None)
    assert case.fn(*inputs)[0].shape == (5,)
    assert not case.random
    assert corpus.load(checkout, "rand_c").random
