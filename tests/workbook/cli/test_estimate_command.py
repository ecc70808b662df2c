"""`nsa estimate` on the command line: what it prints, and what it refuses in one line."""

import json
from dataclasses import dataclass, replace

import pytest

from nsa.model.presets import preset
from nsa.model.train_config import TrainConfig
from workbook.cli import main as cli
from workbook.cli.estimate import spec_of
from workbook.lab.estimate import calibrate, estimate, told
from workbook.lab.estimate.gpus import GIB, GPUS, MIB
from workbook.lab.training import TrainingSpec
from workbook.rooms.training.job import Job


@dataclass
class Between:
    fits: int
    does_not: int


TINY = ["preset=cpu_test", "layers=1", "tokens=64", "backend=gather"]


def made(**changes) -> estimate.Estimate:
    phases = {"forward": 2 * MIB, "backward": 3 * MIB}
    held = {"forward": {"parameters": MIB, "activations": MIB, "inputs": 0}}
    held["backward"] = {"parameters": MIB, "activations": 2 * MIB, "inputs": 0}
    known = {"allocated": 3 * MIB, "reserved": 4 * MIB, "phase": "backward", "phases": phases}
    known |= {"by_category": held["backward"], "by_phase_category": held, "how": "traced"}
    known |= {"saved": {"blocks.*.mlp": MIB, "": 2 * MIB}, "unknown": {}, "gpu": "NVIDIA H200"}
    return estimate.Estimate(**known | changes)


@pytest.fixture
def pretended(monkeypatch):
    """Estimates are made up; what they are asked for is noted."""
    asked = []

    def one(spec, **how):
        asked.append((spec, how))
        return made()

    def largest(spec, what, gib, **how):
        asked.append((what, gib, how))
        return Between(2048, 2049)

    monkeypatch.setattr(estimate, "estimate", one)
    monkeypatch.setattr(estimate, "largest", largest, raising=False)
    return asked


