# due: HANG:collective or STALLED:collective; line: log_and_sync; rank: 0; within: 30; ranks: 2;
# set: first
# Rank 0 logs and calls barrier inside `if rank == 0`; the others are in the next backward
# (barrier on one rank only).
import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def log_and_sync(step, loss, rank):
    if rank == 0:
        print(f"step {step}: {loss.item():.4f}", flush=True)
        if step:
            print("fault", flush=True)
            dist.barrier()


def train_step(model, optimizer, device):
    inputs = torch.randn(32, 2048, device=device)
    loss = (model(inputs) - inputs).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return loss


def main():
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(2048, 2048).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(300):
        loss = train_step(model, optimizer, device)
        if step % 100 == 0:
            log_and_sync(step, loss, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
