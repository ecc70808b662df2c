"""The step-5 question's verdicts and claims, on evidence written by hand; its trials are slow."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from places import NOTEBOOKS

pytest.importorskip("pandas")

from nsa.experiments.case_study.loop.subject import PrintSchedule
from nsa.experiments.case_study.step5 import claims, decision, investigation, plots, table, trials
from nsa.experiments.case_study.step5.investigation import OBSERVERS, PRINTS, Results
from nsa.experiments.case_study.step5.trials import BASE, Lab, Setup, Trial
from nsa.lab.search.candidates import Found, Row, Tried
from nsa.lab.search.ledger import Ledger
from nsa.lab.verdict import Verdict, judge
from nsa.lab.watch.evidence import End, Evidence, Look, P, Sample
from nsa.workbook import parameters

STEP_S = 0.25
STEPS = 31


def trial_of(name: str, reached: float, *, finished: bool = False, **cell) -> Trial:
    """A run in steady motion that came to step `reached`."""
    cell = BASE | cell
    schedule = PrintSchedule(*cell["prints"])
    step_s = STEP_S * cell["layers"] * trials.slowed(cell)
    seconds = reached * step_s
    samples = []
    for tick in range(int(seconds / 0.1) + 1):
        done = tick * 0.1 / step_s
        phase = "backward" if done % 1 > 0.5 else "forward"
        fired = int(1000 * (done % 1))
        samples.append(Sample(3 + 0.1 * tick, 0, P(int(done), phase, fired, fired, 1000), tick))
    last = P(int(reached), "forward", 10) if not finished else P(STEPS - 1, "end")
    how = ("returned", "") if finished else ("stopped by the supervisor", "deadline")
    evidence = Evidence(
        spec={"steps": STEPS}, seconds=3 + seconds, began_s=3.0, deadline_s=seconds,
        samples=samples, end=End(how[0], type=how[1]), losses=[5.6] * STEPS * finished,
    )  # fmt: skip
    started, ended = last.step + 1, last.step + finished
    lines = [schedule.debug(s, (1, 8)) for s in range(1, started + 1) if schedule.at_start(s)]
    lines += [schedule.loss(s, 5.6, 1e-5) for s in range(1, ended + 1) if schedule.at_end(s)]
    lines.sort(key=lambda line: int("".join(c for c in line.split("|")[0].split(":")[0]
                                            if c.isdigit())))  # fmt: skip
    return Trial(f"id-{name}".replace(" ", "-"), cell, evidence, judge(evidence),
                 "\n".join(lines), last, STEPS)  # fmt: skip


def healthy() -> Results:
    named = {"1 x": trial_of("1x", 8.3), "2 x": trial_of("2x", 16.2, deadline=2.0),
             "5 x": trial_of("5x", 31, finished=True, deadline=5.0),
             "6 layers": trial_of("6 layers", 1.4, layers=6)}  # fmt: skip
    named |= {n: trial_of(n, 8.1, prints=p) for n, p in PRINTS.items()}
    named |= {n: trial_of(n, 5.2, **c) for n, c in OBSERVERS.items()}
    lab = Lab(Ledger("nowhere"), Setup(), step_s=STEP_S, trials=list(named.values()))
    rows = [
        {"what": w, "before": 1, "after": 1 + s, "changed": s, "should": s}
        for w, s in (("weights", True), ("graph nodes", False))
    ]
    target = Tried("HANG", "old rule", "b")
    found = Found(base={"path": "masked"}, target=target, cause=dict(claims.CAUSE),
                  rows=[Row(1, {}, "(the defaults)", "the defaults show it",
                            Tried("PASS", id="a"), "", None),
                        Row(2, {}, "path=loop", "everything", target, "", 3)],
                  finished=True)  # fmt: skip
    operations = [
        {"path": path, "layers": 1, "tokens": t, "operations": n, "forward": n, "backward": 0,
         "syncs": 0, "nodes": 9, "kernels": None, "seconds": s, "microseconds": 1.0}
        for path, t, n, s in (("loop", 192, 60_000, 0.3), ("masked", 192, 700, 0.004),
                              ("masked", 384, 700, 0.006))
    ]  # fmt: skip
    memory = [{"layers": 1, "tokens": 128, "peak_mib": 111.8, "predicted_mib": 111.7,
               "seconds": 1.0}]  # fmt: skip
    return Results(lab, named, found, {"after": 4, "rows": rows}, operations, memory)


def verdicts(results: Results) -> list[str]:
    return [claim.verdict for claim in claims.all_claims(results)]


def test_a_healthy_investigation_passes_every_claim():
    made = claims.all_claims(healthy())
    assert [str(c) for c in made if c.verdict != "PASS"] == []
    assert len(made) == 13


def test_sentences_about_trials_carry_their_ids():
    results = healthy()
    made = [c for c in claims.all_claims(results) if "trials" in (c.evidence or {})]
    assert len(made) >= 7
    for claim in made:
        assert any(f"{id}" in claim.claim for id in claim.evidence["trials"]), claim


def hang(results):
    trial = results.named["1 x"]
    replaced = replace(trial, verdict=Verdict("HANG", "blocked"))
    results.named["1 x"] = results.lab.trials[0] = replaced


def print_something_else(results):
    trial = results.named["tracing"]
    results.lab.trials[results.lab.trials.index(trial)] = replace(trial, console="step 0003 | loss")


def stand_still(results):
    results.named["2 x"] = trial_of("2x", 8.3, deadline=2.0)
    results.named["2 x"] = replace(results.named["2 x"], last=results.named["1 x"].last)


def print_alike(results):
    for name in PRINTS:
        results.named[name] = trial_of(name, 8.1)


def let_an_observer_break_it(results):
    trial = results.named["tracing"]
    results.named["tracing"] = replace(trial, verdict=Verdict("CRASH", "ValueError"))


def come_as_far_with_six_layers(results):
    deep = results.named["6 layers"]
    results.named["6 layers"] = replace(deep, last=P(9, "forward"))


def leak(results):
    results.state["rows"][1].update(changed=True)


def find_another_cause(results):
    results.bisection.cause = {"tracing": True}


def dispatch_by_the_token(results):
    results.operations[2]["operations"] = 1400


def hold_more(results):
    results.memory[0]["peak_mib"] *= 1.05


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (hang, "none hangs"),
        (print_something_else, "the last line of all"),
        (stand_still, "comes further with every longer deadline"),
        (print_alike, "chosen by the print schedule"),
        (let_an_observer_break_it, "change the pace and not the verdict"),
        (come_as_far_with_six_layers, "more layers come less far"),
        (leak, "between steps 4 and 5"),
        (find_another_cause, "needs the loop and the deadline"),
        (dispatch_by_the_token, "the loop dispatches by the token"),
        (hold_more, "what the exhibit holds"),
    ],
)
def test_a_spoilt_investigation_fails_the_claim_it_concerns(spoil: Callable, sentence: str):
    results = healthy()
    spoil(results)
    failed = [c.claim for c in claims.all_claims(results) if c.verdict == "FAIL"]
    assert any(sentence in claim for claim in failed), failed


def test_what_was_not_run_is_not_decided():
    results = healthy()
    results.named.clear()
    results.lab.trials.clear()
    results.state, results.operations, results.memory = None, [], []
    results.bisection = Found(base={}, why="no fault")
    found = verdicts(results)
    assert "FAIL" not in found and found.count("INCONCLUSIVE") >= 9


def test_a_machine_that_changes_its_pace_decides_no_cause():
    results = healthy()
    find_another_cause(results)
    results.lab.trials.append(
        replace(trial_of("late", 8.3), evidence=trial_of("x", 3, tracing=True).evidence)
    )
    assert "FAIL" not in [c.verdict for c in [claims.the_old_rules_cause(results)]]


def test_the_tree_takes_the_branch_of_the_evidence():
    nodes = [node for node, _ in decision.decide(healthy())]
    assert nodes == ["ended", "moves", "further", "state", "operations", "DISPATCH"]


@pytest.mark.parametrize(
    ("spoil", "leaf"), [(hang, "HANG"), (leak, "LEAK"), (stand_still, "RERUN")]
)
def test_other_evidence_ends_in_another_leaf(spoil, leaf):
    results = healthy()
    spoil(results)
    assert decision.decide(results)[-1][0] == leaf


def test_the_tree_stops_where_evidence_is_missing():
    results = healthy()
    results.state = None
    assert decision.decide(results)[-1] == ("state", None)
    assert decision.conclusion(results).startswith("INCONCLUSIVE")


def test_every_answer_of_the_tree_leads_somewhere():
    for question in decision.TREE.values():
        for target in (question.yes, question.no):
            assert target in decision.TREE or target in decision.LEAVES
    assert set(plots.PLACES) == {*decision.TREE, *decision.LEAVES}


def test_the_loop_is_no_go_for_its_speed_and_its_defects_and_not_for_a_hang():
    reasons = decision.go(healthy())
    assert [r.holds for r in reasons] == [True, False, False]
    assert decision.verdict(reasons) == "NO-GO"


def test_the_figures_are_drawn_from_any_evidence():
    plt = pytest.importorskip("matplotlib.pyplot")
    results = healthy()
    empty = healthy()
    empty.named = {"1 x": trial_of("1x", 0.1)}
    empty.operations = []
    for found in (results, empty):
        for draw in (plots.progress, plots.said_and_reached,
                     plots.microseconds, plots.decision_tree):  # fmt: skip
            plt.close(draw(found))
        plt.close(plots.console_beside_heartbeat(found.named["1 x"]))
    plt.close(plots.memory_table())


def test_the_tables_have_a_row_a_trial_and_metrics_have_the_houses_columns():
    from nsa.workbook import metrics

    results = healthy()
    assert len(table.trials(results)) == len(results.trials)
    assert len(table.ledger(results)) == 2
    assert list(table.console_beside_progress(results.named["1 x"])["heartbeat"])[-1] == ("step 9")
    for row in table.to_metrics(results):
        assert set(row) <= set(metrics.COLUMNS)


def test_the_console_says_5_while_the_run_goes_on():
    trial = trial_of("1x", 8.3)
    assert (trial.said, trial.reached, trial.old_verdict) == (5, 9, "HANG at step 5")
    assert trial.verdict.kind == "SLOW"


def test_a_trials_page_names_no_place_of_the_machine():
    trial = trial_of("1x", 8.3)
    frames = ["/some/where/torch/nn/linear.py:134 forward", "/some/where/model.py:29 forward"]
    look = Look(4.0, 0, "py-spy", [{"name": "MainThread", "main": True, "frames": frames}])
    trial.evidence.looks.append(look)
    page = table.page(trial)
    assert "nn/linear.py:134 forward" in page and "/some" not in page
    assert trial.id in page


def test_a_deadline_that_ends_before_step_5_asks_another_question():
    with pytest.raises(ValueError, match="longer than 5 steps"):
        Setup(allowed=4.0)
    with pytest.raises(ValueError, match="known are production, smoke, tiny"):
        Setup(design="tinny")


def test_a_lab_refuses_what_it_cannot_run(tmp_path):
    lab = Lab(Ledger(tmp_path), Setup())
    with pytest.raises(ValueError, match="calibrate"):
        lab.run()
    lab.step_s = 0.1
    with pytest.raises(ValueError, match="no factor 'layer'"):
        lab.run(layer=2)


def test_masks_have_only_the_defects_that_masks_can_have(tmp_path):
    lab = Lab(Ledger(tmp_path), Setup(), step_s=0.1)
    assert lab.spec(BASE | {"path": "masked"}, 3).settings["changes"]["defects"] == [
        "future_scores"
    ]
    assert lab.spec(BASE | {"blocking": True}, 3).env == {"CUDA_LAUNCH_BLOCKING": "1"}


@pytest.mark.processes
@pytest.mark.slow
def test_a_healthy_loop_is_said_to_hang_at_step_5_and_found_slow(tmp_path):
    lab = Lab(Ledger(tmp_path), Setup(tokens=128, steps=60))
    lab.calibrate()
    cut = lab.run(deadline=1.5)
    assert not cut.finished and cut.verdict.kind == "SLOW"
    assert cut.said in cut.expected()
    assert cut.reached > 5 or cut.said <= 5


@pytest.mark.parametrize("name", [None, "03_smoke", "03_h200"])
def test_a_machine_twice_as_fast_or_slow_leaves_the_bisections_verdicts_alone(name):
    pytest.importorskip("papermill")
    folder = NOTEBOOKS
    declared = parameters.declared(folder / "03_step5_hang_bisection.ipynb")
    given = parameters.read_file(folder / f"params/{name}.yaml") if name else {}
    full = parameters.filled(declared, parameters.check(declared, given))
    steps, allowed = full["bisect_steps"], full["allowed"]
    longest, shortest = trials.FACTORS["deadline"]
    observed = trials.slowed({n: n in trials.FACTORS for n in trials.SLOWS})
    assert 2 * shortest * allowed < steps, "the loop ends before the old deadline"
    assert longest * allowed > 2 * observed * steps, "an observed loop misses the long deadline"


def test_what_is_varied_is_varied_alone():
    found = investigation.cells([1.0, 5.0], 6)
    assert list(found)[:3] == ["1 x", "5 x", "6 layers"]
    assert all(len(changes) == 1 for changes in found.values())
