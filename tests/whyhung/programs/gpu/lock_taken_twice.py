# due: HANG:lock or STALLED:lock; line: lookup, evict; rank: 1; within: 30; ranks: 2; set: first
# Rank 1's feature cache is full: it evicts with the lock that it holds already, while the others
# are in all_reduce.
import threading

import torch
import torch.distributed as dist
from _shared import join
from torch import nn


class FeatureCache:
    def __init__(self, capacity, device):
        self.lock = threading.Lock()
        self.capacity = capacity
        self.device = device
        self.rows = {}

    def lookup(self, key):
        with self.lock:
            if key not in self.rows:
                if len(self.rows) >= self.capacity:
                    print("fault", flush=True)
                    self.evict()
                self.rows[key] = torch.randn(256, device=self.device)
            return self.rows[key]

    def evict(self):
        with self.lock:
            self.rows.pop(next(iter(self.rows)))


def main():
    rank, device = join()
    cache = FeatureCache(500 if rank == 1 else 100_000, device)
    model = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(500):
        rows = torch.stack([cache.lookup(step * 16 + i) for i in range(16)])
        loss = (model(rows) - rows).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
