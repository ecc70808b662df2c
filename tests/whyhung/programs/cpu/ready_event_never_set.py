# due: HANG:thread or HANG:event or HANG:lock or STALLED:event or STALLED:lock; line: next_batch;
# within: 60; runs: --heartbeat no | --heartbeat yes; set: first
# The prefetch thread died of an exception before it set its event; training waits for the event.
import threading
import time

import torch
from _shared import option


class Prefetcher:
    def __init__(self, rows):
        self.rows, self.batch = rows, None
        self.ready, self.taken = threading.Event(), threading.Event()
        self.taken.set()
        threading.Thread(target=self.fill, daemon=True).start()

    def fill(self):
        for start in range(0, len(self.rows), 8):
            self.taken.wait()
            self.taken.clear()
            self.batch = torch.tensor([float(row) for row in self.rows[start : start + 8]])
            self.ready.set()

    def next_batch(self):
        self.ready.wait()
        self.ready.clear()
        batch = self.batch
        self.taken.set()
        return batch


def heartbeat():
    while True:
        time.sleep(0.1)
        sum(i * i for i in range(20_000))


def main():
    if option("--heartbeat", "no", "yes") == "yes":
        threading.Thread(target=heartbeat, daemon=True).start()
    rows = [str(i / 100) for i in range(4000)]
    rows[2400] = "n/a"
    data, weight = Prefetcher(rows), torch.zeros((), requires_grad=True)
    for step in range(500):
        if step == 300:
            print("fault", flush=True)
        batch = data.next_batch()
        (weight * batch).square().mean().backward()
        time.sleep(0.002)
    print("trained")


if __name__ == "__main__":
    main()
