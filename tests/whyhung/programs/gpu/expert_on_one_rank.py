# due: HANG:collective or STALLED:collective; line: mean_loss, train_step; rank: 1; within: 30;
# ranks: 2; set: first
# Rank 1's batch has no token for the second expert, so DDP never reduces its bucket there (branch
# in forward, unused parameters).
import torch
import torch.distributed as dist
from _shared import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Mixture(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.common = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x, kinds):
        x = torch.relu(self.common(x))
        out = self.experts[0](x)
        if (kinds == 1).any():
            out = torch.where(kinds[:, None] == 1, self.experts[1](x), out)
        return self.head(out).squeeze(-1)


def mean_loss(loss):
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def train_step(model, optimizer, x, kinds):
    loss = model(x, kinds).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return mean_loss(loss)


def main():
    rank, device = join()
    torch.manual_seed(rank)
    model = DistributedDataParallel(Mixture(2048).to(device))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(200):
        x = torch.randn(64, 2048, device=device)
        kinds = torch.arange(64, device=device) % 2
        if step == 50 and rank == 1:
            kinds = torch.zeros_like(kinds)
            print("fault", flush=True)
        loss = train_step(model, optimizer, x, kinds)
        if step % 10 == 0 and rank == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
