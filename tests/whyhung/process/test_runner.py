"""Every end of a trial: the evidence it leaves, and no process left behind."""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from processes import python, running, wait_until, wait_until_gone

from whyhung.process.runner import Spec, run
from whyhung.verdict import judge
from whyhung.watch import looks
from whyhung.watch.evidence import End, Evidence

pytestmark = pytest.mark.processes
STALL_S = 1.0
TOLD = {"stall_s": STALL_S, "deadline_s": 30.0, "on_hang": "kill", "on_stall": "kill"}
# Trials that stand or are late: settings, and how they are run.
STUCK = {
    "lock": ({}, {}),
    "stop": ({}, {}),
    "gil": ({}, {"deadline_s": 6.0}),
    "native": ({"size": 900}, {}),
    "slow": ({"operations": 1_500_000}, {"deadline_s": 4.0, "predicted_s": 0.4}),
}


def trial(name, folder, settings=None, steps=3, ranks=1, **options):
    subject = name if ":" in name else f"subject_entries:{name}"
    spec = Spec(subject, settings or {}, steps=steps, ranks=ranks)
    return run(spec, folder=folder, **{**TOLD, **options})


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    """Two at a time: most of their time they only wait."""
    folder = tmp_path_factory.mktemp("stuck")

    def one(name):
        settings, options = STUCK[name]
        return trial(name, folder / name, settings, **options)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(STUCK, pool.map(one, STUCK), strict=True))


def gone(pids):
    return not wait_until_gone(pids)


@pytest.mark.full
@pytest.mark.parametrize(("name", "verdict"), [("lock", "HANG:lock"), ("stop", "STALLED:stopped")])
def test_what_stands_is_ended_as_asked_with_what_was_seen_of_it(stuck, name, verdict):
    evidence = stuck[name]
    assert (evidence.end.how, evidence.end.type) == ("stopped by the supervisor", "stall")
    assert evidence.last().step == 1 and evidence.frozen_s() >= STALL_S
    seen = evidence.snapshots
    assert len(seen) >= 3 and all(b.t - a.t >= 0.5 for a, b in pairwise(seen))
    # An earlier one may be of a machine so busy that the training was slow before it stood.
    assert all(look.p == {0: evidence.last()} for look in seen[-3:])
    found = judge(evidence)
    assert found.label == verdict and found.edges, found.because
    (report,) = evidence.reports
    assert report["label"] == verdict and report["withdrawn"] is None
    assert report["headline"].startswith(found.kind) and found.line in report["headline"]


@pytest.mark.full
@pytest.mark.parametrize("name", ["lock", "gil"])
def test_the_stacks_name_the_line(stuck, name):
    assert "subject_entries.py" in judge(stuck[name]).line
    assert {look.tool for look in stuck[name].snapshots} <= {"py-spy", "native"}


@pytest.mark.full
def test_a_call_that_keeps_the_gil_and_computes_is_never_called_a_hang(stuck):
    assert judge(stuck["gil"]).label == "SLOW:uncounted"
    assert stuck["gil"].end.type == "deadline" and not stuck["gil"].reports


@pytest.mark.full
def test_the_kernel_tells_who_is_stopped_and_who_waits(stuck):
    assert {s.state for s in stuck["stop"].samples[-4:]} == {"T"}
    assert stuck["lock"].samples[-1].state == "S"
    assert all(s.beats == stuck["gil"].samples[-1].beats for s in stuck["gil"].samples[-3:])


@pytest.mark.full
def test_slow_work_is_ended_at_its_deadline_while_it_moves(stuck):
    evidence = stuck["slow"]
    assert evidence.end.type == "deadline" and evidence.snapshots
    assert evidence.samples[-1].p.key() >= evidence.snapshots[0].p[0].key()
    assert judge(evidence).kind == "SLOW"


@pytest.mark.full
def test_one_long_operation_is_waited_for(stuck):
    assert stuck["native"].end.how == "returned" and len(stuck["native"].losses) == 3
    assert judge(stuck["native"]).kind == "PASS"


@pytest.mark.full
def test_a_strangers_training_is_tried_by_its_path_alone(tmp_path):
    evidence = trial("stranger:Training", tmp_path)
    assert evidence.end == End("returned", 0, peak_mib=evidence.end.peak_mib)
    assert evidence.losses == sorted(evidence.losses, reverse=True) and len(evidence.losses) == 3
    last = evidence.last()
    assert (last.step, last.phase, last.modules) == (2, "end", 4) and last.fired == last.total > 0
    assert 0 < evidence.began_s < evidence.seconds and evidence.end.peak_mib > 50
    assert not evidence.preflight and not evidence.notes
    assert Evidence.from_dict(evidence.to_dict()).to_dict() == evidence.to_dict()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("exception", {}, ("exception", 1, "KeyError", "")),
        ("leave", {"code": 3}, ("exit", 3, "", "")),
        ("kill", {"signal": int(signal.SIGSEGV)}, ("signal", -11, "SIGSEGV", "")),
        ("address_space", {}, ("exception", 1, "MemoryError", "host")),
    ],
)
def test_how_it_ended_by_itself_is_told(tmp_path, name, settings, expected):
    end = trial(name, tmp_path, settings).end
    assert (end.how, end.returncode, end.type, end.out_of_memory) == expected
    if end.how == "exception":
        assert "subject_entries.py" in end.traceback


