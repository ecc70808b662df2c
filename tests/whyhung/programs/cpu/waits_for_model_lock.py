# due: healthy; quiet: 25; runs: --by copying | --by writing; set: late
# A checkpoint's thread holds the model's lock for 25 s, which each step takes: it packs or waits.
import os
import threading
import time
import zlib

import torch
from _shared import SCALE, option


def copy(seconds):
    data, end = os.urandom(300_000), time.monotonic() + seconds
    while time.monotonic() < end:
        zlib.compress(data, 6)


def checkpoint(lock, held, save):
    with lock:
        held.set()
        save(25.5 * SCALE)


def train(lock, steps):
    model = torch.nn.Linear(16, 1)
    for _ in range(steps):
        with lock:
            model(torch.randn(8, 16)).square().mean().backward()


def main():
    by = option("--by", "copying", "writing")
    lock, held = threading.Lock(), threading.Event()
    train(lock, 5)
    save = {"copying": copy, "writing": time.sleep}[by]
    print("quiet", flush=True)
    threading.Thread(target=checkpoint, args=(lock, held, save)).start()
    held.wait()
    train(lock, 5)
    print("over", flush=True)


if __name__ == "__main__":
    main()
