"""The settlement: facts are computed, rows stand or fall with them, nothing is claimed without."""

import json
import re
from dataclasses import replace

import pytest

from nsa.experiments.case_study import figures as case_study
from nsa.experiments.case_study.settlement import claims, facts, plots, table, trials
from nsa.experiments.case_study.settlement.claims import CONTRADICTED, VERDICTS, Row, settle
from nsa.experiments.case_study.settlement.facts import ASKED, measured
from nsa.experiments.case_study.settlement.reread import reread
from nsa.experiments.case_study.settlement.trials import TRIALS
from nsa.lab.process.trial import Outcome

ROWS = claims.all_rows()
QUICK = (
    "one-query", "boolean-mask", "fp16-adamw", "in-place", "planted-nan", "branches",
    "checkpointing",
)  # fmt: skip


def ended(found, status="ok", message=""):
    return Outcome(status, found, 1.0, message, 0)


@pytest.fixture(scope="module")
def quick():
    """Trials that take a moment, run in this process."""
    return {name: ended(TRIALS[name]()) for name in QUICK}


@pytest.fixture(scope="module")
def found(quick):
    return facts.all_facts(quick)


def test_there_is_one_row_for_each_contradiction_and_hypothesis():
    assert [row.id for row in ROWS] == [f"C{n}" for n in range(1, 29)] + [
        f"H{n}" for n in range(1, 19)
    ]


def test_every_fact_of_the_tables_holds():
    facts = reread()
    assert [fact.name for fact in facts if fact.holds is not True] == []
    assert all(one.startswith("table:") for fact in facts for one in fact.evidence)


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_trial_holds_what_is_asked_of_it(quick, name):
    asked = [one for one in ASKED if one.trial == name]
    assert asked
    assert [fact.name for fact in measured(asked, quick) if not fact.holds] == []
    assert json.dumps(quick[name].result)


def test_every_fact_asks_a_trial_that_there_is_and_every_trial_is_asked():
    assert {one.trial for one in ASKED} == set(TRIALS)


def test_every_fact_is_used_by_a_row_and_has_a_name_of_its_own(found):
    names = [f.name for f in reread()] + [a.name for a in ASKED]
    assert len(set(names)) == len(names)
    assert {name for row in ROWS for name in row.facts} == set(found)


def test_a_fact_whose_trial_did_not_run_or_failed_is_open():
    late = {"state": ended(None, "timeout", "still running after 1 s")}
    open_ = {fact.name: fact for fact in measured(ASKED, late)}
    assert all(fact.holds is None for fact in open_.values())
    assert open_["nothing-accumulates"].seen == "timeout: still running after 1 s"
    assert open_["late-binding"].seen == "not run"


def test_a_row_falls_with_its_fact_and_is_open_without_it(found):
    row = next(row for row in ROWS if row.id == "C7")
    assert settle(found, [row])[0].verdict == "REFUTED"
    [fact] = row.facts
    [wrong] = settle({fact: replace(found[fact], holds=False)}, [row])
    assert wrong.verdict == CONTRADICTED
    [unknown] = settle({fact: replace(found[fact], holds=None)}, [row])
    assert unknown.verdict == "INCONCLUSIVE" and unknown.settles.startswith("table:")


def test_claims_carry_evidence_and_fail_when_contradicted(found):
    settled = settle(found)
    made = claims.all_claims(settled)
    assert len(made) == len(ROWS)
    assert all(claim.evidence["evidence"] for claim in made if claim.verdict == "PASS")
    assert json.dumps([claim.evidence for claim in made])
    wrong = found | {"one-constant": replace(found["one-constant"], holds=False)}
    failed = [c for c in claims.all_claims(settle(wrong)) if c.verdict == "FAIL"]
    assert {c.claim.split()[0] for c in failed} == {"C22", "C23", "C26", "H3", "H16"}
    whole = claims.fewer_undecided_than
    assert whole(settle(wrong), 46).verdict == "FAIL"
    assert whole(settled, 46).verdict == "PASS"
    assert whole(settled, 0).verdict == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (Row("C1", "x", "y", "REFUTED", ("no such",)), "'no such', which is no fact"),
        (Row("C1", "x", "y", "WRONG", ()), "verdict 'WRONG' is not one of REFUTED"),
        (Row("C1", "x", "y", "INCONCLUSIVE", ()), "does not say what would settle it"),
        (Row("C1", "x", "y", "REFUTED", ()), "C1 is REFUTED without a fact"),
    ],
)
def test_a_row_that_claims_without_a_fact_is_refused(found, row, complaint):
    with pytest.raises(ValueError, match=complaint):
        settle(found, [row])


