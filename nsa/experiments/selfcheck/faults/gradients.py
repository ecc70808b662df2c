"""Training that goes on with gradients that are missing, zero, wrong or not finite."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nsa.experiments.selfcheck.faults.small import FROM_STEP, SIZE, Small, TinyNSA
from nsa.lab.search import planted as tracing_faults


class SpoiltNSA(TinyNSA):
    """One of `tracing_faults` in the middle layer: settings["plant"]."""

    def build(self) -> nn.Module:
        model = super().build()
        tracing_faults.plant(self.settings["plant"], model, 0, 1)
        return model


class ChosenGate(Small):
    """Two experts, chosen by an argmax, so that the scores that choose get no gradient."""

    def build(self) -> nn.Module:
        return nn.ModuleDict(
            {
                "scores": nn.Linear(SIZE, 2),
                "first": nn.Linear(SIZE, 1),
                "second": nn.Linear(SIZE, 1),
            }
        )

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
        weights = scores.softmax(-1)
        return self.out(weights.masked_fill(hidden, 0) @ v)


class EmptyRow(Small):
    """A row of a softmax that is masked throughout: NaN, then taken for 0.

    The loss stays finite. With an additive mask (settings["additive"]) NaN goes on into the
    gradients of q and k; with masked_fill its own backward stops it, and all is well.
    """

    def build(self) -> nn.Module:
        return Attending(self.settings["additive"])


class HalfAdam(Small):
    """AdamW on fp16 parameters, in which its eps of 1e-8 is 0: 0 / 0 where a gradient is 0."""

    def __init__(self, settings: dict[str, Any], progress: Any) -> None:
        super().__init__(settings, progress)
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-3)

    def update(self) -> None:
        self.optimizer.step()

    def build(self) -> nn.Module:
        return super().build().half()

    def fetch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(step)
        inputs[:, 0] = 0  # of which no weight learns
        return inputs.half(), targets.half()


class Diverging(Small):
    """A learning rate that is too high by far: losses grow until they are no numbers."""

    rate = 1e9


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
    """Does nothing to a matrix, and returns its gradient with other strides."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.t().contiguous().t()


class OtherStrides(Small):
    """Healthy: gradients whose strides are not their parameters'."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = F.linear(inputs, _Transposed.apply(self.model[0].weight), self.model[0].bias)
        return F.mse_loss(self.model[1:](hidden), targets)


class FrozenPart(Small):
    """Healthy: a layer that is not trained has no gradient, and rightly."""

    def build(self) -> nn.Module:
        model = super().build()
        model[0].requires_grad_(False)
        return model


class DetachedLate(Small):
    """A layer that the loss reaches for FROM_STEP steps and then no more."""

    def forward(self, step: int, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = self.model[:2](inputs)
        if step >= FROM_STEP:
            hidden = hidden.detach()
        return F.mse_loss(self.model[2:](hidden), targets)
