# due: HANG:ended or HANG:collective or HANG:process or STALLED:collective;
# line: average, run, launch; rank: 1; within: 30; spawns: 2; set: first
# Rank 1 is killed, as by the OOM killer; nobody ends the others, and the launcher joins rank 0
# first.
import os
import signal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _shared import join
from torch import nn


def average(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def run(rank, size):
    _, device = join(rank=rank, world_size=size)
    model = nn.Linear(1024, 1024).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(300):
        inputs = torch.randn(64, 1024, device=device)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 100 and rank == 1:
            print("fault", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        average(model)
        optimizer.step()
        if step % 20 == 0:
            print(f"rank {rank}, step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


def launch(size):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    context = mp.get_context("spawn")
    ranks = [context.Process(target=run, args=(rank, size)) for rank in range(size)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


if __name__ == "__main__":
    launch(int(os.environ.get("HANGS_RANKS", 2)))
