"""Programs that wait for something outside that never comes, or compute without an end."""

import ctypes
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import torch

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.registry import program


@program("hang", at=2, due="HANG:pipe or STALLED:pipe", certifiable=True)
def full_pipe(form):
    """A command fills stderr, which nobody reads; we wait for it (0), or read its stdout (1)."""
    much = "head -c 1000000 /dev/zero >&2; echo done"
    command = subprocess.Popen(much, shell=True, stdout=-1, stderr=subprocess.PIPE)
    command.wait() if form == 0 else command.stdout.read()


@program("hang", at=2, due="HANG:pipe or STALLED:pipe", certifiable=True)
def own_end_of_a_pipe(form):
    """We read to the end of a pipe of which we hold the other end: a child's (0), a fifo's (1)."""
    if form == 0:
        reading, writing = os.pipe()
        subprocess.run(["echo", "0.5"], stdout=writing, check=True)
    else:
        fifo = common.scratch() / "scores"
        os.mkfifo(fifo)
        writing = os.open(fifo, os.O_RDWR)
        reading = os.open(fifo, os.O_RDONLY)
        os.write(writing, b"0.5")
    while os.read(reading, 100):
        pass


@program("hang", at=2, due="STALLED:socket", line="fetch")
def silent_server(form):
    """A server takes the connection and never answers: asked by socket (0), by urllib (1)."""
    listening = socket.create_server(("127.0.0.1", 0))
    multiprocessing.Process(target=say_nothing, args=(listening, os.getpid()), daemon=True).start()
    fetch(listening.getsockname()[1], form)


def say_nothing(listening, client):
    connection = listening.accept()
    while connection and os.getppid() == client:
        time.sleep(1)


def fetch(port, form):
    if form == 1:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/labels.json")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"labels?\n")
        connection.recv(4096)


@program("hang", at=2, due="STALLED:flock")
def file_lock_for_ever(form):
    """A process that is no child of ours holds a lock on a file: flock (0), POSIX's (1)."""
    path = common.scratch() / "cache.lock"
    hold = f"import fcntl; f = open('{path}', 'w'); fcntl.{('flock', 'lockf')[form]}(f, 2); "
    hold += f"open('{path}.held', 'w'); import os, time; me = {os.getpid()}\n"
    hold += "while os.path.exists(f'/proc/{me}'): time.sleep(1)"
    common.outside(f'{sys.executable} -c "{hold}"')
    while not os.path.exists(f"{path}.held"):
        time.sleep(0.1)
    with open(path, "r+") as file:
        (fcntl.flock, fcntl.lockf)[form](file, fcntl.LOCK_EX)


@program("hang", at=1, due="STALLED:sleep or STALLED:file or STALLED")
def file_that_never_comes(form):
    """Looks for another job's file for ever: each second (0), ten times a second, many files."""
    path = common.scratch() / "tokens.bin"
    while not path.exists() if form == 0 else len(list(path.parent.glob("*.bin"))) < 4:
        time.sleep(1 if form == 0 else 0.1)


@program("hang", at=2, due="STALLED:terminal or STALLED:pipe or STALLED")
def question_to_nobody(form):
    """Asks and reads stdin, which is silent: input (0), a breakpoint that was left in (1)."""
    silent = f"while [ -d /proc/{os.getpid()} ]; do sleep 1; done"
    asker = subprocess.Popen(["sh", "-c", silent], stdout=subprocess.PIPE)
    os.dup2(asker.stdout.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if form == 0:
        input("Overwrite the checkpoint? [y/N] ")
    else:
        breakpoint()


@program("hang", at=2, due="STALLED:stopped")
def stopped(form):
    """A signal stops us (0) or a pool's worker (1), and nobody sends the other one."""
    if form == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    with multiprocessing.Pool(1) as pool:
        pool.map(signal.raise_signal, [signal.SIGSTOP] * form)


@program("hang", at=2, due="HANG:loop or STALLED:loop", line="wait_until")
def loop_without_change(form):
    """Asks again and again for what nobody will change: an attribute (0), a list's length (1)."""
    state = {"ready": False, "seen": []}
    wait_until(lambda: state["ready"] if form == 0 else len(state["seen"]) > 2)


def wait_until(condition):
    while not condition():
        pass


@program("hang", at=2, due="SLOW or STALLED", line="search")
def search_without_end(form):
    """A search that never meets its aim: in plain Python (0), in torch (1)."""
    search(form)


def search(form):
    rate, point = 1.0, torch.ones(16)
    while rate > 0 or point.norm() > 0:
        if form == 0:
            rate = rate * 1.0000001 % 7.3 + 1e-9
        else:
            point = point.roll(1) * 0.5 + torch.rand(16)


@program("hang", at=2, due="HANG:gil or STALLED:gil or SLOW")
def interpreter_held(form):
    """A call into C keeps the interpreter for ever: an expression (0), a call that waits (1)."""
    if form == 0:
        re.search(r"(x+x+)+y", "x" * 90)
    else:
        ctypes.PyDLL(None).pause()
