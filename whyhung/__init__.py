"""Verdicts on programs that hang or are slow: of any Python program, of a torch job, of dumps.

`event()` in a program counts as progress. Nothing of torch is imported here.
"""


def event() -> None:
    """Counts as progress of a watched program; does nothing in one that is not watched."""
    from whyhung.watch import event as count

    count()
