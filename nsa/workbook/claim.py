"""What a notebook says of its own rows."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Claim:
    """A sentence, whether the rows bear it out, and which rows those are."""

    claim: str
    verdict: str  # PASS, FAIL or INCONCLUSIVE
    evidence: Any

    def __str__(self) -> str:
        return f"{self.verdict}: {self.claim}"

    @classmethod
    def undecided(cls, sentence: str, why: str, evidence: Any = None) -> "Claim":
        """INCONCLUSIVE: "sentence: not decided, why"."""
        return cls(f"{sentence}: not decided, {why}", "INCONCLUSIVE", evidence or {})


def verdict_of(holds: bool) -> str:
    """PASS or FAIL."""
    return "PASS" if holds else "FAIL"


def different_programs(served: Mapping[str, Hashable], evidence: Any, what: str) -> Claim:
    """That no two of these have equal path witnesses: a program would be compared with itself."""
    different = len(set(served.values()))
    return Claim(
        f"the {len(served)} {what} that ran are {different} different programs",
        verdict_of(different == len(served)) if len(served) > 1 else "INCONCLUSIVE",
        evidence,
    )
