"""Cells are checked, measured in children of their own, and end as rows whatever happened."""

import json
import math

import pytest

from nsa.experiments.memory import trials as memory
from nsa.experiments.memory.cell import Cell
from nsa.experiments.memory.step_model import predict
from nsa.experiments.memory.trials import measure, rows_to_metrics
from nsa.lab import sweep
from nsa.lab.measure.allocations import CATEGORIES
from nsa.lab.process.trial import Outcome


def cell(**changes) -> Cell:
    return Cell(**{"preset": "cpu_test", "backend": "gather", "tokens": 64} | changes)


@pytest.fixture(scope="module")
def measured():
    """Two real cells, measured once for the tests below."""
    cells = [cell(data="synthetic"), cell(backend="masked", data="synthetic", layers=1)]
    return measure(cells, deadline_s=120, workers=2, threads=1, progress=False)


@pytest.mark.full
def test_a_real_cell_has_all_its_figures(measured):
    row = measured[0]
    assert (row["outcome"], row["message"], row["preset"]) == ("ok", "", "cpu_test")
    assert row["parameters"] == 441_408
    assert row["peak_mib"] == max(row[f"{phase}_mib"] for phase in memory.PHASES)
    assert sum(row["by_category_mib"].values()) == pytest.approx(row["peak_mib"])
    assert set(row["by_phase_category_mib"]) == set(memory.PHASES)
    assert row["cross_check"]["agrees"], row["cross_check"]
    assert row["step_ms"] > 0 and row["timing"] == "contended" and row["alone"] is False
    assert len(row["losses"]) >= 2 and all(0 < loss < 10 for loss in row["losses"])


@pytest.mark.full
def test_the_witness_tells_which_backend_ran(measured):
    assert [row["witness"]["backends"] for row in measured] == [{"gather": 2}, {"masked": 1}]


def test_weights_gradients_and_adam_are_predicted_from_shapes(measured):
    for row in measured:
        config = Cell.from_dict({name: row[name] for name in Cell.__dataclass_fields__}).config()
        expected = predict(config, row["tokens"], row["batch"])
        held = row["by_phase_category_mib"]["optimizer"]
        assert held["parameters"] * 2**20 == expected.weights
        assert held["gradients"] * 2**20 == expected.gradients
        assert held["optimizer_state"] * 2**20 == expected.optimizer_state
        assert expected.fixed <= row["optimizer_mib"] * 2**20


def test_the_quadratic_term_is_there_only_for_backends_that_hold_it():
    config = cell().config()
    assert predict(config, 64).quadratic == predict(config, 64, backend="auto").quadratic == 0
    assert predict(config, 64, 3, "masked").quadratic == 4 * 3 * 8 * 64**2
    with pytest.raises(ValueError, match="tokens=0"):
        predict(config, 0)
    with pytest.raises(ValueError, match="gater"):
        predict(config, 64, backend="gater")


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
def test_an_error_says_in_which_step_and_phase_it_came():
    row = measure([cell(tokens=10**9)], deadline_s=60, threads=1, progress=False)[0]
    assert row["outcome"] == "error" and "in step 0, phase data" in row["message"]


@pytest.mark.processes
@pytest.mark.full
def test_a_backend_that_declines_is_a_row_with_its_reason():
    row = measure([cell(backend="flex")], deadline_s=60, threads=1, progress=False)[0]
    assert row["outcome"] == "declined" and "no backward on cpu" in row["message"]
    assert math.isnan(row["peak_mib"])


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
    config = json.loads(first["config"])
    assert (config["outcome"], config["preset"], config["seed"]) == ("ok", "cpu_test", 1337)
    broken = [m for m in metrics if json.loads(m["config"])["outcome"] == "oom"]
    assert len(broken) == len(metrics) / 2 and all(math.isnan(m["median"]) for m in broken)
    json.loads(broken[0]["config"], parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dtype": "fp16"}, "known are fp32, bf16"), ({"tokens": 0}, "tokens=0")],
)
def test_an_illegal_cell_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        cell(**changes)


def test_a_cell_survives_json_and_refuses_fields_it_does_not_have():
    made = cell(changes={"nsa": {"window": 32}}, layers=1, checkpoint="all")
    assert Cell.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert made.config().nsa.window == 32 and made.config().layers == 1
    with pytest.raises(ValueError, match="the nearest is 'tokens'"):
        Cell.from_dict(made.to_dict() | {"token": 5})
    with pytest.raises(ValueError, match="needs backend, tokens"):
        Cell.from_dict({"preset": "repro"})


def test_a_sweep_with_an_illegal_cell_is_refused():
    with pytest.raises(ValueError, match="the nearest is"):
        measure([cell(), {"preset": "repro", "backend": "gater", "tokens": 1}], deadline_s=1)
