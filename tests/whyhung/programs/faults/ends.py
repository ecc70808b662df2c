"""Trainings that become slow, and trainings that fail by themselves, each in two forms."""

import json
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def subject(function: Callable[[int], Iterator[float]]) -> type:
    """The subject whose steps are what `function` yields. settings: form."""

    class Running:
        def __init__(self, settings: dict[str, Any], progress: Any) -> None:
            self.losses = function(settings["form"])

        def step(self, step: int) -> float:
            return next(self.losses)

    return Running


def tiny() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor]]:
    """A model, its optimizer and one batch."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    inputs = torch.randn(8, 16)
    return model, torch.optim.SGD(model.parameters(), lr=0.01), (inputs, inputs.mean(1, True))


def train_step(model: nn.Module, opt: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    """One step; its loss."""
    opt.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    opt.step()
    return loss.item()


def training(steps: int) -> Iterator[tuple[int, float]]:
    """The usual loop: (step, loss) after each step."""
    model, opt, batch = tiny()
    for i in range(steps):
        yield i, train_step(model, opt, batch)


def busy(seconds: float) -> int:
    """Use `seconds` of processor time in plain Python, on state that changes."""
    end, total = time.thread_time() + seconds, 1
    while time.thread_time() < end:
        total = (total * 31 + sum(int(digit) for digit in str(total + 1))) % 1_000_003
    return total


@subject
def growing_steps(form):
    history = []
    for i, loss in training(24):
        history += [loss] * 40_000
        for _ in range(i):
            add_all(history) if form == 0 else rest(0.12)
        yield loss


def add_all(history):
    return sum(float(loss) ** 2 for loss in history)


def rest(seconds):
    time.sleep(seconds)


@subject
def suddenly_slow(form):
    for i, loss in training(12):
        augment(form, 0.1 if i < 6 else 5)
        yield loss


def augment(form, seconds):
    time.sleep(seconds) if form else busy(seconds)


class Worse(Dataset):
    """Samples from storage that becomes slower (1), or that looks at all earlier ones (0)."""

    def __init__(self, form):
        self.form, self.seen = form, []

    def __len__(self):
        return 24

    def __getitem__(self, k):
        self.seen += [{"id": k, "text": f"sample {k}"}] * 4000
        for _ in range(k):
            time.sleep(0.12) if self.form else json.loads(json.dumps(self.seen))
        return torch.full((16,), k / 24), torch.zeros(1)


@subject
def loader_gets_slower(form):
    model, opt, _ = tiny()
    for batch in DataLoader(Worse(form), 1, num_workers=1 - form):
        yield train_step(model, opt, batch)


@subject
def no_number(form):
    model, opt, (inputs, targets) = tiny()
    for i in range(6):
        bad = i >= 3
        if bad and form == 1:
            inputs[2, 3] = float("nan")
        scale = torch.zeros(()).log() * 0 if bad and form == 0 else 1.0
        yield train_step(model, opt, (inputs, targets * scale))


class Corrupt:
    """One sample cannot be read."""

    def __len__(self):
        return 24

    def __getitem__(self, k):
        if k == 5:
            raise ValueError(f"sample {k} is truncated")
        return torch.full((16,), float(k)), torch.zeros(1)


@subject
def worker_raises(form):
    model, opt, _ = tiny()
    if form == 0:
        for batch in DataLoader(Corrupt(), 4, num_workers=1):
            yield train_step(model, opt, batch)
    with ThreadPoolExecutor(2) as pool:
        for inputs, targets in pool.map(Corrupt().__getitem__, range(6)):
            yield train_step(model, opt, (inputs[None], targets[None]))


@subject
def preloads_all(form):
    for i, loss in training(6):
        if i == 2:
            used = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
            limit = used * resource.getpagesize() + 2**30
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            preload(form)
        yield loss


def preload(form):
    return [torch.ones(2**22) if form == 0 else bytearray(2**24) for _ in range(1000)]
