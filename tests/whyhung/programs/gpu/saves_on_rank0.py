# due: healthy; quiet: 45; ranks: 2; set: first
# Rank 0 writes a checkpoint in many parts to a slow disk for 45 s; the others wait in a barrier.
import os
import pathlib
import time

import torch
import torch.distributed as dist
from _shared import SCALE, join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def save_part(tensors, path):
    with open(path, "wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())
    time.sleep(0.5)  # the share takes about 30 MB a second


def save_checkpoint(model, optimizer, folder):
    print("quiet", flush=True)
    folder.mkdir(exist_ok=True)
    end, part = time.monotonic() + 45 * SCALE, 0
    while time.monotonic() < end:
        state = model.state_dict() if part % 2 else optimizer.state_dict()
        save_part(state, folder / f"part-{part % 8}.pt")
        part += 1
    print("over", flush=True)


def main():
    rank, device = join()
    layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device)
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(60):
        inputs = torch.randn(16, 1024, device=device)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        if step == 30:
            if rank == 0:
                save_checkpoint(model.module, optimizer, pathlib.Path("checkpoint"))
            dist.barrier()
    print(f"rank {rank}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
