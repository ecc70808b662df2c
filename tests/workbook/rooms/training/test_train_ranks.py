"""What ranks say of themselves, and who is named as the first to fail."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from whyhung.process import family
from workbook.rooms.training.ranks import accounted, first_failure, logged

STUCK = """
import ctypes, sys
from workbook.rooms.training import ranks as launch
launch.STUCK_S = 0.2
with launch.accounted(sys.argv[1], 0, lambda: print("told", flush=True)):
    print("here", flush=True)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second waits for ever, whatever signal comes, as a collective does
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""

MANY = """
import os, sys, threading, time
for _ in range(60):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
os.write(int(sys.argv[1]), b"r")
time.sleep(60)
"""
GONE = 2**22 + 1  # no process has so high a number


@pytest.fixture
def put(tmp_path):
    """Writes down how a rank stands."""

    def write(rank, state, **more):
        content = {"rank": rank, "pid": os.getpid(), "state": state, "time": float(rank), **more}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))

    return write


def test_ranks_that_work_or_ended_well_have_not_failed(tmp_path, put):
    put(0, "ok", pid=GONE)
    put(1, "running")
    assert first_failure(tmp_path, ranks=3) is None


def test_a_rank_that_is_gone_without_a_word_comes_before_those_who_miss_it(tmp_path, put):
    put(0, "exception", message="RuntimeError: Connection closed by peer")
    put(1, "terminated")
    put(2, "running", pid=GONE)
    found = first_failure(tmp_path, ranks=3)
    assert (found.rank, found.how) == (2, "killed")
    assert "gone without a word" in found.message
    assert "SIGKILL" in first_failure(tmp_path, 3, {0: 1, 2: -9}).message
    assert "exit code 3" in first_failure(tmp_path, 3, {2: 3}).message


@pytest.mark.processes
def test_a_rank_is_gone_from_the_moment_that_its_sockets_close(tmp_path, put):
    """The others notice a killed rank then, a little before it is a zombie with all its threads."""
    for _ in range(8):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-c", MANY, str(theirs.fileno())]
            child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
            theirs.close()
            assert ours.recv(1) == b"r"
            put(0, "running", pid=child.pid)
            assert first_failure(tmp_path, 1) is None
            child.kill()
            assert ours.recv(1) == b""
            found = first_failure(tmp_path, 1)
            child.wait()
        assert found is not None and found.how == "killed"


def test_of_exceptions_the_earliest_is_the_first(tmp_path, put):
    put(0, "exception", time=20.0, message="RuntimeError: Connection reset by peer")
    put(1, "bad input", time=10.0, message="no bytes", traceback="Traceback")
    put(2, "terminated", time=1.0)
    found = first_failure(tmp_path, ranks=3, exitcodes={0: 1, 1: 2, 2: -15})
    assert (found.rank, found.how, found.message) == (1, "bad input", "no bytes")
    put(0, "exception", time=5.0, message="RuntimeError: Connection reset by peer")
    assert first_failure(tmp_path, ranks=3).rank == 1  # who lost the other did not bring it about


def test_a_rank_that_was_asked_to_end_is_not_taken_for_killed(tmp_path, put):
    put(0, "running", pid=GONE)
    put(1, "exception", time=10.0, message="RuntimeError: this")
    assert first_failure(tmp_path, 2, {0: -signal.SIGTERM, 1: 1}).rank == 1


@pytest.mark.parametrize(
    ("error", "how", "message"),
    [
        (ValueError("T is\ntoo long"), "bad input", "T is too long"),
        (RuntimeError("no memory"), "exception", "RuntimeError: no memory"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt: "),
        (SystemExit(3), "exception", "SystemExit: 3"),
    ],
)
def test_a_rank_says_how_it_ended(tmp_path, error, how, message):
    told = []
    with pytest.raises(type(error)), accounted(tmp_path, 0, lambda: told.append(1)):
        assert first_failure(tmp_path, 1) is None
        raise error
    found = first_failure(tmp_path, 1)
    assert (found.how, found.message, told) == (how, message, [1])
    assert "raise error" in found.traceback


def test_a_rank_that_ends_well_says_so_and_leaves_signals_as_they_were(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with accounted(tmp_path, 0, pytest.fail):
        assert signal.getsignal(signal.SIGTERM) != before
    assert json.loads((tmp_path / "rank0.json").read_text())["state"] == "ok"
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "state", "code"),
    [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupted", 130)],
)
def test_a_rank_stuck_in_c_code_ends_when_it_is_asked_to(tmp_path, number, state, code):
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, str(tmp_path)],
        env=family.environment(os.environ, "cookie"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "here\n"
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=30) == code
        assert process.stdout.read() == "told\n"
    finally:
        process.kill()
        process.communicate()
    assert json.loads((tmp_path / "rank0.json").read_text())["state"] == state


def test_all_that_a_rank_prints_is_in_its_log_and_of_rank_0_on_the_terminal_too(tmp_path, capfd):
    for rank in (0, 1):
        with logged(tmp_path, rank, console=rank == 0):
            print(f"out {rank}")
            print(f"error {rank}", file=sys.stderr)
            os.write(2, b"from C\n")
        print("after")
    for rank in (0, 1):
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert log == f"out {rank}\nerror {rank}\nfrom C\n"
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("out 0\nafter\nafter\n", "error 0\n")
