"""Searches whose every question is a trial: a covering screen, a minimal set, a threshold.

An answer is True (the fault), False (passed) or None (neither: unresolved). "The fault" is the same
verdict kind with the same signature: whoever searches for "not PASS" starts with a hang and ends
with an out-of-memory.
"""
