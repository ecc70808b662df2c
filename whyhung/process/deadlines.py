"""Deadlines of work, and bounds on how long progress may rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

SOFT = 3.0  # what was predicted from small work was seen to be off by 0.73 to 1.30
LEAST_STALL_S = 5.0
GAPS = 10.0


def soft_deadline(predicted_s: float, factor: float = 1.0) -> float:
    """Seconds after which work is late: 3 x prediction x by how much observers slow it.

    ValueError for what is not positive, and for a factor below 1: no observer makes a step faster.
    """
    if not predicted_s > 0:
        raise ValueError(f"predicted_s={predicted_s} must be greater than 0 seconds")
    if not factor >= 1:
        raise ValueError(f"observer factor {factor} must be at least 1")
    return SOFT * predicted_s * factor


def longest_gap(ticks: Iterable[tuple[float, Any]]) -> float:
    """The longest time in which a progress coordinate rested, from (seconds, coordinate) pairs.

    The time before the first move is not counted: nothing had begun. 0.0 where nothing moved.
    """
    moves = [t for (_, before), (t, p) in pairwise(ticks) if p != before]
    return max((b - a for a, b in pairwise(moves)), default=0.0)


def stall_bound(longest_gap_s: float) -> float:
    """Seconds of rest after which progress counts as frozen: max(5 s, 10 x the longest gap)."""
    if not longest_gap_s >= 0:
        raise ValueError(f"longest_gap_s={longest_gap_s} must not be negative")
    return max(LEAST_STALL_S, GAPS * longest_gap_s)