def test_what_is_refuted_or_explained_says_what_is_taken_back():
    for row in ROWS:
        assert row.verdict in VERDICTS
        if row.id.startswith("C") and row.verdict != "INCONCLUSIVE":
            assert row.retraction, row.id


def test_a_kept_run_that_is_not_there_leaves_its_fact_open(tmp_path):
    missing = facts.all_facts({}, memory_run="01-x", root=tmp_path)
    assert missing["kept-production-run"].holds is None
    assert "no runs" in missing["kept-production-run"].seen
    folder = tmp_path / "2026-01-01" / "01-x"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{}")
    claim = "a production step of 12 layers at T 2048, batch 1, stays under 6 GiB"
    for verdict, holds in (("PASS", True), ("FAIL", False), ("INCONCLUSIVE", None)):
        (folder / "verdicts.json").write_text(json.dumps([{"claim": claim, "verdict": verdict}]))
        found = facts.all_facts({}, memory_run="01-x", root=tmp_path)
        assert found["kept-production-run"].holds is holds


def test_unknown_trials_are_refused():
    with pytest.raises(ValueError, match=r"no trial 'states'; there are print-schedule"):
        trials.run_all(["states"])


@pytest.mark.processes
@pytest.mark.full
def test_a_trial_runs_in_a_process_of_its_own_and_keeps_what_it_found(tmp_path):
    made = trials.run_all(["boolean-mask"], folder=tmp_path, progress=False)["boolean-mask"]
    assert made.status == "ok"
    [kept] = tmp_path.glob("*boolean-mask/result.json")
    assert json.loads(kept.read_text())["result"] == made.result


def begun(*arms):
    return {"begun_s": dict(zip(("plain", "aux stats", "traced"), arms, strict=True))}


def test_a_loop_that_stops_at_one_step_would_contradict_the_deadline():
    """Steps that do not move with the limit are what a hang looks like."""
    asked = [one for one in ASKED if one.trial == "deadlines"]
    even = [0.1 * n for n in range(11)]
    slow = [0.3 * n for n in range(11)]

    def holds(found):
        return {fact.name: fact.holds for fact in measured(asked, {"deadlines": ended(found)})}

    assert all(holds(begun(even, even, slow)).values())
    stuck = [*even[:5], *(100.0 + n for n in range(6))]
    assert not holds(begun(stuck, even, slow))["deadline-moves"]
    assert not holds(begun(even, even, even))["traced-is-slower"]
    assert not holds(begun(even, even[:7], slow))["aux-stats-same-steps"]


def test_the_tables_say_each_row_once(found, quick):
    settled = settle(found)
    assert list(table.rows(settled, "C").index) == [f"C{n}" for n in range(1, 29)]
    assert len(table.rows(settled, "H")) == 18
    assert set(table.facts(found, "trial")["holds"]) == {"yes", "not known"}
    assert (len(table.memory()), len(table.timings())) == (6, 9)
    assert list(table.trials(quick)["ended"]) == ["ok"] * len(QUICK)
    assert len(table.to_metrics(found, quick)) == len(found) + len(quick)


def test_figures_are_drawn_with_and_without_trials(found):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    even = [0.1 * n for n in range(11)]
    cut = [plots.cut({"deadlines": ended(begun(even, even, even))}), plots.cut({})]
    for figure in (plots.memory(), plots.microseconds(), plots.verdicts(settle(found)), *cut):
        figure.canvas.draw()
        matplotlib.pyplot.close(figure)


def test_the_case_studys_figures_are_as_its_reports_have_them():
    for layers, (forward, backward, total) in case_study.LAYER_SCALING_S.items():
        assert forward + backward == pytest.approx(total, abs=0.002), layers
    peaks, estimates = case_study.MEMORY_MIB, case_study.PUBLISHED_ESTIMATE_MB
    off = {t: round(100 * (mb / peaks[t] - 1), 1) for t, mb in estimates.items()}
    assert off == {128: -52.6, 512: -71.2, 1024: -54.2, 2048: 5.1}


def test_sentences_hold_no_numbers_that_move():
    """They are compared; what moves is in `seen`."""
    for one in ASKED:
        assert not re.search(r"\d+\.\d+ s\b", one.sentence)


@pytest.mark.processes
@pytest.mark.slow
def test_every_trial_holds_all_that_is_asked_of_it():
    found = facts.all_facts(trials.run_all(deadline_s=250, progress=False))
    wrong = {n: f.seen for n, f in found.items() if not f.holds and n != "kept-production-run"}
    assert wrong == {}
