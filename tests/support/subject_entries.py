"""Subjects that tests/lab/process/test_runner.py tries; each comes to its end in its own way."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from nsa.lab.process.subject import Steps, join


def at_step(settings, fault):
    """Healthy steps, and `fault` in the one that the settings name."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)

    def step(i):
        if i == settings.get("at", 1):
            fault(settings)
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        return loss

    return Steps(step, model)


def lock(settings, progress):
    def taken_twice(settings):
        held = threading.Lock()
        held.acquire()
        held.acquire()

    return at_step(settings, taken_twice)


def visible(settings, progress):
    def seen(settings):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == settings["wanted"]

    return at_step(settings, seen)


def stop(settings, progress):
    return at_step(settings, lambda _: os.kill(os.getpid(), signal.SIGSTOP))


def gil(settings, progress):
    return at_step(settings, lambda _: re.match("(a+)+$", "a" * 60 + "b"))


def exception(settings, progress):
    def fail(settings):
        raise KeyError("the planted one")

    return at_step(settings, fail)


def leave(settings, progress):
    return at_step(settings, lambda settings: os._exit(settings["code"]))


def kill(settings, progress):
    return at_step(settings, lambda settings: os.kill(os.getpid(), settings["signal"]))


def address_space(settings, progress):
    import resource

    def fill(settings):
        limit = 2**30 + int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        bytearray(2**32)

    return at_step(settings, fill)


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


def native(settings, progress):
    """One operation that takes seconds, in C and without the GIL."""
    torch.set_num_threads(1)
    matrix = torch.randn(settings["size"], settings["size"])
    return at_step(settings, lambda _: torch.linalg.eigvals(matrix))


def unlike(settings, progress):
    """Stuck when it is tried for the first time."""

    def once(settings):
        marker = Path(settings["pids"])
        if not marker.exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            marker.write_text(str(os.getpid()))
            threading.Event().wait()

    return at_step(settings, once)


def fork(settings, progress):
    """Leaves a process in a session of its own behind, one that ignores SIGTERM, and returns."""

    def start(settings):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        other = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        forked = os.fork()
        if forked == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(60)
            os._exit(0)
        with open(settings["pids"], "w") as file:
            file.write(f"{other.pid} {forked}")

    return at_step(settings, start)


def ignores_sigterm(settings, progress):
    def ignore(settings):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(settings["pids"], "w") as file:
            file.write(str(os.getpid()))
        threading.Event().wait()

    return at_step(settings, ignore)


def skipped_collective(settings, progress):
    import torch.distributed as dist

    rank, _ = join()

    def step(i):
        if i == 0 or rank == 0:
            dist.all_reduce(torch.ones(4))
        else:
            time.sleep(60)

    return Steps(step)


def rank_fails(settings, progress):
    import torch.distributed as dist

    rank, _ = join()

    def step(i):
        dist.all_reduce(torch.ones(4))
        if rank == 1 and i == 1:
            raise ArithmeticError("rank 1 cannot count")
        return float(i)

    return Steps(step)


def no_steps(settings, progress):
    return object()


def each_waits(settings, progress):
    """Says in a file's name who it is, and waits."""

    def wait(settings):
        Path(settings["pids"], f"pid-{os.getpid()}").touch()
        threading.Event().wait()

    return at_step(settings, wait)


def variable(settings, progress):
    return Steps(lambda i: float(os.environ.get(settings["name"]) == "yes"))
