"""Loss and accuracy of a model by the position of the token in its row."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.nn import functional as F

from nsa.model.data import IGNORED, Data
from nsa.model.train_config import autocast


@dataclass(frozen=True)
class ByPosition:
    """Sums over rows at each of T positions, fp64 on the CPU."""

    nats: Float64[Tensor, " T"]  # cross entropy
    right: Float64[Tensor, " T"]  # targets that are the most likely id
    scored: Float64[Tensor, " T"]  # targets

    @property
    def bits(self) -> float:
        """Mean bits of a scored target; of bytes, bits a byte."""
        return float(self.nats.sum() / self.scored.sum()) / math.log(2)

    @property
    def accuracy(self) -> float:
        return float(self.right.sum() / self.scored.sum())

    def buckets(self, least: int = 64) -> dict[int, float]:
        """Mean bits of positions in [0, least), [least, 2 least), [2 least, 4 least) and so on, by
        the first position after each; without those in which nothing is scored."""
        found, start, end = {}, 0, least
        while start < len(self.nats):
            part = slice(start, end)
            if count := float(self.scored[part].sum()):
                found[min(end, len(self.nats))] = float(self.nats[part].sum()) / count / math.log(2)
            start, end = end, 2 * end
        return found


@torch.no_grad()
def by_position(
    model: nn.Module,
    data: Data,
    *,
    batch: int,
    tokens: int,
    batches: int,
    first_step: int = 0,
    precision: str = "fp32",
) -> ByPosition:
    """Evaluate the model on `batches` batches of `data`, which it was not trained on.

    Targets of -100 are not scored. Waits for the device once.
    """
    device, training = next(model.parameters()).device, model.training
    sums = torch.zeros(3, tokens, dtype=torch.float64, device=device)
    model.eval()
    try:
        for step in range(first_step, first_step + batches):
            ids, targets = data.batch(step, batch, tokens, device)
            with autocast(precision, device):
                logits, _ = model(ids)
            nats = F.cross_entropy(logits.float().mT, targets, reduction="none")  # [B, T]
            scored = targets != IGNORED
            right = (logits.argmax(-1) == targets) & scored
            sums += torch.stack((nats, right, scored)).double().sum(1)
    finally:
        model.train(training)
    return ByPosition(*sums.cpu())
