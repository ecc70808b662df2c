"""A stranger's training that builds a T x T matrix in one line, and keeps it for the backward."""

import torch
from torch import nn

T = 512


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        y = self.mix(x)
        return torch.sigmoid(y @ y.T).mean()  # the planted line


class Stranger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Scores(), Scores()])

    def forward(self, x):
        return sum(layer(x) for layer in self.layers)


class Training:
    def __init__(self, settings, progress):
        torch.set_num_threads(1)
        self.model = Stranger()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.fails = settings.get("fails")

    def step(self, i):
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(T, 8))
        if i == self.fails:
            raise MemoryError("planted")
        loss.backward()
        self.optimizer.step()
        return loss
