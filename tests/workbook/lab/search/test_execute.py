import random
import threading

import pytest
from lab_entries import make_up_trials

from whyhung.process.gpus import Gpus
from whyhung.verdict import Verdict
from whyhung.watch.evidence import End, Evidence
from workbook.lab.search.execute import Done, Trials, bisect, same_paths, sweep
from workbook.lab.search.ledger import Ledger
from workbook.lab.search.plan import ATTEMPT, Plan

STRANGER = "lab_entries:broken_pair"


class Runner:
    """Runs nothing: `ends(settings, attempt, stop)` tells a trial's end; keeps what was asked."""

    def __init__(self, ends):
        self.ends, self.ran, self.asked = ends, [], []

    def __call__(self, spec, *, folder, **options):
        folder.mkdir(parents=True, exist_ok=True)
        attempt = int(spec.env.get(ATTEMPT, "0"))
        self.asked.append(options)
        end = self.ends(spec.settings, attempt, options["stop"])
        if isinstance(end, BaseException):
            raise end
        self.ran.append((spec.settings, attempt))
        return Evidence(spec=spec.to_dict(), end=end, witness=spec.settings.get("witness"))


PASSED = End("returned", 0)
CRASHED = End("exception", 1, "RuntimeError")


def crashed(settings, attempt, stop):
    return CRASHED if settings["cache"] and settings["fast"] else PASSED


