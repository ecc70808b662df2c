"""Exponents of y ~ x^p: between neighbours, and fitted with an interval. Pure functions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Student's t, 97.5 %, for 1 to 30 degrees of freedom (tables; beyond, the expansion below serves)
STUDENT_975 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


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


def local_exponents(x: Sequence[float], y: Sequence[float]) -> np.ndarray:
    """log(y2/y1) / log(x2/x1) for each pair of neighbours in x, n - 1 values.

    A pair with a failed (NaN) point gives NaN. ValueError as for `fit_exponent`.
    """
    x, y = _pairs(x, y)
    return np.diff(np.log(y)) / np.diff(np.log(x))


def fit_exponent(x: Sequence[float], y: Sequence[float]) -> Fit:
    """Least squares in log-log with a 95 % Student interval; points with y NaN are left out.

    One point or none gives NaN throughout. ValueError: lengths differ, x is not growing, or a
    value is not positive.
    """
    x, y = _pairs(x, y)
    kept = np.isfinite(y)
    u, v = np.log(x[kept]), np.log(y[kept])
    n = len(u)
    if n < 2:
        return Fit(math.nan, math.nan, math.nan, n)
    u_centred = u - u.mean()
    spread = float(u_centred @ u_centred)
    slope = float(u_centred @ (v - v.mean())) / spread
    if n < 3:
        return Fit(slope, math.nan, math.nan, n)
    residual = (v - v.mean()) - slope * u_centred
    error = math.sqrt(float(residual @ residual) / (n - 2) / spread)
    half = _student_975(n - 2) * error
    return Fit(slope, slope - half, slope + half, n)


def _student_975(freedom: int) -> float:
    if freedom <= len(STUDENT_975):
        return STUDENT_975[freedom - 1]
    z = 1.959964  # Cornish-Fisher expansion about the normal quantile, Abramowitz and Stegun 26.7.5
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _pairs(x, y) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"x and y must be two lists of one length, got {x.shape} and {y.shape}")
    if not (x > 0).all() or not (np.diff(x) > 0).all():
        raise ValueError(f"x must be positive and growing, got {x.tolist()}")
    if (y <= 0).any():
        raise ValueError(f"y must be positive (NaN where it failed), got {y.tolist()}")
    return x, y
