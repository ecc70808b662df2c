"""Every way a trial can come to its end: what was seen of it, and that nothing of it is left."""

import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from processes import python, wait_until_gone

from nsa.lab.process.runner import Spec, run, run_until_proven
from nsa.lab.verdict import judge
from nsa.lab.watch import flight_recorder, looks
from nsa.lab.watch.evidence import End, Evidence, P, Sample, thinned

STALL_S = 1.0
AT_ONCE = ("lock", "stop", "gil", "native", "slow")


def trial(name, folder, settings=None, **options):
    spec = {"steps": options.pop("steps", 3), "ranks": options.pop("ranks", 1)}
    subject = name if ":" in name else f"subject_entries:{name}"
    given = {"stall_s": STALL_S, "deadline_s": 30.0, **options}
    return run(Spec(subject, settings or {}, **spec), folder=folder, **given)


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    """Trials that stand or are late, two at a time: most of their time they only wait."""
    folder = tmp_path_factory.mktemp("stuck")
    settings = {"native": {"size": 900}, "slow": {"operations": 300_000}}
    options = {"slow": {"deadline_s": 1.0, "predicted_s": 0.1}}

    def one(name):
        more = options.get(name, {})
        return trial(name, folder / name, settings.get(name), **more)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(AT_ONCE, pool.map(one, AT_ONCE), strict=True))


def gone(pids):
    return not wait_until_gone(pids)


def by(evidence, tool):
    return [look for look in evidence.looks if look.tool == tool and look.threads]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "what"), [("lock", "blocked"), ("stop", "stopped"), ("gil", "gil-held")]
)
def test_what_stands_is_looked_at_three_times_and_ended_with_its_proof(stuck, name, what):
    evidence = stuck[name]
    assert (evidence.end.how, evidence.end.type) == ("stopped by the supervisor", "stall")
    assert evidence.last().step == 1 and evidence.frozen_s() >= STALL_S
    seen = by(evidence, "proc")
    assert len(seen) >= 3 and all(b.t - a.t >= 0.5 for a, b in pairwise(seen))
    assert all(look.p == evidence.last() for look in seen)
    verdict = judge(evidence)
    assert (verdict.kind, verdict.what) == ("HANG", what), verdict.because


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("name", ["lock", "gil"])
def test_the_stacks_name_the_line(stuck, name):
    evidence = stuck[name]
    shown = by(evidence, "py-spy")
    if not shown:
        assert "py-spy" in next(look.message for look in evidence.looks if look.message)
    main = (shown or by(evidence, "faulthandler"))[-1].main()
    assert any("subject_entries.py" in frame for frame in main["frames"])


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("name", ["lock", "gil", "slow"])
def test_faulthandler_is_not_asked_where_py_spy_shows_the_stacks(stuck, name):
    """Its dump ends a process now and then."""
    looks = [look for look in stuck[name].looks if look.tool in ("py-spy", "faulthandler")]
    for before, look in pairwise(looks):
        if look.tool == "faulthandler":
            assert before.tool == "py-spy" and not before.threads
    assert looks and looks[0].tool == "py-spy"


@pytest.mark.processes
@pytest.mark.full
def test_the_kernel_tells_who_is_stopped_and_who_waits(stuck):
    assert {s.state for s in stuck["stop"].samples[-4:]} == {"T"}
    assert stuck["lock"].samples[-1].state == "S"
    assert all(s.beats == stuck["gil"].samples[-1].beats for s in stuck["gil"].samples[-3:])


@pytest.mark.processes
@pytest.mark.full
def test_slow_work_is_ended_at_its_deadline_while_it_moves(stuck):
    evidence = stuck["slow"]
    assert evidence.end.type == "deadline" and evidence.looks
    assert evidence.samples[-1].p.key() >= evidence.looks[0].p.key()
    assert judge(evidence).kind == "SLOW"


@pytest.mark.processes
@pytest.mark.full
def test_one_long_operation_is_waited_for(stuck):
    assert stuck["native"].end.how == "returned" and len(stuck["native"].losses) == 3
    assert judge(stuck["native"]).kind == "PASS"


