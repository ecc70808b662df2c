"""Verdicts on how a trial ended, from its evidence; and comparisons of several trials.

`judge` is a pure function, whyhung.verdict.rules has its rules: a timeout alone is never HANG, and
slow work is never HANG.
"""

from whyhung.verdict.rules import KINDS, Verdict, compare, compare_paths, jeffreys, judge

__all__ = ["KINDS", "Verdict", "compare", "compare_paths", "jeffreys", "judge"]
