# due: healthy; quiet: 45; ranks: 2; set: first
# Rank 1 has long documents: it accumulates gradients under no_sync for 45 s, the others wait in
# the synchronized backward.
import contextlib
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def micro_batches(rank, step, device):
    """Yields inputs, each with a mark of the last one."""
    end = time.monotonic() + (45 * SCALE if step == 5 and rank == 1 else 0)
    while True:
        last = time.monotonic() >= end
        yield torch.randn(64, 1024, device=device), last
        if last:
            return


def train_step(model, optimizer, batches):
    optimizer.zero_grad()
    for inputs, last in batches:
        with contextlib.nullcontext() if last else model.no_sync():
            loss = (model(inputs) - inputs).square().mean()
            loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def main():
    rank, device = join()
    layers = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(12):
        if step == 5 and rank == 1:
            print("quiet", flush=True)
        loss = train_step(model, optimizer, micro_batches(rank, step, device))
        if step == 5 and rank == 1:
            print("over", flush=True)
        print(f"rank {rank}, step {step}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
