"""Files that a memory snapshot leaves in a folder, and what it says where it cannot."""

import csv
import gc
import itertools
import json
import pickle
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from observed import trainer
from quadratic import T, Training
from tiny_models import tiny
from torch._dynamo.utils import counters

from workbook.lab.measure import attribution
from workbook.lab.measure.attribution import ENOUGH
from workbook.lab.observers import memory_snapshot
from workbook.lab.observers.memory_snapshot import MemorySnapshot, chosen
from workbook.lab.training import TrainingSpec, open_trainer

pytestmark = pytest.mark.usefixtures("nothing_before")


@pytest.fixture
def poisoned_memory():
    """Not here: filling memory with NaN allocates."""


@pytest.fixture(scope="module", autouse=True)
def nothing_was_compiled():
    """Forget what earlier modules compiled here: it would cost every snapshot its lines."""
    counters.clear()


@pytest.fixture(autouse=True)
def nobody_elses():
    """Let go of what earlier tests held: to a snapshot it is resident."""
    gc.collect()
    yield
    from torch.optim import optimizer  # of snapshots that a test did not close

    optimizer._global_optimizer_pre_hooks.clear()
    optimizer._global_optimizer_post_hooks.clear()


def left(folder, name="memory-rank0.json"):
    return json.loads((folder / name).read_text())


def of_second_step(spec, folder):
    """The record of the second step of that training."""
    with open_trainer(spec) as made:
        made.observers = (MemorySnapshot(1, folder),)
        made.run(2)
    return left(folder)


@contextmanager
def of_step(folder):
    """A snapshot of what runs inside, as of a step of a loop without a Trainer."""
    snapshot = MemorySnapshot(0, folder)
    snapshot.begin(0)
    yield
    snapshot.end(0)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """The folder of a stranger's training, of whose model nobody was told."""
    folder = tmp_path_factory.mktemp("stranger")
    training, snapshot = Training({}, None), MemorySnapshot(1, folder)
    for i in range(3):
        snapshot.begin(i)
        training.step(i)
        snapshot.end(i)
    snapshot.close()
    return folder


def test_the_planted_line_of_a_strangers_file_comes_first_with_its_share(stranger):
    first, second, *_ = left(stranger)["table"]
    assert {row["category"] for row in (first, second)} == {"activations", "temporaries"}
    for row in (first, second):
        assert row["line"] == "tests/support/quadratic.py:16 Scores.forward"
        assert row["module"] == "layers.*" and row["mib"] == 2 * 4 * T * T / 2**20


def test_a_strangers_phases_are_found(stranger):
    found = left(stranger)
    names = [name for name, _ in found["timeline"]["phases"]]
    assert names == [
        "forward",
        "backward",
        "after the backward",
        "optimizer",
        "after the optimizer",
    ]
    assert found["phase"] == "backward"


def test_the_differences_of_the_backward_sum(stranger):
    held = left(stranger)["held_mib"]
    before, after = held["before_backward"], held["after_backward"]
    assert held["difference"] == {name: after[name] - before[name] for name in before}
    statistics = left(stranger)["statistics"]
    for at, by_category in held.items():
        if at != "difference":
            now = statistics[at]["allocated_bytes.all.current"]
            assert sum(by_category.values()) * 2**20 == pytest.approx(now)
    assert before["activations"] > 2 and after["activations"] < 0.1


