import json
import math
from itertools import product
from types import SimpleNamespace

import lab_entries
import pytest

from whyhung.process.runner import SOFT
from whyhung.watch import Progress
from whyhung.watch.evidence import Evidence
from workbook.lab.search import calibration
from workbook.lab.search.calibration import REPEATS, Calibration, calibration_spec, size_of
from workbook.lab.search.execute import Trials
from workbook.lab.search.ledger import Ledger
from workbook.lab.search.plan import Plan

SLOW = {"a": 0.02, "b": 0.01, "c": 1e-4}
PACED = {"subject": "lab_entries:paced", "oracles": [], "steps": 2}


def calibrated(lengths, step_s, first=0.0, gap_s=lambda layers, tokens: 0.0):
    """Calibrate by made-up points, of whose steps one is quick and one was disturbed."""
    rows = []
    for layers, tokens in product((1, 2), lengths):
        later = [step_s(layers, tokens) * (1 + off) for off in (-0.1, 0.0, 0.0, 0.6)]
        row = {"layers": layers, "tokens": tokens, "seconds": [later[0] + first, *later]}
        rows.append(row | {"gap_s": gap_s(layers, tokens)})
    return Calibration.of(Evidence(result={"points": rows}))


@pytest.fixture
def by_a_clock(monkeypatch):
    """Clock that only sleeping moves, for calibration and for what it times."""
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)

    def sleep(seconds):
        clock.now += seconds

    clock.sleep = sleep
    for module in (calibration, lab_entries):
        monkeypatch.setattr(module, "time", clock)


def run(plan, folder, **options):
    return Trials(plan, Ledger(folder), **options).run({})


def test_what_was_measured_small_predicts_what_is_large():
    def step_s(n, t):
        return 0.02 + n * (0.01 + 1e-4 * t + 3e-7 * t * t)

    found = calibrated((64, 128, 256), step_s, first=0.5)
    expected = 0.5 + 3 * step_s(12, 2048)
    assert found.predicted_s((12, 2048), steps=3) == pytest.approx(expected, rel=0.02)
    assert found.stall_s((12, 2048)) == 5


def test_progress_may_rest_longer_where_a_layer_takes_longer_but_not_for_more_layers():
    found = calibrated((64, 128), lambda n, t: 1e-3 * n * t, gap_s=lambda n, t: 1e-3 * n * t)
    assert found.gap_at == (2, 128)
    assert found.stall_s((12, 1280)) == pytest.approx(10 * 10 * 0.256, rel=0.01)
    assert found.stall_s((2, 1280)) == found.stall_s((12, 1280))
    assert found.stall_s((2, 16)) == 5


def test_what_did_not_come_to_its_end_predicts_nothing():
    assert Calibration.of(Evidence()) is None
    assert Calibration.of(Evidence(result={"points": []})) is None


def test_cells_that_differ_in_size_or_observers_share_a_calibration():
    plan = Plan(
        factors={
            "layers": [2, 6], "tokens": [300, 511], "aux_stats": [False, True],
            "backend": ["gather", "masked"], "deadline_factor": [1.0, 2.0],
        },
        settings={"tracing": "arrival", "checkpoint": "1:2"},
        deadline_s=60.0,
    )  # fmt: skip
    base = calibration_spec(plan, plan.base)
    for name in ("layers", "tokens", "aux_stats", "deadline_factor"):
        assert calibration_spec(plan, plan.base | {name: plan.factors[name][1]}) == base
    assert calibration_spec(plan, plan.base | {"backend": "masked"}) != base
    assert base.settings["settings"]["tracing"] == "off" and not base.observers
    assert base.settings["settings"]["checkpoint"] == "all"
    points = [(p["layers"], p["tokens"]) for p in base.settings["points"]]
    assert points == [(1, 64), (2, 64), (1, 128), (2, 128), (1, 256), (2, 256)]
    assert base.steps == 6 * REPEATS and json.dumps(base.to_dict())


@pytest.mark.parametrize(
    ("settings", "layers", "tokens"),
    [({"layers": 1, "tokens": 48}, [1], [8, 16, 32]), ({"tokens": 1}, [1, 2], [1]),
     ({"preset": "production", "tokens": 128}, [1, 2], [32, 64, 128]),
     ({"tokens": 2047}, [1, 2], [128, 256, 512]),
     ({"tokens": 2**20}, [1, 2], [128, 256, 512, 1024])],
)  # fmt: skip
def test_it_is_never_larger_than_what_it_predicts(settings, layers, tokens):
    points = calibration_spec(Plan({}, settings=settings), {}).settings["points"]
    assert points == [{"layers": n, "tokens": t} for t in tokens for n in layers]


def test_the_size_of_a_cell_has_the_presets_layers():
    plan = Plan({}, settings={"preset": "production", "tokens": 128})
    assert size_of(plan, {}) == (12, 128)


def test_a_plan_that_knows_where_the_fault_was_seen_is_calibrated_like_any_other():
    plan = Plan({"backend": ["gather", "masked"]}, seen={"backend": "masked"}, calibrate=True)
    assert calibration_spec(plan, plan.base | plan.seen).settings["settings"]["backend"] == "masked"


def test_settings_of_these_names_that_are_no_numbers_are_left_as_they_are():
    settings = {"layers": [64, 64], "tokens": "all"}
    plan = Plan({}, subject="lab_entries:unsized", settings=settings)
    given = calibration_spec(plan, {}).settings
    assert given["settings"] == settings | {"seed": 1337} and given["points"] == [{}]
    assert size_of(plan, {}) == (1, 1)


