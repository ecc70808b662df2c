"""What a judge says of a trial: a kind, the rule that applied, and what that rule read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    numbers: dict[str, Any] = field(default_factory=dict, compare=False)
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
