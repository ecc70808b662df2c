"""The healthy subject that most planted faults spoil in one place: a small network that learns."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.config import NSAConfig
from nsa.model.config import ModelConfig
from nsa.model.data import Synthetic
from nsa.model.llama import LanguageModel

SIZE, BATCH = 32, 8
MIB = 2**20
FROM_STEP = 3  # where a fault that begins in the middle begins


class Small:
    """Three linear layers; everything that it draws follows from the seed and the step.

    A fault replaces one of `build`, `fetch`, `forward`, `backward`, `update` and `ended`. Gradients
    of a step stay until the next one begins.
    """

    device = "cpu"
    rate = 1e-2

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        """settings: seed (1337)."""
        torch.set_num_threads(1)  # a second one gains nothing here, and others want the core
        torch.manual_seed(settings.get("seed", 1337))
        self.settings, self.progress = settings, progress
        self.model = self.build().to(self.device)
        self.called = self.model
        self.trained = [p for p in self.model.parameters() if p.requires_grad]

    def step(self, step: int) -> Tensor:
        """One step of training; returns its loss, on the device."""
        self.progress.phase("data")
        inputs, targets = self.fetch(step)
        for parameter in self.trained:
            parameter.grad = None
        self.progress.phase("forward")
        loss = self.forward(step, inputs, targets)
        self.progress.phase("backward")
        self.backward(step, loss)
        self.progress.phase("optimizer")
        self.update()
        self.ended(step, loss)
        return loss.detach()

    def build(self) -> nn.Module:
        """The model, on the CPU."""
        return nn.Sequential(
            nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Linear(SIZE, 1)
        )

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs [B, SIZE] and what they sum to [B, 1]."""
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(BATCH, SIZE, generator=generator).to(self.device)
        return inputs, inputs.mean(1, keepdim=True)

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return F.mse_loss(self.called(inputs), targets)

    def backward(self, step: int, loss: Tensor) -> None:
        self.progress.backward(loss)

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


class TinyNSA(Small):
    """The same with AdamW, and a language model of two layers of NSA attention, T 48."""

    config = ModelConfig(
        name="tiny",
        layers=2,
        dim=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        nsa=NSAConfig(
            compress_block=4, compress_stride=2, select_block=8, select_count=4, window=8
        ),
        backend="gather",
    )

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    def build(self) -> nn.Module:
        return LanguageModel(self.config)

    def update(self) -> None:
        self.optimizer.step()

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        tokens, targets = Synthetic(self.settings.get("seed", 1337), 256).batch(step, 2, 48)
        return tokens.to(self.device), targets.to(self.device)

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.called(inputs, targets)[1]
