"""Conditions that `nsa train` looks at before its first step, each planted."""

import json
import os
import shutil
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from train_commands import TINY

from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.presets import preset
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig
from whyhung.process import preflight
from workbook.cli import main as cli
from workbook.lab.measure.activation_model import predict
from workbook.lab.measure.recorders import recorder_for, training_tensors
from workbook.lab.options import Options, Steps
from workbook.rooms.training import preflight as checks
from workbook.rooms.training.job import Job


def job(train=None, model="cpu_test", **changes):
    config = preset(model, **changes.pop("changed", {}))
    settings = {"batch": 4, "tokens": 48, "steps": 5} | (train or {})
    return Job(config, TrainConfig(**settings), data="synthetic", **{"device": "cpu"} | changes)


def states(found):
    return {finding.about: finding.state for finding in found}


def texts(found, state):
    return [finding.text for finding in found if finding.state == state]


@pytest.fixture
def gpu(place, monkeypatch):
    """A machine that seems to have a GPU, whose nvidia-smi says what is in `gpu.says`."""
    says = {"--query-gpu=memory.free": [["80000"]], "--query-gpu=memory.used": [["4"]]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(checks, "devices", lambda *_: (True, "nccl"))
    asked = []

    def smi(query, only):
        asked.append(only)
        return says.get(query, [])

    monkeypatch.setattr(preflight, "_smi", smi)
    return SimpleNamespace(says=says, asked=asked)


def test_a_healthy_machine_is_all_right_and_only_the_gpu_that_is_used_is_asked_about(gpu):
    found = list(checks.look(job()))
    assert set(states(found).values()) == {"ok"}
    assert set(gpu.asked) == {"3"}


def test_a_foreign_process_on_the_gpu_is_refused_by_its_number(gpu):
    gpu.says["--query-compute-apps=pid,used_memory"] = [["4294967", "1000"]]
    with pytest.raises(ValueError, match=r"also used by process 4294967 \(1000 MiB\).*warn trains"):
        checks.check(job())


def test_ranks_of_the_same_torchrun_are_no_foreigners(gpu, monkeypatch):
    gpu.says["--query-compute-apps=pid,used_memory"] = [["77", "500"], ["88", "500"]]
    parents = {77: os.getppid(), 88: 1}
    own = preflight._ancestors
    monkeypatch.setattr(
        preflight, "_ancestors", lambda pid: {pid, parents[pid]} if pid in parents else own(pid)
    )
    assert len(texts(checks.look(job()), "refused")) == 2
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    (text,) = texts(checks.look(job()), "refused")
    assert "process 88" in text


@pytest.mark.parametrize(
    ("free_mib", "state", "said"),
    [
        (6, "refused", "weights, gradients and moments take 6.74 MiB and the GPU has 6 MiB free"),
        (7, "warning", "a smaller --batch, --accumulate or --checkpoint all would need less"),
        (64, "ok", "activations from shapes, to 15 %"),
    ],
)
def test_memory_is_refused_where_what_is_exact_does_not_fit_else_warned(gpu, free_mib, state, said):
    gpu.says["--query-gpu=memory.free"] = [[str(free_mib)]]
    (found,) = (f for f in checks.look(job()) if f.about == "memory")
    assert found.state == state and said in found.text


def test_memory_that_cannot_be_known_is_said_to_be_unknown(gpu):
    del gpu.says["--query-gpu=memory.free"]
    assert states(checks.look(job()))["memory"] == "unknown"
    assert checks.check(job())["findings"], "and nothing is refused"


def test_the_exact_part_is_exact_and_ranks_share_it_only_under_fsdp():
    exact, peak, _ = checks.needed(job(), 1)
    assert exact == predict(preset("cpu_test")).fixed < peak
    assert checks.needed(replace(job(), kind="fsdp", ranks=2), 2)[0] == exact // 2
    ddp = replace(job(), kind="ddp", ranks=2)
    assert checks.needed(ddp, 2)[0] == exact
    twice = checks.needed(replace(ddp, gradient_as_bucket_view=False), 2)[0]
    assert twice == exact + predict(preset("cpu_test")).gradients


def test_ranks_on_cpus_share_the_memory_of_their_machine(place, monkeypatch):
    room_for_one = 15 * 2**19
    monkeypatch.setattr(checks.preflight, "free_ram", lambda: room_for_one)
    assert states(checks.look(job()))["memory"] == "warning"
    assert states(checks.look(replace(job(), kind="ddp", ranks=2)))["memory"] == "refused"


def test_gradients_are_there_with_the_activations_only_where_they_stay():
    single, shared = job(), job(train={"batch": 8}, kind="ddp", ranks=2)
    gradients = predict(preset("cpu_test")).gradients
    assert checks.needed(shared, 2)[1] - checks.needed(single, 1)[1] == gradients


def test_a_recomputed_block_keeps_its_input():
    def of_the_last_layer(batch):
        peaks = [
            checks.needed(job({"batch": batch}, changed={"layers": n, "checkpoint": "all"}), 1)[1]
            for n in (7, 8)
        ]
        return peaks[1] - peaks[0]

    inputs = 48 * 128 * 4  # fp32 [T, E] of a sequence
    assert of_the_last_layer(512) - of_the_last_layer(256) == pytest.approx(256 * inputs, rel=0.1)


def test_free_memory_is_that_of_the_container_where_that_is_less(tmp_path):
    assert checks.preflight.free_ram(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    assert checks.preflight.free_ram(tmp_path) == 5000 * 1024
    group = tmp_path / "sys" / "fs" / "cgroup"
    group.mkdir(parents=True)
    (group / "memory.stat").write_text("anon 7\ninactive_file 400\n")
    (group / "memory.current").write_text("3000\n")
    for most, free in (("max", 5000 * 1024), ("10000", 10000 - 3000 + 400)):
        (group / "memory.max").write_text(f"{most}\n")
        assert checks.preflight.free_ram(tmp_path) == free


def test_checkpointing_and_micro_batches_lower_the_prediction_and_it_is_held_to_its_order():
    def peak(**changes):
        return checks.needed(job(train={"tokens": 512} | changes.pop("train", {}), **changes), 1)[1]

    layers = {"layers": 12}
    assert peak(changed=layers | {"checkpoint": "all"}) < 0.5 * peak(changed=layers)
    assert peak(train={"accumulate": 4}) < peak()
    assert peak(changed={"checkpoint": "0:1"}) == peak(), "one block is whole at a time anyway"
    dense = checks.needed(job(changed={"attention": "dense"}), 1)
    assert dense[1] is None and "not predicted" in dense[2]


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "checkpoint", "accumulate", "most"),
    [("masked", "", 1, 1.5), ("packed", "", 2, 2.5), ("packed", "all", 1, 5.0)],
)
def test_a_step_takes_no_less_than_is_predicted(backend, checkpoint, accumulate, most):
    changed = {"layers": 3, "backend": backend, "checkpoint": checkpoint}
    asked = job(train={"tokens": 128, "accumulate": accumulate}, changed=changed)
    model = LanguageModel(asked.model)
    trainer = Trainer(model, synthetic(), asked.train)
    trainer.run(1)
    with recorder_for("cpu", training_tensors(model, trainer.optimizer)) as recorder:
        trainer.observers = [recorder]
        trainer.run(1)
    measured, (exact, peak, _) = recorder.record(), checks.needed(asked, 1)
    before = measured["by_category"].get("resident", 0)  # what other tests still hold
    assert exact <= measured["phases"]["optimizer"] - before <= 1.1 * exact
    assert 0.95 * peak <= measured["peak"] - before <= most * peak


