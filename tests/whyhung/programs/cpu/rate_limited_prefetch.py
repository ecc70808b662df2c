# due: healthy; quiet: 25; runs: --batch 14 | --batch 5; set: first
# A thread may make one request each 2 s; a batch waits until enough of them are there.
import queue
import threading
import time

import torch
from _shared import SCALE, option


def request(number):
    return [float(number % 5)] * 8


def prefetch(samples, count):
    for number in range(count):
        samples.put(request(number))
        time.sleep(2 * SCALE)


def main():
    form = option("--batch", 14)
    samples, model = queue.Queue(), torch.nn.Linear(8, 1)
    threading.Thread(target=prefetch, args=(samples, 15), daemon=True).start()
    print("quiet", flush=True)
    for _ in range(14 // form + (14 % form > 0)):
        batch = torch.tensor([samples.get() for _ in range(form)])
        model(batch).mean().backward()
    print("over", flush=True)


if __name__ == "__main__":
    main()
