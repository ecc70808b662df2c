"""What a rank takes of a batch, micro-batch by micro-batch, and with what weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.model.parallel import Parallel

IGNORED = -100  # a target that is not scored, as cross entropy has it


@dataclass(frozen=True)
class Share:
    """A rank's rows, [b, T] each, which `micro()` splits; weights [accumulate], or None for 1."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor | None
    accumulate: int = 1

    def micro(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """(tokens, targets, weight) of each micro-batch."""
        each = [None] * self.accumulate if self.weights is None else self.weights.unbind()
        halves = self.tokens.chunk(self.accumulate), self.targets.chunk(self.accumulate)
        return list(zip(*halves, each, strict=True))

    def tensors(self) -> list[Tensor]:
        """Those that there are."""
        return [x for x in (self.tokens, self.targets, self.weights) if x is not None]

    def to(self, device: torch.device) -> "Share":
        """On that device, without waiting for it."""
        moved = (None if x is None else _moved(x, device) for x in self._fields())
        return Share(*moved, self.accumulate)

    def clone(self) -> "Share":
        """In memory of its own."""
        return Share(*(None if x is None else x.clone() for x in self._fields()), self.accumulate)

    def _fields(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.tokens, self.targets, self.weights


def share_of(
    tokens: Tensor, targets: Tensor, parallel: Parallel, accumulate: int, rows: slice
) -> Share:
    """The share of one rank in a whole batch, which every rank has drawn.

    A micro-batch weighs what it has of the batch's scored targets, times the ranks over which
    gradients are averaged: all micro-batches of all ranks make the mean over scored targets.
    """
    weights = None
    if parallel.ranks * accumulate > 1:
        scored = (targets != IGNORED).reshape(parallel.ranks, accumulate, -1).sum(-1)
        weights = (scored[parallel.rank].double() * parallel.ranks / scored.sum()).float()
    return Share(tokens[rows], targets[rows], weights, accumulate)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and x.device.type == "cpu":
        # From memory that is not pinned, the copy would wait for the step before to end.
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
