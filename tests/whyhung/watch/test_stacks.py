"""Stacks of one program, its child of Python and its child of something else."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from processes import running, wait_until

from whyhung.watch import kernel, looks, visible
from whyhung.watch.evidence import Evidence, Process, Snapshot, Thread

pytestmark = pytest.mark.processes
linux = pytest.mark.skipif(
    sys.platform != "linux" or looks._py_spy() is None, reason="needs /proc and py-spy"
)
PROGRAM = r"""
import multiprocessing, subprocess, sys, threading, time

def rests(mark):
    time.sleep(600)

def passes(flag):
    value = 1.5
    while True:
        if flag:
            value = value * 1
        time_or_none = None

def busy_waits(until):
    while time.monotonic() < until:
        pass

def counts(number):
    while number:
        number = number + 1

if __name__ == "__main__":
    multiprocessing.Process(target=rests, args=("in a child",), daemon=True).start()
    subprocess.Popen(["sleep", "600"])
    for target, given in ((passes, True), (busy_waits, time.monotonic() + 600), (counts, 1)):
        threading.Thread(target=target, args=(given,), name=target.__name__, daemon=True).start()
    threading.Thread(target=rests, args=("by a name",), name="nsa:progress", daemon=True).start()
    print(flush=True)
    rests("in the main thread")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    script = tmp_path_factory.mktemp("stacks") / "train.py"
    script.write_text(PROGRAM)
    os.utime(script, (1e9, 1e9))
    child = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True
    )
    child.stdout.readline()
    yield child
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def taken(program, enough=lambda snapshot: True, **options):
    """A snapshot with stacks, when the main threads have come to rest."""
    until = time.monotonic() + 60
    while True:
        snapshot = looks.with_stacks(kernel.snapshot({0: program.pid}), **options)
        seen = [x for x in snapshot.processes if x.of == 0 and x.name != "sleep 600"]
        mains = [process.main() for process in seen if process.main()]
        rest = [x.wait and x.frames and x.frames[0].endswith(" rests") for x in mains]
        # one that py-spy has woken wants the GIL first
        begun = len(rest) >= 2 and all(rest) and all(x.wait.kind != "GIL" for x in mains)
        begun = begun and snapshot.of(0).main().wait.kind == "timer"
        if (begun and enough(snapshot)) or time.monotonic() > until:
            return snapshot


@pytest.fixture(scope="module")
def looked(program):
    return taken(program)


@linux
def test_every_thread_of_python_has_its_frames_its_name_and_whether_it_holds_the_gil(looked):
    main = looked.of(0).main()
    assert main.name == "MainThread" and main.frames[0].endswith(" rests") and main.gil is False
    assert main.frames[0].rpartition(":")[0].endswith("train.py")
    assert main.wait.kind == "timer" and looked.tool == "py-spy"
    names = {thread.name for thread in looked.of(0).threads}
    assert names >= {"MainThread", "passes", "busy_waits", "counts", "nsa:progress"}
    (ours,) = (thread for thread in looked.of(0).threads if thread.ours)
    assert ours.name == "nsa:progress"
    child, sleep = (x for x in looked.processes if x.parent == looked.of(0).pid)
    assert any(frame.endswith(" rests") for frame in child.main().frames)
    assert sleep.name == "sleep 600" and not sleep.main().frames
    assert not any(process.message for process in looked.processes)
    assert Evidence.from_dict(Evidence(snapshots=[looked]).to_dict()).snapshots == [looked]


@linux
def test_equal_state_has_equal_digests_and_only_an_endless_loop_has_them_without_a_mark(
    program, looked
):
    def digests(snapshot):
        return {thread.name: thread.visible for thread in snapshot.of(0).threads}

    before = digests(looked)
    # on a busy machine a thread may not have run between two looks
    again = digests(taken(program, lambda s: digests(s).get("counts") != before["counts"]))
    for name in ("MainThread", "passes", "busy_waits", "nsa:progress"):
        assert before[name] and before[name] == again[name], name
    assert before["counts"] != again["counts"]
    marked = {name for name, digest in before.items() if digest.endswith(visible.HIDDEN)}
    assert marked == {"MainThread", "busy_waits", "counts", "nsa:progress"}


@linux
def test_native_names_stand_above_the_innermost_frame_of_python(program):
    def enough(snapshot):
        return any("sleep" in name for name in snapshot.of(0).main().native)

    snapshot = taken(program, enough, native=True)
    main = snapshot.of(0).main()
    assert enough(snapshot) and main.frames[0].endswith(" rests")
    assert snapshot.tool == "native" and not any("0x" in name for name in main.native)