@pytest.mark.usefixtures("by_a_clock")
def test_points_that_would_take_too_long_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "BUDGET_S", 0.5)
    sizes = [{"layers": 1, "tokens": n} for n in (64, 128, 256)]
    progress = Progress(tmp_path / "progress.bin")
    settings = {"a": 0.03, "b": 0.0, "c": 0.0}
    given = {"subject": "lab_entries:paced", "settings": settings, "points": sizes}
    points = calibration.make(given, progress)
    losses = [points.step(i) for i in range(3 * REPEATS)]
    points.close()
    progress.close()
    assert [row["tokens"] for row in points.result()["points"]] == [64]
    assert len(points.rows[0]["seconds"]) == REPEATS and losses[REPEATS:] == [None] * 2 * REPEATS


@pytest.mark.usefixtures("by_a_clock")
def test_a_short_step_is_taken_until_its_time_can_be_measured(tmp_path):
    progress = Progress(tmp_path / "progress.bin")
    given = {"subject": "lab_entries:paced", "settings": {"a": 0.012, "b": 0.0, "c": 0.0}}
    points = calibration.make(given | {"points": [{"layers": 1, "tokens": 8}]}, progress)
    for i in range(REPEATS):
        points.step(i)
    (row,) = points.result()["points"]
    progress.close()
    times = math.ceil(calibration.LEAST_S / 0.012)
    assert points._made.taken == 1 + (REPEATS - 1) * times  # one alone the first time
    assert row["seconds"] == pytest.approx([0.012] * REPEATS)


@pytest.mark.processes
@pytest.mark.full
def test_a_strangers_training_is_calibrated_by_the_names_that_it_has(tmp_path):
    plan = Plan({}, subject="lab_entries:unsized", oracles=[], steps=4, calibrate=True)
    found = run(plan, tmp_path)
    assert found.verdict.kind == "PASS"
    assert 0.19 < found.evidence.predicted_s < 1  # a machine with other work is late to begin


@pytest.mark.processes
@pytest.mark.full
def test_a_cell_is_predicted_before_it_runs_and_the_next_one_by_the_same_calibration(tmp_path):
    plan = Plan({"layers": [6, 8]}, settings=SLOW | {"tokens": 1024}, calibrate=True, **PACED)
    told = []
    trials = Trials(plan, Ledger(tmp_path), say=told.append)
    for cell in plan.cells():
        done = trials.run(cell)
        step = 0.02 + cell["layers"] * (0.01 + 1e-4 * 1024)
        assert 0.8 < done.evidence.predicted_s / (2 * step) < 2
        assert done.evidence.soft_s == pytest.approx(3 * done.evidence.predicted_s)
        assert "by calibration" in done.calibrated and not done.cached
    calibrations = [i for i in trials.ledger.ids() if i not in {d.id for d in told}]
    assert len(calibrations) == 1 and calibrations[0] in done.calibrated
    assert trials.run(plan.base).cached


@pytest.mark.processes
@pytest.mark.full
def test_a_fault_that_is_there_at_any_size_is_judged_without_a_prediction(tmp_path):
    settings = SLOW | {"layers": 1, "tokens": 64, "breaks": True}
    done = run(Plan({}, settings=settings, calibrate=True, **PACED), tmp_path)
    assert done.verdict.kind == "CRASH" and done.evidence.predicted_s is None
    assert "nothing was predicted: its calibration" in done.calibrated
    assert "CRASH" in done.calibrated


@pytest.mark.processes
@pytest.mark.full
def test_a_rest_inside_a_step_is_seen_and_the_first_step_may_load(tmp_path):
    settings = {"a": 0.4, "b": 0.0, "c": 0.0, "first": 0.5, "layers": 1, "tokens": 64}
    done = run(Plan({}, settings=settings, calibrate=True, **PACED), tmp_path)
    (id,) = [i for i in Ledger(tmp_path).ids() if i != done.id]
    evidence, _ = Ledger(tmp_path).get(id)
    for row in evidence.result["points"]:
        assert 0.2 < row["gap_s"] < 2
        assert row["seconds"][0] > 0.85 and min(row["seconds"][1:]) < 0.8
    assert 0.8 < done.evidence.predicted_s / (2 * 0.4 + 0.5) < 2


def test_a_prediction_is_given_or_measured():
    with pytest.raises(ValueError, match=r"predicted_s=2.0 is given; calibrate would measure it"):
        Plan({}, calibrate=True, predicted_s=2.0)
    with pytest.raises(ValueError, match="calibrate='yes' must be true or false"):
        Plan({}, calibrate="yes")


@pytest.mark.real_starts  # it measures how long a process takes
@pytest.mark.processes
@pytest.mark.long  # its verdict rests on measured time
@pytest.mark.parametrize(("backend", "tokens"), [("gather", 1024), ("masked", 512)])
def test_a_real_training_is_predicted_from_seconds_of_smaller_work(
    tmp_path, backend, tokens, monkeypatch
):
    monkeypatch.setattr(calibration, "DEADLINE_S", 600)  # on however busy a machine
    settings = {"layers": 4, "tokens": tokens, "backend": backend, "threads": 1}
    done = run(Plan({}, settings=settings, steps=4, calibrate=True), tmp_path)
    assert done.verdict.kind == "PASS"
    took = done.evidence.samples[-1].t - done.evidence.began_s
    assert 0.4 < took / done.evidence.predicted_s < SOFT  # late work is looked at, this is not


@pytest.mark.processes
@pytest.mark.slow
def test_several_ranks_are_calibrated_in_one_launch(tmp_path):
    settings = {"ranks": 2, "batch": 2, "layers": 2, "tokens": 128, "threads": 1}
    done = run(Plan({}, settings=settings, calibrate=True), tmp_path)
    assert done.verdict.kind == "PASS" and done.evidence.predicted_s > 0