def test_the_table_is_whole_and_the_picture_has_the_peak(stranger):
    found = left(stranger)
    with (stranger / "memory-rank0.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert sum(float(row["mib"]) for row in rows) == pytest.approx(found["peak_mib"])
    levels = zip(*found["timeline"]["mib"].values(), strict=True)
    assert max(map(sum, levels)) == pytest.approx(found["peak_mib"], abs=1e-3)


def test_a_page_says_what_a_cpu_has_not(stranger):
    page = (stranger / "memory-rank0.txt").read_text()
    assert "torch has no statistics, summary or snapshot file of a CPU" in page
    assert "of the peak is attributed to modules and lines (aim: 95%)" in page
    assert not list(stranger.glob("*.pickle"))


@pytest.mark.parametrize("backend", ["masked", pytest.param("gather", marks=pytest.mark.full)])
def test_95_percent_of_the_production_presets_peak_is_told_by_line(tmp_path, backend):
    spec = TrainingSpec("production", 64, layers=1, backend=backend, data="synthetic")
    found = of_second_step(spec, tmp_path)
    assert found["explained"] >= ENOUGH and found["cross_check"]["agrees"]
    told = sum(row["mib"] for row in found["table"]) - sum(row["mib"] for row in found["missing"])
    assert told / found["peak_mib"] == pytest.approx(found["explained"])
    blocks = {row["module"] for row in found["table"] if row["category"] == "parameters"}
    assert "blocks.*.mlp.down_proj" in blocks


def test_a_snapshot_keeps_no_model_alive(tmp_path):
    made = trainer(MemorySnapshot(0, tmp_path))
    made.run(1)
    model = weakref.ref(made.model)
    made.close()
    del made
    gc.collect()
    assert model() is None


def test_a_share_that_is_too_small_says_what_is_missing(tmp_path):
    weight = torch.ones(8, requires_grad=True)
    kept = itertools.repeat(torch.zeros(100_000))  # which has no name for it
    with of_step(tmp_path):
        (weight * 2).sum().backward()
    assert left(tmp_path)["explained"] < ENOUGH and next(kept) is not None
    page = (tmp_path / "memory-rank0.txt").read_text()
    assert "there before the step, in no tensor that a name of Python's leads to" in page


def test_micro_batches_are_forwards_and_backwards_of_one_step(tmp_path):
    training = Training({}, None)
    with of_step(tmp_path):
        for _ in range(2):
            training.model(torch.ones(T, 8)).backward()
        training.optimizer.step()
    names = [name for name, _ in left(tmp_path)["timeline"]["phases"]]
    assert names[:5] == ["forward", "backward", "forward", "backward", "after the backward"]


def test_all_phases_are_one_profile(tmp_path, monkeypatch):
    """An optimizer's step is a range of torch's, within which a stranger's phase begins: where one
    profile ended and the next began inside it, its end wrote into memory that was freed."""
    begun = []
    plain = attribution.profiled
    monkeypatch.setattr(attribution, "profiled", lambda *a, **o: begun.append(a) or plain(*a, **o))
    training = Training({}, None)
    with of_step(tmp_path):
        training.step(0)
    assert len(begun) == 1 and len(left(tmp_path)["timeline"]["phases"]) == 5


def test_a_step_that_fails_leaves_what_was_held_until_then(tmp_path):
    training, snapshot = Training({"fails": 1}, None), MemorySnapshot(1, tmp_path)
    with pytest.raises(MemoryError, match="planted"):
        for i in range(2):
            snapshot.begin(i)
            training.step(i)
            snapshot.end(i)
    snapshot.close()
    assert "step 1 did not end" in (tmp_path / "memory-rank0.txt").read_text()
    assert left(tmp_path)["table"][0]["line"].startswith("tests/support/quadratic.py:16")
    assert torch.autograd.backward.__module__ == "torch.autograd", "nothing is left in its place"


def test_a_step_that_never_comes_is_told(tmp_path):
    made = trainer(MemorySnapshot(7, tmp_path))
    made.run(2)
    made.close()
    page = (tmp_path / "memory-rank0.txt").read_text()
    assert "step 7 was never reached" in page and "--memory-snapshot 1 would do" in page
    assert not (tmp_path / "memory-rank0.json").exists()


def test_a_snapshot_that_fails_costs_no_step(tmp_path, capsys):
    made = trainer(MemorySnapshot(0, tmp_path))
    with torch.profiler.profile():  # torch has one
        losses = made.run(2)
    made.close()
    assert losses == trainer().run(2)
    why = "the memory snapshot failed: RuntimeError: a profiler of torch's is on, and there is one"
    assert why in capsys.readouterr().err
    assert why in (tmp_path / "memory-rank0.txt").read_text()


def test_losses_are_those_of_a_run_without_one(tmp_path):
    config = tiny(backend="gather")
    assert trainer(MemorySnapshot(1, tmp_path), config=config).run(3) == trainer(config=config).run(
        3
    )


def test_what_was_compiled_has_no_lines_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_snapshot, "_something_was_compiled", lambda model: True)
    made = trainer(MemorySnapshot(1, tmp_path))
    made.run(2)
    page = (tmp_path / "memory-rank0.txt").read_text()
    assert "what runs in it has neither modules nor lines" in page and "what is missing:" in page
    assert "allocated in the backward by " in page


