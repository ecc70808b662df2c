"""How a trial ended, judged from what was seen of it: a pure function, rule by rule.

A timeout alone is never HANG. Work that moves is SLOW however late it is, and a trial that rests is
HANG only with a proof that it cannot go on, or after it has rested twice at the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nsa.lab.evidence import Evidence

KINDS = ("PASS", "FAIL", "SLOW", "HANG", "OOM", "CRASH", "FLAKY", "INVALID", "INCONCLUSIVE")


@dataclass(frozen=True)
class Verdict:
    """One of KINDS, and why.

    what: which sort, as "blocked" or "nan-grad". rule: the first rule that applied. because: what
    it read, in sentences. place: where, as far as another run of the same fault shows it too.
    numbers: what a table wants. signature: kind, what and place, equal for equal faults.
    """

    kind: str
    what: str = ""
    rule: str = ""
    because: tuple[str, ...] = ()
    place: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    signature: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is none of {', '.join(KINDS)}")
        object.__setattr__(self, "because", tuple(self.because))
        if not self.signature:
            at = f" at {self.place}" if self.place else ""
            object.__setattr__(self, "signature", self.label + at)

    @property
    def label(self) -> str:
        """HANG:blocked, PASS, ..."""
        return f"{self.kind}:{self.what}" if self.what else self.kind

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "what": self.what,
            "rule": self.rule,
            "because": list(self.because),
            "place": self.place,
            "numbers": dict(self.numbers),
            "signature": self.signature,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Verdict:
        """What `to_dict` wrote, also after JSON."""
        return cls(**{name: found[name] for name in cls.__dataclass_fields__ if name in found})


def judge(evidence: Evidence) -> Verdict:
    """The verdict of one trial; of one that still runs (`end` None), as of its last sample."""
    raise NotImplementedError


def compare(trials: Sequence[Evidence | Verdict]) -> Verdict:
    """Several trials of one spec: their verdict, or FLAKY with k of n and a Jeffreys interval."""
    raise NotImplementedError


def arms(a: Evidence, b: Evidence) -> Verdict:
    """INVALID where both arms of a comparison ran the same path: it compared nothing."""
    raise NotImplementedError


def jeffreys(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """The interval for a rate of which k of n were seen; from 0 where k = 0, to 1 where k = n."""
    raise NotImplementedError


__all__ = ["KINDS", "Verdict", "arms", "compare", "jeffreys", "judge"]
