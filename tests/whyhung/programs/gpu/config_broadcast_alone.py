# due: HANG:collective or STALLED:collective; line: share_config, train_step; rank: 0; within: 30;
# ranks: 2; set: late
# Rank 0 found a newer config file and broadcasts it; the others did not see the file and train on
# (broadcast_object_list on one rank).
import pathlib

import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def share_config(path):
    config = [path.read_text()]
    dist.broadcast_object_list(config, src=0)
    return config[0]


def train_step(model, optimizer, device):
    inputs = torch.randn(32, 2048, device=device)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(2048, 2048).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    path = pathlib.Path(f"config-of-{rank}.json")  # a local disk; nobody wrote it on the others
    for step in range(200):
        loss = train_step(model, optimizer, device)
        if step == 80 and rank == 0:
            path.write_text('{"rate": 0.01}')
        if path.exists():
            print("fault", flush=True)
            print(share_config(path), flush=True)
            path.unlink()
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