def test_a_step_without_a_backward_says_what_a_graph_has_not(tmp_path):
    with of_step(tmp_path):
        torch.ones(1000).exp()
    assert "a CUDA graph replays without phases" in (tmp_path / "memory-rank0.txt").read_text()


@pytest.mark.parametrize(
    ("asked", "profiled", "graph", "message"),
    [
        ("12", range(0), False, "is no step from 2 to 9, counted from 0; 'second' is the second"),
        ("-1", range(0), False, "is no step"),
        ("5", range(4, 6), False, "step 5 is profiled, and torch has one profiler"),
        ("5", range(0), True, "--memory-snapshot without --cuda-graph"),
    ],
)
def test_a_step_that_cannot_be_is_refused(asked, profiled, graph, message):
    with pytest.raises(ValueError, match=message):
        chosen(asked, range(2, 10), profiled, graph)


def test_the_second_step_is_the_usual_one_and_of_one_the_first():
    assert chosen("second", range(2, 10), range(0), False) == 3
    assert chosen("second", range(2, 3), range(0), False) == 2
    assert chosen("", range(2, 10), range(0), True) is None


@pytest.mark.parametrize(("most", "filled"), [(3, True), (2, False)])
def test_a_history_that_overflows_is_told_and_fills_in_nothing(tmp_path, monkeypatch, most, filled):
    found = {"device_traces": [[{"action": "alloc"}, {"action": "free"}]], "segments": []}
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: found)
    calls = []
    monkeypatch.setattr(memory_snapshot, "MOST_ENTRIES", most)
    snapshot = MemorySnapshot(0, tmp_path)
    snapshot._history(SimpleNamespace(index=0, fill=calls.append))
    assert pickle.loads((tmp_path / "memory-rank0.pickle").read_bytes()) == found
    assert calls == [found["device_traces"][0]] * filled
    assert any("overflowed 2 entries" in note for note in snapshot.notes) is not filled


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gather", "triton"])
def test_on_a_gpu_torch_has_the_same_peak_and_its_viewer_reads_the_snapshot(tmp_path, backend):
    from torch.cuda import _memory_viz

    spec = TrainingSpec("production", 1024, layers=2, backend=backend, precision="bf16",
                        device="cuda", data="synthetic")  # fmt: skip
    found = of_second_step(spec, tmp_path)
    assert found["cross_check"]["agrees"], found["cross_check"]
    assert found["explained"] >= ENOUGH, found["missing"][:5]
    assert set(found["torch_statistics"]) == {
        "before_backward", "after_backward", "end_of_peak_phase"
    }  # fmt: skip
    for name in ("before_backward", "after_backward"):
        theirs = found["torch_statistics"][name]["allocated_bytes.all.current"]
        assert found["statistics"][name]["allocated_bytes.all.current"] == pytest.approx(
            theirs, rel=0.01
        )
    assert "PyTorch CUDA memory summary" in (tmp_path / "memory-summary-rank0.txt").read_text()
    snapshot = pickle.loads((tmp_path / "memory-rank0.pickle").read_bytes())
    assert "<html" in _memory_viz.trace_plot(snapshot).lower() or snapshot["device_traces"][0]


@pytest.mark.gpu
def test_a_compiled_model_on_a_gpu_has_the_lines_that_called_it(tmp_path):
    spec = TrainingSpec("production", 1024, layers=2, backend="masked", precision="bf16",
                        device="cuda", data="synthetic", compile=True)  # fmt: skip
    found = of_second_step(spec, tmp_path)
    assert any(row["line"] for row in found["table"] if row["phase"] == "forward")
