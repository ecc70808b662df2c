# due: healthy; quiet: 25; ranks: 2; runs: --by join | --by flag; set: late
# Rank 1 has fewer batches and waits 25 s: in DDP's Join, or in an all_reduce of who has data.
import contextlib
import time

import torch
import torch.distributed as dist
from _shared import SCALE, option
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def slow_batch():
    print("quiet", flush=True)
    end, total = time.monotonic() + 25 * SCALE, 0
    while time.monotonic() < end:
        total += sum(i * i for i in range(1000)) % 7
    print("over", flush=True)
    return total


def train(model, by, rank):
    left = torch.ones(1)
    for step in range(6 if by == "flag" or rank == 0 else 4):
        if step == 4 and rank == 0:
            slow_batch()
        if by == "flag":
            dist.all_reduce(left.fill_(float(rank == 0 or step < 4)))
        model(torch.randn(8, 16)).square().mean().backward()


def main():
    by = option("--by", "join", "flag")
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(16, 1))
    with Join([model]) if by == "join" else contextlib.nullcontext():
        train(model, by, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
