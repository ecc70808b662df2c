# due: HANG:collective or STALLED:collective; line: run_epoch, finish, train_step; rank: 1;
# within: 30; ranks: 2; set: late
# Rank 1's epoch is ended by an exception that is logged and swallowed; it waits in barrier while
# the others are in a backward.
import logging

import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def parse(record):
    return float(record.split(":")[1])


def train_step(model, optimizer, scale, device):
    inputs = torch.randn(32, 2048, device=device) * scale
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def run_epoch(model, optimizer, records, device):
    try:
        for record in records:
            train_step(model, optimizer, parse(record), device)
    except Exception:
        logging.exception("this epoch has ended early")
        print("fault", flush=True)


def finish(epoch, rank):
    dist.barrier()
    if rank == 0:
        print(f"epoch {epoch} is done", flush=True)


def main():
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(2048, 2048).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(4):
        records = [f"scale:{1 + i % 3}" for i in range(50)]
        if epoch == 2 and rank == 1:
            records[30] = "scale 1"
        run_epoch(model, optimizer, records, device)
        finish(epoch, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
