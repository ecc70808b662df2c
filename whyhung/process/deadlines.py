"""Deadlines of work, and bounds on how long progress may rest."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

SOFT = 3.0  # predictions from small work were seen to be off by 0.73 to 1.30
LEAST_STALL_S = 5.0
GAPS = 10.0


def soft_deadline(predicted_s: float, factor: float = 1.0) -> float:
    """Return the seconds after which work is late: 3 x prediction x slowdown by observers.

    Raises ValueError if predicted_s <= 0, or if factor < 1: no observer makes a step faster.
    """
    if not predicted_s > 0:
        raise ValueError(f"predicted_s={predicted_s} must be greater than 0 seconds")
    if not factor >= 1:
        raise ValueError(f"observer factor {factor} must be at least 1")
    return SOFT * predicted_s * factor


def longest_gap(ticks: Iterable[tuple[float, Any]]) -> float:
    """Return the longest rest of a progress coordinate, from (seconds, coordinate) pairs.

    Time before the first move is not counted, since nothing had begun. 0.0 if nothing moved.
    """
    moves = [t for (_, before), (t, p) in pairwise(ticks) if p != before]
    return max((b - a for a, b in pairwise(moves)), default=0.0)


def stall_bound(longest_gap_s: float) -> float:
    """Return the seconds of rest after which progress is frozen: max(5 s, 10 x the longest gap)."""
    if not longest_gap_s >= 0:
        raise ValueError(f"longest_gap_s={longest_gap_s} must not be negative")
    return max(LEAST_STALL_S, GAPS * longest_gap_s)
