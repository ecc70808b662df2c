import csv
import math
import sys
from types import ModuleType

import pytest
import torch
from observed import no_sync

from workbook.lab.observers.deferred import Deferred
from workbook.lab.observers.writers import CsvWriter, TensorBoardWriter


def column(path, name="value"):
    with path.open(newline="") as file:
        return [row[name] for row in csv.DictReader(file)]


def write(writer, *losses, first=0):
    for step, loss in enumerate(losses, first):
        writer.on_step(step, torch.tensor(loss))
    writer.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "losses.csv"


def test_every_loss_is_a_row_that_is_there_at_once(tmp_path):
    path = tmp_path / "new" / "losses.csv"
    writer = CsvWriter(path)
    for step in range(3):
        writer.on_step(step, torch.tensor(5.5 - step))
    # not closed: what a killed run leaves
    assert column(path, "step") == ["0", "1", "2"]
    assert column(path, "name") == ["loss"] * 3
    assert column(path) == ["5.5", "4.5", "3.5"]
    assert all(iso.startswith("20") for iso in column(path, "iso"))
    writer.close()


def test_a_loss_on_its_way_is_not_waited_for_and_written_at_the_end(path, monkeypatch):
    writer = CsvWriter(path)
    monkeypatch.setattr(Deferred, "ready", lambda self: iter(()))
    loss = torch.tensor(5.5)
    writer.on_step(0, loss)
    loss.fill_(0.0)  # the next step's
    assert column(path) == []
    writer.close()
    assert column(path) == ["5.5"]


def test_numbers_read_back_as_they_were(path):
    writer = CsvWriter(path)
    writer.write(1, {"layer0/gate_cmp": 0.5})
    write(writer, 1 / 3, float("nan"))
    assert column(path, "name")[0] == "layer0/gate_cmp"
    gate, third, nan = map(float, column(path))
    assert (gate, third) == (0.5, torch.tensor(1 / 3).item()) and math.isnan(nan)


def test_a_run_that_goes_on_continues_the_file_and_drops_a_row_cut_short(path):
    write(CsvWriter(path), 5.5)
    with path.open("a") as file:
        file.write("2026-01-01T00:00:00.000+00:00,1,lo")
    write(CsvWriter(path), 4.5, first=1)
    assert column(path, "step") == ["0", "1"]
    assert path.read_text().count("iso,") == 1


def test_a_header_cut_short_is_written_anew(path):
    path.write_text("iso,st")
    write(CsvWriter(path), 5.5)
    assert column(path) == ["5.5"]


def test_another_table_is_left_alone(path):
    path.write_text("a,b\n1,2\n3")
    with pytest.raises(ValueError, match="begins with 'a,b', not with 'iso,step,name,value'"):
        CsvWriter(path)
    assert path.read_text() == "a,b\n1,2\n3"


class Scalars:
    """Stands for SummaryWriter and keeps what it is asked for."""

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
    writer.write(4, {"layer0/gate_cmp": 0.5})
    write(writer, 5.5, first=4)
    assert writer._out.seen == [("layer0/gate_cmp", 0.5, 4), ("loss", 5.5, 4)]
    assert writer._out.log_dir == str(tmp_path) and writer._out.closed


def test_without_tensorboard_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path)


def test_tensorboard_can_read_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TensorBoardWriter(tmp_path), 5.5, first=4)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(4, 5.5)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_gpu_until_the_writer_is_closed(path):
    writer = CsvWriter(path)
    for step in range(3):  # pinned memory is allocated
        writer.on_step(step, torch.tensor(1.0, device="cuda"))
        torch.cuda.synchronize()
    with no_sync():
        torch.cuda._sleep(200_000_000)
        loss = torch.ones((), device="cuda") * 5.5
        writer.on_step(3, loss)
        loss.fill_(0.0)
        assert column(path, "step") == ["0", "1", "2"]
    writer.close()
    assert column(path) == ["1.0", "1.0", "1.0", "5.5"]
