"""Lines said of a run while it rests, how often, and which are left when it is ended."""

import json
import threading
import time

import pytest
from processes import python

from whyhung.process.observer import Counted, Observer
from whyhung.process.reports import Reports
from whyhung.process.runner import Spec, run
from whyhung.process.told import SLOW_S, Told
from whyhung.verdict import Verdict, judge
from whyhung.verdict.headline import headline
from whyhung.watch import kernel
from whyhung.watch.evidence import End, Evidence

LINE = "eval.py:12 evaluate"


def verdict(label, rested_s=20.0):
    kind, _, what = label.partition(":")
    numbers = {"rank": 0, "rested_s": rested_s, "where": "rank 0"}
    return Verdict(kind, what, "a rule", ["rank 0 works"], line=LINE, numbers=numbers)


@pytest.fixture
def told():
    """(what came, Told): label and whether it was withdrawn, in the order of the words."""
    came = []
    made = Told(Evidence(), lambda r: came.append((r["label"], r["withdrawn"] is not None)))
    return came, made


def test_slow_is_told_after_a_minute_and_at_growing_distances(told):
    came, made = told
    times = []
    for t in range(0, 1000, 5):
        before = len(came)
        made.report(t, t, verdict("SLOW:uncounted", t))
        times += [t] * (len(came) - before)
    assert times == [SLOW_S * 2**n for n in range(5)]
    made.moves(1000.0)
    made.report(1070.0, 70.0, verdict("SLOW:timer", 70.0))
    assert came == [("SLOW:uncounted", False)] * 5 + [("SLOW:timer", False)]  # ends without a word
    (last,) = (r for r in made._evidence.reports if r["withdrawn"] is None)
    assert last["t"] == 1070.0 and "SLOW" in last["headline"] and LINE in last["headline"]


def test_what_moves_and_is_late_is_not_said_to_be_silent(told):
    came, made = told
    made.report(400.0, 300.0, verdict("SLOW", 300.0))
    made.report(400.0, 300.0, verdict("SLOW:growing", 300.0))
    made.report(400.0, 300.0, verdict("INCONCLUSIVE:idle", 300.0))
    assert came == []


def test_an_accusation_is_told_once_upgraded_and_withdrawn_by_work_or_progress(told):
    came, made = told
    for label in ("STALLED:socket", "STALLED:socket", "HANG:lock", "SLOW:uncounted"):
        made.report(20.0, 20.0, verdict(label))
    assert came == [("STALLED:socket", False), ("HANG:lock", False),
                    ("STALLED:socket", True), ("HANG:lock", True)]  # fmt: skip
    made.report(70.0, 70.0, verdict("SLOW:uncounted"))
    made.report(90.0, 90.0, verdict("HANG:lock"))
    made.moves(95.0)
    assert came[4:] == [("SLOW:uncounted", False), ("HANG:lock", False), ("HANG:lock", True)]


ENDS = {
    "ended by you (SIGINT)": End("signal", -2, "SIGINT", "ended by you (SIGINT)"),
    "ended by SIGABRT": End("signal", -6, "SIGABRT", "ended by SIGABRT"),
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("label", ["HANG:lock", "STALLED:socket", "SLOW:uncounted"])
def test_what_stood_at_the_end_is_the_verdict_also_of_the_evidence_alone(told, how, label, capsys):
    _, made = told
    made.report(70.0, 70.0, verdict(label, 70.0))
    evidence = made._evidence
    evidence.end = ENDS[how]
    for one in (evidence, Evidence.from_dict(json.loads(json.dumps(evidence.to_dict())))):
        found = judge(one)
        assert found.label == label and found.line == LINE and how in found.because
        assert headline(one, found).startswith(f"{how} while: {label.partition(':')[0]}")
        assert LINE in headline(one, found)
    made.moves(71.0)
    assert judge(evidence).label == f"CRASH:{ENDS[how].type}"


def test_the_last_line_on_stderr_says_what_stood(told, tmp_path, capsys):
    _, made = told
    made.report(70.0, 70.0, verdict("HANG:lock"))
    evidence = made._evidence
    Reports(tmp_path).tell(evidence, judge(evidence) if evidence.end else verdict("HANG:lock"))
    evidence.end = ENDS["ended by you (SIGINT)"]
    Reports(tmp_path).tell(evidence, judge(evidence))
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("whyhung watch: ended by you (SIGINT) while: HANG")
    assert (tmp_path / "report.txt").read_text().startswith("ended by you (SIGINT) while: HANG")


def test_slow_is_one_line_with_what_would_settle_it(tmp_path, capsys):
    slow = verdict("SLOW:uncounted", 61.0)
    Reports(tmp_path).tell(Evidence(), slow)
    said = capsys.readouterr().err
    assert said == (
        f"whyhung watch: SLOW for 61 s, not counted: rank 0 works, at {LINE}; "
        f"what would settle it: whyhung explain {tmp_path}\n"
    )


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ["Uncounted", "Endless"])
def test_what_nothing_counts_is_told_as_slow_and_accused_of_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr("whyhung.process.told.SLOW_S", 4.0)  # for a minute
    came, stop = [], threading.Event()

    def tell(report):
        came.append(report)
        if len(came) == 2:
            stop.set()

    spec = Spec(f"spells:{name}", steps=3)
    evidence = run(spec, folder=tmp_path / "t", stall_s=1.0, deadline_s=120.0, tell=tell, stop=stop)
    assert {report["label"] for report in came} == {"SLOW:uncounted"} and len(came) == 2
    assert came[1]["rested_s"] >= 8.0 and "spells.py" in came[0]["headline"]
    assert evidence.last().step == 2
    assert [r["label"] for r in evidence.reports if r["withdrawn"] is None] == ["SLOW:uncounted"]


@pytest.mark.full
@pytest.mark.processes
def test_a_look_at_a_process_that_ends_meanwhile_accuses_nobody(monkeypatch):
    came, plain, evidence = [], kernel.snapshot, Evidence(stall_s=0.1, wait_s=0.1)
    with python("import threading\nlock = threading.Lock()\nwith lock, lock: pass") as process:

        def snapshot(*given):
            taken = plain(*given)
            if len(evidence.snapshots) == 2:  # enough looks for a verdict, with this one
                process.kill()
                process.wait()
            return taken

        monkeypatch.setattr(kernel, "snapshot", snapshot)
        ranks, end = {0: Counted(process.pid)}, time.monotonic() + 60
        observer = Observer(evidence, lambda: ranks, tell=came.append, works=False)
        while len(evidence.snapshots) < 3 and time.monotonic() < end:
            observer.step()
            time.sleep(0.02)
    assert came == [] and len(evidence.snapshots) == 3
