import os
import warnings
from functools import partial
from unittest.mock import Mock

import observed
import pytest
import torch
from tiny_models import tiny

from nsa.model import saving
from nsa.model.data import synthetic
from nsa.model.llama import LanguageModel
from nsa.model.parallel import Parallel
from nsa.model.train import Trainer
from nsa.model.train_config import TrainConfig

KERNELS = {"config": tiny(head_dim=16, backend="triton"), "device": "cuda"}
trainer = partial(observed.trainer, lr=1e-2)


def everything(trained):
    """All that a later step depends on, as tensors by name."""
    states = trained.optimizer.state
    found = dict(trained.model.state_dict())
    for name, parameter in trained.model.named_parameters():
        found |= {f"{name}.{key}": value for key, value in states.get(parameter, {}).items()}
    scaler = trained.scaler.state_dict()
    return found | {f"scaler.{key}": torch.tensor(value) for key, value in scaler.items()}


def assert_equal_bits(one, other):
    one, other = everything(one), everything(other)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def frozen(seed):
    model = LanguageModel(tiny())
    model.norm.weight.requires_grad_(False)
    return trainer(model=model, seed=seed)


def resumed_in_the_middle(folder, made=trainer, **settings):
    """(6 steps, 3 steps that are saved and 3 of a trainer that knows only the file), losses too."""
    whole, first, second = (made(seed=seed, **settings) for seed in (0, 0, 1))
    losses = whole.run(6)
    begun = first.run(3)
    first.save(folder)
    second.run(1)  # what it held before must not matter
    second.load(folder)
    assert second.steps_done == 3
    return whole, second, losses, begun + second.run(3)


@pytest.mark.full
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"precision": "bf16"}, id="bf16"),
        pytest.param({"precision": "fp16"}, id="fp16"),
        pytest.param(
            {"accumulate": 2, "schedule": "cosine", "steps": 6, "warmup_steps": 2}, id="accumulated"
        ),
        pytest.param({"config": tiny(force_branch="win")}, id="parameters without gradients"),
        pytest.param({"made": frozen}, id="a frozen parameter"),
        pytest.param({"config": tiny(gate="uniform", rope_scale=2.0)}, id="a uniform gate"),
        pytest.param(KERNELS, id="kernels", marks=pytest.mark.gpu),
        pytest.param(KERNELS | {"precision": "fp16"}, id="kernels fp16", marks=pytest.mark.gpu),
    ],
)
def test_a_resumed_run_is_the_whole_one_to_the_last_bit(settings, tmp_path):
    whole, resumed, losses, parts = resumed_in_the_middle(tmp_path, **settings)
    assert parts == losses
    assert_equal_bits(resumed, whole)
    assert resumed.skipped_steps == whole.skipped_steps
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003.pt"]


@pytest.mark.gpu
def test_a_captured_run_is_resumed_by_a_graph_of_its_own(tmp_path):
    _, resumed, losses, parts = resumed_in_the_middle(tmp_path, **KERNELS, cuda_graph=True)
    assert parts == pytest.approx(losses, abs=1e-4)
    assert resumed.run(2)[-1] < 6.0


def test_a_checkpoint_of_no_step_is_the_run_from_its_start(tmp_path):
    whole, first, second = trainer(), trainer(), trainer(seed=1)
    first.save(tmp_path)
    expected = torch.randn(3)
    torch.randn(7)
    second.load(tmp_path)
    assert torch.equal(torch.randn(3), expected), "random numbers go on where they were"
    assert second.run(2) == first.run(2) == whole.run(2)
    assert_equal_bits(second, whole)
    assert_equal_bits(first, whole)


def test_loading_leaves_the_optimizers_settings_as_they_were_made(tmp_path):
    saved, other = trainer(), trainer()
    saved.run(1)
    saved.save(tmp_path)

    def settings():
        groups = other.optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    before = settings()
    other.load(tmp_path)
    assert settings() == before and before[0]["lr"] == 1e-2


def test_no_rank_goes_on_before_the_file_is_there(tmp_path):
    there = []

    class Waiting(Parallel):
        def barrier(self):
            there.extend(file.name for file in tmp_path.iterdir())

    training = TrainConfig(batch=2, tokens=32)
    Trainer(LanguageModel(tiny()), synthetic(0), training, parallel=Waiting()).save(tmp_path)
    assert there == ["step-000000.pt"]


def test_what_decides_how_and_not_what_is_computed_may_change(tmp_path):
    saved = trainer()
    saved.run(1)
    saved.save(tmp_path)
    other = trainer(config=tiny(backend="masked", checkpoint="all"), accumulate=2, steps=100)
    other.load(tmp_path)
    assert other.steps_done == 1
    assert other.run(1) == [pytest.approx(saved.run(1)[0], abs=1e-5)]
    assert [group["lr"] for group in other.optimizer.param_groups] == [2e-3, 2e-3]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"config": tiny(dim=64)}, r"model dim: 64, 32"),
        ({"clip": 0.5}, r"training clip: 0\.5, 1\.0"),
        ({"config": tiny(nsa={"window": 4})}, r"model nsa\.window: 4, 8"),
        ({"lr": 0.5, "precision": "bf16"}, r"training lr: 0\.5, 0\.01; .*: 'bf16', 'fp32'"),
    ],
)
def test_another_config_is_refused_by_its_fields_and_nothing_changes(settings, named, tmp_path):
    saved = trainer()
    saved.run(1)
    saved.save(tmp_path / "one.pt")
    other, untouched = trainer(**settings), trainer(**settings)
    with pytest.raises(ValueError, match=named):
        other.load(tmp_path / "one.pt")
    assert_equal_bits(other, untouched)


