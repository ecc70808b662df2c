"""The trace and the tables of a few profiled steps, read back from what they leave."""

import csv
import gzip
import json

import pytest
import torch
from observed import drive, trainer
from tiny_models import tiny
from torch import nn

from nsa.lab.measure.allocators import Allocation, kept, table
from nsa.lab.observers.trace import Ranges, Report, StepTrace
from nsa.model.llama import LanguageModel

PHASES = ("data", "forward", "backward", "optimizer")


def profiled(file, steps=range(1, 3), config=None, **training):
    model = LanguageModel(config or tiny())
    trace = StepTrace(model, training.get("device", "cpu"), steps, file)
    made = trainer(trace, model=model, **training)
    made.run(steps.stop + 1)
    return trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return profiled(tmp_path_factory.mktemp("trace") / "trace.json.gz", tokens=64)


@pytest.fixture(scope="module")
def ranges(trace):
    """Of the trace file: (name, start, end) in us."""
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
    for name in ("phases", "kernels", "memory", "shapes"):
        with (tmp_path / f"profile-{name}.csv").open() as stream:
            assert len(list(csv.DictReader(stream))) == len(getattr(report, name)) > 0


BIG = {"batch": 1, "tokens": 192}


def test_where_masks_are_dense_attention_is_the_largest_as_by_shapes(tmp_path):
    report = profiled(tmp_path / "a.json.gz", range(1, 2), tiny(backend="masked"), **BIG).report()
    assert report.largest == ("attention", "attention")
    top = report.memory[0]
    assert top["where"] == "blocks.*.attention", "and so is the first allocator"
    of_attention = report.shapes[0]
    assert of_attention["kept_mib"] == pytest.approx(of_attention["predicted_mib"], rel=0.15)
    assert "most by attention, as by shapes (attention)" in str(report)


def test_where_the_mlp_is_wide_it_is_the_largest_as_by_shapes(tmp_path):
    config = tiny(backend="packed", mlp_hidden=1024)
    report = profiled(tmp_path / "m.json.gz", range(1, 2), config, **BIG).report()
    assert report.largest == ("mlp", "mlp")
    held = report.shapes[0]
    assert held["kept_mib"] == pytest.approx(held["predicted_mib"], rel=0.05)
    top = next(row for row in report.memory if row["where"] != "backward")
    assert top["where"].startswith("blocks.*.mlp")


def test_a_largest_part_that_shapes_do_not_name_is_told():
    shapes = [
        {"part": "mlp", "predicted_mib": 5.0, "kept_mib": 5.0},
        {"part": "attention", "predicted_mib": 2.0, "kept_mib": 40.0},
    ]
    phases = [{"phase": name, "host_ms": 1.0, "device_ms": None} for name in ("data", "step")]
    report = Report(range(3, 4), False, phases, [], [], shapes, [])
    assert "most by attention, NOT as by shapes (mlp)" in str(report)


class Hoarder(nn.Module):
    """Keeps 2 MiB for its backward, in a layer of somebody's own model."""

    def forward(self, x):
        return (x * torch.ones(2**19)).sum()


def test_in_anybodys_model_the_one_that_allocates_most_comes_first(tmp_path):
    model = nn.ModuleDict({"hoarder": Hoarder()})
    trace = StepTrace(model, "cpu", range(1, 2), tmp_path / "t.json.gz")
    scale = nn.Parameter(torch.ones(1))
    drive(model, [trace], steps=3, forward=lambda: model["hoarder"](scale))
    first, second = trace.report().memory[:2]
    assert {first["where"], second["where"]} <= {"hoarder", "backward"}
    (kept_by,) = (r for r in trace.report().memory if r["operator"] == "aten::ones")
    assert kept_by["where"] == "hoarder" and kept_by["peak_mib"] == pytest.approx(2.0)
    assert kept_by["allocations"] == 1 and trace.report().shapes == []


def test_layers_that_are_recomputed_are_told_apart(tmp_path):
    report = profiled(tmp_path / "c.json.gz", range(1, 2), tiny(checkpoint="all")).report()
    assert any(row["where"] == "blocks.*.mlp (recomputed)" for row in report.memory)
    assert report.shapes == [], "shapes are of a forward without checkpointing"


