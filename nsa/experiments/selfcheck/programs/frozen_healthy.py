"""Healthy programs of the second batch, on one rank: other users, other libraries' habits."""

import asyncio
import collections
import contextlib
import importlib
import multiprocessing
import os
import pickle
import sched
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tarfile
import threading
import time
from multiprocessing import connection, shared_memory

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.common import SCALE, busy, outside, pause, sized, spend
from nsa.experiments.selfcheck.programs.registry import program

_FROZEN = {"group": "healthy", "batch": "frozen"}


@program(seconds=(12, 25), **_FROZEN)
def one_long_optimizer_step(form):
    """LBFGS calls its closure for 14 s (0); thousands of micro-batches before one step (1)."""
    model, opt, batch = common.tiny()
    for i in range(6):
        for _ in spend(14) if i == 2 and form == 1 else ():
            torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        if i == 2 and form == 0:
            fit(model, batch)
        yield common.train_step(model, opt, batch)


def fit(model, batch):
    endless = {"max_eval": 10**9, "tolerance_grad": -1.0, "tolerance_change": -1.0}
    opt = torch.optim.LBFGS(model.parameters(), 1e-3, sized(2e4), **endless)

    def closure():
        opt.zero_grad()
        loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
        loss.backward()
        return loss

    opt.step(closure)


class Stream(IterableDataset):
    """Fills a buffer from slow storage before it gives the first sample."""

    def __iter__(self):
        buffer = collections.deque()
        for k in range(64):
            pause(14 / 40 if k < 40 else 0)
            buffer.append(torch.full((16,), k / 64))
            if len(buffer) > 40:
                yield buffer.popleft(), torch.zeros(1)
        yield from ((inputs, torch.zeros(1)) for inputs in buffer)


@program(steps=6, seconds=(14, 14), **_FROZEN)
def shuffle_buffer(form):
    """A stream's shuffle buffer fills up for 14 s: here (0), in a worker (1)."""
    model, opt, _ = common.tiny()
    loader = iter(DataLoader(Stream(), 4, num_workers=form, pin_memory=False))
    for _ in range(6):
        yield common.train_step(model, opt, next(loader))


@program(seconds=(12, 14), **_FROZEN)
def workers_prepare_their_data(form):
    """worker_init_fn fetches with a command (0), reads a tar of many members again and again."""
    shard = common.scratch() / "shard.tar"
    with tarfile.open(shard, "w") as packed:
        packed.add(os.path.dirname(torch.__file__) + "/optim", "optim")

    def prepare(worker):
        if form == 0:
            subprocess.run(["sleep", str(14 * SCALE)], check=True)
        for _ in spend(13) if form else ():
            with tarfile.open(shard) as packed:
                [packed.extractfile(member).read() for member in packed if member.isfile()]

    model, opt, _ = common.tiny()
    data = [(torch.full((16,), k / 24), torch.zeros(1)) for k in range(24)]
    for batch in DataLoader(data, 4, num_workers=2, worker_init_fn=prepare, timeout=300):
        yield common.train_step(model, opt, batch)


@program(at=2, seconds=(14, 15), **_FROZEN)
def fifo_opened_late(form):
    """Somebody opens a fifo for writing after 14 s: open waits (0), we open it and poll (1)."""
    fifo = common.scratch() / "scores"
    os.mkfifo(fifo)
    outside(f"sleep {14 * SCALE}; [ -p {fifo} ] && timeout 9 sh -c 'echo 0.5 >{fifo}'")
    with open(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK) if form else fifo) as scores:
        if form == 1:
            polled = select.poll()
            polled.register(scores, select.POLLIN)
            while not polled.poll(1000):
                pass
        assert float(scores.readline()) == 0.5


@program(seconds=(14, 14), **_FROZEN)
def model_lock_held(form):
    """A checkpoint's thread has the model's lock, which each step takes: copies (0), writes (1)."""
    lock, held = threading.Lock(), threading.Event()

    def checkpoint():
        with lock:
            held.set()
            (busy, pause)[form](14)

    for i, loss in common.training():
        if i == 2:
            threading.Thread(target=checkpoint).start()
            held.wait()
        with lock:
            yield loss


