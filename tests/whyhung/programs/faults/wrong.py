"""Training that goes on and is wrong: gradients that are missing, zero, wrong or not finite, and
memory that is kept from step to step. Beside each, healthy ones that only look so."""

import gc
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from faults.small import FROM_STEP, MIB, SIZE, Small, TinyNSA, WithAdamW
from workbook.lab.search import planted as tracing_faults


class SpoiltNSA(TinyNSA):
    """One of `tracing_faults` in the middle layer: settings["plant"] ("rank branch")."""

    def build(self) -> nn.Module:
        model = super().build()
        fault = self.settings.get("plant", "rank branch")
        tracing_faults.plant(fault, model, self.rank, self.ranks)
        return model


class ChosenGate(Small):
    def build(self) -> nn.Module:
        sizes = {"scores": 2, "first": 1, "second": 1}
        return nn.ModuleDict({name: nn.Linear(SIZE, size) for name, size in sizes.items()})

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        experts = torch.cat([self.model["first"](inputs), self.model["second"](inputs)], 1)
        chosen = self.model["scores"](inputs).argmax(1, keepdim=True)
        return F.mse_loss(experts.gather(1, chosen), targets)


class Attending(nn.Module):
    """One head of attention over a causal mask whose first row sees nothing."""

    def __init__(self, additive: bool) -> None:
        super().__init__()
        self.additive = additive
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)  # [T, SIZE] each
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu()
        if self.additive:
            scores = q @ k.T + torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        else:
            scores = (q @ k.T).masked_fill(hidden, float("-inf"))
        return self.out(scores.softmax(-1).masked_fill(hidden, 0) @ v)


class EmptyRow(Small):
    """A row of a softmax that is masked throughout: NaN, then taken for 0.

    The loss stays finite. With an additive mask (settings["additive"]) NaN goes on into the
    gradients of q and k; with masked_fill its own backward stops it, and all is well.
    """

    def build(self) -> nn.Module:
        return Attending(self.settings["additive"])


class HalfAdam(WithAdamW):
    """AdamW on fp16 parameters, in which its eps of 1e-8 is 0: 0 / 0 where a gradient is 0."""

    def build(self) -> nn.Module:
        return super().build().half()

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        inputs[:, 0] = 0  # of which no weight learns
        return inputs.half(), targets.half()


class Recomputed(Small):
    """A checkpointed block whose recomputation takes another branch than its forward took.

    torch raises nothing: it compares the saved tensors' shapes only. settings: spoilt, False for a
    block that does as it did; checkpoint, "" for none.
    """

    calls = 0

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[0](inputs)
        if self.settings.get("checkpoint", "all"):
            hidden = checkpoint(self._activated, hidden, use_reentrant=False)
        else:
            hidden = hidden.tanh()
        return F.mse_loss(self.model[2:](hidden), targets)

    def _activated(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        even = self.settings["spoilt"] and self.calls % 2 == 0
        return hidden.sigmoid() if even else hidden.tanh()


class _Transposed(torch.autograd.Function):
    """The same matrix, whose gradient gets other strides."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.t().contiguous().t()


class OtherStrides(Small):
    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = F.linear(inputs, _Transposed.apply(self.model[0].weight), self.model[0].bias)
        return F.mse_loss(self.model[1:](hidden), targets)


class FrozenPart(Small):
    def build(self) -> nn.Module:
        model = super().build()
        model[0].requires_grad_(False)
        return model


class DetachedLate(Small):
    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[:2](inputs)
        if step >= FROM_STEP:
            hidden = hidden.detach()
        return F.mse_loss(self.model[2:](hidden), targets)


class KeptTensors(Small):
    def prepare(self) -> None:
        self.kept: list[Tensor] = []

    def ended(self, step: int, loss: Tensor) -> None:
        super().ended(step, loss)
        self.kept.append(torch.full((2 * MIB // 4,), float(step), device=self.device))


class KeptGraph(Small):
    """A running sum of a parameter that is never detached.

    Each step's backward goes through all the steps before; nothing else shows it.
    """

    total: Tensor | float = 0.0

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        self.total = self.total + self.model[4].bias
        return super().forward(step, inputs, targets + (self.total - self.total.detach()))


class KeptLosses(Small):
    batch = 8192  # 5 MiB a step
    total: Tensor | float = 0.0

    def ended(self, step: int, loss: Tensor) -> None:
        self.total = self.total + loss


class Cycle(Small):
    def prepare(self) -> None:
        gc.disable()

    def ended(self, step: int, loss: Tensor) -> None:
        first, second = (SimpleNamespace(held=torch.ones(MIB // 4)) for _ in range(2))
        first.other, second.other = second, first


class KeptMasks(Small):
    def prepare(self) -> None:
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

    def prepare(self) -> None:
        self.batch = self.settings["tokens"]

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        q, k, v = self.model["qkv"](inputs).chunk(3, -1)  # [T, SIZE] each
        weights = (q @ k.T).softmax(-1)
        return (self.model["out"](weights @ v) - targets).square().mean()


class OneAllocation(TinyNSA):
    def ended(self, step: int, loss: Tensor) -> None:
        if step == 12:
            self.workspace = torch.ones(192 * MIB // 4)


class CollectedCycle(Cycle):
    def ended(self, step: int, loss: Tensor) -> None:
        super().ended(step, loss)
        if step % 4 == 3:
            gc.collect()
