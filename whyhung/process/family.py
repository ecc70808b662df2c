"""Start a child that can be told apart from all others, and end it with everything it started.

A worker may have its own session, or outlive its parent and be adopted by init, so neither process
groups nor the tree of parents is enough. Each inherits its parent's environment, though: a cookie
in it identifies them, and a process that dropped its environment is found below one that did not,
as long as that one lives. The search reads /proc, so nothing is found outside Linux.

Imports as little as possible: kernels and trials load it before anything else.
`python -m whyhung.process.family MODULE ARG...` runs a module that ends with its parent;
`python family.py --guard COOKIE` ends a family when its standard input does.
"""

import contextlib
import ctypes
import functools
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

COOKIE = "NSA_FAMILY_COOKIE"
PARENT = "NSA_PARENT_PID"
GUARDED = "NSA_GUARDED"
_WITHIN_S = 5.0
_HOME = str(Path(__file__).resolve().parents[2])
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER, _ANYBODY = 0x59616D61, ctypes.c_ulong(-1)


def new_cookie() -> str:
    """Return a new cookie that still belongs to the family around this process, if there is one."""
    return f"{os.environ.get(COOKIE, '')}/{uuid.uuid4().hex}"


def environment(given: Mapping[str, str], cookie: str) -> dict[str, str]:
    """Return `given` for a child of this process, with `cookie` and this package importable."""
    paths = [_HOME, *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    ours = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), COOKIE: cookie}
    return {**given, **ours, PARENT: str(os.getpid())}


def die_with_parent() -> None:
    """Request SIGKILL once the parent is gone; call first in a child started with `environment`.

    Works even if the child is stuck in C with the GIL held. Linux sends the signal when the thread
    that started the child ends. A `guarded` child is ended by its guard instead, which must find
    the tree below it whole.
    """
    if os.environ.pop(GUARDED, None) is None:
        end_with_thread()
    parent = os.environ.pop(PARENT, None)
    if parent is not None and os.getppid() != int(parent):  # it ended before the request
        os._exit(1)


def end_with_thread() -> None:
    """Request SIGKILL from the kernel once the thread that started this child has ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def let_others_look(*, children: bool = False) -> None:
    """Let every process that may signal this child also ptrace it, as py-spy does.

    Under Yama's ptrace_scope 1, the default on desktops, only its ancestors could, and py-spy is
    not one. No effect without Yama. children: forked children do the same, without running any
    Python, in which a signal handler could raise an exception that would be lost.
    """
    with contextlib.suppress(OSError, AttributeError):
        let = functools.partial(ctypes.CDLL(None).prctl, _PR_SET_PTRACER, _ANYBODY)
        let()
        if children:
            os.register_at_fork(after_in_child=let)


def stat(process: Path) -> list[str]:
    """Return the stat fields of a process or thread after "pid (name) ": state, parent, ...

    Raises OSError if it is gone.
    """
    # the name may hold anything, parentheses too
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()


def family(cookie: str, roots: Collection[int] = ()) -> set[int]:
    """Return live processes with `cookie` or one derived from it, `roots`, and all descendants.

    This process itself is never included.
    """
    mark = f"{COOKIE}={cookie}/".encode()
    parents: dict[int, int] = {}
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        # It may end, or belong to somebody else, between any two of these reads.
        with contextlib.suppress(OSError, ValueError):
            state, parent, *_ = stat(folder)
            if state in "ZX":
                continue
            pid = int(folder.name)
            parents[pid] = int(parent)
            if pid in roots:
                found.add(pid)
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            if any((entry + b"/").startswith(mark) for entry in entries):
                found.add(pid)
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return found - {os.getpid()}


def end_family(cookie: str, roots: Collection[int] = ()) -> set[int]:
    """Send SIGKILL to the whole family until none is left; return those left after 5 s.

    `roots` must not have been waited for, since their PIDs could have been reused by now.
    """
    deadline = time.monotonic() + _WITHIN_S
    while left := family(cookie, roots):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return left


@contextlib.contextmanager
def guarded(cookie: str) -> Iterator[dict[str, str]]:
    """End the family even if SIGKILL ends this process in the block, whatever session it is in.

    A guard process outside the family waits for that, on a pipe that only this process holds open.
    Yields variables for the child; none if the guard could not be started.
    """
    command = [sys.executable, "-I", "-S", __file__, "--guard", cookie]
    null = subprocess.DEVNULL
    try:
        guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=null, stderr=null,
                                 start_new_session=True)  # fmt: skip
    except OSError:
        yield {}
        return
    try:
        yield {GUARDED: "1"}
    finally:
        with contextlib.suppress(OSError):
            guard.stdin.write(b".")  # the guard need not act
            guard.stdin.close()
        guard.wait()


def signal_name(number: int) -> str:
    """Return a signal's name, "SIGKILL" for 9; a real-time signal has none and is "signal N"."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


if __name__ == "__main__":
    import runpy

    if sys.argv[1] == "--guard":
        if not sys.stdin.buffer.read():
            end_family(sys.argv[2])
        sys.exit()
    die_with_parent()
    del sys.argv[0]  # runpy puts the module's file in the place of its name
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
