"""Stored runs: their claims with trials and place, what counts, and the caveats that stand by."""

import json

import pytest
from places import ROOT
from stored_runs import store_run

pytest.importorskip("pandas")

from workbook.runs import age
from workbook.runs.loaded import StoredRun
from workbook.runs.record import load
from workbook.runs.results import committed, open_stored

ID = "0123456789ab"


@pytest.fixture(autouse=True)
def no_history(request, monkeypatch):
    """Git is asked for no ages, but where a test starts processes."""
    if not request.node.get_closest_marker("processes"):
        monkeypatch.setattr(age, "since", lambda commit: age.Age(commit))


def test_each_claim_opens_its_evidence_and_the_trials_that_the_run_carries(tmp_path):
    claims = [("PASS", f"it hangs: 3 of 4 [{ID}, aaaaaaaaaaaa]", {"trials": [ID, "aaaaaaaaaaaa"]}),
              ("FAIL", "it is fast: 9 s")]  # fmt: skip
    folder = store_run(tmp_path, "01_tiny", claims)
    (folder / "trials" / ID).mkdir(parents=True)
    (run,) = open_stored(tmp_path).runs
    assert [(s.verdict, s.claim) for s in run.sentences] == [claim[:2] for claim in claims]
    assert [s.trials for s in run.sentences] == [(folder / "trials" / ID,), ()]
    for sentence in run.sentences:
        file, _, line = sentence.where.partition("#L")
        rest = (tmp_path / file).read_text(encoding="utf-8").splitlines()[int(line) - 1 :]
        assert rest[0] == "  {"
        assert json.loads(rest[1].split(": ", 1)[1].rstrip(",")) == sentence.claim


@pytest.mark.parametrize("gpu", ["cpu", "NVIDIA H100"])
def test_no_run_of_another_device_mends_what_one_device_refutes(tmp_path, gpu):
    store_run(tmp_path, "01_tiny", [("FAIL", "it is fast: 99 s")])
    store_run(tmp_path, "01_tiny", [("PASS", "it is fast: 1 s")], started="2026-11-02", gpu=gpu)
    assert open_stored(tmp_path).sentence("01", "it is fast").verdict == "FAIL"


def test_what_is_unknown_of_a_run_or_was_never_said_is_told_of_it(tmp_path):
    known = store_run(tmp_path, "01_tiny", [("PASS", "it is fast: 9 s")], evidence=True)
    bare = store_run(tmp_path, "01_tiny", started="2026-11-02")
    (bare / "metrics.csv").unlink()
    (bare / "environment.json").unlink()
    (bare / "notes.txt").write_text("its host was slow\n")
    lost = store_run(tmp_path, "01_tiny", started="2026-11-03", status="killed", message="SIGTERM")
    runs = {folder: StoredRun(folder, load(folder)) for folder in (known, bare, lost)}
    assert "which git has not here" in str(runs[known].age()) and runs[known].labels == []
    assert "of no known commit" in str(runs[bare].age())
    assert runs[bare].labels == ["its host was slow", "its commit is unknown",
                                 "not marked as evidence", "it has no rows",
                                 "it has no verdicts"]  # fmt: skip
    assert "it has no verdicts" in runs[lost].labels
    assert lost not in [run.folder for run in open_stored(tmp_path).runs]


@pytest.mark.parametrize(
    ("ended", "counts"),
    [
        ({"status": "ok"}, True),
        ({"status": "failed", "stop_reason": "error", "message": "AssertionError: it is"}, True),
        ({"status": "failed", "stop_reason": "error", "message": "ValueError: what"}, False),
        ({"status": "timeout", "stop_reason": "timeout"}, False),
        ({"status": "interrupted", "stop_reason": "interrupted"}, False),
    ],
)
def test_only_runs_that_ended_count_and_a_refuted_claim_is_an_end(tmp_path, ended, counts):
    store_run(tmp_path, "01_tiny", [("FAIL", "it is fast")], **ended)
    assert bool(open_stored(tmp_path).runs) is counts


def test_verdicts_that_were_cut_by_hand_are_refused_and_not_taken_for_others(tmp_path):
    folder = store_run(tmp_path, "01_tiny", [("PASS", "one"), ("PASS", "two")])
    (folder / "verdicts.json").write_text('[{"claim": "one", "verdict": "PASS", "evidence": 1}]')
    with pytest.raises(ValueError, match="one claim after the other"):
        _ = open_stored(tmp_path).runs[0].sentences


@pytest.mark.processes
def test_what_is_committed_is_asked_of_a_checkout(tmp_path):
    store_run(tmp_path, "01_tiny")
    with pytest.raises(ValueError, match="lies in no git checkout"):
        committed(tmp_path)
    if (ROOT / ".git").exists():
        assert len(committed(ROOT / "runs")) > 50