def test_losses_before_the_end_are_kept(tmp_path):
    assert len(trial("exception", tmp_path, {"at": 2}).losses) == 2


@pytest.mark.full
def test_who_is_forked_and_who_ignores_sigterm_is_ended_as_well(tmp_path):
    pids = tmp_path / "pids"
    evidence = trial("fork", tmp_path / "fork", {"pids": str(pids)})
    left = [int(pid) for pid in pids.read_text().split()]
    assert evidence.end.how == "returned" and len(left) == 2 and gone(left)
    evidence = trial("ignores_sigterm", tmp_path / "term", {"pids": str(pids)})
    assert evidence.end.returncode == -9 and gone([int(pids.read_text())])


@pytest.mark.full
def test_its_caller_may_end_it(tmp_path):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    begun = time.monotonic()
    evidence = trial("ignores_sigterm", tmp_path / "f", {"pids": str(tmp_path / "p")}, stop=stop)
    assert evidence.end.type == "caller" and time.monotonic() - begun < 15
    assert judge(evidence).kind == "INCONCLUSIVE"


@pytest.mark.full
def test_of_several_ranks_the_first_to_fail_is_told(tmp_path):
    evidence = trial("rank_fails", tmp_path, ranks=2)
    end = evidence.end
    assert (end.how, end.type, end.first_rank) == ("exception", "ArithmeticError", 1)
    assert evidence.ranks() == [0, 1]


@pytest.mark.slow
def test_who_skips_a_collective_is_named_and_it_is_in_the_flight_recorders(tmp_path):
    evidence = trial("skipped_collective", tmp_path, ranks=2)
    assert [rows[-1]["seq"] for _, rows in sorted(evidence.flights.items())] == [2, 1]
    found = judge(evidence)
    assert found.kind in ("HANG", "STALLED"), found.because
    assert found.numbers["where"] == "rank 1", found.because
    assert found.what != "collective" and "skipped_collective" in found.line


@pytest.mark.slow
def test_nobody_outlives_a_supervisor_that_is_killed(tmp_path):
    """Two ranks end with it; test_no_trial_outlives_a_kill_of_its_supervisor has a single one."""
    code = (
        "from whyhung.process.runner import Spec, run\n"
        f"spec = Spec('subject_entries:each_waits', {{'pids': {str(tmp_path)!r}}}, ranks=2)\n"
        f"run(spec, folder={str(tmp_path / 'trial')!r}, stall_s=60)\n"
    )
    with running(python(code)):
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, within_s=90)
    assert gone([int(file.name[4:]) for file in tmp_path.glob("pid-*")])


@pytest.mark.slow
def test_another_interpreter_runs_with_packages_of_its_own(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nNSA_OTHER=yes exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    spec = Spec("subject_entries:variable", {"name": "NSA_OTHER"}, python=str(other), steps=1)
    evidence = run(spec, folder=tmp_path / "trial")
    assert evidence.losses == [1.0] and evidence.environment["python"]


@pytest.mark.full
def test_without_py_spy_it_says_so_and_the_process_tells_its_stacks_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(looks, "_py_spy", lambda: None)
    assert "py-spy is not installed (pip install py-spy)" in looks.py_spy(os.getpid())[1]
    refused = tmp_path / "py-spy"
    refused.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(looks, "_py_spy", lambda: str(refused))
    assert "py-spy: Permission Denied: Try running again" in looks.py_spy(os.getpid())[1]
    evidence = trial("lock", tmp_path / "lock")
    assert evidence.end.type == "stall"
    found = judge(evidence)
    assert found.label == "HANG:lock" and "subject_entries.py" in found.line
    assert "Permission Denied" in evidence.snapshots[-1].processes[0].message


def test_a_subject_that_is_none_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="no module"):
        trial("nowhere:make", tmp_path)
    end = trial("no_steps", tmp_path).end
    assert end.type == "ValueError" and "has no step(i)" in end.message
    with pytest.raises(ValueError, match="stall_s=0"):
        trial("lock", tmp_path, stall_s=0)
    with pytest.raises(ValueError, match="cannot be run"):
        run(Spec("a:b", python="/no/python"), folder=tmp_path)
