"""Tasks that a model solves only if its attention works at a distance: copy, needle, recall.

On random bytes the loss stays at log(vocab) with any attention, and on text a broken attention is
only slightly worse. Here a model that does not attend far enough answers at chance level.

Batches are as in `nsa.model.data`. A target is -100 where it is unpredictable, and every row
scores the same number of tokens. Ids above MARK are split between symbols, keys, values and
filler as documented in each task.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from nsa.model.config import keep_int
from nsa.model.data import EVALUATION, IGNORED, Batch, Data, Device, check_sizes, generator
from nsa.model.positions import by_position

MARK = 0  # starts a string, or queries the value of a key


class Task:
    """Data with answers whose accuracy can be measured."""

    seed: int
    vocab: int

    @property
    def chance(self) -> float:
        """Accuracy of a model that follows the task's rules without attending to the row."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """Name, fields and chance of the task."""
        return {"name": type(self).__name__.lower(), **asdict(self), "chance": self.chance}

    def check_ints(self, **least: int) -> None:
        for name, smallest in {"seed": 0, **least}.items():
            keep_int(self, name, smallest)


def scored(ids: Int64[Tensor, "B T1"], answers: Int64[Tensor, "B S"], device: Device) -> Batch:
    """Tokens and targets of ids [B, T + 1]; only the ids at `answers` are targets."""
    targets = torch.full_like(ids, IGNORED).scatter_(1, answers, ids.gather(1, answers))
    return ids[:, :-1].contiguous().to(device), targets[:, 1:].contiguous().to(device)


def limits(given: int | tuple[int, int] | None, most: int) -> tuple[int, int]:
    """Range (least, most) to draw from: `given`, or `most` alone if that is None."""
    given = most if given is None else given
    return (given, given) if isinstance(given, int) else given


def check_range(name: str, given: Any, least: int) -> None:
    """Raise unless it is None, a number or a pair (least, most), all at least `least`."""
    if given is None:
        return
    pair = given if isinstance(given, tuple) else (given, given)
    if len(pair) != 2 or any(not isinstance(x, int) or isinstance(x, bool) for x in pair):
        raise TypeError(f"{name}={given!r} is not an int, a pair of ints (least, most) or None")
    if not least <= pair[0] <= pair[1]:
        raise ValueError(f"{name}={given!r}: at least {least}, and the larger number last")


@dataclass(frozen=True)
class Copy(Task):
    """A random string after a mark and its copy after a second mark, whose symbols are scored.

    No symbol occurs twice in a string, so each determines the next: two layers suffice, one that
    copies each token's predecessor to it and one that finds the token whose predecessor equals
    the current one. Filler (id 1) is before the string and between it and the second mark;
    `distance` is from a symbol to its copy: the largest that fits by default, or drawn for each
    row from a pair (least, most).
    """

    seed: int = 1337
    vocab: int = 64
    length: int = 32  # symbols of the string
    distance: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.check_ints(vocab=4, length=1)
        if self.length > self.vocab - 2:
            raise ValueError(
                f"length={self.length} symbols of which none comes twice need vocab >= "
                f"{self.length + 2}, got {self.vocab}; at most {self.vocab - 2} would do"
            )
        check_range("distance", self.distance, self.length + 1)

    @property
    def chance(self) -> float:
        """Mean of 1 / (number of symbols that have not occurred yet)."""
        left = [1 / (self.vocab - 2 - given) for given in range(self.length)]
        return sum(left) / len(left)

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """Draw a batch. ValueError if the strings at their distance do not fit in `tokens`."""
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


@dataclass(frozen=True)
class Needle(Task):
    """A value hidden in filler and queried at the end of the row: one scored token.

    Without keys (`pairs` = 1) the only value in the row is the answer, and one layer finds it. With
    more pairs each value follows its own key, the question is a mark and one of the keys, and two
    layers are needed, as in Copy. Filler is drawn uniformly from `filler` ids.

    `distance` is from the question (the last token) to its value: a number, a pair (least, most)
    to draw from, or None for any that fits. So (w, w) puts it one token outside a window of w,
    and (w - 1, w - 1) just inside.
    """

    seed: int = 1337
    vocab: int = 64
    values: int = 16
    pairs: int = 1
    filler: int = 16
    distance: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.check_ints(vocab=4, values=2, pairs=1, filler=1)
        if self.keys < (self.pairs if self.pairs > 1 else 0):
            raise ValueError(
                f"vocab={self.vocab} leaves {self.keys} keys beside the mark, {self.values} values "
                f"and {self.filler} ids of filler; {self.pairs} pairs need vocab >= "
                f"{1 + self.values + self.filler + self.pairs}"
            )
        check_range("distance", self.distance, 1 if self.pairs == 1 else 2)

    @property
    def keys(self) -> int:
        """Number of ids used as keys."""
        return self.vocab - 1 - self.values - self.filler

    @property
    def chance(self) -> float:
        """One of the values."""
        return 1 / self.values

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """Draw a batch. ValueError if the pairs, or one at the distance, do not fit in `tokens`."""
        check_sizes(step, batch, tokens)
        random = generator(self.seed, step)
        keyed = self.pairs > 1
        width = asked = 2 if keyed else 1  # tokens of a pair, and of the question
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


@dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall (arXiv 2312.04927): pairs first, then every key again.

    `pairs` keys, each followed by its value; then `gap` tokens of filler (id 1), as many as fit by
    default or drawn for each row from a pair (least, most); then the same keys in another order,
    each followed by its value, all of which are scored. The rest of the row is filler in front.
    Keys and values are each half of the rest of the vocabulary.
    """

    seed: int = 1337
    vocab: int = 128
    pairs: int = 16
    gap: int | tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.check_ints(vocab=4, pairs=1)
        if self.pairs > self.symbols:
            raise ValueError(
                f"pairs={self.pairs} need as many keys; vocab={self.vocab} has {self.symbols}, "
                f"vocab={2 + 2 * self.pairs} would do"
            )
        check_range("gap", self.gap, 0)

    @property
    def symbols(self) -> int:
        """Number of keys, which is also that of values."""
        return (self.vocab - 2) // 2

    @property
    def chance(self) -> float:
        """One of the values."""
        return 1 / self.symbols

    def batch(self, step: int, batch: int, tokens: int, device: Device = "cpu") -> Batch:
        """Draw a batch. ValueError if every pair twice and the gap do not fit in `tokens`."""
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


TASKS = {task.__name__.lower(): task for task in (Copy, Needle, Recall)}


def task(name: str, **fields: Any) -> Task:
    """Create the task of that name ("copy", "needle", "recall"); lists, as in JSON, are pairs."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r}; there are {', '.join(TASKS)}")
    return TASKS[name](**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def accuracy(
    model: nn.Module, task: Data, *, batches: int = 4, first_step: int = EVALUATION, **sizes: Any
) -> float:
    """Fraction of scored targets that the model's most likely id equals, on separate batches.

    `sizes` are batch, tokens and precision of `by_position`. Steps start at `first_step`, which no
    training run reaches. Waits for the device once.
    """
    return by_position(model, task, batches=batches, first_step=first_step, **sizes).accuracy
