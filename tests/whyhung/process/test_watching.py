"""Commands under watch, and jobs that are looked at as they run, as strangers write them."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pages
import pytest
from places import SUPPORT
from processes import (
    alive,
    environment_with_package,
    python,
    running,
    wait_until_gone,
    wait_until_there,
)

from whyhung.process import members, nodes, watching
from whyhung.process.attaching import attach
from whyhung.process.reports import Reports
from whyhung.verdict import Verdict
from whyhung.watch.evidence import Evidence, Process

pytestmark = pytest.mark.processes

LOCKED = """
import os, threading, time

def evaluate(lock):
    with lock:
        print("never")

def train():
    lock = threading.Lock()
    lock.acquire()
    open("began.new", "w").write(str(os.getpid()))
    os.replace("began.new", "began")
    evaluate(lock)

train()
"""
STUCK_AT = "script.py:5 evaluate"
AT_WORK = "import time\nend = time.time() + 60\nwhile time.time() < end:\n    sum(range(1000))\n"


@pytest.fixture
def started(tmp_path):
    """Starts `whyhung ARGUMENTS` in a folder with script.py; what is left of it is ended after."""
    processes = []

    def start(*arguments, script=LOCKED, **options):
        (tmp_path / "script.py").write_text(script)
        command = [sys.executable, "-m", "whyhung", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE}
        made = subprocess.Popen(
            command, cwd=tmp_path, text=True, env=environment_with_package(), **pipes, **options
        )
        processes.append(made)
        return made

    yield start
    for process in processes:
        process.terminate()  # does nothing to one that was waited for
        process.wait(timeout=60)
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def verdict_in(folder):
    return Verdict.from_dict(json.loads((folder / "verdict.json").read_text()))


def wait_for(process, condition):
    end = time.monotonic() + 90
    while not condition():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)


def test_output_input_and_exit_code_are_those_of_the_command(started, tmp_path):
    code = "import sys; print(input()[::-1]); print('aside', file=sys.stderr); sys.exit(3)"
    process = started("watch", "--folder", "seen", "--", sys.executable, "-c", code)
    out, err = process.communicate("ends\n", timeout=60)
    assert (process.returncode, out, err) == (3, "sdne\n", "aside\n")
    assert verdict_in(tmp_path / "seen").kind == "CRASH"
    names = {"evidence.json", "verdict.json", "report.txt", "report.md"}
    assert {file.name for file in (tmp_path / "seen").iterdir()} == names


def test_what_a_signal_ended_ends_by_that_signal(started):
    process = started("watch", "--", "sh", "-c", "kill -9 $$")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.full
def test_a_lock_taken_twice_is_told_at_its_line_and_the_program_runs_on(started, tmp_path):
    process = started("watch", "--inside", "off", "--stall-s", 1, "--", sys.executable, "script.py")
    wait_until_there(tmp_path / "began", process)
    pid = int((tmp_path / "began").read_text())
    wait_for(process, lambda: list(tmp_path.glob("watch/*/verdict.json")))
    assert alive(pid) and process.poll() is None
    folder = next(tmp_path.glob("watch/*"))
    wait_for(process, lambda: verdict_in(folder).kind == "HANG")
    assert STUCK_AT in "".join((folder / "report.txt").read_text().splitlines(True)[:5])
    process.send_signal(signal.SIGTERM)  # which is passed on
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and wait_until_gone([pid]) == []
    assert STUCK_AT in err and "report.txt" in err


@pytest.mark.full
@pytest.mark.parametrize("send", [os.kill, os.killpg])
def test_what_stood_stays_when_the_user_ends_it(started, tmp_path, send):
    """Though the signal itself moves it, and the watcher gets it too."""
    options = ["--inside", "off", "--stall-s", 1, "--folder", "seen"]
    process = started("watch", *options, "--", sys.executable, "script.py", start_new_session=True)
    file = tmp_path / "seen" / "verdict.json"
    wait_for(process, lambda: file.is_file() and verdict_in(file.parent).kind == "HANG")
    send(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    said = "ended by you (SIGINT) while: HANG: rank 0 waits"
    assert err.splitlines()[-1].startswith(f"whyhung watch: {said}") and STUCK_AT in err
    assert "withdrawn" not in err and err.count("KeyboardInterrupt") == 1
    page = (tmp_path / "seen" / "report.txt").read_text()
    assert page.startswith(said) and "Who waits for whom" in page
    assert verdict_in(tmp_path / "seen").kind == "HANG"
    again = started("explain", tmp_path / "seen")
    assert again.communicate(timeout=60)[0].startswith(said)


def test_the_program_goes_on_when_the_watcher_is_killed(started, tmp_path):
    process = started("watch", "--", sys.executable, "script.py")
    wait_until_there(tmp_path / "began", process)
    pid = int((tmp_path / "began").read_text())
    process.kill()
    process.wait()
    time.sleep(0.3)
    assert alive(pid)
    os.kill(pid, signal.SIGKILL)
    assert wait_until_gone([pid]) == []


@pytest.mark.full
def test_a_hang_is_ended_with_all_its_processes_where_that_is_asked(started, tmp_path):
    script = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    options = ["--inside", "off", "--stall-s", 1, "--on-hang", "kill", "--folder", "seen"]
    process = started("watch", *options, "--", sys.executable, "script.py", script=script + LOCKED)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM
    assert verdict_in(tmp_path / "seen").kind == "HANG"
    evidence = Evidence.from_dict(json.loads((tmp_path / "seen" / "evidence.json").read_text()))
    pids = {one.pid for one in evidence.snapshots[-1].processes}
    assert len(pids) == 2 and wait_until_gone(pids) == []


@pytest.mark.full
def test_a_healthy_wait_is_not_told(started, tmp_path):
    script = "import time\ntime.sleep(3)\nprint('done')\n"
    process = started("watch", "--stall-s", 1, "--folder", "seen", "--", sys.executable,
                      "script.py", script=script)  # fmt: skip
    assert process.communicate(timeout=60) == ("done\n", "")
    assert verdict_in(tmp_path / "seen").kind == "PASS"


@pytest.mark.full
def test_the_users_limit_ends_what_works_as_slow(started, tmp_path):
    options = ["--inside", "off", "--limit", 2, "--folder", "seen"]
    process = started("watch", *options, "--", sys.executable, "script.py", script=AT_WORK)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and "limit of 2 s" in err
    assert verdict_in(tmp_path / "seen").kind == "SLOW"


def test_a_watcher_that_fails_leaves_the_command_its_end_and_its_exit_code(monkeypatch, capfd):
    def fails(*_, **__):
        raise RuntimeError("ours")

    monkeypatch.setattr(watching, "Observer", fails)
    assert watching.watch(["sh", "-c", "sleep 0.2; echo done; exit 4"], count=False) == 4
    out, err = capfd.readouterr()
    assert out == "done\n" and "your program goes on" in err


@pytest.mark.full
def test_pages_go_to_the_terminal_where_their_folder_cannot_be_written(started, tmp_path):
    (tmp_path / "file").touch()
    options = ["--inside", "off", "--stall-s", 1, "--on-hang", "kill", "--folder", "file"]
    process = started("watch", *options, "--", sys.executable, "script.py")
    _, err = process.communicate(timeout=60)
    assert err.count("cannot be written") == 1 and "Who waits for whom" in err and STUCK_AT in err


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    reports = Reports(tmp_path)
    assert not reports.write(Evidence(), Verdict("PASS"))
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.full
def test_a_job_is_looked_at_and_not_changed(tmp_path):
    (tmp_path / "script.py").write_text(LOCKED)
    with running(subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path)) as process:
        wait_until_there(tmp_path / "began", process)
        evidence, verdict = attach(process.pid, seconds=2)
        assert verdict.kind == "HANG" and verdict.line.endswith(STUCK_AT)
        assert evidence.spec["attached"] == process.pid
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "TracerPid:\t0" in status and alive(process.pid)


@pytest.mark.full
def test_what_works_is_not_called_still():
    with running(python(AT_WORK)) as process:
        _, verdict = attach(process.pid, seconds=2)
    assert verdict.label == "SLOW:uncounted"


@pytest.mark.full
def test_a_server_that_waits_to_be_asked_is_idle_and_nothing_is_wrong(started):
    command = [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with running(subprocess.Popen(command, stdout=subprocess.DEVNULL)) as process:
        time.sleep(1)
        looked = started("attach", process.pid, "--seconds", 2)
        out, _ = looked.communicate(timeout=60)
    assert looked.returncode == 0
    assert out.startswith("it is idle: rank 0 waits for the next request")


@pytest.mark.slow
def test_a_kernel_of_jupyter_without_a_cell_is_idle(tmp_path):
    file = tmp_path / "kernel.json"
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", file]
    null = subprocess.DEVNULL
    with running(subprocess.Popen(command, stdout=null, stderr=null)) as process:
        wait_until_there(file, process)
        time.sleep(3)
        _, verdict = attach(process.pid, seconds=3)
    assert verdict.label == "INCONCLUSIVE:idle"


def test_a_process_that_runs_no_python_is_looked_at_too():
    with running(subprocess.Popen(["sleep", "60"])) as process:
        evidence, verdict = attach(process.pid, seconds=1)
    assert verdict.kind == "SLOW" and verdict.numbers["left_s"] > 0  # its timer
    assert any("does not run Python" in note for note in evidence.notes)


def test_a_process_that_is_not_there_or_has_ended_is_refused():
    with pytest.raises(ValueError, match="there is no process 4194305"):
        attach(2**22 + 1)
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ValueError, match="has ended, and its parent"):
        attach(process.pid)
    process.wait()
    with pytest.raises(ValueError, match="is this one"):
        attach(os.getpid())


def test_a_process_may_end_while_it_is_looked_at():
    with subprocess.Popen(["sleep", "0.5"]) as process:
        _, verdict = attach(process.pid, seconds=3)
    assert verdict.label == "INCONCLUSIVE:ended"


@pytest.mark.full
def test_without_py_spy_the_kernel_still_tells(monkeypatch):
    monkeypatch.setattr("whyhung.watch.looks._py_spy", lambda: None)
    with running(
        python("import threading\nlock = threading.Lock()\nwith lock, lock: pass")
    ) as process:
        time.sleep(0.5)
        evidence, verdict = attach(process.pid, seconds=2)
    assert verdict.kind == "HANG"
    assert any("py-spy is not installed" in one.message for one in evidence.snapshots[0].processes)


def test_a_job_of_another_user_says_what_would_help(monkeypatch):
    monkeypatch.setattr("whyhung.process.attaching.variables", lambda pid: {})
    monkeypatch.setattr("os.access", lambda *_: False)
    with running(python("input()", stdin=subprocess.PIPE)) as process:
        evidence, _ = attach(process.pid, seconds=0.5)
    assert any("CAP_SYS_PTRACE" in note for note in evidence.notes)


def test_a_number_that_went_to_another_process_is_not_taken_for_the_first(monkeypatch):
    with python("input()", stdin=subprocess.PIPE) as process:
        asked = members.Members(process.pid)
        assert asked()[0].pid == process.pid
        asked._started[process.pid] -= 1
        assert asked()[0].pid == 0
        process.kill()


def test_ranks_are_told_from_their_launcher_and_their_workers(monkeypatch):
    told = {
        1: {"RANK": "0"},  # a launcher on the first node
        2: {"RANK": "0", "LOCAL_RANK": "0"},
        3: {"RANK": "1", "LOCAL_RANK": "1"},
        4: {"RANK": "1", "LOCAL_RANK": "1"},  # its worker
        5: {"RANK": "1", "LOCAL_RANK": "1"},  # a shell between
        6: {"RANK": "1", "LOCAL_RANK": "1"},
    }
    parents = {1: 0, 2: 1, 3: 1, 4: 3, 5: 3, 6: 5}
    monkeypatch.setattr(members, "variables", told.get)
    monkeypatch.setattr(members, "is_python", lambda pid: pid != 5)
    family = [Process(pid, parent=parent, started=pid) for pid, parent in parents.items()]
    assert members.ranks_of(family) == {0: 2, 1: 3}
    assert members.ranks_of([replace(family[0], pid=5)]) == {}
    assert members.first_of(family[4:], 5) == 6


def test_nodes_hear_of_each_other_and_a_picture_spans_them(tmp_path, monkeypatch):
    def node(host, rank):
        monkeypatch.setenv("SLURMD_NODENAME", host)
        monkeypatch.delenv("SLURM_PROCID", raising=False)
        return nodes.Nodes(tmp_path), Observed(rank)

    class Observed:
        def __init__(self, rank):
            edge = pages.edge(
                f"rank {rank}", "train.py:7 evaluate", "socket", "waits", outside=True
            )
            self.verdict = Verdict("STALLED", "socket", numbers={"rank": rank}, edges=(edge,),
                                   line="train.py:7 evaluate")  # fmt: skip
            self.evidence = Evidence(flights={rank: [{"seq": 4, "op": "all_reduce"}]})
            self.rank = rank

        def standing(self):
            return {self.rank: ("step 5", 9.0)}

    far, observed = node("b", 1)
    far.exchange(observed)
    near, observed = node("a", 0)
    near.exchange(observed)
    assert observed.evidence.flights.keys() == {0, 1}
    assert [n for n in observed.evidence.notes if "node b" in n and "train.py:7" in n]
    text = "waits in all_reduce for rank 1"
    edge = pages.edge("rank 0", "train.py:3 step", "collective", text)
    edges = near.spliced(Verdict("STALLED", edges=(edge,))).edges
    assert edges[0]["to"] == ["rank 1 on b"]
    assert [e["at"] for e in edges if e["from"] == "rank 1 on b"] == ["train.py:7 evaluate"]
    near.exchange(observed)  # what it heard is not said again as its own
    assert json.loads((tmp_path / "a" / "said.json").read_text())["flights"].keys() == {"0"}


@pytest.mark.slow
def test_two_ranks_under_torchrun_and_one_stands_in_its_users_code(started, tmp_path):
    """Found by the watcher at its line, and by whoever looks at the job from outside."""
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
              "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]  # fmt: skip
    script = [SUPPORT / "stranger_train.py", "--how", "stuck"]
    process = started("watch", "--folder", "seen", "--", sys.executable, "-m", *launch, *script)
    file = tmp_path / "seen" / "verdict.json"
    wait_for(process, file.is_file)
    found = verdict_in(tmp_path / "seen")
    assert found.kind in ("STALLED", "HANG") and found.numbers["where"] == "rank 1"
    assert "stranger_train.py" in found.line and found.line.endswith("evaluate")
    evidence = Evidence.from_dict(json.loads((tmp_path / "seen" / "evidence.json").read_text()))
    pids = {one.rank: one.pid for one in evidence.snapshots[-1].processes if one.rank is not None}
    seen, verdict = attach(pids[0], all_ranks=True, seconds=3)
    assert seen.ranks() == [0, 1] and verdict.line == found.line
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert wait_until_gone(pids.values()) == []
