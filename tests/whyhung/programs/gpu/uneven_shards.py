# due: HANG:collective or STALLED:collective; line: epoch_loss, train; rank: 0; within: 30;
# ranks: 2; set: first
# Rank 0's shard is a batch shorter: it is in the epoch's metric, the others in a backward (DDP
# hangs at the end of an epoch).
import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def epoch_loss(total, seen):
    both = torch.stack([total, torch.full_like(total, seen)])
    dist.all_reduce(both)
    return (both[0] / both[1]).item()


def train(model, optimizer, device, batches):
    total = torch.zeros((), device=device)
    for _ in range(batches):
        inputs = torch.randn(32, 1024, device=device)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach()
    return total


def main():
    rank, device = join()
    layers = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
    model = DistributedDataParallel(layers.to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for epoch in range(3):
        batches = 59 if rank == 0 and epoch == 1 else 60
        total = train(model, optimizer, device, batches)
        if rank == 0 and epoch == 1:
            print("fault", flush=True)
        mean = epoch_loss(total, batches)
        if rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
