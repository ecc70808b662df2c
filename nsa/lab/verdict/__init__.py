"""How a trial ended, judged from what was seen of it; and several trials beside each other.

`judge` is a pure function, nsa.lab.verdict.rules has its rules: a timeout alone is never HANG, and
slow work is never HANG.
"""

from nsa.lab.verdict.rules import KINDS, Verdict, arms, compare, jeffreys, judge

__all__ = ["KINDS", "Verdict", "arms", "compare", "jeffreys", "judge"]
