"""The step-5 question's verdicts and claims, on evidence written by hand; its trials are slow."""

from dataclasses import replace

import pytest
from places import NOTEBOOKS

pytest.importorskip("pandas")

from whyhung.verdict import Verdict, judge
from whyhung.watch.evidence import End, Evidence, P, Process, Sample, Snapshot, Thread, Wait
from workbook.lab.search.candidates import Found, Row, Tried
from workbook.lab.search.ledger import Ledger
from workbook.rooms.case_study import decision
from workbook.rooms.case_study.loop.subject import PrintSchedule
from workbook.rooms.case_study.settlement import plots as settlement
from workbook.rooms.case_study.step5 import claims, plots, table, trials
from workbook.rooms.case_study.step5.trials import BASE, OBSERVERS, PRINTS, Lab, Results, Setup
from workbook.runs import metrics, parameters, store
from workbook.runs.files import write_json

STEP_S = 0.25
STEPS = 31


def trial_of(name: str, reached: float, *, finished: bool = False, **cell) -> trials.Trial:
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
    last = P(STEPS - 1, "end") if finished else P(int(reached), "forward", 10)
    end = End("returned") if finished else End("stopped by the supervisor", type="deadline")
    evidence = Evidence(
        {"steps": STEPS}, seconds=3 + seconds, began_s=3.0, deadline_s=seconds, samples=samples,
        end=end, losses=[5.6] * STEPS * finished,
    )  # fmt: skip
    lines = []
    for step in range(1, last.step + 2):
        lines += [schedule.debug(step, (1, 8))] * schedule.at_start(step)
        if schedule.at_end(step) and step <= last.step + finished:
            lines.append(schedule.loss(step, 5.6, 1e-5))
    id, console = f"id-{name}".replace(" ", "-"), "\n".join(lines)
    return trials.Trial(id, cell, evidence, judge(evidence), console, last, STEPS)


def stuck(name: str, outside: bool = False, **cell) -> trials.Trial:
    """A run that came to step 5 and has waited there ever since."""
    made = trial_of(name, 4.2, **cell)
    evidence, at = made.evidence, made.last
    evidence.samples += [Sample(5 + 0.25 * n, 0, at, 20 + n, state="S") for n in range(200)]
    wait = Wait("lock", "waits for Lock lock", ((7, 7),) * (not outside), outside)
    frames = ("subject.py:164 taken_twice",)
    thread = Thread(7, "MainThread", True, "S", wait=wait, frames=frames)
    process = Process(7, rank=0, state="S", threads=(thread,))
    evidence.snapshots += [Snapshot(50.0 + n, (process,), {0: at}) for n in range(4)]
    evidence.seconds = 56.0
    return replace(made, verdict=judge(evidence))


@pytest.fixture
def healthy() -> Results:
    named = {
        "1 x": trial_of("1x", 8.3),
        "2 x": trial_of("2x", 16.2, deadline=2.0),
        "5 x": trial_of("5x", 31, finished=True, deadline=5.0),
        "6 layers": trial_of("6 layers", 1.4, layers=6),
    }
    named |= {n: trial_of(n, 8.1, prints=p) for n, p in PRINTS.items()}
    named |= {n: trial_of(n, 5.2, **c) for n, c in OBSERVERS.items()}
    lab = Lab(Ledger("nowhere"), Setup(), step_s=STEP_S, trials=list(named.values()))
    rows = [
        {"what": w, "before": 1, "after": 1 + s, "changed": s, "should": s}
        for w, s in (("weights", True), ("graph nodes", False))
    ]
    target = Tried("HANG", "old rule", "b")
    passed = Row(1, {}, "(the defaults)", "the defaults show it", Tried("PASS", id="a"), "", None)
    hung = Row(2, {}, "path=loop", "everything", target, "", 3)
    found = Found(base={"path": "masked"}, target=target, cause=dict(claims.CAUSE),
                  rows=[passed, hung], finished=True)  # fmt: skip
    counts = {"design": "tiny", "layers": 1, "backward": 0, "syncs": 0, "nodes": 9, "kernels": None}
    operations = [
        counts | {"path": path, "tokens": t, "operations": n, "forward": n, "seconds": s,
                  "microseconds": 1.0}
        for path, t, n, s in (("loop", 192, 60_000, 0.3), ("masked", 192, 700, 0.004),
                              ("masked", 384, 700, 0.006))
    ]  # fmt: skip
    # fmt: off
    memory = {"design": "production", "layers": 1, "tokens": 128, "peak_mib": 111.8,
              "predicted_mib": 111.7, "seconds": 1.0}
    attention = [{"path": "loop", "design": "tiny", "tokens": 192, "defects": d, "error": e}
                 for d, e in ((["one_key"], 1.4), ([], 2e-16))]
    # fmt: on
    planted = stuck("planted", lock_at=5)
    lab.trials.append(planted)
    state = {"after": 4, "rows": rows}
    measured = {"planted": planted, "attention": attention}
    return Results(lab, named, found, state, operations, [memory], **measured)


