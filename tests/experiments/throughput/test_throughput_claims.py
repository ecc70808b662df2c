"""The throughput notebook's sentences, tables and figures, on rows made to deserve them."""

import matplotlib
import pytest
from places import NOTEBOOKS

from nsa.experiments.throughput import claims, plots, table
from nsa.experiments.throughput.table import curves_to_metrics, rows_to_metrics
from nsa.experiments.throughput.trials import TrainCell, row_of, throughput_grid
from nsa.lab.process.trial import Outcome
from nsa.workbook import metrics, parameters

matplotlib.use("agg")
DENSE = {"attention": "dense", "backend": "auto"}
H200 = "NVIDIA H200"


def row(backend="triton", step_ms=100.0, tokens=2048, outcome="ok", variant="", **changes):
    """A row as `throughput.measure` leaves it; the batch keeps 32,768 tokens a step and rank."""
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


def curve(backend="triton", offset=0.0, steps=500, seeds=(1, 2), seed_apart=0.01, **changes):
    """Losses that fall from 5 to 2; seeds lie `seed_apart` nats apart."""
    name = DENSE if backend == "dense" else {"backend": backend}
    cell = TrainCell("production", 2048, precision="bf16", device="cuda", steps=steps, **name)
    losses = {
        str(seed): [5 - 3 * step / steps + offset + seed_apart * k for step in range(steps)]
        for k, seed in enumerate(seeds)
    }
    flat = {"device_mib": [900.0] * steps, "host_mib": [4000.0] * steps}
    return cell.to_dict() | flat | {
        "name": cell.name, "variant": "curve", "outcome": "ok", "message": "", "timing": "none",
        "losses": losses, **changes,
    }  # fmt: skip


def frame(*rows, curves=(), gpu=H200):
    found = rows_to_metrics(rows) + curves_to_metrics(curves)
    return metrics.table([metrics.row(line, {"gpu": gpu}) for line in found])


def test_where_no_cell_ran_the_tables_behind_figures_are_empty_and_curves_go_on():
    df = frame(row(outcome="timeout"), curves=[curve()])
    assert table.phases(df).empty
    assert set(table.memory_over_steps(df)["backend"]) == {"triton"}
    assert table.memory_over_steps(frame(row(outcome="timeout"))).empty
    for drawn in (plots.speed, plots.memory, plots.losses):
        assert drawn(df).axes


@pytest.mark.full
def test_a_failed_cell_refutes_and_out_of_memory_does_not():
    claim = claims.nothing_broke
    assert claim(frame(row(), row("masked", outcome="oom"))).verdict == "PASS"
    told = claim(frame(row(), row("gather", outcome="crash")))
    assert told.verdict == "FAIL" and "gather T 2048" in told.claim
    assert claim(frame(row(outcome="not run"))).verdict == "INCONCLUSIVE"
    lost = curve("gather", outcome="timeout", message="late", losses={}, host_mib=[])
    told = claim(frame(row(), curves=[lost]))
    assert told.verdict == "FAIL" and "gather curve T 2048" in told.claim


def test_a_meter_that_the_clock_contradicts_refutes():
    claim = claims.the_meter_is_right
    assert claim(frame(row())).verdict == "PASS"
    told = claim(frame(row(), row("dense", tokens_s=66.0, recount_tokens_s=13.2)))
    assert told.verdict == "FAIL" and "400.00%" in told.claim
    assert told.evidence["furthest"].endswith("dense, , 2048")
    assert claim(frame(row(outcome="oom"))).verdict == "INCONCLUSIVE"


def test_one_program_under_two_names_refutes():
    claim = claims.programs_are_different
    assert claim([row(), row("gather")]).verdict == "PASS"
    assert claim([row(), row("gather", paths={"slc": ["triton"]})]).verdict == "FAIL"
    assert claim([row(), row(tokens=4096)]).verdict == "INCONCLUSIVE"


def test_late_compilation_and_host_waits_refute():
    late, waits = claims.nothing_is_compiled_late, claims.no_step_waits_for_the_device
    assert late(frame(row())).verdict == waits(frame(row())).verdict == "PASS"
    told = late(frame(row(), row(variant="compile", recompilations=2)))
    assert told.verdict == "FAIL" and told.evidence == {"triton compile T 2048": 2}
    assert waits(frame(row(syncs=1))).verdict == "FAIL"
    assert waits(frame(row(syncs=None))).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("series", ["device_mib", "host_mib"])
