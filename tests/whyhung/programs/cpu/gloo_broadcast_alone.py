# due: HANG:collective or STALLED:collective; line: reload_weights, train_step; rank: 1;
# within: 60; ranks: 2; runs: --loader no | --loader yes; set: late
# Rank 1 saw its loss rise and asks for the weights of rank 0, which does not know; it averages
# gradients (gloo).
import torch
import torch.distributed as dist
from _shared import option
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def reload_weights(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def train_step(model, batch):
    model.zero_grad()
    loss = (model(batch) - batch).square().mean()
    loss.backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    dist.reduce(flat, dst=0)
    return loss.item()


def main():
    loader = option("--loader", "no", "yes")
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), nn.Linear(64, 64)
    data, workers = TensorDataset(torch.randn(4000, 64)), 2 * (loader == "yes")
    for step, (batch,) in enumerate(DataLoader(data, 8, num_workers=workers)):
        loss = train_step(model, batch)
        dist.barrier()
        if step == 120 and rank == 1:
            loss = 1e6
        if loss > 1e3:
            print("fault", flush=True)
            reload_weights(model)
    print(f"rank {rank} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
