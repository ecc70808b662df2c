"""A string and its copy."""

from dataclasses import dataclass
from typing import Any

import torch

from nsa.model.data import Batch, check_sizes, generator
from nsa.model.tasks.common import MARK, check_ints, check_range, described, limits, scored


@dataclass(frozen=True)
class Copy:
    """A random string, marked, and once more after a second mark: each symbol of that is scored.

    No symbol comes twice in a string, so the one before tells which is next: two layers can do it,
    one that tells each token its predecessor and one that looks for the token whose predecessor
    equals the present one. Filler (id 1) stands before the string and between it and the second
    mark; `distance` is from a symbol to its copy, the largest that fits by default, or drawn anew
    for each row from a pair (least, most).
    """

    seed: int = 1337
    vocab: int = 64
    length: int = 32  # symbols of the string
    distance: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_ints(self, vocab=4, length=1)
        if self.length > self.vocab - 2:
            raise ValueError(
                f"length={self.length} symbols of which none comes twice need vocab >= "
                f"{self.length + 2}, got {self.vocab}; at most {self.vocab - 2} would do"
            )
        check_range("distance", self.distance, self.length + 1)

    @property
    def chance(self) -> float:
        """Of the symbols that have not come yet, one is next."""
        left = [1 / (self.vocab - 2 - given) for given in range(self.length)]
        return sum(left) / len(left)

    def batch(
        self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"
    ) -> Batch:
        """ValueError where `tokens` tokens do not hold the two strings at their distance."""
        check_sizes(step, batch, tokens)
        # Symbols at first + 1 .., copies `distance` later, the last of which is the last target.
        longest = tokens - self.length
        low, high = limits(self.distance, longest)
        if high > longest or low <= self.length:
            raise ValueError(
                f"{tokens} tokens do not hold a string of {self.length} and its copy at a distance "
                f"of {high if high > longest else low}; the least tokens that do are "
                f"{self.length + max(high, self.length + 1)}"
            )
        random = generator(self.seed, step)
        symbols = torch.rand(batch, self.vocab - 2, generator=random).argsort(1)[:, : self.length]
        distance = torch.randint(low, high + 1, (batch, 1), generator=random)
        copy = tokens + 1 - self.length + torch.arange(self.length)  # [L], of tokens + 1 ids
        ids = torch.full((batch, tokens + 1), 1)
        ids[:, copy] = symbols + 2
        ids.scatter_(1, copy - distance, symbols + 2)
        ids[:, copy[0] - 1] = MARK
        ids.scatter_(1, copy[0] - 1 - distance, MARK)
        return scored(ids, copy.expand(batch, -1), device)

    def record(self) -> dict[str, Any]:
        return described(self)
