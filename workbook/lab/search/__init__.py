"""Searches in which every query is a trial: a covering screen, a minimal set, a threshold.

An answer is True (the fault), False (passed) or None (neither: unresolved). "The fault" means the
same verdict kind with the same signature: a search for "not PASS" could start with a hang and end
with an out-of-memory.
"""