def stopped(settings, attempt, stop):
    assert stop.wait(10)
    return End("stopped by the supervisor", type="caller")


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A ledger whose trials are made up: fake(ends) -> (Ledger, Runner)."""

    def make(ends):
        made = Runner(ends)
        make_up_trials(monkeypatch, made)
        return Ledger(tmp_path / "trials"), made

    return make


def plan(**more):
    factors = {"cache": [False, True], "fast": [False, True], "other": [1, 2]}
    return Plan.from_dict({"subject": STRANGER, "factors": factors, "oracles": []} | more)


def test_a_sweep_runs_every_cell_once_and_a_finished_trial_is_a_cache_hit(fake):
    ledger, ran = fake(crashed)
    swept, again = sweep(plan(), ledger), sweep(plan(), ledger, budget_s=1e-9)
    assert len(swept.done) == len(ran.ran) == 8 and not swept.not_run and not swept.why
    kinds = {(d.cell["cache"], d.cell["fast"]): d.verdict.kind for d in swept.done}
    assert kinds.pop((True, True)) == "CRASH" and set(kinds.values()) == {"PASS"}
    # a spent budget still tells what is there
    assert [done.id for done in again.done] == [done.id for done in swept.done]
    assert not again.not_run
    assert {done.cached for done in swept.done} == {False} != {done.cached for done in again.done}


def test_interrupted_it_loses_the_trial_in_flight_and_goes_on(fake):
    state = {"calls": 0}

    def ends(settings, attempt, stop):
        state["calls"] += 1
        return KeyboardInterrupt() if state["calls"] == 4 else PASSED

    ledger, ran = fake(ends)
    with pytest.raises(KeyboardInterrupt):
        sweep(plan(), ledger)
    assert len(ledger.ids()) == 3
    swept = sweep(plan(), ledger)
    assert len(swept.done) == 8 and sum(done.cached for done in swept.done) == 3
    assert len(ran.ran) == 8


def test_the_budget_ends_the_trial_in_flight_which_is_run_by_the_next_sweep(fake):
    state = {"calls": 0, "slow": True}

    def ends(settings, attempt, stop):
        state["calls"] += 1
        slow = state["slow"] and state["calls"] == 3
        return stopped(settings, attempt, stop) if slow else PASSED

    ledger, _ = fake(ends)
    swept = sweep(plan(), ledger, budget_s=1.0)
    assert len(swept.done) == 2 and len(swept.not_run) == 6
    assert swept.why == "the budget of 1 s is spent"
    state["slow"] = False
    swept = sweep(plan(), ledger, budget_s=600)
    assert len(swept.done) == 8 and sum(done.cached for done in swept.done) == 2


def test_a_trial_that_ends_by_itself_as_time_is_up_is_kept(fake):
    def ends(settings, attempt, stop):
        assert stop.wait(5)
        return PASSED

    ledger, _ = fake(ends)
    swept = sweep(plan(), ledger, budget_s=0.2)
    assert len(swept.done) >= 1 and len(ledger.ids()) == len(swept.done)


def test_a_trial_that_was_certified_to_hang_when_time_was_up_is_kept(fake, monkeypatch):
    ledger, _ = fake(stopped)
    hang = Verdict("HANG", "lock")
    monkeypatch.setattr("workbook.lab.search.ledger.judge", lambda evidence: hang)
    swept = sweep(plan(), ledger, budget_s=0.2)
    assert [done.verdict for done in swept.done] == [hang] and len(swept.not_run) == 7


def test_one_trial_runs_on_each_gpu_and_the_table_is_in_the_plans_order(fake):
    both, first = threading.Barrier(2, timeout=10), threading.Event()

    def ends(settings, attempt, stop):
        both.wait()  # nobody passes alone
        if not first.is_set():
            first.set()
            stop.wait(0.2)  # so that others overtake it
        return crashed(settings, attempt, stop)

    ledger, ran = fake(ends)
    swept = sweep(plan(), ledger, gpus=Gpus(("0", "3")))
    assert [done.cell for done in swept.done] == list(plan().cells()) and not swept.not_run
    assert {asked["gpu"] for asked in ran.asked} == {"0", "3"}
    again = sweep(plan(), ledger)
    assert all(done.cached for done in again.done)


def test_a_plan_with_several_ranks_is_run_one_trial_after_another(fake):
    ledger, ran = fake(crashed)
    factors = {"cache": [False, True], "fast": [False], "ranks": [1, 2]}
    sweep(plan(factors=factors), ledger, gpus=Gpus(("0", "1")))
    assert len(ran.asked) == 4 and {asked["gpu"] for asked in ran.asked} == {None}


def test_one_that_breaks_off_ends_those_on_the_other_gpus(fake):
    both = threading.Barrier(2, timeout=10)
    ended = []

    def ends(settings, attempt, stop):
        if both.wait() == 0:
            return RuntimeError("the lab itself is broken")
        ended.append(stop.wait(10))
        return stopped(settings, attempt, stop)

    ledger, ran = fake(ends)
    with pytest.raises(RuntimeError, match="the lab itself"):
        sweep(plan(), ledger, gpus=Gpus(("0", "1")))
    assert ended == [True] and len(ran.asked) == 2


def test_a_budget_on_several_gpus_ends_all_in_flight(fake):
    ledger, _ = fake(stopped)
    swept = sweep(plan(), ledger, gpus=Gpus(("0", "1")), budget_s=0.2)
    assert not swept.done and swept.not_run == list(plan().cells())
    assert swept.why == "the budget of 0.2 s is spent"


def test_a_budget_must_be_a_time(fake):
    ledger, _ = fake(crashed)
    with pytest.raises(ValueError, match="budget_s=0 must be greater than 0"):
        Trials(plan(), ledger, budget_s=0)


def test_deadlines_and_predictions_reach_the_runner(fake):
    ledger, ran = fake(crashed)
    made = plan(deadline_s=10, predicted_s=1.5, factors={"cache": [False], "fast": [False],
                                        "deadline_factor": [1.0, 2.0]})  # fmt: skip
    sweep(made, ledger)
    assert [asked["deadline_s"] for asked in ran.asked] == [10, 20]
    assert {asked["predicted_s"] for asked in ran.asked} == {1.5}


def test_attempts_that_differ_are_flaky(fake):
    def ends(settings, attempt, stop):
        return crashed(settings, attempt, stop) if attempt % 2 else PASSED

    ledger, ran = fake(ends)
    swept = sweep(plan(attempts=4), ledger)
    assert len(ran.ran) == 32
    together = {swept.done[first].cell["cache"]: v.kind for first, v in swept.flaky.items()}
    assert together == {True: "FLAKY"} and len(swept.flaky) == 2


def test_variants_that_ran_the_same_code_are_invalid(fake):
    def done(backend, paths):
        evidence = Evidence(witness={"paths": paths})
        return Done({"backend": backend, "layers": 1}, backend, Verdict("PASS"), evidence)

    rows = [done("auto", {"slc": {"a": 1}}), done("gather", {"slc": {"a": 1}}),
            done("masked", {"slc": {"b": 1}})]  # fmt: skip
    assert [(a.id, b.id) for a, b in same_paths(rows)] == [("auto", "gather")]


def test_a_bisection_of_a_plan_finds_the_pair_and_what_it_ran_is_there_for_a_sweep(fake):
    ledger, ran = fake(crashed)
    said = []
    found = bisect(plan(), ledger, say=said.append)
    assert found.cause == {"cache": True, "fast": True} and found.solved
    assert found.target.kind == "CRASH" and len(said) == len(found.rows) == len(ran.ran)
    assert all(row.tried.id in ledger.ids() for row in found.rows)
    cached = sum(done.cached for done in sweep(plan(), ledger).done)
    assert cached == len(found.rows)


def test_a_bisection_of_a_plan_keeps_to_never(fake):
    ledger, ran = fake(crashed)
    bisect(plan(never=[{"fast": True, "other": 2}]), ledger)
    assert not any(s["fast"] and s["other"] == 2 for s, _ in ran.ran)


def test_a_bisection_without_time_says_so(fake):
    ledger, _ = fake(stopped)
    found = bisect(plan(), ledger, budget_s=0.2)
    assert not found.solved and found.why == "not at its end: the budget of 0.2 s is spent"


def test_a_flaky_threshold_of_a_plan_asks_one_value_several_times(fake):
    rng = random.Random(5)

    def ends(settings, attempt, stop):
        fires = settings["size"] >= 6 and rng.random() < 0.7
        return CRASHED if fires else PASSED

    ledger, ran = fake(ends)
    made = plan(factors={"size": list(range(1, 13))}, attempts=3, kind="CRASH")
    found = bisect(made, ledger)
    assert found.posterior.value == 6 and found.solved and len(found.rows) <= 20
    assert len(ran.ran) == len(found.rows) == len(ledger.ids())
    assert str(found).startswith("CRASH:RuntimeError begins at size=6 (probability ")


def test_a_plan_in_which_nothing_varies_is_not_bisected(fake):
    ledger, _ = fake(crashed)
    with pytest.raises(ValueError, match="no factor has two values that can be run"):
        bisect(plan(factors={"cache": [True]}), ledger)
