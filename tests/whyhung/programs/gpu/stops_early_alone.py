# due: HANG:collective or STALLED:collective; line: train_epoch, best_of_all, main; rank: 1;
# within: 30; ranks: 2; set: late
# Each rank decides by its own validation loss when to stop: rank 1 is in the final gather, the
# others train on (early stopping).
import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def stops(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad >= self.patience


def train_epoch(model, optimizer, device):
    for _ in range(20):
        inputs = torch.randn(32, 1024, device=device)
        loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def best_of_all(best):
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, best)
    return min(every)


def main():
    rank, device = join()
    model = DistributedDataParallel(nn.Linear(1024, 1024).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    stopping = EarlyStopping(patience=3)
    for epoch in range(100):
        train_epoch(model, optimizer, device)
        validation = 1.0 / (1 + (min(epoch, 5) if rank == 1 else epoch))
        if rank == 0:
            print(f"epoch {epoch}: {validation:.4f}", flush=True)
        if stopping.stops(validation):
            print("fault", flush=True)
            break
    print("best", best_of_all(stopping.best), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
