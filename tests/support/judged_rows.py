"""Rows of a selfcheck as tests want them, without a trial."""

from nsa.experiments.selfcheck.judged import Judged


def row(name="a lock", expected=("HANG",), found="HANG", **more):
    """A row that is right unless told otherwise."""
    given = {"control": False, "what": "", "because": ("it rests",), "rule": "a rule"}
    return Judged(name=name, expected=expected, found=found, **{**given, **more})


def control(name="healthy", expected=("PASS",), found="PASS", **more):
    return row(name, expected, found, control=True, **more)


def skipped(name="device OOM", expected=("OOM",), **more):
    return row(name, expected, "not run", skipped="needs 1 GPU(s), here are 0", because=(), **more)
