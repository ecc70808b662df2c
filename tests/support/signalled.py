"""A program that is sent signals at random moments: `signalled.py KIND FILE`.

KIND: "count", whose handlers count; "raise", whose handlers raise what the program catches;
"agent", where torchrun's agent has the handlers. FILE holds the cells below, for the sender.
"""

import mmap
import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
PID, READY, HANDLED, RAISED, CAUGHT, STOP, CELLS = range(7)


class Stop(Exception):
    """An exception like torch's SignalException, which derives from Exception."""


def opened(file):
    with open(file, "r+b") as stream:
        return memoryview(mmap.mmap(stream.fileno(), 8 * CELLS)).cast("q")


def count(*_):
    cells[HANDLED] += 1


def stop(number, frame):
    # At a fork Python itself would lose it there, of this program unwatched as well.
    raises = "logging" not in frame.f_code.co_filename
    cells[RAISED] += raises
    cells[HANDLED] += 1
    if raises:
        raise Stop(number)


def train(raises):
    """Steps, until it is to stop."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(30)), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    data = TensorDataset(torch.randn(64, 64))
    number = 0

    def step():
        torch.set_grad_enabled(True)  # an optimizer that was interrupted may have left it off
        # Its iterator's __del__ ends the workers, and there Python would lose it.
        workers = 2 if number % 50 == 49 and not raises else 0
        for (x,) in DataLoader(data, batch_size=16, num_workers=workers):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if number % 10 == 0:
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        time.sleep(0.1 * (number % 4 == 0))

    def steps():
        nonlocal number
        while not cells[STOP]:
            number += 1
            step()

    def safely(depth):
        while not cells[STOP]:
            try:
                safely(depth - 1) if depth else steps()
            except Stop:
                cells[CAUGHT] += 1

    step()  # whatever a first step loads
    for one in SIGNALS:
        signal.signal(one, stop if raises else count)
    cells[READY] = 1
    safely(3)  # another signal may come while one is dealt with


def agent():
    """torchrun's own handlers raise; each signal ends a launch, and another begins."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.api import PContext
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start = PContext.start

    def started(context):
        start(context)
        cells[READY] += 1

    PContext.start = started
    while not cells[STOP]:
        here = {"rdzv_endpoint": "127.0.0.1:0", "local_addr": "127.0.0.1"}
        rest = {"rdzv_backend": "c10d", "max_restarts": 0, "monitor_interval": 0.05}
        config = LaunchConfig(1, 1, 2, **here, **rest)
        try:
            elastic_launch(config, "sleep")("600")
        except SignalException:
            cells[CAUGHT] += 1


if __name__ == "__main__":
    cells = opened(sys.argv[2])
    cells[PID] = os.getpid()
    torch.set_num_threads(1)
    if sys.argv[1] == "agent":
        agent()
    else:
        train(sys.argv[1] == "raise")
    print("stopped")
