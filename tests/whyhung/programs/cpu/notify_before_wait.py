# due: HANG:thread or HANG:lock or HANG:event or HANG:condition or STALLED:lock;
# line: wait_until_loaded; within: 60; runs: --refresher no | --refresher yes; set: late
# The loader notified its condition before the trainer waited for it, and has ended (a lost wake-
# up).
import threading
import time

import torch
from _shared import option


class Weights:
    def __init__(self):
        self.loaded, self.tensors = threading.Condition(), []

    def load(self):
        tensors = [torch.randn(100, 100) for _ in range(20)]
        with self.loaded:
            self.tensors = tensors
            self.loaded.notify_all()

    def wait_until_loaded(self):
        with self.loaded:
            self.loaded.wait()  # asks nobody if they are there already
        return sum(tensor.sum().item() for tensor in self.tensors)


def refresh(statistics):
    while True:
        statistics.append(sum(i % 7 for i in range(30_000)))
        del statistics[:-10]
        time.sleep(0.1)


def main():
    if option("--refresher", "no", "yes") == "yes":
        threading.Thread(target=refresh, args=([],), daemon=True).start()
    weights = Weights()
    threading.Thread(target=weights.load).start()
    time.sleep(1.0)
    print("fault", flush=True)
    print(weights.wait_until_loaded())


if __name__ == "__main__":
    main()
