"""The second batch's hangs on one rank, one that becomes slow and one that fails."""

import asyncio
import importlib
import json
import logging
import multiprocessing
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import torch
from torch.utils.data import DataLoader, Dataset

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.registry import program

_HANG = {"group": "hang", "batch": "frozen", "at": 2}
_PROOF = {**_HANG, "certifiable": True}
_THREAD = "HANG:thread or HANG:lock or STALLED:thread or STALLED:lock"
_WORKER = "HANG:lock or HANG:process or HANG:worker or STALLED"
_TASK = "HANG:asyncio or HANG:thread or STALLED:asyncio or STALLED:thread"


@program(due=_THREAD, **_PROOF)
def too_few_at_the_barrier(form):
    """One augmenter ended, the others meet without it (0); a semaphore that ran out (1)."""
    meeting, places = threading.Barrier(3), threading.Semaphore(2)

    def augment(k):
        places.acquire()
        if k == 0 or form == 1:
            return  # forgets to release
        meeting.wait()

    for k in range(2):
        threading.Thread(target=augment, args=(k,), daemon=True).start()
    meeting.wait() if form == 0 else places.acquire()


@program(due="HANG:queue or STALLED:queue", **_PROOF)
def nobody_takes_it(form):
    """The writer of events ended: its queue is full (0), or its task_done will not come (1)."""
    events = queue.Queue(3)

    def write():
        while (event := events.get()) < 2:
            events.task_done()
            round(event, 3)

    threading.Thread(target=write).start()
    for k in range(3 if form else 9):
        events.put(k)
    events.join()


class Uploads(logging.Handler):
    """Sends each line in its own way."""

    def __init__(self, send):
        super().__init__()
        self.send = send

    def emit(self, record):
        self.send()


@program(due=_THREAD, line="log_from_a_thread or send or emit or send_locked", **_PROOF)
def log_from_a_thread(form):
    """A handler waits for a thread that logs (0), or for a lock whose owner logs (1)."""
    log, ours, sending = logging.Logger("training"), threading.Lock(), threading.Event()
    other = threading.Thread(target=log.warning, args=("loss rises",), daemon=True)

    def send():
        other.start()
        other.join()

    def send_locked():
        sending.set()
        with ours:
            pass

    log.addHandler(Uploads(send_locked if form else send))
    with ours:
        if form == 1:
            other.start()
            sending.wait()
        log.warning("accuracy falls")


@program(due="HANG:process or HANG:pipe or STALLED:process or STALLED:pipe", **_PROOF)
def command_waits_for_us(form):
    """A command reads until we close its stdin: we wait for it (0); both fill their pipes (1)."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command:
        command.stdin.write(bytes(2**20 if form else 100))
        command.stdin.flush()
        command.wait()


@program(due=_THREAD, line="prepare or warm or import_that_waits", **_PROOF)
def import_that_waits(form):
    """A module starts a thread that imports it, and waits: by join (0), for a future (1)."""
    warm = "def warm():\n    from plugin_that_waits import TABLE\n\n\ndef prepare():\n"
    start = [
        "    import threading\n    t = threading.Thread(target=warm)\n    t.start(), t.join()\n",
        "    import concurrent.futures as f\n    f.ThreadPoolExecutor(1).submit(warm).result()\n",
    ][form]
    folder = common.scratch()
    (folder / "plugin_that_waits.py").write_text(f"{warm}{start}\n\nprepare()\nTABLE = {{}}\n")
    sys.path.insert(0, str(folder))
    importlib.import_module("plugin_that_waits")


_shared = multiprocessing.Lock()


def count(k):
    common.end_with_parent()
    with _shared:
        return k


@program(due=_WORKER, line="count or wait_under_lock", **_PROOF)
def wait_under_lock(form):
    """We hold a lock that our workers need, and wait for them: a process (0), a pool (1)."""
    with _shared:
        if form == 1:
            multiprocessing.Pool(2).map(count, range(4))
        child = multiprocessing.Process(target=count, args=(1,))
        child.start()
        child.join()


@program(due=_TASK, line="answers or after", **_PROOF)
def loop_waits_for_itself(form):
    """A coroutine blocks its loop for a result of that loop (0); two tasks await each other."""
    asyncio.run(answers(form))


async def answers(form):
    loop, first, second = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    if form == 0:
        return asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1), loop).result()

    async def after(mine, other):
        await other.wait()
        mine.set()

    await asyncio.gather(after(first, second), after(second, first))


def put_and_die(answers, lock):
    lock.acquire()
    answers.put(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


@program(due="STALLED", **_HANG)
def manager_of_the_dead(form):
    """An evaluator behind a Manager was killed: its queue stays empty (0), its lock held (1)."""
    with common.manager() as manager:
        scores, lock = manager.Queue(), manager.Lock()
        multiprocessing.Process(target=put_and_die, args=(scores, lock)).start()
        scores.get()
        lock.acquire() if form else scores.get()


@program(due="STALLED:sleep or STALLED:file or STALLED", **_HANG)
def database_never_free(form):
    """A program that is no child of ours keeps its transaction: a long timeout (0), retries."""
    path = common.scratch() / "runs.db"
    hold = f"import os, sqlite3, time; c = sqlite3.connect('{path}', isolation_level=None); "
    hold += f"c.execute('begin exclusive'); open('{path}.held', 'w')\n"
    hold += f"while os.path.exists('/proc/{os.getpid()}'): time.sleep(1)"
    common.outside(f'{sys.executable} -c "{hold}"')
    while not os.path.exists(f"{path}.held"):
        time.sleep(0.1)
    while True:
        try:
            return sqlite3.connect(path, timeout=(10**6, 1)[form]).execute("create table t (x)")
        except sqlite3.OperationalError:
            time.sleep(2)


class Worse(Dataset):
    """Samples from storage that becomes slower (1), or that looks at all earlier ones (0)."""

    def __init__(self, form):
        self.form, self.seen = form, []

    def __len__(self):
        return 24

    def __getitem__(self, k):
        self.seen += [{"id": k, "text": f"sample {k}"}] * common.sized(4000)
        for _ in range(k):
            common.pause(0.12) if self.form else json.loads(json.dumps(self.seen))
        return torch.full((16,), k / 24), torch.zeros(1)


@program("slow", batch="frozen", due="SLOW", steps=24, line="__getitem__", load_sensitive=True)
def loader_gets_slower(form):
    """Each batch takes longer: a log that is read anew, in a worker (0); slower storage, here."""
    model, opt, _ = common.tiny()
    for batch in DataLoader(Worse(form), 1, num_workers=1 - form):
        yield common.train_step(model, opt, batch)