def meet(barrier, seconds, child):
    common.end_with_parent() if child else None
    pause(seconds)
    barrier.wait()


@program(at=2, seconds=(14, 14), **_FROZEN)
def barrier_with_a_late_one(form):
    """Three augmenters meet, one is late: threads (0), processes (1)."""
    kinds = (
        (threading.Barrier, threading.Thread),
        (multiprocessing.Barrier, multiprocessing.Process),
    )
    barrier = kinds[form][0](3)
    for seconds in (0, 14):
        kinds[form][1](target=meet, args=(barrier, seconds, form)).start()
    barrier.wait()


def evaluate_into(answers, lock):
    with lock:
        answers.put("started")
        pause(14)
        answers.put(0.7)


@program(at=3, seconds=(14, 14), **_FROZEN)
def manager_proxies(form):
    """A Manager between us and an evaluator: its queue's answer is late (0), its lock held (1)."""
    with common.manager() as manager:
        answers, lock = manager.Queue(), manager.Lock()
        evaluator = multiprocessing.Process(target=evaluate_into, args=(answers, lock))
        evaluator.start()
        answers.get()
        with lock if form else contextlib.nullcontext():
            answers.get()
        evaluator.join()


@program(at=2, seconds=(14, 16), **_FROZEN)
def database_locked(form):
    """Another job's transaction keeps the results' database: a long timeout (0), retries (1)."""
    path = common.scratch() / "runs.db"
    sqlite3.connect(path).execute("create table runs (loss)").connection.close()
    hold = f"import sqlite3, time; c = sqlite3.connect('{path}', isolation_level=None); "
    hold += f"c.execute('begin exclusive'); open('{path}.held', 'w'); time.sleep({14 * SCALE})"
    outside(f'{sys.executable} -c "{hold}"')
    while not os.path.exists(f"{path}.held"):
        time.sleep(0.05)
    while True:
        with contextlib.suppress(sqlite3.OperationalError):
            with sqlite3.connect(path, timeout=(90, 0.5)[form]) as database:
                database.execute("insert into runs values (0.5)")
            return database.close()
        pause(1)


@program(at=2, seconds=(14, 14), **_FROZEN)
def forked_snapshot(form):
    """A fork writes the checkpoint; we wait by waitpid (0), by a descriptor of it (1)."""
    state = common.tiny()[0].state_dict()
    if not (child := os.fork()):
        pause(14)
        pickle.dumps({name: value.tolist() for name, value in state.items()})
        os._exit(0)
    if form == 1:
        watched = os.pidfd_open(child)
        select.select([watched], [], [])
        os.close(watched)
    os.waitpid(child, 0)


@program(at=3, seconds=(14, 16), **_FROZEN)
def save_through_a_command(form):
    """A slow compressor: torch.save into its pipe (0), communicate with it (1)."""
    piece = "[ $(head -c 65536 | wc -c) -gt 0 ]"
    slow = [f"while {piece}; do sleep {0.2 * SCALE}; done", f"sleep {14 * SCALE}; wc -c"][form]
    with subprocess.Popen(slow, shell=True, stdin=-1, stdout=-1) as command:
        weights = torch.ones(2**20 + 2**17)
        if form == 0:
            torch.save(weights, command.stdin)
        else:
            command.communicate(weights.numpy().tobytes())


@program(at=3, seconds=(13, 16), **_FROZEN)
def checkpoint_rotation(form):
    """Old checkpoints of many files are copied and removed (0); a slow mount is flushed (1)."""
    folder = common.scratch()
    tokens = np.memmap(folder / "tokens.bin", dtype=np.uint8, mode="w+", shape=2**20)
    (folder / "step0").mkdir()
    for k in range(200):
        (folder / "step0" / f"{k}.pt").write_bytes(bytes(4096))
    for k in spend(13) if form == 0 else range(20):
        if form == 0:
            shutil.copytree(folder / "step0", folder / f"step{k + 1}")
            shutil.rmtree(folder / f"step{k + 1}")
        else:
            tokens[k * 4096 :][:4096] = k
            tokens.flush()
            pause(0.7)


def fill(name):
    pause(14)
    memory = shared_memory.SharedMemory(name)
    memory.buf[0] = 1
    memory.close()


