"""Claims of a notebook about its own rows."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
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


class Undecided(LookupError):
    """Raised by a rule that this run was to decide, and does not: INCONCLUSIVE.

    found: what follows the sentence all the same, before the reason `why`.
    """

    def __init__(self, why: str, evidence: Any = None, found: str = "") -> None:
        super().__init__(why)
        self.evidence, self.found = evidence, found


class NotHere(Undecided):
    """Raised by a rule that this machine, or a run with these parameters, cannot decide: NOT
    APPLICABLE."""


def claim(sentence: str | Callable[..., str], word: Callable[[bool], str] = verdict_of):
    """Decorate a rule, which then returns a `Claim`.

    sentence: with the rule's arguments in braces, or a function of them. The rule returns (found,
    True if it holds, evidence) and optionally the points that were not measured, see `Claim.over`.
    What it found follows the sentence behind a colon, unless it begins with a space or a mark. It
    raises `Undecided` or `NotHere` where it cannot tell. word: `verdict_of`, or `aim_of`.
    """

    def decorate(rule: Callable[..., tuple]) -> Callable[..., Claim]:
        bind = inspect.signature(rule).bind

        @wraps(rule)
        def judged(*args: Any, **named: Any) -> Claim:
            given = bind(*args, **named)
            given.apply_defaults()
            if callable(sentence):
                text = sentence(*given.args, **given.kwargs)
            else:
                text = sentence.format_map(given.arguments)
            try:
                found, holds, evidence, *more = rule(*args, **named)
            except NotHere as why:
                return Claim.not_here(_said(text, why.found), str(why))
            except Undecided as why:
                return Claim.undecided(_said(text, why.found), str(why), why.evidence)
            decided = Claim(_said(text, found), word(bool(holds)), evidence)
            return decided.over(more[0] if more else ())

        return judged

    return decorate


def aim(sentence: str | Callable[..., str]):
    """Decorate a rule as `claim` does; a result that is right and too low is AIM MISSED."""
    return claim(sentence, aim_of)


def _said(sentence: str, found: str) -> str:
    joined = not found or found[0] in " ,;:"
    return sentence + found if joined else f"{sentence}: {found}"
