"""How long work should take, predicted from seconds of smaller work: what a deadline is made of.

t = a + b L + c L T + d L T T for L layers and T tokens: something fixed, something a layer, the
projections, and what is quadratic. None of the four can be negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SOFT = 3.0  # what was predicted from small work was seen to be off by 0.73 to 1.30
LEAST_STALL_S = 5.0
GAPS = 10.0
TERMS = ("a", "b", "c", "d")


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a step, as a + b L + c L T + d L T T; valid for what it was fitted on.

    Another machine, backend, precision or set of observers wants a fit of its own.
    """

    a: float
    b: float
    c: float
    d: float
    points: tuple[tuple[int, int, float], ...] = ()  # layers, tokens, seconds

    @classmethod
    def fit(cls, points: Iterable[Mapping[str, Any]]) -> TimeModel:
        """From points {"layers", "tokens", "seconds"}: least squares without negative terms.

        Each point counts by its relative error (weights 1/t), so that a small one is not lost
        beside a large one. Good are layers 1 and 2 at three lengths, the least of several times
        each: 1 % of noise at T 64 to 256 can become 1.4 x at T 2048, too long more than too short.

        Raises ValueError without a point, or for one that is not positive.
        """
        import numpy as np
        from scipy.optimize import nnls

        used = tuple((int(p["layers"]), int(p["tokens"]), float(p["seconds"])) for p in points)
        if not used:
            raise ValueError("no points to fit; measure layers 1 and 2 at three lengths")
        wrong = [p for p in used if not (p[0] > 0 and p[1] > 0 and 0 < p[2] < float("inf"))]
        if wrong:
            layers, tokens, seconds = wrong[0]
            raise ValueError(
                f"a point of layers={layers}, tokens={tokens}, seconds={seconds}: all three must "
                "be positive and finite"
            )
        seconds = np.array([p[2] for p in used])
        rows = np.array([_terms(layers, tokens) for layers, tokens, _ in used]) / seconds[:, None]
        scale = rows.max(axis=0)  # L T T is millions of times the constant
        found, _ = nnls(rows / scale, np.ones(len(used)))
        return cls(*(float(x) for x in found / scale), points=used)

    def predict(self, layers: int, tokens: int) -> float:
        """Seconds of a step with so many layers and tokens."""
        if layers < 1 or tokens < 1:
            raise ValueError(f"layers={layers} and tokens={tokens} must be at least 1")
        terms = _terms(layers, tokens)
        return sum(getattr(self, name) * x for name, x in zip(TERMS, terms, strict=True))

    def worst(self) -> tuple[float, float]:
        """Smallest and largest of predicted over measured, of the points it was fitted on."""
        ratios = [self.predict(layers, tokens) / s for layers, tokens, s in self.points]
        return (min(ratios), max(ratios)) if ratios else (float("nan"), float("nan"))

    def to_dict(self) -> dict[str, Any]:
        terms = {name: getattr(self, name) for name in TERMS}
        return {**terms, "points": [list(p) for p in self.points]}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> TimeModel:
        """What `to_dict` wrote, also after JSON."""
        points = tuple((int(n), int(t), float(s)) for n, t, s in found.get("points", ()))
        return cls(*(float(found[name]) for name in TERMS), points=points)


def soft_deadline(predicted_s: float, observers: float | Sequence[float] = 1.0) -> float:
    """When work counts as late: 3 x prediction x by how much observers slow it.

    `observers`: one factor, or one for each of them. ValueError for what is not positive, and for
    a factor below 1: no observer makes a step faster.
    """
    factors = [observers] if isinstance(observers, int | float) else list(observers)
    if not predicted_s > 0:
        raise ValueError(f"predicted_s={predicted_s} must be greater than 0 seconds")
    if any(not factor >= 1 for factor in factors):
        raise ValueError(f"observer factors {factors} must be at least 1")
    deadline = SOFT * predicted_s
    for factor in factors:
        deadline *= factor
    return deadline


def longest_gap(ticks: Iterable[tuple[float, Any]]) -> float:
    """The longest time in which a progress coordinate rested, from (seconds, coordinate) pairs.

    The time before the first move is not counted: nothing had begun. 0.0 where nothing moved.
    """
    longest, since, before, moved = 0.0, None, None, False
    for t, p in ticks:
        if before is None or p != before:
            if moved and since is not None:
                longest = max(longest, t - since)
            moved = moved or before is not None
            since, before = t, p
    return longest


def stall_bound(longest_gap_s: float | None = None) -> float:
    """How long progress may rest before it counts as frozen: max(5 s, 10 x the longest gap)."""
    if longest_gap_s is not None and not longest_gap_s >= 0:
        raise ValueError(f"longest_gap_s={longest_gap_s} must not be negative")
    return max(LEAST_STALL_S, GAPS * (longest_gap_s or 0.0))


def _terms(layers: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, float(layers), float(layers * tokens), float(layers * tokens * tokens)
