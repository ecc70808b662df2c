"""The memory notebook's sentences: each verdict on rows made to deserve it."""

from dataclasses import asdict
from itertools import product

import numpy as np
import pytest

from workbook.lab.training import TrainingSpec
from workbook.rooms.memory import claims, table
from workbook.runs import metrics

TOKENS = (256, 512, 1024, 2048)
PRODUCTION = {"preset": "production", "layers": 12}


def rows_of(backend, growth, *, tokens=TOKENS, constant=100.0, **config):
    """Metric rows of a backend whose growing part is growth(T) MiB; None: it failed with oom."""
    rows = []
    for t in tokens:
        grown = growth(t)
        config = {"preset": "repro", "layers": 5} | config
        known = config | {"outcome": "oom" if grown is None else "ok"}
        values = {"memory_parameters": constant, "memory_activations": grown}
        values["peak_memory"] = None if grown is None else constant + grown
        row = {"operation": "training_step", "backend": backend, "mode": "step", "unit": "MiB"}
        row |= {"x_name": "tokens", "x_value": t, "config": known}
        rows += [row | {"metric": name, "median": mib} for name, mib in values.items()]
    return rows


def frame(*groups):
    return metrics.table([metrics.row(row, {"device": "cpu"}) for group in groups for row in group])


def linear(*groups):
    return claims.linear_backend_is_linear(frame(*groups), "gather")


LINE = rows_of("gather", lambda t: 0.1 * t)
MASKED = rows_of("masked", lambda t: 1e-3 * t**2 if t < 2048 else None)


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
    assert linear(rows_of("gather", growth)).verdict == verdict


def test_a_run_of_one_length_is_not_asked_how_memory_grows():
    assert linear(rows_of("gather", lambda t: 1.0, tokens=(256,))).verdict == "NOT APPLICABLE"
    assert linear(rows_of("gather", lambda t: None, tokens=(256, 512))).verdict == "INCONCLUSIVE"


def test_a_longest_length_without_neighbours_decides_nothing():
    lone = rows_of("gather", lambda t: 0.1 * t, tokens=(128, 4096))
    claim = linear(lone)
    assert claim.verdict == "INCONCLUSIVE" and claim.evidence == {}
    known = rows_of("gather", lambda t: 0.1 * t, **PRODUCTION)
    for groups in ((lone, known), (known, lone)):
        claim = linear(*groups)
        assert claim.verdict == "PASS" and list(claim.evidence) == ["production, 12 layers"]


def test_below_n_l_even_a_linear_backend_may_start_steeper():
    """The smoke run measures T 64 to 256 of a model whose queries see 8 blocks of 32 tokens."""

    def steep(**config):
        tokens = (64, 128, 256)
        return rows_of(
            "gather", lambda t: 1e-3 * t**1.7, tokens=tokens, preset="cpu_test", **config
        )

    claim = linear(steep())
    assert claim.verdict == "INCONCLUSIVE"
    assert claim.claim.endswith("every query still sees every key up to T = n l' = 256")
    claim = linear(steep(changes={"nsa": {"select_count": 4}}))
    assert claim.verdict == "FAIL" and str(claim.evidence) == "{'cpu_test, 5 layers': 1.7}"


def test_a_cell_measured_twice_counts_once_and_as_the_last_time():
    found = table.growing(frame(LINE, rows_of("gather", lambda t: 0.5 * t)))
    assert found.loc[("repro, 5 layers", "gather")].tolist() == [0.5 * t for t in TOKENS]


def test_the_worst_model_decides_and_a_large_constant_part_hides_no_growth():
    steep = rows_of("gather", lambda t: 1e-4 * t**2, constant=1e6, **PRODUCTION)
    claim = linear(LINE, steep)
    assert claim.verdict == "FAIL" and claim.claim.endswith("T^2.00")
    assert set(claim.evidence) == {"repro, 5 layers", "production, 12 layers"}


def test_dense_masks_are_compared_at_the_longest_length_of_both():
    def told(*groups):
        return claims.dense_masks_cost_more(frame(*groups), ["gather", "packed"])

    claim = told(MASKED, LINE)
    assert claim.verdict == "PASS"
    assert claim.evidence == {"repro, 5 layers": {"tokens": 1024, "times": 10.2}}
    assert told(rows_of("masked", lambda t: 0.01 * t), LINE).verdict == "FAIL"
    assert told(LINE).verdict == "NOT APPLICABLE"
    short = [rows_of(name, lambda t: 0.1 * t, tokens=(64, 128)) for name in ("masked", "gather")]
    assert told(*short).verdict == "INCONCLUSIVE"  # up to n l' every query sees every key


