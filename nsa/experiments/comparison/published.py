"""Figures to be measured against: what the best public kernels reach on an H200, and our aims.

Medians in ms on one H200, bf16, causal, one sequence, HQ 64, HKV 4, D 128 unless said otherwise,
l 32, d 16, l' 64, n 16, w 512, mean phi; scoring, window and gates included. Public figures are of
random inputs, of whichever public implementation is fastest at the shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nsa.config import NSAConfig

MEMORY_64K_GIB = (2.0, 4.0)  # forward, backward, beyond inputs and outputs, at T 65536


@dataclass(frozen=True)
class Aim:
    """Milliseconds to stay below at one shape and kind of queries."""

    tokens: int
    queries: str
    forward_ms: float
    backward_ms: float
    public_ms: tuple[float, float] | None = None
    heads: int = 64
    kv_heads: int = 4
    dim: int = 128

    def fits(self, tokens: int, config: Mapping[str, Any]) -> bool:
        """Whether a measurement at `tokens` with that config of a row is of this aim's shape."""
        mine = {"heads": self.heads, "kv_heads": self.kv_heads, "queries": self.queries}
        mine |= {"dim": self.dim, "value_dim": self.dim, "dtype": "bf16", "batch": 1}
        mine |= vars(NSAConfig())
        return tokens == self.tokens and all(config.get(n) == v for n, v in mine.items())

    def __str__(self) -> str:
        length = f"{self.tokens // 1024}k"
        return f"{length}, HQ {self.heads}, HKV {self.kv_heads}, D {self.dim}, {self.queries}"


def _both(tokens: int, random, correlated, public, **sizes: int) -> list[Aim]:
    return [
        Aim(tokens, "random", *random, public, **sizes),
        Aim(tokens, "correlated", *correlated, **sizes),
    ]


_SMALL = {"heads": 12, "kv_heads": 4}

AIMS = (
    *_both(8192, (2.2, 4.8), (1.7, 4.1), (2.65, 5.93)),
    *_both(32768, (12, 26), (9.0, 20), (13.9, 31.5)),
    *_both(65536, (29, 60), (22, 54), (36.8, 82.5)),
    *_both(131072, (84, 165), (72, 152), (110, 248)),
    *_both(32768, (18, 34), (16, 32), (38.3, 54.4), kv_heads=16),
    *_both(2048, (0.15, 0.35), (0.15, 0.35), (0.70, 0.86), dim=64, **_SMALL),
    *_both(2048, (0.15, 0.35), (0.15, 0.35), (0.70, 0.86), **_SMALL),
)
