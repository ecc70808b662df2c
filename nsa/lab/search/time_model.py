"""How long work should take, predicted from seconds of smaller work: what a deadline is made of.

t = a + b L + c L T + d L T T for L layers and T tokens: something fixed, something a layer, the
projections, and what is quadratic. None of the four can be negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class TimeModel:
    """Seconds of a step, as a + b L + c L T + d L T T; valid for what it was fitted on.

    Another machine, backend, precision or set of observers wants a fit of its own.
    """

    a: float
    b: float
    c: float
    d: float

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

        rows = []
        for layers, tokens, seconds in ((p["layers"], p["tokens"], p["seconds"]) for p in points):
            if not (layers > 0 and tokens > 0 and 0 < seconds < float("inf")):
                raise ValueError(
                    f"a point of layers={layers}, tokens={tokens}, seconds={seconds}: all three "
                    "must be positive and finite"
                )
            rows.append([term / seconds for term in _terms(layers, tokens)])
        if not rows:
            raise ValueError("no points to fit; measure layers 1 and 2 at three lengths")
        scale = np.max(rows, axis=0)  # L T T is millions of times the constant
        found, _ = nnls(rows / scale, np.ones(len(rows)))
        return cls(*(found / scale).tolist())

    def predict(self, layers: int, tokens: int) -> float:
        """Seconds of a step with so many layers and tokens."""
        if layers < 1 or tokens < 1:
            raise ValueError(f"layers={layers} and tokens={tokens} must be at least 1")
        return sum(a * x for a, x in zip(astuple(self), _terms(layers, tokens), strict=True))


def _terms(layers: int, tokens: int) -> tuple[float, float, float, float]:
    return 1.0, float(layers), float(layers * tokens), float(layers * tokens * tokens)