def measured_row(backend="gather", path="gather-chunks", activations=7.5, **changes):
    known = "gather" if backend == "mine" else backend
    cell = TrainingSpec("repro", 512, backend=known, layers=1)
    row = asdict(cell) | {"outcome": "ok", "parameters": 1000, "model": cell.config().to_dict()}
    row["backend"] = backend
    held = {"parameters": 4000 / 2**20, "gradients": 4000 / 2**20}
    row["held_mib"] = held | {"optimizer_state": 8000 / 2**20, "activations": activations}
    row["witness"] = {"paths": {"slc": {path: 2}, "win": {"span-chunks": 2}}}
    return row | changes


@pytest.mark.parametrize(
    ("claim", "verdict", "rows"),
    [
        ("state_is_sixteen_bytes_a_parameter", "PASS", [{}]),
        ("state_is_sixteen_bytes_a_parameter", "FAIL", [{}, {"parameters": 900}]),
        ("state_is_sixteen_bytes_a_parameter", "INCONCLUSIVE", [{"outcome": "oom"}]),
        ("activations_are_as_predicted", "PASS", [{}]),
        ("activations_are_as_predicted", "FAIL", [{}, {"activations": 10.0}]),
        ("activations_are_as_predicted", "NOT APPLICABLE", [{"checkpoint": "all"}]),
        ("backends_are_different_programs", "PASS", [{}, {"backend": "masked", "path": "dense"}]),
        ("backends_are_different_programs", "NOT APPLICABLE", [{}]),
    ],
)
def test_rows_of_trials_decide(claim, verdict, rows):
    assert getattr(claims, claim)([measured_row(**row) for row in rows]).verdict == verdict


def test_a_backend_whose_tensors_nobody_has_modelled_decides_nothing_and_is_named():
    mine = measured_row("mine", activations=1000.0)
    assert claims.activations_are_as_predicted([mine]).verdict == "INCONCLUSIVE"
    claim = claims.activations_are_as_predicted([measured_row(), mine])
    assert claim.verdict == "PASS" and claim.evidence["not predicted"] == ["mine"]


def test_two_backends_with_one_witness_are_one_program():
    rows = [measured_row(), measured_row("masked", "dense"), measured_row("packed")]
    told = claims.backends_are_different_programs(rows)
    assert told.verdict == "FAIL" and "3 backends that ran are 2 different" in told.claim


def test_the_production_step_is_judged_by_its_best_backend():
    def told(mib, **config):
        rows = rows_of("gather", lambda t: mib, constant=0.0, **PRODUCTION, **config)
        masked = rows_of("masked", lambda t: 9e4, constant=0.0, **PRODUCTION, **config)
        return claims.production_fits(frame(rows, masked))

    good = told(2000.0)
    assert good.verdict == "PASS" and good.claim.endswith("1.95 GiB with gather")
    assert told(7000.0).verdict == "AIM MISSED"
    another = told(2000.0, batch=4)  # a step of another batch is another step
    assert another.verdict == claims.production_fits(frame(LINE)).verdict == "NOT APPLICABLE"
    lost = frame(rows_of("gather", lambda t: None, constant=0.0, **PRODUCTION))
    assert claims.production_fits(lost).verdict == "INCONCLUSIVE"


def test_tables_show_failures_by_name_and_keep_every_length():
    df = frame(LINE, MASKED)
    peaks, growing = table.peaks(df), table.growing(df)
    gather, masked = ("repro, 5 layers", "gather"), ("repro, 5 layers", "masked")
    assert list(peaks.columns) == list(TOKENS)
    assert peaks.loc[masked, 2048] == "oom" and peaks.loc[gather, 256] == "125.6"
    assert growing.loc[gather, 512] == pytest.approx(51.2) and np.isnan(growing.loc[masked, 2048])
    exponents = table.exponents(growing)
    assert exponents.loc[masked, "256-512"] == "2.00" and exponents.loc[masked, "1024-2048"] == ""


def test_the_case_study_stands_above_our_rows():
    found = table.beside_the_case_study(frame(LINE))
    assert found.iloc[0][2048] == "20,556.9" and found.iloc[1][2048] == "0.77"
    assert found.iloc[2][256] == "125.6"


def test_predictions_are_a_curve_a_backend_and_model():
    cells = [
        TrainingSpec("repro", t, backend=b, layers=1)
        for b, t in (*product(("masked", "gather"), (128, 256)), ("auto", 128))
    ]
    curves = table.predicted(cells)
    assert list(curves) == ["repro, 1 layer"]
    assert set(curves["repro, 1 layer"]) == {"masked", "gather"}
    tokens, mib = curves["repro, 1 layer"]["masked"]
    assert tokens == [128, 256] and mib[1] > mib[0] > 0
