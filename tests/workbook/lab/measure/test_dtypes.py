import copy

import pytest
import torch
from observed import trainer
from tiny_models import tiny
from torch import nn

from nsa.model.llama import parameter_count
from workbook.cli import main as cli
from workbook.lab.measure.dtypes import checkpoint_report, dtype_report, file_report, preset_report


def trained(steps=1):
    made = trainer()
    made.run(steps)
    return made


def rows(report, part):
    return {row["dtype"]: row for row in report.rows if row["part"] == part}


def test_a_training_has_fp32_everywhere_and_every_number_is_counted():
    made = trained()
    report = dtype_report(made.model, made.optimizer, torch.float32)
    count = parameter_count(made.model)
    assert report.mismatches == []
    weights = rows(report, "parameters")["fp32"]
    assert weights["elements"] == count and weights["mib"] == pytest.approx(4 * count / 2**20)
    assert weights["tensors"] == len(list(made.model.parameters()))
    assert rows(report, "gradients expected")["fp32"]["elements"] == count
    counts = weights["tensors"]  # AdamW counts the steps of each parameter
    assert rows(report, "optimizer state")["fp32"]["elements"] == 2 * count + counts


def test_a_planted_layer_of_another_dtype_is_flagged_by_name():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 8).bfloat16())
    (said,) = dtype_report(model).mismatches
    assert said == "2.weight, 2.bias are bf16 where most parameters are fp32"
    assert rows(dtype_report(model), "parameters")["bf16"]["elements"] == 64 * 8 + 8


def test_weights_that_are_not_what_the_config_says_are_flagged():
    (said,) = dtype_report(nn.Linear(4, 4).double(), expected=torch.float32).mismatches
    assert said == "weight, bias are fp64; the config says fp32"


def test_moments_narrower_than_fp32_are_flagged():
    model = nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    report = dtype_report(model, optimizer)
    (said,) = report.mismatches
    assert said.startswith("optimizer state weight.exp_avg, weight.exp_avg_sq, bias.exp_avg and 1")
    assert "are bf16" in said
    assert rows(report, "gradients").keys() == {"bf16"}, "those that there are"


def test_gradients_of_another_dtype_are_flagged():
    model = nn.Linear(4, 4)
    if hasattr(model.weight, "grad_dtype"):
        model.weight.grad_dtype = None  # any
    try:
        model.weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("this torch refuses such gradients itself")
    assert dtype_report(model).mismatches == [
        "the gradient of weight is bf16 and the parameter fp32"
    ]


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    assert rows(dtype_report(model), "parameters")["fp32"]["elements"] == 64
    assert rows(checkpoint_report(model.state_dict()), "parameters")["fp32"]["elements"] == 64


def test_integers_in_a_state_dict_are_no_parameters():
    model = nn.BatchNorm1d(4)
    found = checkpoint_report({"state_dict": model.state_dict()})
    assert rows(found, "buffers")["int64"]["elements"] == 1
    assert dtype_report(model).mismatches == []


def test_a_preset_is_reported_as_its_training_will_be_without_memory():
    made = trained()
    there, planned = dtype_report(made.model, made.optimizer), preset_report(tiny())
    assert there.rows == planned.rows


def test_a_checkpoint_is_reported_and_a_mixed_one_flagged(tmp_path, capsys):
    made = trained()
    made.save(tmp_path / "run" / "checkpoints")
    assert cli.main(["env", "dtypes", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "parameters          fp32" in printed and "MISMATCH" not in printed
    (file,) = (tmp_path / "run" / "checkpoints").iterdir()
    content = torch.load(file, weights_only=True)
    mixed = copy.deepcopy(content)
    mixed["model"]["head.weight"] = mixed["model"]["head.weight"].bfloat16()
    torch.save(mixed, tmp_path / "mixed.pt")
    assert cli.main(["env", "dtypes", str(tmp_path / "mixed.pt")]) == 1
    printed = capsys.readouterr().out
    assert "MISMATCH: head.weight is bf16 where most parameters are fp32" in printed
    assert "MISMATCH: head.weight is bf16; the config says fp32" in printed


def test_what_is_no_checkpoint_is_one_clear_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "whole.pt")
    (tmp_path / "folder").mkdir()
    for what, message in (
        ("text.pt", "no checkpoint of tensors and plain values"),
        ("list.pt", "list.pt: it holds a list; needed is a mapping of tensors"),
        ("empty.pt", "no floating-point tensor in it; it holds epoch"),
        ("whole.pt", "torch.save(model.state_dict(), path) writes one"),
        ("folder", "there is no checkpoint (step-000500.pt) in folder"),
        ("cpu_tset", "no preset (repro, step5"),
    ):
        assert cli.main(["env", "dtypes", what]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_preset_by_name(capsys):
    assert cli.main(["env", "dtypes", "cpu_test", "--json"]) == 0
    assert '"elements": 441408' in capsys.readouterr().out


def test_foreign_checkpoints_are_read(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    content = {"model_state_dict": model.state_dict(), "epoch": 1}
    content["optimizer_state_dict"] = optimizer.state_dict()
    torch.save(content, tmp_path / "theirs.pt")
    found = file_report(tmp_path / "theirs.pt")
    assert rows(found, "parameters")["fp32"]["elements"] == 12
    assert rows(found, "optimizer state")["fp32"]["elements"] == 12
