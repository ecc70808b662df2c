# due: healthy; quiet: 25; runs: --by computing | --by waiting; set: first
# A scheduler's SIGUSR1 has the handler save a checkpoint, which packs or waits for 25 s.
import os
import signal
import time
import zlib

import torch
from _shared import SCALE, option


def pack(seconds):
    data, end = os.urandom(300_000), time.monotonic() + seconds
    while time.monotonic() < end:
        zlib.compress(data, 6)


def train(steps):
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        if step == steps // 2:
            os.kill(os.getpid(), signal.SIGUSR1)


def main():
    by = option("--by", "computing", "waiting")
    save = {"computing": pack, "waiting": time.sleep}[by]

    def on_signal(number, frame):
        print("quiet", flush=True)
        save(25 * SCALE)
        print("over", flush=True)

    signal.signal(signal.SIGUSR1, on_signal)
    train(20)


if __name__ == "__main__":
    main()
