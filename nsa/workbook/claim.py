"""What a notebook says of its own rows."""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# The worst first. FAIL: something is wrong. AIM MISSED: what was found is right, and less than was
# aimed at. INCONCLUSIVE: this run was to tell, and does not. NOT APPLICABLE: this machine, or a run
# with these parameters, cannot tell.
VERDICTS = ("FAIL", "AIM MISSED", "INCONCLUSIVE", "PASS", "NOT APPLICABLE")
UNDECIDED = ("INCONCLUSIVE", "NOT APPLICABLE")
# How a measurement may end that is an answer, though it is no number. Any other end without a value
# is a point that nobody measured.
ANSWERS = ("declined", "oom", "refused")
NAMED = 4  # points of a sentence that are named
LACKS = "; not measured: "  # stands between a sentence and the points that it lacks


@dataclass(frozen=True)
class Claim:
    """A sentence, whether the rows bear it out, and which rows those are."""

    claim: str
    verdict: str  # one of VERDICTS
    evidence: Any

    def __str__(self) -> str:
        return f"{self.verdict}: {self.claim}"

    def over(self, unmeasured: Iterable[object]) -> "Claim":
        """The claim, whose points are all measured but these: one that would pass is INCONCLUSIVE
        and names them. What the measured ones refute stays refuted, for one of them is enough."""
        lost = list(dict.fromkeys(map(str, unmeasured)))
        if not lost or self.verdict != "PASS":
            return self
        named = "; ".join(lost[:NAMED]) + f" and {len(lost) - NAMED} more" * (len(lost) > NAMED)
        evidence = {"found": self.evidence, "not measured": lost}
        return Claim(f"{self.claim}{LACKS}{named}", "INCONCLUSIVE", evidence)

    @classmethod
    def undecided(cls, sentence: str, why: str, evidence: Any = None) -> "Claim":
        """INCONCLUSIVE: "sentence: not decided, why"."""
        return cls(f"{sentence}: not decided, {why}", "INCONCLUSIVE", evidence or {})

    @classmethod
    def not_here(cls, sentence: str, why: str) -> "Claim":
        """NOT APPLICABLE: "sentence: not applicable here, why"."""
        return cls(f"{sentence}: not applicable here, {why}", "NOT APPLICABLE", {})


def verdict_of(holds: bool) -> str:
    """PASS or FAIL."""
    return "PASS" if holds else "FAIL"


def aim_of(reached: bool) -> str:
    """PASS or AIM MISSED."""
    return "PASS" if reached else "AIM MISSED"


def different_programs(
    served: Mapping[str, Hashable], evidence: Any, what: str, planned: Mapping[str, str]
) -> Claim:
    """That no two of these have equal path witnesses: a program would be compared with itself.
    planned: how each that was to run ended, by name."""
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