@linux
def test_a_stopped_process_shows_its_stacks_too(program):
    child = next(p for p in kernel.family({0: program.pid}) if p.name.endswith("(forked)"))
    os.kill(child.pid, signal.SIGSTOP)
    try:
        snapshot = taken(program, lambda s: s.process(child.pid).state == "T")
        main = snapshot.process(child.pid).main()
        assert main.wait.kind == "stopped" and any("rests" in frame for frame in main.frames)
    finally:
        os.kill(child.pid, signal.SIGCONT)


@linux
def test_of_a_process_that_ended_it_says_so_and_keeps_what_was_seen():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        wait_until(lambda: looks.runs_python(child.pid))
        snapshot = kernel.snapshot({0: child.pid})
        child.kill()
    assert looks.py_spy(child.pid) == ([], "it ended before py-spy looked")
    (process,) = looks.with_stacks(snapshot).processes
    assert process.pid == child.pid and process.threads == snapshot.of(0).threads


@linux
def test_without_py_spy_or_its_rights_the_message_says_what_would_help(
    program, monkeypatch, tmp_path
):
    snapshot = kernel.snapshot({0: program.pid})
    monkeypatch.setattr(looks, "_py_spy", lambda: None)
    rank = looks.with_stacks(snapshot).of(0)
    assert "pip install py-spy" in rank.message and rank.threads == snapshot.of(0).threads
    refused = tmp_path / "py-spy"
    refused.write_text("#!/bin/sh\necho 'Permission Denied: Try running again' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(looks, "_py_spy", lambda: str(refused))
    message = looks.with_stacks(snapshot).of(0).message
    assert "Permission Denied" in message and "CAP_SYS_PTRACE" in message
    refused.write_text("#!/bin/sh\necho nonsense\n")
    assert "py-spy: " in looks.with_stacks(snapshot).of(0).message
    refused.write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr(looks, "PY_SPY_S", 0.1)
    assert "did not answer" in looks.with_stacks(snapshot).of(0).message


GIL = """
import ctypes, threading, time
threading.Thread(target=lambda: print(flush=True) or ctypes.PyDLL(None).sleep(600)).start()
while True:
    time.sleep(0.001)
"""


@linux
def test_who_waits_for_the_gil_waits_for_the_thread_that_holds_it():
    with running(subprocess.Popen([sys.executable, "-c", GIL], stdout=subprocess.PIPE)) as child:
        child.stdout.readline()
        until = time.monotonic() + 60
        while True:
            process = looks.with_stacks(kernel.snapshot({0: child.pid})).of(0)
            main = process.main()
            owners = [thread for thread in process.threads if thread.gil]
            seen = main.wait and main.wait.kind == "GIL" and owners and owners[0].wait
            if seen or time.monotonic() > until:
                break
    (owner,) = owners
    assert main.wait.wakers == ((child.pid, owner.tid),) and not main.wait.outside
    assert main.wait.left_s is None and owner.wait.kind == "timer" and owner.wait.left_s <= 600


def test_py_spy_is_found_on_the_path_or_nowhere(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert looks._py_spy() is None
    (tmp_path / "py-spy").write_text("")
    assert looks._py_spy() == str(tmp_path / "py-spy")


def test_strangers_are_not_stopped_for_a_look():
    me = Process(os.getpid(), of=kernel.STRANGER, threads=(Thread(threading.get_native_id()),))
    assert looks.with_stacks(Snapshot(0.0, (me,))).processes == (me,)


LOOPS = """
def f(x, y):
    while True:
        pass
    while x:
        y + 1
    while x:
        y = 2
    while True:
        if y: break
    while True:
        y = y / 2
    while x.done:
        pass
    while x(): pass
    for i in [x]:
        pass
    while True: y[0] = 1
"""


def test_only_loops_that_nothing_can_end_from_inside_are_endless(tmp_path):
    file = tmp_path / "loops.py"
    file.write_text(LOOPS)
    plain = [{"name": "x", "repr": "3"}, {"name": "y", "repr": '"text"'}]
    opaque = [{"name": "x", "repr": "<Tensor at 0x7f00>"}, {"name": "y", "repr": "[1]"}]

    def lines(known, began=2.0**40):
        frame = {"filename": str(file), "locals": known}
        every = range(1, LOOPS.count("\n") + 1)
        return [
            n
            for n in every
            if visible.endless({**frame, "line": n}, os.getpid(), began) is not None
        ]

    assert lines(plain) == [3, 4, 5, 6]
    assert lines(opaque) == lines([]) == lines([{"name": "x", "repr": "0"}]) == [3, 4]
    assert lines(plain, began=1.0) == []  # it has been edited since the process began
    file.write_text("not python (")
    assert replace(Thread(1), visible=visible.digest([], 1, 1.0)).visible == ""
    assert lines(plain) == []
