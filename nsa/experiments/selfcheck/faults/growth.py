"""Memory that is kept from step to step, and some that only looks so."""

import gc
from typing import Any

import torch
from torch import Tensor, nn

from nsa.experiments.selfcheck.faults.small import SIZE, Small, TinyNSA

MIB = 2**20


class KeptTensors(Small):
    """A list that gets a tensor of 2 MiB each step, without a graph behind it."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.kept: list[Tensor] = []

    def ended(self, step: int, loss: Tensor) -> None:
        self.kept.append(torch.full((2 * MIB // 4,), float(step)))


class KeptGraph(Small):
    """A running sum of a parameter that is never detached.

    Each step's backward goes through all the steps before; nothing else shows it.
    """

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.total: Tensor | float = 0.0

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        self.total = self.total + self.model[4].bias
        return super().forward(step, inputs, targets + (self.total - self.total.detach()))


class KeptLosses(Small):
    """A running sum of losses with their graphs, and all that those hold: 5 MiB a step."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.total: Tensor | float = 0.0

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        return inputs.repeat(1024, 1), targets.repeat(1024, 1)

    def ended(self, step: int, loss: Tensor) -> None:
        self.total = self.total + loss


class Cycle(Small):
    """Objects that point at each other hold 2 MiB a step, and the collector is off."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        gc.disable()

    def ended(self, step: int, loss: Tensor) -> None:
        first, second = _Part(step), _Part(step)
        first.other, second.other = second, first


class _Part:
    def __init__(self, step: int) -> None:
        self.tensor = torch.full((MIB // 4,), float(step))
        self.other: Any = None


class KeptMasks(Small):
    """A dense T x T mask for every T that was seen, kept; T grows from step to step."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.masks: dict[int, Tensor] = {}

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        tokens = 256 + 64 * step
        if tokens not in self.masks:
            self.masks[tokens] = torch.ones(tokens, tokens).tril()
        return super().fetch(step)


class Dense(Small):
    """Attention written out over settings["tokens"] tokens: its weights are kept, T x T of them."""

    def build(self) -> nn.Module:
        return nn.ModuleDict({"qkv": nn.Linear(SIZE, 3 * SIZE), "out": nn.Linear(SIZE, 1)})

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        times = self.settings["tokens"] // len(inputs)
        return inputs.repeat(times, 1), targets.repeat(times, 1)

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        q, k, v = self.model["qkv"](inputs).chunk(3, -1)  # [T, SIZE] each
        weights = (q @ k.T).softmax(-1)
        return (self.model["out"](weights @ v) - targets).square().mean()


class OneAllocation(TinyNSA):
    """Healthy: one buffer of 192 MiB, made late and kept, as a workspace is."""

    def ended(self, step: int, loss: Tensor) -> None:
        if step == 12:
            self.workspace = torch.ones(192 * MIB // 4)


class CollectedCycle(Cycle):
    """Healthy: the same cycles, which the collector takes every fourth step."""

    def ended(self, step: int, loss: Tensor) -> None:
        super().ended(step, loss)
        if step % 4 == 3:
            gc.collect()
