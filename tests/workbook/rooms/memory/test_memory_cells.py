"""Cells are checked, measured in children of their own, and end as rows whatever happened."""

import math

import pytest

from whyhung.process.trial import Outcome
from workbook.lab import sweep
from workbook.lab.measure.activation_model import predict
from workbook.lab.measure.allocations import CATEGORIES
from workbook.lab.training import TrainingSpec
from workbook.rooms.memory import trials as memory
from workbook.rooms.memory.cell import memory_grid
from workbook.rooms.memory.trials import measure, rows_to_metrics


def cell(**changes) -> TrainingSpec:
    return TrainingSpec(**{"preset": "cpu_test", "backend": "gather", "tokens": 64} | changes)


@pytest.fixture(scope="module")
def measured():
    """Two real cells, measured once for the tests below."""
    cells = [cell(data="synthetic"), cell(backend="masked", data="synthetic", layers=1)]
    return measure(cells, deadline_s=120, workers=2, threads=1, progress=False)


@pytest.mark.full
def test_a_real_cell_has_all_its_figures_and_the_witness_of_its_backend(measured):
    row = measured[0]
    assert (row["outcome"], row["message"], row["preset"]) == ("ok", "", "cpu_test")
    assert row["parameters"] == 441_408
    assert row["peak_mib"] == max(row[f"{phase}_mib"] for phase in memory.PHASES)
    assert sum(row["by_category_mib"].values()) == pytest.approx(row["peak_mib"])
    assert set(row["by_phase_category_mib"]) == set(memory.PHASES)
    assert row["cross_check"]["agrees"], row["cross_check"]
    assert row["step_ms"] > 0 and row["timing"] == "contended" and row["alone"] is False
    assert len(row["losses"]) >= 2 and all(0 < loss < 10 for loss in row["losses"])
    assert [row["witness"]["backends"] for row in measured] == [{"gather": 2}, {"masked": 1}]


def test_weights_gradients_and_adam_are_predicted_from_shapes(measured):
    for row in measured:
        names = TrainingSpec.__dataclass_fields__
        config = TrainingSpec(**{name: row[name] for name in names if name in row}).config()
        expected = predict(config)
        held = row["by_phase_category_mib"]["optimizer"]
        assert held["parameters"] * 2**20 == expected.weights
        assert held["gradients"] * 2**20 == expected.gradients
        assert held["optimizer_state"] * 2**20 == expected.optimizer_state
        assert expected.fixed <= row["optimizer_mib"] * 2**20


def test_every_way_to_end_is_a_row_and_an_interrupt_keeps_those_there_are(monkeypatch):
    asked = {}

    def interrupted(*_, **options):
        asked.update(options)
        oom = Outcome("oom", None, 1.0, "planted", 1, "where")
        beside = Outcome("ok", {"peak_mib": 7.0}, 1.0, "", 0, alone=False)
        raise sweep.Interrupted([beside, None, oom])

    monkeypatch.setattr(sweep, "measure", interrupted)
    rows = measure([cell(seed=seed) for seed in (0, 1, 2)], deadline_s=50)
    assert [(row["outcome"], row["seed"]) for row in rows] == [("ok", 0), ("oom", 2)]
    assert rows[0]["peak_mib"] == 7.0
    assert math.isnan(rows[1]["peak_mib"]) and rows[1]["by_category_mib"] == {}
    assert (rows[1]["message"], rows[1]["evidence"]) == ("planted", "where")
    assert [row["timing"] for row in rows] == ["contended", "ratio"]
    assert asked["again_alone"] and asked["said"](rows[0]) == "7.0 MiB"
    assert str(cell()) == "cpu_test gather T=64 fp32 cpu"


