"""The steps that an observer has kept."""

from collections.abc import Sequence
from typing import Any


def kept_step(steps: Sequence[Any], number: int | None) -> Any:
    """The record with that `.number`, by default the last; ValueError if it was not kept."""
    kept = {record.number: record for record in steps}
    if not kept:
        raise ValueError("no step was observed yet; the trainer must have this as an observer")
    if number is not None and number not in kept:
        raise ValueError(f"step {number} was not kept; kept are {', '.join(map(str, kept))}")
    return steps[-1] if number is None else kept[number]