def source_tree(folder, package):
    shutil.copytree(package, folder / "nsa", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "pyproject.toml").write_text('[project]\nname = "nsa"\n')


@pytest.fixture
def installed(tmp_path):
    package = tmp_path / "site-packages" / "nsa"
    package.mkdir(parents=True)
    for name in ("__init__.py", "model.py", "old.py"):
        (package / name).write_text(f"# {name}")
    return package


def test_a_stale_installation_is_refused_by_the_number_of_its_files(tmp_path, installed):
    source_tree(tmp_path / "work", installed)
    inside = tmp_path / "work" / "notebooks"
    inside.mkdir()
    assert checks.installation(inside, installed).state == "ok"
    (tmp_path / "work" / "nsa" / "model.py").write_text("# edited")
    (tmp_path / "work" / "nsa" / "new.py").write_text("# only here")
    (tmp_path / "work" / "nsa" / "old.py").unlink()
    found = checks.installation(inside, installed)
    assert found.state == "refused" and "differs in 3 files, nsa/model.py the first" in found.text
    assert f"pip install -e {tmp_path / 'work'}" in found.text
    assert checks.installation(inside, tmp_path / "work" / "nsa").state == "ok", "an editable one"


def test_a_folder_that_is_no_source_tree_says_nothing_about_the_installation(tmp_path, installed):
    (tmp_path / "nsa").mkdir()
    (tmp_path / "nsa" / "__init__.py").write_text("# somebody's own")
    assert checks.installation(tmp_path, installed).state == "ok"