@pytest.mark.processes
@pytest.mark.full
def test_an_error_says_where_it_came_and_a_backend_that_declines_why():
    cells = [cell(tokens=10**9), cell(backend="flex")]
    broken, declined = measure(cells, deadline_s=60, workers=2, threads=1, progress=False)
    assert broken["outcome"] == "error" and "in step 0, phase data" in broken["message"]
    assert declined["outcome"] == "declined" and "no backward on cpu" in declined["message"]
    assert math.isnan(declined["peak_mib"])


def test_metrics_are_the_long_table(measured):
    failed = memory.row_of(cell(seed=9), Outcome("oom", None, 1.0, "no memory", 1))
    metrics = rows_to_metrics([measured[0], failed])
    assert len(metrics) == 2 * (4 + len(CATEGORIES) + 1)
    first = metrics[0]
    expected = {"operation": "training_step", "backend": "gather", "mode": "step"}
    expected |= {"metric": "peak_memory", "unit": "MiB", "x_name": "tokens", "x_value": 64}
    assert expected.items() <= first.items()
    assert first["median"] == first["q20"] == first["q80"] == measured[0]["peak_mib"]
    assert {(m["metric"], m["mode"]) for m in metrics} == {
        *(("peak_memory", mode) for mode in ("step", "forward", "backward", "optimizer")),
        *((f"memory_{category}", "step") for category in CATEGORIES),
        ("step_time", "step"),
    }
    config = first["config"]
    assert (config["outcome"], config["preset"], config["dtype"]) == ("ok", "cpu_test", "fp32")
    broken = [m for m in metrics if m["config"]["outcome"] == "oom"]
    assert len(broken) == len(metrics) / 2 and all(math.isnan(m["median"]) for m in broken)


def test_a_grid_is_every_combination_in_order():
    cells = memory_grid(["repro", "smoke"], [1, 2], ["gather", "masked"], [64, 128], dtype="bf16")
    assert len(cells) == 16
    assert [c.tokens for c in cells[:2]] == [64, 128]
    lines = [(c.preset, c.layers, c.backend) for c in cells[::2]]
    assert lines[:3] == [("repro", 1, "gather"), ("repro", 1, "masked"), ("repro", 2, "gather")]
    assert {c.precision for c in cells} == {"bf16"}
    (own,) = memory_grid(["production"], [], ["gather"], [64])  # each preset's own layers
    assert own.layers is None and own.config().layers == 12


def test_dense_attention_is_a_line_beside_the_backends():
    ours, dense = memory_grid(["repro"], [1], ["triton", "dense"], [64], longest=["triton:64"])
    assert (ours.attention, ours.backend) == ("nsa", "triton")
    assert (dense.attention, dense.backend, dense.name) == ("dense", "auto", "dense")
    assert dense.config().attention == "dense"
    row = memory.row_of(dense, Outcome("ok", {"peak_mib": 7.0}, 1.0, "", 0))
    assert {line["backend"] for line in rows_to_metrics([row])} == {"dense"}


def test_a_backend_can_be_kept_out_of_long_sequences():
    tokens, longest = [64, 128, 256], ["sequential=128"]
    cells = memory_grid(["repro"], [1], ["sequential", "gather"], tokens, longest=longest)
    kept = {
        name: [c.tokens for c in cells if c.backend == name] for name in ("sequential", "gather")
    }
    assert kept == {"sequential": [64, 128], "gather": tokens}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({"longest": [text]}, "sequential=256")
            for text in ("sequential", "sequential:", "sequential:-5", "sequential:0", "=5")
        ),
        ({"longest": ["gathr:3"]}, "the nearest is 'gather'"),
        ({"longest": ["gather:32"]}, "no cell to measure"),
        ({"backends": []}, "no cell to measure"),
        ({"presets": ["reprro"]}, "repro"),
        ({"dtype": "fp16"}, "known are fp32, bf16"),
    ],
)
def test_a_grid_without_cells_or_with_an_illegal_one_is_refused(changes, message):
    given = {"presets": ["repro"], "layers": [1], "backends": ["gather"], "tokens": [64]}
    with pytest.raises(ValueError, match=message):
        memory_grid(**given | changes)
