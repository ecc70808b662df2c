"""Detect idle programs, which wait for a request as a server or a prompt does: nothing is wrong."""

from __future__ import annotations

from collections.abc import Sequence

from whyhung.verdict.frames import is_users
from whyhung.watch.evidence import P, Process, Thread

# Library code that waits for the next request, innermost first among a stack's library frames.
_SERVES = (
    "ipykernel/", "tornado/", "uvicorn/", "hypercorn/", "gunicorn/", "aiohttp/web", "waitress/",
    "werkzeug/serving.py", "socketserver.py", "wsgiref/", "grpc/_server.py", "jupyter",
    "IPython/terminal", "prompt_toolkit/", "torch/distributed/rpc/",
)  # fmt: skip
_LOOPS = "asyncio/base_events.py", "uvloop", "trio/_core", "selectors.py", "zmq/"


def idle(process: Process | None, p: P) -> str:
    """Return what a rank's main thread waits for when idle, in words; "" if it is not.

    Called only for a wait that something outside may end, directly or through other threads.

    Idle are a prompt at a terminal, a server's loop without a user frame under way in it, and,
    before any step began, an event loop without any user frame: within a training a loop of the
    user's waits for an answer.
    """
    thread = process.main() if process is not None else None
    wait = thread.wait if thread is not None else None
    if wait is None or wait.kind in ("stopped", "timer", "lock", "collective", "device"):
        return ""
    if wait.kind == "terminal":
        return "waits for input at a terminal"
    frames = thread.frames
    own = next((number for number, frame in enumerate(frames) if is_users(frame)), len(frames))
    inner = frames[:own]
    if not _is_loop(inner):
        return ""
    serves = _listens(thread) or any(mark in frame for mark in _SERVES for frame in inner)
    if serves or (own == len(frames) and p.step < 0):
        return "waits for the next request"
    return ""


def _is_loop(inner: Sequence[str]) -> bool:
    return any(mark in frame for mark in (*_LOOPS, *_SERVES) for frame in inner)


def _listens(thread: Thread) -> bool:
    return thread.wait is not None and "a connection to" in thread.wait.text
