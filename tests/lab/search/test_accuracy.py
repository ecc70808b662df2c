"""How a prediction is held against what a cell took; and, slow, ten cells that are."""

from types import SimpleNamespace

import pytest

from nsa.lab.search.accuracy import AIM, CELLS, foretold, judged, row
from nsa.lab.search.ledger import Ledger
from whyhung.process.deadlines import SOFT


def done(predicted_s, took_s, how="returned", began_s=2.0):
    samples = [SimpleNamespace(t=began_s + took_s)]
    evidence = SimpleNamespace(
        predicted_s=predicted_s, began_s=began_s, samples=samples, end=SimpleNamespace(how=how)
    )
    return SimpleNamespace(evidence=evidence, verdict=SimpleNamespace(label="PASS"))


def test_what_it_took_counts_from_its_first_step_in_units_of_the_prediction():
    assert row("a", {}, done(4.0, 5.0))["ratio"] == 1.25


def test_a_cell_that_was_ended_early_is_told_and_has_no_ratio():
    stopped = "stopped by the supervisor"
    early, late = (row("a", {}, done(2.0, t, stopped)) for t in (5.9, 6.1))
    assert (early["ratio"], early["early"], late["early"]) == (None, True, False)
    assert row("a", {}, done(None, 5.0))["ratio"] is None


def test_the_aim_holds_both_ways_and_the_worst_is_the_furthest():
    rows = [row("a", {}, done(4.0, took)) for took in (3.0, 5.0, 5.1, 1.0)]
    assert judged(rows) == {"within": 2, "of": 4, "worst": 0.25, "early": 0}
    assert judged([]) == {"within": 0, "of": 0, "worst": None, "early": 0}


def test_there_are_ten_cells_none_of_which_a_calibration_runs():
    cells = [cell for part in CELLS.values() for cell in part.values()]
    assert len(cells) == 10 and AIM == 0.25
    assert all(cell["layers"] > 2 or cell["tokens"] > 512 for cell in cells)


@pytest.mark.real_starts  # it measures how long a process takes
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", ["12 layers", pytest.param("dense masks", marks=pytest.mark.long)])
def test_no_cell_is_ended_before_three_times_its_prediction(name, tmp_path):
    cells = {name: CELLS["first"][name]}
    rows = foretold(cells, Ledger(tmp_path), {"device": "cpu", "threads": 1})
    assert [r["verdict"] for r in rows] == ["PASS"] and not any(r["early"] for r in rows)
    assert all(1 / SOFT < r["ratio"] < SOFT for r in rows)