def test_a_healthy_investigation_passes_every_claim(healthy):
    made = claims.all_claims(healthy)
    assert [str(c) for c in made if c.verdict != "PASS"] == []
    assert len(made) == 14
    with_trials = [c for c in made if "trials" in (c.evidence or {})]
    assert len(with_trials) >= 7
    for claim in with_trials:
        assert any(id in claim.claim for id in claim.evidence["trials"]), claim


def change(results, name, **changes):
    """The trial of that name with some of its fields changed."""
    old, seen = results.named[name], results.lab.trials
    results.named[name] = seen[seen.index(old)] = replace(old, **changes)


# By the sentence that then fails.
SPOILS = {
    "none hangs": lambda r: change(r, "1 x", verdict=stuck("x").verdict),
    "of 9 trials that the old": lambda r: change(r, "1 x", verdict=stuck("x", True).verdict),
    "with a lock planted": lambda r: setattr(r, "planted", trial_of("blind", 4.2, lock_at=5)),
    "the last line of all": lambda r: change(r, "tracing", console="step 0003 | loss"),
    "comes further with every longer": lambda r: change(r, "2 x", last=r.named["1 x"].last),
    "chosen by the print schedule": lambda r: change(r, "1 x", console="step 0003 | loss"),
    "no verdict changes under": lambda r: change(r, "tracing", verdict=Verdict("CRASH", "bad")),
    "more layers come less far": lambda r: change(r, "6 layers", last=P(9, "forward")),
    "between steps 4 and 5": lambda r: r.state["rows"][1].update(changed=True),
    "needs the loop and the": lambda r: setattr(r.bisection, "cause", {"tracing": True}),
    "the loop dispatches by the token": lambda r: r.operations[2].update(operations=1400),
    "what the exhibit holds": lambda r: r.memory[0].update(peak_mib=1.05 * 111.8),
    "the loop's attention is not": lambda r: r.attention[1].update(error=0.1),
}


@pytest.mark.parametrize("sentence", SPOILS)
def test_a_spoilt_investigation_fails_the_claim_it_concerns(healthy, sentence):
    SPOILS[sentence](healthy)
    failed = [c.claim for c in claims.all_claims(healthy) if c.verdict == "FAIL"]
    assert any(sentence in claim for claim in failed), failed


def test_schedules_that_print_the_same_so_far_decide_nothing(healthy):
    """Trials on a busy machine end after three steps."""
    healthy.named.update({n: trial_of(n, 8.1) for n in PRINTS})
    assert claims.the_hang_step_moves_with_the_prints(healthy).verdict == "INCONCLUSIVE"


def test_what_was_not_run_is_not_decided(healthy):
    healthy.named.clear()
    healthy.lab.trials.clear()
    healthy.state, healthy.operations, healthy.memory, healthy.planted = None, [], [], None
    healthy.attention = []
    healthy.bisection = Found(base={}, why="no fault")
    found = [claim.verdict for claim in claims.all_claims(healthy)]
    assert "FAIL" not in found and found.count("INCONCLUSIVE") >= 10


def test_a_machine_that_changes_its_pace_decides_no_cause(healthy):
    SPOILS["needs the loop and the"](healthy)
    slow = replace(trial_of("late", 8.3), evidence=trial_of("x", 3, tracing=True).evidence)
    healthy.lab.trials.append(slow)
    assert claims.the_old_rules_cause(healthy).verdict == "INCONCLUSIVE"


def test_a_machine_that_slows_down_decides_nothing_about_longer_deadlines(healthy):
    late = replace(
        trial_of("2x", 8.3, deadline=2.0), evidence=trial_of("x", 4, tracing=True).evidence
    )
    healthy.named["2 x"] = late
    assert claims.the_verdict_moves_with_the_deadline(healthy).verdict == "FAIL"  # at one pace
    healthy.lab.trials.append(late)
    assert claims.the_verdict_moves_with_the_deadline(healthy).verdict == "INCONCLUSIVE"


