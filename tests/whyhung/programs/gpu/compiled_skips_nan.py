# due: HANG:collective or STALLED:collective; line: share_metrics, train_epoch; rank: 1;
# within: 30; ranks: 2; set: first
# Rank 1 skips a batch whose loss is not finite under torch.compile'd DDP, so that it ends its
# epoch a backward early.
import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def share_metrics(values):
    dist.all_reduce(values)
    return values.tolist()


def train_epoch(model, optimizer, batches):
    metrics = torch.zeros(2, device=batches[0].device)
    for batch in batches:
        loss = (model(batch) - batch).square().mean()
        if not torch.isfinite(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics += torch.stack([loss.detach(), torch.ones_like(loss)])
    return metrics


def main():
    rank, device = join()
    layers = nn.Sequential(nn.Linear(1024, 2048), nn.GELU(), nn.Linear(2048, 1024))
    model = torch.compile(DistributedDataParallel(layers.to(device)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for epoch in range(5):
        batches = [torch.randn(32, 1024, device=device) for _ in range(20)]
        if epoch == 2 and rank == 1:
            batches[7][3, 5] = float("nan")
        metrics = train_epoch(model, optimizer, batches)
        if epoch == 2 and rank == 1:
            print("fault", flush=True)
        print(f"rank {rank}, epoch {epoch}: {share_metrics(metrics)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