def test_a_checkpoint_that_is_older_than_a_field_had_its_default(tmp_path):
    before = trainer()
    before.save(tmp_path / "old.pt")
    state = saving.read(tmp_path / "old.pt")
    for name in ("gate_temperature", "gate_init", "rope_scale"):
        del state["configs"]["model"][name]
    saving.write(state, tmp_path / "old.pt")
    trainer().load(tmp_path / "old.pt")
    with pytest.raises(ValueError, match=r"model gate_temperature: 2\.0, 1\.0"):
        trainer(config=tiny(gate_temperature=2.0)).load(tmp_path / "old.pt")


@pytest.mark.parametrize("left", [0.0, 0.5, 0.999, 1.0])
def test_a_file_that_is_truncated_or_has_one_byte_changed_is_refused(left, tmp_path):
    file, trained = tmp_path / "one.pt", trainer()
    trained.save(file)
    content = bytearray(file.read_bytes())
    place = content.find(trained.model.head.weight.detach().numpy().tobytes()[:64])
    assert place > 0
    if left == 1.0:
        content[place + 3] ^= 0x40
    file.write_bytes(content[: int(left * len(content))])
    with pytest.raises(ValueError, match=r"one\.pt is truncated or no checkpoint"):
        trainer().load(file)


def test_files_of_something_else_are_refused(tmp_path):
    trained, file = trainer(), tmp_path / "other.pt"
    with pytest.raises(FileNotFoundError, match=r"other\.pt"):
        trained.load(file)
    file.write_text("hello")
    with pytest.raises(ValueError, match=r"other\.pt is truncated or no checkpoint"):
        trained.load(file)
    for content, message in (
        (trained.model, "is truncated or no checkpoint"),  # would execute code
        ({"model": {}}, "holds no nsa training checkpoint"),
        ([1, 2], "holds no nsa training checkpoint"),
        ({"format": saving.FORMAT, "version": 99}, "is of version 99, .* reads version 1"),
    ):
        torch.save(content, file)
        with pytest.raises(ValueError, match=rf"other\.pt {message}"):
            trained.load(file)


class Interrupted:
    """A stream that Ctrl-C meets after so many bytes."""

    def __init__(self, stream, after):
        self.stream, self.left = stream, after

    def write(self, data):
        self.left -= len(data)
        if self.left < 0:
            self.stream.write(bytes(data)[: len(data) // 2])
            raise KeyboardInterrupt
        return self.stream.write(data)

    def __getattr__(self, name):
        return getattr(self.stream, name)


@pytest.mark.parametrize("after", [0, 20_000])
def test_an_interrupted_write_leaves_the_last_good_checkpoint(after, tmp_path, monkeypatch):
    trained = trainer()
    trained.run(1)
    trained.save(tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    trained.run(1)
    plain = torch.save
    monkeypatch.setattr(torch, "save", lambda x, stream: plain(x, Interrupted(stream, after)))
    with pytest.raises(KeyboardInterrupt):
        trained.save(tmp_path / "last.pt")
    assert (tmp_path / "last.pt").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["last.pt"]
    monkeypatch.undo()
    trained.save(tmp_path / "last.pt")
    other = trainer()
    other.load(tmp_path / "last.pt")
    assert other.steps_done == 2


def test_the_disk_has_the_bytes_before_the_name(tmp_path, monkeypatch):
    noted = Mock(wraps=os)
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, getattr(noted, name))
    trainer().save(tmp_path)
    assert [name for name, *_ in noted.method_calls] == ["fsync", "replace", "fsync"]


def test_a_folder_stands_for_its_newest_readable_checkpoint(tmp_path):
    trained = trainer()
    for _ in range(3):
        trained.run(1)
        trained.save(tmp_path)
    (tmp_path / "notes.txt").write_text("no checkpoint")
    names = [path.name for path in saving.checkpoints(tmp_path)]
    assert names == ["step-000001.pt", "step-000002.pt", "step-000003.pt"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last = trainer()
        last.load(tmp_path)
    assert last.steps_done == 3
    os.truncate(tmp_path / "step-000003.pt", 5000)
    with pytest.warns(RuntimeWarning, match=r"passed over: .*step-000003\.pt is truncated"):
        last.load(tmp_path)
    assert last.steps_done == 2
    for file in saving.checkpoints(tmp_path):
        os.truncate(file, 10)
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read: .*step-000001\.pt"):
        last.load(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint \(step-000500\.pt\) in"):
        last.load(tmp_path / "empty")
    assert saving.file_of("runs", 1_500_000).name == "step-1500000.pt"
    assert saving.file_of("runs/last.pt", 7).name == "last.pt"
