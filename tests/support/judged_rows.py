"""Rows of a selfcheck as tests want them, without a trial."""

from workbook.rooms.selfcheck.judged import Judged


def row(name="a lock", due="HANG", found="HANG", **more):
    """A row that is right unless told otherwise."""
    given = {"control": False, "because": ("it rests",), "rule": "a rule"}
    return Judged(name=name, due=due, found=found, **{**given, **more})


def control(name="healthy", due="PASS", found="PASS", **more):
    return row(name, due, found, control=True, **more)


def skipped(name="device OOM", due="OOM", **more):
    return row(name, due, "not run", skipped="needs 1 GPU(s), here are 0", because=(), **more)


def hang(name="lock_taken_twice 0", **more):
    """A program that hangs, certified after 8 s at load 1, its line in the head of its page."""
    told = ({"label": "HANG:lock", "rested_s": 8.0, "withdrawn": False},)
    given = {"group": "hang", "certifiable": True, "load": 1, "line_named": True, "named_s": 8.0}
    return row(name, "HANG or STALLED", **{**given, "found_what": "lock", "reports": told, **more})


def silent(name="silent_server 0", **more):
    """A program that hangs and cannot be certified."""
    told = ({"label": "STALLED:socket", "rested_s": 12.0, "withdrawn": False},)
    given = {"found": "STALLED", "certifiable": False, "named_s": 12.0, "reports": told}
    return hang(name, **{**given, "found_what": "socket", **more})


def well(name="shell_command 0", stalled=None, **more):
    """A healthy program; stalled: whether it was called so and that was withdrawn, None: never."""
    told = {"label": "STALLED:child", "rested_s": 12.0, "withdrawn": stalled}
    given = {"group": "healthy", "load": 1, "reports": () if stalled is None else (told,)}
    return control(name, "PASS or SLOW", **{**given, **more})