def test_memory_that_climbs_refutes(series):
    claim = claims.memory_is_flat
    assert claim(frame(row(steps=500))).verdict == "PASS"
    climbing = [900 + 0.1 * step for step in range(500)]
    assert claim(frame(row(steps=500, **{series: climbing}))).verdict == "FAIL"
    assert claim(frame(curves=[curve(**{series: climbing})])).verdict == "FAIL"
    settling = [900.0] * 5 + [1900.0] * 495
    assert claim(frame(row(steps=500, **{series: settling}))).verdict == "PASS"
    assert claim(frame(row(steps=20))).verdict == "INCONCLUSIVE"


def test_a_backend_that_learns_otherwise_refutes():
    claim = claims.backends_learn_alike
    alike = [curve(), curve("gather", offset=0.005)]
    assert claim(frame(curves=alike)).verdict == "PASS"
    told = claim(frame(curves=[*alike, curve("masked", offset=0.05)]))
    assert told.verdict == "FAIL" and "triton, gather, masked" in told.claim
    # The twin is another model, and one seed has no spread.
    assert claim(frame(curves=[*alike, curve("dense", offset=1.0)])).verdict == "PASS"
    one = [curve(seeds=[1]), curve("gather", seeds=[1])]
    assert claim(frame(curves=one)).verdict == "INCONCLUSIVE"
    lost = curve("gather")
    lost["losses"]["1"][250] = float("nan")
    assert claim(frame(curves=[curve(), lost])).verdict == "FAIL"


def test_where_seeds_cross_their_spread_is_that_around_it():
    claim = claims.backends_learn_alike

    def crossing(apart, **changes):
        made = curve(**changes)
        first = made["losses"]["1"]
        made["losses"]["2"] = [loss + apart(step) for step, loss in enumerate(first)]
        return made

    def cross(step):  # in the window of the steps 240 to 249 nothing lies between them
        return 0.01 * ((step >= 250) - (step < 240))

    def late(step):
        return 0.01 * (step >= 250)

    both = [crossing(cross), crossing(cross, backend="gather", offset=0.005)]
    assert claim(frame(curves=both)).verdict == "PASS"
    both = [crossing(late), crossing(late, backend="gather", offset=0.005)]
    told = claim(frame(curves=both))
    assert told.verdict == "FAIL" and told.evidence == {"nats apart": 0.005, "spread": 0}


def test_a_lesson_that_went_otherwise_refutes():
    claim = claims.lessons_are_learnt
    learnt = {"lesson": "window", "outcome": "ok", "as_expected": True, "accuracy": {"in": 1.0}}
    assert claim([learnt]).verdict == "PASS"
    told = claim([learnt, learnt | {"lesson": "copy", "as_expected": False}])
    assert told.verdict == "FAIL" and told.claim.endswith("not so: copy")
    late = {"lesson": "recall", "outcome": "timeout"}
    assert claim([learnt, late]).verdict == "INCONCLUSIVE"
    assert len(claims.all_claims(frame(row()), [row()], [learnt])) == 8


def test_the_aims_of_one_gpu_are_reached_or_missed():
    fast, near = claims.is_fast, claims.is_near_the_twin
    df = frame(row(step_ms=131.0), row("dense", step_ms=105.0))
    assert fast(df, "triton").verdict == "PASS" and near(df, "triton").verdict == "PASS"
    df = frame(row(step_ms=132.0), row("dense", step_ms=105.0))
    assert fast(df, "triton").verdict == "FAIL" and near(df, "triton").verdict == "FAIL"
    # A variant is not what the aim is about.
    df = frame(row(step_ms=100.0, variant="compile"), row("dense"))
    assert fast(df, "triton").verdict == near(df, "triton").verdict == "INCONCLUSIVE"


def test_watching_is_measured_where_a_cell_asks_for_it():
    claim = claims.watching_costs_little
    watched = row(variant="observe")
    assert claim(frame(row(), watched | {"watched_times": 1.149})).verdict == "PASS"
    told = claim(frame(watched | {"watched_times": 1.151}, row()))
    assert told.verdict == "FAIL" and told.evidence == {"triton T 2048": 1.151}
    assert claim(frame(row() | {"watched_times": 1.0})).verdict == "INCONCLUSIVE"


def test_longer_than_16k_nsa_wins_at_every_length():
    claim = claims.beats_the_twin_when_long
    wins = [row(tokens=t, step_ms=100.0) for t in (8192, 16384, 32768)]
    twin = [
        row("dense", tokens=t, step_ms=ms) for t, ms in ((8192, 90), (16384, 130), (32768, 200))
    ]
    assert claim(frame(*wins, *twin), "triton").verdict == "PASS"
    twin[1] = row("dense", tokens=16384, step_ms=99.0)
    told = claim(frame(*wins, *twin), "triton")
    assert told.verdict == "FAIL" and "at T 16384" in told.claim
    assert claim(frame(wins[0], twin[0]), "triton").verdict == "INCONCLUSIVE"


