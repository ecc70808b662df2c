# due: STALLED:polling or HANG:polling or HANG:thread or HANG:queue or STALLED:queue;
# line: next_sample; within: 60; runs: --timeout 1 | --timeout 0.05; set: first
# The reader thread ended early; the trainer asks its queue again and again with a timeout
# (queue.get(timeout) loops).
import queue
import threading
import time

import torch
from _shared import option


def read(samples, count):
    for i in range(count):
        samples.put(torch.full((8,), float(i % 5)))


def next_sample(samples, timeout):
    while True:
        try:
            return samples.get(timeout=timeout)
        except queue.Empty:
            continue  # the reader is slow today


def train(samples, timeout):
    model = torch.nn.Linear(8, 1)
    for step in range(400):
        if step == 300:
            print("fault", flush=True)
        model(next_sample(samples, timeout)).sum().backward()
        time.sleep(0.005)


def main():
    timeout = option("--timeout", 1.0)
    samples = queue.Queue(16)
    threading.Thread(target=read, args=(samples, 300), daemon=True).start()
    train(samples, timeout)
    print("trained")


if __name__ == "__main__":
    main()
