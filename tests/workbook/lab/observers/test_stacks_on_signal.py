"""The stacks of a training that goes on: asked for at any moment, at no danger to it."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workbook.lab.observers.stacks_on_signal import stacks, stacks_on_signal

IMPORTS = """
import os, signal, sys, threading, time, torch
from workbook.lab.observers.stacks_on_signal import stacks_on_signal
"""
STUCK = """
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


@pytest.fixture
def written(tmp_path):
    return tmp_path / "stacks.txt"


def ran(code, file, said=""):
    """The stacks in the child's file, one for each thread."""
    command = [sys.executable, "-c", IMPORTS + code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
    return file.read_text().strip().split("\n\n")


@pytest.fixture
def handled():
    """Handles a signal for the length of a test."""
    before = {}

    def handle(number, handler):
        before.setdefault(number, signal.signal(number, handler))

    yield handle
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.processes
@pytest.mark.full
def test_sigusr1_writes_the_stack_of_every_thread_from_inside_a_backward(written):
    other, main = ran(STUCK, written)
    assert "[other]" in other and "[MainThread]" in main and "in loop_that_does_not_end" in main


@pytest.mark.processes
@pytest.mark.full
def test_native_code_is_shown_while_it_runs(written):
    assert "[MainThread]" in ran(NATIVE, written, "[True]\n")[-1]


@pytest.mark.processes
@pytest.mark.full
def test_hundreds_of_dumps_do_not_end_a_process_whose_threads_work(written):
    ran(BUSY, written, "ended\n")
    assert written.read_text().count("[MainThread]") >= 400


def test_afterwards_the_signal_is_what_it_was_and_who_was_woken_before_still_is(written, handled):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    told = []
    handled(signal.SIGUSR1, lambda number, _: told.append(number))
    woken = signal.set_wakeup_fd(writer)
    threads = threading.active_count()
    try:
        with stacks_on_signal(written):
            os.kill(os.getpid(), signal.SIGUSR1)
            assert os.read(reader, 9) == bytes([signal.SIGUSR1])
            assert not told
        assert "in test_afterwards" in written.read_text()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(reader, 9) == bytes([signal.SIGUSR1]) and told == [signal.SIGUSR1]
        assert threading.active_count() == threads
    finally:
        assert signal.set_wakeup_fd(woken) == writer
        os.close(reader)
        os.close(writer)


def test_afterwards_a_signal_that_nobody_handled_is_not_handled(handled):
    handled(signal.SIGUSR1, signal.SIG_DFL)
    with stacks_on_signal(sys.stderr):
        assert signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_another_signal_writes_nothing(written, handled):
    handled(signal.SIGUSR2, lambda *_: None)
    with stacks_on_signal(written):
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.1)
    assert written.read_text() == ""


def test_a_thread_is_refused_and_who_asks_is_left_out(written):
    found = []

    def within():
        with pytest.raises(ValueError, match="main thread"), stacks_on_signal(written):
            pass
        found.append(stacks())

    thread = threading.Thread(target=within, name="asking")
    thread.start()
    thread.join()
    assert "[MainThread]" in found[0] and "[asking]" not in found[0]
    assert Path(__file__).name in found[0]
