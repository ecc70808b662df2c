"""Find and end every process that a trial started, however far it went from it. Linux only.

A worker may live in a session of its own, or outlive its parent and be adopted by init, so neither
process groups nor the tree of parents is enough. Each inherits the trial's environment, though: a
cookie in it finds them, and whoever dropped the environment is found below one that did not, as
long as that one lives.
"""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

COOKIE = "NSA_TRIAL_COOKIE"


def new_cookie() -> str:
    """A cookie of its own that still belongs to the trial around this process, if there is one."""
    return f"{os.environ.get(COOKIE, '')}/{uuid.uuid4().hex}"


def family(cookie: str, roots: Iterable[int] = ()) -> set[int]:
    """Live processes that carry `cookie` or one made below it, `roots`, and all descendants."""
    mark = f"{COOKIE}={cookie}/".encode()
    parents: dict[int, int] = {}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end, or belong to somebody else, between any two of these reads.
        with contextlib.suppress(OSError, IndexError):
            # after "pid (name) ", where the name may hold anything: state, parent, ...
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state in "ZX":
                continue
            pid = int(folder.name)
            parents[pid] = int(parent)
            entries = (folder / "environ").read_bytes().split(b"\0")
            if pid in roots or any((entry + b"/").startswith(mark) for entry in entries):
                found.add(pid)
    grew = True
    while grew:
        below = {pid for pid, parent in parents.items() if parent in found} - found
        found |= below
        grew = bool(below)
    return found - {os.getpid()}


def end_family(cookie: str, roots: Iterable[int] = (), within_s: float = 5.0) -> set[int]:
    """SIGKILL all of them, again until none is left; returns those left after `within_s`."""
    deadline = time.monotonic() + within_s
    while left := family(cookie, roots):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left
