import csv
import math
import sys
from types import ModuleType

import pytest
import torch

from nsa.lab.observers.deferred import Deferred
from nsa.lab.observers.writers import CsvWriter, TensorBoardWriter


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_loss_is_a_row_that_is_there_at_once(tmp_path):
    writer = CsvWriter(tmp_path / "new" / "losses.csv")
    for step in range(3):
        writer.on_step(step, torch.tensor(5.5 - step))
    found = rows(tmp_path / "new" / "losses.csv")  # not closed: what a killed run leaves
    assert [(row["step"], row["name"], row["value"]) for row in found] == [
        ("0", "loss", "5.5"),
        ("1", "loss", "4.5"),
        ("2", "loss", "3.5"),
    ]
    assert all(row["iso"].startswith("20") for row in found)
    writer.close()


def test_a_loss_on_its_way_is_not_waited_for_and_written_at_the_end(tmp_path, monkeypatch):
    writer = CsvWriter(tmp_path / "losses.csv")
    monkeypatch.setattr(Deferred, "ready", lambda self: iter(()))
    loss = torch.tensor(5.5)
    writer.on_step(0, loss)
    loss.fill_(0.0)  # the next step's
    assert rows(tmp_path / "losses.csv") == []
    writer.close()
    assert [row["value"] for row in rows(tmp_path / "losses.csv")] == ["5.5"]


def test_numbers_read_back_as_they_were(tmp_path):
    writer = CsvWriter(tmp_path / "x.csv")
    loss = torch.tensor(1 / 3)
    writer.on_step(0, loss)
    writer.on_step(1, torch.tensor(float("nan")))
    writer.write(1, {"layer0/gate_cmp": 0.5})
    writer.close()
    found = rows(tmp_path / "x.csv")
    assert float(found[0]["value"]) == loss.item()
    assert math.isnan(float(found[1]["value"]))
    assert (found[2]["name"], found[2]["value"]) == ("layer0/gate_cmp", "0.5")


def test_a_run_that_goes_on_continues_the_file_and_drops_a_row_cut_short(tmp_path):
    path = tmp_path / "losses.csv"
    first = CsvWriter(path)
    first.on_step(0, torch.tensor(5.5))
    first.close()
    with path.open("a") as file:
        file.write("2026-01-01T00:00:00.000+00:00,1,lo")
    again = CsvWriter(path)
    again.on_step(1, torch.tensor(4.5))
    again.close()
    assert [row["step"] for row in rows(path)] == ["0", "1"]
    assert path.read_text().count("iso,") == 1


def test_a_header_cut_short_is_written_anew(tmp_path):
    path = tmp_path / "losses.csv"
    path.write_text("iso,st")
    writer = CsvWriter(path)
    writer.on_step(0, torch.tensor(5.5))
    writer.close()
    assert [row["value"] for row in rows(path)] == ["5.5"]


def test_another_table_is_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n3")
    with pytest.raises(ValueError, match="begins with 'a,b', not with 'iso,step,name,value'"):
        CsvWriter(path)
    assert path.read_text() == "a,b\n1,2\n3"


def test_losses_can_be_written_more_rarely(tmp_path):
    writer = CsvWriter(tmp_path / "losses.csv", every=3)
    for step in range(7):
        writer.on_step(step, torch.tensor(1.0))
    writer.close()
    assert [row["step"] for row in rows(tmp_path / "losses.csv")] == ["0", "3", "6"]
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        CsvWriter(tmp_path / "losses.csv", every=0)


class Scalars:
    """What SummaryWriter is asked for."""

    def __init__(self, log_dir):
        self.log_dir, self.seen, self.closed = log_dir, [], False

    def add_scalar(self, name, value, step, walltime):
        self.seen.append((name, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_gets_the_same_numbers(tmp_path, monkeypatch):
    stub = ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Scalars
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    writer = TensorBoardWriter(tmp_path)
    writer.on_step(4, torch.tensor(5.5))
    writer.write(4, {"layer0/gate_cmp": 0.5})
    writer.close()
    assert writer._writer.seen == [("loss", 5.5, 4), ("layer0/gate_cmp", 0.5, 4)]
    assert writer._writer.log_dir == str(tmp_path) and writer._writer.closed


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path)


def test_tensorboard_can_read_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoardWriter(tmp_path)
    writer.on_step(4, torch.tensor(5.5))
    writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(4, 5.5)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_gpu_until_the_writer_is_closed(tmp_path):
    writer = CsvWriter(tmp_path / "losses.csv")
    for step in range(3):  # pinned memory is allocated
        writer.on_step(step, torch.tensor(1.0, device="cuda"))
        torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        torch.cuda._sleep(200_000_000)
        loss = torch.ones((), device="cuda") * 5.5
        writer.on_step(3, loss)
        loss.fill_(0.0)
        assert [row["step"] for row in rows(tmp_path / "losses.csv")] == ["0", "1", "2"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    writer.close()
    assert [row["value"] for row in rows(tmp_path / "losses.csv")] == ["1.0", "1.0", "1.0", "5.5"]
