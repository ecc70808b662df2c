"""Associative recall of many pairs."""

from dataclasses import dataclass
from typing import Any

import torch

from nsa.model.data import Batch, check_sizes, generator
from nsa.model.tasks.common import check_ints, check_range, described, limits, scored


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (arXiv 2312.04927): pairs first, then every key once more.

    `pairs` keys, each followed by its value; then `gap` tokens of filler (id 1), as many as fit by
    default or drawn for each row from a pair (least, most); then the same keys in another order,
    each followed by its value, all of which are scored. What is left stands in front as filler.
    Keys and values share the rest of the vocabulary half and half.
    """

    seed: int = 1337
    vocab: int = 128
    pairs: int = 16
    gap: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_ints(self, vocab=4, pairs=1)
        if self.pairs > self.symbols:
            raise ValueError(
                f"pairs={self.pairs} need as many keys; vocab={self.vocab} has {self.symbols}, "
                f"vocab={2 + 2 * self.pairs} would do"
            )
        check_range("gap", self.gap, 0)

    @property
    def symbols(self) -> int:
        """Keys, and as many values."""
        return (self.vocab - 2) // 2

    @property
    def chance(self) -> float:
        """One of the values."""
        return 1 / self.symbols

    def batch(
        self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"
    ) -> Batch:
        """ValueError where `tokens` tokens do not hold every pair twice, and the gap."""
        check_sizes(step, batch, tokens)
        width = 2 * self.pairs
        room = tokens + 1 - 2 * width  # the last value is a target only
        low, high = limits(self.gap, room)
        if high > room or room < 0:
            raise ValueError(
                f"{tokens} tokens do not hold {self.pairs} pairs twice and a gap of "
                f"{max(high, 0)}; {2 * width - 1 + max(high, 0)} would do"
            )
        random = generator(self.seed, step)
        key = torch.rand(batch, self.symbols, generator=random).argsort(1)[:, : self.pairs] + 2
        value = torch.randint(self.symbols, key.shape, generator=random) + 2 + self.symbols
        order = torch.rand(batch, self.pairs, generator=random).argsort(1)
        gap = torch.randint(low, high + 1, (batch, 1), generator=random)
        ids = torch.full((batch, tokens + 1), 1)
        place = torch.arange(width) + room - gap
        ids.scatter_(1, place, torch.stack((key, value), -1).flatten(1))
        again = torch.stack((key.gather(1, order), value.gather(1, order)), -1)
        ids[:, -width:] = again.flatten(1)
        answers = tokens + 2 - width + 2 * torch.arange(self.pairs)
        return scored(ids, answers.expand(batch, -1), device)

    def record(self) -> dict[str, Any]:
        return described(self)