@pytest.mark.processes
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


ENDS = [
    ("exception", {}, ("exception", 1, "KeyError", "")),
    ("leave", {"code": 3}, ("exit", 3, "", "")),
    ("kill", {"signal": int(signal.SIGSEGV)}, ("signal", -11, "SIGSEGV", "")),
    ("address_space", {}, ("exception", 1, "MemoryError", "host")),
]


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize(("name", "settings", "expected"), ENDS)
def test_how_it_ended_by_itself_is_told(tmp_path, name, settings, expected):
    end = trial(name, tmp_path, settings).end
    assert (end.how, end.returncode, end.type, end.out_of_memory) == expected
    if name in ("exception", "address_space"):
        assert "subject_entries.py" in end.traceback


@pytest.mark.processes
def test_losses_before_the_end_are_kept(tmp_path):
    assert len(trial("exception", tmp_path, {"at": 2}).losses) == 2


@pytest.mark.processes
@pytest.mark.full
def test_who_is_forked_and_who_ignores_sigterm_is_ended_as_well(tmp_path):
    pids = tmp_path / "pids"
    evidence = trial("fork", tmp_path / "fork", {"pids": str(pids)})
    left = [int(pid) for pid in pids.read_text().split()]
    assert evidence.end.how == "returned" and len(left) == 2 and gone(left)
    evidence = trial("ignores_sigterm", tmp_path / "term", {"pids": str(pids)})
    assert evidence.end.returncode == -9 and gone([int(pids.read_text())])


@pytest.mark.processes
def test_its_caller_may_end_it(tmp_path):
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    begun = time.monotonic()
    evidence = trial("ignores_sigterm", tmp_path / "f", {"pids": str(tmp_path / "p")}, stop=stop)
    assert evidence.end.type == "caller" and time.monotonic() - begun < 15
    assert judge(evidence).kind == "INCONCLUSIVE"


@pytest.mark.processes
@pytest.mark.full
def test_of_several_ranks_the_first_to_fail_is_told(tmp_path):
    evidence = trial("rank_fails", tmp_path, ranks=2)
    assert (evidence.end.how, evidence.end.type, evidence.end.first_rank) == (
        "exception", "ArithmeticError", 1
    )  # fmt: skip
    assert evidence.ranks() == [0, 1]


@pytest.mark.processes
@pytest.mark.slow
def test_a_skipped_collective_is_in_the_flight_recorders(tmp_path):
    evidence = trial("skipped_collective", tmp_path, ranks=2)
    assert [rows[-1]["seq"] for _, rows in sorted(evidence.flights.items())] == [2, 1]
    assert judge(evidence).what == "collective"


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_nobody_outlives_a_supervisor_that_is_killed(tmp_path, ranks):
    code = (
        "from nsa.lab.process.runner import Spec, run\n"
        f"spec = Spec('subject_entries:each_waits', {{'pids': {str(tmp_path)!r}}}, ranks={ranks})\n"
        f"run(spec, folder={str(tmp_path / 'trial')!r}, stall_s=60)\n"
    )
    supervisor = python(code)
    end = time.monotonic() + 90
    while len(files := list(tmp_path.glob("pid-*"))) < ranks and time.monotonic() < end:
        time.sleep(0.05)
    supervisor.kill()
    supervisor.wait()
    assert len(files) == ranks and gone([int(file.name[4:]) for file in files])


