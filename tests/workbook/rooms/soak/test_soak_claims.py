"""Drift, on series that trainings show; each sentence can come out otherwise."""

from dataclasses import replace

import numpy as np
import pandas
import pytest

from whyhung.process.trial import Outcome
from workbook.lab.training import TrainingSpec
from workbook.rooms.soak import claims, plots, table
from workbook.rooms.soak.trials import COLUMNS, Estimated, Part, Setting, Soak
from workbook.runs import metrics

GPU = TrainingSpec("production", 2048, batch=16, precision="bf16", checkpoint="all", device="cuda")
STEPS, HALF = 800, 400
LIMITS = (60.0, 65.0)
CPU = TrainingSpec("cpu_test", 64)
ON_CPU = Soak(CPU, STEPS, 10, LIMITS)


def soaked(cell=GPU, steps=STEPS, **columns):
    """A soak whose series are functions of the step within a process, or numbers."""
    random, parts, half = np.random.default_rng(7), [], steps // 2
    for start, stop in ((0, half + 10), (half, steps)):
        local = np.arange(stop - start)
        base = {name: np.full(len(local), np.nan) for name in COLUMNS}
        base |= {"step": np.arange(start, stop), "loss": 5.0 / (1 + np.arange(start, stop))}
        base["seconds"] = 0.124 * (1 + 0.004 * random.standard_normal(len(local)))
        base |= {"tensors_mib": np.full(len(local), 1200.0)}
        base["host_mib"] = 3000 + 0.3 * random.standard_normal(len(local))
        base |= {"reserved_mib": base["tensors_mib"] + 2600, "peak_mib": base["tensors_mib"] + 2200}
        for name, made in columns.items():
            base[name] = base[name] + made(local, start) if callable(made) else made
        rows = pandas.DataFrame(base)[list(COLUMNS)]
        ended = Outcome(
            "ok", {"stop": None, "warnings": [], "saved": "", "steps_done": stop}, 9, "", 0
        )
        parts.append(Part({"resume": "x"} if start else {}, ended, rows))
    return Soak(cell, steps, 10, LIMITS, tuple(parts))


