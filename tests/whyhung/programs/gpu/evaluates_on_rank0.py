# due: healthy; quiet: 50; ranks: 2; runs: --sync barrier | --sync all_reduce; set: first
# Rank 0 evaluates for 50 s on its CPU and GPU while the other ranks wait in a collective.
import collections
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join, option
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def grams(text, n):
    return collections.Counter(tuple(text[i : i + n]) for i in range(len(text) - n + 1))


@torch.no_grad()
def evaluate(model, device):
    print("quiet", flush=True)
    hits, end = 0, time.monotonic() + 50 * SCALE
    while time.monotonic() < end:
        answers = model(torch.randn(256, 512, device=device)).argsort(-1)[:8].tolist()
        for answer in answers:
            hits += sum((grams(answer, 4) & grams(sorted(answer), 4)).values())
    print("over", flush=True)
    return hits


def main():
    sync = option("--sync", "barrier", "all_reduce")
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(512, 512).to(device))
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(2):
        for _ in range(50):
            inputs = torch.randn(64, 512, device=device)
            optimizer.zero_grad()
            (model(inputs) - inputs).square().mean().backward()
            optimizer.step()
        if rank == 0 and epoch == 0:
            print("hits", evaluate(model.module, device), flush=True)
        if sync == "barrier":
            dist.barrier()
        else:
            ready = torch.ones(1, device=device)
            dist.all_reduce(ready)
            print("ranks that are ready:", ready.item(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
