"""Threads and processes of one job that wait for each other, for ever."""

import asyncio
import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from torch.utils.data import DataLoader

from nsa.experiments.selfcheck.programs.registry import program

_LOCK = {"due": "HANG:lock or STALLED:lock", "certifiable": True}
_QUEUE = {"due": "HANG:queue or STALLED:queue", "certifiable": True}
_THREAD = {"due": "HANG:thread or STALLED:thread", "certifiable": True}


class Metrics:
    """Numbers under a lock."""

    def __init__(self):
        self.lock, self.values = threading.Lock(), []

    def add(self, value):
        with self.lock:
            self.values.append(value)
            self.flush()

    def flush(self):
        with self.lock:
            self.values.clear()


@program("hang", at=2, line="flush", **_LOCK)
def lock_taken_twice(form):
    """A method takes a lock that its caller has (0), or a signal's handler that its thread has."""
    metrics = Metrics()
    if form == 0:
        metrics.add(1.0)
    signal.signal(signal.SIGUSR2, lambda *_: metrics.flush())
    with metrics.lock:
        os.kill(os.getpid(), signal.SIGUSR2)
        metrics.values.append(2.0)


@program("hang", at=2, line="locks_in_opposite_order or other_way", **_LOCK)
def locks_in_opposite_order(form):
    """Two threads take two locks (0) or re-entrant ones (1), each in its own order."""
    model, data = ((threading.Lock, threading.RLock)[form]() for _ in range(2))
    both = threading.Barrier(2)

    def other_way():
        with data:
            both.wait()
            with model:
                pass

    threading.Thread(target=other_way, daemon=True).start()
    with model:
        both.wait()
        with data:
            pass


@program("hang", line="next_batch", **_QUEUE)
def dead_producer(form):
    """The reader of the data ended by an exception (0) or early, without a word (1)."""
    batches = queue.Queue()

    def produce():
        for k in range(6):
            if k == 3 and form == 1:
                return
            batches.put([1, 2, 3][k])

    threading.Thread(target=produce).start()
    for _ in range(6):
        yield float(next_batch(batches))


def next_batch(batches):
    return batches.get()


@program("hang", at=2, line="thread_waits_for_us or outer", **_THREAD)
def thread_waits_for_us(form):
    """We join a thread that waits for what we do next (0); a pool of one waits for itself (1)."""
    if form == 0:
        go_on = threading.Event()
        saver = threading.Thread(target=go_on.wait)
        saver.start()
        saver.join()
        go_on.set()
    else:
        pool = ThreadPoolExecutor(1)

        def outer():
            return pool.submit(sum, [1, 2]).result()

        pool.submit(outer).result()


@program("hang", at=1, **_THREAD)
def event_never_set(form):
    """Who was to set it took another branch (0); notified before we waited (1)."""
    ready, changed = threading.Event(), threading.Condition()

    def prepare():
        with changed:
            changed.notify_all()
        if len(threading.enumerate()) > 99:
            ready.set()

    preparing = threading.Thread(target=prepare)
    preparing.start()
    preparing.join()
    with changed:
        ready.wait() if form == 0 else changed.wait()


def dies(k):
    if k == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return k


@program("hang", at=2, due="HANG:worker or STALLED:worker")
def pool_worker_killed(form):
    """A worker of a pool is killed with its task: in map (0), in one call (1)."""
    pool = multiprocessing.Pool(2)
    pool.map(dies, [0, 1, 2], chunksize=1) if form == 0 else pool.apply_async(dies, [1]).get()


@program("hang", at=3, due="HANG:process or STALLED:process", certifiable=True)
def join_before_read(form):
    """A process is joined before its large answer is read: a queue's (0), a pipe's (1)."""
    answers, (ours, theirs) = multiprocessing.Queue(), multiprocessing.Pipe()
    put = answers.put if form == 0 else theirs.send
    child = multiprocessing.Process(target=put, args=(bytes(2**22),))
    child.start()
    child.join()
    answers.get() if form == 0 else ours.recv()


def dies_with(lock):
    lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


@program("hang", at=2, **_LOCK)
def lock_of_a_killed_process(form):
    """A process was killed while it held a lock (0) or a shared value's (1)."""
    lock = multiprocessing.Lock() if form == 0 else multiprocessing.Value("i").get_lock()
    child = multiprocessing.Process(target=dies_with, args=(lock,))
    child.start()
    child.join()
    with lock:
        pass


_cache_lock = threading.Lock()


class Cached:
    """Samples behind a lock of the module."""

    def __len__(self):
        return 8

    def __getitem__(self, k):
        with _cache_lock:
            return k


@program("hang", at=2, line="forked_lock or __getitem__", due="HANG:lock or STALLED:lock")
def forked_lock(form):
    """A thread held a lock when we forked: a process (0) or a loader's worker (1) waits for it."""

    def warm():
        with _cache_lock:
            time.sleep(2)

    threading.Thread(target=warm).start()
    time.sleep(0.2)
    if form == 0:
        child = multiprocessing.Process(target=Cached().__getitem__, args=(0,))
        child.start()
        child.join()
    else:
        list(DataLoader(Cached(), 4, num_workers=1))


@program("hang", at=2, due="HANG:asyncio or STALLED:asyncio", certifiable=True, line="answer")
def future_never_resolved(form):
    """An await whose other half has gone: a future (0), a queue of tasks that were cancelled."""
    asyncio.run(answer(form))


async def answer(form):
    if form == 0:
        return await asyncio.get_running_loop().create_future()
    answers = asyncio.Queue()
    asking = asyncio.create_task(answers.put(1), name="ask")
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    return await answers.get()
