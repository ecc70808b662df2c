"""Each sentence of the selfcheck has rows that refute it, and what was not run decides nothing."""

import json

import pytest
from judged_rows import control, row, skipped

from nsa.experiments.selfcheck import claims, plots, table
from nsa.lab.process.trial import Outcome
from nsa.workbook import metrics


def many(rounds=2):
    """As many faults and controls as are enough, all right."""
    return [
        made(f"{made.__name__} {number}", round=turn, seconds=3.0 + number, named_s=6.0,
             track=((0.0, 0.0), (1.0, 0.5)))
        for turn in range(1, rounds + 1)
        for made, count in ((row, 24), (control, 8))
        for number in range(count)
    ]  # fmt: skip


def test_all_claims_pass_when_all_is_right_and_nothing_is_claimed_of_what_was_not_run():
    assert {one.verdict for one in claims.all_claims(many())} == {"PASS"}
    assert {one.verdict for one in claims.all_claims([skipped()])} == {"INCONCLUSIVE"}


@pytest.mark.parametrize(
    ("spoilt", "claim"),
    [
        (row(found="SLOW"), claims.every_fault_is_named),
        (row(what="blocked", found_what="gil-held"), claims.every_fault_is_named),
        (control(found="HANG"), claims.no_control_is_called_a_hang),
        (control(found="FAIL"), claims.no_control_is_accused),
        (row(because=()), claims.hangs_are_told_apart),
        (row(named_s=15.1), claims.hangs_are_named_soon),
        (row("row 3", found="CRASH", round=2), claims.rounds_agree),
    ],
)
def test_a_row_that_is_not_so_refutes_its_claim(spoilt, claim):
    assert claim(many()).verdict == "PASS"
    assert claim([*many(), spoilt]).verdict == "FAIL"


def test_a_hang_without_a_proof_may_take_its_rerun():
    late = row(found_what="unproven-native", named_s=25.0)
    assert claims.hangs_are_named_soon([*many(), late]).verdict == "PASS"


def test_one_round_does_not_agree_with_itself():
    assert claims.rounds_agree(many(rounds=1)).verdict == "INCONCLUSIVE"


def test_too_few_faults_are_inconclusive_and_name_what_was_skipped():
    claim = claims.there_are_enough([row(), skipped()])
    assert claim.verdict == "INCONCLUSIVE" and claim.evidence["skipped"] == {
        "device OOM": "needs 1 GPU(s), here are 0"
    }


def test_the_fault_matrix_has_a_row_a_fault_and_counts_rounds():
    rows = [row(round=1), row(found="SLOW", round=2), skipped(), control()]
    shown = table.matrix_of(rows, controls=False)
    assert list(shown.index) == ["a lock", "device OOM"]
    assert shown.loc["a lock", "found"] == "HANG x1, SLOW x1"
    assert shown.loc["a lock", "right"] == "1 of 2"
    assert shown.loc["device OOM", "why"] == "needs 1 GPU(s), here are 0"


def test_reasons_have_short_paths():
    because = ("at /usr/lib/python3.11/re/__init__.py:166 match", "at subject.py:12 step, 3 / 4")
    shown = table.matrix_of([row(because=because)], controls=False)
    assert shown.loc["a lock", "why"] == "at re/__init__.py:166 match; at subject.py:12 step, 3 / 4"


def test_the_confusion_matrix_counts_kinds():
    shown = table.confusion([row(), row(found="SLOW"), control()])
    assert shown.loc["HANG"].to_dict() == {"PASS": 0, "SLOW": 1, "HANG": 1}
    assert shown.loc["control PASS", "PASS"] == 1


def test_facts_say_what_was_found_and_nothing_of_the_time():
    assert table.facts([row(), control(), skipped()]) == [
        "fault   a lock: HANG, found", "control healthy: PASS, found",
    ]  # fmt: skip
    assert table.facts([row(found="SLOW")])[0].endswith("not so: SLOW")


def test_a_hang_has_its_place_and_how_long_it_rested():
    shown = table.hangs([row(place="data, fetch", named_s=5.26), control()])
    assert shown.loc["a lock", ["place", "rested, s"]].tolist() == ["data, fetch", 5.3]


def test_metrics_rows_fit_the_workbooks_table():
    rows = table.to_metrics([row(seconds=4.0), skipped()])
    shown = metrics.table([metrics.row(found, {}) for found in rows])
    assert shown["median"].tolist()[0] == 4.0 and shown["median"].isna().tolist() == [False, True]


FIGURES = [
    plots.confusion,
    plots.time_to_verdict,
    lambda rows: plots.progress(rows, ["row 1", "control 1"]),
]


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("rows", [many(), [*many(), row(found="SLOW", seconds=1.0)], [skipped()]])
def test_figures_are_drawn_whatever_was_found(figure, rows):
    import matplotlib.pyplot as plt

    drawn = figure(rows)
    drawn.canvas.draw()
    plt.close(drawn)


COUNTING = {"ratio": 1.07, "plain_ms": 100.0, "counted_ms": 107.0, "clock": "processor time"}
FORETOLD = {"worst": 0.2, "left_at_half": 0.1, "seconds": 2.0, "looks": 9, "nodes": 4000}
LOST = Outcome("timeout", None, 120.0, "still running after 120 s", -9)


def ended(result):
    return Outcome("ok", result, 3.0, "", 0)


def test_counting_and_foretelling_have_aims_and_a_gpu_a_stricter_one():
    def verdicts(counting, foretold, on_gpu=False):
        found = claims.aims(counting, foretold, on_gpu=on_gpu)
        return [claim.verdict for claim in found]

    good = ended(COUNTING), ended(FORETOLD)
    assert verdicts(*good) == ["PASS", "PASS"]
    assert verdicts(*good, on_gpu=True) == ["FAIL", "PASS"]
    assert verdicts(ended(COUNTING | {"ratio": 1.11}), LOST) == ["FAIL", "INCONCLUSIVE"]
    assert verdicts(LOST, ended(FORETOLD | {"worst": 0.26})) == ["INCONCLUSIVE", "FAIL"]


def test_what_watching_was_measured_on_is_told_beside_it():
    step = {"preset": "cpu_test", "backend": "gather", "layers": 4, "tokens": 256}
    shown = table.watching(step, step, ended(COUNTING), ended(FORETOLD))
    assert list(shown["found"]) == ["1.070", "20% of 2 s at most"]
    assert list(shown["step"]) == ["cpu_test, gather, 4 layers, 1 x 256 tokens"] * 2
    assert "4,000 nodes" in shown["by"].iloc[1]
    shown = table.watching(step, step, LOST, LOST)
    assert set(shown["found"]) == {"not measured"}
    assert set(shown["by"]) == {"still running after 120 s"}


def test_evidence_is_written_without_a_machines_paths(tmp_path):
    because = ("3 looks, all at /usr/lib/python3.11/re/__init__.py:175 search", "at rest")
    table.write_evidence(tmp_path, [row(because=because)])
    (kept,) = json.loads((tmp_path / "selfcheck.json").read_text())
    assert kept["because"] == ["3 looks, all at re/__init__.py:175 search", "at rest"]
    assert kept["name"] == row().name
