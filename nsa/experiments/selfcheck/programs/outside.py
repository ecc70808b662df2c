"""Healthy programs that wait for something outside: a command, a server, a file, a scheduler."""

import asyncio
import contextlib
import fcntl
import http.server
import multiprocessing
import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import torch

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.common import SCALE, busy, outside, pause, training
from nsa.experiments.selfcheck.programs.registry import program


@program("healthy", at=2, forms=3, seconds=(14, 20))
def shell_command(form):
    """The output of a command that waits (0), that computes (1), of a pipeline (2)."""
    command = [
        f"sleep {14 * SCALE}; echo 0.31",
        f"awk 'BEGIN {{for (i = 0; i < {common.sized(1.5e8)}; i++) x += i % 7; print x}}'",
        f"(sleep {14 * SCALE}; echo 27.4) | tr . , | cat",
    ][form]
    subprocess.check_output(command, shell=True)


@program("healthy", at=3, seconds=(14, 14))
def upload_by_command(form):
    """A checkpoint goes to a command: we look now and then (0); we write to it and it is slow."""
    if form == 0:
        with subprocess.Popen(["sleep", str(14 * SCALE)]) as upload:
            while upload.poll() is None:
                pause(0.5)
    else:
        slow = f"sleep {14 * SCALE}; cat >/dev/null"
        with subprocess.Popen(slow, shell=True, stdin=subprocess.PIPE) as upload:
            upload.stdin.write(bytes(2**22))


def serve(listening, seconds):
    """Answers every request, late."""
    while True:
        connection, _ = listening.accept()
        with connection:
            connection.recv(2**16)
            pause(seconds)
            connection.sendall(b"stored\n")


def late_server(seconds, process):
    """A server of this machine, in a process or a thread; its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    kind = multiprocessing.Process if process else threading.Thread
    kind(target=serve, args=(listening, seconds), daemon=True).start()
    return listening.getsockname()


@program("healthy", at=2, seconds=(14, 14))
def upload_by_socket(form):
    """A server answers after 14 s; it is another process (0), a thread of ours (1)."""
    address = late_server(14, process=form == 0)
    with socket.create_connection(address) as connection:
        connection.sendall(b"weights")
        connection.recv(100)


class Overloaded(http.server.BaseHTTPRequestHandler):
    """503 until the fourth request."""

    asked = 0

    def do_GET(self):
        Overloaded.asked += 1
        self.send_response(503 if Overloaded.asked % 4 else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@program("healthy", at=3, seconds=(8, 14))
def http_back_off(form):
    """Retries with growing pauses: plain sleeps (0), a server that says 503 three times (1)."""
    if form == 0:
        for attempt in range(4):
            pause(2**attempt)
    else:
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
            threading.Thread(target=server.serve_forever).start()
            download(f"http://127.0.0.1:{server.server_port}/tokenizer.json")
            server.shutdown()


def download(address):
    for attempt in range(6):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(address) as answer:
            return answer.read()
        threading.Event().wait(2 * 2**attempt * SCALE)


@program("healthy", seconds=(14, 15))
def checkpoint_to_slow_disk(form):
    """Pieces with fsync on a slow disk (0); saved by a thread that the next save waits for (1)."""
    model, saving = common.tiny()[0], None
    path = common.scratch() / "model.pt"
    for i, loss in training():
        if i in (2, 3) and form == 1:
            if saving:
                saving.join()
            saving = threading.Thread(target=save_slowly, args=(model, path))
            saving.start()
        if i == 2 and form == 0:
            save_slowly(model, path)
        yield loss


def save_slowly(model, path):
    torch.save(model.state_dict(), path)
    with open(path, "ab", buffering=0) as file:
        for _ in range(20):
            file.write(bytes(2**14))
            os.fsync(file.fileno())
            pause(0.7)


@program("healthy", at=1, seconds=(14, 16))
def lock_file_polling(form):
    """Waits until another job removes its lock file: exists (0), exclusive creation (1)."""
    lock = common.scratch() / "download.lock"
    lock.touch()
    outside(f"sleep {14 * SCALE}; rm {lock}")
    while form == 0 and lock.exists():
        pause(1)
    while form == 1:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        pause(random.uniform(0.05, 1.5))


@program("healthy", at=2, seconds=(14, 14))
def file_lock_held(form):
    """Another process holds a cache's flock for 14 s: a child (0), somebody else's (1)."""
    lock = common.scratch() / "cache.lock"
    hold = f"flock -F {lock} sleep {15 * SCALE}"
    outside(hold) if form else subprocess.Popen(hold.split())
    pause(1)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_SH if form else fcntl.LOCK_EX)


@program("healthy", at=2, seconds=(8, 15))
def slow_producer(form):
    """Lines of a command that writes one now and then: iterated (0), by select (1)."""
    pace = f"for k in 1 2 3; do sleep {(7 if form else 5) * SCALE}; echo $k; done"
    with subprocess.Popen(pace, shell=True, stdout=subprocess.PIPE) as producer:
        for _ in producer.stdout if form == 0 else chunks(producer.stdout):
            pass


def chunks(pipe):
    while select.select([pipe], [], []) and (chunk := os.read(pipe.fileno(), 2**16)):
        yield chunk


@program("healthy", at=3, seconds=(14, 14))
def rate_limiter(form):
    """An interface that may be asked so often: short sleeps (0), one wait until it is time (1)."""
    if form == 0:
        until = time.monotonic() + 14 * SCALE
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.25))
    else:
        gate = threading.Event()
        threading.Timer(14 * SCALE, gate.set).start()
        gate.wait()


@program("healthy", at=0, seconds=(14, 18))
def other_jobs_file(form):
    """Another job's output: until it is there (0), until its size rests (1)."""
    path = common.scratch() / "tokens.bin"
    outside(f"sleep {13 * SCALE}; echo some >{path}; sleep {SCALE}; echo more >>{path}")
    size = -1
    while not path.exists() or (form == 1 and size != path.stat().st_size):
        size = path.stat().st_size if path.exists() else -1
        pause(2)


