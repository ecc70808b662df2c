# due: healthy; quiet: 20; runs: --who alone | --who workers; set: first
# A scheduler stops the job for 20 s and lets it go on, alone or with the workers of its pool.
import multiprocessing
import os
import subprocess
import time

import torch
from _shared import SCALE, option


def double(number):
    return 2 * number


def preempt(pids, seconds):
    """Another session, as a scheduler's: it is no child of ours."""
    pids = " ".join(map(str, pids))
    command = f"(kill -STOP {pids}; sleep {seconds}; kill -CONT {pids}) >/dev/null 2>&1 &"
    subprocess.run(["setsid", "sh", "-c", command], check=True, stdin=subprocess.DEVNULL)


def train(steps):
    model = torch.nn.Linear(16, 1)
    for _ in range(steps):
        model(torch.randn(8, 16)).square().mean().backward()


def stand(pids):
    print("quiet", flush=True)
    began = time.monotonic()
    preempt(pids, 21 * SCALE)
    while time.monotonic() < began + 20.5 * SCALE:  # a step each time, until it was stopped
        train(1)
    print("over", flush=True)


def main():
    who = option("--who", "alone", "workers")
    if who == "alone":
        stand([os.getpid()])
    else:
        with multiprocessing.Pool(2) as pool:
            pool.map(double, range(8))
            stand([os.getpid(), *(child.pid for child in multiprocessing.active_children())])
            print(sum(pool.map(double, range(8))))
    train(5)


if __name__ == "__main__":
    main()
