# due: STALLED:stopped or HANG:stopped; line: checkpoint_signal, train_step; rank: 1; within: 30;
# ranks: 2; set: first
# Rank 1 is stopped by SIGSTOP, as a scheduler that suspends one node's job does; the others wait
# in their all_reduce.
import os
import signal

import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def checkpoint_signal(rank):
    if rank == 1:
        print("fault", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)


def train_step(model, optimizer, device):
    inputs = torch.randn(64, 512, device=device)
    loss = (model(inputs) - inputs).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def main():
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(512, 512).to(device))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(1, 400):
        loss = train_step(model, optimizer, device)
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
        if step == 150:
            checkpoint_signal(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
