"""Verdicts on how a trial ended, from its evidence.

`judge` is a pure function, whyhung.verdict.rules has its rules: a timeout alone is never HANG, and
slow work is never HANG.
"""

from whyhung.verdict.rules import KINDS, Verdict, judge

__all__ = ["KINDS", "Verdict", "judge"]
