"""Does a series grow steadily? Slopes of all pairs (Theil and Sen), of which a low one must be up.

A least-squares line calls one late allocation a leak. Of the slopes between all pairs of points
most are 0 then, and the low ones stay so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LOW = 0.2  # the quantile of the slopes that must be positive
LEAST = 4  # points that must be left
MOST = 64


def skip_first_third(values: Sequence[float]) -> Sequence[float]:
    """Without what warms up."""
    return values[len(values) // 3 :]


def steady_slope(steps: Sequence[float], values: Sequence[float]) -> float | None:
    """The slope that four fifths of all pairs of points reach, the first third left out.

    Units of `values` a step; 0 or less for what stays, falls, goes to and fro, or jumps once. None
    for fewer than 4 points after the first third.

    Raises ValueError for steps and values of different numbers.
    """
    if len(steps) != len(values):
        raise ValueError(f"{len(steps)} steps with {len(values)} values; each step needs one")
    x = np.asarray(skip_first_third(steps), dtype=float)
    y = np.asarray(skip_first_third(values), dtype=float)
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < LEAST:
        return None
    if len(x) > MOST:
        chosen = np.linspace(0, len(x) - 1, MOST).round().astype(int)
        x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), k=1)
    return float(np.quantile((y[second] - y[first]) / (x[second] - x[first]), LOW))


def exponent(small: float, middle: float, large: float) -> float | None:
    """Of a quantity at n, 2 n and 4 n, whatever constant it has besides: 1 linear, 2 quadratic.

    None where it does not grow.
    """
    near, far = middle - small, large - middle
    return float(np.log2(far / near)) if near > 0 and far > 0 else None
