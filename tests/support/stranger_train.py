"""A training script as people write them; it knows nothing of whoever watches it."""

import argparse
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.body(x)


def evaluate(rank, how):
    """Evaluate: goes wrong, or only takes long."""
    if how == "lock":
        lock = threading.Lock()
        with lock, lock:
            return
    if how == "wait":
        time.sleep(7)
    if how == "stuck" and rank == 1:
        threading.Event().wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--how", default="")
    parser.add_argument("--time", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", "0"))
    model = Net(args.width)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds = []
    for step in range(args.steps):
        began = time.process_time()
        x = torch.randn(32, args.width)
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seconds.append(time.process_time() - began)
        if step == 5:
            evaluate(rank, args.how)
    if rank == 0:
        print(f"loss {loss.item():.4f} after {args.steps} steps", flush=True)
    if args.time:
        print(sorted(seconds)[len(seconds) // 2] * 1e6, file=sys.stderr)


if __name__ == "__main__":
    main()