@program("healthy", seconds=(14, 14))
def signal_checkpoint(form):
    """The scheduler's SIGUSR1 saves a checkpoint in its handler: computes (0), waits (1)."""
    before = signal.signal(signal.SIGUSR1, lambda *_: (busy, pause)[form](14))
    for i, loss in training():
        if i == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        yield loss
    signal.signal(signal.SIGUSR1, before)


@program("healthy", seconds=(12, 13))
def preempted(form):
    """A scheduler stops us for 12 s and lets us go on: alone (0), with a pool's workers (1)."""
    resumed = common.scratch() / "resumed"
    with multiprocessing.Pool(2) if form else contextlib.nullcontext() as pool:
        for i, loss in training():
            if i == 2:
                us = f"{{me}} {' '.join(str(c.pid) for c in multiprocessing.active_children())}"
                stop = f"kill -STOP {us}; sleep {12 * SCALE}; kill -CONT {us}"
                outside(f"{stop}; touch {resumed}")
            while i == 2 and not resumed.exists():
                pool.map(pause, [1, 1]) if form else pause(0.5)
            yield loss


@program("healthy", seconds=(14, 14))
def asyncio_in_a_thread(form):
    """Main waits for a coroutine in a thread's event loop: a sleep (0), a late server (1)."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for i, loss in training():
        if i == 2:
            work = ask(*late_server(14, process=False)) if form else asyncio.sleep(14 * SCALE)
            asyncio.run_coroutine_threadsafe(work, loop).result()
        yield loss
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


async def ask(host, port):
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"evaluate")
    await reader.readline()
    writer.close()


@program("healthy", seconds=(14, 14))
def asyncio_in_main(form):
    """An evaluation of awaits: sleeps (0), a command and a thread (1)."""
    for i, loss in training():
        if i == 4:
            asyncio.run(judge_answers(form))
        yield loss


async def judge_answers(form):
    if form == 0:
        await asyncio.gather(*(asyncio.sleep(s * SCALE) for s in (1, 3, 14)))
    else:
        command = await asyncio.create_subprocess_exec("sleep", str(14 * SCALE))
        await asyncio.gather(command.wait(), asyncio.to_thread(pause, 9))