def test_a_real_estimate_is_printed_by_phase_category_and_module(capsys):
    assert cli.main(["estimate", *TINY, "device=cpu"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("cpu_test x1 gather T 64, batch 1, fp32, on a CPU\n  allocated  ")
    assert "at the peak, in the " in out and "reserved" not in out
    rows = {line[:17].strip(): line.split()[-4:] for line in out.splitlines()}
    assert {"parameters", "gradients", "optimizer state", "activations", "together"} <= set(rows)
    assert rows["optimizer state"][0] == rows["optimizer state"][-1] != "0.0"
    assert "attention" in out.partition("saved by")[2]


def test_json_has_the_training_the_estimate_and_what_fits(pretended, capsys):
    words = ["estimate", *TINY, "--gpu", "H100", "--allocator", "max_split_size_mb:64"]
    assert cli.main([*words, "--fits", "80", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["spec"]["backend"] == "gather" and found["spec"]["device"] == "cuda"
    assert found["estimate"]["allocated"] == 3 * MIB
    how = {"gpu": "H100", "allocator": "max_split_size_mb:64"}
    assert pretended[0][1] == how
    assert pretended[1:] == [("tokens", 80.0, how), ("batch", 80.0, how)]


def test_a_page_says_what_fits_and_how_far_to_trust_it():
    spec = TrainingSpec("cpu_test", 64, device="cuda", layers=1)
    shown = told.page(spec, made())
    assert "allocated  3.0 MiB at the peak, in the backward" in shown
    assert "reserved   4.0 MiB" in shown and "calibrate" not in shown and "inputs" not in shown
    unsure = {"calibrated": False, "uncertainty": 0.08}
    unsure["unknown"] = {"mine::op": 7 * MIB, "mine::small": 9}
    fits = {"gib": 80.0, "tokens": Between(2048, 2049), "batch": Between(0, 1)}
    shown = told.page(spec, made(**unsure, notes=("a note",)), fits)
    assert "traced, ±8.0%; no NVIDIA H200 was ever calibrated" in shown
    assert "mine::op is in no table; it may hold up to 7.0 MiB more" in shown
    assert "mine::small: in no table, each less than 0.1% of the peak" in shown
    assert "fits       T up to 2,048 (2,049 does not) in 80 GiB" in shown
    assert "fits       no batch: batch 1 does not in 80 GiB" in shown
    assert "note       a note" in shown
    many = made(saved={f"m{i}": MIB for i in range(20)})
    assert "8 others" in told.page(spec, many)


def test_words_are_fields_of_the_training_or_of_its_model():
    spec = spec_of({"preset": "smoke", "nsa.window": 64, "gate": "softmax", "batch": 2})
    assert (spec.tokens, spec.precision, spec.device) == (1024, "bf16", "cuda")
    assert spec.config().nsa.window == 64 and spec.config().gate == "softmax"
    assert spec_of({"device": "cpu"}).precision == "fp32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokns=4"], "a training has no 'tokns'; the nearest is 'tokens'"),
        (["window=4"], "a training has no 'window'; the nearest is 'nsa.window'"),
        (["allocator=x"], "a training has no 'allocator'; nsa estimate --help"),
        (["layers=0"], "layers=0 must be at least 1"),
        (["batch=3", "ranks=2", "parallel=ddp"], "batch"),
        (["backend=gathr"], "the nearest is 'gather'"),
        (["--gpu", "H900"], "gpu='H900' is none that is known"),
        (["--fits", "0"], "--fits 0 must be greater than 0 GiB"),
        (["tokens"], "is not of the form name=value"),
        (["--like", "zz"], "zz"),
        (["--calibrate"], "a GPU is calibrated on itself"),
        ([*TINY, "device=cpu", "backend=triton"], "twice"),
        ([*TINY[:-1], "device=cpu", "backend=flash"], "GPU"),
    ],
)
def test_what_cannot_be_estimated_is_one_line_and_exit_code_2(words, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["estimate", *words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("nsa: ") and message in told and told.count("\n") == 1


def test_our_kernels_are_estimated_where_triton_is_and_else_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr("nsa.attention.backends.triton.INSTALLED", False)
    assert cli.main(["estimate", *TINY[:-1], "backend=triton"]) == 2
    assert "need Triton, but no GPU: pip install 'nsa[triton]'" in capsys.readouterr().err


def test_the_training_of_a_run_is_taken_and_changed(pretended, tmp_path):
    model = preset("smoke", layers=2, backend="packed", nsa={"window": 64})
    train = TrainConfig(batch=4, tokens=128, precision="bf16", steps=3)
    folder = tmp_path / "2026-01-01" / "train-abc"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text('{"status": "ok"}')

    def write(job):
        (folder / "job.json").write_text(json.dumps({"argv": [], **job.to_dict()}))
        return cli.main(["estimate", "batch=8", "--like", str(folder), "--runs", str(tmp_path)])

    assert write(Job(model, train)) == 0
    spec = pretended[0][0]
    assert spec.config() == model
    assert (spec.batch, spec.tokens, spec.precision) == (8, 128, "bf16")
    assert (spec.device, spec.parallel) == ("cuda", "none")
    assert write(Job(model, replace(train, accumulate=2))) == 2
    (folder / "job.json").unlink()
    assert cli.main(["estimate", "--like", str(folder), "--runs", str(tmp_path)]) == 2


def test_a_calibrated_gpu_is_a_line_of_the_table():
    known = GPUS["NVIDIA H200"]
    gpu = replace(known, resident=65 * MIB, context=529 * MIB, total=int(139.8 * GIB))
    assert calibrate.row(gpu) == (
        '_gpu("NVIDIA H200", (9, 0), 132, 139.8, resident=int(65 * MIB), context=529 * MIB),'
    )


@pytest.mark.gpu
@pytest.mark.processes
def test_a_gpu_is_read_in_a_child():
    gpu = calibrate.calibrated()
    assert gpu.measured and gpu.resident > 8 * MIB and gpu.context > 100 * MIB
