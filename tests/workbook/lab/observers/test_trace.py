"""The trace and the tables of a few profiled steps, read back from what they leave."""

import csv
import gzip
import json

import pytest
from observed import trainer
from tiny_models import tiny
from torch import nn

from nsa.model.llama import LanguageModel
from workbook.lab.observers.trace import Ranges, StepTrace

PHASES = ("data", "forward", "backward", "optimizer")


def watched(file, steps, config=None, **training):
    """A trace of those steps, and the trainer that has it."""
    model = LanguageModel(config or tiny())
    trace = StepTrace(model, training.get("device", "cpu"), steps, file)
    return trace, trainer(trace, model=model, **training)


def profiled(file, steps=range(1, 3), config=None, **training):
    trace, made = watched(file, steps, config, **training)
    made.run(steps.stop + 1)
    return trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return profiled(tmp_path_factory.mktemp("trace") / "trace.json.gz", tokens=64)


@pytest.fixture(scope="module")
def ranges(trace):
    """Ranges of the trace file: (name, start, end) in us."""
    events = json.loads(gzip.decompress(trace.file.read_bytes()))["traceEvents"]
    return [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e.get("cat") == "user_annotation"
    ]


def inside(ranges, outer, name):
    """The ranges of that name within the range `outer`."""
    (start, end) = next((a, b) for n, a, b in ranges if n == outer)
    return [(a, b) for n, a, b in ranges if n == name and start <= a and b <= end]


def test_the_phases_in_the_trace_sum_to_the_step_within_3_percent(ranges):
    differences = []
    for step in ("step 1", "step 2"):
        ((start, end),) = inside(ranges, step, step)
        phases = [inside(ranges, step, name) for name in PHASES]
        assert [len(found) for found in phases] == [1, 1, 1, 1]
        differences.append(1 - sum(b - a for found in phases for a, b in found) / (end - start))
    # of the two, for a busy machine may take the processor away between two phases
    assert 0 <= min(differences) < 0.03


def test_every_layer_and_projection_of_a_branch_has_a_range_in_the_forward(ranges):
    start, end = inside(ranges, "step 1", "forward")[0]
    for name in ("blocks.0", "blocks.1.mlp", "blocks.1.attention.cmp.k_proj", "head"):
        ((a, b),) = inside(ranges, "step 1", name)
        assert start <= a <= b <= end
    (a, b), (c, d) = (inside(ranges, "step 1", f"blocks.0{n}")[0] for n in ("", ".attention"))
    assert a <= c and d <= b
    assert "step 0" not in {name for name, *_ in ranges}, "it was not asked for"


def test_the_tables_are_those_of_the_trace_and_are_stored(trace, ranges, tmp_path):
    report = trace.report()
    steps = [b - a for name, a, b in ranges if name.startswith("step ")]
    assert report.phases[-1]["phase"] == "step"
    assert report.phases[-1]["host_ms"] == pytest.approx(sum(steps) / 2e3, rel=1e-3)
    parts = [b - a for name, a, b in ranges if name in PHASES]
    assert report.accounted == pytest.approx(sum(parts) / sum(steps), rel=1e-3)
    assert any("mm" in row["name"] for row in report.kernels)
    assert 0 < sum(row["ms"] for row in report.kernels) < sum(steps) / 1e3, "each its own time"
    report.write(tmp_path)
    assert (tmp_path / "profile.txt").read_text() == f"{report}\n"
    for name in ("phases", "kernels"):
        with (tmp_path / f"profile-{name}.csv").open() as stream:
            assert len(list(csv.DictReader(stream))) == len(getattr(report, name)) > 0


def test_the_trace_has_the_allocators_events(trace):
    events = json.loads(gzip.decompress(trace.file.read_bytes()))["traceEvents"]
    held = [e["args"]["Total Allocated"] for e in events if e["name"] == "[memory]"]
    assert len(set(held)) > 10


def test_nothing_is_done_in_other_steps(tmp_path, monkeypatch):
    trace, made = watched(tmp_path / "t.json.gz", range(7, 8))
    monkeypatch.setattr(trace._ranges, "on_phase", lambda *_: pytest.fail("a range was opened"))
    made.run(2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.model.modules())
    with pytest.raises(ValueError, match="steps 7 to 8 were not all taken"):
        trace.report()
    made.close()
    assert not trace.file.exists()


def test_a_step_that_fails_leaves_its_trace_and_no_hook(tmp_path, monkeypatch):
    trace, made = watched(tmp_path / "t.json.gz", range(3))
    monkeypatch.setattr(made.model.norm, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run(3)
    made.close()
    assert b"blocks.1.mlp" in gzip.decompress(trace.file.read_bytes())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in made.model.modules())


def test_a_stretch_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no step"):
        StepTrace(nn.Linear(1, 1), "cpu", range(3, 3), tmp_path / "t.json.gz")


def test_losses_are_those_of_a_run_that_is_not_watched(tmp_path):
    _, made = watched(tmp_path / "t.json.gz", range(1, 2), seed=3)
    made.observers = (*made.observers, Ranges(made.model))
    assert made.run(3) == trainer(seed=3).run(3)


gpu = pytest.mark.gpu


@gpu
def test_on_a_gpu_phases_sum_to_the_time_between_the_first_kernel_and_the_last(tmp_path):
    config = tiny(layers=4, dim=1024, mlp_hidden=8192)
    training = {"device": "cuda", "batch": 8, "tokens": 2048, "precision": "bf16"}
    trace = profiled(tmp_path / "t.json.gz", range(3, 6), config, **training)
    report = trace.report()
    assert report.accounted == pytest.approx(1.0, abs=0.03), str(report)


@gpu
def test_in_a_cuda_graph_the_phases_are_one_and_that_is_said(tmp_path):
    training = {"device": "cuda", "precision": "bf16", "cuda_graph": True}
    report = profiled(tmp_path / "t.json.gz", range(6, 8), **training).report()
    assert {row["phase"] for row in report.phases} >= {"data", "graph", "step"}
    assert not {"forward", "backward"} & {row["phase"] for row in report.phases}
    assert "replays forward, backward and optimizer as one phase" in str(report)
