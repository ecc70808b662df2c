# due: healthy; quiet: 45; ranks: 2; runs: --where main | --where worker; set: first
# Rank 0 builds the index of a corpus for 45 s before its first batch; the others are in their
# first backward.
import time

import numpy as np
import torch
import torch.distributed as dist
from _shared import SCALE, join, option
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset


def build_index(seconds):
    """Draws an order of documents in blocks, as pretraining corpora do."""
    generator, order, end = np.random.default_rng(0), [], time.monotonic() + seconds
    while time.monotonic() < end:
        order.append(np.sort(generator.permutation(200_000))[:64])
    return np.concatenate(order or [np.arange(64)])


class Corpus(Dataset):
    def __init__(self, seconds, early):
        self.seconds = seconds
        self.order = build_index(seconds) if early else None

    def __len__(self):
        return 800

    def __getitem__(self, i):
        if self.order is None:
            self.order = build_index(self.seconds)
        return torch.full((256,), float(self.order[i % len(self.order)] % 7))


def main():
    where = option("--where", "main", "worker")
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(256, 256).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    if rank == 0:
        print("quiet", flush=True)
    data = Corpus(45 * SCALE if rank == 0 else 0, early=where == "main")
    for step, batch in enumerate(DataLoader(data, 16, num_workers=1)):
        if step == 0 and rank == 0:
            print("over", flush=True)
        inputs = batch.to(device)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"rank {rank}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
