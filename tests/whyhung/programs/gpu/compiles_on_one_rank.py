# due: healthy; quiet: 40; ranks: 2; set: first
# Rank 1 meets new shapes and compiles again and again for 40 s with cold caches; the others wait
# for it.
import os
import tempfile
import time

from _shared import SCALE, join

os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.softmax(layer(x), -1) + torch.sin(x) * x.std()
        return x


def warm_up(device):
    """Compiles one network after another until the time is over."""
    print("quiet", flush=True)
    end, depth = time.monotonic() + 40 * SCALE, 2
    while time.monotonic() < end:
        torch.compiler.reset()
        model = torch.compile(Net(depth).to(device), dynamic=False)
        model(torch.randn(8 * depth, 256, device=device)).sum().backward()
        depth += 1
    print("over", flush=True)
    return depth


def main():
    rank, device = join()
    total = torch.zeros(1, device=device)
    for step in range(30):
        if step == 10 and rank == 1:
            total += warm_up(device)
        dist.all_reduce(total)
        if step % 10 == 0:
            print(f"rank {rank}, step {step}: {total.item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
