"""Where a size stops fitting, with few looks: each is a trace."""

from collections.abc import Callable

import numpy as np

FURTHER = 8  # times the largest look, beyond which a form is not believed
CLOSE = 1 / 512  # of the size: what fits and what does not are as near as this, or neighbours


def boundary(
    look: Callable[[int], tuple[float, bool]], room: float, start: int, most: int | None = None
) -> tuple[int, int | None]:
    """(a size that fits, a larger one that does not), neighbours or CLOSE; 0 if 1 does not fit, and
    None for the other if `most` fits.

    look(size) tells what it needs and whether that fits `room`. What is needed grows about as a
    quadratic in the size, so the next look is where that of the nearest three crosses `room`; from
    one on that left more than half of what was to be searched, in the middle.
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
    """The next size to look at, between both."""
    top = FURTHER * max(needs) if high is None else high - 1
    nearest = sorted(needs, key=lambda size: abs(needs[size] - room))[:3]
    guess: float = 2 * low if high is None else (low + high) // 2
    if len(nearest) > 1:
        form = np.polyfit(nearest, [needs[size] for size in nearest], len(nearest) - 1)
        roots = np.roots(form - np.eye(len(form))[-1] * room)
        ahead = [root.real for root in roots if abs(root.imag) < 1e-9 and root.real > 0]
        guess = min(ahead, key=lambda root: abs(root - nearest[0]), default=guess)
    return int(min(max(guess, low + 1), top))
