# due: HANG:process or HANG:ended or HANG:queue or HANG:pipe or STALLED:queue or STALLED:pipe;
# line: train; within: 60; set: first
# The process that fills a queue crashed (segmentation fault in a decoder); the trainer waits in
# get without a timeout.
import ctypes
import multiprocessing
import time

import torch


def decode(number):
    if number == 400:
        print("fault", flush=True)
        ctypes.string_at(0)
    return [float(number % 7)] * 16


def produce(samples):
    for number in range(1000):
        samples.put(decode(number))


def train(samples):
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(1000):
        inputs = torch.tensor(samples.get())
        loss = model(inputs).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.002)
    return loss.item()


def main():
    samples = multiprocessing.Queue(64)
    multiprocessing.Process(target=produce, args=(samples,), daemon=True).start()
    print("loss", train(samples))


if __name__ == "__main__":
    main()
