"""Subjects of tests/whyhung/process/test_runner.py; each comes to its end in its own way."""

import functools
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from whyhung.process.subject import Steps, join


def at_step(fault):
    """A subject of healthy steps, but for `fault(settings)` in the one that the settings name."""

    @functools.wraps(fault)
    def subject(settings, progress):
        torch.set_num_threads(1)
        model = torch.nn.Linear(4, 4)

        def step(i):
            if i == settings.get("at", 1):
                fault(settings)
            loss = model(torch.ones(2, 4)).pow(2).mean()
            loss.backward()
            return loss

        return Steps(step, model)

    del subject.__wrapped__  # it takes the progress too
    return subject


@at_step
def lock(settings):
    held = threading.Lock()
    held.acquire()
    held.acquire()


@at_step
def visible(settings):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == settings["wanted"]


@at_step
def stop(settings):
    os.kill(os.getpid(), signal.SIGSTOP)


@at_step
def gil(settings):
    re.match("(a+)+$", "a" * 60 + "b")


@at_step
def exception(settings):
    raise KeyError("the planted one")


@at_step
def leave(settings):
    os._exit(settings["code"])


@at_step
def kill(settings):
    os.kill(os.getpid(), settings["signal"])


@at_step
def address_space(settings):
    limit = 2**30 + int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(2**32)


def slow(settings, progress):
    """A loop of many small operations: 100 % of a core, one step for long."""
    torch.set_num_threads(1)
    x = torch.ones(4, requires_grad=True)

    def step(i):
        y = x
        for _ in range(settings["operations"]):
            y = y * 1.0001
        y.sum().backward()

    return Steps(step)


@at_step
def native(settings):
    """One operation that takes seconds, in C and without the GIL."""
    torch.linalg.eigvals(torch.randn(settings["size"], settings["size"]))


@at_step
def unlike(settings):
    """Stuck when it is tried for the first time."""
    marker = Path(settings["pids"])
    if not marker.exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        marker.write_text(str(os.getpid()))
        threading.Event().wait()


@at_step
def fork(settings):
    """Leaves a process in a session of its own behind, one that ignores SIGTERM, and returns."""
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    forked = os.fork()
    if forked == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
        os._exit(0)
    Path(settings["pids"]).write_text(f"{other.pid} {forked}")


@at_step
def ignores_sigterm(settings):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(settings["pids"]).write_text(str(os.getpid()))
    threading.Event().wait()


def skipped_collective(settings, progress):
    rank, _ = join()

    def step(i):
        if i == 0 or rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            threading.Event().wait()

    return Steps(step)


def rank_fails(settings, progress):
    rank, _ = join()

    def step(i):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and i == 1:
            raise ArithmeticError("rank 1 cannot count")
        return float(i)

    return Steps(step)


def no_steps(settings, progress):
    return object()


@at_step
def each_waits(settings):
    """Says in a file's name who it is, and waits."""
    Path(settings["pids"], f"pid-{os.getpid()}").touch()
    threading.Event().wait()


def variable(settings, progress):
    return Steps(lambda i: float(os.environ.get(settings["name"]) == "yes"))