@pytest.mark.processes
@pytest.mark.slow
def test_another_interpreter_runs_with_packages_of_its_own(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nNSA_OTHER=yes exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    spec = Spec("subject_entries:variable", {"name": "NSA_OTHER"}, python=str(other), steps=1)
    evidence = run(spec, folder=tmp_path / "trial")
    assert evidence.losses == [1.0] and evidence.environment["python"]


def test_a_rest_without_proof_is_tried_again_for_twice_as_long(monkeypatch, tmp_path):
    from nsa.lab.process import runner

    given = []

    def rested(spec, *, folder, **options):
        given.append((Path(folder).name, options["deadline_s"]))
        samples = [Sample(float(t), 0, P(1)) for t in range(8)]
        end = End("stopped by the supervisor", -9, "deadline")
        return Evidence(samples=samples, end=end, deadline_s=options["deadline_s"], began_s=1.0)

    monkeypatch.setattr(runner, "run", rested)
    evidence = run_until_proven(Spec("a:b"), folder=tmp_path / "t", deadline_s=5.0)
    assert given == [("t", 5.0), ("again", 12.0)] and evidence.again.frozen_s() == 7.0


@pytest.mark.processes
@pytest.mark.full
def test_without_py_spy_it_says_so_and_faulthandler_remains(monkeypatch, tmp_path):
    monkeypatch.setattr(looks, "_py_spy", lambda: None)
    assert looks.py_spy(os.getpid()) == ([], "py-spy is not installed (pip install py-spy)")
    refused = tmp_path / "py-spy"
    refused.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(looks, "_py_spy", lambda: str(refused))
    assert looks.py_spy(os.getpid()) == ([], "py-spy: Permission Denied: Try running again")
    evidence = trial("lock", tmp_path / "lock")
    assert evidence.end.type == "stall" and len(by(evidence, "faulthandler")) >= 3
    assert judge(evidence).what == "blocked"


def test_a_dump_is_read_with_its_main_thread():
    text = (
        'Thread 0x0000000000000007 (most recent call first):\n  File "a b.py", line 3 in f\n\n'
        "Current thread 0x00007fb5a6673b80 [python] (most recent call first):\n"
        '  File "c.py", line 9 in <module>\n'
    )
    found = looks.parse(text, 0x7FB5A6673B80)
    assert [(t["main"], t["frames"]) for t in found] == [
        (False, ["a b.py:3 f"]), (True, ["c.py:9 <module>"])
    ]  # fmt: skip


def test_thinning_keeps_the_moves_and_every_other_sample_of_each_rank():
    samples = [Sample(float(t), t % 2, P(t // 20)) for t in range(100)]
    kept = thinned(samples)
    assert 50 <= len(kept) < 75 and {s.p for s in kept} == {s.p for s in samples}
    assert {s.rank for s in kept} == {0, 1} and kept == sorted(kept, key=lambda s: s.t)


def test_both_flight_recorders_are_read(monkeypatch):
    import torch
    import torch._C._distributed_c10d as c10d

    def dump(name):
        entry = {"process_group": ("0", "default"), "collective_seq_id": 3, "profiling_name": name}
        return lambda *_: pickle.dumps({"entries": [entry]})

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "_dump_fr_trace", dump("gloo:all_reduce"))
    monkeypatch.setattr(c10d, "_dump_nccl_trace", dump("nccl:all_reduce"), raising=False)
    assert [e["op"] for e in flight_recorder.recorded()] == ["gloo:all_reduce", "nccl:all_reduce"]


def test_the_same_spec_source_and_environment_have_the_same_id():
    spec = Spec("a:b", {"x": 1}, oracles=["finite"])
    assert spec == Spec.from_dict(spec.to_dict()) and len(spec.id("s", {})) == 12
    assert spec.id("s", {}) == Spec.from_dict(spec.to_dict()).id("s", {})
    others = [spec.id("t", {}), spec.id("s", {"torch": "3"}), Spec("a:b", {"x": 2}).id("s", {})]
    assert len({spec.id("s", {}), *others}) == 4


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"ranks": 0}, "ranks=0 must be at least 1"),
        ({"settings": {"a": {1}}}, "must fit JSON"),
    ],
)
def test_a_spec_that_cannot_be_run_is_refused(values, said):
    with pytest.raises(ValueError, match=said):
        Spec("a:b", **values)


@pytest.mark.processes
def test_a_subject_that_is_none_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="no module"):
        trial("nowhere:make", tmp_path)
    end = trial("no_steps", tmp_path).end
    assert end.type == "ValueError" and "has no step(i)" in end.message
    with pytest.raises(ValueError, match="stall_s=0"):
        trial("lock", tmp_path, stall_s=0)
    with pytest.raises(ValueError, match="cannot be run"):
        run(Spec("a:b", python="/no/python"), folder=tmp_path)
