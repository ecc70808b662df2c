"""Searches whose every question is a trial: a covering screen, a minimal set, a threshold.

An answer is True (the fault), False (passed) or None (neither: unresolved). "The fault" is the same
verdict kind with the same signature: whoever searches for "not PASS" starts with a hang and ends
with an out-of-memory.
"""

from nsa.lab.search.covering import Cell, Judged, cover, ddmin, everything, same, screen
from nsa.lab.search.thresholds import Answer, Bracket, Posterior, bayes, threshold

__all__ = [
    "Answer", "Bracket", "Cell", "Judged", "Posterior", "bayes", "cover", "ddmin", "everything",
    "same", "screen", "threshold",
]  # fmt: skip