@pytest.mark.parametrize(
    ("given", "changed", "said"),
    [
        ({"train": {"min_lr": 1e-4}}, (), "--min-lr is never used: the schedule is constant"),
        ({"train": {"warmup_steps": 50}}, (), "--warmup 50: --lr is never reached in 5 steps"),
        ({"observe_every": 3}, (), "--observe-every is never used"),
        ({"bucket_mb": 1.0}, (), "--bucket-mb is never used: parallel='none' has no buckets"),
        ({"backend": "gloo"}, (), "--dist-backend is never used: there is one rank"),
        ({"train": {"steps": 2000}}, (), "without --save-every nothing is left of 2000 steps"),
        ({"changed": {"attention": "dense"}}, ("nsa.window",), "--set nsa.window is never used"),
        ({"changed": {"force_branch": "win"}}, ("phi",), "--set phi is never used: force_branch"),
    ],
)
def test_options_that_are_never_used_or_missing_are_warned_of(given, changed, said):
    (text,) = texts(checks._options(job(**given), set(changed)), "warning")
    assert said in text


def test_options_that_are_used_are_not_warned_of():
    used = job(
        train={"min_lr": 1e-4, "schedule": "cosine", "warmup_steps": 2},
        observe=("arrival",),
        observe_every=3,
        save_every=5,
    )
    assert states(checks._options(used, {"nsa.window", "phi"})) == {"options": "ok"}


def test_checkpoints_that_do_not_fit_the_disk_are_refused(place, monkeypatch):
    state = predict(preset("cpu_test"))
    one = state.weights + state.optimizer_state
    usage = SimpleNamespace(free=3 * one - 1)  # two are kept as a third is written
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda _: usage)
    found = states(checks.look(job(save_every=1), runs="not/there/yet"))
    assert found["disk"] == "refused" and states(checks.look(job()))["disk"] == "ok"
    usage.free = one - 1  # the last weights have no room, which costs those alone
    assert states(checks.look(job()))["disk"] == "warning"
    assert states(checks.look(job(weights=False)))["disk"] == "ok"
    usage.free = 3 * one - 1
    usage.free += 1
    assert states(checks.look(job(save_every=1)))["disk"] == "ok"


@pytest.mark.processes
def test_a_refused_run_leaves_nothing_and_warn_and_off_let_it_pass(place, capsys, monkeypatch):
    monkeypatch.setattr(checks.preflight, "free_ram", lambda: 1000)
    assert cli.main([*TINY, "--steps", "1", "--into", "r"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nsa: preflight: weights, gradients and moments take")
    assert error.count("\n") == 1 and not (place / "r").exists()
    assert cli.main([*TINY, "--steps", "1", "--into", "warned", "--preflight", "warn"]) == 0
    assert "nsa: preflight: weights" in capsys.readouterr().err
    stored = json.loads((place / "warned" / "preflight.json").read_text())
    assert stored["how"] == "warn"
    assert {f["about"]: f["state"] for f in stored["findings"]}["memory"] == "refused"
    assert cli.main([*TINY, "--steps", "1", "--into", "off", "--preflight", "off"]) == 0
    assert json.loads((place / "off" / "preflight.json").read_text())["findings"] == []


@pytest.mark.gpu
def test_a_process_that_holds_the_gpu_is_found(place):
    import subprocess
    import sys

    hold = "import torch; x = torch.ones(2**29, device='cuda'); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold], **pipes) as other:
        other.stdout.readline()
        refused = texts(checks.look(job(device="cuda")), "refused")
        other.communicate(b"\n")
    assert refused and "GPU" in refused[0]


def test_options_of_a_step_are_fields_of_its_config_with_their_defaults():
    known = {one.name: one.default for one in fields(TrainConfig)}
    chosen = {"steps": 100, "batch": 8, "tokens": None, "precision": None, "nonfinite": "stop"}
    assert {one.name: one.default for one in fields(Steps)} == {
        name: chosen.get(name, known[name]) for name in known if hasattr(Steps, name)
    }
    assert all(one.metadata["help"] for one in (*fields(Steps), *fields(Options)))
