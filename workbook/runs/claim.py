"""Claims of a notebook about its own rows."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# The worst first. FAIL: something is wrong. AIM MISSED: the result is right, and below what was
# aimed at. INCONCLUSIVE: this run was to decide it, and does not. NOT APPLICABLE: this machine,
# or a run with these parameters, cannot decide it.
VERDICTS = ("FAIL", "AIM MISSED", "INCONCLUSIVE", "PASS", "NOT APPLICABLE")
UNDECIDED = ("INCONCLUSIVE", "NOT APPLICABLE")
# Outcomes of a measurement that are an answer, though no number. Any other outcome without a value
# is a point that was not measured.
ANSWERS = ("declined", "oom", "refused")
NAMED = 4  # number of points that a sentence names
LACKS = "; not measured: "  # between a sentence and its missing points


@dataclass(frozen=True)
class Claim:
    """A sentence, its verdict from the rows, and those rows."""

    claim: str
    verdict: str  # one of VERDICTS
    evidence: Any

    def __str__(self) -> str:
        return f"{self.verdict}: {self.claim}"

    def over(self, unmeasured: Iterable[object]) -> "Claim":
        """Mark points of the claim as unmeasured: a claim that would pass becomes INCONCLUSIVE and
        names them. A refuted claim stays refuted, since one measured point is enough."""
        lost = list(dict.fromkeys(map(str, unmeasured)))
        if not lost or self.verdict != "PASS":
            return self
        named = "; ".join(lost[:NAMED]) + f" and {len(lost) - NAMED} more" * (len(lost) > NAMED)
        evidence = {"found": self.evidence, "not measured": lost}
        return Claim(f"{self.claim}{LACKS}{named}", "INCONCLUSIVE", evidence)

    @classmethod
    def undecided(cls, sentence: str, why: str, evidence: Any = None) -> "Claim":
        """Claim that is INCONCLUSIVE: "sentence: not decided, why"."""
        return cls(f"{sentence}: not decided, {why}", "INCONCLUSIVE", evidence or {})

    @classmethod
    def not_here(cls, sentence: str, why: str) -> "Claim":
        """Claim that is NOT APPLICABLE: "sentence: not applicable here, why"."""
        return cls(f"{sentence}: not applicable here, {why}", "NOT APPLICABLE", {})


def verdict_of(holds: bool) -> str:
    """Return PASS or FAIL."""
    return "PASS" if holds else "FAIL"


def aim_of(reached: bool) -> str:
    """Return PASS or AIM MISSED."""
    return "PASS" if reached else "AIM MISSED"


def different_programs(
    served: Mapping[str, Hashable], evidence: Any, what: str, planned: Mapping[str, str]
) -> Claim:
    """Claim that all path witnesses differ, or a program would be compared with itself.
    planned: outcome of each planned one, by name."""
    if len(planned) == 1:
        return Claim.not_here(f"{what} are different programs", "this run is of one")
    different = len(set(served.values()))
    claim = Claim(
        f"the {len(served)} {what} that ran are {different} different programs",
        verdict_of(different == len(served)) if len(served) > 1 else "INCONCLUSIVE",
        evidence,
    )
    lost = (name for name, ended in planned.items() if ended not in ANSWERS)
    return claim.over(name for name in lost if name not in served)
