"""The stacks of a training that goes on: asked for at any moment, at no danger to it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nsa.lab.observers.stacks_on_signal import stacks, stacks_on_signal
from nsa.lab.watch import looks

STUCK = """
import os, signal, sys, threading, time, torch
from nsa.lab.observers.stacks_on_signal import stacks_on_signal

class Stuck(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        loop_that_does_not_end()

def loop_that_does_not_end():
    os.kill(os.getpid(), signal.SIGUSR1)
    while not os.path.getsize(sys.argv[1]):
        time.sleep(0.01)
    sys.stdout.flush()
    os._exit(0)

threading.Thread(target=threading.Event().wait, name="other", daemon=True).start()
with stacks_on_signal(sys.argv[1]):
    Stuck.apply(torch.ones(1, requires_grad=True)).sum().backward()
"""
NATIVE = """
import os, signal, sys, threading, time, torch
from nsa.lab.observers.stacks_on_signal import stacks_on_signal

torch.set_num_threads(1)
a, ended, written = torch.randn(2500, 2500), [], []

def ask():
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGUSR1)
    while not os.path.getsize(sys.argv[1]) and not ended:
        time.sleep(0.01)
    written.append(not ended)

with stacks_on_signal(sys.argv[1]):
    asking = threading.Thread(target=ask)
    asking.start()
    torch.linalg.svdvals(a)
    ended.append(True)
    asking.join()
print(written)
"""
BUSY = """
import os, signal, sys, threading, time
from nsa.lab.observers.stacks_on_signal import stacks_on_signal

def deep(n):
    return deep(n - 1) if n else 0

def work():
    while True:
        deep(12)
        deep(3)

threading.Thread(target=work, daemon=True).start()
with stacks_on_signal(sys.argv[1]):
    size = 0
    for _ in range(400):
        os.kill(os.getpid(), signal.SIGUSR1)
        while os.path.getsize(sys.argv[1]) == size:
            time.sleep(0)
        size = os.path.getsize(sys.argv[1])
print("ended")
"""


def ran(code, file, seconds=60):
    return subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=seconds
    )


@pytest.mark.processes
@pytest.mark.full
def test_sigusr1_writes_the_stack_of_every_thread_from_inside_a_backward(tmp_path):
    done = ran(STUCK, tmp_path / "stacks.txt")
    assert done.returncode == 0, done.stderr
    found = looks.parse((tmp_path / "stacks.txt").read_text(), 0)
    assert [thread["name"] for thread in found] == ["other", "MainThread"]
    assert any("loop_that_does_not_end" in frame for frame in found[-1]["frames"])


@pytest.mark.processes
@pytest.mark.full
def test_native_code_is_shown_while_it_runs(tmp_path):
    done = ran(NATIVE, tmp_path / "stacks.txt")
    assert (done.returncode, done.stdout) == (0, "[True]\n"), done.stderr
    main = looks.parse((tmp_path / "stacks.txt").read_text(), 0)[-1]
    assert main["name"] == "MainThread"


@pytest.mark.processes
@pytest.mark.full
def test_hundreds_of_dumps_do_not_end_a_process_whose_threads_work(tmp_path):
    done = ran(BUSY, tmp_path / "stacks.txt", 120)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert (tmp_path / "stacks.txt").read_text().count("[MainThread]") >= 400


def test_afterwards_the_signal_is_what_it_was_and_who_was_woken_before_still_is(tmp_path):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    told = []
    old = signal.signal(signal.SIGUSR1, lambda number, _: told.append(number))
    woken = signal.set_wakeup_fd(writer)
    threads = threading.active_count()
    try:
        with stacks_on_signal(tmp_path / "stacks.txt"):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(reader, 9) == bytes([signal.SIGUSR1])
            assert not told
        assert "in test_afterwards" in (tmp_path / "stacks.txt").read_text()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(reader, 9) == bytes([signal.SIGUSR1]) and told == [signal.SIGUSR1]
        assert threading.active_count() == threads
    finally:
        assert signal.set_wakeup_fd(woken) == writer
        signal.signal(signal.SIGUSR1, old)
        os.close(reader)
        os.close(writer)


def test_afterwards_a_signal_that_nobody_handled_is_not_handled():
    old = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with stacks_on_signal(sys.stderr):
            assert signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_another_signal_writes_nothing(tmp_path):
    old = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with stacks_on_signal(tmp_path / "stacks.txt"):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.1)
        assert (tmp_path / "stacks.txt").read_text() == ""
    finally:
        signal.signal(signal.SIGUSR2, old)


def test_a_thread_is_refused(tmp_path):
    refused = []

    def within():
        with pytest.raises(ValueError, match="main thread"), stacks_on_signal(tmp_path / "s"):
            pass
        refused.append(True)

    thread = threading.Thread(target=within)
    thread.start()
    thread.join()
    assert refused == [True]


def test_who_asks_is_left_out():
    found = []
    thread = threading.Thread(target=lambda: found.append(stacks()), name="asking")
    thread.start()
    thread.join()
    assert "[MainThread]" in found[0] and "[asking]" not in found[0]
    assert Path(__file__).name in found[0]
