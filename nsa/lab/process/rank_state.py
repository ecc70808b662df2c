"""What each rank of a job says of itself in files, and from them which rank failed first.

rank<r>.json: {"rank", "pid", "state", "time"}, and of a failure its message and traceback. A rank
that says "running" and whose process is gone was killed. That comes before whatever the others say,
who then lose their connection to it or are asked to end. rank<r>.log: its output and its errors.
This module imports as little as it can.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nsa.lab.process import atomic
from nsa.lab.process.family import signal_name


class Both:
    """What Python writes, into the log and to where it went before if somebody reads there."""

    def __init__(self, log, console) -> None:
        self._log, self._console = log, console

    def write(self, text: str) -> int:
        self._log.write(text)
        with contextlib.suppress(OSError, ValueError):
            self._console.write(text)
        return len(text)

    def flush(self) -> None:
        self._log.flush()
        with contextlib.suppress(OSError, ValueError):
            self._console.flush()

    def __getattr__(self, name: str):
        return getattr(self._log, name)


@contextlib.contextmanager
def logged(folder: Path, rank: int, console: bool) -> Iterator[None]:
    """File descriptors 1 and 2 are rank<r>.log while this is open, C and C++ code included.

    `console`: what Python itself prints goes to the terminal as well.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    file = os.open(
        Path(folder, f"rank{rank}.log"),
        os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
        0o644,
    )
    before = sys.stdout, sys.stderr
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    streams = [os.fdopen(os.dup(n), "w", buffering=1, encoding="utf-8") for n in (1, 2)]
    consoles = [os.fdopen(n, "w", buffering=1, encoding="utf-8") for n in kept]
    sys.stdout, sys.stderr = streams
    if console:
        sys.stdout, sys.stderr = map(Both, streams, consoles)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
        for number, terminal in enumerate(consoles, 1):
            os.dup2(terminal.fileno(), number)
        for stream in (*streams, *consoles):
            with contextlib.suppress(OSError):
                stream.close()


STUCK_S = 5.0  # how long a rank may take to end after Ctrl-C; a collective never looks for one
TAIL_LINES = 40
EXITING = 0x4  # PF_EXITING among a process's flags, field 9 of /proc/<pid>/stat


@dataclass(frozen=True)
class Failure:
    """The first rank to fail.

    how: "exception", "bad input" (a ValueError), "killed", "interrupted" or "terminated".
    """

    rank: int
    how: str
    message: str
    time: float
    traceback: str = ""


def say(folder: Path, rank: int, state: str, **more) -> None:
    """Puts down how this rank stands; the file appears whole or not at all."""
    content = {"rank": rank, "pid": os.getpid(), "state": state, "time": time.time(), **more}
    atomic.write(Path(folder, f"rank{rank}.json"), json.dumps(content, indent=1))


@contextmanager
def accounted(folder: Path, rank: int, when_ended: Callable[[], None]) -> Iterator[None]:
    """Around all that a rank does: its file says how it ended, however it did.

    `when_ended` is called once the file says so, unless all went well. SIGTERM ends the process
    with 143, also where the main thread waits for a GPU or for other ranks: a thread of its own
    hears it. After Ctrl-C the main thread has STUCK_S to end by itself, then the same is done.
    """
    say(folder, rank, "running")
    said = threading.Lock()  # taken by the first who says how it ended, and kept

    def end(state: str, code: int) -> None:
        if said.acquire(blocking=False):
            say(folder, rank, state)
            when_ended()
        else:
            time.sleep(STUCK_S)  # the main thread has ended, unless it is stuck on its way out
        os._exit(code)

    with _heard(end):
        try:
            yield
        except BaseException as error:
            if said.acquire(blocking=False):
                what = {"message": one_line(error), "traceback": _tail(error)}
                say(folder, rank, _state_of(error), **what)
                when_ended()
            raise
        said.acquire(blocking=False)
    say(folder, rank, "ok")


def first_failure(
    folder: Path, ranks: int, exitcodes: Mapping[int, int] | None = None
) -> Failure | None:
    """Which rank failed first, or None when all ended well or are at work.

    `exitcodes` of ranks as far as they are known, negative for a signal.
    """
    exitcodes = exitcodes or {}
    found = []
    for rank in range(ranks):
        said = _read(folder, rank)
        state, code = said.get("state"), exitcodes.get(rank)
        if state is None and code is None:
            continue  # it never came as far as that
        if state in (None, "running") and code == -signal.SIGTERM:
            found.append(Failure(rank, "terminated", "was asked to end", said.get("time", 0.0)))
        elif state in (None, "running") and (code or not _lives(said.get("pid"))):
            found.append(Failure(rank, "killed", _how_killed(code), said.get("time", 0.0)))
        elif state not in (None, "running", "ok"):
            message = said.get("message") or f"was {state}"
            found.append(Failure(rank, state, message, said["time"], said.get("traceback", "")))
    order = {"killed": 0, "exception": 1, "bad input": 1}
    return min(found, key=lambda f: (order.get(f.how, 2), f.time), default=None)


def one_line(error: BaseException) -> str:
    """ValueErrors are written for readers; of others the kind belongs to the message."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


def _state_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "bad input" if isinstance(error, ValueError | ModuleNotFoundError) else "exception"


def _how_killed(code: int | None) -> str:
    if code is None:
        return "was killed: its process is gone without a word"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended at once with exit code {code}"


def _tail(error: BaseException) -> str:
    return "\n".join("".join(traceback.format_exception(error)).splitlines()[-TAIL_LINES:])


def _read(folder: Path, rank: int) -> dict:
    try:
        return json.loads(Path(folder, f"rank{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _lives(pid: int | None) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    state, *fields = stat.rpartition(")")[2].split()
    # Its sockets close, and tell the other ranks, a moment before it is a zombie.
    return state not in "ZX" and not int(fields[5]) & EXITING


@contextmanager
def _heard(end: Callable[[str, int], None]) -> Iterator[None]:
    """SIGTERM and SIGINT wake a thread through a pipe, whatever C code holds the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            heard = os.read(reading, 1)
            if heard == bytes([signal.SIGTERM]):
                end("terminated", 128 + signal.SIGTERM)
            if heard == bytes([signal.SIGINT]) and not over.wait(STUCK_S):
                end("interrupted", 128 + signal.SIGINT)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    fd_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
        signal.set_wakeup_fd(fd_before)
        with contextlib.suppress(OSError):
            os.write(writing, b"\0")
        thread.join()
        os.close(reading)
        os.close(writing)
