"""Search for the largest size that fits, with few looks: each is a trace."""

from collections.abc import Callable

import numpy as np

FURTHER = 8  # limit of extrapolation, as a multiple of the largest look
CLOSE = 1 / 512  # fraction of the size: the search ends at this distance, or at neighbours


def boundary(
    look: Callable[[int], tuple[float, bool]], room: float, start: int, most: int | None = None
) -> tuple[int, int | None]:
    """Return (a size that fits, a larger one that does not), neighbours or CLOSE; 0 if 1 does not
    fit, and None for the second if `most` fits.

    look(size) returns its need and True if that fits `room`. The need is about quadratic in the
    size, so the next look is where a quadratic through the nearest three crosses `room`; once a
    look leaves more than half of the interval, the search bisects.
    """
    low, high, slow = 0, None if most is None else most + 1, False
    needs: dict[int, float] = {}
    size = min(start, most or start)
    while high is None or high - low > max(1, CLOSE * low):
        left = None if high is None else high - low
        needs[size], fits = look(size)
        low, high = (size, high) if fits else (low, size)
        slow = slow or (left is not None and high - low > left / 2)
        size = (low + high) // 2 if slow else _crossing(needs, room, low, high)
    return low, None if most is not None and high == most + 1 else high


def _crossing(needs: dict[int, float], room: float, low: int, high: int | None) -> int:
    """Return the next size to try, between `low` and `high`."""
    top = FURTHER * max(needs) if high is None else high - 1
    nearest = sorted(needs, key=lambda size: abs(needs[size] - room))[:3]
    guess: float = 2 * low if high is None else (low + high) // 2
    if len(nearest) > 1:
        form = np.polyfit(nearest, [needs[size] for size in nearest], len(nearest) - 1)
        roots = np.roots(form - np.eye(len(form))[-1] * room)
        ahead = [root.real for root in roots if abs(root.imag) < 1e-9 and root.real > 0]
        guess = min(ahead, key=lambda root: abs(root - nearest[0]), default=guess)
    return int(min(max(guess, low + 1), top))
