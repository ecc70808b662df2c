"""Which steps an observer looks at, and which of them it has kept."""

from collections.abc import Sequence
from typing import Any

SAMPLED = 10  # steps from one to the next in a long run, where looking at all would be paid for


class Sampled:
    """Whether a step is looked at: the first asked about, and each a multiple of `every` later.

    A training that is resumed between two of them is looked at from its own first step.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._first: int | None = None

    def __call__(self, step: int) -> bool:
        if self._first is None:
            self._first = step
        return (step - self._first) % self.every == 0


def kept_step(steps: Sequence[Any], number: int | None) -> Any:
    """The record with that `.number`, by default the last; ValueError if it was not kept."""
    kept = {record.number: record for record in steps}
    if not kept:
        raise ValueError("no step was observed yet; the trainer must have this as an observer")
    if number is not None and number not in kept:
        raise ValueError(f"step {number} was not kept; kept are {', '.join(map(str, kept))}")
    return steps[-1] if number is None else kept[number]