@pytest.fixture
def decided(tmp_path):
    """Decisions of the tree on an investigation that is stored as a notebook stores it."""

    def decide(results: Results) -> decision.Decision:
        return decision.decide(stored(results), "loop")

    def stored(results: Results):
        run = store.Run(tmp_path / "run", "03_step5_hang_bisection")
        run.folder.mkdir(exist_ok=True)
        (run.folder / "metrics.csv").unlink(missing_ok=True)
        write_json(run.folder / "environment.json", {"gpus": []})
        run.device("cpu")
        run.add_rows(table.to_metrics(results))
        run.judge(claims.all_claims(results), must_hold=False, shown=False)
        return decision.evidence(live=run)

    decide.stored = stored
    return decide


def test_the_tree_takes_the_branch_of_the_evidence(healthy, decided):
    found = decided(healthy)
    nodes = ["ended", "moves", "further", "state", "operations", "differ", "correct"]
    assert [node for node, _ in found.path] == nodes
    assert found.leaves == ("DISPATCH", "WRONG")
    claim = claims.the_tree_ends_in_slow(healthy, found)
    assert claim.verdict == "PASS" and "id-1x" in claim.claim


@pytest.mark.parametrize(
    ("sentence", "leaf"),
    [
        ("none hangs", "HANG"),
        ("of 9 trials that the old", "STALLED"),
        ("between steps 4 and 5", "LEAK"),
        ("comes further with every longer", "RERUN"),
    ],
)
def test_other_evidence_ends_in_another_leaf(healthy, decided, sentence, leaf):
    SPOILS[sentence](healthy)
    found = decided(healthy)
    assert found.leaves == (leaf,) and decision.LEAVES[leaf].text == found.conclusion
    assert claims.the_tree_ends_in_slow(healthy, found).verdict == "FAIL"


def test_equal_variants_are_invalid_and_a_loop_whose_operations_explain_nothing_is_profiled(
    healthy, decided
):
    for row in healthy.operations:
        row.update(operations=700)
    assert decided(healthy).leaves == ("ELSEWHERE", "INVALID")


@pytest.mark.parametrize(("error", "wrong"), [(1.1e-6, True), (0.9e-6, False)])
def test_attention_that_is_right_is_asked_for_the_five(healthy, decided, error, wrong):
    healthy.attention[0].update(error=error)
    found = decided(healthy)
    assert found.leaves == (("DISPATCH", "WRONG") if wrong else ("DISPATCH",))
    assert found.missing == ("" if wrong else "static")


def test_a_machine_that_changes_its_pace_settles_nothing(healthy, decided):
    slow = trial_of("x", 4, tracing=True).evidence
    late = replace(trial_of("2x", 8.3, deadline=2.0), evidence=slow)
    healthy.named["2 x"] = late
    healthy.lab.trials.append(late)
    found = decided(healthy)
    assert (found.leaves, found.missing) == ((), "further")
    assert claims.the_tree_ends_in_slow(healthy, found).verdict == "INCONCLUSIVE"


def test_the_tree_stops_where_evidence_is_missing(healthy, decided):
    healthy.state = None
    found = decided(healthy)
    assert (found.path[-1][0], found.missing) == ("state", "state")
    assert "INCONCLUSIVE" in found.conclusion and "nsa run 03" in found.conclusion
    assert claims.the_tree_ends_in_slow(healthy, found).verdict == "INCONCLUSIVE"


def test_every_answer_of_the_tree_leads_somewhere():
    known = {*decision.TREE, *decision.LEAVES}
    led = {to for question in decision.TREE.values() for to in question.to}
    led |= {leaf.then for leaf in decision.LEAVES.values() if leaf.then}
    assert led < known


def test_a_loop_that_was_timed_on_a_cpu_is_no_go_for_its_attention_alone(healthy, decided):
    rules = decision.go(decided.stored(healthy), "loop")
    assert [rule.answer.holds for rule in rules] == [True, None, None, False]
    assert decision.verdict(rules) == "NO-GO"


