"""The healthy subject that most planted faults spoil in one place: a small network that learns."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.config import NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.data import Synthetic
from nsa.model.llama import LanguageModel

SIZE = 32  # features
MIB = 2**20
FROM_STEP = 3  # where a fault that begins in the middle begins


class Small:
    """Three linear layers; everything that it draws follows from the seed and the step.

    A fault replaces one of `build`, `prepare`, `fetch`, `forward`, `update` and `ended`. Gradients
    of a step stay until the next one begins. settings: seed (1337).
    """

    device = "cpu"
    batch, rate = 8, 1e-2
    rank, ranks = 0, 1

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        torch.set_num_threads(1)  # a second one gains nothing here, and others want the core
        self.seed = settings.get("seed", 1337)
        torch.manual_seed(self.seed)
        self.settings, self.progress = settings, progress
        self.model = self.build().to(self.device)
        self.called = self.model
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.prepare()

    def step(self, step: int) -> Tensor:
        """One step of training; returns its loss, on the device."""
        self.progress.phase("data")
        inputs, targets = self.fetch(step)
        for parameter in self.trained:
            parameter.grad = None
        self.progress.phase("forward")
        loss = self.forward(step, inputs, targets)
        self.progress.phase("backward")
        self.progress.backward(loss)
        self.progress.phase("optimizer")
        self.update()
        self.ended(step, loss)
        return loss.detach()

    def build(self) -> nn.Module:
        """The model, on the CPU."""
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, 1)
        )

    def prepare(self) -> None:
        """Before the first step."""

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs [B, SIZE] and their means [B, 1]."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(self.batch, SIZE, generator=generator).to(self.device)
        return inputs, inputs.mean(1, keepdim=True)

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return F.mse_loss(self.called(inputs), targets)

    def update(self) -> None:
        """Plain gradient descent: an optimizer of torch's takes a second to load."""
        with torch.no_grad():
            for parameter in self.trained:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.rate)

    def ended(self, step: int, loss: Tensor) -> None:
        """After the optimizer."""

    def close(self) -> None:
        """After the last step."""


class WithAdamW(Small):
    """The same, trained by torch's AdamW."""

    def prepare(self) -> None:
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    def update(self) -> None:
        self.optimizer.step()


class TinyNSA(WithAdamW):
    """A language model of two layers of NSA attention. settings: tokens (48)."""

    # layers, dim, heads, KV heads, head dim; l, d, l', n, w
    config = ModelConfig(
        "tiny", 2, 32, 4, 2, 8, nsa=NSAConfig(4, 2, 8, 4, window=8), backend="gather"
    )

    def build(self) -> nn.Module:
        return LanguageModel(self.config)

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        sizes = 2, self.settings.get("tokens", 48)
        tokens, targets = Synthetic(self.seed, 256).batch(step, *sizes)
        return tokens.to(self.device), targets.to(self.device)

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.called(inputs, targets)[1]
