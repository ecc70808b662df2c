"""What the programs share: a tiny model, ways to spend time, and processes beside them."""

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.managers import SyncManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

SCALE = float(os.environ.get("NSA_PROGRAM_SCALE", "1"))  # of every duration
_folders: list[tempfile.TemporaryDirectory] = []


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


def training(steps: int = 6) -> Iterator[tuple[int, float]]:
    """The usual loop: (step, loss) after each step; with several ranks, data parallel by hand."""
    model, opt, batch = tiny()
    for i in range(steps):
        loss = train_step(model, opt, batch)
        for parameter in model.parameters() if dist.is_initialized() else ():
            dist.all_reduce(parameter.grad)
        yield i, loss


def training_with(happens: Callable, at: int, form: int) -> Iterator[float]:
    """The usual loop, in which something happens after one of the steps."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        join()
    for i, loss in training():
        if i == at:
            happens(form)
        yield loss


def spend(seconds: float) -> Iterator[int]:
    """Counts until this thread has used so much processor time."""
    end, k = time.thread_time() + seconds * SCALE, 0
    while time.thread_time() < end:
        yield k
        k += 1


def busy(seconds: float) -> int:
    """So much processor time in plain Python, on state that changes."""
    total = 1
    for k in spend(seconds):
        total = (total * 31 + sum(int(digit) for digit in str(total + k))) % 1_000_003
    return total


def pause(seconds: float) -> None:
    """Sleeps."""
    time.sleep(seconds * SCALE)


def sized(count: float) -> int:
    """A count that takes its time in proportion; at least 1."""
    return max(1, int(count * SCALE))


def scratch() -> Path:
    """A folder that goes when we end."""
    _folders.append(tempfile.TemporaryDirectory(prefix="programs-"))
    return Path(_folders[-1].name)


def outside(command: str) -> None:
    """A shell command of another session, which is no child of ours. {me} is our process id."""
    command = command.replace("{me}", str(os.getpid()))
    shell = ["setsid", "sh", "-c", f"({command}) </dev/null >/dev/null 2>&1 &"]
    subprocess.run(shell, check=True)


def end_with_parent() -> None:
    """In a child: the kernel kills it when its parent ends, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def manager() -> SyncManager:
    """What multiprocessing.Manager() gives, but its process never outlives us."""
    started = SyncManager()
    started.start(end_with_parent)
    return started


def join() -> int:
    """Joins torchrun's group; our rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def leave() -> None:
    """Leaves the group, if we joined one, once all have come so far."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        time.sleep(0.5)  # torch 2.13 now and then aborts an exit that comes right after it
