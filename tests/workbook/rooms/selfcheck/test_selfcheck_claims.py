"""Each sentence of the selfcheck has rows that refute it, and what was not run decides nothing."""

import json
from dataclasses import replace

import pytest
from judged_rows import control, hang, row, silent, skipped, well

from whyhung.process.trial import Outcome
from workbook.rooms.selfcheck import claims, plots, table
from workbook.rooms.selfcheck.judged import read
from workbook.runs import metrics


def many():
    """A sweep in which all is right, of 50 healthy programs and of every other sort a few."""
    healthy = [well(f"healthy {n}") for n in range(49)] + [well(stalled=True)]
    return [*healthy, *(hang(f"hang {n}") for n in range(20)), silent(), row(), control()]


def verdicts(rows):
    return {one.verdict for one in claims.must_hold(rows) + claims.should_hold(rows)}


def test_all_claims_pass_when_all_is_right_and_nothing_is_claimed_of_what_was_not_run():
    frozen = [replace(one, batch="frozen") for one in many()]
    assert verdicts(many()) == {"PASS", "NOT APPLICABLE"}
    assert verdicts(many() + frozen) == {"PASS"}
    assert verdicts([skipped()]) == {"NOT APPLICABLE"}


HUNG = ({"label": "HANG:child", "rested_s": 9.0, "withdrawn": True},)
SPOILT = [
    ([row(found="SLOW")], "what is planted"),
    ([well(found="HANG")], "healthy ones called HANG"),
    ([well(reports=HUNG)], "healthy ones called HANG"),
    ([well(stalled=True)], "healthy ones called STALLED"),
    ([well(found="STALLED")], "healthy ones that stay STALLED"),
    ([well(stalled=False)], "healthy ones that stay STALLED"),
    ([silent(certifiable=True)] * 3, "hangs that can be certified and are"),
    ([hang(named_s=15.1)] * 3, "certified within"),
    ([silent(named_s=20.1)], "other hangs named"),
    ([silent(line_named=False)], "other hangs named"),
    ([hang(line_named=False)] * 2, "hangs whose line or rank"),
]


@pytest.mark.parametrize(("spoilt", "claim"), SPOILT)
def test_a_row_that_is_not_so_refutes_its_claim(spoilt, claim):
    def refuted(rows):
        found = claims.must_hold(rows) + claims.should_hold(rows)
        return [one.claim for one in found if one.verdict in ("FAIL", "AIM MISSED")]

    assert refuted(many()) == []
    assert any(told.startswith(claim) for told in refuted([*many(), *spoilt]))


def test_an_aim_must_be_met_at_each_load_and_a_busy_machine_has_more_time():
    late = [replace(one, load=24, named_s=39.0) for one in many()]
    shown = table.aims([*many(), *late])
    within = shown.loc["certified within 15 s, or 40 s above load 1"]
    assert within[["load 1", "load 24"]].tolist() == ["20 of 20", "20 of 20"]
    worse = table.aims([*many(), *(replace(one, named_s=41.0) for one in late)])
    assert worse.loc[within.name, "load 24"] == "0 of 20, missed"


def test_what_was_called_of_healthy_ones_is_told_with_its_end():
    shown = table.accused([well(stalled=True), well("other 0"), hang()])
    assert shown.index.tolist() == ["shell_command 0"]
    assert shown[["called", "withdrawn", "in the end"]].values.tolist() == [
        ["STALLED:child", True, "PASS"]
    ]


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


def test_metrics_rows_fit_the_workbooks_table():
    rows = table.to_metrics([row(seconds=4.0), skipped()])
    shown = metrics.table([metrics.row(found, {"device": "cpu"}) for found in rows])
    assert shown["median"].tolist()[0] == 4.0 and shown["median"].isna().tolist() == [False, True]


@pytest.mark.parametrize("figure", [plots.matrices, plots.latency])
@pytest.mark.parametrize(
    "rows", [many(), [*many(), hang(load=24, named_s=33.0), well(found="HANG")], [skipped()]]
)
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


def test_counting_and_estimating_have_aims_and_a_gpu_a_stricter_one():
    def verdicts(counting, estimated, on_gpu=False):
        found = claims.of_watching(counting, estimated, on_gpu=on_gpu)
        return [claim.verdict for claim in found]

    good = ended(COUNTING), ended(FORETOLD)
    assert verdicts(*good) == ["PASS", "PASS"]
    assert verdicts(*good, on_gpu=True) == ["AIM MISSED", "PASS"]
    assert verdicts(ended(COUNTING | {"ratio": 1.11}), LOST) == ["AIM MISSED", "INCONCLUSIVE"]
    assert verdicts(LOST, ended(FORETOLD | {"worst": 0.26})) == ["INCONCLUSIVE", "AIM MISSED"]


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
    (again,) = read([tmp_path / "selfcheck.json"])
    assert again == row(because=tuple(kept["because"]))