@program(at=2, seconds=(14, 15), **_FROZEN)
def shared_memory_polled(form):
    """A feeder writes a flag into shared memory after 14 s: we spin with yields (0), we nap (1)."""
    memory = shared_memory.SharedMemory(create=True, size=64)
    feeder = multiprocessing.Process(target=fill, args=(memory.name,))
    feeder.start()
    while not memory.buf[0]:
        time.sleep(0.01 * form)
    feeder.join()
    memory.close()
    memory.unlink()


@program(at=1, seconds=(14, 14), **_FROZEN)
def slow_plugin(form):
    """A plugin asks its licence server while it is imported: by us (0), by a thread first (1)."""
    folder = common.scratch()
    (folder / "plugin_with_licence.py").write_text(f"import time\ntime.sleep({14 * SCALE})\n")
    sys.path.insert(0, str(folder))
    sys.modules.pop("plugin_with_licence", None)
    importlib.invalidate_caches()
    if form == 1:
        threading.Thread(target=importlib.import_module, args=("plugin_with_licence",)).start()
        pause(1)
    importlib.import_module("plugin_with_licence")
    sys.path.remove(str(folder))


def service(ours, slow_start):
    common.end_with_parent()
    pause(14 * slow_start)
    ours.sendall(b"ready\n")
    with ours.makefile("rw") as lines:
        for line in lines:
            if line == "finish\n":
                pause(14 * (not slow_start))
                lines.write("synced\n")
                return


@program(seconds=(14, 14), **_FROZEN)
def tracking_service(form):
    """A tracker's process behind a socket: slow at its start (0), at the end (1)."""
    ours, theirs = socket.socketpair()
    tracker = multiprocessing.Process(target=service, args=(theirs, form == 0), daemon=True)
    tracker.start()
    with ours, ours.makefile("rw") as lines:
        lines.readline()
        for i, loss in common.training():
            print(f"loss {loss:.4f}" if i < 5 else "finish", file=lines, flush=True)
            if i == 5:
                lines.readline()
                tracker.join()
            yield loss


def act(pipe, weights, seconds):
    common.end_with_parent()
    for order in iter(pipe.recv, None):
        pause(seconds * (order == 2))
        pipe.send((order, float(weights.sum())))


@program(seconds=(14, 14), **_FROZEN)
def actors_and_learner(form):
    """Actors with shared weights play; one is late: whichever is ready (0), each in turn (1)."""
    weights = torch.ones(4).share_memory_()
    pipes, actors = [], []
    for seconds in (14, 14 * form):
        ours, theirs = multiprocessing.Pipe()
        actors.append(multiprocessing.Process(target=act, args=(theirs, weights, seconds)))
        actors[-1].start()
        pipes.append(ours)
    for i, loss in common.training():
        for pipe in pipes:
            pipe.send(i)
        missing = list(pipes)
        while missing:
            for pipe in connection.wait(missing) if form == 0 else missing[:1]:
                pipe.recv()
                missing.remove(pipe)
        for pipe in pipes if i == 5 else ():
            pipe.send(None)
        yield loss
    for actor in actors:
        actor.join()


@program(at=3, seconds=(14, 14), **_FROZEN)
def judged_by_coroutines(form):
    """Answers go through an asyncio.Queue to a slow judge (0); to a limited interface (1)."""
    asyncio.run(judge(form))


async def judge(form):
    answers, limit = asyncio.Queue(1), asyncio.Semaphore(1)

    async def ask(seconds):
        async with limit:
            await asyncio.sleep(seconds * SCALE)
        if form == 0:
            await answers.put(seconds)

    asking = [asyncio.create_task(ask(seconds)) for seconds in (1, 13, 0)]
    await (asyncio.gather(*asking) if form else all_of(answers))


async def all_of(answers):
    return [await answers.get() for _ in range(3)]


@program(at=1, seconds=(14, 14), **_FROZEN)
def starts_on_the_hour(form):
    """Cheap power begins later: a scheduler of this process (0), an alarm that we wait for (1)."""
    if form == 0:
        later = sched.scheduler()
        later.enter(14 * SCALE, 1, os.sched_yield)
        later.run()
    else:
        before = signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 14 * SCALE + 0.05)
        signal.pause()
        signal.signal(signal.SIGALRM, before)
