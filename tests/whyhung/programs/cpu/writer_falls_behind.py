# due: healthy; quiet: 25; runs: --when queue | --when end; set: first
# A process writes events to slow storage for 25 s: its queue is full meanwhile, or it is joined.
import multiprocessing
import time

import torch
from _shared import SCALE, option


def write(events, slow):
    for k, loss in enumerate(iter(events.get, None)):
        if k == slow:
            time.sleep(26 * SCALE)
        round(loss, 3)


def train(events, steps):
    model = torch.nn.Linear(16, 1)
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        events.put(loss.item())
    events.put(None)


def main():
    when = option("--when", "queue", "end")
    events = multiprocessing.Queue(1 if when == "queue" else 0)
    slow = 2 if when == "queue" else 19
    writer = multiprocessing.Process(target=write, args=(events, slow))
    writer.start()
    print("quiet", flush=True)
    train(events, 20)
    writer.join()
    print("over", flush=True)


if __name__ == "__main__":
    main()