@pytest.mark.parametrize("empty", [False, True])
def test_the_figures_are_drawn_from_any_evidence(healthy, decided, empty):
    plt = pytest.importorskip("matplotlib.pyplot")
    if empty:
        healthy.named, healthy.operations = {"1 x": trial_of("1x", 0.1)}, []
    for draw in (plots.progress, plots.said_and_reached):
        plt.close(draw(healthy))
    plt.close(settlement.microseconds(healthy.operations))
    stored = decided.stored(healthy)
    both = [decision.decide(stored, name) for name in decision.SUBJECTS]
    assert len(table.decided(both).columns) == 2
    plt.close(plots.console_beside_heartbeat(healthy.named["1 x"]))


def test_the_tables_have_a_row_a_trial_and_metrics_have_the_houses_columns(healthy):
    assert len(table.trials(healthy)) == len(healthy.trials) + 1
    assert table.trials(healthy)["verdict"]["id-planted"] == "HANG:lock"
    assert len(table.ledger(healthy)) == 2
    for row in table.to_metrics(healthy):
        assert set(row) <= set(metrics.COLUMNS)


def test_the_console_says_5_while_the_run_goes_on():
    trial = trial_of("1x", 8.3)
    assert (trial.said, trial.reached, trial.old_verdict) == (5, 9, "HANG at step 5")
    assert trial.verdict.kind == "SLOW"


def test_the_console_says_the_same_of_a_planted_hang_and_the_evidence_does_not(healthy):
    plain, planted = healthy.named["1 x"], healthy.planted
    assert (planted.said, planted.reached) == (plain.said, 5) == (5, 5)
    assert (plain.moves, planted.moves) == (True, False) and planted not in healthy.trials
    assert (planted.verdict.label, stuck("x", True).verdict.label) == ("HANG:lock", "STALLED:lock")


def test_a_loop_that_works_and_counts_nothing_is_not_called_moving(healthy, decided):
    uncounted = Verdict("SLOW", "uncounted", numbers={"rested_s": 9.0})
    change(healthy, "1 x", verdict=uncounted)
    assert claims.nothing_hangs(healthy).verdict == "INCONCLUSIVE"
    assert decided(healthy).leaves == ("STALLED",)


def test_a_trials_page_names_no_place_of_the_machine():
    trial = trial_of("1x", 8.3)
    frames = ("/some/where/torch/nn/linear.py:134 forward", "/some/where/model.py:29 forward")
    process = Process(7, rank=0, threads=(Thread(7, "MainThread", True, frames=frames),))
    trial.evidence.snapshots.append(Snapshot(4.0, (process,)))
    page = table.page(trial)
    assert "linear.py:134 forward" in page and "    model.py:29 forward" in page
    assert "/some" not in page
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


def test_masks_have_no_defects(tmp_path):
    lab = Lab(Ledger(tmp_path), Setup(), step_s=0.1)
    masked = lab.spec(BASE | {"path": "masked"}, 3)
    assert masked.settings["changes"]["defects"] == []
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


@pytest.mark.processes
@pytest.mark.slow
def test_a_lock_planted_into_the_loop_is_certified_at_its_line(tmp_path):
    lab = Lab(Ledger(tmp_path), Setup(tokens=64))
    lab.calibrate()
    planted = lab.run(**trials.PLANTED)
    assert planted.verdict.label == "HANG:lock" and "taken_twice" in planted.verdict.line
    assert planted.evidence.end.type == "stall" and planted.said in planted.expected()


@pytest.mark.parametrize("name", [None, "03_smoke", "03_h200"])
def test_a_machine_twice_as_fast_or_slow_leaves_the_bisections_verdicts_alone(name):
    pytest.importorskip("papermill")
    declared = parameters.declared(NOTEBOOKS / "03_step5_hang_bisection.ipynb")
    given = parameters.read_file(NOTEBOOKS / f"params/{name}.yaml") if name else {}
    full = parameters.filled(declared, parameters.check(declared, given))
    steps, allowed = full["bisect_steps"], full["allowed"]
    longest, shortest = trials.FACTORS["deadline"]
    observed = trials.slowed({n: n in trials.FACTORS for n in trials.SLOWS})
    assert 2 * shortest * allowed < steps, "the loop ends before the old deadline"
    assert longest * allowed > 2 * observed * steps, "an observed loop misses the long deadline"


def test_what_is_varied_is_varied_alone():
    found = trials.cells([1.0, 5.0], 6)
    assert list(found)[:3] == ["1 x", "5 x", "6 layers"]
    assert all(len(changes) == 1 for changes in found.values())
