"""Programs that become slow, and programs that fail by themselves."""

import resource
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils.data import DataLoader

from nsa.experiments.selfcheck.programs import common
from nsa.experiments.selfcheck.programs.registry import program


@program("slow", due="SLOW", steps=24, line="add_all or growing_steps", load_sensitive=True)
def growing_steps(form):
    """Every step takes longer: all earlier losses are gone through (0), a sleep that grows (1)."""
    history = []
    for i, loss in common.training(24):
        history += [loss] * 15_000
        for _ in range(i):
            add_all(history) if form == 0 else common.pause(0.12)
        yield loss


def add_all(history):
    return sum(float(loss) ** 2 for loss in history)


@program("slow", due="SLOW", steps=12, line="augment", load_sensitive=True)
def suddenly_slow(form):
    """From step 6 on a step takes 50 times as long: computes (0), waits for its storage (1)."""
    for i, loss in common.training(12):
        augment(form, 0.1 if i < 6 else 5)
        yield loss


def augment(form, seconds):
    common.pause(seconds) if form else common.busy(seconds)


@program("fails", due="FAIL:nan")
def no_number(form):
    """NaN from step 3: a logarithm of zero in the loss (0), a corrupt sample (1)."""
    model, opt, (inputs, targets) = common.tiny()
    for i in range(6):
        bad = i >= 3
        if bad and form == 1:
            inputs[2, 3] = float("nan")
        scale = torch.zeros(()).log() * 0 if bad and form == 0 else 1.0
        yield common.train_step(model, opt, (inputs, targets * scale))


class Corrupt:
    """One sample cannot be read."""

    def __len__(self):
        return 24

    def __getitem__(self, k):
        if k == 5:
            raise ValueError(f"sample {k} is truncated")
        return torch.full((16,), float(k)), torch.zeros(1)


@program("fails", due="CRASH:ValueError", line="__getitem__")
def worker_raises(form):
    """A sample raises in a loader's worker (0), in a thread's future (1)."""
    model, opt, _ = common.tiny()
    if form == 0:
        for batch in DataLoader(Corrupt(), 4, num_workers=1):
            yield common.train_step(model, opt, batch)
    with ThreadPoolExecutor(2) as pool:
        for inputs, targets in pool.map(Corrupt().__getitem__, range(6)):
            yield common.train_step(model, opt, (inputs[None], targets[None]))


@program("fails", at=2, due="OOM:host or CRASH:MemoryError or CRASH:RuntimeError", line="preload")
def out_of_memory(form):
    """All data is loaded under a limit on memory: tensors (0), Python's own bytes (1)."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, resource.RLIM_INFINITY))
    preload(form)


def preload(form):
    return [torch.ones(2**22) if form == 0 else bytearray(2**24) for _ in range(1000)]