def test_nothing_is_done_in_other_steps(tmp_path, monkeypatch):
    model = LanguageModel(tiny())
    trace = StepTrace(model, "cpu", range(7, 8), tmp_path / "t.json.gz")
    made = trainer(trace, model=model)
    monkeypatch.setattr(trace._ranges, "on_phase", lambda *_: pytest.fail("a range was opened"))
    made.run(2)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="steps 7 to 8 were not all taken"):
        trace.report()
    made.close()
    assert not trace.file.exists()


def test_a_step_that_fails_leaves_its_trace_and_no_hook(tmp_path, monkeypatch):
    model = LanguageModel(tiny())
    trace = StepTrace(model, "cpu", range(0, 3), tmp_path / "t.json.gz")
    made = trainer(trace, model=model)
    monkeypatch.setattr(model.norm, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.run(3)
    made.close()
    assert b"blocks.1.mlp" in gzip.decompress(trace.file.read_bytes())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_stretch_without_steps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no step"):
        StepTrace(nn.Linear(1, 1), "cpu", range(3, 3), tmp_path / "t.json.gz")


def test_losses_are_those_of_a_run_that_is_not_watched(tmp_path):
    model = LanguageModel(tiny())
    trace = StepTrace(model, "cpu", range(1, 2), tmp_path / "t.json.gz")
    watched = trainer(trace, Ranges(model), model=model, seed=3).run(3)
    assert watched == trainer(seed=3).run(3)


def a(time, address, size, where="", operator="", phase="forward"):
    return Allocation(time, address, size, where, operator, phase)


def test_who_holds_most_is_looked_at_where_all_together_hold_most():
    found = [
        a(0, 7, 1 << 20, phase="data"),  # inputs, which stay and are no activations
        a(0, 1, 4 << 20, "blocks.0.mlp", "aten::mul"),
        a(1, 2, 2 << 20, "blocks.1.mlp", "aten::mul"),
        a(2, 9, -1),  # of what was there before
        a(3, 1, -1),
        a(4, 1, 3 << 20, "", "AddBackward0", "backward"),
        a(5, 3, 2 << 20, "blocks.0.mlp", "aten::mul", "backward"),
        a(6, 3, -1),
        a(7, 4, 1 << 20, "", "Late", "backward"),
    ]
    rows = {(r["where"], r["operator"]): r for r in table(found, steps=2)}
    assert rows["blocks.*.mlp", "aten::mul"]["peak_mib"] == 2
    assert rows["blocks.*.mlp", "aten::mul"]["allocated_mib"] == 3
    assert rows["backward", "AddBackward0"]["peak_mib"] == 3
    assert rows["backward", "Late"]["peak_mib"] == 0, "when most is held it is not there yet"
    assert rows["blocks.*.mlp (recomputed)", "aten::mul"]["peak_mib"] == 2
    assert [x.address for x in kept(found[:5])] == [2]


gpu = pytest.mark.gpu


@gpu
def test_on_a_gpu_phases_sum_to_the_time_between_the_first_kernel_and_the_last(tmp_path):
    config = tiny(layers=4, dim=1024, mlp_hidden=8192)
    training = {"device": "cuda", "batch": 8, "tokens": 2048, "precision": "bf16"}
    trace = profiled(tmp_path / "t.json.gz", range(3, 6), config, **training)
    report = trace.report()
    assert report.accounted == pytest.approx(1.0, abs=0.03), str(report)
    assert report.memory[0]["peak_mib"] > 1, "the table is of the GPU's memory"
    assert report.largest == ("mlp", "mlp"), str(report)


@gpu
def test_in_a_cuda_graph_the_phases_are_one_and_that_is_said(tmp_path):
    training = {"device": "cuda", "precision": "bf16", "cuda_graph": True}
    report = profiled(tmp_path / "t.json.gz", range(6, 8), **training).report()
    assert {row["phase"] for row in report.phases} >= {"data", "graph", "step"}
    assert not {"forward", "backward"} & {row["phase"] for row in report.phases}
    assert "replays forward, backward and optimizer as one phase" in str(report)
