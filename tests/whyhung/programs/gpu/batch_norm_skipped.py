# due: HANG:collective or STALLED:collective; line: forward, detect, train_step; rank: 1;
# within: 30; ranks: 2; set: late
# Rank 1 has an image without boxes and skips the box head, whose SyncBatchNorm the others are in
# (detection training hangs).
import torch
import torch.distributed as dist
from _shared import join
from torch import nn


class Detector(nn.Module):
    def __init__(self, width, cuda):
        super().__init__()
        self.backbone = nn.Linear(width, width)
        self.boxes = nn.Sequential(nn.Linear(width, width), self.norm(width, cuda))
        self.classes = nn.Linear(width, 8)

    @staticmethod
    def norm(width, cuda):
        return nn.SyncBatchNorm(width) if cuda else Mean()

    def detect(self, features, count):
        return self.boxes(features[:count]).square().mean() if count else features.sum() * 0

    def forward(self, x, count):
        features = torch.relu(self.backbone(x))
        return self.classes(features).square().mean() + self.detect(features, count)


class Mean(nn.Module):
    """Stands for SyncBatchNorm, which wants a GPU."""

    def forward(self, x):
        mean = x.detach().mean(0)
        dist.all_reduce(mean)
        return x - mean


def train_step(model, optimizer, x, count):
    loss = model(x, count)
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    optimizer.step()
    return loss.item()


def main():
    rank, device = join()
    model = Detector(1024, device.type == "cuda").to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for step in range(200):
        count = 16
        if step == 90 and rank == 1:
            print("fault", flush=True)
            count = 0
        loss = train_step(model, optimizer, torch.randn(32, 1024, device=device), count)
        if step % 20 == 0 and rank == 0:
            print(f"step {step}: {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
