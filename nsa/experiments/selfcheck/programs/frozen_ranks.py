"""Two ranks, second batch: healthy ones that wait for each other, and ones that part for ever."""

import contextlib
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.common import busy, join, pause, training
from nsa.experiments.selfcheck.programs.registry import program

_HEALTHY = {"group": "healthy", "batch": "frozen", "ranks": 2}
_HANG = {
    "group": "hang",
    "batch": "frozen",
    "ranks": 2,
    "due": "HANG:collective or STALLED:collective",
}
_MAYBE_THREAD = "HANG:collective or HANG:thread or STALLED:collective or STALLED:thread"
_DAY = timedelta(days=1)


@program(seconds=(14, 28), **_HEALTHY)
def uneven_batches(form):
    """Rank 1 has fewer batches and waits: in DDP's Join (0), in all_reduce of "who has data"."""
    rank = join()
    model, _, batch = common.tiny()
    model = DistributedDataParallel(model)
    opt, left = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(1)
    with Join([model]) if form == 0 else contextlib.nullcontext():
        for i in range(6 if form or rank == 0 else 4):
            if i >= 4 and rank == 0:
                (pause, busy)[form](14)
            left.fill_(float(rank == 0 or i < 4))
            if form == 1:
                dist.all_reduce(left)
            yield common.train_step(model, opt, batch)
    yield from [0.0] * (2 if form == 0 and rank == 1 else 0)


@program(seconds=(14, 14), **_HEALTHY)
def pipeline_stages(form):
    """Rank 0's stage is slow with its third batch: rank 1 in recv (0), in wait of irecv (1)."""
    rank, state = join(), torch.zeros(8, 16)
    for i, loss in training():
        if rank == 0:
            (pause, busy)[form](14 * (i == 2))
            dist.send(state + i, dst=1)
        elif form == 0:
            dist.recv(state)
        else:
            dist.irecv(state, src=0).wait()
        yield loss


@program(seconds=(14, 14), **_HEALTHY)
def overlapped_reduction(form):
    """An asynchronous all_reduce whose wait comes 14 s later (0); whose other rank is late (1)."""
    rank, metric = join(), torch.ones(1)
    for i, loss in training():
        if i == 3 and form == 1 and rank == 0:
            pause(14)
        work = dist.all_reduce(metric, async_op=True)
        if i == 3 and form == 0:
            busy(14)
        work.wait()
        yield loss


@program(seconds=(20, 20), **_HEALTHY)
def objects_between_ranks(form):
    """One rank makes a large object for 20 s: broadcast to all (0), gathered on rank 0 (1)."""
    rank = join()
    for i, loss in training():
        if i == 1 and rank == form:
            (busy, pause)[form](20)
        index = [{k: str(k) for k in range(20_000)}] if rank == form else [None]
        if i == 1 and form == 0:
            dist.broadcast_object_list(index)
        elif i == 1:
            dist.gather_object(index, [None, None] if rank == 0 else None)
        yield loss


@program(forms=3, seconds=(20, 20), **_HEALTHY)
def rank_0_in_a_subgroup(form):
    """Rank 0 scores for 20 s in a group of its own; rank 1: monitored_barrier, store, a file."""
    rank = join()
    alone, places = dist.new_group([0]), [str(common.scratch() / "scored")]
    store = dist.distributed_c10d._get_default_store()
    dist.broadcast_object_list(places)
    for i, loss in training():
        if i == 2 and rank == 0:
            pause(20)
            dist.all_reduce(torch.ones(1), group=alone)
            store.set("scored", "1")
            open(places[0], "w").close()
        while (
            i == 2 and form and not (store.check(["scored"]), os.path.exists(places[0]))[form - 1]
        ):
            pause(0.5)
        if i == 2 and form == 0:
            dist.monitored_barrier(timeout=_DAY)
        dist.barrier()
        yield loss


@program(rank=1, certifiable=True, line="next_gradients or finish", **_HANG)
def one_batch_fewer(form):
    """Rank 1's loop ended a batch earlier: it is in the last barrier (0), waits for a result."""
    rank = join()
    for i, loss in training(4):
        if i == 3 and rank == 1:
            finish(form)
        next_gradients()
        yield loss
    finish(form)


def next_gradients():
    dist.all_reduce(torch.ones(100))


def finish(form):
    if form == 0:
        dist.barrier()
    else:
        dist.broadcast_object_list([None])


@program(rank=1, certifiable=True, line="average or absent_from_a_subgroup", **_HANG)
def absent_from_a_subgroup(form):
    """Rank 1 forgets a subgroup's collective and goes on: a reduction (0), objects (1)."""
    rank = join()
    experts = dist.new_group([0, 1])
    for i, loss in training():
        if i == 3 and rank == 0:
            average(experts, form)
        yield loss


def average(group, form):
    if form == 0:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        dist.all_gather_object([None, None], {"tokens": 4}, group=group)


@program(rank=1, certifiable=True, line="evaluate or exception_on_one_rank", **_HANG)
def exception_on_one_rank(form):
    """Rank 1 catches its exception, so it leaves out a collective: all_gather (0), reduce (1)."""
    rank = join()
    for i, loss in training():
        if i == 2:
            with contextlib.suppress(KeyError):
                evaluate(rank, form)
        yield loss


def evaluate(rank, form):
    if rank == 1:
        raise KeyError("no label")
    if form == 0:
        dist.all_gather([torch.zeros(1), torch.zeros(1)], torch.ones(1))
    else:
        dist.reduce(torch.ones(1), dst=0)


@program(certifiable=True, line="receive or answer", **{**_HANG, "due": _MAYBE_THREAD})
def rank_that_never_sends(form):
    """Rank 0 receives, rank 1 too (0); or it waits for a thread that will not be told (1)."""
    rank = join()
    for i, loss in training():
        if i == 2:
            receive() if rank == 0 else answer(form)
        yield loss


def receive():
    dist.recv(torch.zeros(4), src=1)


def answer(form):
    dist.recv(torch.zeros(4), src=0) if form == 0 else threading.Event().wait()


@program(**{**_HANG, "due": "STALLED:store or HANG:collective or STALLED"}, rank=1, line="key")
def key_nobody_sets(form):
    """Rank 1 waits for a key of the store that rank 0 named otherwise: wait (0), check (1)."""
    rank = join()
    store = dist.distributed_c10d._get_default_store()
    for i, loss in training():
        if i == 2 and rank == 0:
            store.set("tokenizer/done", "1")
        elif i == 2:
            key(store, form)
        yield loss


def key(store, form):
    if form == 0:
        store.wait(["tokenizer_done"], _DAY)
    while form == 1 and not store.check(["tokenizer_done"]):
        time.sleep(0.5)
