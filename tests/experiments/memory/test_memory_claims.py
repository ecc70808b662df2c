"""The memory notebook's sentences: each verdict on rows made to deserve it."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest

from nsa.experiments.memory import claims, table
from nsa.experiments.memory.cell import Cell
from nsa.workbook import metrics

TOKENS = (256, 512, 1024, 2048)


def rows_of(backend, growth, *, tokens=TOKENS, preset="repro", layers=5, constant=100.0, **config):
    """Metric rows of a backend whose growing part is growth(T) MiB; None: it failed with oom."""
    rows = []
    for t in tokens:
        grown = growth(t)
        outcome = "ok" if grown is not None else "oom"
        known = {"preset": preset, "layers": layers, "outcome": outcome} | config
        values = {"peak_memory": constant, "memory_parameters": constant, "memory_activations": 0.0}
        if grown is None:
            values = dict.fromkeys(values, math.nan)
        else:
            values["peak_memory"] += grown
            values["memory_activations"] = grown
        row = {"operation": "training_step", "backend": backend, "mode": "step", "unit": "MiB"}
        row |= {"x_name": "tokens", "x_value": t, "config": json.dumps(known)}
        rows += [row | {"metric": name, "median": mib} for name, mib in values.items()]
    return rows


def frame(*groups):
    return metrics.table([metrics.row(row, {}) for group in groups for row in group])


def test_the_case_studys_exponents_are_computed_from_its_table():
    claim = claims.case_study_is_not_quadratic()
    assert claim.verdict == "PASS" and claim.claim.endswith("1.56, 1.86, 1.22, 0.77")


@pytest.mark.parametrize(
    "growth, verdict",
    [
        (lambda t: 0.05 * t, "PASS"),
        (lambda t: 0.05 * t**1.09, "PASS"),
        (lambda t: 0.05 * t**1.1003, "FAIL"),
        (lambda t: 1e-4 * t**2, "FAIL"),
        (lambda t: None, "INCONCLUSIVE"),
        (lambda t: 5.0 if t == 256 else None, "INCONCLUSIVE"),
        (lambda t: 5.0 * t if t <= 512 else None, "PASS"),
    ],
)
def test_linear_means_an_exponent_of_at_most_1_1(growth, verdict):
    claim = claims.linear_backend_is_linear(frame(rows_of("gather", growth)), "gather")
    assert claim.verdict == verdict, claim


def test_a_longest_length_without_neighbours_decides_nothing():
    lone = rows_of("gather", lambda t: 0.1 * t, tokens=(128, 4096))
    claim = claims.linear_backend_is_linear(frame(lone), "gather")
    assert claim.verdict == "INCONCLUSIVE" and claim.evidence == {}
    known = rows_of("gather", lambda t: 0.1 * t, preset="production", layers=12)
    for groups in ((lone, known), (known, lone)):
        claim = claims.linear_backend_is_linear(frame(*groups), "gather")
        assert claim.verdict == "PASS" and list(claim.evidence) == ["production, 12 layers"]


def test_below_n_l_even_a_linear_backend_may_start_steeper():
    """The smoke run measures T 64 to 256 of a model whose queries see 8 blocks of 32 tokens."""
    steep = rows_of("gather", lambda t: 1e-3 * t**1.7, tokens=(64, 128, 256), preset="cpu_test")
    claim = claims.linear_backend_is_linear(frame(steep), "gather")
    assert claim.verdict == "INCONCLUSIVE"
    assert claim.claim.endswith("every query still sees every key up to T = n l' = 256")
    narrow = rows_of("gather", lambda t: 1e-3 * t**1.7, tokens=(64, 128, 256), preset="cpu_test",
                     changes={"nsa": {"select_count": 4}})  # fmt: skip
    claim = claims.linear_backend_is_linear(frame(narrow), "gather")
    assert claim.verdict == "FAIL" and str(claim.evidence) == "{'cpu_test, 5 layers': 1.7}"


def test_a_cell_measured_twice_counts_once_and_as_the_last_time():
    first, second = rows_of("gather", lambda t: 9.0 * t), rows_of("gather", lambda t: 0.5 * t)
    found = table.growing(frame(first, second))
    assert found.loc[("repro, 5 layers", "gather")].tolist() == [0.5 * t for t in TOKENS]


def test_a_large_constant_part_does_not_hide_quadratic_growth():
    df = frame(rows_of("gather", lambda t: 1e-4 * t**2, constant=1e6))
    assert claims.linear_backend_is_linear(df, "gather").verdict == "FAIL"


def test_the_worst_model_decides():
    df = frame(
        rows_of("gather", lambda t: 0.1 * t),
        rows_of("gather", lambda t: 1e-4 * t**2, preset="production", layers=12),
    )
    claim = claims.linear_backend_is_linear(df, "gather")
    assert claim.verdict == "FAIL" and claim.claim.endswith("T^2.00")
    assert set(claim.evidence) == {"repro, 5 layers", "production, 12 layers"}


def test_dense_masks_are_compared_at_the_longest_length_of_both():
    masked = rows_of("masked", lambda t: 1e-3 * t**2 if t < 2048 else None)
    df = frame(masked, rows_of("gather", lambda t: 0.1 * t))
    claim = claims.dense_masks_cost_more(df, ["gather", "packed"])
    assert claim.verdict == "PASS"
    assert claim.evidence == {"repro, 5 layers": {"tokens": 1024, "times": 10.2}}
    cheap = frame(rows_of("masked", lambda t: 0.01 * t), rows_of("gather", lambda t: 0.1 * t))
    assert claims.dense_masks_cost_more(cheap, ["gather"]).verdict == "FAIL"
    alone = frame(rows_of("gather", lambda t: 0.1 * t))
    assert claims.dense_masks_cost_more(alone, ["gather"]).verdict == "INCONCLUSIVE"


def measured_row(backend="gather", path="gather-chunks", **changes):
    cell = Cell("repro", backend, 512, layers=1)
    row = asdict(cell) | {"outcome": "ok", "parameters": 1000, "model": cell.config().to_dict()}
    held = {"parameters": 4000 / 2**20, "gradients": 4000 / 2**20}
    row["held_mib"] = held | {"optimizer_state": 8000 / 2**20, "activations": 7.5}
    row["witness"] = {"paths": {"slc": {path: 2}, "win": {"span-chunks": 2}}}
    return row | changes


def test_state_is_held_to_sixteen_bytes_a_parameter():
    claim = claims.state_is_sixteen_bytes_a_parameter
    assert claim([measured_row()]).verdict == "PASS"
    assert claim([measured_row(), measured_row(parameters=900)]).verdict == "FAIL"
    assert claim([measured_row(outcome="oom")]).verdict == "INCONCLUSIVE"


def test_activations_are_held_to_their_prediction():
    claim = claims.activations_are_as_predicted
    assert claim([measured_row()]).verdict == "PASS"
    wrong = measured_row()
    wrong["held_mib"] = wrong["held_mib"] | {"activations": 10.0}
    assert claim([measured_row(), wrong]).verdict == "FAIL"
    assert claim([measured_row(checkpoint="all")]).verdict == "INCONCLUSIVE"


def test_two_backends_with_one_witness_are_one_program():
    claim = claims.backends_are_different_programs
    masked = measured_row("masked", "dense")
    assert claim([measured_row(), masked]).verdict == "PASS"
    same = measured_row("packed")
    told = claim([measured_row(), masked, same])
    assert told.verdict == "FAIL" and "3 backends that ran are 2 different" in told.claim
    assert claim([measured_row()]).verdict == "INCONCLUSIVE"


def test_the_production_step_is_judged_by_its_best_backend():
    def df(gather):
        return frame(
            rows_of("gather", lambda t: gather, preset="production", layers=12, constant=0.0),
            rows_of("masked", lambda t: 90_000.0, preset="production", layers=12, constant=0.0),
        )

    good = claims.production_fits(df(2000.0))
    assert good.verdict == "PASS" and good.claim.endswith("1.95 GiB with gather")
    assert claims.production_fits(df(7000.0)).verdict == "FAIL"
    assert claims.production_fits(frame(rows_of("gather", float))).verdict == "INCONCLUSIVE"


def test_a_production_step_of_another_batch_is_another_step():
    rows = rows_of("gather", lambda t: 2000.0, preset="production", layers=12, batch=4)
    claim = claims.production_fits(frame(rows))
    assert claim.verdict == "INCONCLUSIVE" and "not measured" in claim.claim


def test_tables_show_failures_by_name_and_keep_every_length():
    df = frame(
        rows_of("gather", lambda t: 0.1 * t),
        rows_of("masked", lambda t: 1e-3 * t**2 if t < 2048 else None),
    )
    peaks = table.peaks(df)
    assert list(peaks.columns) == list(TOKENS)
    assert peaks.loc[("repro, 5 layers", "masked"), 2048] == "oom"
    assert peaks.loc[("repro, 5 layers", "gather"), 256] == "125.6"
    growing = table.growing(df)
    assert growing.loc[("repro, 5 layers", "gather"), 512] == pytest.approx(51.2)
    assert np.isnan(growing.loc[("repro, 5 layers", "masked"), 2048])
    exponents = table.exponents(growing)
    assert exponents.loc[("repro, 5 layers", "masked"), "256-512"] == "2.00"
    assert exponents.loc[("repro, 5 layers", "masked"), "1024-2048"] == ""


def test_the_case_study_stands_above_our_rows():
    found = table.beside_the_case_study(frame(rows_of("gather", lambda t: 0.1 * t)))
    assert found.iloc[0][2048] == "20,556.9" and found.iloc[1][2048] == "0.77"
    assert found.iloc[2][256] == "125.6"


def test_predictions_are_a_curve_a_backend_and_model():
    cells = [Cell("repro", b, t, layers=1) for b in ("masked", "gather") for t in (128, 256)]
    curves = table.predicted([*cells, Cell("repro", "auto", 128, layers=1)])
    assert {model: set(lines) for model, lines in curves.items()} == {
        "repro, 1 layer": {"masked", "gather"}
    }
    tokens, mib = curves["repro, 1 layer"]["masked"]
    assert tokens == [128, 256] and mib[1] > mib[0] > 0
