"""Two ranks over gloo: healthy ones of which one is late, and ones that wait for ever."""

import os
import subprocess
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.common import SCALE, busy, join, pause, training
from nsa.experiments.selfcheck.programs.registry import program


@program("healthy", forms=4, ranks=2, seconds=(30, 32))
def rank_0_alone(form):
    """Rank 0 evaluates (0, 3), uploads (1) or backs off (2); rank 1 waits in a collective."""
    rank, metric = join(), torch.zeros(1)
    for i, loss in training():
        if i == 2 and rank == 0:
            (busy, upload, back_off, busy)[form](30)
        if i == 2:
            (dist.barrier, dist.all_reduce, dist.broadcast, dist.barrier)[form](
                *[(), (metric,), (metric, 0), ()][form]
            )
        yield loss


def upload(seconds):
    subprocess.run(["sleep", str(seconds * SCALE)], check=True)


def back_off(seconds):
    for part in (1, 2, 4, 8):
        pause(seconds * part / 15)


@program("healthy", ranks=2, seconds=(14, 14))
def uneven_work(form):
    """One rank's batch is far longer: it computes (0) or its worker process does (1)."""
    rank = join()
    model, opt, batch = common.tiny()
    for i in range(6):
        if i % 2 == rank and i > 2:
            upload(14) if form else busy(14)
        loss = common.train_step(model, opt, batch)
        dist.all_reduce(next(model.parameters()).grad)
        yield loss


@program("healthy", ranks=2, seconds=(20, 20))
def late_rank(form):
    """Rank 1 imports for 20 s before it joins (0); rank 0 reads its data first (1)."""
    if int(os.environ["RANK"]) == 1 - form:
        (busy, pause)[form](20)
    join()
    for _, loss in training():
        yield loss


@program("healthy", ranks=2, seconds=(15, 15))
def rank_0_downloads(form):
    """Rank 0 downloads first; rank 1 waits for a key of the store (0), for a file (1)."""
    rank = join()
    store = dist.distributed_c10d._get_default_store()
    ready = common.scratch() / "ready"
    places = [str(ready)]
    dist.broadcast_object_list(places)
    for i, loss in training():
        if i == 0 and rank == 0:
            pause(15)
            open(places[0], "w").close() if form else store.set("downloaded", "1")
        elif i == 0 and form == 0:
            store.wait(["downloaded"], timedelta(minutes=10))
        while i == 0 and form == 1 and not os.path.exists(places[0]):
            pause(1)
        dist.barrier()
        yield loss


_OF_RANKS = "HANG:collective or STALLED:collective"


@program("hang", ranks=2, due=_OF_RANKS, rank=1, certifiable=True, line="log_metrics or stopped")
def skipped_collective(form):
    """Rank 1 leaves out the metrics' reduction (0) or stops early (1), then waits in a barrier."""
    rank, metric = join(), torch.zeros(3)
    for i, loss in training():
        if i == 2 and rank == 1:
            stopped(form)
        if i == 2:
            log_metrics(metric)
        yield loss


def stopped(form):
    if form == 1:
        dist.recv(torch.zeros(1), src=0)
    dist.barrier()


def log_metrics(metric):
    dist.all_reduce(metric)


@program("hang", ranks=2, due=_OF_RANKS, certifiable=True, line="exchange")
def other_order(form):
    """Each rank sends and receives in its own order (0); two collectives swapped (1)."""
    rank = join()
    for i, loss in training():
        if i == 3:
            exchange(rank, form)
        yield loss


def exchange(rank, form):
    a, b = torch.zeros(5), torch.zeros(5)
    if form == 0:
        dist.recv(a, src=1 - rank)
        dist.send(b, dst=1 - rank)
    elif rank == 0:
        dist.broadcast(a, src=1)
        dist.broadcast(b, src=0)
    else:
        dist.recv(b, src=0)
        dist.broadcast(a, src=1)


@program("hang", ranks=2, due="HANG:lock or STALLED:lock", rank=1, certifiable=True, line="save")
def rank_at_its_lock(form):
    """Rank 1 takes a lock twice; the other waits in the next all_reduce (0) or barrier (1)."""
    rank, lock = join(), threading.Lock()
    for i, loss in training():
        if i == 2:
            with lock:
                save(lock, rank)
            if form == 1:
                dist.barrier()
        yield loss


def save(lock, rank):
    if rank == 1:
        with lock:
            pass
