"""A training by somebody who never heard of this package: a module, and a function of a step."""

import torch
from torch import nn


class Stranger(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Training:
    """A stranger's training to be tried: settings in, an object with step(i) out."""

    def __init__(self, settings, progress):
        torch.set_num_threads(1)
        self.model = Stranger(settings.get("width", 16), settings.get("depth", 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, i):
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, self.model.layers[0].in_features)).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        return loss
