"""A plan's trials: in turns, each once, resumed where a run was stopped."""

import json
import shutil
import subprocess
import sys
import time

import pytest
from lab_entries import make_up_trials
from places import NOTEBOOKS
from processes import environment_with_package

from whyhung.watch.evidence import End, Evidence
from workbook.lab.search.ledger import Ledger
from workbook.lab.search.plan import ATTEMPT
from workbook.rooms.ab import claims, trials
from workbook.rooms.ab.plan import ABPlan

PLAN = {"subject": "stranger:make", "factors": {"width": [1, 2, 4]}, "repeats": 2, "oracles": []}


@pytest.fixture
def made_up(monkeypatch):
    """Runs nothing: the order of (width, turn), and how long each takes but for the first two."""
    ran, takes = [], {"s": 0.0}

    def run(spec, *, folder, stop=None, **options):
        folder.mkdir(parents=True, exist_ok=True)
        turn = int(spec.env.get(ATTEMPT, "0"))
        if stop is not None and stop.wait(takes["s"] * (len(ran) > 1)):
            return Evidence(
                spec=spec.to_dict(), end=End("stopped by the supervisor", type="caller")
            )
        ran.append((spec.settings["width"], turn))
        result = {"seconds": [9.0, 8.0, 1.0, 2.0, 3.0], "allocated": 7.0, "note": "text"}
        return Evidence(spec=spec.to_dict(), end=End("returned", 0), result=result, began_s=0.5)

    make_up_trials(monkeypatch, run)
    return ran, takes


def test_variants_take_turns(made_up, tmp_path):
    trials.run(ABPlan(**PLAN), Ledger(tmp_path))
    assert made_up[0] == [(1, 0), (2, 0), (4, 0), (1, 1), (2, 1), (4, 1)]


def test_steps_before_the_warm_up_are_not_counted_and_other_words_are_no_numbers(made_up, tmp_path):
    results = trials.run(ABPlan(**PLAN), Ledger(tmp_path))
    assert results.trials[0].values == {"seconds": 2.0, "allocated": 7.0, "startup": 0.5}


def test_a_plan_that_ran_out_of_time_goes_on_and_runs_no_trial_twice(made_up, tmp_path):
    ran, takes = made_up
    takes["s"] = 60.0
    first = trials.run(ABPlan(**PLAN), Ledger(tmp_path), budget_s=1.0)
    assert len(first.trials) == 2 and "1 s" in first.why
    takes["s"] = 0.0
    second = trials.run(ABPlan(**PLAN), Ledger(tmp_path))
    assert len(second.trials) == len(set(ran)) == len(ran) == 6
    assert [trial.done.cached for trial in second.trials] == sorted(
        (trial.done.cached for trial in second.trials), reverse=True
    )


def test_a_run_takes_over_what_an_earlier_run_of_the_same_command_finished(made_up, tmp_path):
    earlier, other, now = (
        tmp_path / day / name / "trials" / "ab"
        for day, name in (
            ("1", "08_ab-0123abcd"),
            ("1", "08_ab-ffffffff"),
            ("2", "08_ab-0123abcd-2"),
        )
    )
    plan = ABPlan(**PLAN)
    trials.run(plan, Ledger(earlier))
    shutil.copytree(earlier, other)
    for kept in list(earlier.glob("[!.]*"))[:4]:
        shutil.rmtree(kept)
    now.mkdir(parents=True)
    assert trials.adopt(plan, Ledger(now), now.parent.parent) == 2
    assert trials.adopt(plan, Ledger(tmp_path / "scratch/trials/ab"), tmp_path / "scratch") == 0


@pytest.mark.long
@pytest.mark.processes
def test_a_run_that_is_interrupted_goes_on_by_the_same_command(tmp_path):
    pytest.importorskip("papermill")
    command = [sys.executable, "-m", "nsa", "run", "ab", "--notebooks", NOTEBOOKS, "--quiet"]
    factors = "factors={backend: [gather, masked], layers: [1], tokens: [48]}"
    command += ["-p", factors, "-p", "expect=[same_verdict]"]
    command += ["--runs", tmp_path]
    options = {"env": environment_with_package(), "stdout": subprocess.DEVNULL}
    begun = subprocess.Popen(command, **options)
    finished = "*/08_ab-*/trials/ab/[!.]*/verdict.json"
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(finished)) and time.monotonic() < deadline:
        time.sleep(0.2)
    begun.send_signal(2)
    assert begun.wait(60) != 0
    before = {path.parent.name for path in tmp_path.glob(finished)}
    assert 0 < len(before) < 4
    assert subprocess.run(command, **options).returncode == 0
    last = max(tmp_path.glob("*/08_ab-*-2"))
    assert json.loads((last / "record.json").read_text())["status"] == "ok"
    assert {path.name for path in (last / "trials/ab").glob("[!.]*")} >= before
    told = (last / "stdout.log").read_text()
    assert told.count("(there before)") == len(before)


@pytest.mark.slow
@pytest.mark.processes
def test_a_strangers_steps_are_timed_and_compared(tmp_path):
    rule = {"cost": {"factor": "nap_s", "least": 2.0}}
    plan = ABPlan(
        subject="ab_entries:naps",
        factors={"nap_s": [0.01, 0.2]},
        repeats=2,
        oracles=["arrival"],
        expect=["same_verdict", {"equal_loss": 0}, "different_programs", rule],
    )
    results = trials.run(plan, Ledger(tmp_path))
    assert [trial.done.verdict.kind for trial in results.trials] == ["PASS"] * 4
    verdicts = [one.verdict for one in claims.judge(results)]
    assert verdicts[:3] == ["PASS", "PASS", "INCONCLUSIVE"]  # nothing tells what a stranger runs
    assert all(trial.values["seconds"] >= trial.done.cell["nap_s"] for trial in results.trials)
