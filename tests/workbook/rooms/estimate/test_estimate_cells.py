"""Cells of an estimate: the grid, the boundaries, and one real cell of each."""

from itertools import pairwise

import pytest
import torch
from places import committed_root

from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.training import TrainingSpec
from workbook.rooms.estimate import cells, child, trials

FACTORS = {
    "presets": ["repro"],
    "layers": [1, 3],
    "backends": ["gather", "flash", "sequential"],
    "tokens": [64, 512],
    "checkpoints": ["", "1:3"],
    "batches": [1],
    "precisions": ["fp32", "bf16"],
}
MIB = 2**20
COMMITTED = committed_root()
TINY = {"preset": "cpu_test", "layers": 1, "backend": "gather", "tokens": 64, "data": "synthetic"}


def test_a_grid_has_what_can_be_run_and_every_pair_of_values_that_can():
    every = cells.grid(FACTORS, longest=["sequential:64"])
    pairs = cells.grid(FACTORS, longest=["sequential:64"], cover="pairs")
    assert set(map(str, pairs)) < set(map(str, every))
    assert not [c for c in every if c.backend == "flash" and c.precision == "fp32"]
    assert not [c for c in every if c.backend == "sequential" and c.tokens > 64]
    assert not [c for c in every if c.layers == 1 and c.checkpoint]
    for one, other in (("backend", "tokens"), ("backend", "layers"), ("tokens", "checkpoint")):
        met = [{(getattr(c, one), getattr(c, other)) for c in some} for some in (every, pairs)]
        assert met[0] == met[1]
    order = [cell.backend for cell in every]
    assert order == sorted(order, key=FACTORS["backends"].index)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoints": ["0:9"]}, "does not fit 3 layers"),
        ({"tokens": []}, "no cell to estimate"),
        ({"backends": ["gathr"]}, "gather"),
    ],
)
def test_a_grid_that_could_not_be_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cells.grid(FACTORS | changes, cover="pairs")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("repro", "a mapping with find and gib"),
        ({"preset": "repro"}, "gib=None"),
        ({"preset": "repro", "gib": 4, "find": "layers"}, "find='layers' is unknown"),
        ({"gib": 4}, "a boundary needs preset"),
        ({"preset": "repro", "gib": 4, "tokns": 4}, "the nearest is 'tokens'"),
    ],
)
def test_a_boundary_that_could_not_be_looked_for_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        cells.boundaries([given], 0)


def test_a_boundary_is_looked_for_around_the_estimated_one():
    values = trials.values_near(2000)
    assert values[0] == 1800 and values[-1] == 2200 and 2000 in values
    assert {b - a for a, b in pairwise(values)} == {10}
    assert trials.values_near(2) == [1, 2, 3, 4]  # a batch


@pytest.mark.full
@pytest.mark.usefixtures("nothing_before")
def test_one_real_cell_is_estimated_to_one_percent_and_no_time_is_no_finding():
    spec = {"cells": [TINY], "deadline_s": 100.0, "gpu": "NVIDIA H200", "threads": None}
    [ours] = child.estimates(spec)["rows"]
    [theirs] = child.measure(spec)["rows"]
    assert (ours["outcome"], theirs["outcome"]) == ("ok", "ok")
    assert ours["allocated"] == pytest.approx(theirs["allocated"], rel=0.01)
    assert set(theirs["phases"]) == {"data", "forward", "backward", "optimizer"}
    assert theirs["reserved"] is None and theirs["agrees"] and ours["processor_s"] > 0
    [row] = child.measure(spec | {"deadline_s": -1.0})["rows"]
    assert row["outcome"] == "not run"
    declined = spec | {"cells": [TINY | {"backend": "flash", "precision": "bf16"}]}
    [row] = child.measure(declined)["rows"]
    assert row["outcome"] == "declined" and "GPU" in row["message"]


def test_a_lost_child_and_a_crowded_cell_run_again_alone(monkeypatch, tmp_path):
    made = [TrainingSpec(**TINY | {"tokens": t}) for t in (64, 65, 66, 67)]
    asked = []

    def measured(entry, groups, spec, **options):
        asked.append((list(groups), options["deadline_s"], options["workers"]))
        ended = []
        for group in groups:
            alone = len(asked) == 2
            if 0 in group and not alone:
                ended.append(Outcome("timeout", None, 9.0, "too slow", None, alone=False))
                continue
            rows = [{"outcome": "oom" if n == 2 else "ok", "message": ""} for n in group]
            ended.append(Outcome("ok", {"rows": rows}, 1.0, "", 0, alone=alone))
        assert [c["tokens"] for c in spec(groups[0], 5.0)["cells"]] == [64 + n for n in groups[0]]
        return ended

    monkeypatch.setattr(sweep, "measure", measured)
    options = {"together": 2, "deadline_s": 10.0, "workers": 3, "folder": tmp_path}
    rows = trials.measure(made, threads=1, progress=False, **options)
    assert asked == [([[0, 1], [2, 3]], 20.0, 3), ([[0], [1], [2]], 10.0, 1)]
    assert [row["outcome"] for row in rows] == ["ok", "ok", "oom", "ok"]
    assert [row["alone"] for row in rows] == [True, True, True, False]


def test_committed_peaks_of_a_few_trainings_are_recalled(monkeypatch, tmp_path):
    def estimates(specs, **_):
        peaks = {"forward": 2 * MIB, "backward": 3 * MIB, "optimizer": MIB}
        return [{"allocated": 3 * MIB, "phases": peaks, "message": ""} for _ in specs]

    monkeypatch.setattr(trials, "estimates", estimates)
    rows = trials.recall(COMMITTED, 5)
    assert len(rows) >= 5 and len({row["cell"].partition(",")[0] for row in rows}) == 5
    backends = [row["backend"] for row in rows]
    assert backends == sorted(backends)
    for row in rows:
        estimated = {"forward": 2.0, "backward": 3.0, "optimizer": 1.0, "step": 3.0}[row["mode"]]
        assert row["foretold"] == estimated and row["error"] == estimated / row["measured"] - 1
    assert trials.recall(tmp_path, 5) == []
    assert len(trials.recall(COMMITTED, 10**6)) > 290


@pytest.mark.gpu
def test_cells_that_share_a_process_start_from_nothing_and_hold_the_same():
    cell = TINY | {"device": "cuda", "precision": "bf16", "tokens": 512}
    large = cell | {"backend": "masked", "tokens": 2048}
    rows = child.measure({"cells": [cell, large, cell], "deadline_s": 300.0, "threads": None})
    first, _, last = rows["rows"]
    assert first["before"] == last["before"]
    assert first["allocated"] == last["allocated"] and first["reserved"] == last["reserved"]


@pytest.mark.gpu
def test_a_boundary_of_real_steps_lies_between_what_fits_and_what_does_not():
    cell = TINY | {"device": "cuda", "backend": "masked", "tokens": 512}
    spec = {"cell": cell, "find": "batch", "gib": 2.0, "context": 0}
    try:
        found = child.boundary(spec | {"values": [1, 8, 64, 512]})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found["monotone"] and found["fits"] < found["does_not"]
