"""How a trial ended, judged from what was seen of it; and several trials beside each other.

`judge` is a pure function, whyhung.verdict.rules has its rules: a timeout alone is never HANG, and
slow work is never HANG.
"""

from whyhung.verdict.rules import KINDS, Verdict, arms, compare, jeffreys, judge

__all__ = ["KINDS", "Verdict", "arms", "compare", "jeffreys", "judge"]
