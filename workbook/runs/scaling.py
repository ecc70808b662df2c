"""Exponents of y ~ x^p, lines, slopes and ratios, each with its interval. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import linregress, theilslopes
from scipy.stats import t as student


@dataclass(frozen=True)
class Fit:
    """y ~ x^exponent over `n` points, with its 95 % interval (NaN below three points)."""

    exponent: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.exponent:.2f} ({self.n} points, no interval)"
        return f"{self.exponent:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class Ratio:
    """Geometric mean of `n` paired ratios, with its 95 % interval (NaN for a single pair)."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.value:.3g} (one pair, no interval)"
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def paired_ratio(base: Sequence[float], other: Sequence[float]) -> Ratio:
    """other / base of pairs that were measured side by side; the interval is Student's, of the
    logarithms. ValueError for a value that is not positive."""
    base, other = np.asarray(base, dtype=float), np.asarray(other, dtype=float)
    if base.shape != other.shape or not len(base) or not ((base > 0) & (other > 0)).all():
        raise ValueError(f"ratios want positive pairs, got {base.tolist()} and {other.tolist()}")
    logs, n = np.log(other / base), len(base)
    half = student.ppf(0.975, n - 1) * logs.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
    middle = logs.mean()
    return Ratio(*(float(np.exp(middle + sign * half)) if sign else float(np.exp(middle))
                   for sign in (0, -1, 1)), n)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """y = at_0 + slope x through `n` points: the slope's 95 % interval, R2, and the largest
    residual as a share of the mean of y, with its x."""

    slope: float
    low: float
    high: float
    at_0: float
    r2: float
    n: int
    worst: float
    worst_at: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Least squares. ValueError as in `fit_exponent`, and below three points, since two always lie
    on a line."""
    x, y = _pairs(x, y)
    if len(x) < 3 or not np.isfinite(y).all():
        raise ValueError(f"a line wants three points or more, all measured, got {y.tolist()}")
    line = linregress(x, y)
    half = float(student.ppf(0.975, len(x) - 2) * line.stderr)
    along = line.intercept + line.slope * x
    off = (y - along) / np.abs(y).mean()
    worst = int(np.argmax(np.abs(off)))
    r2 = 1.0 if not np.ptp(y) else float(line.rvalue**2)
    slope = float(line.slope)
    return Line(slope, slope - half, slope + half, float(line.intercept), r2, len(x),
                float(off[worst]), float(x[worst]))  # fmt: skip


@dataclass(frozen=True)
class Slope:
    """Theil and Sen's slope over `n` points, with its 95 % interval; NaN below three points."""

    value: float
    low: float
    high: float
    n: int


def robust_slope(x: Sequence[float], y: Sequence[float]) -> Slope:
    """Median slope over all pairs of points, with Sen's interval from ranks; points with y NaN are
    left out. A few outliers, a jump, or a stretch at another level move neither far.

    ValueError for lengths that differ.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be two lists of one length, got {x.shape} and {y.shape}")
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if len(x) < 3:
        return Slope(math.nan, math.nan, math.nan, len(x))
    found = theilslopes(y, x, alpha=0.95)
    return Slope(float(found.slope), float(found.low_slope), float(found.high_slope), len(x))


def local_exponents(x: Sequence[float], y: Sequence[float]) -> np.ndarray:
    """log(y2/y1) / log(x2/x1) for each pair of neighbours in x, n - 1 values. A pair with a failed
    (NaN) point gives NaN. ValueError as in `fit_exponent`."""
    x, y = _pairs(x, y)
    return np.diff(np.log(y)) / np.diff(np.log(x))


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Least squares in log-log with a 95 % Student interval; points with y NaN are left out.

    One point or none gives NaN throughout. ValueError for lengths that differ, x that does not
    increase, or a value that is not positive.
    """
    x, y = _pairs(x, y)
    kept = np.isfinite(y)
    u, v = np.log(x[kept]), np.log(y[kept])
    n = len(u)
    if n < 2:
        return Fit(math.nan, math.nan, math.nan, n)
    line = linregress(u, v)
    slope = float(line.slope)
    half = float(student.ppf(0.975, n - 2) * line.stderr) if n > 2 else math.nan
    return Fit(slope, slope - half, slope + half, n)


def _pairs(x, y) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be two lists of one length, got {x.shape} and {y.shape}")
    if not (x > 0).all() or not (np.diff(x) > 0).all():
        raise ValueError(f"x must be positive and growing, got {x.tolist()}")
    if (y <= 0).any():
        raise ValueError(f"y must be positive (NaN where it failed), got {y.tolist()}")
    return x, y


def crossing(tokens: list[int], ours: list[float], dense: list[float]) -> str:
    """Smallest T at and above which ours stays below dense, in words."""
    gap = np.log(np.asarray(ours, float)) - np.log(np.asarray(dense, float))
    losing = np.flatnonzero(gap >= 0)
    if not len(losing):
        return f"below {tokens[0]}"
    last = int(losing[-1])
    if last == len(tokens) - 1:
        return f"beyond {tokens[-1]}"
    x = np.log(np.asarray(tokens, float))
    share = gap[last] / (gap[last] - gap[last + 1])
    return f"{math.exp(x[last] + share * (x[last + 1] - x[last])):.0f}"