# Of users' trainings: what is added to the series, and whether it is called growth.
MEMORY = {
    "healthy": (lambda i, s: 0.0 * i, "PASS"),
    "a warm-up that grows": (lambda i, s: 400.0 * np.minimum(i, 15) / 15, "PASS"),
    "an evaluation every 50 steps": (lambda i, s: 900.0 * (i % 50 == 0), "PASS"),
    "another level after the restart": (lambda i, s: 300.0 * (s > 0) + 0.0 * i, "PASS"),
    "falls": (lambda i, s: -0.01 * i, "PASS"),
    "noise that rises by chance": (lambda i, s: 0.2 * np.cos(i / 40 + 4) + 0.2 * np.sin(i), "PASS"),
    "1 MiB a step": (lambda i, s: 1.0 * i, "FAIL"),
    "16 KiB a step": (lambda i, s: i / 64, "FAIL"),
    "1 MiB every 20 steps": (lambda i, s: 1.0 * (i // 20), "FAIL"),
    "1 MiB a step in the second process alone": (lambda i, s: 1.0 * i * (s > 0), "FAIL"),
    "one jump in the middle": (lambda i, s: 512.0 * (i > 300), "INCONCLUSIVE"),
    "1 KiB a step": (lambda i, s: i / 1024, "INCONCLUSIVE"),
}


@pytest.mark.parametrize("series", table.SERIES)
@pytest.mark.parametrize("case", MEMORY)
def test_memory_grows_by_steps_and_by_as_much_as_counts(case, series):
    adds, verdict = MEMORY[case]
    if series == "host" and case == "1 KiB a step":
        verdict = "PASS"  # which adds up to nothing beside what its heap comes and goes by
    claim = claims.memory_does_not_grow(soaked(**{table.SERIES[series][0]: adds}), series)
    assert claim.verdict == verdict, claim


def test_memory_of_too_few_steps_decides_nothing_and_of_none_neither():
    few = claims.memory_does_not_grow(soaked(steps=120), "host")
    assert few.verdict == "NOT APPLICABLE" and "it takes 100" in few.claim
    warming = soaked(steps=120, tensors_mib=lambda i, s: 400.0 * np.minimum(i, 15) / 15)
    assert claims.memory_does_not_grow(warming, "tensors").verdict == "PASS"
    whole = soaked()
    cut, nothing = (
        replace(whole, parts=tuple(replace(p, rows=p.rows[:n]) for p in whole.parts))
        for n in (60, 0)
    )
    assert claims.memory_does_not_grow(cut, "host").verdict == "INCONCLUSIVE"
    assert claims.memory_does_not_grow(nothing, "tensors").verdict == "INCONCLUSIVE"
    assert claims.speed_does_not_drift(nothing).verdict == "INCONCLUSIVE"


SECONDS = {
    "healthy": (lambda i, s: 0.0 * i, "PASS"),
    "the first steps compile": (lambda i, s: 30.0 * (i < 5), "PASS"),
    "every 50th step waits for a disk": (lambda i, s: 1.0 * (i % 50 == 0), "PASS"),
    "one step in 20 waits for a disk from the middle on": (
        lambda i, s: 1.0 * (i % 20 == 5) * (s > 0),
        "PASS",
    ),
    "a tenth of the steps takes twice as long": (
        lambda i, s: 0.124 * (abs(i + s - 500) < 40),
        "PASS",
    ),
    "the last tenth takes 1.5 times": (lambda i, s: 0.062 * (i + s >= 720), "PASS"),
    "slower by 5 % in the end": (lambda i, s: 0.0062 * (i + s) / STEPS, "AIM MISSED"),
    "faster by 5 % in the end": (lambda i, s: -0.0062 * (i + s) / STEPS, "AIM MISSED"),
    "slower by 1 % in the end": (lambda i, s: 0.00125 * (i + s) / STEPS, "INCONCLUSIVE"),
    "slower by a quarter after the restart": (lambda i, s: 0.03 * (s > 0) + 0 * i, "INCONCLUSIVE"),
}


@pytest.mark.parametrize("case", SECONDS)
def test_speed_drifts_by_the_whole_run_and_not_by_some_of_its_steps(case):
    adds, verdict = SECONDS[case]
    claim = claims.speed_does_not_drift(soaked(seconds=adds))
    assert claim.verdict == verdict, claim


def test_a_cpus_speed_is_never_judged():
    slow = soaked(CPU, seconds=lambda i, s: 9.0 * i, reserved_mib=np.nan, peak_mib=np.nan)
    assert claims.speed_does_not_drift(slow).verdict == "NOT APPLICABLE"
    assert claims.memory_does_not_grow(slow, "reserved").verdict == "NOT APPLICABLE"
    assert "tokens/s" not in table.drifts(slow).index and "tokens/s" in table.drifts(soaked()).index


def test_a_restart_on_a_gpu_is_exact_as_on_a_cpu():
    """Sums are in a fixed order there, too."""
    same, apart = soaked(), soaked(loss=lambda i, s: 1e-7 * (s > 0))
    assert claims.goes_on_after_the_restart(same).verdict == "PASS"
    assert claims.goes_on_after_the_restart(apart).verdict == "FAIL"


@pytest.mark.parametrize(
    ("status", "verdict"),
    [("crash", "INCONCLUSIVE"), ("timeout", "INCONCLUSIVE"), ("not run", "INCONCLUSIVE"),
     ("oom", "FAIL"), ("error", "FAIL")],
)  # fmt: skip
def test_an_end_that_is_not_the_trainings_own_decides_nothing(status, verdict):
    found = soaked()
    assert claims.comes_to_its_end(found).verdict == "PASS"
    last = replace(found.parts[1], ended=Outcome(status, None, 1.0, "why", 1))
    found = replace(found, parts=(found.parts[0], last))
    assert claims.comes_to_its_end(found).verdict == verdict


def trials(changed=None, status="ok"):
    """Trials of three settings in three turns; `changed`: {(setting, series): value}."""
    found = []
    for turn in range(3):
        for name in ("", "expandable_segments:True", "roundup_power2_divisions:4"):
            mib = {"requested": 3000.0, "allocated": 3010.0, "reserved": 3300.0}
            mib |= {"fragmentation": 290.0, "inactive_split": 200.0, "losses": 2.0}
            mib["seconds"] = 0.1 * (1 + turn) * (1 + 0.001 * len(name) * turn)  # a slower machine
            if name.startswith("exp"):
                mib["fragmentation"] = 90.0
            mib |= {of: value for (where, of), value in (changed or {}).items() if where == name}
            result = {of: [value] * 9 for of, value in mib.items()} if status == "ok" else None
            found.append(Setting(name, turn, Outcome(status, result, 1.0, "", 0)))
    return found


ROUND, EXPANDABLE = "roundup_power2_divisions:4", claims.EXPANDABLE
SETTINGS = {
    "settings_ask_for_the_same": [
        ({}, "PASS"), ({(ROUND, "allocated"): 4000.0}, "PASS"),
        ({(ROUND, "requested"): 3100.0}, "FAIL"), ({(EXPANDABLE, "losses"): 2.1}, "FAIL"),
    ],
    "expandable_segments_waste_less": [
        ({}, "PASS"), ({(EXPANDABLE, "fragmentation"): 400.0}, "AIM MISSED"),
    ],
    "no_setting_is_slow": [({}, "PASS"), ({(ROUND, "seconds"): 0.22}, "INCONCLUSIVE")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changed", "verdict"),
    [(name, *case) for name, cases in SETTINGS.items() for case in cases],
)
def test_what_settings_change_and_what_they_must_not(name, changed, verdict):
    claim = getattr(claims, name)
    assert claim(soaked(), trials(changed)).verdict == verdict
    assert claim(soaked(), trials(status="oom")).verdict == "INCONCLUSIVE"
    assert claim(soaked(), []).verdict == "NOT APPLICABLE"
    assert claim(ON_CPU, trials()).verdict == "NOT APPLICABLE"


def test_a_setting_that_is_slow_in_every_turn_misses_the_aim():
    slow = trials()
    for trial in slow:
        if trial.name == ROUND:
            trial.ended.result["seconds"] = [0.2 * (1 + trial.turn)] * 9
    assert claims.no_setting_is_slow(soaked(), slow).verdict == "AIM MISSED"


@pytest.mark.parametrize(
    ("mib", "verdict"), [(3500.0, "PASS"), (2800.0, "AIM MISSED"), (np.nan, "INCONCLUSIVE")]
)
def test_what_is_reserved_is_estimated_or_not(mib, verdict):
    said = [Estimated(t.name, 3000.0, 3300.0) for t in trials()[:2]]
    said.append(Estimated(ROUND, 3000.0, mib))
    assert claims.reserved_is_estimated(soaked(), trials(), said).verdict == verdict
    assert claims.reserved_is_estimated(soaked(), trials(), []).verdict == "NOT APPLICABLE"
    assert claims.reserved_is_estimated(ON_CPU, [], said).verdict == "NOT APPLICABLE"
    plots.settings([], "a CPU", said).canvas.draw()
    plots.settings(trials(), "a GPU", said).canvas.draw()
    assert table.settings([], said).loc["usual", "foretold reserved, MiB"] == "3,300.0"


def test_rows_fit_the_table_of_all_runs_and_figures_can_be_drawn():
    found = soaked(tensors_mib=lambda i, s: 1.0 * i)
    limits = {"limits_mib": [1203.0, 1206.0], "stop": {"reason": "memory", "step": 6}}
    warned = {"warnings": [{"guard": "memory", "step": 3}], "saved": "", "steps_done": 7}
    rows = found.parts[0].rows.iloc[:7].assign(peak_mib=lambda rows: rows["tensors_mib"])
    planted = Part({}, Outcome("ok", limits | warned, 1.0, "", 0), rows)
    assert claims.limits_stop_a_run(planted).verdict == "PASS"
    made = [metrics.row(row, {"device": "x"}) for row in table.to_metrics(found, planted, trials())]
    kinds = {row["metric"] for row in made}
    assert {"memory", "memory_growth", "tokens_per_second", "memory_limit", "reserved"} <= kinds
    for figure in (
        plots.over_steps(found, "a GPU"),
        plots.restart_and_limits(found, planted),
        plots.settings(trials(), "a GPU"),
        plots.settings([], "a CPU"),
    ):
        figure.canvas.draw()
    assert table.settings(trials()).loc["usual", "times usual"] == ""
