"""A needle in a haystack."""

from dataclasses import dataclass
from typing import Any

import torch

from nsa.model.data import Batch, check_sizes, generator
from nsa.model.tasks.common import MARK, check_ints, check_range, described, limits, scored


@dataclass(frozen=True)
class Needle:
    """A value hidden in filler and asked for at the end of the row: one scored token.

    Without keys (`pairs` = 1) the only value in the row is the answer, and one layer finds it. With
    more pairs each value follows a key of its own, the question is a mark and one of the keys, and
    it takes two layers, as in Copy. Filler is drawn uniformly from `filler` ids.

    `distance` is from the question (the last token) to the value asked for: a number, a pair
    (least, most) to draw from, or None for any that fits. So (w, w) puts it one token outside a
    window of w, and (w - 1, w - 1) just inside.
    """

    seed: int = 1337
    vocab: int = 64
    values: int = 16
    pairs: int = 1
    filler: int = 16
    distance: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_ints(self, vocab=4, values=2, pairs=1, filler=1)
        if self.keys < (self.pairs if self.pairs > 1 else 0):
            raise ValueError(
                f"vocab={self.vocab} leaves {self.keys} keys beside the mark, {self.values} values "
                f"and {self.filler} ids of filler; {self.pairs} pairs need vocab >= "
                f"{1 + self.values + self.filler + self.pairs}"
            )
        check_range("distance", self.distance, 1 if self.pairs == 1 else 2)

    @property
    def keys(self) -> int:
        """Ids that are left for keys."""
        return self.vocab - 1 - self.values - self.filler

    @property
    def chance(self) -> float:
        """One of the values."""
        return 1 / self.values

    def batch(
        self, step: int, batch: int, tokens: int, device: str | torch.device = "cpu"
    ) -> Batch:
        """ValueError where `tokens` tokens do not hold the pairs, or one at the distance."""
        check_sizes(step, batch, tokens)
        random = generator(self.seed, step)
        keyed = self.pairs > 1
        width = 2 if keyed else 1  # tokens of a pair
        asked = 2 if keyed else 1  # tokens of the question
        low, high = (asked, tokens - width) if self.distance is None else limits(self.distance, 0)
        slots = (tokens - asked) // width
        if high > tokens - width or low < asked or slots < self.pairs + 1:
            raise ValueError(
                f"{tokens} tokens do not hold {self.pairs} pair(s) and a question with the value "
                f"{low} to {high} tokens before the end; at least "
                f"{max(high + width, (self.pairs + 1) * width + asked)} tokens would do"
            )
        filler = 1 + self.values + torch.arange(self.filler)
        ids = filler[torch.randint(self.filler, (batch, tokens + 1), generator=random)]
        value = torch.randint(self.values, (batch, self.pairs), generator=random) + 1
        last = tokens - 1
        place = last - torch.randint(low, high + 1, (batch, 1), generator=random)
        if keyed:
            # Slots of two tokens in step with the needle, so that no other pair covers it.
            shift = (place - 1) % 2
            free = torch.rand(batch, slots, generator=random)
            free.scatter_(1, (place - 1 - shift) // 2, -1.0)  # the needle comes first
            free[:, -1:].masked_fill_(shift + 2 * slots > tokens - asked, 2.0)  # would overlap
            pairs = free.argsort(1)[:, : self.pairs] * 2 + shift
            key = torch.rand(batch, self.keys, generator=random).argsort(1)[:, : self.pairs]
            key = key + 1 + self.values + self.filler
            ids.scatter_(1, pairs, key)
            ids.scatter_(1, pairs + 1, value)
            ids[:, last - 1], ids[:, last] = MARK, key[:, 0]
        else:
            ids.scatter_(1, place, value)
            ids[:, last] = MARK
        ids[:, tokens] = value[:, 0]
        return scored(ids, torch.full((batch, 1), tokens), device)

    def record(self) -> dict[str, Any]:
        return described(self)
