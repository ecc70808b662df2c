"""The throughput notebook's sentences, tables and figures, on rows made to deserve them."""

import matplotlib
import numpy as np
import pytest
from places import NOTEBOOKS

from whyhung.process.trial import Outcome
from workbook.rooms.throughput import claims, plots, table
from workbook.rooms.throughput.table import curves_to_metrics, rows_to_metrics
from workbook.rooms.throughput.trials import TrainCell, row_of, throughput_grid
from workbook.runs import metrics, parameters

matplotlib.use("agg")
DENSE = {"attention": "dense", "backend": "auto"}
H200 = "NVIDIA H200"
TWO = "batch=32 ranks=2 parallel=ddp"
PASS, FAIL, OPEN = "PASS", "FAIL", "INCONCLUSIVE"
MISSED, NOT_HERE = "AIM MISSED", "NOT APPLICABLE"


def row(backend="triton", step_ms=100.0, tokens=2048, outcome="ok", variant="", **changes):
    """A row as `trials.measure` leaves it; the batch keeps 32,768 tokens a step and rank."""
    fields = {name: changes.pop(name) for name in list(changes) if name in ("device", "steps")}
    name = DENSE if backend == "dense" else {"backend": backend}
    cell = TrainCell(
        "production", tokens, batch=max(1, 32768 // tokens), precision="bf16",
        **{"device": "cuda"} | name | fields,
    ).with_(variant)  # fmt: skip
    if outcome != "ok":
        return row_of(cell, Outcome(outcome, None, 0.0, "planted", None))
    speed = 1e3 * cell.batch * tokens / step_ms
    measured = {
        "step_ms": step_ms, "step_ms_q20": 0.9 * step_ms, "step_ms_q80": 1.1 * step_ms,
        "tokens_s": speed, "recount_tokens_s": speed, "loader_wait_ms": 0.1, "peak_mib": 9000.0,
        "phase_ms": {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 9.0},
        "recompilations": 0, "syncs": 0, "matmul_tflops": 790.0, "nominal_tflops": 989.4,
        "device_mib": [900.0] * cell.steps, "host_mib": [4000.0] * cell.steps,
        "paths": {"slc": [backend]}, "losses": [5.0], "parameters": 78_578_736,
    }  # fmt: skip
    return row_of(cell, Outcome("ok", measured | changes, 9.0, "", 0))


def curve(backend="triton", offset=0.0, steps=500, seeds=(1, 2), apart=None, **changes):
    """Losses that fall from 5 to 2; seeds lie apart(step) nats apart, 0.01 by default."""
    name = DENSE if backend == "dense" else {"backend": backend}
    cell = TrainCell("production", 2048, precision="bf16", device="cuda", steps=steps, **name)
    apart = apart or (lambda step: 0.01)
    losses = {
        str(seed): [5 - 3 * step / steps + offset + k * apart(step) for step in range(steps)]
        for k, seed in enumerate(seeds)
    }
    flat = {"device_mib": [900.0] * steps, "host_mib": [4000.0] * steps}
    return cell.to_dict() | flat | {
        "name": cell.name, "variant": "curve", "outcome": "ok", "message": "", "timing": "none",
        "losses": losses, **changes,
    }  # fmt: skip


def frame(*rows, curves=(), gpu=H200):
    found = rows_to_metrics(rows) + curves_to_metrics(curves)
    return metrics.table([metrics.row(line, {"device": gpu}) for line in found])


def cross(step):  # in the window of the steps 240 to 249 nothing lies between them
    return 0.01 * ((step >= 250) - (step < 240))


def late(step):
    return 0.01 * (step >= 250)


def lost_at(step):
    return float("nan") if step == 250 else 0.01


GATHER, TWIN, WATCHED = {"backend": "gather"}, {"backend": "dense"}, {"variant": "observe"}
LOST = GATHER | {"outcome": "timeout", "message": "late", "losses": {}, "host_mib": []}
CLIMBING = [900 + 0.1 * step for step in range(500)]
SETTLING = [900.0] * 5 + [1900.0] * 495
ALIKE = [{}, GATHER | {"offset": 0.005}]
FSDP = {"variant": "batch=32 ranks=2 parallel=fsdp"}
COMPILED = {"variant": f"{TWO} compile", "step_ms": 80.0}
RECOMPILED = {"variant": "compile", "recompilations": 2}
MISCOUNTED = TWIN | {"tokens_s": 66.0, "recount_tokens_s": 13.2}
OTHER, BELOW = {"backend": "masked", "offset": 0.2}, GATHER | {"offset": -0.06}


def at(tokens, step_ms, **more):
    return {"tokens": tokens, "step_ms": step_ms, **more}


WINS = [at(t, 100.0) for t in (8192, 16384, 32768)]
LONG_TWIN = [at(t, ms, **TWIN) for t, ms in ((8192, 90), (16384, 130), (32768, 200))]
FAST_TWIN = at(16384, 99.0, **TWIN)
# (claim, verdict, what it says, rows of cells, rows of curves)
VERDICTS = [
    # Out of memory is no refutation.
    ("nothing_broke", PASS, "", [{}, {"backend": "masked", "outcome": "oom"}], []),
    ("nothing_broke", FAIL, "gather T 2048", [{}, GATHER | {"outcome": "crash"}], []),
    ("nothing_broke", OPEN, "", [{"outcome": "not run"}], []),
    ("nothing_broke", FAIL, "gather curve T 2048", [{}], [LOST]),
    ("the_meter_is_right", PASS, "", [{}], []),
    ("the_meter_is_right", FAIL, "400.00%", [{}, MISCOUNTED], []),
    ("the_meter_is_right", OPEN, "", [{"outcome": "oom"}], []),
    ("nothing_is_compiled_late", PASS, "", [{}], []),
    ("nothing_is_compiled_late", FAIL, "triton compile T 2048", [{}, RECOMPILED], []),
    ("no_step_waits_for_the_device", PASS, "", [{}], []),
    ("no_step_waits_for_the_device", FAIL, "", [{"syncs": 1}], []),
    ("no_step_waits_for_the_device", OPEN, "", [{"syncs": None}], []),
    ("memory_is_flat", PASS, "", [{"steps": 500}], []),
    ("memory_is_flat", FAIL, "", [{"steps": 500, "device_mib": CLIMBING}], []),
    ("memory_is_flat", FAIL, "", [{"steps": 500, "host_mib": CLIMBING}], []),
    ("memory_is_flat", FAIL, "", [], [{"device_mib": CLIMBING}]),
    ("memory_is_flat", FAIL, "", [], [{"host_mib": CLIMBING}]),
    ("memory_is_flat", PASS, "", [{"steps": 500, "device_mib": SETTLING}], []),
    ("memory_is_flat", PASS, "", [{"steps": 500, "host_mib": SETTLING}], []),
    ("memory_is_flat", NOT_HERE, "", [{"steps": 20}], []),
    ("memory_is_flat", OPEN, "", [{"steps": 500, "outcome": "oom"}], []),
    ("backends_learn_alike", PASS, "", [], ALIKE),
    ("backends_learn_alike", FAIL, "triton, gather, masked", [], [*ALIKE, OTHER]),
    # The twin is another model, and one seed has no spread.
    ("backends_learn_alike", PASS, "", [], [*ALIKE, TWIN | {"offset": 1.0}]),
    ("backends_learn_alike", NOT_HERE, "", [], [{"seeds": [1]}, GATHER | {"seeds": [1]}]),
    ("backends_learn_alike", OPEN, "", [], [{}, LOST]),
    ("backends_learn_alike", FAIL, "not finite: gather", [], [{}, GATHER | {"apart": lost_at}]),
    # Where seeds cross, their spread is that around it.
    ("backends_learn_alike", PASS, "", [], [one | {"apart": cross} for one in ALIKE]),
    ("backends_learn_alike", FAIL, "", [], [one | {"apart": late} for one in ALIKE]),
    ("is_fast", PASS, "", [{"step_ms": 131.0}], []),
    ("is_fast", MISSED, "", [{"step_ms": 132.0}], []),
    ("is_near_the_twin", PASS, "", [{"step_ms": 131.0}, TWIN | {"step_ms": 105.0}], []),
    ("is_near_the_twin", MISSED, "", [{"step_ms": 132.0}, TWIN | {"step_ms": 105.0}], []),
    # A variant is not what the aim is about.
    ("is_fast", NOT_HERE, "", [{"variant": "compile"}, TWIN], []),
    ("is_near_the_twin", NOT_HERE, "", [{"variant": "compile"}, TWIN], []),
    ("is_fast", OPEN, "has no value", [{"outcome": "oom"}], []),
    ("watching_costs_little", PASS, "", [{}, WATCHED | {"watched_times": 1.149}], []),
    ("watching_costs_little", MISSED, "1.151", [WATCHED | {"watched_times": 1.151}, {}], []),
    ("watching_costs_little", NOT_HERE, "", [{"watched_times": 1.0}], []),
    ("beats_the_twin_when_long", PASS, "", [*WINS, *LONG_TWIN], []),
    ("beats_the_twin_when_long", MISSED, "at T 16384", [*WINS, *LONG_TWIN, FAST_TWIN], []),
    ("beats_the_twin_when_long", NOT_HERE, "", [WINS[0], LONG_TWIN[0]], []),
    ("two_ranks_pay", PASS, "", [{}, {"variant": TWO, "step_ms": 104.0}], []),
    ("two_ranks_pay", MISSED, "", [{}, {"variant": TWO, "step_ms": 106.0}], []),
    ("two_ranks_pay", NOT_HERE, "", [{}, FSDP], []),
    ("two_ranks_pay", OPEN, "", [{}, COMPILED], []),
    ("learns_as_the_twin", PASS, "", [], [{"offset": 0.03}, TWIN]),
    ("learns_as_the_twin", MISSED, "", [], [{"offset": 0.1}, TWIN]),
    # What all its backends compute is the same, so each is a sample more.
    ("learns_as_the_twin", PASS, "+0.00%", [], [{"offset": 0.06}, BELOW, TWIN]),
    ("learns_as_the_twin", NOT_HERE, "", [], [{"steps": 100}, TWIN | {"steps": 100}]),
    ("learns_as_the_twin", NOT_HERE, "", [], [{}]),
]


@pytest.mark.parametrize(("claim", "verdict", "says", "cells", "curves"), VERDICTS)
def test_each_claim_is_borne_out_refuted_or_open(claim, verdict, says, cells, curves):
    df = frame(*(row(**cell) for cell in cells), curves=[curve(**one) for one in curves])
    told = getattr(claims, claim)(df)
    assert told.verdict == verdict and says in told.claim


def test_a_refutation_cites_what_it_found():
    df = frame(row(), row(**RECOMPILED))
    assert claims.nothing_is_compiled_late(df).evidence == {"triton compile T 2048": 2}
    df = frame(row(), row(**MISCOUNTED))
    assert claims.the_meter_is_right(df).evidence["furthest"].endswith("dense, , 2048")
    df = frame(curves=[curve(apart=late), curve("gather", offset=0.005, apart=late)])
    found = claims.backends_learn_alike(df).evidence
    assert found["nats apart"] == 0.005 and found["p"] < claims.ALPHA
    df = frame(row(variant="observe", watched_times=1.151))
    assert claims.watching_costs_little(df).evidence == {"triton T 2048": 1.151}


@pytest.mark.full
def test_loss_curves_that_part_by_chance_are_rarely_said_to_differ():
    """Three backends, two seeds: walks of equal law, as rounding and seeds make them."""
    rng = np.random.default_rng(0)

    def verdict(offset=0.0):
        def walk(seed):
            noise = 0.02 * rng.standard_normal(100).cumsum() / 10 + 0.02 * rng.standard_normal(100)
            return list(np.linspace(4, 2, 100) + noise)

        made = [curve(name, steps=100) for name in ("triton", "gather", "masked")]
        for one in made:
            one["losses"] = {seed: walk(seed) for seed in ("1", "2")}
        made[0]["losses"] = {k: [x + offset for x in v] for k, v in made[0]["losses"].items()}
        return claims.backends_learn_alike(frame(curves=made)).verdict

    assert [verdict() for _ in range(30)].count(FAIL) <= 2
    assert [verdict(1.0) for _ in range(3)] == [FAIL] * 3


def test_one_program_under_two_names_refutes():
    claim = claims.programs_are_different
    assert claim([row(), row("gather")]).verdict == PASS
    assert claim([row(), row("gather", paths={"slc": ["triton"]})]).verdict == FAIL
    assert claim([row(), row(tokens=4096)]).verdict == NOT_HERE
    assert claim([row(), row("gather", outcome="oom")]).verdict == OPEN


def test_a_lesson_that_went_otherwise_refutes():
    claim = claims.lessons_are_learnt
    learnt = {"lesson": "window", "outcome": "ok", "as_expected": True, "accuracy": {"in": 1.0}}
    assert claim([learnt]).verdict == PASS
    told = claim([learnt, learnt | {"lesson": "copy", "as_expected": False}])
    assert told.verdict == FAIL and told.claim.endswith("not so: copy")
    assert claim([learnt, {"lesson": "recall", "outcome": "timeout"}]).verdict == OPEN
    assert len(claims.all_claims(frame(row()), [row()], [learnt])) == 8


def test_ranks_that_run_compiled_are_held_against_one_that_does():
    plain, compiled = row(variant=TWO, step_ms=90.0), row(**COMPILED)
    df = frame(row(), plain, row(variant="compile", step_ms=70.0), compiled)
    told = claims.two_ranks_pay(df)
    assert told.verdict == MISSED
    assert told.evidence == {"T 2048": 2.222, "T 2048 compile": 1.75}
    assert len(plots.scaling(df).axes[0].patches) == 2


def test_where_no_cell_ran_the_tables_behind_figures_are_empty_and_curves_go_on():
    df = frame(row(outcome="timeout"), curves=[curve()])
    assert table.phases(df).empty
    assert set(table.memory_over_steps(df)["backend"]) == {"triton"}
    assert table.memory_over_steps(frame(row(outcome="timeout"))).empty
    for drawn in (plots.speed, plots.memory, plots.losses):
        assert drawn(df).axes


@pytest.mark.parametrize("gpu", ["unknown", "NVIDIA A100"])
def test_no_other_machine_decides_an_aim(gpu):
    df = frame(row(), row("dense"), row(tokens=16384), row("dense", tokens=16384), gpu=gpu)
    found = claims.aims(df)
    assert {claim.verdict for claim in found} == {NOT_HERE} and len(found) == 6
    on_the_cpu = frame(row(device="cpu"), row("dense", device="cpu"))
    assert {c.verdict for c in claims.aims(on_the_cpu)} == {NOT_HERE}


def test_an_empty_run_decides_nothing():
    df = frame()
    assert {c.verdict for c in claims.all_claims(df, [])} == {OPEN}
    assert {c.verdict for c in claims.aims(df)} == {NOT_HERE}


def test_break_even_is_where_a_token_costs_both_the_same():
    cells = [row(tokens=t, step_ms=100.0) for t in (2048, 8192)]
    cells += [row("dense", tokens=2048, step_ms=50.0), row("dense", tokens=8192, step_ms=200.0)]
    line = table.break_even(frame(*cells)).iloc[0]
    assert (line["break-even T"], line["longest T of both"], line["dense / NSA"]) == (
        "4096", 8192, 2.0,
    )  # fmt: skip


def test_tables_show_values_and_failures_by_name():
    df = frame(row(), row("gather", outcome="oom"), row("dense", step_ms=80.0))
    speed = table.speed(df)[2048].droplevel("model")
    assert speed.to_dict() == {"triton": "327,680", "gather": "oom", "dense": "409,600"}
    assert table.step_times(df)[2048].iloc[0] == "100 [90, 110]"
    assert table.notes(df).loc["gather", "why"] == "planted"
    meters = table.meters(df).droplevel(["model", "variant"])
    # 0.61 GFLOP a token, 32,768 tokens in 0.1 s, of 790 TFLOP/s
    assert meters.loc[("triton", 2048), "of measured ceiling"] == pytest.approx(0.253, abs=1e-3)
    assert meters.loc[("triton", 2048), "of nominal ceiling"] == pytest.approx(0.202, abs=1e-3)
    beside = table.beside_the_case_study(df)
    assert beside.loc["case study", "tokens/s"].iloc[0] == "153"
    assert beside.iloc[-1]["tokens/s"] == "409,600"


def test_variants_stand_beside_the_plain_cell_of_the_same_backend():
    two = row(variant=TWO)
    changed = row(variant="checkpoint=all", step_ms=125.0, peak_mib=4500.0)
    df = frame(row(), row("dense"), two, changed)
    found = table.variants(df).droplevel(["model", "backend", "T"])
    assert found["tokens/s, times plain"].to_dict() == {"": 1.0, "checkpoint=all": 0.8}
    assert found.loc["checkpoint=all", "peak MiB, times plain"] == 0.5


def test_a_cell_measured_twice_counts_once_and_last():
    df = frame(row(step_ms=100.0), row(step_ms=50.0))
    assert table.at_points(df, "step_time").to_list() == [50.0]


def test_work_is_told_by_shapes():
    lines = table.facts([row(), row("dense")])
    work = dict(line.split(": operations a step ") for line in lines if "operations" in line)
    assert list(work) == ["triton T 2048 batch 16", "dense T 2048 batch 16"]
    ours, dense = (int(told.split()[3].replace(",", "")) for told in work.values())
    assert ours > dense


def test_cpu_times_are_labelled():
    df = frame(row(device="cpu"), gpu="")
    assert "only ratios" in table.speed(df).columns.name
    assert "only ratios" not in table.speed(frame(row())).columns.name


def test_figures_are_drawn_with_failures_in_them():
    two = row(variant=TWO, step_ms=105.0, communication_ms=5.0)
    cells = [row(), row("dense"), row("masked", outcome="oom"), two, row(tokens=4096)]
    df = frame(*cells, curves=[curve(), curve("gather"), curve("dense", offset=0.1)])
    figure = plots.speed(df, note="H200")
    ours, beside = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert "masked: oom" in ours and any(text.startswith("153") for text in beside)
    assert not any(text.startswith("153") for text in ours)  # decades below what was measured
    memory = plots.memory(df).axes[0]
    highest = max(max(line.get_ydata()) for line in memory.get_lines())
    assert memory.get_ylim()[0] == 0 and memory.get_ylim()[1] > 1.04 * highest
    for drawn in (plots.speed, plots.memory):
        drawn(frame(row(outcome="oom"))).canvas.draw()  # no line at all
    bars = plots.phases(df).axes[0]
    assert len(bars.get_yticklabels()) == 4
    (bar,) = plots.scaling(df).axes[0].patches
    assert bar.get_width() == pytest.approx(2 * 100 / 105, rel=1e-3)
    assert len(plots.losses(df).axes) == 2
    over_steps = plots.memory_over_steps(df)
    assert len(over_steps.axes) == 2
    shown = [(line.get_color(), line.get_marker()) for line in over_steps.axes[0].get_lines()]
    assert len(set(shown)) == len(shown) == len(over_steps.legends[0].get_texts())
    profile = {"kernels": [{"name": "gemm", "ms": 3.0, "calls": 4, "share": 1.0}]}
    assert plots.kernels(profile, "step").axes[0].get_title(loc="left") == "step: kernels (calls)"
    assert plots.losses(frame(row())) is None


@pytest.mark.parametrize("name", ["04_smoke", "04_h200", "04_h200x2", "04_losses", "04_tasks"])
def test_the_parameter_files_fit_the_notebook_and_make_legal_cells(name):
    pytest.importorskip("papermill")
    declared = parameters.declared(NOTEBOOKS / "04_throughput.ipynb")
    given = parameters.check(declared, parameters.read_file(NOTEBOOKS / f"params/{name}.yaml"))
    full = parameters.filled(declared, given)
    keys = ["step_tokens", "long_backends", "long_tokens", "variants", "ranks", "parallel"]
    cells = throughput_grid(
        full["preset"], full["backends"], full["tokens"], precision=full["precision"],
        steps=full["steps"], **{key: full[key] for key in keys},
    )  # fmt: skip
    assert len({str(cell) for cell in cells}) == len(cells)
    if name not in ("04_smoke", "04_tasks"):
        assert full["preset"] == "production" and full["backends"][0] == "triton"
        assert claims.TOKENS in full["tokens"]
