# due: HANG:collective or STALLED:collective; line: keep_best, train_step; rank: 0; within: 30;
# ranks: 2; set: late
# Rank 0 alone calls torch.distributed.checkpoint.save when its loss is the best; the others are
# in the next step.
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def keep_best(model, loss, best, rank):
    if loss < best and rank == 0:
        print("fault", flush=True)
        dcp.save({"model": model.module.state_dict()}, checkpoint_id="best")
    return min(loss, best)


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
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    best = float("inf")
    for step in range(300):
        loss = train_step(model, optimizer, device)
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
        if step == 100:
            best = keep_best(model, loss, best, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