def test_two_gpus_pay_or_not():
    claim, variant = claims.two_ranks_pay, "batch=32 ranks=2 parallel=ddp"
    both = [row(), row(variant=variant, step_ms=104.0, communication_ms=4.0)]
    assert claim(frame(*both), "triton").verdict == "PASS"
    both[1] = row(variant=variant, step_ms=106.0, communication_ms=6.0)
    assert claim(frame(*both), "triton").verdict == "FAIL"
    fsdp = row(variant="batch=32 ranks=2 parallel=fsdp", communication_ms=1.0)
    assert claim(frame(row(), fsdp), "triton").verdict == "INCONCLUSIVE"


def test_ranks_that_run_compiled_are_held_against_one_that_does():
    claim, two = claims.two_ranks_pay, "batch=32 ranks=2 parallel=ddp"
    plain, compiled = row(variant=two, step_ms=90.0), row(variant=f"{two} compile", step_ms=80.0)
    rows = [row(), plain, row(variant="compile", step_ms=70.0), compiled]
    told = claim(frame(*rows), "triton")
    assert told.verdict == "FAIL"
    assert told.evidence == {"T 2048": 2.222, "T 2048 compile": 1.75}
    assert claim(frame(row(), compiled), "triton").verdict == "INCONCLUSIVE"
    assert len(plots.scaling(frame(*rows)).axes[0].get_lines()) == 3


def test_nsa_learns_as_well_as_the_twin_after_500_steps():
    claim = claims.learns_as_the_twin
    assert claim(frame(curves=[curve(offset=0.03), curve("dense")])).verdict == "PASS"
    assert claim(frame(curves=[curve(offset=0.1), curve("dense")])).verdict == "FAIL"
    # What all its backends compute is the same, so each is a sample more.
    both = [curve(offset=0.06), curve("gather", offset=-0.06), curve("dense")]
    assert claim(frame(curves=both)).claim.endswith("+0.00%")
    short = [curve(steps=100), curve("dense", steps=100)]
    assert claim(frame(curves=short)).verdict == "INCONCLUSIVE"
    assert claim(frame(curves=[curve()])).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize("gpu", ["", "NVIDIA A100"])
def test_no_other_machine_decides_an_aim(gpu):
    df = frame(row(), row("dense"), row(tokens=16384), row("dense", tokens=16384), gpu=gpu)
    found = claims.aims(df)
    assert {claim.verdict for claim in found} == {"INCONCLUSIVE"} and len(found) == 6
    on_the_cpu = frame(row(device="cpu"), row("dense", device="cpu"))
    assert {c.verdict for c in claims.aims(on_the_cpu)} == {"INCONCLUSIVE"}


def test_an_empty_run_decides_nothing():
    df = frame()
    verdicts = {c.verdict for c in claims.all_claims(df, []) + claims.aims(df)}
    assert verdicts == {"INCONCLUSIVE"}


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
    two = row(variant="batch=32 ranks=2 parallel=ddp")
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
    two = row(variant="batch=32 ranks=2 parallel=ddp", step_ms=105.0, communication_ms=5.0)
    cells = [row(), row("dense"), row("masked", outcome="oom"), two, row(tokens=4096)]
    df = frame(*cells, curves=[curve(), curve("gather"), curve("dense", offset=0.1)])
    figure = plots.speed(df, note="H200")
    ours, beside = ([text.get_text() for text in axes.texts] for axes in figure.axes)
    assert "masked: oom" in ours and any(text.startswith("153") for text in beside)
    assert not any(text.startswith("153") for text in ours)  # decades below what was measured
    assert len(plots.speed(df, reported=False).axes) == 1
    memory = plots.memory(df).axes[0]
    highest = max(max(line.get_ydata()) for line in memory.get_lines())
    assert memory.get_ylim()[0] == 0 and memory.get_ylim()[1] > 1.04 * highest
    plots.memory(frame(row(outcome="oom")))  # no line at all
    bars = plots.phases(df).axes[0]
    assert len(bars.get_yticklabels()) == 4
    lines = plots.scaling(df).axes[0].get_lines()
    assert lines[1].get_ydata()[-1] == pytest.approx(2 * 100 / 105, rel=1e-3)
    assert len(plots.losses(df).axes) == 2
    over_steps = plots.memory_over_steps(df)
    assert len(over_steps.axes) == 2
    shown = [(line.get_color(), line.get_marker()) for line in over_steps.axes[0].get_lines()]
    assert len(set(shown)) == len(shown) == len(over_steps.legends[0].get_texts())
    profile = {"kernels": [{"name": "gemm", "ms": 3.0, "calls": 4, "share": 1.0}]}
    assert plots.kernels(profile, "step").axes[0].get_title() == "step"
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
